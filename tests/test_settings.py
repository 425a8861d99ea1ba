"""A setting is one field: the constructor, docstring, command line, model header and search space derive from it."""

import inspect
from dataclasses import dataclass, fields

import pytest

import gramtower as gt
from gramtower.experiments.tuning import space
from gramtower.model import model_file
from gramtower.model.settings import CHOSEN, REQUIRED, SETTINGS, ModelSettings, _setting, settings_of


@dataclass(eq=False, repr=False)
class More(ModelSettings):
    """The settings, and one more.

    Args:
        momentum: Momentum of the steps. Not used.
    """

    momentum: float = _setting(0.9, "train")


NO_FLAG = {"towers", "verbose"}  # a function, and the opposite of --quiet


def test_every_field_has_its_description():
    assert list(SETTINGS) == [one.name for one in fields(ModelSettings)]
    for name, setting in SETTINGS.items():
        assert setting.doc.endswith("."), name
        assert setting.table in ("model", "train") or name in NO_FLAG, name


def test_every_setting_is_in_the_signature_and_in_the_docstring():
    assert list(inspect.signature(gt.TwoTower).parameters) == list(SETTINGS)
    for name in SETTINGS:
        assert f"\n    {name}: " in inspect.getdoc(gt.TwoTower)
    assert "{arguments}" not in gt.TwoTower.__doc__


def test_every_setting_with_a_table_is_a_flag_and_a_key_of_the_config_file():
    pytest.importorskip("cyclopts")
    from gramtower.cli.options import TABLES

    histories = {"history", "history_last", "history_decay"}
    own = {"model": histories, "train": {"validation_side", "refit"}}  # arguments of fit
    for table, more in own.items():
        flags = {one.name for one in fields(TABLES[table])}
        assert flags - more == {one.flag or name for name, one in SETTINGS.items() if one.table == table}


def test_every_setting_but_functions_is_in_the_header_of_a_model_file():
    assert set(model_file._PARAMS) == set(SETTINGS) - {"towers"}
    assert {name for name, one in SETTINGS.items() if one.before is not REQUIRED} == set(model_file._LATER)


def test_the_search_space_has_the_settings_that_say_so():
    assert {one.searched for one in SETTINGS.values() if one.searched} == {*space.NAMES} - {"features"}


def test_auto_is_the_default_and_none_means_the_same(tmp_path):
    assert CHOSEN == ("dim", "hidden", "activation", "normalize", "refine", "omega", "l2", "embedding_l2",
                      "max_iterations", "memory_budget")  # fmt: skip
    pairs = gt.Interactions.from_arrays([0, 0, 1, 2], [0, 1, 0, 1])
    default, nothing = gt.TwoTower(device="cpu"), gt.TwoTower(**dict.fromkeys(CHOSEN), device="cpu")
    assert {default.get_params()[name] for name in CHOSEN} == {"auto"}
    assert {nothing.get_params()[name] for name in CHOSEN} == {None}
    assert vars(default.with_changes()) == vars(nothing.with_changes()) == vars(ModelSettings(device="cpu"))
    assert default.fit(pairs).l2_ == nothing.fit(pairs).l2_
    default.save(tmp_path / "model")
    assert gt.load(tmp_path / "model").get_params() == default.get_params()
    assert repr(gt.TwoTower()) == "TwoTower()"


def test_a_new_field_becomes_an_argument_and_a_flag(monkeypatch):
    cyclopts = pytest.importorskip("cyclopts")
    from gramtower.cli import options

    monkeypatch.setattr(options, "SETTINGS", settings_of(More))
    monkeypatch.setattr(options, "ModelSettings", More)
    assert "momentum" in inspect.signature(More).parameters

    @cyclopts.Parameter(name="*")
    @dataclass
    @options._from_settings("train")
    class Training(options._Options):
        """Options of training."""

    app = cyclopts.App(result_action="return_value")

    @app.default
    def train(*, training: Training | None = None):
        return training

    assert app(["--momentum", "0.5"]).momentum == 0.5
    assert "Momentum of the steps. [default: 0.9]" in options._flag("momentum").help

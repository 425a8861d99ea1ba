"""Cross-validation: the folds of the splits, metrics as by hand, models left alone, intervals that mean something."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower.data.splits import folds, held_out, held_out_users
from gramtower.data.tables import FeatureTable
from gramtower.experiments.cross_validation import bootstrap_intervals, t_interval
from gramtower.metrics import Scores


def sample(seed=0, users=60, items=40):
    """Users who like items of their own group."""
    rng = np.random.default_rng(seed)
    left = rng.integers(0, users, 900)
    right = (rng.integers(0, items // 4, 900) * 4 + left % 4) % items
    return gt.Interactions.from_arrays([f"u{i}" for i in left], right)


def small(**options):
    return gt.TwoTower(**{"dim": 3, "hidden": (), "max_iterations": 2, "device": "cpu", "select": False} | options)


class Popular:
    """A model of few lines: everyone gets the most frequent items."""

    def __init__(self, shift=0.0, notes=None):
        self.shift, self.notes = shift, notes

    def get_params(self):
        return {"shift": self.shift, "notes": self.notes}

    def fit(self, pairs, left_features=None, right_features=None):
        self.pairs, self.features = pairs, (left_features, right_features)
        Popular.fitted.append(self)

    def evaluate(self, test, metrics):
        return {name: len(test) + self.shift for name in metrics}


def test_each_fold_is_fitted_and_measured_as_by_hand():
    pairs, names = sample(), ("recall@5", "psp@3", "coverage@1")
    found = gt.cross_validate(small(), pairs, folds=3, metrics=names, seed=4)
    for split, scores in zip(folds(pairs, 3, seed=4), found.folds, strict=True):
        assert scores == small().fit(split.train).evaluate(split.test, names)
    for name in names:
        assert found.mean[name] == pytest.approx(np.mean([fold[name] for fold in found.folds]))
        assert found.values(name).tolist() == [fold[name] for fold in found.folds]
        low, high = found.interval[name]
        assert low < found.mean[name] < high
    assert set(found.user_interval) == {"recall@5", "psp@3"}  # coverage is of all users together
    for name, (low, high) in found.user_interval.items():
        assert low < found.mean[name] < high


def test_the_model_stays_as_it_is_and_parameters_are_copies():
    Popular.fitted = []
    model = Popular(0.5, {"a": [1]})
    found = gt.cross_validate(model, sample(), folds=4, metrics="recall@5")
    assert not hasattr(model, "pairs")
    assert [(fitted.shift, fitted.notes) for fitted in Popular.fitted] == [(0.5, {"a": [1]})] * 4
    assert all(fitted.notes is not model.notes for fitted in Popular.fitted)
    assert found.mean["recall@5"] == pytest.approx(len(sample()) / 4 + 0.5)
    assert found.user_interval == {}  # it says nothing of single users


def test_the_result_reads_well_and_goes_into_json():
    found = gt.cross_validate(small(), sample(), folds=3, metrics=("map@5", "coverage@5"))
    lines = repr(found).splitlines()
    assert lines[0] == "CrossValidation of 3 folds"
    assert lines[1].split("  ")[-1] == "folds"
    assert lines[2].startswith(f"map@5       {found.mean['map@5']:.4f}  {found.interval['map@5'][0]:.4f} to ")
    assert " -  " in lines[3]  # coverage has no values of users
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["map@5"]["folds"] == found.values("map@5").tolist()
    assert plain["coverage@5"]["user_interval"] is None
    with pytest.raises(ValueError, match=r"metric.*'mrr'"):
        found.values("mrr")


def test_matrices_and_features_are_taken_as_by_fit():
    pytest.importorskip("polars", reason="tables are read with polars")
    pairs = sample()
    matrix = sp.csr_matrix(pairs.matrix)
    by_place = gt.cross_validate(small(), matrix, folds=2, metrics="recall@5", seed=1)
    assert by_place.mean == gt.cross_validate(small(), pairs, folds=2, metrics="recall@5", seed=1).mean
    groups = sp.csr_matrix(np.eye(4)[pairs.right_ids % 4])
    table = FeatureTable(
        {"left": list(pairs.left_ids), "group": [str(int(name[1:]) % 4) for name in pairs.left_ids]},
        id="left",
        categorical=["group"],
    )
    found = gt.cross_validate(
        small(), pairs, folds=2, metrics="recall@5", left_features=["id", table], right_features=groups
    )
    assert found.mean["recall@5"] > 0.2


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix, torch.from_numpy])
def test_rows_of_features_follow_the_ids_of_splits_of_entities(kind):
    pairs = sample()
    places = np.arange(pairs.shape[0], dtype=np.float64)[:, None]
    split = held_out(pairs, "left", 0.3)
    Popular.fitted = []
    gt.cross_validate(Popular(), pairs, [split], metrics="recall@5", left_features=["id", kind(places)])
    word, given = Popular.fitted[0].features[0]
    given = given.toarray() if sp.issparse(given) else np.asarray(given)
    assert word == "id"
    assert pairs.left_ids[given[:, 0].astype(int)].tolist() == split.train.left_ids.tolist()
    with pytest.raises(ValueError, match=r"left_features.*5"):
        gt.cross_validate(Popular(), pairs, [split], left_features=kind(places[:5]))


def test_splits_with_histories_are_evaluated_by_them():
    pairs = sample()
    made = [held_out_users(pairs, 0.3, history=0.5, seed=seed) for seed in (0, 1)]
    found = gt.cross_validate(small(), pairs, made, metrics="recall@5", left_features="history")
    for split, scores in zip(made, found.folds, strict=True):
        model = small().fit(split.train, left_features="history")
        assert scores == model.evaluate(split.test, ("recall@5",), histories=split.history)
        assert isinstance(scores, Scores)
    assert found.user_interval["recall@5"][0] < found.user_interval["recall@5"][1]


def test_the_interval_over_folds_is_students():
    stats = pytest.importorskip("scipy.stats")
    values = [0.21, 0.25, 0.22, 0.27, 0.24]
    expected = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert t_interval(values) == pytest.approx(expected)
    assert np.isnan(t_interval([0.3])).all()


def bootstrap_interval(folds, **options):
    """The interval of one mean."""
    return bootstrap_intervals([(keys, np.asarray(values)[:, None]) for keys, values in folds], **options)[0]


def test_the_bootstrap_is_that_of_a_mean_and_users_in_all_folds_count_once():
    rng = np.random.default_rng(0)
    values, keys = rng.normal(0.3, 0.2, 400), np.arange(400)
    low, high = bootstrap_interval([(keys, values)], replicates=4000)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    again = bootstrap_interval([(keys, values)] * 5, replicates=4000)
    assert again == pytest.approx((low, high))  # five folds with the same values say no more than one
    order = rng.permutation(400)
    mixed = bootstrap_interval([(keys, values), (keys[order], values[order])], replicates=4000)
    assert mixed == pytest.approx((low, high))


def test_the_bootstrap_leaves_out_users_without_a_value_and_does_not_depend_on_blocks(monkeypatch):
    values, keys = np.random.default_rng(1).random(50), np.arange(50)
    whole = bootstrap_interval([(keys, values)], seed=3)
    gone = bootstrap_interval([(np.append(keys, 50), np.append(values, np.nan))], seed=3)
    assert gone == whole
    monkeypatch.setattr("gramtower.experiments.cross_validation._ELEMENTS", 50)
    assert bootstrap_interval([(keys, values)], seed=3) == pytest.approx(whole)
    assert np.isnan(bootstrap_interval([(keys[:1], values[:1] * np.nan)])).all()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(folds=1), r"folds.*1"),
        (dict(folds=10**6), r"folds.*1000000"),
        (dict(folds=2.5), r"folds.*2.5"),
        (dict(folds=[]), "folds"),
        (dict(folds=np.array(3)), r"folds.*ndarray"),
        (dict(folds=torch.tensor(3)), r"folds.*Tensor"),
        (dict(folds=sp.eye(3)), r"folds.*dia_matrix"),
        (dict(folds=[1, 2]), r"folds.*sequence"),
        (dict(metrics="recal@5"), r"metrics.*'recal@5'"),
        (dict(model=gt.TwoTower), r"model.*TwoTower.*get_params"),
        (dict(model=3), r"model.*int"),
        (dict(pairs=[[1, 2]]), r"pairs.*list"),
        (dict(seed=-1), r"seed.*-1"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, text):
    with pytest.raises(ValueError, match=text):
        gt.cross_validate(**dict(model=small(), pairs=sample()) | arguments)


@pytest.fixture
def table(tmp_path):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pytest.importorskip("polars", reason="the command line reads tables with polars")
    pairs = sample().matrix.tocoo()
    lines = [f"u{i},{j}" for i, j in zip(pairs.row, pairs.col, strict=True)]
    (tmp_path / "pairs.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    return tmp_path / "pairs.csv"


FLAGS = ("--left", "user", "--right", "item", "--dim", "3", "--hidden", "none", "--max-iterations", "2")


def test_the_command_prints_what_the_function_gives(table, tmp_path, capsys):
    from gramtower.cli.program import run

    tokens = ["cross-validate", str(table), *FLAGS, "--device", "cpu", "--folds", "2", "--seed", "3", "--quiet"]
    assert run([*tokens, "--metrics", "recall@5, coverage@5", "--json", "--out", str(tmp_path / "found.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    pairs = gt.Interactions.from_csv(table, "user", "item")
    expected = gt.cross_validate(small(seed=3), pairs, 2, ("recall@5", "coverage@5"), seed=3)
    assert printed["metrics"] == expected.to_dict()
    assert json.loads((tmp_path / "found.json").read_text()) == printed
    assert run([*tokens, "--metrics", "recall@5"]) == 0
    shown = capsys.readouterr().out
    assert "95% over folds" in shown
    assert f"{expected.interval['recall@5'][0]:.4f} to {expected.interval['recall@5'][1]:.4f}" in shown


def test_what_a_config_holds_out_is_said_to_be_left_alone(table, tmp_path, capsys):
    from gramtower.cli.program import run

    (tmp_path / "fit.toml").write_text('[data]\nvalidation = "0.1"\n')
    tokens = ["cross-validate", str(table), *FLAGS, "--device", "cpu", "--folds", "2", "--metrics", "recall@5"]
    assert run([*tokens, "--config", str(tmp_path / "fit.toml")]) == 0
    assert "[data] validation 0.1 of the config is not used" in capsys.readouterr().err
    assert run(tokens) == 0
    assert "validation" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--folds", "1"], "folds: got 1, expected an integer from 2"),
        (["--metrics", "recal@5"], "metrics: got 'recal@5'"),
        (["--validation", "0.1"], "--validation"),
        (["--out", "."], "--out: got ., which is a folder"),
    ],
)
def test_bad_flags_are_refused(flags, text, table, capsys):
    from gramtower.cli.program import run

    assert run(["cross-validate", str(table), *FLAGS, "--quiet", *flags]) == 2
    assert text in capsys.readouterr().err


def test_ctrl_c_ends_the_validation_and_not_the_fit_of_one_fold(monkeypatch):
    from gramtower.optim.sweeps import SweepsFirst

    begun = []

    def interrupted(self, *arguments):
        begun.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(SweepsFirst, "iterate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gt.cross_validate(small(), sample(), folds=3)
    assert len(begun) == 1


def test_splits_of_other_pairs_are_refused_where_rows_of_features_are_asked_for():
    pairs, others = sample(), gt.Interactions.from_arrays([f"x{i}" for i in range(20)], range(20))
    with pytest.raises(ValueError, match=r"folds.*'x"):
        gt.cross_validate(small(), pairs, folds=folds(others, 2), left_features=np.ones((pairs.shape[0], 2)))

"""The search space: what is searched by default, what a file may say, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower._util.checks import parse_hidden
from gramtower.experiments.tuning.space import (
    FEATURES_FIRST,
    NAMES,
    Choices,
    Range,
    as_space,
    default_space,
    effective,
    first_settings,
    larger,
    read_space,
    rescaled_penalty,
    searched,
)

START = {
    "omega": 0.01, "l2": 0.0625, "penalty": 0.004, "frequency_power": 1.0, "left_power": 0.0, "right_power": 0.0,
    "imputed": -1.0, "dim": 64, "hidden": "none", "activation": "relu", "normalize": "no", "loss": "logistic",
    "features": "ids",
}  # fmt: skip


def whole(**options):
    return default_space(START, **{"labels": False, "given_features": False, **options})


def test_the_whole_space_contains_the_defaults():
    space = whole()
    assert set(space) == set(NAMES)
    for name, value in START.items():
        assert space[name].nearest(value) == value


def test_only_the_models_own_loss_goes_with_labels_other_than_ones():
    assert whole(labels=True)["loss"] == Choices(("logistic",))
    assert whole()["loss"] == Choices(("logistic", "squared"))


def test_a_subset_with_other_ranges_and_values():
    given = {"omega": [0.1, 0.2], "left-power": True, "dim": [8, 16], "hidden": ["none", [32, 16]], "l2": 0.5}
    space = as_space(given, whole())
    assert space["omega"] == Range(0.1, 0.2, True)
    assert space["left_power"] == whole()["left_power"]
    assert space["dim"] == Choices((8, 16))
    assert [parse_hidden(text) for text in space["hidden"].values] == [(), (32, 16)]
    assert searched(space) == ["omega", "left_power", "dim", "hidden"]
    assert space["l2"] == Choices((0.5,))
    assert as_space({"hidden": [64, 64], "dim": [2, 4]}, whole())["hidden"] == Choices(("64,64",))


def test_a_search_begins_at_the_start_and_one_step_from_it():
    space = as_space({"omega": True, "left_power": True, "right_power": [0.0, 0.4], "dim": [32, 64, 128]}, whole())
    first, *others = first_settings(space, START)
    assert first == {"omega": 0.01, "left_power": 0.0, "right_power": 0.0, "dim": 64}
    changed = [[name for name in first if other[name] != first[name]] for other in others]
    assert sorted(changed) == [[n] for n in ("dim", "dim", "left_power", "omega", "omega", "right_power")]
    assert {other["omega"] for other in others} == {0.01, 0.02, 0.005}
    assert [other["right_power"] for other in others if other["right_power"]] == [0.1]


def test_with_features_the_first_changes_are_those_that_matter_most():
    start = {**START, "features": "given", "hidden": "64"}
    space = default_space(start, labels=False, given_features=True, unseen=True)
    assert set(FEATURES_FIRST) == set(NAMES)
    assert space["features"] == Choices(("given",))
    assert space["activation"].values == ("relu", "leaky_relu(0.35)", "gelu")
    first, *others = first_settings(space, start)
    changed = [next(name for name in first if other[name] != first[name]) for other in others]
    assert list(dict.fromkeys(changed)) == [name for name in FEATURES_FIRST if name != "features"]
    assert [other["hidden"] for other in others[-3:]] == ["64,64", "128", "64"]  # what costs most
    assert others[-1]["dim"] == 128


def test_towers_are_larger_by_units_or_outputs():
    start = {"hidden": "64/none", "dim": 32}
    for more in ({"hidden": "128/none"}, {"hidden": "64,64/none"}, {"dim": 64}, {"hidden": "none", "dim": 64}):
        assert larger({**start, **more}, start)
    for less in ({}, {"hidden": "32/none"}, {"hidden": "none"}, {"dim": 16}):
        assert not larger({**start, **less}, start)
    assert not larger({"l2": 2.0}, {"l2": 1.0})


def test_an_activation_changes_nothing_without_hidden_layers():
    start = {**START, "features": "given", "hidden": "64"}
    plain = {"dim": 32, "hidden": "none"}
    assert effective({**plain, "activation": "gelu"}, start) == plain
    for other in ({"hidden": "8"}, {"hidden": "none/8"}, {}, {"features": "ids"}):
        assert effective({"activation": "gelu", **other}, start) == {"activation": "gelu", **other}
    alone = {**start, "hidden": "none"}
    assert effective({"activation": "gelu", "features": "given"}, alone) == {"features": "given"}
    seen = {"activation": "gelu", "features": "ids"}  # the default of which may be another
    assert effective(seen, alone) == seen


def test_the_space_has_whatever_the_model_starts_with():
    odd = default_space(
        {**START, "imputed": -0.5, "loss": "squared_hinge", "hidden": "7"}, labels=False, given_features=False
    )
    assert odd["imputed"].values == (-0.5, 0.0, -1.0, "fitted")
    assert odd["loss"].values[0] == "squared_hinge"
    assert odd["hidden"].values[0] == "7"


def test_starts_outside_the_space_move_to_its_edge():
    assert Range(0.1, 0.2, True).nearest(5) == 0.2
    assert Choices((8, 16)).nearest(64) == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "an empty space"),
        ({"dim": 64, "l2": 1.0}, "an empty space"),
        ({"dim": []}, r"space.*dim.*empty"),
        ({"omga": True}, "unknown name 'omga', expected 'omega'"),
        ({"omega": [0.2, 0.1]}, "low below high and above 0"),
        ({"omega": [0.0, 0.1]}, "above 0"),
        ({"frequency_power": [1.0, 0.5]}, "low below high"),
        ({"omega": [1, 2, 3]}, "low, high"),
        ({"omega": "large"}, r"space.*omega.*'large'"),
        ({"dim": [0, 8]}, r"space.*dim.*0"),
        ({"loss": ["logistic", "huber"]}, r"space.*loss.*'huber'"),
        ({"hidden": ["64;64", "none"]}, r"space.*hidden.*'64;64'"),
        (
            {"features": ["ids", "given"]},
            r"space.*features.*'given'.*'ids'.*'history'",
        ),
    ],
)
def test_bad_spaces_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        as_space(given, whole())


def test_a_file_holds_one_table(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('[space]\nomega = [0.001, 0.1]\nhidden = ["none", "64,64"]\n')
    assert read_space(path) == {"omega": [0.001, 0.1], "hidden": ["none", "64,64"]}
    for text, message in (("omega = 1\n", "one table"), ("[space\n", "not a TOML file")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_space(path)


def test_the_penalty_keeps_its_total_whatever_the_power():
    """Compared with the objective's own weights: Σ μ c over all entities does not move with ν."""
    matrix = sp.csr_matrix((np.random.default_rng(0).random((9, 7)) < 0.4).astype(np.float32))
    problems = [
        gt.Problem(matrix, omega=0.3, frequency_power=power, embedding_l2=rescaled_penalty(0.2, power, matrix, 0.3))
        for power in (1.0, 0.4, 1.3)
    ]
    totals = [sum(float(side.sum()) for side in problem._penalties()) for problem in problems]
    assert totals == pytest.approx([totals[0]] * 3)
    assert problems[0].embedding_l2 == pytest.approx(0.2)

"""Weights by name against arrays written out, in the problem, the estimator and its file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower.engine.objective.constants import degree_power, entity_weights


def with_lonely_entities():
    """7 × 5; row 2 and column 4 have no pair."""
    dense = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]] + [[0, 1, 0, 1, 0]] * 3)
    return sp.csr_matrix(dense.astype(np.float32))


def by_hand(counts, power):
    """Counts, with 0 taken as 1, to a power, over their mean: one entity at a time."""
    raw = [float(c if c else 1) ** power for c in counts]
    return np.array([x / (sum(raw) / len(raw)) for x in raw])


@pytest.mark.parametrize("power", [0.5, -0.5, 1.0, 0.0])
def test_a_problem_by_name_equals_the_one_with_arrays(power):
    matrix = with_lonely_entities()
    rows, columns = by_hand([4, 1, 0, 2, 2, 2, 2], power), by_hand([3, 5, 1, 4, 0], -power)
    options = dict(omega=0.3, embedding_l2=0.1)
    named = gt.Problem(matrix, left_weights=f"degree^{power}", right_weights=f"degree^{-power}", **options)
    given = gt.Problem(matrix, left_weights=rows, right_weights=columns, **options)
    towers = gt.mlp_towers(named, hidden=(4,), dim=3, dtype=torch.float64)
    for a, b in zip(named.weight_arrays, (rows, columns), strict=True):
        assert (np.ones(len(b)) if a is None else a) == pytest.approx(b, rel=1e-14)
    assert named.at(towers).value == pytest.approx(given.at(towers).value, rel=1e-13)


def test_entities_without_pairs_weigh_as_those_with_one():
    found = entity_weights("left_weights", "degree^-1", np.array([0, 1, 4]))
    assert found[0] == found[1] == 4 * found[2]


@pytest.mark.parametrize(
    ("text", "power"), [("degree", 1.0), ("degree^0.5", 0.5), (" degree ^ -1e-1", -0.1), ("degree^+2", 2.0)]
)
def test_powers_are_read(text, power):
    assert degree_power("left_weights", text) == power


def test_the_power_zero_is_no_weights_at_all():
    assert entity_weights("left_weights", "degree^0", np.array([0, 1, 4])) is None
    assert entity_weights("left_weights", "degree^-0.0", np.array([0, 1, 4])) is None


@pytest.mark.parametrize("text", ["", "degrees^1", "degree^", "degree^x", "degree^inf", "degree^nan", "degree 2"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match=r'right_weights.*"degree\^0.5"'):
        gt.Problem(with_lonely_entities(), right_weights=text)


def test_a_power_that_overflows_is_refused():
    with pytest.raises(ValueError, match=r"left_weights.*'degree\^1000'"):
        gt.Problem(with_lonely_entities(), left_weights="degree^1000")


def test_the_estimator_takes_them_and_its_file_keeps_them(tmp_path):
    matrix = with_lonely_entities()
    options = dict(dim=3, hidden=(4,), max_iterations=4, device="cpu")
    named = gt.TwoTower(left_weights="degree^0.5", right_weights="degree^-0.5", **options).fit(matrix)
    arrays = dict(left_weights=by_hand([4, 1, 0, 2, 2, 2, 2], 0.5), right_weights=by_hand([3, 5, 1, 4, 0], -0.5))
    given = gt.TwoTower(**arrays, **options).fit(matrix)
    plain = gt.TwoTower(**options).fit(matrix)
    assert np.allclose(named.embed(), given.embed(), atol=1e-6)
    assert not np.allclose(named.embed(), plain.embed(), atol=1e-3)
    named.save(tmp_path / "named")
    given.save(tmp_path / "given")
    assert "left_weights=array([" in repr(given)
    assert gt.load(tmp_path / "named").left_weights == "degree^0.5"
    for side, array in arrays.items():
        assert np.array_equal(getattr(gt.load(tmp_path / "given"), side), array)


def of_pairs(matrix, power):
    """The degree of the left entity of each pair to a power, over the mean of these: one pair at a time."""
    raw = [float(sum(row > 0)) ** power for row in matrix.toarray() for entry in row if entry]
    return np.array([x / (sum(raw) / len(raw)) for x in raw])


@pytest.mark.parametrize("power", [0.5, -0.5, -1.0])
def test_pairs_by_name_equal_the_ones_with_an_array(power):
    matrix = with_lonely_entities()
    named = gt.Problem(matrix, pair_weights=f"degree^{power}")
    assert named.pair_weights == pytest.approx(of_pairs(matrix, power), rel=1e-14)
    towers = gt.mlp_towers(named, hidden=(4,), dim=3, dtype=torch.float64)
    given = gt.Problem(matrix, pair_weights=of_pairs(matrix, power))
    assert named.at(towers).value == pytest.approx(given.at(towers).value, rel=1e-13)
    assert gt.Problem(matrix, pair_weights="degree^0").pair_weights is None
    assert len(gt.Problem(sp.csr_matrix((3, 2)), pair_weights="degree^-1").pair_weights) == 0
    with pytest.raises(ValueError, match="pair_weights"):
        gt.Problem(matrix, pair_weights="degrees")


def described():
    """Pairs of 40 left entities with features, in different numbers, and the features."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 6))
    likes = X @ rng.normal(size=(6, 25)) + rng.normal(size=(40, 1)) > 1.0
    return sp.csr_matrix(likes.astype(np.float32)), X


@pytest.mark.parametrize("weighted", [False, True])
def test_left_entities_with_features_only_count_as_the_root_of_their_pairs(weighted, tmp_path):
    matrix, X = described()
    data = gt.Interactions.from_matrix(matrix)
    if weighted:
        data = replace(data, weights=np.linspace(0.5, 1.5, data.matrix.nnz, dtype=np.float32))
    plain = gt.Interactions.from_matrix(matrix)
    own = of_pairs(matrix, -0.5) * (1.0 if data.weights is None else data.weights)
    options = dict(dim=3, hidden=(4,), max_iterations=4, device="cpu", select=False)
    default = gt.TwoTower(**options).fit(data, left_features=X)
    off = {"left_weights": "degree^0.5", "pair_weights": None}
    given = gt.TwoTower(**options, **off).fit(replace(plain, weights=own.astype(np.float32)), left_features=X)
    equal = gt.TwoTower(**options, left_weights=None, pair_weights=None).fit(data, left_features=X)
    zero = gt.TwoTower(**options, left_weights="degree^0", pair_weights="degree^0").fit(data, left_features=X)
    assert np.array_equal(zero.embed(), equal.embed())
    assert np.allclose(default.embed(), given.embed(), atol=1e-5)
    assert not np.allclose(default.embed(), equal.embed(), atol=1e-3)
    default.save(tmp_path / "model")
    assert gt.load(tmp_path / "model").pair_weights == "auto"


@pytest.mark.parametrize("features", [{}, {"left_features": "id and X"}, {"right_features": "X"}])
def test_other_pairs_count_alike_by_default(features):
    matrix, X = described()
    known = {"id and X": ["id", X], "X": np.eye(25)[:, :6]}
    given = {side: known[name] for side, name in features.items()}
    options = dict(dim=3, max_iterations=4, device="cpu", select=False)
    default = gt.TwoTower(**options).fit(matrix, **given)
    equal = gt.TwoTower(**options, left_weights=None, pair_weights=None).fit(matrix, **given)
    assert np.array_equal(default.embed(), equal.embed())


def test_arrays_of_pairs_belong_to_the_data():
    with pytest.raises(ValueError, match=r"pair_weights: got ndarray.*Interactions"):
        gt.TwoTower(pair_weights=np.ones(3), device="cpu").fit(with_lonely_entities())
    with pytest.raises(ValueError, match="pair_weights"):
        gt.TwoTower(pair_weights="left", device="cpu").fit(with_lonely_entities())


def test_ids_next_to_left_features_are_explained_with_the_weights_of_their_pairs():
    matrix, X = described()
    options = dict(dim=4, hidden=(), device="cpu", optimizer="newton", max_iterations=200, select=False)
    model = gt.TwoTower(**options).fit(matrix, left_features=X)
    for column in (0, 7):
        found = model.explain(3, column, side="right")
        assert found.method == "normal equations"
        assert abs(found.remainder) < 1e-4

"""Features of any scale: what is learned of them, that new rows get the same, and that models train alike."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.tables import FeatureTable
from gramtower.distributed.group import SINGLE
from gramtower.model.feature_spec import dense_scaling, sparse_scaling

ROWS = 40


def words(seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.gamma(0.5, 1.0, 12), (ROWS, 12)) + np.eye(ROWS, 12)
    return sp.csr_matrix(counts, dtype=np.float64)


def pairs():
    rng = np.random.default_rng(1)
    likes = (words().toarray() @ rng.normal(size=(12, 9))) > 1.0
    likes[:, 0] = True
    return sp.csr_matrix(likes, dtype=np.float32)


def lengths(rows):
    return np.sqrt(np.asarray(rows.multiply(rows).sum(1))).ravel()


def test_sparse_rows_are_weighted_by_how_rare_a_feature_is_and_have_length_one():
    given = words()
    scale = sparse_scaling("left_features", SINGLE, given, ROWS)
    made = scale("left_features", given)
    np.testing.assert_allclose(lengths(made), 1.0, rtol=1e-6)
    dense = given.toarray()
    unit = dense[dense > 0].mean()
    expected = np.log1p(dense / unit) * np.sqrt(1 + np.log((1 + ROWS) / (1 + (dense > 0).sum(0))))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(made.toarray(), expected, rtol=1e-6)


@pytest.mark.parametrize("factor", [1e-200, 1e-3, 1e6, 1e300])
def test_the_size_of_all_entries_does_not_matter(factor):
    given = words()
    plain = sparse_scaling("x", SINGLE, given, ROWS)("x", given).toarray()
    scaled = sparse_scaling("x", SINGLE, given * factor, ROWS)("x", given * factor).toarray()
    np.testing.assert_allclose(scaled, plain, rtol=1e-5)
    dense = np.random.default_rng(0).normal(3.0, 2.0, (ROWS, 5))
    plain = dense_scaling("x", SINGLE, dense, ROWS)("x", dense)
    scaled = dense_scaling("x", SINGLE, dense * factor, ROWS)("x", dense * factor)
    np.testing.assert_allclose(scaled, plain, rtol=1e-5, atol=1e-6)


def test_dense_columns_are_standardised_and_constant_ones_say_nothing():
    given = np.column_stack([np.arange(ROWS), np.full(ROWS, 7.0), np.r_[np.zeros(ROWS - 1), 1e9]])
    made = dense_scaling("x", SINGLE, given, ROWS)("x", given)
    np.testing.assert_allclose(made[:, 0].mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(made[:, 0].std() * np.sqrt(3), 1.0, rtol=1e-5)
    assert not made[:, 1].any()
    assert np.abs(made).max() <= 10 / np.sqrt(3) + 1e-6


def test_numbers_of_a_table_keep_their_size_beside_words_of_length_one():
    pytest.importorskip("polars", reason="feature tables need polars")
    frame = {"id": list(range(6)), "kind": ["a", "a", "a", "a", "b", None], "size": [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]}
    table = FeatureTable(frame, id="id", categorical=["kind"], numeric=["size"])
    encoded = table.encode(range(6))
    assert table.columns_apart == [0, 3]  # the size, and that the kind is missing
    made = sparse_scaling("x", SINGLE, encoded, 6, table.columns_apart)("x", encoded).toarray()
    np.testing.assert_allclose(made[:, [0, 3]] * np.sqrt(2), encoded.toarray()[:, [0, 3]], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(made[:5, 1:3], axis=1), 1.0, rtol=1e-6)


def test_a_model_scales_new_rows_as_it_did_those_of_training(tmp_path):
    model = gt.TwoTower(dim=4, hidden=(8,), max_iterations=3, device="cpu").fit(pairs(), left_features=words() * 1000)
    model.save(tmp_path / "m")
    for known in (model, gt.load(tmp_path / "m")):
        np.testing.assert_allclose(known.embed(left_features=words() * 1000), model.embed(), rtol=1e-4, atol=1e-5)
    plain = gt.TwoTower(dim=4, hidden=(8,), max_iterations=3, device="cpu").fit(pairs(), left_features=words())
    np.testing.assert_allclose(plain.embed(), model.embed(), rtol=1e-3, atol=1e-3)


def test_scaling_can_be_turned_off_and_is_said():
    options = {"dim": 4, "hidden": (8,), "max_iterations": 1, "device": "cpu"}
    raw = gt.TwoTower(**options, scale_features=False).fit(pairs(), left_features=words())
    assert raw.left_.inputs.text == "sparse"
    scaled = gt.TwoTower(**options).fit(pairs(), left_features=words())
    assert scaled.left_.inputs.text == "sparse (log, √idf, rows of length one)"
    assert "rows of length one" in repr(scaled)
    with pytest.raises(ValueError, match=r"scale_features.*'yes'"):
        gt.TwoTower(**options, scale_features="yes").fit(pairs())


def test_new_rows_that_are_not_numbers_are_refused():
    model = gt.TwoTower(dim=4, hidden=(8,), max_iterations=1, device="cpu").fit(pairs(), left_features=words())
    bad = words()
    bad.data[0] = np.nan
    with pytest.raises(ValueError, match=r"left_features.*finite"):
        model.embed(left_features=bad)

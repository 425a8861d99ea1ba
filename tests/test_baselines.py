"""Baselines against dense twins in float64: the formulas by other means, and lists by sorted scores."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import scipy.sparse as sp

from gramtower.experiments import baselines
from gramtower.experiments.baselines import ALS, EASE, ItemKNN, Popularity, needs_implicit, settings_of

implicit = pytest.mark.skipif(importlib.util.find_spec("implicit") is None, reason="implicit is not installed")


def sample(users=31, items=17, seed=0):
    """Pairs of labels 1, a few of label −1, an empty row and an empty column; and the positive ones, dense."""
    rng = np.random.default_rng(seed)
    dense = (rng.random((users, items)) < 0.3).astype(np.float64)
    dense *= np.where(rng.random(dense.shape) < 0.1, -1.0, 1.0)
    dense[3], dense[:, 5] = 0.0, 0.0
    return sp.csr_matrix(dense.astype(np.float32)), (dense > 0).astype(np.float64)


def expected_lists(scores, seen, rows, k):
    """The k best columns of dense scores, ties to the smaller one."""
    scores = np.where(seen.toarray()[rows] != 0, -np.inf, scores[rows])
    order = np.lexsort((np.broadcast_to(np.arange(scores.shape[1]), scores.shape), -scores))[:, :k]
    return np.where(np.take_along_axis(scores, order, 1) > -np.inf, order, -1)


def test_popularity_counts_positive_pairs():
    pairs, X = sample()
    model = Popularity().fit(pairs)
    np.testing.assert_array_equal(model.scores_, X.sum(0))
    rows = np.array([4, 0, 30])
    scores = np.broadcast_to(X.sum(0), X.shape)
    np.testing.assert_array_equal(model.lists(rows, 6, pairs), expected_lists(scores, pairs, rows, 6))


def test_ease_is_the_ridge_regression_of_each_item_on_the_others():
    pairs, X = sample()
    model = EASE(l2=7.0).fit(pairs)
    for j in range(X.shape[1]):  # zero on the diagonal: item j is no input of its own regression
        others = np.delete(np.arange(X.shape[1]), j)
        A = X[:, others]
        b = np.linalg.solve(A.T @ A + 7.0 * np.eye(len(others)), A.T @ X[:, j])
        np.testing.assert_allclose(model.weights_[others, j], b, rtol=2e-5, atol=1e-7)
        assert model.weights_[j, j] == 0.0


@pytest.mark.parametrize("block_bytes", [1, 64_000_000])
def test_ease_ranks_products_with_a_users_items(block_bytes, monkeypatch):
    monkeypatch.setattr(baselines, "_BLOCK_BYTES", block_bytes)
    pairs, X = sample()
    model = EASE(l2=7.0).fit(pairs)
    G = X.T @ X + 7.0 * np.eye(X.shape[1])
    P = np.linalg.inv(G)
    B = -P / np.diag(P)
    np.fill_diagonal(B, 0.0)
    rows = np.array([30, 1, 2, 9])  # not that without pairs, whose scores are all 0
    scores = X @ B
    assert np.diff(np.sort(scores[rows], axis=1)).min() > 1e-6  # or rounding could order them
    np.testing.assert_array_equal(model.lists(rows, 5, pairs), expected_lists(scores, pairs, rows, 5))
    np.testing.assert_array_equal(model.lists(np.array([3]), 4, pairs), [[0, 1, 2, 3]])
    assert (model.lists(rows, 40, pairs)[:, X.shape[1] :] == -1).all()


def test_ease_says_when_there_are_too_many_items(monkeypatch):
    assert EASE(most_items=20).too_large(20) is None
    assert EASE(most_items=20).too_large(21).startswith("21 items are more than 20")
    with pytest.raises(ValueError, match=r"pairs.*17.*16"):
        EASE(most_items=16).fit(sample()[0])
    monkeypatch.setattr(baselines, "memory_size", lambda: 1_000_000)
    assert EASE().too_large(144) is None
    assert "need 0.0 GB, more than half of the 0.0 GB" in EASE().too_large(145)


@implicit
def test_item_knn_adds_the_cosines_of_near_items():
    pairs, X = sample(users=400, items=12)
    lengths = np.linalg.norm(X, axis=0)
    cosine = X.T @ X / np.where(lengths > 0, lengths, 1) / np.where(lengths > 0, lengths, 1)[:, None]
    whole = ItemKNN(neighbours=12).fit(pairs)
    np.testing.assert_allclose(whole.similarity_.toarray(), cosine, atol=1e-12)
    few = ItemKNN(neighbours=4).fit(pairs)
    near = np.zeros_like(cosine)
    for j in np.flatnonzero(lengths):
        best = np.argsort(-cosine[j], kind="stable")[:4]
        assert cosine[j][best[-1]] > np.sort(cosine[j])[-5]  # no tie at the border
        near[j, best] = cosine[j, best]
    np.testing.assert_allclose(few.similarity_.toarray(), near, atol=1e-12)
    rows = np.arange(40)
    np.testing.assert_array_equal(
        few.lists(rows, 3, pairs), expected_lists((X @ near).astype(np.float32), pairs, rows, 3)
    )


@implicit
def test_als_solves_for_items_and_ranks_by_its_factors():
    pairs, X = sample(users=60, items=25)
    options = {"factors": 6, "regularization": 0.3, "iterations": 4, "use_cg": False}
    model = ALS(options).fit(pairs, seed=3)
    P, Q = (np.asarray(factors, dtype=np.float64) for factors in (model.model_.user_factors, model.model_.item_factors))
    solved = np.linalg.solve(P.T @ P + 0.3 * np.eye(6), P.T @ X).T  # confidence 1 everywhere: alpha is 1
    np.testing.assert_allclose(Q, solved, rtol=2e-3, atol=2e-4)
    rows = np.array([0, 7, 59])
    assert (model.lists(rows, 5, pairs) == expected_lists(P @ Q.T, pairs, rows, 5)).mean() > 0.9
    np.testing.assert_array_equal(model.lists(rows, 5, pairs), ALS(options).fit(pairs, seed=3).lists(rows, 5, pairs))
    assert not np.array_equal(P, ALS(options).fit(pairs, seed=4).model_.user_factors)


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "implicit is not installed" in needs_implicit(ALS())
    assert "implicit is not installed" in needs_implicit(ItemKNN())
    assert needs_implicit(EASE()) is None


def test_settings_are_checked_and_told():
    assert settings_of(EASE(l2=3.0).fit(sample()[0])) == {"l2": 3.0, "most_items": 20_000}
    assert settings_of(Popularity()) == {}
    with pytest.raises(ValueError, match=r"l2.*0"):
        EASE(l2=0)
    with pytest.raises(ValueError, match=r"neighbours.*0"):
        ItemKNN(0)

"""implicit's evaluation: metrics by their formulas and beside implicit's, splits by what they promise."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import scipy.sparse as sp
from test_compat_als import fitted, grouped

from gramtower.compat.implicit import TwoTower, evaluation


class Fixed:
    """A model whose lists are given."""

    def __init__(self, lists):
        self.lists = np.array(lists, dtype=np.int32)

    def recommend(self, userid, user_items, N=10):
        return self.lists[np.asarray(userid), :N], np.zeros((len(userid), N), np.float32)


def matrix(rows, width):
    places = [(i, j) for i, row in enumerate(rows) for j in row]
    return sp.csr_matrix((np.ones(len(places)), np.transpose(places)), shape=(len(rows), width))


def test_metrics_by_hand():
    model = Fixed([[4, 0, 2], [5, 3, 1], [0, 1, 2]])
    test, nothing = matrix([[0, 2], [5], []], 6), sp.csr_matrix((3, 6))
    found = evaluation.ranking_metrics_at_k(model, nothing, test, K=3)
    assert found["precision"] == pytest.approx(3 / 3)  # three hits, of at most two and one
    assert found["map"] == pytest.approx(((1 / 2 + 2 / 3) / 2 + 1.0) / 2)
    log = np.log2
    assert found["ndcg"] == pytest.approx(((1 / log(3) + 1 / log(4)) / (1 + 1 / log(3)) + 1.0) / 2)
    assert found["auc"] == pytest.approx((6 / 8 + 1.0) / 2)  # the first user: both items behind 4, ahead of 1, 3 and 5


@pytest.mark.parametrize("K", [1, 5, 12])
def test_metrics_are_those_of_implicit(K):
    theirs = pytest.importorskip("implicit.evaluation")
    train, test = evaluation.train_test_split(grouped(), 0.7, random_state=1)
    model = fitted(train, 6)
    expected = theirs.ranking_metrics_at_k(model, train, test, K=K, show_progress=False)
    assert evaluation.ranking_metrics_at_k(model, train, test, K=K) == pytest.approx(expected, rel=1e-12)
    for name, key in (
        ("precision_at_k", "precision"), ("mean_average_precision_at_k", "map"), ("ndcg_at_k", "ndcg"),
        ("AUC_at_k", "auc"),
    ):  # fmt: skip
        assert getattr(evaluation, name)(model, train, test, K=K, show_progress=False) == pytest.approx(expected[key])
    assert 0.15 < expected["precision"] < 0.9


def test_models_of_both_kinds_are_evaluated_and_in_batches(monkeypatch):
    train, test = evaluation.train_test_split(grouped(), 0.7, random_state=1)
    model = TwoTower(6, iterations=3, use_gpu=False)
    model.fit(train, show_progress=False)
    whole = evaluation.ranking_metrics_at_k(model, train, test)
    monkeypatch.setattr(evaluation, "_BATCH", 7)
    assert evaluation.ranking_metrics_at_k(model, train, test) == pytest.approx(whole, rel=1e-12)
    assert whole["precision"] > 0.15


def test_a_random_split_is_that_of_implicit_and_keeps_dislikes_for_training():
    ratings = grouped()
    ratings.data[::7] = -1.0
    train, test = evaluation.train_test_split(ratings, 0.6, random_state=4)
    assert (test.data > 0).all()
    assert (train.multiply(test != 0)).nnz == 0
    assert train.nnz + test.nnz < ratings.nnz  # dislikes that were drawn for testing are dropped
    assert 0.55 < train.nnz / ratings.nnz < 0.65
    expected = pytest.importorskip("implicit.evaluation").train_test_split(ratings, 0.6, random_state=4)
    for ours, theirs in zip((train, test), expected, strict=True):
        assert (ours != theirs).nnz == 0


@pytest.mark.parametrize("K", [1, 3])
def test_k_entries_of_each_user_are_left_out(K):
    ratings = sp.vstack([grouped(), sp.csr_matrix(([1.0] * 3, [[0, 0, 0], [4, 5, 6]]), shape=(1, 100))], format="csr")
    train, test = evaluation.leave_k_out_split(ratings, K=K, random_state=2)
    assert (train + test != ratings).nnz == 0
    assert train.nnz + test.nnz == ratings.nnz
    assert np.array_equal(np.diff(test.indptr), np.where(np.diff(ratings.indptr) > K + 1, K, 0))
    assert np.diff(test.indptr)[-1] == (1 if K == 1 else 0)  # three entries are more than 1 + 1, not than 3 + 1
    again, _ = evaluation.leave_k_out_split(ratings, K=K, random_state=2)
    other, _ = evaluation.leave_k_out_split(ratings, K=K, random_state=3)
    assert (again != train).nnz == 0 != (other != train).nnz


def test_a_share_of_users_is_kept_for_training():
    _, test = evaluation.leave_k_out_split(grouped(), train_only_size=0.8, random_state=np.random.RandomState(1))
    assert (np.diff(test.indptr) == 0).sum() == 120


def test_bad_input_is_named():
    model, board = Fixed([[0]]), matrix([[0]], 2)
    for given, what in (
        (lambda: evaluation.leave_k_out_split(board, K=0), "K"),
        (lambda: evaluation.leave_k_out_split(board, train_only_size=1.0), "train_only_size"),
        (lambda: evaluation.leave_k_out_split(board, train_only_size=-1.0), "train_only_size"),
        (lambda: evaluation.train_test_split(board, 1.5), "train_percentage"),
        (lambda: evaluation.train_test_split(np.eye(2)), "ratings"),
        (lambda: evaluation.train_test_split(board, random_state="x"), "seed"),
        (lambda: evaluation.precision_at_k(model, board, board, K=0), "K"),
        (lambda: evaluation.precision_at_k(model, board, sp.csr_matrix((1, 2))), "test_user_items"),
        (lambda: evaluation.precision_at_k(model, sp.csr_matrix((3, 2)), board), "train_user_items"),
    ):
        with pytest.raises(ValueError, match=rf"^{what}"):
            given()


def test_signatures_are_those_of_implicit():
    theirs = pytest.importorskip("implicit.evaluation")
    for name in ("train_test_split", "ranking_metrics_at_k", "precision_at_k", "ndcg_at_k", "AUC_at_k"):
        expected = inspect.signature(getattr(theirs, name)).parameters
        given = inspect.signature(getattr(evaluation, name)).parameters
        assert {n: p.default for n, p in given.items()} == {n: p.default for n, p in expected.items()}, name

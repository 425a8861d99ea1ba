"""The functions of `implicit.evaluation`: splits of a matrix of ratings, and metrics of lists of K items.

For users with t > 0 test items, h_r = 1 if the r-th item of their list is one of them, H = Σ h_r, r = 1 … K:

    precision   Σ_users H / Σ_users min(K, t)
    map         mean of Σ_r h_r (h_1 + … + h_r) / r  over min(K, t)
    ndcg        mean of Σ_r h_r / log2(r + 1)  over  Σ_(r ≤ min(K, t)) 1 / log2(r + 1)
    auc         mean of the AUC of lists that continue with all other items in random order

The functions take any model with implicit's `recommend`. docs/metrics.md has this library's own definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Protocol

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.compat.implicit.base import Factors, RowsLike, Seed
from gramtower.data.matrices import SparseMatrix, canonical, checked

_BATCH = 1000  # users whose lists are computed at a time
Split = tuple[sp.csr_matrix, sp.csr_matrix]


class Lists(Protocol):
    """A model that can be evaluated."""

    def recommend(self, userid: RowsLike, user_items: SparseMatrix, N: int = 10) -> tuple[Factors, Factors]:
        """Lists of N items, without those of ``user_items``, and their scores."""


def train_test_split(ratings: SparseMatrix, train_percentage: float = 0.8, random_state: Seed = None) -> Split:
    """Split entries at random into a training and a test matrix; the test matrix has positive entries only.

    The same seed gives the same split as implicit's function.
    """
    share = check.number("train_percentage", train_percentage, minimum=0.0)
    if share > 1.0:
        check.fail("train_percentage", train_percentage, "a share from 0 to 1")
    entries = checked("ratings", ratings).tocoo()
    train = _generator(random_state).random(len(entries.data)) < share
    return _part(entries, train), _part(entries, ~train & (entries.data > 0))


def leave_k_out_split(
    ratings: SparseMatrix, K: int = 1, train_only_size: float = 0.0, random_state: Seed = None
) -> Split:
    """Move K random entries of each user with more than K + 1 entries to a test matrix.

    Args:
        ratings: users × items.
        K: number of test entries per user.
        train_only_size: share of users, drawn at random, that keep all entries for training.
        random_state: seed or generator.
    """
    K = check.count("K", K)
    if not 0.0 <= check.number("train_only_size", train_only_size) < 1.0:
        check.fail("train_only_size", train_only_size, "a share of at least 0 and less than 1")
    entries, random = checked("ratings", ratings).tocoo(), _generator(random_state)
    users, counts = np.unique(entries.row, return_counts=True)
    tested = counts > K + 1
    if train_only_size > 0:
        kept = random.choice(len(users), size=max(1, int(len(users) * train_only_size)), replace=False)
        tested[kept] = False
    order = np.lexsort((random.random(len(entries.row)), entries.row))  # by user, in random order within a user
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    test = (place < K) & np.isin(entries.row, users[tested])
    return _part(entries, ~test), _part(entries, test)


def ranking_metrics_at_k(
    model: Lists,
    train_user_items: SparseMatrix,
    test_user_items: SparseMatrix,
    K: int = 10,
    show_progress: bool = True,
    num_threads: int = 1,
) -> dict[str, float]:
    """Precision, MAP, NDCG and AUC of the lists of a model; the module docstring has the formulas.

    Args:
        model: model with implicit's ``recommend``.
        train_user_items: users × items that lists leave out.
        test_user_items: users × items that lists should contain; users without entries do not count.
        K: length of the lists.
        show_progress: has no effect.
        num_threads: has no effect.
    """
    K = check.count("K", K)
    test = canonical("test_user_items", test_user_items)
    train = canonical("train_user_items", train_user_items)
    if train.shape[0] != test.shape[0]:
        check.fail("train_user_items", f"{train.shape[0]} rows", f"{test.shape[0]}, as test_user_items has")
    users = np.flatnonzero(np.diff(test.indptr)).astype(np.int32)
    if not len(users):
        check.fail("test_user_items", "no entries", "at least one user with a test item")
    sums, most = np.zeros(4), 0.0
    for start in range(0, len(users), _BATCH):
        batch = users[start : start + _BATCH]
        lists, _ = model.recommend(batch, train[batch], N=K)
        hits = _hits(np.asarray(lists), test[batch])
        positive = np.diff(test.indptr)[batch]
        most += float(np.minimum(K, positive).sum())
        sums += _totals(hits, positive, test.shape[1], K)
    precision, map_, ndcg, auc = sums / [most, *[len(users)] * 3]
    return {"precision": float(precision), "map": float(map_), "ndcg": float(ndcg), "auc": float(auc)}


def _metric(key: str, name: str, label: str) -> Callable[..., float]:
    """A function with the arguments of :func:`ranking_metrics_at_k` that returns one of its metrics."""

    def metric_at_k(*given: object, **named: object) -> float:
        return metrics(*given, **named)[key]

    metrics: Callable[..., dict[str, float]] = ranking_metrics_at_k
    vars(metric_at_k)["__signature__"] = signature(metrics).replace(return_annotation="float")
    metric_at_k.__name__ = metric_at_k.__qualname__ = name
    metric_at_k.__doc__ = f"{label} of :func:`ranking_metrics_at_k`."
    return metric_at_k


precision_at_k = _metric("precision", "precision_at_k", "Precision")
mean_average_precision_at_k = _metric("map", "mean_average_precision_at_k", "MAP")
ndcg_at_k = _metric("ndcg", "ndcg_at_k", "NDCG")
AUC_at_k = _metric("auc", "AUC_at_k", "AUC")


def _hits(lists: Factors, test: sp.csr_matrix) -> NDArray[np.bool_]:
    """Whether each item of the lists is one of the user's test items."""
    n = test.shape[1]
    wanted = np.repeat(np.arange(test.shape[0]), np.diff(test.indptr)) * n + test.indices
    inside = (lists >= 0) & (lists < n)
    return np.asarray(inside & np.isin(lists + np.arange(len(lists))[:, None] * n, wanted))


def _totals(hits: NDArray[np.bool_], positive: Factors, items: int, K: int) -> NDArray[np.float64]:
    """Sums over users of hits, average precision, NDCG and AUC."""
    rank = np.arange(1, hits.shape[1] + 1)
    found = np.cumsum(hits, axis=1)
    best = np.minimum(K, positive)
    average = (hits * found / rank).sum(1) / best
    ideal = np.cumsum(1.0 / np.log2(np.arange(2, K + 2)))
    gain = (hits / np.log2(rank + 1)).sum(1) / ideal[best - 1]
    misses, negative = (~hits).sum(1), items - positive
    before = (~hits * found).sum(1)  # pairs of a positive and a lower negative item of the list
    total = hits.sum(1)
    ordered = before + (total + positive) / 2.0 * (negative - misses)
    auc = np.divide(ordered, positive * negative, out=np.ones(len(positive)), where=negative > 0)
    return np.array([total.sum(), average.sum(), gain.sum(), auc.sum()])


def _part(entries: sp.coo_matrix, chosen: NDArray[np.bool_]) -> sp.csr_matrix:
    places = entries.row[chosen], entries.col[chosen]
    return sp.csr_matrix((entries.data[chosen], places), shape=entries.shape, dtype=entries.dtype)


def _generator(random_state: Seed) -> np.random.Generator:
    """A numpy generator from a seed, a generator of either kind, or None for a random seed."""
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(int(random_state.randint(2**31)))
    if random_state is None or isinstance(random_state, np.random.Generator):
        return np.random.default_rng(random_state)
    return np.random.default_rng(check.seed(random_state))

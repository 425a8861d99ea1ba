"""The functions of `lightfm.evaluation`: metrics of a model for each user with test items.

With the ranks r of a user's t test items (`predict_rank`, 0 for the first) among N items that are not in training:

    precision_at_k    |{r < k}| / k
    recall_at_k       |{r < k}| / t
    auc_score         mean of 1 − a / (N − t), a = items above a test item that are not test items
    reciprocal_rank   1 / (1 + the lowest r)

A user without test items counts only with ``preserve_rows``, as 0, in `auc_score` as ½, in `recall_at_k` as NaN. The
functions take any model with LightFM's `predict_rank`. docs/metrics.md has this library's own definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.matrices import SparseMatrix, canonical

Values = NDArray[np.float32]
_Metric = Callable[[Values, int, int], float]  # of a user's ascending ranks, N and k


class Ranks(Protocol):
    """A model that can be evaluated."""

    def predict_rank(self, test_interactions: SparseMatrix, /, **options: Any) -> sp.csr_matrix:
        """Ranks of the test items; the options are those of :meth:`LightFM.predict_rank`."""


def _at_k(name: str, about: str, empty: float, metric: _Metric) -> Callable[..., Values]:
    """A function for lists of k items."""

    def of_users(
        model: Ranks,
        test_interactions: SparseMatrix,
        train_interactions: SparseMatrix | None = None,
        k: int = 10,
        user_features: SparseMatrix | None = None,
        item_features: SparseMatrix | None = None,
        preserve_rows: bool = False,
        num_threads: int = 1,
        check_intersections: bool = True,
    ) -> Values:
        kept, k = check.flag("preserve_rows", preserve_rows), check.count("k", k)
        test, train = canonical("test_interactions", test_interactions), train_interactions
        ranks = model.predict_rank(
            test, train_interactions=train, item_features=item_features, user_features=user_features,
            num_threads=num_threads, check_intersections=check_intersections,
        )  # fmt: skip
        items = np.full(ranks.shape[0], ranks.shape[1])
        if train is not None:
            items -= np.diff(canonical("train_interactions", train).indptr)
        found, there = np.full(len(items), empty, np.float32), np.flatnonzero(np.diff(ranks.indptr))
        for row in there:
            found[row] = metric(np.sort(ranks.data[ranks.indptr[row] : ranks.indptr[row + 1]]), int(items[row]), k)
        return found if kept else found[there]

    return _named(of_users, name, about)


def _of_all(name: str, about: str, empty: float, metric: _Metric) -> Callable[..., Values]:
    """A function of the whole ranking, with the same arguments except k."""
    inner = _at_k(name, about, empty, metric)
    arguments = [one for one in signature(inner).parameters.values() if one.name != "k"]
    without_k = signature(inner).replace(parameters=arguments)

    def of_users(*given: object, **named: object) -> Values:
        return inner(**without_k.bind(*given, **named).arguments)

    vars(of_users)["__signature__"] = without_k
    return _named(of_users, name, about)


def _named(function: Callable[..., Values], name: str, about: str) -> Callable[..., Values]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{about} for each user with test items; the module docstring has the formula."
    return function


def _auc(ranks: Values, items: int, _: int) -> float:
    others = items - len(ranks)
    above = np.maximum(ranks - np.arange(len(ranks)), 0)  # without the test items that are ranked above
    return float((1.0 - above / others).mean()) if others > 0 else 0.5


precision_at_k = _at_k(
    "precision_at_k", "The share of test items among the first k", 0.0, lambda ranks, _, k: float((ranks < k).sum()) / k
)
recall_at_k = _at_k(
    "recall_at_k", "The share of the test items that are among the first k", np.nan,
    lambda ranks, _, k: float((ranks < k).mean()),
)  # fmt: skip
auc_score = _of_all("auc_score", "The chance that a test item is ranked above another item", 0.5, _auc)
reciprocal_rank = _of_all(
    "reciprocal_rank", "1 over the place of the first test item", 0.0, lambda ranks, *_: 1.0 / (1.0 + float(ranks[0]))
)

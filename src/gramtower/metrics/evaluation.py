"""Ranking metrics of given lists, and of embeddings against held-out pairs in bounded memory.

Users are taken in blocks: the products of their scores, one pass for the top K, and for the AUC one count for each
test pair. Nothing of users × items is made. Checked by tests/test_metrics.py; timed by benchmarks/bench_evaluation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.matrices import canonical
from gramtower.distributed.group import SINGLE, Group
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.metrics.tally import Scores, Tally
from gramtower.retrieval.ranks import above
from gramtower.retrieval.scores import embeddings, score_blocks
from gramtower.retrieval.select import best
from gramtower.retrieval.tiles import best_lists


def ranking_metrics(recommended: Any, relevant: Any, metrics: str | Sequence[str] = DEFAULT) -> Scores:
    """Metrics of given recommendations.

    Args:
        recommended: users × K item columns, best first, −1 where there is none; no item twice in a row.
        relevant: scipy.sparse, users × items; stored entries with a value above 0 are the relevant items.
        metrics: names; the AUC needs scores of all items and is not one of them here.

    Returns:
        Metrics by name, means over the users that have relevant items, which ``.users`` counts.
    """
    wanted = parse(metrics)
    if any(metric.kind == "auc" for metric in wanted):
        check.fail("metrics", "'auc'", "metrics of lists; evaluate_embeddings computes the AUC")
    lists = check.as_array("recommended", recommended, "integers, users × K")
    if lists.ndim != 2 or lists.dtype.kind not in "iu":
        check.fail("recommended", f"shape {lists.shape} of {lists.dtype}", "integers, users × K")
    truth = _positives(canonical("relevant", relevant))
    if truth.shape[0] != len(lists):
        check.fail("relevant", f"shape {truth.shape}", f"{len(lists)} rows, one for each list")
    _check_lists(lists, truth.shape[1], max(metric.k for metric in wanted))
    users = np.flatnonzero(np.diff(truth.indptr))
    if not len(users):
        check.fail("relevant", "no pair with a value above 0", "at least one")
    tally = Tally(wanted, truth[users])
    tally.add_lists(0, lists[users].astype(np.int64))
    return tally.result(len(lists) - len(users), 0)


def evaluate_embeddings(
    P: Any,
    Q: Any,
    test: Any,
    *,
    train: Any = None,
    metrics: str | Sequence[str] = DEFAULT,
    exclude_train: bool = True,
    by: str | None = None,
    block_bytes: int | str | None = None,
    processes: Group = SINGLE,
) -> Scores:
    """Metrics of the ranking of all items by p_iᵀq_j for each user with test pairs.

    Args:
        P: embeddings of users, m × k.
        Q: embeddings of items, n × k.
        test: scipy.sparse, m × n; stored entries with a value above 0 are the relevant pairs.
        train: scipy.sparse, m × n; every stored entry is a training pair.
        metrics: names, see docs/metrics.md.
        exclude_train: leave training pairs out of the ranking; test pairs that are training pairs then do not count.
        by: "popularity" adds each metric for the test items of each tercile of training popularity, "activity" for the
            users of each tercile of training activity, as in ``"recall@20 popularity=low"``.
        block_bytes: most bytes of scores held at once.
        processes: the processes whose users count together; P, test and train are then each process's own rows, Q is
            that of all items.

    Returns:
        Metrics by name; attributes of the result count users and pairs, also those left out.
    """
    wanted = parse(metrics)
    P, Q = embeddings(P, Q)
    shape = (len(P), len(Q))
    truth = _positives(canonical("test", test, shape))
    seen = None if train is None else canonical("train", train, shape)
    if by is not None:
        check.choice("by", by, ("popularity", "activity"))
        if seen is None:
            check.fail("train", "None", f"the training pairs, for by={by!r}")
    exclude = seen if check.flag("exclude_train", exclude_train) else None
    given = truth.nnz
    if exclude is not None:
        truth = _without(truth, exclude)
    users = np.flatnonzero(np.diff(truth.indptr))
    if not processes.totals(float(len(users)))[0]:
        check.fail("test", f"{given} pairs, {given - truth.nnz} of them in train", "at least one pair that is not")
    truth = truth[users]
    exclude = None if exclude is None else exclude[users]
    tally = Tally(wanted, truth, processes)
    if by is not None:
        tally.break_down(by, seen, users)
    k = min(max(metric.k for metric in wanted), shape[1])
    if any(metric.kind == "auc" for metric in wanted):  # needs whole rows of scores
        for start, stop, scores in score_blocks(P, Q, exclude, rows=users, block_bytes=block_bytes):
            if k:
                tally.add_lists(start, best(scores, k)[0].cpu().numpy())
            tally.add_ranks(start, stop, above(scores, truth, start, stop), exclude)
    else:
        for start, _, columns, _ in best_lists(P, Q, k, exclude, rows=users, block_bytes=block_bytes):
            tally.add_lists(start, columns)
    return tally.result(shape[0] - len(users), given - truth.nnz)


def _positives(pairs: sp.csr_matrix) -> sp.csr_matrix:
    """The entries with a value above 0."""
    result = sp.csr_matrix((pairs.data > 0, pairs.indices, pairs.indptr), shape=pairs.shape, copy=True)
    result.eliminate_zeros()
    return result


def _without(pairs: sp.csr_matrix, others: sp.csr_matrix) -> sp.csr_matrix:
    """The pairs that are not stored entries of the other matrix."""
    stored = sp.csr_matrix((np.ones(others.nnz, dtype=bool), others.indices, others.indptr), shape=others.shape)
    return (pairs > pairs.multiply(stored)).tocsr()


def _check_lists(lists: NDArray[Any], n: int, k: int) -> None:
    if lists.shape[1] < min(k, n):
        check.fail("recommended", f"{lists.shape[1]} columns", f"at least {min(k, n)} for these metrics")
    if lists.size and (lists.min() < -1 or lists.max() >= n):
        check.fail("recommended", f"columns from {lists.min()} to {lists.max()}", f"item columns below {n}, or -1")
    ordered = np.sort(lists, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        check.fail("recommended", f"an item twice in row {int(twice.argmax())}", "each item once in a row")

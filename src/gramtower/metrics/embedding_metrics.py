"""Ranking metrics of given lists, and of embeddings against held-out pairs in bounded memory.

Users are processed in blocks: the product for their scores, one pass for the top K, and one count for each test pair
for the AUC. There is no array of users × items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.matrices import SparseMatrix, canonical, union, without
from gramtower.distributed.group import SINGLE, Group
from gramtower.metrics.definitions import (
    DEFAULT,
    PROPENSITY,
    Metric,
    above,
    inverse_propensities,
    parse,
    self_information,
)
from gramtower.metrics.tally import ItemFacts, Scores, Tally
from gramtower.retrieval.topk import EmbeddingsLike, Ranking, as_embeddings, best, embeddings


def ranking_metrics(
    recommended: NDArray[np.generic] | Tensor | Sequence[Sequence[int]],
    relevant: SparseMatrix,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    popularity: SparseMatrix | None = None,
    propensity: tuple[float, float] = PROPENSITY,
    embeddings: EmbeddingsLike | None = None,
) -> Scores:
    """Metrics of given recommendations.

    Args:
        recommended: users × K item columns, best first, −1 for empty places; a row has no item twice.
        relevant: scipy.sparse, users × items; stored entries with a value above 0 are the relevant items.
        metrics: names of metrics. The AUC is not available, because it needs scores of all items; the MRR without a K
            uses the whole lists.
        popularity: scipy.sparse, any number of users × items: the training pairs, for psp and novelty.
        propensity: A and B of psp.
        embeddings: embeddings of the items, one row each, for diversity.

    Returns:
        Metrics by name: means over the users that have relevant items, whose number is ``.users``.
    """
    wanted = parse(metrics)
    if any(metric.kind == "auc" for metric in wanted):
        check.fail("metrics", "'auc'", "metrics of lists; evaluate_embeddings computes the AUC")
    lists = check.as_array("recommended", recommended, "integers, users × K")
    if lists.ndim != 2 or lists.dtype.kind not in "iu":
        check.fail("recommended", f"shape {lists.shape} of {lists.dtype}", "integers, users × K")
    truth = _positives(canonical("relevant", relevant))
    n = truth.shape[1]
    if truth.shape[0] != len(lists):
        check.fail("relevant", f"shape {truth.shape}", f"{len(lists)} rows, one for each list")
    wanted = [replace(m, k=max(1, lists.shape[1])) if m.k == 0 else m for m in wanted]
    _check_lists(lists, n, max(metric.k for metric in wanted))
    users = np.flatnonzero(np.diff(truth.indptr))
    if not len(users):
        check.fail("relevant", "no pair with a value above 0", "at least one")
    known = None if popularity is None else _of_items("popularity", popularity, n)
    Q = None if embeddings is None else as_embeddings("embeddings", embeddings)
    if Q is not None and len(Q) != n:
        check.fail("embeddings", f"{len(Q)} rows", f"{n}, one for each item")
    facts = _facts(wanted, _degrees(known, SINGLE), propensity, Q, "popularity")
    tally = Tally(wanted, truth[users], facts=facts)
    tally.add_lists(0, lists[users].astype(np.int64))
    return tally.result(users, len(lists) - len(users), 0)


def evaluate_embeddings(
    P: EmbeddingsLike,
    Q: EmbeddingsLike,
    test: SparseMatrix,
    *,
    train: SparseMatrix | None = None,
    metrics: str | Sequence[str] = DEFAULT,
    exclude_train: bool = True,
    exclude: SparseMatrix | None = None,
    by: str | None = None,
    popularity: SparseMatrix | None = None,
    propensity: tuple[float, float] = PROPENSITY,
    block_bytes: int | str | None = None,
    processes: Group = SINGLE,
) -> Scores:
    """Metrics of the ranking of all items by p_iᵀq_j for each user with test pairs.

    Args:
        P: embeddings of users, m × k.
        Q: embeddings of items, n × k.
        test: scipy.sparse, m × n; stored entries with a value above 0 are the relevant pairs.
        train: scipy.sparse, m × n; every stored entry is a training pair.
        metrics: names of metrics, see docs/metrics.md.
        exclude_train: whether to leave training pairs out of the ranking; test pairs that are training pairs then do
            not count.
        exclude: scipy.sparse, m × n; additional pairs to leave out in the same way.
        by: "popularity" adds each metric for the test items of each tercile of training popularity, "activity" for the
            users of each tercile of training activity, as in ``"recall@20 popularity=low"``.
        popularity: scipy.sparse, any number of rows × n: the training pairs from which the popularity of items is
            counted, for psp, novelty and by="popularity"; by default ``train``. It is needed for users who were not in
            the training data, whose ``train`` has their histories or nothing.
        propensity: A and B of psp.
        block_bytes: largest memory for scores.
        processes: the processes that divide the users; P, test, train, exclude and popularity are then those of this
            process's users, and Q is that of all items.

    Returns:
        Metrics by name; attributes of the result have the numbers of users and pairs, and of those left out.
    """
    wanted = parse(metrics)
    P, Q = embeddings(P, Q)
    shape = (len(P), len(Q))
    truth = _positives(canonical("test", test, shape))
    seen = None if train is None else canonical("train", train, shape)
    known = seen if popularity is None else _of_items("popularity", popularity, shape[1])
    if by is not None:
        check.choice("by", by, ("popularity", "activity"))
        if (known if by == "popularity" else seen) is None:
            check.fail("train", "None", f"the training pairs, for by={by!r}")
    left_out = [seen] if check.flag("exclude_train", exclude_train) and seen is not None else []
    left_out += [] if exclude is None else [canonical("exclude", exclude, shape)]
    given = truth.nnz
    exclude = union(*left_out) if len(left_out) > 1 else left_out[0] if left_out else None
    if exclude is not None:
        truth = without(truth, exclude)
    users = np.flatnonzero(np.diff(truth.indptr))
    if not processes.totals(float(len(users)))[0]:
        check.fail("test", f"{given} pairs, {given - truth.nnz} of them in train", "at least one pair that is not")
    truth = truth[users]
    exclude = None if exclude is None else exclude[users]
    counted = by == "popularity" or any(metric.kind in ("psp", "novelty") for metric in wanted)
    degrees = _degrees(known if counted else None, processes)
    tally = Tally(wanted, truth, processes, _facts(wanted, degrees, propensity, Q, "train"))
    if by == "popularity" and degrees is not None:
        tally.break_down(by, degrees[0])
    elif by is not None and seen is not None:
        tally.break_down(by, np.diff(seen.indptr)[users].astype(np.int64))
    k = min(max(metric.k for metric in wanted), shape[1])
    kinds = {metric.kind for metric in wanted if not metric.k}
    ranking = Ranking(P, Q, exclude, ranked=users)
    if kinds:  # needs whole rows of scores
        for start, stop, scores in ranking.scores(block_bytes):
            if k:
                tally.add_lists(start, best(scores, k)[0].cpu().numpy())
            if "auc" in kinds:
                tally.add_ranks(start, stop, above(scores, truth, start, stop), exclude)
            if "mrr" in kinds:
                tally.add_first(start, stop, scores)
    else:
        for start, _, columns, _ in ranking.lists(k, block_bytes):
            tally.add_lists(start, columns)
    return tally.result(users, shape[0] - len(users), given - truth.nnz)


def _facts(
    wanted: list[Metric],
    degrees: tuple[NDArray[np.int64], int] | None,
    propensity: tuple[float, float],
    Q: Tensor | None,
    argument: str,
) -> ItemFacts:
    """The properties of items that the metrics need."""
    names = {metric.kind: metric.name for metric in wanted}
    for kind in ("psp", "novelty"):
        if kind in names and degrees is None:
            check.fail(argument, "None", f"the training pairs, for {names[kind]!r}")
    if not isinstance(propensity, Sequence) or isinstance(propensity, str) or len(propensity) != 2:
        check.fail("propensity", repr(propensity), "two numbers, A and B")
    a = check.number("propensity A", propensity[0], minimum=0.0)
    b = check.number("propensity B", propensity[1], above=0.0)
    worth = information = directions = None
    if degrees is not None and "psp" in names:
        worth = inverse_propensities(*degrees, a, b)
    if degrees is not None and "novelty" in names:
        information = self_information(*degrees)
    if "diversity" in names:
        if Q is None:
            check.fail("embeddings", "None", f"embeddings of the items, for {names['diversity']!r}")
        lengths = torch.linalg.vector_norm(Q, dim=1, keepdim=True)
        directions = torch.where(lengths > 0, Q / lengths, torch.zeros_like(Q)).cpu().numpy()
    return ItemFacts(worth, information, directions)


def _degrees(known: sp.csr_matrix | None, processes: Group) -> tuple[NDArray[np.int64], int] | None:
    """Numbers of training pairs of each item and of training users, over all processes."""
    if known is None:
        return None
    counts = torch.from_numpy(np.bincount(known.indices, minlength=known.shape[1]))
    return processes.sum_(counts).numpy(), int(processes.totals(float(known.shape[0]))[0])


def _of_items(name: str, pairs: SparseMatrix, n: int) -> sp.csr_matrix:
    """Pairs of any users with n items."""
    found = canonical(name, pairs)
    if found.shape[1] != n:
        check.fail(name, f"shape {found.shape}", f"{n} columns, one for each item")
    return found


def _positives(pairs: sp.csr_matrix) -> sp.csr_matrix:
    """The entries with a value above 0."""
    result = sp.csr_matrix((pairs.data > 0, pairs.indices, pairs.indptr), shape=pairs.shape, copy=True)
    result.eliminate_zeros()
    return result


def _check_lists(lists: NDArray[np.int64], n: int, k: int) -> None:
    if lists.shape[1] < min(k, n):
        check.fail("recommended", f"{lists.shape[1]} columns", f"at least {min(k, n)} for these metrics")
    if lists.size and (lists.min() < -1 or lists.max() >= n):
        check.fail("recommended", f"columns from {lists.min()} to {lists.max()}", f"item columns below {n}, or -1")
    ordered = np.sort(lists, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        check.fail("recommended", f"an item twice in row {int(twice.argmax())}", "each item once in a row")

"""Names and formulas of the metrics, as defined in docs/metrics.md.

AT_K       functions of hits (users × K, whether the item at this place is relevant) and the number of relevant items
psp        hits weighted by the inverse propensities of items
OF_LISTS   novelty and diversity of a list, whatever is relevant; NaN for a list that is too short
OF_ITEMS   functions of how often each item is in the lists of all users

The AUC and the MRR count exactly, without sorting users × items. For a relevant item of user i with score s, the AUC
needs #{j not relevant, s_ij > s} + ½ #{j not relevant, s_ij = s}, where items left out of the ranking have score −inf
and are never above. Cost: one pass over a user's scores for each relevant item, two for the rank of the first one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.retrieval.topk import use_compiled

DEFAULT = ("map@5", "recall@20", "ndcg@20")
PROPENSITY = (0.55, 1.5)  # A and B of Jain et al. (2016), who estimated them on Wikipedia

Floats = NDArray[np.float64]
Hits = NDArray[np.bool_]
Lists = NDArray[np.int64]
_ELEMENTS = 1 << 20  # numbers in a block of summed embeddings


def _ndcg(hits: Hits, relevant: Floats) -> Floats:
    gains = 1 / np.log2(np.arange(2, hits.shape[1] + 2))
    ideal = np.append(np.nan, np.cumsum(gains))
    return np.asarray(hits @ gains / ideal[np.minimum(relevant, len(gains)).astype(int)])


def _precisions(hits: Hits) -> Floats:
    """precision@κ for each κ = 1 … K."""
    return hits.cumsum(1) / np.arange(1, hits.shape[1] + 1)


def inverse_propensities(counts: NDArray[np.int64], users: int, a: float, b: float) -> Floats:
    """1 / p_j = 1 + C (N_j + B)^(−A) with C = (log N − 1)(B + 1)^A, for items with N_j training pairs of N users.

    The largest value, 1 + C·B^(−A), is that of items without pairs. C is at least 0, also for N < e.
    """
    c = max(0.0, math.log(max(1, users)) - 1) * (b + 1) ** a
    return np.asarray(1 + c * (counts + b) ** -a, dtype=np.float64)


def best_gains(gains: Floats, rows: NDArray[np.int64], users: int, k: int) -> Floats:
    """The sum of the k largest gains of each user, given gains and their users (``rows``), in order of users."""
    order = np.lexsort((-gains, rows))
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    first = place < k
    return np.asarray(np.bincount(rows[first], gains[order][first], minlength=users), dtype=np.float64)


def self_information(counts: NDArray[np.int64], users: int) -> Floats:
    """log₂(N / N_j), the surprise of an item with N_j training pairs of N users; N_j is at least 1."""
    return np.asarray(np.log2(max(1, users) / np.maximum(counts, 1)), dtype=np.float64)


def novelty(lists: Lists, information: Floats) -> Floats:
    """The mean self-information of the items of each list."""
    filled = lists >= 0
    total, count = np.where(filled, information[lists], 0.0).sum(1), filled.sum(1)
    return np.asarray(np.divide(total, count, out=np.full(len(lists), np.nan), where=count > 0))


def diversity(lists: Lists, directions: NDArray[np.float32], lengths: Iterable[int]) -> dict[int, Floats]:
    """For each K, 1 − the mean cosine of the pairs of items in the first K places of each list.

    It uses Σ_{a≠b} u_aᵀu_b = ‖Σ u_a‖² − Σ ‖u_a‖² and so costs O(lists · K · k).

    Args:
        lists: items, −1 where a list ends early.
        directions: embeddings of items, normalised to length one or zero.
        lengths: the values of K.
    """
    wanted = sorted(set(lengths))
    found = {k: np.full(len(lists), np.nan) for k in wanted}
    size = max(1, _ELEMENTS // directions.shape[1])
    for start in range(0, len(lists), size):
        part = lists[start : start + size]
        total, own, count = np.zeros((len(part), directions.shape[1])), np.zeros(len(part)), np.zeros(len(part))
        for place in range(wanted[-1]):
            if place < part.shape[1]:
                filled = part[:, place] >= 0
                vectors = np.where(filled[:, None], directions[part[:, place]], 0.0)
                total += vectors
                own += np.einsum("ij,ij->i", vectors, vectors)
                count += filled
            if place + 1 in found:
                cosines = np.einsum("ij,ij->i", total, total) - own
                pairs = count * (count - 1)
                alike = np.divide(cosines, pairs, out=np.full(len(part), np.nan), where=pairs > 0)
                found[place + 1][start : start + size] = 1 - alike
    return found


def coverage(counts: NDArray[np.int64]) -> float:
    """The fraction of items that are in some list, from how often each item is."""
    return float((counts > 0).mean())


def gini(counts: NDArray[np.int64]) -> float:
    """The Gini index of how often each item is in a list: 0 if all are equal, (n − 1)/n if one has all places."""
    n, total = len(counts), int(counts.sum())
    if not total:
        return float("nan")
    ordered = np.sort(counts).astype(np.float64)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total))


def above(scores: Tensor, relevant: sp.csr_matrix, start: int, stop: int) -> NDArray[np.float64]:
    """One count for each relevant pair of rows start:stop, whose scores are given."""
    if use_compiled(scores.device, scores.numel()):
        from gramtower.retrieval import scan

        offsets = relevant.indptr[start : stop + 1].astype(np.int64)
        columns = relevant.indices[offsets[0] : offsets[-1]].astype(np.int64)
        return scan.above(scores, offsets - offsets[0], columns)
    return above_torch(scores, relevant, start, stop)


def above_torch(scores: Tensor, relevant: sp.csr_matrix, start: int, stop: int) -> NDArray[np.float64]:
    """The same as ``above``, by sorting each row, for any device."""
    offsets = relevant.indptr[start : stop + 1]
    counts = np.diff(offsets)
    rows = torch.from_numpy(np.repeat(np.arange(stop - start), counts)).to(scores.device)
    place = np.arange(offsets[-1] - offsets[0]) - np.repeat(offsets[:-1] - offsets[0], counts)
    places = torch.from_numpy(place).to(scores.device)
    columns = torch.from_numpy(relevant.indices[offsets[0] : offsets[-1]].astype(np.int64)).to(scores.device)
    wanted = scores.new_full((stop - start, int(counts.max(initial=0))), -torch.inf)
    wanted[rows, places] = scores[rows, columns]
    total = torch.zeros_like(wanted, dtype=torch.float64)
    for among, sign in ((scores, 1), (wanted, -1)):
        ordered = among.sort(1).values
        not_below = among.shape[1] - torch.searchsorted(ordered, wanted)
        higher = among.shape[1] - torch.searchsorted(ordered, wanted, right=True)
        total += sign * 0.5 * (not_below + higher)
    return np.asarray(total[rows, places].cpu().numpy())


def first_places(scores: Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """The rank of each row's first relevant item, from 1, or infinity; equal scores are in order of columns.

    ``rows``, which increase, and ``columns`` are those of the relevant pairs, whose scores are above −inf.
    """
    count, n = scores.shape
    i, j = (torch.from_numpy(x.astype(np.int64)).to(scores.device) for x in (rows, columns))
    own = scores[i, j]
    highest = scores.new_full((count,), torch.inf).scatter_reduce_(0, i, own, "amax", include_self=False)
    among = own == highest[i]
    column = torch.full((count,), n, device=scores.device).scatter_reduce_(0, i[among], j[among], "amin")
    before = (scores > highest[:, None]).sum(1)
    before += ((scores == highest[:, None]) & (torch.arange(n, device=scores.device) < column[:, None])).sum(1)
    places = np.asarray(before.cpu().numpy() + 1, dtype=np.float64)
    places[np.bincount(rows, minlength=count) == 0] = np.inf
    return places


AT_K: dict[str, Callable[[Hits, Floats], Floats]] = {
    "map": lambda hits, relevant: (_precisions(hits) * hits).sum(1) / np.minimum(relevant, hits.shape[1]),
    "paper_map": lambda hits, relevant: _precisions(hits).mean(1),
    "precision": lambda hits, relevant: hits.mean(1),
    "recall": lambda hits, relevant: hits.sum(1) / relevant,
    "ndcg": _ndcg,
    "hit": lambda hits, relevant: np.asarray(hits.any(1), np.float64),
    "mrr": lambda hits, relevant: np.where(hits.any(1), 1 / (hits.argmax(1) + 1), 0.0),
}
OF_LISTS = ("novelty", "diversity")
OF_ITEMS: dict[str, Callable[[NDArray[np.int64]], float]] = {"coverage": coverage, "gini": gini}
OF_RANKINGS = ("auc", "mrr")  # of all items, without a K
LOWER_IS_BETTER = ("gini",)
_ALIASES = {"hr": "hit", "hit_rate": "hit"}
_NAMES = (*AT_K, "psp", *OF_LISTS, *OF_ITEMS)
KNOWN = (*(f"{name}@K" for name in (*_NAMES, *_ALIASES)), *OF_RANKINGS)


@dataclass(frozen=True)
class Metric:
    """A requested metric."""

    name: str  # as given by the caller, and the key of the result
    kind: str
    k: int  # 0 if the whole ranking counts


def to_maximise(name: object) -> str:
    """Check that larger values of a metric are better, for early stopping and searches, and return its name."""
    if not isinstance(name, str):
        check.fail("metric", repr(name), "one metric, such as 'recall@20'")
    (metric,) = parse(name, "metric")
    if metric.kind in LOWER_IS_BETTER:
        check.fail("metric", repr(name), "a metric for which higher is better, such as 'recall@20'")
    return name


def parse(metrics: str | Sequence[str], argument: str = "metrics") -> list[Metric]:
    """Parse names of metrics such as ``"recall@20"``; the error for an unknown name lists all metrics."""
    parsed = []
    for name in [metrics] if isinstance(metrics, str) else check.listed(argument, metrics, "names"):
        match = re.fullmatch(r"([a-z_]+)@([1-9][0-9]*)", name) if isinstance(name, str) else None
        kind = _ALIASES.get(match[1], match[1]) if match else None
        if isinstance(name, str) and name in OF_RANKINGS:
            parsed.append(Metric(name, name, 0))
        elif match and kind in _NAMES:
            if kind == "diversity" and match[2] == "1":
                check.fail(argument, repr(name), "diversity@2 or more: a list of 1 has no pairs of items")
            parsed.append(Metric(name, kind, int(match[2])))
        else:
            check.fail(argument, repr(name), "names such as 'recall@20', of " + ", ".join(KNOWN))
    if not parsed:
        check.fail(argument, "none", "at least one of " + ", ".join(KNOWN))
    return parsed

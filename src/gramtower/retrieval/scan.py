"""Compiled passes over scores for CPUs (numba): lists of the k best of each row, and counts for the AUC.

Each row keeps a buffer of a little more than 2k candidates. A vector comparison tests whether any of 64 scores is above
a bound that k candidates are above. That is rare, and only then a second one finds which, as the bits of one number. A
full buffer is reduced to a little more than its k best, and its bound is raised: about log2(n / k) times per row, so
that the cost beyond one pass over the scores is O(k log(n / k)) per row. Columns come in increasing order and stay in
it, so that an equal score at a later column never enters: ties go to the smaller column.

The results are the same as those of topk.best_torch and metrics.definitions.above_torch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util.compiled import compiled
from gramtower._util.host import parallel_for

_TOGETHER = 64  # scores compared before a branch


def above(scores: Tensor, offsets: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same as metrics.definitions.above; columns[offsets[i]:offsets[i + 1]] are relevant to row i."""
    counts, array = np.empty(len(columns)), scores.numpy()
    parallel_for(lambda first, last: _above(first, last, array, offsets, columns, counts), tasks(len(scores)))
    return counts


def tasks(rows: int) -> list[int]:
    """Even ranges of rows, a few for each thread."""
    return [int(bound) for bound in np.linspace(0, rows, min(rows, 8 * torch.get_num_threads()) + 1)]


@compiled(inline="always")
def leave_out(row, offset, place, end, excluded, denied):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Set a row's scores at ``denied`` and at excluded[place:end] to −inf; return the first place after its columns."""
    for j in denied:
        row[j - offset] = -np.inf
    while place < end and excluded[place] < offset + row.shape[0]:
        row[excluded[place] - offset] = -np.inf
        place += 1
    return place


@compiled(inline="always")
def _ranks(row, s):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The number of scores above s, and of those not below s."""
    higher, not_below = np.int32(0), np.int32(0)
    for j in range(row.shape[0]):
        higher += np.int32(row[j] > s)
        not_below += np.int32(row[j] >= s)
    return np.int64(higher), np.int64(not_below)


@compiled(nogil=True)
def _above(first, last, scores, offsets, columns, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    for i in range(first, last):
        row = scores[i]
        relevant = np.empty(offsets[i + 1] - offsets[i], np.float32)
        for e in range(len(relevant)):
            relevant[e] = row[columns[offsets[i] + e]]
        ordered = np.sort(relevant)
        for e in range(len(relevant)):
            s = relevant[e]
            higher, not_below = _ranks(row, s)
            higher -= len(relevant) - np.searchsorted(ordered, s, "right")
            not_below -= len(relevant) - np.searchsorted(ordered, s)
            counts[offsets[i] + e] = 0.5 * (higher + not_below)


_SEQUENCE = np.uint64(0x03F79D71B4CB0A89)  # de Bruijn sequence: shifted by any l, its six highest bits are different
_PLACES = np.empty(64, np.int64)  # l by these bits, which gives the place of a power of two by a product and a lookup
_PLACES[[(0x03F79D71B4CB0A89 << l & 2**64 - 1) >> 58 for l in range(64)]] = np.arange(64)
_SPARE = 16  # places of a buffer beyond 2k
_TRIED = 12  # candidates that are tried as the next bound


class BestLists:
    """Candidates for the k best of each row: columns, scores, their number, and the bound for later scores."""

    def __init__(self, rows: int, k: int) -> None:
        places = 2 * k + _SPARE + _TOGETHER
        self.k = k
        self.columns, self.values = np.empty((rows, places), np.int64), np.empty((rows, places), np.float32)
        self.counts, self.bounds = np.zeros(rows, np.int64), np.full(rows, -np.inf, np.float32)

    def add(self, scores: NDArray[np.float32], offset: int, *left_out: NDArray[np.signedinteger]) -> None:
        """Add scores of the columns from ``offset`` on to the lists of their rows; earlier columns must come first.

        ``left_out`` are places, ends, excluded and denied: the scores of the columns excluded[places[i]:ends[i]] of row
        i, and of ``denied``, become −inf first; both are increasing. places[i] moves past the given columns.
        """
        _add(scores, offset, self.k, self.columns, self.values, self.counts, self.bounds, *left_out)

    def finished(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Columns and scores, best first; −1 and −inf if there are fewer than k."""
        shape = len(self.counts), self.k
        columns, values = np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32)
        _finish(self.columns, self.values, self.counts, columns, values)
        return columns, values


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same as topk.best, for k of at most some hundreds, because the best are sorted by insertion."""
    rows = len(scores)
    columns, values = np.empty((rows, k), np.int64), np.empty((rows, k), np.float32)
    array, none, nothing = scores.numpy(), np.zeros(rows, np.int64), np.empty(0, np.int32)

    def work(first: int, last: int) -> None:
        part, lists = slice(first, last), BestLists(last - first, k)
        lists.add(array[part], 0, none[part], none[part], nothing, nothing)
        columns[part], values[part] = lists.finished()

    parallel_for(work, tasks(rows))
    return torch.from_numpy(columns), torch.from_numpy(values)


@compiled()
def _kth(work, k):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The k-th largest number, by Hoare's selection, which changes the order of ``work``."""
    low, high, place = 0, work.shape[0] - 1, k - 1
    while low < high:
        pivot, i, j = work[(low + high) // 2], low, high
        while i <= j:
            while work[i] > pivot:
                i += 1
            while work[j] < pivot:
                j -= 1
            if i <= j:
                work[i], work[j] = work[j], work[i]
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return work[place]


@compiled()
def _keep(c, v, k):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Keep the k best of more candidates, in their order; return the least of them."""
    least, above = _kth(v.copy(), k), 0
    for e in range(v.shape[0]):
        above += v[e] > least
    equal, p = k - above, 0
    for e in range(v.shape[0]):
        if v[e] > least or (v[e] == least and equal > 0):
            equal -= v[e] == least
            v[p], c[p] = v[e], c[e]
            p += 1
    return least


@compiled()
def _cut(c, v, k):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Keep k to 3k/2 of more than 2k candidates in their order; return how many, and the bound for later scores.

    The bound is the highest of a few candidates that k others are above: counting is a vector operation, while an exact
    selection is a chain of branches. The exact selection is used only if many scores are equal.
    """
    bound, kept = np.float32(-np.inf), np.int32(v.shape[0])
    for e in range(0, v.shape[0], max(1, v.shape[0] // _TRIED)):
        if v[e] > bound:
            above = np.int32(0)
            for l in range(v.shape[0]):
                above += np.int32(v[l] > v[e])
            if above >= k:
                bound, kept = v[e], above
    if kept > k + k // 2:
        return k, _keep(c, v, k)
    p = 0
    for e in range(v.shape[0]):
        s = v[e]
        v[p], c[p] = s, c[e]
        p += 1 if s > bound else 0  # without a branch
    return p, bound


@compiled(nogil=True)
def _add(scores, offset, k, columns, values, counts, bounds, places, ends, excluded, denied):  # type: ignore[no-untyped-def]  # pragma: no cover
    width, full = scores.shape[1], values.shape[1] - _TOGETHER
    vectorised = width - width % _TOGETHER
    first, last = np.searchsorted(denied, offset), np.searchsorted(denied, offset + width)
    for i in range(scores.shape[0]):
        row, c, v = scores[i], columns[i], values[i]
        places[i] = leave_out(row, offset, places[i], ends[i], excluded, denied[first:last])
        count, bound = counts[i], bounds[i]
        for start in range(0, vectorised, _TOGETHER):
            part, any_above = row[start : start + _TOGETHER], np.uint8(0)
            for l in range(_TOGETHER):
                any_above |= np.uint8(part[l] > bound)
            if any_above != 0:
                mask = np.uint64(0)
                for l in range(_TOGETHER):
                    mask |= np.uint64(part[l] > bound) << np.uint64(l)
                while mask != 0:
                    lowest = mask & (~mask + np.uint64(1))
                    l = _PLACES[np.int64((lowest * _SEQUENCE) >> np.uint64(58))]
                    v[count], c[count] = part[l], offset + start + l
                    count += 1
                    mask ^= lowest
                if count >= full:
                    count, bound = _cut(c[:count], v[:count], k)
        for l in range(vectorised, width):
            if row[l] > bound:
                v[count], c[count] = row[l], offset + l
                count += 1
        if count >= full:
            count, bound = _cut(c[:count], v[:count], k)
        counts[i], bounds[i] = count, bound


@compiled(nogil=True)
def _finish(columns, values, counts, best_columns, best_values):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Sort each row's k best candidates; equal scores stay in order of columns."""
    k = best_columns.shape[1]
    for i in range(columns.shape[0]):
        c, v, count = columns[i, : counts[i]], values[i, : counts[i]], counts[i]
        if count > k:
            _keep(c, v, k)
        for e in range(min(count, k)):
            s, j, p = v[e], c[e], e
            while p > 0 and best_values[i, p - 1] < s:
                best_values[i, p], best_columns[i, p] = best_values[i, p - 1], best_columns[i, p - 1]
                p -= 1
            best_values[i, p], best_columns[i, p] = s, j

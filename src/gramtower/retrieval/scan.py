"""Passes over scores for CPUs, compiled by numba: top K, and counts for the AUC.

Top K of short lists: each row keeps its k best so far in order. A vector comparison asks of 64 scores at a time whether
any is above the least of them, which after the first few columns is seldom so; only then are the 64 looked at one by
one. Columns come in increasing order, so that an equal score at a later column never enters: ties go to the smaller
column.

Same answers as select.best_torch and ranks.above_torch: tests/test_topk.py, tests/test_metrics.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util.compiled import compiled
from gramtower._util.torch_runtime import parallel_for

_TOGETHER = 64  # scores compared before a branch


class ShortLists:
    """The k best of each row so far, kept sorted, which pays for k of a few dozen; long_lists.py is for more."""

    def __init__(self, rows: int, k: int) -> None:
        self.columns, self.values = np.full((rows, k), -1, np.int64), np.full((rows, k), -np.inf, np.float32)

    def add(self, scores: NDArray[np.float32], offset: int, *left_out: NDArray[Any]) -> None:
        """Put scores of the columns from ``offset`` on into the lists of their rows; earlier columns came before.

        ``left_out`` are places, ends, excluded and denied: columns excluded[places[i]:ends[i]] of row i, and those of
        ``denied``, become −inf first; both increase. places[i] moves on past the columns given.
        """
        _update_lists(scores, offset, self.columns, self.values, *left_out)

    def finished(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Columns and scores, best first; −1 and −inf where there are fewer than k."""
        return self.columns, self.values


def above(scores: Tensor, offsets: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float64]:
    """See ranks.above; columns[offsets[i]:offsets[i + 1]] are relevant to row i."""
    counts, array = np.empty(len(columns)), scores.numpy()
    parallel_for(lambda first, last: _above(first, last, array, offsets, columns, counts), tasks(len(scores)))
    return counts


def tasks(rows: int) -> list[int]:
    """Even ranges of rows, a few for each thread."""
    return [int(bound) for bound in np.linspace(0, rows, min(rows, 8 * torch.get_num_threads()) + 1)]


@compiled(inline="always")
def _enter(c, v, s, j):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Put score s at column j into a list, behind all that are not below it; the last one leaves."""
    p = v.shape[0] - 1
    while p > 0 and v[p - 1] < s:
        v[p], c[p] = v[p - 1], c[p - 1]
        p -= 1
    v[p], c[p] = s, j


@compiled(inline="always")
def leave_out(row, offset, place, end, excluded, denied):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Make −inf of a row's scores at ``denied`` and at excluded[place:end], up to its last column; the place after."""
    for j in denied:
        row[j - offset] = -np.inf
    while place < end and excluded[place] < offset + row.shape[0]:
        row[excluded[place] - offset] = -np.inf
        place += 1
    return place


@compiled(nogil=True)
def _update_lists(scores, offset, columns, values, places, ends, excluded, denied):  # type: ignore[no-untyped-def]  # pragma: no cover
    """See ShortLists.add."""
    width, k = scores.shape[1], values.shape[1]
    vectorised = width - width % _TOGETHER
    first, last = np.searchsorted(denied, offset), np.searchsorted(denied, offset + width)
    for i in range(scores.shape[0]):
        row, c, v = scores[i], columns[i], values[i]
        places[i] = leave_out(row, offset, places[i], ends[i], excluded, denied[first:last])
        for start in range(0, vectorised, _TOGETHER):
            least, any_above = v[k - 1], np.uint8(0)
            for l in range(start, start + _TOGETHER):
                any_above |= np.uint8(row[l] > least)
            if any_above != 0:
                for l in range(start, start + _TOGETHER):
                    if row[l] > v[k - 1]:
                        _enter(c, v, row[l], offset + l)
        for l in range(vectorised, width):
            if row[l] > v[k - 1]:
                _enter(c, v, row[l], offset + l)


@compiled(inline="always")
def _ranks(row, s):  # type: ignore[no-untyped-def]  # pragma: no cover
    """How many scores are above s, and how many are not below it."""
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

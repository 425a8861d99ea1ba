"""Passes over rows of scores for CPUs, compiled by numba and run on plain threads: top K, and counts for the AUC.

Top K: the columns are put into groups and one vector pass finds the maximum of each. The k-th largest maximum is a
lower bound of the k-th best score, because k groups reach it; so only the groups that reach it, about k, are looked at
score by score. A group is every 64th column of 4096, so that 64 maxima move along the row side by side.

Same answers as select.best_torch and ranks.above_torch: tests/test_topk.py, tests/test_metrics.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from gramtower.kernels.threads import share_out

_LANES = 64  # groups side by side
_DEPTH = 64  # columns in a group
_ROWS = 4  # rows read at once


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See select.best; for k of at most a few hundred, because the best so far are kept sorted."""
    rows = len(scores)
    columns, values = torch.empty((rows, k), dtype=torch.int64), torch.empty((rows, k), dtype=torch.float32)
    given, into, best_so_far = scores.numpy(), columns.numpy(), values.numpy()
    share_out(lambda first, last: _best(first, last, given, into, best_so_far), _tasks(rows))
    return columns, values


def above(scores: Tensor, offsets: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float64]:
    """See ranks.above; columns[offsets[i]:offsets[i + 1]] are relevant to row i."""
    counts, given = np.empty(len(columns)), scores.numpy()
    share_out(lambda first, last: _above(first, last, given, offsets, columns, counts), _tasks(len(scores)))
    return counts


def _tasks(rows: int) -> list[int]:
    """Even ranges of rows, a few for each thread."""
    return [int(bound) for bound in np.linspace(0, rows, min(rows, 8 * torch.get_num_threads()) + 1)]


@njit(inline="always")
def _before(s, j, t, l):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Does score s at column j come before score t at column l?"""
    return s > t or (s == t and j < l)


@njit(inline="always")
def _group_maxima(rows, maxima):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Of a few rows side by side, because memory answers several streams faster than one."""
    n = rows.shape[1]
    maxima[:] = -np.inf
    for c in range(maxima.shape[1] // _LANES):
        for d in range(_DEPTH):
            start = (c * _DEPTH + d) * _LANES
            for r in range(rows.shape[0]):
                m = maxima[r, c * _LANES : (c + 1) * _LANES]
                if start + _LANES <= n:
                    part = rows[r, start : start + _LANES]
                    for l in range(_LANES):
                        m[l] = part[l] if part[l] > m[l] else m[l]
                else:
                    for j in range(start, n):
                        m[j - start] = rows[r, j] if rows[r, j] > m[j - start] else m[j - start]


@njit(inline="always")
def _kth_largest(numbers, space):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The k-th largest number, k the length of the space it may use; −inf if there are fewer above that."""
    k, filled, least = space.shape[0], 0, np.float32(-np.inf)
    for e in range(numbers.shape[0]):
        s = numbers[e]
        if s > least:
            p = min(filled, k - 1)
            while p > 0 and space[p - 1] < s:
                space[p] = space[p - 1]
                p -= 1
            space[p] = s
            filled = min(filled + 1, k)
            if filled == k:
                least = space[k - 1]
    return least


@njit(nogil=True, cache=True)
def _best(first, last, scores, columns, values):  # type: ignore[no-untyped-def]  # pragma: no cover
    n, k, chunk = scores.shape[1], values.shape[1], _LANES * _DEPTH
    several = np.empty((_ROWS, -(-n // chunk) * _LANES), np.float32)
    for i in range(first, last):
        row, v, c, maxima = scores[i], values[i], columns[i], several[(i - first) % _ROWS]
        if (i - first) % _ROWS == 0:
            _group_maxima(scores[i : min(i + _ROWS, last)], several)
        bound = _kth_largest(maxima, v)
        filled = 0
        for g in range(len(maxima)):
            if maxima[g] < bound or maxima[g] == -np.inf:
                continue
            start = g // _LANES * chunk
            for j in range(start + g % _LANES, min(n, start + chunk), _LANES):
                s = row[j]
                if s < bound or not s > -np.inf or (filled == k and not _before(s, j, v[k - 1], c[k - 1])):
                    continue
                p = min(filled, k - 1)
                while p > 0 and _before(s, j, v[p - 1], c[p - 1]):
                    v[p], c[p] = v[p - 1], c[p - 1]
                    p -= 1
                v[p], c[p] = s, j
                filled = min(filled + 1, k)
        v[filled:], c[filled:] = -np.inf, -1


@njit(inline="always")
def _ranks(row, s):  # type: ignore[no-untyped-def]  # pragma: no cover
    """How many scores are above s, and how many are not below it."""
    higher, not_below = np.int32(0), np.int32(0)
    for j in range(row.shape[0]):
        higher += np.int32(row[j] > s)
        not_below += np.int32(row[j] >= s)
    return np.int64(higher), np.int64(not_below)


@njit(nogil=True, cache=True)
def _above(first, last, scores, offsets, columns, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    for i in range(first, last):
        row = scores[i]
        own = np.empty(offsets[i + 1] - offsets[i], np.float32)
        for e in range(len(own)):
            own[e] = row[columns[offsets[i] + e]]
        ordered = np.sort(own)
        for e in range(len(own)):
            s = own[e]
            higher, not_below = _ranks(row, s)
            higher -= len(own) - np.searchsorted(ordered, s, "right")
            not_below -= len(own) - np.searchsorted(ordered, s)
            counts[offsets[i] + e] = 0.5 * (higher + not_below)

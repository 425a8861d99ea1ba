"""Rows of (left, right, label, weight, time) → one CSR matrix without duplicates.

One sort of 64-bit keys, which numpy does with vector instructions, puts the rows in order of (left, right) and, where
there are numbers to carry along, of their place in the file. Then rows of the same pair are merged by a rule.
O(rows log rows) time. Many rows are handed to data/grouping.py, which does the same on all cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host

_MANY, _PIECE = 1 << 22, 1 << 20  # rows from which on all cores are used, and of a piece that one of them takes
RULES = ("max", "sum", "first", "last", "error")


def ordered(
    rows: NDArray[Any], columns: NDArray[Any], bits: int, places: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Sorted keys row · 2^bits + column, duplicates kept, and with ``places`` the input position of each.

    The sort is stable: positions are sorted along as low bits where that fits into 63 bits.
    """
    keys = rows.astype(np.int64)
    keys <<= bits
    keys |= columns
    if not places:
        keys.sort()
        return keys, None
    low = max(1, len(keys) - 1).bit_length()
    if int(keys.max(initial=0)).bit_length() + low > 63:
        order = np.argsort(keys, kind="stable")
        return keys[order], order
    keys <<= low
    keys |= np.arange(len(keys))
    keys.sort()
    order = keys & ((1 << low) - 1)
    keys >>= low
    return keys, order


def merge(
    rows: NDArray[Any],
    columns: NDArray[Any],
    shape: tuple[int, int],
    labels: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    times: NDArray[Any] | None,
    rule: str,
) -> tuple[sp.csr_matrix, NDArray[np.float32] | None, NDArray[np.float64] | None, int]:
    """The matrix of labels (1 where ``labels`` is None), its weights and times, and how many rows were merged away."""
    if len(rows) < _MANY or not host.has_numba():
        return ordered_merge(rows, columns, shape, labels, weights, times, rule)
    from gramtower.data.grouping import Piece, group  # compiled by numba, which is not worth it for few rows

    numbers = {"value": labels, "weight": weights, "time": times}
    spans = [slice(start, start + _PIECE) for start in range(0, len(rows), _PIECE)]
    pieces = [Piece(rows[s], columns[s], {k: v[s] for k, v in numbers.items() if v is not None}) for s in spans]
    return group(pieces, shape, rule)


def ordered_merge(
    rows: NDArray[Any],
    columns: NDArray[Any],
    shape: tuple[int, int],
    labels: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    times: NDArray[Any] | None,
    rule: str,
) -> tuple[sp.csr_matrix, NDArray[np.float32] | None, NDArray[np.float64] | None, int]:
    """The same as :func:`merge`, by one sort of all rows in one thread."""
    bits = max(1, shape[1] - 1).bit_length()
    numbers = (labels, weights, times)
    keys, order = ordered(rows, columns, bits, places=any(array is not None for array in numbers))
    fresh = np.ones(len(keys), dtype=bool)  # whether an entry is the first of its pair
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    repeated = len(keys) - int(np.count_nonzero(fresh))
    if repeated and rule == "error":
        row, column = divmod(int(keys[np.argmin(fresh)]), 1 << bits)
        check.fail("duplicates", f"{repeated} rows that repeat a pair, first {(row, column)}", "none")
    starts = np.flatnonzero(fresh) if repeated and order is not None else None
    if repeated:
        keys = keys[fresh]
    if order is None:
        merged: list[NDArray[Any] | None] = [None] * 3
    elif starts is None:
        merged = [None if array is None else array[order] for array in numbers]
    elif rule in ("first", "last"):
        chosen = _chosen(order, fresh, starts, times, rule)
        merged = [None if array is None else array[chosen] for array in numbers]
    else:
        add = np.maximum if rule == "max" else np.add
        reductions = (add, add, np.maximum)  # of several times the latest
        merged = [
            None if array is None else reduction.reduceat(array[order], starts)
            for array, reduction in zip(numbers, reductions, strict=True)
        ]
    values, kept, stamps = merged
    values = np.ones(len(keys), np.float32) if values is None else values.astype(np.float32)
    matrix = _matrix(keys, values, bits, shape)
    kept = None if kept is None else kept.astype(np.float32)
    stamps = None if stamps is None else stamps.astype(np.float64)
    return matrix, kept, stamps, repeated


def _matrix(keys: NDArray[np.int64], values: NDArray[np.float32], bits: int, shape: tuple[int, int]) -> sp.csr_matrix:
    index = np.int32 if max(len(keys), *shape) < 2**31 - 1 else np.int64
    offsets = np.searchsorted(keys, np.arange(shape[0] + 1) << bits).astype(index)
    found = np.empty(len(keys), dtype=index)
    np.bitwise_and(keys, (1 << bits) - 1, out=found, casting="unsafe")
    return sp.csr_matrix((values, found, offsets), shape=shape)


def _chosen(
    order: NDArray[Any], fresh: NDArray[Any], starts: NDArray[Any], times: NDArray[Any] | None, rule: str
) -> NDArray[Any]:
    """For each pair, the place of its first or last row: by time where there are times, then by place."""
    if times is not None:
        order = order[np.lexsort((times[order], np.cumsum(fresh)))]  # lexsort is stable: equal times keep their places
    at = starts if rule == "first" else np.append(starts[1:], len(order)) - 1
    return np.asarray(order[at])

"""Rows of (left, right, label, weight, time) → one CSR matrix without duplicates.

Two counting passes put the rows in order of (left, right, place in the file): O(rows + m + n) time, no comparison
sort. Then rows of the same pair are merged by a rule. Checked by tests/test_interactions.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check

RULES = ("max", "sum", "first", "last", "error")


def ordered(rows: NDArray[Any], columns: NDArray[Any], shape: tuple[int, int]) -> sp.csr_matrix:
    """CSR of all entries, duplicates kept, whose values are the places the entries came from.

    Entries of a row are in order of column, those of one pair in order of place.
    """
    total = len(rows)
    index = np.int32 if max(total, *shape) < 2**31 - 1 else np.int64
    single = (np.zeros(total, np.int8), columns.astype(index, copy=False), np.arange(total + 1, dtype=index))
    by_column = sp.csr_matrix(single, shape=(total, shape[1])).tocsc()  # a counting pass: stable in place
    del single
    place, offsets = by_column.indices, by_column.indptr
    del by_column
    return sp.csc_matrix((place, rows[place].astype(index, copy=False), offsets), shape=shape).tocsr()


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
    places = ordered(rows, columns, shape)
    order, offsets, found = places.data, places.indptr, places.indices
    del places
    fresh = np.ones(len(order), dtype=bool)  # whether an entry is the first of its pair
    np.not_equal(found[1:], found[:-1], out=fresh[1:])
    fresh[offsets[:-1][np.diff(offsets) > 0]] = True
    repeated = len(order) - int(fresh.sum())
    if repeated and rule == "error":
        second = int(np.argmin(fresh))
        row = int(np.searchsorted(offsets, second, side="right")) - 1
        check.fail("duplicates", f"{repeated} rows that repeat a pair, first {(row, int(found[second]))}", "none")
    if not repeated:
        values = np.ones(len(order), np.float32) if labels is None else labels[order].astype(np.float32)
        kept = None if weights is None else weights[order].astype(np.float32)
        stamps = None if times is None else times[order].astype(np.float64)
        return sp.csr_matrix((values, found, offsets), shape=shape), kept, stamps, 0
    starts = np.flatnonzero(fresh)
    if rule in ("first", "last"):
        chosen = _chosen(order, fresh, starts, times, rule)
        values = np.ones(len(starts), np.float32) if labels is None else labels[chosen].astype(np.float32)
        kept = None if weights is None else weights[chosen].astype(np.float32)
        stamps = None if times is None else times[chosen].astype(np.float64)
    else:
        reduce = np.maximum.reduceat if rule == "max" else np.add.reduceat
        one = np.ones(len(starts), np.float32)
        values = one if labels is None else reduce(labels[order], starts).astype(np.float32)
        kept = None if weights is None else reduce(weights[order], starts).astype(np.float32)
        stamps = None if times is None else np.maximum.reduceat(times[order], starts).astype(np.float64)
    before = np.concatenate([[0], np.cumsum(fresh)])
    merged = (values, found[starts], before[offsets].astype(offsets.dtype))
    return sp.csr_matrix(merged, shape=shape), kept, stamps, repeated


def _chosen(
    order: NDArray[Any], fresh: NDArray[Any], starts: NDArray[Any], times: NDArray[Any] | None, rule: str
) -> NDArray[Any]:
    """For each pair, the place of its first or last row: by time where there are times, then by place."""
    if times is not None:
        order = order[np.lexsort((times[order], np.cumsum(fresh)))]  # lexsort is stable: equal times keep their places
    at = starts if rule == "first" else np.append(starts[1:], len(order)) - 1
    return np.asarray(order[at])

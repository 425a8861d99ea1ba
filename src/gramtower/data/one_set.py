"""Whether both sides of pairs are one set of entities, such as packages that depend on packages, told from the data.

They are if at least half of the smaller side's ids are on the other side too and, if these were ids of different
things, such as users and films that are both numbered from 1, at least twenty pairs would be expected to have the same
id twice, of which there are not a tenth. Cost: O(ids + pairs), and an index of the smaller side's ids, which is not
kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower.data.lookup import index_of, join

_EXPECTED = 20  # pairs of an id with itself in data of two different sets; then a tenth or less has odds of 10⁻⁶
_ROWS = 1 << 16  # left rows that are looked at together


def are_one_set(matrix: sp.csr_matrix, left_ids: NDArray[Any], right_ids: NDArray[Any]) -> bool:
    """Whether the ids of both sides are those of one set; see the module."""
    rows = _same(left_ids, right_ids)
    columns = np.flatnonzero(rows >= 0)
    if 2 * len(columns) < max(1, min(matrix.shape)):
        return False
    left, right = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    chances = left[rows[columns]].astype(np.float64) * right[columns] / max(1, matrix.nnz)
    expected = float(np.minimum(chances, 1.0).sum())
    if expected < _EXPECTED:
        return False
    found = sum(_with_itself(matrix, rows, start, start + _ROWS) for start in range(0, len(left), _ROWS))
    return found <= 0.1 * expected


def _same(left_ids: NDArray[Any], right_ids: NDArray[Any]) -> NDArray[np.int64]:
    """The left row of each right id, −1 where it is not on the left."""
    if len(left_ids) <= len(right_ids):
        return join(right_ids, index_of(left_ids))
    columns = join(left_ids, index_of(right_ids))
    there = np.flatnonzero(columns >= 0)
    rows = np.full(len(right_ids), -1, dtype=np.int64)
    rows[columns[there]] = there
    return rows


def _with_itself(matrix: sp.csr_matrix, same: NDArray[np.int64], first: int, last: int) -> int:
    """How many pairs of some rows are of an entity with itself; ``same`` is the row of each column's entity."""
    offsets, columns = matrix.indptr[first : last + 1], matrix.indices
    rows = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
    return int((same[columns[offsets[0] : offsets[-1]]] == rows).sum())

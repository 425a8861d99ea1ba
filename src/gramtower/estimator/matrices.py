"""Pairs as matrices in the order of a model's ids: what goes into fit and evaluate."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions


def history_features(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """Each row's observed columns with equal values and length one."""
    counts = np.diff(matrix.indptr)
    values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
    return sp.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)


def matrix_and_ids(pairs: Any) -> tuple[sp.csr_matrix, tuple[NDArray[Any] | None, NDArray[Any] | None]]:
    """The matrix of Interactions or of a sparse matrix, and the ids of its rows and columns if it has any."""
    if isinstance(pairs, Interactions):
        return pairs.matrix, (pairs.left_ids, pairs.right_ids)
    if sp.issparse(pairs):
        return sp.csr_matrix(pairs), (None, None)
    check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")


def aligned(
    name: str, test: Any, ids: tuple[NDArray[Any] | None, NDArray[Any] | None], shape: tuple[int, int]
) -> sp.csr_matrix:
    """Held-out pairs in the model's row numbers; pairs of unknown entities cannot be ranked and are left out."""
    matrix, test_ids = matrix_and_ids(test)
    if ids[0] is None or ids[1] is None:
        if matrix.shape != shape:
            check.fail(name, f"shape {matrix.shape}", f"shape {shape}, as in training")
        return matrix
    if test_ids[0] is None or test_ids[1] is None:
        check.fail(name, "a matrix without ids", "gramtower.Interactions, as in training")
    rows, columns = (
        row_map(known, new, len(known), len(new)) for known, new in ((ids[0], test_ids[0]), (ids[1], test_ids[1]))
    )
    coo = matrix.tocoo()
    i, j = rows[coo.row], columns[coo.col]
    keep = (i >= 0) & (j >= 0)
    return sp.csr_matrix((coo.data[keep], (i[keep], j[keep])), shape=shape)


def row_map(known: NDArray[Any] | None, new: NDArray[Any] | None, known_rows: int, new_rows: int) -> NDArray[np.int64]:
    """For each new row the row of the same id in the known order, or −1."""
    if known is None or new is None:
        numbers = np.arange(new_rows)
        return np.where(numbers < known_rows, numbers, -1)
    places = {key: row for row, key in enumerate(known.tolist())}
    return np.array([places.get(key, -1) for key in new.tolist()], dtype=np.int64)

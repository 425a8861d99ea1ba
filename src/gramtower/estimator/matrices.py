"""Pairs as matrices in the order of a model's ids: what goes into fit and evaluate."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.left_out import warn_of_pairs
from gramtower.data.lookup import index_of, join
from gramtower.data.matrices import checked


def history_features(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """Each row's observed columns with equal values and length one."""
    counts = np.diff(matrix.indptr)
    values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
    return sp.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)


def pattern_of(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """A copy of a matrix's pattern, with ones for values."""
    ones = np.ones(len(matrix.indices), dtype=np.float32)
    return sp.csr_matrix((ones, matrix.indices.copy(), matrix.indptr.copy()), shape=matrix.shape)


def matrix_and_ids(
    pairs: Any, name: str = "pairs"
) -> tuple[sp.csr_matrix, tuple[NDArray[Any] | None, NDArray[Any] | None]]:
    """The matrix of Interactions or of a sparse matrix, and the ids of its rows and columns if it has any."""
    if isinstance(pairs, Interactions):
        return pairs.matrix, (pairs.left_ids, pairs.right_ids)
    if sp.issparse(pairs):
        return sp.csr_matrix(checked(name, pairs)), (None, None)
    check.fail(name, type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")


def aligned(
    name: str,
    test: Any,
    ids: tuple[NDArray[Any] | None, NDArray[Any] | None],
    shape: tuple[int, int],
    every: bool = True,
) -> sp.csr_matrix:
    """Held-out pairs in the model's row numbers; pairs of unknown entities cannot be ranked and are left out.

    Args:
        name: of the argument, for errors and warnings.
        test: the pairs.
        ids: of the model.
        shape: of the model.
        every: whether ``ids`` are those of all processes; then pairs that are left out are warned of, and it is an
            error if all are.
    """
    matrix, test_ids = matrix_and_ids(test, name)
    if ids[0] is None or ids[1] is None:
        if matrix.shape != shape:
            check.fail(name, f"shape {matrix.shape}", f"shape {shape}, as in training")
        return matrix
    if test_ids[0] is None or test_ids[1] is None:
        check.fail(name, "a matrix without ids", "gramtower.Interactions, as in training")
    known, given = (ids[0], ids[1]), (test_ids[0], test_ids[1])
    rows, columns = join(given[0], index_of(known[0])), join(given[1], index_of(known[1]))
    coo = matrix.tocoo()
    i, j = rows[coo.row], columns[coo.col]
    keep = (i >= 0) & (j >= 0)
    lost = int(len(keep) - keep.sum())
    if every and lost:
        entry = int(np.argmin(keep))
        side, place = (0, coo.row[entry]) if i[entry] < 0 else (1, coo.col[entry])
        example = given[side].tolist()[place]
        if lost == len(keep):
            shown = f"{lost:,} pairs, none of them with two known ids ({example!r} is not known)"
            such = f", with ids such as {known[side].tolist()[0]!r}" if len(known[side]) else ""
            check.fail(name, shown, f"pairs of entities of the model{such}")
        warn_of_pairs(name, lost, len(keep), example)
    return sp.csr_matrix((coo.data[keep], (i[keep], j[keep])), shape=shape)


def known_pairs(ids: tuple[NDArray[Any] | None, NDArray[Any] | None], pairs: Interactions) -> int:
    """How many pairs have both ids among those known; None for a side whose every id will do."""
    given = (pairs.left_ids, pairs.right_ids)
    there = [
        np.ones(len(new), dtype=bool) if known is None else join(new, index_of(known)) >= 0
        for known, new in zip(ids, given, strict=True)
    ]
    coo = pairs.matrix.tocoo()
    return int((there[0][coo.row] & there[1][coo.col]).sum())


def row_map(known: NDArray[Any] | None, new: NDArray[Any] | None, known_rows: int, new_rows: int) -> NDArray[np.int64]:
    """For each new row the row of the same id in the known order, or −1."""
    if known is None or new is None:
        numbers = np.arange(new_rows)
        return np.where(numbers < known_rows, numbers, -1)
    return join(new, index_of(known))

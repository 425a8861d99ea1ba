"""Factors of single users or items while the other side stays as it is, in closed form.

    A = YᵀY + λI + Σ_j (c_j − 1) y_j y_jᵀ,   b = Σ_(c_j liked) c_j y_j,   x = A⁻¹ b

the minimiser over x of Σ_j c_j (t_j − x·y_j)² + λ‖x‖² over all items j, where c_j = 1 and t_j = 0 without an entry.
If λ = 0 and the factors do not span all dimensions, it is the shortest of the minimisers.

Cost: n k² once, then entries · k² + k³ for each row. In float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp
from numpy.typing import NDArray

Array = NDArray[np.float64]


def solve_rows(confident: sp.csr_matrix, factors: NDArray[Any], regularization: float) -> Array:
    """The best factors for each row of confidences, given those of its columns."""
    Y = factors.astype(np.float64)
    gramian = Y.T @ Y
    found = np.zeros((confident.shape[0], Y.shape[1]))
    for row in range(confident.shape[0]):
        A, b = _equations(confident, row, Y, gramian, regularization)
        if not b.any():
            continue  # nothing liked: the minimiser is 0
        if regularization > 0:
            found[row] = scipy.linalg.solve(A, b, assume_a="pos")
        else:
            found[row] = np.linalg.lstsq(A, b, rcond=None)[0]
    return found


def explained(
    confident: sp.csr_matrix, row: int, factors: NDArray[Any], regularization: float, column: int, weights: Any
) -> tuple[NDArray[np.int64], Array, Array]:
    """The score of a row and a column as a sum over the row's liked columns: y_columnᵀ A⁻¹ y_j c_j.

    Returns:
        The liked columns, what each adds, and A⁻¹, which may be given again as ``weights``.
    """
    Y = factors.astype(np.float64)
    if weights is None:
        A, _ = _equations(confident, row, Y, Y.T @ Y, regularization)
        weights = scipy.linalg.pinvh(A)
    columns, c = _row(confident, row)
    liked, c = columns[c > 0], c[c > 0]
    return liked, (Y[liked] @ (weights @ Y[column])) * c, weights


def _row(matrix: sp.csr_matrix, row: int) -> tuple[NDArray[np.int64], Array]:
    part = slice(matrix.indptr[row], matrix.indptr[row + 1])
    return matrix.indices[part], matrix.data[part]


def _equations(
    confident: sp.csr_matrix, row: int, Y: Array, gramian: Array, regularization: float
) -> tuple[Array, Array]:
    columns, c = _row(confident, row)
    own = Y[columns]
    A = gramian + (own.T * (np.abs(c) - 1.0)) @ own
    A[np.diag_indices_from(A)] += regularization
    return A, own.T @ np.maximum(c, 0.0)

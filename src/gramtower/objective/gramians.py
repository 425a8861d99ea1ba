"""Weighted Gramians AᵀDB of tall matrices (eq:gramian) with float64 accumulation over row blocks.

Each block's k × k product is made in the matrices' own precision, the blocks are added in float64: L⁻ is a
difference of large Frobenius products, so rounding that grows with the number of rows would end a line search
early. O(rows k²) time, O(k²) memory beyond one block. Checked by tests/test_gramians.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 8192


def gram(A: Tensor, B: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_i weight_i a_i b_iᵀ in float64."""
    total = torch.zeros(A.shape[1], B.shape[1], dtype=torch.float64, device=A.device)
    for start in range(0, A.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        left = A[rows] if weight is None else A[rows] * weight[rows, None]
        total += left.t() @ B[rows]
    return total


def column_sums(A: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_i weight_i a_i in float64."""
    total = torch.zeros(A.shape[1], dtype=torch.float64, device=A.device)
    for start in range(0, A.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        total += A[rows].sum(0) if weight is None else weight[rows] @ A[rows]
    return total


def square_norms(A: Tensor) -> Tensor:
    """‖a_i‖² for each row."""
    norms: Tensor = torch.linalg.vector_norm(A, dim=1)
    return norms.square()

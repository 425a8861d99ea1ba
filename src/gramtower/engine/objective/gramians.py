"""Weighted Gramians AᵀDB of tall matrices (eq:gramian) with float64 accumulation over row blocks.

L⁻ is a difference of large Frobenius products, so rounding errors that grow with the number of rows would end a line
search early. Each block's k × k product is computed in the matrices' own precision, and the blocks are added in
float64. On a CPU a block has at most 1,024 rows, because a BLAS may add the rows of a product one after the other: then
‖error‖ < 10⁻⁶ ‖AᵀDB‖ in float32 if the terms have one sign. On a GPU weighted rows take up to 256 MB in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramtower.engine.kernels import select

_ROWS = 8192
_CPU_ROWS, _FEW = 1024, 256  # a block's rows on a CPU; so few are not worth two blocks
_GPU_ROWS, _GPU_BUFFER = 2048, 1 << 24  # a GPU makes many blocks' products at once; numbers in all of them together
_WEIGHTED = 1 << 26  # numbers of weighted rows at a time


def gram(A: Tensor, B: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_i weight_i a_i b_iᵀ in float64."""
    if A.shape[0] <= _ROWS:
        return _product(A if weight is None else A * weight[:, None], B)
    shape = A.shape[1], B.shape[1]
    height = max(_GPU_ROWS, A.shape[0] * shape[0] * shape[1] // _GPU_BUFFER)
    blocks = A.shape[0] // height
    done = 0
    if A.is_cuda and blocks:
        done = blocks * height
        most = blocks if weight is None else max(1, _WEIGHTED // (height * shape[0]))
        products = A.new_empty(blocks, *shape)
        for start in range(0, blocks, most):
            stop = min(blocks, start + most)
            rows = slice(start * height, stop * height)
            left = A[rows] if weight is None else A[rows] * weight[rows, None]
            left, right = left.view(-1, height, shape[0]), B[rows].view(-1, height, shape[1])
            torch.bmm(left.transpose(1, 2), right, out=products[start:stop])
        total = select(A.device).column_sums(products.view(blocks, -1), dtype=torch.float64).view(shape)
    else:
        total = torch.zeros(shape, dtype=torch.float64, device=A.device)
    for start in range(done, A.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        left = A[rows] if weight is None else A[rows] * weight[rows, None]
        total += _product(left, B[rows])
    return total


def _product(A: Tensor, B: Tensor) -> Tensor:
    """AᵀB in float64, of so few rows that a GPU, or float64, needs no blocks."""
    if A.is_cuda or A.dtype == torch.float64 or A.shape[0] <= _FEW:
        return (A.t() @ B).double()
    blocks = 2 * -(-A.shape[0] // (2 * _CPU_ROWS))  # an even number, for the threads' sake
    height = A.shape[0] // blocks
    done = blocks * height
    left, right = (X[:done].view(blocks, height, X.shape[1]) for X in (A, B))
    total = torch.bmm(left.transpose(1, 2), right).sum(0, dtype=torch.float64)
    return total if done == A.shape[0] else total + A[done:].t() @ B[done:]


def column_sums(A: Tensor, weight: Tensor | None = None) -> Tensor:
    """Σ_i weight_i a_i in float64."""
    return select(A.device).column_sums(A, weight, torch.float64)


def square_norms(A: Tensor) -> Tensor:
    """‖a_i‖² for each row."""
    norms: Tensor = torch.linalg.vector_norm(A, dim=1)
    return norms.square()

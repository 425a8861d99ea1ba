"""Inverses of many small symmetric matrices, positive definite but for rounding, for the preconditioner.

By Cholesky in float64, all matrices of a size at once; on a GPU, which has no fast batches of larger ones, those one
by one, and it is waited for once for all of them. A matrix that Cholesky cannot factorise is inverted by its clamped
eigenvalues. Cost: O(size³) a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramtower.engine.towers.layer_factors import clamped_spectrum

_BATCHED = 128  # rows and columns up to which a GPU does a batch in the time of one
_LEAST, _TINY = 1e-15, 1e-12  # of the largest eigenvalue, or of this: what the others are clamped at


class Inverses:
    """Ask for all inverses, solve, and look each up."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []
        self._sums: list[Tensor] = []  # of all numbers that must be finite
        self._found: list[Tensor | None] = []

    def ask(self, matrix: Tensor, shift: Tensor | float, *others: Tensor) -> int:
        """Ask for (matrix + shift·I)⁻¹, of use where ``others`` are finite too; the number that it is found under."""
        damped = matrix.clone()
        damped.diagonal().add_(shift)
        self._asked.append(damped)
        self._sums.append(sum((other.sum() for other in others), matrix.sum()))
        return len(self._asked) - 1

    def __getitem__(self, number: int) -> Tensor | None:
        """The inverse; None if something was not finite."""
        return self._found[number]

    def solve(self, dtype: torch.dtype) -> None:
        """Find what was asked for, in the given dtype."""
        self._found = [None] * len(self._asked)
        batches = self._batches()
        if not batches:
            return
        matrices = [torch.stack([self._asked[i] for i in numbers]) for numbers in batches]
        tried = [torch.linalg.cholesky_ex(batch) for batch in matrices]
        sums = torch.stack([self._sums[i] for numbers in batches for i in numbers])
        flags = torch.stack([torch.cat([info for _, info in tried]) == 0, sums.isfinite()], 1).tolist()
        for numbers, batch, (factors, _) in zip(batches, matrices, tried, strict=True):
            own, flags = flags[: len(numbers)], flags[len(numbers) :]
            for i, (definite, _) in enumerate(own):
                if not definite:
                    factors[i] = torch.eye(len(factors[i]), dtype=factors.dtype, device=factors.device)
            inverses = _inverse_products(factors)
            for i, (definite, finite) in enumerate(own):
                if finite and not definite:
                    values, vectors = clamped_spectrum(batch[i])
                    inverses[i] = (vectors / values.clamp_min(max(float(values.max()), _TINY) * _LEAST)) @ vectors.mT
                self._found[numbers[i]] = inverses[i].to(dtype) if finite else None

    def _batches(self) -> list[list[int]]:
        """The numbers of matrices that are factorised together."""
        by_size: dict[int, list[int]] = {}
        for i, matrix in enumerate(self._asked):
            by_size.setdefault(len(matrix), []).append(i)
        batches: list[list[int]] = []
        for size, numbers in by_size.items():
            one_by_one = size > _BATCHED and self._asked[numbers[0]].is_cuda
            batches += [[i] for i in numbers] if one_by_one else [numbers]
        return batches


def _inverse_products(factors: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ of lower triangular L: on a GPU two kernels, where LAPACK's way is a chain of small ones."""
    if not factors.is_cuda:
        return torch.cholesky_inverse(factors)
    eye = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    inverse: Tensor = torch.linalg.solve_triangular(factors, eye.expand_as(factors), upper=False)
    return inverse.mT @ inverse

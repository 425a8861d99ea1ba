"""Kronecker factors A ⊗ S of single layers, and the sums and random vectors they are computed from.

A = Σ_i r_i x_i x_iᵀ are the moments of a layer's inputs (the bias is an input of 1), S is the curvature at its outputs;
factors.py computes them for a tower.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gramtower.data.pairs import SparseBlock


@dataclass
class Factor:
    """A ⊗ S of a weight, with its bias as one more input if A is a full matrix."""

    weight: str  # local name of the weight
    bias: str | None  # local name of the bias that A covers, or None
    inputs_first: bool  # whether the weight is stored inputs × outputs
    A: Tensor  # inputs × inputs, or its diagonal
    S: Tensor  # outputs × outputs
    mean: Tensor | None = None  # mean of A's diagonal over the rows of all processes, if A covers only local rows


@dataclass
class Factors:
    """The factors of a tower's parameters, in float64."""

    trainable: Collection[str]  # local names of the parameters to precondition
    layers: list[Factor] = field(default_factory=list)  # factors of weights
    # vectors with a full matrix: local name → (c, S), for the curvature c S. These are biases that are not part of
    # their weight's A, with c = Σ r_i, and scales of columns.
    biases: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    diagonals: dict[str, Tensor] = field(default_factory=dict)  # diagonals of all other parameters, by local name

    def add(self, weight: str, bias: str | None, inputs_first: bool, A: Tensor, S: Tensor, total: Tensor) -> None:
        """Add A ⊗ S of a layer with Σ r_i = ``total``; a diagonal A covers only the weight."""
        with_bias = bias is not None and bias in self.trainable
        if A.dim() == 1:
            if weight in self.trainable:
                self.layers.append(Factor(weight, None, inputs_first, A, S))
            if bias is not None and with_bias:
                self.add_matrix(bias, S, total)
        elif weight in self.trainable:
            inputs = len(A) if bias is None or with_bias else len(A) - 1
            self.layers.append(Factor(weight, bias if with_bias else None, inputs_first, A[:inputs, :inputs], S))
        elif bias is not None and with_bias:
            self.add_matrix(bias, S, A[-1, -1])

    def add_matrix(self, name: str, S: Tensor, count: Tensor | float = 1.0) -> None:
        """Add the curvature count·S of a vector; a vector that is used twice gets the sum."""
        if name in self.biases:
            before, other = self.biases[name]
            S, count = before * other + count * S, 1.0
        self.biases[name] = (torch.as_tensor(count, dtype=S.dtype, device=S.device), S)

    def add_diagonal(self, name: str, square: Tensor) -> None:
        """Add the diagonal of any other parameter's curvature."""
        self.diagonals[name] = self.diagonals[name] + square if name in self.diagonals else square


def outer(x: Tensor, r: Tensor, bias: bool) -> Tensor:
    """Σ r (x, 1)(x, 1)ᵀ, or without the 1, in float64."""
    weighted = x * r[:, None]
    A = (weighted.t() @ x).double()
    if not bias:
        return A
    full = torch.empty(len(A) + 1, len(A) + 1, dtype=torch.float64, device=x.device)
    full[:-1, :-1] = A
    full[-1, :-1] = full[:-1, -1] = weighted.sum(0, dtype=torch.float64)
    full[-1, -1] = r.sum(dtype=torch.float64)
    return full


def mean_column(moment: Tensor, rows: int) -> Tensor:
    """mean(x)/√c as a column, from Σ r (x, 1)(x, 1)ᵀ over ``rows`` rows, where c is the mean of the weights r."""
    return torch.as_tensor(moment[:-1, -1:] / (rows * moment[-1, -1]).clamp_min(1e-300).sqrt())


def column_squares(block: SparseBlock, r: Tensor) -> Tensor:
    """Σ_i r_i x_ij² for each feature j, in float64."""
    total = torch.zeros(block.shape[1], dtype=torch.float64, device=r.device)
    values = (block.values.square() * r[block.pattern.rows]).double()
    return total.index_add_(0, block.pattern.columns.long(), values)


@dataclass(frozen=True)
class Noise:
    """Random signs that depend only on an entity's number, not on blocks, processes or devices."""

    seed: int  # seed of the random numbers
    step: int  # number of the step that uses them
    draws: int  # number of vectors for each entity

    def rows(self, draw: int, numbers: Tensor, weight: Tensor, root: Tensor) -> Tensor:
        """Vectors with covariance w_i R Rᵀ for the entities with these numbers, in the dtype of R."""
        key = np.random.SeedSequence((self.seed, self.step, draw)).generate_state(1, np.uint64)
        columns = torch.arange(root.shape[1], device=root.device)
        bits = _mixed(_mixed(numbers.to(root.device) + (int(key[0]) >> 2))[:, None] + columns)
        signs = 1 - 2 * (bits & 1).to(root.dtype)
        return (signs @ root.t()) * weight.to(root.dtype).clamp_min(0).sqrt()[:, None]


def _mixed(x: Tensor) -> Tensor:
    """A hash of integers: two rounds of multiplications and shifts modulo 2⁶⁴."""
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def root(S: Tensor) -> Tensor:
    """R with R Rᵀ = S for a positive semidefinite S, to about ten digits, by Cholesky or eigenvalues."""
    slack = 1e-11 * S.diagonal().abs().mean() * torch.eye(len(S), dtype=S.dtype, device=S.device)
    lower, failed = torch.linalg.cholesky_ex(S + slack)
    if int(failed) == 0 and bool(lower.isfinite().all()):
        return torch.as_tensor(lower)
    values, vectors = clamped_spectrum(S)
    return torch.as_tensor(vectors * values.sqrt())


def clamped_spectrum(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix, clamped at 0, and its eigenvectors.

    If the matrix is not finite, or the eigenvalues are not found, only the diagonal is used, with 0 for entries that
    are not finite, so that there is always a preconditioner.
    """
    scale = S.abs().max()
    if bool(scale.isfinite()):
        try:
            values, vectors = torch.linalg.eigh(S / scale.clamp_min(torch.finfo(S.dtype).tiny))
            return values.clamp_min(0) * scale, vectors
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            pass
    diagonal = S.diagonal().nan_to_num(0.0, 0.0, 0.0).clamp_min(0)
    return diagonal, torch.eye(len(S), dtype=S.dtype, device=S.device)

"""The formulas of the objective over all m·n pairs, each written once, for the rows of one side.

With E the embeddings of a side (P or Q), A its weights, Ẽ its imputed factor, and the Gramians of the other side:

    side_sums         E_c = EᵀAE,  Ê_c = ẼᵀAE,  ½ Σ μ c_i ‖e_i‖²    what the value and the other side need (eq:gramian)
    output_gradient   ωA(E G_c − Ẽ Ĝ_c) + diag(μ c) E              the bracket of eq:final_grad
    output_curvature  ωA(dE G_c + E dG_c) + diag(μ c) dE           that of eq:final_Gd, along dE
    pair_moments      (1, ‖e_i‖²)                                  what the preconditioner sums over O

The terms of observed pairs (X Q, Z Q and their transposes) are in blocks.py, the loop over rows in
value_and_gradient.py. Each is O(rows k²).

Gramians AᵀDB of tall matrices (:func:`gram`) are accumulated in float64 over row blocks. L⁻ is a difference of large
Frobenius products, so rounding errors that grow with the number of rows would end a line search early. Each block's
k × k product is computed in the matrices' own precision. On a CPU a block has at most 1,024 rows, because a BLAS may
add the rows of a product one after the other: then ‖error‖ < 10⁻⁶ ‖AᵀDB‖ in float32 if the terms have one sign. On a
GPU weighted rows take up to 256 MB in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gramtower.engine.kernels import select

Part = TypeVar("Part", Tensor | float, Tensor | None)

_ROWS = 8192
_CPU_ROWS, _FEW = 1024, 256  # a block's rows on a CPU; so few are not worth two blocks
_GPU_ROWS, _GPU_BUFFER = 2048, 1 << 24  # a GPU makes many blocks' products at once; numbers in all of them together
_WEIGHTED = 1 << 26  # numbers of weighted rows at a time


@dataclass(frozen=True)
class Side:
    """One side's entities."""

    weight: Tensor | None  # a (left) or b (right), None for ones
    penalty: Tensor | None  # μ c, None without a penalty on embeddings
    # P̃ (left) or Q̃ (right), rows × r; or the one number that all rows of a rank-one factor hold
    imputed: Tensor | float

    def rows(self, start: int, stop: int) -> Side:
        """A range of the entities, as views."""
        part = slice(start, stop)
        return Side(_part(self.weight, part), _part(self.penalty, part), _part(self.imputed, part))

    def sampled(self, rows: Tensor, factor: Tensor, penalty_factor: Tensor | float) -> Side:
        """Some of the entities, with weights and penalties multiplied."""
        weight = factor if self.weight is None else factor * self.weight[rows]
        penalty = None if self.penalty is None else self.penalty[rows] * penalty_factor
        return Side(weight, penalty, _part(self.imputed, rows))

    def cross_gramian(self, embeddings: Tensor) -> Tensor:
        """P̂_c = P̃ᵀAP, r × k in float64 (eq:gramian)."""
        if isinstance(self.imputed, Tensor):
            return gram(self.imputed, embeddings, self.weight)
        return self.imputed * column_sums(embeddings, self.weight)[None, :]

    def subtract_imputed(self, matrix: Tensor, out: Tensor) -> None:
        """out −= P̃ matrix, with an r × k matrix."""
        if isinstance(self.imputed, Tensor):
            out.addmm_(self.imputed, matrix, alpha=-1.0)
        else:
            out.sub_(matrix[0], alpha=self.imputed)

    def imputed_product(self, matrix: Tensor) -> Tensor:
        """P̃ matrix with an r × k matrix: rows × k, or one row for all where they are equal."""
        return self.imputed @ matrix if isinstance(self.imputed, Tensor) else self.imputed * matrix[:1]

    def imputed_gramian(self, rows: int) -> Tensor:
        """P̃_c = P̃ᵀAP̃, r × r in float64."""
        if isinstance(self.imputed, Tensor):
            return gram(self.imputed, self.imputed, self.weight)
        total = float(rows) if self.weight is None else float(self.weight.double().sum())
        return torch.full((1, 1), self.imputed * self.imputed * total, dtype=torch.float64)


def _part(value: Part, rows: slice | Tensor) -> Part:
    """Some rows of a tensor; anything else is the same for all of them."""
    return value[rows] if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class SideSums:
    """Sums over the rows of a side, in float64."""

    gramian: Tensor  # P_c = PᵀAP, or Q_c = QᵀBQ
    cross: Tensor  # P̂_c = P̃ᵀAP, or Q̂_c = Q̃ᵀBQ
    penalty: Tensor  # ½ Σ_i μ c_i ‖p_i‖²

    def __add__(self, other: SideSums) -> SideSums:
        return SideSums(self.gramian + other.gramian, self.cross + other.cross, self.penalty + other.penalty)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them, to be added over processes."""
        return self.gramian, self.cross, self.penalty


def side_sums(side: Side, E: Tensor) -> SideSums:
    """E_c, Ê_c and the penalty of some rows."""
    penalty = torch.zeros((), dtype=torch.float64, device=E.device)
    if side.penalty is not None:
        penalty = 0.5 * (side.penalty * square_norms(E)).sum(dtype=torch.float64)
    return SideSums(gram(E, E, side.weight), side.cross_gramian(E), penalty)


def value_terms(left: SideSums, right: SideSums, observed: Tensor, theta_square: Tensor) -> Tensor:
    """Σ_O ℓ⁺, ⟨P̂_c, Q̂_c⟩, ⟨P_c, Q_c⟩, the embedding penalty and ‖θ‖²: what L is made of (eq:Ln_brief)."""
    cross, gramian = (left.cross * right.cross).sum(), (left.gramian * right.gramian).sum()
    return torch.stack([observed, cross, gramian, left.penalty + right.penalty, theta_square])


def output_gradient(side: Side, E: Tensor, gramian: Tensor, cross: Tensor, out: Tensor | None = None) -> Tensor:
    """∂(L − Σ_O ℓ⁺)/∂E, with ω G_c and ω Ĝ_c of the other side in E's dtype; over ``out``."""
    U = torch.mm(E, gramian, out=out)
    side.subtract_imputed(cross, U)
    return _weigh(side, U, E)


def output_curvature(
    side: Side, E: Tensor, dE: Tensor, gramian: Tensor, d_gramian: Tensor, out: Tensor | None = None
) -> Tensor:
    """The change of output_gradient along dE, with ω G_c and ω dG_c = ω dGᵀBG of the other side; over ``out``."""
    return _weigh(side, torch.mm(dE, gramian, out=out).addmm_(E, d_gramian), dE)


def pair_moments(E: Tensor) -> Tensor:
    """(1, ‖e_i‖²) of each row."""
    norms = square_norms(E)
    return torch.stack([torch.ones_like(norms), norms], 1)


def _weigh(side: Side, U: Tensor, E: Tensor) -> Tensor:
    """diag(a) U + diag(μ c) E, in place of U."""
    if side.weight is not None:
        U *= side.weight[:, None]
    if side.penalty is not None:
        U.addcmul_(E, side.penalty[:, None])
    return U


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

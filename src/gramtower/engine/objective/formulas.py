"""The formulas of the objective over all m·n pairs, each written once, for the rows of one side.

With E the embeddings of a side (P or Q), A its weights, Ẽ its imputed factor, and the Gramians of the other side:

    side_sums         E_c = EᵀAE,  Ê_c = ẼᵀAE,  ½ Σ μ c_i ‖e_i‖²    what the value and the other side need (eq:gramian)
    output_gradient   ωA(E G_c − Ẽ Ĝ_c) + diag(μ c) E              the bracket of eq:final_grad
    output_curvature  ωA(dE G_c + E dG_c) + diag(μ c) dE           that of eq:final_Gd, along dE
    pair_moments      (1, ‖e_i‖²)                                  what the preconditioner sums over O

The terms of observed pairs (X Q, Z Q and their transposes) are in blocks.py, the loop over rows in
value_and_gradient.py. Each is O(rows k²).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramtower.engine.objective.constants import Side
from gramtower.engine.objective.gramians import gram, square_norms


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

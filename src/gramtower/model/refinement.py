"""Known entities after training: what their tower says of them, moved by their own pairs.

A tower sees features alone. What they do not say of an entity, such as how popular it is, its own pairs do. With the
embeddings q_j of the other side as training left them, that of left entity i becomes

    p_i = f(u_i) + d_i,    min over d of  Σ_(i,j)∈O ℓ(R_ij, p_iᵀq_j) + ½ω Σ_∉O a_i b_j (ỹ − p_iᵀq_j)² + ½κ Σ_i ‖d_i‖²

and likewise on the right. κ = 2 mean_O(ℓ″ at ŷ = 0) mean_j ‖q_j‖² is the curvature that two pairs have on average: what
features say counts as much as two pairs, so that an entity with few of them stays where its tower puts it. New entities
have no d. Towers learn nothing of d, unlike of ids beside features, which would take from them what they are to learn.

It is a problem over ids (eq:prob), convex, whose towers are rows that stay as they are and, on one side, a table added
to them. Cost: some ten Gauss-Newton products a side, O(|O|k + (m+n)k²) each, and no pass through a tower. Memory: the
embeddings, and training of a table as large as one side's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.optim.solvers import NewtonKron
from gramtower.training.loop import minimize

_WORTH = 2.0  # pairs that what features say of an entity counts as
_ITERATIONS, _DAMPING = 3, 1e-3  # convex: the model is right from the start
_PAIRS = 1 << 22  # pairs whose curvature is computed at a time
Sides = tuple[Tensor, Tensor]


class _Moved(nn.Module):
    """Rows that stay as they are, and a multiple of those of a trained table that starts at ``start``."""

    def __init__(self, rows: Tensor, start: Tensor, scale: float) -> None:
        super().__init__()
        self.fixed, self.scale = _table(rows, trained=False), scale
        self.own = _table(start, trained=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Both together."""
        rows: Tensor = self.fixed(ids) + self.scale * self.own(ids)
        return rows


def _table(rows: Tensor, trained: bool) -> nn.Embedding:
    return nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=not trained)


def refine(problem: Problem, embeddings: Sides, sides: tuple[bool, bool]) -> Sides:
    """The embeddings of local left and right entities, those of some sides moved.

    Args:
        problem: the pairs, ids on both sides, λ = 1 and μ = 0.
        embeddings: P and Q as training left them, on the device to compute on.
        sides: for left and right, whether they are moved; each while the other one is as it was.
    """
    moved, curvature = list(embeddings), _mean_curvature(problem)
    for side in (0, 1):
        if sides[side] and (kappa := _WORTH * curvature * _mean_square(problem, embeddings[1 - side])) > 0:
            start = torch.zeros_like(embeddings[side])
            towers = _towers(embeddings, side, start, 1 / math.sqrt(kappa))  # λ = 1 on the table is κ on its multiple
            minimize(problem, towers, NewtonKron(damping=_DAMPING), _ITERATIONS)
            point = problem.at(towers)
            moved[side] = (point.P, point.Q)[side].clone()
    return moved[0], moved[1]


def least_budget(problem: Problem, dim: int, device: torch.device, sides: tuple[bool, bool]) -> int:
    """The smallest memory budget that :func:`refine` keeps to in one process with embeddings of a size, in bytes."""
    rows, zero = (problem.shards.left, problem.shards.right), torch.zeros((), device=device)
    shapes = zero.expand(rows[0].count, dim), zero.expand(rows[1].count, dim)  # tables that take no memory
    return max(problem.least_budget(_towers(shapes, side, shapes[side], 1.0)) for side in (0, 1) if sides[side])


def _towers(embeddings: Sides, side: int, start: Tensor, scale: float) -> Towers:
    moved, other = _Moved(embeddings[side], start, scale), _table(embeddings[1 - side], trained=False)
    return Towers(moved, other) if side == 0 else Towers(other, moved)


def _mean_square(problem: Problem, rows: Tensor) -> float:
    """‖q_j‖² of the rows of all processes on average."""
    square, count = problem.shards.group.totals(float(rows.square().sum(dtype=torch.float64)), float(len(rows)))
    return square / max(1.0, count)


def _mean_curvature(problem: Problem) -> float:
    """w ℓ″(R, 0) of the pairs of all processes on average; 0 where no pair says anything."""
    total = 0.0
    for start in range(0, len(problem.labels), _PAIRS):
        part = slice(start, start + _PAIRS)
        labels = torch.from_numpy(problem.labels[part]).double()
        second = problem.loss.second(labels, torch.zeros_like(labels))
        if problem.pair_weights is not None:
            second = second * torch.from_numpy(problem.pair_weights[part])
        total += float(second.sum())
    return problem.shards.group.totals(total)[0] / max(1, problem.observed)

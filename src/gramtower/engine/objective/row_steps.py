"""Steps of one side's embedding table to the minimum of each row's own quadratic model, the other side fixed.

    A_i = ω a_i Q_c + Σ_j∈O_i ∂²ℓ⁺_ij q_j q_jᵀ + (λ + μ c_i) I

is row i's block of the Gauss-Newton matrix (eq:general_G) if the left embeddings are a table of their own, and likewise
on the right. In the eigenbasis of Q_c everything except the observed pairs is diagonal, so that a row needs no k × k
matrix, only two to four steps of conjugate gradient over its pairs (kernels/reference.py). If labels are fitted, the
right rows are centred and their steps keep their mean: b_j times the mean gradient is subtracted from each gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gramtower.engine.kernels import select
from gramtower.engine.kernels.reference import RowSystems
from gramtower.engine.objective.blocks import LeftBlock
from gramtower.engine.objective.formulas import column_sums
from gramtower.engine.objective.problem import Problem
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.towers import Towers

_LEAST, _TINY = 1e-7, 1e-12  # least shift, of the largest eigenvalue, and at all


def solves_rows(problem: Problem, towers: Towers) -> bool:
    """Whether two embedding tables, one for each side, are all that is trained and can be solved by rows here."""
    plan, kernels = problem.plan(towers), select(towers.device, problem.kernels)
    if not kernels.SOLVES_ROWS or plan.streamed is not None or problem.shards.group.size > 1:
        return False
    return all(plan.needs.viewed) and all(len(towers.local_names(side)) == 1 for side in ("left", "right"))


@torch.no_grad()
def row_step(
    at: Evaluation, side: int, steps: int, tolerance: float, out: Tensor, scratch: tuple[Tensor, Tensor]
) -> float:
    """Write one side's rows after their step to ``out``; return the square of the norm of their gradient.

    Each row takes at most ``steps`` steps of conjugate gradient, and ends at a relative residual of ``tolerance``. Both
    matrices of ``scratch``, of the sizes of the left and the right table, are overwritten.
    """
    c = at.constants
    own, E, F = (c.left, at.P, at.Q) if side == 0 else (c.right, at.Q, at.P)
    gramian, cross = at.gramians[0][1 - side], at.gramians[1][1 - side]
    values, vectors = torch.linalg.eigh(gramian)
    V = vectors.to(E.dtype)
    y, B = torch.mm(E, V, out=scratch[side]), torch.mm(F, V, out=scratch[1 - side])
    spectrum = at.scaled(values.clamp_min(0))
    shift = E.new_full((len(E),), c.l2) if own.penalty is None else own.penalty + c.l2
    shift.clamp_min_(max(_LEAST * float(spectrum[-1]), _TINY))
    weight = E.new_ones(len(E)) if own.weight is None else own.weight
    pull = own.imputed_product(at.scaled(cross) @ V)
    if side == 1 and c.fitted_total is not None:
        pull = (_mean_gradient(at) @ V)[None, :]
    systems = RowSystems(y, pull, weight, spectrum, shift, steps, tolerance)
    norms: list[Tensor] = []
    at.visit(lambda block: norms.append(block.solve(side, B, systems)))
    torch.addmm(E, y, V.t(), out=out)
    return float(norms[0])


def _mean_gradient(at: Evaluation) -> Tensor:
    """Σ_j ∂L/∂q_j / Σ_j b_j of centred right rows, without λ; their all-pairs part sums to zero."""
    c, total = at.constants, at.Q.new_zeros(at.Q.shape[1], dtype=torch.float64)

    def add(block: LeftBlock) -> None:
        slopes = block.P.new_zeros(len(block.P), 1)
        block.left_sum(block.observed.slopes, slopes.new_ones(len(at.Q), 1), slopes)
        total.add_(column_sums(block.P, slopes[:, 0]))

    at.visit(add, by_columns=False)
    if c.right.penalty is not None:
        total.add_(column_sums(at.Q, c.right.penalty))
    assert c.fitted_total is not None
    return (total / c.fitted_total).to(at.Q.dtype)

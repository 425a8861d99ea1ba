"""Conjugate gradient for G s = b, with or without a preconditioner (Appendix, Alg. "Conjugate gradient procedures").

It differs from the textbook in two ways: it returns the residual, from which the caller gets sᵀGs without another
product, and it can stop when the quadratic model hardly decreases (Martens, 2010, Section 4.4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from gramtower.engine.towers.parameters import Parameters


class Operator(Protocol):
    """A symmetric positive definite matrix, defined by its products with vectors."""

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """The matrix times d, written to ``out`` if given."""


@dataclass
class CGResult:
    """The outcome of conjugate gradient."""

    s: Parameters  # the solution
    residual: Parameters  # b − G s
    steps: int  # number of products with G
    model: float  # ½ sᵀGs − bᵀs, the value of the quadratic model; never positive
    slope: float  # −bᵀs
    converged: bool  # whether it stopped before the limit of steps


def conjugate_gradient(
    G: Operator,
    b: Parameters,
    *,
    tolerance: float = 0.1,
    max_steps: int = 30,
    preconditioner: Operator | None = None,
    progress: float = 0.0,
) -> CGResult:
    """Solve G s = b approximately from s = 0.

    Args:
        G: the matrix.
        b: the right-hand side; it is overwritten with the residual.
        tolerance: ξ; stop when the residual's norm is at most ξ times that of b (in the preconditioner's norm).
        max_steps: largest number of products with G.
        preconditioner: M ≈ G⁻¹.
        progress: stop when five steps lower the model by less than this fraction of its depth; 0 disables this.
    """
    s, r, buffer = b.zeros(), b, b.empty()  # the buffer holds G d, then M r

    def preconditioned() -> Parameters:
        return r if preconditioner is None else preconditioner.product(r, buffer)

    z = preconditioned()
    d = z.clone()
    gamma = r.inner(z)
    now = first = float(gamma)
    depths = [0.0]
    steps = 0
    while steps < max_steps and now > 0:
        Gd = G.product(d, buffer)
        curvature = d.inner(Gd)
        steps += 1
        t = torch.where(curvature > 0, gamma / curvature, 0.0)
        s.axpy_(t, d)
        r.axpy_(-t, Gd)
        z = preconditioned()
        gamma, before = r.inner(z), gamma
        # This is the only synchronisation with a GPU in a step.
        curved, drop, now = torch.stack([curvature, 0.5 * t * before, gamma]).tolist()
        if not curved > 0:  # rounding, or a matrix that is not positive definite; t was 0
            break
        depths.append(depths[-1] - drop)  # each step lowers the model by tγ/2
        if now <= tolerance**2 * first:
            break
        if progress and steps >= 5 and depths[-6] - depths[-1] < progress * -depths[-1]:
            break
        torch.addcmul(z.vector, d.vector, (gamma / before).to(d.vector.dtype), out=d.vector)
    else:
        return _result(s, r, steps, depths[-1], False)
    return _result(s, r, steps, depths[-1], curved > 0)


def _result(s: Parameters, r: Parameters, steps: int, model: float, converged: bool) -> CGResult:
    """The result, with bᵀs from the residual, as b is overwritten: bᵀs = rᵀs + sᵀGs and model = ½ sᵀGs − bᵀs."""
    rest = r.dot(s)  # zero except for rounding; NaN if G was NaN along some direction
    return CGResult(s, r, steps, model, 2 * model + (rest if math.isfinite(rest) else 0.0), converged)

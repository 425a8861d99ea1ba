"""Point: what an optimizer, or anybody, may ask of a problem at parameters θ.

Five questions: value, gradient, Gauss-Newton products, a preconditioner, and the problem along a line. The mathematics
is value_and_gradient.py (value, gradient), gauss_newton.py (G) and kronecker.py (M).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.objective.gauss_newton import EAGER, Executor, GaussNewton
from gramtower.engine.objective.kronecker import SIDES, Kronecker, kronecker
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Parameters, as_parameters


@dataclass(frozen=True)
class Terms:
    """The value, term by term."""

    observed: float  # Σ_O ℓ⁺
    all_pairs: float  # ω L⁻
    l2: float
    embedding_l2: float

    @property
    def total(self) -> float:
        """L(θ)."""
        return self.observed + self.all_pairs + self.l2 + self.embedding_l2

    def non_finite(self) -> list[str]:
        """Names of the terms that are NaN or infinite."""
        return [name for name, value in vars(self).items() if not math.isfinite(value)]


class Point:
    """The objective at given weights: ask it for value, gradient and curvature.

    Made by :meth:`gramtower.Problem.at`.

    Its tensors are valid as long as it is: on a GPU their memory may be used again afterwards. Over several processes P
    and Q are the rows held here; values and dot products are those of all.

    Args:
        evaluation: the objective at θ.
        parameters: θ, a private copy.
        at: the problem at other parameters.
        executor: runs gradients and products.
        spare_bytes: of the memory budget, for the pairs of vectors that secant steps remember.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        parameters: Parameters,
        at: Callable[[Parameters], Point],
        executor: Executor = EAGER,
        spare_bytes: int = 0,
    ) -> None:
        self.evaluation, self.parameters, self._at, self.executor = evaluation, parameters, at, executor
        self.spare_bytes = spare_bytes

    @property
    def P(self) -> Tensor:
        """The left embeddings, m × k; a forward each time they are asked for where left rows are streamed."""
        return self.evaluation.P

    @property
    def Q(self) -> Tensor:
        """The right embeddings, n × k."""
        return self.evaluation.right.outputs

    @property
    def right_rows(self) -> Tensor:
        """The right embeddings of all processes."""
        return self.evaluation.right_outputs

    @property
    def bilinear(self) -> bool:
        """Whether scores are linear in each side's parameters while the other's are fixed, and both are trained."""
        at, towers = self.evaluation, self.evaluation.towers
        both = all(towers.local_names(side) for side in ("left", "right"))
        return both and not towers.share_parameters and at.left.tower.linear and at.right.linear

    @property
    def work(self) -> Work:
        """What has been done so far, for this and all other points of the problem."""
        return self.evaluation.work

    @property
    def value(self) -> float:
        """L(θ), accumulated in float64."""
        return self.terms.total

    @cached_property
    def terms(self) -> Terms:
        """The value, term by term."""
        c = self.evaluation.constants
        observed, cross, gramian, penalty, square = self._sums
        self.work.data_passes += self.evaluation.share[1]
        all_pairs = c.omega * (0.5 * c.imputed_square - cross + 0.5 * gramian)
        return Terms(observed, all_pairs, 0.5 * c.l2 * square, penalty)

    @property
    def value_noise(self) -> float:
        """Rounding level of the value: the last place of the sums it is made of."""
        c = self.evaluation.constants
        sums = 0.5 * c.omega * (c.imputed_square + abs(self._sums[2]))
        sums += sum(abs(term) for term in vars(self.terms).values())
        return float(torch.finfo(self.parameters.vector.dtype).eps * sums)

    @cached_property
    def _sums(self) -> list[float]:
        return [float(x) for x in self.evaluation.sums.tolist()]

    @torch.no_grad()
    def gradient(self) -> Parameters:
        """∇L(θ) by eq:final_grad: one vjp of each tower, two passes over O."""
        return self.executor.gradient(self.evaluation.gradient)

    def gauss_newton(self, damping: float = 0.0) -> GaussNewton:
        """G of eq:general_G as a linear operator; ``G @ d`` by eq:final_Gd. ``damping`` is added to λ in G alone."""
        return GaussNewton(self.evaluation, check.number("damping", damping, minimum=0.0), self.executor)

    def preconditioner(self, kind: str = "kronecker", damping: float = 0.0, side: str | None = None) -> Kronecker:
        """M with M @ r ≈ (G + damping·I)⁻¹ r, made of Kronecker factors of the all-pairs curvature.

        With ``side``, "left" or "right", that of this side's parameters while the other's do not move: M is zero there.
        """
        check.choice("kind", kind, ("kronecker",))
        if side is not None:
            check.choice("side", side, SIDES)
            if self.evaluation.towers.share_parameters:
                check.fail("side", repr(side), "None, as the towers share parameters")
        damping = check.number("damping", damping, minimum=0.0)
        return kronecker(self.evaluation, damping, side, self.executor.unbound)

    def at(self, parameters: Parameters) -> Point:
        """The problem at other parameters."""
        return self._at(parameters)

    def along(self, direction: Parameters) -> Callable[[float], Point]:
        """The problem along a line: ``point.along(d)(δ)`` is the point at θ + δ d."""
        direction = as_parameters("direction", direction, self.parameters)
        return lambda step: self._at(self.parameters.clone().axpy_(step, direction))

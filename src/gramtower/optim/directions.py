"""Directions: steepest descent, AdaGrad's diagonal, Newton by conjugate gradient, and limited-memory BFGS.

    Steepest   s = −∇L                                     (eq:grad_dir)
    Diagonal   s = −(μI + M)^(−½) ∇L,  M ← M + diag(∇L)²   (eq:diag_scaling)
    NewtonCG   G s = −∇L to a relative residual ξ          (eq:general_ls)
    LBFGS      limited-memory BFGS                         (bfgs.py)

newton_kron.py and secant.py have the preconditioned ones.
"""

from __future__ import annotations

import torch

from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.bfgs import Pair, inverse_product
from gramtower.optim.conjugate_gradient import conjugate_gradient
from gramtower.optim.parts import Direction, DirectionResult, State, vector, vectors


class Steepest(Direction):
    """Against the gradient."""

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """s = −∇L."""
        return DirectionResult(-gradient)


class Diagonal(Direction):
    """AdaGrad: each coordinate scaled by the root of its accumulated squared gradients.

    Args:
        mu: μ, keeps the scaling finite.
    """

    def __init__(self, mu: float) -> None:
        self.mu = mu
        self.squares: Parameters | None = None

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """s = −(μI + M)^(−½) ∇L, after adding this gradient's squares to M."""
        g = gradient.vector
        squares = g * g if self.squares is None else torch.addcmul(self.squares.vector, g, g)
        self.squares = Parameters(gradient.layout, squares)
        return DirectionResult(Parameters(gradient.layout, -g / (squares + self.mu).sqrt_()))

    def state(self) -> State:
        """M."""
        return {} if self.squares is None else {"squares": self.squares}

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.squares = vector(state, "squares")


class NewtonCG(Direction):
    """The paper's Gauss-Newton direction by plain conjugate gradient.

    Args:
        cg_tolerance: ξ.
        cg_max_steps: most products with G.
    """

    def __init__(self, cg_tolerance: float, cg_max_steps: int) -> None:
        self.tolerance, self.max_steps = cg_tolerance, cg_max_steps

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """G s ≈ −∇L."""
        assert point is not None
        result = conjugate_gradient(
            point.gauss_newton(), gradient.scale_(-1.0), tolerance=self.tolerance, max_steps=self.max_steps
        )
        return DirectionResult(result.s, result.steps, result.model, slope=result.slope)


class LBFGS(Direction):
    """Limited-memory BFGS from the last few steps and gradient changes.

    Args:
        memory: pairs of steps and gradient changes kept.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.pairs: list[Pair] = []  # oldest first
        self.before: tuple[Parameters, Parameters] | None = None  # θ and gradient of the last call

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """The two-loop recursion; the first direction is the gradient scaled to length one."""
        assert point is not None
        theta = point.parameters
        if self.before is not None:
            step, change = theta - self.before[0], gradient - self.before[1]
            bend = step.dot(change)
            if bend > 1e-10 * step.norm() * change.norm():
                self.pairs = [*self.pairs, Pair(step, change, bend)][-self.memory :]
        self.before = (theta, gradient)
        if not self.pairs:
            return DirectionResult(gradient * (-1.0 / max(gradient.norm(), 1e-30)))
        last = self.pairs[-1]
        scale = last.bend / last.change.dot(last.change)
        return DirectionResult(inverse_product(gradient, self.pairs, lambda q: q.scale_(scale)).scale_(-1.0))

    def retry(self) -> bool:
        """Forget the pairs and go down the gradient once."""
        had, self.pairs, self.before = bool(self.pairs), [], None
        return had

    def state(self) -> State:
        """The pairs and the last point."""
        found: State = {f"step{i}": pair.step for i, pair in enumerate(self.pairs)}
        found |= {f"change{i}": pair.change for i, pair in enumerate(self.pairs)}
        if self.before is not None:
            found |= {"theta": self.before[0], "gradient": self.before[1]}
        return found

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.pairs = [Pair(s, y) for s, y in zip(vectors(state, "step"), vectors(state, "change"), strict=True)]
        theta, gradient = vector(state, "theta"), vector(state, "gradient")
        self.before = None if theta is None or gradient is None else (theta, gradient)

"""Secant methods: limited-memory BFGS, and the secant steps of `newton-kron` over the Kronecker preconditioner.

A secant pair is a step s and the change y of the gradient along it. Limited-memory BFGS (Nocedal and Wright, "Numerical
Optimization", Alg. 7.4) multiplies its inverse H with a vector in four passes over θ for each pair.

Secant steps are for towers that are linear in their parameters. Near a minimum the Hessian differs from the
Gauss-Newton matrix by the slopes of all pairs, so that Gauss-Newton converges only linearly if the model does not fit
the data. A gradient costs no more than a conjugate gradient step and contains the true curvature along the last steps:

    s = −H ∇L,   H the inverse of limited-memory BFGS with γM instead of a multiple of the identity

M ≈ (G + damping)⁻¹ is the Kronecker preconditioner. It is rebuilt when L has decreased by 2% since it was built, or
when damping has increased. γ is ½ without pairs, because both sides then correct the same residuals, and 1 until a full
step is rejected; from then on it is sᵀy / yᵀMy of the last pair. If a step met less than a fifth of the curvature that
H predicted, y is moved toward H⁻¹s = −δ∇L until it has a fifth (Powell, 1978), so that every pair can be used. Damping
starts at zero and is increased when the decrease at the full step is less than a quarter of the predicted −½ sᵀ∇L.

The first iterations move one side at a time, s = −M∇L on the left, then on the right, as alternating least squares
does: from small random embeddings both sides together start next to a saddle point, while each side is a convex
problem. A side that starts at zero moves first. Without memory for a pair all iterations are of this kind.

Memory: two vectors of θ's size for each pair and five more during a step; three in all while one side moves at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.kronecker import Kronecker
from gramtower.engine.objective.problem import Point
from gramtower.engine.towers.parameters import LinearOperator, Parameters
from gramtower.optim.descent import Damping, Direction, DirectionResult, State, StepResult, vector, vectors


class Pair:
    """A step s, the change y of the gradient along it, and sᵀy, which is computed at the first access if it is None."""

    def __init__(self, step: Parameters, change: Parameters, curvature: float | None = None) -> None:
        self.step, self.change = step, change
        if curvature is not None:
            self.curvature = curvature

    @cached_property
    def curvature(self) -> float:
        """sᵀy."""
        return self.step.dot(self.change)


def inverse_product(g: Parameters, pairs: Sequence[Pair], initial: Callable[[Parameters], Parameters]) -> Parameters:
    """H g by the two-loop recursion over pairs with sᵀy > 0, oldest first; ``initial`` may overwrite its argument."""
    q = g.clone()
    coefficients = []
    for pair in reversed(pairs):
        a = pair.step.inner(q) / pair.curvature
        coefficients.append(a)
        q.axpy_(-a, pair.change)
    q = initial(q)
    for pair, a in zip(pairs, reversed(coefficients), strict=True):
        b = pair.change.inner(q) / pair.curvature
        q.axpy_(a - b, pair.step)
    return q


class LimitedMemory(Direction):
    """Limited-memory BFGS with ``memory`` secant pairs."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.pairs: list[Pair] = []  # oldest first
        self.before: tuple[Parameters, Parameters] | None = None  # θ and gradient of the last call

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        """−H∇L; the first direction is the negative gradient scaled to length one."""
        theta = point.parameters
        if self.before is not None:
            step, change = theta - self.before[0], gradient - self.before[1]
            curvature = step.dot(change)
            if curvature > 1e-10 * step.norm() * change.norm():
                self.pairs = [*self.pairs, Pair(step, change, curvature)][-self.memory :]
        self.before = (theta, gradient)
        if not self.pairs:
            return DirectionResult(gradient * (-1.0 / max(gradient.norm(), 1e-30)))
        last = self.pairs[-1]
        scale = last.curvature / last.change.dot(last.change)
        return DirectionResult(inverse_product(gradient, self.pairs, lambda q: q.scale_(scale)).scale_(-1.0))

    def retry(self) -> bool:
        """Discard the pairs and take one step of steepest descent."""
        had, self.pairs, self.before = bool(self.pairs), [], None
        return had

    def state(self) -> State:
        found: State = {f"step{i}": pair.step for i, pair in enumerate(self.pairs)}
        found |= {f"change{i}": pair.change for i, pair in enumerate(self.pairs)}
        if self.before is not None:
            found |= {"theta": self.before[0], "gradient": self.before[1]}
        return found

    def restore(self, state: State) -> None:
        self.pairs = [Pair(s, y) for s, y in zip(vectors(state, "step"), vectors(state, "change"), strict=True)]
        theta, gradient = vector(state, "theta"), vector(state, "gradient")
        self.before = None if theta is None or gradient is None else (theta, gradient)


_FIRST = 0.5  # γ while there are no pairs: both sides correct the same residuals
_LEAST_CURVATURE = 0.2  # fraction of the predicted curvature along a step
_DECREASE = 0.02  # relative decrease of L after which M is rebuilt


@dataclass
class _Built:
    """A preconditioner with its damping, the value of L where it was built, and its state."""

    damping: float
    value: float
    state: dict[str, Sharded | Tensor]
    M: Kronecker | None = None  # None until a resumed run needs it


class KroneckerSecant(Direction):
    """Secant steps over the Kronecker preconditioner, with ``memory`` secant pairs.

    It moves one side at a time for ``alternating`` turns, or always if ``memory`` is 0, and then both sides.
    """

    def __init__(self, damping: Damping, memory: int, alternating: int) -> None:
        self.damping = damping
        self.configure(memory, alternating)
        self.turn = 0  # the left side moves in even turns, the right side in odd ones
        self.tried_other_side = False  # since the last successful step
        self.rescaled = False
        self.pairs: list[Pair] = []  # oldest first
        self.last: tuple[Pair, float] | None = None  # the last step with the gradient where it began, and δ
        self.built: _Built | None = None
        self._gradient: Parameters | None = None  # gradient of the current iteration

    def configure(self, memory: int, alternating: int) -> None:
        """Set the number of secant pairs and of alternating turns, before the first step."""
        self.memory, self.alternating = memory, alternating

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        """−H∇L, or −M∇L on one side; keeps the gradient for the next pair."""
        if self._one_side:
            M = point.preconditioner("kronecker", self.damping.value, self._side_to_move(point))
            s = M.product(gradient)
        else:
            M = self._preconditioner(point)
            self._remember(gradient)
            s = inverse_product(gradient, self.pairs, lambda q: self._scaled(M, q))
        s.scale_(-1.0)
        self._gradient = None if self._one_side else gradient
        slope = gradient.dot(s)
        return DirectionResult(s, 0, 0.5 * slope, self.damping.value, slope)

    @property
    def _one_side(self) -> bool:
        return self.turn < self.alternating or self.memory == 0

    def _side_to_move(self, point: Point) -> str:
        """The side whose turn it is, unless the other side is all zeros and must move first."""
        side = self.turn % 2
        if not bool(point.evaluation.gramians[0][1 - side].any()):
            side = 1 - side
        return ("left", "right")[side]

    def _preconditioner(self, point: Point) -> Kronecker:
        """M, rebuilt if necessary."""
        built, damping = self.built, self.damping.value
        if built is None or damping > built.damping or point.value < built.value - _DECREASE * abs(built.value):
            self.built = None  # free its memory first
            M = point.preconditioner("kronecker", damping)
            self.built = _Built(damping, point.value, M.state(), M)
            return M
        if built.M is None:  # the towers determine its structure, the checkpoint its numbers
            M = point.preconditioner("kronecker", built.damping)
            value = built.value if M.load(built.state) else point.value  # not loaded if other blocks are finite here
            self.built = built = _Built(built.damping, value, M.state(), M)
        assert built.M is not None
        return built.M

    def _scaled(self, M: LinearOperator, q: Parameters) -> Parameters:
        """γ M q."""
        product = M.product(q)
        if not self.pairs:
            return product.scale_(_FIRST)
        if not self.rescaled:
            return product
        pair = self.pairs[-1]
        expected = M.product(pair.change, q).dot(pair.change)  # overwrites q
        return product.scale_(pair.curvature / expected) if expected > 0 else product

    def _remember(self, gradient: Parameters) -> None:
        """Add a pair of the last step and the change of the gradient along it."""
        if self.last is None:
            return
        (taken, size), self.last = self.last, None
        s, before = taken.step, taken.change
        y = gradient - before
        curvature, expected = s.dot(y), -size * s.dot(before)
        if curvature < _LEAST_CURVATURE * expected:
            share = (1 - _LEAST_CURVATURE) * expected / (expected - curvature)
            y.scale_(share).axpy_(-(1 - share) * size, before)
            curvature = s.dot(y)
        if curvature > 0:
            self.pairs = [*self.pairs, Pair(s, y, curvature)][-self.memory :]

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """Update the damping, and keep the step if both sides moved."""
        gradient, self._gradient = self._gradient, None
        if direction.model is not None and direction.model < 0:
            self.damping.learn(step.first_decrease, direction.model)
        if step.point is None:
            return
        if gradient is not None:
            s = direction.s if step.size == 1.0 else direction.s.scale_(step.size)  # the direction is not used again
            self.last = Pair(s, gradient), step.size
            self.rescaled = self.rescaled or (bool(self.pairs) and step.size < 1.0)
            self.pairs = self.pairs[max(0, len(self.pairs) + 1 - self.memory) :]  # make room for the next pair
        self.turn += 1
        self.tried_other_side = False

    def retry(self) -> bool:
        """Try the other side if one side always moves, then discard the pairs, then end alternation and damp more."""
        if self.memory == 0 and not self.tried_other_side:
            self.turn += 1
            self.tried_other_side = True
            return True
        if self.turn >= self.alternating and self.pairs:
            self.pairs = []
            return True
        self.turn = max(self.turn, self.alternating)
        return self.damping.retry()

    def state(self) -> State:
        """Damping, pairs, the last step and the preconditioner, by the names of the checkpoint format."""
        found: State = {"damping": self.damping.value, "iterations": self.turn, "rescaled": self.rescaled}
        found |= {"size": 0.0, "made_damping": 0.0, "made_value": 0.0}
        for i, pair in enumerate(self.pairs):
            found |= {f"step{i}": pair.step, f"change{i}": pair.change}
        if self.last is not None:
            pair, size = self.last
            found |= {"last_step": pair.step, "last_gradient": pair.change, "size": size}
        if self.built is not None:
            found |= {"made_damping": self.built.damping, "made_value": self.built.value}
            found |= {f"made_{name}": tensor for name, tensor in self.built.state.items()}
        return found

    def restore(self, state: State) -> None:
        self.damping.value, self.turn, self.rescaled = state["damping"], state["iterations"], state["rescaled"]
        self.pairs = [Pair(s, y) for s, y in zip(vectors(state, "step"), vectors(state, "change"), strict=True)]
        step, gradient = vector(state, "last_step"), vector(state, "last_gradient")
        self.last = None if step is None or gradient is None else (Pair(step, gradient), state["size"])
        self.built = None
        stored = {key: x for key, x in state.items() if key.startswith("made_") and isinstance(x, (Sharded, Tensor))}
        factors = {key.removeprefix("made_"): x for key, x in stored.items()}
        if factors:
            self.built = _Built(state["made_damping"], state["made_value"], factors)

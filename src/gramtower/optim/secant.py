"""The inverse of limited-memory BFGS (Nocedal and Wright, "Numerical Optimization", Alg. 7.4) times a vector.

Four passes over θ for each pair of a step and the change of the gradient along it.

The direction of `newton-kron` for linear towers: secant steps over the Kronecker preconditioner.

With linear towers L is convex in each side while the other is fixed, but not in both together. Near a minimum the
Hessian differs from the Gauss-Newton matrix by the slopes of all pairs, which do not vanish where pairs remain
unexplained: Gauss-Newton then converges linearly, however well its systems are solved. A gradient costs no more than a
conjugate gradient step and knows the true curvature along the last steps:

    s = −H ∇L,   H the inverse of limited-memory BFGS over γM in the place of a multiple of the identity

M ≈ (G + damping)⁻¹ is the Kronecker preconditioner, made anew where L has fallen by 2% since it was made, or where
damping grew: in between it hardly changes, and pairs tell what does. γ is ½ without pairs, as both sides then answer
for the same residuals, and 1 until a full step is refused: M of sparse features can be too long by far. From then on it
is sᵀy / yᵀMy of the last step s and gradient change y. Where a step met less than a fifth of the curvature that H
expected, y is moved toward H⁻¹s until it has a fifth (Powell, 1978); H⁻¹s = −δ∇L is known from the step before, so that
every pair is of use. Damping starts at none and grows where the decrease at the full step is under a quarter of the
−½ sᵀ∇L promised.

The first iterations move one side at a time, s = −M∇L on the left, then on the right, as alternating least squares
does: from small random embeddings both sides together start next to a saddle, and each alone at a convex problem. A
side that starts at zero moves first: beside it the other one would be drawn to zero too, which is the saddle. With
memory for no pair all iterations are of this kind: M is of one side's curvature there, and two of them are less work
than a few conjugate gradient steps over both.

Cost of an iteration: a value, a gradient, M built at most once and applied once or twice, four passes over θ for each
pair kept. Memory: of θ's size, two vectors for each pair kept and five more while a step is tried: θ, the gradient, the
last one, the step, and the next θ; three in all while one side moves at a time. Not in the paper. Checked by
tests/test_secant.py; timed by benchmarks/bench_solvers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.kronecker import Kronecker
from gramtower.engine.objective.operators import LinearOperator
from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.descent import Damping, Direction, DirectionResult, State, StepResult, vector, vectors


class Pair:
    """A step and the change of the gradient along it.

    Args:
        step: s.
        change: y.
        bend: sᵀy, or None for whoever asks first to compute.
    """

    __slots__ = ("_bend", "change", "step")

    def __init__(self, step: Parameters, change: Parameters, bend: float | None = None) -> None:
        self.step, self.change, self._bend = step, change, bend

    @property
    def bend(self) -> float:
        """sᵀy."""
        if self._bend is None:
            self._bend = self.step.dot(self.change)
        return self._bend


def inverse_product(g: Parameters, pairs: Sequence[Pair], initial: Callable[[Parameters], Parameters]) -> Parameters:
    """H g: the two-loop recursion over pairs, oldest first.

    Args:
        g: left as it is.
        pairs: with sᵀy > 0.
        initial: the inverse that pairs correct, applied to a vector that it may overwrite.
    """
    q = g.clone()
    coefficients = []
    for pair in reversed(pairs):
        a = pair.step.inner(q) / pair.bend
        coefficients.append(a)
        q.axpy_(-a, pair.change)
    q = initial(q)
    for pair, a in zip(pairs, reversed(coefficients), strict=True):
        b = pair.change.inner(q) / pair.bend
        q.axpy_(a - b, pair.step)
    return q


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
        self.pairs = [Pair(s, y) for s, y in zip(vectors(state, "step"), vectors(state, "change"), strict=True)]
        theta, gradient = vector(state, "theta"), vector(state, "gradient")
        self.before = None if theta is None or gradient is None else (theta, gradient)


_FIRST = 0.5  # γ while there are no pairs: both sides answer for the same residuals
_LEAST_BEND = 0.2  # of the curvature that was expected along a step
_FALL = 0.02  # share of L by which it has fallen when M is made anew


@dataclass
class _Made:
    """A preconditioner with its damping, the value of L where it was made, and what it is made of."""

    damping: float
    value: float
    state: dict[str, Sharded | Tensor]
    M: Kronecker | None = None  # none yet in a run that was resumed


class KroneckerSecant(Direction):
    """See the module's first lines.

    Args:
        damping: at the start, and how it moves.
        memory: pairs kept; with none, one side moves at a time in all iterations.
        alternating: first iterations, in which one side moves at a time.
    """

    def __init__(self, damping: Damping, memory: int, alternating: int) -> None:
        self.damping, self.memory, self.alternating = damping, memory, alternating
        self.iterations, self.rescaled = 0, False
        self.turned = False  # whether the other side has been tried where the one could not move
        self.pairs: list[Pair] = []  # oldest first
        self.last: tuple[Pair, float] | None = None  # step and gradient where it began, and δ
        self.made: _Made | None = None  # M, and where it was made
        self._gradient: Parameters | None = None  # of the iteration under way

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """−H∇L, or −M∇L on one side."""
        assert point is not None
        if self._one_side:
            M = point.preconditioner("kronecker", self.damping.value, self._moved(point))
            s = M.product(gradient)
        else:
            M = self._preconditioner(point)
            self._remember(gradient)
            s = inverse_product(gradient, self.pairs, lambda q: self._scaled(M, q))
        s.scale_(-1.0)
        self._gradient = None if self._one_side else gradient  # the next pair is made of it
        slope = gradient.dot(s)
        return DirectionResult(s, 0, 0.5 * slope, self.damping.value, slope)

    @property
    def _one_side(self) -> bool:
        return self.iterations < self.alternating or self.memory == 0

    def _moved(self, point: Point) -> str:
        """The side that moves: by turns, unless the other is all zeros, where only λ would say where to go."""
        side = self.iterations % 2
        if not bool(point.evaluation.gramians[0][1 - side].any()):
            side = 1 - side
        return ("left", "right")[side]

    def _preconditioner(self, point: Point) -> Kronecker:
        """M, as it was made or anew."""
        made, damping = self.made, self.damping.value
        if made is None or damping > made.damping or point.value < made.value - _FALL * abs(made.value):
            self.made = None  # not two of them at a time
            M = point.preconditioner("kronecker", damping)
            self.made = _Made(damping, point.value, M.state(), M)
            return M
        if made.M is None:  # the same towers give it its form; the numbers are those that were stored
            M = point.preconditioner("kronecker", made.damping)
            value = made.value if M.load(made.state) else point.value  # other blocks are finite here: it is another M
            self.made = made = _Made(made.damping, value, M.state(), M)
        assert made.M is not None
        return made.M

    def _scaled(self, M: LinearOperator, q: Parameters) -> Parameters:
        """γ M q."""
        product = M.product(q)
        if not self.pairs:
            return product.scale_(_FIRST)
        if not self.rescaled:
            return product
        pair = self.pairs[-1]
        expected = M.product(pair.change, q).dot(pair.change)  # q is not needed any more
        return product.scale_(pair.bend / expected) if expected > 0 else product

    def _remember(self, gradient: Parameters) -> None:
        """The last step and the change of the gradient along it as one more pair."""
        if self.last is None:
            return
        (taken, size), self.last = self.last, None
        s, before = taken.step, taken.change
        y = gradient - before
        bend, expected = s.dot(y), -size * s.dot(before)
        if bend < _LEAST_BEND * expected:
            share = (1 - _LEAST_BEND) * expected / (expected - bend)
            y.scale_(share).axpy_(-(1 - share) * size, before)
            bend = s.dot(y)
        if bend > 0:
            self.pairs = [*self.pairs, Pair(s, y, bend)][-self.memory :]

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """Move the damping, and keep the step if both sides moved."""
        gradient, self._gradient = self._gradient, None
        if direction.model is not None and direction.model < 0:
            self.damping.learn(step.first_decrease, direction.model)
        if step.point is None:
            return
        if gradient is not None:
            s = direction.s if step.size == 1.0 else direction.s.scale_(step.size)  # nobody needs it any more
            self.last = Pair(s, gradient), step.size
            self.rescaled = self.rescaled or (bool(self.pairs) and step.size < 1.0)
            self.pairs = self.pairs[max(0, len(self.pairs) + 1 - self.memory) :]  # room for the pair that follows
        self.iterations += 1
        self.turned = False

    def retry(self) -> bool:
        """Forget the pairs, or move the other side where one side always moves; after that, much more damping."""
        if self.memory == 0 and not self.turned:
            self.iterations, self.turned = self.iterations + 1, True
            return True
        if self.iterations >= self.alternating and self.pairs:
            self.pairs = []
            return True
        self.iterations = max(self.iterations, self.alternating)
        return self.damping.retry()

    def state(self) -> State:
        """Damping, pairs, the last step and the preconditioner."""
        found: State = {"damping": self.damping.value, "iterations": self.iterations, "rescaled": self.rescaled}
        found |= {"size": 0.0, "made_damping": 0.0, "made_value": 0.0}
        for i, pair in enumerate(self.pairs):
            found |= {f"step{i}": pair.step, f"change{i}": pair.change}
        if self.last is not None:
            pair, size = self.last
            found |= {"last_step": pair.step, "last_gradient": pair.change, "size": size}
        if self.made is not None:
            found |= {"made_damping": self.made.damping, "made_value": self.made.value}
            found |= {f"made_{name}": tensor for name, tensor in self.made.state.items()}
        return found

    def restore(self, state: State) -> None:
        self.damping.value, self.iterations, self.rescaled = state["damping"], state["iterations"], state["rescaled"]
        self.pairs = [Pair(s, y) for s, y in zip(vectors(state, "step"), vectors(state, "change"), strict=True)]
        step, gradient = vector(state, "last_step"), vector(state, "last_gradient")
        self.last = None if step is None or gradient is None else (Pair(step, gradient), state["size"])
        self.made = None
        stored = {key: x for key, x in state.items() if key.startswith("made_") and isinstance(x, (Sharded, Tensor))}
        factors = {key.removeprefix("made_"): x for key, x in stored.items()}
        if factors:
            self.made = _Made(state["made_damping"], state["made_value"], factors)

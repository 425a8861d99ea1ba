"""Second-order directions: Gauss-Newton by conjugate gradient, limited-memory BFGS, and those of `newton-kron`.

Conjugate gradient for G s = b (Appendix, Alg. "Conjugate gradient procedures") differs from the textbook in two ways:
it returns the residual, from which the caller gets sᵀGs without another product, and it can stop when the quadratic
model hardly decreases (Martens, 2010, Section 4.4). Without a preconditioner it stalls on all-pairs problems: the
curvature along the mean of all embeddings is millions of times λ. The Kronecker preconditioner
(engine/objective/kronecker.py) handles that direction in closed form. Levenberg-Marquardt damping is added to G and to
the preconditioner: it is increased when the actual decrease at the full step is below the quadratic model's prediction,
and reduced when they agree.

A secant pair is a step s and the change y of the gradient along it. Limited-memory BFGS (Nocedal and Wright, "Numerical
Optimization", Alg. 7.4) multiplies its inverse H with a vector in four passes over θ for each pair.

Secant steps of `newton-kron` are for towers that are linear in their parameters, with as many pairs as fit in memory.
Near a minimum the Hessian differs from the Gauss-Newton matrix by the slopes of all pairs, so that Gauss-Newton
converges only linearly if the model does not fit the data. A gradient costs no more than a conjugate gradient step and
contains the true curvature along the last steps:

    s = −H ∇L,   H the inverse of limited-memory BFGS with γM instead of a multiple of the identity

M ≈ (G + damping)⁻¹ is the Kronecker preconditioner. It is rebuilt when L has decreased by 2% since it was built, or
when damping has increased. γ is ½ without pairs, because both sides then correct the same residuals, and 1 until a full
step is rejected; from then on it is sᵀy / yᵀMy of the last pair. If a step met less than a fifth of the curvature that
H predicted, y is moved toward H⁻¹s = −δ∇L until it has a fifth (Powell, 1978), so that every pair can be used. Damping
starts at zero and is increased when the decrease at the full step is less than a quarter of the predicted −½ sᵀ∇L.

The first iterations move one side at a time, s = −M∇L on the left, then on the right, as alternating least squares
does: from small random embeddings both sides together start next to a saddle point, while each side is a convex
problem. A side that starts at zero moves first. Without memory for a pair all iterations are of this kind. Memory: two
vectors of θ's size for each pair and five more during a step; three in all while one side moves at a time.

Other towers switch to secant steps, if there is memory for a pair, when the quadratic model fails: damping is above its
initial value after it was far below, or it is far above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.kronecker import Kronecker
from gramtower.engine.objective.problem import Point
from gramtower.engine.towers.parameters import LinearOperator, Parameters
from gramtower.optim.descent import Damping, Direction, DirectionResult, State, StepResult, Verdict, vector, vectors


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
    G: LinearOperator,
    b: Parameters,
    *,
    tolerance: float = 0.1,
    max_steps: int = 30,
    preconditioner: LinearOperator | None = None,
    progress: float = 0.0,
) -> CGResult:
    """Solve G s = b approximately from s = 0.

    Args:
        G: the matrix, symmetric and positive definite.
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
    steps, converged = 0, False
    while not converged and steps < max_steps and now > 0:
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
        stalled = progress > 0 and steps >= 5 and depths[-6] - depths[-1] < progress * -depths[-1]
        converged = now <= tolerance**2 * first or stalled
        if not converged:
            torch.addcmul(z.vector, d.vector, (gamma / before).to(d.vector.dtype), out=d.vector)
    # b is overwritten, but bᵀs = rᵀs + sᵀGs, and the model is ½ sᵀGs − bᵀs.
    rest = r.dot(s)  # zero except for rounding; NaN if G was NaN along some direction
    slope = 2 * depths[-1] + (rest if math.isfinite(rest) else 0.0)
    return CGResult(s, r, steps, depths[-1], slope, converged)


class NewtonCG(Direction):
    """The paper's Gauss-Newton direction (eq:general_ls) by conjugate gradient to the relative residual ξ."""

    def __init__(self, cg_tolerance: float, cg_max_steps: int) -> None:
        self.tolerance, self.max_steps = cg_tolerance, cg_max_steps

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        """G s ≈ −∇L."""
        result = conjugate_gradient(
            point.gauss_newton(), gradient.scale_(-1.0), tolerance=self.tolerance, max_steps=self.max_steps
        )
        return DirectionResult(result.s, result.steps, result.model, slope=result.slope)


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


_FAR_BELOW, _FAR_ABOVE = 0.1, 30.0  # times the initial damping


class KroneckerNewton(Direction):
    """Damped Gauss-Newton by preconditioned conjugate gradient.

    The limit of conjugate gradient steps starts at ``cg_steps``. It is raised, up to ``cg_max_steps``, while the
    quadratic model is accurate and the steps do not suffice, and lowered when the model is poor. Conjugate gradient
    stops at the relative residual ``cg_tolerance``, or when five steps lower the model by less than the fraction
    ``cg_progress``.
    """

    def __init__(
        self, damping: Damping, cg_steps: int, cg_max_steps: int, cg_tolerance: float, cg_progress: float
    ) -> None:
        self.damping = damping
        self.steps, self.least, self.most = cg_steps, cg_steps, cg_max_steps
        self.tolerance, self.progress = cg_tolerance, cg_progress
        self.converged = True
        self.initial_damping, self.was_low = damping.value, False

    @property
    def model_failed(self) -> bool:
        """Whether damping is above its initial value after it was far below, or is far above."""
        return self.damping.value > self.initial_damping * (1.0 if self.was_low else _FAR_ABOVE)

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        """(G + damping) s ≈ −∇L; overwrites the gradient."""
        damping = self.damping.value
        solved = conjugate_gradient(
            point.gauss_newton(damping),
            gradient.scale_(-1.0),
            tolerance=self.tolerance,
            max_steps=self.steps,
            preconditioner=point.preconditioner("kronecker", damping),
            progress=self.progress,
        )
        self.converged = solved.converged
        return DirectionResult(solved.s, solved.steps, solved.model, damping, solved.slope)

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """Update the damping and the limit of steps by how well the model predicted the full step."""
        if direction.model is None or not direction.model < 0:
            return
        verdict = self.damping.learn(step.first_decrease, direction.model)
        self.was_low = self.was_low or self.damping.value < _FAR_BELOW * self.initial_damping
        if verdict is Verdict.GOOD and not self.converged:
            self.steps = min(self.most, self.steps + max(1, self.steps // 4))
        elif verdict is Verdict.POOR:
            self.steps = max(self.least, self.steps - self.steps // 4)

    def retry(self) -> bool:
        return self.damping.retry()

    def state(self) -> State:
        return {
            "damping": self.damping.value, "lowered": self.was_low, "steps": self.steps, "converged": self.converged
        }  # fmt: skip

    def restore(self, state: State) -> None:
        self.damping.value, self.was_low = state["damping"], state["lowered"]
        self.steps, self.converged = state["steps"], state["converged"]


class KroneckerDirection(Direction):
    """Secant steps for linear towers; for all others conjugate gradient until its quadratic model fails.

    ``network_memory`` is the largest number of secant pairs if the towers are not linear.
    """

    def __init__(self, newton: KroneckerNewton, secant: KroneckerSecant, network_memory: int) -> None:
        self.newton, self.secant, self.network_memory = newton, secant, network_memory
        self.chosen: KroneckerNewton | KroneckerSecant | None = None

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        if self.chosen is None:
            self.chosen = self.newton
            if point.bilinear and self.secant.memory > 0:
                self.secant.configure(self._capacity(point, self.secant.memory), self.secant.alternating)
                if self.secant.memory or self.secant.alternating:
                    self.chosen = self.secant
        elif self.chosen is self.newton and self.newton.model_failed and not point.bilinear:
            memory = self._capacity(point, self.network_memory)
            if memory:
                self.secant.configure(memory, alternating=0)
                self.chosen = self.secant
        return self.chosen.find(gradient, point)

    @staticmethod
    def _capacity(point: Point, most: int) -> int:
        """Number of secant pairs that fit in memory, the minimum over processes."""
        theta = point.parameters.vector
        own = point.spare_bytes // (2 * theta.element_size() * max(1, len(theta)))
        return min(most, *(int(pairs) for pairs in point.parameters.layout.group.gather_json(int(own))))

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        assert self.chosen is not None
        self.chosen.learn(direction, step)

    def retry(self) -> bool:
        assert self.chosen is not None
        return self.chosen.retry()

    def state(self) -> State:
        chosen = "" if self.chosen is None else "secant" if self.chosen is self.secant else "newton"
        return {
            "chosen": chosen, "memory": self.secant.memory, "alternating": self.secant.alternating,
            "newton": self.newton.state(), "secant": self.secant.state(),
        }  # fmt: skip

    def restore(self, state: State) -> None:
        self.newton.restore(state["newton"])
        self.secant.restore(state["secant"])
        self.secant.configure(state["memory"], state["alternating"])
        self.chosen = {"": None, "newton": self.newton, "secant": self.secant}[state["chosen"]]

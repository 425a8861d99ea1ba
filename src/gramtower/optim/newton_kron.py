"""The directions of `newton-kron`: Gauss-Newton by conjugate gradient, preconditioned and damped, and the choice of it.

Plain conjugate gradient stalls on all-pairs problems: the mean direction of all embeddings has a curvature millions of
times λ, and thirty steps cannot see past it. The Kronecker preconditioner (engine/objective/kronecker.py) takes that
direction out in closed form, so that a handful of steps suffices. Levenberg-Marquardt damping is added to G and to the
preconditioner: it grows when the real decrease at the full step falls short of the quadratic model's promise, and
shrinks when they agree.

Where both towers are linear in their parameters, secant.py takes its place: with as many pairs as there is memory for,
and with memory for none by steps that move one side at a time.

Checked by tests/test_optim.py; timed by `make reproduce` and benchmarks/bench_als.py.
"""

from __future__ import annotations

from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.conjugate_gradient import conjugate_gradient
from gramtower.optim.damping import Damping, Verdict
from gramtower.optim.parts import Direction, DirectionResult, State, StepResult
from gramtower.optim.secant import KroneckerSecant


class KroneckerNewton(Direction):
    """See the module's first lines.

    Args:
        damping: at the start, and how it moves.
        cg_steps: conjugate gradient steps allowed at the start; more are allowed while the model is right and the
            steps run out, fewer when it is wrong.
        cg_max_steps: most steps ever allowed.
        cg_tolerance: relative residual, in the preconditioner's norm, at which conjugate gradient stops.
        cg_progress: conjugate gradient also stops when five steps lowered the model by less than this share.
    """

    def __init__(
        self,
        damping: Damping,
        cg_steps: int,
        cg_max_steps: int,
        cg_tolerance: float,
        cg_progress: float,
    ) -> None:
        self.damping = damping
        self.steps, self.least, self.most = cg_steps, cg_steps, cg_max_steps
        self.tolerance, self.progress = cg_tolerance, cg_progress
        self.converged = True

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """(G + damping) s ≈ −∇L."""
        assert point is not None
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
        """Move the damping and the number of steps by how well the model predicted the full step."""
        if direction.model is None or not direction.model < 0:
            return
        verdict = self.damping.learn(step.first_decrease, direction.model)
        if verdict is Verdict.RIGHT and not self.converged:
            self.steps = min(self.most, self.steps + max(1, self.steps // 4))
        elif verdict is Verdict.WRONG:
            self.steps = max(self.least, self.steps - self.steps // 4)

    def retry(self) -> bool:
        """Much more damping."""
        return self.damping.retry()

    def state(self) -> State:
        """Damping and steps."""
        return {"damping": self.damping.value, "steps": self.steps, "converged": self.converged}

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.damping.value, self.steps, self.converged = state["damping"], state["steps"], state["converged"]


class KroneckerDirection(Direction):
    """Secant steps for linear towers, conjugate gradient for all others: chosen at the first point.

    Args:
        newton: by conjugate gradient.
        secant: by secants; it keeps as many pairs as there is memory for.
    """

    def __init__(self, newton: KroneckerNewton, secant: KroneckerSecant) -> None:
        self.newton, self.secant = newton, secant
        self.memory: int | None = None  # pairs that secant keeps
        self.alternates = False  # whether it may move one side at a time

    @property
    def _chosen(self) -> KroneckerNewton | KroneckerSecant:
        return self.secant if self.memory or self.alternates else self.newton

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """By the one that suits the towers."""
        assert point is not None
        if self.memory is None:
            suits = point.bilinear and self.secant.memory > 0
            self.memory = self._room(point) if suits else 0
            self.alternates = suits and self.secant.alternating > 0
        self.secant.memory = self.memory
        return self._chosen.find(gradient, point)

    def _room(self, point: Point) -> int:
        """Pairs that there is memory for, in the process that has the least of it."""
        theta = point.parameters.vector
        own = point.spare_bytes // (2 * theta.element_size() * max(1, len(theta)))
        return min(self.secant.memory, *(int(pairs) for pairs in point.parameters.layout.group.gather_json(int(own))))

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """See Direction."""
        self._chosen.learn(direction, step)

    def retry(self) -> bool:
        """See Direction."""
        return self._chosen.retry()

    def state(self) -> State:
        """Both states, and which is in use."""
        return {"memory": self.memory, "newton": self.newton.state(), "secant": self.secant.state()}

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.memory = state["memory"]
        self.newton.restore(state["newton"])
        self.secant.restore(state["secant"])
        self.alternates = self.secant.iterations > 0

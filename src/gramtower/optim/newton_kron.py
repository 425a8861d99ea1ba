"""The direction of `newton-kron`: Gauss-Newton by conjugate gradient, preconditioned and damped.

Plain conjugate gradient stalls on all-pairs problems: the mean direction of all embeddings has a curvature millions of
times λ, and thirty steps cannot see past it. The Kronecker preconditioner (engine/objective/kronecker.py) takes that
direction out in closed form, so that a handful of steps suffices. Levenberg-Marquardt damping is added to G and to the
preconditioner: it grows when the real decrease at the full step falls short of the quadratic model's promise, and
shrinks when they agree.

Checked by tests/test_optim.py; timed by `make reproduce` and benchmarks/bench_als.py.
"""

from __future__ import annotations

from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.conjugate_gradient import conjugate_gradient
from gramtower.optim.parts import Direction, DirectionResult, State, StepResult

_LARGEST = 1e12
_NONE = 1e-10  # damping below this is none


class KroneckerNewton(Direction):
    """See the module's first lines.

    Args:
        damping: at the start.
        damping_up: factor when the decrease was under a quarter of the promise.
        damping_down: factor when it was over three quarters.
        cg_steps: conjugate gradient steps allowed at the start; more are allowed while the model is right and the
            steps run out, fewer when it is wrong.
        cg_max_steps: most steps ever allowed.
        cg_tolerance: relative residual, in the preconditioner's norm, at which conjugate gradient stops.
        cg_progress: conjugate gradient also stops when five steps lowered the model by less than this share.
    """

    def __init__(
        self,
        damping: float,
        damping_up: float,
        damping_down: float,
        cg_steps: int,
        cg_max_steps: int,
        cg_tolerance: float,
        cg_progress: float,
    ) -> None:
        self.damping, self.up, self.down = damping, damping_up, damping_down
        self.steps, self.least, self.most = cg_steps, cg_steps, cg_max_steps
        self.tolerance, self.progress = cg_tolerance, cg_progress
        self.converged = True

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """(G + damping) s ≈ −∇L."""
        assert point is not None
        solved = conjugate_gradient(
            point.gauss_newton(self.damping),
            gradient.scale_(-1.0),
            tolerance=self.tolerance,
            max_steps=self.steps,
            preconditioner=point.preconditioner("kronecker", self.damping),
            progress=self.progress,
        )
        self.converged = solved.converged
        return DirectionResult(solved.s, solved.steps, solved.model, self.damping, solved.slope)

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """Move the damping and the number of steps by how well the model predicted the full step."""
        if direction.model is None or not direction.model < 0:
            return
        ratio = step.first_decrease / -direction.model
        if ratio > 0.75:
            self.damping *= self.down ** (3 if abs(ratio - 1) < 0.05 else 1)  # a model this good needs little damping
            if self.damping < _NONE:
                self.damping = 0.0
            if not self.converged:
                self.steps = min(self.most, self.steps + max(1, self.steps // 4))
        elif not ratio >= 0.25:  # NaN counts as disagreement
            self.damping = max(self.damping * self.up, 1e-3)
            self.steps = max(self.least, self.steps - self.steps // 4)

    def retry(self) -> bool:
        """Much more damping: in the limit a short step down the preconditioned gradient."""
        self.damping = max(self.damping, 1e-3) * 100
        return self.damping < _LARGEST

    def state(self) -> State:
        """Damping and steps."""
        return {"damping": self.damping, "steps": self.steps, "converged": self.converged}

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.damping, self.steps, self.converged = state["damping"], state["steps"], state["converged"]

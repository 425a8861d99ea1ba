"""The directions of `newton-kron`: Gauss-Newton by conjugate gradient, preconditioned and damped, and the choice of it.

Plain conjugate gradient stalls on all-pairs problems: the mean direction of all embeddings has a curvature millions of
times λ, and thirty steps cannot see past it. The Kronecker preconditioner (engine/objective/kronecker.py) takes that
direction out in closed form, so that a handful of steps suffices. Levenberg-Marquardt damping is added to G and to the
preconditioner: it grows when the real decrease at the full step falls short of the quadratic model's promise, and
shrinks when they agree.

Where both towers are linear in their parameters, secant.py takes its place: with as many pairs as there is memory for,
and with memory for none by steps that move one side at a time. With other towers it takes over, where there is memory
for a pair, once damping is above what it started with after it has been far below, or far above: the model is no longer
right. From there on what G lacks of the Hessian decides, and damping would only make steps shorter.
"""

from __future__ import annotations

from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.conjugate_gradient import conjugate_gradient
from gramtower.optim.descent import Damping, Direction, DirectionResult, State, StepResult, Verdict
from gramtower.optim.secant import KroneckerSecant

_FAR_BELOW, _FAR_ABOVE = 0.1, 30.0  # times the damping at the start


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
        self.start, self.lowered = damping.value, False

    @property
    def outgrown(self) -> bool:
        """Whether damping is above its start after it has been far below, or far above."""
        return self.damping.value > self.start * (1.0 if self.lowered else _FAR_ABOVE)

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
        self.lowered = self.lowered or self.damping.value < _FAR_BELOW * self.start
        if verdict is Verdict.RIGHT and not self.converged:
            self.steps = min(self.most, self.steps + max(1, self.steps // 4))
        elif verdict is Verdict.WRONG:
            self.steps = max(self.least, self.steps - self.steps // 4)

    def retry(self) -> bool:
        """Much more damping."""
        return self.damping.retry()

    def state(self) -> State:
        """Damping and steps."""
        return {
            "damping": self.damping.value, "lowered": self.lowered, "steps": self.steps, "converged": self.converged
        }  # fmt: skip

    def restore(self, state: State) -> None:
        self.damping.value, self.lowered = state["damping"], state["lowered"]
        self.steps, self.converged = state["steps"], state["converged"]


class KroneckerDirection(Direction):
    """Secant steps for linear towers; for all others conjugate gradient until its model fails, and then those too.

    Args:
        newton: by conjugate gradient.
        secant: by secants; it keeps as many pairs as there is memory for.
        network_memory: pairs that it keeps at most where towers are not linear.
    """

    def __init__(self, newton: KroneckerNewton, secant: KroneckerSecant, network_memory: int) -> None:
        self.newton, self.secant, self.network_memory = newton, secant, network_memory
        self.chosen: KroneckerNewton | KroneckerSecant | None = None

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """By the one that suits the towers, and the iterations before."""
        assert point is not None
        if self.chosen is None:
            self.chosen = self.newton
            if point.bilinear and self.secant.memory > 0:
                self.secant.memory = self._room(point, self.secant.memory)
                if self.secant.memory or self.secant.alternating:
                    self.chosen = self.secant
        elif self.chosen is self.newton and self.newton.outgrown and not point.bilinear:
            memory = self._room(point, self.network_memory)
            if memory:
                self.secant.memory, self.secant.alternating = memory, 0
                self.chosen = self.secant
        return self.chosen.find(gradient, point)

    @staticmethod
    def _room(point: Point, most: int) -> int:
        """Pairs that there is memory for, in the process that has the least of it."""
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
        """Both states, and which is in use."""
        chosen = "" if self.chosen is None else "secant" if self.chosen is self.secant else "newton"
        return {
            "chosen": chosen, "memory": self.secant.memory, "alternating": self.secant.alternating,
            "newton": self.newton.state(), "secant": self.secant.state(),
        }  # fmt: skip

    def restore(self, state: State) -> None:
        self.newton.restore(state["newton"])
        self.secant.restore(state["secant"])
        self.secant.memory, self.secant.alternating = state["memory"], state["alternating"]
        self.chosen = {"": None, "newton": self.newton, "secant": self.secant}[state["chosen"]]

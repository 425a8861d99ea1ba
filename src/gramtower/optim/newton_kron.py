"""The directions of `newton-kron`: damped, preconditioned Gauss-Newton by conjugate gradient, or secant steps.

Plain conjugate gradient stalls on all-pairs problems: the curvature along the mean of all embeddings is millions of
times λ. The Kronecker preconditioner (engine/objective/kronecker.py) handles that direction in closed form.
Levenberg-Marquardt damping is added to G and to the preconditioner: it is increased when the actual decrease at the
full step is below the quadratic model's prediction, and reduced when they agree.

If both towers are linear in their parameters, secant steps (secant.py) are used instead, with as many secant pairs as
fit in memory. Other towers switch to secant steps, if there is memory for a pair, when the quadratic model fails:
damping is above its initial value after it was far below, or it is far above.
"""

from __future__ import annotations

from gramtower.engine.objective.problem import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.conjugate_gradient import conjugate_gradient
from gramtower.optim.descent import Damping, Direction, DirectionResult, State, StepResult, Verdict
from gramtower.optim.secant import KroneckerSecant

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

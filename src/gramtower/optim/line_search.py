"""Step rules: backtracking line search with sufficient decrease (eq:ls_condition), and a fixed step.

The paper checks δ in {δ_init, δ_init/2, δ_init/4, …}, δ_init being the last step taken, doubled every five iterations
(Section "Compared Optimization Methods"). A value has rounding errors; once the decrease that the slope promises is
below them, the search ends without a point.
"""

from __future__ import annotations

import math

from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters
from gramtower.optim.parts import State, StepResult, StepRule

# Decreases this far below the rounding level are not even tried; above it a trial must still come out lower.
_NOISE = 0.1


class Backtracking(StepRule):
    """A step rule: halve the step until the objective falls enough.

    L(θ + δs) ≤ L(θ) + ηδ sᵀ∇L, δ being the step and s the direction.

    Args:
        sufficient_decrease: η.
        initial_step: δ_init of the first iteration, and of every iteration if ``double_every`` is 0.
        double_every: iterations after which δ_init is doubled; 0 starts every search from ``initial_step``.
        max_trials: objective values computed before giving up.
    """

    def __init__(
        self, sufficient_decrease: float = 1e-4, initial_step: float = 1.0, double_every: int = 5, max_trials: int = 60
    ) -> None:
        self.eta, self.initial, self.double_every, self.max_trials = (
            sufficient_decrease, initial_step, double_every, max_trials,
        )  # fmt: skip
        self.last, self.iterations = initial_step, 0

    def take(self, point: Point, slope: float, s: Parameters) -> StepResult:
        """See the class; ``slope`` is sᵀ∇L."""
        line, first = point.along(s), -math.inf
        step = self._start()
        for trial in range(1, self.max_trials + 1):
            if not -slope * step > point.value_noise * _NOISE:
                return StepResult(None, step, trial - 1, first)
            trial_point = line(step)
            if trial == 1:
                first = point.value - trial_point.value
            enough = trial_point.value <= point.value + self.eta * step * slope and trial_point.value < point.value
            if enough and trustworthy(point, trial_point):
                self.last = step
                self.iterations += 1
                return StepResult(trial_point, step, trial, first)
            step /= 2
            del trial_point  # before the next one is made: each is as large as an evaluation
        return StepResult(None, step, self.max_trials, first)

    def _start(self) -> float:
        if not self.double_every:
            return self.initial
        doubled = self.iterations and self.iterations % self.double_every == 0
        return self.last * (2 if doubled else 1)

    def state(self) -> State:
        """The last step and the number of steps taken."""
        return {"last": self.last, "iterations": self.iterations}

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.last, self.iterations = state["last"], state["iterations"]


def trustworthy(point: Point, trial_point: Point) -> bool:
    """Whether a trial's value means anything.

    Far out, L is a difference of sums so large that it is infinite, or rounding alone; both can look like a decrease.
    """
    noise = trial_point.value_noise
    return math.isfinite(trial_point.value) and noise <= max(10 * point.value_noise, 0.01 * abs(point.value))

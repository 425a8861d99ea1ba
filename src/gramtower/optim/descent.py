"""Descent methods and their parts: a direction and a step rule.

    direction   from a gradient, and for second-order methods its point, to a direction s
    step rule   from a point and a direction to the next point

    Steepest   s = −∇L                                     (eq:grad_dir)
    Diagonal   s = −(μI + M)^(−½) ∇L,  M ← M + diag(∇L)²   (eq:diag_scaling)

second_order.py has the directions by Gauss-Newton and secant pairs, stochastic.py the methods with estimated gradients;
solvers.py lists the parts of each optimizer.

Every part has ``state`` and ``restore``, which is all that a checkpoint needs. Parts replace their tensors and never
write into them, so that a state is a snapshot. The type of a value determines how processes divide it: Parameters are
divided like θ, a Sharded tensor has rows of this process's entities, and any other tensor is the same in all processes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers

State = dict[str, Any]  # Parameters, Sharded and plain tensors, numbers, text, or JSON-like values made of them
Stored = Parameters | Sharded | Tensor
STORED = (Parameters, Sharded, Tensor)


class Stateful:
    """Something whose state a checkpoint saves and restores."""

    def state(self) -> State:
        """Everything needed to continue as if never interrupted; later iterations do not change it."""
        return {}

    def restore(self, state: State) -> None:
        """Continue from a result of :meth:`state`."""


@dataclass
class DirectionResult:
    """The result of ``Direction.find``.

    Attributes:
        s: the direction.
        cg_steps: number of conjugate gradient steps.
        model: predicted change of the objective at the full step (negative), or None without a quadratic model.
        damping: the damping that was used, or None.
        slope: sᵀ∇L if ``find`` consumed the gradient; None if the gradient is still valid.
    """

    s: Parameters
    cg_steps: int = 0
    model: float | None = None
    damping: float | None = None
    slope: float | None = None


@dataclass
class StepResult:
    """The result of ``StepRule.take``.

    Attributes:
        point: the new point, or None if no measurable decrease was found.
        size: δ, the step size.
        trials: number of objective values computed.
        first_decrease: decrease of the objective at the first trial (negative if it increased).
    """

    point: Point | None
    size: float
    trials: int
    first_decrease: float


class Direction(Stateful):
    """A part of an optimizer, built in or custom: finds the direction of the next step."""

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        """The direction for the gradient at a point.

        ``find`` may consume the gradient, which means that it overwrites it or keeps it for later. It must then return
        ``slope``, and the caller does not use the gradient again. Without ``slope`` the gradient must be unchanged, and
        the caller does not change it either.
        """
        raise NotImplementedError

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """Adapt to the outcome of a step along the direction."""

    def retry(self) -> bool:
        """Adapt after a step that failed, and return whether to try again."""
        return False


class FirstOrder(Direction):
    """A direction that depends only on gradients, which may be estimates."""

    def scaled(self, gradient: Parameters) -> Parameters:
        """The direction for this gradient, which is not changed."""
        raise NotImplementedError

    def find(self, gradient: Parameters, point: Point) -> DirectionResult:
        return DirectionResult(self.scaled(gradient))


class StepRule(Stateful):
    """A part of an optimizer, built in or custom: chooses the step size along a direction."""

    def take(self, point: Point, slope: float, s: Parameters) -> StepResult:
        """Step from a point along s, where ``slope`` is sᵀ∇L."""
        raise NotImplementedError


def vector(state: State, name: str) -> Parameters | None:
    """The Parameters that a state has under a name, or None."""
    found = state.get(name)
    if found is not None and not isinstance(found, Parameters):
        raise TypeError(f"{name} is a {type(found).__name__}, expected Parameters")
    return found


def vectors(state: State, name: str) -> list[Parameters]:
    """The Parameters that a state has under ``name0``, ``name1``, …."""
    found: list[Parameters] = []
    while (one := vector(state, f"{name}{len(found)}")) is not None:
        found.append(one)
    return found


def split_state(state: State, prefix: str = "") -> tuple[dict[str, Stored], dict[str, object]]:
    """Split a nested state into flat dictionaries of tensors and JSON-like values; the inverse of join_state."""
    tensors: dict[str, Stored] = {}
    values: dict[str, object] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, STORED):
            tensors[name] = value
        elif isinstance(value, dict) and any(isinstance(v, (*STORED, dict)) for v in value.values()):
            below = split_state(value, name + "/")
            tensors |= below[0]
            values |= below[1]
        else:
            values[name] = value
    return tensors, values


def join_state(tensors: dict[str, Stored], values: dict[str, object]) -> State:
    """Build the nested state from the results of :func:`split_state`."""
    state: State = {}
    for name, value in {**values, **tensors}.items():
        place = state
        *folders, key = name.split("/")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[key] = value
    return state


_NOISE = 0.1  # expected decreases below this fraction of the rounding error are not tried


class Backtracking(StepRule):
    """A step rule: halve the step until the objective decreases sufficiently.

    The condition is L(θ + δs) ≤ L(θ) + ηδ sᵀ∇L (eq:ls_condition) with the step size δ and the direction s. As in the
    paper, δ is one of {δ_init, δ_init/2, δ_init/4, …}, where δ_init is the last step size, doubled every few
    iterations. The search ends without a point when the decrease that the slope predicts is below the rounding error.

    Args:
        sufficient_decrease: η.
        initial_step: δ_init of the first iteration, and of every iteration if ``double_every`` is 0.
        double_every: iterations after which δ_init is doubled; 0 starts every search from ``initial_step``.
        max_trials: number of objective values computed before giving up.
    """

    def __init__(
        self, sufficient_decrease: float = 1e-4, initial_step: float = 1.0, double_every: int = 5, max_trials: int = 60
    ) -> None:
        self.eta, self.initial, self.double_every, self.max_trials = (
            sufficient_decrease, initial_step, double_every, max_trials,
        )  # fmt: skip
        self.last, self.iterations = initial_step, 0

    def take(self, point: Point, slope: float, s: Parameters) -> StepResult:
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
            del trial_point  # free the memory of its evaluation before the next one
        return StepResult(None, step, self.max_trials, first)

    def _start(self) -> float:
        if not self.double_every:
            return self.initial
        doubled = self.iterations and self.iterations % self.double_every == 0
        return self.last * (2 if doubled else 1)

    def state(self) -> State:
        return {"last": self.last, "iterations": self.iterations}

    def restore(self, state: State) -> None:
        self.last, self.iterations = state["last"], state["iterations"]


def trustworthy(point: Point, trial_point: Point) -> bool:
    """Whether the value of a trial is accurate enough.

    Far away, L is a difference of sums that are infinite or so large that only rounding errors remain; both can look
    like a decrease.
    """
    noise = trial_point.value_noise
    return math.isfinite(trial_point.value) and noise <= max(10 * point.value_noise, 0.01 * abs(point.value))


@dataclass
class IterationResult:
    """The result of one iteration."""

    point: Point | None  # the new point, or None if none was found
    gradient_norm: float  # ‖∇L‖ at the start of the iteration; training/result.Record describes exceptions
    cg_steps: int = 0  # number of conjugate gradient steps
    step: float = 0.0  # δ
    damping: float | None = None  # the damping that was used, or None
    trials: int = 0  # number of objective values computed by the line search
    # instead of the point, the new θ of a method that does not compute the value there
    parameters: Parameters | None = None


class Method(Stateful):
    """A running optimizer, which moves from one point to the next."""

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        """Make one iteration."""
        raise NotImplementedError


class Descent(Method):
    """A method with exact gradients, a direction and a step rule."""

    def __init__(self, direction: Direction, rule: StepRule) -> None:
        self.direction, self.rule = direction, rule

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        gradient = point.gradient()
        norm = gradient.norm()
        if not norm < float("inf") or norm == 0.0:
            return IterationResult(None, norm)
        while True:
            direction = self.direction.find(gradient, point)
            slope = gradient.dot(direction.s) if direction.slope is None else direction.slope
            kept = gradient if direction.slope is None else None
            del gradient
            step = self.rule.take(point, slope, direction.s)
            self.direction.learn(direction, step)
            if step.point is not None or not self.direction.retry():
                return IterationResult(step.point, norm, direction.cg_steps, step.size, direction.damping, step.trials)
            gradient = point.gradient() if kept is None else kept

    def state(self) -> State:
        return {"direction": self.direction.state(), "rule": self.rule.state()}

    def restore(self, state: State) -> None:
        self.direction.restore(state.get("direction", {}))
        self.rule.restore(state.get("rule", {}))


_LARGEST_DAMPING = 1e12
_LEAST_DAMPING = 1e-3  # smallest value after an increase
_NO_DAMPING = 1e-10  # values below this become 0


class Verdict(enum.Enum):
    """The actual decrease at the full step, compared with the one that a quadratic model predicted."""

    GOOD = "good"  # more than three quarters of the prediction
    FAIR = "fair"
    POOR = "poor"  # less than a quarter, or NaN


class Damping:
    """Levenberg-Marquardt damping: increased when a quadratic model predicts too much, reduced when it is accurate.

    Args:
        value: initial value.
        up: factor after a decrease of less than a quarter of the prediction.
        down: factor after a decrease of more than three quarters.
    """

    def __init__(self, value: float, up: float, down: float) -> None:
        self.value, self._up, self._down = value, up, down

    def learn(self, decrease: float, model: float) -> Verdict:
        """Update the damping by the decrease at the full step and the predicted change, which is negative."""
        ratio = decrease / -model
        if ratio > 0.75:
            self.value *= self._down ** (3 if abs(ratio - 1) < 0.05 else 1)  # an accurate model needs little damping
            if self.value < _NO_DAMPING:
                self.value = 0.0
            return Verdict.GOOD
        if ratio >= 0.25:
            return Verdict.FAIR
        self.value = max(self.value * self._up, _LEAST_DAMPING)
        return Verdict.POOR

    def retry(self) -> bool:
        """Increase the damping by a factor of 100, for a shorter step; return False once it is too large."""
        self.value = max(self.value, _LEAST_DAMPING) * 100
        return self.value < _LARGEST_DAMPING


class Steepest(FirstOrder):
    """Steepest descent."""

    def scaled(self, gradient: Parameters) -> Parameters:
        """s = −∇L."""
        return -gradient


class Diagonal(FirstOrder):
    """AdaGrad: each coordinate is divided by the root of its sum of squared gradients; μ keeps the scaling finite."""

    def __init__(self, mu: float) -> None:
        self.mu = mu
        self.squares: Parameters | None = None

    def scaled(self, gradient: Parameters) -> Parameters:
        """s = −(μI + M)^(−½) ∇L, after adding this gradient's squares to M."""
        g = gradient.vector
        squares = g * g if self.squares is None else torch.addcmul(self.squares.vector, g, g)
        self.squares = Parameters(gradient.layout, squares)
        return Parameters(gradient.layout, -g / (squares + self.mu).sqrt_())

    def state(self) -> State:
        return {} if self.squares is None else {"squares": self.squares}

    def restore(self, state: State) -> None:
        self.squares = vector(state, "squares")

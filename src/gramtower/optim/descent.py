"""What an optimization method is made of, and how its parts keep their state.

    direction   which way: from a gradient, and for second-order ones the point it belongs to, to a direction s
    step rule   how far: from a point and a direction to the next point

Every part has ``state`` and ``restore``, which is all that a checkpoint needs. Parts replace their tensors and never
write into them, so that a state is a snapshot. The type of a value says who holds it: Parameters are cut as θ is, a
Sharded tensor has rows of this process's entities, and any other tensor is the same in all processes.

Step rules: backtracking line search with sufficient decrease (eq:ls_condition), and a fixed step.

The paper checks δ in {δ_init, δ_init/2, δ_init/4, …}, δ_init being the last step taken, doubled every five iterations
(Section "Compared Optimization Methods"). A value has rounding errors; once the decrease that the slope promises is
below them, the search ends without a point.

What runs an iteration: exact gradients, a direction and a line search. stochastic.py has estimated gradients.

solvers.py says which parts the methods of each name are made of.

Levenberg-Marquardt damping: more of it where a quadratic model promised too much, less where it was right.

Directions: steepest descent, AdaGrad's diagonal, Newton by conjugate gradient, and limited-memory BFGS.

    Steepest   s = −∇L                                     (eq:grad_dir)
    Diagonal   s = −(μI + M)^(−½) ∇L,  M ← M + diag(∇L)²   (eq:diag_scaling)
    NewtonCG   G s = −∇L to a relative residual ξ          (eq:general_ls)
    LBFGS      limited-memory BFGS                         (secant.py)

newton_kron.py and secant.py have the preconditioned ones.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.conjugate_gradient import conjugate_gradient

State = dict[str, Any]  # Parameters, Sharded and plain tensors, numbers, text, or JSON-like values made of them
Stored = Parameters | Sharded | Tensor
STORED = (Parameters, Sharded, Tensor)


class Stateful:
    """Something whose state a checkpoint saves and restores."""

    def state(self) -> State:
        """What is needed to continue exactly as if never interrupted; later iterations do not change it."""
        return {}

    def restore(self, state: State) -> None:
        """Continue from what :meth:`state` returned."""


@dataclass
class DirectionResult:
    """What a Direction found: which way to go, and how that was computed.

    Attributes:
        s: the direction.
        cg_steps: conjugate gradient steps it took.
        model: the decrease that a quadratic model promises for the full step (negative), or None without a model.
        damping: damping in force, or None.
        slope: sᵀ∇L, set when ``find`` overwrote the gradient; None if the gradient is still valid.
    """

    s: Parameters
    cg_steps: int = 0
    model: float | None = None
    damping: float | None = None
    slope: float | None = None


@dataclass
class StepResult:
    """What a StepRule did: the step it took, and the point where that led.

    Attributes:
        point: the new point, or None if no measurable decrease was found.
        size: δ.
        trials: objective values computed.
        first_decrease: decrease of the objective at the first trial (negative if it rose).
    """

    point: Point | None
    size: float
    trials: int
    first_decrease: float


class Direction(Stateful):
    """A part of an optimizer, perhaps of your own: which way to go from a point."""

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """The direction for this gradient. ``point`` is None for gradients from samples.

        A direction that overwrites the gradient sets ``slope``.
        """
        raise NotImplementedError

    def learn(self, direction: DirectionResult, step: StepResult) -> None:
        """Adapt to how well the direction did."""

    def retry(self) -> bool:
        """After a failed step: adapt, and return whether to try again."""
        return False


class StepRule(Stateful):
    """A part of an optimizer, perhaps of your own: how far to go along a direction."""

    def take(self, point: Point, slope: float, s: Parameters) -> StepResult:
        """The step from a point along s."""
        raise NotImplementedError


def vector(state: State, name: str) -> Parameters | None:
    """The vector of θ's layout that a state has under a name, None if it has none."""
    found = state.get(name)
    if found is not None and not isinstance(found, Parameters):
        raise TypeError(f"{name} is a {type(found).__name__}, expected Parameters")
    return found


def vectors(state: State, name: str) -> list[Parameters]:
    """The vectors called ``name0``, ``name1``, … as far as there are any."""
    found: list[Parameters] = []
    while (one := vector(state, f"{name}{len(found)}")) is not None:
        found.append(one)
    return found


def split_state(state: State, prefix: str = "") -> tuple[dict[str, Stored], dict[str, Any]]:
    """A nested state as flat tensors and JSON-like values; :func:`join_state` undoes it."""
    tensors: dict[str, Stored] = {}
    values: dict[str, Any] = {}
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


def join_state(tensors: dict[str, Stored], values: dict[str, Any]) -> State:
    """The nested state that :func:`split_state` took apart."""
    state: State = {}
    for name, value in {**values, **tensors}.items():
        place = state
        *folders, key = name.split("/")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[key] = value
    return state


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
        self.last, self.iterations = state["last"], state["iterations"]


def trustworthy(point: Point, trial_point: Point) -> bool:
    """Whether a trial's value means anything.

    Far out, L is a difference of sums so large that it is infinite, or rounding alone; both can look like a decrease.
    """
    noise = trial_point.value_noise
    return math.isfinite(trial_point.value) and noise <= max(10 * point.value_noise, 0.01 * abs(point.value))


@dataclass
class IterationResult:
    """What one iteration did.

    Attributes:
        point: the new point, or None if none was found.
        parameters: the new θ of a method that needs no value there, in place of the point.
        gradient_norm: ‖∇L‖ where the iteration started, or what stands for it; see training/result.Record.
        cg_steps: conjugate gradient steps.
        step: δ.
        damping: damping that was in force, or None.
        trials: objective values computed by the line search.
    """

    point: Point | None
    gradient_norm: float
    cg_steps: int = 0
    step: float = 0.0
    damping: float | None = None
    trials: int = 0
    parameters: Parameters | None = None


class Method(Stateful):
    """An optimizer while it runs: it goes from one point to the next."""

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        """One iteration."""
        raise NotImplementedError


class Descent(Method):
    """A method that goes downhill: the exact gradient, a direction from it, and a line search."""

    def __init__(self, direction: Direction, rule: StepRule) -> None:
        self.direction, self.rule = direction, rule

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        """∇L, s, δ, and on to θ + δs."""
        gradient = point.gradient()
        norm = gradient.norm()
        if not norm < float("inf") or norm == 0.0:
            return IterationResult(None, norm)
        while True:
            direction = self.direction.find(gradient, point)
            slope = gradient.dot(direction.s) if direction.slope is None else direction.slope
            kept = gradient if direction.slope is None else None  # otherwise it was overwritten
            del gradient
            step = self.rule.take(point, slope, direction.s)
            self.direction.learn(direction, step)
            if step.point is not None or not self.direction.retry():
                return IterationResult(step.point, norm, direction.cg_steps, step.size, direction.damping, step.trials)
            gradient = point.gradient() if kept is None else kept

    def state(self) -> State:
        """The parts' states."""
        return {"direction": self.direction.state(), "rule": self.rule.state()}

    def restore(self, state: State) -> None:
        self.direction.restore(state.get("direction", {}))
        self.rule.restore(state.get("rule", {}))


_LARGEST = 1e12
_LEAST = 1e-3  # what it grows from
_NONE = 1e-10  # damping below this is none


class Verdict(enum.Enum):
    """How a model's promise compared with the decrease at the full step."""

    RIGHT = "right"  # over three quarters of it
    SO_SO = "so-so"
    WRONG = "wrong"  # under a quarter of it, or not a number


class Damping:
    """The damping in force, and how it moves.

    Args:
        value: at the start.
        up: factor when the decrease was under a quarter of the promise.
        down: factor when it was over three quarters.
    """

    def __init__(self, value: float, up: float, down: float) -> None:
        self.value, self._up, self._down = value, up, down

    def learn(self, decrease: float, model: float) -> Verdict:
        """Move by the decrease at the full step and the model's value there, which is negative."""
        ratio = decrease / -model
        if ratio > 0.75:
            self.value *= self._down ** (3 if abs(ratio - 1) < 0.05 else 1)  # a model this good needs little damping
            if self.value < _NONE:
                self.value = 0.0
            return Verdict.RIGHT
        if ratio >= 0.25:
            return Verdict.SO_SO
        self.value = max(self.value * self._up, _LEAST)  # NaN counts as disagreement
        return Verdict.WRONG

    def retry(self) -> bool:
        """Much more of it: in the limit a short step down the preconditioned gradient. Whether there is any more."""
        self.value = max(self.value, _LEAST) * 100
        return self.value < _LARGEST


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

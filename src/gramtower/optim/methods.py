"""The methods by name: two lines each say what a method is made of.

`gd`, `gd-diag`, `newton`, `sogram`, `sogram-diag`, `sampling`, `sampling-diag` are the paper's seven (Section "Compared
Optimization Methods"), with its constants as defaults; `newton-kron` and `lbfgs` go beyond it. The keyword arguments of
each function below are the options that :func:`gramtower.minimize` takes for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gramtower import _checks as check
from gramtower.model.parameters import Parameters
from gramtower.model.towers import Towers
from gramtower.objective.point import Point
from gramtower.objective.problem import Problem
from gramtower.optim.directions import LBFGS, Diagonal, NewtonCG, Steepest
from gramtower.optim.line_search import Backtracking
from gramtower.optim.newton_kron import KroneckerNewton
from gramtower.optim.parts import Direction, Part, State
from gramtower.optim.sampled import Blocks, Source, Subsets

_SEARCHED_STEPS = 10


@dataclass
class Moved:
    """What one iteration did.

    Attributes:
        point: the new point, or None if none was found.
        parameters: the new θ of a method that needs no value there, in place of the point.
        gradient_norm: ‖∇L‖ where the iteration started, or of the last sample.
        cg_steps: conjugate gradient steps.
        step: δ.
        damping: damping that was in force, or None.
        trials: values looked at by the line search.
    """

    point: Point | None
    gradient_norm: float
    cg_steps: int = 0
    step: float = 0.0
    damping: float | None = None
    trials: int = 0
    parameters: Parameters | None = None


class Method(Part):
    """Goes from one point to the next."""

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> Moved:
        """One iteration."""
        raise NotImplementedError


class Descent(Method):
    """Exact gradient, a direction, a line search."""

    def __init__(self, direction: Direction, rule: Backtracking) -> None:
        self.direction, self.rule = direction, rule

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> Moved:
        """∇L, s, δ, and on to θ + δs."""
        gradient = point.gradient()
        norm = gradient.norm()
        if not norm < float("inf") or norm == 0.0:
            return Moved(None, norm)
        while True:
            found = self.direction.find(gradient, point)
            slope = gradient.dot(found.s) if found.slope is None else found.slope
            kept = gradient if found.slope is None else None  # otherwise its memory was used for the direction
            del gradient
            taken = self.rule.take(point, slope, found.s)
            self.direction.learn(found, taken)
            if taken.point is not None or not self.direction.retry():
                return Moved(taken.point, norm, found.cg_steps, taken.size, found.damping, taken.trials)
            gradient = point.gradient() if kept is None else kept

    def state(self) -> State:
        """The parts' states."""
        return {"direction": self.direction.state(), "rule": self.rule.state()}

    def restore(self, state: State) -> None:
        """See Part."""
        self.direction.restore(state.get("direction", {}))
        self.rule.restore(state["rule"])


class Sampled(Method):
    """Estimated gradients, a direction, a fixed step; one iteration is several steps.

    Args:
        source: where gradients come from.
        direction: which way.
        step_size: δ; None finds it by a few line-searched gradient steps from the start.
        steps: steps in one iteration; the objective is evaluated once after them.
    """

    def __init__(self, source: Source, direction: Direction, step_size: float | None, steps: int) -> None:
        self.source, self.direction, self.step_size, self.steps = source, direction, step_size, steps

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> Moved:
        """θ ← θ + δs, several times."""
        if self.step_size is None:
            self.step_size = searched_step(problem, towers, point)
        theta, norm = point.parameters.clone(), 0.0
        for _ in range(self.steps):
            gradient = self.source.gradient(problem, towers, theta)
            theta.axpy_(self.step_size, self.direction.find(gradient, None).s)
            norm = gradient.norm()
            if not norm < float("inf"):
                return Moved(None, norm, step=self.step_size)
        return Moved(None, norm, step=self.step_size, parameters=theta)

    def state(self) -> State:
        """The parts' states and the step found."""
        return {"source": self.source.state(), "direction": self.direction.state(), "step_size": self.step_size}

    def restore(self, state: State) -> None:
        """See Part."""
        self.source.restore(state["source"])
        self.direction.restore(state.get("direction", {}))
        self.step_size = state["step_size"]


def searched_step(problem: Problem, towers: Towers, point: Point) -> float:
    """The smallest step among the first few that line-searched gradient descent takes from here."""
    method = gd(seed=0)
    sizes: list[float] = []
    for _ in range(_SEARCHED_STEPS):
        moved = method.iterate(problem, towers, point)
        if moved.point is None:
            break
        point = moved.point
        sizes.append(moved.step)
    return min(sizes, default=2.0**-25)


def gd(*, seed: int, sufficient_decrease: float = 1e-4, initial_step: float = 1.0, double_every: int = 5) -> Method:
    """Gradient descent with backtracking line search."""
    return Descent(Steepest(), Backtracking(sufficient_decrease, initial_step, double_every))


def gd_diag(
    *, seed: int, mu: float = 1e-8, sufficient_decrease: float = 1e-4, initial_step: float = 1.0, double_every: int = 5
) -> Method:
    """Gradient descent scaled by AdaGrad's diagonal, with backtracking line search."""
    return Descent(Diagonal(mu), Backtracking(sufficient_decrease, initial_step, double_every))


def newton(
    *,
    seed: int,
    cg_tolerance: float = 0.1,
    cg_max_steps: int = 30,
    sufficient_decrease: float = 1e-4,
    initial_step: float = 1.0,
    double_every: int = 5,
) -> Method:
    """The paper's Gauss-Newton method."""
    direction = NewtonCG(cg_tolerance, cg_max_steps)
    return Descent(direction, Backtracking(sufficient_decrease, initial_step, double_every))


def newton_kron(
    *,
    seed: int,
    damping: float = 1.0,
    damping_up: float = 2.5,
    damping_down: float = 0.5,
    cg_steps: int = 3,
    cg_max_steps: int = 40,
    cg_tolerance: float = 1e-4,
    cg_progress: float = 5e-3,
    sufficient_decrease: float = 1e-4,
) -> Method:
    """Damped Gauss-Newton with Kronecker-preconditioned conjugate gradient."""
    direction = KroneckerNewton(damping, damping_up, damping_down, cg_steps, cg_max_steps, cg_tolerance, cg_progress)
    return Descent(direction, Backtracking(sufficient_decrease, 1.0, double_every=0))


def lbfgs(*, seed: int, memory: int = 10, sufficient_decrease: float = 1e-4) -> Method:
    """Limited-memory BFGS with backtracking line search from δ = 1."""
    return Descent(LBFGS(memory), Backtracking(sufficient_decrease, 1.0, double_every=0))


def sogram(
    *, seed: int, ratio: float = 0.01, alpha: float = 0.1, step_size: float | None = None, steps: int | None = None
) -> Method:
    """Stochastic online Gramians: gradients from two subsets of the observed pairs."""
    return Sampled(Subsets(seed, ratio, alpha), Steepest(), step_size, steps or round(1 / ratio))


def sogram_diag(
    *,
    seed: int,
    ratio: float = 0.01,
    alpha: float = 0.1,
    mu: float = 1e-8,
    step_size: float = 0.01,
    steps: int | None = None,
) -> Method:
    """`sogram` scaled by AdaGrad's diagonal."""
    return Sampled(Subsets(seed, ratio, alpha), Diagonal(mu), step_size, steps or round(1 / ratio))


def sampling(*, seed: int, ratio: float = 0.01, step_size: float | None = None, steps: int | None = None) -> Method:
    """Gradients from all pairs between a few left and a few right entities."""
    return Sampled(Blocks(seed, ratio), Steepest(), step_size, steps or round(1 / ratio))


def sampling_diag(
    *, seed: int, ratio: float = 0.01, mu: float = 1e-8, step_size: float = 0.01, steps: int | None = None
) -> Method:
    """`sampling` scaled by AdaGrad's diagonal."""
    return Sampled(Blocks(seed, ratio), Diagonal(mu), step_size, steps or round(1 / ratio))


OPTIMIZERS: dict[str, Callable[..., Method]] = {
    "newton-kron": newton_kron,
    "gd": gd,
    "gd-diag": gd_diag,
    "newton": newton,
    "sogram": sogram,
    "sogram-diag": sogram_diag,
    "sampling": sampling,
    "sampling-diag": sampling_diag,
    "lbfgs": lbfgs,
}

_LIMITS: dict[str, tuple[float, float]] = {  # exclusive lower, inclusive upper
    "ratio": (0.0, 1.0),
    "alpha": (0.0, 1.0),
    "sufficient_decrease": (0.0, 0.999),
    "damping_down": (0.0, 1.0),
}
_COUNTS = ("cg_steps", "cg_max_steps", "memory", "steps")


def make_method(name: str, seed: int, options: dict[str, Any]) -> Method:
    """A method by name with its options; refuses names and options that do not exist."""
    check.choice("optimizer", name, tuple(OPTIMIZERS))
    known = [option for option in inspect.signature(OPTIMIZERS[name]).parameters if option != "seed"]
    for option, value in options.items():
        if option not in known:
            near = check.near(option, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            check.fail(f"option of {name}", f"{option!r}{hint}", "one of " + ", ".join(known))
        _check_option(option, value)
    return OPTIMIZERS[name](seed=seed, **options)


def _check_option(option: str, value: Any) -> None:
    if value is None and option in ("step_size", "steps"):
        return
    if option in _COUNTS:
        check.count(option, value)
    elif option == "double_every":
        check.count(option, value, minimum=0)
    elif option in _LIMITS:
        low, high = _LIMITS[option]
        if not low < check.number(option, value) <= high:
            check.fail(option, value, f"a number above {low:g} and at most {high:g}")
    elif option in ("damping", "cg_tolerance", "cg_progress"):
        check.number(option, value, minimum=0.0)
    else:
        check.number(option, value, above=0.0)

"""What an optimization method is made of, and how its parts keep their state.

    direction   which way: from a gradient, and for second-order ones the point it belongs to, to a direction s
    step rule   how far: from a point and a direction to the next point

Every part can say what it remembers (``state``) and take it back (``restore``), which is all that a checkpoint needs.
Parts replace what they remember and never write into it, so that a state stays that of the moment it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters

State = dict[str, Any]  # tensors, numbers, text, or JSON-like values made of them


class Part:
    """Something with a memory."""

    def state(self) -> State:
        """What must be remembered to go on exactly as if never stopped; it does not change when the part goes on."""
        return {}

    def restore(self, state: State) -> None:
        """Take back what :meth:`state` gave."""


@dataclass
class DirectionResult:
    """A direction.

    Attributes:
        s: the direction.
        cg_steps: conjugate gradient steps it took.
        model: the decrease that a quadratic model promises for the full step (negative), or None without a model.
        damping: damping in force, or None.
        slope: sᵀ∇L where the gradient's memory was used for the direction; None where the gradient is still there.
    """

    s: Parameters
    cg_steps: int = 0
    model: float | None = None
    damping: float | None = None
    slope: float | None = None


@dataclass
class StepResult:
    """A step.

    Attributes:
        point: where it led, or None if no measurable decrease was found.
        size: δ.
        trials: values looked at.
        first_decrease: decrease of the objective at the first trial (negative if it rose).
    """

    point: Point | None
    size: float
    trials: int
    first_decrease: float


class Direction(Part):
    """Which way to go."""

    def find(self, gradient: Parameters, point: Point | None) -> DirectionResult:
        """The direction for this gradient. ``point`` is None for gradients from samples.

        A direction that uses the gradient's memory says so by giving the slope.
        """
        raise NotImplementedError

    def learn(self, found: DirectionResult, taken: StepResult) -> None:
        """See how far the direction led."""

    def retry(self) -> bool:
        """After a failed step: change something and say whether another try makes sense."""
        return False


class StepRule(Part):
    """How far to go."""

    def take(self, point: Point, slope: float, s: Parameters) -> StepResult:
        """The step from a point along s."""
        raise NotImplementedError


def split_state(state: State, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A nested state as flat tensors and JSON-like values; :func:`join_state` undoes it."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, dict) and any(isinstance(v, (Tensor, dict)) for v in value.values()):
            below = split_state(value, name + "/")
            tensors |= below[0]
            values |= below[1]
        else:
            values[name] = value
    return tensors, values


def join_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> State:
    """The nested state that :func:`split_state` took apart."""
    state: State = {}
    for name, value in {**values, **tensors}.items():
        place = state
        *folders, key = name.split("/")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[key] = value
    return state

"""What an optimization method is made of, and how its parts keep their state.

    direction   which way: from a gradient, and for second-order ones the point it belongs to, to a direction s
    step rule   how far: from a point and a direction to the next point

Every part has ``state`` and ``restore``, which is all that a checkpoint needs. Parts replace their tensors and never
write into them, so that a state is a snapshot. The type of a value says who holds it: Parameters are cut as θ is, a
Sharded tensor has rows of this process's entities, and any other tensor is the same in all processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.point import Point
from gramtower.engine.towers.parameters import Parameters

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

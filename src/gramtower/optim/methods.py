"""What runs an iteration: exact gradients, a direction and a line search. stochastic.py has estimated gradients.

solvers.py says which parts the methods of each name are made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.parts import Direction, State, Stateful, StepRule


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
        """See Stateful."""
        self.direction.restore(state.get("direction", {}))
        self.rule.restore(state.get("rule", {}))

"""Optimizers of torch, such as AdamW, with exact gradients over all pairs.

    θ ← step(θ, ∇L(θ), state)

Nothing is sampled and there is no line search: the objective may increase, and the learning rate is that of the user.
Checkpoints have the optimizer's state, so that a run continues exactly. An iteration costs as many gradients as it has
steps, and memory for a copy of θ, the state, and a copy of the state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import IterationResult, Method, State

OptimizerClass = type[torch.optim.Optimizer]


class TorchSteps(Method):
    """Steps of an optimizer of torch, which updates its own copy of θ."""

    def __init__(self, kind: OptimizerClass, options: dict[str, Any], steps: int) -> None:
        self._kind, self._options, self._steps = kind, options, steps
        self._theta: Parameters | None = None  # the optimizer's parameters are views of it
        self._saved: State = {}  # the state of a checkpoint until the optimizer is there

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        """Make the steps of one iteration."""
        if (processes := problem.shards.group.size) > 1:
            check.fail("optimizer", f"{self._kind.__name__} in {processes} processes", "a solver of gramtower.optim")
        if self._theta is None:
            self._begin(point.parameters)
        assert self._theta is not None
        self._theta.vector.copy_(point.parameters.vector)
        norm = math.nan
        for step in range(self._steps):
            at = point if step == 0 else problem.at(towers, self._theta.clone())
            gradient = at.gradient()
            norm = gradient.norm()
            if not 0.0 < norm < math.inf:
                return IterationResult(None, norm)
            for name, view in self._views.items():
                view.grad = gradient[name]
            self._optimizer.step()
        for view in self._views.values():
            view.grad = None
        rate = float(self._optimizer.param_groups[0].get("lr", 0.0))
        return IterationResult(None, norm, step=rate, parameters=self._theta.clone())

    def _begin(self, like: Parameters) -> None:
        self._theta = like.clone()
        self._views: dict[str, Tensor] = {name: view.requires_grad_() for name, view in self._theta.items()}
        self._optimizer = self._kind(list(self._views.values()), **self._options)
        for name, view in self._views.items():
            if of := {key.partition(":")[2]: one for key, one in self._saved.items() if key.startswith(f"{name}:")}:
                self._optimizer.state[view] = {key: self._placed(one, view) for key, one in of.items()}
        self._saved = {}

    def _placed(self, one: Tensor, view: Tensor) -> Tensor:
        """A copy of a stored tensor on the device where the optimizer keeps it: counters are on the CPU."""
        counter = not one.ndim and not (self._options.get("capturable") or self._options.get("fused"))
        return one.to("cpu" if counter else view.device, copy=True)

    def state(self) -> State:
        """A copy of the tensors of the optimizer's state, by parameter and name."""
        if self._theta is None:
            return self._saved
        state = {name: self._optimizer.state.get(view, {}) for name, view in self._views.items()}
        return {
            f"{name}:{key}": one.detach().clone()
            for name, held in state.items()
            for key, one in held.items()
            if one is not None
        }

    def restore(self, state: State) -> None:
        self._theta, self._saved = None, state

"""Stochastic methods: several steps θ ← θ + δs per iteration along estimated gradients.

    Blocks    m̂ = ρm left and n̂ = ρn right entities, all their pairs            (`sampling`)
    Subsets   Ô₁, Ô₂ ⊂ O of size ρ|O|; Gramians averaged with rate α over steps  (`sogram`, eq:grad_sogram)

engine/objective/subsampling.py computes the estimates. The state of the random generator is part of a checkpoint.

    given δ   It is fixed, as in the paper (whose constants are in experiments/).
    no δ      The first iteration searches for δ. The curvature c along the exact direction s, from one more value of L,
              gives the minimum of a parabola, −sᵀ∇L / c; δ₀ is that times ‖s‖² / ‖ŝ‖² for a sampled direction ŝ that
              is longer. The same samples are tried with δ₀/4, δ₀/16, … or with 4δ₀, …, and the lowest exact value
              wins. A later iteration that ends non-finite, or above L_best + ½(L_start − L_best), is undone: δ is
              halved, and the iteration is repeated with new samples.

The first iteration has 8 steps. Each iteration doubles them up to one pass over the data (1/ρ steps), or to about a
second of work if that is less, but at least to the work of the value that ends the iteration. Work is counted in pair
visits, not by a clock, so that runs are reproducible bit for bit, also from a checkpoint.

Cost: that of the steps; without a given δ also one value per iteration, and up to _MOST_TRIALS + 2 in the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.objective.subsampling import (
    Gramians,
    block_gradient,
    subset_gradient,
    subset_gramians,
    swapped_gradient,
)
from gramtower.engine.towers.parameters import Layout, Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import FirstOrder, IterationResult, Method, State, Stateful, trustworthy


class Source(Stateful):
    """A stream of gradient estimates from a fraction ρ, ``ratio``, of the data."""

    def __init__(self, seed: int, ratio: float) -> None:
        self.rng, self.ratio = np.random.default_rng(seed), ratio

    def gradient(self, problem: Problem, towers: Towers, parameters: Parameters) -> Parameters:
        """The next estimate of ∇L."""
        raise NotImplementedError

    def begin(self, point: Point) -> None:
        """Initialise from the exact values at the point where a run starts."""

    def visits(self, m: int, n: int, observed: int) -> tuple[float, float]:
        """The approximate number of observed pairs and entities that an estimate uses."""
        raise NotImplementedError

    def _draw(self, total: int, device: torch.device) -> Tensor:
        """A fraction ρ of 0 … total−1 without repetition, increasing; at least one."""
        chosen = self.rng.choice(total, max(1, round(self.ratio * total)), replace=False, shuffle=False)
        chosen.sort()
        return torch.from_numpy(chosen).to(device)

    def state(self) -> State:
        return {"rng": self.rng.bit_generator.state}

    def restore(self, state: State) -> None:
        self.rng.bit_generator.state = state["rng"]


class Blocks(Source):
    """Gradients from all pairs of the sampled entities, Û × V̂."""

    def visits(self, m: int, n: int, observed: int) -> tuple[float, float]:
        return self.ratio**2 * observed, self.ratio * (m + n)

    def gradient(self, problem: Problem, towers: Towers, parameters: Parameters) -> Parameters:
        m, n = problem.shape
        rows, columns = self._draw(m, towers.device), self._draw(n, towers.device)
        return block_gradient(problem, towers, parameters, rows, columns)


class Subsets(Source):
    """Gradients from two subsets of O, the second of which updates running averages of the Gramians with rate α.

    With α = 1 there is no averaging, which is the two-subset method of eq:grad_sogram_naive. With ``swap`` both subsets
    play both parts, and the two gradients are averaged.
    """

    def __init__(self, seed: int, ratio: float, alpha: float, swap: bool = False) -> None:
        super().__init__(seed, ratio)
        self.alpha, self.swap = alpha, swap
        self.running: Gramians | None = None

    def begin(self, point: Point) -> None:
        """Initialise the running averages with the exact Gramians, where the paper uses zeros."""
        own, cross = point.evaluation.gramians
        self.running = Gramians(*(matrix.clone() for matrix in (*own, *cross)))

    def visits(self, m: int, n: int, observed: int) -> tuple[float, float]:
        drawn, uses = self.ratio * observed, 3 if self.swap else 2
        return uses * drawn, uses * (min(m, drawn) + min(n, drawn))

    def gradient(self, problem: Problem, towers: Towers, parameters: Parameters) -> Parameters:
        """Draw Ô₁ and Ô₂, move the running Gramians toward those of Ô₂, and compute the gradient on Ô₁."""
        total = problem.observed
        if not total:
            check.fail("pairs", "no observed pair", "at least one, because this method samples observed pairs")
        first, second = self._draw(total, towers.device), self._draw(total, towers.device)
        covered = len(first) * len(second) / total**2
        if self.swap:
            both, before = (first, second), self.running
            found, self.running = swapped_gradient(problem, towers, parameters, both, before, self.alpha, covered)
            return found
        fresh = subset_gramians(problem, towers, parameters, second)
        self.running = (self.running or fresh.zeros()).toward(fresh, self.alpha)
        return subset_gradient(problem, towers, parameters, first, self.running, covered)

    def state(self) -> State:
        state = super().state()
        if self.running is not None:
            state |= self.running._asdict()
        return state

    def restore(self, state: State) -> None:
        super().restore(state)
        self.running = None
        if "P" in state:
            running = Gramians(*(state[name] for name in Gramians._fields))
            k, r = running.P.shape[-1:].numel(), running.hP.shape[:1].numel()
            shapes = [tuple(t.shape) for t in running]
            if shapes != [(k, k), (k, k), (r, k), (r, k)] or any(t.dtype != torch.float64 for t in running):
                check.fail("running Gramians", shapes, "k × k and r × k in float64")
            self.running = running


_FIRST = 8  # steps of the first iteration
_FACTOR = 4.0  # between two step sizes of the search
_MOST_TRIALS = 16
_MOST_HALVINGS = 40
_SECOND = 5_000_000  # pair visits in about a second on one core
_LAUNCH = 20_000  # pair visits in the time of a step's fixed overhead


class _Trial(NamedTuple):
    """Steps of one size from one point: the result (θ is None if it became non-finite), and the parts' state after."""

    size: float
    value: float
    theta: Parameters | None
    norm: float
    state: State


class Sampled(Method):
    """A method with estimated gradients and several steps per iteration.

    A ``step_size`` of None searches for one and halves it if the run diverges; ``steps`` of None increases them as the
    module describes.
    """

    def __init__(self, source: Source, direction: FirstOrder, step_size: float | None, steps: int | None) -> None:
        self.source, self.direction, self.steps = source, direction, steps
        self.given, self.step_size = step_size is not None, step_size
        self.iterations = 0
        self.first: float | None = None  # the exact value at the start, and below the lowest since
        self.best: float | None = None

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        most = most_steps(self.source, problem, point.parameters.layout)
        steps = self.steps or min(_FIRST << min(self.iterations, 40), most)
        if self.step_size is None:
            return self._begin(problem, towers, point, steps)
        if not self.given:
            return self._continue(problem, towers, point, steps, self.step_size)
        theta, norm = self._walk(problem, towers, point, steps, self.step_size)
        self.iterations += 1
        return IterationResult(None, norm, step=self.step_size, parameters=theta)

    def _begin(self, problem: Problem, towers: Towers, point: Point, steps: int) -> IterationResult:
        """The first iteration, which searches for the step size."""
        before = self._parts()
        gradient = point.gradient()
        norm, s = gradient.norm(), self.direction.scaled(gradient)
        if not 0.0 < norm < math.inf:
            return IterationResult(None, norm)
        size = lowest_on_parabola(point, s, gradient.dot(s))
        self._restore(before)
        self.source.begin(point)
        before, self.first, self.best = self._parts(), point.value, point.value
        drawn = self.direction.scaled(self.source.gradient(problem, towers, point.parameters))
        size *= min(1.0, (s.norm() / max(drawn.norm(), 1e-300)) ** 2)

        def look(size: float) -> _Trial:
            self._restore(before)
            theta, norm = self._walk(problem, towers, point, steps, size)
            there = None if theta is None else problem.at(towers, theta)
            good = there is not None and math.isfinite(there.value) and trustworthy(point, there)
            value = there.value if there is not None and good else math.inf
            return _Trial(size, value, theta, norm, self._parts())

        found = searched(look, size, point.value)
        self._restore(found.state)
        self.step_size = found.size
        if found.theta is None or not found.value < point.value:
            return IterationResult(None, norm, step=found.size)
        return self._reached(problem.at(towers, found.theta), found.norm)

    def _continue(self, problem: Problem, towers: Towers, point: Point, steps: int, size: float) -> IterationResult:
        """A later iteration, repeated with half the step size and new samples while it diverges."""
        assert self.first is not None
        assert self.best is not None
        before, highest, norm = self._parts(), self.best + 0.5 * (self.first - self.best), 0.0
        for _ in range(_MOST_HALVINGS):
            theta, norm = self._walk(problem, towers, point, steps, size)
            there = None if theta is None else problem.at(towers, theta)
            if there is not None and there.value <= highest and trustworthy(point, there):
                self.step_size = size
                return self._reached(there, norm)
            size /= 2
            before["source"]["rng"] = self.source.state()["rng"]
            self._restore(before)
            del there  # free the memory of its evaluation before the next one
        return IterationResult(None, norm if norm < math.inf else 0.0, step=size)

    def _reached(self, point: Point, norm: float) -> IterationResult:
        assert self.best is not None
        assert self.step_size is not None
        self.best = min(self.best, point.value)
        self.iterations += 1
        return IterationResult(point, norm, step=self.step_size)

    def _walk(
        self, problem: Problem, towers: Towers, point: Point, steps: int, size: float
    ) -> tuple[Parameters | None, float]:
        """θ after some steps, or None if a gradient was not finite, and the norm of the last gradient."""
        theta, norm = point.parameters.clone(), 0.0
        for _ in range(steps):
            gradient = self.source.gradient(problem, towers, theta)
            theta.axpy_(size, self.direction.scaled(gradient))
            norm = gradient.norm()
            if not norm < math.inf:
                return None, norm
        return theta, norm

    def _parts(self) -> State:
        return {"source": self.source.state(), "direction": self.direction.state()}

    def _restore(self, state: State) -> None:
        self.source.restore(state["source"])
        self.direction.restore(state.get("direction", {}))

    def state(self) -> State:
        own = {"step_size": self.step_size, "iterations": self.iterations, "first": self.first, "best": self.best}
        return self._parts() | own

    def restore(self, state: State) -> None:
        self._restore(state)
        self.step_size, self.iterations = state["step_size"], state["iterations"]
        self.first, self.best = state["first"], state["best"]


def lowest_on_parabola(point: Point, s: Parameters, slope: float) -> float:
    """The minimum −slope / c of a parabola with that slope through L(θ) and L(θ + ts), t = ‖θ‖ / (100 ‖s‖); or t."""
    t = 0.01 * (point.parameters.norm() or 1.0) / s.norm()
    curvature = 2 * (point.along(s)(t).value - point.value - t * slope) / t**2
    return -slope / curvature if 0.0 < curvature < math.inf else t


def searched(look: Callable[[float], _Trial], size: float, start: float) -> _Trial:
    """The best trial of a search that multiplies or divides the step size by a factor while the value decreases."""
    best, left = look(size), _MOST_TRIALS - 1
    for factor in (_FACTOR, 1 / _FACTOR) if best.value < start else (1 / _FACTOR,):
        first = best
        while left > 0:
            left, tried = left - 1, look(best.size * factor)
            if best.value < start and tried.value >= best.value:
                break
            best = tried
        if best is not first:
            break
    return best


def most_steps(source: Source, problem: Problem, layout: Layout) -> int:
    """Largest number of steps of an iteration: a pass over the data or a second, but at least the work of a value."""
    (m, n), observed = problem.shape, problem.observed
    tables = weights = dim = 0
    for name, shape in layout.shapes.items():
        count, width = n if name.startswith("right.") else m, math.prod(shape[1:])
        if name in layout.owned or shape[:1] == (count,):
            tables += count * width
        else:
            weights += math.prod(shape)
        dim = max(dim, width)
    dim = max(1, dim)
    pairs, entities = source.visits(m, n, observed)
    step = _LAUNCH + pairs + (entities * weights + tables + weights) / dim
    value = observed + (m + n) * weights / dim
    return max(1, min(round(1 / source.ratio), round(max(_SECOND, value) / step)))

"""Where stochastic methods get their gradients: blocks Û × V̂, or two subsets of O with running Gramians.

    Blocks    m̂ = ρm left and n̂ = ρn right entities, all their pairs          (`sampling`)
    Subsets   Ô₁, Ô₂ ⊂ O of size ρ|O|; Gramians averaged with rate α over steps  (`sogram`, eq:grad_sogram)

Draws come from a generator whose state is part of a checkpoint. The estimates themselves are
engine/objective/subsampling.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.objective.subsampling import Gramians, block_gradient, subset_gradient, subset_gramians
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.parts import State, Stateful


class Source(Stateful):
    """A stream of gradient estimates.

    Args:
        seed: for the draws.
        ratio: ρ.
    """

    def __init__(self, seed: int, ratio: float) -> None:
        self.rng, self.ratio = np.random.default_rng(seed), ratio

    def gradient(self, problem: Problem, towers: Towers, parameters: Parameters) -> Parameters:
        """The next estimate of ∇L."""
        raise NotImplementedError

    def begin(self, point: Point) -> None:
        """Take up what is known exactly of the point where a run starts."""

    def visits(self, m: int, n: int, observed: int) -> tuple[float, float]:
        """About how many observed pairs and entities a gradient looks at."""
        raise NotImplementedError

    def _draw(self, total: int, device: torch.device) -> Tensor:
        """A share ρ of 0 … total−1 without repetition, increasing; at least one."""
        chosen = self.rng.choice(total, max(1, round(self.ratio * total)), replace=False, shuffle=False)
        chosen.sort()
        return torch.from_numpy(chosen).to(device)

    def state(self) -> State:
        """The generator's state."""
        return {"rng": _plain(self.rng.bit_generator.state)}

    def restore(self, state: State) -> None:
        """See Stateful."""
        self.rng.bit_generator.state = state["rng"]


class Blocks(Source):
    """Û × V̂."""

    def visits(self, m: int, n: int, observed: int) -> tuple[float, float]:
        """Those of the block."""
        return self.ratio**2 * observed, self.ratio * (m + n)

    def gradient(self, problem: Problem, towers: Towers, parameters: Parameters) -> Parameters:
        """From all pairs between the entities drawn."""
        m, n = problem.shape
        rows, columns = self._draw(m, towers.device), self._draw(n, towers.device)
        return block_gradient(problem, towers, parameters, rows, columns)


class Subsets(Source):
    """Two subsets of O, the second feeding running averages of the Gramians.

    Args:
        seed: for the draws.
        ratio: ρ.
        alpha: α; 1 forgets at once, which is the plain two-subset method of eq:grad_sogram_naive.
    """

    def __init__(self, seed: int, ratio: float, alpha: float) -> None:
        super().__init__(seed, ratio)
        self.alpha = alpha
        self.running: Gramians | None = None

    def begin(self, point: Point) -> None:
        """Let the running averages begin with the exact Gramians, in the place of the paper's zeros."""
        own, cross = point.evaluation.gramians
        self.running = Gramians((own[0].clone(), own[1].clone()), (cross[0].clone(), cross[1].clone()))

    def visits(self, m: int, n: int, observed: int) -> tuple[float, float]:
        """Those of both subsets."""
        drawn = self.ratio * observed
        return 2 * drawn, 2 * (min(m, drawn) + min(n, drawn))

    def gradient(self, problem: Problem, towers: Towers, parameters: Parameters) -> Parameters:
        """Draw Ô₁ and Ô₂, move the running Gramians toward those of Ô₂, take the gradient on Ô₁."""
        total = problem.observed
        if not total:
            check.fail("pairs", "no observed pair", "at least one, for a method that draws subsets of them")
        first, second = self._draw(total, towers.device), self._draw(total, towers.device)
        fresh = subset_gramians(problem, towers, parameters, second)
        self.running = (self.running or fresh.zeros()).toward(fresh, self.alpha)
        covered = len(first) * len(second) / total**2
        return subset_gradient(problem, towers, parameters, first, self.running, covered)

    def state(self) -> State:
        """The generator's state and the running Gramians."""
        state = super().state()
        if self.running is not None:
            (P, Q), (hP, hQ) = self.running.plain, self.running.cross
            state |= {"P": P, "Q": Q, "hP": hP, "hQ": hQ}
        return state

    def restore(self, state: State) -> None:
        """See Stateful."""
        super().restore(state)
        self.running = None
        if "P" in state:
            own, cross = ([state[name] for name in names] for names in (("P", "Q"), ("hP", "hQ")))
            k, r = own[0].shape[-1:].numel(), cross[0].shape[:1].numel()
            fits = all(t.shape == (k, k) for t in own) and all(t.shape == (r, k) for t in cross)
            if not fits or any(t.dtype != torch.float64 for t in (*own, *cross)):
                check.fail("running Gramians", [tuple(t.shape) for t in (*own, *cross)], "k × k and r × k in float64")
            self.running = Gramians((state["P"], state["Q"]), (state["hP"], state["hQ"]))


def _plain(value: object) -> object:
    """Numpy's generator state with plain integers, as JSON takes them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int)) else int(value)  # type: ignore[call-overload]

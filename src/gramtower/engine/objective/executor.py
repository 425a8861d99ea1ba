"""How the work of a point is run: kernel by kernel here, replayed from CUDA graphs in cuda_graphs.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gramtower.engine.towers.parameters import Parameters


class Damped(Protocol):
    """G + damping·I as an executor sees it."""

    damping: float

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """The product, kernel by kernel."""


class Factored(Protocol):
    """A preconditioner as an executor sees it."""

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """The product, kernel by kernel."""

    def tensors(self) -> list[Tensor]:
        """What it is made of, always in the same order."""

    def copy(self) -> Factored:
        """A deep copy."""


class Executor:
    """Runs everything kernel by kernel."""

    def gradient(self, compute: Callable[[], Parameters]) -> Parameters:
        """∇L."""
        return compute()

    def product(self, G: Damped, d: Parameters, out: Parameters) -> Parameters:
        """G d, written over ``out``."""
        return G.compute(d, out)

    @property
    def unbound(self) -> Executor:
        """What runs operators that do not belong to one evaluation, such as preconditioners."""
        return self

    def apply(self, M: Factored, r: Parameters, out: Parameters) -> Parameters:
        """M r, written over ``out``."""
        return M.compute(r, out)


EAGER = Executor()

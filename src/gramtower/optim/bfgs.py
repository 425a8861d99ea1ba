"""The inverse of limited-memory BFGS (Nocedal and Wright, "Numerical Optimization", Alg. 7.4) times a vector.

Four passes over θ for each pair of a step and the change of the gradient along it. Checked by tests/test_optim.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gramtower.engine.towers.parameters import Layout, Parameters


class Pair:
    """A step and the change of the gradient along it.

    Args:
        s: the step, as a flat vector.
        y: the change.
        bend: sᵀy, or None for whoever asks first to compute.
    """

    __slots__ = ("_bend", "s", "y")

    def __init__(self, s: Tensor, y: Tensor, bend: float | None = None) -> None:
        self.s, self.y, self._bend = s, y, bend

    def step(self, layout: Layout) -> Parameters:
        """s."""
        return Parameters(layout, self.s)

    def change(self, layout: Layout) -> Parameters:
        """y."""
        return Parameters(layout, self.y)

    def bend(self, layout: Layout) -> float:
        """sᵀy."""
        if self._bend is None:
            self._bend = self.step(layout).dot(self.change(layout))
        return self._bend


def inverse_product(g: Parameters, pairs: Sequence[Pair], initial: Callable[[Parameters], Parameters]) -> Parameters:
    """H g: the two-loop recursion over pairs, oldest first.

    Args:
        g: left as it is.
        pairs: with sᵀy > 0.
        initial: the inverse that pairs correct, applied to a vector that it may overwrite.
    """
    layout, q = g.layout, g.clone()
    coefficients = []
    for pair in reversed(pairs):
        a = pair.step(layout).inner(q) / pair.bend(layout)
        coefficients.append(a)
        q.axpy_(-a, pair.change(layout))
    q = initial(q)
    for pair, a in zip(pairs, reversed(coefficients), strict=True):
        b = pair.change(layout).inner(q) / pair.bend(layout)
        q.axpy_(a - b, pair.step(layout))
    return q

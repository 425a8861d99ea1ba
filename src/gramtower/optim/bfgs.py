"""The inverse of limited-memory BFGS (Nocedal and Wright, "Numerical Optimization", Alg. 7.4) times a vector.

Four passes over θ for each pair of a step and the change of the gradient along it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gramtower.engine.towers.parameters import Parameters


class Pair:
    """A step and the change of the gradient along it.

    Args:
        step: s.
        change: y.
        bend: sᵀy, or None for whoever asks first to compute.
    """

    __slots__ = ("_bend", "change", "step")

    def __init__(self, step: Parameters, change: Parameters, bend: float | None = None) -> None:
        self.step, self.change, self._bend = step, change, bend

    @property
    def bend(self) -> float:
        """sᵀy."""
        if self._bend is None:
            self._bend = self.step.dot(self.change)
        return self._bend


def inverse_product(g: Parameters, pairs: Sequence[Pair], initial: Callable[[Parameters], Parameters]) -> Parameters:
    """H g: the two-loop recursion over pairs, oldest first.

    Args:
        g: left as it is.
        pairs: with sᵀy > 0.
        initial: the inverse that pairs correct, applied to a vector that it may overwrite.
    """
    q = g.clone()
    coefficients = []
    for pair in reversed(pairs):
        a = pair.step.inner(q) / pair.bend
        coefficients.append(a)
        q.axpy_(-a, pair.change)
    q = initial(q)
    for pair, a in zip(pairs, reversed(coefficients), strict=True):
        b = pair.change.inner(q) / pair.bend
        q.axpy_(a - b, pair.step)
    return q

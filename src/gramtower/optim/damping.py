"""Levenberg-Marquardt damping: more of it where a quadratic model promised too much, less where it was right."""

from __future__ import annotations

import enum

_LARGEST = 1e12
_LEAST = 1e-3  # what it grows from
_NONE = 1e-10  # damping below this is none


class Verdict(enum.Enum):
    """How a model's promise compared with the decrease at the full step."""

    RIGHT = "right"  # over three quarters of it
    SO_SO = "so-so"
    WRONG = "wrong"  # under a quarter of it, or not a number


class Damping:
    """The damping in force, and how it moves.

    Args:
        value: at the start.
        up: factor when the decrease was under a quarter of the promise.
        down: factor when it was over three quarters.
    """

    def __init__(self, value: float, up: float, down: float) -> None:
        self.value, self._up, self._down = value, up, down

    def learn(self, decrease: float, model: float) -> Verdict:
        """Move by the decrease at the full step and the model's value there, which is negative."""
        ratio = decrease / -model
        if ratio > 0.75:
            self.value *= self._down ** (3 if abs(ratio - 1) < 0.05 else 1)  # a model this good needs little damping
            if self.value < _NONE:
                self.value = 0.0
            return Verdict.RIGHT
        if ratio >= 0.25:
            return Verdict.SO_SO
        self.value = max(self.value * self._up, _LEAST)  # NaN counts as disagreement
        return Verdict.WRONG

    def retry(self) -> bool:
        """Much more of it: in the limit a short step down the preconditioned gradient. Whether there is any more."""
        self.value = max(self.value, _LEAST) * 100
        return self.value < _LARGEST

"""The limits that a caller sets to a run: iterations, seconds of training, tolerance, and patience with a metric.

The tolerance is compared with the gradient in loop.py, which knows it.
"""

from __future__ import annotations

from gramtower._util import checks as check
from gramtower.training.result import Reason, Stop


class Limits:
    """The limits, checked; the arguments are those of ``minimize``, with patience None where nothing is validated."""

    def __init__(self, max_iterations: int, time_limit: float | None, tolerance: float, patience: int | None) -> None:
        self.max_iterations = check.count("max_iterations", max_iterations, minimum=0)
        self.time_limit = None if time_limit is None else check.number("time_limit", time_limit, minimum=0.0)
        self.tolerance = check.number("tolerance", tolerance, minimum=0.0)
        self.patience = None if patience is None else check.count("patience", patience)

    def reached(self, iteration: int, seconds: float, waited: int) -> Stop | None:
        """Why to stop after so many iterations and seconds, and validations without a better metric; None goes on."""
        if self.patience is not None and waited >= self.patience:
            return Stop(Reason.EARLY_STOP, Reason.EARLY_STOP.value.format(patience=self.patience))
        if iteration >= self.max_iterations:
            return Stop(Reason.MAX_ITERATIONS, Reason.MAX_ITERATIONS.value.format(iterations=self.max_iterations))
        if self.time_limit is not None and seconds >= self.time_limit:
            return Stop(Reason.TIME_LIMIT, Reason.TIME_LIMIT.value.format(seconds=self.time_limit))
        return None

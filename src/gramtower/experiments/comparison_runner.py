"""One problem, one start, several methods: what they have in common, and the run of one of them.

A method that was interrupted goes on from its checkpoint. Whatever ends a method (a limit, divergence, an error, an
iteration longer than the limit) is an outcome with a status of comparison_store.py; none of them ends the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.experiments.comparison_store import checkpoint_path, history_path
from gramtower.experiments.machine import OthersBusy, environment
from gramtower.training.checkpoint import remove_checkpoint
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Result

_ALL, _GROWTH = 20, 1.05
_CHECKPOINT_SECONDS = 5.0
_ERRORS = (ValueError, RuntimeError, ArithmeticError, MemoryError)


@dataclass
class Runner:
    """What all methods have in common.

    Attributes:
        problem: what is minimised.
        start: makes the towers that every method starts from.
        validation: the metric of a point, or None.
        time_limit: seconds of training for each method.
        max_iterations: the same in iterations, or None.
        seed: for methods that draw.
        options: constants of methods, by name of the method.
        folder: where histories and checkpoints are.
        verbose: one line an iteration on standard error.
        note: called with the name of each method that starts.
    """

    problem: Problem
    start: Callable[[], Towers]
    validation: Callable[[Point], float] | None
    time_limit: float
    max_iterations: int | None
    seed: int
    folder: Path
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    verbose: bool = False
    note: Callable[[str], None] = print  # to standard output

    def prepare(self) -> None:
        """Compile and cache what all methods share, so that none is charged for it."""
        point = self.problem.at(self.start())
        point.gauss_newton() @ point.gradient()

    def run(self, name: str) -> dict[str, Any]:
        """Run a method, or go on with it; returns what became of it."""
        options = self.options.get(name, {})
        checkpoint, others = checkpoint_path(self.folder, name), OthersBusy()
        about = {"options": options, "resumed": checkpoint.exists(), "environment": environment()}
        if self.verbose:
            self.note(f"-- {name}" + (" goes on from its checkpoint" if about["resumed"] else ""))
        if not about["resumed"]:
            self.forget([name])  # what a run without a checkpoint has left
        try:
            result = minimize(
                self.problem, self.start(), name, self.max_iterations or 10**9, self.time_limit, self.seed,
                validation=self.validation, validate_at=measured_at, history=history_path(self.folder, name),
                checkpoint=checkpoint, checkpoint_every=1, checkpoint_seconds=_CHECKPOINT_SECONDS,
                verbose=self.verbose, **options,
            )  # fmt: skip
        except _ERRORS as error:
            return {"status": "failed", "message": f"{type(error).__name__}: {' '.join(str(error).split())}", **about}
        status, message = judge(result, self.time_limit)
        return {"status": status, "message": message, "others_busy": others.cores(), **about}

    def forget(self, names: Iterable[str]) -> None:
        """Remove what methods have left, so that they start anew."""
        for name in names:
            remove_checkpoint(checkpoint_path(self.folder, name))
            history_path(self.folder, name).unlink(missing_ok=True)


def measured_at(iteration: int) -> bool:
    """Whether the metric is computed after an iteration: the first 20, then at steps of a twentieth.

    A rule of the iteration alone, so that an interrupted run measures what an uninterrupted one does.
    """
    if iteration <= _ALL:
        return True
    place = math.log(iteration, _GROWTH)
    return math.floor(place) > math.floor(math.log(iteration - 1, _GROWTH))


def judge(result: Result, time_limit: float) -> tuple[str, str]:
    """Status and message of a run that ended without an error."""
    first, last = result.history[0], result.history[-1]
    if result.reason is Reason.INTERRUPTED:
        return "unfinished", result.message
    if result.reason is Reason.NON_FINITE:
        return "diverged", result.message
    longest = last.seconds if last.iteration == 0 else last.seconds - first.seconds
    if result.reason is Reason.TIME_LIMIT and last.iteration <= 1 and longest >= time_limit:
        what = "the first iteration" if last.iteration else "evaluating the start"
        return "too slow", f"{what} took {longest:.3g} s, longer than the time limit of {time_limit:g} s"
    if last.value > first.value:
        return "diverged", f"ended above its start, at {last.value:.6g} from {first.value:.6g}: {result.message}"
    return "finished", result.message

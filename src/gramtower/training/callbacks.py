"""What watches a run: the protocol of callbacks, a progress bar, and recorders for MLflow, TensorBoard and W&B.

A callback is any function of a record and a point, called after each iteration; one that returns True stops the run. If
it has them, ``begin`` is called before the first iteration and ``end`` after the last, whatever ended the run. An
exception in a callback ends the run and reaches the caller; checkpoints stay whole. Over several processes every one
calls its callbacks; those here act in the first alone. The packages they write to are imported when a run begins.
A fit with ``refit=True`` is two runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gramtower._util import checks as check
from gramtower._util.optional import need
from gramtower.engine.objective.point import Point
from gramtower.training.bars import Bar, open_bar
from gramtower.training.result import Record, Result

_USE = "this callback"  # in errors about missing packages


class Callback(Protocol):
    """What :func:`gramtower.minimize` and ``TwoTower.fit`` take; plain functions are callbacks."""

    def __call__(self, record: Record, point: Point, /) -> object:
        """After an iteration; True stops the run."""


@dataclass(frozen=True)
class Started:
    """What ``begin`` is told.

    Attributes:
        last: the record that the run goes on from: that of the start, or the last one of a checkpoint.
        max_iterations: after which it stops at the latest.
        settings: method, objective and sizes, by name.
        first: whether this is the first of the run's processes.
    """

    last: Record
    max_iterations: int
    settings: dict[str, Any] = field(default_factory=dict)
    first: bool = True


class Watchers:
    """The callbacks of one run: every one that was told of the beginning is told of the end."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks: list[Any] = check.functions("callbacks", callbacks)
        self._begun: list[Any] = []

    def begin(self, started: Started) -> None:
        """Before the first iteration."""
        for one in self.callbacks:
            if hasattr(one, "begin"):
                one.begin(started)
            self._begun.append(one)

    def __call__(self, record: Record, point: Point) -> int:
        """After an iteration: how many ask to stop."""
        answers = [one(record, point) for one in self.callbacks]
        return sum(isinstance(answer, (bool, np.bool_)) and bool(answer) for answer in answers)

    def end(self, result: Result) -> None:
        """After the last iteration. All are told, even if one fails."""
        self._end(result)

    def fail(self) -> None:
        """After an error, which counts more than one in what follows."""
        with suppress(Exception):
            self._end(None)

    def _end(self, result: Result | None) -> None:
        with ExitStack() as stack:
            while self._begun:
                if hasattr(one := self._begun.pop(0), "end"):
                    stack.callback(one.end, result)


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record that there are, by the names that recorders show them under."""
    named = {
        "objective": record.value, "relative_decrease": record.relative_decrease, "validation": record.metric,
        "gradient_norm": record.gradient_norm, "seconds": record.seconds, "data_passes": record.data_passes,
        "step": record.step, "damping": record.damping, "cg_steps": record.cg_steps,
    }  # fmt: skip
    return {name: float(value) for name, value in named.items() if value is not None}


class ProgressBar:
    """A bar that shows how far a fit is: iterations, time left, objective and metric in one line.

    In a terminal it is drawn by rich on standard error, in a notebook as an output of the cell that needs nothing more
    than the notebook itself. ``gt.TwoTower().fit(pairs, callbacks=[gt.ProgressBar()])``.

    Args:
        console: a ``rich.console.Console`` to draw on instead.
    """

    def __init__(self, console: Any = None) -> None:
        self.console = console
        self._bar: Bar | None = None

    def begin(self, started: Started) -> None:
        """Draw it."""
        if started.first:
            done, figures = started.last.iteration, _figures(started.last)
            self._bar = open_bar(started.max_iterations, done, figures, _USE, self.console)

    def __call__(self, record: Record, point: Point) -> None:
        """Move it."""
        if self._bar is not None:
            self._bar.move(record.iteration, _figures(record))

    def end(self, result: Result | None) -> None:
        """Leave it as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class MLflow:
    """A run of MLflow, nested in the active one if there is one, with the settings and a metric for each number.

    Args:
        experiment: name of the experiment; None for the active one.
        run_name: name of the run; None lets MLflow choose.
    """

    def __init__(self, experiment: str | None = None, run_name: str | None = None) -> None:
        self.experiment, self.run_name = experiment, run_name
        self._mlflow: Any = None

    def begin(self, started: Started) -> None:
        """Start the run."""
        mlflow = need("mlflow", _USE)
        if not started.first:
            return
        if self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        mlflow.start_run(run_name=self.run_name, nested=True)
        self._mlflow = mlflow
        mlflow.log_params(started.settings)
        mlflow.log_metrics(numbers_of(started.last), step=started.last.iteration)

    def __call__(self, record: Record, point: Point) -> None:
        """Log an iteration."""
        if self._mlflow is not None:
            self._mlflow.log_metrics(numbers_of(record), step=record.iteration)

    def end(self, result: Result | None) -> None:
        """End the run, with the reason as a tag."""
        if self._mlflow is None:
            return
        mlflow, self._mlflow = self._mlflow, None
        with ExitStack() as stack:
            stack.callback(mlflow.end_run, "FAILED" if result is None else "FINISHED")
            mlflow.set_tag("gramtower.reason", "ERROR" if result is None else result.reason.name)


class TensorBoard:
    """A scalar for each number of a record, in event files that TensorBoard shows.

    Args:
        folder: of the event files; a second run goes to ``FOLDER-2``, and so on.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = check.path("folder", folder)
        self._writer: Any = None
        self._runs = 0

    def begin(self, started: Started) -> None:
        """Open the files."""
        summary = need("torch.utils.tensorboard", _USE, "tensorboard")
        if not started.first:
            return
        self._runs += 1
        named = self.folder.name + (f"-{self._runs}" if self._runs > 1 else "")
        self._writer = summary.SummaryWriter(str(self.folder.with_name(named)))
        self._writer.add_text("settings", "\n".join(f"- {name}: {value}" for name, value in started.settings.items()))
        self._add(started.last)

    def __call__(self, record: Record, point: Point) -> None:
        """Add an iteration."""
        if self._writer is not None:
            self._add(record)

    def _add(self, record: Record) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(name, value, record.iteration)

    def end(self, result: Result | None) -> None:
        """Close the files."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases with the settings as its config.

    Args:
        options: what ``wandb.init`` takes, such as ``project="films"``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._run: Any = None

    def begin(self, started: Started) -> None:
        """Start the run."""
        wandb = need("wandb", _USE)
        if not started.first:
            return
        self._run = wandb.init(**self.options | {"config": started.settings | self.options.get("config", {})})
        self._run.log(numbers_of(started.last), step=started.last.iteration)

    def __call__(self, record: Record, point: Point) -> None:
        """Log an iteration."""
        if self._run is not None:
            self._run.log(numbers_of(record), step=record.iteration)

    def end(self, result: Result | None) -> None:
        """Finish the run; one that an error ended counts as failed."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=int(result is None))


def _figures(record: Record) -> str:
    metric = "" if record.metric is None else f", validation {record.metric:.4f}"
    return f"objective {record.value:.6g}{metric}"

"""Callbacks of a run: the protocol, a progress bar, log lines, and loggers for MLflow, TensorBoard and W&B.

A callback is any function of a record and a point. It is called after each iteration, and stops the run by returning
True. Its methods ``begin`` and ``end``, if it has them, are called before the first iteration and after the last, for
whatever reason the run ended. An exception in a callback ends the run and is raised to the caller; checkpoints stay
valid. Every process calls its callbacks; those of this module act only in the first. They import the packages that they
need when a run begins. A fit with ``refit=True`` is two runs.

A progress bar is drawn by rich in a terminal. In a notebook it is HTML, which needs only IPython, while rich's bar
would need ipywidgets there.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from gramtower._util import checks as check
from gramtower._util import html
from gramtower._util.checks import need
from gramtower.engine.objective.problem import Point
from gramtower.training.result import Record, Result

_USE = "this callback"  # in errors about missing packages


class Callback(Protocol):
    """A callback of :func:`gramtower.minimize` and ``TwoTower.fit``, for example a plain function."""

    def __call__(self, record: Record, point: Point, /) -> object:
        """Called after an iteration; return True to stop the run."""


@dataclass(frozen=True)
class Started:
    """The argument of ``begin``.

    Attributes:
        last: the record that the run starts from: that of iteration 0, or the last one of a checkpoint.
        max_iterations: the limit of iterations.
        settings: settings of the method and the objective, and sizes, by name.
        first: whether this is the first process of the run.
    """

    last: Record
    max_iterations: int
    settings: dict[str, object] = field(default_factory=dict)
    first: bool = True


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record, by the names under which they are logged."""
    named = {
        "objective": record.value, "relative_decrease": record.relative_decrease, "validation": record.metric,
        "gradient_norm": record.gradient_norm, "seconds": record.seconds, "data_passes": record.data_passes,
        "step": record.step, "damping": record.damping, "cg_steps": record.cg_steps,
    }  # fmt: skip
    return {name: float(value) for name, value in named.items() if value is not None}


class ProgressBar:
    """A progress bar with iterations, remaining time, objective and metric in one line.

    In a terminal rich draws it on standard error; in a notebook it is an output of the cell and needs no other package.
    Example: ``gt.TwoTower().fit(pairs, callbacks=[gt.ProgressBar()])``.

    Args:
        console: a ``rich.console.Console`` to draw on instead.
    """

    def __init__(self, console: Any = None) -> None:
        self.console = console
        self._bar: _TerminalBar | _NotebookBar | None = None

    def begin(self, started: Started) -> None:
        """Draw the bar."""
        if started.first:
            at = started.max_iterations, started.last.iteration, _figures(started.last)
            notebook = self.console is None and in_notebook()
            self._bar = _NotebookBar(*at) if notebook else _TerminalBar(*at, self.console)

    def __call__(self, record: Record, point: Point) -> None:
        if self._bar is not None:
            self._bar.move(record.iteration, _figures(record))

    def end(self, result: Result | None) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class MLflow:
    """Logs to an MLflow run, nested in the active run if there is one: the settings, and a metric for each number.

    Args:
        experiment: name of the experiment; None for the active experiment.
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
    """Writes event files for TensorBoard, with a scalar for each number of a record.

    Args:
        folder: folder of the event files; a second run writes to ``FOLDER-2``, and so on.
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
    """Logs to a run of Weights & Biases, with the settings as its config.

    Args:
        options: arguments of ``wandb.init``, such as ``project="films"``.
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
        """Finish the run; after an error it counts as failed."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=int(result is None))


def _figures(record: Record) -> str:
    metric = "" if record.metric is None else f", validation {record.metric:.4f}"
    return f"objective {record.value:.6g}{metric}"


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook, not in a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class _TerminalBar:
    """A line on standard error, drawn by rich."""

    def __init__(self, total: int, done: int, figures: str, console: Any) -> None:
        rich = need("rich.progress", _USE)
        console = console or need("rich.console", _USE).Console(stderr=True)
        parts = ("iteration", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[figures]}")
        self._bar = rich.Progress(*parts, rich.TimeRemainingColumn(), console=console)
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=done, figures=figures)

    def move(self, done: int, figures: str) -> None:
        self._bar.update(self._task, completed=done, figures=figures)

    def stop(self) -> None:
        self._bar.stop()


class _NotebookBar:
    """An output of the cell, which is replaced after each iteration."""

    def __init__(self, total: int, done: int, figures: str) -> None:
        shown = need("IPython.display", "a bar in a notebook", "ipython")
        self._total, self._first, self._began = total, done, time.monotonic()
        self._now = (done, figures)
        self._handle = shown.display(self._content(), raw=True, display_id=True)

    def move(self, done: int, figures: str) -> None:
        self._now = (done, figures)
        passed, made = time.monotonic() - self._began, done - self._first
        left = f"{passed / made * (self._total - done):.0f} s left" if made and done < self._total else ""
        self._handle.update(self._content(left), raw=True)

    def stop(self) -> None:
        self._handle.update(self._content(), raw=True)

    def _content(self, left: str = "") -> dict[str, str]:
        """Return the bar as HTML, and as text for front ends without HTML."""
        done, figures = self._now
        words = ", ".join(part for part in (f"iteration {done} of {self._total}", figures, left) if part)
        return {"text/html": html.progress(done, self._total, words), "text/plain": words}


HEADER = " iter   seconds      objective   decrease       |g|   CG      step   damping    metric"


def progress_lines(name: str, verbose: bool | None = None) -> Callable[[str], None] | None:
    """A function that reports lines about the progress of several fits; None if they are not shown anywhere.

    Args:
        name: name of the logger that gets them at level INFO.
        verbose: whether to print them to standard error too; None prints them in a terminal or a notebook.
    """
    shown = (sys.stderr.isatty() or in_notebook()) if verbose is None else check.flag("verbose", verbose)
    logger = logging.getLogger(name)
    if not shown and not logger.isEnabledFor(logging.INFO):
        return None

    def say(text: str) -> None:
        logger.info("%s", text)
        if shown:
            print(text, file=sys.stderr, flush=True)

    return say


def line(record: Record) -> str:
    """One iteration as a line with fixed columns."""
    gradient = "-" if record.gradient_norm is None else f"{record.gradient_norm:.2e}"
    damping = "-" if record.damping is None else f"{record.damping:.1e}"
    metric = "-" if record.metric is None else f"{record.metric:.4f}"
    return (
        f"{record.iteration:5d} {record.seconds:9.2f} {record.value:14.7g} {record.relative_decrease:10.2e} "
        f"{gradient:>9} {record.cg_steps:4d} {record.step:9.2e} {damping:>9} {metric:>9}"
    )


def traffic(record: Record) -> str:
    """A line about the bytes sent between processes, as counted by the first process."""
    product = f", {record.product_bytes / 1e6:.3g} MB for one G·d" if record.product_bytes else ""
    return f"{record.processes} processes; each sent and received about {record.bytes / 1e6:.3g} MB{product}"


class Log:
    """Prints a line per iteration; in a terminal also a status line with the remaining time, which is overwritten."""

    def __init__(self, limits: tuple[int, float | None], stream: TextIO | None = None) -> None:
        self.max_iterations, self.time_limit = limits
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._last: Record | None = None

    def __call__(self, record: Record) -> None:
        clear = "\r\x1b[K" if self.live and self._last is not None else ""
        if self._last is None:
            print(HEADER, file=self.stream)
        self._last = record
        print(clear + line(record), file=self.stream, flush=True)
        if self.live and record.iteration < self.max_iterations:
            self.stream.write(f"\r… {self._left(record)}")
            self.stream.flush()

    def end(self, message: str) -> None:
        """Print why the run stopped."""
        clear = "\r\x1b[K" if self.live and self._last is not None else ""
        print(f"{clear}stopped: {message}", file=self.stream, flush=True)
        if self._last is not None and self._last.processes > 1:
            print(traffic(self._last), file=self.stream, flush=True)

    def _left(self, record: Record) -> str:
        done = f"iteration {record.iteration + 1} of at most {self.max_iterations}"
        if record.iteration == 0:
            return done
        left = (self.max_iterations - record.iteration) * record.seconds / record.iteration
        if self.time_limit is not None:
            left = min(left, max(0.0, self.time_limit - record.seconds))
        return f"{done}, at most {left:.0f} s left"

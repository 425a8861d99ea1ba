"""What watches a run: the protocol of callbacks, a progress bar, and recorders for MLflow, TensorBoard and W&B.

A callback is any function of a record and a point, called after each iteration; one that returns True stops the run. If
it has them, ``begin`` is called before the first iteration and ``end`` after the last, whatever ended the run. An
exception in a callback ends the run and reaches the caller; checkpoints stay whole. Over several processes every one
calls its callbacks; those here act in the first alone. The packages they write to are imported when a run begins.
A fit with ``refit=True`` is two runs.

How a progress bar is drawn: by rich in a terminal, as HTML that is replaced in place in a notebook.

A notebook needs nothing but IPython, whose kernel runs it; rich's own bar would need ipywidgets there. Checked by
tests/test_notebooks.py and tests/test_callbacks.py.

Lines about progress: one an iteration in fixed columns, and one for each step of a longer call.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from gramtower._util import checks as check
from gramtower._util import html
from gramtower._util.optional import need
from gramtower.engine.objective.point import Point
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


class Bar(Protocol):
    """One bar on the screen."""

    def move(self, done: int, figures: str) -> None:
        """Show that so many iterations are done, with figures beside the bar."""

    def stop(self) -> None:
        """Leave it as it is."""


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook, not in a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def open_bar(total: int, done: int, figures: str, use: str, console: Any = None) -> Bar:
    """A bar where it can be seen: on ``console`` if there is one, otherwise in the notebook or the terminal.

    Args:
        total: iterations that there may be.
        done: iterations before this run.
        figures: text beside the bar.
        use: what needs the packages, for errors.
        console: a ``rich.console.Console``.
    """
    if console is None and in_notebook():
        return NotebookBar(total, done, figures)
    return TerminalBar(total, done, figures, use, console)


class TerminalBar:
    """A line on standard error, by rich."""

    def __init__(self, total: int, done: int, figures: str, use: str, console: Any) -> None:
        rich = need("rich.progress", use)
        console = console or need("rich.console", use).Console(stderr=True)
        parts = ("iteration", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[figures]}")
        self._bar = rich.Progress(*parts, rich.TimeRemainingColumn(), console=console)
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=done, figures=figures)

    def move(self, done: int, figures: str) -> None:
        self._bar.update(self._task, completed=done, figures=figures)

    def stop(self) -> None:
        self._bar.stop()


class NotebookBar:
    """An output of the cell, replaced after each iteration."""

    def __init__(self, total: int, done: int, figures: str) -> None:
        self._shown = need("IPython.display", "a bar in a notebook", "ipython")
        self._total, self._first, self._began = total, done, time.monotonic()
        self._now = (done, figures)
        self._handle = self._shown.display(self._content(), display_id=True)

    def move(self, done: int, figures: str) -> None:
        self._now = (done, figures)
        self._handle.update(self._content(self._left(done)))

    def stop(self) -> None:
        """Without the time that is left."""
        self._handle.update(self._content())

    def _left(self, done: int) -> str:
        passed, made = time.monotonic() - self._began, done - self._first
        return f"{passed / made * (self._total - done):.0f} s left" if made and done < self._total else ""

    def _content(self, left: str = "") -> Any:
        done, figures = self._now
        words = ", ".join(part for part in (f"iteration {done} of {self._total}", figures, left) if part)
        return _Output(html.progress(done, self._total, words), words)


class _Output:
    """The same as HTML and as text, of which a front end takes what it can show."""

    def __init__(self, markup: str, words: str) -> None:
        self._markup, self._words = markup, words

    def _repr_html_(self) -> str:
        return self._markup

    def __repr__(self) -> str:
        return self._words


HEADER = " iter   seconds      objective   decrease       |g|   CG      step   damping    metric"


def progress_lines(name: str, verbose: bool | None = None) -> Callable[[str], None] | None:
    """A function that takes lines about the progress of a call of several fits; None if nobody reads them.

    Args:
        name: of the logger that gets them at level INFO.
        verbose: whether they go to standard error too; None for yes in a terminal or a notebook.
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
    """The fixed columns of one iteration."""
    gradient = "-" if record.gradient_norm is None else f"{record.gradient_norm:.2e}"
    damping = "-" if record.damping is None else f"{record.damping:.1e}"
    metric = "-" if record.metric is None else f"{record.metric:.4f}"
    return (
        f"{record.iteration:5d} {record.seconds:9.2f} {record.value:14.7g} {record.relative_decrease:10.2e} "
        f"{gradient:>9} {record.cg_steps:4d} {record.step:9.2e} {damping:>9} {metric:>9}"
    )


def traffic(record: Record) -> str:
    """Bytes sent between processes, as counted by the first one."""
    product = f", {record.product_bytes / 1e6:.3g} MB for one G·d" if record.product_bytes else ""
    return f"{record.processes} processes; each sent and received about {record.bytes / 1e6:.3g} MB{product}"


class Log:
    """Writes the lines; on a terminal also a status line that the next line overwrites.

    Args:
        limits: (max_iterations, time_limit), for the time left.
        stream: where to, standard error by default.
    """

    def __init__(self, limits: tuple[int, float | None], stream: TextIO | None = None) -> None:
        self.max_iterations, self.time_limit = limits
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self._started = False
        self._last: Record | None = None

    def __call__(self, record: Record) -> None:
        """Show a record."""
        self._last = record
        clear = "\r\x1b[K" if self.live and self._started else ""
        if not self._started:
            print(HEADER, file=self.stream)
            self._started = True
        print(clear + line(record), file=self.stream, flush=True)
        if self.live and record.iteration < self.max_iterations:
            self.stream.write(f"\r… {self._left(record)}")
            self.stream.flush()

    def end(self, message: str) -> None:
        """Say why the run stopped."""
        clear = "\r\x1b[K" if self.live and self._started else ""
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

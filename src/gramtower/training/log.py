"""Lines about progress: one an iteration in fixed columns, and one for each step of a longer call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

from gramtower._util import checks as check
from gramtower.training.bars import in_notebook
from gramtower.training.result import Record

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

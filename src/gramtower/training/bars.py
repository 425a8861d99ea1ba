"""How a progress bar is drawn: by rich in a terminal, as HTML that is replaced in place in a notebook.

A notebook needs nothing but IPython, whose kernel runs it; rich's own bar would need ipywidgets there. Checked by
tests/test_notebooks.py and tests/test_callbacks.py.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from gramtower._util import html as html
from gramtower._util.optional import need


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
        """See Bar."""
        self._bar.update(self._task, completed=done, figures=figures)

    def stop(self) -> None:
        """See Bar."""
        self._bar.stop()


class NotebookBar:
    """An output of the cell, replaced after each iteration."""

    def __init__(self, total: int, done: int, figures: str) -> None:
        self._shown = need("IPython.display", "a bar in a notebook", "ipython")
        self._total, self._first, self._began = total, done, time.monotonic()
        self._now = (done, figures)
        self._handle = self._shown.display(self._content(), display_id=True)

    def move(self, done: int, figures: str) -> None:
        """See Bar."""
        self._now = (done, figures)
        self._handle.update(self._content(self._left(done)))

    def stop(self) -> None:
        """See Bar: without the time that is left."""
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

"""What commands print: JSON for programs, tables for people; progress goes to standard error.

A stream may be closed, or unable to encode a character; :func:`prepare_streams` makes all of them usable.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gramtower._util.checks import LeftOutWarning
from gramtower._util.files import plain

if TYPE_CHECKING:
    from rich.console import Console

_ROOT = Path(__file__).parents[1]
_NARROWEST, _WIDEST = 40, 1000  # columns of text


def print_json(payload: Mapping[str, object]) -> None:
    """One JSON object; numbers that JSON does not know become null.

    Characters that the terminal lacks are escaped, and so are control characters that JSON itself leaves as they are.
    """
    content = plain(payload)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    text = text if showable(text) == text else json.dumps(content, indent=2, allow_nan=False)
    print(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table; columns of numbers are aligned to the right. Text is shown as it is, brackets included."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    given = [list(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        numeric = bool(given) and all(row[place] is None or isinstance(row[place], (int, float)) for row in given)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in given:
        table.add_row(*(Text(showable(visible(shown(cell)))) for cell in row))
    console_of().print(table)


def print_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one a line; long values such as paths are neither cut nor broken."""
    from rich.text import Text

    console = console_of()
    width = max(map(len, facts), default=0) + 2
    for name, value in facts.items():
        console.print(Text.assemble((visible(name).ljust(width), "bold"), visible(shown(value))), soft_wrap=True)


class Table(NamedTuple):
    """A table for people."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    title: str | None = None


def console_of(folded: bool = False) -> Console:
    """Standard output as it is now; in files and pipes only ``folded`` text is folded to the width of a terminal."""
    from rich.console import Console

    terminal = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
    width = terminal if folded or sys.stdout.isatty() else _WIDEST
    return Console(file=sys.stdout, highlight=False, width=width, height=100)


def shown(value: object) -> str:
    """A value for people: counts with separators, other numbers to six digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e15 else f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    return str(value)


def note(text: str) -> None:
    """A line about progress, on standard error, in one piece: several processes may write there."""
    sys.stderr.write("\n".join(map(visible, text.split("\n"))) + "\n")
    sys.stderr.flush()


def silent(text: str) -> None:
    """Print nothing, in place of :func:`note`."""


def show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    """A warning of this library as one line on standard error; those of other packages are not for its users."""
    ours = issubclass(category, LeftOutWarning) or Path(filename).is_relative_to(_ROOT)
    if ours and os.environ.get("RANK", "0") == "0":  # of several processes the first
        note(f"warning: {' '.join(str(message).split())}")


_PLAIN = {"×": "x", "✓": "*", "−": "-", "–": "-", "…": "...", "→": "->", "≥": ">=", "≤": "<="}
_HANDLER = "gramtower"


def prepare_streams() -> None:
    """Make standard input, output and error usable whatever the caller handed down.

    A closed one (``>&-``) is opened on the null device: the next file opened would otherwise take its number, and be
    written to by every message. Characters that the terminal's encoding lacks are written plainly, or as escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            # not by its number, which a file may have taken: some builds of libffi open one when they are loaded
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def showable(text: str) -> str:
    """A text as standard output can show it."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, _HANDLER).decode(encoding)


def visible(text: str) -> str:
    """A text whose control characters, which a terminal might obey, are escaped."""
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in ("Cc", "Cs") else c for c in text)


def abandon_output() -> None:
    """Redirect standard output to the null device once its reader has gone, so that the final flush does not fail."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file of the system
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """What an encoder writes for characters that it does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in missing), error.end


codecs.register_error(_HANDLER, _substitute)

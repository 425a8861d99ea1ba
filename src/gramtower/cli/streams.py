"""Standard streams that can always be written to, even when closed or unable to encode a character."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata

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
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
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
    """Let go of standard output, which nobody reads any more, so that the interpreter's end does not fail on it."""
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
    places = range(error.start, error.end)
    escaped = codecs.lookup_error("backslashreplace")
    parts = []
    for place in places:
        character = error.object[place]
        one = UnicodeEncodeError(error.encoding, error.object, place, place + 1, error.reason)
        parts.append(_PLAIN.get(character) or str(escaped(one)[0]))
    return "".join(parts), error.end


codecs.register_error(_HANDLER, _substitute)

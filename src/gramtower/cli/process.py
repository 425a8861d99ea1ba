"""The process: standard streams that can always be written to, and how it ends; loads nothing of torch.

A stream may be closed, or unable to encode a character. SIGTERM, which Kubernetes, Slurm and spot machines send, is an
interrupt like Ctrl-C with an exit code of its own.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
import unicodedata
from typing import NoReturn

from gramtower.distributed.launch import started_among_several

_received: list[int] = []


def interrupt_on_sigterm() -> None:
    """Raise KeyboardInterrupt in the main thread when SIGTERM comes, unless the caller had it ignored.

    Further ones are ignored, so that none of them cuts short what the first began; Ctrl-C still ends the process.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> NoReturn:
    _received.append(number)
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def was_terminated() -> bool:
    """Whether SIGTERM has come."""
    return bool(_received)


def interruption() -> tuple[str, int]:
    """The word for the signal that interrupted the program, and its exit code: 128 and the signal's number."""
    return ("stopped by SIGTERM", 143) if _received else ("interrupted", 130)


def leave(code: int) -> NoReturn:
    """End the program.

    One of several processes skips the interpreter's shutdown: gloo's threads, still freeing tensors, sometimes abort it
    (pytorch issue 190489), and torchrun would count a run as failed whose model is written.
    """
    if started_among_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


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
    places = range(error.start, error.end)
    escaped = codecs.lookup_error("backslashreplace")
    parts = []
    for place in places:
        character = error.object[place]
        one = UnicodeEncodeError(error.encoding, error.object, place, place + 1, error.reason)
        parts.append(_PLAIN.get(character) or str(escaped(one)[0]))
    return "".join(parts), error.end


codecs.register_error(_HANDLER, _substitute)

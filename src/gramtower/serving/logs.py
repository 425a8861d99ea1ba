"""The log of the server on standard error, as text or as one JSON object per line.

An event is one line: control characters are escaped and the lines of a traceback are indented, so that no client can
forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

FORMATS = ("text", "json")
_LONGEST = 2000  # characters of a target in a line
_LOGGERS = ("uvicorn", "gramtower.serving")


def write(form: str, message: str, level: str = "info", traceback: str = "", **fields: object) -> None:
    """Write an event in one call, as several processes may share the stream; ``fields`` are added to JSON."""
    if form == "json":
        content = {"time": _now(), "level": level, "message": message, **fields}
        line = json.dumps(content | ({"traceback": traceback} if traceback else {}))  # in ASCII
    else:
        line = "\n    ".join([escaped(message), *map(escaped, traceback.splitlines())])
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def write_request(form: str, scope: Scope, status: int, seconds: float, worker: str | None = None) -> None:
    """Write a request: client, method, target, status and duration."""
    client = (scope.get("client") or ("-",))[0]
    query = scope.get("query_string", b"")
    asked = (scope.get("raw_path") or scope["path"].encode("utf-8", "backslashreplace")) + (b"?" if query else b"")
    target = (asked + query).decode("utf-8", "backslashreplace")[:_LONGEST]
    if form == "json":
        named = {} if worker is None else {"worker": worker}
        write(form, "request", client=client, method=scope["method"][:_LONGEST], target=target, status=status,
              seconds=round(seconds, 6), **named)  # fmt: skip
        return
    quoted = f"{scope['method'][:_LONGEST]} {target}".replace("\\", "\\\\").replace('"', '\\"')
    by = "" if worker is None else f" worker {worker}"
    write(form, f'{_now()} {client} "{quoted}" {status} {1000 * seconds:.1f} ms{by}')


def escaped(text: str) -> str:
    """A text in one line, with escapes for characters that are not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class Handler(logging.Handler):
    """Handler of the log records of uvicorn and of this package."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def emit(self, record: logging.LogRecord) -> None:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        write(self.form, record.getMessage(), record.levelname.lower(), trace)


def configure(form: str) -> None:
    """Set the format of this process's loggers."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [Handler(form)], False


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")

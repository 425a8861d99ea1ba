"""What the server tells clients and operators: refusals, limits on requests, JSON, and the log on standard error.

The log is text, or one JSON object per line. An event is one line: control characters are escaped and the lines of a
traceback are indented, so that no client can forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

LOG_FORMATS = ("text", "json")
_LONGEST = 2000  # characters of a target in a line of the log


class Refused(Exception):
    """A request that cannot be answered; ``details`` are added to the JSON of the answer."""

    def __init__(self, status: int, message: str, **details: object) -> None:
        super().__init__(message)
        self.status, self.content = status, {"error": message, **details}


@dataclass(frozen=True)
class Limits:
    """Limits on requests; a request above one is answered with 422, or with the status given here."""

    body: int = 2_000_000  # bytes of the body (413)
    body_seconds: float = 10.0  # time in which the body must arrive (408)
    k: int = 1_000  # length of a list
    ids: int = 1_000  # entities, pairs or rows of features
    stream_ids: int = 100_000  # entities of a request with a streamed answer
    answers: int = 200_000  # numbers or list entries in an answer that is not streamed
    history: int = 10_000  # right ids in the history of one new entity
    listed: int = 10_000  # ids in ``allow`` and ``deny``
    waiting: int = 1_024  # requests that wait to be computed (503)
    connections: int = 1_024  # open connections (503)


def within(name: str, given: int, most: int, what: str, hint: str = "") -> None:
    """Refuse a number above its limit with 422."""
    if given > most:
        raise Refused(422, f"{name}: got {given}, expected at most {most} {what}{hint}")


def encode(content: object) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def log(form: str, message: str, level: str = "info", traceback: str = "", **fields: object) -> None:
    """Log an event in one write, as several processes may share the stream; ``fields`` are added to JSON."""
    if form == "json":
        content = {"time": _now(), "level": level, "message": message, **fields}
        line = json.dumps(content | ({"traceback": traceback} if traceback else {}))  # in ASCII
    else:
        line = "\n    ".join(map(_escaped, [message, *traceback.splitlines()]))
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def log_request(form: str, scope: Scope, status: int, seconds: float, worker: str | None = None) -> None:
    """Log a request: client, method, target, status and duration."""
    client, method = (scope.get("client") or ("-",))[0], scope["method"][:_LONGEST]
    query = scope.get("query_string", b"")
    asked = (scope.get("raw_path") or scope["path"].encode("utf-8", "backslashreplace")) + (b"?" if query else b"")
    target = (asked + query).decode("utf-8", "backslashreplace")[:_LONGEST]
    if form == "json":
        named = {} if worker is None else {"worker": worker}
        log(form, "request", client=client, method=method, target=target, status=status,
            seconds=round(seconds, 6), **named)  # fmt: skip
        return
    quoted = f"{method} {target}".replace("\\", "\\\\").replace('"', '\\"')
    by = "" if worker is None else f" worker {worker}"
    log(form, f'{_now()} {client} "{quoted}" {status} {1000 * seconds:.1f} ms{by}')


class LogHandler(logging.Handler):
    """Handler of the log records of uvicorn and of this package."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def emit(self, record: logging.LogRecord) -> None:
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
        log(self.form, record.getMessage(), record.levelname.lower(), trace)


def configure_logs(form: str) -> None:
    """Set the format of this process's loggers."""
    for name in ("uvicorn", "gramtower.serving"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [LogHandler(form)], False


def _escaped(text: str) -> str:
    """A text in one line, with escapes for characters that are not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")

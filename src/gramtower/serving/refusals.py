"""Errors that a request is answered with, the limits on requests, and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass


class Refused(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, message: str, **details: object) -> None:
        super().__init__(message)
        self.status, self.message, self.details = status, message, details

    def to_plain(self) -> dict[str, object]:
        """The content of the JSON answer."""
        return {"error": self.message, **self.details}


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


def shown(value: object, most: int = 60) -> str:
    """A value as text for a message, cut if it is long."""
    text = repr(value[: most + 1]) if isinstance(value, str) else repr(value)[: most + 1]
    return text if len(text) <= most else text[:most] + "…"


def encode(content: object) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()

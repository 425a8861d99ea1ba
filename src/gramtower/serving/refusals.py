"""What a request is refused with: a status, one clear line, and particulars that a program can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Refused(Exception):
    """A request that gets no answer.

    Args:
        status: of HTTP.
        message: one line: what was given, what was expected.
        particulars: further fields of the answer's JSON.
    """

    def __init__(self, status: int, message: str, **particulars: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.particulars = status, message, particulars

    def to_plain(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": self.message, **self.particulars}


def shown(value: object, most: int = 60) -> str:
    """A value for a message, cut where it is long."""
    text = value if isinstance(value, str) else repr(value)[: most + 1]
    text = repr(text[: most + 1]) if isinstance(value, str) else text
    return text if len(text) <= most else text[:most] + "…"


@dataclass(frozen=True)
class Limits:
    """Bounds of requests.

    Attributes:
        body: bytes of a request's body (413).
        body_seconds: time in which it must have arrived (408).
        k: length of a list.
        ids: entities, pairs or rows of features of one request.
        stream_ids: entities of a request whose answer is streamed.
        answers: numbers or places of lists in an answer that is not streamed.
        history: right ids in the history of one new entity.
        listed: ids in ``allow`` and ``deny``.
        waiting: requests that wait for the worker (503).
        connections: that are open at a time (503).
    """

    body: int = 2_000_000
    body_seconds: float = 10.0
    k: int = 1_000
    ids: int = 1_000
    stream_ids: int = 100_000
    answers: int = 200_000
    history: int = 10_000
    listed: int = 10_000
    waiting: int = 1_024
    connections: int = 1_024


def within(name: str, given: int, most: int, what: str, hint: str = "") -> None:
    """Refuse with 422 what is over its bound."""
    if given > most:
        raise Refused(422, f"{name}: got {given}, expected at most {most} {what}{hint}")

"""How much one request may ask for; what is beyond is answered with 413 or 422 and the bound."""

from __future__ import annotations

from dataclasses import dataclass

from gramtower.serving.errors import Refused


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

"""What a request is refused with: a status, one clear line, and particulars that a program can read."""

from __future__ import annotations

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

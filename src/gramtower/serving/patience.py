"""Connections that send the head of a request too slowly are closed, which uvicorn itself leaves open.

A timer runs while a connection is open and no request is under way on it but bytes of one, or nothing yet, have come;
its end closes the connection. Bodies have their own time (http.read_body), and idle connections uvicorn's keep-alive.
Checked by tests/test_serving_process.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS = 10.0

_Base: Any = AutoHTTPProtocol


class PatientProtocol(_Base):  # type: ignore[misc]
    """HTTP of uvicorn, with an end to its patience."""

    seconds = SECONDS
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        super().data_received(data)
        if self._under_way():
            self._end()
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._end()
        super().connection_lost(exc)

    def _under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(self.seconds, self._give_up)

    def _end(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._under_way():
            self.transport.close()

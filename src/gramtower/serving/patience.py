"""Connections that are too slow, or whose requests have too long a head, are closed, which uvicorn leaves open.

A timer runs while a connection is open and no request is under way on it but bytes of one, or nothing yet, have come;
its end closes the connection. So does a client that takes nothing of its answer for some time: each connection counts
towards the limit of all, and a few hundred of such clients would keep out everyone else. A head of a request may have
64 KiB: httptools has no limit of its own, and copies all of a header with every piece of it that comes. Bodies have
their own time (http.read_body), and idle connections uvicorn's keep-alive.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS, STALLED = 10.0, 30.0
LONGEST = 64 * 1024  # bytes of a head

_Base: Any = AutoHTTPProtocol


class PatientProtocol(_Base):  # type: ignore[misc]
    """HTTP of uvicorn, with an end to its patience."""

    seconds, stalled, longest = SECONDS, STALLED, LONGEST
    _waiting: asyncio.TimerHandle | None = None  # for a head
    _writing: asyncio.TimerHandle | None = None  # until it is asked how much of an answer was taken
    _unsent = _head = _heads = 0
    _in_head = False

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        heads = self._heads
        super().data_received(data)
        if self._in_head and heads == self._heads:  # all of these bytes are of a head that began before
            self._head += len(data)
            if self._head > self.longest and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")
        if self._under_way():
            self._end()
        else:
            self._wait()

    def on_message_begin(self) -> None:
        """A request begins; httptools calls this, h11 has a limit of its own."""
        self._head, self._heads, self._in_head = 0, self._heads + 1, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._in_head = False
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client takes an answer more slowly than it is made."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._look_later()

    def resume_writing(self) -> None:
        """It has taken nearly all of it."""
        self._end_look()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._end()
        self._end_look()
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

    def _look_later(self) -> None:
        self._end_look()
        self._writing = asyncio.get_running_loop().call_later(self.stalled, self._look)

    def _end_look(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _look(self) -> None:
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent < before:
            self._look_later()
        else:
            self.transport.abort()  # closing would wait for the rest to be taken

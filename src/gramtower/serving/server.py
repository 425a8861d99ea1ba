"""Connections that are too slow, or whose requests have too long a head, are closed, which uvicorn leaves open.

A timer runs while a connection is open and no request is under way on it but bytes of one, or nothing yet, have come;
its end closes the connection. So does a client that takes nothing of its answer for some time: each connection counts
towards the limit of all, and a few hundred of such clients would keep out everyone else. A head of a request may have
64 KiB: httptools has no limit of its own, and copies all of a header with every piece of it that comes. Bodies have
their own time (http.read_body), and idle connections uvicorn's keep-alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gramtower._util import checks as check
from gramtower.retrieval.topk import WORTH_CALLING
from gramtower.serving import logs
from gramtower.serving.ann_index import Query, best_lists
from gramtower.serving.http_app import make_app
from gramtower.serving.refusals import Limits
from gramtower.serving.request_checks import LOOPBACK
from gramtower.serving.served_models import Labels, Loaded, Metrics, Models
from gramtower.serving.snapshot import Source
from gramtower.serving.workers import run_workers

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


_WARM = 64  # rows of lists that nobody asked for
_KEEP_ALIVE, _BACKLOG, _GRACE = 30, 512, 30  # seconds between requests of a connection; connections; seconds to end in


@dataclass
class Options:
    """How to serve.

    Attributes:
        host: address to listen at.
        port: 0 for a free one.
        token: that requests must bear.
        hosts: further names that requests may be for, where the server is for this machine alone.
        origins: whose pages may read answers.
        watch: seconds between looks at the files; None to wait for SIGHUP.
        wait: most seconds that a request waits for others.
        limits: of requests.
        workers: processes that answer.
        access_log: whether to log each request.
        log_format: "text" or "json".
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    watch: float | None = None
    wait: float = 0.002
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    access_log: bool = False
    log_format: str = "text"


def serve(
    sources: Sequence[Source],
    options: Options,
    say: Callable[[str], None],
    announce: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve models until a signal ends it.

    Args:
        sources: the models.
        options: how to serve.
        say: takes lines for the operator.
        announce: told the address when models are loaded.
    """
    with bound(options.host, options.port) as listening, _deaf():
        port = listening.getsockname()[1]
        shown = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{shown}:{port}/"
        if not is_loopback(options.host) and options.token is None:
            say(f"warning: everyone who reaches {options.host} can ask; a token in GRAMTOWER_TOKEN stops that")

        def ready() -> None:
            say(f"serving at {address} (interface: /docs)")
            announce(address)

        if options.workers > 1:
            run_workers(serve_at, listening, sources, options, say, ready)
        else:
            serve_at(listening, sources, options, say, ready)


def serve_at(
    listening: socket.socket,
    sources: Sequence[Source],
    options: Options,
    say: Callable[[str], None],
    ready: Callable[[], None],
    labels: Labels = (),
    loaded: Loaded = lambda name, stamp: None,
) -> None:
    """Serve models at a socket, in this process.

    Args:
        listening: the socket.
        sources: the models.
        options: how to serve.
        say: takes lines for the operator.
        ready: called when it takes connections.
        labels: tell the metrics of this process from those of others.
        loaded: called with the name and the stamp of each model that was loaded.
    """
    settle()
    logs.configure(options.log_format)
    requests = partial(logs.write_request, options.log_format, worker=dict(labels).get("worker"))
    metrics = Metrics(labels)
    models = Models(sources, metrics, say, loaded, options.watch is not None)
    local = is_loopback(options.host)
    app, service = make_app(
        models, metrics, options.limits, wait=options.wait, token=options.token,
        hosts=[*LOOPBACK, options.host, *options.hosts] if local else None, origins=options.origins,
        log=requests if options.access_log else None,
    )  # fmt: skip
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        lifespan="on", timeout_keep_alive=_KEEP_ALIVE, backlog=_BACKLOG, limit_concurrency=options.limits.connections,
        timeout_graceful_shutdown=_GRACE, h11_max_incomplete_event_size=64 * 1024, ws="none", http=PatientProtocol,
    )  # fmt: skip
    try:
        asyncio.run(_main(_Server(config, ready), listening, models, options.watch))
    finally:
        service.batcher.close()


def settle() -> None:
    """Load compiled code, and leave all that is in memory so far out of garbage collections.

    These are the objects of some hundred modules, which stay for ever; a full collection that goes through them takes a
    tenth of a second, in which nobody is answered. Models come later, and are collected when they are replaced.
    """
    rows = torch.zeros(_WARM, 1)
    best_lists([Query(rows, [np.empty(0, np.int64)] * _WARM, 1)], torch.zeros(WORTH_CALLING // _WARM, 1))
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that holds an address and does not listen yet."""
    check.count("port", port, minimum=0, most=65535)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        check.fail("host", repr(host), f"an address of this machine ({error})")
    made = socket.socket(family, kind, protocol)
    with made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                check.fail("port", f"{port}, which is in use", "a free one; --port 0 finds one")
            check.fail("host, port", f"{host}, {port} ({error.strerror})", "an address that this process may listen at")
        yield made


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """SIGHUP does not end the process while it loads; what it would ask for is being done."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Server(uvicorn.Server):
    """One that says when it takes connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def main_loop(self) -> None:
        self._ready()  # not in startup: of an end that is asked for there uvicorn 0.30 leaves connections open
        await super().main_loop()


async def _main(server: uvicorn.Server, listening: socket.socket, models: Models, watch: float | None) -> None:
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Future[list[str]]] = set()

    def again() -> None:
        reload = loop.run_in_executor(None, models.reload)
        reloads.add(reload)
        reload.add_done_callback(reloads.discard)

    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, again)
        await asyncio.to_thread(models.reload, True)  # what was replaced while it was read, before signals were heard
    watching = None if watch is None else asyncio.create_task(_watch(models, watch))
    try:
        await server.serve([listening])
    finally:
        if watching is not None:
            watching.cancel()


async def _watch(models: Models, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(models.reload, True)

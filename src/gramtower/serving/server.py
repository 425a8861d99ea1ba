"""The server process: its socket, uvicorn, signals, timeouts of connections, and the files it watches.

SIGHUP reloads all models; SIGTERM and SIGINT end the server after the requests in progress are answered. The port is
bound before models are loaded, so that a port in use is reported at once, and opened when the models are ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import gc
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from gramtower._util import checks as check
from gramtower.retrieval.topk import WORTH_CALLING
from gramtower.serving.ann_index import Query, best_lists
from gramtower.serving.http_app import make_app
from gramtower.serving.messages import Limits, configure_logs, log_request
from gramtower.serving.request_checks import LOOPBACK
from gramtower.serving.served_models import Labels, Loaded, Metrics, Models
from gramtower.serving.snapshot import Source
from gramtower.serving.workers import run_workers

_WARM = 64  # rows of the lists that are computed to load compiled code
_KEEP_ALIVE, _BACKLOG, _GRACE = 30, 512, 30  # seconds between requests; connections that wait; seconds to shut down
_TOO_LONG = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass
class Options:
    """Settings of the server."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0 for a free port
    token: str | None = None  # bearer token that requests must have; None for no token
    hosts: Sequence[str] = ()  # further host names to answer to on a loopback address
    origins: Sequence[str] = ()  # origins whose pages may read answers (CORS)
    watch: float | None = None  # seconds between checks of the files; None to reload on SIGHUP only
    wait: float = 0.002  # longest time in seconds that a request waits to be batched with others
    limits: Limits = field(default_factory=Limits)  # bounds on requests
    workers: int = 1  # number of processes
    access_log: bool = False  # whether to log each request
    log_format: str = "text"  # "text" or "json"


def serve(
    sources: Sequence[Source],
    options: Options,
    say: Callable[[str], None],
    announce: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve models until a signal ends the process; ``announce`` is called with the address once it answers."""
    with bound(options.host, options.port) as listening, _ignoring_hangup():
        port = listening.getsockname()[1]
        shown = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{shown}:{port}/"
        if not is_loopback(options.host) and options.token is None:
            say(f"warning: everyone who reaches {options.host} can send requests; set a token in GRAMTOWER_TOKEN")

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
    """Serve models on a socket, in this process."""
    settle()
    configure_logs(options.log_format)
    requests = partial(log_request, options.log_format, worker=dict(labels).get("worker"))
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
        timeout_graceful_shutdown=_GRACE, ws="none", http=TimedProtocol,
    )  # fmt: skip
    try:
        asyncio.run(_main(_Server(config, ready), listening, models, options.watch))
    finally:
        service.batcher.close()


def settle() -> None:
    """Load compiled code and exclude all objects made so far from garbage collection.

    These objects of some hundred modules are never freed, and a full collection that visits them would block requests
    for about 0.1 s. Models are loaded later, and are collected when they are replaced.
    """
    rows = torch.zeros(_WARM, 1)
    best_lists([Query(rows, [np.empty(0, np.int64)] * _WARM, 1)], torch.zeros(WORTH_CALLING // _WARM, 1))
    gc.collect()
    gc.freeze()


class TimedProtocol(asyncio.Protocol):
    """Wrap uvicorn's HTTP protocol with timeouts and a limit on the size of a request's head.

    uvicorn keeps a connection open when the head of a request never ends, or when the client reads nothing of its
    answer. Each connection counts towards the limit of connections, so a few hundred such clients would keep out all
    others. Bodies have a timeout of their own (``read_body``), and idle connections have uvicorn's keep-alive timeout.

    Attributes:
        head_seconds: time in which the head of a request must have arrived.
        stalled_seconds: time in which a client must read some of its answer.
        head_bytes: largest size of a head.
    """

    head_seconds, stalled_seconds, head_bytes = 10.0, 30.0, 64 * 1024

    def __init__(self, config: uvicorn.Config, **given: object) -> None:
        own = copy.copy(config)
        self._app, own.loaded_app = config.loaded_app, self._answer
        self._inner: asyncio.Protocol = AutoHTTPProtocol(config=own, **given)  # type: ignore[call-arg]
        self._requests = self._received = 0  # requests in progress; bytes since the last request began
        self._timers = dict[str, asyncio.TimerHandle]()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on a request, whose head is complete."""
        self._requests, self._received = self._requests + 1, 0
        self._stop("head")
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._inner.connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; those that no request in progress has are part of a head."""
        if not self._requests:
            if self._received > self.head_bytes:
                self._transport.write(_TOO_LONG)
                self._transport.close()
                return
            self._received += len(data)
            self._expect_head()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Start to watch a client that reads more slowly than the answer is computed."""
        self._inner.pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop("write")
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("head")
        self._stop("write")
        self._inner.connection_lost(exc)

    def _expect_head(self) -> None:
        if "head" not in self._timers:
            self._start("head", self.head_seconds, self._end_head)

    def _end_head(self) -> None:
        self._stop("head")
        if not self._requests:
            self._transport.close()

    def _watch_writing(self) -> None:
        self._start("write", self.stalled_seconds, self._end_stalled, self._transport.get_write_buffer_size())

    def _end_stalled(self, before: int) -> None:
        if self._transport.get_write_buffer_size() < before:
            self._watch_writing()
        else:
            self._transport.abort()  # close() would wait until the rest is read

    def _start(self, name: str, seconds: float, call: Callable[..., None], *given: int) -> None:
        self._stop(name)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, call, *given)

    def _stop(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket to an address without listening yet."""
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
                check.fail("port", f"{port}, which is in use", "a free port; --port 0 finds one")
            check.fail("host, port", f"{host}, {port} ({error.strerror})", "an address that this process may listen on")
        yield made


@contextlib.contextmanager
def _ignoring_hangup() -> Iterator[None]:
    """Ignore SIGHUP, which would end the process, while models are being loaded anyway."""
    if not hasattr(signal, "SIGHUP") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def main_loop(self) -> None:
        self._ready()  # not in startup: uvicorn 0.30 leaves connections open if it is ended there
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
        await asyncio.to_thread(models.reload, True)  # files replaced while models were being loaded
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

"""The process: a socket, uvicorn, signals, and files that are watched.

SIGHUP reads all models again, SIGTERM and SIGINT end the server once the requests under way are answered. The port is
bound before models are loaded, so that one in use is known at once, and listened on when they are ready to answer.
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

import numpy as np
import torch
import uvicorn

from gramtower._util import checks as check
from gramtower.retrieval.topk import WORTH_CALLING
from gramtower.serving import logs
from gramtower.serving.app import make_app
from gramtower.serving.http import LOOPBACK
from gramtower.serving.limits import Limits
from gramtower.serving.lists import Query, best_lists
from gramtower.serving.metrics import Labels, Metrics
from gramtower.serving.models import Loaded, Models
from gramtower.serving.patience import PatientProtocol
from gramtower.serving.snapshot import Source
from gramtower.serving.workers import run_workers

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

"""The server process: its socket, uvicorn, signals, and the files it watches.

SIGHUP reloads all models; SIGTERM and SIGINT end the server after the requests in progress are answered. The port is
bound before models are loaded, so that a port in use is reported at once, and opened when the models are ready. Linux
closes the connection of a client that reads nothing of its answer for 30 s; otherwise such clients would use up the
limit of connections.

Several processes share the address and the memory of the mapped model files. Their parent holds the socket and computes
nothing. It starts the workers, passes SIGHUP on once they serve, ends them on SIGTERM and SIGINT, and restarts a worker
that died. It keeps the files of the served models open, so that a restarted worker gets them even if other files have
replaced them. If a worker cannot start, the server ends before it is ready; later the parent tries again as long as
another worker serves. A worker ends by itself if its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import uvicorn

from gramtower._util import checks as check
from gramtower._util.files import as_path
from gramtower.distributed.shard_files import others
from gramtower.retrieval.topk import WORTH_CALLING
from gramtower.serving.ann_index import Query, best_lists, index_path
from gramtower.serving.http_app import make_app
from gramtower.serving.messages import Limits, configure_logs, log_request
from gramtower.serving.request_checks import LOOPBACK
from gramtower.serving.served_models import Loaded, Metrics, Models
from gramtower.serving.snapshot import Source, Stamp

_WARM = 64  # rows of the lists that are computed to load compiled code
_KEEP_ALIVE, _BACKLOG, _GRACE = 30, 512, 30  # seconds between requests; connections that wait; seconds to shut down
_STALLED = 30.0  # seconds in which a client must read some of its answer
_WORKERS_GRACE = 40  # seconds in which workers must end
_AGAIN, _MOST = 1.0, 30.0  # seconds before a restart: the first one, and after many failures
_LOOK = 0.2  # seconds between looks at signals, in the parent of workers
_HANGUP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []  # Windows has none


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
    if options.workers > 1 and not hasattr(signal, "SIGHUP"):
        check.fail("workers", options.workers, "1 on Windows, which lacks the signal that reloads their models")
    # SIGHUP would end the process while models are being loaded
    with bound(options.host, options.port) as listening, _handling(signal.SIG_IGN, *_HANGUP):
        port = listening.getsockname()[1]
        shown = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{shown}:{port}/"
        if not is_loopback(options.host) and options.token is None:
            say(f"warning: everyone who reaches {options.host} can send requests; set a token in GRAMTOWER_TOKEN")

        def ready() -> None:
            say(f"serving at {address} (interface: /docs)")
            announce(address)

        (run_workers if options.workers > 1 else serve_at)(listening, sources, options, say, ready)


def serve_at(
    listening: socket.socket,
    sources: Sequence[Source],
    options: Options,
    say: Callable[[str], None],
    ready: Callable[[], None],
    worker: str | None = None,
    loaded: Loaded = lambda name, stamp: None,
) -> None:
    """Serve models on a socket, in this process."""
    settle()
    configure_logs(options.log_format)
    metrics = Metrics(worker)
    models = Models(sources, metrics, say, loaded, options.watch is not None)
    app, service = make_app(
        models, metrics, options.limits, wait=options.wait, token=options.token,
        hosts=[*LOOPBACK, options.host, *options.hosts] if is_loopback(options.host) else None, origins=options.origins,
        log=partial(log_request, options.log_format, worker=worker) if options.access_log else None,
    )  # fmt: skip
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        lifespan="on", timeout_keep_alive=_KEEP_ALIVE, backlog=_BACKLOG, limit_concurrency=options.limits.connections,
        timeout_graceful_shutdown=_GRACE, ws="none",
    )  # fmt: skip
    try:
        asyncio.run(_main(uvicorn.Server(config), listening, models, options.watch, ready))
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


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket to an address without listening yet; the connections inherit its options."""
    check.count("port", port, minimum=0, most=65535)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        check.fail("host", repr(host), f"an address of this machine ({error})")
    with socket.socket(family, kind, protocol) as made:
        if os.name == "posix":  # elsewhere it would let a second process take the port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _STALLED))
        try:
            made.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                check.fail("port", f"{port}, which is in use", "a free port; --port 0 finds one")
            check.fail("host, port", f"{host}, {port} ({error.strerror})", "an address that this process may listen on")
        yield made


@contextlib.contextmanager
def _handling(handler: Callable[[int, object], object] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Handle signals while the block runs; in other threads than the main one, which cannot, do nothing."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def _main(
    server: uvicorn.Server,
    listening: socket.socket,
    models: Models,
    watch: float | None,
    ready: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    for number in _HANGUP:
        loop.add_signal_handler(number, lambda: loop.run_in_executor(None, models.reload))
    await asyncio.to_thread(models.reload, True)  # files replaced while models were being loaded
    watching = asyncio.create_task(_watch(models, watch))
    serving = asyncio.create_task(server.serve([listening]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready()
    await serving
    watching.cancel()


async def _watch(models: Models, seconds: float | None) -> None:
    while seconds is not None:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(models.reload, True)


@dataclass
class _Worker:
    process: BaseProcess
    reports: Connection
    failures: int = 0  # consecutive failed starts
    ready: bool = False
    reload: bool = False  # SIGHUP has arrived and was not passed on yet
    due: float | None = None  # time of the restart, if it died

    def send(self, number: int) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def messages(self) -> Iterator[tuple[str | None, Stamp]]:
        """Reports that have arrived: name and stamp of a loaded model, or no name when the worker serves."""
        with contextlib.suppress(EOFError, OSError):  # the worker has ended
            while self.reports.poll():
                yield self.reports.recv()

    def restart_later(self, number: int, say: Callable[[str], None]) -> None:
        """Set the time at which a worker that ended is restarted."""
        self.failures += not self.ready
        pause = _AGAIN if self.ready else min(_MOST, _AGAIN * 2.0**self.failures)
        self.ready, self.due = False, time.monotonic() + pause
        say(f"worker {number} ended with exit code {self.process.exitcode}; restarting it in {pause:g} s")


class _Kept:
    """The open files of the models being served, with paths that a worker can open.

    A path is a link to a descriptor of this process, so it leads to the opened file whatever has replaced it since.
    """

    def __init__(self) -> None:
        self._models = dict[str, tuple[Path, contextlib.ExitStack]]()

    def keep(self, source: Source, stamp: Stamp) -> None:
        """Open the files of a model that a worker has loaded, unless they have changed since ``stamp``."""
        if not Path("/proc/self/fd").is_dir():
            return
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gramtower-serve-")))
            model = as_path(source.path)  # of a URL, the present object
            for path in (model, *others(model), index_path(model)):
                if path == model or path.exists():
                    file = opened.enter_context(path.open("rb"))
                    (folder / path.name).symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
            if source.stamp() == stamp:
                self.close([source.name])
                self._models[source.name] = folder / source.path.name, opened.pop_all()

    def close(self, names: Sequence[str] | None = None) -> None:
        """Close the files of all models, or of some."""
        for name in list(self._models) if names is None else names:
            if name in self._models:
                self._models.pop(name)[1].close()

    def source(self, source: Source) -> Source:
        """The source with the path of its kept file, if it has one."""
        return replace(source, kept=self._models[source.name][0]) if source.name in self._models else source


def run_workers(
    listening: socket.socket,
    sources: Sequence[Source],
    options: Options,
    say: Callable[[str], None],
    announce: Callable[[], None],
) -> None:
    """Serve with several processes until a signal ends them."""
    mapped = {source.name: replace(source, mapped=True) for source in sources}
    share = max(1, torch.get_num_threads() // options.workers)
    context = multiprocessing.get_context("spawn")
    workers: dict[int, _Worker] = {}
    received = list[int]()

    def start(number: int, failures: int = 0) -> None:
        reports, its_end = context.Pipe(duplex=False)
        models = [kept.source(one) for one in mapped.values()]
        given = (number, share, listening, models, options, say, its_end)
        process = context.Process(target=_work, args=given, name=f"gramtower-worker-{number}")
        process.start()
        its_end.close()
        workers[number] = _Worker(process, reports, failures)

    def attend(number: int, worker: _Worker) -> None:
        for name, stamp in worker.messages():
            if name is None:
                worker.ready, worker.failures = True, 0
            else:
                kept.keep(mapped[name], stamp)
        if worker.due is not None:
            if time.monotonic() >= worker.due:
                start(number, worker.failures)
        elif not worker.process.is_alive():
            if not worker.ready and not (announced and any(one.ready for one in workers.values())):
                given = f"worker {number}, which ended with exit code {worker.process.exitcode}"
                check.fail("workers", given, "models that can be served; see its message above")
            worker.restart_later(number, say)
        elif worker.reload and worker.ready:  # a signal would end a worker that is starting
            worker.reload = False
            worker.send(signal.SIGHUP)

    with (
        contextlib.closing(_Kept()) as kept,
        _handling(lambda number, _: received.append(number), signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    ):
        announced = False
        try:
            for number in range(1, options.workers + 1):
                start(number)
            while not (signals := {received.pop() for _ in range(len(received))}) & {signal.SIGTERM, signal.SIGINT}:
                for number, worker in list(workers.items()):
                    worker.reload |= signal.SIGHUP in signals
                    attend(number, worker)
                if not announced and all(worker.ready for worker in workers.values()):
                    announced = True
                    announce()
                alive = [worker for worker in workers.values() if worker.due is None]
                wait([one for worker in alive for one in (worker.process.sentinel, worker.reports)], _LOOK)
        finally:
            for worker in workers.values():
                worker.send(signal.SIGTERM)
            end = time.monotonic() + _WORKERS_GRACE
            for worker in workers.values():
                worker.process.join(max(0.0, end - time.monotonic()))
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()


def _work(
    number: int,
    threads: int,
    listening: socket.socket,
    sources: Sequence[Source],
    options: Options,
    say: Callable[[str], None],
    reports: Connection,
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves: models are being loaded anyway
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def write(line: str) -> None:
        say(f"worker {number}: {line}")

    def report(name: str | None = None, stamp: Stamp = ()) -> None:
        with lock, contextlib.suppress(OSError):  # the parent is gone
            reports.send((name, stamp))

    try:
        serve_at(listening, sources, options, write, report, str(number), report)
    except (ValueError, OSError) as error:
        write(f"error: {' '.join(str(error).split())}")
        raise SystemExit(2) from error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

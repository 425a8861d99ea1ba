"""Several server processes at one address, which share the pages of mapped model files.

The parent holds the socket and computes nothing: it starts the workers, hands SIGHUP on to them once they serve, ends
them on SIGTERM and SIGINT once their requests are answered, and starts one anew that died while it served. One that
cannot start ends all. A worker whose parent is gone ends by itself. Checked by tests/test_serving_process.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any

import torch

from gramtower import _checks as check
from gramtower.serving.snapshot import Source

_GRACE = 40  # seconds in which workers end
_AGAIN = 1.0  # seconds before one that died is started again

Serve = Callable[..., None]


@dataclass
class _Worker:
    process: BaseProcess
    ready: Event
    reload: bool = False  # SIGHUP has come, and was not handed on yet
    due: float | None = None  # when it is started again, after it died


def run_workers(
    serve_at: Serve,
    listening: socket.socket,
    sources: Sequence[Source],
    options: Any,
    say: Callable[[str], None],
    announce: Callable[[], None],
) -> None:
    """Serve by several processes until a signal ends them.

    Args:
        serve_at: what each runs; see serving/server.py.
        listening: the socket.
        sources: the models, which the workers map.
        options: how to serve.
        say: takes lines for the operator.
        announce: called when all workers can answer.

    Raises:
        ValueError: if one cannot start.
    """
    mapped = [replace(source, mapped=True) for source in sources]
    share = max(1, torch.get_num_threads() // options.workers)
    context = multiprocessing.get_context("spawn")
    workers: dict[int, _Worker] = {}

    def start(number: int) -> None:
        ready = context.Event()
        given = (number, share, serve_at, listening, mapped, options, say, ready)
        process = context.Process(target=_work, args=given, name=f"gramtower-worker-{number}")
        process.start()
        workers[number] = _Worker(process, ready)

    with _signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
        try:
            for number in range(1, options.workers + 1):
                start(number)
            announced = False
            while not (asked := _read(received)) & {signal.SIGTERM, signal.SIGINT}:
                for number, worker in workers.items():
                    worker.reload |= signal.SIGHUP in asked
                    if worker.due is not None:
                        if time.monotonic() >= worker.due:
                            start(number)
                    elif not worker.process.is_alive():
                        worker.due = _restart(number, worker, say)
                    elif worker.reload and worker.ready.is_set():  # a signal would end one that starts
                        worker.reload = False
                        _send(worker, signal.SIGHUP)
                serving = all(worker.ready.is_set() and worker.due is None for worker in workers.values())
                if serving and not announced:
                    announced = True
                    announce()
                alive = [worker.process.sentinel for worker in workers.values() if worker.due is None]
                wait([received, *alive], 1.0 if serving else 0.1)
        finally:
            for worker in workers.values():
                _send(worker, signal.SIGTERM)
            end = time.monotonic() + _GRACE
            for worker in workers.values():
                worker.process.join(max(0.0, end - time.monotonic()))
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()


def _restart(number: int, worker: _Worker, say: Callable[[str], None]) -> float:
    """When a worker that ended is started again."""
    code = worker.process.exitcode
    if not worker.ready.is_set():
        given = f"worker {number}, which ended with exit code {code}"
        check.fail("workers", given, "models that can be served; what it said above is why")
    say(f"worker {number} ended with exit code {code}; it is started again")
    return time.monotonic() + _AGAIN


@contextlib.contextmanager
def _signals(*numbers: int) -> Iterator[socket.socket]:
    """Signals as bytes of a socket: they wake the loop, and are acted on between its steps, never within one."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)

        def note(number: int, frame: Any) -> None:
            with contextlib.suppress(BlockingIOError):  # full of signals that were not acted on yet
                writer.send(bytes([number]))

        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _read(received: socket.socket) -> set[int]:
    try:
        return set(received.recv(4096))
    except BlockingIOError:
        return set()


def _send(worker: _Worker, number: int) -> None:
    if worker.process.pid is not None and worker.process.is_alive():
        os.kill(worker.process.pid, number)


def _work(
    number: int,
    threads: int,
    serve_at: Serve,
    listening: socket.socket,
    sources: Sequence[Source],
    options: Any,
    say: Callable[[str], None],
    ready: Event,
) -> None:
    """One worker."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves: what it would ask for is being done
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(line: str) -> None:
        say(f"worker {number}: {line}")

    try:
        serve_at(listening, sources, options, tell, ready.set, (("worker", str(number)),))
    except (ValueError, OSError) as error:
        tell(f"error: {' '.join(str(error).split())}")
        raise SystemExit(2) from error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

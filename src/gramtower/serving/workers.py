"""Several server processes at one address, which share the pages of mapped model files.

The parent holds the socket and computes nothing: it starts the workers, hands SIGHUP on to them, ends them on SIGTERM
and SIGINT once their requests are answered, and starts one anew that died while it served. One that cannot start ends
all. A worker whose parent is gone ends by itself. Checked by tests/test_serving_process.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
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
    stopping = threading.Event()
    workers: dict[int, _Worker] = {}

    def start(number: int) -> None:
        ready = context.Event()
        given = (number, share, serve_at, listening, mapped, options, say, ready)
        process = context.Process(target=_work, args=given, name=f"gramtower-worker-{number}")
        process.start()
        workers[number] = _Worker(process, ready)

    def tell(number: int) -> None:
        for worker in workers.values():
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, number)

    def on_stop(number: int, frame: Any) -> None:
        stopping.set()
        tell(signal.SIGTERM)

    before = {number: signal.signal(number, on_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, frame: tell(signal.SIGHUP))
    try:
        for number in range(1, options.workers + 1):
            start(number)
        announced = False
        while not stopping.is_set():
            ended = [number for number, worker in workers.items() if not worker.process.is_alive()]
            for number in ended:
                if not workers[number].ready.is_set():
                    given = f"worker {number}, which ended with exit code {workers[number].process.exitcode}"
                    check.fail("workers", given, "models that can be served; what it said above is why")
                say(f"worker {number} ended with exit code {workers[number].process.exitcode}; it is started again")
                time.sleep(_AGAIN)
                start(number)
            if not announced and all(worker.ready.is_set() for worker in workers.values()):
                announced = True
                announce()
            wait([worker.process.sentinel for worker in workers.values()], 0.1 if not announced else 1.0)
    finally:
        tell(signal.SIGTERM)
        end = time.monotonic() + _GRACE
        for worker in workers.values():
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        for number, handler in before.items():
            signal.signal(number, handler)


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

"""Several server processes at one address, which share the pages of mapped model files.

The parent holds the socket and computes nothing: it starts the workers, hands SIGHUP on to them once they serve, ends
them on SIGTERM and SIGINT once their requests are answered, and starts one again that died while it served. It keeps
the files of the models that are served open, so that such a worker gets them although other files are in their place.
A worker that cannot start ends all before the server is ready; afterwards it is tried again while another one serves. A
worker whose parent is gone ends by itself.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from gramtower._util import checks as check
from gramtower.distributed.shard_files import others
from gramtower.serving.ann_index import path_beside
from gramtower.serving.snapshot import Source

_GRACE = 40  # seconds in which workers end
_AGAIN, _MOST = 1.0, 30.0  # seconds before one that died is started again: at first, and after many failures

Serve = Callable[..., None]


@dataclass
class _Worker:
    process: BaseProcess
    reports: Connection
    failures: int = 0  # starts that failed, one after the other
    ready: bool = False
    reload: bool = False  # SIGHUP has come, and was not handed on yet
    due: float | None = None  # when it is started again, after it died


class _Kept:
    """The open files of the models that are served, under names that a worker can open.

    A name is a link to a descriptor of this process, so it leads to the file that was opened, whatever has been renamed
    into its place since then.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self._files = folder, 0, dict[str, tuple[Path | None, list[int]]]()

    def keep(self, source: Source, stamp: list[Any]) -> None:
        """Open the files of a model that a worker has loaded; those of ``stamp``, or none."""
        if not Path("/proc/self/fd").is_dir():
            return
        self._count += 1
        place, opened = self._folder / str(self._count), list[int]()
        try:
            place.mkdir()
            for path in (source.path, *others(source.path), path_beside(source.path)):
                if path == source.path or path.exists():
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    (place / path.name).symlink_to(f"/proc/{os.getpid()}/fd/{opened[-1]}")
        except OSError:
            stamp = []
        found: tuple[Path | None, list[int]] = (place / source.path.name, opened)
        if json.loads(json.dumps(source.stamp())) == stamp:
            self._files[source.name], found = found, self._files.get(source.name, (None, []))
        if found[0] is not None:  # the former file; or the new one, if it was replaced: a worker reports the next
            shutil.rmtree(found[0].parent, ignore_errors=True)
        for file in found[1]:
            os.close(file)

    def source(self, source: Source) -> Source:
        """A source that leads to the files that were kept."""
        return replace(source, kept=self._files[source.name][0]) if source.name in self._files else source


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

    def start(number: int, failures: int = 0) -> None:
        reports, its_end = context.Pipe(duplex=False)
        given = (number, share, serve_at, listening, [kept.source(one) for one in mapped], options, say, its_end)
        process = context.Process(target=_work, args=given, name=f"gramtower-worker-{number}")
        process.start()
        its_end.close()
        workers[number] = _Worker(process, reports, failures)

    def hear(worker: _Worker) -> None:
        for name, stamp in _messages(worker.reports):
            if name is None:
                worker.ready, worker.failures = True, 0
            else:
                kept.keep(next(source for source in mapped if source.name == name), stamp)

    with (
        _signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received,
        tempfile.TemporaryDirectory(prefix="gramtower-serve-") as folder,
    ):
        kept = _Kept(Path(folder))
        try:
            for number in range(1, options.workers + 1):
                start(number)
            announced = False
            while not (asked := _read(received)) & {signal.SIGTERM, signal.SIGINT}:
                for number, worker in workers.items():
                    worker.reload |= signal.SIGHUP in asked
                    hear(worker)
                    if worker.due is not None:
                        if time.monotonic() >= worker.due:
                            start(number, worker.failures)
                    elif not worker.process.is_alive():
                        if not worker.ready and not (announced and any(one.ready for one in workers.values())):
                            given = f"worker {number}, which ended with exit code {worker.process.exitcode}"
                            check.fail("workers", given, "models that can be served; what it said above is why")
                        worker.due = _restart(number, worker, say)
                    elif worker.reload and worker.ready:  # a signal would end one that starts
                        worker.reload = False
                        _send(worker, signal.SIGHUP)
                serving = all(worker.ready for worker in workers.values())
                if serving and not announced:
                    announced = True
                    announce()
                alive = [worker for worker in workers.values() if worker.due is None]
                events = [one for worker in alive for one in (worker.process.sentinel, worker.reports)]
                wait([received, *events], 1.0 if serving else 0.1)
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
    pause = _AGAIN
    if not worker.ready:
        worker.failures += 1
        pause = min(_MOST, _AGAIN * 2.0**worker.failures)
    worker.ready = False
    say(f"worker {number} ended with exit code {worker.process.exitcode}; it is started again in {pause:g} s")
    return time.monotonic() + pause


def _messages(reports: Connection) -> Iterator[tuple[str | None, list[Any]]]:
    """Messages of a worker that have come: the name and stamp of a model that it loaded, or no name when it serves."""
    try:
        while reports.poll():
            name, stamp = json.loads(reports.recv_bytes())
            yield name, stamp
    except (EOFError, OSError):  # it has ended
        return


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
    reports: Connection,
) -> None:
    """One worker."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves: what it would ask for is being done
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    lock = threading.Lock()

    def tell(line: str) -> None:
        say(f"worker {number}: {line}")

    def report(name: str | None = None, stamp: Sequence[Any] = ()) -> None:
        with lock, contextlib.suppress(OSError):  # the parent is gone
            reports.send_bytes(json.dumps([name, stamp]).encode())

    try:
        serve_at(listening, sources, options, tell, report, (("worker", str(number)),), report)
    except (ValueError, OSError) as error:
        tell(f"error: {' '.join(str(error).split())}")
        raise SystemExit(2) from error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

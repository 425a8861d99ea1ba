"""Several server processes on one address, which share the memory of the mapped model files.

The parent holds the socket and computes nothing. It starts the workers, passes SIGHUP on once they serve, ends them on
SIGTERM and SIGINT, and restarts a worker that died. It keeps the files of the served models open, so that a restarted
worker gets them even if other files have replaced them. If a worker cannot start, the server ends before it is ready;
later the parent tries again as long as another worker serves. A worker ends by itself if its parent is gone.
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
from gramtower.serving.ann_index import index_path
from gramtower.serving.snapshot import Source

_GRACE = 40  # seconds in which workers must end
_AGAIN, _MOST = 1.0, 30.0  # seconds before a restart: the first one, and after many failures


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

    def messages(self) -> Iterator[tuple[str | None, list[object]]]:
        """Reports that have arrived: name and stamp of a loaded model, or no name when the worker serves."""
        with contextlib.suppress(EOFError, OSError):  # the worker has ended
            while self.reports.poll():
                name, stamp = json.loads(self.reports.recv_bytes())
                yield name, stamp

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

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self._files = folder, 0, dict[str, tuple[Path | None, list[int]]]()

    def keep(self, source: Source, stamp: list[object]) -> None:
        """Open the files of a model that a worker has loaded, unless they have changed since ``stamp``."""
        if not Path("/proc/self/fd").is_dir():
            return
        self._count += 1
        place, opened = self._folder / str(self._count), list[int]()
        try:
            place.mkdir()
            for path in (source.path, *others(source.path), index_path(source.path)):
                if path == source.path or path.exists():
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    (place / path.name).symlink_to(f"/proc/{os.getpid()}/fd/{opened[-1]}")
        except OSError:
            stamp = []
        unused: tuple[Path | None, list[int]] = (place / source.path.name, opened)
        if json.loads(json.dumps(source.stamp())) == stamp:
            self._files[source.name], unused = unused, self._files.get(source.name, (None, []))
        if unused[0] is not None:
            shutil.rmtree(unused[0].parent, ignore_errors=True)
        for file in unused[1]:
            os.close(file)

    def source(self, source: Source) -> Source:
        """The source with the path of its kept file, if it has one."""
        return replace(source, kept=self._files[source.name][0]) if source.name in self._files else source


def run_workers(
    serve_at: Callable[..., None],
    listening: socket.socket,
    sources: Sequence[Source],
    options: Any,
    say: Callable[[str], None],
    announce: Callable[[], None],
) -> None:
    """Serve with several processes until a signal ends them."""
    mapped = {source.name: replace(source, mapped=True) for source in sources}
    share = max(1, torch.get_num_threads() // options.workers)
    context = multiprocessing.get_context("spawn")
    workers: dict[int, _Worker] = {}

    def start(number: int, failures: int = 0) -> None:
        reports, its_end = context.Pipe(duplex=False)
        models = [kept.source(one) for one in mapped.values()]
        given = (number, share, serve_at, listening, models, options, say, its_end)
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
        _signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received,
        tempfile.TemporaryDirectory(prefix="gramtower-serve-") as folder,
    ):
        kept, announced = _Kept(Path(folder)), False
        try:
            for number in range(1, options.workers + 1):
                start(number)
            while not (signals := _read(received)) & {signal.SIGTERM, signal.SIGINT}:
                for number, worker in list(workers.items()):
                    worker.reload |= signal.SIGHUP in signals
                    attend(number, worker)
                serving = all(worker.ready for worker in workers.values())
                if serving and not announced:
                    announced = True
                    announce()
                alive = [worker for worker in workers.values() if worker.due is None]
                events = [one for worker in alive for one in (worker.process.sentinel, worker.reports)]
                wait([received, *events], 1.0 if serving else 0.1)
        finally:
            for worker in workers.values():
                worker.send(signal.SIGTERM)
            end = time.monotonic() + _GRACE
            for worker in workers.values():
                worker.process.join(max(0.0, end - time.monotonic()))
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()


@contextlib.contextmanager
def _signals(*numbers: int) -> Iterator[socket.socket]:
    """Turn signals into bytes on a socket: they wake the loop, which handles them between its steps."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)

        def note(number: int, frame: object) -> None:
            with contextlib.suppress(BlockingIOError):  # the socket is full of signals not handled yet
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


def _work(
    number: int,
    threads: int,
    serve_at: Callable[..., None],
    listening: socket.socket,
    sources: Sequence[Source],
    options: Any,
    say: Callable[[str], None],
    reports: Connection,
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves: models are being loaded anyway
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    lock = threading.Lock()

    def write(line: str) -> None:
        say(f"worker {number}: {line}")

    def report(name: str | None = None, stamp: Sequence[object] = ()) -> None:
        with lock, contextlib.suppress(OSError):  # the parent is gone
            reports.send_bytes(json.dumps([name, stamp]).encode())

    try:
        serve_at(listening, sources, options, write, report, (("worker", str(number)),), report)
    except (ValueError, OSError) as error:
        write(f"error: {' '.join(str(error).split())}")
        raise SystemExit(2) from error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

"""Heartbeats: each process reports which collective it is in, so that a failed wait can name the missing process.

A thread writes a line to the store of torch.distributed every few seconds: how many operations were begun, and a count
of its own, which shows that the process is alive. When an operation fails or times out, the lines are read twice: a
process whose count stands still is gone, one that began fewer operations is hung. NCCL ends a process by itself on a
time-out; there the thread prints who is missing while the process waits.

Cost: one small message every two seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEAT = 2.0  # seconds between lines
_PATIENCE = 0.8  # share of the time-out after which a waiting process says whom it waits for


class PeerError(RuntimeError):
    """Another process of the run is gone or hung."""


class Watch:
    """Writes this process's line and reads the others'.

    Args:
        store: what torch.distributed keeps small values in.
        rank: of this process.
        size: number of processes.
        timeout: seconds after which an operation fails.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.begun, self.operation, self._beats = 0, "nothing yet", 0
        self._stop = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._run, name="gramtower-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside the store at the end of the interpreter would abort the process

    def begin(self, operation: str) -> None:
        """Count an operation that all processes take part in."""
        self.begun += 1
        self.operation = operation

    def close(self) -> None:
        """Write no more."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def missing(self) -> str:
        """The processes that are gone or behind, in words; empty if there are none. Takes a few seconds."""
        first = [self._read(rank) for rank in range(self.size)]
        self._stop.wait(1.6 * _BEAT)
        second = [self._read(rank) for rank in range(self.size)]
        reports = []
        for rank, (before, now) in enumerate(zip(first, second, strict=True)):
            if rank == self.rank:
                continue
            if now is None:
                reports.append(f"process {rank} of {self.size} never began")
            elif before is not None and before["beats"] == now["beats"]:
                reports.append(f"process {rank} of {self.size} ({_where(now)}) is gone: it gives no sign of life")
            elif now["begun"] < self.begun:
                reports.append(
                    f"process {rank} of {self.size} ({_where(now)}) is hung: it lives but has begun {now['begun']} "
                    f"operations, the last of them {now['operation']}, where this process has begun {self.begun}"
                )
        return "; ".join(reports)

    def explain(self, error: BaseException) -> PeerError:
        """An error that names the missing processes."""
        found = self.missing() or "no process is missing"
        short = " ".join(str(error).split())[:300]
        return PeerError(
            f"process {self.rank} of {self.size} could not end {self.operation}: {found}. "
            f"The last checkpoint is whole; the same command goes on from it. ({short})"
        )

    def _run(self) -> None:
        begun, since, reported = self.begun, time.monotonic(), False
        while not self._stop.wait(_BEAT):
            try:
                self._write()
                if self.begun != begun:
                    begun, since, reported = self.begun, time.monotonic(), False
                elif not reported and time.monotonic() - since > _PATIENCE * self.timeout and (found := self.missing()):
                    reported = True
                    print(f"process {self.rank} waits in {self.operation}: {found}", file=sys.stderr, flush=True)
            except Exception:  # the store is gone, and with it the run
                return

    def _write(self) -> None:
        self._beats += 1
        line = {"beats": self._beats, "begun": self.begun, "operation": self.operation}
        line |= {"pid": os.getpid(), "host": socket.gethostname()}
        self._store.set(f"gramtower/{self.rank}", json.dumps(line))

    def _read(self, rank: int) -> dict[str, Any] | None:
        with contextlib.suppress(Exception):
            if self._store.check([f"gramtower/{rank}"]):
                line: dict[str, Any] = json.loads(self._store.get(f"gramtower/{rank}"))
                return line
        return None


def _where(line: dict[str, object]) -> str:
    return f"pid {line['pid']} on {line['host']}"

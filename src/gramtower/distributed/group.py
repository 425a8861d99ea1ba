"""The processes of a run, their collectives, and facts that must be equal in all of them.

:class:`Group` is a single process: every sum is already complete, and nothing is copied. :class:`ProcessGroup` is the
same over torch.distributed (gloo on CPUs, NCCL on GPUs). No other module of the engine uses torch.distributed.

``bytes`` counts what this process sends or receives, by kind of operation (docs/scale.md has the formulas):

    reduce    2 (N − 1)/N times the size of the tensor, as in a ring
    gather    (N − 1) times the largest shard
    scatter   the rows that go to others
    scalars   (N − 1) times the numbers gathered

:func:`agree` compares named facts before a computation starts, and its error names the process that differs.
:class:`Digest` is a fingerprint of rows that does not depend on how they are spread over processes: the sum, modulo
2⁶⁴, of a hash of each entry.

So that a failed wait can name the missing process, a thread of each (:class:`Watch`) writes a line to the store of
torch.distributed every two seconds: how many operations were begun, and a count of its own, which shows that the
process is alive. When an operation fails or times out, the lines are read twice: a process whose count stands still is
gone, one that began fewer operations is hung. NCCL ends a process by itself on a time-out; there the thread prints who
is missing while the process waits.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.host import parallel_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_BEAT = 2.0  # seconds between lines
_PATIENCE = 0.8  # share of the time-out after which a waiting process says whom it waits for
_CHUNK = 1 << 16  # entries at a time, so that what numpy makes of them on the way stays in cache


@dataclass(frozen=True)
class Pending:
    """An asynchronous operation; ``wait()`` completes it and returns the result."""

    wait: Callable[[], Tensor]


class Group:
    """A single process."""

    size, rank = 1, 0
    local_size = 1  # processes on this machine

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.product_bytes = 0  # of the last G·d

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds so far."""
        return sum(self.bytes.values())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise an error of one process in all processes; for work without collectives."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            if self.size == 1:
                raise
            error = caught
        reports = self.gather_json(None if error is None else [isinstance(error, ValueError), str(error)])
        if error is not None:
            raise error
        for rank, text in enumerate(reports):
            if text is not None:
                raise (ValueError if text[0] else RuntimeError)(f"process {rank} of {self.size}: {text[1]}")

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce: the sum of a tensor over the processes, in place."""
        return tensor

    def sum_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All-reduce of several tensors of one dtype, in one message."""
        return tensors

    def totals(self, *numbers: float) -> tuple[float, ...]:
        """Sum numbers in the order of ranks, so that every process gets the same bits."""
        return numbers

    def from_first(self, value: T) -> T:
        """Broadcast a JSON value of the first process."""
        found: T = self.gather_json(value if self.rank == 0 else None)[0]
        return found

    def gather_json(self, value: object) -> list[Any]:
        """All-gather JSON values by rank."""
        return [value]

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Broadcast the tensor of a process, the first one unless given, in place."""
        return tensor

    def exchange_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """All-to-all: send the next ``counts[r]`` rows to each process r; returns the rows received, by rank."""
        return rows

    def gather_rows(self, rows: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Pending:
        """All-gather: all processes' rows by rank; ``counts`` are the numbers of rows of each."""
        return Pending(lambda: rows)

    def reduce_scatter_rows(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Reduce-scatter: sum ``rows`` over processes, keep this rank's slice; ``counts`` are the rows of each."""
        return Pending(lambda: rows)


SINGLE = Group()


class ProcessGroup(Group):
    """The processes of torch.distributed's default group, which must be initialised."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        super().__init__()
        self._dist = dist
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        cuda = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self.watch = Watch(_get_default_store(), self.rank, self.size, _timeout(self.device))

    def sum_(self, tensor: Tensor) -> Tensor:
        self.bytes["reduce"] += 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size
        return self._in_place("sum", tensor, self._dist.all_reduce)

    def sum_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not tensors:  # towers that are only tables have no replicated tensors
            return ()
        flat = self.sum_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))

    def totals(self, *numbers: float) -> tuple[float, ...]:
        local = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        gathered = local.new_empty(self.size * len(numbers))
        self.bytes["scalars"] += (self.size - 1) * local.numel() * 8
        self._call("totals", lambda: self._gather(gathered, local))
        rows = gathered.view(self.size, len(numbers)).tolist()
        return tuple(sum(column) for column in zip(*rows, strict=True))

    def gather_json(self, value: object) -> list[Any]:
        """All-gather values as JSON text, so that nothing is unpickled."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        local = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
        self._call("gather_json", lambda: self._gather(lengths, local))
        counts = lengths.tolist()
        gathered = self.gather_rows(text[:, None], counts).wait()[:, 0].cpu().numpy().tobytes()
        ends = [sum(counts[: rank + 1]) for rank in range(self.size)]
        return [json.loads(gathered[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self._in_place("broadcast", tensor, lambda buffer: self._dist.broadcast(buffer, source))

    def exchange_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        sent = rows.to(self.device).contiguous()
        received = [other[self.rank] for other in self.gather_json(list(counts))]
        found = sent.new_empty(sum(received), *rows.shape[1:])
        self.bytes["scatter"] += (len(rows) - counts[self.rank]) * rows[:1].numel() * rows.element_size()
        self._call("exchange_rows", lambda: self._dist.all_to_all_single(found, sent, received, list(counts)))
        return found.to(rows.device)

    def gather_rows(self, rows: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Pending:
        """All-gather rows; shorter shards are padded to the longest."""
        if rows.device.type != self.device.type:
            elsewhere = self.gather_rows(rows.to(self.device), counts)
            return Pending(lambda: elsewhere.wait().to(rows.device))
        longest, tail = max(counts), rows.shape[1:]
        if longest == 0:
            return Pending(lambda: rows)
        even = all(count == longest for count in counts)
        padded = rows.contiguous() if len(rows) == longest else rows.new_zeros(longest, *tail)
        if len(rows) < longest:
            padded[: len(rows)] = rows
        gathered = rows.new_empty(self.size * longest, *tail) if out is None or not even else out
        self.bytes["gather"] += (self.size - 1) * padded.numel() * padded.element_size()
        work = self._call("gather_rows", lambda: self._gather(gathered, padded, async_op=True))

        def finish() -> Tensor:
            self._call("gather_rows", work.wait)
            if even:
                return gathered
            parts = [part[:count] for part, count in zip(torch.split(gathered, longest), counts, strict=True)]
            return torch.cat(parts) if out is None else torch.cat(parts, out=out)

        return Pending(finish)

    def reduce_scatter_rows(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Add the parts in the order of ranks, so that the sum does not depend on the backend."""
        if rows.device.type != self.device.type:
            elsewhere = self.reduce_scatter_rows(rows.to(self.device), counts)
            return Pending(lambda: elsewhere.wait().to(rows.device))
        local, tail = counts[self.rank], rows.shape[1:]
        received = rows.new_empty(self.size * local, *tail)
        rows = rows.contiguous()
        self.bytes["scatter"] += (len(rows) - local) * rows[:1].numel() * rows.element_size()
        splits = ([local] * self.size, list(counts))
        work = self._call(
            "reduce_scatter_rows", lambda: self._dist.all_to_all_single(received, rows, *splits, async_op=True)
        )

        def finish() -> Tensor:
            self._call("reduce_scatter_rows", work.wait)
            return received.view(self.size, local, *tail).sum(0)

        return Pending(finish)

    def _in_place(self, name: str, tensor: Tensor, operation: Callable[[Tensor], object]) -> Tensor:
        buffer = tensor.to(self.device)
        self._call(name, lambda: operation(buffer))
        return tensor if buffer is tensor else tensor.copy_(buffer)

    def _call(self, name: str, operation: Callable[[], T]) -> T:
        self.watch.begin(name)
        try:
            return operation()
        except RuntimeError as error:
            raise self.watch.explain(error) from error


def current_group() -> Group:
    """The default group of torch.distributed if it has several processes; otherwise a group of this process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SINGLE
    return _made_once(dist.group.WORLD)


@lru_cache(maxsize=1)
def _made_once(_: object) -> ProcessGroup:
    return ProcessGroup()


def _timeout(device: torch.device) -> float:
    """Seconds after which an operation fails; torch has no public attribute for it."""
    from torch.distributed.distributed_c10d import _get_default_group

    try:
        return float(_get_default_group()._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 600.0


def agree(group: Group, facts: Mapping[str, object]) -> None:
    """Check that facts are equal in all processes."""
    reports = group.gather_json(dict(facts))
    for name, value in reports[0].items():
        for rank, other in enumerate(reports):
            if other.get(name) != value:
                check.fail(name, f"{other.get(name)!r} in process {rank} of {group.size}", f"{value!r} as in process 0")


def versions() -> dict[str, str]:
    """Versions of packages that must be equal in every process."""
    from importlib.metadata import version

    return {
        "version of gramtower": version("gramtower"),
        "version of torch": str(torch.__version__).split("+")[0],
        "version of numpy": np.__version__,
        "version of python": platform.python_version(),
    }


class Digest:
    """A fingerprint of entries (key, value) in any order: two 64-bit sums."""

    def __init__(self) -> None:
        self._sums = np.zeros(2, dtype=np.uint64)

    def add(self, keys: NDArray[np.integer], values: NDArray[np.number]) -> Digest:
        """Add entries: a distinct integer and a number for each."""
        return self._add(lambda part: keys[part].astype(np.uint64), values)

    def add_rows(self, array: ArrayLike | None, first: int) -> Digest:
        """Add an array whose first row has the global number ``first``; None adds nothing."""
        if array is None:
            return self
        plain = np.asarray(array)
        begin = first * (plain[:1].size or 1)
        flat = np.ascontiguousarray(plain).reshape(-1)
        return self._add(lambda part: np.arange(part.start + begin, part.stop + begin, dtype=np.uint64), flat)

    def add_sums(self, sums: NDArray[np.uint64]) -> Digest:
        """Add the sums of another Digest or of entry_sums."""
        with np.errstate(over="ignore"):
            self._sums = self._sums + sums
        return self

    def text(self, group: Group) -> str:
        """The sums over all processes, in hexadecimal."""
        parts = group.gather_json([int(x) for x in self._sums])
        return "".join(f"{sum(part[half] for part in parts) % 2**64:016x}" for half in range(2))

    def _add(self, keys: Callable[[slice], NDArray[np.uint64]], values: NDArray[np.number]) -> Digest:
        bounds = [*range(0, len(values), _CHUNK), len(values)]
        sums: NDArray[np.uint64] = np.zeros((len(bounds), 2), np.uint64)

        def work(start: int, stop: int) -> None:
            with np.errstate(over="ignore"):
                part = slice(start, stop)
                bits = np.ascontiguousarray(values[part], dtype=np.float64).view(np.uint64)
                mixed = mix(keys(part) + mix(bits))
                sums[start // _CHUNK] = mixed.sum(), mix(mixed).sum()

        parallel_for(work, bounds)
        return self.add_sums(sums.sum(axis=0, dtype=np.uint64))


def mix(x: Any) -> Any:
    """Apply the final steps of splitmix64 to a number or an array: every bit of x changes every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)


class PeerError(RuntimeError):
    """Another process of the run is gone or hung."""


class Watch:
    """Writes this process's line and reads the others'; operations fail after ``timeout`` seconds."""

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
            name = f"process {rank} of {self.size}"
            if now is None:
                reports.append(f"{name} never began")
                continue
            name = f"{name} (pid {now['pid']} on {now['host']})"
            if before is not None and before["beats"] == now["beats"]:
                reports.append(f"{name} is gone: it gives no sign of life")
            elif now["begun"] < self.begun:
                reports.append(
                    f"{name} is hung: it lives but has begun {now['begun']} operations, the last of them "
                    f"{now['operation']}, where this process has begun {self.begun}"
                )
        return "; ".join(reports)

    def explain(self, error: RuntimeError) -> PeerError:
        """An error that names the missing processes."""
        found, short = self.missing() or "no process is missing", " ".join(str(error).split())[:300]
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
        with suppress(Exception):
            if self._store.check([f"gramtower/{rank}"]):
                line: dict[str, Any] = json.loads(self._store.get(f"gramtower/{rank}"))
                return line
        return None

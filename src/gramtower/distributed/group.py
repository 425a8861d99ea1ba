"""The processes of a run and their collectives: all-reduce, all-gather, reduce-scatter, broadcast.

:class:`Group` is a single process: every sum is already complete, and nothing is copied. :class:`ProcessGroup` is the
same over torch.distributed (gloo on CPUs, NCCL on GPUs). No other module of the engine uses torch.distributed.

``bytes`` counts what this process sends or receives, by kind of operation (docs/scale.md has the formulas):

    reduce    2 (N − 1)/N times the size of the tensor, as in a ring
    gather    (N − 1) times the largest shard
    scatter   the rows that go to others
    scalars   (N − 1) times the numbers gathered
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramtower.distributed.watch import PeerError, Watch

T = TypeVar("T")


class Pending:
    """An asynchronous operation; ``wait()`` completes it and returns the result."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        return self._finish()


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
        return value

    def gather_json(self, value: object) -> list[Any]:
        """All-gather JSON values by rank."""
        return [value]

    def copy_from_first_(self, tensor: Tensor) -> Tensor:
        """Broadcast the first process's tensor, in place."""
        return tensor

    def gather_rows(self, rows: Tensor, counts: Sequence[int], out: Tensor | None = None) -> Pending:
        """All-gather: all processes' rows by rank; ``counts`` are the numbers of rows of each."""
        return Pending(lambda: rows)

    def reduce_scatter_rows(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Reduce-scatter: sum ``rows`` over processes, keep this rank's slice; ``counts`` are the rows of each."""
        return Pending(lambda: rows)

    def barrier(self) -> None:
        """Wait for all processes."""


SINGLE = Group()


class ProcessGroup(Group):
    """The processes of torch.distributed's default group, which must be initialised."""

    def __init__(self, device: torch.device | None = None) -> None:
        import torch.distributed as dist

        super().__init__()
        self._dist = dist
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if device is None:
            cuda = dist.get_backend() == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.device = device
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        from torch.distributed.distributed_c10d import _get_default_store

        self.watch = Watch(_get_default_store(), self.rank, self.size, _timeout(self.device))

    def sum_(self, tensor: Tensor) -> Tensor:
        self.bytes["reduce"] += 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size
        buffer = tensor.to(self.device)
        self._call("sum", lambda: self._dist.all_reduce(buffer))
        return tensor if buffer is tensor else tensor.copy_(buffer)

    def sum_all(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not tensors:  # towers of tables alone have no replicated tensors
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

    def from_first(self, value: T) -> T:
        found: T = self.gather_json(value if self.rank == 0 else None)[0]
        return found

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

    def copy_from_first_(self, tensor: Tensor) -> Tensor:
        buffer = tensor.to(self.device)
        self._call("copy_from_first", lambda: self._dist.broadcast(buffer, 0))
        return tensor if buffer is tensor else tensor.copy_(buffer)

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

    def barrier(self) -> None:
        self.totals(0.0)

    def _call(self, name: str, operation: Callable[[], T]) -> T:
        self.watch.begin(name)
        try:
            return operation()
        except PeerError:
            raise
        except RuntimeError as error:
            raise self.watch.explain(error) from error


def current_group() -> Group:
    """The default group of torch.distributed if it has several processes; otherwise a group of this process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return SINGLE
    return _made_once(dist.group.WORLD)


def _timeout(device: torch.device) -> float:
    """Seconds after which an operation fails; torch has no public attribute for it."""
    from torch.distributed.distributed_c10d import _get_default_group

    try:
        return float(_get_default_group()._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return 600.0


@lru_cache(maxsize=1)
def _made_once(_: object) -> ProcessGroup:
    return ProcessGroup()

"""The left rows in blocks, each with the constants of its pairs on the device: kept there, or sent when needed.

When the pairs do not fit the memory budget they stay in pinned host memory and a block's columns, weights and orders
travel on a stream of their own while the block before it is worked on. Two blocks are on the device at a time, the one
being worked on and the next: it is sent as soon as the block before both has made room. Checked by
tests/test_swept.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs
from gramtower.kernels import Kernels
from gramtower.kernels.layout import Order
from gramtower.objective.setting import Setting

Make = Callable[[tuple[int, int]], Setting]
_PER_PAIR = ("labels", "pair_weight", "loss_weight", "pair_imputed")


class RowBlocks:
    """Blocks of ``rows`` left rows, made when they are first visited.

    Args:
        total: left rows.
        rows: of a block.
        streamed: whether what belongs to single pairs stays in host memory.
        kernels: whose order of the pairs is kept with them.
    """

    def __init__(self, total: int, rows: int, streamed: bool, kernels: Kernels) -> None:
        self.streamed, self.kernels = streamed, kernels
        self._road: Any = None  # one for all passes: memory that was used on a stream is kept for that stream
        self.bounds = [(start, min(total, start + rows)) for start in range(0, total, rows)]
        self._made: list[Setting | _Stored] = []

    def visit(self, make: Make, by_columns: bool = True) -> Iterator[tuple[int, int, Setting]]:
        """Ranges of rows with their constants, in order; each is valid until the next one is asked for.

        ``make`` gives the constants of a range the first time. Who only sums over rows can do without the order
        ``by_columns``.
        """
        if self.streamed:
            yield from self._sent(make, by_columns)
            return
        for index, (start, stop) in enumerate(self.bounds):
            if index == len(self._made):
                self._made.append(make((start, stop)))
            setting = self._made[index]
            assert isinstance(setting, Setting)
            yield start, stop, setting

    def _sent(self, make: Make, by_columns: bool) -> Iterator[tuple[int, int, Setting]]:
        for index in range(len(self._made), len(self.bounds)):
            self._made.append(_Stored.of(make(self.bounds[index]), self.kernels))
        if self._road is None:
            self._road = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        road = self._road
        before: torch.cuda.Event | None = None  # the end of the work on the block before
        coming: tuple[Setting, torch.cuda.Event] | None = self._send(0, road, by_columns)
        for index, (start, stop) in enumerate(self.bounds):
            assert coming is not None
            (setting, arrived), coming = coming, None
            torch.cuda.current_stream().wait_event(arrived)
            there_is_more = index + 1 < len(self.bounds)
            if there_is_more and (before is None or before.query()):  # type: ignore[no-untyped-call]
                coming = self._send(index + 1, road, by_columns)
            yield start, stop, setting
            del setting
            worked = _mark()
            if there_is_more and coming is None:
                assert before is not None
                before.synchronize()  # the device is busy with this block meanwhile
                coming = self._send(index + 1, road, by_columns)
            before = worked

    def _send(self, index: int, road: torch.cuda.Stream, by_columns: bool) -> tuple[Setting, torch.cuda.Event]:
        stored = self._made[index]
        assert isinstance(stored, _Stored)
        user = torch.cuda.current_stream()
        with torch.cuda.stream(road):
            setting = stored.send(user, by_columns)
            return setting, _mark()


def _mark() -> torch.cuda.Event:
    """The moment at which what the present stream was given so far is done."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass
class _Stored:
    """The constants of a block, those of single pairs in host memory.

    Attributes:
        setting: with what belongs to entities, and the offsets of the pattern's rows; the rest is missing.
        per_pair: what belongs to single pairs.
        columns: of the pairs.
        kernels: which visit the pairs.
        order: the short index tensors of the kernels' traversal order, on the device.
        by_columns: the O(|O|) tensors of the order by columns.
    """

    setting: Setting
    per_pair: dict[str, _Sent]
    columns: _Sent
    kernels: Kernels
    order: Order | None
    by_columns: dict[str, _Sent]

    @staticmethod
    def of(setting: Setting, kernels: Kernels) -> _Stored:
        """Move what belongs to single pairs to host memory."""
        values = {name: getattr(setting, name) for name in _PER_PAIR}
        per_pair = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() and 0 not in v.stride()}
        pairs = setting.pairs
        empty = Pairs(pairs.shape, pairs.offsets, pairs.columns[:0].clone())
        missing: dict[str, Any] = dict.fromkeys(per_pair)
        sent = {name: _Sent.of(tensor) for name, tensor in per_pair.items()}
        columns = _Sent.of(pairs.columns, pairs.shape[1])
        order, long = kernels.export_order(pairs)
        limits = {"rows": pairs.shape[0]}
        by_columns = {name: _Sent.of(tensor, limits.get(name)) for name, tensor in long.items()}
        return _Stored(replace(setting, pairs=empty, **missing), sent, columns, kernels, order, by_columns)

    def send(self, user: torch.cuda.Stream, by_columns: bool) -> Setting:
        """The whole of it on the device, for ``user`` to read."""
        empty = self.setting.pairs
        pairs = Pairs(empty.shape, empty.offsets, self.columns.bring(user))
        long = {name: sent.bring(user) for name, sent in self.by_columns.items()} if by_columns else None
        self.kernels.import_order(pairs, self.order, long)
        values: dict[str, Any] = {name: sent.bring(user) for name, sent in self.per_pair.items()}
        return replace(self.setting, pairs=pairs, **values)


@dataclass(frozen=True)
class _Sent:
    """A tensor in pinned memory; numbers below 65,536 travel, and are read, in 16 bits.

    Attributes:
        tensor: as it travels.
        device: where to.
    """

    tensor: Tensor
    device: torch.device

    @staticmethod
    def of(tensor: Tensor, limit: int | None = None) -> _Sent:
        """Move a tensor to host memory; its numbers are below ``limit``."""
        short = tensor.cpu()
        if limit is not None and limit <= 1 << 16:
            short = short.to(torch.uint16)
        return _Sent(short.pin_memory(), tensor.device)

    def bring(self, user: torch.cuda.Stream) -> Tensor:
        """The tensor on the device, for ``user`` to read."""
        here = self.tensor.to(self.device, non_blocking=True)
        here.record_stream(user)
        return here

"""The left rows in blocks, each with the constants of its pairs on the device: kept there, or sent when needed.

When the pairs do not fit the memory budget they stay in pinned host memory and a block's columns, weights and orders
travel on a stream of their own while the blocks before it are worked on. Three blocks are on the device at a time: the
one being worked on, the next, and one on its way, for which the block before the first must have made room. Checked by
tests/test_swept.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs
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

    def __init__(self, total: int, rows: int, streamed: bool, kernels: Any) -> None:
        self.streamed, self.kernels = streamed, kernels
        self._road: Any = None  # one for all passes: memory that was used on a stream is kept for that stream
        self.bounds = [(start, min(total, start + rows)) for start in range(0, total, rows)]
        self._made: list[Setting | _Stored] = []

    def visit(self, make: Make) -> Iterator[tuple[int, int, Setting]]:
        """Ranges of rows with their constants, in order; each is valid until the next one is asked for.

        ``make`` gives the constants of a range the first time.
        """
        if self.streamed:
            yield from self._sent(make)
            return
        for index, (start, stop) in enumerate(self.bounds):
            if index == len(self._made):
                self._made.append(make((start, stop)))
            setting = self._made[index]
            assert isinstance(setting, Setting)
            yield start, stop, setting

    def _sent(self, make: Make) -> Iterator[tuple[int, int, Setting]]:
        for index in range(len(self._made), len(self.bounds)):
            self._made.append(_Stored.of(make(self.bounds[index]), self.kernels))
        if self._road is None:
            self._road = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        road = self._road
        worked: list[torch.cuda.Event] = []
        coming = deque(self._send(index, road) for index in range(min(2, len(self.bounds))))
        for index, (start, stop) in enumerate(self.bounds):
            setting, arrived = coming.popleft()
            torch.cuda.current_stream().wait_event(arrived)
            yield start, stop, setting
            del setting
            worked.append(_mark())
            if index + 2 < len(self.bounds):
                if index:
                    worked[index - 1].synchronize()  # the device is busy with this block meanwhile
                coming.append(self._send(index + 2, road))

    def _send(self, index: int, road: torch.cuda.Stream) -> tuple[Setting, torch.cuda.Event]:
        stored = self._made[index]
        assert isinstance(stored, _Stored)
        user = torch.cuda.current_stream()
        with torch.cuda.stream(road):
            setting = stored.send(user)
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
        per_pair: what belongs to single pairs, pinned.
        order: how kernels visit the pairs, its short parts on the device and its long ones in ``per_pair``.
    """

    setting: Setting
    per_pair: dict[str, Tensor]
    order: Any

    @staticmethod
    def of(setting: Setting, kernels: Any) -> _Stored:
        """Move what belongs to single pairs to host memory."""
        values = {name: getattr(setting, name) for name in _PER_PAIR}
        per_pair = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() and 0 not in v.stride()}
        per_pair["columns"] = setting.pairs.columns
        order = None
        if hasattr(kernels, "take_order"):
            order, long = kernels.take_order(setting.pairs)
            per_pair |= long
        pinned = {name: tensor.cpu().pin_memory() for name, tensor in per_pair.items()}
        empty = Pairs(setting.pairs.shape, setting.pairs.offsets, setting.pairs.columns[:0].clone())
        missing: dict[str, Any] = {name: None for name in per_pair if name in _PER_PAIR}
        return _Stored(replace(setting, pairs=empty, **missing), pinned, (kernels, order))

    def send(self, user: torch.cuda.Stream) -> Setting:
        """The whole of it on the device, for ``user`` to read."""
        empty = self.setting.pairs
        here = {name: tensor.to(empty.device, non_blocking=True) for name, tensor in self.per_pair.items()}
        for tensor in here.values():
            tensor.record_stream(user)
        pairs = Pairs(empty.shape, empty.offsets, here.pop("columns"))
        kernels, order = self.order
        if order is not None:
            kernels.give_order(pairs, order, here)
        values: dict[str, Any] = {name: here[name] for name in _PER_PAIR if name in here}
        return replace(self.setting, pairs=pairs, **values)

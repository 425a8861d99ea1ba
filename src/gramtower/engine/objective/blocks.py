"""The left rows of a point in blocks, and what their observed pairs add to value, gradient and G·d.

One evaluation (value_and_gradient.py) loops over these blocks, which know what is kept:

    resident   one block of all rows: embeddings, activations and ℓ⁺ on the pairs are kept as long as the point
    streamed   many blocks, each made for one visit: its rows run forward again, and nothing of it is kept

Pairs of streamed blocks stay on the device, or in pinned host memory from where a block's columns, weights and orders
are copied on a copy stream while the previous block is used: double-buffered, block t + 1 is copied once block t − 1
has been freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs
from gramtower.distributed.shards import Shards
from gramtower.engine.kernels import Kernels
from gramtower.engine.kernels.elementwise import LossTerms, Observed
from gramtower.engine.kernels.layout import Order
from gramtower.engine.kernels.reference import RowSystems
from gramtower.engine.objective.constants import PairConstants
from gramtower.engine.objective.formulas import Side
from gramtower.engine.towers.linearization import Linearization

_PER_PAIR = ("labels", "pair_weight", "loss_weight", "imputed")  # of LossTerms, as far as they are tensors


@dataclass(eq=False, repr=False)
class LeftBlock:
    """Some left rows at θ, from ``start`` on, with the tower over them and their observed pairs."""

    start: int
    side: Side  # constants of the rows
    _pairs: Pairs
    _terms: LossTerms
    tower: Linearization
    _Q: Tensor
    _kernels: Kernels
    _resident: bool
    passes: float = 0.0  # over the block's pairs, so far

    @property
    def P(self) -> Tensor:
        """The rows' embeddings."""
        return self.tower.outputs

    def rows_of(self, matrix: Tensor) -> Tensor:
        """These rows of a matrix with one for each left row."""
        return matrix[self.start : self.start + self.tower.rows]

    @cached_property
    def gathered_P(self) -> Tensor:
        """The embeddings in bfloat16."""
        return self.P.bfloat16()

    @cached_property
    def observed(self) -> Observed:
        """ℓ⁺ on the pairs with its derivatives. One pass over them, as long as the block lives."""
        self.passes += 1
        return self._kernels.losses(self._pairs, self.P, self._Q, self._terms)

    def add_slopes(self, U: Tensor) -> Tensor:
        """X of eq:Xij, and U += X Q."""
        x = self._in_one_pass(U)
        if x is None:
            x = self.observed.slopes
            self.left_sum(x, self._Q, U)
        return x

    def add_curvatures(self, W: Tensor, Q: Tensor, H: Tensor, U: Tensor) -> Tensor:
        """Z_ij = ∂²ℓ⁺ (w_i·q_j + p_i·h_j) of eq:final_Gd, and U += Z Q; Q and H as they are gathered for each pair."""
        z = self._in_one_pass(U, (W, H)) if Q is self._Q else None
        if z is None:
            z = self._kernels.curvature_left(self._pairs, self.observed.curvatures, self.P, W, Q, H, U)
            self.passes += 1
        return z

    def _in_one_pass(self, U: Tensor, tangents: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
        """X or Z, if the kernels can add it times Q to U in one pass; None if ℓ⁺ is kept, or if they cannot."""
        if self._resident:
            return None
        x = self._kernels.loss_left(self._pairs, self.P, self._Q, self._terms, U, tangents)
        self.passes += x is not None
        return x

    def left_sum(self, x: Tensor, B: Tensor, out: Tensor) -> None:
        """out += X B; of fewer columns than k, counted as that share of a pass."""
        self._kernels.left_sum(self._pairs, x, B, out)
        self.passes += B.shape[1] / self._Q.shape[1]

    def right_sum(self, x: Tensor, A: Tensor, out: Tensor) -> None:
        """out += Xᵀ A, likewise."""
        self._kernels.right_sum(self._pairs, x, A, out)
        self.passes += A.shape[1] / self._Q.shape[1]

    def solve(self, side: int, others: Tensor, systems: RowSystems, shards: Shards) -> Tensor:
        """The systems of these rows, or of the right ones: steps, and the square of their gradient's norm.

        The pairs of a right row are spread over the processes, which solve its system together: 2 + 2 · steps passes.
        """
        x, c = self.observed.slopes, self.observed.curvatures
        if side == 0 or shards.single:
            solve = (self._kernels.solve_left, self._kernels.solve_right)[side]
            self.passes += 1  # the further ones are out of the cache
            return solve(self._pairs, x, c, others, systems)

        def dots(rows: Tensor) -> Tensor:
            self.passes += 1
            return self._kernels.dots(self._pairs, others, shards.gather(rows).wait())

        def add_sum(z: Tensor, E: Tensor, out: Tensor) -> None:
            shards.add_right_sum(out, lambda total: self.right_sum(z, E, total)).wait()

        return systems.solve(x, c, dots, add_sum, others)


class PairBlocks:
    """The pairs of a problem on a device, in blocks of left rows; made when they are first visited.

    ``make`` returns the constants of the pairs of a range of rows, or of all rows for None. A ``block`` of None keeps
    all rows resident; ``pinned`` keeps O(|O|) tensors in pinned host memory, with the kernels' order of the pairs.
    """

    def __init__(
        self,
        make: Callable[[tuple[int, int] | None], PairConstants],
        rows: int,
        block: int | None,
        pinned: bool,
        kernels: Kernels,
    ) -> None:
        self.resident, self._pinned, self._kernels, self._maker = block is None, pinned, kernels, make
        height = max(1, rows) if block is None else block
        self.bounds = [(start, min(rows, start + height)) for start in range(0, max(1, rows), height)]
        self._copy_stream: Any = None  # one for all visits: the allocator caches memory per stream
        self._made: list[PairConstants] = []
        self._stored: list[_PinnedPairs] = []

    @property
    def largest(self) -> int:
        """Rows of the largest block."""
        return max(stop - start for start, stop in self.bounds)

    def visit(self, by_columns: bool = True) -> Iterator[tuple[int, int, PairConstants]]:
        """Ranges of rows with their pairs, in order; each is valid until the next one is asked for."""
        if self._pinned:
            yield from self._copied(by_columns)
            return
        for index, (start, stop) in enumerate(self.bounds):
            if index == len(self._made):
                self._made.append(self._maker(None if self.resident else (start, stop)))
            yield start, stop, self._made[index]

    def _copied(self, by_columns: bool) -> Iterator[tuple[int, int, PairConstants]]:
        for index in range(len(self._stored), len(self.bounds)):
            self._stored.append(_PinnedPairs.of(self._maker(self.bounds[index]), self._kernels))
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        freed: torch.cuda.Event | None = None  # the end of the work on the previous block
        upcoming: tuple[PairConstants, torch.cuda.Event] | None = self._copy(0, by_columns)
        for index, (start, stop) in enumerate(self.bounds):
            assert upcoming is not None
            (pairs, arrived), upcoming = upcoming, None
            torch.cuda.current_stream().wait_event(arrived)
            more = index + 1 < len(self.bounds)
            if more and (freed is None or freed.query()):  # type: ignore[no-untyped-call]
                upcoming = self._copy(index + 1, by_columns)
            yield start, stop, pairs
            del pairs
            used = _record_event()
            if more and upcoming is None:
                assert freed is not None
                freed.synchronize()  # the device is busy with this block meanwhile
                upcoming = self._copy(index + 1, by_columns)
            freed = used

    def _copy(self, index: int, by_columns: bool) -> tuple[PairConstants, torch.cuda.Event]:
        user = torch.cuda.current_stream()
        with torch.cuda.stream(self._copy_stream):
            pairs = self._stored[index].to_device(user, by_columns)
            return pairs, _record_event()


def _record_event() -> torch.cuda.Event:
    """An event after all work submitted to the current stream so far."""
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass
class _PinnedPairs:
    """The pairs of a block in pinned host memory."""

    offsets: Pairs  # of the pattern's rows, on the device, with an empty pattern
    terms: LossTerms  # the loss's scalar constants, on the device
    per_pair: dict[str, _Pinned]  # its O(|O|) tensors
    columns: _Pinned  # of the pairs
    kernels: Kernels  # whose traversal order is kept
    order: Order | None  # the small index tensors of that order, on the device
    by_columns: dict[str, _Pinned]  # its O(|O|) tensors

    @staticmethod
    def of(constants: PairConstants, kernels: Kernels) -> _PinnedPairs:
        """Move the O(|O|) tensors to host memory."""
        pairs, terms = constants.pairs, constants.terms
        values = {name: getattr(terms, name) for name in _PER_PAIR}
        per_pair = {k: v for k, v in values.items() if isinstance(v, Tensor) and v.dim() and 0 not in v.stride()}
        missing: dict[str, Any] = dict.fromkeys(per_pair)
        order, long = kernels.export_order(pairs)
        limits = {"rows": pairs.shape[0]}
        return _PinnedPairs(
            Pairs(pairs.shape, pairs.offsets, pairs.columns[:0].clone()), replace(terms, **missing),
            {name: _Pinned.of(tensor) for name, tensor in per_pair.items()}, _Pinned.of(pairs.columns, pairs.shape[1]),
            kernels, order, {name: _Pinned.of(tensor, limits.get(name)) for name, tensor in long.items()},
        )  # fmt: skip

    def to_device(self, user: torch.cuda.Stream, by_columns: bool) -> PairConstants:
        """All of it on the device, for ``user`` to read."""
        pairs = Pairs(self.offsets.shape, self.offsets.offsets, self.columns.to_device(user))
        long = {name: tensor.to_device(user) for name, tensor in self.by_columns.items()} if by_columns else None
        self.kernels.import_order(pairs, self.order, long)
        values: dict[str, Any] = {name: tensor.to_device(user) for name, tensor in self.per_pair.items()}
        return PairConstants(pairs, replace(self.terms, **values))


@dataclass(frozen=True)
class _Pinned:
    """A tensor in pinned memory; numbers below 65,536 are copied, and read, in 16 bits."""

    tensor: Tensor
    device: torch.device

    @staticmethod
    def of(tensor: Tensor, limit: int | None = None) -> _Pinned:
        """Copy a tensor to pinned memory; its numbers are below ``limit``."""
        short = tensor.cpu()
        if limit is not None and limit <= 1 << 16:
            short = short.to(torch.uint16)
        return _Pinned(short.pin_memory(), tensor.device)

    def to_device(self, user: torch.cuda.Stream) -> Tensor:
        """The tensor on the device, for ``user`` to read."""
        copy = self.tensor.to(self.device, non_blocking=True)
        copy.record_stream(user)
        return copy

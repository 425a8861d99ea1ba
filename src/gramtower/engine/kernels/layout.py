"""The order in which a GPU visits the pairs, and how its programs share a row without atomics.

A program works on one piece: at most 512 entries of one row (left order) or of one column (right order), fewer if there
would be too few pieces to keep a GPU busy. A row of one piece is written by its program; a row of several gets a line
of a partial result for each, and a last kernel adds the lines in order, so that every run has the same bits.

In the right order the entries are grouped by blocks of about ``ROW_BLOCK`` rows and then by column, so that programs
that run at the same time gather from a part of the left embeddings that fits the second-level cache. The order depends
only on the number of entries in each column (:func:`column_order`), so that the memory plan knows the number of lines:

    one launch           all pieces at once, with a line for each piece of a column that falls into several blocks
    one launch a block   if those lines would be more than ``LINES``: only columns of several pieces in a block have any
    no blocks            if a column has hardly more than an entry or two in a block, so that additions cost too much

The orders are sorted on the device of the pairs, ``SORTED`` entries at a time, in O(|O|) once for a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs

LONGEST, SHORTEST = 512, 64  # entries of a piece
ENOUGH, PLENTY = 1 << 14, 1 << 18  # pieces that keep a GPU busy, and so many that they may be longer
ROW_BLOCK = 1 << 15
DENSE = 3  # entries of a column in a block, on average, that make blocks worth their additions
LINES = 1 << 19  # lines of a partial result that are not worth a launch for each block
SORTED = 1 << 23  # entries sorted at a time

PIECE_BYTES = 16  # of the index tensors of a piece
CUT_BYTES = 96  # more of them while pieces are cut
SORT_BYTES = 64  # of an entry while it is sorted


@dataclass(frozen=True)
class Pieces:
    """Runs of entries with one target row each, in the order in which programs are started."""

    targets: Tensor  # int32. The row each piece adds to.
    starts: Tensor  # int64, pieces + 1. Piece s covers entries ``starts[s]:starts[s + 1]``.
    # int32. -1 where the piece is its target's only one of a launch, otherwise its line of the partial result.
    lines: Tensor
    several: Tensor  # int32. The targets that have lines.
    # int32, several + 1. Lines ``bounds[t]:bounds[t + 1]`` of the partial result belong to ``several[t]``.
    bounds: Tensor
    entries: Tensor | None  # int32 or int64, or None. Where each entry stands in row order, if the order is another.
    gathered: Tensor  # int32. The row to gather for each entry.
    partial_lines: int  # lines of the partial result
    launches: tuple[int, ...]  # pieces ``launches[l]:launches[l + 1]`` are started together

    def __len__(self) -> int:
        return int(self.targets.shape[0])


Order = tuple[Pieces, Pieces]  # by rows and by columns
_left: WeakKeyDictionary[Pairs, Pieces] = WeakKeyDictionary()
_right: WeakKeyDictionary[Pairs, Pieces] = WeakKeyDictionary()


@dataclass(frozen=True)
class OrderSizes:
    """Sizes of an order: exact for rows, upper bounds for columns."""

    height: int  # rows of a block
    pieces: int  # of all launches
    lines: int  # of the partial result
    together: bool = True  # whether all blocks are one launch


def piece_length(entries: int) -> int:
    """The most entries of a piece."""
    return max(min(LONGEST, max(SHORTEST, entries // ENOUGH)), entries // PLENTY)


def row_order(counts: Tensor) -> OrderSizes:
    """The sizes of the left order, from the number of entries in each row."""
    parts = _ceil(counts, piece_length(int(counts.sum())))
    return OrderSizes(max(1, len(counts)), int(parts.sum()), int(parts[parts > 1].sum()))


def column_order(counts: Tensor, rows: int) -> OrderSizes:
    """How the right order is made, and its sizes, from the number of entries in each column."""
    entries = int(counts.sum())
    length = piece_length(entries)
    height = max(1, -(-rows // max(1, round(rows / ROW_BLOCK))))  # no remnant of few rows, with as many pieces
    blocks = -(-rows // height)
    parts = _ceil(counts, length)
    long = int(parts[parts > 1].sum())
    runs = int(counts.clamp_max(blocks).sum())  # at most: a column has an entry in each block, or one for each
    if blocks > 1 and entries < DENSE * runs:
        return OrderSizes(max(1, rows), int(parts.sum()), long)
    if blocks == 1:
        return OrderSizes(height, int(parts.sum()), long)
    pieces = runs + entries // length
    if pieces <= LINES:
        return OrderSizes(height, pieces, pieces)
    return OrderSizes(height, pieces, min(2 * long, 2 * entries // length), together=False)


def block_order(counts: Tensor, rows: int, block: int, most: int) -> tuple[int, int]:
    """The most pieces of all blocks of ``block`` rows ordered by themselves, and lines of one with ``most`` entries."""
    entries, length = int(counts.sum()), piece_length(most)
    cuts = max(1, round(block / ROW_BLOCK))  # as column_order cuts each
    runs = int(counts.clamp_max(cuts * -(-rows // block)).sum())
    pieces = runs + rows + 2 * entries // min(length, SHORTEST)
    lines = 2 * most // length
    if cuts > 1:
        lines = max(lines, min(LINES, most, cuts * len(counts) + most // length))
    return pieces, lines


def left_order(pairs: Pairs) -> Pieces:
    """The pieces of rows, entries in row order."""
    if pairs not in _left:
        counts = pairs.offsets.diff()
        rows = counts.nonzero()[:, 0]
        _left[pairs] = _cut([(rows, counts[rows])], len(pairs), None, pairs.columns, True)
    return _left[pairs]


def right_order(pairs: Pairs) -> Pieces:
    """The pieces of columns, block of rows by block of rows."""
    if pairs not in _right:
        m, n = pairs.shape
        sizes = column_order(torch.bincount(pairs.columns, minlength=n), m)  # pairs would keep their column_counts
        entries = torch.empty(len(pairs), dtype=torch.int32 if len(pairs) < 2**31 else torch.int64, device=pairs.device)
        rows = torch.empty(len(pairs), dtype=torch.int32, device=pairs.device)
        starts = torch.arange(0, max(1, m), sizes.height, device=pairs.device)  # a process may hold no rows at all
        bounds = [*pairs.offsets[starts].tolist(), len(pairs)]
        runs = [_sort(pairs, first, last, entries, rows) for first, last in pairwise(bounds)]
        _right[pairs] = _cut(runs, len(pairs), entries, rows, sizes.together)
    return _right[pairs]


def remember(pairs: Pairs, left: Pieces, right: Pieces | None) -> None:
    """Register orders computed earlier for a new copy of the same pairs."""
    _left[pairs] = left
    if right is not None:
        _right[pairs] = right


def _sort(pairs: Pairs, first: int, last: int, entries: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Write entries first:last of both orders by column, then by row; the columns there are, and their counts."""
    n, device = pairs.shape[1], pairs.device
    if first == last:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return none, none
    if last - first <= SORTED:
        order, targets, counts = _sort_part(pairs, first, last)
        entries[first:last] = order + first
        rows[first:last] = _rows_of(pairs, first, last)[order]
        return targets, counts
    total = torch.bincount(pairs.columns[first:last], minlength=n)
    free = total.cumsum(0).sub_(total).add_(first)  # where the next entry of a column goes
    for start in range(first, last, SORTED):
        stop = min(last, start + SORTED)
        order, targets, counts = _sort_part(pairs, start, stop)
        shift = free[targets].sub_(counts.cumsum(0).sub_(counts))
        place = torch.repeat_interleave(shift, counts).add_(torch.arange(stop - start, device=device))
        free[targets] += counts
        rows[place] = _rows_of(pairs, start, stop)[order]
        entries[place] = order.add_(start).to(entries.dtype)
    targets = total.nonzero()[:, 0]
    return targets, total[targets]


def _sort_part(pairs: Pairs, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of some entries by column, stable, with the columns there are and their counts."""
    columns, order = torch.sort(pairs.columns[first:last], stable=True)
    targets, counts = torch.unique_consecutive(columns, return_counts=True)
    return order, targets.long(), counts


def _rows_of(pairs: Pairs, first: int, last: int) -> Tensor:
    """int32. The rows of entries first:last."""
    ends = torch.tensor([first, last], device=pairs.device)
    start = int(torch.searchsorted(pairs.offsets, ends[0], right=True)) - 1
    stop = int(torch.searchsorted(pairs.offsets, ends[1]))
    counts = pairs.offsets[start : stop + 1].clamp(first, last).diff()
    numbers = torch.arange(start, stop, dtype=torch.int32, device=pairs.device)
    return torch.repeat_interleave(numbers, counts, output_size=last - first)


def _cut(
    blocks: list[tuple[Tensor, Tensor]], total: int, entries: Tensor | None, gathered: Tensor, together: bool
) -> Pieces:
    """Runs of entries cut into pieces: targets and counts of each block; a launch for all or for each of them."""
    length, device = piece_length(total), gathered.device
    targets, counts = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    parts = _ceil(counts, length)
    ends = parts.cumsum(0)
    pieces = int(ends[-1]) if len(ends) else 0
    run = torch.repeat_interleave(torch.arange(len(targets), device=device), parts, output_size=pieces)
    within = torch.arange(pieces, device=device).sub_(ends.sub_(parts)[run])
    starts = counts.cumsum(0).sub_(counts)[run].add_(within, alpha=length)
    starts = torch.cat([starts, starts.new_full((1,), total)])
    target = targets[run]
    launches = [0, pieces]
    if together:
        shared = torch.bincount(target)[target] > 1
    else:
        shared = (parts > 1)[run]
        sizes = torch.tensor([len(found) for found, _ in blocks], device=device).cumsum(0)
        last = torch.cat([parts.new_zeros(1), parts.cumsum(0)])[sizes]
        launches = [0, *last.tolist()]
    # Lines of one row follow each other, in the order in which its pieces come.
    several = shared.nonzero()[:, 0]
    order = several[torch.argsort(target[several], stable=True)]
    found, each = torch.unique_consecutive(target[order], return_counts=True)
    lines = torch.full((pieces,), -1, dtype=torch.int32, device=device)
    lines[order] = torch.arange(len(order), dtype=torch.int32, device=device)
    bounds = torch.cat([each.new_zeros(1), each.cumsum(0)])
    return Pieces(
        target.to(torch.int32), starts, lines, found.to(torch.int32), bounds.to(torch.int32), entries, gathered,
        len(order), tuple(dict.fromkeys(launches)),
    )  # fmt: skip


def _ceil(counts: Tensor, length: int) -> Tensor:
    """⌈counts / length⌉."""
    return counts.add(length - 1).div_(length, rounding_mode="floor")

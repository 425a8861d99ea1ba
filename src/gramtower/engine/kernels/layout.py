"""The order in which a GPU visits the pairs, and how its programs share a row without atomics.

A program works on one piece: at most 512 entries of one row (left order) or of one column (right order), fewer where
there would be too few pieces to keep a GPU busy. A row of one piece is written by its program; a row of several gets
one line of a partial result for each, and a second kernel adds the lines in order: the same bits in every run.

In the right order the entries are grouped by blocks of about ``ROW_BLOCK`` rows before they are grouped by column:
programs that run at the same time then gather from a part of the left embeddings that stays in the second-level cache.

O(|O|) once for a pattern. Checked through engine/kernels/gpu.py by tests/test_gpu_kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower.data.pairs import Pairs

LONGEST, SHORTEST = 512, 64  # entries of a piece
ENOUGH = 1 << 14  # pieces that keep a GPU busy
ROW_BLOCK = 1 << 15


@dataclass(frozen=True)
class Pieces:
    """Runs of entries with one target row each, in the order in which programs are started.

    Attributes:
        targets: int32. The row each piece adds to.
        starts: int64, pieces + 1. Piece s covers entries ``starts[s]:starts[s + 1]``.
        lines: int32. -1 where the piece is its target's only one, otherwise its line of the partial result.
        several: int32. The targets of more than one piece.
        bounds: int32, several + 1. Lines ``bounds[t]:bounds[t + 1]`` of the partial result belong to ``several[t]``.
        entries: int32 or int64, or None. Where each entry stands in row order, if the order is another.
        gathered: int32. The row to gather for each entry.
        partial_lines: lines of the partial result.
    """

    targets: Tensor
    starts: Tensor
    lines: Tensor
    several: Tensor
    bounds: Tensor
    entries: Tensor | None
    gathered: Tensor
    partial_lines: int

    def __len__(self) -> int:
        return int(self.targets.shape[0])


Order = tuple[Pieces, Pieces]  # by rows and by columns
_left: WeakKeyDictionary[Pairs, Pieces] = WeakKeyDictionary()
_right: WeakKeyDictionary[Pairs, Pieces] = WeakKeyDictionary()


def left_order(pairs: Pairs) -> Pieces:
    """The pieces of rows, entries in row order."""
    if pairs not in _left:
        counts = np.diff(pairs.offsets.cpu().numpy())
        rows = np.flatnonzero(counts)
        _left[pairs] = _cut(rows, counts[rows], pairs.shape[0], None, pairs.columns)
    return _left[pairs]


def right_order(pairs: Pairs) -> Pieces:
    """The pieces of columns, block of rows by block of rows."""
    if pairs not in _right:
        m, n = pairs.shape
        device = pairs.device
        entries = torch.empty(len(pairs), dtype=torch.int32 if len(pairs) < 2**31 else torch.int64, device=device)
        rows = torch.empty(len(pairs), dtype=torch.int32, device=device)
        offsets = pairs.offsets.cpu().numpy()
        targets, counts = [], []
        block = max(1, -(-m // max(1, round(m / ROW_BLOCK))))  # no remnant of few rows, whose pieces would be as many
        for start in range(0, m, block):
            stop = min(m, start + block)
            first, last = int(offsets[start]), int(offsets[stop])
            order = torch.argsort(pairs.columns[first:last], stable=True)
            entries[first:last] = order + first
            block_rows = torch.arange(start, stop, dtype=torch.int32, device=device)
            rows[first:last] = torch.repeat_interleave(block_rows, pairs.offsets[start : stop + 1].diff())[order]
            each = torch.bincount(pairs.columns[first:last], minlength=n).cpu().numpy()
            found = np.flatnonzero(each)
            targets.append(found)
            counts.append(each[found])
        _right[pairs] = _cut(np.concatenate(targets), np.concatenate(counts), n, entries, rows)
    return _right[pairs]


def remember(pairs: Pairs, left: Pieces, right: Pieces | None) -> None:
    """Register orders computed earlier for a new copy of the same pairs."""
    _left[pairs] = left
    if right is not None:
        _right[pairs] = right


def _cut(
    targets: NDArray[np.int64], counts: NDArray[np.int64], rows: int, entries: Tensor | None, gathered: Tensor
) -> Pieces:
    """Runs of ``counts`` entries cut into pieces; ``targets`` may name a row several times."""
    total = int(counts.sum())
    length = min(LONGEST, max(SHORTEST, total // ENOUGH))
    parts = -(-counts // length)
    run = np.repeat(np.arange(len(targets)), parts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    firsts = np.cumsum(counts) - counts
    starts = np.append(firsts[run] + within * length, total)
    target = targets[run]
    per_row = np.bincount(target, minlength=rows)
    several = np.flatnonzero(per_row > 1)
    bounds = np.concatenate([[0], np.cumsum(per_row[several])])
    # Lines of one row follow each other, in the order in which its pieces come.
    order = np.argsort(target, kind="stable")
    order = order[per_row[target[order]] > 1]
    lines = np.full(len(run), -1)
    lines[order] = np.arange(len(order))
    device = gathered.device

    def tensor(array: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(dtype).to(device)

    return Pieces(
        tensor(target, torch.int32),
        tensor(starts, torch.int64),
        tensor(lines, torch.int32),
        tensor(several, torch.int32),
        tensor(bounds, torch.int32),
        entries,
        gathered,
        int(bounds[-1]),
    )

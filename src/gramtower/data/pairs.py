"""A sparse m × n pattern held by rows and by columns, the form every pair operation reads.

Holds the observed set O of eq:obj and also sparse feature matrices (rows × features). Rows are compressed
(CSR); columns are the same entries in column order (CSC) with, for each, its position in row order, so that a
value computed per pair is stored once and read from both sides.

Cost: O(|O|) time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.host import parallel_for
from gramtower.data.matrices import SparseMatrix, checked, rows_increase

SEGMENT = 4096  # entries of a row handled as one piece
_MANY = 1 << 20  # pairs from which on all cores are used
_SHARED = (np.int32, np.int64, np.float32, np.float64)  # dtypes of arrays that torch takes as they are


@dataclass(frozen=True)
class Segments:
    """Non-empty rows cut into pieces of at most ``SEGMENT`` entries, so that a popular item does not serialise.

    Attributes:
        rows: int64. Row of each piece; pieces of one row follow each other.
        starts: int64, pieces + 1. Piece s covers entries ``starts[s]:starts[s + 1]``.
        lines: int64. -1 for the first piece of a row, otherwise a running number of the pieces that continue one.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lines: NDArray[np.int64]

    @cached_property
    def continued(self) -> int:
        """How many pieces continue a row that another piece began."""
        return int(self.lines.max(initial=-1)) + 1


def cut_rows(offsets: Tensor) -> Segments:
    """The pieces of all rows, in order."""
    bounds = offsets.cpu().numpy()
    pieces = -(-np.diff(bounds) // SEGMENT)
    rows = np.repeat(np.arange(len(pieces)), pieces)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lines = np.where(within > 0, np.cumsum(within > 0) - 1, -1)
    return Segments(rows, np.append(bounds[rows] + within * SEGMENT, bounds[-1]), lines)


def bin_count(numbers: Tensor, size: int) -> Tensor:
    """How often each number from 0 to ``size`` − 1 occurs; of many on a CPU, by all threads."""
    threads = min(torch.get_num_threads(), len(numbers) // (2 * size + 1))
    if threads < 2 or len(numbers) < _MANY or numbers.device.type != "cpu":
        return torch.bincount(numbers, minlength=size)
    counts = numbers.new_empty((threads, size), dtype=torch.int64)
    cuts = [len(numbers) * t // threads for t in range(threads + 1)]

    def work(first: int, last: int) -> None:
        for t in range(first, last):
            counts[t] = torch.bincount(numbers[cuts[t] : cuts[t + 1]], minlength=size)

    parallel_for(work, list(range(threads + 1)))
    return counts.sum(0)


@dataclass(frozen=True)
class Columns:
    """The same entries in column order."""

    offsets: Tensor  # int64, n + 1. Entries ``offsets[j]:offsets[j + 1]`` belong to column j
    rows: Tensor  # int32, |O|. Row of each entry
    position: Tensor  # int64 or int32, |O|. Where each entry stands in row order

    @cached_property
    def segments(self) -> Segments:
        """Columns cut into pieces."""
        return cut_rows(self.offsets)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Entries of a sparse m × n pattern in row order; see the module's first lines."""

    shape: tuple[int, int]  # (m, n)
    offsets: Tensor  # int64, m + 1. Entries ``offsets[i]:offsets[i + 1]`` belong to row i
    columns: Tensor  # int32, |O|. Column of each entry, increasing within a row

    def __len__(self) -> int:
        return int(self.columns.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the index tensors live."""
        return self.columns.device

    @cached_property
    def by_column(self) -> Columns:
        """The column-order view; made on first use in O(|O|) by a counting sort, of many pairs on all cores."""
        if _compiled(len(self)):
            from gramtower.data.grouping import by_column  # compiled by numba, not worth it for few pairs

            arrays = by_column(self.offsets.cpu().numpy(), self.columns.cpu().numpy(), self.shape[1])
            return Columns(*(torch.from_numpy(array).to(self.device) for array in arrays))
        position = np.arange(len(self), dtype=np.int32 if len(self) < 2**31 else np.int64)
        csr = sp.csr_matrix((position, self.columns.cpu().numpy(), self.offsets.cpu().numpy()), shape=self.shape)
        pattern = csr.tocsc()
        parts = pattern.indptr.astype(np.int64), pattern.indices.astype(np.int32), pattern.data
        return Columns(*(torch.from_numpy(part).to(self.device) for part in parts))

    @cached_property
    def rows(self) -> Tensor:
        """int32, |O|. Row of each entry."""
        numbers = torch.arange(self.shape[0], dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(numbers, self.row_counts)

    @cached_property
    def segments(self) -> Segments:
        """Rows cut into pieces."""
        return cut_rows(self.offsets)

    @cached_property
    def row_counts(self) -> Tensor:
        """|O_i,:| for each row i."""
        return self.offsets.diff()

    @cached_property
    def column_counts(self) -> Tensor:
        """|O_:,j| for each column j."""
        if "by_column" in self.__dict__:
            return self.by_column.offsets.diff()
        return bin_count(self.columns, self.shape[1])

    def row_range(self, start: int, stop: int) -> tuple[Pairs, slice]:
        """Rows ``start:stop`` as a pattern (a view), and the positions of their entries in this one."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        offsets = self.offsets[start : stop + 1] - first
        return Pairs((stop - start, self.shape[1]), offsets, self.columns[first:last]), slice(first, last)

    def take_rows(self, rows: Tensor) -> tuple[Pairs, Tensor]:
        """Some rows as a pattern, and the numbers of their entries in this one."""
        counts = self.row_counts[rows]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        entries = torch.arange(int(offsets[-1]), device=self.device)
        entries += torch.repeat_interleave(self.offsets[rows] - offsets[:-1], counts)
        return Pairs((len(rows), self.shape[1]), offsets, self.columns[entries]), entries

    def take_block(self, rows: Tensor, columns: Tensor) -> tuple[Pairs, Tensor]:
        """The pairs inside rows × columns (columns increasing), renumbered, and the numbers of their entries here."""
        part, entries = self.take_rows(rows)
        number = torch.full((self.shape[1],), -1, dtype=torch.int32, device=self.device)
        number[columns] = torch.arange(len(columns), dtype=torch.int32, device=self.device)
        inside = number[part.columns]
        keep = inside >= 0
        kept_rows = part.rows[keep].long()
        counts = torch.bincount(kept_rows, minlength=len(rows))
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return Pairs((len(rows), len(columns)), offsets, inside[keep]), entries[keep]

    def take_entries(self, entries: Tensor) -> tuple[Pairs, Tensor, Tensor]:
        """Some pairs (numbers increasing) between the entities they touch: pattern, left and right row numbers."""
        left, rows = torch.unique(self.rows[entries].long(), return_inverse=True)
        right, columns = torch.unique(self.columns[entries].long(), return_inverse=True)
        counts = torch.bincount(rows, minlength=len(left))
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return Pairs((len(left), len(right)), offsets, columns.to(torch.int32)), left, right

    def to(self, device: torch.device) -> Pairs:
        """The same pattern on another device."""
        if device == self.device:
            return self
        moved = Pairs(self.shape, self.offsets.to(device), self.columns.to(device))
        if "by_column" in self.__dict__:
            here = self.by_column
            moved.__dict__["by_column"] = Columns(*(one.to(device) for one in (here.offsets, here.rows, here.position)))
        return moved


def sorting_bytes(count: int) -> int:
    """Bytes of a pair that the order by columns of so many takes while it is made, besides the result."""
    return 6 if _compiled(count) else 20


def _compiled(count: int) -> bool:
    return count >= _MANY and host.has_numba()


def from_sparse(name: str, matrix: SparseMatrix, least_rows: int = 1) -> tuple[Pairs, NDArray[np.floating]]:
    """The pattern and the stored values of a scipy.sparse matrix, both in row order.

    Every stored entry counts, explicit zeros too. Duplicates are refused rather than summed. One process of many may
    hold no row at all: ``least_rows=0``.
    """
    matrix = checked(name, matrix)
    if matrix.shape[0] < least_rows or matrix.shape[1] == 0:
        check.fail(name, f"shape {matrix.shape}", "at least one row and one column")
    m, n = (int(x) for x in matrix.shape)
    if matrix.format == "csr" and rows_increase(matrix.indptr, matrix.indices):
        offsets, columns, values = matrix.indptr, matrix.indices, matrix.data
    else:
        coo = matrix.tocoo()
        keys = coo.row.astype(np.int64) * n + coo.col
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        if len(keys) > 1 and (repeated := keys[1:] == keys[:-1]).any():
            i, j = divmod(int(keys[int(np.argmax(repeated))]), n)
            given = f"{int(repeated.sum())} duplicate pairs, the first at row {i}, column {j}"
            check.fail(name, given, "each pair stored once (merge them first, e.g. with matrix.sum_duplicates())")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(coo.row, minlength=m))])
        columns, values = coo.col[order], coo.data[order]
    data = check.as_float_array(name, values)
    pairs = Pairs((m, n), torch.from_numpy(np.array(offsets, dtype=np.int64)), _copied(columns, torch.int32))
    return pairs, _copied(data).numpy()


def _copied(array: NDArray[np.number], dtype: torch.dtype | None = None) -> Tensor:
    """A copy, made by all threads."""
    if not array.flags.writeable or array.dtype not in _SHARED:  # torch would warn of the one and refuse the other
        array = np.array(array, np.int64 if array.dtype.kind in "iu" else np.float64)
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype=dtype, copy=True)

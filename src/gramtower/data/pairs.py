"""What the engine reads: sparse m × n patterns, and the features of entities.

:class:`Pairs` holds the observed set O of eq:obj and also sparse feature matrices (rows × features). Rows are
compressed (CSR); columns are the same entries in column order (CSC) with, for each, its position in row order, so that
a value computed per pair is stored once and read from both sides.

:class:`Features` are one-hot ids, sparse rows or dense rows, handed to towers block by block. Ids are row numbers and
never become one-hot vectors; sparse rows stay a pattern with values.

Cost: O(|O|) time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

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
    """Non-empty rows cut into pieces of at most ``SEGMENT`` entries, so that a popular item does not serialise."""

    rows: NDArray[np.int64]  # row of each piece; pieces of one row follow each other
    starts: NDArray[np.int64]  # pieces + 1; piece s covers entries ``starts[s]:starts[s + 1]``
    lines: NDArray[np.int64]  # -1 for the first piece of a row, otherwise a running number of the pieces that go on

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

    def work(t: int, _: int) -> None:
        counts[t] = torch.bincount(numbers[cuts[t] : cuts[t + 1]], minlength=size)

    parallel_for(work, list(range(threads + 1)))
    return counts.sum(0)


@dataclass(frozen=True)
class ColumnOrder:
    """The same entries in column order."""

    offsets: Tensor  # int64, n + 1. Entries ``offsets[j]:offsets[j + 1]`` belong to column j
    rows: Tensor  # int32, |O|. Row of each entry
    position: Tensor  # int64 or int32, |O|. Where each entry stands in row order

    @cached_property
    def segments(self) -> Segments:
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
        return self.columns.device

    @cached_property
    def by_column(self) -> ColumnOrder:
        """The column-order view; made on first use in O(|O|) by a counting sort, of many pairs on all cores."""
        if len(self) >= _MANY and host.has_numba():
            from gramtower.data.grouping import by_column  # compiled by numba, not worth it for few pairs

            arrays = by_column(self.offsets.cpu().numpy(), self.columns.cpu().numpy(), self.shape[1])
            return ColumnOrder(*(torch.from_numpy(array).to(self.device) for array in arrays))
        position = np.arange(len(self), dtype=np.int32 if len(self) < 2**31 else np.int64)
        csr = sp.csr_matrix((position, self.columns.cpu().numpy(), self.offsets.cpu().numpy()), shape=self.shape)
        pattern = csr.tocsc()
        parts = pattern.indptr.astype(np.int64), pattern.indices.astype(np.int32), pattern.data
        return ColumnOrder(*(torch.from_numpy(part).to(self.device) for part in parts))

    @cached_property
    def rows(self) -> Tensor:
        """int32, |O|. Row of each entry."""
        numbers = torch.arange(self.shape[0], dtype=torch.int32, device=self.device)
        return torch.repeat_interleave(numbers, self.row_counts)

    @cached_property
    def segments(self) -> Segments:
        return cut_rows(self.offsets)

    @cached_property
    def row_counts(self) -> Tensor:
        """|O_i,:| for each row i."""
        return self.offsets.diff()

    @cached_property
    def column_counts(self) -> Tensor:
        """|O_:,j| for each column j."""
        known = "by_column" in self.__dict__
        return self.by_column.offsets.diff() if known else bin_count(self.columns, self.shape[1])

    def row_range(self, start: int, stop: int) -> tuple[Pairs, slice]:
        """Rows ``start:stop`` as a pattern (a view), and the positions of their entries in this one."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        offsets = self.offsets[start : stop + 1] - first
        return Pairs((stop - start, self.shape[1]), offsets, self.columns[first:last]), slice(first, last)

    def take_rows(self, rows: Tensor) -> tuple[Pairs, Tensor]:
        """Some rows as a pattern, and the numbers of their entries in this one."""
        counts = self.row_counts[rows]
        offsets = _ends(counts)
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
        offsets = _ends(torch.bincount(kept_rows, minlength=len(rows)))
        return Pairs((len(rows), len(columns)), offsets, inside[keep]), entries[keep]

    def take_entries(self, entries: Tensor) -> tuple[Pairs, Tensor, Tensor]:
        """Some pairs (numbers increasing) between the entities they touch: pattern, left and right row numbers."""
        left, rows = torch.unique(self.rows[entries].long(), return_inverse=True)
        right, columns = torch.unique(self.columns[entries].long(), return_inverse=True)
        offsets = _ends(torch.bincount(rows, minlength=len(left)))
        return Pairs((len(left), len(right)), offsets, columns.to(torch.int32)), left, right

    def to(self, device: torch.device) -> Pairs:
        """The same pattern on another device."""
        if device == self.device:
            return self
        moved = Pairs(self.shape, self.offsets.to(device), self.columns.to(device))
        if "by_column" in self.__dict__:
            parts = self.by_column.offsets, self.by_column.rows, self.by_column.position
            moved.__dict__["by_column"] = ColumnOrder(*(part.to(device) for part in parts))
        return moved


def _ends(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sorting_bytes(count: int) -> int:
    """Bytes of a pair that the order by columns of so many takes while it is made, besides the result."""
    return 6 if count >= _MANY and host.has_numba() else 20


def from_sparse(name: str, matrix: SparseMatrix, least_rows: int = 1) -> tuple[Pairs, NDArray[np.floating]]:
    """The pattern and the stored values of a scipy.sparse matrix, both in row order; explicit zeros count too.

    Duplicates are refused rather than summed. One process of many may hold no row at all: ``least_rows=0``.
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


@dataclass(frozen=True)
class IdBlock:
    """Entities known only by their row numbers: ``start:stop``, or the numbers listed in ``rows``."""

    start: int
    stop: int
    rows: Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def tensor(self, device: torch.device) -> Tensor:
        """The row numbers as a LongTensor."""
        return torch.arange(self.start, self.stop, device=device) if self.rows is None else self.rows


@dataclass(frozen=True)
class SparseBlock:
    """Some rows of a sparse feature matrix: pattern and values."""

    pattern: Pairs
    values: Tensor
    _fields: dict[tuple[int, int], SparseBlock] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, features)."""
        return self.pattern.shape

    def columns(self, start: int, stop: int) -> SparseBlock:
        """Columns ``start:stop`` as a block of their own, made once."""
        if (start, stop) not in self._fields:
            device = self.values.device
            chosen = torch.arange(self.shape[0], device=device), torch.arange(start, stop, device=device)
            pattern, entries = self.pattern.take_block(*chosen)
            self._fields[start, stop] = SparseBlock(pattern, self.values[entries])
        return self._fields[start, stop]


Block = Tensor | SparseBlock | IdBlock
MatrixLike: TypeAlias = NDArray[Any] | Tensor | SparseMatrix  # features with one row for each entity


class Features:
    """The features of one side's entities; over several processes, those that this process holds."""

    def __init__(
        self,
        kind: str,  # "ids" (row numbers), "dense" or "sparse"
        rows: int,  # number of entities
        width: int,  # number of features; for ids, the number of entities
        data: Tensor | SparseBlock | None,
        parent: Features | None = None,  # the features that these rows were taken from
        ids: Tensor | None = None,
    ) -> None:
        self.kind, self.rows, self.width, self._data, self.parent, self._ids = kind, rows, width, data, parent, ids
        self.first, self.total = 0, rows  # the number of the first entity, and of the entities of all processes
        self._casts: dict[tuple[torch.dtype, torch.device], Tensor | SparseBlock] = {}
        self._blocks: dict[tuple[torch.dtype, torch.device, int, int], SparseBlock] = {}

    @property
    def entries(self) -> int:
        """Stored numbers: one per row for ids, non-zeros for sparse rows, all for dense rows."""
        if isinstance(self._data, SparseBlock):
            return len(self._data.pattern)
        return self.rows if self._data is None else self.rows * self.width

    @property
    def arrays(self) -> list[Tensor]:
        """What is stored, for telling one set of features from another."""
        if isinstance(self._data, SparseBlock):
            return [self._data.pattern.offsets, self._data.pattern.columns, self._data.values]
        return [] if self._data is None else [self._data]

    def block(self, start: int, stop: int, dtype: torch.dtype, device: torch.device) -> Block:
        """Rows ``start:stop``: an :class:`IdBlock`, dense rows, or a :class:`SparseBlock`."""
        if self._data is None:
            return IdBlock(start, stop, None if self._ids is None else self._ids[start:stop])
        data = self._cast(dtype, device)
        if isinstance(data, Tensor):
            return data[start:stop]
        key = (dtype, device, start, stop)
        if key not in self._blocks:  # kept, because its column order costs a sort
            part, where = data.pattern.row_range(start, stop)
            self._blocks[key] = SparseBlock(part, data.values[where])
        return self._blocks[key]

    def take(self, rows: Tensor, dtype: torch.dtype, device: torch.device) -> Features:
        """The features of some entities, by row number."""
        if self._data is None:
            return Features("ids", len(rows), self.width, None, self, rows.to(device))
        data = self._cast(dtype, device)
        if isinstance(data, Tensor):
            return Features("dense", len(rows), self.width, data[rows.to(device)], self)
        pattern, entries = data.pattern.take_rows(rows.to(device))
        return Features("sparse", len(rows), self.width, SparseBlock(pattern, data.values[entries]), self)

    def mean_square_norm(self) -> float:
        """Mean of ‖x_i‖² over rows of all processes, which sets the initial scale of a first layer."""
        return self.square_sum / max(1, self.total)

    @cached_property
    def square_sum(self) -> float:
        """Σ ‖x_i‖²; :meth:`place` makes it the sum over all processes."""
        if self._data is None:
            return float(self.rows)
        values = self._data.values if isinstance(self._data, SparseBlock) else self._data
        return float(values.double().square().sum())

    def place(self, first: int, total: int, square_sum: float) -> Features:
        """Set the position of these rows among those of all processes, and the square sum of all rows."""
        self.first, self.total, self.__dict__["square_sum"] = first, total, square_sum
        return self

    def _cast(self, dtype: torch.dtype, device: torch.device) -> Tensor | SparseBlock:
        key = (dtype, device)
        if key not in self._casts:
            data = self._data
            if isinstance(data, SparseBlock):
                self._casts[key] = SparseBlock(data.pattern.to(device), data.values.to(device, dtype))
            else:
                assert data is not None
                codes = data.dtype == torch.int64  # for modules that embed categorical codes
                self._casts[key] = data.to(device) if codes else data.to(device, dtype)
        return self._casts[key]


def as_features(name: str, value: MatrixLike | None, rows: int) -> Features:
    """Features from None (ids), scipy.sparse, numpy or torch 2-D; checked against the number of entities."""
    if value is None:
        return Features("ids", rows, rows, None)
    if sp.issparse(value):
        _check_rows(name, value.shape, rows)
        pattern, stored = from_sparse(name, value, least_rows=min(1, rows))
        return Features("sparse", rows, pattern.shape[1], SparseBlock(pattern, torch.from_numpy(stored)))
    if isinstance(value, Tensor) and value.dtype == torch.int64:
        _check_rows(name, tuple(value.shape), rows)
        return Features("dense", rows, int(value.shape[1]), value.detach().clone())
    if not isinstance(value, (np.ndarray, Tensor)):
        check.fail(name, type(value).__name__, "None (one-hot ids), scipy.sparse, numpy or torch 2-D")
    array = check.as_float_array(name, value)
    _check_rows(name, array.shape, rows)
    check.finite(name, array)
    return Features("dense", rows, int(array.shape[1]), torch.tensor(array))


def _check_rows(name: str, shape: tuple[int, ...], rows: int) -> None:
    if len(shape) != 2 or shape[0] != rows or shape[1] == 0:
        check.fail(name, f"shape {tuple(shape)}", f"shape ({rows}, features), one row for each entity of that side")

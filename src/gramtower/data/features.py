"""Entity features: one-hot ids, sparse rows or dense rows, handed to towers block by block.

Ids are row numbers and never become one-hot vectors; sparse rows stay a :class:`~gramtower.data.pairs.Pairs`
pattern with values.
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
from gramtower.data.matrices import SparseMatrix
from gramtower.data.pairs import Pairs, from_sparse


@dataclass(frozen=True)
class IdBlock:
    """Entities known by their row numbers alone: ``start:stop``, or the numbers listed in ``rows``."""

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

    def to_dense(self) -> Tensor:
        """The block as a dense tensor; for tests and error paths on a few rows only."""
        dense = self.values.new_zeros(self.shape)
        dense[self.pattern.rows.long(), self.pattern.columns.long()] = self.values
        return dense


Block = Tensor | SparseBlock | IdBlock
MatrixLike: TypeAlias = NDArray[Any] | Tensor | SparseMatrix  # features with one row for each entity


class Features:
    """The features of one side's entities.

    Attributes:
        kind: ``"ids"`` (row numbers), ``"dense"`` or ``"sparse"``.
        rows: number of entities.
        width: number of features; for ids, the number of entities.
        parent: the features that these rows were taken from, or None.
        first: over several processes, the number of this process's first entity.
        total: over several processes, the number of entities of all.
    """

    def __init__(
        self,
        kind: str,
        rows: int,
        width: int,
        data: Tensor | SparseBlock | None,
        parent: Features | None = None,
        ids: Tensor | None = None,
    ) -> None:
        self.kind, self.rows, self.width, self._data, self.parent, self._ids = kind, rows, width, data, parent, ids
        self.first, self.total = 0, rows
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

"""Features brought to a common scale, learned from the training part, kept in the model, the same for new entities.

    sparse matrices   x → sign(x) log(1 + |x| / x̄) · √idf, then rows of length one; x̄ is the mean size of an entry
    tables            one-hot, list and text columns times √idf, together of length one; numbers and indicators of
                      missing values apart, over √their number
    dense matrices    (x − mean) / deviation of each column, at most ±10, over √width: rows of about length one

    idf_j = 1 + log((1 + rows) / (1 + rows with feature j))

So counts, weighted words, raw amounts and vectors of any norm train alike, with the same penalties and the same first
steps. Cost: O(entries), twice. Over several processes the sums are those of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.schema import build
from gramtower.distributed.group import Group

MOST_DEVIATIONS = 10.0


@dataclass(frozen=True)
class _Form:
    """A scaling as it is stored, without its tensors."""

    shifted: bool
    unit: float | None
    apart: list[int]


@dataclass(frozen=True, eq=False)
class Scaling:
    """How the columns of one part of the features are scaled.

    Attributes:
        factor: of each column.
        shift: subtracted before, from each column of a dense matrix; None for sparse ones.
        unit: size of an entry that becomes log 2; None leaves entries as they are.
        apart: columns that row lengths leave out, increasing.
    """

    factor: NDArray[np.float64]
    shift: NDArray[np.float64] | None = None
    unit: float | None = None
    apart: tuple[int, ...] = ()

    def __call__(self, name: str, rows: Any) -> Any:
        """The scaled rows, float32; dense if they were, otherwise CSR."""
        if self.shift is not None:
            given = rows.toarray() if sp.issparse(rows) else check.as_float_array(name, rows)
            check.finite(name, given)
            dense = (given.astype(np.float64) - self.shift) * self.factor
            most = MOST_DEVIATIONS / math.sqrt(len(self.factor))
            return np.clip(dense, -most, most).astype(np.float32)
        made = sp.csr_matrix(rows, dtype=np.float64, copy=True)
        check.finite(name, made.data)
        if self.unit is not None:
            made.data = np.copysign(np.log1p(np.abs(made.data) / self.unit), made.data)
        made.data *= self.factor[made.indices]
        apart = np.isin(made.indices, np.array(self.apart, dtype=made.indices.dtype))
        squares = np.where(apart, 0.0, made.data**2)
        lengths = np.sqrt(np.asarray(sp.csr_matrix((squares, made.indices, made.indptr), made.shape).sum(1)).ravel())
        each = np.repeat(1 / np.where(lengths > 0, lengths, 1.0), np.diff(made.indptr))
        made.data *= np.where(apart, 1.0, each)
        return sp.csr_matrix(made, dtype=np.float32)

    @property
    def text(self) -> str:
        """In a few words, for people."""
        if self.shift is not None:
            return "standardised"
        return ("log, " if self.unit is not None else "") + "√idf, rows of length one"

    def to_plain(self) -> dict[str, Any]:
        """All but the numbers of the columns, as JSON has it."""
        return asdict(_Form(self.shift is not None, self.unit, list(self.apart)))

    @classmethod
    def unfilled(cls, plain: dict[str, Any], width: int) -> Scaling:
        """What :meth:`to_plain` gave of so many columns, before their numbers are read."""
        form = build("inputs.scaling", _Form, plain)
        if (form.unit is not None and not 0 < form.unit < np.inf) or any(not 0 <= x < width for x in form.apart):
            check.fail("inputs.scaling", str(plain)[:60], "a positive unit, and columns that are there")
        unknown = np.empty(0)
        return cls(unknown, unknown if form.shifted else None, form.unit, tuple(sorted(form.apart)))


def sparse_scaling(
    name: str, group: Group, rows: sp.csr_matrix, total: int, apart: Sequence[int] | None = None
) -> Scaling:
    """The scaling of sparse rows held here, of ``total`` in all processes.

    Args:
        name: of the argument, for errors.
        group: the processes.
        rows: the local ones.
        total: rows of all processes.
        apart: columns of a table that hold standardised numbers and indicators of missing ones; None for a matrix,
            whose entries are amounts.
    """
    data = rows.data.astype(np.float64)
    present = data != 0
    counted = np.bincount(rows.indices[present], minlength=rows.shape[1]).astype(np.float64)
    largest = max(group.gather_json(float(np.abs(data).max(initial=0.0))))
    size = np.abs(data / (largest or 1.0)).sum()
    (counted,) = (x.numpy() for x in group.sum_all(torch.from_numpy(counted)))
    size, entries = group.totals(float(size), float(present.sum()))
    factor = np.sqrt(1 + np.log((1 + total) / (1 + counted)))
    if apart is not None:
        factor[list(apart)] = 1 / math.sqrt(max(1, len(apart)))
        return Scaling(factor, apart=tuple(apart))
    return Scaling(factor, unit=largest * size / max(1.0, entries) or 1.0)


def dense_scaling(name: str, group: Group, rows: Any, total: int) -> Scaling:
    """The scaling of dense rows held here, of ``total`` in all processes."""
    values = check.as_float_array(name, rows).astype(np.float64)
    sizes = group.gather_json(np.abs(values).max(axis=0, initial=0.0).tolist())
    unit = np.exp2(np.frexp(np.max(sizes, axis=0))[1] - 1.0)  # a power of two, so that squares of any numbers add up
    values = values / unit
    (sums,) = group.sum_all(torch.from_numpy(values.sum(0)))
    mean = sums.numpy() / max(1, total)
    (squares,) = group.sum_all(torch.from_numpy(((values - mean) ** 2).sum(0)))
    deviation = np.sqrt(squares.numpy() / max(1, total))
    told_apart = deviation > 1e-12 * np.abs(mean)
    factor = np.where(told_apart, 1 / np.where(told_apart, deviation, 1.0), 0.0) / math.sqrt(max(1, values.shape[1]))
    return Scaling(factor / unit, shift=mean * unit)

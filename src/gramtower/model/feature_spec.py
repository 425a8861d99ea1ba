"""The features that a tower sees of its entities, kept so that new entities are encoded alike.

    "id"            a column for each entity of the training data; a new entity has none of them. "id*0.1" next to
                    other parts: entries of 0.1 instead of 1, which is λ / 0.1² instead of λ on what ids learn
    "history"       the observed right entities of a left one, equal values, length one; for an entity without any, the
                    mean of the histories in training, as a tower has learned nothing for an empty one.
                    "history:last=20": of the last 20 by time; "history:decay=20": of all, with values that halve with
                    every 20 newer ones
    a FeatureTable  its columns, joined by id. A frame stands for FeatureTable.inferred of it
    a matrix        one row for each entity, in the order of the ids

The encoding of tables is kept; their rows and those of matrices are kept only if asked for, encoded and not scaled.

Tables and matrices are brought to a common scale, learned from the training data and kept for new entities:

    sparse matrices   x → sign(x) log(1 + |x| / x̄) · √idf, then rows of length one; x̄ is the mean size of an entry
    tables            one-hot, list and text columns times √idf, together of length one; numbers and indicators of
                      missing values apart, over √their number
    dense matrices    (x − mean) / deviation of each column, at most ±10, over √width: rows of about length one

    idf_j = 1 + log((1 + rows) / (1 + rows with feature j))

One part is handed to the tower as it is, ids as row numbers and dense rows dense; several become one sparse matrix.
Cost: O(entries).
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.files import build
from gramtower.data import frames
from gramtower.data.encoders import Encoded
from gramtower.data.frames import TableLike
from gramtower.data.ids import index_of, join
from gramtower.data.matrices import checked, pattern, ranks
from gramtower.data.pairs import Features, MatrixLike
from gramtower.data.tables import FeaturesLike, FeatureTable
from gramtower.distributed.group import SINGLE, Group, current_group
from gramtower.distributed.shards import Rows

if TYPE_CHECKING:
    import polars as pl

JSON = dict[str, object]
IdArray: TypeAlias = NDArray[np.int64 | np.object_]  # whole numbers, or text
Ids = tuple[IdArray | None, IdArray | None]  # of a side, and of the other one
Matrix: TypeAlias = NDArray[np.float32] | sp.csr_matrix  # encoded features
Both = tuple[FeaturesLike, FeaturesLike]  # of the left and of the right entities
MOST_DEVIATIONS = 10.0
FLOATS = (torch.float32, torch.float64)
# of a tensor in a file; None for a length that the content says
TensorShape = tuple[tuple[int | None, ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True)
class _ScalingForm:
    """A scaling as it is stored, without its tensors."""

    shifted: bool
    unit: float | None
    apart: list[int]


@dataclass(frozen=True, eq=False)
class Scaling:
    """How the columns of one part of the features are scaled."""

    factor: NDArray[np.float64]  # of each column
    # subtracted before, from each column of a dense matrix; None for sparse ones
    shift: NDArray[np.float64] | None = None
    unit: float | None = None  # size of an entry that becomes log 2; None leaves entries as they are
    apart: tuple[int, ...] = ()  # columns that row lengths leave out, increasing

    def __call__(self, name: str, rows: MatrixLike) -> Matrix:
        """The scaled rows, float32; dense if they were, otherwise CSR."""
        if self.shift is not None:
            given = sp.csr_matrix(rows).toarray() if sp.issparse(rows) else check.as_float_array(name, rows)
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
        if self.shift is not None:
            return "standardised"
        return ("log, " if self.unit is not None else "") + "√idf, rows of length one"

    def to_plain(self) -> JSON:
        """All but the numbers of the columns, as JSON has it."""
        return asdict(_ScalingForm(self.shift is not None, self.unit, list(self.apart)))

    @classmethod
    def unfilled(cls, plain: JSON, width: int) -> Scaling:
        """What :meth:`to_plain` gave of so many columns, before their numbers are read."""
        form = build("inputs.scaling", _ScalingForm, plain)
        if (form.unit is not None and not 0 < form.unit < np.inf) or any(not 0 <= x < width for x in form.apart):
            check.fail("inputs.scaling", str(plain)[:60], "a positive unit, and columns that are there")
        unknown = np.empty(0)
        return cls(unknown, unknown if form.shifted else None, form.unit, tuple(sorted(form.apart)))


def sparse_scaling(
    name: str, group: Group, rows: sp.csr_matrix, total: int, apart: Sequence[int] | None = None
) -> Scaling:
    """The scaling of sparse rows held here, of ``total`` in all processes."""
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


def dense_scaling(name: str, group: Group, rows: MatrixLike, total: int) -> Scaling:
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


@dataclass(frozen=True, eq=False)
class GivenFeatures:
    """Features of one side: None or "id" for ids, "history", a table, a matrix, or a list of these."""

    side: str  # "left" or "right"
    given: FeaturesLike  # the argument of the caller

    @property
    def parts(self) -> list[FeaturesLike]:
        return list(self.given) if isinstance(self.given, (list, tuple)) else [self.given]

    @property
    def described(self) -> list[FeatureTable | MatrixLike | TableLike]:
        """The parts that are tables or matrices, not names."""
        return [part for part in self.parts if part is not None and not isinstance(part, str)]

    @property
    def only_tables(self) -> bool:
        """Whether tables describe the entities, next to ids and histories at most: then features are joined by id."""
        return bool(self.described) and all(isinstance(part, FeatureTable) for part in self.described)

    def width(self, right: int) -> int:
        """Return the number of features that a hidden layer would see; 0 where the side has ids."""
        total = 0
        for part in self.parts:
            if part is None or (isinstance(part, str) and not part.startswith("history")) or is_combination(part):
                return 0
            if isinstance(part, str):
                total += right
            else:
                shape: Any = getattr(part, "shape", ())
                total += part.width if isinstance(part, FeatureTable) else int(shape[1]) if len(shape) == 2 else 1
        return total

    def joined(self, name: str, known: FeatureSpec | None = None) -> FeaturesLike:
        """Return the same with frames as tables, which are joined by id: of the column ``name``, otherwise ``id``.

        Numpy would take rows of frames for those of the entities, whatever their order. The kinds of columns are
        inferred; where ``known`` has a table in the same place, columns and kinds are those of this table.
        """
        before = [None] * len(self.parts) if known is None else [part.table for part in known.parts]
        tables = iter(before if len(before) == len(self.parts) else [None] * len(self.parts))

        def read(part: FeaturesLike) -> FeaturesLike:
            table = next(tables)
            if not is_frame(part):
                return part
            column = self.id_column(part, name, table)
            try:
                return FeatureTable.inferred(part, column) if table is None else table.read_alike(part, column)
            except ValueError as error:
                raise ValueError(f"{self.side}_features: {error}") from error

        return self._changed(read)

    def id_column(self, frame: TableLike, name: str, table: FeatureTable | None) -> str:
        """The column of ids of a frame: that of the table of before, the one called ``name``, or ``id``."""
        argument = f"{self.side}_features"
        present = frames.column_names(argument, frame)
        wanted = dict.fromkeys([*([] if table is None else [table.id]), name, "id"])
        column = next((one for one in wanted if one in present), None)
        if column is None:
            given = f"a {type(frame).__name__} of {', '.join(present[:5])}{', …' * (len(present) > 5)}"
            expected = f"a column of ids, {' or '.join(map(repr, wanted))}, or FeatureTable.inferred(frame, id=…)"
            index = getattr(getattr(frame, "index", None), "name", None)  # of pandas
            check.fail(argument, given, "frame.reset_index(), with its ids" if index in wanted else expected)
        return column

    def tables(self) -> FeaturesLike:
        """Return the tables, which describe entities without pairs too; None for a left side that has none."""
        if (processes := current_group().size) > 1:
            check.fail("candidates", f"'all' in {processes} processes", "'trained', and model.add after loading")
        if self.side == "left" and not self.described:
            return None
        if not self.only_tables:
            kinds = ", ".join(type(part).__name__ for part in self.described) or "only ids"
            expected = f"{self.side}_features with a FeatureTable, whose rows without pairs are kept"
            check.fail("candidates", f"'all' with {self.side}_features of {kinds}", expected)
        return self.described if len(self.described) > 1 else self.described[0]

    def take(self, ids: IdArray, rows: NDArray[np.int64]) -> FeaturesLike:
        """Return the features of some of the entities as a fit takes them: rows of matrices; tables and names as is."""

        def taken(part: FeaturesLike) -> FeaturesLike:
            return self._rows_of(part, ids, rows) if isinstance(part, FeatureTable) or is_matrix(part) else part

        return self._changed(taken)

    def encode(self, ids: IdArray, rows: NDArray[np.int64]) -> list[MatrixLike]:
        """Return the rows of some of the entities in each table and matrix, not scaled."""
        taken = [self._rows_of(part, ids, rows) for part in self.described]
        return [part.encode(ids[rows]) if isinstance(part, FeatureTable) else part for part in taken]

    def local(self, rows: Rows, is_local: bool) -> FeaturesLike:
        """Return the features with matrices cut to the rows of this process, unless they were given so."""
        name = f"{self.side}_features"

        def cut(part: FeaturesLike) -> FeaturesLike:
            if not is_matrix(part) or rows.count == rows.total:
                return part
            if not is_local:
                return rows.local_rows(name, checked(name, part).tocsr() if sp.issparse(part) else part)
            if part.shape[0] != rows.count:
                expected = f"{rows.count}, one for each of this process's own entities of that side"
                check.fail(name, f"{part.shape[0]} rows", expected)
            return part

        return self._changed(cut)

    def _changed(self, change: Callable[[FeaturesLike], FeaturesLike]) -> FeaturesLike:
        changed = [change(part) for part in self.parts]
        return changed if isinstance(self.given, (list, tuple)) else changed[0]

    def _rows_of(self, part: FeaturesLike, ids: IdArray, rows: NDArray[np.int64]) -> FeatureTable | MatrixLike:
        """Some rows of a matrix; a table as one that takes only some of the ids, a strict one having all of them."""
        name = f"{self.side}_features"
        if isinstance(part, FeatureTable):
            found = copy.copy(part)
            found.report = dict(part.report)
            if part.strict:
                found.match(ids)
            found.strict = False
            return found
        if not is_matrix(part) or len(part.shape) != 2 or part.shape[0] != len(ids):
            check.fail(name, _shown(part), f"{len(ids)} rows, one for each {self.side} entity")
        if sp.issparse(part):
            return sp.csr_matrix(checked(name, part))[rows]
        return (
            part[torch.from_numpy(rows)] if isinstance(part, torch.Tensor) else check.as_float_array(name, part)[rows]
        )


def is_combination(part: object) -> bool:
    """Whether something is the table of ids in a context, in which ids are one-hot."""
    return isinstance(part, FeatureTable) and part.id == COMBINATION


def is_matrix(value: object) -> TypeGuard[MatrixLike]:
    """Whether a value has rows of numbers: scipy.sparse, torch, numpy or anything that numpy makes an array of."""
    return hasattr(value, "shape") and (sp.issparse(value) or hasattr(value, "__array__"))


def _shown(value: object) -> str:
    return type(value).__name__ + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")


def is_sparse(value: object) -> TypeGuard[sp.csr_matrix]:
    """Whether something is a scipy.sparse matrix or array."""
    return bool(sp.issparse(value))


def is_frame(given: object) -> TypeGuard[TableLike]:
    """Whether something is a table with named columns: of polars, pandas or pyarrow, or a mapping of columns."""
    names = ("collect_schema", "column_names", "__arrow_c_stream__", "__dataframe__")
    single = hasattr(given, "to_list")  # a column of polars or pandas
    return isinstance(given, Mapping) or (not single and any(hasattr(given, name) for name in names))


def is_table(given: object) -> TypeGuard[TableLike | str | os.PathLike[str]]:
    """Whether something is such a table, or the path of a file."""
    return isinstance(given, (str, os.PathLike)) or is_frame(given)


def read_table(name: str, given: TableLike | str | os.PathLike[str]) -> pl.DataFrame:
    """A table, or the file of one, as a polars frame."""
    if isinstance(given, (str, os.PathLike)):
        return frames.read_frame(name, check.path(name, given))
    return frames.as_frame(name, given)


NAMES = ("id", "history")
COMBINATION = "(combination)"  # the column of ids of a table of ids in a context (model/context.py)
ORDERED = ("last", "decay")  # rules of histories that need to know which entries are newer
_GIVEN = ("table", "sparse", "dense")  # parts that the caller describes new entities by
_USUAL = 1024  # entries of the mean history that are kept, the largest ones


@dataclass(frozen=True, eq=False)
class StoredRows:
    """The encoded rows of one part, not scaled, for later updates and explanations."""

    entities: NDArray[np.int64]  # the entities of the side that have a row, by their numbers, increasing
    rows: Matrix  # those rows

    @classmethod
    def copied(cls, name: str, entities: NDArray[np.int64], rows: MatrixLike) -> StoredRows:
        """The rows of some of the entities, from those of all."""
        if not is_sparse(rows):
            dense: Any = check.as_float_array(name, rows)[entities]
            return cls(entities, dense)
        kept = sp.csr_matrix(rows)[entities]
        kept.sum_duplicates()
        kept.data = check.as_float_array(name, kept.data)
        return cls(entities, kept)

    def followed_by(self, count: int, rows: MatrixLike | None) -> StoredRows:
        """The same with rows of entities that come after the ``count`` of before; None if they have none."""
        if rows is None:
            return self
        if sp.issparse(self.rows):
            both: Matrix = sp.csr_matrix(sp.vstack([self.rows, sp.csr_matrix(rows)], format="csr"))
        else:
            both = np.concatenate([self.rows, rows.toarray() if is_sparse(rows) else rows])
        return StoredRows(np.concatenate([self.entities, count + np.arange(rows.shape[0])]), both)

    def row(self, entity: int) -> Matrix | None:
        """The row of one entity; None if it has none."""
        place = np.flatnonzero(self.entities == entity)
        return self.rows[place] if len(place) else None

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the arrays by their names in a file."""
        found: dict[str, NDArray[np.generic]] = {"entities": self.entities}
        if is_sparse(self.rows):
            counts, columns = np.diff(self.rows.indptr).astype(np.int64), self.rows.indices.astype(np.int32)
            found |= {"counts": counts, "columns": columns, "values": self.rows.data}
        else:
            found["values"] = self.rows
        return {prefix + name: torch.from_numpy(array) for name, array in found.items()}

    @staticmethod
    def tensor_shapes(prefix: str, count: int, width: int, dense: bool) -> dict[str, TensorShape]:
        """The shapes and types of these arrays."""
        found: dict[str, TensorShape] = {"entities": ((count,), (torch.int64,))}
        if dense:
            found["values"] = ((count, width), FLOATS)
        else:
            found |= {"counts": ((count,), (torch.int64,)), "columns": ((None,), (torch.int32,))}
            found["values"] = ((None,), FLOATS)
        return {prefix + name: expected for name, expected in found.items()}

    @classmethod
    def of_tensors(cls, prefix: str, tensors: Mapping[str, Tensor], width: int, total: int) -> StoredRows:
        """What :meth:`tensors` gave, of a side of ``total`` entities; refused if it does not hold together."""
        found = {
            name.removeprefix(prefix): tensor.numpy().copy()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        entities, values = found["entities"], found["values"]
        if len(entities) and (entities[0] < 0 or entities[-1] >= total or (np.diff(entities) <= 0).any()):
            check.fail(f"{prefix}entities", "numbers out of order or range", f"increasing numbers below {total}")
        if "counts" not in found:
            return cls(entities, values)
        if (found["counts"] < 0).any() or len(values) != len(found["columns"]):
            check.fail(f"{prefix}counts", "counts that do not fit", "numbers >= 0, and a value for each column")
        offsets = np.concatenate([[0], np.cumsum(found["counts"])])
        pattern(f"{prefix}columns", found["columns"], offsets, (len(entities), width))
        return cls(entities, sp.csr_matrix((values, found["columns"], offsets), shape=(len(entities), width)))


@dataclass(frozen=True)
class Part:
    """Some columns: their kind (``id``, ``history``, ``table``, ``sparse``, ``dense``) and number."""

    kind: str
    width: int
    table: FeatureTable | None = None  # how a table is encoded
    scaling: Scaling | None = None  # how its columns are scaled, or None
    factor: float = 1.0  # entry of an id in its own column
    # of histories, the row of an entity without one; None for an empty row
    usual: sp.csr_matrix | None = field(default=None, compare=False, repr=False)
    last: int = 0  # of histories, how many of the last entries count; 0 for all
    decay: int = 0  # of histories, the number of newer entries that halve a value; 0 for equal values
    # of tables and matrices, the rows of entities; None if they are not kept
    stored: StoredRows | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        rule = next((f":{name}={value}" for name in ORDERED if (value := getattr(self, name))), "")
        return self.kind + rule if self.factor == 1 else f"{self.kind}*{self.factor!r}"

    @property
    def text(self) -> str:
        return self.name + ("" if self.scaling is None else f" ({self.scaling.text})")


@dataclass(frozen=True)
class _Form:
    """A part as it is stored."""

    kind: str
    width: int
    table: dict[str, Any] | None = None
    scaling: dict[str, Any] | None = None
    factor: float = 1.0
    last: int = 0
    decay: int = 0
    stored: int | None = None  # number of rows that are kept


@dataclass(frozen=True)
class FeatureSpec:
    """The parts of one side's features, in the order of their columns."""

    parts: tuple[Part, ...]

    @property
    def kind(self) -> str:
        return " + ".join(part.kind for part in self.parts)

    @property
    def text(self) -> str:
        return " + ".join(part.text for part in self.parts)

    @property
    def described(self) -> bool:
        """Whether anything but ids is known of the entities."""
        return any(part.kind != "id" for part in self.parts)

    @property
    def features_alone(self) -> bool:
        """Whether entities are known by features, and neither by ids nor by histories, which are a kind of ids."""
        return all(part.kind not in NAMES and not is_combination(part.table) for part in self.parts)

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    @property
    def has_history(self) -> bool:
        return any(part.kind == "history" for part in self.parts)

    @property
    def has_order(self) -> bool:
        """Whether it matters which entries of a history are newer."""
        return any(part.last or part.decay for part in self.parts)

    def placeholder(self, rows: int) -> Matrix | None:
        """Features without entries, to build towers with; None for ids."""
        if self.kind == "id":
            return None
        return np.zeros((rows, self.width), np.float32) if self.kind == "dense" else sp.csr_matrix((rows, self.width))

    @property
    def given(self) -> list[Part]:
        """The parts that the caller describes new entities by."""
        return [part for part in self.parts if part.kind in _GIVEN]

    def ways(self, side: str) -> list[str]:
        """The arguments that describe new entities."""
        return [f"{side}_features"] * bool(self.given) + ["histories"] * self.has_history

    def listed(self, side: str, features: FeaturesLike) -> list[FeaturesLike]:
        """What was given for new entities, part by part."""
        wanted = self.given
        if features is not None and not wanted:
            known = "histories" if self.has_history else "ids"
            expected = f"a model fitted with {side}_features; this one knows {side} {known} only"
            check.fail(f"{side}_features", "features", expected)
        if len(wanted) <= 1 or features is None:
            return [features] * len(wanted)
        if not isinstance(features, (list, tuple)) or len(features) != len(wanted):
            kinds = ", ".join(part.kind for part in wanted)
            check.fail(f"{side}_features", type(features).__name__, f"a list of {len(wanted)}: {kinds}")
        return list(features)

    @property
    def spans(self) -> list[tuple[Part, slice]]:
        """The parts, each with the range of its columns."""
        ends = itertools.accumulate(part.width for part in self.parts)
        return [(part, slice(end - part.width, end)) for part, end in zip(self.parts, ends, strict=True)]

    @property
    def only_tables(self) -> bool:
        """Whether tables describe the entities, next to ids and histories at most."""
        tables = [part.table for part in self.given]
        return bool(tables) and not any(table is None or is_combination(table) for table in tables)

    @property
    def stores_rows(self) -> bool:
        """Whether the rows of entities are kept, so that an update needs only those of new and changed ones."""
        return any(part.stored is not None for part in self.parts)

    def stored_rows(self, entity: int) -> list[Matrix | None] | None:
        """The row of one entity in each given part, as :meth:`encoded` takes them; None if not all parts are kept."""
        kept = [part.stored for part in self.given if part.stored is not None]
        return [one.row(entity) for one in kept] if len(kept) == len(self.given) else None

    def with_more_rows(self, count: int, given: Sequence[MatrixLike | None]) -> FeatureSpec:
        """The same with the rows of entities after the ``count`` of before, if it keeps rows."""
        if not self.stores_rows:
            return self
        rest = iter(given)
        parts = (part if part.stored is None else replace(part, stored=part.stored.followed_by(count, next(rest)))
                 for part in self.parts)  # fmt: skip
        return FeatureSpec(tuple(parts))

    def encoded(
        self, side: str, given: Sequence[MatrixLike | None], count: int, history: sp.csr_matrix | None = None
    ) -> Matrix:
        """Features of entities that were not there in training, from the rows of each given part before scaling.

        None stands for a table without any of them.
        """
        name, rest, made = f"{side}_features", iter(given), []
        for part in self.parts:
            if part.kind in _GIVEN:
                rows = next(rest)
                rows = _missing(name, part, count) if rows is None else rows
                made.append(rows if part.scaling is None else part.scaling(name, rows))
            else:  # a new entity has no id
                known = sp.csr_matrix((count, part.width), dtype=np.float32)
                if part.kind == "history" and history is not None:
                    known = history_features(sp.csr_matrix(history[:, : part.width]), part.last, part.decay)
                made.append(_or_usual(known, part.usual))
        return concatenated(made)

    def with_usual_history(self, pairs: sp.csr_matrix, group: Group = SINGLE) -> FeatureSpec:
        """The same with the mean history of training, for entities without one."""
        if not self.has_history:
            return self
        seen = history_features(sp.csr_matrix(pairs))
        total = group.sum_(torch.from_numpy(np.asarray(seen.sum(0), dtype=np.float64).ravel())).numpy()
        (count,) = group.totals(float((np.diff(seen.indptr) > 0).sum()))
        most = np.sort(np.argsort(-total, kind="stable")[:_USUAL])
        most = most[total[most] > 0]
        values = total[most] * (total.sum() / max(total[most].sum(), 1e-30) / max(count, 1.0))
        entries = values.astype(np.float32), most, [0, len(most)]
        usual = sp.csr_matrix(entries, shape=(1, seen.shape[1]))
        parts = (replace(part, usual=usual[:, : part.width]) if part.kind == "history" else part for part in self.parts)
        return FeatureSpec(tuple(parts))

    def columns_in(
        self, side: str, old: FeatureSpec, ids: Sequence[IdArray | None], old_ids: Sequence[IdArray | None]
    ) -> Iterator[tuple[slice, slice, NDArray[np.int64]]]:
        """For each part its columns here and in ``old``, and for each column its place in the old part, or −1.

        Ids and history are matched by id, of this side and of the other, tables by the names of their features,
        matrices by place. ``side`` is for errors.
        """
        names = [" + ".join(part.name for part in inputs.parts) for inputs in (self, old)]
        if names[0] != names[1]:
            check.fail(f"{side}_features", repr(names[0]), f"{names[1]!r} as before")
        for (part, here), (before, there) in zip(self.spans, old.spans, strict=True):
            keys: tuple[Any, Any] = (None, None)
            if part.kind in NAMES:
                place = NAMES.index(part.kind)
                keys = (old_ids[place], ids[place])
            elif part.table is not None and before.table is not None:
                _check_encoders(side, part.table, before.table)
                keys = (np.array(before.table.feature_names), np.array(part.table.feature_names))
            elif part.width != before.width:
                check.fail(f"{side}_features", f"{part.width} columns", f"{before.width}, as before")
            places = np.arange(part.width) if keys[0] is None or keys[1] is None else join(keys[1], index_of(keys[0]))
            places[places >= before.width] = -1  # entities that were added after training have no column
            yield here, there, places

    def to_plain(self) -> list[JSON]:
        """The parts without their rows, as JSON has them."""
        return [
            {"kind": p.kind, "width": p.width}
            | ({} if p.table is None else {"table": json.loads(p.table.to_json())})
            | ({} if p.scaling is None else {"scaling": p.scaling.to_plain()})
            | ({} if p.factor == 1 else {"factor": p.factor})
            | {name: value for name in ORDERED if (value := getattr(p, name))}
            | ({} if p.stored is None else {"stored": len(p.stored.entities)})
            for p in self.parts
        ]

    @classmethod
    def from_plain(cls, plain: Sequence[object]) -> FeatureSpec:
        """What :meth:`to_plain` gave."""
        parts = []
        for one in plain:
            form = build("inputs", _Form, one)
            kind = check.choice("inputs.kind", form.kind, (*NAMES, *_GIVEN))
            if (kind == "table") != (form.table is not None):
                check.fail("inputs", f"{kind} with {type(form.table).__name__}", "a table only for the kind table")
            table = None if form.table is None else FeatureTable.encoder_from_json(json.dumps(form.table))
            if not 0 < form.width < 2**31 or (table is not None and table.width != form.width):
                check.fail("inputs.width", form.width, "a positive number" if table is None else f"{table.width}")
            scaling = None if form.scaling is None else Scaling.unfilled(form.scaling, form.width)
            if not 0 < form.factor < np.inf or (form.factor != 1 and kind != "id"):
                check.fail("inputs.factor", form.factor, "a positive number for ids, 1 for others")
            if min(form.last, form.decay) < 0 or (max(form.last, form.decay) and (kind != "history")):
                check.fail(
                    "inputs", f"{kind} with last {form.last} and decay {form.decay}", "numbers >= 0 of a history"
                )
            stored = None
            if form.stored is not None:
                if kind not in _GIVEN or not 0 <= form.stored < 2**31:
                    check.fail("inputs.stored", form.stored, "a number of rows, of a table or a matrix")
                unread = np.broadcast_to(np.int64(0), form.stored)  # which takes no memory
                stored = StoredRows(unread, np.empty((0, form.width), np.float32))
            parts.append(Part(kind, form.width, table, scaling, form.factor, None, form.last, form.decay, stored))
        kinds = [part.kind for part in parts if part.kind in NAMES]
        if not parts or len(set(kinds)) < len(kinds):
            check.fail("inputs", " + ".join(kinds) or "nothing", "parts, id and history once each")
        return cls(tuple(parts))

    def _scales(self, side: str) -> Iterator[tuple[str, int, str]]:
        """Yield the name in a file, the part and the attribute of each array of the scalings."""
        for place, part in enumerate(self.parts):
            if part.scaling is not None:
                for name in ("factor",) if part.scaling.shift is None else ("factor", "shift"):
                    yield f"scale|{side}|{place}|{name}", place, name

    def tensors(self, side: str) -> dict[str, Tensor]:
        """Return the numbers of the scalings and the rows that are kept, by their names in a file."""
        found = {
            key: torch.from_numpy(getattr(self.parts[place].scaling, name)) for key, place, name in self._scales(side)
        }
        for place, part in enumerate(self.parts):
            found |= {} if part.stored is None else part.stored.tensors(f"rows|{side}|{place}|")
        return found

    def tensor_shapes(self, side: str) -> dict[str, TensorShape]:
        """The shapes and types of these tensors."""
        found: dict[str, TensorShape] = {
            key: ((self.parts[place].width,), (torch.float64,)) for key, place, _ in self._scales(side)
        }
        for place, part in enumerate(self.parts):
            if part.stored is not None:
                count, dense = len(part.stored.entities), part.kind == "dense"
                found |= StoredRows.tensor_shapes(f"rows|{side}|{place}|", count, part.width, dense)
        return found

    def with_tensors(self, side: str, tensors: Mapping[str, Tensor], total: int) -> FeatureSpec:
        """Return the same with the numbers that :meth:`tensors` gave for a side of ``total`` entities."""
        parts = [
            part if part.stored is None
            else replace(part, stored=StoredRows.of_tensors(f"rows|{side}|{place}|", tensors, part.width, total))
            for place, part in enumerate(self.parts)
        ]  # fmt: skip
        for key, place, name in self._scales(side):
            scaling = parts[place].scaling
            assert scaling is not None
            array: dict[str, Any] = {name: tensors[key].numpy()}
            parts[place] = replace(parts[place], scaling=replace(scaling, **array))
        return FeatureSpec(tuple(parts))

    def check_sizes(self, side: str, rows: int, right: int) -> None:
        """Refuse an id for each of other than ``rows`` entities, and a history over other than all right ones."""
        for part in self.parts:
            wanted = {"id": rows, "history": right}.get(part.kind, part.width)
            if part.width != wanted or (part.kind == "history" and side == "right"):
                check.fail(f"inputs.{side}", f"{part.width} columns of {part.kind}", f"{wanted}")


@dataclass(frozen=True)
class TowerWidths:
    """Features of both sides of which only the widths are known, to build towers with."""

    left: Features
    right: Features

    @classmethod
    def of(cls, left: FeatureSpec, right: FeatureSpec) -> TowerWidths:
        return cls(*(Features("ids", 0, inputs.width, None) for inputs in (left, right)))


def history_features(matrix: sp.csr_matrix, last: int = 0, decay: int = 0) -> sp.csr_matrix:
    """Each row's observed columns with equal values and length one, or those of ``last`` or ``decay`` (see above).

    With these, larger values of the matrix are newer; of equal ones the first column counts as the newest.
    """
    counts = np.diff(matrix.indptr)
    if not (last or decay):
        values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
        return sp.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)
    newer = ranks(matrix, -matrix.data)
    values = np.exp2(-newer / decay) if decay else (newer < last).astype(np.float64)
    found = sp.csr_matrix((values, matrix.indices.copy(), matrix.indptr.copy()), shape=matrix.shape)
    found.eliminate_zeros()
    lengths = np.sqrt(np.asarray(found.multiply(found).sum(1)).ravel())
    found.data /= np.repeat(lengths, np.diff(found.indptr))
    return sp.csr_matrix(found, dtype=np.float32)


def _or_usual(rows: sp.csr_matrix, usual: sp.csr_matrix | None) -> sp.csr_matrix:
    empty = np.flatnonzero(np.diff(rows.indptr) == 0)
    if usual is None or not len(empty):
        return rows
    entries = np.ones(len(empty), np.float32), (empty, np.zeros(len(empty), np.int64))
    return sp.csr_matrix(rows + sp.csr_matrix(entries, shape=(rows.shape[0], 1)) @ usual)


def _encoded_columns(inputs: Iterable[FeatureSpec]) -> list[Encoded]:
    tables = [part.table for one in inputs for part in one.parts if part.table is not None]
    return [column for table in tables for column in table.encoders if isinstance(column, Encoded)]


def attach_encoders(inputs: Iterable[FeatureSpec], given: Mapping[str, Any]) -> None:
    """Give columns of text the encoders that they were trained with, by the names of these."""
    columns = _encoded_columns(inputs)
    names = sorted({column.encoder for column in columns})
    if not isinstance(given, Mapping) or any(name not in names for name in given):
        shown = ", ".join(map(repr, given)) if isinstance(given, Mapping) else type(given).__name__
        check.fail("encoders", shown, f"a mapping from names of the model's encoders: {', '.join(names) or 'none'}")
    for column in columns:
        if column.encoder in given:
            column.attach(given[column.encoder])


def _check_encoders(side: str, table: FeatureTable, before: FeatureTable) -> None:
    """Refuse a column whose encoder is not the one that the previous model was trained with."""
    old = {one.column: one for one in before.encoders if isinstance(one, Encoded)}
    for one in table.encoders:
        if isinstance(one, Encoded) and one.column in old and not one.has_encoder_of(old[one.column]):
            given = f"column {one.column!r} through {one.encoder!r}"
            check.fail(f"{side}_features", given, f"the encoder of before, {old[one.column].encoder!r}")


def new_matrix(name: str, part: Part, rows: FeaturesLike) -> Matrix:
    """Rows of a matrix for new entities: checked, sparse or numpy."""
    if not is_matrix(rows) or len(rows.shape) != 2 or rows.shape[1] != part.width:
        check.fail(name, _shown(rows), f"{part.width} columns, as in training")
    return checked(name, rows) if sp.issparse(rows) else check.as_float_array(name, rows)


def _missing(name: str, part: Part, count: int) -> sp.csr_matrix:
    if part.table is None:
        check.fail(name, "None", f"a matrix of {part.width} columns, as in training")
    return part.table.missing_row()[np.zeros(count, np.int64)]


def concatenated(features: Sequence[Matrix]) -> Matrix:
    """One part as it is; several as one sparse matrix."""
    if len(features) == 1:
        return features[0]
    parts = [
        one if sp.issparse(one) else sp.csr_matrix(check.as_float_array("features", one), dtype=np.float32)
        for one in features
    ]
    return sp.csr_matrix(sp.hstack(parts, format="csr"), dtype=np.float32)


def training_parts(
    side: str, given: FeaturesLike, ids: IdArray | None, matrix: sp.csr_matrix, place: Rows | None = None,
    times: NDArray[np.floating] | None = None, store: bool = False,
) -> list[tuple[Part, MatrixLike | None]]:  # fmt: skip
    """The parts of one side's inputs, each with its features of the training data as they came.

    ``times`` are those of the entries of the matrix, which histories of the last entries need; with ``store`` the parts
    keep the rows of entities.
    """
    place = place or Rows((0, matrix.shape[0]))
    wanted = list(given) if isinstance(given, (list, tuple)) else ["id" if given is None else given]
    if not wanted:
        check.fail(f"{side}_features", repr(given), "at least one part; None for ids only")
    read = [_training_part(side, one, ids, matrix, place, times, store) for one in wanted]
    named = [part.kind for part, _ in read if part.kind in NAMES]
    if len(set(named)) < len(named):
        check.fail(f"{side}_features", " + ".join(named), "id and history once each")
    if len(read) == 1 and read[0][0].factor != 1:
        check.fail(f"{side}_features", repr(wanted[0]), "other parts next to it, or 'id'")
    return read


def training_inputs(
    side: str, parts: list[tuple[Part, MatrixLike | None]], place: Rows, group: Group, scale: bool
) -> tuple[FeatureSpec, Matrix]:
    """The inputs of one side, and its features, scaled if asked to be; all processes must call it together."""
    name, made = f"{side}_features", []
    for part, rows in parts:
        if scale and part.kind == "dense":
            part = replace(part, scaling=dense_scaling(name, group, rows, place.total))
        elif scale and part.kind in ("sparse", "table"):
            apart = None if part.table is None else part.table.columns_apart
            part = replace(part, scaling=sparse_scaling(name, group, sp.csr_matrix(rows), place.total, apart))
        made.append((part, rows if part.scaling is None else part.scaling(name, rows)))
    several = len(made) > 1
    features = [_own_columns(place, part.factor) if several and rows is None else rows for part, rows in made]
    return FeatureSpec(tuple(part for part, _ in made)), concatenated(features)


def _training_part(
    side: str, one: FeaturesLike, ids: IdArray | None, matrix: sp.csr_matrix, place: Rows,
    times: NDArray[np.floating] | None, store: bool,
) -> tuple[Part, MatrixLike | None]:  # fmt: skip
    rows, stored = place.count, None
    if isinstance(one, str):
        names = NAMES if side == "left" else NAMES[:1]
        name, star, factor = one.partition("*")
        if star and name == "id":
            return Part("id", place.total, factor=_factor(f"{side}_features", one, factor)), None
        if one.startswith("history:") and side == "left":
            part = _ordered_history(one, matrix.shape[1])
            if times is None:
                check.fail("left_features", f"{one!r} and pairs without times", "pairs with times, or 'history'")
            timed = sp.csr_matrix((times, matrix.indices, matrix.indptr), matrix.shape)
            return part, history_features(timed, part.last, part.decay)
        if one not in names:
            known = " or ".join(map(repr, names))
            check.fail(f"{side}_features", repr(one), f"{known}, or a FeatureTable, which takes the path of a file")
        if one == "id":
            return Part("id", place.total), None
        return Part("history", matrix.shape[1]), history_features(matrix)
    if isinstance(one, FeatureTable):
        keys = range(place.first, place.stop) if ids is None else ids
        encoded = one.encode(keys)
        if rows == place.total and one.report["ids_without_features"] == rows:  # of several processes none knows all
            example = repr(0 if ids is None else ids.tolist()[0])
            given = f"a table of {len(one):,} rows, none of them with the id of a {side} entity"
            check.fail(f"{side}_features", given, f"ids such as {example} in column {one.id!r}")
        if not encoded.shape[1]:
            given = f"a table without a value in {', '.join(one.columns)}"
            check.fail(f"{side}_features", given, "at least one column with values")
        if store and not is_combination(one):
            stored = StoredRows.copied(f"{side}_features", np.flatnonzero(one.match(keys) < len(one)), encoded)
        return Part("table", encoded.shape[1], one.without_rows(), stored=stored), encoded
    if is_frame(one) or not is_matrix(one) or len(one.shape) != 2 or one.shape[0] != rows:
        expected = f'scipy.sparse, numpy or torch with {rows} rows, a FeatureTable, "id", "history", or a list of these'
        check.fail(f"{side}_features", _shown(one), expected)
    if not one.shape[1]:
        check.fail(f"{side}_features", f"a matrix of shape {tuple(one.shape)}", "at least one column")
    made = checked(f"{side}_features", one) if sp.issparse(one) else one
    check.finite(f"{side}_features", made.data if is_sparse(made) else check.as_float_array(f"{side}_features", made))
    if store:
        stored = StoredRows.copied(f"{side}_features", np.arange(rows), made)
    return Part("sparse" if is_sparse(made) else "dense", int(made.shape[1]), stored=stored), made


def _ordered_history(given: str, width: int) -> Part:
    rule, _, text = given.removeprefix("history:").partition("=")
    count = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if rule not in ORDERED or count < 1:
        check.fail("left_features", repr(given), "'history', 'history:last=20' or 'history:decay=20'")
    return Part("history", width, last=count if rule == "last" else 0, decay=count if rule == "decay" else 0)


def _factor(name: str, given: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        check.fail(name, repr(given), "'id' or, with a positive number, such as 'id*0.1'")
    return factor


def _own_columns(place: Rows, factor: float) -> sp.csr_matrix:
    """A column for each entity of the side, with the factor in each own row."""
    entries = np.full(place.count, factor, np.float32), np.arange(place.first, place.stop), np.arange(place.count + 1)
    return sp.csr_matrix(entries, shape=(place.count, place.total))

"""Columns of the entities of one side, joined by id: filters, numbers to add to scores, and groups for quotas.

A filter is an expression such as ``category == 'books' and (in_stock or year >= 2020)``, or a mapping of columns to
values. An expression is parsed by ``ast`` and only the nodes named here are followed; nothing of it is executed. Cost:
a few passes over a column.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Mapping
from functools import cached_property, reduce
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.ids import Ids, id_series, join
from gramtower.data.tables import FeatureTable, infer_kinds

if TYPE_CHECKING:
    from polars import DataFrame, Series

    from gramtower.data.frames import TableLike
    from gramtower.data.sources import PathLike

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
_TITLES = ("title", "name", "label")
_WHOLE = 2.0**53  # above it, floats are not exact integers
_NO_ROWS = np.empty(0, np.int64)
_LONGEST = 10_000  # characters of an expression
_NUMBERS = {ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal}
_TURNED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.In: ast.Eq, ast.NotIn: ast.NotEq}
_EXPRESSION = "comparisons of columns with values, such as genre == 'Comedy' and year >= 1990 and not sold"


class TableError(ValueError):
    """A column that a table does not have, or that cannot be used as asked."""


def frame_and_id(table: FeatureTable | TableLike | PathLike, name: str, typed: bool = False) -> tuple[DataFrame, str]:
    """The frame of an argument ``table`` and its column of ids: that of a FeatureTable, "id", ``name`` or the first.

    With ``typed``, columns of a text file with a number in every cell are numbers.
    """
    source = table.source if isinstance(table, FeatureTable) else table
    frame = frames.read_frame("table", source)
    if not frame.columns:
        check.fail("table", "no columns", "a column of ids, and others")
    usual = next((one for one in ("id", name) if one in frame.columns), frame.columns[0])
    named = table.id if isinstance(table, FeatureTable) else usual
    if typed and isinstance(source, (str, os.PathLike)) and not frames.is_parquet(check.path("table", source)):
        kinds = infer_kinds(frame, named, {}, "|")
        frame = frame.with_columns(_numbers(frame[name]) for name, kind in kinds.items() if kind == "numeric")
    return frame, named


class EntityTable:
    """Columns of the entities of one side, with filters.

    A mapping asks each column for a value, one of several values, or a range {"min", "max"} of a numeric column.
    All must match. A list column such as ``Comedy|Drama`` matches by its elements. A missing cell equals nothing: it
    fails ``==``, ``<`` and ``in``, and passes ``!=`` and ``not``.
    """

    def __init__(
        self,
        name: str,
        frame: DataFrame,
        id: str,
        ids: Ids | None,
        count: int,
        title: str | None = None,
        separator: str = "|",
    ) -> None:
        keys = id_series("id", frame[frames.pick(f"id of {name}", id, frame.columns)])
        index = {key: row for row, key in enumerate(keys.to_list()) if key is not None}
        if len(index) < len(keys) - keys.null_count():
            check.fail(f"id of {name}", "an id in several rows", "each id in one row")
        known = np.arange(count) if ids is None else ids
        rows = join(known, index) if len(index) else np.full(count, -1)
        if not (rows >= 0).any():
            example = repr(known[:1].tolist()[0]) if count else "none"
            check.fail(name, f"{len(frame):,} rows, none of them with an id of the model", f"ids such as {example}")
        self.joined = int((rows >= 0).sum())
        present = {column.lower(): column for column in frame.columns if column != id}
        named: list[str | None] = [present[wanted] for wanted in _TITLES if wanted in present]
        self.title = frames.pick(f"title of {name}", title, frame.columns) if title else (named or [None])[0]
        self.columns = [column for column in frame.columns if column != id]
        self.kinds = infer_kinds(frame, id, {}, separator)
        numbers = [_numbers(frame[column]) for column in self.columns if self.kinds[column] == "numeric"]
        places = frames.polars().Series(rows).replace(-1, None)
        joined = {column.name: column.gather(places) for column in frame.select(self.columns).with_columns(numbers)}
        self._frame: DataFrame = frames.polars().DataFrame(joined)  # null for entities that are not in the table
        self._there, self._separator, self._found = rows >= 0, separator, dict[str, dict[str, Rows]]()

    @classmethod
    def of(cls, table: FeatureTable | TableLike | PathLike, ids: Ids | None, count: int, name: str = "") -> EntityTable:
        """The table of an argument ``table``, see :func:`frame_and_id`."""
        return cls("table", *frame_and_id(table, name), ids, count)

    @cached_property
    def titles(self) -> list[str | None] | None:
        return None if self.title is None else self._texts(self.title).to_list()

    def cells(self, entities: Rows, columns: list[str] | None = None) -> list[dict[str, object]]:
        """The cells of each entity by column; empty for entities that are not in the table."""
        wanted = self.columns if columns is None else [self._column(column) for column in columns]
        taken = self._frame.select(wanted)[entities.tolist()].to_dicts()
        return [_plain(cells) if there else {} for there, cells in zip(self._there[entities], taken, strict=True)]

    def matching(self, wanted: str | Mapping[str, object], name: str = "where") -> Rows:
        """The entities that match a filter, increasing; ``name`` is the name of the argument in errors."""
        if isinstance(wanted, Mapping):
            found = [self._of_column(self._column(column, name), value, name) for column, value in wanted.items()]
            return np.flatnonzero(reduce(np.logical_and, found, np.ones(len(self._there), bool)))
        if not isinstance(wanted, str) or len(wanted) > _LONGEST:
            given = f"{len(wanted)} characters" if isinstance(wanted, str) else type(wanted).__name__
            check.fail(name, given, f"an expression of at most {_LONGEST} characters, or a mapping of columns")
        try:
            return np.flatnonzero(self._mask(ast.parse(wanted.strip(), mode="eval").body, name))
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise TableError(f"{name}: got {check.shown(wanted)}, expected {_EXPRESSION}") from error

    def numbers(self, column: str, name: str) -> NDArray[np.float64]:
        """The numbers of a column by entity, 1 and 0 for true and false, NaN if missing."""
        if self.kinds[self._column(column, name)] == "numeric":
            return self._numbers(column)
        texts = self._texts(column).str.strip_chars().str.to_lowercase().replace("", None)
        known = texts.drop_nulls().is_in(["true", "false"])
        if not known.all():
            given = f"column {column!r}, which has {check.shown(texts.drop_nulls().filter(~known)[0])}"
            raise TableError(f"{name}: got {given}, expected a column of numbers, or of true and false")
        return np.asarray((texts == "true").cast(frames.polars().Float64).fill_null(math.nan).to_numpy())

    def codes(self, column: str, name: str) -> Rows:
        """Numbers of the values of a column, entities × most values of a cell; −1 fills up."""
        found = self._values(self._column(column, name)).values()
        entities = np.concatenate([_NO_ROWS, *found])
        values = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
        order = np.argsort(entities, kind="stable")
        entities, values = entities[order], values[order]
        places = np.arange(len(entities)) - np.searchsorted(entities, entities)
        made = np.full((len(self._there), int(places.max(initial=0)) + 1), -1)
        made[entities, places] = values
        return made

    def groups(self, column: str, entities: Rows) -> list[str | None]:
        """The value of a column for each entity, the first element of a list, for colours."""
        texts = self._texts(self._column(column))
        if self.kinds[column] == "list":
            texts = texts.str.split(self._separator).list.first()
        return texts.gather(entities.tolist()).to_list()

    def _column(self, column: str, name: str = "column") -> str:
        if column not in self.kinds:
            near = ", ".join(map(repr, check.near(str(column), self.columns) or self.columns[:5]))
            raise TableError(f"{name}: got {check.shown(column)}, expected a column of the table, such as {near}")
        return column

    def _mask(self, node: ast.expr, name: str) -> Mask:
        """Whether each entity matches a part of an expression."""
        if isinstance(node, ast.BoolOp):
            joined = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return reduce(joined, [self._mask(part, name) for part in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._mask(node.operand, name)
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            found = [self._compared(*one, name) for one in zip(sides, node.ops, sides[1:], strict=False)]
            return reduce(np.logical_and, found)
        if isinstance(node, ast.Name):
            return np.asarray(np.nan_to_num(self.numbers(node.id, name)) != 0)
        raise TableError(f"{name}: got {check.shown(ast.unparse(node))}, expected {_EXPRESSION}")

    def _compared(self, left: ast.expr, sign: ast.cmpop, right: ast.expr, name: str) -> Mask:
        kind = type(sign)
        if isinstance(right, ast.Name) and not isinstance(left, ast.Name):
            left, kind, right = right, _TURNED.get(kind, kind), left
        try:
            value = ast.literal_eval(right)
        except (TypeError, ValueError):
            value = None
        several, listed = kind in (ast.In, ast.NotIn), isinstance(value, (list, tuple, set))
        parts = list(value) if listed else [value]
        plain = kind not in (ast.Is, ast.IsNot) and all(isinstance(part, (str, int, float)) for part in parts)
        if not isinstance(left, ast.Name) or several != listed or not plain:
            text = ast.unparse(ast.Compare(left, [sign], [right]))
            raise TableError(f"{name}: got {check.shown(text)}, expected {_EXPRESSION}")
        column = self._column(left.id, name)
        if kind in _NUMBERS:
            if self.kinds[column] != "numeric" or (number := _number(value)) is None:
                given = f"{check.shown(value)} to compare with column {column!r}, which is {self.kinds[column]}"
                raise TableError(f"{name}: got {given}, expected a number and a numeric column")
            return np.asarray(_NUMBERS[kind](self._numbers(column), number))
        found = self._of_column(column, parts, name)
        return found if kind in (ast.Eq, ast.In) else ~found

    def _of_column(self, column: str, value: object, name: str) -> Mask:
        if isinstance(value, Mapping):
            return self._range(column, value, name)
        values = value if isinstance(value, list) else [value]
        if self.kinds[column] == "numeric":
            asked = [math.nan if (number := _number(one)) is None else number for one in values]
            for one in (one for one, number in zip(values, asked, strict=True) if math.isnan(number)):
                given = f"{check.shown(one)} to compare with column {column!r}, which is numeric"
                raise TableError(f"{name}: got {given}, expected numbers")
            return np.isin(self._numbers(column), asked)
        texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
        found = np.zeros(len(self._there), bool)
        for text in texts:
            found[self._values(column).get(text, _NO_ROWS)] = True
        return found

    def _range(self, column: str, bounds: Mapping[str, object], name: str) -> Mask:
        if self.kinds[column] != "numeric" or not bounds or set(bounds) - {"min", "max"}:
            given = f"{check.shown(dict(bounds))} of column {check.shown(column)}, which is {self.kinds[column]}"
            expected = 'a value, a list of values, or {"min": …, "max": …} of a numeric column'
            raise TableError(f"{name}: got {given}, expected {expected}")
        low, high = _number(bounds.get("min", -math.inf)), _number(bounds.get("max", math.inf))
        if low is None or high is None:
            raise TableError(f"{name}: got {check.shown(dict(bounds))}, expected numbers")
        numbers = self._numbers(column)
        return np.asarray((numbers >= low) & (numbers <= high))

    def _numbers(self, column: str) -> NDArray[np.float64]:
        """The numbers of a column by entity, NaN if missing."""
        numbers = self._frame[column].cast(frames.polars().Float64, strict=False)
        return np.asarray(numbers.fill_null(math.nan).to_numpy())

    def _values(self, column: str) -> dict[str, Rows]:
        """The entities of each value of a column, increasing; made once."""
        if column in self._found:
            return self._found[column]
        pl = frames.polars()
        table = pl.DataFrame({"value": self._texts(column), "entity": np.arange(len(self._there))}).drop_nulls()
        if self.kinds[column] == "list":
            table = table.with_columns(pl.col("value").str.split(self._separator)).explode("value")
        grouped = table.unique(maintain_order=True).group_by("value").agg(pl.col("entity"))
        values, lists = grouped["value"].to_list(), grouped["entity"].to_list()
        found = {value: np.sort(np.array(rows, np.int64)) for value, rows in zip(values, lists, strict=True)}
        self._found[column] = found
        return found

    def _texts(self, column: str) -> Series:
        pl = frames.polars()
        cells = self._frame[column]
        if isinstance(cells.dtype, pl.List):
            return cells.cast(pl.List(pl.String)).list.join(self._separator)
        return cells.cast(pl.String, strict=False)


def _numbers(column: Series) -> Series:
    """A numeric column, which a file may have as text, as numbers; as integers if all are whole."""
    pl = frames.polars()
    if column.dtype.is_integer():
        return column
    if not column.dtype.is_numeric():
        column = column.cast(pl.String).str.strip_chars().replace("", None)
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == column.null_count():
            return whole
    numbers = column.cast(pl.Float64, strict=False).fill_nan(None)
    present = numbers.drop_nulls()
    return numbers.cast(pl.Int64) if ((present % 1 == 0) & (present.abs() < _WHOLE)).all() else numbers


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _plain(cells: dict[str, object]) -> dict[str, object]:
    return {
        name: None if isinstance(cell, float) and not math.isfinite(cell)
        else cell if cell is None or isinstance(cell, (str, bool, int, float))
        else cell if isinstance(cell, list) and all(isinstance(one, str) for one in cell)
        else str(cell)
        for name, cell in cells.items()
    }  # fmt: skip

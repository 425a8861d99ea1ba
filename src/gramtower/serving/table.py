"""A table of one side's entities beside a served model: titles and columns to show, and filters by column.

Joined by id once, when a model is loaded. A filter asks for one value or several (any of them) of a column, or for a
range {"min", "max"} of numbers; a list column such as ``Comedy|Drama`` matches by its elements; of several columns all
must match. Rows that match a value are found once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.ids import id_series, join
from gramtower.data.tables import infer_kinds
from gramtower.serving.errors import Refused, shown

if TYPE_CHECKING:
    from polars import DataFrame, Series

_TITLES = ("title", "name", "label")
_WHOLE = 2.0**53  # beyond it a float says nothing about the last digits
Rows = NDArray[np.int64]


class EntityTable:
    """Columns of the entities of one side.

    Args:
        name: what messages call the table, such as "--right-table".
        frame: its rows.
        id: its column of ids.
        ids: of the model, in order; None where they are row numbers.
        count: how many entities the model has.
        title: the column that names an entity; by default one called title, name or label, if there is one.
        separator: between the elements of list columns.
    """

    def __init__(
        self,
        name: str,
        frame: DataFrame,
        id: str,
        ids: NDArray[Any] | None,
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
            example = repr(known[0]) if count else "none"
            check.fail(name, f"{len(frame):,} rows, none of them with an id of the model", f"ids such as {example}")
        self.joined = int((rows >= 0).sum())
        present = {column.lower(): column for column in frame.columns if column != id}
        named: list[str | None] = [present[wanted] for wanted in _TITLES if wanted in present]
        self.title = frames.pick(f"title of {name}", title, frame.columns) if title else (named or [None])[0]
        self.columns = [column for column in frame.columns if column != id]
        self.kinds = infer_kinds(frame, id, {}, separator)
        numbers = [_numbers(frame[column]) for column in self.columns if self.kinds[column] == "numeric"]
        self._frame = frame.select(self.columns).with_columns(numbers)
        self._rows, self._separator, self._found = rows, separator, dict[str, dict[str, Rows]]()

    def titles(self) -> list[str | None] | None:
        """The title of each entity, None where it has none; None if no column holds titles."""
        return self._titles

    @cached_property
    def _titles(self) -> list[str | None] | None:
        if self.title is None:
            return None
        texts = self._texts(self.title).to_list()
        return [texts[row] if row >= 0 else None for row in self._rows.tolist()]

    def cells(self, entities: Rows, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """The row of each entity as a mapping, empty for those without one."""
        rows = self._rows[entities]
        wanted = self.columns if columns is None else [self._column(column) for column in columns]
        taken = self._frame.select(wanted)[np.maximum(rows, 0).tolist()].to_dicts()
        return [_plain(cells) if row >= 0 else {} for row, cells in zip(rows.tolist(), taken, strict=True)]

    def matching(self, wanted: Mapping[str, Any]) -> Rows:
        """The entities that a filter lets through, increasing.

        Raises:
            Refused: 422 for a column that is not there, or a range of what are no numbers.
        """
        every: Rows | None = None
        for column, value in wanted.items():
            rows = self._of_column(self._column(column), value)
            every = rows if every is None else np.intersect1d(every, rows, assume_unique=True)
        return np.arange(len(self._rows)) if every is None else every

    def groups(self, column: str, entities: Rows) -> list[str | None]:
        """One value of a column for each entity, of a list the first, to colour by."""
        texts = self._texts(self._column(column))
        if self.kinds[column] == "list":
            texts = texts.str.split(self._separator).list.first()
        cells = texts.to_list()
        return [cells[row] if row >= 0 else None for row in self._rows[entities].tolist()]

    def _column(self, column: str) -> str:
        if column not in self.kinds:
            near = check.near(column, self.columns) or self.columns[:5]
            raise Refused(
                422, f"column: got {shown(column)}, expected one of the table, such as {', '.join(map(repr, near))}"
            )
        return column

    def _of_column(self, column: str, value: Any) -> Rows:
        if isinstance(value, Mapping):
            return self._range(column, value)
        values = value if isinstance(value, list) else [value]
        if self.kinds[column] == "numeric":
            numbers = self._numbers(column)
            asked = [number for number in map(_number, values) if number is not None]
            return np.flatnonzero(np.isin(numbers, asked))
        if column not in self._found:
            self._found[column] = self._by_value(column)
        found = [self._found[column].get(_text(one), np.empty(0, np.int64)) for one in values]
        return found[0] if len(found) == 1 else np.unique(np.concatenate([*found, np.empty(0, np.int64)]))

    def _range(self, column: str, bounds: Mapping[str, Any]) -> Rows:
        if self.kinds[column] != "numeric" or not bounds or set(bounds) - {"min", "max"}:
            raise Refused(
                422,
                f"filter: got {shown(dict(bounds))} of column {shown(column)}, which is {self.kinds[column]}, expected "
                'a value, a list of values, or {"min": …, "max": …} of a numeric column',
            )
        low, high = (_number(bounds.get(name, default)) for name, default in (("min", -math.inf), ("max", math.inf)))
        if low is None or high is None:
            raise Refused(422, f"filter: got {shown(dict(bounds))}, expected numbers")
        numbers = self._numbers(column)
        return np.flatnonzero((numbers >= low) & (numbers <= high))

    def _numbers(self, column: str) -> NDArray[np.float64]:
        """The numbers of a column by entity, NaN where there is none."""
        pl = frames.polars()
        numbers = self._frame[column].cast(pl.Float64, strict=False).fill_null(math.nan).to_numpy()
        return np.where(self._rows >= 0, numbers[np.maximum(self._rows, 0)], np.nan)

    def _by_value(self, column: str) -> dict[str, Rows]:
        """The entities of each value, or element of a list."""
        pl = frames.polars()
        entities = np.flatnonzero(self._rows >= 0)
        cells = self._texts(column)[self._rows[entities].tolist()]
        table = pl.DataFrame({"value": cells, "entity": entities}).drop_nulls()
        if self.kinds[column] == "list":
            table = table.with_columns(pl.col("value").str.split(self._separator)).explode("value")
        grouped = table.unique(maintain_order=True).group_by("value").agg(pl.col("entity"))
        values, lists = grouped["value"].to_list(), grouped["entity"].to_list()
        return {value: np.sort(np.array(rows, np.int64)) for value, rows in zip(values, lists, strict=True)}

    def _texts(self, column: str) -> Series:
        pl = frames.polars()
        cells = self._frame[column]
        if isinstance(cells.dtype, pl.List):
            return cells.cast(pl.List(pl.String)).list.join(self._separator)
        return cells.cast(pl.String, strict=False)


def _numbers(column: Series) -> Series:
    """A column of numbers as such, where a file has them as text; whole ones as integers."""
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


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(cells: dict[str, Any]) -> dict[str, Any]:
    """Cells that JSON can hold."""
    return {
        name: None if isinstance(cell, float) and not math.isfinite(cell)
        else cell if cell is None or isinstance(cell, (str, bool, int, float))
        else cell if isinstance(cell, list) and all(isinstance(one, str) for one in cell)
        else str(cell)
        for name, cell in cells.items()
    }  # fmt: skip

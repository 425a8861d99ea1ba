"""Which kind of features each column of a table holds, when nobody said.

    list         lists, or text with the separator in at least a tenth of the cells and elements that recur
    numeric      numbers, or text that is a number in every cell; numbers with leading zeros, such as "02139", are codes
    categorical  truth values; text whose values recur (at most half as many values as cells) or are single words
    text         other text
    skip         dates, columns without a value, and anything else

Cost: O(cells). Checked by tests/test_tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gramtower import _checks as check
from gramtower.data import frames

if TYPE_CHECKING:
    from polars import DataFrame, Series

KINDS = ("numeric", "categorical", "list", "text", "skip")
_SEPARATED, _RECURRING, _WORDS = 0.1, 0.5, 1.5


def infer_kinds(table: DataFrame, id: str, given: Mapping[str, str], separator: str) -> dict[str, str]:
    """The kind of every column but ``id``, those of ``given`` as they are given."""
    present = [name for name in table.columns if name != id]
    for name, kind in given.items():
        if name not in present:
            close = check.near(name, present, 1) or present
            check.fail("kinds", repr(name), f"a column besides the id, such as {', '.join(map(repr, close)) or 'none'}")
        check.choice(f"kinds[{name!r}]", kind, KINDS)
    return {name: given[name] if name in given else infer_kind(table[name], separator) for name in present}


def infer_kind(column: Series, separator: str) -> str:
    """The kind of one column."""
    pl = frames.polars()
    cells = column.drop_nulls()
    if isinstance(column.dtype, pl.List) and column.dtype.inner == pl.String:
        return "list"
    if column.dtype == pl.Boolean and len(cells):
        return "categorical"
    if column.dtype.is_numeric() and len(cells):
        return "numeric"
    if column.dtype not in (pl.String, pl.Categorical, pl.Enum) or not len(cells):
        return "skip"
    return _of_text(cells.cast(pl.String), separator)


def _of_text(cells: Series, separator: str) -> str:
    pl = frames.polars()
    stripped = cells.str.strip_chars().replace("", None).drop_nulls()
    if not len(stripped):
        return "skip"
    numbers = stripped.cast(pl.Float64, strict=False)
    if not numbers.null_count() and not stripped.str.contains(r"^[+-]?0\d").any():
        return "numeric"
    if int(stripped.str.contains(separator, literal=True).sum()) >= _SEPARATED * len(stripped):
        elements = stripped.str.split(separator).explode()
        if elements.n_unique() <= _RECURRING * len(elements):
            return "list"
    if stripped.n_unique() <= _RECURRING * len(stripped):
        return "categorical"
    return "text" if int(stripped.str.count_matches(r"\w+").sum()) >= _WORDS * len(stripped) else "categorical"

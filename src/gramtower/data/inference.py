"""Which kind of features each column of a table holds, when it is not given.

    list         lists, or text with the separator in at least a tenth of the cells and elements that recur
    numeric      numbers, or text that is a number in every cell; numbers with leading zeros, such as "02139", are codes
    categorical  truth values; text whose values recur (at most half as many values as cells) or are single words
    text         other text
    vector       lists of floating-point numbers, all of one length of at least two
    skip         dates, columns without a value, and anything else

Cost: O(cells).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gramtower._util import checks as check
from gramtower.data import frames

if TYPE_CHECKING:
    from polars import DataFrame, Series

KINDS = ("numeric", "categorical", "list", "text", "vector", "skip")
_SEPARATED, _RECURRING, _WORDS = 0.1, 0.5, 1.5


def infer_kinds(table: DataFrame, id: str, given: Mapping[str, str], separator: str) -> dict[str, str]:
    """The kind of every column but ``id``, those of ``given`` as they are given."""
    present = [name for name in table.columns if name != id]
    for name, kind in given.items():
        if name not in present:
            close = check.near(name, present, 1) or present
            check.fail("kinds", repr(name), f"a column besides the id, such as {', '.join(map(repr, close)) or 'none'}")
        check.choice(f"kinds[{name!r}]", kind, KINDS)
    asked = [table[name] for name in present if name not in given]
    return dict(zip(present, _told(present, given, iter(_kinds(asked, separator))), strict=True))


def _told(present: Sequence[str], given: Mapping[str, str], found: Iterator[str]) -> list[str]:
    return [given[name] if name in given else next(found) for name in present]


def _kinds(columns: Sequence[Series], separator: str) -> list[str]:
    """The kinds of columns of one length, all at a time: tables may have very many."""
    kinds = [_by_type(column) for column in columns]
    texts = [column for column, kind in zip(columns, kinds, strict=True) if not kind]
    found = iter(_of_text(texts, separator))
    return [kind or next(found) for kind in kinds]


def _by_type(column: Series) -> str:
    """The kind of a column that is no text; "" for text."""
    pl = frames.polars()
    if isinstance(column.dtype, pl.List) and column.dtype.inner == pl.String:
        return "list"
    if column.null_count() == len(column):
        return "skip"
    if isinstance(column.dtype, (pl.List, pl.Array)):
        return "vector" if _is_vector(column) else "skip"
    if column.dtype == pl.Boolean:
        return "categorical"
    if column.dtype.is_numeric():
        return "numeric"
    return "" if column.dtype in (pl.String, pl.Categorical, pl.Enum) else "skip"


def _is_vector(column: Series) -> bool:
    """Whether a column of lists holds floats, in lists of one length."""
    pl = frames.polars()
    if isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    lengths = column.drop_nulls().list.len().unique().to_list()
    inner = getattr(column.dtype, "inner", None)
    return inner is not None and bool(inner.is_float()) and len(lengths) == 1 and lengths[0] > 1


def _of_text(columns: Sequence[Series], separator: str) -> list[str]:
    pl = frames.polars()
    named = [column.alias(str(place)) for place, column in enumerate(columns)]
    table = pl.DataFrame(named).select(pl.all().cast(pl.String).str.strip_chars().replace("", None))
    cells = pl.all().drop_nulls()
    figures = {
        "cells": cells.len(),
        "numbers": cells.cast(pl.Float64, strict=False).is_not_null().sum(),
        "codes": cells.str.contains(r"^[+-]?0\d").sum(),
        "separated": cells.str.contains(separator, literal=True).sum(),
        "values": cells.n_unique(),
        "words": cells.str.count_matches(r"\w+").sum(),
    }
    counted = {name: table.select(figure).row(0) if columns else () for name, figure in figures.items()}
    rows = zip(*counted.values(), strict=True)
    return [_decide(table[str(place)], separator, *row) for place, row in enumerate(rows)]


def _decide(
    column: Series, separator: str, cells: int, numbers: int, codes: int, separated: int, values: int, words: int
) -> str:
    """The kind of a column of text by what was counted in it."""
    if not cells:
        return "skip"
    if numbers == cells and not codes:
        return "numeric"
    if separated >= _SEPARATED * cells:
        elements = column.drop_nulls().str.split(separator).explode()
        if elements.n_unique() <= _RECURRING * len(elements):
            return "list"
    if values <= _RECURRING * cells:
        return "categorical"
    return "text" if words >= _WORDS * cells else "categorical"

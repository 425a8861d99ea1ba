"""What the cells of a column hold: texts, numbers, or times.

polars does the work (frames.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from gramtower._util import checks as check
from gramtower.data.frames import polars

if TYPE_CHECKING:
    from polars import Series

_LARGEST = float(np.finfo(np.float32).max)  # of a number


def texts(column: Series) -> Series:
    """Cells as text; whole numbers that a missing value turned into floats are written as whole numbers."""
    pl = polars()
    column = _plain(column)
    if column.dtype == pl.String:
        return column
    if column.dtype.is_float():
        column = column.fill_nan(None)
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == column.null_count() and (whole.cast(column.dtype) == column).all():
            column = whole
    try:
        return column.cast(pl.String)
    except pl.exceptions.PolarsError:
        check.fail(f"column {column.name!r}", f"{column.dtype}", "text or whole numbers")


def numbers(name: str, column: Series) -> Series:
    """Float64 values; null and NaN are missing values, text that is no number and numbers beyond float32 are errors."""
    pl = polars()
    column = _plain(column)
    if not (column.dtype.is_numeric() or column.dtype in (pl.Boolean, pl.String, pl.Null)):
        check.fail(name, f"column {column.name!r} of {column.dtype}", "numbers")
    result = column.cast(pl.Float64, strict=False)
    if result.null_count() > column.null_count() and column.dtype == pl.String:
        result = column.str.strip_chars().cast(pl.Float64, strict=False)
    if result.null_count() > column.null_count():
        shown = column.filter(result.is_null() & column.is_not_null())
        check.fail(name, f"{shown[0]!r} in column {column.name!r} ({len(shown)} such rows)", "numbers")
    large = np.abs(result.to_numpy()) > _LARGEST
    if large.any():
        shown = column[int(np.argmax(large))]
        check.fail(name, f"{shown} in column {column.name!r}", f"finite numbers, up to {_LARGEST:.2g}")
    return result


def _no_date(texts: Series) -> str:
    """The first text that is no date, or not written as the others are; the first of all if none is."""
    pl = polars()
    try:
        wrong = texts.filter(texts.str.to_datetime(strict=False).is_null())
    except pl.exceptions.PolarsError:
        wrong = texts
    return str((wrong if len(wrong) else texts)[0])


def seconds(name: str, column: Series) -> Series:
    """Float64 times: numbers as they are, dates and times as seconds since 1970 (UTC unless they have a zone)."""
    pl = polars()
    column = _plain(column)
    if column.dtype == pl.String:
        sample = column.drop_nulls()
        if len(sample) and sample.head(1).cast(pl.Float64, strict=False).null_count():
            try:
                column = column.str.to_datetime()
            except pl.exceptions.PolarsError:
                given = f"{_no_date(sample)!r} in column {column.name!r}"
                check.fail(name, given, "numbers, or dates such as 2020-01-31, written alike in all rows")
    if column.dtype in (pl.Date, pl.Datetime):
        return column.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64) / 1e6
    return numbers(name, column)


def _plain(column: Series) -> Series:
    """A column of Objects as what polars makes of them together, such as numbers of integers and floats."""
    pl = polars()
    if column.dtype != pl.Object:
        return column
    try:
        return cast("Series", pl.Series(column.name, column.to_list(), strict=False))
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        check.fail("frame", f"column {column.name!r} of several types", "cells of one type")

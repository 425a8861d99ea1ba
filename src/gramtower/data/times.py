"""Moments as seconds since 1970 (UTC): from numbers, dates, datetimes of Python, numpy and pandas, and ISO 8601 text.

A time without a zone is UTC; one with a zone is converted.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.ids import is_missing

_EXPECTED = "a number, a date, a datetime, or text such as 2020-01-31 or 2020-01-31T12:00:00+01:00"


def moment(name: str, value: Any) -> float:
    """One moment."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            check.fail(name, repr(value), _EXPECTED)
    if isinstance(value, np.datetime64) and not np.isnat(value):
        return float(_of_datetime64(np.asarray([value]))[0])
    if isinstance(value, datetime) and not is_missing(value):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date) and not is_missing(value):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    if not isinstance(value, (int, float, np.integer, np.floating)):
        check.fail(name, repr(value), _EXPECTED)
    return check.number(name, value)


def moments(name: str, values: Any) -> NDArray[np.float64]:
    """A sequence of moments; NaN where one is missing."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        check.fail(name, type(values).__name__, "a sequence of times")
    array = check.as_array(name, values, "a sequence of times")
    if array.dtype.kind == "M":
        return _of_datetime64(array)
    if array.dtype.kind not in "OU":
        return check.as_float_array(name, array).astype(np.float64, copy=False)
    if array.ndim != 1:
        check.fail(name, f"shape {array.shape}", "one dimension")
    gone = [is_missing(cell) or (isinstance(cell, np.datetime64) and np.isnat(cell)) for cell in array]
    return np.array([np.nan if no else moment(name, cell) for cell, no in zip(array, gone, strict=True)])


def _of_datetime64(array: NDArray[Any]) -> NDArray[np.float64]:
    seconds = array.astype("datetime64[s]")  # whole seconds apart from the rest, which nanoseconds would overflow with
    rest = (array - seconds) / np.timedelta64(1, "s")
    found = seconds.astype(np.int64) + rest
    return np.where(np.isnat(array), np.nan, found)

"""Ids: their types, columns of ids as codes, lookups, ids as tensors, and times and durations.

The ids of a side are whole numbers (an int64 array) or text (an object array of str):

    text files                          text, whatever it looks like: "007" stays "007"
    integers of frames, Parquet, arrays whole numbers
    floats that are whole numbers       whole numbers, because missing values turn integers into floats elsewhere
    text and whole numbers in one list  text; the numbers are written in digits
    uuid.UUID                           text
    bool, bytes, other floats, dates,   refused; so are whole numbers beyond signed 64 bits, and floats beyond 2⁵³,
    lists and everything else           which are not exact

None, NaN and pandas' NA are missing. Lookups are type-sensitive: 7 does not match "7", and the error explains it. Joins
of tables (pairs to evaluate, features, a warm start) match a whole number with its decimal text, "7" but not "007",
because ids of CSV files are text and those of a Parquet file with the same entities may be numbers. Times are seconds
since 1970; a time without a zone is UTC. Cost: O(rows), and a sort for numbers that are far apart.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from time import time as clock
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data import frames

if TYPE_CHECKING:
    import polars as pl


Key = int | str
Ids: TypeAlias = NDArray[np.int64 | np.object_]  # whole numbers, or text
IdsLike = Key | Iterable[Key]  # one id, or a list, array or column of ids
_CHUNK = 1 << 16  # codes renumbered at a time, so that what numpy makes of them on the way stays in cache
_EXACT = 2**53  # floats beyond are not all the whole numbers there are
_SPARE = 4  # numbers are their own codes where they span at most this many times their count
_EXPECTED = "ids that are text or whole numbers"
_NUMBER = re.compile(r"0|-?[1-9][0-9]*")  # whole numbers as Python writes them
_NAMED = 3  # unknown ids that an error names
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}  # of the units of durations
_UNITS = {"second": "s", "minute": "min", "hour": "h", "day": "d", "week": "w"}
_LATEST = 1e11  # seconds since 1970, in the year 5138: later times are milliseconds
_MOMENT = "a number, a date, a datetime, or text such as 2020-01-31 or 2020-01-31T12:00:00+01:00"


@dataclass(frozen=True)
class Coded:
    """A column of ids as numbers."""

    codes: NDArray[Any]  # one integer for each row, equal where the ids are equal; -1 where the id is missing
    names: Callable[[NDArray[Any]], NDArray[Any]]  # the ids at some places of the column


def by_appearance(codes: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Renumber non-negative codes 0, 1, … by first appearance; also returns the place where each appears first."""
    total = len(codes)
    index = np.int32 if total < 2**31 - 1 else np.int64
    size = int(codes.max()) + 1 if total else 0
    first: NDArray[Any] = np.full(size, total, dtype=index)
    for start in range(0, total, _CHUNK):
        part = codes[start : start + _CHUNK].astype(np.intp)
        fresh = np.flatnonzero(first[part] == total)[::-1]
        first[part[fresh]] = start + fresh  # the last assignment, the first place, stays
    used = np.flatnonzero(first < total)
    used = used[np.argsort(first[used])]
    renumbered: NDArray[Any] = np.empty(size, dtype=index)
    renumbered[used] = np.arange(len(used), dtype=index)
    result: NDArray[Any] = np.empty(total, dtype=index)
    for start in range(0, total, _CHUNK):
        result[start : start + _CHUNK] = renumbered[codes[start : start + _CHUNK].astype(np.intp)]
    return result, first[used]


def code_series(**columns: pl.Series) -> list[Coded]:
    """Codes of polars columns of ids by the names of arguments; text columns are coded in parallel.

    The code of a text is its position among the distinct texts, as in a polars Enum.
    """
    pl = frames.polars()
    named = [id_series(name, columns.pop(name)).alias(name) for name in list(columns)]
    table = pl.DataFrame([column for column in named if column.dtype == pl.String])
    distinct = table.lazy().select(pl.all().unique().drop_nulls().implode()).collect()
    enums = [pl.col(name).cast(pl.Enum(distinct[name][0])).to_physical() for name in table.columns]
    coded = table.select(enums)
    return [_coded_text(c, coded[c.name]) if c.name in coded.columns else _coded_numbers(*_parts(c)) for c in named]


def _coded_text(text: pl.Series, codes: pl.Series) -> Coded:
    pl = frames.polars()
    array = (codes.cast(pl.Int64).fill_null(-1) if codes.null_count() else codes).to_numpy()
    return Coded(array, lambda places: as_objects(text.gather(pl.Series(places, dtype=pl.UInt32)).to_list()))


def _parts(column: pl.Series) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Numbers, with 0 for missing ones, and a mask of the missing ones."""
    if not column.null_count():
        return column.to_numpy(), None
    return column.fill_null(0).to_numpy(), column.is_null().to_numpy()


def _coded_numbers(values: NDArray[np.int64], missing: NDArray[np.bool_] | None) -> Coded:
    there = values if missing is None else values[~missing]
    low, high = (int(there.min()), int(there.max())) if len(there) else (0, 0)
    codes: NDArray[Any]
    if high - low < _SPARE * len(there):
        codes = (values - low).astype(np.int32 if high - low < 2**31 else np.int64)
    else:
        codes = np.unique(values, return_inverse=True)[1]
    if missing is not None:
        codes[missing] = -1
    return Coded(codes, lambda places: values[places])


def code_values(name: str, values: Iterable[object]) -> Coded:
    """Codes of any sequence of ids."""
    ids, missing = id_array(name, values)
    if ids.dtype != object:
        return _coded_numbers(ids.astype(np.int64, copy=False), missing)
    known: dict[str, int] = {}
    numbered = (-1 if text is None else known.setdefault(text, len(known)) for text in ids.tolist())
    codes = np.fromiter(numbered, dtype=np.int64, count=len(ids))
    _check_unicode(name, known)
    return Coded(codes, lambda places: ids[places])


def id_series(name: str, column: pl.Series) -> pl.Series:
    """A polars column of ids as String or Int64."""
    polars = frames.polars()
    kind, shown = column.dtype, f"column {column.name!r} of {column.dtype}"
    if kind in (polars.String, polars.Int64):
        return column
    if kind in (polars.Categorical, polars.Enum, polars.Null):
        return column.cast(polars.String)
    if kind == polars.Object:
        return _from_objects(name, column)
    if not (kind.is_float() or kind.is_integer()):
        check.fail(name, shown, _EXPECTED)
    if kind.is_float():
        column = column.fill_nan(None)
        if (column.abs() > _EXACT).any():
            check.fail(name, f"{shown} with numbers beyond 2^53", "integers or text: such floats are not exact")
    whole = column.cast(polars.Int64, strict=False)
    wrong = whole.is_null() & column.is_not_null() if kind.is_integer() else whole.cast(kind) != column
    if wrong.any():
        check.fail(name, f"{column.filter(wrong)[0]!r} in {shown}", f"{_EXPECTED} below 2^63")
    return whole


def _from_objects(name: str, column: pl.Series) -> pl.Series:
    ids, missing = id_array(name, column.to_list())
    cells = ids.tolist() if missing is None else np.where(missing, np.array(None), ids).tolist()
    if ids.dtype == object:
        _check_unicode(name, {text for text in cells if text is not None})
    kind = frames.polars().String if ids.dtype == object else frames.polars().Int64
    return cast("pl.Series", frames.polars().Series(column.name, cells, dtype=kind))


def id_array(name: str, values: object) -> tuple[Ids, NDArray[np.bool_] | None]:
    """Convert ids to an int64 or object array, with a mask of the missing ones (None if there are none)."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        check.fail(name, type(values).__name__, "a sequence of ids")
    if type(values).__module__.startswith("polars"):
        column = id_series(name, values)  # type: ignore[arg-type]
        if column.dtype == frames.polars().Int64:
            return _parts(column)
        return as_objects(column.to_list()), column.is_null().to_numpy() if column.null_count() else None
    if isinstance(values, Tensor):
        values = check.as_array(name, values, "a sequence of ids")
    elif isinstance(values, range):
        values = np.arange(values.start, values.stop, values.step)
    elif hasattr(values, "__array__") and not isinstance(values, np.ma.MaskedArray):
        values = np.asarray(values)
    if isinstance(values, np.ndarray) and values.ndim != 1:
        check.fail(name, f"shape {values.shape}", "one dimension")
    if isinstance(values, np.ndarray) and values.dtype.kind not in "iufUOT":
        check.fail(name, f"an array of {values.dtype}", _EXPECTED)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf" and not isinstance(values, np.ma.MaskedArray):
        return integers(name, values)
    cells = values.tolist() if isinstance(values, np.ndarray) else list(values)
    keys = [None if is_missing(cell) else key_of(name, cell) for cell in cells]
    absent = np.fromiter((key is None for key in keys), dtype=bool, count=len(keys))
    missing = absent if absent.any() else None
    if any(isinstance(key, str) for key in keys) or not keys:
        return as_objects([key if key is None else str(key) for key in keys]), missing
    return np.array([_in_range(name, int(key or 0)) for key in keys], dtype=np.int64), missing


def integers(name: str, values: NDArray[np.number]) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """An array of numbers as whole numbers, and a mask of missing ones (None if there are none)."""
    if values.dtype.kind != "f":
        if values.dtype == np.uint64 and len(values):
            _in_range(name, int(values.max()))
        return values.astype(np.int64), None
    missing = np.isnan(values)
    filled = np.where(missing, 0.0, values)
    wrong = (filled != np.floor(filled)) | (np.abs(filled) > _EXACT)
    if wrong.any():
        key_of(name, float(values[np.argmax(wrong)]))
    return filled.astype(np.int64), missing if missing.any() else None


def is_missing(cell: object) -> bool:
    """Whether a cell is None, NaN, or pandas' NA or NaT."""
    if isinstance(cell, (float, np.floating)):
        return bool(cell != cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def key_of(name: str, cell: object) -> Key:
    """Convert one id to text or a whole number (7.0 is 7)."""
    if isinstance(cell, (str, uuid.UUID)):
        return str(cell)
    if isinstance(cell, (int, np.integer)) and not isinstance(cell, bool):
        return int(cell)
    if isinstance(cell, (float, np.floating)):
        if float(cell).is_integer() and abs(float(cell)) <= _EXACT:
            return int(cell)
        check.fail(name, repr(cell), f"{_EXPECTED} (floats up to 2^53)")
    check.fail(name, repr(cell), _EXPECTED)


def _in_range(name: str, key: int) -> int:
    if not -(2**63) <= key < 2**63:
        check.fail(name, key, "whole numbers from -2^63 to 2^63 - 1, or text: str(id)")
    return key


def _check_unicode(name: str, texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            check.fail(name, ascii(text), "text that UTF-8 can write")


def as_ids(name: str, values: object) -> Ids:
    """Convert ids and check that they are distinct and none is missing."""
    ids, missing = id_array(name, values)
    if missing is not None:
        check.fail(name, f"no id at place {int(np.argmax(missing))}", "an id at every place")
    if ids.dtype == object:
        _check_unicode(name, ids)
    if len(distinct := set(ids.tolist())) != len(ids):
        twice = next(key for key in ids.tolist() if key not in distinct or distinct.remove(key))  # type: ignore[func-returns-value]
        check.fail(name, f"{twice!r} twice", "distinct ids")
    return ids


def as_objects(texts: Sequence[object]) -> NDArray[np.object_]:
    """Convert a list to a one-dimensional object array."""
    result = np.empty(len(texts), dtype=object)
    result[:] = texts
    return result


def index_of(ids: Ids) -> dict[Key, int]:
    """Map each id to its row."""
    return {key: row for row, key in enumerate(ids.tolist())}


class UnknownIds(ValueError):
    """Ids that an index does not have."""


def rows_of(name: str, ids: IdsLike, index: Mapping[Key, int], expected: str | None = None) -> NDArray[np.int64]:
    """Look up the rows of ids; the error names unknown ids and similar ones, and ends with ``expected``.

    Tuples in the index, such as ("new", 0), are found as they are.
    """
    known: Mapping[Any, int] = index
    keys: list[Any] = [x if isinstance(x, tuple) and x in known else key_of(name, x) for x in check.ids(name, ids)]
    unknown = [key for key in keys if key not in index]
    if unknown:
        named = "; ".join(f"{key!r}{_hint(key, index)}" for key in dict.fromkeys(unknown[:_NAMED]))
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise UnknownIds(
            f"{name}: got unknown ids {named}{more}, expected {expected or f'ids among the {len(index)} known'}"
        )
    return np.fromiter((index[key] for key in keys), dtype=np.int64, count=len(keys))


def join(ids: Ids, index: Mapping[Key, int]) -> NDArray[np.int64]:
    """Match ids with rows, −1 for unknown ids; a number and its decimal text are the same id."""
    keys = ids.tolist()
    if keys and index and isinstance(keys[0], str) != _is_text(index):
        keys = [str(key) for key in keys] if _is_text(index) else [_number(key) for key in keys]
    return np.fromiter((index.get(key, -1) for key in keys), dtype=np.int64, count=len(keys))


def as_known(texts: Iterable[str], ids: Ids | None) -> list[Key]:
    """Convert text from a command line to the type of the known ids; None means row numbers."""
    numbers = ids is None or ids.dtype.kind == "i"
    return [_number(text) if numbers else text for text in texts]


def is_of_other_type(key: object, index: Mapping[Key, int]) -> bool:
    """Whether an unknown id would be known as text instead of a number, or as a number instead of text."""
    return isinstance(key, (str, int)) and (str(key) if isinstance(key, int) else _number(key)) in index


def _is_text(index: Mapping[Key, int]) -> bool:
    return isinstance(next(iter(index)), str)


def _number(text: str) -> Key:
    """The whole number that a text writes, or the text itself."""
    return int(text) if len(text) <= 20 and _NUMBER.fullmatch(text) else text


def _hint(key: Key, index: Mapping[Key, int]) -> str:
    if not index:
        return ""
    if isinstance(key, str) != _is_text(index):
        other: Key = str(key) if isinstance(key, int) else _number(key)
        known = f", and {other!r} is one of them" if other in index else ""
        return f" (ids are {'text' if _is_text(index) else 'whole numbers'} here{known})"
    close = check.near(key, index) if isinstance(key, str) else []  # type: ignore[arg-type]
    return f" (nearest: {', '.join(map(repr, close))})" if close else ""


def pack_ids(ids: Ids | None) -> dict[str, Tensor]:
    """Ids as tensors: ``numbers``, or one block of UTF-8 ``text`` with ``offsets``; empty for None."""
    if ids is None:
        return {}
    ids, _ = id_array("ids", ids)
    if ids.dtype != object:
        return {"numbers": torch.from_numpy(ids.copy())}
    encoded = [key.encode() for key in ids.tolist()]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    text = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
    return {"text": torch.from_numpy(text), "offsets": torch.from_numpy(offsets)}


def unpack_ids(tensors: Mapping[str, Tensor], prefix: str = "") -> Ids | None:
    """Rebuild ids from the tensors of pack_ids, whose names have a prefix; None if there are none."""
    found = {name: tensors[prefix + name] for name in ("numbers", "text", "offsets") if prefix + name in tensors}
    if not found:
        return None
    if set(found) not in ({"numbers"}, {"text", "offsets"}):
        check.fail("ids", f"tensors {', '.join(prefix + name for name in found)}", "numbers, or text and offsets")
    kinds = {"numbers": torch.int64, "text": torch.uint8, "offsets": torch.int64}
    for name, tensor in found.items():
        if tensor.dtype != kinds[name] or tensor.dim() != 1:
            given = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            check.fail(f"ids: {prefix}{name}", given, f"{kinds[name]} of one dimension")
    ids = found["numbers"].numpy() if "numbers" in found else _texts(prefix, found["text"], found["offsets"])
    distinct = len(np.unique(ids)) if ids.dtype != object else len(set(ids.tolist()))
    if distinct < len(ids):
        check.fail("ids", f"{len(ids) - distinct} repeated ids", "distinct ids")
    return ids


def _texts(prefix: str, text: Tensor, offsets: Tensor) -> NDArray[np.object_]:
    bounds = offsets.numpy()
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(text) or (bounds[1:] < bounds[:-1]).any():
        check.fail(f"ids: {prefix}offsets", f"{len(bounds)} offsets", f"offsets that rise from 0 to {len(text)}")
    data = text.numpy().tobytes()
    spans = itertools.pairwise(bounds.tolist())
    try:
        if data.isascii():  # one decoding for all: every byte is a character
            letters = data.decode()
            return as_objects([letters[a:b] for a, b in spans])
        return as_objects([data[a:b].decode() for a, b in spans])
    except UnicodeDecodeError as error:
        check.fail(f"ids: {prefix}text", f"bytes that are not UTF-8 ({error.reason})", "ids in UTF-8")


def moment(name: str, value: object) -> float:
    """Convert a number, date, datetime or ISO 8601 text to seconds since 1970 (UTC)."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            check.fail(name, repr(value), _MOMENT)
    if isinstance(value, np.datetime64) and not np.isnat(value):
        return float(_of_datetime64(np.asarray([value]))[0])
    if isinstance(value, datetime) and not is_missing(value):
        return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date) and not is_missing(value):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    if not isinstance(value, (int, float, np.integer, np.floating)):
        check.fail(name, repr(value), _MOMENT)
    return check.number(name, value)


def moments(name: str, values: object) -> NDArray[np.float64]:
    """Convert a sequence of times to seconds since 1970 (UTC); NaN where one is missing."""
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


def _of_datetime64(array: NDArray[np.datetime64]) -> NDArray[np.float64]:
    seconds = array.astype("datetime64[s]")  # whole seconds apart from the rest, which nanoseconds would overflow with
    rest = (array - seconds) / np.timedelta64(1, "s")
    found = seconds.astype(np.int64) + rest
    return np.where(np.isnat(array), np.nan, found)


def duration(name: str, value: object) -> float:
    """Convert text such as "90d" or "3 weeks", a timedelta or a pandas Timedelta to seconds, which must be positive."""
    found = float("nan")
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)\s*", value, re.ASCII)):
        word = match[2].removesuffix("s") if len(match[2]) > 2 else match[2]
        found = float(match[1]) * _SECONDS.get(_UNITS.get(word, word), found)
    elif isinstance(value, np.timedelta64):
        found = float(value / np.timedelta64(1, "s"))
    elif isinstance(value, timedelta):
        found = value.total_seconds()
    if not 0 < found < float("inf"):
        units = ", ".join(_SECONDS)
        check.fail(name, repr(value), f"a positive duration: text such as '90d' (units: {units}), or a timedelta")
    return found


def entity_names(left: str, right: str) -> tuple[str, str]:
    """Names of the left and the right entities for messages, made from those of their columns; they always differ."""
    left, right = (" ".join(name.split())[:60] for name in (left, right))
    return (left, right) if left != right else (f"left {left}", f"right {right}")


def date_text(seconds: float) -> str:
    """A time in seconds since 1970 as text, such as 2024-01-31T12:00:00."""
    return str(np.datetime64(round(seconds), "s"))


def decays(times: NDArray[np.float64], half_life: object, now: object = None) -> NDArray[np.float64]:
    """2^(−age / half_life) of each time; age counts from ``now`` or from the newest time. NaN stays NaN.

    A time in the future is refused, as all others would count for nothing, unless ``now`` is as late.
    """
    half, newest = duration("half_life", half_life), float(np.max(times, initial=-np.inf, where=~np.isnan(times)))
    if newest > _LATEST:
        check.fail("time", f"{newest:.0f}", "dates, or seconds since 1970: divide milliseconds by 1000")
    if now is None and newest > (today := clock()) + _SECONDS["d"]:  # a day for time zones
        given = f"{int((times > today).sum()):,} times in the future, up to {date_text(newest)}"
        expected = "times of the past; leave these rows out, or pass now=, the time from which ages count"
        check.fail("time", given, expected)
    end = newest if now is None else moment("now", now)
    if end < newest:
        given = f"{date_text(end)} with {int((times > end).sum()):,} later times, up to {date_text(newest)}"
        check.fail("now", given, "the newest time or a later one; leave out what came after it")
    found: NDArray[np.float64] = np.exp2((times - end) / half)
    if len(found) and not np.nanmax(found, initial=0.0) > np.finfo(np.float32).tiny:
        check.fail("half_life", repr(half_life), "a duration after which the newest pair has a weight above 0")
    return found

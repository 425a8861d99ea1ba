"""Ids ↔ row numbers: numbering by first appearance, look-up, and the nearest known ids for those that are unknown.

Checked by tests/test_interactions.py.
"""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data import frames

if TYPE_CHECKING:
    import polars as pl

_CHUNK = 1 << 16  # codes renumbered at a time, so that what numpy makes of them on the way stays in cache
_CANDIDATES = 2000  # ids compared letter by letter for one unknown id


@dataclass(frozen=True)
class Coded:
    """A column of ids as numbers.

    Attributes:
        codes: one integer for each row, equal where the ids are equal; -1 where the id is missing.
        names: the ids at some places of the column, as text.
    """

    codes: NDArray[Any]
    names: Callable[[NDArray[Any]], list[str]]


def by_appearance(codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Renumber codes 0, 1, … in order of first appearance.

    Args:
        codes: non-negative integers with few gaps.

    Returns:
        The new codes, and for each of them the place where it appears first.
    """
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


def code_series(*columns: pl.Series) -> list[Coded]:
    """Codes of polars columns of one length, found side by side.

    They are Categorical codes, which serve as keys within one call only: another process numbers differently.
    """
    pl = frames.polars()
    given = [frames.texts(column).alias(str(place)) for place, column in enumerate(columns)]
    coded = pl.DataFrame(given).select(pl.all().cast(pl.Categorical).to_physical())
    return [_coded(text, codes) for text, codes in zip(given, coded, strict=True)]


def _coded(text: pl.Series, codes: pl.Series) -> Coded:
    pl = frames.polars()
    missing = codes.null_count() > 0
    array = (codes.cast(pl.Int64).fill_null(-1) if missing else codes).to_numpy()
    return Coded(array, lambda places: text.gather(pl.Series(places, dtype=pl.UInt32)).to_list())


def code_values(name: str, values: Any) -> Coded:
    """Codes of any sequence of text or whole numbers; None and NaN are missing."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        check.fail(name, type(values).__name__, "a sequence of ids")
    if isinstance(values, np.ndarray) and values.ndim != 1:
        check.fail(name, f"shape {values.shape}", "one dimension")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        _, codes = np.unique(values, return_inverse=True)
        return Coded(codes, lambda places: [str(x) for x in values[places].tolist()])
    cells = values.tolist() if isinstance(values, np.ndarray) else list(values)
    known: dict[str, int] = {}
    numbered = (known.setdefault(text_of(name, cell), len(known)) if _present(cell) else -1 for cell in cells)
    codes = np.fromiter(numbered, dtype=np.int64, count=len(cells))
    texts = list(known)
    return Coded(codes, lambda places: [texts[code] for code in codes[places]])


def _present(cell: Any) -> bool:
    return cell is not None and bool(cell == cell)


def text_of(name: str, cell: Any) -> str:
    """One id as text: text as it is, whole numbers in digits (7.0 is "7")."""
    if isinstance(cell, str):
        return str(cell)
    if isinstance(cell, (int, np.integer)) and not isinstance(cell, bool):
        return str(int(cell))
    if isinstance(cell, (float, np.floating)) and float(cell).is_integer():
        return str(int(cell))
    check.fail(name, repr(cell), "ids that are text or whole numbers")


def as_ids(name: str, values: Any) -> NDArray[np.object_]:
    """Distinct ids as a one-dimensional object array of text."""
    texts = [text_of(name, value) for value in values]
    if len(set(texts)) != len(texts):
        seen: set[str] = set()
        twice = next(text for text in texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        check.fail(name, f"{twice!r} twice", "distinct ids")
    return as_objects(texts)


def as_objects(texts: list[str]) -> NDArray[np.object_]:
    """A one-dimensional object array."""
    result = np.empty(len(texts), dtype=object)
    result[:] = texts
    return result


def rows_of(name: str, ids: Any, index: Mapping[str, int]) -> NDArray[np.int64]:
    """Row numbers of ids; unknown ones are an error that names the first few and the nearest known ids."""
    asked = [ids] if isinstance(ids, (str, int, np.integer)) else list(ids)
    texts = [text_of(name, value) for value in asked]
    unknown = [text for text in texts if text not in index]
    if unknown:
        named = "; ".join(f"{text!r}{_hint(text, index)}" for text in dict.fromkeys(unknown[:3]))
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        check.fail(name, f"unknown ids {named}{more}", f"ids among the {len(index)} known")
    return np.fromiter((index[text] for text in texts), dtype=np.int64, count=len(texts))


def _hint(text: str, known: Iterable[str]) -> str:
    close = nearest(text, known)
    return f" (nearest: {', '.join(repr(c) for c in close)})" if close else ""


def nearest(text: str, known: Iterable[str], count: int = 3) -> Sequence[str]:
    """Known ids that look like ``text``: ranked by difflib among those that begin and end most alike."""
    names = [name for name in known if abs(len(name) - len(text)) <= 2 + len(text) // 2]
    if len(names) > _CANDIDATES:
        names = heapq.nlargest(_CANDIDATES, names, key=lambda name: _alike(text, name) + _alike(text[::-1], name[::-1]))
    return difflib.get_close_matches(text, names, n=count, cutoff=0.6)


def _alike(one: str, other: str) -> int:
    """How many letters two texts begin with in common."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )

"""Ids ↔ row numbers: look-up of ids that must be known, and joins of two sets of ids.

Who asks by id asks by type: 7 is not "7", and the error says so. Joins of tables (pairs to evaluate, features, a warm
start) match a whole number with the text that writes it, "7" but not "007": ids of CSV files are text, and those of a
Parquet file with the same entities may be numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.ids import Key, key_of

_NUMBER = re.compile(r"0|-?[1-9][0-9]*")  # whole numbers as Python writes them
_NAMED = 3  # unknown ids that an error names


def index_of(ids: NDArray[Any]) -> dict[Key, int]:
    """The row of each id."""
    return {key: row for row, key in enumerate(ids.tolist())}


def rows_of(name: str, ids: Any, index: Mapping[Key, int], expected: str | None = None) -> NDArray[np.int64]:
    """Row numbers of one id or of several.

    Args:
        name: of the argument, for errors.
        ids: one id or a sequence of them.
        index: what index_of made.
        expected: what to say was expected; by default, ids among those known.

    Raises:
        ValueError: for unknown ids; names the first few, with near ones or why they cannot be among those known.
    """
    keys = [key_of(name, cell) for cell in check.ids(name, ids)]
    unknown = [key for key in keys if key not in index]
    if unknown:
        named = "; ".join(f"{key!r}{_hint(key, index)}" for key in dict.fromkeys(unknown[:_NAMED]))
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        check.fail(name, f"unknown ids {named}{more}", expected or f"ids among the {len(index)} known")
    return np.fromiter((index[key] for key in keys), dtype=np.int64, count=len(keys))


def join(ids: NDArray[Any], index: Mapping[Key, int]) -> NDArray[np.int64]:
    """The row of each id, −1 where it is unknown; a number and the text that writes it are the same id."""
    keys = ids.tolist()
    if keys and index and isinstance(keys[0], str) != _is_text(index):
        keys = [str(key) for key in keys] if _is_text(index) else [_number(key) for key in keys]
    return np.fromiter((index.get(key, -1) for key in keys), dtype=np.int64, count=len(keys))


def as_known(texts: Iterable[str], ids: NDArray[Any] | None) -> list[Key]:
    """Text from a command line as ids of the type of those known; None stands for row numbers."""
    numbers = ids is None or ids.dtype.kind == "i"
    return [_number(text) if numbers else text for text in texts]


def is_of_other_type(key: object, index: Mapping[Key, int]) -> bool:
    """Whether an unknown id would be known as text instead of a number, or as a number instead of text."""
    return isinstance(key, (str, int)) and (str(key) if isinstance(key, int) else _number(key)) in index


def _is_text(index: Mapping[Key, int]) -> bool:
    return isinstance(next(iter(index)), str)


def _number(text: str) -> Key:
    """The whole number that a text writes, otherwise the text."""
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

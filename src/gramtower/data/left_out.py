"""Warnings about what was left out of the data: rows that make no pair, and pairs of entities that are not known."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

_REASONS = {"rows_without_id": "without an id", "rows_without_number": "without a value, weight or time"}
_SHARE = 0.01  # of the rows; more are worth a warning


class LeftOutWarning(UserWarning):
    """Some of the data was left out."""


def rows_left_out(report: Mapping[str, int]) -> int:
    """How many rows of a report are left out because something is missing in them."""
    return sum(report.get(name, 0) for name in _REASONS)


def warn_of_rows(report: Mapping[str, int]) -> None:
    """Warn if more than a hundredth of the rows miss something; those below a threshold are meant to be left out."""
    if (lost := rows_left_out(report)) > _SHARE * report["rows"]:
        why = ", ".join(f"{report[name]:,} {reason}" for name, reason in _REASONS.items() if report.get(name))
        _warn("rows", lost, report["rows"], why)


def warn_of_pairs(name: str, lost: int, total: int, example: object, hint: str = "") -> None:
    """Warn if more than a hundredth of pairs have an id that is not known; a hint says what can be done about it."""
    if lost > _SHARE * total:
        why = f"an id is not in the training data, such as {example!r}"
        _warn(f"pairs of {name}", lost, total, f"{why}; {hint}" if hint else why)


def warn_of_ids(name: str, unknown: Sequence[object], total: int) -> None:
    """Warn if some ids of an argument that takes unknown ones are not known; they are ignored."""
    if unknown:
        some = ", ".join(map(repr, unknown[:3]))
        text = f"{name}: {len(unknown):,} of {total:,} ids are unknown to the model and are ignored, such as {some}"
        warnings.warn(text, LeftOutWarning, stacklevel=4)


def warn_of_header(names: tuple[str, str], ids: tuple[NDArray[Any], NDArray[Any]]) -> None:
    """Warn if the names of both columns are ids as well: they are a pair then, of a file without a header."""
    if all(map(_is_id, names, ids)):
        text = f"the first line is left out: {names[0]!r} and {names[1]!r}, taken for names of columns, are ids too"
        warnings.warn(f"{text}; header=False reads it as a pair", LeftOutWarning, stacklevel=3)


def _is_id(name: str, ids: NDArray[Any]) -> bool:
    if ids.dtype == object:
        return bool((ids == name).any())
    return name.isdecimal() and bool((ids == int(name)).any())


def _warn(what: str, lost: int, total: int, why: str) -> None:
    most = "more than half: " if 2 * lost > total else ""
    warnings.warn(f"{most}{lost:,} of {total:,} {what} are left out ({why})", LeftOutWarning, stacklevel=4)

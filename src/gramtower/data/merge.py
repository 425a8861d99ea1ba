"""Build the fields of Interactions from columns of ids and numbers: drop rows, number ids, merge duplicates, count.

:func:`ordered_merge` sorts 64-bit keys, which puts the rows in order of (left, right) and, if there are numbers to
carry along, of their position in the file; then rows of the same pair are merged by a rule. Many rows are passed to
data/grouping.py, which does the same on all cores. Cost: O(rows log rows) time; a few arrays of that length.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.checks import LeftOutWarning
from gramtower.data.ids import Coded, Ids, by_appearance

Codes: TypeAlias = NDArray[np.integer]
Places: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.floating] | None
Merged: TypeAlias = tuple[sp.csr_matrix, NDArray[np.float32] | None, NDArray[np.float64] | None, int]
_LOST = ("rows_without_id", "rows_without_number", "rows_below_threshold")


@dataclass(frozen=True)
class Rule:
    """The rule for which rows make a pair, for its label, and for merging rows of one pair; see Interactions."""

    threshold: float | None
    labels: bool
    duplicates: str

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check.number("threshold", self.threshold)
        if not isinstance(self.labels, (bool, np.bool_)):
            check.fail("labels", repr(self.labels), "True or False")
        if self.labels and self.threshold is not None:
            check.fail("labels", "True with a threshold", "only one of them: pairs over a threshold are labelled 1")
        check.choice("duplicates", self.duplicates, RULES)

    @classmethod
    def of(cls, threshold: float | None, labels: bool, duplicates: str, value: object) -> Rule:
        """Make a rule, and refuse one that reads values if there are none."""
        rule = cls(threshold, labels, duplicates)
        if rule.reads_value and value is None:
            check.fail("value", None, "a value column, which threshold and labels=True need")
        return rule

    @property
    def reads_value(self) -> bool:
        """Whether the value column matters."""
        return self.labels or self.threshold is not None


@dataclass(frozen=True)
class Fields:
    """The fields of Interactions."""

    matrix: sp.csr_matrix
    left_ids: NDArray[Any]
    right_ids: NDArray[Any]
    times: NDArray[np.float64] | None
    weights: NDArray[np.float32] | None
    report: dict[str, int]


def assemble(left: Coded, right: Coded, numbers: dict[str, NDArray[np.floating]], rule: Rule) -> Fields:
    """Drop rows, number ids by first appearance, and merge duplicates; a missing number is NaN."""
    total = len(left.codes)
    for name, array in (("right", right.codes), *numbers.items()):
        if array.shape != (total,):
            check.fail(name, f"shape {array.shape}", f"({total},), as many as left")
    for name, array in numbers.items():
        if np.isinf(array).any():
            check.fail(name, "an infinite number", "finite numbers")
    report = {"rows": total}
    kept = _identified(left.codes, right.codes)
    report["rows_without_id"] = 0 if kept is None else total - int(kept.sum())
    kept, report["rows_without_number"] = _narrow(kept, total, [~np.isnan(array) for array in numbers.values()])
    high = [] if rule.threshold is None else [numbers["value"] >= rule.threshold]
    kept, report["rows_below_threshold"] = _narrow(kept, total, high)
    check_rows(report)
    rows, left_ids = _numbered(left, kept)
    columns, right_ids = _numbered(right, kept)
    del left, right
    numbers = numbers if kept is None else {name: array[kept] for name, array in numbers.items()}
    labels = numbers.get("value") if rule.labels else None
    shape = (len(left_ids), len(right_ids))
    matrix, weights, times, merged = merge(
        rows, columns, shape, labels, numbers.get("weight"), numbers.get("time"), rule.duplicates
    )
    report |= {"rows_merged": merged, "pairs": matrix.nnz, "left": shape[0], "right": shape[1]}
    return Fields(matrix, left_ids, right_ids, times, weights, report)


def check_rows(report: dict[str, int]) -> None:
    """Refuse data without a kept row, and warn if many rows are dropped."""
    if report["rows"] == sum(report[name] for name in _LOST):
        counts = ", ".join(f"{name} {count}" for name, count in report.items())
        check.fail("rows", f"none to keep ({counts})", "at least one observed pair")
    warn_of_rows(report)


def _identified(left: NDArray[np.integer], right: NDArray[np.integer]) -> NDArray[np.bool_] | None:
    """Rows with both ids; None for all."""
    if all(codes.dtype.kind == "u" or codes.min(initial=0) >= 0 for codes in (left, right)):
        return None
    return (left.astype(np.int64) >= 0) & (right.astype(np.int64) >= 0)


def _narrow(
    kept: NDArray[np.bool_] | None, total: int, masks: list[NDArray[np.bool_]]
) -> tuple[NDArray[np.bool_] | None, int]:
    """Intersect a mask with others, and count the rows lost; None means all rows."""
    both = kept
    for mask in masks:
        if both is not None or not mask.all():
            both = mask if both is None else both & mask
    before = total if kept is None else int(kept.sum())
    return both, before - (total if both is None else int(both.sum()))


def _numbered(side: Coded, kept: NDArray[np.bool_] | None) -> tuple[NDArray[np.integer], Ids]:
    codes, places = by_appearance(side.codes if kept is None else side.codes[kept])
    return codes, side.names(places if kept is None else np.flatnonzero(kept)[places])


def given_ids(name: str, given: Iterable[object]) -> Iterable[object]:
    """Ids as given, tensors as arrays; sparse matrices are refused."""
    if sp.issparse(given):
        check.fail(name, "a sparse matrix", "a sequence of ids; from_matrix takes a matrix")
    return check.as_array(name, given, "a sequence of ids") if isinstance(given, torch.Tensor) else given


_MANY, _PIECE = 1 << 22, 1 << 20  # rows from which on all cores are used, and of a piece that one of them takes
RULES = ("max", "sum", "first", "last", "error")


def ordered(
    rows: NDArray[np.integer], columns: NDArray[np.integer], bits: int, places: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Sorted keys row · 2^bits + column, duplicates kept, and with ``places`` the input position of each.

    The sort is stable: positions are sorted along as low bits if that fits into 63 bits.
    """
    keys = rows.astype(np.int64)
    keys <<= bits
    keys |= columns
    if not places:
        keys.sort()
        return keys, None
    low = max(1, len(keys) - 1).bit_length()
    if int(keys.max(initial=0)).bit_length() + low > 63:
        order = np.argsort(keys, kind="stable")
        return keys[order], order
    keys <<= low
    keys |= np.arange(len(keys))
    keys.sort()
    order = keys & ((1 << low) - 1)
    keys >>= low
    return keys, order


def merge(
    rows: Codes, columns: Codes, shape: tuple[int, int], labels: Reals, weights: Reals, times: Reals, rule: str
) -> Merged:
    """The matrix of labels (1 where ``labels`` is None), its weights and times, and how many rows were merged away."""
    if len(rows) < _MANY or not host.has_numba():
        return ordered_merge(rows, columns, shape, labels, weights, times, rule)
    from gramtower.data.grouping import Piece, group  # compiled by numba, which is not worth it for few rows

    left, right = rows.astype(np.int32, copy=False), columns.astype(np.int32, copy=False)
    numbers = {"value": labels, "weight": weights, "time": times}
    spans = [slice(start, start + _PIECE) for start in range(0, len(rows), _PIECE)]
    pieces = [Piece(left[s], right[s], {k: v[s] for k, v in numbers.items() if v is not None}) for s in spans]
    return group(pieces, shape, rule)


def ordered_merge(
    rows: Codes, columns: Codes, shape: tuple[int, int], labels: Reals, weights: Reals, times: Reals, rule: str
) -> Merged:
    """Do the same as :func:`merge` by one sort of all rows in one thread."""
    bits = max(1, shape[1] - 1).bit_length()
    numbers = (labels, weights, times)
    keys, order = ordered(rows, columns, bits, places=any(array is not None for array in numbers))
    fresh = np.ones(len(keys), dtype=bool)  # whether an entry is the first of its pair
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    repeated = len(keys) - int(np.count_nonzero(fresh))
    if repeated and rule == "error":
        row, column = divmod(int(keys[np.argmin(fresh)]), 1 << bits)
        check.fail("duplicates", f"{repeated} rows that repeat a pair, first {(row, column)}", "none")
    starts = np.flatnonzero(fresh) if repeated and order is not None else None
    if repeated:
        keys = keys[fresh]
    if order is None:
        merged: list[NDArray[Any] | None] = [None] * 3
    elif starts is None:
        merged = [None if array is None else array[order] for array in numbers]
    elif rule in ("first", "last"):
        chosen = _chosen(order, fresh, starts, times, rule)
        merged = [None if array is None else array[chosen] for array in numbers]
    else:
        add = np.maximum if rule == "max" else np.add
        reductions = (add, add, np.maximum)  # of several times the latest
        merged = [
            None if array is None else reduction.reduceat(array[order], starts)
            for array, reduction in zip(numbers, reductions, strict=True)
        ]
    values, kept, stamps = merged
    values = np.ones(len(keys), np.float32) if values is None else values.astype(np.float32)
    index = np.int32 if max(len(keys), *shape) < 2**31 - 1 else np.int64
    offsets = np.searchsorted(keys, np.arange(shape[0] + 1) << bits).astype(index)
    found = np.empty(len(keys), dtype=index)
    np.bitwise_and(keys, (1 << bits) - 1, out=found, casting="unsafe")
    kept = None if kept is None else kept.astype(np.float32)
    stamps = None if stamps is None else stamps.astype(np.float64)
    return sp.csr_matrix((values, found, offsets), shape=shape), kept, stamps, repeated


def _chosen(
    order: Places, fresh: NDArray[np.bool_], starts: Places, times: NDArray[np.floating] | None, rule: str
) -> Places:
    """For each pair, the position of its first or last row, by time (if there are times) and then by position."""
    if times is not None:
        order = order[np.lexsort((times[order], np.cumsum(fresh)))]  # lexsort is stable: equal times keep their places
    at = starts if rule == "first" else np.append(starts[1:], len(order)) - 1
    return np.asarray(order[at])


_REASONS = {"rows_without_id": "without an id", "rows_without_number": "without a value, weight or time"}
_SHARE = 0.01  # of the rows; more are worth a warning


def rows_left_out(report: Mapping[str, int]) -> int:
    """Number of rows of a report that were dropped because of a missing cell."""
    return sum(report.get(name, 0) for name in _REASONS)


def warn_of_rows(report: Mapping[str, int]) -> None:
    """Warn if more than 1% of the rows were dropped because of a missing cell."""
    if (lost := rows_left_out(report)) > _SHARE * report["rows"]:
        why = ", ".join(f"{report[name]:,} {reason}" for name, reason in _REASONS.items() if report.get(name))
        _warn("rows", lost, report["rows"], why)


def warn_of_pairs(name: str, lost: int, total: int, example: object, hint: str = "") -> None:
    """Warn if more than 1% of the pairs have an unknown id; ``hint`` says what to do about it."""
    if lost > _SHARE * total:
        why = f"an id is not in the training data, such as {example!r}"
        _warn(f"pairs of {name}", lost, total, f"{why}; {hint}" if hint else why)


def warn_of_ids(name: str, unknown: Sequence[object], total: int) -> None:
    """Warn if some ids are unknown and ignored."""
    if unknown:
        some = ", ".join(map(repr, unknown[:3]))
        text = f"{name}: {len(unknown):,} of {total:,} ids are unknown to the model and are ignored, such as {some}"
        warnings.warn(text, LeftOutWarning, stacklevel=4)


def warn_of_header(names: tuple[str, str], ids: tuple[Ids, Ids]) -> None:
    """Warn if the names of both columns are also ids: then the file probably has no header."""
    if all(map(_is_id, names, ids)):
        text = f"the first line is left out: {names[0]!r} and {names[1]!r}, taken for names of columns, are ids too"
        warnings.warn(f"{text}; header=False reads it as a pair", LeftOutWarning, stacklevel=3)


def _is_id(name: str, ids: Ids) -> bool:
    if ids.dtype == object:
        return bool((ids == name).any())
    return name.isdecimal() and bool((ids == int(name)).any())


def _warn(what: str, lost: int, total: int, why: str) -> None:
    most = "more than half: " if 2 * lost > total else ""
    warnings.warn(f"{most}{lost:,} of {total:,} {what} are left out ({why})", LeftOutWarning, stacklevel=4)

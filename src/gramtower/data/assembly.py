"""From columns of ids and numbers to the fields of Interactions: what is left out, numbered, merged and counted.

Cost: O(rows) time; a few arrays of that length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.ids import Coded, by_appearance
from gramtower.data.left_out import warn_of_rows
from gramtower.data.merging import RULES, merge

_LOST = ("rows_without_id", "rows_without_number", "rows_below_threshold")


@dataclass(frozen=True)
class Rule:
    """Which rows make a pair, what its label is, and how rows of one pair are merged; see Interactions."""

    threshold: float | None
    labels: bool
    duplicates: str

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check.number("threshold", self.threshold)
        if not isinstance(self.labels, (bool, np.bool_)):
            check.fail("labels", repr(self.labels), "True or False")
        if self.labels and self.threshold is not None:
            check.fail("labels", "True with a threshold", "one of them: pairs over a threshold are labelled 1")
        check.choice("duplicates", self.duplicates, RULES)

    @classmethod
    def of(cls, threshold: float | None, labels: bool, duplicates: str, value: object) -> Rule:
        """A rule for rows with these values, or None; refused if it reads values and there are none."""
        rule = cls(threshold, labels, duplicates)
        rule.need_value(value)
        return rule

    @property
    def reads_value(self) -> bool:
        """Whether the value column matters."""
        return self.labels or self.threshold is not None

    def need_value(self, given: object) -> None:
        """Refuse a rule that reads values when there are none."""
        if self.reads_value and given is None:
            check.fail("value", None, "the values that threshold or labels=True speak of")


@dataclass(frozen=True)
class Fields:
    """What assemble makes; the fields of Interactions."""

    matrix: sp.csr_matrix
    left_ids: NDArray[Any]
    right_ids: NDArray[Any]
    times: NDArray[np.float64] | None
    weights: NDArray[np.float32] | None
    report: dict[str, int]


def assemble(left: Coded, right: Coded, numbers: dict[str, NDArray[Any]], rule: Rule) -> Fields:
    """Leave out rows, number ids by first appearance, merge.

    Args:
        left: ids of the left side.
        right: ids of the right side, as many rows.
        numbers: "value", "weight" and "time" where given: one float for each row, NaN where missing.
        rule: see the class.
    """
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
    """Refuse rows of which none is kept, and warn where many are left out.

    Args:
        report: rows, and how many of them are left out for each reason.
    """
    if report["rows"] == sum(report[name] for name in _LOST):
        counts = ", ".join(f"{name} {count}" for name, count in report.items())
        check.fail("rows", f"none to keep ({counts})", "at least one observed pair")
    warn_of_rows(report)


def _identified(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Rows with both ids; None for all."""
    if all(codes.dtype.kind == "u" or codes.min(initial=0) >= 0 for codes in (left, right)):
        return None
    return (left.astype(np.int64) >= 0) & (right.astype(np.int64) >= 0)


def _narrow(
    kept: NDArray[np.bool_] | None, total: int, masks: list[NDArray[np.bool_]]
) -> tuple[NDArray[np.bool_] | None, int]:
    """Rows that are in all masks too, and how many were lost by that; None stays None while nothing is lost."""
    both = kept
    for mask in masks:
        if both is not None or not mask.all():
            both = mask if both is None else both & mask
    before = total if kept is None else int(kept.sum())
    return both, before - (total if both is None else int(both.sum()))


def _numbered(side: Coded, kept: NDArray[np.bool_] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    if kept is None:
        codes, places = by_appearance(side.codes)
    else:
        codes, places = by_appearance(side.codes[kept])
        places = np.flatnonzero(kept)[places]
    return codes, side.names(places)


def given_ids(name: str, given: Any) -> Any:
    """Ids as they were given, tensors as arrays; matrices are none."""
    if sp.issparse(given):
        check.fail(name, "a sparse matrix", "a sequence of ids; from_matrix takes a matrix")
    return check.as_array(name, given, "a sequence of ids") if isinstance(given, torch.Tensor) else given

"""The text format of extreme classification: labels and sparse features of a document on each line.

Reads the whole file: O(size) time and memory.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.readers.lists import lines
from gramtower.data.sources import PathLike, reading

_UNNAMED = 1 << 22  # labels that a header may speak of besides one for each character of the file
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Extreme:
    """A multi-label data set.

    Attributes:
        pairs: points × labels; ids are row numbers, and points without labels have an empty row.
        features: points × features, float32, in the same order of points.
    """

    pairs: Interactions
    features: sp.csr_matrix


def extreme_classification(path: PathLike) -> Extreme:
    """The text format of the extreme classification repository.

    The first line is ``points features labels``; each other line is ``l1,l2,… f:v f:v …``, beginning with a space when
    the point has no label. Values that float32 cannot hold, NaN among them, are refused.
    """
    with reading(path):
        numbered = lines(path, "utf8", keep_blank=True)
        numbers = next(numbered)[1].split()
        if len(numbers) != 3 or not all(x.isascii() and x.isdecimal() and len(x) <= 10 for x in numbers):
            check.fail("path", f"{path}, whose first line is not three numbers", "a line 'points features labels'")
        points, features, labels = map(int, numbers)
        label_columns, columns, values = array("q"), array("q"), array("d")
        label_counts: list[int] = []
        counts: list[int] = []
        size = 0
        for number, line in numbered:
            try:
                point_labels, places, cells = _point(line)
                label_columns.extend(point_labels)
                columns.extend(places)
                values.extend(cells)
            except (ValueError, OverflowError):
                check.fail("path", f"line {number} of {path}: {line[:60]!r}", "a line 'l1,l2,… f:v f:v …'")
            label_counts.append(len(point_labels))
            counts.append(len(places))
            size += len(line)
        if len(counts) != points:
            check.fail("path", f"{len(counts)} points in {path}", f"{points}, as its first line says")
        if labels > _UNNAMED + size:  # each takes memory, named in the file or not
            check.fail("path", f"{labels:,} labels in a file of {size:,} characters", f"at most {_UNNAMED + size:,}")
        matrix = _sparse("labels", np.ones(len(label_columns)), label_columns, label_counts, labels)
        pairs = Interactions.from_matrix(matrix, left_name="point", right_name="label")
        return Extreme(pairs, _sparse("features", np.asarray(values), columns, counts, features))


def _point(line: str) -> tuple[list[int], list[int], list[float]]:
    """Labels, places and values of features of a line."""
    head, _, rest = line.partition(" ")
    cells = [cell.split(":") for cell in rest.split()]
    values = [float(value) for _, value in cells]
    if "_" in line or not all(-_LARGEST <= value <= _LARGEST for value in values):  # int takes 1_0 for 10
        raise ValueError
    return [int(x) for x in head.split(",")] if head else [], [int(place) for place, _ in cells], values


def _sparse(name: str, values: Any, columns: Any, counts: list[int], width: int) -> sp.csr_matrix:
    places = np.asarray(columns)
    if len(places) and not 0 <= places.min() <= places.max() < width:
        check.fail("path", f"{name} numbered {places.min()} to {places.max()}", f"numbers from 0 to {width - 1}")
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    matrix = sp.csr_matrix((values.astype(np.float32), places, offsets), shape=(len(counts), width))
    matrix.sum_duplicates()
    if name == "labels":
        matrix.data[:] = 1  # a label named twice
    check.finite(name, matrix.data)  # a feature named twice is added
    return matrix

"""Sparse matrices: checks of those given by the user, set operations, and assembly from rows of pairs.

scipy checks little, and its own conversions read beyond their arrays when offsets decrease or columns are out of range.
So every function that takes a matrix calls :func:`checked` or :func:`canonical` first, and stored patterns are checked
by :func:`pattern`. Cost: O(entries), by numpy on all cores.

:func:`assemble` drops rows of pairs, numbers ids and merges duplicates. :func:`ordered_merge` sorts 64-bit keys, which
puts the rows in order of (left, right) and, if there are numbers to carry along, of their position in the file; then
rows of the same pair are merged by a rule. Many rows are passed to data/grouping.py, which does the same on all cores.
Cost: O(rows log rows) time; a few arrays of that length.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.checks import LeftOutWarning
from gramtower._util.host import parallel_for
from gramtower.data.ids import Coded, Ids, by_appearance, index_of, join

SparseMatrix: TypeAlias = sp.spmatrix | sp.sparray
Codes: TypeAlias = NDArray[np.integer]
Places: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.floating] | None
Merged: TypeAlias = tuple[sp.csr_matrix, NDArray[np.float32] | None, NDArray[np.float64] | None, int]
Number = TypeVar("Number", bound=np.number)
RULES = ("max", "sum", "first", "last", "error")
_CHUNK = 1 << 20  # entries that one thread looks at before the next
_EXPECTED = 20  # pairs of an id with itself in data of two different sets; then a tenth or less has odds of 10⁻⁶
_ROWS = 1 << 16  # left rows that are looked at together
_ENTRIES = 1 << 22  # pairs that are counted together
_MANY, _PIECE = 1 << 22, 1 << 20  # rows from which on all cores are used, and of a piece that one of them takes
_REASONS = {"rows_without_id": "without an id", "rows_without_number": "without a value, weight or time"}
_SHARE = 0.01  # of the rows; more are worth a warning


def checked(name: str, value: SparseMatrix, shape: tuple[int, int] | None = None) -> SparseMatrix:
    """Check that all indices of a scipy.sparse matrix or array are valid and values finite; drops unused entries."""
    if not sp.issparse(value):
        check.fail(name, type(value).__name__, "a scipy.sparse matrix or array")
    if len(value.shape) != 2:
        check.fail(name, f"shape {value.shape}", "two dimensions")
    if shape is not None and value.shape != shape:
        check.fail(name, f"shape {value.shape}", f"shape {shape}")
    if max(value.shape) >= 2**31:
        check.fail(name, f"shape {value.shape}", "fewer than 2**31 rows and columns")
    if value.format in ("csr", "csc", "bsr"):
        return _compressed(name, value)
    value = value if value.format == "coo" else _as_coordinates(name, value)
    rows, columns, data = (_array(name, value, part) for part in ("row", "col", "data"))
    if not len(rows) == len(columns) == len(data):
        check.fail(name, f"{len(rows)} rows, {len(columns)} columns and {len(data)} values", "as many of each")
    _indices(name, rows, value.shape[0], "rows")
    _indices(name, columns, value.shape[1], "columns")
    _values(name, data)
    return value


def canonical(name: str, value: SparseMatrix, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """Convert to CSR with increasing columns in each row; duplicates are added. Shares memory if possible."""
    matrix = sp.csr_matrix(checked(name, value, shape))
    if not rows_increase(matrix.indptr, matrix.indices):
        matrix = matrix.copy()
        matrix.has_sorted_indices = matrix.has_canonical_format = False  # whatever the caller's matrix said of itself
        matrix.sum_duplicates()
    return matrix


def pattern(name: str, columns: NDArray[np.integer], offsets: NDArray[np.integer], shape: tuple[int, int]) -> None:
    """Refuse a stored CSR pattern that does not fit its shape, or whose columns do not increase within each row."""
    _offsets(name, offsets, shape[0], len(columns))
    if int(offsets[-1]) != len(columns):
        check.fail(name, f"offsets that end at {int(offsets[-1])}", f"{len(columns)}, the number of columns stored")
    _indices(name, columns, shape[1], "columns")
    if not rows_increase(offsets, columns):
        check.fail(name, "columns out of order or twice in a row", "columns that increase within each row")


def entry_mask(name: str, given: ArrayLike, total: int) -> NDArray[np.bool_]:
    """A mask over the stored entries of a matrix, from a mask or from distinct positions."""
    chosen = check.as_array(name, given, "a mask, or places of entries")
    if chosen.dtype == bool and chosen.shape != (total,):
        check.fail(name, f"a mask of shape {chosen.shape}", f"shape ({total},), one for each pair")
    if chosen.dtype != bool:
        places = chosen.astype(np.int64) if chosen.size == 0 else chosen
        if places.dtype.kind not in "iu" or places.ndim != 1:
            check.fail(name, f"{places.dtype} of shape {places.shape}", "a mask, or places of entries")
        if places.size and not 0 <= places.min() <= places.max() < total:
            check.fail(name, f"places {places.min()} to {places.max()}", f"places from 0 to {total - 1}")
        chosen = np.zeros(total, dtype=bool)
        chosen[places] = True
        if int(chosen.sum()) != len(places):
            check.fail(name, f"{len(places)} places, some of them twice", "each place once")
    return chosen


def union(first: sp.csr_matrix, *others: sp.csr_matrix) -> sp.csr_matrix:
    """A matrix of ones at the stored entries of any of some matrices of one shape."""
    found = _with_ones(first, np.float32)
    for other in others:
        if other.nnz:
            found = found.maximum(_with_ones(other, np.float32))
    return sp.csr_matrix(found)


def without(pairs: sp.csr_matrix, others: sp.csr_matrix) -> sp.csr_matrix:
    """The entries of a matrix of positive values that another matrix of its shape does not store."""
    return (pairs > pairs.multiply(_with_ones(others, bool))).tocsr()


def resized(matrix: sp.csr_matrix, shape: tuple[int, int]) -> sp.csr_matrix:
    """Append empty rows and columns to a matrix."""
    if matrix.shape == shape:
        return matrix
    offsets = np.concatenate([matrix.indptr, np.full(shape[0] - matrix.shape[0], matrix.indptr[-1])])
    return sp.csr_matrix((matrix.data, matrix.indices, offsets.astype(matrix.indptr.dtype)), shape=shape)


def _with_ones(matrix: sp.csr_matrix, dtype: type) -> sp.csr_matrix:
    return sp.csr_matrix((np.ones(matrix.nnz, dtype), matrix.indices, matrix.indptr), shape=matrix.shape)


def ones_at(rows: ArrayLike, columns: ArrayLike, shape: tuple[int, int]) -> sp.csr_matrix:
    """A float32 matrix with 1 at each position, also at repeated ones."""
    places = np.asarray(rows), np.asarray(columns)
    matrix = sp.csr_matrix((np.ones(len(places[0]), dtype=np.float32), places), shape=shape)
    matrix.sum_duplicates()  # which scipy 1.13.0 leaves
    matrix.data[:] = 1
    return matrix


def selection(rows: NDArray[np.int64], size: int) -> sp.csr_matrix:
    """A matrix whose product with ``size`` rows picks ``rows`` of them; −1 gives an empty row."""
    there = np.flatnonzero(rows >= 0)
    return ones_at(there, rows[there], (len(rows), size))


def only_rows(matrix: sp.csr_matrix, rows: NDArray[np.bool_]) -> sp.csr_matrix:
    """A matrix without the entries of other rows."""
    return selected(matrix, np.repeat(rows, np.diff(matrix.indptr)))


def extremes(array: NDArray[Number]) -> tuple[Number, Number]:
    """The smallest and largest number of a non-empty array (NaN if it contains one), by all threads."""
    cuts = [*range(0, len(array), _CHUNK), len(array)]
    lows, highs = np.empty(len(cuts) - 1, array.dtype), np.empty(len(cuts) - 1, array.dtype)

    def work(first: int, last: int) -> None:
        part = array[first:last]
        lows[first // _CHUNK], highs[first // _CHUNK] = part.min(), part.max()

    parallel_for(work, cuts)
    return lows.min(), highs.max()


def rows_increase(offsets: NDArray[np.integer], columns: NDArray[np.integer]) -> bool:
    """Whether columns strictly increase within every row: sorted and free of duplicates."""

    def rise(first: int, last: int) -> bool:
        rising = columns[first + 1 : last + 1] > columns[first:last]
        ends = np.array([first, last], offsets.dtype)  # of another type, the search would convert all offsets
        starts = offsets[slice(*np.searchsorted(offsets, ends, "right"))]
        rising[starts - first - 1] = True  # a new row may start lower
        return bool(rising.all())

    return everywhere(rise, len(columns) - 1)


def everywhere(test: Callable[[int, int], bool], total: int) -> bool:
    """Whether a test holds for all chunks of positions below ``total``; threads test them in parallel."""
    failed: list[int] = []

    def work(first: int, last: int) -> None:
        if not failed and not test(first, last):
            failed.append(first)

    parallel_for(work, [*range(0, max(0, total), _CHUNK), max(0, total)])
    return not failed


def _compressed(name: str, value: SparseMatrix) -> SparseMatrix:
    blocks = value.blocksize if value.format == "bsr" else (1, 1)
    sizes = [size // block for size, block in zip(value.shape, blocks, strict=True)]
    rows, columns = reversed(sizes) if value.format == "csc" else sizes
    offsets, indices, data = (_array(name, value, part) for part in ("indptr", "indices", "data"))
    _offsets(name, offsets, rows, min(len(indices), len(data)))
    stored = int(offsets[-1])
    _indices(name, indices[:stored], columns, "rows" if value.format == "csc" else "columns")
    _values(name, data[:stored])
    if stored == len(indices) == len(data):
        return value
    return type(value)((data[:stored], indices[:stored], offsets), shape=value.shape)


def _as_coordinates(name: str, value: SparseMatrix) -> SparseMatrix:
    if value.format == "lil" and [len(row) for row in value.rows] != [len(row) for row in value.data]:
        check.fail(name, "lists of columns and of values that differ in length", "a value for each column")
    if value.format == "dia" and (value.data.ndim != 2 or np.shape(value.offsets) != value.data.shape[:1]):
        given = f"{np.size(value.offsets)} diagonals with values of shape {value.data.shape}"
        check.fail(name, given, "a row of values for each diagonal")
    try:
        return value.tocoo()
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        check.fail(name, f"a damaged {type(value).__name__} ({error})", "columns and values that fit its shape")


def _array(name: str, value: SparseMatrix, part: str) -> NDArray[Any]:
    array = np.asarray(getattr(value, part))
    if part != "data" and (array.ndim != 1 or array.dtype.kind not in "iu"):
        check.fail(name, f"{part} of shape {array.shape} and {array.dtype}", "integers in one dimension")
    if array.ndim != (3 if part == "data" and value.format == "bsr" else 1):
        check.fail(name, f"{part} of shape {array.shape}", "a value for each index")
    return array


def _offsets(name: str, offsets: NDArray[np.integer], rows: int, stored: int) -> None:
    if len(offsets) != rows + 1 or offsets[0] != 0:
        first = f", the first {int(offsets[0])}" if len(offsets) else ""
        check.fail(name, f"{len(offsets)} offsets{first}", f"{rows + 1}, the first 0")
    if (falling := offsets[1:] < offsets[:-1]).any():
        at = int(np.argmax(falling))
        check.fail(name, f"offsets that fall from {offsets[at]} to {offsets[at + 1]} at row {at}", "offsets that rise")
    if int(offsets[-1]) > stored:
        check.fail(name, f"offsets up to {offsets[-1]} with {stored} entries", "offsets that end at the last entry")


def _indices(name: str, indices: NDArray[np.integer], size: int, kind: str) -> None:
    if not everywhere(lambda a, b: indices[a:b].min() >= 0 and indices[a:b].max() < size, len(indices)):
        at = int(np.argmax((indices < 0) | (indices >= size)))
        check.fail(name, f"{kind} such as {indices[at]} (entry {at})", f"{kind} from 0 to {size - 1}")


def _values(name: str, data: NDArray[np.number]) -> None:
    if data.dtype.kind not in "biuf":
        check.fail(name, f"dtype {data.dtype}", "an array of real numbers")
    flat = data.reshape(-1)
    if data.dtype.kind == "f" and not everywhere(lambda a, b: bool(np.isfinite(flat[a:b]).all()), len(flat)):
        check.finite(name, flat)  # says where


def selected(matrix: sp.csr_matrix, chosen: NDArray[np.bool_]) -> sp.csr_matrix:
    """Return the matrix with only some of its entries."""
    offsets = np.concatenate([[0], np.cumsum(chosen)])[matrix.indptr].astype(matrix.indptr.dtype)
    return sp.csr_matrix((matrix.data[chosen], matrix.indices[chosen], offsets), shape=matrix.shape)


def ranks(matrix: sp.csr_matrix, *keys: NDArray[np.floating]) -> NDArray[np.int64]:
    """Place of each entry among those of its row, ordered by the last key and then by those before it."""
    counts = np.diff(matrix.indptr)
    order = np.lexsort((*keys, np.repeat(np.arange(len(counts)), counts)))
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.arange(len(order)) - np.repeat(matrix.indptr[:-1], counts)
    return found


def are_one_set(
    matrix: sp.csr_matrix,
    left_ids: Ids,
    right_ids: Ids,
    total: Callable[[NDArray[np.float64]], NDArray[np.float64]] = lambda numbers: numbers,
) -> bool:
    """Whether both sides are one set of entities, such as packages that depend on packages.

    They are if at least half of the ids of the smaller side are on the other side, and pairs of an id with itself are
    rare: less than a tenth of the number expected for unrelated sides, such as users and films that are both numbered
    from 1. If fewer than twenty are expected, the answer is no. Cost: O(ids + pairs).

    If several processes have some left rows each, ``total`` adds numbers over them.
    """
    rows = _left_rows(left_ids, right_ids)
    columns = np.flatnonzero(rows >= 0)
    common, count, pairs = total(np.array([len(columns), len(left_ids), matrix.nnz], np.float64))
    if 2 * common < max(1, min(count, len(right_ids))):
        return False
    left, right = np.diff(matrix.indptr), np.zeros(matrix.shape[1])
    for first in range(0, matrix.nnz, _ENTRIES):  # numpy makes 8 bytes of each
        right += np.bincount(matrix.indices[first : first + _ENTRIES], minlength=len(right))
    right = total(right)
    chances = left[rows[columns]].astype(np.float64) * right[columns] / max(1, pairs)
    expected = float(total(np.minimum(chances, 1.0).sum(keepdims=True))[0])
    if expected < _EXPECTED:
        return False
    found = 0  # pairs of an entity with itself
    for first in range(0, len(left), _ROWS):
        offsets = matrix.indptr[first : first + _ROWS + 1]
        own = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
        found += int((rows[matrix.indices[offsets[0] : offsets[-1]]] == own).sum())
    return bool(total(np.array([found], np.float64))[0] <= 0.1 * expected)


def _left_rows(left_ids: Ids, right_ids: Ids) -> NDArray[np.int64]:
    """The left row of each right id, −1 if it is not on the left."""
    if len(left_ids) <= len(right_ids) and object in (left_ids.dtype, right_ids.dtype):
        return join(right_ids, index_of(left_ids))
    rows: NDArray[np.int64] = np.full(len(right_ids), -1, dtype=np.int64)
    if object in (left_ids.dtype, right_ids.dtype):
        places = join(left_ids, index_of(right_ids))
        there = np.flatnonzero(places >= 0)
        rows[places[there]] = there
        return rows
    order = np.argsort(right_ids)
    known = right_ids[order]
    for first in range(0, len(left_ids) if len(known) else 0, _ROWS):
        part = left_ids[first : first + _ROWS]
        at = np.minimum(np.searchsorted(known, part), len(known) - 1)
        there = np.flatnonzero(known[at] == part)
        rows[order[at[there]]] = first + there
    return rows


@dataclass(frozen=True)
class Rule:
    """The rule for which rows make a pair, for its label, and for merging rows of one pair; see Interactions."""

    threshold: float | None
    labels: bool
    duplicates: str
    value: InitVar[object] = True  # the column of values, or None

    def __post_init__(self, value: object) -> None:
        if self.threshold is not None:
            check.number("threshold", self.threshold)
        if not isinstance(self.labels, (bool, np.bool_)):
            check.fail("labels", repr(self.labels), "True or False")
        if self.labels and self.threshold is not None:
            check.fail("labels", "True with a threshold", "only one of them: pairs over a threshold are labelled 1")
        check.choice("duplicates", self.duplicates, RULES)
        if self.reads_value and value is None:
            check.fail("value", None, "a value column, which threshold and labels=True need")

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
    reasons: dict[str, Iterable[NDArray[np.bool_]]] = {
        "rows_without_id": (side.codes >= 0 for side in (left, right) if side.codes.dtype.kind != "u"),
        "rows_without_number": (~np.isnan(array) for array in numbers.values()),
        "rows_below_threshold": (numbers["value"] >= low for low in (rule.threshold,) if low is not None),
    }
    report = {"rows": total}
    kept: NDArray[np.bool_] | None = None  # all rows
    for reason, masks in reasons.items():
        before = total if kept is None else int(kept.sum())
        for mask in masks:
            if not mask.all():
                kept = mask if kept is None else kept & mask
        report[reason] = before - (total if kept is None else int(kept.sum()))
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
    """Refuse data without a kept row, and warn if more than 1% of the rows were dropped because of a missing cell."""
    if report["rows"] == sum(report[name] for name in (*_REASONS, "rows_below_threshold")):
        counts = ", ".join(f"{name} {count}" for name, count in report.items())
        check.fail("rows", f"none to keep ({counts})", "at least one observed pair")
    if (lost := rows_left_out(report)) > _SHARE * report["rows"]:
        why = ", ".join(f"{report[name]:,} {reason}" for name, reason in _REASONS.items() if report[name])
        _warn("rows", lost, report["rows"], why)


def _numbered(side: Coded, kept: NDArray[np.bool_] | None) -> tuple[NDArray[np.integer], Ids]:
    codes, places = by_appearance(side.codes if kept is None else side.codes[kept])
    return codes, side.names(places if kept is None else np.flatnonzero(kept)[places])


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
    merged: list[NDArray[Any] | None] = list(numbers)
    if order is not None and repeated and rule not in ("first", "last"):
        starts, add = np.flatnonzero(fresh), np.maximum if rule == "max" else np.add
        for place, reduction in enumerate((add, add, np.maximum)):  # of several times the latest
            if (array := numbers[place]) is not None:
                merged[place] = reduction.reduceat(array[order], starts)
    elif order is not None:
        chosen = _chosen(order, fresh, times, rule) if repeated else order
        merged = [None if array is None else array[chosen] for array in numbers]
    if repeated:
        keys = keys[fresh]
    values, kept, stamps = merged
    values = np.ones(len(keys), np.float32) if values is None else values.astype(np.float32)
    index = np.int32 if max(len(keys), *shape) < 2**31 - 1 else np.int64
    offsets = np.searchsorted(keys, np.arange(shape[0] + 1) << bits).astype(index)
    found = np.empty(len(keys), dtype=index)
    np.bitwise_and(keys, (1 << bits) - 1, out=found, casting="unsafe")
    kept = None if kept is None else kept.astype(np.float32)
    stamps = None if stamps is None else stamps.astype(np.float64)
    return sp.csr_matrix((values, found, offsets), shape=shape), kept, stamps, repeated


def _chosen(order: Places, fresh: NDArray[np.bool_], times: Reals, rule: str) -> Places:
    """For each pair, the position of its first or last row, by time (if there are times) and then by position."""
    starts = np.flatnonzero(fresh)
    if times is not None:
        order = order[np.lexsort((times[order], np.cumsum(fresh)))]  # lexsort is stable: equal times keep their places
    at = starts if rule == "first" else np.append(starts[1:], len(order)) - 1
    return np.asarray(order[at])


def rows_left_out(report: Mapping[str, int]) -> int:
    """Number of rows of a report that were dropped because of a missing cell."""
    return sum(report.get(name, 0) for name in _REASONS)


def warn_of_pairs(name: str, lost: int, total: int, example: object, hint: str = "") -> None:
    """Warn if more than 1% of the pairs have an unknown id; ``hint`` says what to do about it."""
    if lost > _SHARE * total:
        why = f"an id is not in the training data{'' if example is None else f', such as {example!r}'}"
        _warn(f"pairs of {name}", lost, total, f"{why}; {hint}" if hint else why)


def warn_of_ids(name: str, unknown: Sequence[object], total: int) -> None:
    """Warn if some ids are unknown and ignored."""
    if unknown:
        some = ", ".join(map(repr, unknown[:3]))
        text = f"{name}: {len(unknown):,} of {total:,} ids are unknown to the model and are ignored, such as {some}"
        warnings.warn(text, LeftOutWarning, stacklevel=4)


def warn_of_header(names: tuple[str, str], ids: tuple[Ids, Ids]) -> None:
    """Warn if the names of both columns are also ids: then the file probably has no header."""
    if all((own == name).any() for name, own in zip(names, ids, strict=True)):  # ids of text files are text
        text = f"the first line is left out: {names[0]!r} and {names[1]!r}, taken for names of columns, are ids too"
        warnings.warn(f"{text}; header=False reads it as a pair", LeftOutWarning, stacklevel=3)


def _warn(what: str, lost: int, total: int, why: str) -> None:
    most = "more than half: " if 2 * lost > total else ""
    warnings.warn(f"{most}{lost:,} of {total:,} {what} are left out ({why})", LeftOutWarning, stacklevel=4)

"""Checks of sparse matrices given by the user, and set operations on them.

scipy checks little, and its own conversions read beyond their arrays when offsets decrease or columns are out of range.
So every function that takes a matrix calls :func:`checked` or :func:`canonical` first, and stored patterns are checked
by :func:`pattern`. Cost: O(entries), by numpy on all cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check
from gramtower._util.host import parallel_for
from gramtower.data.ids import Ids, index_of, join

SparseMatrix: TypeAlias = sp.spmatrix | sp.sparray
Number = TypeVar("Number", bound=np.number)
_CHUNK = 1 << 20  # entries that one thread looks at before the next


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
    return _coordinates(name, value if value.format == "coo" else _as_coordinates(name, value))


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
    found = _ones(first)
    for other in others:
        if other.nnz:
            found = found.maximum(_ones(other))
    return sp.csr_matrix(found)


def without(pairs: sp.csr_matrix, others: sp.csr_matrix) -> sp.csr_matrix:
    """The entries of a matrix of positive values that another matrix of its shape does not store."""
    stored = sp.csr_matrix((np.ones(others.nnz, dtype=bool), others.indices, others.indptr), shape=others.shape)
    return (pairs > pairs.multiply(stored)).tocsr()


def resized(matrix: sp.csr_matrix, shape: tuple[int, int]) -> sp.csr_matrix:
    """Append empty rows and columns to a matrix."""
    if matrix.shape == shape:
        return matrix
    offsets = np.concatenate([matrix.indptr, np.full(shape[0] - matrix.shape[0], matrix.indptr[-1])])
    return sp.csr_matrix((matrix.data, matrix.indices, offsets.astype(matrix.indptr.dtype)), shape=shape)


def _ones(matrix: sp.csr_matrix) -> sp.csr_matrix:
    ones = np.ones(matrix.nnz, dtype=np.float32)
    return sp.csr_matrix((ones, matrix.indices, matrix.indptr), shape=matrix.shape)


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


def _coordinates(name: str, value: SparseMatrix) -> SparseMatrix:
    rows, columns, data = (_array(name, value, part) for part in ("row", "col", "data"))
    if not len(rows) == len(columns) == len(data):
        check.fail(name, f"{len(rows)} rows, {len(columns)} columns and {len(data)} values", "as many of each")
    _indices(name, rows, value.shape[0], "rows")
    _indices(name, columns, value.shape[1], "columns")
    _values(name, data)
    return value


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


_EXPECTED = 20  # pairs of an id with itself in data of two different sets; then a tenth or less has odds of 10⁻⁶
_ROWS = 1 << 16  # left rows that are looked at together


def are_one_set(matrix: sp.csr_matrix, left_ids: Ids, right_ids: Ids) -> bool:
    """Whether both sides are one set of entities, such as packages that depend on packages.

    They are if at least half of the ids of the smaller side are on the other side, and pairs of an id with itself are
    rare: less than a tenth of the number expected for unrelated sides, such as users and films that are both numbered
    from 1. If fewer than twenty are expected, the answer is no. Cost: O(ids + pairs).
    """
    rows = _same(left_ids, right_ids)
    columns = np.flatnonzero(rows >= 0)
    if 2 * len(columns) < max(1, min(matrix.shape)):
        return False
    left, right = np.diff(matrix.indptr), np.bincount(matrix.indices, minlength=matrix.shape[1])
    chances = left[rows[columns]].astype(np.float64) * right[columns] / max(1, matrix.nnz)
    expected = float(np.minimum(chances, 1.0).sum())
    if expected < _EXPECTED:
        return False
    found = sum(_with_itself(matrix, rows, start, start + _ROWS) for start in range(0, len(left), _ROWS))
    return found <= 0.1 * expected


def _same(left_ids: Ids, right_ids: Ids) -> NDArray[np.int64]:
    """The left row of each right id, −1 if it is not on the left."""
    if len(left_ids) <= len(right_ids):
        return join(right_ids, index_of(left_ids))
    columns = join(left_ids, index_of(right_ids))
    there = np.flatnonzero(columns >= 0)
    rows = np.full(len(right_ids), -1, dtype=np.int64)
    rows[columns[there]] = there
    return rows


def _with_itself(matrix: sp.csr_matrix, same: NDArray[np.int64], first: int, last: int) -> int:
    """Count the pairs of an entity with itself in some rows; ``same`` is the row of each column's entity."""
    offsets, columns = matrix.indptr[first : last + 1], matrix.indices
    rows = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
    return int((same[columns[offsets[0] : offsets[-1]]] == rows).sum())

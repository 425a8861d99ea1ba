"""Group rows of (left, right, numbers) into one CSR matrix without duplicates, on all cores and nearly in place.

1. Ranges of left rows are *buckets*. A pass over the pieces counts the rows of each; a second one moves the rows of a
   piece to their buckets, in their order, and frees the piece.
2. Each bucket is put in order of (left, right) by a counting sort by left and a sort of every left row's few entries,
   and rows of the same pair are merged. The result is written over the bucket.

So in addition to the arrays of the result there are a few pieces and a bucket for each thread: memory of a bucket is
allocated as rows are moved there, while that of pieces is freed (host.own_pages). The result equals that of
matrices.ordered_merge and does not depend on the number of threads. Cost: O(rows log(entries of a row)).

:func:`by_column` sorts the entries of a CSR pattern by column in the same two steps, which are stable: the entries of a
column are in the order of rows, for any number of threads. Cost: O(|O|) time; 4 bytes for each entry besides results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.compiled import compiled
from gramtower._util.host import parallel_for

Kind = TypeVar("Kind", bound=np.generic)
Numbers = dict[str, NDArray[Any]]  # float32 or float64 by name
_BUCKETS = 256  # more of them write to more pages at a time than the processor keeps addresses of
_NUMBERS = ("value", "weight", "time")
_RULES = {"max": 0, "error": 0, "sum": 1, "first": 2, "last": 3}


@dataclass
class Piece:
    """Some rows of the input, one after the other."""

    left: NDArray[np.int32]  # left row numbers, or marks of them; int32
    right: NDArray[np.int32]  # the same of columns
    numbers: Numbers  # "value", "weight" and "time" where there are any, as many


def group(
    pieces: list[Piece],
    shape: tuple[int, int],
    rule: str,
    renumber: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None,
) -> tuple[sp.csr_matrix, NDArray[np.float32] | None, NDArray[np.float64] | None, int]:
    """The matrix of values (1 where there are none), its weights and times, and how many rows were merged away.

    The list of pieces is emptied; ``renumber`` has row and column numbers by mark, if pieces hold marks.
    """
    total = sum(len(piece.left) for piece in pieces)
    shift = max(0, (shape[0] - 1).bit_length() - (_BUCKETS - 1).bit_length())
    left, right, numbers, bounds = _to_buckets(pieces, shape[0], shift, rule, renumber)
    counts, sizes = _in_order(left, right, numbers, bounds, shape[0], shift, rule)
    del left
    right = _compact(right, bounds, sizes)
    found = {name: _compact(numbers.pop(name), bounds, sizes) for name in list(numbers)}
    values = found.pop("value", None)
    # torch writes ones with all threads
    data = torch.ones(len(right)).numpy() if values is None else values.astype(np.float32, copy=False)
    index = np.int32 if max(len(right), *shape) < 2**31 - 1 else np.int64
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(index)
    matrix = sp.csr_matrix((data, right.astype(index, copy=False), offsets), shape=shape)
    weights = found["weight"].astype(np.float32, copy=False) if "weight" in found else None
    return matrix, weights, found.get("time"), total - len(right)


def _to_buckets(
    pieces: list[Piece], rows: int, shift: int, rule: str, renumber: tuple[NDArray[np.int32], NDArray[np.int32]] | None
) -> tuple[NDArray[np.int32], NDArray[np.int32], Numbers, NDArray[np.int64]]:
    """Left rows, columns and numbers of all pieces, bucket after bucket, and where each bucket begins."""
    left_rows, columns = renumber or (np.empty(0, np.int32), np.empty(0, np.int32))
    starts = _starts([piece.left for piece in pieces], shift, ((rows - 1) >> shift) + 1, left_rows)
    total = sum(len(piece.left) for piece in pieces)
    left, right = host.own_pages(total, np.int32), host.own_pages(total, np.int32)
    names = list(pieces[0].numbers) if pieces else []
    numbers = {name: host.own_pages(total, np.float64 if name == "time" else _dtype(rule)) for name in names}

    def work(number: int, _: int) -> None:
        piece = pieces[number]
        targets = np.empty(len(piece.left) if names else 0, np.int64)
        _move(piece.left, piece.right, left_rows, columns, shift, starts[number], left, right, targets)
        for name in names:
            _scatter(piece.numbers[name], targets, numbers[name])
        pieces[number] = Piece(left[:0], right[:0], {})

    parallel_for(work, list(range(len(pieces) + 1)))
    pieces.clear()
    return left, right, numbers, np.append(starts[0], total)


def _in_order(
    left: NDArray[np.int32],
    right: NDArray[np.int32],
    numbers: Numbers,
    bounds: NDArray[np.int64],
    rows: int,
    shift: int,
    rule: str,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Put each bucket in order and merge, at its beginning; the entries of each row, and of each bucket, then."""
    buckets = len(bounds) - 1
    counts, sizes = np.zeros(rows, np.int64), np.zeros(buckets, np.int64)
    repeats: NDArray[np.int64] = np.full((buckets, 2), -1, np.int64)  # the first pair of a bucket that occurs twice
    arrays = [numbers.get(name, np.empty(0, np.float64 if name == "time" else _dtype(rule))) for name in _NUMBERS]

    def work(b: int, _: int) -> None:
        span = bounds[b], bounds[b + 1], b << shift, min(rows, (b + 1) << shift), left, right, counts
        if numbers:
            sizes[b] = _merge_rows(*span, *arrays, _RULES[rule], repeats[b])
        else:
            sizes[b] = _sort_rows(*span, repeats[b])

    parallel_for(work, list(range(buckets + 1)))
    if rule == "error" and (merged := len(left) - int(sizes.sum())):
        pair = tuple(repeats[int(np.argmax(repeats[:, 0] >= 0))].tolist())
        check.fail("duplicates", f"{merged} rows that repeat a pair, first {pair}", "none")
    return counts, sizes


def _dtype(rule: str) -> np.dtype[np.floating]:
    """Of values and weights on the way: sums are rounded once, at the end; what is chosen may be rounded before."""
    return np.dtype(np.float64 if rule == "sum" else np.float32)


def _starts(
    pieces: Sequence[NDArray[np.int32]], shift: int, buckets: int, renumber: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Where the rows of each piece begin in each bucket, pieces × buckets; bucket after bucket, piece after piece."""
    counts: NDArray[np.int64] = np.zeros((max(1, len(pieces)), buckets), np.int64)

    def work(number: int, _: int) -> None:
        _histogram(pieces[number], renumber, shift, counts[number])

    parallel_for(work, list(range(len(pieces) + 1)))
    flat = counts.T.reshape(-1)  # in order of (bucket, piece)
    return np.ascontiguousarray((np.cumsum(flat) - flat).reshape(buckets, len(counts)).T)


def _compact(array: NDArray[Kind], bounds: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[Kind]:
    """The first ``sizes`` of each bucket, one after the other, in place."""
    total = int(sizes.sum())
    if total == len(array):
        return array
    at = 0
    for start, size in zip(bounds.tolist(), sizes.tolist(), strict=False):
        if at < start:
            array[at : at + size] = array[start : start + size]
        at += size
    return array[:total] if 8 * total > 7 * len(array) else array[:total].copy()


@compiled(nogil=True)
def _histogram(left, renumber, shift, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    marks = len(renumber) > 0
    for e in range(len(left)):
        counts[(renumber[left[e]] if marks else left[e]) >> shift] += 1


@compiled(nogil=True)
def _move(left, right, left_rows, columns, shift, starts, new_left, new_right, targets):  # type: ignore[no-untyped-def]  # pragma: no cover
    marks, keep, at = len(left_rows) > 0, len(targets) > 0, starts.copy()
    for e in range(len(left)):
        row, column = left[e], right[e]
        if marks:
            row, column = left_rows[row], columns[column]
        to = at[row >> shift]
        at[row >> shift] = to + 1
        new_left[to], new_right[to] = row, column
        if keep:
            targets[e] = to


@compiled(nogil=True)
def _scatter(values, targets, out):  # type: ignore[no-untyped-def]  # pragma: no cover
    for e in range(len(values)):
        out[targets[e]] = values[e]


@compiled(nogil=True)
def _starts_of(start, stop, first, last, left):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Where the entries of rows first … last begin, counted from the bucket's first one."""
    starts = np.zeros(last - first + 1, np.int64)
    for e in range(start, stop):
        starts[left[e] - first + 1] += 1
    for r in range(last - first):
        starts[r + 1] += starts[r]
    return starts


@compiled(nogil=True)
def _sort_rows(start, stop, first, last, left, right, counts, repeat):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Entries start … stop, of rows first … last: columns in order, each once; returns how many there are."""
    starts = _starts_of(start, stop, first, last, left)
    at, found = starts.copy(), np.empty(stop - start, np.int32)
    for e in range(start, stop):
        r = left[e] - first
        found[at[r]] = right[e]
        at[r] += 1
    out = start
    for r in range(last - first):
        row = found[starts[r] : starts[r + 1]]
        row.sort()
        begin = out
        for k in range(len(row)):
            if k == 0 or row[k] != row[k - 1]:
                right[out] = row[k]
                out += 1
            elif repeat[0] < 0:
                repeat[0], repeat[1] = first + r, row[k]
        counts[first + r] = out - begin
    return out - start


@compiled(nogil=True)
def _merge_rows(start, stop, first, last, left, right, counts, values, weights, times, rule, repeat):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The same with numbers, which are merged by a rule; arrays of no length are none."""
    starts = _starts_of(start, stop, first, last, left)
    at, keys = starts.copy(), np.empty(stop - start, np.int64)
    for e in range(start, stop):
        r = left[e] - first
        keys[at[r]] = (np.int64(right[e]) << 32) | (e - start)
        at[r] += 1
    has_values, has_weights, has_times = len(values) > 0, len(weights) > 0, len(times) > 0
    v = values[start:stop].copy() if has_values else values
    w = weights[start:stop].copy() if has_weights else weights
    t = times[start:stop].copy() if has_times else times
    out, low = start, (np.int64(1) << 32) - 1
    for r in range(last - first):
        row = keys[starts[r] : starts[r + 1]]
        row.sort()  # by column, then by place
        begin, k = out, 0
        while k < len(row):
            column, e = row[k] >> 32, row[k] & low
            k += 1
            if k < len(row) and row[k] >> 32 == column and repeat[0] < 0:
                repeat[0], repeat[1] = first + r, column
            chosen = e
            if has_values:
                values[out] = v[e]
            if has_weights:
                weights[out] = w[e]
            if has_times:
                times[out] = t[e]
            while k < len(row) and row[k] >> 32 == column:
                e = row[k] & low
                k += 1
                if rule >= 2:
                    earlier = has_times and t[e] < t[chosen]
                    if earlier if rule == 2 else not earlier:
                        chosen = e
                    continue
                if has_values:
                    values[out] = max(values[out], v[e]) if rule == 0 else values[out] + v[e]
                if has_weights:
                    weights[out] = max(weights[out], w[e]) if rule == 0 else weights[out] + w[e]
                if has_times:
                    times[out] = max(times[out], t[e])
            if rule >= 2:
                if has_values:
                    values[out] = v[chosen]
                if has_weights:
                    weights[out] = w[chosen]
                if has_times:
                    times[out] = t[chosen]
            right[out] = column
            out += 1
        counts[first + r] = out - begin
    return out - start


def by_column(
    offsets: NDArray[np.int64], columns: NDArray[np.int32], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.integer]]:
    """Offsets of the columns, and of each entry in their order the row and the position in row order."""
    total, rows_count = len(columns), len(offsets) - 1
    shift = max(0, (width - 1).bit_length() - (_BUCKETS - 1).bit_length())
    buckets = ((width - 1) >> shift) + 1
    cuts = np.linspace(0, total, min(rows_count, 4 * torch.get_num_threads()) + 1)
    blocks = [0, *np.searchsorted(offsets, cuts[1:-1]).tolist(), rows_count]
    pieces = [columns[offsets[first] : offsets[last]] for first, last in pairwise(blocks)]
    starts = _starts(pieces, shift, buckets, columns[:0])
    bounds = np.append(starts[0], total)
    key, row = np.empty(total, np.int32), np.empty(total, np.int32)
    position: NDArray[np.integer] = np.empty(total, np.int32 if total < 2**31 else np.int64)

    def move(b: int, _: int) -> None:
        _move_entries(blocks[b], blocks[b + 1], offsets, columns, shift, starts[b], key, row, position)

    parallel_for(move, list(range(len(blocks))))
    found: NDArray[np.int64] = np.zeros(width + 1, np.int64)

    def order(b: int, _: int) -> None:
        columns_of = b << shift, min(width, (b + 1) << shift)
        _order(bounds[b], bounds[b + 1], *columns_of, key, row, position, found)

    parallel_for(order, list(range(buckets + 1)))
    return found, row, position


@compiled(nogil=True)
def _move_entries(first, last, offsets, columns, shift, at, key, row, position):  # type: ignore[no-untyped-def]  # pragma: no cover
    for r in range(first, last):
        for e in range(offsets[r], offsets[r + 1]):
            bucket = columns[e] >> shift
            to = at[bucket]
            at[bucket] = to + 1
            key[to], row[to], position[to] = columns[e], r, e


@compiled(nogil=True)
def _order(start, stop, first, last, key, row, position, offsets):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Entries start … stop, of columns first … last, by column; where each column ends goes to offsets[column + 1]."""
    at = np.zeros(last - first + 1, np.int64)
    for e in range(start, stop):
        at[key[e] - first + 1] += 1
    for c in range(last - first):
        at[c + 1] += at[c]
        offsets[first + c + 1] = start + at[c + 1]
    rows, positions = row[start:stop].copy(), position[start:stop].copy()
    for e in range(start, stop):
        c = key[e] - first
        to = start + at[c]
        at[c] += 1
        row[to], position[to] = rows[e - start], positions[e - start]

"""The entries of a CSR pattern in column order, on all cores: a counting sort in two steps, each within the caches.

Ranges of columns are *buckets*. Blocks of rows are counted by bucket, then moved to their buckets in order; each bucket
is then put in order of its columns, with a copy of the bucket alone. Both steps keep the order of entries that go to
the same place, so that the entries of a column come by row and the result is one, whatever the number of threads.

Cost: O(|O|) time; 4 bytes for each entry besides the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gramtower._util.compiled import compiled
from gramtower._util.threads import parallel_for

_BUCKETS = 256  # more of them write to more pages at a time than the processor keeps addresses of


def by_column(
    offsets: NDArray[np.int64], columns: NDArray[np.int32], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Offsets of the columns, and of each entry in their order the row and the position in row order."""
    total, rows_count = len(columns), len(offsets) - 1
    shift = max(0, (width - 1).bit_length() - (_BUCKETS - 1).bit_length())
    buckets = ((width - 1) >> shift) + 1
    cuts = np.linspace(0, total, min(rows_count, 4 * torch.get_num_threads()) + 1)
    blocks = [0, *np.searchsorted(offsets, cuts[1:-1]).tolist(), rows_count]
    counts: NDArray[np.int64] = np.zeros((len(blocks) - 1, buckets), np.int64)

    def count(first: int, last: int) -> None:
        for b in range(first, last):
            _count(columns[offsets[blocks[b]] : offsets[blocks[b + 1]]], shift, counts[b])

    each = list(range(len(blocks)))
    parallel_for(count, each)
    flat = counts.T.reshape(-1)
    starts = np.ascontiguousarray((np.cumsum(flat) - flat).reshape(buckets, -1).T)
    bounds = np.append(starts[0], total)
    key, row = np.empty(total, np.int32), np.empty(total, np.int32)
    position = np.empty(total, np.int32 if total < 2**31 else np.int64)

    def move(first: int, last: int) -> None:
        for b in range(first, last):
            _move(blocks[b], blocks[b + 1], offsets, columns, shift, starts[b], key, row, position)

    parallel_for(move, each)
    found: NDArray[np.int64] = np.zeros(width + 1, np.int64)

    def order(first: int, last: int) -> None:
        for b in range(first, last):
            columns_of = b << shift, min(width, (b + 1) << shift)
            _order(bounds[b], bounds[b + 1], *columns_of, key, row, position, found)

    parallel_for(order, list(range(buckets + 1)))
    return found, row, position


@compiled(nogil=True)
def _count(columns, shift, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    for e in range(len(columns)):
        counts[columns[e] >> shift] += 1


@compiled(nogil=True)
def _move(first, last, offsets, columns, shift, at, key, row, position):  # type: ignore[no-untyped-def]  # pragma: no cover
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

"""The k best columns of many rows without full rows of scores: tiles of scores are ranked in cache.

On a CPU each thread takes some rows, multiplies them with a few columns at a time, and merges the scores into
its rows' lists while they are in its cache, so that scores never go to memory and back. Elsewhere, for long lists and
for little work, blocks of full rows. Cost: the score products and one pass over the scores.
Checked by tests/test_topk.py against sorted dense scores; timed by benchmarks/bench_evaluation.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.retrieval.scores import score_blocks
from gramtower.retrieval.select import best, compiled
from gramtower.runtime.threads import pool

_ROWS = 512  # of a tile; with fewer, products are slower
_TILE = 1 << 18  # scores of a tile
_FEWEST = 64  # columns of a tile

Lists = tuple[int, int, NDArray[np.int64], NDArray[np.float32]]


def best_lists(
    P: Tensor,
    Q: Tensor,
    k: int,
    exclude: sp.csr_matrix | None = None,
    deny: NDArray[np.int64] | None = None,
    rows: NDArray[np.int64] | None = None,
    block_bytes: int | str | None = None,
) -> Iterator[Lists]:
    """The k best columns of each row, as in select.best, some rows at a time and in order.

    The arguments are those of score_blocks, with ``deny`` increasing; k is at most the number of columns.

    Yields:
        First row, row after the last, their columns and their scores.
    """
    count = len(P) if rows is None else len(rows)
    if compiled(P.device, count * len(Q), k):
        yield from _tiled(P, Q, k, exclude, deny, rows, block_bytes)
        return
    never = None if deny is None else torch.from_numpy(deny).to(Q.device)
    for start, stop, scores in score_blocks(P, Q, exclude, never, rows, block_bytes):
        columns, values = best(scores, k)
        yield start, stop, columns.cpu().numpy(), values.cpu().numpy()


def _tiled(
    P: Tensor,
    Q: Tensor,
    k: int,
    exclude: sp.csr_matrix | None,
    deny: NDArray[np.int64] | None,
    rows: NDArray[np.int64] | None,
    block_bytes: int | str | None,
) -> Iterator[Lists]:
    from gramtower.retrieval.long_lists import lists_of

    count, n, threads = len(P) if rows is None else len(rows), len(Q), torch.get_num_threads()
    height, width = tile_shape(count, n, threads, block_bytes)
    across = [(first, Q[first : first + width].t()) for first in range(0, n, width)]
    offsets = np.zeros(count + 1, np.int64) if exclude is None else exclude.indptr.astype(np.int64)
    excluded = np.empty(0, np.int32) if exclude is None else exclude.indices
    denied = np.empty(0, np.int64) if deny is None else deny

    def work(start: int) -> Lists:
        stop = min(start + height, count)
        left = P[start:stop] if rows is None else P[torch.from_numpy(rows[start:stop])]
        lists = lists_of(len(left), k)
        places, ends = offsets[start:stop].copy(), offsets[start + 1 : stop + 1]
        tile = torch.empty(len(left), width)
        scores = tile.numpy()
        for first, right in across:
            if right.shape[1] < width:  # the last columns
                tile = torch.empty(len(left), right.shape[1])
                scores = tile.numpy()
            torch.mm(left, right, out=tile)
            lists.add(scores, first, places, ends, excluded, denied)
        return start, stop, *lists.finished()

    workers, waiting = pool(threads), deque[Future[Any]]()
    try:
        for start in range(0, count, height):
            waiting.append(workers.submit(work, start))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def tile_shape(rows: int, n: int, threads: int, block_bytes: int | str | None = None) -> tuple[int, int]:
    """Rows and columns of a thread's tile; the tiles of all threads are within ``block_bytes``, or 64 scores each."""
    size = _TILE if block_bytes is None else min(_TILE, check.memory_size("block_bytes", block_bytes) // (4 * threads))
    height = max(1, min(_ROWS, -(-rows // threads), size // _FEWEST))
    return height, min(n, max(_FEWEST, size // height))

"""The k best columns of many rows without full rows of scores: tiles of scores are ranked in cache.

On a CPU each thread takes some rows, multiplies them with a few columns at a time, and merges the scores into
its rows' lists while they are in its cache, so that scores never go to memory and back. Of few rows each thread takes
all, and some of the columns: every row of Q is then read once. Elsewhere, for long lists and for little work, blocks of
full rows; a GPU is given the next block before the lists of the last one are fetched. Cost: the score products and one
pass over the scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.torch_runtime import pool
from gramtower.retrieval.scores import score_blocks
from gramtower.retrieval.select import WORTH_CALLING, best, best_but_for_ties, settle_ties, use_compiled

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
    loaded: bool = False,
) -> Iterator[Lists]:
    """The k best columns of each row, as in select.best, some rows at a time and in order.

    The arguments are those of score_blocks, with ``deny`` increasing; k is at most the number of columns. With
    ``loaded`` compiled code is used for few scores too, as by a process that answers again and again.

    Yields:
        First row, row after the last, their columns and their scores.
    """
    count = len(P) if rows is None else len(rows)
    if use_compiled(P.device, count * len(Q), k, **({"least": WORTH_CALLING} if loaded else {})):
        yield from _tiled(P, Q, k, exclude, deny, rows, block_bytes)
        return
    never = None if deny is None else torch.from_numpy(deny).to(Q.device)
    if not P.is_cuda:
        for start, stop, scores in score_blocks(P, Q, exclude, never, rows, block_bytes):
            columns, values = best(scores, k)
            yield start, stop, columns.numpy(), values.numpy()
        return
    before: Callable[[], Lists] | None = None
    for start, stop, scores in score_blocks(P, Q, exclude, never, rows, block_bytes, buffers=2):
        fetch = _launched(start, stop, scores, k)
        if before is not None:
            yield before()
        before = fetch
    if before is not None:
        yield before()


def _launched(start: int, stop: int, scores: Tensor, k: int) -> Callable[[], Lists]:
    """Start to rank a block on a GPU; what waits for its lists, to be called before the block is overwritten."""
    columns, values, tied = (found.to("cpu", non_blocking=True) for found in best_but_for_ties(scores, k))
    done = torch.cuda.current_stream(scores.device).record_event()

    def fetch() -> Lists:
        done.synchronize()
        settle_ties(scores, columns, values, tied.nonzero()[:, 0])
        return start, stop, columns.numpy(), values.numpy()

    return fetch


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
    narrow = width * height // max(1, count)
    by_columns = threads > 1 and count <= min(_ROWS, height * threads) and narrow >= _FEWEST and n > threads * _FEWEST
    width = min(narrow, -(-n // threads)) if by_columns else width
    offsets = np.zeros(count + 1, np.int64) if exclude is None else exclude.indptr.astype(np.int64)
    excluded = np.empty(0, np.int32) if exclude is None else exclude.indices
    denied = np.empty(0, np.int64) if deny is None else deny

    def strip(start: int, stop: int, first_column: int = 0, last_column: int = n) -> Lists:
        left = P[start:stop] if rows is None else P[torch.from_numpy(rows[start:stop])]
        lists = lists_of(len(left), k)
        places, ends = offsets[start:stop].copy(), offsets[start + 1 : stop + 1]
        if first_column:
            for row, end in enumerate(ends.tolist()):
                places[row] += np.searchsorted(excluded[places[row] : end], first_column)
        tile = torch.empty(len(left), width)
        for first in range(first_column, last_column, width):
            right = Q[first : min(first + width, last_column)].t()
            if right.shape[1] < tile.shape[1]:  # the last columns
                tile = torch.empty(len(left), right.shape[1])
            torch.mm(left, right, out=tile)
            lists.add(tile.numpy(), first, places, ends, excluded, denied)
        return start, stop, *lists.finished()

    workers, waiting = pool(threads), deque[Future[Any]]()
    try:
        if by_columns:
            yield _shared(workers, strip, count, n, threads, k)
            return
        for start in range(0, count, height):
            waiting.append(workers.submit(strip, start, min(start + height, count)))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _shared(workers: Executor, strip: Callable[..., Lists], count: int, n: int, threads: int, k: int) -> Lists:
    """Lists of few rows, a range of the columns for each thread, so that each reads its part of Q alone."""
    bounds = [n * part // threads for part in range(threads + 1)]
    parts = [workers.submit(strip, 0, count, first, last) for first, last in pairwise(bounds)]
    found = [part.result() for part in parts]
    columns = np.concatenate([part[2] for part in found], 1)
    values = np.concatenate([part[3] for part in found], 1)
    order = np.lexsort((columns, -values), axis=1)[:, :k]
    return 0, count, np.take_along_axis(columns, order, 1), np.take_along_axis(values, order, 1)


def tile_shape(rows: int, n: int, threads: int, block_bytes: int | str | None = None) -> tuple[int, int]:
    """Rows and columns of a thread's tile; the tiles of all threads are within ``block_bytes``, or 64 scores each."""
    size = _TILE if block_bytes is None else min(_TILE, check.memory_size("block_bytes", block_bytes) // (4 * threads))
    height = max(1, min(_ROWS, -(-rows // threads), size // _FEWEST))
    return height, min(n, max(_FEWEST, size // height))

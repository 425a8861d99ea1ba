"""The k best of each row of a block of scores, the same answer from every implementation.

Best first; equal scores in order of columns, so that nothing depends on threads, blocks or the device. Places that no
finite score fills hold column −1 and score −inf. Cost: one pass over the block.

The k best columns of many rows without full rows of scores: tiles of scores are ranked in cache.

On a CPU each thread takes some rows, multiplies them with a few columns at a time, and merges the scores into
its rows' lists while they are in its cache, so that scores never go to memory and back. Of few rows each thread takes
all, and some of the columns: every row of Q is then read once. Elsewhere, for long lists and for little work, blocks of
full rows; a GPU is given the next block before the lists of the last one are fetched. Cost: the score products and one
pass over the scores.

Exact top-K: the k right entities with the highest p_iᵀq_j for each left entity, in bounded memory.

Cost: the score products and one pass over the scores while they are in cache. Ties go to the smaller column.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.torch_runtime import pool
from gramtower.data.matrices import canonical
from gramtower.retrieval.scores import embeddings, score_blocks

_MOST_KEPT = 512  # compiled passes sort the best by insertion, which pays for lists that are not long
_WORTH_LOADING = 1 << 20  # scores; with fewer, loading compiled code takes longer than it saves
WORTH_CALLING = 1 << 16  # scores; with fewer, handing them to threads takes longer than it saves


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns (int64) and scores of the k best of each row; k at most the number of columns."""
    if use_compiled(scores.device, scores.numel(), k):
        from gramtower.retrieval import scan

        return scan.best(scores, k)
    return best_torch(scores, k)


def use_compiled(device: torch.device, scores: int, k: int = 0, least: int = _WORTH_LOADING) -> bool:
    """Whether compiled passes (scan.py) are there, and worth it for so many scores and lists of k.

    ``least`` is for callers that have them loaded anyhow: from how many scores on they are asked.
    """
    worth = device.type == "cpu" and scores >= least and k <= _MOST_KEPT
    return worth and host.has_numba()


def best_torch(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See best; in plain torch, for any device."""
    columns, values, tied = best_but_for_ties(scores, k)
    return settle_ties(scores, columns, values, tied.nonzero()[:, 0])


def best_but_for_ties(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns and scores as best gives them, and the rows where other columns may have the k-th score too.

    A GPU is not waited for; settle_ties must look at these rows again.
    """
    n = scores.shape[1]
    groups = _BestGroups.of(scores, k)
    values, columns = torch.topk(scores if groups is None else groups.scores, min(k + 1, n), dim=1)
    if groups is not None:
        columns = groups.columns(columns)
    tied = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    if k < n:
        tied = values[:, k] == values[:, k - 1]
        if groups is not None:
            tied |= groups.least == values[:, k - 1]
        tied &= values[:, k - 1] > -torch.inf
        values, columns = values[:, :k], columns[:, :k]
    by_column = columns.sort(1)
    by_score = values.gather(1, by_column.indices).sort(stable=True, dim=1, descending=True)
    columns = by_column.values.gather(1, by_score.indices)
    return columns.masked_fill_(by_score.values == -torch.inf, -1), by_score.values, tied


def settle_ties(scores: Tensor, columns: Tensor, values: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the smaller columns in the rows ``again``, where torch chose among equals; in place, on any device."""
    k, size = columns.shape[1], max(1, -(-len(scores) // 16))
    for start in range(0, len(again), size):
        rows = again[start : start + size]
        ordered = scores[rows.to(scores.device)].sort(stable=True, dim=1, descending=True)
        best = ordered.values[:, :k]
        chosen = ordered.indices[:, :k].masked_fill_(best == -torch.inf, -1)
        values[rows], columns[rows] = best.to(values.device), chosen.to(columns.device)
    return columns, values


class _BestGroups(NamedTuple):
    """The scores among which each row's k best are.

    Columns are taken in groups of about √(n / k), those of a group equally far apart: a GPU then reads whole lines for
    the maxima. The k + 1 groups with the highest maxima hold the k best, up to scores that equal the least of these
    maxima; every other group is below it or equal. So all scores are read once, where torch.topk reads them several
    times.

    Attributes:
        scores: of the best groups, first columns first, and of the columns that no group has.
        groups: rows × (k + 1), which groups.
        step: how far apart the columns of a group are.
        size: columns of a group.
        least: of the maxima, the highest that a score elsewhere may be.
    """

    scores: Tensor
    groups: Tensor
    step: int
    size: int
    least: Tensor

    @classmethod
    def of(cls, scores: Tensor, k: int) -> _BestGroups | None:
        """None where the groups would be few."""
        n = scores.shape[1]
        size = 1 << max(3, round(math.log2(n / (k + 1)) / 2))
        step = n // size
        if step < 4 * (k + 1):
            return None
        grouped = scores[:, : step * size].view(len(scores), size, step)
        highest = torch.topk(grouped.amax(1), k + 1, dim=1)
        inside = grouped.gather(2, highest.indices[:, None, :].expand(-1, size, -1)).flatten(1)
        kept = torch.cat([inside, scores[:, step * size :]], 1) if step * size < n else inside
        return cls(kept, highest.indices, step, size, highest.values[:, k])

    def columns(self, places: Tensor) -> Tensor:
        """The columns of ``scores`` as columns of the whole."""
        count = self.groups.shape[1]
        number = places // count  # of the column in its group
        grouped = number * self.step + self.groups.gather(1, places % count)
        return torch.where(number < self.size, grouped, places + self.size * (self.step - count))


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
    """The k best columns of each row, as in :func:`best`, some rows at a time and in order.

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
    from gramtower.retrieval.scan import lists_of

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


class Ranking(NamedTuple):
    """What lists are made of, checked: embeddings, which columns are candidates, and what each row leaves out.

    Attributes:
        P: left embeddings.
        Q: those of the candidates.
        exclude: rows × candidates, or None.
        deny: candidates never to choose, increasing, or None.
        chosen: the column of each candidate; None if all are.
    """

    P: Tensor
    Q: Tensor
    exclude: sp.csr_matrix | None
    deny: NDArray[np.int64] | None
    chosen: NDArray[np.int64] | None

    def lists(self, k: int, block_bytes: int | str | None = None, loaded: bool = False) -> Iterator[Lists]:
        """First row, row after the last, columns and scores of some rows at a time, in order; at most k of each."""
        width = min(k, len(self.Q))
        if width == 0:
            return
        for start, stop, columns, values in best_lists(
            self.P, self.Q, width, self.exclude, self.deny, block_bytes=block_bytes, loaded=loaded
        ):
            yield start, stop, columns if self.chosen is None else self._named(columns), values

    def top(
        self, k: int, block_bytes: int | str | None = None, loaded: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The lists of all rows as :func:`top_k` returns them; with ``loaded`` by compiled code for few rows too."""
        found = np.full((len(self.P), k), -1, dtype=np.int64)
        values = np.full((len(self.P), k), -np.inf, dtype=np.float32)
        for start, stop, columns, best in self.lists(k, block_bytes, loaded):
            width = columns.shape[1]
            found[start:stop, :width], values[start:stop, :width] = columns, best
        return found, values

    def rows(self, start: int, stop: int) -> Ranking:
        """The same for some of the rows."""
        return self._replace(P=self.P[start:stop], exclude=None if self.exclude is None else self.exclude[start:stop])

    def to(self, device: torch.device) -> Ranking:
        """The same with the embeddings on another device."""
        return self._replace(P=self.P.to(device), Q=self.Q.to(device))

    def _named(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self.chosen is not None
        return np.where(columns >= 0, self.chosen[columns], -1)


def ranking(P: Any, Q: Any, *, exclude: Any = None, allow: Any = None, deny: Any = None) -> Ranking:
    """The arguments of :func:`top_k`, checked and brought into one form."""
    P, Q = embeddings(P, Q)
    rows, n = len(P), len(Q)
    if exclude is not None:
        exclude = canonical("exclude", exclude, (rows, n))
    denied = None if deny is None else _columns("deny", deny, n)
    return checked_ranking(P, Q, exclude, None if allow is None else _columns("allow", allow, n), denied)


def checked_ranking(
    P: Tensor,
    Q: Tensor,
    exclude: sp.csr_matrix | None = None,
    chosen: NDArray[np.int64] | None = None,
    denied: NDArray[np.int64] | None = None,
) -> Ranking:
    """The same of finite float32 embeddings, canonical exclusions and increasing columns, which are not looked at.

    Looking through Q for NaN takes as long as the product of a single row with it: who asks often asks this.
    """
    if chosen is not None:  # few columns: leave out the others before the product
        if denied is not None:
            chosen, denied = np.setdiff1d(chosen, denied, assume_unique=True), None
        Q = Q[torch.from_numpy(chosen).to(Q.device)]
        exclude = None if exclude is None else exclude[:, chosen]
    return Ranking(P, Q, exclude, denied, chosen)


def top_k(
    P: Any,
    Q: Any,
    k: int,
    *,
    exclude: Any = None,
    allow: Any = None,
    deny: Any = None,
    block_bytes: int | str | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best columns for each row of P.

    Args:
        P: left embeddings, rows × dim.
        Q: right embeddings, n × dim.
        k: how many; more than there are columns to choose from leaves places empty.
        exclude: scipy.sparse, rows × n; its stored entries are left out.
        allow: column numbers to choose from; None for all.
        deny: column numbers never to choose.
        block_bytes: most bytes of scores held at once, a number or text such as "64MB".

    Returns:
        Columns (int64, −1 where there is none) and scores (float32, −inf there), rows × k, best first; of equal scores
        the smaller column comes first.
    """
    k = check.count("k", k)
    return ranking(P, Q, exclude=exclude, allow=allow, deny=deny).top(k, block_bytes)


def _columns(name: str, value: Any, n: int) -> NDArray[np.int64]:
    """Distinct column numbers, increasing."""
    array = check.as_array(name, value, "a list of column numbers")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        check.fail(name, f"shape {array.shape} of {array.dtype}", "a list of column numbers")
    if array.min() < 0 or array.max() >= n:
        bad = array[(array < 0) | (array >= n)]
        check.fail(name, f"{int(bad[0])}", f"column numbers from 0 to {n - 1}")
    return np.unique(array).astype(np.int64)

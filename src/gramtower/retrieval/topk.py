"""Exact top-K: the k right entities with the highest p_iᵀq_j for each left entity, in bounded memory.

The best come first, and equal scores in order of columns, so that results do not depend on threads, blocks or the
device. Empty places have column −1 and score −inf. Cost: the score products and one pass over the scores.

On a CPU each thread takes some rows, multiplies them with a few columns at a time, and merges the scores into the lists
of its rows while they are in its cache, so that scores are never written to memory. If there are few rows, each thread
takes all of them and some of the columns, so that every row of Q is read once. Otherwise (on a GPU, for long lists and
for few scores) blocks of full rows are ranked; a GPU starts with the next block before the lists of the last are
fetched. All blocks share one buffer of at most ``block_bytes`` (or one row), or two in turn, so that there is no array
of m·n elements. Pairs that must not be ranked are −inf.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.host import pool
from gramtower.data.matrices import SparseMatrix, canonical, without
from gramtower.retrieval.list_rules import NO_RULES, Rules, percentiles

_GATHERED = 1 << 22  # numbers gathered at a time
_COPY = 4  # time to copy a row of Q, in products with it
_DEFAULT_BYTES = {"cpu": 64_000_000, "cuda": 1_000_000_000}  # memory of a block of scores
_MOST_KEPT = 512  # longest lists for compiled code, which sorts by insertion
_WORTH_LOADING = 1 << 20  # least number of scores for which compiled code is loaded
WORTH_CALLING = 1 << 16  # least number of scores for which it is called once it is loaded

EmbeddingsLike: TypeAlias = NDArray[np.generic] | Tensor  # floating-point rows, one for each entity


def embeddings(P: EmbeddingsLike, Q: EmbeddingsLike) -> tuple[Tensor, Tensor]:
    """Both matrices of embeddings as float32 tensors, checked."""
    left, right = as_embeddings("P", P), as_embeddings("Q", Q)
    if left.shape[1] != right.shape[1] or left.device != right.device:
        given = f"shapes {tuple(left.shape)} on {left.device} and {tuple(right.shape)} on {right.device}"
        check.fail("P, Q", given, "the same number of columns and the same device")
    return left, right


def as_embeddings(name: str, value: EmbeddingsLike) -> Tensor:
    """A matrix of embeddings as a float32 tensor, checked; ``name`` is the name of the argument."""
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim != 2 or 0 in value.shape[1:]:
        given = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        check.fail(name, given, "a tensor of shape (entities, k)")
    if value.dtype.kind not in "biufc" if isinstance(value, np.ndarray) else value.layout != torch.strided:
        check.fail(name, f"{type(value).__name__} of {value.dtype}", "a dense tensor of floating-point embeddings")
    tensor = torch.as_tensor(value).detach()
    if not tensor.is_floating_point():
        check.fail(name, f"dtype {tensor.dtype}", "floating-point embeddings")
    tensor = tensor.to(torch.float32).contiguous()
    if not torch.isfinite(tensor.sum()) and (bad := int((~torch.isfinite(tensor)).any(1).sum())):  # a sum may overflow
        check.fail(name, f"{bad} rows with NaN or infinity", "finite embeddings")
    return tensor


def _product(left: Tensor, right: Tensor, added: Tensor | None, out: Tensor) -> None:
    if added is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(added, left, right, out=out)


def rows_in_block(
    n: int, rows: int, device: torch.device, block_bytes: int | str | None = None, buffers: int = 1
) -> int:
    """The number of rows of n scores in a block, if there are ``buffers`` blocks at a time."""
    given = _DEFAULT_BYTES.get(device.type, _DEFAULT_BYTES["cpu"]) if block_bytes is None else block_bytes
    return max(1, min(rows, check.memory_size("block_bytes", given) // (4 * buffers * max(1, n))))


def _places(exclude: sp.csr_matrix, start: int, stop: int, device: torch.device) -> Tensor:
    """The positions of the stored entries of rows start:stop in a block of scores; it does not wait for a GPU."""
    bounds = exclude.indptr[start : stop + 1]
    columns = exclude.indices[bounds[0] : bounds[-1]].astype(np.int64)
    places = torch.from_numpy(columns + np.repeat(np.arange(stop - start) * exclude.shape[1], np.diff(bounds)))
    return places if device.type == "cpu" else places.pin_memory().to(device, non_blocking=True)


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns (int64) and scores of the k best of each row; k at most the number of columns."""
    if use_compiled(scores.device, scores.numel(), k):
        from gramtower.retrieval import scan

        return scan.best(scores, k)
    return best_torch(scores, k)


def use_compiled(device: torch.device, scores: int, k: int = 0, loaded: bool = False) -> bool:
    """Whether compiled code (scan.py), perhaps loaded already, is worth it for so many scores and lists of k."""
    least = WORTH_CALLING if loaded else _WORTH_LOADING
    return device.type == "cpu" and scores >= least and k <= _MOST_KEPT and host.has_numba()


def best_torch(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same as ``best`` in plain torch, for any device."""
    columns, values, tied = best_but_for_ties(scores, k)
    return settle_ties(scores, columns, values, tied.nonzero()[:, 0])


def best_but_for_ties(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Columns and scores as of ``best``, and the rows in which other columns may also have the k-th score.

    It does not wait for a GPU; ``settle_ties`` must process these rows again.
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
    """Choose the smaller columns in the rows ``again``, where torch chose among equal scores; in place."""
    k, size = columns.shape[1], max(1, -(-len(scores) // 16))
    for start in range(0, len(again), size):
        rows = again[start : start + size]
        ordered = scores[rows.to(scores.device)].sort(stable=True, dim=1, descending=True)
        best = ordered.values[:, :k]
        chosen = ordered.indices[:, :k].masked_fill_(best == -torch.inf, -1)
        values[rows], columns[rows] = best.to(values.device), chosen.to(columns.device)
    return columns, values


class _BestGroups(NamedTuple):
    """A subset of the scores that contains the k best of each row.

    Columns are divided into groups of about √(n / k), with equal distances within a group, so that a GPU reads whole
    lines for the maxima. The k + 1 groups with the highest maxima contain the k best, except for scores that equal the
    least of these maxima. All scores are thus read once, while torch.topk reads them several times.
    """

    scores: Tensor  # of the best groups, first columns first, and of the columns without a group
    groups: Tensor  # rows × (k + 1), the best groups
    step: int  # distance of the columns of a group
    size: int  # number of columns of a group
    least: Tensor  # the least of the maxima, which no score elsewhere exceeds

    @classmethod
    def of(cls, scores: Tensor, k: int) -> _BestGroups | None:
        """The best groups, or None if there would be too few groups."""
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
        """The columns of the whole block for columns of ``scores``."""
        count = self.groups.shape[1]
        number = places // count  # of the column in its group
        grouped = number * self.step + self.groups.gather(1, places % count)
        return torch.where(number < self.size, grouped, places + self.size * (self.step - count))


_ROWS = 512  # rows of a tile; with fewer, products are slower
_TILE = 1 << 18  # scores of a tile
_FEWEST = 64  # least columns of a tile

Lists = tuple[int, int, NDArray[np.int64], NDArray[np.float32]]  # first row, row after the last, columns, scores


def _launched(start: int, stop: int, scores: Tensor, k: int) -> Callable[[], Lists]:
    """Start to rank a block; return a function that waits for its lists, before the block is overwritten."""
    columns, values, tied = (found.to("cpu", non_blocking=True) for found in best_but_for_ties(scores, k))
    done = torch.cuda.current_stream(scores.device).record_event() if scores.is_cuda else None

    def fetch() -> Lists:
        if done is not None:
            done.synchronize()
        settle_ties(scores, columns, values, tied.nonzero()[:, 0])
        return start, stop, columns.numpy(), values.numpy()

    return fetch


def _shared(workers: Executor, strip: Callable[..., Lists], count: int, n: int, threads: int, k: int) -> Lists:
    """Lists of few rows, with a range of the columns for each thread, so that each reads only its part of Q."""
    bounds = [n * part // threads for part in range(threads + 1)]
    parts = [workers.submit(strip, 0, count, first, last) for first, last in pairwise(bounds)]
    found = [part.result() for part in parts]
    columns = np.concatenate([part[2] for part in found], 1)
    values = np.concatenate([part[3] for part in found], 1)
    order = np.lexsort((columns, -values), axis=1)[:, :k]
    return 0, count, np.take_along_axis(columns, order, 1), np.take_along_axis(values, order, 1)


def tile_shape(rows: int, n: int, threads: int, block_bytes: int | str | None = None) -> tuple[int, int]:
    """Rows and columns of a thread's tile; the tiles of all threads fit ``block_bytes``, or have 64 scores each."""
    size = _TILE if block_bytes is None else min(_TILE, check.memory_size("block_bytes", block_bytes) // (4 * threads))
    height = max(1, min(_ROWS, -(-rows // threads), size // _FEWEST))
    return height, min(n, max(_FEWEST, size // height))


ColumnsLike: TypeAlias = Sequence[int] | NDArray[np.generic] | Tensor


class Ranking(NamedTuple):
    """Checked inputs of a ranking: embeddings, candidates, the pairs that each row leaves out, and further rules."""

    P: Tensor  # left embeddings
    Q: Tensor  # embeddings of the candidates
    exclude: sp.csr_matrix | None = None  # rows × candidates
    deny: NDArray[np.int64] | None = None  # candidates that are never chosen, increasing
    chosen: NDArray[np.int64] | None = None  # the column of each candidate; None if all columns are candidates
    own: sp.csr_matrix | None = None  # rows × candidates, the only ones of each row; None if a row may have any
    rules: Rules = NO_RULES  # for the candidates
    ranked: NDArray[np.int64] | None = None  # rows of P, to which ``exclude`` and ``own`` belong; None for all

    @property
    def height(self) -> int:
        """The number of rows to rank."""
        return len(self.P if self.ranked is None else self.ranked)

    def left(self, which: slice | NDArray[np.int64]) -> Tensor:
        """The left embeddings of some of these rows."""
        which = which if self.ranked is None else self.ranked[which]
        return self.P[which if isinstance(which, slice) else torch.from_numpy(which).to(self.P.device)]

    def scores(self, block_bytes: int | str | None = None, buffers: int = 1) -> Iterator[tuple[int, int, Tensor]]:
        """Blocks of scores in order of rows: first row, row after the last, and their scores, −inf where left out.

        A block is overwritten after ``buffers - 1`` more.
        """
        n, device = len(self.Q), self.P.device
        size = rows_in_block(n, self.height, device, block_bytes, buffers)
        held = [torch.empty((size, n), device=device) for _ in range(min(buffers, -(-self.height // size)))]
        deny = None if self.deny is None else torch.from_numpy(self.deny).to(device)
        added = self._added()
        for number, start in enumerate(range(0, self.height, size)):
            stop = min(start + size, self.height)
            scores = held[number % buffers][: stop - start]
            places = None if self.exclude is None else _places(self.exclude, start, stop, device)
            _product(self.left(slice(start, stop)), self.Q.t(), added, scores)
            if places is not None:
                scores.view(-1).index_fill_(0, places, -torch.inf)
            if deny is not None:
                scores.index_fill_(1, deny, -torch.inf)
            yield start, stop, scores

    def _added(self) -> Tensor | None:
        return None if self.rules.added is None else torch.from_numpy(self.rules.added).to(self.Q.device)

    def lists(self, k: int, block_bytes: int | str | None = None, loaded: bool = False) -> Iterator[Lists]:
        """The lists of some rows at a time, in order; at most k columns per row."""
        if not len(self.Q):
            return
        for start, stop, columns, values in self._ruled(min(k, len(self.Q)), self.rules.pool(k), block_bytes, loaded):
            if self.chosen is not None:
                columns = np.where(columns >= 0, self.chosen[columns], -1)
            yield start, stop, columns, values

    def _ruled(self, k: int, pool: int, block_bytes: int | str | None, loaded: bool) -> Iterator[Lists]:
        """Lists of candidates, chosen from the ``pool`` best of each row, or from more where they stay short."""
        rules, pool = self.rules, min(pool, len(self.Q))
        for start, stop, columns, values in self._best(pool, block_bytes, loaded):
            shown = self._shown(start, stop, columns, values)
            if rules.min_score is not None:
                low = shown < np.float64(rules.min_score)
                columns = np.where(low, -1, columns)
                values, shown = (np.where(low, np.float32(-np.inf), one) for one in (values, shown))
            if rules.diversity or rules.groups:
                found, scores = np.full((stop - start, k), -1), np.full((stop - start, k), -np.inf, np.float32)
                step = max(1, _GATHERED // (pool * self.Q.shape[1]))
                for a in range(0, stop - start, step):
                    part = slice(a, a + step)
                    units = self._units(columns[part]) if rules.diversity else None
                    places = rules.choose(columns[part], values[part], k, units)
                    found[part] = np.where(places >= 0, np.take_along_axis(columns[part], places, 1), -1)
                    scores[part] = np.where(places >= 0, np.take_along_axis(shown[part], places, 1), -np.inf)
                short = np.flatnonzero((found[:, -1] < 0) & (columns[:, -1] >= 0))
                if len(short) and pool < len(self.Q):
                    again = self.rows(start + short)
                    for a, b, more, better in again._ruled(k, 2 * pool, block_bytes, loaded):
                        found[short[a:b]], scores[short[a:b]] = more, better
                columns, shown = found, scores
            yield start, stop, columns, shown.astype(np.float32, copy=False)

    def _shown(
        self, start: int, stop: int, columns: NDArray[np.int64], values: NDArray[np.float32]
    ) -> NDArray[np.floating]:
        """The scores to return for the best columns of some rows, whose scores are in decreasing order."""
        rules = self.rules
        if rules.scores == "raw":
            return values
        if rules.probability is not None:
            raw = values if rules.added is None else _pair_scores(self.left(slice(start, stop)), self.Q, columns)
            found = rules.probability(raw)
        else:
            found = percentiles(values, self._candidates(start, stop))
        return np.where(columns >= 0, found, -np.inf)

    def _candidates(self, start: int, stop: int) -> NDArray[np.int64]:
        """How many candidates some rows have."""
        if self.own is not None:
            return np.asarray(np.diff(self.own.indptr[start : stop + 1]), np.int64)
        there = np.ones(len(self.Q), np.int64)
        there[[] if self.deny is None else self.deny] = 0
        count = np.full(stop - start, there.sum())
        if self.exclude is not None:
            ends = self.exclude.indptr[start : stop + 1]
            left_out = np.append(0, np.cumsum(there[self.exclude.indices[ends[0] : ends[-1]]]))
            count -= np.diff(left_out[ends - ends[0]])
        return count

    def _best(self, k: int, block_bytes: int | str | None, loaded: bool) -> Iterator[Lists]:
        """The k best columns of each row, k at most the number of candidates, without choices among them."""
        if self.own is not None:
            yield from self._best_own(self.own, k)
        elif use_compiled(self.P.device, self.height * len(self.Q), k, loaded):
            yield from self._tiled(k, block_bytes)
        else:
            ahead, launched = int(self.P.is_cuda), deque[Callable[[], Lists]]()  # a GPU starts a block ahead
            for start, stop, scores in self.scores(block_bytes, 1 + ahead):
                launched.append(_launched(start, stop, scores, k))
                if len(launched) > ahead:
                    yield launched.popleft()()
            while launched:
                yield launched.popleft()()

    def _best_own(self, own: sp.csr_matrix, k: int) -> Iterator[Lists]:
        widths, added = np.diff(own.indptr), self._added()
        step = max(1, _GATHERED // max(1, int(widths.max(initial=0))))
        for start in range(0, self.height, step):
            part = widths[start : start + step]
            stop = start + len(part)
            columns = np.full((len(part), int(part.max(initial=0))), -1)
            columns[np.arange(columns.shape[1]) < part[:, None]] = own.indices[own.indptr[start] : own.indptr[stop]]
            yield start, stop, *best_of(self.left(slice(start, stop)), self.Q, columns, k, added)

    def _tiled(self, k: int, block_bytes: int | str | None) -> Iterator[Lists]:
        """Lists by compiled code: each thread takes some rows, or all of a few rows and some of the columns."""
        from gramtower.retrieval.scan import BestLists

        height, n, threads, added = self.height, len(self.Q), torch.get_num_threads(), self._added()
        rows, width = tile_shape(height, n, threads, block_bytes)
        narrow = width * rows // max(1, height)
        by_columns = threads > 1 and height <= min(_ROWS, rows * threads)
        by_columns = by_columns and narrow >= _FEWEST and n > threads * _FEWEST
        width = min(narrow, -(-n // threads)) if by_columns else width
        offsets = np.zeros(height + 1, np.int64) if self.exclude is None else self.exclude.indptr.astype(np.int64)
        excluded = np.empty(0, np.int32) if self.exclude is None else self.exclude.indices
        denied = np.empty(0, np.int64) if self.deny is None else self.deny

        def strip(start: int, stop: int, first_column: int = 0, last_column: int = n) -> Lists:
            left = self.left(slice(start, stop))
            lists = BestLists(len(left), k)
            places, ends = offsets[start:stop].copy(), offsets[start + 1 : stop + 1]
            if first_column:
                for row, end in enumerate(ends.tolist()):
                    places[row] += np.searchsorted(excluded[places[row] : end], first_column)
            tile = torch.empty(len(left), width)
            for first in range(first_column, last_column, width):
                part = slice(first, min(first + width, last_column))
                right = self.Q[part].t()
                if right.shape[1] < tile.shape[1]:  # the last columns
                    tile = torch.empty(len(left), right.shape[1])
                _product(left, right, None if added is None else added[part], tile)
                lists.add(tile.numpy(), first, places, ends, excluded, denied)
            return start, stop, *lists.finished()

        workers, waiting = pool(threads), deque[Future[Any]]()
        try:
            if by_columns:
                yield _shared(workers, strip, height, n, threads, k)
                return
            for start in range(0, height, rows):
                waiting.append(workers.submit(strip, start, min(start + rows, height)))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def _units(self, columns: NDArray[np.int64]) -> NDArray[np.float32]:
        gathered = self.Q[torch.from_numpy(np.maximum(columns, 0)).to(self.Q.device)]
        return np.asarray(torch.nn.functional.normalize(gathered, dim=2).cpu().numpy())

    def top(
        self, k: int, block_bytes: int | str | None = None, loaded: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The lists of all rows as :func:`top_k` returns them.

        With ``loaded`` compiled code is used for few scores too, as in a server that has loaded it.
        """
        found = np.full((self.height, k), -1, dtype=np.int64)
        values = np.full((self.height, k), -np.inf, dtype=np.float32)
        for start, stop, columns, best in self.lists(k, block_bytes, loaded):
            width = columns.shape[1]
            found[start:stop, :width], values[start:stop, :width] = columns, best
        return found, values

    def rows(self, which: slice | NDArray[np.int64]) -> Ranking:
        """The same for some of the rows."""
        exclude, own = (None if pairs is None else pairs[which] for pairs in (self.exclude, self.own))
        return self._replace(P=self.left(which), exclude=exclude, own=own, ranked=None)


def best_of(
    P: Tensor, Q: Tensor, candidates: NDArray[np.int64], k: int, added: Tensor | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best of some candidates of each row, rows × candidates with −1 for none; empty places as in top_k."""
    if (missing := k - candidates.shape[1]) > 0:
        candidates = np.pad(candidates, ((0, 0), (0, missing)), constant_values=-1)
    scores = _pair_scores(P, Q, candidates, added)
    order = np.lexsort((candidates, -scores), axis=1)[:, :k]
    return np.take_along_axis(candidates, order, 1), np.take_along_axis(scores, order, 1)


def _pair_scores(P: Tensor, Q: Tensor, columns: NDArray[np.int64], added: Tensor | None = None) -> NDArray[np.float32]:
    """The scores of some columns of each row, −inf for column −1."""
    scores, step = np.empty(columns.shape, np.float32), max(1, _GATHERED // max(1, columns.shape[1] * Q.shape[1]))
    for start in range(0, len(P), step):
        part = slice(start, start + step)
        chosen = torch.from_numpy(np.maximum(columns[part], 0)).to(Q.device)
        found = torch.einsum("rd,rcd->rc", P[part], Q[chosen]).float()
        scores[part] = (found if added is None else found + added[chosen]).cpu().numpy()
    scores[columns < 0] = -np.inf
    return scores


def ranking(
    P: EmbeddingsLike,
    Q: EmbeddingsLike,
    *,
    exclude: SparseMatrix | None = None,
    allow: ColumnsLike | None = None,
    deny: ColumnsLike | None = None,
    own: sp.csr_matrix | None = None,
    rules: Rules = NO_RULES,
) -> Ranking:
    """The arguments of :func:`top_k`, checked and brought into one form; ``own`` and ``rules`` as in Ranking."""
    P, Q = embeddings(P, Q)
    rows, n = len(P), len(Q)
    if exclude is not None:
        exclude = canonical("exclude", exclude, (rows, n))
    denied = None if deny is None else _columns("deny", deny, n)
    return checked_ranking(P, Q, exclude, None if allow is None else _columns("allow", allow, n), denied, own, rules)


def checked_ranking(
    P: Tensor,
    Q: Tensor,
    exclude: sp.csr_matrix | None = None,
    chosen: NDArray[np.int64] | None = None,
    denied: NDArray[np.int64] | None = None,
    own: sp.csr_matrix | None = None,
    rules: Rules = NO_RULES,
) -> Ranking:
    """The ranking of finite float32 embeddings, canonical exclusions and increasing columns, which are not checked.

    Checking Q for NaN takes as long as its product with a single row, which matters for frequent queries.
    """
    if rules.among is not None:
        chosen = rules.among if chosen is None else np.intersect1d(chosen, rules.among, assume_unique=True)
    if own is not None:
        own, exclude = own if exclude is None else without(own, exclude), None
        chosen = np.arange(len(Q)) if chosen is None and denied is not None else chosen
    elif chosen is not None and len(P) * (len(Q) - len(chosen)) < _COPY * len(chosen):  # few rows: no copy of Q
        others = np.ones(len(Q), bool)
        others[chosen] = False
        others[[] if denied is None else denied] = True
        return Ranking(P, Q, exclude, np.flatnonzero(others), None, None, rules)
    if chosen is not None:  # leave out the other columns before the product
        if denied is not None:
            chosen, denied = np.setdiff1d(chosen, denied, assume_unique=True), None
        rules = rules.take(chosen)
        # on a CPU numpy copies a few rows about three times as fast as torch
        Q = Q[torch.from_numpy(chosen).to(Q.device)] if Q.is_cuda else torch.from_numpy(Q.numpy()[chosen])
        exclude, own = (None if pairs is None else pairs[:, chosen] for pairs in (exclude, own))
    return Ranking(P, Q, exclude, denied, chosen, own, rules)


def top_k(
    P: EmbeddingsLike,
    Q: EmbeddingsLike,
    k: int,
    *,
    exclude: SparseMatrix | None = None,
    allow: ColumnsLike | None = None,
    deny: ColumnsLike | None = None,
    block_bytes: int | str | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k best columns for each row of P.

    Args:
        P: left embeddings, rows × dim.
        Q: right embeddings, n × dim.
        k: number of columns per row; places are left empty if there are fewer candidates.
        exclude: scipy.sparse, rows × n; its stored entries are left out.
        allow: column numbers of the candidates; None for all columns.
        deny: column numbers that are never chosen.
        block_bytes: largest memory for scores, in bytes or as text such as "64MB".

    Returns:
        Columns (int64, −1 where there is none) and scores (float32, −inf there), rows × k, best first; of equal scores
        the smaller column comes first.
    """
    k = check.count("k", k)
    return ranking(P, Q, exclude=exclude, allow=allow, deny=deny).top(k, block_bytes)


def _columns(name: str, value: ColumnsLike, n: int) -> NDArray[np.int64]:
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

"""The k best of each row of a block of scores, the same answer from every implementation.

Best first; equal scores in order of columns, so that nothing depends on threads, blocks or the device. Places that no
finite score fills hold column −1 and score −inf. Cost: one pass over the block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gramtower._util import host

_MOST_KEPT = 512  # compiled passes sort the best by insertion, which pays for lists that are not long
_WORTH_LOADING = 1 << 20  # scores; with fewer, loading compiled code takes longer than it saves
WORTH_CALLING = 1 << 16  # scores; with fewer, handing them to threads takes longer than it saves


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns (int64) and scores of the k best of each row; k at most the number of columns."""
    if use_compiled(scores.device, scores.numel(), k):
        from gramtower.retrieval import long_lists

        return long_lists.best(scores, k)
    return best_torch(scores, k)


def use_compiled(device: torch.device, scores: int, k: int = 0, least: int = _WORTH_LOADING) -> bool:
    """Whether compiled passes (scan.py, long_lists.py) are there, and worth it for so many scores and lists of k.

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

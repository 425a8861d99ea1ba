"""The k best of each row of a block of scores, the same answer from every implementation.

Best first; equal scores in order of columns, so that nothing depends on threads, blocks or the device. Places that no
finite score fills hold column −1 and score −inf. Cost: one pass over the block. Checked by tests/test_topk.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gramtower.runtime import host

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
    n = scores.shape[1]
    kept, places, outside = _in_best_groups(scores, k) or (scores, None, None)
    values, columns = torch.topk(kept, min(k + 1, n), dim=1)
    if places is not None:
        columns = places.gather(1, columns)
    if k < n:
        tied = values[:, k] == values[:, k - 1]
        if outside is not None:
            tied |= outside == values[:, k - 1]
        tied &= values[:, k - 1] > -torch.inf
        values, columns = values[:, :k], columns[:, :k]
        again, size = tied.nonzero()[:, 0], max(1, -(-len(scores) // 16))
        for start in range(0, len(again), size):  # torch chose among equals; here the smaller column is chosen
            rows = again[start : start + size]
            ordered = scores[rows].sort(stable=True, dim=1, descending=True)
            values[rows], columns[rows] = ordered.values[:, :k], ordered.indices[:, :k]
    by_column = columns.sort(1)
    by_score = values.gather(1, by_column.indices).sort(stable=True, dim=1, descending=True)
    columns = by_column.values.gather(1, by_score.indices)
    return columns.masked_fill_(by_score.values == -torch.inf, -1), by_score.values


def _in_best_groups(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The scores among which each row's k best are, their columns, and the highest that may be elsewhere.

    Columns are taken in groups of about √(n / k). The k + 1 groups with the highest maxima hold the k best, up to
    scores that equal the least of these maxima; every other group is below it or equal. So all scores are read once,
    for the maxima, where torch.topk reads them several times. None where the groups would be few.
    """
    n = scores.shape[1]
    size = 1 << max(3, round(math.log2(n / (k + 1)) / 2))
    groups = n // size
    if groups < 4 * (k + 1):
        return None
    grouped = scores[:, : groups * size].view(len(scores), groups, size)
    highest = torch.topk(grouped.amax(2), k + 1, dim=1)
    inside = highest.indices[:, :, None].expand(-1, -1, size)
    columns = inside * size + torch.arange(size, device=scores.device)
    rest = torch.arange(groups * size, n, device=scores.device).expand(len(scores), -1)
    kept = torch.cat([grouped.gather(1, inside).flatten(1), scores[:, groups * size :]], 1)
    return kept, torch.cat([columns.flatten(1), rest], 1), highest.values[:, k]

"""The k best of each row of a block of scores, the same answer from every implementation.

Best first; equal scores in order of columns, so that nothing depends on threads, blocks or the device. Places that no
finite score fills hold column −1 and score −inf. Cost: one pass over the block. Checked by tests/test_topk.py.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

_MOST_KEPT = 128  # scan keeps the best sorted by moving them, which pays for short lists
_WORTH_LOADING = 1 << 20  # scores; with fewer, loading compiled code takes longer than it saves
WORTH_CALLING = 1 << 16  # scores; with fewer, handing them to threads takes longer than it saves


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns (int64) and scores of the k best of each row; k at most the number of columns."""
    if compiled(scores.device, scores.numel(), k):
        from gramtower.retrieval import scan

        return scan.best(scores, k)
    return best_torch(scores, k)


def compiled(device: torch.device, scores: int, k: int = 0, least: int = _WORTH_LOADING) -> bool:
    """Whether the compiled passes of scan.py are there, and worth it for so many scores and lists of length k.

    ``least`` is for callers that have them loaded anyhow: from how many scores on they are asked.
    """
    worth = device.type == "cpu" and scores >= least and k <= _MOST_KEPT
    return worth and importlib.util.find_spec("numba") is not None


def best_torch(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See best; in plain torch, for any device."""
    n = scores.shape[1]
    values, columns = torch.topk(scores, min(k + 1, n), dim=1)
    if k < n:
        tied = (values[:, k] == values[:, k - 1]) & (values[:, k] > -torch.inf)
        values, columns = values[:, :k], columns[:, :k]
        again, size = tied.nonzero()[:, 0], -(-len(scores) // 16)
        for start in range(0, len(again), size):  # torch chose among equals; here the smaller column is chosen
            rows = again[start : start + size]
            ordered = scores[rows].sort(stable=True, dim=1, descending=True)
            values[rows], columns[rows] = ordered.values[:, :k], ordered.indices[:, :k]
    by_column = columns.sort(1)
    by_score = values.gather(1, by_column.indices).sort(stable=True, dim=1, descending=True)
    columns = by_column.values.gather(1, by_score.indices)
    return columns.masked_fill_(by_score.values == -torch.inf, -1), by_score.values

"""How many other items are ranked above each relevant one: exact counts for the AUC, without sorting users × items.

For a relevant item r of user i with score s: #{j not relevant, s_ij > s} + ½ #{j not relevant, s_ij = s}, where items
left out of the ranking score −inf and are never above. Cost: one pass over the user's scores for each relevant item.
Checked by tests/test_metrics.py.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower.retrieval.select import compiled


def above(scores: Tensor, relevant: sp.csr_matrix, start: int, stop: int) -> NDArray[np.float64]:
    """One count for each relevant pair of rows start:stop, whose scores are given."""
    if compiled(scores.device, scores.numel()):
        from gramtower.retrieval import scan

        offsets = relevant.indptr[start : stop + 1].astype(np.int64)
        columns = relevant.indices[offsets[0] : offsets[-1]].astype(np.int64)
        return scan.above(scores, offsets - offsets[0], columns)
    return above_torch(scores, relevant, start, stop)


def above_torch(scores: Tensor, relevant: sp.csr_matrix, start: int, stop: int) -> NDArray[np.float64]:
    """See above; by sorting each row, for any device."""
    offsets = relevant.indptr[start : stop + 1]
    counts = np.diff(offsets)
    rows = torch.from_numpy(np.repeat(np.arange(stop - start), counts)).to(scores.device)
    place = np.arange(offsets[-1] - offsets[0]) - np.repeat(offsets[:-1] - offsets[0], counts)
    places = torch.from_numpy(place).to(scores.device)
    columns = torch.from_numpy(relevant.indices[offsets[0] : offsets[-1]].astype(np.int64)).to(scores.device)
    wanted = scores.new_full((stop - start, int(counts.max(initial=0))), -torch.inf)
    wanted[rows, places] = scores[rows, columns]
    total = torch.zeros_like(wanted, dtype=torch.float64)
    for among, sign in ((scores, 1), (wanted, -1)):
        ordered = among.sort(1).values
        not_below = among.shape[1] - torch.searchsorted(ordered, wanted)
        higher = among.shape[1] - torch.searchsorted(ordered, wanted, right=True)
        total += sign * 0.5 * (not_below + higher)
    return np.asarray(total[rows, places].cpu().numpy())

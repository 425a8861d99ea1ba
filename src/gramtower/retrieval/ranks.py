"""Ranks of relevant items among all items: exact counts for the AUC and the MRR, without sorting users × items.

For a relevant item r of user i with score s: #{j not relevant, s_ij > s} + ½ #{j not relevant, s_ij = s}, where items
left out of the ranking have score −inf and are never above. Cost: one pass over the user's scores for each relevant
item, and two for the rank of the first one.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower.retrieval.topk import use_compiled


def above(scores: Tensor, relevant: sp.csr_matrix, start: int, stop: int) -> NDArray[np.float64]:
    """One count for each relevant pair of rows start:stop, whose scores are given."""
    if use_compiled(scores.device, scores.numel()):
        from gramtower.retrieval import scan

        offsets = relevant.indptr[start : stop + 1].astype(np.int64)
        columns = relevant.indices[offsets[0] : offsets[-1]].astype(np.int64)
        return scan.above(scores, offsets - offsets[0], columns)
    return above_torch(scores, relevant, start, stop)


def above_torch(scores: Tensor, relevant: sp.csr_matrix, start: int, stop: int) -> NDArray[np.float64]:
    """The same as ``above``, by sorting each row, for any device."""
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


def first_places(scores: Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """The rank of each row's first relevant item, from 1, or infinity; equal scores are in order of columns.

    ``rows``, which increase, and ``columns`` are those of the relevant pairs, whose scores are above −inf.
    """
    count, n = scores.shape
    i, j = (torch.from_numpy(x.astype(np.int64)).to(scores.device) for x in (rows, columns))
    own = scores[i, j]
    highest = scores.new_full((count,), torch.inf).scatter_reduce_(0, i, own, "amax", include_self=False)
    among = own == highest[i]
    column = torch.full((count,), n, device=scores.device).scatter_reduce_(0, i[among], j[among], "amin")
    before = (scores > highest[:, None]).sum(1)
    before += ((scores == highest[:, None]) & (torch.arange(n, device=scores.device) < column[:, None])).sum(1)
    places = np.asarray(before.cpu().numpy() + 1, dtype=np.float64)
    places[np.bincount(rows, minlength=count) == 0] = np.inf
    return places

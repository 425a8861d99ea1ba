"""Exact top-K: the k right entities with the highest p_iᵀq_j for each left entity, in bounded memory.

Cost: the score products and one pass over the scores while they are in cache. Ties go to the smaller column.
Checked by tests/test_topk.py against sorted dense scores; timed by benchmarks/bench_evaluation.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.matrices import canonical
from gramtower.retrieval.scores import embeddings
from gramtower.retrieval.tiles import best_lists


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
    P, Q = embeddings(P, Q)
    rows, n = len(P), len(Q)
    if exclude is not None:
        exclude = canonical("exclude", exclude, (rows, n))
    denied = None if deny is None else _columns("deny", deny, n)
    chosen = None if allow is None else _columns("allow", allow, n)
    return top_k_checked(P, Q, k, exclude, chosen, denied, block_bytes)


def top_k_checked(
    P: Tensor,
    Q: Tensor,
    k: int,
    exclude: sp.csr_matrix | None = None,
    chosen: NDArray[np.int64] | None = None,
    denied: NDArray[np.int64] | None = None,
    block_bytes: int | str | None = None,
    loaded: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The same of finite float32 embeddings, canonical exclusions and increasing columns, which are not looked at.

    Looking through Q for NaN takes as long as the product of a single row with it: who asks often asks this. With
    ``loaded`` compiled code is used for few rows too.
    """
    rows = len(P)
    if chosen is not None:  # few columns: leave out the others before the product
        if denied is not None:
            chosen, denied = np.setdiff1d(chosen, denied, assume_unique=True), None
        Q = Q[torch.from_numpy(chosen).to(Q.device)]
        exclude = None if exclude is None else exclude[:, chosen]
    found = np.full((rows, k), -1, dtype=np.int64)
    values = np.full((rows, k), -np.inf, dtype=np.float32)
    width = min(k, len(Q))
    if width == 0:
        return found, values
    for start, stop, columns, best in best_lists(P, Q, width, exclude, denied, None, block_bytes, loaded):
        found[start:stop, :width], values[start:stop, :width] = columns, best
    if chosen is not None:
        found = np.where(found >= 0, chosen[found], -1)
    return found, values


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

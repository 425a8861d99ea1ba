"""Exact top-K: the k right entities with the highest p_iᵀq_j for each left entity, in bounded memory.

Cost: the score products and one pass over the scores while they are in cache. Ties go to the smaller column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.matrices import canonical
from gramtower.retrieval.scores import embeddings
from gramtower.retrieval.tiles import Lists, best_lists


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

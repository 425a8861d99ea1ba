"""Lists for many queries at a time: those of several clients share one product with all right embeddings.

Queries that choose among the same entities are one ranking, with what each leaves out as one row of a
sparse matrix; the longest list asked for is made for all of them, and cut. With an approximate index its candidates
take the place of all entities: they are scored exactly, and a query that is left with fewer than its k, as the rest is
excluded, is answered exactly. Queries that choose among some entities only are always answered exactly.

Embeddings are finite: those of a model are checked when it is read, those of new entities when they are made.

Cost: rows × entities × dim for a group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower.retrieval.topk import checked_ranking
from gramtower.serving.index import Index

Rows = NDArray[np.int64]
Found = tuple[Rows, NDArray[np.float32]]
_WIDEST = 2048  # candidates of one query that an index is asked for
_GATHERED = 1 << 22  # numbers of the candidates' embeddings at a time


@dataclass
class Query:
    """Rows that a list is wanted for.

    Attributes:
        embeddings: one row for each list.
        excluded: columns that each list leaves out, increasing.
        k: length of the lists.
        among: the only columns to choose from, increasing; None for all.
        key: equal for queries with the same ``among``.
        notes: numbers of the request that its answer repeats, such as unknown ids, by name.
    """

    embeddings: Tensor
    excluded: list[Rows]
    k: int
    among: Rows | None = None
    key: Hashable = field(default=None)
    notes: dict[str, int] = field(default_factory=dict)


def best_lists(queries: Sequence[Query], Q: Tensor, index: Index | None = None) -> list[Found]:
    """Columns (−1 for none) and scores of each query, rows × k."""
    groups: dict[Hashable, list[int]] = {}
    for place, query in enumerate(queries):
        groups.setdefault(query.key, []).append(place)
    answers: list[Found | None] = [None] * len(queries)
    for places in groups.values():
        members = [queries[place] for place in places]
        P = torch.cat([query.embeddings for query in members])
        excluded = [columns for query in members for columns in query.excluded]
        k, among = min(max(query.k for query in members), len(Q)), members[0].among
        if index is None or among is not None:
            found, scores = _exact(P, Q, excluded, k, among)
        else:
            found, scores = _approximate(P, Q, excluded, k, index)
        start = 0
        for place, query in zip(places, members, strict=True):
            stop = start + len(query.embeddings)
            answers[place] = found[start:stop, : query.k], scores[start:stop, : query.k]
            start = stop
    return [answer for answer in answers if answer is not None]


def _exact(P: Tensor, Q: Tensor, excluded: Sequence[Rows], k: int, among: Rows | None = None) -> Found:
    lengths = [len(columns) for columns in excluded]
    left_out = None
    if any(lengths):
        indices = np.concatenate(excluded)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        left_out = sp.csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(P), len(Q)))
    return checked_ranking(P.float(), Q.float(), left_out, among).top(k, loaded=True)


def _scores(P: Tensor, Q: Tensor, candidates: Rows) -> NDArray[np.float32]:
    """Scores of each row's candidates, some rows at a time: their embeddings are gathered; −1 is scored like 0."""
    columns = torch.from_numpy(np.maximum(candidates, 0))
    step = max(1, _GATHERED // max(1, columns.shape[1] * Q.shape[1]))
    scores = np.empty(candidates.shape, np.float32)
    for start in range(0, len(P), step):
        part = slice(start, start + step)
        scores[part] = torch.einsum("rd,rcd->rc", P[part], Q[columns[part]]).float().numpy()
    return scores


def _approximate(P: Tensor, Q: Tensor, excluded: Sequence[Rows], k: int, index: Index) -> Found:
    widest = max((len(columns) for columns in excluded), default=0)
    candidates = index.search(P.float().numpy(), min(len(Q), k + widest, max(_WIDEST, k)))
    for row, columns in enumerate(excluded):
        if len(columns):
            candidates[row][np.isin(candidates[row], columns)] = -1
    scores = _scores(P, Q, candidates)
    scores[candidates < 0] = -np.inf
    order = np.lexsort((candidates, -scores), axis=1)[:, :k]
    found, values = np.take_along_axis(candidates, order, 1), np.take_along_axis(scores, order, 1)
    if found.shape[1] < k:
        found = np.pad(found, ((0, 0), (0, k - found.shape[1])), constant_values=-1)
        values = np.pad(values, ((0, 0), (0, k - values.shape[1])), constant_values=-np.inf)
    wanted = np.minimum(k, len(Q) - np.array([len(columns) for columns in excluded]))
    short = np.flatnonzero((found >= 0).sum(1) < wanted)
    if len(short):
        again = _exact(P[torch.from_numpy(short)], Q, [excluded[row] for row in short.tolist()], k)
        found[short], values[short] = again
    return found, values.astype(np.float32)

"""Two sets of observed pairs as one: the entities of the first, then those that only the second has.

A pair that both have is taken from the second, with its label, weight and time. Ids are joined as in data/lookup.py and
keep the type of the first. Cost: O(pairs log pairs).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.lookup import as_known, index_of, join


def union(known: Interactions, more: Interactions, name: str = "more", strangers: bool = True) -> Interactions:
    """The pairs of both.

    Args:
        known: the first ones; their rows and columns keep their places.
        more: the second ones; weights that one of the two has not are ones, times are kept if both have them.
        name: of the argument that gave the second ones, for errors.
        strangers: whether entities that are new in ``more`` are added; their pairs are left out otherwise.
    """
    rows, left_ids = _places(f"{name}: left ids", known.left_ids, more.left_ids, strangers)
    columns, right_ids = _places(f"{name}: right ids", known.right_ids, more.right_ids, strangers)
    shape = (len(left_ids), len(right_ids))
    first, second = known.matrix.tocoo(), more.matrix.tocoo()
    i, j = rows[second.row], columns[second.col]
    kept = (i >= 0) & (j >= 0)
    keys = np.concatenate([_keys(first.row, first.col, shape), _keys(i[kept], j[kept], shape)])
    order = np.argsort(keys, kind="stable")
    last = np.append(np.diff(keys[order]) > 0, True)[: len(order)]  # of the entries of one pair, the second's
    chosen = order[last]
    offsets = np.searchsorted(keys[chosen], np.arange(shape[0] + 1, dtype=np.int64) * shape[1])
    data = np.concatenate([first.data, second.data[kept]])[chosen]
    matrix = sp.csr_matrix((data, keys[chosen] % max(shape[1], 1), offsets), shape=shape)
    weights = times = None
    if known.weights is not None or more.weights is not None:
        parts = [np.ones(len(p), np.float32) if p.weights is None else p.weights for p in (known, more)]
        weights = np.concatenate([parts[0], parts[1][kept]])[chosen]
    if known.times is not None and more.times is not None:
        times = np.concatenate([known.times, more.times[kept]])[chosen]
    report = {"pairs": int(matrix.nnz), "left": shape[0], "right": shape[1]}
    left, right = (
        size if count == len(ids) else None
        for size, count, ids in zip(known.numbered, shape, (known.left_ids, known.right_ids), strict=True)
    )
    return replace(
        known, matrix=matrix, left_ids=left_ids, right_ids=right_ids, weights=weights, times=times, report=report,
        numbered=(left, right),
    )  # fmt: skip


def _keys(rows: NDArray[Any], columns: NDArray[Any], shape: tuple[int, int]) -> NDArray[np.int64]:
    return np.asarray(rows.astype(np.int64) * shape[1] + columns)


def _places(
    name: str, known: NDArray[Any], given: NDArray[Any], strangers: bool
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The row of each given id among those known and, after them, the new ones; and all of these ids."""
    places = join(given, index_of(known)) if len(known) else np.full(len(given), -1, dtype=np.int64)
    new = places < 0
    if not strangers or not new.any():
        return places, known
    places[new] = len(known) + np.arange(int(new.sum()))
    added = given[new].tolist()
    if len(known) and known.dtype.kind != given.dtype.kind:  # numbers and text
        added = list(map(str, added)) if known.dtype == object else as_known(added, known)
        if known.dtype != object and any(isinstance(one, str) for one in added):
            example = next(one for one in added if isinstance(one, str))
            check.fail(name, repr(example), "whole numbers, as those that are known")
    ids = np.empty(len(known) + len(added), dtype=known.dtype if len(known) else given.dtype)
    ids[: len(known)], ids[len(known) :] = known, added
    return places, ids

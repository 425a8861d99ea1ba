"""One process's part of a problem whose data every process holds whole: rows are cut, nothing else changes.

For data that no process could hold, read own rows (data/partition.py) and give them to Problem with its ``shards``.
Checked by tests/test_distributed.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import checked
from gramtower.data.pairs import from_sparse
from gramtower.distributed.group import Group
from gramtower.distributed.shards import Rows, Shards, entity_costs, spread
from gramtower.engine.objective.problem import Problem


def sharded_problem(
    group: Group,
    pairs: Any,
    left: Any = None,
    right: Any = None,
    *,
    row_work: float = 1.0,
    shards: Shards | None = None,
    **options: Any,
) -> Problem:
    """The part of ``Problem(pairs, left, right, **options)`` that this process of a group holds.

    Args:
        group: the processes.
        pairs: all pairs, the same in every process.
        left: features of all left entities, or None.
        right: features of all right entities, or None.
        row_work: tower work of an entity in units of a pair's, for even shares.
        shards: who holds what; None for even shares.
        options: the other arguments of :class:`Problem`, for all entities and pairs.
    """
    if isinstance(pairs, Interactions):
        options.setdefault("pair_weights", pairs.weights)
        pairs = pairs.matrix
    pattern, labels = from_sparse("pairs", pairs)
    counts = pattern.row_counts.numpy()
    shards = shards or spread(group, entity_costs(counts, row_work), np.ones(pattern.shape[1]))
    rows, columns = shards.left, shards.right
    first, last = int(pattern.offsets[rows.first]), int(pattern.offsets[rows.stop])
    offsets = pattern.offsets[rows.first : rows.stop + 1].numpy() - first
    entries = (labels[first:last], pattern.columns[first:last].numpy(), offsets)
    own = sp.csr_matrix(entries, shape=(rows.count, pattern.shape[1]))
    for name, side in (("left_weights", rows), ("right_weights", columns)):
        if options.get(name) is not None and not isinstance(options[name], str):
            whole = check.weights(name, options[name], side.total)
            assert whole is not None
            options[name] = whole[side.first : side.stop]
    if options.get("pair_weights") is not None:
        given = check.weights("pair_weights", options["pair_weights"], len(pattern))
        assert given is not None
        options["pair_weights"] = given[first:last]
    if isinstance(options.get("imputed"), (tuple, list)):
        factors = zip(options["imputed"], (rows, columns), strict=True)
        options["imputed"] = tuple(_cut(factor, side) for factor, side in factors)
    return Problem(own, _cut(left, rows), _cut(right, columns), shards=shards, **options)


def _cut(rows: Any, side: Rows) -> NDArray[Any] | Any:
    if rows is None:
        return None
    rows = checked("features", rows).tocsr() if sp.issparse(rows) else rows
    if rows.shape[0] != side.total:
        check.fail("features", f"shape {tuple(rows.shape)}", f"{side.total} rows, one for each entity of that side")
    return rows[side.first : side.stop]

"""What a fit was given, as this process holds it: everything with one process, own rows with several.

Over several processes pairs come as a :class:`~gramtower.data.partition.Part`, or whole and the same in every process;
then each keeps its own rows. Checked by tests/test_distributed_fit.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.partition import Part
from gramtower.data.tables import FeatureTable
from gramtower.distributed.agreement import Digest, agree
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Rows, Shards, entity_costs, spread, whole
from gramtower.estimator.matrices import aligned, history_features, matrix_and_ids

Ids = tuple[NDArray[Any] | None, NDArray[Any] | None]


@dataclass
class Given:
    """The data of a fit.

    Attributes:
        matrix: own left rows × all right columns.
        ids: of the own left rows, and of all right columns.
        own_right: ids of the own right rows.
        shards: who holds what.
        pairs: number of pairs of all processes.
        weights: of the own pairs, or None.
        features: of the own entities of both sides.
        history: whether left entities are described by their pairs.
        test: own held-out pairs, or None.
    """

    matrix: sp.csr_matrix
    ids: Ids
    own_right: NDArray[Any] | None
    shards: Shards
    pairs: int
    weights: NDArray[Any] | None
    features: tuple[Any, Any] = (None, None)
    history: bool = False
    test: sp.csr_matrix | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of all processes."""
        return self.shards.left.total, self.shards.right.total


def take_up(
    group: Group, pairs: Any, left_features: Any, right_features: Any, validation: Any, row_work: float
) -> Given:
    """A fit's arguments as this process holds them; see TwoTower.fit for what they may be."""
    if isinstance(left_features, str):
        check.choice("left_features", left_features, ("history",))
    with group.together():
        given = _from_part(pairs, group) if isinstance(pairs, Part) else _from_whole(group, pairs, row_work)
    if not isinstance(pairs, Part) and group.size > 1:
        matrix = matrix_and_ids(pairs)[0]
        keys = np.arange(matrix.nnz) * np.int64(matrix.shape[1]) + matrix.indices
        digest = Digest().add(keys, matrix.data).text(SINGLE)
        agree(group, {"pairs": f"{matrix.shape[0]} × {matrix.shape[1]}, {matrix.nnz} pairs, digest {digest}"})
    given.history = isinstance(left_features, str)
    shards, spread_data = given.shards, isinstance(pairs, Part)
    with group.together():
        left = (
            history_features(given.matrix)
            if isinstance(left_features, str)
            else _features("left_features", left_features, given.ids[0], shards.left, spread_data)
        )
        right = _features("right_features", right_features, given.own_right, shards.right, spread_data)
        given.features = left, right
        if validation is not None:
            given.test = _validation(validation, pairs, given)
        elif isinstance(pairs, Part):
            given.test = pairs.held_out
    return given


def _from_whole(group: Group, pairs: Any, row_work: float) -> Given:
    matrix, ids = matrix_and_ids(pairs)
    weights = pairs.weights if isinstance(pairs, Interactions) else None
    if group.size == 1:
        return Given(matrix, ids, ids[1], whole(matrix.shape), matrix.nnz, weights)
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    shards = spread(group, entity_costs(np.diff(matrix.indptr), row_work), np.ones(matrix.shape[1]))
    rows, columns = shards.left, shards.right
    span = slice(int(matrix.indptr[rows.first]), int(matrix.indptr[rows.stop]))
    own_ids = None if ids[0] is None else ids[0][rows.first : rows.stop]
    own_right = None if ids[1] is None else ids[1][columns.first : columns.stop]
    own = matrix[rows.first : rows.stop]
    return Given(own, (own_ids, ids[1]), own_right, shards, matrix.nnz, None if weights is None else weights[span])


def _from_part(part: Part, group: Group) -> Given:
    if part.shards.group.size != group.size:
        given = f"a part read for {part.shards.group.size} processes"
        check.fail("pairs", given, f"one read for {group.size}: read_part inside the process group")
    ids = part.left_ids, part.right_ids()
    return Given(part.matrix, ids, part.right_ids(own=True), part.shards, part.pairs, part.weights)


def _features(name: str, features: Any, ids: NDArray[Any] | None, rows: Rows, own: bool) -> Any:
    """Features of the own entities: encoded by id, given as own rows, or cut from those of all."""
    if isinstance(features, FeatureTable):
        return features.encode(ids)
    if features is None or rows.count == rows.total:
        return features
    features = features.tocsr() if sp.issparse(features) else features
    expected = rows.count if own else rows.total
    if features.shape[0] != expected:
        whose = "this process's own entities" if own else "all entities"
        check.fail(name, f"{features.shape[0]} rows", f"{expected}, one for each of {whose} of that side")
    return features if own else features[rows.first : rows.stop]


def _validation(validation: Any, pairs: Any, given: Given) -> sp.csr_matrix:
    if isinstance(pairs, Part):
        if not isinstance(validation, Part):
            check.fail("validation", type(validation).__name__, "nothing: a partition holds its own held-out pairs")
        return validation.matrix
    matrix, ids = matrix_and_ids(pairs)
    rows = given.shards.left
    return aligned("validation", validation, ids, matrix.shape)[rows.first : rows.stop]

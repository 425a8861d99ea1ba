"""What a fit was given, as this process holds it: everything with one process, own rows with several.

Over several processes pairs come as a :class:`~gramtower.data.partition.Part`, or whole and the same in every process;
then each keeps its own rows. Checked by tests/test_distributed_fit.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import checked
from gramtower.data.partition import Part
from gramtower.data.tables import FeatureTable
from gramtower.distributed.agreement import Digest, agree
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Rows, Shards, entity_costs, spread, whole
from gramtower.estimator.inputs import Ids, Inputs, training_inputs
from gramtower.estimator.matrices import aligned, matrix_and_ids


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
        inputs: what each tower sees.
        features: that of the own entities of both sides.
        test: own held-out pairs, or None.
        hidden: widths of the towers' hidden layers.
        dim: size of the embeddings.
    """

    matrix: sp.csr_matrix
    ids: Ids
    own_right: NDArray[Any] | None
    shards: Shards
    pairs: int
    weights: NDArray[Any] | None
    inputs: tuple[Inputs, Inputs] = (Inputs(()), Inputs(()))
    features: tuple[Any, Any] = (None, None)
    test: sp.csr_matrix | None = None
    hidden: tuple[int, ...] = ()
    dim: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of all processes."""
        return self.shards.left.total, self.shards.right.total


Work = Callable[[tuple[int, int]], float]  # tower work of an entity in units of a pair's, for a shape (m, n)


def take_up(
    group: Group, pairs: Any, left_features: Any, right_features: Any, validation: Any, row_work: Work
) -> Given:
    """A fit's arguments as this process holds them; see TwoTower.fit for what they may be."""
    with group.together():
        given = _from_part(pairs, group) if isinstance(pairs, Part) else _from_whole(group, pairs, row_work)
    if not isinstance(pairs, Part) and group.size > 1:
        matrix = matrix_and_ids(pairs)[0]
        keys = np.arange(matrix.nnz) * np.int64(matrix.shape[1]) + matrix.indices
        digest = Digest().add(keys, matrix.data).text(SINGLE)
        agree(group, {"pairs": f"{matrix.shape[0]} × {matrix.shape[1]}, {matrix.nnz} pairs, digest {digest}"})
    shards, own = given.shards, isinstance(pairs, Part)
    with group.together():
        left_features = _own_rows("left_features", left_features, shards.left, own)
        right_features = _own_rows("right_features", right_features, shards.right, own)
        left, left_rows = training_inputs("left", left_features, given.ids[0], given.matrix, shards.left)
        right, right_rows = training_inputs("right", right_features, given.own_right, given.matrix.T, shards.right)
        given.inputs, given.features = (left, right), (left_rows, right_rows)
        if validation is not None:
            given.test = _validation(validation, pairs, given)
        elif isinstance(pairs, Part):
            given.test = pairs.held_out
    return given


def _from_whole(group: Group, pairs: Any, row_work: Work) -> Given:
    matrix, ids = matrix_and_ids(pairs)
    weights = pairs.weights if isinstance(pairs, Interactions) else None
    if group.size == 1:
        return Given(matrix, ids, ids[1], whole(matrix.shape), matrix.nnz, weights)
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    shards = spread(group, entity_costs(np.diff(matrix.indptr), row_work(matrix.shape)), np.ones(matrix.shape[1]))
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


def own_weights(name: str, weights: Any, rows: Rows) -> Any:
    """Weights of the own entities, cut from those of all; None and text are the same for all."""
    if weights is None or isinstance(weights, str) or rows.count == rows.total:
        return weights
    every = check.weights(name, weights, rows.total)
    return None if every is None else every[rows.first : rows.stop]


def _own_rows(name: str, features: Any, rows: Rows, own: bool) -> Any:
    """Matrices among the features as rows of the own entities: given so, or cut from those of all."""
    if isinstance(features, (list, tuple)):
        return [_own_rows(name, part, rows, own) for part in features]
    if isinstance(features, FeatureTable) or not hasattr(features, "shape") or rows.count == rows.total:
        return features
    features = checked(name, features).tocsr() if sp.issparse(features) else features
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

"""The inputs of one side from what a fit is given: parts told apart and checked, scalings learned, features made.

What they are afterwards, and for new entities, is inputs.py. Cost: O(entries).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.matrices import checked
from gramtower.data.tables import FeatureTable
from gramtower.distributed.group import Group
from gramtower.distributed.shards import Rows
from gramtower.model.columns import is_frame
from gramtower.model.inputs import NAMES, Inputs, Part, beside, history_features, is_matrix
from gramtower.model.scaling import dense_scaling, sparse_scaling


def feature_width(given: Any, right: int) -> int:
    """Number of features that a hidden layer of a side would see; 0 where it has ids.

    What is no feature at all counts as none here, and is refused by :func:`training_parts`.
    """
    total = 0
    for part in given if isinstance(given, (list, tuple)) else [given]:
        if part is None or (isinstance(part, str) and part != "history"):
            return 0
        if isinstance(part, str):
            total += right
        else:
            shape: Any = getattr(part, "shape", ())
            total += part.width if isinstance(part, FeatureTable) else int(shape[1]) if len(shape) == 2 else 1
    return total


def training_parts(
    side: str, given: Any, ids: NDArray[Any] | None, matrix: sp.csr_matrix, place: Rows | None = None
) -> list[tuple[Part, Any]]:
    """The parts of one side's inputs, each with its features of the training data as they came.

    Args:
        side: "left" or "right".
        given: what the caller said: None for ids, one part, or a sequence of parts.
        ids: ids of the side's entities, None for row numbers.
        matrix: the training pairs, one row for each entity of the side.
        place: over several processes, which of all entities of the side are this process's; ids, rows of features and,
            on the left, of the matrix are theirs.
    """
    place = place or Rows((0, matrix.shape[0]))
    wanted = list(given) if isinstance(given, (list, tuple)) else ["id" if given is None else given]
    if not wanted:
        check.fail(f"{side}_features", repr(given), "at least one part; None for ids alone")
    read = [_training_part(side, one, ids, matrix, place) for one in wanted]
    named = [part.kind for part, _ in read if part.kind in NAMES]
    if len(set(named)) < len(named):
        check.fail(f"{side}_features", " + ".join(named), "id and history once each")
    if len(read) == 1 and read[0][0].factor != 1:
        check.fail(f"{side}_features", repr(wanted[0]), "other parts beside it, or 'id'")
    return read


def training_inputs(
    side: str, parts: list[tuple[Part, Any]], place: Rows, group: Group, scale: bool
) -> tuple[Inputs, Any]:
    """The inputs of one side, and its features as :class:`~gramtower.Problem` takes them, scaled if asked to be.

    All processes must call it together.
    """
    name, made = f"{side}_features", []
    for part, rows in parts:
        if scale and part.kind == "dense":
            part = replace(part, scaling=dense_scaling(name, group, rows, place.total))
        elif scale and part.kind in ("sparse", "table"):
            apart = None if part.table is None else part.table.columns_apart
            part = replace(part, scaling=sparse_scaling(name, group, sp.csr_matrix(rows), place.total, apart))
        made.append((part, rows if part.scaling is None else part.scaling(name, rows)))
    several = len(made) > 1
    features = [_own_columns(place, part.factor) if several and rows is None else rows for part, rows in made]
    return Inputs(tuple(part for part, _ in made)), beside(features)


def _training_part(
    side: str, one: Any, ids: NDArray[Any] | None, matrix: sp.csr_matrix, place: Rows
) -> tuple[Part, Any]:
    rows = place.count
    if isinstance(one, str):
        names = NAMES if side == "left" else NAMES[:1]
        name, times, factor = one.partition("*")
        if times and name == "id":
            return Part("id", place.total, factor=_factor(f"{side}_features", one, factor)), None
        if one not in names:
            known = " or ".join(map(repr, names))
            check.fail(f"{side}_features", repr(one), f"{known}, or a FeatureTable, which takes the path of a file")
        if one == "id":
            return Part("id", place.total), None
        return Part("history", matrix.shape[1]), history_features(matrix)
    if isinstance(one, FeatureTable):
        encoded = one.encode(range(place.first, place.stop) if ids is None else ids)
        if rows == place.total and one.report["ids_without_features"] == rows:  # of several processes none knows all
            example = repr(0 if ids is None else ids.tolist()[0])
            given = f"a table of {len(one):,} rows, none of them with the id of a {side} entity"
            check.fail(f"{side}_features", given, f"ids such as {example} in column {one.id!r}")
        if not encoded.shape[1]:
            given = f"a table without a value in {', '.join(one.columns)}"
            check.fail(f"{side}_features", given, "at least one column with values")
        return Part("table", encoded.shape[1], FeatureTable.encoder_from_json(one.to_json())), encoded
    refuse_frame(side, one)
    if not is_matrix(one) or len(one.shape) != 2 or one.shape[0] != rows:
        shape = f" of shape {tuple(one.shape)}" if hasattr(one, "shape") else ""
        expected = f'scipy.sparse, numpy or torch with {rows} rows, a FeatureTable, "id", "history", or a list of these'
        check.fail(f"{side}_features", type(one).__name__ + shape, expected)
    if not one.shape[1]:
        check.fail(f"{side}_features", f"a matrix of shape {tuple(one.shape)}", "at least one column")
    one = checked(f"{side}_features", one) if sp.issparse(one) else one
    check.finite(f"{side}_features", one.data if sp.issparse(one) else check.as_float_array(f"{side}_features", one))
    return Part("sparse" if sp.issparse(one) else "dense", int(one.shape[1])), one


def refuse_frame(side: str, one: Any) -> None:
    """Refuse a frame: numpy would take its rows for those of the entities, whatever their order."""
    if is_frame(one):
        expected = 'a FeatureTable, which is joined by id: FeatureTable.inferred(frame, id="…")'
        check.fail(f"{side}_features", f"a {type(one).__name__}", expected)


def _factor(name: str, given: str, text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        check.fail(name, repr(given), "'id' or, with a positive number, such as 'id*0.1'")
    return factor


def _own_columns(place: Rows, factor: float) -> sp.csr_matrix:
    """A column for each entity of the side, with the factor in each own row."""
    entries = np.full(place.count, factor, np.float32), np.arange(place.first, place.stop), np.arange(place.count + 1)
    return sp.csr_matrix(entries, shape=(place.count, place.total))

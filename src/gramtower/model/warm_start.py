"""A fitted model's weights in fresh towers: first layers feature by feature, everything else as it is.

Entities and features that are new start near the average of those known.

More pairs for a fitted model: what it knows stays, new entities get rows, and a few iterations follow.

Of the old pairs a model keeps which there are, not their labels and weights. Where all labels were 1 and there were no
weights that is everything; a model fitted otherwise is refused, because a fit with other labels would be of another
objective. Of features it keeps how they are encoded, not the rows: tables and matrices must be given whole. Entities
that were added by a table and have no pairs yet are no part of the fit; afterwards they are added again, described by
the table that is given. Other rows of that table stay out of the model.
Cost: O(pairs log pairs), and the iterations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.features import as_features
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions, union
from gramtower.data.matrices import checked
from gramtower.data.tables import FeatureTable
from gramtower.engine.towers.parameters import side_of
from gramtower.engine.towers.towers import Towers
from gramtower.model.feature_spec import FeatureSpec
from gramtower.model.fit_data import FitData
from gramtower.model.fitted import FittedModel
from gramtower.model.given_features import GivenFeatures
from gramtower.model.refinement import with_feature_columns
from gramtower.model.side import Side


def carry_over(fitted: FittedModel, towers: Towers, data: FitData) -> None:
    """Copy the weights of a fitted model into fresh towers for other data."""
    sides, inputs, ids = (fitted.left, fitted.right), data.inputs, data.ids
    before, after = fitted.known_towers("start from it").parameters(), towers.parameters()
    for name, fresh in after.items():
        if name not in before.layout.shapes:
            check.fail("warm_start", f"towers with a new parameter {name}", "the same architecture as before")
        old = before[name].cpu()
        side = side_of(name)
        index = ("left", "right").index(side)
        known, new = sides[index].inputs, inputs[index]
        if name.endswith(".0.weight") and (len(old), len(fresh)) == (known.width, new.width):
            turned = (ids, (sides[0].ids, sides[1].ids))  # of this side, and of the other
            for here, there, places in new.columns_in(side, known, *((t[index], t[1 - index]) for t in turned)):
                rows, part = fresh[here], old[there]
                rows.mul_(0.1).add_(part.mean(0))
                rows[places >= 0] = part[places[places >= 0]]
        elif old.shape == fresh.shape:
            fresh.copy_(old)
        else:
            given = f"{name} of shape {tuple(fresh.shape)}"
            check.fail("warm_start", given, f"the shape {tuple(old.shape)} it had before")
    towers.load(after)


def start_from_outputs(fitted: FittedModel, towers: Towers, data: FitData) -> None:
    """Let linear towers over ids start from what a fitted model's towers, which see features too, give for the data."""
    wide = with_feature_columns(towers, data)
    carry_over(fitted, wide, data)
    start = towers.parameters()
    for side, rows, count in zip(("left", "right"), data.features, data.shape, strict=True):
        start[towers.local_names(side)["0.weight"]].copy_(wide.embed(side, as_features(side, rows, count)))
    towers.load(start)


def refuse_increment(fitted: FittedModel, data: FitData) -> None:
    """Refuse to start from a model on data that lack most of what it knows: a fit keeps nothing but its own pairs."""
    seen, matrix = fitted.observed(), data.matrix
    degrees = {
        "left": (np.diff(seen.indptr), np.diff(matrix.indptr)),
        "right": tuple(np.bincount(x.indices, minlength=x.shape[1]) for x in (seen, matrix)),
    }
    for place, side in enumerate((fitted.left, fitted.right)):
        known, ids = np.flatnonzero(degrees[side.name][0]), data.ids[place]
        if side.ids is None or ids is None:
            rows = np.where(known < len(degrees[side.name][1]), known, -1)
        else:
            rows = join(side.ids[known], index_of(ids))
        found = int((degrees[side.name][1][rows[rows >= 0]] > 0).sum())
        if 2 * found < len(known):
            check.fail(
                "pairs",
                f"pairs of {found:,} of the {len(known):,} {side.name} entities that the model knows",
                "all pairs, old and new, with warm_start=True; model.update(pairs) adds pairs to those it knows",
            )


def grown_pairs(fitted: FittedModel, more: Any, dropped: tuple[bool, bool] = (False, False)) -> Any:
    """The pairs that a model knows, and more: entities keep their rows, new ones come after them.

    Args:
        fitted: the model.
        more: pairs to add.
        dropped: for both sides, whether entities that were added after training and have no pairs are left out:
            nothing is to be learned from them.

    Returns:
        Interactions; a matrix where the model knows entities by number.
    """
    if not fitted.shards.single:
        check.fail("model", f"one spread over {fitted.shards.group.size} processes", "one of a single process")
    if not fitted.plain_pairs:
        given = "a model fitted with labels other than 1 or with weights, which it does not keep"
        check.fail("model", given, "fit(pairs, warm_start=True) with all pairs, old and new")
    ids = fitted.left.ids, fitted.right.ids
    if ids[0] is None or ids[1] is None:
        if not sp.issparse(more):
            given = type(more).__name__
            check.fail("more_pairs", given, "a scipy.sparse matrix, as in training: entities are known by number")
        second = Interactions.from_matrix(checked("more_pairs", more))
        return union(Interactions.from_matrix(fitted.observed()), second, "more_pairs").matrix
    if not isinstance(more, Interactions):
        check.fail("more_pairs", type(more).__name__, "gramtower.Interactions, as in training")
    observed = fitted.observed()
    kept = [
        np.flatnonzero((np.arange(len(side)) < side.trained) | (counts > 0) | (not drop))
        for side, counts, drop in zip(
            sides_of(fitted), (np.diff(observed.indptr), np.bincount(observed.indices, minlength=observed.shape[1])),
            dropped, strict=True,
        )
    ]  # fmt: skip
    known = Interactions(
        sp.csr_matrix(observed[kept[0]][:, kept[1]]), ids[0][kept[0]], ids[1][kept[1]],
        left_name=more.left_name, right_name=more.right_name,
        same_entities=fitted.same_entities or bool(more.same_entities),
    )  # fmt: skip
    return union(known, more, "more_pairs")


def sides_of(fitted: FittedModel) -> tuple[Side, Side]:
    """Return the left and the right side."""
    return fitted.left, fitted.right


def described_features(side: str, inputs: FeatureSpec, ids: NDArray[Any] | None, given: Any) -> Any:
    """What the tower of a side sees: as before where the model can tell, otherwise as given, for all entities."""
    name, wanted = f"{side}_features", [part.kind for part in inputs.parts if part.kind not in ("id", "history")]
    if given is None:
        if wanted:
            expected = (
                f"features of all {side} entities, old and new: the model keeps how they are encoded, not the rows"
            )
            check.fail(name, f"nothing, for a model that sees {inputs.kind}", expected)
        return [part.name for part in inputs.parts]
    for part in GivenFeatures(side, given).parts:
        if not isinstance(part, FeatureTable) or ids is None or not len(ids):
            continue
        found = int((part.match(ids) < len(part)).sum())
        if 2 * found < len(ids):
            expected = f"the table of all {side} entities, old and new: the model does not keep its rows"
            check.fail(name, f"rows of {found:,} of the {len(ids):,} {side} entities that the model knows", expected)
    return given

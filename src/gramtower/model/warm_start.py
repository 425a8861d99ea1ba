"""A fitted model's weights in fresh towers: first layers feature by feature, everything else as it is.

Entities and features that are new start near the average of those known.
"""

from __future__ import annotations

import numpy as np

from gramtower._util import checks as check
from gramtower.data.lookup import index_of, join
from gramtower.engine.towers.parameters import side_of
from gramtower.engine.towers.towers import Towers
from gramtower.model.fit_data import FitData
from gramtower.model.fitted import FittedModel


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

"""More pairs for a fitted model: what it knows stays, new entities get rows, and a few iterations follow.

Of the old pairs a model keeps which there are, not their labels and weights. Where all labels were 1 and there were no
weights that is everything; a model fitted otherwise is refused, because a fit with other labels would be of another
objective. Of features it keeps how they are encoded, not the rows: tables and matrices must be given whole. Entities
that were added by a table and have no pairs yet are no part of the fit; afterwards they are added again, described by
the table that is given. Other rows of that table stay out of the model.
Cost: O(pairs log pairs), and the iterations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.lookup import index_of, join
from gramtower.data.matrices import checked
from gramtower.data.tables import FeatureTable
from gramtower.data.union import union
from gramtower.model import newcomers
from gramtower.model.fit import fit, tables_of
from gramtower.model.fitted import FittedModel
from gramtower.model.inputs import Inputs
from gramtower.model.settings import ModelSettings
from gramtower.model.side import Side
from gramtower.training.callbacks import Callback

ITERATIONS = 2  # unless given; benchmarks/bench_updates.py tries others


def update(
    settings: ModelSettings,
    fitted: FittedModel,
    more: Any,
    left_features: Any = None,
    right_features: Any = None,
    iterations: int = ITERATIONS,
    callbacks: Iterable[Callback] = (),
) -> FittedModel:
    """A model of all that a fitted one knows and of more pairs; see TwoTower.update."""
    settings = settings.with_changes(max_iterations=check.count("iterations", iterations, minimum=0))
    features = (
        _features("left", fitted.left.inputs, fitted.left.ids, left_features),
        _features("right", fitted.right.inputs, fitted.right.ids, right_features),
    )
    described = [side.added > 0 and _all_tables(given) for side, given in zip(_sides(fitted), features, strict=True)]
    pairs = grown_pairs(fitted, more, (described[0], described[1]))
    found = fit(settings, pairs, *features, previous=fitted, callbacks=callbacks)
    for before, given, kept in zip(_sides(fitted), features, described, strict=True):
        found = _with_kept(found, before, tables_of(before.name, given)) if kept else found
    return found


def _with_kept(found: FittedModel, before: Side, tables: Any) -> FittedModel:
    """A model with the entities that were added to a side before and still have no pairs, as tables describe them."""
    this = found.side(before.name)
    assert before.ids is not None
    assert this.ids is not None
    added = before.ids[before.trained :]
    wanted, name = added[join(added, index_of(this.ids)) < 0], f"{before.name}_features"
    if not len(wanted):
        return found
    what = newcomers.described(this, tables)
    rows = what.take(name, join(wanted, what.places(name)))  # without a row there: every column is missing
    frames = rows if isinstance(rows, list) else [rows]
    frames = [
        frame.drop(part.table.id) if part.table is not None and part.table.id in frame.columns else frame
        for part, frame in zip(this.inputs.given, frames, strict=True)
    ]
    return found.grown(before.name, frames if len(frames) > 1 else frames[0], ids=wanted, kept=True)[0]


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
            _sides(fitted), (np.diff(observed.indptr), np.bincount(observed.indices, minlength=observed.shape[1])),
            dropped, strict=True,
        )
    ]  # fmt: skip
    known = Interactions(
        sp.csr_matrix(observed[kept[0]][:, kept[1]]), ids[0][kept[0]], ids[1][kept[1]],
        left_name=more.left_name, right_name=more.right_name,
        same_entities=fitted.same_entities or bool(more.same_entities),
    )  # fmt: skip
    return union(known, more, "more_pairs")


def _sides(fitted: FittedModel) -> tuple[Side, Side]:
    return fitted.left, fitted.right


def _all_tables(features: Any) -> bool:
    """Whether features are tables, next to ids and histories, so that entities without pairs are described by id."""
    parts = [part for part in (features if isinstance(features, (list, tuple)) else [features]) if part is not None]
    return all(isinstance(part, (str, FeatureTable)) for part in parts) and any(
        isinstance(part, FeatureTable) for part in parts
    )


def _features(side: str, inputs: Inputs, ids: NDArray[Any] | None, given: Any) -> Any:
    """What the tower of a side sees: as before where the model can tell, otherwise as given, for all entities."""
    name, wanted = f"{side}_features", [part.kind for part in inputs.parts if part.kind not in ("id", "history")]
    if given is None:
        if wanted:
            expected = (
                f"features of all {side} entities, old and new: the model keeps how they are encoded, not the rows"
            )
            check.fail(name, f"nothing, for a model that sees {inputs.kind}", expected)
        return [part.name for part in inputs.parts]
    for part in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(part, FeatureTable) or ids is None or not len(ids):
            continue
        found = int((part.match(ids) < len(part)).sum())
        if 2 * found < len(ids):
            expected = f"the table of all {side} entities, old and new: the model does not keep its rows"
            check.fail(name, f"rows of {found:,} of the {len(ids):,} {side} entities that the model knows", expected)
    return given

"""What the page of a fit says of its data and of its lists: degrees, metrics by group with counts, examples.

Held-out pairs are those of a test, or the validation pairs that a model keeps. Cost: that of two evaluations and of a
few lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower.data.interactions import Interactions
from gramtower.data.matrices import without
from gramtower.metrics.tally import GROUPS, Scores, terciles
from gramtower.model.fit_data import own_pairs
from gramtower.model.fitted import FittedModel

QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three quarters": 0.75, "most": 1.0}
EXAMPLES, LENGTH, SHOWN = 5, 10, 3  # left entities, right ones of a list, pairs that a left entity has


@dataclass(frozen=True)
class Group:
    """Metrics of a tercile of right entities by popularity, or of left ones by activity.

    Attributes:
        name: such as "popularity low"; "all" for all of them.
        entities: how many are in it: right ones, or left ones with held-out pairs.
        least: fewest training pairs of one of them.
        most: most training pairs of one of them.
        users: left entities that the metrics are means over.
        pairs: held-out pairs that count.
        metrics: by name.
    """

    name: str
    entities: int
    least: int
    most: int
    users: int
    pairs: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Example:
    """A left entity, some of the right ones that it has, and its list; rows of the model.

    Attributes:
        row: of the left entity.
        pairs: how many it has in training.
        known: some of them.
        listed: the best, without those of training.
        hits: which of these are held-out pairs.
    """

    row: int
    pairs: int
    known: list[int]
    listed: list[int]
    hits: list[bool]


def degrees(matrix: sp.csr_matrix) -> dict[str, NDArray[np.int64]]:
    """How many pairs each entity has, by side."""
    right = np.bincount(matrix.indices, minlength=matrix.shape[1])
    return {"left": np.diff(matrix.indptr).astype(np.int64), "right": right.astype(np.int64)}


def degree_quantiles(matrix: sp.csr_matrix) -> dict[str, dict[str, float]]:
    """Quantiles of the pairs that entities have, and how many have none, by side."""
    return {
        side: {name: float(np.quantile(counts, at)) if len(counts) else 0.0 for name, at in QUANTILES.items()}
        | {"none": int((counts == 0).sum())}
        for side, counts in degrees(matrix).items()
    }


def validation_pairs(fitted: FittedModel) -> sp.csr_matrix | None:
    """The validation pairs that a model keeps, None if there are none that can be told from others.

    A model keeps which pairs there were, not their labels: where labels were not all 1 none counts as relevant.
    """
    if not fitted.plain_pairs or not fitted.shards.single:
        return None
    found = sp.csr_matrix(fitted.further)
    found = found if not fitted.same_entities else without(found, own_pairs(fitted.ids, found.shape))
    kept = np.arange(found.shape[0]) < fitted.left.trained  # of those added, histories
    found = sp.csr_matrix(sp.diags(kept.astype(np.float32)) @ found)
    found.eliminate_zeros()
    return found if found.nnz else None


def groups_of(fitted: FittedModel, truth: sp.csr_matrix, metrics: Sequence[str]) -> list[Group]:
    """Metrics of held-out pairs: all, by popularity of right entities, and by activity of left ones.

    Args:
        fitted: the model.
        truth: held-out pairs in its rows.
        metrics: names.
    """
    truth = without(truth, fitted.trained)
    test, trained = as_pairs(fitted, truth), degrees(fitted.trained)
    users = np.flatnonzero(np.diff(truth.indptr))
    active, popular = trained["left"][users], trained["right"]
    by = {name: fitted.evaluate(test, metrics, by=name) for name in ("popularity", "activity")}
    every = by["activity"]
    found = [_group("all", every, "", metrics, active, np.ones(len(users), dtype=bool), every.users, truth.nnz)]
    for name, mask in zip(GROUPS, terciles(popular), strict=True):
        count, pairs = by["popularity"].groups.get(f"popularity={name}", 0), int(mask[truth.indices].sum())
        found.append(_group("popularity", by["popularity"], name, metrics, popular, mask, count, pairs))
    for name, mask in zip(GROUPS, terciles(active), strict=True):
        count, pairs = every.groups.get(f"activity={name}", 0), int(np.diff(truth.indptr)[users][mask].sum())
        found.append(_group("activity", every, name, metrics, active, mask, count, pairs))
    return [group for group in found if group.users]


def _group(
    by: str, scores: Scores, name: str, metrics: Sequence[str], counts: NDArray[np.int64], mask: NDArray[np.bool_],
    users: int, pairs: int,
) -> Group:  # fmt: skip
    inside = counts[mask]
    label = f" {by}={name}" if name else ""
    values = {metric: float(scores[metric + label]) for metric in metrics if metric + label in scores}
    return Group(
        f"{by} {name}".strip(), len(inside), int(inside.min(initial=int(counts.max(initial=0)))),
        int(inside.max(initial=0)), users, pairs, values,
    )  # fmt: skip


def as_pairs(fitted: FittedModel, matrix: sp.csr_matrix) -> Any:
    """Rows and columns of a model as pairs that it takes: with its ids, or as they are."""
    if fitted.left.ids is None or fitted.right.ids is None:
        return matrix
    return Interactions(matrix, fitted.left.ids, fitted.right.ids, numbered=fitted.numbered)


def examples(fitted: FittedModel, truth: sp.csr_matrix | None, count: int = EXAMPLES) -> list[Example]:
    """Lists of left entities from seldom to often seen; of those with held-out pairs where there are any."""
    active = degrees(fitted.trained)["left"]
    held_out = sp.csr_matrix(fitted.trained.shape) if truth is None else without(truth, fitted.trained)
    asked = np.flatnonzero(np.diff(held_out.indptr) if held_out.nnz else active)
    if not len(asked):
        return []
    order = asked[np.argsort(active[asked], kind="stable")]
    places = np.unique(np.linspace(0, len(order) - 1, count + 2).round().astype(int)[1:-1])
    rows = order[places]
    names = rows.tolist() if fitted.left.ids is None else fitted.left.ids[rows].tolist()
    seen = as_pairs(fitted, without(fitted.seen, held_out))
    found, scores = fitted.recommend(names, LENGTH, exclude_seen=False, exclude=seen)
    lists = []
    for place, row in enumerate(rows.tolist()):
        columns = fitted.right.rows(found[place][np.isfinite(scores[place])].tolist())
        own = fitted.trained.indices[fitted.trained.indptr[row] : fitted.trained.indptr[row + 1]]
        relevant = set(held_out.indices[held_out.indptr[row] : held_out.indptr[row + 1]].tolist())
        known = own[np.unique(np.linspace(0, len(own) - 1, SHOWN).round().astype(int))] if len(own) else own
        hits = [column in relevant for column in columns.tolist()]
        lists.append(Example(row, int(active[row]), known.tolist(), columns.tolist(), hits))
    return lists

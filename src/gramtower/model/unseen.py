"""Validation on entities that are held out of a fit with all their pairs.

    hold_out_entities(…)       the part to learn from, with features of its entities, and what is asked about the others
    Unseen.validator(…)        the metric of a point: their features through its towers, then ranked

Held-out entities are no rows of the part to learn from: an empty row would be learned as an entity that goes with
nothing. Scalings of features are learned from only that part (a FeatureTable keeps the encoding it was made with).
Where both sides are one set, held-out entities are on neither side of it.

    side="left"     the known right entities are ranked for each held-out left one
    side="right"    the held-out right entities are ranked among themselves for each known left one

Cost: O(pairs log pairs) once, and a pass of the held-out rows through their tower for each look. Checked by
tests/test_unseen.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.features import Features, as_features
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions
from gramtower.data.splits import held_out
from gramtower.distributed.group import current_group
from gramtower.distributed.partition import Shard
from gramtower.distributed.shards import Shards
from gramtower.engine.objective.point import Point
from gramtower.metrics import Scores, evaluate_embeddings
from gramtower.metrics.tally import deal, means_without
from gramtower.model.fit_data import FitData, known_pairs, matrix_and_ids
from gramtower.model.given_features import GivenFeatures
from gramtower.model.refinement import ExpectedIds
from gramtower.model.settings import ModelSettings
from gramtower.training.checkpoint import features_text, sparse_digest

SIDES = ("left", "right")


@dataclass(frozen=True, eq=False)
class Unseen:
    """Held-out entities of one side, with their pairs and features.

    Attributes:
        side: theirs, "left" or "right".
        train: the pairs to learn from, with no entity that has none.
        features: what describes the entities of ``train``, left and right, as ``TwoTower.fit`` takes it.
        described: rows of the held-out entities for each table or matrix among the features of their side, not scaled.
        truth: their pairs: held-out left × known right entities, or known left × held-out right ones.
    """

    side: str
    train: Interactions
    features: tuple[Any, Any]
    described: list[Any]
    truth: sp.csr_matrix

    @property
    def count(self) -> int:
        """How many entities are held out."""
        return int(self.truth.shape[SIDES.index(self.side)])

    def validator(self, metric: str, data: FitData) -> UnseenValidator:
        """The metric of a point of a fit on :attr:`train`, whose scalings the held-out entities get."""
        rows = data.inputs[SIDES.index(self.side)].encoded(self.side, self.described)
        described = as_features(self.side, rows, self.count)
        return UnseenValidator(metric, self.side, described, self.truth, data.matrix, ExpectedIds.of(self.side, data))


@dataclass(frozen=True, eq=False)
class UnseenValidator:
    """The metric of rankings for, or of, entities that were held out; computed where the towers are.

    Attributes:
        metric: its name.
        side: of the held-out entities.
        rows: their features as the tower of that side takes them.
        truth: their pairs; see :class:`Unseen`.
        train: the training pairs, from which the popularity of right entities is counted. Held-out ones have none.
        expected: predicts id vectors of held-out entities; None where the tower sees no ids next to their features.
    """

    metric: str
    side: str
    rows: Features
    truth: sp.csr_matrix
    train: sp.csr_matrix
    expected: ExpectedIds | None = None

    def __call__(self, point: Point) -> float:
        """The metric at a point."""
        return float(self.scores(point, (self.metric,))[self.metric])

    def scores(self, point: Point, metrics: Sequence[str], known: tuple[Tensor, Tensor] | None = None) -> Scores:
        """Several metrics at a point, of one ranking; with other embeddings of known entities if they are given."""
        return self._scores(*self._embeddings(point, known), self.truth, metrics)

    def without(self, point: Point, seed: int) -> list[float]:
        """The metric without each part of the held-out entities, dealt with a seed.

        Those of the right side are left out of the rankings, so that users are ranked once for each part; users
        whose only pairs are with them do not count then, and the metric is 0 where none is left. Empty for a metric of
        held-out left entities together, not of single ones.
        """
        P, Q = self._embeddings(point)
        if self.side == "left":
            values = self._scores(P, Q, self.truth, (self.metric,)).per_user.get(self.metric)
            return [] if values is None else means_without(values, deal(len(values), seed))
        parts, columns = deal(self.truth.shape[1], seed), sp.csc_matrix(self.truth)
        found = []
        for part in range(int(parts.max()) + 1):
            kept = np.flatnonzero(parts != part)
            rows, truth = Q[torch.from_numpy(kept).to(Q.device)], sp.csr_matrix(columns[:, kept])
            measured = (truth.data > 0).any()
            found.append(float(self._scores(P, rows, truth, (self.metric,))[self.metric]) if measured else 0.0)
        return found

    def _embeddings(self, point: Point, known: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        (P, Q), towers, parameters = known or (point.P, point.right_rows), point.evaluation.towers, point.parameters
        if self.expected is not None:
            parameters = self.expected.in_parameters(towers, parameters, self.expected.weights(0.5))
        new = towers.embed(self.side, self.rows, parameters)
        return (new, Q) if self.side == "left" else (P, new)

    def _scores(self, P: Tensor, Q: Tensor, truth: sp.csr_matrix, metrics: Sequence[str]) -> Scores:
        known = self.train if self.side == "left" else sp.csr_matrix(truth.shape, dtype=np.float32)
        return evaluate_embeddings(P, Q, truth, metrics=metrics, popularity=known)

    def fingerprint(self, shards: Shards) -> dict[str, str]:
        """What is measured, and on what, for a checkpoint's fingerprint."""
        x = self.truth
        digest = sparse_digest(x.indptr, x.indices, x.data, 0, x.shape[1]).text(shards.group)
        text = f"held-out {self.side} entities {features_text(self.rows, shards.group)}with pairs {digest}"
        return {"metric": self.metric, "validation": text}


def hold_out_entities(
    settings: ModelSettings, pairs: Any, features: tuple[Any, Any], share: object, side: object, seed: int
) -> Unseen:
    """A share of the entities of a side held out with all their pairs, drawn with the seed.

    Args:
        settings: of the model, whose weights must not be arrays.
        pairs: Interactions, or a scipy.sparse matrix.
        features: what describes the entities of both sides, as ``TwoTower.fit`` takes it.
        share: of the entities that have pairs, above 0 and below 1.
        side: "left" or "right".
        seed: of the draw.

    Raises:
        ValueError: if nothing but ids or histories is known of that side, or none of the pairs that are held out can be
            found.
    """
    name = check.choice("validation_side", side, SIDES)
    axis = SIDES.index(name)
    _refuse_others(settings, pairs, features[axis], share, name)
    both = [GivenFeatures(side, given) for side, given in zip(SIDES, features, strict=True)]
    for given in both:
        given.refuse_frames()
    matrix, _ = matrix_and_ids(pairs)
    whole = pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(matrix, same_entities=False)
    train, test = split_entities(whole, share, name, seed)
    kept = [join(new, index_of(old)) for new, old in zip(_ids(train), _ids(whole), strict=True)]
    new = join(_ids(test)[axis], index_of(_ids(whole)[axis]))
    inner = [given.take(own, rows) for given, own, rows in zip(both, _ids(whole), kept, strict=True)]
    described = both[axis].encode(_ids(whole)[axis], new)
    return Unseen(name, train, (inner[0], inner[1]), described, _truth(test, train, axis, share))


def split_entities(pairs: Interactions, share: Any, side: str, seed: int) -> tuple[Interactions, Interactions]:
    """Pairs of the other entities, and of those held out.

    Where both sides are one set, the latter are on no side of the former, and pairs of two of them are in neither.
    """
    axis = SIDES.index(side)
    split = held_out(pairs, side, share, seed=seed)
    if not pairs.one_set:
        return split.train, split.test
    gone = _ids(pairs)[axis][(split.held_out_users, split.held_out_items)[axis]]
    train, test = (_without_others(part, 1 - axis, gone) for part in (split.train, split.test))
    for part, what in ((train, "to learn from"), (test, "to find")):
        if not len(part):
            check.fail("validation", f"{share} of the entities, which leaves no pair {what}", "another share")
    return train, test


def unseen_pairs(pairs: Interactions, share: float, side: str, seed: int) -> int:
    """How many pairs :func:`hold_out_entities` asks about: those with known entities of the other side."""
    axis = SIDES.index(check.choice("validation_side", side, SIDES))
    train, test = split_entities(pairs, share, side, seed)
    return known_pairs((None, train.right_ids) if axis == 0 else (train.left_ids, None), test)


def _without_others(pairs: Interactions, axis: int, gone: NDArray[Any]) -> Interactions:
    """Pairs whose entity on a side is none of some."""
    strange = join(_ids(pairs)[axis], index_of(gone)) < 0
    matrix = pairs.matrix
    kept = strange[matrix.indices] if axis == 1 else np.repeat(strange, np.diff(matrix.indptr))
    return pairs.subset(kept).without_empty()


def _refuse_others(settings: ModelSettings, pairs: Any, features: Any, share: object, side: str) -> None:
    """Refuse what entities cannot be held out of or for."""
    if (processes := current_group().size) > 1:
        check.fail("validation_side", f"{side!r} in {processes} processes", "None, or one process")
    if isinstance(pairs, Shard):
        check.fail("validation_side", repr(side), "None: a partition holds its own held-out pairs")
    if not isinstance(share, Real) or isinstance(share, bool):
        expected = f"a share of the {side} entities, such as 0.1, with validation_side={side!r}"
        check.fail("validation", "None" if share is None else type(share).__name__, expected)
    if check.number("validation", share, above=0.0) >= 1:
        check.fail("validation", share, f"a share of the {side} entities, above 0 and below 1")
    parts = GivenFeatures(side, features).parts
    if all(part is None or isinstance(part, str) for part in parts):
        seen = " + ".join("id" if part is None else str(part) for part in parts) or "nothing"
        given = f"{side!r} with {side}_features of {seen}"
        check.fail("validation_side", given, f"{side}_features with a table or a matrix, which describes new entities")
    for name in ("left_weights", "right_weights"):
        if not isinstance(getattr(settings, name), (str, type(None))):
            check.fail("validation_side", f"{side!r} with {name} as an array", "weights by name, such as 'degree^0.5'")


def _ids(pairs: Interactions) -> tuple[NDArray[Any], NDArray[Any]]:
    return pairs.left_ids, pairs.right_ids


def _truth(test: Interactions, train: Interactions, axis: int, share: object) -> sp.csr_matrix:
    """The held-out pairs of known entities of the other side, in the rows and columns of both parts."""
    other = 1 - axis
    places = [np.arange(size) for size in test.shape]
    places[other] = join(_ids(test)[other], index_of(_ids(train)[other]))
    coo = test.matrix.tocoo()
    rows, columns = places[0][coo.row], places[1][coo.col]
    known = (rows >= 0) & (columns >= 0)
    if not (coo.data[known] > 0).any():
        given = f"{share} of the {SIDES[axis]} entities, all of whose pairs are with entities that no others have"
        check.fail("validation", given, "another share")
    shape = (test.shape[0], train.shape[1]) if axis == 0 else (train.shape[0], test.shape[1])
    found = sp.csr_matrix((coo.data[known], (rows[known], columns[known])), shape=shape)
    found.sort_indices()
    return found

"""A fitted model, and what it answers: recommendations, neighbours, scores, embeddings, metrics.

Exact: lists come from all scores, in blocks. Answers are copies: changing one changes nothing in the model. Checked by
tests/test_estimator.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.features import as_features
from gramtower.data.interactions import Interactions
from gramtower.distributed.group import SINGLE
from gramtower.distributed.shards import Shards
from gramtower.engine.towers.towers import Towers
from gramtower.estimator.fit_data import aligned, matrix_and_ids, own_pairs
from gramtower.estimator.side import Side, history_matrix, normalised
from gramtower.metrics import evaluate_embeddings
from gramtower.metrics.definitions import DEFAULT
from gramtower.retrieval.topk import top_k
from gramtower.training.result import Reason, Record


@dataclass(frozen=True, eq=False)
class FittedModel:
    """What training ended in, and the questions to it.

    Attributes:
        left: ids, inputs and embeddings of the left entities: the model's own memory, as all attributes are.
        right: those of the right entities.
        seen: the pairs of training, as ones.
        towers: what embeds new entities; None if they are the caller's own and were not given to ``load``.
        shards: which rows this process holds.
        dim: size of the embeddings.
        hidden: widths of the hidden layers, left and right; none for towers of the caller's own.
        omega: ω of the training.
        history: records of the training.
        reason: why it stopped.
        message: the same with particulars.
        best_metric: of the validation, or None.
        same_entities: whether both sides are one set, where ``seen`` holds every entity with itself too.
        plain_pairs: whether all labels were 1 and no pair had a weight, so that ``seen`` says all of them.
    """

    left: Side
    right: Side
    seen: sp.csr_matrix
    towers: Towers | None
    shards: Shards
    dim: int
    hidden: tuple[tuple[int, ...], tuple[int, ...]]
    omega: float
    history: list[Record]
    reason: Reason
    message: str
    best_metric: float | None
    same_entities: bool = False
    plain_pairs: bool = True

    def __str__(self) -> str:
        """Sizes, and what each tower sees and how it is scaled."""
        sides = (
            f"{len(side):,} {side.name} entities by {side.inputs.text}"
            + (f" through hidden layers of {', '.join(map(str, widths))}" if widths else "")
            for side, widths in zip((self.left, self.right), self.hidden, strict=True)
        )
        return f"{' and '.join(sides)}, embeddings of size {self.dim}"

    def recommend(
        self,
        left: Any = None,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        allow: Sequence[Any] | None = None,
        deny: Sequence[Any] | None = None,
        left_features: Any = None,
        histories: Any = None,
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The k best right entities for each left one.

        Args:
            left: ids of left entities; None with ``left_features``, ``histories`` or both for entities not seen in
                training.
            k: how many.
            exclude_seen: leave out right entities observed with the left one in training (or listed in its history).
            allow: only these right ids.
            deny: never these right ids.
            left_features: features of new entities: rows of a matrix, or for a model fitted with a FeatureTable a frame
                or file with the same columns.
            histories: for models whose left features have a "history": a list of right ids for each new entity, or a
                scipy.sparse matrix with one column for each right entity.

        Returns:
            Ids, of the type that the training data has, and scores, one row for each left entity. A score of −inf marks
            a place without an answer; its id is None, or −1 where ids are numbers.
        """
        check.count("k", k)
        exclude_seen = check.flag("exclude_seen", exclude_seen)
        new = left_features is not None or histories is not None
        if (left is None) != new:
            given = "None" if left is None else "ids, and features or histories"
            check.fail("left", given, "ids of left entities; or, for new ones, left_features, histories or both")
        if new:
            seen = None if histories is None else history_matrix(self.right, histories)
            P = self._embed_new("left", left_features, seen)
        else:
            rows = self.left.rows(check.ids("left", left))
            P, seen = self.left.embeddings[torch.from_numpy(rows)], self.seen[rows]
        found, scores = top_k(
            P, self.right.embeddings, min(k, len(self.right)),
            exclude=seen if exclude_seen else None,
            allow=None if allow is None else self.right.rows(check.ids("allow", allow)),
            deny=None if deny is None else self.right.rows(check.ids("deny", deny)),
        )  # fmt: skip
        return self.right.names(found), scores

    def similar(self, ids: Any, side: str = "right", k: int = 10) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The k entities of the same side whose embeddings point most alike (cosine), the entity itself left out.

        Entities without a direction of their own, see :meth:`has_direction`, are refused and never listed.
        """
        this = self._side(side)
        rows = this.rows(check.ids("ids", ids))
        directed = self.has_direction(side)
        if not directed[rows].all():
            bad = this.names(rows[~directed[rows]])[0]
            given = f"{bad!r}, which has no pair in the training data and no features"
            check.fail(f"{side} ids", given, "entities with a pair: nothing says what others are like")
        unit = normalised(this.embeddings)
        own = sp.csr_matrix((np.ones(len(rows)), (np.arange(len(rows)), rows)), shape=(len(rows), len(this)))
        found, scores = top_k(
            unit[torch.from_numpy(rows)], unit, min(check.count("k", k), len(this)),
            exclude=own, deny=np.flatnonzero(~directed),
        )  # fmt: skip
        return this.names(found), scores

    def has_direction(self, side: str = "right") -> NDArray[np.bool_]:
        """Whether anything sets each entity of a side apart: a pair of the training data, or features.

        All others, known by their id alone, end up with embeddings of about the same direction, which says nothing
        of what they are like. Of several processes none knows all pairs of a right entity: there all count as known.
        """
        this = self._side(side)
        described = any(part.kind not in ("id", "history") for part in this.inputs.parts)
        if described or (side == "right" and not self.shards.single):
            return np.ones(len(this), dtype=bool)
        seen = self.observed()
        if side == "left":
            return np.asarray(np.diff(seen.indptr) > 0)
        return np.bincount(seen.indices, minlength=len(this)) > 0

    def observed(self) -> sp.csr_matrix:
        """The seen pairs without those of an entity with itself, where both sides are one set."""
        if not self.same_entities:
            return self.seen
        own = own_pairs((self.left.ids, self.right.ids), self.seen.shape)
        return sp.csr_matrix(self.seen - self.seen.multiply(own))

    def score(self, left: Any, right: Any) -> NDArray[np.float32]:
        """p_iᵀq_j for pairs of ids, element by element."""
        rows, columns = self.left.rows(check.ids("left", left)), self.right.rows(check.ids("right", right))
        if len(rows) != len(columns):
            check.fail("left, right", f"{len(rows)} and {len(columns)} ids", "as many left as right ids")
        P, Q = self.left.embeddings[torch.from_numpy(rows)], self.right.embeddings[torch.from_numpy(columns)]
        return np.asarray((P * Q).sum(1).numpy(), dtype=np.float32)

    def embed(
        self,
        ids: Any = None,
        side: str = "left",
        *,
        left_features: Any = None,
        right_features: Any = None,
        histories: Any = None,
    ) -> NDArray[np.float32]:
        """Embeddings of entities by id, or of new ones by what the towers see; all of a side when nothing is given.

        Features and histories of new entities are those of :meth:`recommend`.
        """
        if left_features is not None or histories is not None:
            history = None if histories is None else history_matrix(self.right, histories)
            return np.asarray(self._embed_new("left", left_features, history).numpy())
        if right_features is not None:
            return np.asarray(self._embed_new("right", right_features).numpy())
        this = self._side(side)
        if ids is None:
            return np.asarray(this.embeddings.numpy().copy())
        return np.asarray(this.embeddings[torch.from_numpy(this.rows(check.ids("ids", ids)))].numpy())

    def evaluate(
        self,
        test: Any,
        metrics: Sequence[str] = DEFAULT,
        *,
        exclude_seen: bool = True,
        by: str | None = None,
        left_features: Any = None,
        histories: Any = None,
    ) -> dict[str, float]:
        """Ranking metrics on held-out pairs; see docs/metrics.md for the definitions.

        With ``left_features``, ``histories`` or both, the left entities of ``test`` are taken as new ones, described as
        for :meth:`recommend`, one row for each row of ``test``; histories may be Interactions, such as those of
        :func:`gramtower.data.splits.held_out_users`, and are what counts as seen.
        """
        exclude_seen = check.flag("exclude_seen", exclude_seen)
        P, seen, processes = self.left.embeddings, self.seen, self.shards.group
        if left_features is not None or histories is not None:
            if by is not None:
                check.fail("by", repr(by), "None for new entities, whose training pairs there are none of")
            matrix, (rows, _) = matrix_and_ids(test, "test")
            if isinstance(histories, Interactions):
                histories = aligned("histories", histories, (rows, self.right.ids), (matrix.shape[0], len(self.right)))
            seen = None if histories is None else history_matrix(self.right, histories)
            P = self._embed_new("left", left_features, seen)
            truth = aligned("test", test, (rows, self.right.ids), (len(P), len(self.right)))
            processes = SINGLE  # every process knows all new entities
        else:
            truth = self._align(test)
        return evaluate_embeddings(
            P, self.right.embeddings, truth,
            train=seen, metrics=metrics, exclude_train=exclude_seen, by=by, processes=processes,
        )  # fmt: skip

    def _embed_new(self, name: str, features: Any, history: sp.csr_matrix | None = None) -> Tensor:
        """New entities through their tower."""
        given = self._side(name).inputs.new(name, features, history)
        towers = self.known_towers("embed new entities")
        return towers.embed(name, as_features(name, given, given.shape[0])).cpu()

    def known_towers(self, purpose: str) -> Towers:
        """The towers; refused if the model was loaded without them, with the purpose they are needed for."""
        if self.towers is None:
            check.fail("model", "loaded without its own towers", f"gramtower.load(path, towers=...) to {purpose}")
        return self.towers

    def _align(self, test: Any) -> sp.csr_matrix:
        """Held-out pairs of the left entities that this process knows."""
        rows, ids = self.shards.left, (self.left.ids, self.right.ids)
        if ids[0] is not None or rows.count == rows.total:
            return aligned("test", test, ids, self.seen.shape, every=self.shards.single)
        return aligned("test", test, ids, (rows.total, self.shards.right.total))[rows.first : rows.stop]

    def _side(self, side: str) -> Side:
        return self.left if check.choice("side", side, ("left", "right")) == "left" else self.right


def pattern_of(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """A copy of a matrix's pattern, with ones for values."""
    ones = np.ones(len(matrix.indices), dtype=np.float32)
    return sp.csr_matrix((ones, matrix.indices.copy(), matrix.indptr.copy()), shape=matrix.shape)

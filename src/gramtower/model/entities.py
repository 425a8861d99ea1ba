"""The entities of a fitted model with the pairs they have, which all of its answers are about.

:meth:`Entities.with_added` and the ``…_features`` of a call give the same entities with more of them
(model/newcomers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.left_out import warn_of_pairs
from gramtower.data.lookup import index_of
from gramtower.data.matrices import canonical, resized, union
from gramtower.distributed.shards import Shards
from gramtower.engine.towers.towers import Towers
from gramtower.model.fit_data import Aligned, Numbered, align, given_pairs
from gramtower.model.inputs import Ids
from gramtower.model.newcomers import described, extended
from gramtower.model.side import Side, history_matrix

CANDIDATES = ("all", "trained")  # right entities to choose from: all that are known, or those of the training data


@dataclass(frozen=True, eq=False)
class Entities:
    """Both sides, their pairs, and the towers that embed new entities.

    Attributes:
        left: ids, inputs and embeddings of the left entities: the model's own memory, as all attributes are.
        right: those of the right entities.
        trained: the pairs of training, as ones.
        further: pairs that entities have and that nothing was learned from: those of validation, and the histories of
            entities that were added.
        towers: what embeds new entities; None if they are the caller's own and were not given to ``load``.
        shards: which rows this process holds.
    """

    left: Side
    right: Side
    trained: sp.csr_matrix
    further: sp.csr_matrix
    towers: Towers | None
    shards: Shards

    @cached_property
    def seen(self) -> sp.csr_matrix:
        """What left entities have seen, as ones: the pairs of training and of validation, and histories."""
        return union(self.trained, self.further) if self.further.nnz else self.trained

    @property
    def ids(self) -> Ids:
        """Ids of both sides; None for row numbers."""
        return self.left.ids, self.right.ids

    @property
    def shape(self) -> tuple[int, int]:
        """Left and right entities that this process knows."""
        return len(self.left), len(self.right)

    @property
    def numbered(self) -> Numbered:
        """Of which matrix ids are row numbers; see Interactions."""
        return self.left.numbered, self.right.numbered

    def has_direction(self, side: str = "right") -> NDArray[np.bool_]:
        """Whether anything sets each entity of a side apart: a pair of the training data, or features.

        All others, known by their id alone, end up with embeddings of about the same direction, which says nothing
        of what they are like. Of several processes none knows all pairs of a right entity: there all count as known.
        """
        this = self.side(side)
        described = any(part.kind not in ("id", "history") for part in this.inputs.parts)
        if described or (side == "right" and not self.shards.single):
            return np.ones(len(this), dtype=bool)
        if side == "right":
            return np.bincount(self.trained.indices, minlength=len(this)) > 0
        known = np.diff(self.trained.indptr) > 0
        known[this.trained :] = np.diff(self.further.indptr)[this.trained :] > 0  # histories of those added
        return np.asarray(known)

    def with_added(
        self,
        left_features: Any = None,
        right_features: Any = None,
        *,
        histories: Any = None,
        left_ids: Any = None,
        right_ids: Any = None,
    ) -> Self:
        """The same model with new entities, which it keeps, saves and answers about like those of training.

        Their embeddings come from the towers; a vector of their own they have only after another ``fit``.

        Args:
            left_features: what describes new left entities: a FeatureTable, frame or file with the column of ids, or a
                matrix and ``left_ids``. Rows with known ids are left as the model knows them.
            right_features: the same for right ones.
            histories: right ids of each new left entity, row by row as ``left_features``; they count as seen.
            left_ids: ids of rows that bring none.
            right_ids: the same for right ones.
        """
        here, left_given = self, left_features is not None or histories is not None
        if not left_given and right_features is None:
            check.fail("left_features, right_features", "None", "what describes new entities, of one side or of both")
        if right_features is not None:
            here = here.grown("right", right_features, None, right_ids, True)[0]
        if left_given:
            history = None if histories is None else history_matrix(here.right, histories)
            here, places = here.grown("left", left_features, history, left_ids, True)
            if history is not None:
                new = np.where(places >= len(self.left), places, -1)
                seen = sp.csr_matrix(selection(new, here.shape[0]).T @ history)
                here = replace(here, further=union(here.further, seen))
        return here

    def without_added_right(self) -> Self:
        """The same with the right entities of training alone."""
        if not self.right.added:
            return self
        count, right = self.right.trained, self.right
        ids = None if right.ids is None else right.ids[:count]
        return replace(
            self, right=replace(right, ids=ids, embeddings=right.embeddings[:count], added=0),
            trained=self.trained[:, :count], further=self.further[:, :count],
        )  # fmt: skip

    def grown(
        self, side: str, features: Any, history: sp.csr_matrix | None = None, ids: Any = None, kept: bool = False
    ) -> tuple[Self, NDArray[np.int64]]:
        """The model with entities that features or histories describe, and their rows there."""
        if features is None and history is None:
            return self, np.empty(0, dtype=np.int64)
        if not self.shards.single:
            check.fail(f"{side}_features", f"features in {self.shards.group.size} processes", "a loaded model, in one")
        towers = self.known_towers("embed new entities")
        grown, places = extended(self.side(side), towers, features, history, ids, kept)
        shape = (len(grown), len(self.right)) if side == "left" else (len(self.left), len(grown))
        pairs = {"trained": resized(self.trained, shape), "further": resized(self.further, shape)}
        left, right = (grown, self.right) if side == "left" else (self.left, grown)
        return replace(self, left=left, right=right, **pairs), places

    def known_towers(self, purpose: str) -> Towers:
        """The towers; refused if the model was loaded without them, with the purpose they are needed for."""
        if self.towers is None:
            check.fail("model", "loaded without its own towers", f"gramtower.load(path, towers=...) to {purpose}")
        return self.towers

    def aligned(self, name: str, pairs: Any) -> Aligned:
        """Pairs of the left entities that this process knows."""
        rows = self.shards.left
        if self.left.ids is not None or rows.count == rows.total:
            return align(name, pairs, self.ids, self.shape, self.numbered, (self.left.trained, self.right.trained))
        found = align(name, pairs, self.ids, (rows.total, self.shards.right.total), self.numbered)
        return replace(found, pairs=found.pairs[rows.first : rows.stop])

    def excluded(self, exclude: Any) -> sp.csr_matrix:
        """Pairs to leave out, in the model's rows; those of others change nothing, with a warning if all are such."""
        found = self.aligned("exclude", given_pairs("exclude", exclude))
        if self.shards.single and found.example is not None and not found.pairs.nnz:
            warn_of_pairs("exclude", found.total, found.total, found.example[0])
        return found.pairs

    def excluded_of_new(self, exclude: Any, features: Any, count: int) -> sp.csr_matrix:
        """Pairs to leave out for new left entities: by their ids, or row by row."""
        pairs = given_pairs("exclude", exclude)
        if not isinstance(pairs, Interactions):
            return resized(canonical("exclude", pairs, (count, self.right.trained)), (count, len(self.right)))
        what = None if features is None else described(self.left, features)
        if what is None or what.ids is None:
            expected = "a scipy.sparse matrix with a row for each new entity, or a table of them with a column of ids"
            check.fail("exclude", "pairs with ids, of entities without", expected)
        its = pairs.left_ids, self.right.ids
        found = align("exclude", pairs, its, (len(its[0]), len(self.right)), (pairs.numbered[0], self.right.numbered))
        return sp.csr_matrix(selection(what.rows_in(index_of(its[0])), len(its[0])) @ found.pairs)

    def chosen(self, allow: Any, deny: Any, candidates: str) -> dict[str, Any]:
        """Columns to choose from and those never to choose, as top_k takes them; "trained" denies those added.

        Unknown ids change nothing, with a warning.
        """
        denied = [] if deny is None else [self.right.known_rows("deny", deny)]
        if candidates == "trained":
            denied.append(np.arange(self.right.trained, len(self.right)))
        allowed = None if allow is None else self.right.known_rows("allow", allow)
        return {"allow": allowed, "deny": np.concatenate(denied) if denied else None}

    def left_index(self) -> dict[Any, int]:
        """The row of each left id."""
        return index_of(np.arange(len(self.left)) if self.left.ids is None else self.left.ids)

    def seen_by_described(
        self, features: Any, history: sp.csr_matrix | None, index: Mapping[Any, int] | None = None
    ) -> sp.csr_matrix | None:
        """What left entities that a call describes have seen: their history, and the pairs of those that are known.

        Args:
            features: what describes them.
            history: their right entities, row by row.
            index: the row of each left id, where the caller has one already.
        """
        what = None if features is None else described(self.left, features)
        if what is None or what.ids is None:
            return history
        rows = what.rows_in(self.left_index() if index is None else index)
        own = sp.csr_matrix(selection(rows, len(self.left)) @ self.seen)
        return own if history is None else union(own, history)

    def called(self, features: Any, count: int) -> list[Any]:
        """What to call left entities that a call describes: the ids of their table, or their rows; None without one."""
        what = None if features is None else described(self.left, features)
        if what is None or what.ids is None:
            return list(range(count))
        return [
            None if what.missing is not None and what.missing[row] else key for row, key in enumerate(what.ids.tolist())
        ]

    def side(self, side: str) -> Side:
        """One side by its name."""
        return self.left if check.choice("side", side, ("left", "right")) == "left" else self.right


def selection(rows: NDArray[np.int64], size: int) -> sp.csr_matrix:
    """A matrix whose product with ``size`` rows picks ``rows`` of them; −1 gives an empty row."""
    there = np.flatnonzero(rows >= 0)
    return sp.csr_matrix((np.ones(len(there), np.float32), (there, rows[there])), shape=(len(rows), size))

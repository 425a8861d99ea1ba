"""The lists of a fitted model: recommendations for left entities, one by one or all to a file, and neighbours.

Exact: lists come from all scores, in blocks. What is left out of them is the rule of model/fitted.py. Checked by
tests/test_estimator.py, tests/test_seen.py, tests/test_recommend_all.py and tests/test_new_entities.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.lists import columns_beside, lists_frame
from gramtower.data.matrices import union
from gramtower.model.defaults import pick_device
from gramtower.model.entities import CANDIDATES, Entities
from gramtower.model.listing import write_lists
from gramtower.model.newcomers import embedded, read_once
from gramtower.model.side import history_matrix, normalised
from gramtower.retrieval.topk import ranking, top_k


class RankedLists(Entities):
    """Entities that are asked for lists."""

    def recommend(
        self,
        left: Any = None,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        exclude: Any = None,
        allow: Sequence[Any] | None = None,
        deny: Sequence[Any] | None = None,
        candidates: str = "all",
        left_features: Any = None,
        right_features: Any = None,
        histories: Any = None,
        as_frame: bool = False,
        table: Any = None,
    ) -> tuple[NDArray[Any], NDArray[np.float32]] | Any:
        """The k best right entities for each left one.

        Args:
            left: ids of left entities; None with ``left_features``, ``histories`` or both for entities not seen in
                training.
            k: how many.
            exclude_seen: leave out what the left entity has seen: right entities of its training and validation pairs,
                or of its history.
            exclude: further pairs to leave out: :class:`~gramtower.Interactions`, a frame or the path of a CSV or
                Parquet file whose first two columns are left and right ids, or a scipy.sparse matrix: of the model's
                shape where it was fitted on one, or with a row for each new entity. Pairs of others change nothing.
            allow: only these right ids. Ids that the model does not know are ignored, with a warning that counts them;
                if it knows none of them, lists are empty.
            deny: never these right ids; unknown ones are ignored likewise.
            candidates: "all" that the model knows, also those added later and those of ``right_features``; "trained"
                for those of the training data alone.
            left_features: features of new entities: rows of a matrix, or for a model fitted with a FeatureTable a frame
                or file with the same columns. One list is made for each row; a row with a known id is embedded by its
                features, and what it has seen is left out.
            right_features: the same for right entities to be ranked among the others. Of a table with the column of
                ids, rows with known ids are left as the model knows them; rows of a matrix are called ("new", 0),
                ("new", 1), …, or go on with the numbers of a model without ids.
            histories: for models whose left features have a "history": a list of right ids for each new entity, or a
                scipy.sparse matrix with one column for each right entity.
            as_frame: return a table, of polars if it is installed and otherwise of pandas, with a row for each answer:
                ``left``, ``rank`` from 1, ``right``, ``score``. New left entities are called by the ids that a table
                of them has, or by their row from 0.
            table: with ``as_frame``, a table of right entities, such as their titles, whose other columns are put
                beside the answers: a frame, file or FeatureTable with ids in the column "id" or else in the first.

        Returns:
            Ids, of the type that the training data has, and scores, one row for each left entity, as two arrays; a
            score of −inf marks a place without an answer, whose id is None, or −1 where ids are numbers. Or the table,
            which has no such places.
        """
        check.count("k", k)
        _check_frame(as_frame, table)
        exclude_seen = check.flag("exclude_seen", exclude_seen)
        check.choice("candidates", candidates, CANDIDATES)
        new = left_features is not None or histories is not None
        if (left is None) != new:
            given = "None" if left is None else "ids, and features or histories"
            check.fail("left", given, "ids of left entities; or, for new ones, left_features, histories or both")
        here = self.grown("right", right_features)[0]
        if new:
            left_features = read_once(self.left, left_features)
            seen = None if histories is None else history_matrix(here.right, histories)
            P = embedded(self.left, self.known_towers("embed new entities"), left_features, seen)
            asked = self.called(left_features, len(P)) if as_frame else []
            seen = here.seen_by_described(left_features, seen)
        else:
            asked = check.ids("left", left)
            rows = self.left.rows(asked)
            P, seen = self.left.embeddings[torch.from_numpy(rows)], here.seen[rows]
        left_out = [seen] if exclude_seen and seen is not None else []
        if exclude is not None:
            left_out.append(
                here.excluded_of_new(exclude, left_features, len(P)) if new else here.excluded(exclude)[rows]
            )
        found, scores = top_k(
            P, here.right.embeddings, min(k, len(here.right)),
            exclude=union(*left_out) if left_out else None, **here.chosen(allow, deny, candidates),
        )  # fmt: skip
        ids = here.right.names(found)
        return _framed(asked, ids, scores, ("left", "right"), table) if as_frame else (ids, scores)

    def recommend_all(
        self,
        path: str | Path,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        exclude: Any = None,
        allow: Sequence[Any] | None = None,
        deny: Sequence[Any] | None = None,
        candidates: str = "all",
        right_features: Any = None,
        device: str = "auto",
        fresh: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Write the lists of all left entities, those of :meth:`recommend`, to a table, in bounded memory.

        One row for each answer, in order of left entities: left id, rank from 1, right id and score. While it is being
        written its parts are in a folder ``PATH.parts`` beside it; the same call goes on where one was killed.

        Args:
            path: the table: .parquet, .csv or .tsv. Needs polars: ``pip install "gramtower[io]"``.
            k: how many for each.
            exclude_seen: leave out what the left entity has seen.
            exclude: further pairs to leave out.
            allow: only these right ids.
            deny: never these right ids.
            candidates: "all" or "trained".
            right_features: new right entities to be ranked among the others: a table with the column of ids.
            device: where scores are made: "auto", "cpu" or "cuda".
            fresh: begin again where an earlier call left parts, also those of other lists.
            progress: called with the number of lists that are written and of all, after each part.

        Returns:
            The number of answers that this call wrote; those of parts that were there are not among them.

        Raises:
            ValueError: also if the disk has too little room, or parts of other lists are there; nothing is written.
        """
        k = check.count("k", k)
        exclude_seen, fresh = check.flag("exclude_seen", exclude_seen), check.flag("fresh", fresh)
        check.choice("candidates", candidates, CANDIDATES)
        if progress is not None and not callable(progress):
            check.fail("progress", repr(progress), "a function of two numbers, or None")
        where, path = pick_device(device), check.path("path", path)
        here = self.grown("right", right_features)[0]
        left_out = ([here.seen] if exclude_seen else []) + ([] if exclude is None else [here.excluded(exclude)])
        made = ranking(
            here.left.embeddings, here.right.embeddings,
            exclude=union(*left_out) if left_out else None, **here.chosen(allow, deny, candidates),
        )  # fmt: skip
        return write_lists(here, made, path, min(k, len(here.right)), where, fresh, progress)

    def similar(
        self,
        ids: Any = None,
        side: str = "right",
        k: int = 10,
        *,
        left_features: Any = None,
        right_features: Any = None,
        as_frame: bool = False,
        table: Any = None,
    ) -> tuple[NDArray[Any], NDArray[np.float32]] | Any:
        """The k entities of the same side whose embeddings point most alike (cosine), the entity itself left out.

        Entities without a direction of their own, see :meth:`has_direction`, are refused and never listed.

        Args:
            ids: of entities; None for those that the features describe, one row each.
            side: "left" or "right".
            k: how many.
            left_features: new left entities, asked about and listed like the others; see ``right_features`` of
                :meth:`recommend`.
            right_features: new right entities.
            as_frame: return a table as :meth:`recommend` does, with columns called after the side, ``rank``,
                ``similar`` and ``score``.
            table: with ``as_frame``, a table of entities of the side, as for :meth:`recommend`.

        Returns:
            Ids and cosines as two arrays, or the table.
        """
        self.side(side)
        _check_frame(as_frame, table)
        features = {"left": left_features, "right": right_features}
        other = "left" if side == "right" else "right"
        if features[other] is not None:
            check.fail(f"{other}_features", "features", f"None: entities of the {side} side are compared")
        if (ids is None) and features[side] is None:
            check.fail("ids", "None", f"ids, or {side}_features of new entities")
        here, places = self.grown(side, features[side])
        this = here.side(side)
        rows = places[places >= 0] if ids is None else this.rows(check.ids("ids", ids))
        directed = here.has_direction(side)
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
        names = this.names(found)
        return (
            _framed(this.names(rows).tolist(), names, scores, (side, "similar"), table) if as_frame else (names, scores)
        )


def _check_frame(as_frame: object, table: object) -> None:
    if not check.flag("as_frame", as_frame) and table is not None:
        check.fail("table", type(table).__name__, "as_frame=True as well: arrays have no columns")


def _framed(asked: list[Any], ids: NDArray[Any], scores: NDArray[Any], names: tuple[str, str], table: Any) -> Any:
    return lists_frame(asked, ids, scores, names, beside=None if table is None else columns_beside(table, ids, scores))

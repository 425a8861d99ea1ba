"""A fitted model, and what it answers: recommendations, neighbours, scores, embeddings, metrics.

One rule says what an entity has *seen*, for every answer and every metric: the pairs of training, those of validation,
the history of a new entity, and what a call gives as ``exclude``. Metrics rank what is tested: a validation pair that
is among the pairs tested counts, one that is not is left out like the others. Popularity is that of training pairs.

New entities are described by features (model/side.py); :meth:`FittedModel.with_added` keeps them. Lists are
exact: they come from all scores, in blocks. Answers are copies: changing one changes nothing in the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack, cast

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower._util.host import explained
from gramtower._util.tensors import digest_of
from gramtower.data.entity_table import EntityTable
from gramtower.data.frames import TableLike
from gramtower.data.ids import IdsLike, Key, entity_names, index_of, join
from gramtower.data.interactions import Interactions, PairsLike
from gramtower.data.list_files import ListFile, extra_columns, lists_frame
from gramtower.data.matrices import canonical, only_rows, resized, selected, selection, union, warn_of_pairs, without
from gramtower.data.tables import FeaturesLike, FeatureTable
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Shards
from gramtower.engine.towers.towers import Towers
from gramtower.metrics import evaluate_embeddings
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.metrics.embedding_metrics import Scores
from gramtower.model import calibration as calibrating
from gramtower.model import defaults
from gramtower.model.calibration import Calibration, Counts, Reliability
from gramtower.model.context import Combinations, Context, combinations_table
from gramtower.model.defaults import pick_device
from gramtower.model.feature_spec import IdArray, Ids, is_sparse, is_table
from gramtower.model.fit_data import (
    Aligned,
    FitPairs,
    Numbered,
    PairColumns,
    align,
    matrix_and_ids,
    own_pairs,
    read_pairs,
    refuse_strangers,
)
from gramtower.model.side import (
    Described,
    HistoriesLike,
    Side,
    described,
    embedded,
    extended,
    history_matrix,
    normalised,
)
from gramtower.retrieval.list_rules import Boost, make_rules, need_calibration
from gramtower.retrieval.topk import Ranking, ranking, top_k
from gramtower.training.checkpoint import locked
from gramtower.training.result import Reason, Record

CANDIDATES = ("all", "trained")  # right entities to choose from: all that are known, or those of the training data


@dataclass(frozen=True)
class Tried:
    """A point of the path: the settings that differ from the model's own, and the metric of the held-out part."""

    settings: dict[str, Any]  # arguments of :class:`gramtower.TwoTower` as they were tried
    metric: float  # of the held-out part
    standard_error: float  # of that metric, over the entities that were ranked


@dataclass(frozen=True)
class Selection:
    """What a fit tried on held-out data before it learned from all of them."""

    metric: str  # name of the metric
    held_out: str  # the part of the data that was held out
    tried: list[Tried] = field(default_factory=list)  # the points, in the order in which they were tried
    chosen: dict[str, Any] = field(default_factory=dict)  # the settings that the fit uses, for all pairs
    note: str = ""  # why nothing was tried, or empty
    # whether the towers learn only from ids, although features were given next to them: these ranked the held-out pairs
    # of known entities no better, and serve to embed new ones
    ids_only: bool = False
    continued: bool = False  # whether the fit of all pairs starts from the best point and takes half of the iterations

    def __str__(self) -> str:
        if not self.tried:
            return f"settings by rule: {self.note}"
        settings = ", ".join(f"{name}={short(value, name)}" for name, value in self.chosen.items())
        ids = "; features only for new entities, as ids rank known ones no worse" if self.ids_only else ""
        return f"{settings}, chosen from {len(self.tried)} by {self.metric} on {self.held_out}{ids}"


def short(value: object, name: str = "") -> str:
    """A setting as text."""
    if name == "hidden" and isinstance(value, (tuple, list)):
        return check.hidden_text(tuple(value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class ListRules(TypedDict, total=False):
    """The rules of lists, as keyword arguments; :meth:`FittedModel.recommend` describes them."""

    exclude_seen: bool
    exclude: PairsLike | None
    allow: IdsLike | PairsLike | None
    deny: IdsLike | None
    candidates: str
    table: FeatureTable | TableLike | str | Path | None
    where: str | Mapping[str, object] | None
    boost: Boost | None
    popularity: float
    diversity: float
    at_most: Mapping[str, int] | None
    min_score: float | None
    scores: str


@dataclass(frozen=True, eq=False)
class FittedModel:
    """The result of training, and its answers. All attributes are in memory of the model's own."""

    left: Side  #: ids, inputs and embeddings of the left entities
    right: Side  #: those of the right entities
    trained: sp.csr_matrix  #: the pairs of training, as ones
    #: pairs that nothing was learned from: those of validation, and the histories of entities that were added
    further: sp.csr_matrix
    towers: Towers | None  #: embed new entities; None if they are the caller's own and were not given to ``load``
    shards: Shards  #: which rows this process holds
    dim: int  #: size of the embeddings
    hidden: tuple[tuple[int, ...], tuple[int, ...]]  #: widths of the hidden layers; empty for custom towers
    normalize: bool  #: whether the towers bring the embeddings of a side to one length
    omega: float  #: ω of the training
    history: list[Record]  #: records of the training
    reason: Reason  #: why it stopped
    message: str  #: the same in words
    best_metric: float | None  #: of the validation, or None
    same_entities: bool = False  #: whether both sides are one set, where ``seen`` holds every entity with itself too
    #: whether all labels were 1 and no pair had a weight: ``seen`` has all that was learned from
    plain_pairs: bool = True
    activation: str = defaults.ACTIVATION  #: of the hidden layers
    l2: float | None = None  #: λ of the training; None if loaded from an older file; likewise the next two
    embedding_l2: float | None = None  #: μ of the training
    auto_weights: str | None = None  #: the weights of right entities that ``"auto"`` stands for
    refine: bool = False  #: whether known entities of sides with only features were moved by their own pairs
    path: Selection | None = None  #: the settings tried on held-out data, or None if ``select`` was off
    names: tuple[str, str] = ("left", "right")  #: of the columns that the ids were read from, such as ("user", "item")
    calibration: Calibration | None = None  #: from scores to probabilities, if ``calibrate`` fitted it

    def __post_init__(self) -> None:
        for side, name in zip(self.sides, entity_names(*self.names), strict=True):
            side.called = name

    def __str__(self) -> str:
        sides = (
            f"{len(side):,} {name} entities by {side.inputs.text}"
            + (f" through hidden layers of {', '.join(map(str, widths))}" if widths else "")
            for side, widths, name in zip(self.sides, self.hidden, self.list_columns, strict=True)
        )
        length = ", those of a side of one length" if self.normalize else ""
        moved = ", known entities moved by their own pairs" if self.refine else ""
        path = "" if self.path is None else f"; {self.path}"
        return f"{' and '.join(sides)}, embeddings of size {self.dim}{length}{moved}{path}"

    def _repr_html_(self) -> str:
        return html.card("FittedModel", self.html_facts())

    def html_facts(self) -> str:
        sides = [
            (name, len(side), side.inputs.text, ", ".join(map(str, widths)) or "none")
            for side, widths, name in zip(self.sides, self.hidden, self.list_columns, strict=True)
        ]
        facts: dict[str, object] = {"size of embeddings": self.dim, "ω": self.omega, "pairs": int(self.trained.nnz)}
        drawn = ""
        if self.history:
            last = self.history[-1]
            facts |= {"iterations": last.iteration, "seconds": last.seconds, "objective": last.value}
            drawn = html.curve([record.value for record in self.history], "objective, iteration by iteration")
        if self.best_metric is not None:
            facts["best validation metric"] = self.best_metric
        table = html.table(("side", "entities", "known by", "hidden layers"), sides)
        return table + html.facts(facts) + drawn + html.note(f"Stopped: {self.message}")

    def observed(self) -> sp.csr_matrix:
        """The seen pairs without those of an entity with itself, where both sides are one set."""
        if not self.same_entities:
            return self._pairs
        own = own_pairs((self.left.ids, self.right.ids), self._pairs.shape)
        return sp.csr_matrix(self._pairs - self._pairs.multiply(own))

    def predict(
        self, left: IdsLike, right: IdsLike, *, left_features: FeaturesLike = None, right_features: FeaturesLike = None,
        scores: str = "raw", context: Context | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Scores of pairs of ids, element by element: how well the two entities of each pair go together.

        Args:
            left: ids of left entities.
            right: as many ids of right entities.
            left_features: describes new left entities, as for :meth:`similar`.
            right_features: describes new right entities.
            scores: "raw", or "probability" as for :meth:`recommend`.
            context: the context of the left entities, as for :meth:`recommend`.
        """
        shown = check.choice("scores", scores, ("raw", "probability"))
        probability = None if shown == "raw" else need_calibration(self.calibration)
        here = self._grown("left", left_features)[0]._grown("right", right_features)[0]
        found, columns = here.in_context(left, context), here.right.rows(check.ids("right", right))
        P = here.left.embeddings[torch.from_numpy(here.left.rows(left))] if found is None else found[1]
        if len(P) != len(columns):
            check.fail("left, right", f"{len(P)} and {len(columns)} ids", "as many left as right ids")
        result = (P * here.right.embeddings[torch.from_numpy(columns)]).sum(1).numpy()
        return np.asarray(result if probability is None else probability(result), dtype=np.float32)

    def calibrated(
        self, validation: PairsLike | None = None, method: str = "auto", *, population: str = "all", seed: int = 0
    ) -> Self:
        """Fit the function from scores to probabilities, for ``scores="probability"``; the model's file keeps it.

        A probability is that of a pair which the model has not seen to be among the held-out pairs. Over all pairs
        that the model has not seen, probabilities sum to about the number of held-out pairs (docs/how-to/scores.md).
        Another ``fit`` or ``update`` removes it.

        Args:
            validation: held-out pairs, as for ``test`` of :meth:`evaluate`; those that the model has learned from do
                not count. None for the validation pairs of ``fit``, which have chosen when it stopped.
            method: "platt", a logistic function of the score; "isotonic", any increasing function, which needs more
                held-out pairs; or "auto", which is isotonic from 1,000 held-out pairs on.
            population: the left entities whose pairs are counted: "all" that the model knows, or those with
                "held-out" pairs, if the others could not have any.
            seed: of a sample of left entities, which stands for all where there are more than a hundred million pairs.
        """
        check.choice("method", method, calibrating.METHODS)
        counts = self._counted("validation", validation, population, seed)
        return replace(self, calibration=calibrating.calibrate(counts, method, population))

    def reliability(self, test: PairsLike | None = None, bins: int = 10) -> Reliability:
        """How often pairs are held out, by the probability that the model gives them; it must be calibrated.

        Args:
            test: held-out pairs, as for :meth:`evaluate`. They should be others than those of ``calibrate``, and about
                as many: probabilities are those of a hold-out of the same size. None for the validation pairs of the
                model.
            bins: number of bins of probabilities; each has about the same sum of probabilities.
        """
        if self.calibration is None:
            check.fail("model", "one without probabilities", "model.calibrate(held_out_pairs) before")
        bins = check.count("bins", bins)
        counts = self._counted("test", test, self.calibration.population, seed=0)
        return calibrating.reliability(counts, self.calibration, bins)

    def _counted(self, name: str, given: PairsLike | None, population: str, seed: int) -> Counts:
        """The scores of the pairs that were not seen, and of those that are held out."""
        check.choice("population", population, calibrating.POPULATIONS)
        self.need_whole()
        if given is None:
            pairs = only_rows(self.further, np.arange(len(self.left)) < self.left.trained)
            if not pairs.nnz:
                expected = "held-out pairs, or a model that was fitted with validation= and without refit="
                check.fail(name, "None, and the model has no validation pairs", expected)
        else:
            read = read_pairs(name, given, context=self.context_of(given))
            found = self.aligned(name, read).known_pairs(name, self.ids)
            pairs = selected(found, found.data > 0)
        held_out = without(pattern_of(pairs), self.trained)
        seen = union(self.trained, without(self.further, held_out))
        if not held_out.nnz:
            check.fail(name, "only pairs that the model has learned from", "held-out pairs")
        return calibrating.count_scores(
            self.left.embeddings, self.right.embeddings, held_out, seen, population, check.seed(seed)
        )

    def embed(
        self, ids: IdsLike | None = None, side: str = "left", *, left_features: FeaturesLike = None,
        right_features: FeaturesLike = None, histories: HistoriesLike | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Embeddings of entities by id, or of new ones by what the towers see; all of a side when nothing is given.

        Features and histories of new entities are those of :meth:`recommend`; they are of one side, whatever ``side``
        says, and take the place of ``ids``.
        """
        new_left = left_features is not None or histories is not None
        if new_left and right_features is not None:
            check.fail("left_features, right_features", "features of both sides", "those of one")
        if new_left or right_features is not None:
            if ids is not None:
                check.fail(
                    "ids", "ids together with features or histories", "None: these describe entities of their own"
                )
            history = None if histories is None else history_matrix(self.right, histories)
            this, features = (self.left, left_features) if new_left else (self.right, right_features)
            what = None if features is None else described(this, features)
            return np.asarray(embedded(this, self.known_towers("embed new entities"), what, history).numpy())
        this = self.side(side)
        if ids is None:
            return np.asarray(this.embeddings.numpy().copy())
        return np.asarray(this.embeddings[torch.from_numpy(this.rows(check.ids("ids", ids)))].numpy())

    def evaluate(
        self, test: PairsLike, metrics: Sequence[str] = DEFAULT, *, exclude_seen: bool = True,
        exclude: PairsLike | None = None, by: str | None = None, candidates: str = "all",
        allow: IdsLike | None = None, left_features: FeaturesLike = None, right_features: FeaturesLike = None,
        histories: HistoriesLike | None = None, **columns: Unpack[PairColumns],
    ) -> Scores:  # fmt: skip
        """Ranking metrics on held-out pairs; see docs/metrics.md for the definitions.

        Everything that has ids is joined by id. What has none, a matrix, is joined by place: as pairs if it has the
        shape of training, as features or histories if it has one row for each left entity of ``test``. Anything else
        is refused. Test pairs of unknown entities cannot be ranked: ``left_out`` of the result counts them, and more
        than one in a hundred are a warning.

        Args:
            test: :class:`~gramtower.Interactions`; a polars, pandas or pyarrow table or the path of a CSV or Parquet
                file, whose first two columns are left and right ids unless ``left`` and ``right`` say otherwise; or a
                scipy.sparse matrix for a model that was fitted on one.
            metrics: names.
            exclude_seen: leave what a left entity has seen out of its ranking: training pairs (which then do not count
                where they are tested), and validation pairs that are not tested.
            exclude: further pairs to leave out, as for :meth:`recommend`; they do not count where they are tested.
            by: "popularity" or "activity" for a break-down.
            candidates: "all" right entities are ranked, also those added later and those of ``right_features``;
                "trained" for those of the training data only, where pairs of others are left out and counted.
            allow: rank only these right ids, such as those of new entities. Pairs of others are left out and counted as
                ``left_out["not_allowed"]``; unknown ids are ignored, with a warning.
            left_features: describes left entities of ``test`` as for :meth:`recommend`. Those in it, or in
                ``histories``, are embedded as described, whether the model knows them or not; the others as it knows
                them. What known ones have seen is left out either way.
            right_features: new right entities, ranked among the others, as for :meth:`recommend`.
            histories: of left entities, as for :meth:`recommend`, or Interactions such as those of
                :func:`gramtower.data.splits.held_out_users`, or a table or file like ``test``; they count as seen.
            columns: ``left``, ``right``, ``value`` … of a table of test pairs, as for :meth:`gramtower.TwoTower.fit`.
                Pairs with a value above 0, or of at least ``threshold``, are relevant.
        """
        exclude_seen = check.flag("exclude_seen", exclude_seen)
        columns.setdefault("context", self.context_of(test))
        test = read_pairs("test", test, **columns)
        histories = read_pairs("histories", histories) if is_table(histories) else histories
        here = self._grown("right", right_features)[0]._with_combinations(test)
        if check.choice("candidates", candidates, CANDIDATES) == "trained":
            here = here._without_added_right()
        allowed = None if allow is None else np.unique(here.right.known_rows("allow", allow))
        asked = _Evaluation(here, metrics, exclude_seen, exclude, by, candidates == "trained", allowed)
        if left_features is None and histories is None:
            return asked.of_known(test)
        return asked.of_described(test, left_features, histories)

    def recommend(
        self,
        left: IdsLike | None = None,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        exclude: PairsLike | None = None,
        allow: IdsLike | PairsLike | None = None,
        deny: IdsLike | None = None,
        candidates: str = "all",
        where: str | Mapping[str, object] | None = None,
        boost: Boost | None = None,
        popularity: float = 0.0,
        diversity: float = 0.0,
        at_most: Mapping[str, int] | None = None,
        min_score: float | None = None,
        scores: str = "raw",
        left_features: FeaturesLike = None,
        right_features: FeaturesLike = None,
        histories: HistoriesLike | None = None,
        context: Context | None = None,
        as_frame: bool = False,
        table: FeatureTable | TableLike | str | Path | None = None,
    ) -> tuple[IdArray, NDArray[np.float32]] | Any:
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
                if it knows none of them, lists are empty. Or pairs like ``exclude``: each left entity chooses among the
                right entities that it has a pair with, and has an empty list without one.
            deny: never these right ids; unknown ones are ignored likewise.
            candidates: "all" that the model knows, also those added later and those of ``right_features``; "trained"
                for only those of the training data.
            where: only right entities whose columns of ``table`` match ``"genre == 'Comedy' and year >= 1990"``, or
                ``{"genre": ["Comedy", "War"], "year": {"min": 1990}}``; docs/how-to/ranking.md describes both. If
                none matches, lists are empty.
            boost: numbers that are added to scores: ``{column: weight}`` adds weight times the cell of a column of
                numbers or of true and false, 0 if it is missing; or an array with a number for each right entity.
            popularity: an exponent γ: γ log(1 + n) is added to the scores of a right entity with n training pairs, as
                if exp(score) were multiplied by (1 + n)^γ. Below 0 it favours rare entities.
            diversity: from 0 to 1: how much an entity loses for being like those above it (maximal marginal relevance
                by cosines of embeddings, among the 10 k best). Lists are in the order of choice.
            at_most: ``{column: count}``: no more than so many entities of a list share a value of this column.
            min_score: leave out lower scores; scores are those that are returned.
            scores: what is returned as scores. "raw"; "probability" of a calibrated model: how often such a pair is
                among held-out pairs, which boosts and popularity do not change; or "percentile": 100 for the best, and
                100 (c − h) / c for an entity with h of the c candidates of the left entity above it. The order of
                lists does not change. docs/how-to/scores.md defines both.
            left_features: features of new entities: rows of a matrix, or for a model fitted with a FeatureTable a frame
                or file with the same columns. One list is made for each row; a row with a known id is embedded by its
                features, and what it has seen is left out.
            right_features: the same for right entities to be ranked among the others. Of a table with the column of
                ids, rows with known ids are left as the model knows them; rows of a matrix are called ("new", 0),
                ("new", 1), …, or go on with the numbers of a model without ids.
            histories: for models whose left features have a "history": a list of right ids for each new entity, the
                newest last, or a scipy.sparse matrix with one column for each right entity, larger values being newer.
                The order matters only for "history:last=…" and "history:decay=…".
            context: for models fitted on pairs with context columns, the context of the ``left`` ids, such as
                ``{"device": "tv"}``; a value is for all ids, a list has one for each. What is not given, or was not
                there in training, counts as missing. What a user has seen in any context is left out.
            as_frame: return a table, of polars if it is installed and otherwise of pandas, with a row for each answer:
                left id, ``rank`` from 1, right id, ``score``. The columns of ids are called as in the training data,
                such as ``user`` and ``item``, or ``left`` and ``right`` if that has no names. New left entities are
                called by the ids that a table of them has, or by their row from 0.
            table: a table of right entities for ``where``, ``boost`` and ``at_most``, whose columns, such as titles,
                are joined to the answers with ``as_frame``: a frame, file or FeatureTable with ids in the column "id",
                or else in one called as in the training data, or else in the first.

        Returns:
            Ids, of the type that the training data has, and scores, one row for each left entity, as two arrays; a
            score of −inf marks a place without an answer, whose id is None, or −1 where ids are numbers. Or the table,
            which has no such places.
        """
        check.count("k", k)
        _check_frame(as_frame, None if where is not None or boost is not None or at_most is not None else table)
        new = left_features is not None or histories is not None
        if (left is None) != new:
            given = "None" if left is None else "ids, and features or histories"
            check.fail("left", given, "ids of left entities; or, for new ones, left_features, histories or both")
        here = self._grown("right", right_features)[0]
        if new and context is not None:
            check.fail("context", "values with left_features or histories", "left ids with them")
        asked_in = None if left is None else here.in_context(left, context)
        if new:
            what = None if left_features is None else described(self.left, left_features)
            seen = None if histories is None else history_matrix(here.right, histories)
            P = embedded(self.left, self.known_towers("embed new entities"), what, seen)
            asked = list(range(len(P))) if what is None else what.names()
            seen = here.seen_by_described(what, seen)
        elif asked_in is not None:
            asked, (rows, P) = check.ids("left", left), asked_in
            seen = here.seen_by_users[rows]
        else:
            names = check.ids("left", left)
            asked, rows = names, self.left.rows(names)
            P, seen = self.left.embeddings[torch.from_numpy(rows)], here.seen[rows]

        def paired(name: str, given: PairsLike) -> sp.csr_matrix:
            if new:
                return here._paired_of_new(name, given, what, len(P))
            return here._paired(name, given, of_users=asked_in is not None)[rows]

        made = here._ranking(
            P, seen, paired, exclude_seen, exclude, allow, deny, candidates, table,
            where=where, boost=boost, popularity=popularity, diversity=diversity, at_most=at_most, min_score=min_score,
            scores=scores,
        )  # fmt: skip
        found, values = made.top(min(k, len(here.right)))
        ids = here.right.names(found)
        if not as_frame:
            return ids, values
        return _framed(asked, ids, values, self.list_columns, table, self.list_columns[1])

    def recommend_all(
        self, path: str | Path, k: int = 10, *, right_features: FeaturesLike = None, device: str = "auto",
        fresh: bool = False, progress: Callable[[int, int], object] | None = None, **rules: Unpack[ListRules],
    ) -> int:  # fmt: skip
        """Write the lists of all left entities, those of :meth:`recommend`, to a table, in bounded memory.

        One row for each answer, in order of left entities: left id, rank from 1, right id and score, called as in the
        frame of :meth:`recommend`. While it is being written its parts are in a folder ``PATH.parts`` next to it; the
        same call continues one that was killed.

        Args:
            path: the table or its URL: .parquet, .csv or .tsv. Needs polars: ``pip install "gramtower[io]"``.
            k: how many for each.
            right_features: new right entities to be ranked among the others: a table with the column of ids.
            device: where scores are made: "auto", "cpu" or "cuda".
            fresh: begin again where an earlier call left parts, also those of other lists.
            progress: called with the number of lists that are written and of all, after each part.
            rules: those of :meth:`recommend`: ``exclude_seen``, ``exclude``, ``allow``, ``deny``, ``candidates``,
                ``table``, ``where``, ``boost``, ``popularity``, ``diversity``, ``at_most``, ``min_score``, ``scores``.

        Returns:
            The number of answers that this call wrote; those of parts that were there are not among them.

        Raises:
            ValueError: also if the disk has too little room, or parts of other lists are there; nothing is written.
        """
        k, fresh = check.count("k", k), check.flag("fresh", fresh)
        if progress is not None and not callable(progress):
            check.fail("progress", repr(progress), "a function of two numbers, or None")
        on, path = pick_device(device), check.path("path", path)
        here, made = self.ranked(right_features, **rules)
        most, names = min(k, len(here.right)), self.list_columns
        return write_lists(here.ids, here.shape, made, path, most, on, fresh, progress, names)

    def ranked(self, right_features: FeaturesLike = None, **rules: Unpack[ListRules]) -> tuple[FittedModel, Ranking]:
        """The ranking of all left entities, and the model with the right entities of ``right_features``."""
        here = self._grown("right", right_features)[0]
        here.need_whole()
        return here, here._ranking(here.left.embeddings, here.seen, here._paired, **rules)

    def similar(
        self, ids: IdsLike | None = None, side: str = "right", k: int = 10, *, left_features: FeaturesLike = None,
        right_features: FeaturesLike = None, as_frame: bool = False,
        table: FeatureTable | TableLike | str | Path | None = None,
    ) -> tuple[IdArray, NDArray[np.float32]] | Any:  # fmt: skip
        """The k entities of the same side whose embeddings point most alike (cosine), the entity itself left out.

        Entities without a pair and without features (see :meth:`has_direction`) are rejected and never listed.

        Args:
            ids: of entities; None for those that the features describe, one row each.
            side: "left" or "right".
            k: how many.
            left_features: new left entities, asked about and listed like the others; see ``right_features`` of
                :meth:`recommend`.
            right_features: new right entities.
            as_frame: return a table as :meth:`recommend` does, with columns for the id asked about, ``rank``,
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
            check.fail(f"{other}_features", "features", f"None: {self.side(side).called} entities are compared")
        if (ids is None) and features[side] is None:
            check.fail("ids", "None", f"ids, or {side}_features of new entities")
        here, places = self._grown(side, features[side])
        this = here.side(side)
        rows = places[places >= 0] if ids is None else this.rows(check.ids("ids", ids))
        directed = here.has_direction(side)
        if not directed[rows].all():
            bad = this.names(rows[~directed[rows]])[0]
            given = f"{bad!r}, which has no pair in the training data and no features"
            check.fail(f"{this.called} ids", given, "entities with a pair: nothing says what others are like")
        unit = normalised(this.embeddings)
        found, scores = top_k(
            unit[torch.from_numpy(rows)], unit, min(check.count("k", k), len(this)),
            exclude=selection(rows, len(this)), deny=np.flatnonzero(~directed),
        )  # fmt: skip
        names = this.names(found)
        if as_frame:
            heads = self.list_columns[side == "right"], "similar"
            return _framed(this.names(rows).tolist(), names, scores, heads, table, heads[0])
        return names, scores

    @cached_property
    def seen(self) -> sp.csr_matrix:
        """What left entities have seen, as ones: the pairs of training and of validation, and histories.

        In a model with context these are the pairs of the same user in any context.
        """
        return self._pairs if self.combinations is None else self.combinations.spread(self._pairs)

    @cached_property
    def seen_by_users(self) -> sp.csr_matrix:
        """What the users of a model with context have seen in any context."""
        assert self.combinations is not None
        return self.combinations.seen(self._pairs)

    @cached_property
    def _pairs(self) -> sp.csr_matrix:
        return union(self.trained, self.further) if self.further.nnz else self.trained

    @cached_property
    def combinations(self) -> Combinations | None:
        """The combinations of ids and context that left entities are; None in a model without context."""
        return Combinations.of(self.left.inputs, self.left.ids)

    def context_of(self, given: object) -> list[str] | None:
        """The context columns to read of a table of pairs; None of pairs that were read before, or without context."""
        return None if self.combinations is None or not is_table(given) else self.combinations.columns[1:]

    def in_context(self, left: IdsLike, context: Context | None) -> tuple[NDArray[np.int64], Tensor] | None:
        """Users of a model with context, by place, and their embeddings in it.

        None for ids of left entities: combinations without further context, or any ids of a model without context.
        """
        known = self.combinations
        if known is None:
            if context is not None:
                check.fail("context", "values", "None: this model was fitted on pairs without context columns")
            return None
        names = check.ids("left", left)
        if context is None and all(name in self.left.index for name in names):
            return None
        places = known.rows(names)
        what = described(self.left, known.features(places, context))
        return places, embedded(self.left, self.known_towers("embed"), what, None)

    def _with_combinations(self, test: FitPairs) -> Self:
        """The model with the unseen combinations of known users that test pairs have."""
        known = self.combinations
        if known is None or not isinstance(test, Interactions):
            return self
        new = join(test.left_ids, self.left.index) < 0
        if new.all() and test.context != tuple(known.columns[1:]):
            given = f"pairs with context {', '.join(test.context)}" if test.context else "pairs without context columns"
            check.fail("test", given, f"pairs read with context={known.columns[1:]}")
        fresh = known.of_users(test.left_ids[new])
        if not len(fresh):
            return self
        return self._grown("left", combinations_table(fresh, known.columns))[0]

    @property
    def sides(self) -> tuple[Side, Side]:
        """The left and the right side."""
        return self.left, self.right

    @property
    def ids(self) -> Ids:
        """Ids of both sides; None for row numbers."""
        return self.left.ids, self.right.ids

    @property
    def list_columns(self) -> tuple[str, str]:
        """Names of the columns of left and right ids in tables of lists: as in the data, unless they are not free."""
        taken = self.names[0] == self.names[1] or not {"rank", "similar", "score"}.isdisjoint(self.names)
        return FittedModel.names if taken else self.names

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

        All others are known only by id: their embeddings have about the same direction, which says nothing about
        them. Of several processes none knows all pairs of a right entity: there all count as known.
        """
        this = self.side(side)
        if this.inputs.given or (side == "right" and not self.shards.single):
            return np.ones(len(this), dtype=bool)
        if side == "right":
            return np.bincount(self.trained.indices, minlength=len(this)) > 0
        known = np.diff(self.trained.indptr) > 0
        known[this.trained :] = np.diff(self.further.indptr)[this.trained :] > 0  # histories of those added
        return np.asarray(known)

    def with_added(
        self, left_features: FeaturesLike = None, right_features: FeaturesLike = None, *,
        histories: HistoriesLike | None = None, left_ids: IdsLike | None = None, right_ids: IdsLike | None = None,
    ) -> Self:  # fmt: skip
        """Keep new entities in the model and in its file; it answers about them like those of training.

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
            here = here._grown("right", right_features, None, right_ids, True)[0]
        if left_given:
            history = None if histories is None else history_matrix(here.right, histories)
            here, places = here._grown("left", left_features, history, left_ids, True)
            if history is not None:
                new = np.where(places >= len(self.left), places, -1)
                seen = sp.csr_matrix(selection(new, here.shape[0]).T @ history)
                here = replace(here, further=union(here.further, seen))
        return here

    def _without_added_right(self) -> Self:
        if not self.right.added:
            return self
        count, right = self.right.trained, self.right
        ids = None if right.ids is None else right.ids[:count]
        return replace(
            self, right=replace(right, ids=ids, embeddings=right.embeddings[:count], added=0),
            trained=self.trained[:, :count], further=self.further[:, :count],
        )  # fmt: skip

    def _grown(
        self, side: str, features: FeaturesLike, history: sp.csr_matrix | None = None, ids: IdsLike | None = None,
        kept: bool = False,
    ) -> tuple[Self, NDArray[np.int64]]:  # fmt: skip
        """The model with entities that features or histories describe, and their rows there."""
        if features is None and history is None:
            return self, np.empty(0, dtype=np.int64)
        self.need_whole()
        towers = self.known_towers("embed new entities")
        grown, places = extended(self.side(side), towers, features, history, ids, kept)
        return self.with_side(grown), places

    def with_side(self, grown: Side) -> Self:
        """The model with more entities of a side, which have no pairs."""
        left, right = (grown, self.right) if grown.name == "left" else (self.left, grown)
        pairs = (resized(matrix, (len(left), len(right))) for matrix in (self.trained, self.further))
        trained, further = pairs
        return replace(self, left=left, right=right, trained=trained, further=further)

    def need_whole(self) -> None:
        """Refuse a model of which each of several processes holds a part."""
        if not self.shards.single:
            check.fail("model", f"one that {self.shards.group.size} processes share", "a loaded model, in one process")

    def known_towers(self, purpose: str) -> Towers:
        """The towers; refused if the model was loaded without them, with the purpose they are needed for."""
        if self.towers is None:
            check.fail("model", "loaded without its own towers", f"gramtower.load(path, towers=...) to {purpose}")
        return self.towers

    def aligned(self, name: str, pairs: FitPairs) -> Aligned:
        """Pairs of the left entities that this process knows."""
        rows = self.shards.left
        if self.left.ids is not None or rows.count == rows.total:
            return align(name, pairs, self.ids, self.shape, self.numbered, (self.left.trained, self.right.trained))
        found = align(name, pairs, self.ids, (rows.total, self.shards.right.total), self.numbered)
        return replace(found, pairs=found.pairs[rows.first : rows.stop])

    def _paired(self, name: str, given: PairsLike, of_users: bool = False) -> sp.csr_matrix:
        """The pairs of an argument, in the model's rows or in those of its users without context.

        In a model with context a pair holds for its user in all contexts. Pairs of others change nothing, with a
        warning if all are.
        """
        pairs, known = read_pairs(name, given), self.combinations
        if known is None or not isinstance(pairs, Interactions):
            found = self.aligned(name, pairs)
        else:
            if pairs.context or (join(pairs.left_ids, self.left.index) >= 0).any():
                own = Combinations(known.columns, pairs.left_ids)
                pairs = Interactions(own.seen(pairs.matrix), own.users, pairs.right_ids)
            shape = len(known.users), len(self.right)
            found = align(name, pairs, (known.users, self.right.ids), shape, (None, self.right.numbered))
        if self.shards.single and found.example is not None and not found.pairs.nnz:
            warn_of_pairs(name, found.total, found.total, found.example[0])
        return found.pairs if known is None or of_users else known.of_combinations(found.pairs)

    def _paired_of_new(self, name: str, given: PairsLike, what: Described | None, count: int) -> sp.csr_matrix:
        """The pairs of an argument for new left entities: by their ids, or row by row."""
        pairs = read_pairs(name, given)
        if not isinstance(pairs, Interactions):
            return resized(canonical(name, pairs, (count, self.right.trained)), (count, len(self.right)))
        if what is None or what.ids is None:
            expected = "a scipy.sparse matrix with a row for each new entity, or a table of them with a column of ids"
            check.fail(name, "pairs with ids, of entities without", expected)
        its = pairs.left_ids, self.right.ids
        found = align(name, pairs, its, (len(its[0]), len(self.right)), (pairs.numbered[0], self.right.numbered))
        return sp.csr_matrix(selection(what.rows_in(index_of(its[0])), len(its[0])) @ found.pairs)

    def _ranking(
        self, P: Tensor, seen: sp.csr_matrix | None, paired: Callable[[str, PairsLike], sp.csr_matrix],
        exclude_seen: bool = True, exclude: PairsLike | None = None, allow: IdsLike | PairsLike | None = None,
        deny: IdsLike | None = None, candidates: str = "all",
        table: FeatureTable | TableLike | str | Path | None = None, **rules: Any,
    ) -> Ranking:  # fmt: skip
        """The ranking of :meth:`recommend`; "trained" denies entities that were added, unknown ids are a warning.

        ``seen`` and ``paired(argument, pairs)`` are in the rows of P.
        """
        check.choice("candidates", candidates, CANDIDATES)
        left_out = [seen] if check.flag("exclude_seen", exclude_seen) and seen is not None else []
        left_out += [] if exclude is None else [paired("exclude", exclude)]
        right, allowed, own = self.right, None, None
        if isinstance(allow, Interactions) or is_sparse(allow) or (is_table(allow) and not isinstance(allow, str)):
            own = pattern_of(paired("allow", allow))
        elif allow is not None:
            allowed = right.known_rows("allow", cast("IdsLike", allow))
        denied = [] if deny is None else [right.known_rows("deny", deny)]
        if candidates == "trained":
            denied.append(np.arange(right.trained, len(right)))

        @cache
        def columns() -> EntityTable:
            if table is None:
                check.fail("table", "None", f"a table of {right.called} entities with the columns of the rules")
            return EntityTable.of(table, right.ids, len(right), self.list_columns[1])

        return ranking(
            P, right.embeddings, exclude=union(*left_out) if left_out else None, allow=allowed, own=own,
            deny=np.concatenate(denied) if denied else None,
            rules=make_rules(columns, lambda: self.popularity, len(right), probability=self.calibration, **rules),
        )  # fmt: skip

    @cached_property
    def popularity(self) -> NDArray[np.int64]:
        """The number of training pairs of each right entity."""
        self.need_whole()
        return np.bincount(self.trained.indices, minlength=len(self.right))

    def seen_by_described(
        self, what: Described | None, history: sp.csr_matrix | None, index: Mapping[Key, int] | None = None
    ) -> sp.csr_matrix | None:
        """What left entities that a call describes have seen: their history, and the pairs of those that are known."""
        if what is None or what.ids is None:
            return history
        rows = what.rows_in(self.left.index if index is None else index)
        own = sp.csr_matrix(selection(rows, len(self.left)) @ self.seen)
        return own if history is None else union(own, history)

    def side(self, side: str) -> Side:
        """One side by its name."""
        return self.left if check.choice("side", side, ("left", "right")) == "left" else self.right


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """The metrics to compute for a model, and the pairs to leave out of its rankings; see `FittedModel.evaluate`."""

    known: FittedModel
    metrics: Sequence[str]
    exclude_seen: bool
    exclude: PairsLike | None
    by: str | None
    trained_only: bool  # whether right entities that were not there in training are left out as asked
    allowed: NDArray[np.int64] | None  # columns to rank, increasing; None for all

    def of_known(self, test: FitPairs) -> Scores:
        """Metrics of pairs of entities that the model knows; rows of the result are those of its left entities."""
        known, left = self.known, self.known.left
        found = known.aligned("test", test)
        if known.shards.single:
            self._refuse_strangers(found)
        also = [] if self.exclude is None else [known._paired("exclude", self.exclude)]
        if self.exclude_seen:
            also.append(without(known.further, only_rows(found.pairs, np.arange(len(left)) < left.trained)))
            if known.combinations is not None:  # pairs in another context: lists never have them, tested or not
                also.append(known.combinations.spread(known.trained))
        return self._measured(left.embeddings, found, also, known.shards.group, train=known.trained)

    def of_described(self, test: FitPairs, features: FeaturesLike, histories: HistoriesLike | None) -> Scores:
        """Metrics where left entities are described in the call; rows of the result are those of the test.

        Those that are in neither the features nor the histories are taken as the model knows them, if it does.
        """
        known, left, right = self.known, self.known.left, self.known.right
        if self.by == "activity":
            check.fail("by", repr(self.by), "popularity, or None: of new entities there are no training pairs")
        if not known.shards.single and (self.by or {m.kind for m in parse(self.metrics)} & {"psp", "novelty"}):
            check.fail("metrics", "popularity, in several processes", "a loaded model, in one process")
        matrix, (given, _) = matrix_and_ids(test, "test")
        count = matrix.shape[0]
        ids, shape, trained = (given, right.ids), (count, len(right)), (count, right.trained)
        numbered = (test.numbered[0] if isinstance(test, Interactions) else None, right.numbered)
        names = np.arange(count) if given is None else given
        what = None if features is None else described(left, features)
        rows = np.full(count, -1, dtype=np.int64)  # of the features
        if what is not None:
            rows = _by_place("left_features", what.count, count) if what.ids is None else join(names, what.places())
        history, new = None, rows >= 0
        if histories is not None:
            history, shown = self._histories(histories, names, numbered)
            new |= shown
        own = np.full(count, -1, dtype=np.int64)  # rows of the model; those of another matrix mean other entities
        if given is not None and known.shards.single and numbered[0] in (None, left.numbered):
            own = join(given, left.index)
        old = np.where(new, -1, own)
        P = torch.zeros(count, left.embeddings.shape[1], dtype=left.embeddings.dtype)
        P[torch.from_numpy(old >= 0)] = left.embeddings[torch.from_numpy(old[old >= 0])]
        if new.any():
            of_new, towers = None if history is None else sp.csr_matrix(history[new]), known.known_towers("embed")
            P[torch.from_numpy(new)] = embedded(left, towers, what, of_new, rows[new]).to(P)
        found = align("test", test, ids, shape, numbered, trained)
        there = new | (old >= 0)
        if found.example is None and (strange := ~there & (np.diff(found.pairs.indptr) > 0)).any():
            found = replace(found, example=(names.tolist()[int(np.argmax(strange))], 0))
        found = replace(found, pairs=only_rows(found.pairs, there))
        self._refuse_strangers(found)
        picked = selection(own, len(left))
        seen = sp.csr_matrix(picked @ known.trained)
        seen = seen if history is None else union(seen, only_rows(history, new))
        of_training = only_rows(found.pairs, (own >= 0) & (own < left.trained))
        also = [without(sp.csr_matrix(picked @ known.further), of_training)] if self.exclude_seen else []
        if self.exclude is not None:
            pairs = read_pairs("exclude", self.exclude)
            also.append(align("exclude", pairs, ids, shape, numbered, trained).pairs)
        return self._measured(P, found, also, SINGLE, train=seen, popularity=known.trained)

    def _histories(
        self, histories: HistoriesLike, names: IdArray, numbered: Numbered
    ) -> tuple[sp.csr_matrix, NDArray[np.bool_]]:
        """What the left entities of a test have seen, in its rows, and which of them have a history."""
        right = self.known.right
        if not isinstance(histories, Interactions):
            matrix = history_matrix(right, histories)
            return matrix, _by_place("histories", matrix.shape[0], len(names)) >= 0
        if self.known.left.inputs.has_order:
            if histories.times is None:
                check.fail("histories", "pairs without times", "pairs with times, or lists with the newest id last")
            old = histories.matrix
            timed = sp.csr_matrix((histories.times, old.indices, old.indptr), shape=old.shape)
            histories = replace(histories, matrix=timed)
        found = align("histories", histories, (names, right.ids), (len(names), len(right)), numbered)
        refuse_strangers("histories", found, (names, right.ids))
        return found.pairs, join(names, index_of(histories.left_ids)) >= 0

    def _measured(self, P: Tensor, found: Aligned, also: list[sp.csr_matrix], group: Group, **more: Any) -> Scores:
        """Metrics of rankings of the columns that are allowed, with counts of the test pairs that they leave out.

        Pairs of ``also`` are left out of the rankings.
        """
        known, Q, truth, lost = self.known, self.known.right.embeddings, found.pairs, {}
        more["exclude"] = union(*also) if also else None
        kept = int(group.totals(float(truth.nnz))[0])
        if (columns := self.allowed) is not None:
            truth, Q = sp.csr_matrix(truth[:, columns]), Q[torch.from_numpy(columns)]
            more = {name: sp.csr_matrix(one[:, columns]) for name, one in more.items() if one is not None}
            lost = {"not_allowed": found.pairs.nnz - truth.nnz}
            if not group.totals(float(truth.nnz))[0]:
                check.fail("allow", f"{len(columns):,} known ids, none of them in a test pair", "some that are tested")
        scores = evaluate_embeddings(
            P, Q, truth, metrics=self.metrics, exclude_train=self.exclude_seen, by=self.by, processes=group, **more
        )
        unknown = {"unknown_left": found.total - found.unknown_right - kept, "unknown_right": found.unknown_right}
        scores.left_out = lost | unknown | {"seen": scores.pairs_left_out}
        scores.pairs_left_out = sum(scores.left_out.values())
        if known.shards.single:
            example = None if found.example is None else found.example[0]
            warn_of_pairs("test", found.total - kept, found.total, example, self._hint(found, kept))
        return scores

    def _refuse_strangers(self, found: Aligned) -> None:
        refuse_strangers("test", found, self.known.ids, self._hint(found, 0))

    def _hint(self, found: Aligned, kept: int) -> str:
        """How entities that are not known could be ranked, side by side; ``kept`` are the pairs with two known ids."""
        strange = found.total - found.unknown_right > kept or (found.example is not None and found.example[1] == 0)
        hints = []
        for side, asked in zip(
            self.known.sides, (strange, found.unknown_right > 0 and not self.trained_only), strict=True
        ):
            ways = side.inputs.ways(side.name)
            verb = "describes" if len(ways) == 1 else "describe"
            if asked and ways:
                hints.append(f"{' and '.join(ways)} of evaluate {verb} new {side.called} entities")
            elif asked:
                given = f"{side.name}_features"
                hints.append(f"the model knows {side.called} entities only by id; fit with {given} to rank new ones")
        return ", ".join(hints)


def _by_place(name: str, given: int, count: int) -> NDArray[np.int64]:
    """Row numbers of what has no ids and must have a row for each left entity of a test."""
    if given != count:
        expected = f"{count}, one for each row of test, or a table with a column of ids"
        check.fail(name, f"{given} rows without ids", expected)
    return np.arange(count)


def _check_frame(as_frame: object, table: object) -> None:
    if not check.flag("as_frame", as_frame) and table is not None:
        check.fail("table", type(table).__name__, "as_frame=True as well: arrays have no columns")


def _framed(
    asked: Sequence[Key], ids: IdArray, scores: NDArray[np.float32], names: tuple[str, str],
    table: FeatureTable | TableLike | str | Path | None, name: str,
) -> Any:  # fmt: skip
    more = None if table is None else extra_columns(table, name, ids, scores)
    return lists_frame(asked, ids, scores, names, more=more)


def pattern_of(matrix: sp.csr_matrix | None, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """A copy of a matrix's pattern, with ones for values; None stands for an empty one."""
    if matrix is None:
        return sp.csr_matrix(shape, dtype=np.float32)
    ones = np.ones(len(matrix.indices), dtype=np.float32)
    return sp.csr_matrix((ones, matrix.indices.copy(), matrix.indptr.copy()), shape=matrix.shape)


def write_lists(
    ids: Ids, shape: tuple[int, int], ranking: Ranking, path: Path, k: int, device: torch.device, fresh: bool,
    progress: Callable[[int, int], object] | None, names: tuple[str, str] = FittedModel.names,
) -> int:  # fmt: skip
    """Write the lists of all left entities to a table, from where an earlier run of the same was killed.

    A thread writes one part while the next is ranked. Each part has its own products: how scores are rounded depends on
    the number of rows, and a run that goes on after a kill has to end in the same file as one that was not killed.
    """
    file = ListFile(path, ids, shape, k, _marks(ids, ranking), names)
    with locked(path, name="path"):
        done, answers = file.begin(fresh), 0
        pending: Future[int] | None = None
        if progress is not None and done:
            progress(min(done * file.rows, file.lists), file.lists)
        with ThreadPoolExecutor(1, "gramtower-lists") as writer, explained(None):
            across = ranking.Q.to(device)
            for part in range(done, file.parts + 1):
                if part < file.parts:
                    start, stop = part * file.rows, min((part + 1) * file.rows, file.lists)
                    some = ranking if stop - start == file.lists else ranking.rows(slice(start, stop))
                    columns, values = some._replace(P=some.P.to(device), Q=across).top(k)
                if pending is not None:
                    answers += pending.result()
                    if progress is not None:
                        progress(min(part * file.rows, file.lists), file.lists)
                if part < file.parts:
                    pending = writer.submit(file.write, part, columns, values)
        file.finish()
    return answers


def _marks(ids: Ids, ranking: Ranking) -> dict[str, str]:
    """Digests of all that the lists depend on."""
    rules = ranking.rules
    return {
        "left ids": digest_of(ids[0]),
        "right ids": digest_of(ids[1]),
        "left embeddings": digest_of(ranking.P),
        "right embeddings": digest_of(ranking.Q),
        "pairs left out": digest_of(ranking.exclude),
        "right entities allowed": digest_of(ranking.chosen),
        "right entities denied": digest_of(ranking.deny),
        "pairs allowed": digest_of(ranking.own),
        "boost and popularity": digest_of(rules.added),
        "at_most": digest_of(*itertools.chain(*rules.groups)),
        "diversity": str(rules.diversity),
        "min_score": str(rules.min_score),
        "scores": rules.scores,
        "calibration": digest_of(rules.probability),
    }

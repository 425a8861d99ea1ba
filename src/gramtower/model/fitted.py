"""A fitted model, and what it answers: recommendations, neighbours, scores, embeddings, metrics.

One rule says what an entity has *seen*, for every answer and every metric: the pairs of training, those of validation,
the history of a new entity, and what a call gives as ``exclude``. Metrics rank what is tested: a validation pair that
is among the pairs tested counts, one that is not is left out like the others. Popularity is that of training pairs.

New entities are described by features (model/newcomers.py); :meth:`Entities.with_added` keeps them. Its lists are
those of model/ranked_lists.py. Answers are copies: changing one changes nothing in the model. Checked by
tests/test_estimator.py, tests/test_seen.py and tests/test_new_entities.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower.data.frames import Column
from gramtower.metrics.definitions import DEFAULT
from gramtower.metrics.tally import Scores
from gramtower.model import defaults, measuring
from gramtower.model.columns import Columns, is_frame, is_path
from gramtower.model.entities import CANDIDATES
from gramtower.model.fit_data import given_pairs, own_pairs
from gramtower.model.newcomers import embedded
from gramtower.model.ranked_lists import RankedLists
from gramtower.model.side import history_matrix
from gramtower.training.result import Reason, Record


@dataclass(frozen=True)
class Tried:
    """A point of the path: the settings that differ from the model's own, and the metric of the held-out part.

    Attributes:
        settings: arguments of :class:`gramtower.TwoTower` as they were tried.
        metric: of the held-out part.
        standard_error: of that metric, over the entities that were ranked.
    """

    settings: dict[str, Any]
    metric: float
    standard_error: float


@dataclass(frozen=True)
class Selection:
    """What a fit tried on held-out data before it learned from all of them.

    Attributes:
        metric: name of the metric.
        held_out: the part of the data that was held out.
        tried: the points, in the order in which they were tried.
        chosen: the settings that the fit uses, for all pairs.
        note: why nothing was tried, or empty.
    """

    metric: str
    held_out: str
    tried: list[Tried] = field(default_factory=list)
    chosen: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        """The choice in one line."""
        if not self.tried:
            return f"settings by rule: {self.note}"
        settings = ", ".join(f"{name}={short(value)}" for name, value in self.chosen.items())
        return f"{settings}, chosen from {len(self.tried)} by {self.metric} on {self.held_out}"

    def to_plain(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, name: str, plain: Any) -> Selection:
        """The selection of such a dictionary, of the file or field ``name``.

        Raises:
            ValueError: if it is not one.
        """
        try:
            tried = [Tried(**one) for one in plain["tried"]]
            return cls(str(plain["metric"]), str(plain["held_out"]), tried, dict(plain["chosen"]), str(plain["note"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: this is not a selection of settings; delete it to choose again") from error


def short(value: object) -> str:
    """A setting as text."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, eq=False)
class FittedModel(RankedLists):
    """What training ended in, and the questions to it. Its entities and their pairs are fields of :class:`Entities`.

    Attributes:
        dim: size of the embeddings.
        hidden: widths of the hidden layers, left and right; none for towers of the caller's own.
        normalize: whether embeddings of a side have one length, which the towers see to.
        refine: whether known entities of sides known by features alone were moved by their own pairs after training.
        omega: ω of the training.
        activation: of the hidden layers.
        l2: λ of the training; None in a file of before it was kept, and so for the next two.
        embedding_l2: μ of the training.
        auto_weights: the weights of right entities that ``"auto"`` stands for.
        history: records of the training.
        reason: why it stopped.
        message: the same with particulars.
        best_metric: of the validation, or None.
        path: what was tried on held-out data to choose the penalty, or None if the fit was told not to.
        same_entities: whether both sides are one set, where ``seen`` holds every entity with itself too.
        plain_pairs: whether all labels were 1 and no pair had a weight, so that ``seen`` says all of them.
        names: of the columns that the ids of both sides were read from, such as ("user", "item"); ("left", "right")
            where the data has none.
    """

    dim: int
    hidden: tuple[tuple[int, ...], tuple[int, ...]]
    normalize: bool
    omega: float
    history: list[Record]
    reason: Reason
    message: str
    best_metric: float | None
    same_entities: bool = False
    plain_pairs: bool = True
    activation: str = defaults.ACTIVATION
    l2: float | None = None
    embedding_l2: float | None = None
    auto_weights: str | None = None
    refine: bool = False
    path: Selection | None = None
    names: tuple[str, str] = ("left", "right")

    def __str__(self) -> str:
        """Sizes, and what each tower sees and how it is scaled."""
        sides = (
            f"{len(side):,} {side.name} entities by {side.inputs.text}"
            + (f" through hidden layers of {', '.join(map(str, widths))}" if widths else "")
            for side, widths in zip((self.left, self.right), self.hidden, strict=True)
        )
        length = ", those of a side of one length" if self.normalize else ""
        moved = ", known entities moved by their own pairs" if self.refine else ""
        path = "" if self.path is None else f"; {self.path}"
        return f"{' and '.join(sides)}, embeddings of size {self.dim}{length}{moved}{path}"

    def _repr_html_(self) -> str:
        """A card for notebooks: what each tower sees, how training went and why it stopped."""
        return html.card("FittedModel", self.html_facts())

    def html_facts(self) -> str:
        """The inside of such a card."""
        sides = [
            (side.name, len(side), side.inputs.text, ", ".join(map(str, widths)) or "none")
            for side, widths in zip((self.left, self.right), self.hidden, strict=True)
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
            return self.seen
        own = own_pairs((self.left.ids, self.right.ids), self.seen.shape)
        return sp.csr_matrix(self.seen - self.seen.multiply(own))

    def predict(
        self, left: Any, right: Any, *, left_features: Any = None, right_features: Any = None
    ) -> NDArray[np.float32]:
        """Scores of pairs of ids, element by element: how well the two entities of each pair go together.

        Args:
            left: ids of left entities.
            right: as many ids of right entities.
            left_features: describes new left entities, as for :meth:`similar`.
            right_features: describes new right entities.
        """
        here = self.grown("left", left_features)[0].grown("right", right_features)[0]
        rows, columns = here.left.rows(check.ids("left", left)), here.right.rows(check.ids("right", right))
        if len(rows) != len(columns):
            check.fail("left, right", f"{len(rows)} and {len(columns)} ids", "as many left as right ids")
        P, Q = here.left.embeddings[torch.from_numpy(rows)], here.right.embeddings[torch.from_numpy(columns)]
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

        Features and histories of new entities are those of :meth:`recommend`; they are of one side, whatever ``side``
        says, and take the place of ``ids``.
        """
        new_left = left_features is not None or histories is not None
        if new_left and right_features is not None:
            check.fail("left_features, right_features", "features of both sides", "those of one")
        if new_left or right_features is not None:
            if ids is not None:
                check.fail("ids", "ids beside features or histories", "None: these describe entities of their own")
            history = None if histories is None else history_matrix(self.right, histories)
            this, features = (self.left, left_features) if new_left else (self.right, right_features)
            return np.asarray(embedded(this, self.known_towers("embed new entities"), features, history).numpy())
        this = self.side(side)
        if ids is None:
            return np.asarray(this.embeddings.numpy().copy())
        return np.asarray(this.embeddings[torch.from_numpy(this.rows(check.ids("ids", ids)))].numpy())

    def evaluate(
        self,
        test: Any,
        metrics: Sequence[str] = DEFAULT,
        *,
        exclude_seen: bool = True,
        exclude: Any = None,
        by: str | None = None,
        candidates: str = "all",
        allow: Sequence[Any] | None = None,
        left_features: Any = None,
        right_features: Any = None,
        histories: Any = None,
        left: Column | None = None,
        right: Column | None = None,
        value: Column | None = None,
        threshold: float | None = None,
    ) -> Scores:
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
            left: of a table of test pairs, the column of left ids, by name or by position from 0.
            right: the column of right ids.
            value: the column of values; without ``threshold``, pairs with a value above 0 are relevant.
            threshold: smallest value that makes a pair.
        """
        exclude_seen = check.flag("exclude_seen", exclude_seen)
        test = Columns(left, right, value, threshold=threshold).read_pairs("test", test)
        histories = given_pairs("histories", histories) if is_frame(histories) or is_path(histories) else histories
        here = self.grown("right", right_features)[0]
        if check.choice("candidates", candidates, CANDIDATES) == "trained":
            here = here.without_added_right()
        allowed = None if allow is None else np.unique(here.right.known_rows("allow", allow))
        ranking = measuring.Ranking(metrics, exclude_seen, exclude, by, candidates == "trained", allowed)
        if left_features is None and histories is None:
            return measuring.of_known(here, test, ranking)
        return measuring.of_described(here, test, ranking, left_features, histories)


def pattern_of(matrix: sp.csr_matrix | None, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """A copy of a matrix's pattern, with ones for values; None stands for an empty one."""
    if matrix is None:
        return sp.csr_matrix(shape, dtype=np.float32)
    ones = np.ones(len(matrix.indices), dtype=np.float32)
    return sp.csr_matrix((ones, matrix.indices.copy(), matrix.indptr.copy()), shape=matrix.shape)

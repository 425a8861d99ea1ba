"""Choose the penalty, and the shape of towers where it matters, by data that are held out of a fit.

No rule over sizes knows the right penalty: it depends on how much signal the pairs carry, which only held-out pairs
show. :func:`select` holds out a part of the data, fits the rest along a path of penalties and keeps the best one:

    towers over ids              path over μ; a tenth of the pairs of a sample of left entities is held out
    features on a side           path over λ; a sample of the entities of that side is held out with all their pairs
    features and ids on a side   path over μ and λ together; pairs are held out, because ids are for known entities

The path starts at the rule's value (estimator/defaults.py), moves up or down by a factor while the metric improves, and
is refined once by the parabola through the best three points. Each point starts from the parameters of the best one so
far, as glmnet does, and takes a fraction of a fit's iterations. Of points whose difference to the best is within one
standard error of that difference, the one with the strongest penalty is taken. Where features describe both sides,
linear and normalised towers are compared at the rule's value first, and the path is walked for the best of them.

More pairs want a weaker penalty on embeddings: μ is multiplied by the share of pairs that was kept, to the power 1.5.
Cost: four to seven points, each a third to a half of a fit of narrow towers.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.partition import Shard
from gramtower.distributed.group import current_group
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.estimator import defaults
from gramtower.estimator.fit_data import FitData, matrix_and_ids, prepare_data
from gramtower.estimator.fit_parts import (
    is_tiny,
    iterations,
    make_problem,
    make_towers,
    make_validation,
    over_ids,
)
from gramtower.estimator.fitted import Selection, Tried, short
from gramtower.estimator.refinement import refine
from gramtower.estimator.settings import ModelSettings
from gramtower.estimator.unseen import SIDES, Unseen, hold_out_entities
from gramtower.runtime.threads import one_thread
from gramtower.training.loop import minimize
from gramtower.training.result import Reason

HOLDS = ("pairs", "left", "right")  # parts that select="…" can ask to hold out
_PENALTIES = {defaults.IDS: ("embedding_l2",), defaults.FEATURES: ("l2",), defaults.BOTH: ("embedding_l2", "l2")}
_SHARE, _RANKED, _LEAST = 0.1, 5_000, 50  # of an entity's pairs, and of all; most and least entities that are ranked
_ENTITIES = 0.2  # of the entities of a side with features
_FACTOR = {"embedding_l2": 2.0, "l2": 4.0}
_STEPS, _NEAR = 6, 0.1  # points of a path in one direction; a step, in factors, that is not worth a fit
_FIRST, _NEXT = 0.5, 0.34  # of a fit's iterations: from scratch, and from another point
_NARROW = {"cpu": 256, "cuda": 512}  # hidden units of towers over features that are compared
_MORE_PAIRS = 1.5  # power of the kept share of pairs that μ is multiplied by


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A part of the data to learn from, and the part that was held out of it.

    Attributes:
        pairs: to learn from.
        features: of its entities, left and right.
        validation: held-out pairs, or None.
        unseen: held-out entities, or None.
        kept: share of all pairs that is left to learn from.
        text: the held-out part, for people.
    """

    pairs: Any
    features: tuple[Any, Any]
    validation: Any = None
    unseen: Unseen | None = None
    kept: float = 1.0
    text: str = "the validation part"


def select(settings: ModelSettings, pairs: Any, features: tuple[Any, Any], given: HeldOut | None = None) -> Selection:
    """Choose the penalties that ``settings`` leaves open, and the shape of towers where features describe both sides.

    Args:
        settings: of the model; arguments that are given are never changed.
        pairs: all pairs of the fit.
        features: of all its entities, left and right.
        given: the user's validation part; by default one is held out here, with the model's seed.

    Returns:
        The path, with the settings that the fit is to use: empty, with a note, where nothing can be chosen.
    """
    part = given or hold_out_part(settings, pairs, features)
    if isinstance(part, str):
        return Selection(settings.metric, "nothing", note=part)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fit of all pairs gives the same ones
        data = prepare_data(settings, part.pairs, *part.features, part.validation)
    names = tuple(name for name in _PENALTIES[data.seen] if getattr(settings, name) is None)
    if not names:
        return Selection(settings.metric, "nothing", note=f"{' and '.join(_PENALTIES[data.seen])} given")
    with one_thread(is_tiny(settings, data)):
        search = _Search(settings, data, part.unseen, names)
        best, scale = search.run()
    tried = [Tried(point.settings, point.metric, point.standard_error) for point in search.points]
    if best is None:
        return Selection(settings.metric, part.text, tried, note=f"{settings.metric} is the same for all")
    chosen = {**best.shape.changes}
    if "l2" in names:
        more = 1.0 if given is not None else _pairs_of_entity(matrix_and_ids(pairs)[0]) / _pairs_of_entity(data.matrix)
        chosen["l2"] = search.problem.l2 * scale * more
    if "embedding_l2" in names:
        chosen["embedding_l2"] = search.problem.embedding_l2 * scale * part.kept**_MORE_PAIRS
    return Selection(settings.metric, part.text, tried, chosen)


def hold_out_part(settings: ModelSettings, pairs: Any, features: tuple[Any, Any]) -> HeldOut | str:
    """Hold out a part of the data as the module's first lines say; the reason if that cannot be done."""
    seed, what = check.seed(settings.seed), _held_side(settings, features)
    if isinstance(pairs, Shard):
        return "a partition is fitted with its own held-out pairs, or by rule"
    matrix, _ = matrix_and_ids(pairs)
    if what != "pairs":
        try:
            share = min(_ENTITIES, _RANKED / max(1, matrix.shape[SIDES.index(what)]))
            unseen = hold_out_entities(settings, pairs, features, share, what, seed)
        except ValueError as error:
            if isinstance(settings.select, str):
                raise
            return f"no {what} entities can be held out ({error})"
        if (ranked := int((np.diff(unseen.truth.indptr) > 0).sum())) < _LEAST:
            return f"the {ranked} entities to rank are too few to choose by (at least {_LEAST})"
        kept = unseen.train.matrix.nnz / matrix.nnz
        return HeldOut(unseen.train, unseen.features, None, unseen, kept, f"{unseen.count:,} {what} entities")
    held = _held_pairs(matrix, seed)
    rows = int((np.add.reduceat(held, matrix.indptr[:-1][np.diff(matrix.indptr) > 0]) > 0).sum()) if held.any() else 0
    if rows < _LEAST:
        return f"the {rows} left entities with pairs to hold out are too few to choose by (at least {_LEAST})"
    whole = pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(matrix)
    parts: list[Any] = [whole.subset(~held), whole.subset(held)]
    if not isinstance(pairs, Interactions):
        parts = [part.matrix for part in parts]
    text = f"{int(held.sum()):,} pairs of {rows:,} left entities"
    return HeldOut(parts[0], features, parts[1], None, 1 - float(held.mean()), text)


def _held_side(settings: ModelSettings, features: tuple[Any, Any]) -> str:
    """The kind of part to hold out: "pairs", or the side whose entities are held out."""
    if isinstance(settings.select, str):
        return settings.select
    weights = settings.left_weights, settings.right_weights
    if current_group().size > 1 or not all(isinstance(given, str | None) for given in weights):
        return "pairs"
    for side, given in zip(SIDES, features, strict=True):
        parts = list(given) if isinstance(given, list | tuple) else [given]
        if parts and not any(part is None or isinstance(part, str) for part in parts):
            return side
    return "pairs"


def _held_pairs(matrix: sp.csr_matrix, seed: int) -> NDArray[np.bool_]:
    """Which pairs are held out: of entities in random order, until a tenth of all pairs or enough entities are."""
    counts, rng = np.diff(matrix.indptr).astype(np.int64), np.random.default_rng(seed)
    out = np.where(counts > 1, np.clip(np.floor(_SHARE * counts + 0.5), 1, counts - 1), 0).astype(np.int64)
    order = rng.permutation(np.flatnonzero(out))[:_RANKED]
    order = order[: int(np.searchsorted(np.cumsum(out[order]), _SHARE * matrix.nnz, "right"))]
    taken = np.zeros_like(out)
    taken[order] = out[order]
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.lexsort((rng.random(matrix.nnz), rows))  # the pairs of each entity, in random order
    rank = np.empty(matrix.nnz, dtype=np.int64)
    rank[places] = np.arange(matrix.nnz) - np.repeat(matrix.indptr[:-1], counts)
    found: NDArray[np.bool_] = rank < np.repeat(taken, counts)
    return found


def _pairs_of_entity(matrix: sp.csr_matrix) -> float:
    """Pairs of an entity of the smaller side, of those that have any; the rule for λ goes by it."""
    return matrix.nnz / max(1, min(int((np.diff(matrix.indptr) > 0).sum()), len(np.unique(matrix.indices))))


def _top(points: list[_Point], best: _Point) -> float:
    """The exponent at which the polynomial through the best point and those around it is largest, between them."""
    near = sorted(points, key=lambda point: abs(point.exponent - best.exponent))[:4]
    x, y = np.array([point.exponent for point in near]), np.array([point.metric for point in near])
    if not x.min() < best.exponent < x.max():  # the path ended before the metric fell
        return best.exponent
    low, high = x[x < best.exponent].max(), x[x > best.exponent].min()
    grid = np.linspace(low, high, 201)
    return float(grid[np.argmax(np.polyval(np.polyfit(x, y, len(x) - 1), grid))])


@dataclass(frozen=True)
class _Shape:
    """The shape of towers: the changes of settings it takes, and the data with these sizes."""

    changes: dict[str, Any]
    data: FitData


@dataclass
class _Point:
    """A fit of the part to learn from."""

    shape: _Shape
    exponent: float  # of the factor between points, for the multiple of the rule's penalties
    settings: dict[str, Any]
    metric: float
    standard_error: float
    values: NDArray[np.float64] | None  # of the entities that are ranked
    parameters: Parameters | None


class _Search:
    """The points of a path on one part of the data."""

    def __init__(self, settings: ModelSettings, data: FitData, unseen: Unseen | None, names: tuple[str, ...]) -> None:
        self.settings, self.data, self.names = settings, data, names
        self.group, self.factor = data.shards.group, _FACTOR[names[0]]
        self.problem = make_problem(settings, data)
        self.own = over_ids(settings, data, data.dim) if data.refine else None
        self.measure = make_validation(settings, data, unseen)
        self.made: tuple[_Shape, Towers] | None = None
        self.points: list[_Point] = []

    def run(self) -> tuple[_Point | None, float]:
        """The best point, or None if all are alike, and the multiple of the rule's penalties to use with its shape."""
        firsts = [self.point(shape, 0.0, None) for shape in self.shapes()]
        first = max(firsts, key=lambda point: point.metric)
        walked = self.walk(first)
        if not max(point.metric for point in self.points) > min(point.metric for point in self.points):
            return None, 1.0
        best = max(walked, key=lambda point: point.metric)
        level = [point for point in walked if best.metric - point.metric <= self.error(point, best)]
        strongest = max(level, key=lambda point: point.exponent)
        exponent = _top(walked, best) if strongest is best else strongest.exponent
        return best, self.factor**exponent

    def walk(self, first: _Point) -> list[_Point]:
        """Follow the penalty of a shape of towers up or down while it helps, then go to the top of a parabola."""
        points, best = {0.0: first}, 0.0
        for direction in (1.0, -1.0):
            while abs(best + direction) <= _STEPS:
                at = best + direction
                points[at] = self.point(first.shape, at, points[best].parameters)
                if not points[at].metric > points[best].metric:
                    break
                points[best].parameters = None  # only the best one is started from
                best = at
            if best:
                break
        top = _top(list(points.values()), points[best])
        if abs(top - best) > _NEAR:
            points[top] = self.point(first.shape, top, points[best].parameters)
        return list(points.values())

    def shapes(self) -> list[_Shape]:
        """The shapes of towers to compare; with features on both sides also linear and normalised ones."""
        data, changes = self.data, list[dict[str, Any]]([{}])
        if all(data.features_alone) and self.settings.towers is None:
            if self.settings.hidden is None:
                changes.append({"hidden": ()})
            if self.settings.normalize is None:
                changes += [{**one, "normalize": not data.normalize} for one in changes]
        return [_Shape(one, self.resized(one)) for one in changes]

    def resized(self, changes: dict[str, Any]) -> FitData:
        """The data with towers of a shape, as narrow as is enough to compare them."""
        data, settings = self.data, self.settings.with_changes(**changes)
        if data.seen == defaults.IDS or settings.towers is not None:
            return data
        hidden = ((), ()) if changes.get("hidden") == () else data.hidden
        most = _NARROW.get(data.device.type, _NARROW["cpu"])
        hidden = tuple(tuple(min(width, most) for width in widths) for widths in hidden)
        dim = min(data.dim, most // 2)
        normalize = changes.get("normalize", data.normalize)
        activation = defaults.default_activation(normalize) if settings.activation is None else settings.activation
        return replace(data, hidden=hidden, dim=dim, normalize=normalize, activation=activation)

    def point(self, shape: _Shape, exponent: float, start: Parameters | None) -> _Point:
        """Fit towers of a shape at a multiple of the rule's penalties, from a start or from scratch."""
        settings, problem = self.settings, self.problem
        values = {name: getattr(self.problem, name) * self.factor**exponent for name in self.names}
        problem = problem.with_penalties(**{"l2": problem.l2, "embedding_l2": problem.embedding_l2, **values})
        if self.made is None or self.made[0] is not shape:
            self.made = shape, make_towers(settings, shape.data, problem)
        towers = self.made[1]
        if start is not None:
            towers.load(start)
        count = iterations(settings, shape.data, problem, towers)
        count = max(1, round(count * (_FIRST if start is None else _NEXT)))
        result = minimize(problem, towers, "newton-kron", count, seed=settings.seed)
        if result.reason is Reason.INTERRUPTED:
            raise KeyboardInterrupt
        at = problem.at(towers)
        P, Q = at.P, at.right_rows
        if self.own is not None:
            P, Q = refine(self.own, (P, Q), self.data.features_alone)
        scores = self.measure.ranked(at, P, Q)
        ranked = scores.per_user.get(settings.metric)
        metric = float(scores[settings.metric])
        found = _Point(shape, exponent, {**shape.changes, **values}, metric, 0.0, ranked, result.parameters)
        found.standard_error = self.error(found)
        self.points.append(found)
        if settings.verbose and self.group.rank == 0:
            text = ", ".join(f"{name}={short(value)}" for name, value in found.settings.items())
            line = f"select: {text}: {settings.metric} {metric:.4f} ± {found.standard_error:.4f}"
            print(line, file=sys.stderr, flush=True)
        return found

    def error(self, one: _Point, other: _Point | None = None) -> float:
        """The standard error of a point's metric, or of the difference of two; 0 where it is no mean over entities."""
        if one.values is None or (other is not None and other.values is None):
            return 0.0
        values = one.values if other is None else one.values - other.values
        values = values[np.isfinite(values)]
        count, total, square = self.group.totals(float(len(values)), float(values.sum()), float((values**2).sum()))
        return math.sqrt(max(0.0, square / count - (total / count) ** 2) / max(1.0, count - 1)) if count else 0.0

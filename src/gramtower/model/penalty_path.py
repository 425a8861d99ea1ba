"""Choose the penalty, and the shape of towers where it matters, by data that are held out of a fit.

No rule over sizes knows the right penalty: it depends on how much signal the pairs carry, which only held-out pairs
show. :func:`select` holds out a part of the data, fits the rest along a path of penalties and keeps the best one:

    ids on each side             path over μ; a tenth of the pairs of a sample of left entities is held out
    features on a side           path over λ; a sample of the entities of that side is held out with all their pairs
    histories                    path over μ and λ together; pairs are held out, because known entities have them

The path starts at the rule's value (defaults.py) and moves up by a factor until the metric falls (with ids by more than
one standard error), or down while it improves by more than one standard error.

Towers over ids start from the parameters of the point before, as glmnet does. The first point takes all iterations of a
fit and the next ones half of them: after a quarter a stronger penalty still ranks like the weaker one that it started
from. The penalty is the top of the polynomial through the best point and its neighbours. To prefer the strongest
point within one standard error of the best instead ranked new data worse.

Networks over features start from scratch, because from another point they end elsewhere, and are narrower than those of
the fit. The rule's penalty stays unless another one gains two standard errors. Where features describe both sides,
linear and normalised towers are compared at the rule's value first. All points are then ranked after a third, a half,
two thirds and all of the iterations: networks that follow their training pairs more closely than new entities allow
stop early, where that gains more than one standard error.

At the best penalty half of ω is tried where every entity has an id or features describe both sides. With ids it stays
if it ranks better, with features if it gains more than one standard error.

Where features are given next to ids, the path is that of ids. Then a fit of ids and one of both, at the best penalty,
rank the held-out pairs: features take part in training if they gain two standard errors. Otherwise known entities are
ranked as by ids, and features serve only to embed new ones (unseen.py).

More pairs want a weaker penalty on embeddings: μ is multiplied by the share of pairs that was kept.
From 5 million pairs on, a sample of the left entities is enough to choose by.

The fit of all pairs by linear towers over ids starts from the best point, if this knows all entities, and takes half
of the iterations. Its lists are as good as those of a fit from scratch.

Cost: with ids one fit and some four points of a half or a quarter of a fit, and another half instead of the fit of all
pairs; with features three or four narrower fits, or up to eight where shapes are compared.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.host import threads_of_fit
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import ranks
from gramtower.distributed.group import SINGLE, Group, agree, current_group
from gramtower.distributed.partition import Shard
from gramtower.distributed.shards import Shards
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.parameters import Parameters, side_of
from gramtower.engine.towers.towers import Towers
from gramtower.model import defaults
from gramtower.model.feature_spec import JSON, Both, GivenFeatures, is_combination
from gramtower.model.fit_data import FitData, FitPairs, matrix_and_ids, prepare_data
from gramtower.model.fit_parts import is_tiny, iterations, make_problem, make_towers, make_validation, over_ids, refine
from gramtower.model.fitted import Selection, Tried, short
from gramtower.model.settings import ModelSettings
from gramtower.model.unseen import SIDES, Unseen, UnseenValidator, hold_out_entities
from gramtower.optim.solvers import NewtonKron, as_solver
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record

KEPT = ("l2", "embedding_l2", "omega", "max_iterations")  # settings that fits and updates take over from a model's path
HOLDS = ("pairs", "left", "right")  # parts that select="…" can ask to hold out
_PENALTIES = {defaults.IDS: ("embedding_l2",), defaults.FEATURES: ("l2",), defaults.HISTORIES: ("embedding_l2", "l2")}
_SHARE, _RANKED, _LEAST = 0.1, 5_000, 50  # of an entity's pairs, and of all; most and least entities that are ranked
_ENTITIES = 0.2  # of the entities of a side with features
_FACTOR = {"embedding_l2": 2.0, "l2": 4.0}
_STEPS, _FEW_STEPS = 6, 2  # points of a path in one direction: of towers over ids, and of networks over features
_NEXT, _OTHER = 0.5, 0.25  # shares of a fit's iterations from another point: with its neighbour's penalty, its own one
_LOOKS = (1 / 3, 1 / 2, 2 / 3, 1.0)  # shares of a fit's iterations after which networks over features are ranked
_NARROW = {"cpu": 512, "cuda": 1024}  # hidden units of towers over features that are compared
_WHOLE = 0.3  # power of the share of a sample that μ is multiplied by
_SURE = 2.0  # standard errors by which features next to ids, or another λ of networks, must gain to be chosen
_PAIRS = 5_000_000  # from which on a sample of the left entities is enough to choose by


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A part of the data to learn from, and the part that was held out of it."""

    pairs: FitPairs  # to learn from
    features: Both  # of its entities, left and right
    validation: FitPairs | None = None  # held-out pairs, or None
    unseen: Unseen | None = None  # held-out entities, or None
    kept: float = 1.0  # share of the pairs that is left to learn from, where pairs are held out
    sample: float = 1.0  # share of the pairs of all data that this part and the held-out one are of
    text: str = "the validation part"  # the held-out part, for people


@dataclass
class Start:
    """The parameters of linear towers over ids, from which another fit of the same entities starts."""

    parameters: Parameters | None  # those of this process; None once they are loaded, as they take memory
    shards: Shards

    def load_into(self, towers: Towers, shards: Shards) -> None:
        """Give towers the parameters, and let go of these."""
        given, fresh = self.parameters, towers.parameters()
        assert given is not None
        for name, rows in given.items():
            before, after = getattr(self.shards, side_of(name)), getattr(shards, side_of(name))
            if name in given.layout.owned and before.bounds != after.bounds:
                # with more pairs, processes may hold other rows of a table
                rows = shards.group.gather_rows(rows, before.counts).wait()[after.first : after.stop]
            fresh[name].copy_(rows)
        towers.load(fresh)
        self.parameters = None


def continued_iterations(count: int) -> int:
    """The number of iterations of a fit that starts from a point of the path, from that of a fit from scratch."""
    return max(1, round(_NEXT * count))


def select(
    settings: ModelSettings, pairs: FitPairs, features: Both, given: HeldOut | None = None
) -> tuple[Selection, Start | None]:
    """Choose the penalties that settings leave open, and the shape of towers where features describe both sides.

    The start is that of the fit of all pairs; None if it starts from scratch.
    """
    group = current_group()
    agree(group, {name: getattr(settings, name) for name in ("select", "metric", "l2", "embedding_l2")})
    with group.together():
        part = given or hold_out_part(settings, pairs, features)
    if isinstance(part, str):
        return Selection(settings.metric, "nothing", note=part), None
    # tables as large as those for all data; networks over features have their size from `resized`
    if part.sample < 1 and part.unseen is None and settings.dim is None and settings.towers is None:
        settings = settings.with_changes(dim=_dim(settings, pairs, part.pairs.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fit of all pairs gives the same ones
        data = prepare_data(settings, part.pairs, *part.features, part.validation)
    names = tuple(name for name in _PENALTIES[data.seen] if getattr(settings, name) is None)
    if not names:
        return Selection(settings.metric, "nothing", note=f"{' and '.join(_PENALTIES[data.seen])} given"), None
    ranked = data.held_out if part.unseen is None else part.unseen.truth
    assert ranked is not None
    count = int(data.shards.group.totals(float((np.diff(ranked.indptr) > 0).sum()))[0])
    if count < _LEAST:
        return Selection(settings.metric, part.text, note=_too_few(count)), None
    with threads_of_fit(is_tiny(settings, data)):
        by_ids = data.ids_suffice and part.unseen is None and settings.towers is None
        search = _Search(settings, data.by_ids() if by_ids else data, part.unseen, names, pairs.shape)
        best, scale = search.run()
        searches = [search]
        if by_ids and best is not None:
            searches.append(_Search(settings.with_changes(**best.shape.changes), data, None, names, pairs.shape))
            changes = best.shape.changes
            plain, joint = (one.point(_Shape(changes, one.data), best.exponent) for one in searches)
            by_ids = joint.metric - plain.metric <= _SURE * search.error(joint, plain)
    tried = [Tried(point.settings, point.metric, point.standard_error) for one in searches for point in one.points]
    if best is None:
        return Selection(settings.metric, part.text, tried, note=f"{settings.metric} is the same for all"), None
    chosen = dict(best.shape.changes)
    if "l2" in names:
        l2 = search.problem.l2 * scale
        if part.unseen is not None and given is None:  # a sum over pairs grows with them
            l2 *= _pairs_of_entity(matrix_and_ids(pairs)[0]) / _pairs_of_entity(data.matrix)
        chosen["l2"] = l2
    if "omega" in chosen:
        chosen["omega"] = search.problem.omega * (1.0 if given is not None else _denser(pairs, part))
    if "embedding_l2" in names:
        more = part.kept * part.sample**_WHOLE
        chosen["embedding_l2"] = search.problem.embedding_l2 * scale * more
    if best.stopped_at is not None:  # after so many iterations towers of this size ranked best
        sizes = {"hidden": best.shape.data.hidden, "dim": best.shape.data.dim} if settings.towers is None else {}
        chosen |= {name: size for name, size in sizes.items() if getattr(settings, name) is None}
        chosen["max_iterations"] = best.stopped_at
    start = None
    if len(searches) == 1 or by_ids:  # otherwise towers see features too
        start = search.start(best) if given is None and part.unseen is None and part.sample == 1 else None
    return Selection(settings.metric, part.text, tried, chosen, ids_only=by_ids, continued=start is not None), start


def _too_few(count: int) -> str:
    return f"{count} entities to rank are too few to choose by; at least {_LEAST} are needed"


def hold_out_part(settings: ModelSettings, pairs: FitPairs, features: Both) -> HeldOut | str:
    """Hold out a part of the data as the module's first lines say; the reason if that cannot be done."""
    seed, what = check.seed(settings.seed), _held_side(settings, features)
    if isinstance(pairs, Shard):
        return _hold_out_of_part(pairs, features, seed)
    matrix, _ = matrix_and_ids(pairs)
    whole = pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(matrix, same_entities=False)
    sample = 1.0
    if matrix.nnz > _PAIRS and _fits_samples(settings):
        sample = _PAIRS / matrix.nnz
        whole, features = _sampled(whole, features, sample, seed)
    if what != "pairs":
        share = min(_ENTITIES, _RANKED / max(1, whole.shape[SIDES.index(what)]))
        try:
            unseen = hold_out_entities(settings, whole, features, share, what, seed)
        except ValueError as error:
            if isinstance(settings.select, str):
                check.fail("select", repr(what), f"pairs, or a side whose entities can be held out ({error})")
            return f"no {what} entities can be held out ({error})"
        text = f"{unseen.count:,} {whole.entity_names[SIDES.index(what)]} entities"
        return HeldOut(unseen.train, unseen.features, None, unseen, 1.0, sample, text)
    held, rows = _held_pairs(whole.matrix, seed)
    if rows < _LEAST:
        return _too_few(rows)
    parts: list[Any] = [whole.subset(~held), whole.subset(held)]
    if not isinstance(pairs, Interactions) and sample == 1.0:
        parts = [part.matrix for part in parts]
    text = f"{int(held.sum()):,} pairs of {rows:,} {whole.entity_names[0]} entities"
    return HeldOut(parts[0], features, parts[1], None, 1 - float(held.mean()), sample, text)


def _sampled(pairs: Interactions, features: Both, share: float, seed: int) -> tuple[Interactions, Both]:
    """The pairs of a share of the left entities, without entities that have none, and the features of the others."""
    chosen = np.random.default_rng(seed).random(pairs.shape[0]) < share
    found = pairs.subset(np.repeat(chosen, np.diff(pairs.matrix.indptr))).without_empty()
    sides = zip(SIDES, features, (pairs.left_ids, pairs.right_ids), (found.left_ids, found.right_ids), strict=True)
    left, right = (GivenFeatures(side, given).take(old, join(new, index_of(old))) for side, given, old, new in sides)
    return found, (left, right)


def _hold_out_of_part(part: Shard, features: Both, seed: int) -> HeldOut | str:
    """Hold out pairs of a partition, the same ones whatever the number of processes."""
    group = part.shards.group
    if part.held_out is not None:
        return HeldOut(part, features)
    before = sum(group.gather_json(int(part.matrix.nnz))[: group.rank])
    held, rows = _held_pairs(part.matrix, seed, group, part.shards.left.first, before)
    if rows < _LEAST:
        return _too_few(rows)
    inner = part.holding_out(held)
    text = f"{part.pairs - inner.pairs:,} pairs of {rows:,} {part.entity_names[0]} entities"
    return HeldOut(inner, features, None, None, inner.pairs / part.pairs, 1.0, text)


def _dim(settings: ModelSettings, pairs: FitPairs, most: tuple[int, int]) -> int | None:
    """The size of embeddings over ids for all pairs, as far as a sample allows; None for other towers."""
    device = defaults.pick_device(settings.device)
    room = defaults.room_for_training(device, current_group(), settings.memory_budget)
    return min(*most, defaults.default_dim(matrix_and_ids(pairs)[0].shape, ((), ()), device, room))


def _held_side(settings: ModelSettings, features: Both) -> str:
    """The kind of part to hold out: "pairs", or the side whose entities are held out."""
    if isinstance(settings.select, str):
        return settings.select
    if current_group().size > 1 or not _fits_samples(settings):
        return "pairs"
    for side, given in zip(SIDES, features, strict=True):
        parts = GivenFeatures(side, given)
        if len(parts.parts) == len(parts.described) > 0 and not any(map(is_combination, parts.parts)):
            return side
    return "pairs"


def _fits_samples(settings: ModelSettings) -> bool:
    """Whether settings hold for a part of the entities: no weights or labels are given as arrays of all of them."""
    given = (settings.left_weights, settings.right_weights)
    return settings.factors is None and all(isinstance(weights, str | None) for weights in given)


def _held_pairs(
    matrix: sp.csr_matrix, seed: int, group: Group = SINGLE, row: int = 0, entry: int = 0
) -> tuple[NDArray[np.bool_], int]:
    """Which local pairs are held out, and of how many entities in all processes.

    A tenth of an entity's pairs is, at least one, of a random sample of the entities that have two or more. The sample
    is as large as 5,000 entities or a tenth of all pairs allow. Draws go by the numbers of rows and pairs.
    """
    counts = np.diff(matrix.indptr).astype(np.int64)
    out = np.where(counts > 1, np.clip(np.floor(_SHARE * counts + 0.5), 1, counts - 1), 0).astype(np.int64)
    able, held, total = group.totals(float((out > 0).sum()), float(out.sum()), float(matrix.nnz))
    share = min(_RANKED / max(1.0, able), _SHARE * total / max(1.0, held))
    taken = np.where(_draws(seed, row, len(counts)) < share, out, 0)
    rank = ranks(matrix, _draws(seed + 1, entry, matrix.nnz))  # the pairs of each entity, in random order
    return rank < np.repeat(taken, counts), int(group.totals(float((taken > 0).sum()))[0])


def _draws(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """Numbers ``first``, ``first`` + 1, … of a random sequence; Philox makes four at a time."""
    skipped = first % 4
    return np.random.Generator(np.random.Philox(seed).advance(first // 4)).random(skipped + count)[skipped:]


def _denser(pairs: FitPairs, part: HeldOut) -> float:
    """The rule's ω for all pairs over that for the part to learn from, which has a lower density."""
    if isinstance(pairs, Shard):
        return 1 / part.kept
    whole, here = matrix_and_ids(pairs)[0], matrix_and_ids(part.pairs)[0]
    return defaults.default_omega(whole.shape, whole.nnz) / defaults.default_omega(here.shape, here.nnz)


def _pairs_of_entity(matrix: sp.csr_matrix) -> float:
    """Pairs of an entity of the smaller side, of those that have any; the rule for λ goes by it."""
    return int(matrix.nnz) / max(1, min(int((np.diff(matrix.indptr) > 0).sum()), len(np.unique(matrix.indices))))


def _top(points: list[_Point], best: _Point) -> float:
    """The exponent at which the polynomial through the best point and those around it is largest, between them."""
    near = sorted(points, key=lambda point: abs(point.exponent - best.exponent))[:4]
    x, y = np.array([point.exponent for point in near]), np.array([point.metric for point in near])
    if not x.min() < best.exponent < x.max():  # the path ended before the metric fell
        return best.exponent
    low, high = x[x < best.exponent].max(), x[x > best.exponent].min()
    grid = np.linspace(low, high, 201)
    return float(grid[np.argmax(np.polyval(np.polyfit(x, y, len(x) - 1), grid))])


def _forget(points: Iterable[_Point], *kept: _Point) -> None:
    """Free the parameters of all points but some: the next ones start from these."""
    for point in points:
        if not any(point is one for one in kept):
            point.parameters = None


@dataclass(frozen=True)
class _Shape:
    """The shape of towers: the changes of settings it takes, and the data with these sizes."""

    changes: JSON
    data: FitData


@dataclass
class _Point:
    """A fit of the part to learn from."""

    shape: _Shape
    exponent: float  # of the factor between points, for the multiple of the rule's penalties
    settings: JSON
    metric: float
    standard_error: float
    values: NDArray[np.float64] | None  # whose mean the metric is: of entities, or of parts of the held-out right ones
    parameters: Parameters | None
    stopped_at: int | None = None  # iterations after which it ranked best; None if these are all of them


class _Search:
    """The points of a path on one part of the data."""

    def __init__(
        self,
        settings: ModelSettings,
        data: FitData,
        unseen: Unseen | None,
        names: tuple[str, ...],
        whole: tuple[int, int],
    ) -> None:
        self.settings, self.data, self.names = settings, data, names
        self.whole = whole  # numbers of entities of all data
        self.group, self.factor = data.shards.group, _FACTOR[names[0]]
        self.problem, self.own = self.objective(settings)
        self.measure = make_validation(settings, data, unseen)
        held, (left, right) = None if unseen is None else unseen.side, data.features_alone
        self.refined = left and held != "left", right and held != "right"  # held-out entities have no pairs to go by
        self.warm = data.seen != defaults.FEATURES  # networks that start warm end elsewhere than from scratch
        self.given = given = as_solver(settings.optimizer, dict(settings.solver_options()))
        self.solver = given if isinstance(given, NewtonKron) else NewtonKron()  # others end before they have converged
        # whether iterations can be chosen: networks over features on both sides, in a fit by the same solver
        self.looks = all(data.features_alone) and self.solver is given and settings.max_iterations is None
        self.points: list[_Point] = []

    def objective(self, settings: ModelSettings) -> tuple[Problem, Problem | None]:
        """The problem that towers are fitted to, and the one that refines embeddings, if they are refined."""
        moved = self.data.refine and settings.memory_budget is None  # a fit asks whether its budget has room for it
        own = over_ids(settings, self.data, self.data.dim) if moved else None
        return make_problem(settings, self.data), own

    def run(self) -> tuple[_Point | None, float]:
        """The best point, or None if all are alike, and the multiple of the rule's penalties to use with its shape."""
        walked, best = self.walk(self.first())
        if not max(point.metric for point in self.points) > min(point.metric for point in self.points):
            return None, 1.0
        if not self.warm:
            first = walked[0]
            if best.metric - first.metric <= _SURE * self.error(first, best):
                best = first
            return self.half_of_omega(best), self.factor**best.exponent
        return self.half_of_omega(best), self.factor ** _top(walked, best)

    def first(self) -> _Point:
        """The best shape of towers at the rule's penalties; linear and normalised ones need features on both sides."""
        settings, normalize = self.settings, self.data.normalize
        both = settings.towers is None and all(self.data.features_alone)
        best = self.tried({"normalize": normalize} if both and settings.normalize is None else {})
        if both and settings.hidden is None:
            linear = self.tried({**best.shape.changes, "hidden": ()})
            if linear.metric - best.metric > self.error(linear, best):
                best = linear
        if both and settings.normalize is None:
            turned = self.tried({**best.shape.changes, "normalize": not normalize})
            if turned.metric - best.metric > self.error(turned, best):
                best = turned
        return best

    def tried(self, changes: JSON) -> _Point:
        return self.point(_Shape(changes, self.resized(changes)), 0.0)

    def walk(self, first: _Point) -> tuple[list[_Point], _Point]:
        """Follow the penalty up while it does no harm, or down while it helps; return the points and the best of them.

        A weaker penalty than the rule's is the best only if it gains more than one standard error.
        """
        points, best, most = {0.0: first}, first, _STEPS if self.warm else _FEW_STEPS
        last = first
        while last.exponent < most:
            last = self.point(first.shape, last.exponent + 1, last.parameters, _NEXT)
            points[last.exponent] = last
            best = max(best, last, key=lambda point: point.metric)
            _forget(points.values(), first, best, last)
            if best.metric - last.metric > (self.error(last, best) if self.warm else 0.0):
                break
        last = first
        while best is last and last.exponent > -most:
            last = self.point(first.shape, last.exponent - 1, last.parameters, _NEXT)
            points[last.exponent] = last
            if last.metric - best.metric > self.error(last, best):
                best = last
            _forget(points.values(), best, last)
        return list(points.values()), best

    def half_of_omega(self, best: _Point) -> _Point:
        """The best point with half of ω, if that gains; otherwise the best point."""
        if self.settings.omega is not None or not (all(self.data.features_alone) or self.data.seen == defaults.IDS):
            return best
        default, half = (self.problem, self.own), {"omega": self.problem.omega / 2}
        self.problem, self.own = self.objective(self.settings.with_changes(**half))
        shape = replace(best.shape, changes={**best.shape.changes, **half})
        found = self.point(shape, best.exponent, best.parameters, _OTHER)
        if found.metric - best.metric > (0.0 if self.warm else self.error(found, best)):
            return found
        self.problem, self.own = default
        return best

    def start(self, best: _Point) -> Start | None:
        """The start of a fit of all pairs of the same entities; None unless towers are linear and over ids."""
        data = self.data
        linear = data.seen == defaults.IDS and data.hidden == ((), ()) and self.settings.towers is None
        return Start(best.parameters, data.shards) if linear and self.solver is self.given else None

    def resized(self, changes: JSON) -> FitData:
        """The data with towers of a shape, over features as narrow as is enough to compare them."""
        data, settings = self.data, self.settings.with_changes(**changes)
        if self.warm or settings.towers is not None:
            return data
        most = _NARROW.get(data.device.type, _NARROW["cpu"])
        left, right = hidden = data.hidden
        if self.settings.hidden is None and all(data.features_alone):
            widths = data.inputs[0].width, data.inputs[1].width
            left, right = hidden = defaults.default_hidden(self.whole, widths, data.device)
        dim = data.dim
        if settings.dim is None:
            room = defaults.room_for_training(data.device, self.group, settings.memory_budget)
            dim = min(most // 2, defaults.default_dim(self.whole, hidden, data.device, room, self.group.size))
        if changes.get("hidden") == ():
            left, right = (), ()
        hidden = tuple(min(width, most) for width in left), tuple(min(width, most) for width in right)
        normalize = bool(changes.get("normalize", data.normalize))
        activation = defaults.default_activation(normalize) if settings.activation is None else settings.activation
        return replace(data, hidden=hidden, dim=dim, normalize=normalize, activation=activation)

    def point(self, shape: _Shape, exponent: float, start: Parameters | None = None, share: float = 1.0) -> _Point:
        """Fit towers of a shape at a multiple of the rule's penalties.

        Towers over ids go on from ``start``, if there is one, for a share of a fit's iterations.
        """
        settings, problem = self.settings, self.problem
        values = {name: getattr(self.problem, name) * self.factor**exponent for name in self.names}
        problem = problem.with_penalties(**{"l2": problem.l2, "embedding_l2": problem.embedding_l2, **values})
        start = start if self.warm else None
        towers = make_towers(settings, shape.data, problem, draw=start is None)
        if start is not None:
            towers.load(start)
        full = iterations(settings, shape.data, problem, towers)
        count = max(1, round(share * full)) if self.warm else full
        looks = {max(1, round(part * count)) for part in _LOOKS} if self.looks else set()
        looked: list[_Point] = []

        def look(record: Record, at: Point) -> None:
            if record.iteration in looks:
                metric, ranked = self.ranked(at)
                looked.append(_Point(shape, exponent, {}, metric, 0.0, ranked, None, record.iteration))

        result = minimize(problem, towers, self.solver, count, seed=settings.seed, callbacks=[look])
        if result.reason is Reason.INTERRUPTED:
            raise KeyboardInterrupt
        last = result.history[-1].iteration
        if last not in looks:
            looks.add(last)
            look(result.history[-1], problem.at(towers))
        best, end = max(looked, key=lambda one: one.metric), looked[-1]
        if best.metric - end.metric <= self.error(best, end):
            best = end
        stop = None if best is end else best.stopped_at
        tried = {**shape.changes, **values, **({} if stop is None else {"max_iterations": stop})}
        kept, error = result.parameters if self.warm else None, self.error(best)
        found = replace(best, settings=tried, standard_error=error, parameters=kept, stopped_at=stop)
        self.points.append(found)
        if settings.verbose and self.group.rank == 0:
            text = ", ".join(f"{name}={short(value, name)}" for name, value in found.settings.items())
            text += " with features" if self.data.ids_suffice else ""  # next to ids, which were tried before
            line = f"select: {text}: {settings.metric} {found.metric:.4f} ± {error:.4f}"
            print(line, file=sys.stderr, flush=True)
        return found

    def ranked(self, at: Point) -> tuple[float, NDArray[np.float64] | None]:
        """The metric of held-out data at a point of a fit, and the values whose mean it is."""
        P, Q = at.P, at.right_rows
        if self.own is not None:
            P, Q = refine(self.own, (P, Q), self.refined)
        assert self.measure is not None
        name = self.settings.metric
        scores = self.measure.scores(at, (name,), (P, Q))
        metric, values = float(scores[name]), scores.per_user.get(name)
        if isinstance(self.measure, UnseenValidator) and self.measure.side == "right":
            # users share the ranked entities, so that those are what is drawn: pseudo-values of the jackknife
            without = np.array(self.measure.without(at, self.settings.seed))
            values = len(without) * metric - (len(without) - 1) * without
        return metric, values

    def error(self, one: _Point, other: _Point | None = None) -> float:
        """The standard error of a point's metric, or of the difference of two; 0 where it is no mean over entities."""
        values = one.values
        if values is None:
            return 0.0
        if other is not None:
            if other.values is None:
                return 0.0
            values = values - other.values
        values = values[np.isfinite(values)]
        count, total, square = self.group.totals(float(len(values)), float(values.sum()), float((values**2).sum()))
        return math.sqrt(max(0.0, square / count - (total / count) ** 2) / max(1.0, count - 1)) if count else 0.0

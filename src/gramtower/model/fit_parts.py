"""The parts of a fit that follow from settings and data: the problem, the towers, iterations, validation, refinement.

Fits, selection, tuning and comparisons put them together in different orders.

A previous model's weights go into fresh towers: first layers feature by feature, everything else unchanged. Entities
and features that are new start near the average of those known. Of old pairs a model keeps only which there are: one
fitted with other labels than 1 or with weights cannot be updated. Of features it keeps the encoding, not the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions, union
from gramtower.data.matrices import checked, without
from gramtower.data.pairs import as_features
from gramtower.data.tables import FeaturesLike, FeatureTable
from gramtower.distributed.shards import Rows, Shards
from gramtower.engine.objective.constants import Numbers, weights_of_pairs
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.objective.regularizers import as_regularizer
from gramtower.engine.towers.mlp import mlp_towers, undrawn_towers
from gramtower.engine.towers.parameters import side_of
from gramtower.engine.towers.towers import Towers
from gramtower.metrics import Scores, evaluate_embeddings
from gramtower.metrics.definitions import to_maximise
from gramtower.model import defaults
from gramtower.model.context import Combinations
from gramtower.model.feature_spec import GivenFeatures, is_combination, is_frame, read_table
from gramtower.model.fit_data import FitData, FitPairs, matrix_and_ids
from gramtower.model.fitted import FittedModel
from gramtower.model.settings import Factors, ModelSettings, WeightsLike, given
from gramtower.model.side import Described, Side, described
from gramtower.model.unseen import SIDES, Unseen, UnseenValidator, Validator, with_feature_columns
from gramtower.optim.solvers import NewtonKron, as_solver
from gramtower.training.checkpoint import sparse_digest
from gramtower.training.loop import minimize

_TINY = 50_000_000  # multiplications of an evaluation: about ten milliseconds


def make_problem(settings: ModelSettings, data: FitData) -> Problem:
    """What is minimised, ω and μ set by the data where they were left out."""
    settings = settings.with_changes()
    size, shards, known = (data.shape, data.observed), data.shards, data.seen
    omega, l2, mu = given(settings.omega), given(settings.l2), given(settings.embedding_l2)
    if mu is None:
        mu = defaults.default_embedding_l2(*size, known, settings.frequency_power)
    return Problem(
        data.matrix, *data.features, loss=settings.loss,
        omega=defaults.default_omega(*size) if omega is None else omega,
        l2=defaults.default_l2(*size, known, data.entries) if l2 is None else l2,
        imputed=_local_imputed(settings, shards),
        left_weights=_local_weights("left_weights", left_weights(settings, data), shards.left),
        right_weights=_local_weights("right_weights", right_weights(settings, data), shards.right),
        embedding_l2=mu, frequency_power=settings.frequency_power, memory_budget=settings.memory_budget,
        precision=precision(settings), pair_precision=settings.pair_precision,
        regularizer=as_regularizer(settings.regularizer), pair_weights=_pair_weights(settings, data),
        shards=None if shards.single else shards,
    )  # fmt: skip


def precision(settings: ModelSettings) -> str:
    """The precision of products as it was given, or tf32 if the optimizer is safe with it."""
    if settings.precision != "auto":
        return settings.precision
    return "tf32" if as_solver(settings.optimizer, dict(settings.solver_options())).tf32 else "float32"


def imputed_label(settings: ModelSettings) -> float | str | Factors:
    """ỹ as it was given, or the default."""
    return defaults.IMPUTED if settings.imputed == "auto" else settings.imputed


def _local_imputed(settings: ModelSettings, shards: Shards) -> float | str | Factors:
    """ỹ, of factors the rows of local entities."""
    factors = settings.factors
    if factors is None or shards.single or len(factors) != 2:
        return imputed_label(settings)
    arrays = (check.as_float_array(f"imputed[{side}]", array) for side, array in enumerate(factors))
    left, right = (rows.local_rows("imputed", a) for rows, a in zip((shards.left, shards.right), arrays, strict=True))
    return left, right


def left_weights(settings: ModelSettings, data: FitData) -> WeightsLike:
    """a as it was given, or by name for the data."""
    weights = settings.left_weights
    return defaults.default_left_weights(data.features_alone[0]) if _is_auto(weights) else weights


def right_weights(settings: ModelSettings, data: FitData) -> WeightsLike:
    """b as it was given, or by name for the data."""
    weights = settings.right_weights
    return auto_weights(data) if _is_auto(weights) else weights


def _pair_weights(settings: ModelSettings, data: FitData) -> Numbers | None:
    """The weights of the local pairs: those of the data, times those by the degree of their left entities."""
    name, given_weights = settings.pair_weights, data.weights
    if _is_auto(name):
        name = defaults.default_pair_weights(data.features_alone[0])
    if name is None:
        return given_weights
    weights = weights_of_pairs(name, np.diff(data.matrix.indptr).astype(np.int64), data.shards.group)
    if weights is None:
        return given_weights
    weights = weights.astype(np.float32)  # like those of the data
    return weights if given_weights is None else weights * given_weights


def _is_auto(weights: WeightsLike) -> bool:
    return isinstance(weights, str) and weights == "auto"


def auto_weights(data: FitData) -> str:
    """What ``right_weights="auto"`` stands for."""
    return defaults.default_right_weights(data.shape, data.observed, data.seen, data.described)


def _local_weights(name: str, weights: WeightsLike, rows: Rows) -> WeightsLike:
    """Weights of the local entities, cut from those of all; None and text are the same for all."""
    if weights is None or isinstance(weights, str) or rows.count == rows.total:
        return weights
    local: WeightsLike = rows.local_rows(name, check.weights(name, weights, rows.total))
    return local


def over_ids(settings: ModelSettings, data: FitData, dim: int) -> Problem:
    """The same pairs, ω and weights over ids, to fit the embeddings of single entities."""
    budget = settings.memory_budget
    if budget is not None:
        budget = max(1, check.memory_size("memory_budget", budget) - held_bytes(data, dim))
    changes = {"l2": 1.0, "embedding_l2": 0.0, "regularizer": None, "memory_budget": budget}
    problem = make_problem(settings.with_changes(**changes), replace(data, features=(None, None)))
    problem.graphs = False  # a few evaluations are over before recording them has paid
    return problem


def held_bytes(data: FitData, dim: int) -> int:
    """Bytes of all embeddings on a GPU while some are moved; on the host they are the model's own."""
    return 4 * sum(data.shape) * dim if data.device.type == "cuda" else 0


def make_towers(
    settings: ModelSettings, data: FitData, problem: Problem, previous: FittedModel | None = None, draw: bool = True
) -> Towers:
    """Towers on the device of the data, freshly drawn, with a previous model's weights for all that it knows.

    If other parameters will be loaded, ``draw`` can be False, which leaves those of multi-layer towers uninitialised.
    """
    if settings.towers is not None:
        towers = settings.towers(problem)
    elif not draw:
        with data.device:
            return undrawn_towers(problem, data.hidden, data.dim, data.activation, data.normalize)
    else:
        towers = mlp_towers(problem, data.hidden, data.dim, data.activation, settings.seed, normalize=data.normalize)
    if previous is not None:
        carry_over(previous, towers, data)
    return towers.to(data.device)


def iterations(settings: ModelSettings, data: FitData, problem: Problem, towers: Towers) -> int:
    """The most iterations: those given, or the optimizer's default for the problem, or that of the data."""
    asked = given(settings.max_iterations)
    if asked is not None:
        return asked
    solver = as_solver(settings.optimizer, dict(settings.solver_options()))
    found = solver.default_iterations(problem, towers)
    return defaults.default_iterations(data.seen) if found is None else found


def is_tiny(settings: ModelSettings, data: FitData) -> bool:
    """Whether an evaluation of linear towers over ids takes a CPU so little that it is not worth a second thread."""
    linear = settings.towers is None and data.hidden == ((), ()) and data.seen == defaults.IDS
    work = sum(data.shape) * data.dim**2 + 4 * data.observed * data.dim
    return linear and data.device.type == "cpu" and work <= _TINY


def make_validation(
    settings: ModelSettings, data: FitData, unseen: Unseen | None = None
) -> RankingValidator | UnseenValidator | None:
    """The metric of a point on held-out pairs, or on entities that were held out of the data; None without them."""
    if unseen is not None:
        to_maximise(settings.metric)
        return unseen.validator(settings.metric, data)
    return None if data.held_out is None else RankingValidator(settings.metric, *ranked_pairs(data, data.held_out))


def ranked_pairs(data: FitData, held_out: sp.csr_matrix) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Held-out pairs and those that rankings leave out: of training, with context those of a user in any context."""
    known = Combinations.of(data.inputs[0], data.ids[0])
    if known is None:
        return held_out, data.matrix
    seen = known.spread(data.matrix)
    new = without(held_out, seen)
    return (new, seen) if new.nnz else (held_out, data.matrix)


@dataclass(frozen=True, eq=False)
class RankingValidator(Validator):
    """The metric of the held-out pairs; over several processes that of all, from the pairs of local left rows."""

    held_out: sp.csr_matrix
    train: sp.csr_matrix

    def scores(self, point: Point, metrics: Sequence[str], known: tuple[Tensor, Tensor] | None = None) -> Scores:
        P, Q = known or (point.P, point.right_rows)
        processes = point.evaluation.constants.shards.group
        return evaluate_embeddings(P, Q, self.held_out, train=self.train, metrics=metrics, processes=processes)

    def fingerprint(self, shards: Shards) -> dict[str, str]:
        digests = (
            sparse_digest(x.indptr, x.indices, x.data, shards.left.first, x.shape[1]).text(shards.group)
            for x in (self.held_out, self.train)
        )
        return {"metric": self.metric, "validation": "held out {}, left out {}".format(*digests)}


def refined(settings: ModelSettings, data: FitData, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of local left and of all right entities, moved by their own pairs."""
    own = data.shards.right.local_rows("right embeddings", right)
    here = left.to(data.device), own.to(data.device)
    P, Q = refine(over_ids(settings, data, right.shape[1]), here, data.features_alone)
    return P.cpu(), data.shards.gather(Q).wait().cpu()


def carry_over(fitted: FittedModel, towers: Towers, data: FitData) -> None:
    """Copy the weights of a fitted model into fresh towers for other data."""
    before, after = fitted.known_towers("start from it").parameters(), towers.parameters()
    for name, fresh in after.items():
        if name not in before.layout.shapes:
            check.fail("warm_start", f"towers with a new parameter {name}", "the same architecture as before")
        old, side = before[name].cpu(), side_of(name)
        turn = 1 if side == "left" else -1  # ids of this side come before those of the other
        known, new = fitted.side(side).inputs, data.inputs[SIDES.index(side)]
        if name.endswith(".0.weight") and (len(old), len(fresh)) == (known.width, new.width):
            for here, there, places in new.columns_in(side, known, data.ids[::turn], fitted.ids[::turn]):
                rows, part = fresh[here], old[there]
                rows.mul_(0.1).add_(part.mean(0))
                rows[places >= 0] = part[places[places >= 0]]
        elif old.shape == fresh.shape:
            fresh.copy_(old)
        else:
            given = f"{name} of shape {tuple(fresh.shape)}"
            check.fail("warm_start", given, f"the shape {tuple(old.shape)} it had before")
    towers.load(after)


def start_from_outputs(fitted: FittedModel, towers: Towers, data: FitData) -> None:
    """Let linear towers over ids start from what a fitted model's towers, which see features too, give for the data."""
    wide = with_feature_columns(towers, data)
    carry_over(fitted, wide, data)
    start = towers.parameters()
    for side, rows, count in zip(("left", "right"), data.features, data.shape, strict=True):
        start[towers.local_names(side)["0.weight"]].copy_(wide.embed(side, as_features(side, rows, count)))
    towers.load(start)


def refuse_increment(fitted: FittedModel, data: FitData) -> None:
    """Refuse to start from a model on data that lack most of what it knows: a fit keeps nothing but its own pairs."""
    before, after = _degrees(fitted.observed()), _degrees(data.matrix)
    for side, old, new, ids in zip(fitted.sides, before, after, data.ids, strict=True):
        known = np.flatnonzero(old)
        rows = known[known < len(new)] if side.ids is None or ids is None else join(side.ids[known], index_of(ids))
        found = int((new[rows[rows >= 0]] > 0).sum())
        if 2 * found < len(known):
            check.fail(
                "pairs",
                f"pairs of {found:,} of the {len(known):,} {side.called} entities that the model knows",
                "all pairs, old and new, with warm_start=True; model.update(pairs) adds pairs to those it knows",
            )


def _degrees(pairs: sp.csr_matrix) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    return np.diff(pairs.indptr), np.bincount(pairs.indices, minlength=pairs.shape[1])


def grown_pairs(fitted: FittedModel, more: FitPairs, dropped: tuple[bool, bool] = (False, False)) -> FitPairs:
    """The pairs that a model knows, and more: entities keep their rows, new ones come after them."""
    fitted.need_whole()
    if not fitted.plain_pairs:
        given = "a model fitted with labels other than 1 or with weights, which it does not keep"
        check.fail("model", given, "fit(pairs, warm_start=True) with all pairs, old and new")
    if fitted.left.inputs.has_order:
        given = "a model of recent histories, which does not keep the order of its pairs"
        check.fail("model", given, "fit(pairs, warm_start=True) with all pairs and their times, old and new")
    ids, observed = fitted.ids, fitted.observed()
    if ids[0] is None or ids[1] is None:
        if not sp.issparse(more):
            given = type(more).__name__
            check.fail("more_pairs", given, "a scipy.sparse matrix, as in training: entities are known by number")
        second = Interactions.from_matrix(checked("more_pairs", more))
        return union(Interactions.from_matrix(observed), second, "more_pairs").matrix
    if not isinstance(more, Interactions):
        check.fail("more_pairs", type(more).__name__, "gramtower.Interactions, as in training")
    context = () if fitted.combinations is None else tuple(fitted.combinations.columns[1:])
    if more.context != context:
        given = f"pairs with context {', '.join(more.context)}" if more.context else "pairs without context columns"
        expected = f"pairs read with context={list(context)}" if context else "pairs without context columns"
        check.fail("more_pairs", given, f"{expected}, as in training")
    kept = [
        np.flatnonzero((np.arange(len(side)) < side.trained) | (counts > 0) | (not drop))
        for side, counts, drop in zip(fitted.sides, _degrees(observed), dropped, strict=True)
    ]
    known = Interactions(
        sp.csr_matrix(observed[kept[0]][:, kept[1]]), ids[0][kept[0]], ids[1][kept[1]],
        left_name=more.left_name, right_name=more.right_name,
        same_entities=fitted.same_entities or bool(more.same_entities), context=context,
    )  # fmt: skip
    return union(known, more, "more_pairs")


def described_features(known: Side, given: FeaturesLike) -> FeaturesLike:
    """What the tower of a side sees: as before where the model can tell, otherwise as given, for all entities."""
    name, everyone = f"{known.name}_features", f"all {known.called} entities, old and new: the model"
    if given is None and any(is_combination(part.table) for part in known.inputs.parts):
        return None  # the pairs say it
    if given is None and known.inputs.given:
        expected = f"features of {everyone} keeps rows only with store_features=True"
        check.fail(name, f"nothing, for a model that sees {known.inputs.kind}", expected)
    if given is None:
        return [part.name for part in known.inputs.parts]
    for part in GivenFeatures(known.name, given).parts:
        if isinstance(part, FeatureTable) and known.ids is not None and len(known.ids):
            found, total = int((part.match(known.ids) < len(part)).sum()), len(known.ids)
            if 2 * found < total:
                shown = f"rows of {found:,} of the {total:,} {known.called} entities that the model knows"
                check.fail(name, shown, f"the table of {everyone} keeps rows only with store_features=True")
    return given


def stored_features(known: Side, given: FeaturesLike, column: str, pairs: FitPairs) -> FeaturesLike:
    """The features of a side of grown pairs, as a fit takes them: the rows that the model stores, and those given.

    Given rows replace stored ones. ``column`` is the name of the column of ids in the pairs.
    """
    name, axis = f"{known.name}_features", SIDES.index(known.name)
    before, after = known.ids, matrix_and_ids(pairs)[1][axis]
    if before is None or after is None:
        before, after = np.arange(len(known)), np.arange(pairs.shape[axis])
    everyone = np.concatenate([after, before[join(before, index_of(after)) < 0]])  # also those added without pairs
    old = join(everyone, index_of(before))  # rows of the model, and in ``new`` those that are given
    what = _more_rows(known, given, column)
    if what is None and (old < 0).any():
        some = f"{int((old < 0).sum()):,} new {known.called} entities, such as {everyone[old < 0].tolist()[0]!r}"
        check.fail(name, f"nothing for {some}", "their rows: the model stores only those of the entities that it knows")
    if what is None:
        new = np.full(len(old), -1)
    elif what.ids is not None:
        new = join(everyone, what.places())
    elif what.count in (len(old), (old < 0).sum()) and all(part.table is None for part in known.inputs.given):
        new = np.where((old < 0) | (what.count == len(old)), np.arange(len(old)) - (len(old) - what.count), -1)
    else:
        expected = f"{int((old < 0).sum())}, one for each new {known.called} entity in the order of their first pair"
        check.fail(name, f"{what.count} rows without ids", f"{expected}, or a column of ids for a table")
    made: list[FeaturesLike] = []
    listed = iter([None] * len(known.inputs.given) if what is None else what.parts)
    for part in known.inputs.parts:
        if part.stored is None:
            made.append(part.name)
            continue
        rows = next(listed)
        if part.table is not None:
            own = before[part.stored.entities], part.stored.rows
            further = () if rows is None else (rows[new[new >= 0]], everyone[new >= 0])
            made.append(part.table.with_rows(*own, *further))
        elif ((old < 0) & (new < 0)).any():
            check.fail(name, f"no row for {everyone[(old < 0) & (new < 0)].tolist()[0]!r}", "one for each new entity")
        else:
            made.append(part.stored.followed_by(len(known), rows).rows[np.where(new < 0, old, len(known) + new)])
    return made


def _more_rows(known: Side, given: FeaturesLike, column: str) -> Described | None:
    """Rows of new and changed entities, given as for a fit or without the names of ids and histories."""
    name, whole = f"{known.name}_features", GivenFeatures(known.name, given)
    names = [part for part in whole.parts if isinstance(part, str)]
    if names and names != [part.name for part in known.inputs.parts if part.stored is None]:
        check.fail(name, " + ".join(names), f"{known.inputs.kind}, as before, or only rows")
    others = [part for part in whole.parts if not isinstance(part, str)]
    listed: list[FeaturesLike] = []
    rows_of_parts = known.inputs.listed(known.name, others if len(others) > 1 else next(iter(others), None))
    for part, rows in zip(known.inputs.given, rows_of_parts, strict=True):
        if isinstance(rows, FeatureTable) and len(rows) > rows.report.get("rows", 0):
            check.fail(name, "a table made by with_labels", "the rows of new labels in a frame, with their ids")
        if part.table is not None and is_frame(rows):
            own = whole.id_column(rows, column, part.table)
            rows = read_table(name, rows).rename({own: part.table.id})
        listed.append(rows)
    given_any = any(rows is not None for rows in listed)
    return described(known, listed if len(listed) > 1 else listed[0]) if given_any else None


_WORTH = 2.0  # pairs that what features say of an entity counts as
_ITERATIONS, _DAMPING = 3, 1e-3  # convex: the model is right from the start
_PAIRS = 1 << 22  # pairs whose curvature is computed at a time
Sides = tuple[Tensor, Tensor]


class _Moved(nn.Module):
    """Rows that stay as they are, and a multiple of those of a trained table that starts at ``start``."""

    def __init__(self, rows: Tensor, start: Tensor, scale: float) -> None:
        super().__init__()
        self.fixed, self.scale = _table(rows, trained=False), scale
        self.own = _table(start, trained=True)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.fixed(ids) + self.scale * self.own(ids)
        return rows


def _table(rows: Tensor, trained: bool) -> nn.Embedding:
    return nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=not trained)


def refine(problem: Problem, embeddings: Sides, sides: tuple[bool, bool]) -> Sides:
    """The embeddings of local left and right entities, those of some sides moved by their own pairs after training.

    An entity's own pairs show what features do not, such as how popular it is. With embeddings q_j of the other side as
    training left them, that of left entity i becomes p_i = f(u_i) + d_i, where d minimises

        Σ_(i,j)∈O ℓ(R_ij, p_iᵀq_j) + ½ω Σ_∉O a_i b_j (ỹ − p_iᵀq_j)² + ½κ Σ_i ‖d_i‖²,

    and likewise on the right. κ = 2 mean_O(ℓ″ at ŷ = 0) mean_j ‖q_j‖² is the curvature of two average pairs: features
    count as much as two pairs. New entities have no d. The towers are trained without d: ids trained next to features
    would explain what features should learn. Cost: some ten Gauss-Newton products a side, and no pass through a tower.
    """
    moved, curvature = list(embeddings), _mean_curvature(problem)
    for side in (0, 1):
        if sides[side] and (kappa := _WORTH * curvature * _mean_square(problem, embeddings[1 - side])) > 0:
            start = torch.zeros_like(embeddings[side])
            towers = _towers(embeddings, side, start, 1 / math.sqrt(kappa))  # λ = 1 on the table is κ on its multiple
            minimize(problem, towers, NewtonKron(damping=_DAMPING), _ITERATIONS)
            point = problem.at(towers)
            moved[side] = (point.P, point.Q)[side].clone()
    return moved[0], moved[1]


def least_budget(problem: Problem, dim: int, device: torch.device, sides: tuple[bool, bool]) -> int:
    """The smallest memory budget that :func:`refine` keeps to in one process with embeddings of a size, in bytes."""
    rows, zero = (problem.shards.left, problem.shards.right), torch.zeros((), device=device)
    shapes = zero.expand(rows[0].count, dim), zero.expand(rows[1].count, dim)  # tables that take no memory
    return max(problem.least_budget(_towers(shapes, side, shapes[side], 1.0)) for side in (0, 1) if sides[side])


def _towers(embeddings: Sides, side: int, start: Tensor, scale: float) -> Towers:
    moved, other = _Moved(embeddings[side], start, scale), _table(embeddings[1 - side], trained=False)
    return Towers(moved, other) if side == 0 else Towers(other, moved)


def _mean_square(problem: Problem, rows: Tensor) -> float:
    """‖q_j‖² of the rows of all processes on average."""
    square, count = problem.shards.group.totals(float(rows.square().sum(dtype=torch.float64)), float(len(rows)))
    return square / max(1.0, count)


def _mean_curvature(problem: Problem) -> float:
    """w ℓ″(R, 0) of the pairs of all processes on average; 0 where no pair says anything."""
    total = 0.0
    for start in range(0, len(problem.labels), _PAIRS):
        part = slice(start, start + _PAIRS)
        labels = torch.from_numpy(problem.labels[part]).double()
        second = problem.loss.second(labels, torch.zeros_like(labels))
        if problem.pair_weights is not None:
            second = second * torch.from_numpy(problem.pair_weights[part])
        total += float(second.sum())
    return problem.shards.group.totals(total)[0] / max(1, problem.observed)

"""Run one trial: train a model with settings of the search space, and rank the validation part as it goes.

When a trial is stopped early. Validation curves of second-order methods rise steeply and bend: extended in a straight
line at the slope of the last few iterations, they end too high. A trial whose extended curve still stays below the best
is pruned. On entities that training has not seen, curves are rough: few entities are held out, all rankings share them,
and the best point on the way is often an early one that is best for these only. There a trial runs to its end, and its
value is the mean of its last points.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.checks import hidden_text, parse_hidden
from gramtower.data.interactions import Interactions, PairsLike
from gramtower.data.tables import FeaturesLike
from gramtower.engine.objective.constants import degree_power
from gramtower.engine.objective.problem import Point
from gramtower.experiments.tuning.space import Value, rescaled_penalty
from gramtower.model import defaults
from gramtower.model.fit_data import FitData, aligned, hold_out, matrix_and_ids, prepare_data
from gramtower.model.fit_parts import (
    RankingValidator,
    imputed_label,
    iterations,
    left_weights,
    make_problem,
    make_towers,
    ranked_pairs,
    right_weights,
)
from gramtower.model.penalty_path import HeldOut
from gramtower.model.settings import ModelSettings, given
from gramtower.model.unseen import Unseen, UnseenValidator, hold_out_entities
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record

Both = tuple[FeaturesLike, FeaturesLike]  # features of left and of right entities
LOOK_BACK = 3  # iterations that a slope is taken over
FEWEST = 6  # iterations that a trial is given before it is judged


def hopeless(curve: Sequence[float], remaining: int, best: float | None, rough: bool = False) -> bool:
    """Return whether a curve, extended in a straight line over the remaining iterations, stays below the best.

    A rough curve, of entities that training has not seen, is extended from the best of its last few points.
    """
    if best is None or len(curve) <= FEWEST:
        return False
    if not rough and max(curve) >= best:
        return False  # it counts with its best point
    slope = (curve[-1] - curve[-1 - LOOK_BACK]) / LOOK_BACK
    now = max(curve[-LOOK_BACK:]) if rough else curve[-1]
    return now + max(0.0, slope) * remaining < best


def outcome(curve: Sequence[float], rough: bool = False) -> tuple[float, int]:
    """Return value and iteration: the best of a curve, or the mean end of a rough one."""
    if rough:
        last = curve[-min(LOOK_BACK, max(1, len(curve) - 1)) :]
        return sum(last) / len(last), len(curve) - 1
    best = max(range(len(curve)), key=lambda i: curve[i])
    return curve[best], best


_SCORES = {"cpu": 2 * 10**8, "cuda": 4 * 10**9}  # most scores computed for one look at the validation part

#: Metrics that a report has next to the one that is maximised: lists can gain by one and lose by another.
REPORTED = ("map@5", "recall@20", "ndcg@20")


@dataclass(frozen=True)
class Tried:
    """The record of a trial; ``without`` and ``metrics`` are only those of the defaults and of better trials."""

    number: int  # trials are numbered as they end, from 0
    settings: dict[str, Value]  # by the names of the search space, fixed ones too
    value: float  # the best of its curve, or the mean of the last points if entities were held out
    iteration: int  # where it was reached
    curve: list[float]  # metric at the start and after each iteration
    seconds: float  # training time
    pruned: bool  # whether it was stopped early
    reason: str  # why it stopped
    without: list[float] = field(default_factory=list)  # the metric without each part of the validation entities
    same_as: int | None = None  # the trial with equivalent settings whose results these are; None if it was trained
    metrics: dict[str, float] = field(default_factory=dict)  # REPORTED and the maximised one
    warm_from: int | None = None  # in logs of earlier versions: the trial whose solution it started from
    confirmed: float | None = None  # in logs of earlier versions: the value of a warm start that was then repeated

    @property
    def note(self) -> str:
        """Whether it was stopped early, or has the results of another trial."""
        if self.same_as is not None:
            return f"same as {self.same_as}"
        notes = [f"warm from {self.warm_from}"] if self.warm_from is not None else []
        return ", ".join([*notes, "given up"] if self.pruned else notes)


@dataclass(frozen=True)
class Parts:
    """The inner training part, and the validation part in its rows and columns (or in those of ``unseen``)."""

    train: Any  # pairs that trials learn from, as ``TwoTower.fit`` takes them
    matrix: sp.csr_matrix  # the same as a matrix
    held_out: sp.csr_matrix  # validation pairs, of at most as many users as can be ranked often
    users: int  # number of users with validation pairs
    shown: int  # number of those that trials are ranked on
    features: Both  # features passed to tune, left and right, of the entities of ``train``
    unseen: Unseen | None = None  # entities that were held out with all their pairs


def validation_part(parts: Parts) -> HeldOut:
    """Return the parts in the form in which penalties are chosen on them before trials begin."""
    held_out = parts.held_out if parts.unseen is None else None
    if held_out is not None and isinstance(parts.train, Interactions):
        held_out = Interactions.from_matrix(held_out, parts.train.left_ids, parts.train.right_ids)
    return HeldOut(parts.train, parts.features, held_out, parts.unseen)


def make_parts(pairs: PairsLike, validation: object, features: Both, seed: int, device: str) -> Parts:
    """Split the validation part off, or take the given one."""
    matrix, ids = matrix_and_ids(pairs)
    if isinstance(validation, Real):
        train, held = hold_out(pairs, validation, seed)
        inner, held_out = matrix_and_ids(train)[0], matrix_and_ids(held)[0]
    else:
        train, inner, held_out = pairs, matrix, aligned("validation", validation, ids, matrix.shape)
        lost = np.flatnonzero((np.diff(held_out.indptr) > 0) & (np.diff(matrix.indptr) == 0))
        if not held_out.nnz:
            check.fail("validation", "no pair of known entities", "pairs of entities that are in the training data")
        if len(lost):
            name = repr(lost[0].item() if ids[0] is None else ids[0][lost[:1]].tolist()[0])
            given = f"{len(lost)} users without a training pair, such as {name}"
            check.fail("validation", given, "users with pairs to learn from; or a share, which keeps one for each")
    kept, users, shown = _ranked_often(held_out, seed, device)
    return Parts(train, inner, kept, users, shown, features)


def make_parts_of_entities(
    model: ModelSettings, pairs: PairsLike, share: object, side: str, features: Both, seed: int
) -> Parts:
    """Hold out a share of the entities of a side with all their pairs."""
    unseen = hold_out_entities(model, pairs, features, share, side, seed)
    kept, users, shown = _ranked_often(unseen.truth, seed, model.device)
    unseen = replace(unseen, truth=kept)
    return Parts(unseen.train, unseen.train.matrix, kept, users, shown, unseen.features, unseen)


def _ranked_often(held_out: sp.csr_matrix, seed: int, device: str) -> tuple[sp.csr_matrix, int, int]:
    """Return the pairs of as many users as can be ranked often, drawn with the seed, and both numbers of users."""
    users = np.flatnonzero(np.diff(held_out.indptr))
    most = max(1, _SCORES[defaults.pick_device(device).type] // held_out.shape[1])
    shown = np.random.default_rng(seed).permutation(users)[:most]
    keep = np.zeros(held_out.shape[0])
    keep[shown] = 1.0
    kept = sp.csr_matrix(sp.diags(keep) @ held_out)
    kept.eliminate_zeros()
    return kept, len(users), len(shown)


def start_values(model: ModelSettings, parts: Parts, data: FitData) -> dict[str, Value]:
    """Return the settings that a model has without tuning, by the names of the search space."""
    given_features = any(features is not None for features in parts.features)
    problem, imputed = make_problem(model, data), imputed_label(model)

    def power(name: str, weights: object) -> float:  # s of "degree^s"; 0 for none, and for an array
        return degree_power(name, weights) if isinstance(weights, str) else 0.0

    return {
        "omega": problem.omega,
        "l2": problem.l2,
        "penalty": problem.embedding_l2 / rescaled_penalty(1.0, model.frequency_power, data.matrix, problem.omega),
        "frequency_power": model.frequency_power,
        "left_power": power("left_weights", left_weights(model, data)),
        "right_power": power("right_weights", right_weights(model, data)),
        "imputed": imputed if isinstance(imputed, (float, int, str)) else "given",
        "dim": data.dim,
        "hidden": hidden_text(data.hidden),
        "activation": data.activation,
        "normalize": "yes" if data.normalize else "no",
        "loss": model.loss if isinstance(model.loss, str) else model.loss.name,
        "features": "given" if given_features else "ids",
    }


def model_arguments(
    settings: dict[str, Value], model: ModelSettings, matrix: sp.csr_matrix, start: Mapping[str, Value]
) -> dict[str, Any]:
    """Return arguments of TwoTower for settings of the search space; other arguments stay the model's."""
    arguments: dict[str, Any] = {
        name: settings[name]
        for name in ("omega", "l2", "frequency_power", "imputed", "dim", "loss", "activation")
        if name in settings and (name, settings[name]) != ("imputed", "given")
    }
    if "normalize" in settings:
        arguments["normalize"] = settings["normalize"] == "yes"
    if "hidden" in settings:
        arguments["hidden"] = parse_hidden(str(settings["hidden"]))
    for side in ("left", "right"):
        if f"{side}_power" in settings:
            arguments[f"{side}_weights"] = f"degree^{float(settings[f'{side}_power'])!r}"
    if "penalty" in settings or ("frequency_power" in settings and given(model.embedding_l2) is None):
        omega, penalty = (float(settings.get(name, start[name])) for name in ("omega", "penalty"))
        power = float(arguments.get("frequency_power", model.frequency_power))
        arguments["embedding_l2"] = rescaled_penalty(penalty, power, matrix, omega)
    return arguments


def changed_arguments(
    settings: dict[str, Value], model: ModelSettings, matrix: sp.csr_matrix, start: Mapping[str, Value]
) -> dict[str, Any]:
    """Return :func:`model_arguments` without those that are as they were at the start.

    Defaults depend on the size of the data, and there are more pairs than in the inner training part. Unchanged
    settings are therefore left to their rules, unless a changed setting would change them: dimensions follow hidden
    layers, and everything follows the input of the towers.
    """
    same = {name for name, value in settings.items() if value == start[name]}
    if "hidden" in settings and "hidden" not in same:
        same.discard("dim")
    if "features" in settings and "features" not in same:
        same.clear()
    arguments = model_arguments(settings, model, matrix, start)
    for side in ("left", "right"):  # an array is no power, and is not left to itself
        if f"{side}_power" in same and isinstance(getattr(model, f"{side}_weights"), (str, type(None))):
            same.add(f"{side}_weights")
    changed = settings.keys() - same
    if not {"penalty", "frequency_power"} & changed and ("omega" not in changed or model.frequency_power == 1):
        same.add("embedding_l2")
    return {name: value for name, value in arguments.items() if name not in same}


def chosen_features(settings: dict[str, Value], given: Both) -> Both:
    """Return the input of the towers for settings."""
    known: dict[str, FeaturesLike] = {"ids": None, "history": "history", "ids+history": ["id", "history"]}
    choice = settings.get("features", "given")
    return given if choice == "given" else (known[str(choice)], None)


def run_trial(
    model: ModelSettings,
    settings: dict[str, Value],
    parts: Parts,
    *,
    number: int,
    first: float | None = None,
    best: float | None,
    deadline: float | None,
    seed: int = 0,
) -> Tried | None:
    """Train until the metric stops improving, or cannot reach the best any more; return None if time was up before.

    On entities that training has not seen a trial runs to its end, unless it cannot reach the best.
    ``first`` and ``best`` are metrics of the first and of the best trial; ``deadline`` is a time of ``perf_counter``.
    """
    data = prepare_data(model, parts.train, *chosen_features(settings, parts.features))
    problem = make_problem(model, data)
    towers = make_towers(model, data, problem)
    measure: RankingValidator | UnseenValidator = RankingValidator(model.metric, *ranked_pairs(data, parts.held_out))
    if parts.unseen is not None:
        measure = parts.unseen.validator(model.metric, data)
    curve: list[float] = []
    most = iterations(model, data, problem, towers)
    last: Tensor | None = None
    pruned = late = False
    rough = parts.unseen is not None

    def look(point: Point) -> float:
        curve.append(measure(point))
        return curve[-1]

    def watch(record: Record, point: Point) -> bool:
        nonlocal pruned, late, last
        last = point.parameters.vector
        late = deadline is not None and time.perf_counter() >= deadline
        pruned = hopeless(curve, most - record.iteration, best, rough)
        return late or pruned

    result = minimize(
        problem, towers, model.optimizer, most, model.time_limit, model.seed, [watch],
        validation=look, patience=None if rough else model.patience, **model.solver_options(),
    )  # fmt: skip
    if result.reason is Reason.INTERRUPTED:
        raise KeyboardInterrupt
    if late:
        return None
    value, iteration = outcome(curve, rough)
    found = Tried(number, settings, value, iteration, curve, result.history[-1].seconds, pruned, result.reason.name)
    if not pruned and (first is None or value > first):
        towers.load(last if rough and last is not None else result.parameters.vector)
        point = problem.at(towers)
        names = tuple(dict.fromkeys((model.metric, *REPORTED)))
        scores = measure.scores(point, names)
        metrics = {name: float(scores[name]) for name in names}
        return replace(found, without=measure.without(point, seed), metrics=metrics)
    return found

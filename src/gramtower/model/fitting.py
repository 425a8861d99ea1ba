"""From pairs to a fitted model: the data are prepared, a problem and towers are made for them, and it is minimised.

Each step is a function of the settings and of what the steps before it returned; tuning and comparisons take the same
steps with another end.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower._util.files import build, write_text
from gramtower._util.host import readable, threads_of_fit
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import current_group
from gramtower.distributed.partition import Shard
from gramtower.engine.objective.cuda_graphs import return_memory
from gramtower.engine.objective.problem import Point, Problem
from gramtower.model.context import with_context
from gramtower.model.feature_spec import Both, GivenFeatures
from gramtower.model.fit_data import FitData, FitPairs, hold_out, own_pairs, prepare_data, rejoined
from gramtower.model.fit_parts import (
    auto_weights,
    described_features,
    grown_pairs,
    held_bytes,
    is_tiny,
    iterations,
    least_budget,
    make_problem,
    make_towers,
    make_validation,
    over_ids,
    refined,
    refuse_increment,
    start_from_outputs,
    stored_features,
)
from gramtower.model.fitted import CANDIDATES, FittedModel, Selection, pattern_of
from gramtower.model.penalty_path import HOLDS, KEPT, HeldOut, Start, continued_iterations, select
from gramtower.model.settings import ModelSettings, given
from gramtower.model.side import Side, appended
from gramtower.model.unseen import Unseen, hold_out_entities, move_expected_ids, with_feature_columns
from gramtower.optim.solvers import as_solver
from gramtower.training.callbacks import Callback
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Result

ITERATIONS = 2  # unless given; benchmarks/bench_updates.py tries others


def fit(
    settings: ModelSettings, pairs: FitPairs, left_features: FeaturesLike = None, right_features: FeaturesLike = None,
    validation: FitPairs | float | None = None, previous: FittedModel | None = None,
    checkpoint: str | Path | None = None, history: str | Path | None = None, *, refit: bool = False,
    callbacks: Iterable[Callback] = (), candidates: str = "trained", validation_side: str | None = None,
) -> FittedModel:  # fmt: skip
    """Learn from observed pairs, starting from a previous model if there is one; see TwoTower.fit."""
    if isinstance(pairs, Interactions) and pairs.context:
        left_features = with_context(pairs, left_features)
    features, watchers = (left_features, right_features), check.functions("callbacks", callbacks)
    features = left_features, right_features = joined_features(features, pairs, previous)
    as_solver(settings.optimizer, dict(settings.solver_options()))  # refused before any work, and so is the next one
    if not isinstance(settings.pair_weights, str | None):
        expected = 'text such as "degree^-0.5", or None; weights of single pairs belong to Interactions'
        check.fail("pair_weights", type(settings.pair_weights).__name__, expected)
    if check.choice("candidates", candidates, CANDIDATES) == "all":
        described = [
            GivenFeatures(side, given).tables() for side, given in zip(("left", "right"), features, strict=True)
        ]
        found = fit(
            settings, pairs, left_features, right_features, validation, previous, checkpoint, history,
            refit=refit, callbacks=watchers, validation_side=validation_side,
        )  # fmt: skip
        return found.with_added(*described)
    train, held_out, unseen, known = pairs, validation, None, features
    if validation_side is not None:
        seed = check.seed(settings.seed)
        unseen = hold_out_entities(settings, pairs, features, validation, validation_side, seed)
        train, held_out, known = unseen.train, None, unseen.features
    elif isinstance(validation, Real):
        train, held_out = hold_out(pairs, validation, check.seed(settings.seed))
    if check.flag("refit", refit):
        if isinstance(pairs, Shard) and not isinstance(validation, Real):
            check.fail("refit", True, "False, or validation as a share: processes that share a folder do not add pairs")
        if validation is None:
            check.fail("refit", True, "validation as well: a share such as 0.1, or pairs, to find the iterations")
    path, start = None if previous is None else previous.path, None
    if not isinstance(settings.select, bool) and settings.select not in HOLDS:
        check.fail("select", repr(settings.select), "True (auto), False (off), 'pairs', 'left' or 'right'")
    if settings.select and previous is None:
        part = None if validation is None else HeldOut(train, known, held_out, unseen)
        path, start = _selected(settings, pairs, features, part, checkpoint)
        settings = settings.with_changes(**path.chosen)
    if not refit:
        return _fit(
            settings, train, known, held_out, previous, checkpoint, history, watchers, unseen, path=path, start=start
        )
    everything = rejoined(pairs, validation) if train is pairs else pairs
    first_history = None if history is None else validated_history(check.path("history", history))
    found = _fit(settings, train, known, held_out, previous, checkpoint, first_history, watchers, unseen, path=path)
    if found.reason is Reason.INTERRUPTED:
        return found
    count = best_iteration(found)
    if count == 0 and previous is None:  # an untrained model is never useful
        warnings.warn("validation never improved over the random start; training for 1 iteration", stacklevel=3)
        count = 1
    again = None if checkpoint is None else refit_checkpoint(check.path("checkpoint", checkpoint))
    last = settings.with_changes(max_iterations=count)
    final = _fit(last, everything, features, None, previous, again, history, watchers, path=path)
    reason, message = final.reason, final.message
    if reason is Reason.MAX_ITERATIONS:  # the number of them was found, and how is what there is to say
        reason, message = found.reason, f"{found.message}; then all pairs were fitted for {count} iterations"
    return replace(final, reason=reason, message=message, best_metric=found.best_metric)


def joined_features(features: Both, pairs: FitPairs, previous: FittedModel | None = None) -> Both:
    """The features of both sides with frames as tables, joined by the ids of the pairs."""
    sides, names = ("left", "right"), _names(pairs, previous)
    with current_group().together():
        left, right = (
            GivenFeatures(side, given).joined(name, None if previous is None else previous.side(side).inputs)
            for side, given, name in zip(sides, features, names, strict=True)
        )
    return left, right


def selection_file(checkpoint: Path) -> Path:
    """Where a fit with a checkpoint keeps the settings that it chose."""
    return checkpoint.with_name(f"{checkpoint.name}.selection.json")


def _selected(
    settings: ModelSettings, pairs: FitPairs, features: Both, given: HeldOut | None, checkpoint: str | Path | None
) -> tuple[Selection, Start | None]:
    """Settings chosen by held-out data; a continued run takes those in the file next to its checkpoint."""
    if checkpoint is None:
        return select(settings, pairs, features, given)
    group, path = current_group(), check.path("checkpoint", checkpoint)
    file = selection_file(path)
    if group.from_first(path.exists() and file.exists()):
        try:
            return build(str(file), Selection, json.loads(file.read_text("utf-8"))), None
        except ValueError as error:
            raise ValueError(f"checkpoint: {error}; delete {file.name} to choose settings again") from error
    found, start = select(settings, pairs, features, given)
    if group.rank == 0 and found.tried:
        write_text(file, json.dumps(asdict(found)))
    return found, start


def refit_checkpoint(checkpoint: Path) -> Path:
    """Where the second half of a fit with ``refit`` has its checkpoint."""
    return checkpoint.with_name(f"{checkpoint.name}.refit")


def validated_history(history: Path) -> Path:
    """Where the first half of a fit with ``refit``, that with validation, has its records."""
    return history.with_name(f"{history.stem}-validation{history.suffix}")


def best_iteration(fitted: FittedModel) -> int:
    """The iteration that a fit with validation kept."""
    return next(record.iteration for record in fitted.history if record.metric == fitted.best_metric)


def _fit(
    settings: ModelSettings, pairs: FitPairs, features: Both, validation: FitPairs | None, previous: FittedModel | None,
    checkpoint: str | Path | None, history: str | Path | None, callbacks: list[Callback], unseen: Unseen | None = None,
    *, path: Selection | None = None, start: Start | None = None,
) -> FittedModel:  # fmt: skip
    """Fit towers to all given pairs, from ``start`` or a checkpoint if there is one."""
    options = settings.solver_options()
    if previous is not None:
        settings = sized_as(settings, previous)
    whole = prepare_data(settings, pairs, *features, validation)
    ids_only = path is not None and path.ids_only and whole.ids_suffice
    data = whole.by_ids() if ids_only else whole
    if previous is not None:
        refuse_increment(previous, data)
    with threads_of_fit(is_tiny(settings, data)):
        problem = make_problem(settings, data)
        towers = make_towers(settings, data, problem, None if ids_only else previous, draw=start is None)
        if ids_only and previous is not None:
            start_from_outputs(previous, towers, whole)
        if start is not None:
            start.load_into(towers, data.shards)
        count = iterations(settings, data, problem, towers)
        if path is not None and path.continued and previous is None and given(settings.max_iterations) is None:
            count = continued_iterations(count)
        moved = data.refine and _has_room(settings, data, problem.plan(towers).needs.columns)
        measure = make_validation(settings, data, unseen)
        result = minimize(
            problem, towers, settings.optimizer, count, settings.time_limit,
            settings.seed, callbacks, validation=measure, patience=None if measure is None else settings.patience,
            checkpoint=checkpoint, history=history,
            verbose=settings.verbose, **options,
        )  # fmt: skip
        point = problem.at(towers)
        _refuse_non_finite(problem, point, result)
        left, right = point.P.cpu(), point.right_rows.cpu()
        chosen: dict[str, Any] = {
            "omega": problem.omega, "l2": problem.l2, "embedding_l2": problem.embedding_l2, "shards": problem.shards
        }  # fmt: skip
        del point, problem, measure
        return_memory()
    if ids_only:
        data, towers = whole, with_feature_columns(towers, whole)
    move_expected_ids(towers, data, left, right)
    if moved:
        left, right = refined(settings, data, left, right)
    return FittedModel(
        left=Side("left", data.ids[0], left, data.inputs[0], data.numbered[0]),
        right=Side("right", data.ids[1], right, data.inputs[1], data.numbered[1]),
        trained=pattern_of(data.matrix), further=_further(data), towers=towers,
        same_entities=data.same_entities, plain_pairs=data.weights is None and bool((data.matrix.data == 1).all()),
        dim=right.shape[1], hidden=data.hidden if settings.towers is None else ((), ()),
        normalize=data.normalize and settings.towers is None, refine=moved,
        history=result.history, reason=result.reason, message=result.message, best_metric=result.best_metric,
        activation=data.activation, auto_weights=auto_weights(data), names=_names(pairs, previous), path=path, **chosen,
    )  # fmt: skip


def _names(pairs: FitPairs, previous: FittedModel | None) -> tuple[str, str]:
    """What the data calls left and right entities; what the previous model calls them where the data does not say."""
    found = FittedModel.names
    if isinstance(pairs, (Interactions, Shard)):
        found = str(pairs.left_name), str(pairs.right_name)
    return previous.names if previous is not None and found == FittedModel.names else found


def _has_room(settings: ModelSettings, data: FitData, dim: int) -> bool:
    """Whether a memory budget leaves room to refine embeddings; an error before training if that was asked for."""
    if settings.memory_budget is None or not data.shards.single:
        return True
    held = held_bytes(data, dim)
    least = held + least_budget(
        over_ids(settings.with_changes(memory_budget=None), data, dim), dim, data.device, data.features_alone
    )
    enough = check.memory_size("memory_budget", settings.memory_budget) >= least
    if settings.refine and not enough:
        check.fail("refine", f"True with a memory budget of {settings.memory_budget}", f"{readable(least)!r}, or False")
    return enough


def _further(data: FitData) -> sp.csr_matrix:
    """Return the pairs that answers leave out besides those of training: held-out ones and self-pairs of one set."""
    held_out = pattern_of(data.held_out, data.matrix.shape)
    return pattern_of(held_out + own_pairs(data.ids, held_out.shape)) if data.same_entities else held_out


def sized_as(settings: ModelSettings, previous: FittedModel) -> ModelSettings:
    """Settings whose towers stay as large as a previous model's, whatever the default for more data."""
    if (processes := current_group().size) > 1:
        check.fail("warm_start", f"True in {processes} processes", "False, or a fit in one process")
    if settings.towers is not None:  # their size is their own
        return settings
    chosen = {} if previous.path is None else previous.path.chosen  # what held-out data chose stays
    return settings.with_changes(
        dim=previous.dim, hidden=previous.hidden, normalize=previous.normalize, activation=previous.activation,
        **{name: chosen[name] for name in KEPT if name in chosen and getattr(settings, name) in (None, "auto")},
    )  # fmt: skip


def _refuse_non_finite(problem: Problem, point: Point, result: Result) -> None:
    """Refuse a model that is not finite, or that learned nothing because the objective was not."""
    stopped = result.reason is Reason.NON_FINITE and result.history[-1].iteration == 0
    bad = [name for name, rows in (("left", point.P), ("right", point.Q)) if not bool(rows.isfinite().all())]
    if problem.shards.group.totals(float(bool(bad)))[0] or stopped:
        found = f"{' and '.join(bad) or 'other'} embeddings"
        if stopped:
            terms = f"at the start, the term {', '.join(result.non_finite)}"
            found = "the gradient" if result.non_finite == ["gradient"] else terms
        dtype = str(point.Q.dtype).removeprefix("torch.")
        check.fail(
            "fit",
            f"NaN or infinite numbers: {found}",
            f"an objective that is finite in {dtype}: smaller labels, imputed, omega, l2, embedding_l2 or weights, "
            "features scaled to about 1, or a smaller step_size",
        )


def update(
    settings: ModelSettings, fitted: FittedModel, more: FitPairs, given_features: Both = (None, None),
    iterations: int = ITERATIONS, callbacks: Iterable[Callback] = (),
) -> FittedModel:  # fmt: skip
    """A model of all that a fitted one knows and of more pairs; see TwoTower.update."""
    settings = settings.with_changes(max_iterations=check.count("iterations", iterations, minimum=0))
    kept = [side.added > 0 and side.inputs.only_tables for side in fitted.sides]
    pairs = grown_pairs(fitted, more, (kept[0], kept[1]))
    stored = [side.inputs.stores_rows for side in fitted.sides]
    left, right = (None if stores else given for stores, given in zip(stored, given_features, strict=True))
    read, names = joined_features((left, right), more, fitted), _names(more, fitted)
    left, right = (
        stored_features(side, given, name, pairs) if stores else described_features(side, table)
        for side, given, name, stores, table in zip(fitted.sides, given_features, names, stored, read, strict=True)
    )
    features = left, right
    if settings.factors is not None and [len(factor) for factor in settings.factors] != [*pairs.shape]:
        shown = " and ".join(f"{len(factor):,}" for factor in settings.factors)
        expected = f"{pairs.shape[0]:,} and {pairs.shape[1]:,} rows, of all entities, old and new: "
        check.fail("imputed", f"{shown} rows", expected + "model.set_params(imputed=(P̃, Q̃)) before update")
    found = fit(settings, pairs, *features, previous=fitted, callbacks=callbacks)
    for before, table, there in zip(fitted.sides, features, kept, strict=True):
        found = _with_kept(found, before, GivenFeatures(before.name, table)) if there else found
    return found


def _with_kept(found: FittedModel, before: Side, given: GivenFeatures) -> FittedModel:
    """A model with the entities that were added to a side before and still have no pairs, as tables describe them."""
    this = found.side(before.name)
    assert before.ids is not None
    assert this.ids is not None
    added = before.ids[before.trained :]
    wanted = np.flatnonzero(join(added, index_of(this.ids)) < 0)
    if not len(wanted):
        return found
    rows, ids = given.encode(added, wanted), np.concatenate([this.ids, added[wanted]])
    return found.with_side(appended(this, found.known_towers("embed"), ids, rows, len(wanted)))

"""From pairs to a fitted model: the data are prepared, a problem and towers are made for them, and it is minimised.

Each step is a function of the settings and of what the steps before it returned; tuning and comparisons take the same
steps with another end. Checked by tests/test_estimator.py and, over several processes, tests/test_distributed_fit.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import scipy.sparse as sp
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.partition import Shard
from gramtower.data.tables import FeatureTable
from gramtower.distributed.group import current_group
from gramtower.distributed.shards import Rows, Shards
from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.mlp import mlp_towers
from gramtower.engine.towers.towers import Towers
from gramtower.estimator import defaults
from gramtower.estimator.entities import CANDIDATES
from gramtower.estimator.expected_ids import move_expected_ids
from gramtower.estimator.fit_data import FitData, hold_out, own_pairs, prepare_data, rejoined
from gramtower.estimator.fitted import FittedModel, pattern_of
from gramtower.estimator.refinement import least_budget, refine
from gramtower.estimator.settings import ModelSettings
from gramtower.estimator.side import Side
from gramtower.estimator.unseen import Unseen, UnseenValidator, hold_out_entities
from gramtower.estimator.warm_start import carry_over, refuse_increment
from gramtower.metrics import Scores, evaluate_embeddings
from gramtower.metrics.definitions import to_maximise
from gramtower.metrics.jackknife import deal, means_without
from gramtower.runtime.memory import readable
from gramtower.runtime.threads import one_thread
from gramtower.training.callbacks import Callback
from gramtower.training.fingerprint import sparse_digest
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Result

_TINY = 50_000_000  # multiplications of an evaluation: about ten milliseconds


def fit(
    settings: ModelSettings,
    pairs: Any,
    left_features: Any = None,
    right_features: Any = None,
    validation: Any = None,
    previous: FittedModel | None = None,
    checkpoint: str | Path | None = None,
    history: str | Path | None = None,
    *,
    refit: bool = False,
    callbacks: Iterable[Callback] = (),
    candidates: str = "trained",
    validation_side: str | None = None,
) -> FittedModel:
    """Learn from observed pairs, starting from a previous model if there is one; see TwoTower.fit."""
    features, watchers = (left_features, right_features), check.functions("callbacks", callbacks)
    if check.choice("candidates", candidates, CANDIDATES) == "all":
        described = {"left": tables_of("left", left_features), "right": tables_of("right", right_features)}
        found = fit(
            settings, pairs, left_features, right_features, validation, previous, checkpoint, history,
            refit=refit, callbacks=watchers, validation_side=validation_side,
        )  # fmt: skip
        return found.with_added(described["left"], described["right"])
    train, held_out, unseen, known = pairs, validation, None, features
    if validation_side is not None:
        seed = check.seed(settings.seed)
        unseen = hold_out_entities(settings, pairs, features, validation, validation_side, seed)
        train, held_out, known = unseen.train, None, unseen.features
    elif isinstance(validation, Real):
        train, held_out = hold_out(pairs, validation, check.seed(settings.seed))
    if not check.flag("refit", refit):
        return _fit(settings, train, known, held_out, previous, checkpoint, history, watchers, unseen)
    if isinstance(pairs, Shard):
        check.fail("refit", True, "False: a partition has its held-out pairs in files of their own")
    if validation is None:
        check.fail("refit", True, "validation as well: a share such as 0.1, or pairs, to find the number of iterations")
    everything = rejoined(pairs, validation) if train is pairs else pairs
    first_history = None if history is None else validated_history(check.path("history", history))
    found = _fit(settings, train, known, held_out, previous, checkpoint, first_history, watchers, unseen)
    if found.reason is Reason.INTERRUPTED:
        return found
    count = best_iteration(found)
    if count == 0 and previous is None:  # nobody wants the numbers that were drawn
        warnings.warn("no iteration ranks the validation part better than the start did; one is made", stacklevel=3)
        count = 1
    again = None if checkpoint is None else refit_checkpoint(check.path("checkpoint", checkpoint))
    final = _fit(
        settings.with_changes(max_iterations=count), everything, features, None, previous, again, history, watchers
    )
    reason, message = final.reason, final.message
    if reason is Reason.MAX_ITERATIONS:  # the number of them was found, and how is what there is to say
        reason, message = found.reason, f"{found.message}; then all pairs were fitted for {count} iterations"
    return replace(final, reason=reason, message=message, best_metric=found.best_metric)


def tables_of(side: str, features: Any) -> Any:
    """The tables of a side, as those of its entities without pairs; None for a left side that has none.

    Raises:
        ValueError: if there is no table, or something without ids beside it.
    """
    if (processes := current_group().size) > 1:
        check.fail("candidates", f"'all' in {processes} processes", "'trained', and model.add after loading")
    parts = [part for part in (features if isinstance(features, (list, tuple)) else [features]) if part is not None]
    given = [part for part in parts if not isinstance(part, str)]
    if side == "left" and not given:
        return None
    if not given or not all(isinstance(part, FeatureTable) for part in given):
        shown = f"'all' with {side}_features of {', '.join(type(part).__name__ for part in given) or 'ids alone'}"
        check.fail("candidates", shown, f"{side}_features with a FeatureTable, whose rows without pairs are kept")
    return given if len(given) > 1 else given[0]


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
    settings: ModelSettings,
    pairs: Any,
    features: tuple[Any, Any],
    validation: Any,
    previous: FittedModel | None,
    checkpoint: str | Path | None,
    history: str | Path | None,
    callbacks: list[Callback],
    unseen: Unseen | None = None,
) -> FittedModel:
    """One fit, from the arguments to the model."""
    options = settings.solver_options()
    if previous is not None:
        settings = sized_as(settings, previous)
    data = prepare_data(settings, pairs, *features, validation)
    if previous is not None:
        refuse_increment(previous, data)
    with one_thread(_is_tiny(settings, data)):
        problem = make_problem(settings, data)
        towers = make_towers(settings, data, problem, previous)
        moved = data.refine and _has_room(settings, data, problem.plan(towers).needs.columns)
        measure = make_validation(settings, data, unseen)
        result = minimize(
            problem, towers, settings.optimizer, iterations(settings, data), settings.time_limit, settings.seed,
            callbacks, validation=measure, patience=None if measure is None else settings.patience,
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
    move_expected_ids(towers, data, left, right)
    if moved:
        left, right = _refined(settings, data, left, right)
    return FittedModel(
        left=Side("left", data.ids[0], left, data.inputs[0], data.numbered[0]),
        right=Side("right", data.ids[1], right, data.inputs[1], data.numbered[1]),
        trained=pattern_of(data.matrix), further=_further(data), towers=towers,
        same_entities=data.same_entities, plain_pairs=data.weights is None and bool((data.matrix.data == 1).all()),
        dim=right.shape[1], hidden=data.hidden if settings.towers is None else ((), ()),
        normalize=data.normalize and settings.towers is None, refine=moved,
        history=result.history, reason=result.reason, message=result.message, best_metric=result.best_metric,
        activation=data.activation, auto_weights=auto_weights(data), **chosen,
    )  # fmt: skip


def _refined(settings: ModelSettings, data: FitData, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of local left and of all right entities, moved by their own pairs."""
    own = data.shards.right.local_rows("right embeddings", right)
    here = left.to(data.device), own.to(data.device)
    P, Q = refine(_over_ids(settings, data, right.shape[1]), here, data.features_alone)
    return P.cpu(), data.shards.gather(Q).wait().cpu()


def _has_room(settings: ModelSettings, data: FitData, dim: int) -> bool:
    """Whether a memory budget leaves room to refine embeddings; an error before training if that was asked for."""
    if settings.memory_budget is None or not data.shards.single:
        return True
    held = _held(data, dim)
    least = held + least_budget(
        _over_ids(settings.with_changes(memory_budget=None), data, dim), dim, data.device, data.features_alone
    )
    enough = check.memory_size("memory_budget", settings.memory_budget) >= least
    if settings.refine and not enough:
        check.fail("refine", f"True with a memory budget of {settings.memory_budget}", f"{readable(least)!r}, or False")
    return enough


def _held(data: FitData, dim: int) -> int:
    """Bytes of all embeddings on a GPU while some are moved; on the host they are the model's own."""
    return 4 * sum(data.shape) * dim if data.device.type == "cuda" else 0


def _over_ids(settings: ModelSettings, data: FitData, dim: int) -> Problem:
    """The same pairs, ω and weights, over ids, for what is learned of single entities."""
    budget = settings.memory_budget
    if budget is not None:
        budget = max(1, check.memory_size("memory_budget", budget) - _held(data, dim))
    changes = {"l2": 1.0, "embedding_l2": 0.0, "memory_budget": budget}
    problem = make_problem(settings.with_changes(**changes), replace(data, features=(None, None)))
    problem.graphs = False  # a few evaluations are over before recording them has paid
    return problem


def _is_tiny(settings: ModelSettings, data: FitData) -> bool:
    """Whether an evaluation of linear towers over ids takes a CPU so little that it is not worth a second thread."""
    if not _is_linear_over_ids(settings, data) or data.device.type != "cpu":
        return False
    return bool(sum(data.shape) * data.dim**2 + 4 * data.observed * data.dim <= _TINY)


def _further(data: FitData) -> sp.csr_matrix:
    """What answers leave out beside training pairs: held-out ones and, where both sides are one set, self-pairs."""
    held_out = pattern_of(data.held_out, data.matrix.shape)
    return pattern_of(held_out + own_pairs(data.ids, held_out.shape)) if data.same_entities else held_out


def sized_as(settings: ModelSettings, previous: FittedModel) -> ModelSettings:
    """Settings whose towers stay as large as a previous model's, whatever the default for more data."""
    if (processes := current_group().size) > 1:
        check.fail("warm_start", f"True in {processes} processes", "False, or a fit in one process")
    if settings.towers is not None:  # their size is their own
        return settings
    return settings.with_changes(
        dim=previous.dim, hidden=previous.hidden, normalize=previous.normalize, activation=previous.activation
    )


def make_problem(settings: ModelSettings, data: FitData) -> Problem:
    """What is minimised, ω and μ set by the data where they were left out."""
    size, shards, known, mu = (data.shape, data.observed), data.shards, data.seen, settings.embedding_l2
    if mu is None:  # of towers of one's own the size is not known yet
        mu = defaults.default_embedding_l2(*size, data.dim if settings.towers is None else settings.dim or 1, known)
    l2 = settings.l2
    return Problem(
        data.matrix, *data.features, loss=settings.loss,
        omega=defaults.default_omega(*size, known) if settings.omega is None else settings.omega,
        l2=defaults.default_l2(*size, known, data.described, data.entries) if l2 is None else l2,
        imputed=settings.imputed,
        left_weights=_local_weights("left_weights", settings.left_weights, shards.left),
        right_weights=_local_weights("right_weights", right_weights(settings, data), shards.right),
        embedding_l2=mu, frequency_power=settings.frequency_power, memory_budget=settings.memory_budget,
        precision=settings.precision, pair_precision=settings.pair_precision,
        pair_weights=data.weights, shards=None if shards.single else shards,
    )  # fmt: skip


def right_weights(settings: ModelSettings, data: FitData) -> Any:
    """b as it was given, or by name as the data say."""
    auto = isinstance(settings.right_weights, str) and settings.right_weights == "auto"
    return auto_weights(data) if auto else settings.right_weights


def auto_weights(data: FitData) -> str:
    """What ``right_weights="auto"`` stands for."""
    return defaults.default_right_weights(data.shape, data.observed, data.seen, data.described)


def iterations(settings: ModelSettings, data: FitData) -> int:
    """How many at most."""
    if settings.max_iterations is not None:
        return settings.max_iterations
    return defaults.default_iterations(data.seen, data.normalize, _is_swept(settings, data))


def _is_swept(settings: ModelSettings, data: FitData) -> bool:
    """Whether the default optimizer sweeps over the rows of two tables (optim/sweeps.py)."""
    if settings.optimizer != "newton-kron" or (settings.optimizer_options or {}).get("sweeps") == 0:
        return False
    alone = data.device.type == "cpu" and data.shards.single and settings.memory_budget is None
    return alone and _is_linear_over_ids(settings, data)


def _is_linear_over_ids(settings: ModelSettings, data: FitData) -> bool:
    return settings.towers is None and data.hidden == ((), ()) and data.seen == defaults.IDS


def make_towers(
    settings: ModelSettings, data: FitData, problem: Problem, previous: FittedModel | None = None
) -> Towers:
    """Towers on the device of the data, freshly drawn, with a previous model's weights for all that it knows."""
    if settings.towers is not None:
        towers = settings.towers(problem)
    else:
        towers = mlp_towers(problem, data.hidden, data.dim, data.activation, settings.seed, normalize=data.normalize)
    if previous is not None:
        carry_over(previous, towers, data)
    return towers.to(data.device)


def make_validation(
    settings: ModelSettings, data: FitData, unseen: Unseen | None = None
) -> RankingValidator | UnseenValidator | None:
    """The metric of a point on held-out pairs, or on entities that were held out of the data; None without them."""
    if unseen is not None:
        to_maximise(settings.metric)
        return unseen.validator(settings.metric, data)
    return None if data.held_out is None else RankingValidator(settings.metric, data.held_out, data.matrix)


@dataclass(frozen=True)
class RankingValidator:
    """The metric of the held-out pairs, training pairs left out of the ranking; computed where the towers are.

    Over several processes both are those of local left rows, and the metric is that of all.
    """

    metric: str
    held_out: sp.csr_matrix
    train: sp.csr_matrix

    def __call__(self, point: Point) -> float:
        """The metric at a point."""
        return float(self._scores(point)[self.metric])

    def without(self, point: Point, seed: int) -> list[float]:
        """The metric without each part of the users, dealt with a seed; empty for one that is of no single users."""
        values = self._scores(point).per_user.get(self.metric)
        return [] if values is None else means_without(values, deal(len(values), seed))

    def _scores(self, point: Point) -> Scores:
        processes = point.evaluation.constants.shards.group
        return evaluate_embeddings(
            point.P, point.right_rows, self.held_out, train=self.train, metrics=(self.metric,), processes=processes
        )

    def marks(self, shards: Shards) -> dict[str, str]:
        """What is measured, and on what, for a checkpoint's fingerprint."""
        digests = (
            sparse_digest(x.indptr, x.indices, x.data, shards.left.first, x.shape[1]).text(shards.group)
            for x in (self.held_out, self.train)
        )
        return {"metric": self.metric, "validation": "held out {}, left out {}".format(*digests)}


def _local_weights(name: str, weights: Any, rows: Rows) -> Any:
    """Weights of the local entities, cut from those of all; None and text are the same for all."""
    if weights is None or isinstance(weights, str) or rows.count == rows.total:
        return weights
    return rows.local_rows(name, check.weights(name, weights, rows.total))


def _refuse_non_finite(problem: Problem, point: Point, result: Result) -> None:
    """Refuse a model that is not finite, or that learned nothing because the objective was not."""
    stopped = result.reason is Reason.NON_FINITE and result.history[-1].iteration == 0
    bad = [name for name, rows in (("left", point.P), ("right", point.Q)) if not bool(rows.isfinite().all())]
    if problem.shards.group.totals(float(bool(bad)))[0] or stopped:
        found = result.message.split(" became")[0] if stopped else f"{' and '.join(bad) or 'other'} embeddings"
        dtype = str(point.Q.dtype).removeprefix("torch.")
        check.fail(
            "fit",
            f"NaN or infinite numbers: {found}",
            f"an objective that is finite in {dtype}: smaller labels, imputed, omega, l2, embedding_l2 or weights, "
            "features scaled to about 1, or a smaller step_size",
        )

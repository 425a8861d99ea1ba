"""The parts of a fit that follow from settings and data: the problem, the towers, iterations, validation, refinement.

Fits, selection, tuning and comparisons put them together in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import scipy.sparse as sp
from torch import Tensor

from gramtower._util import checks as check
from gramtower.distributed.shards import Rows, Shards
from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.mlp import mlp_towers
from gramtower.engine.towers.towers import Towers
from gramtower.metrics import Scores, evaluate_embeddings
from gramtower.metrics.definitions import to_maximise
from gramtower.metrics.tally import deal, means_without
from gramtower.model import defaults
from gramtower.model.fit_data import FitData
from gramtower.model.fitted import FittedModel
from gramtower.model.refinement import refine
from gramtower.model.settings import ModelSettings, given
from gramtower.model.unseen import Unseen, UnseenValidator
from gramtower.model.warm_start import carry_over
from gramtower.optim.solvers import as_solver
from gramtower.training.checkpoint import sparse_digest

_TINY = 50_000_000  # multiplications of an evaluation: about ten milliseconds


def make_problem(settings: ModelSettings, data: FitData) -> Problem:
    """What is minimised, ω and μ set by the data where they were left out."""
    settings = settings.with_changes()
    size, shards, known = (data.shape, data.observed), data.shards, data.seen
    omega, l2, mu = given(settings.omega), given(settings.l2), given(settings.embedding_l2)
    if mu is None:  # of towers of one's own the size is not known yet
        mu = defaults.default_embedding_l2(
            *size, data.dim if settings.towers is None else given(settings.dim) or 1, known
        )
    return Problem(
        data.matrix, *data.features, loss=settings.loss,
        omega=defaults.default_omega(*size, known) if omega is None else omega,
        l2=defaults.default_l2(*size, known, data.entries) if l2 is None else l2,
        imputed=imputed_label(settings),
        left_weights=_local_weights("left_weights", left_weights(settings), shards.left),
        right_weights=_local_weights("right_weights", right_weights(settings, data), shards.right),
        embedding_l2=mu, frequency_power=settings.frequency_power, memory_budget=settings.memory_budget,
        precision=settings.precision, pair_precision=settings.pair_precision,
        pair_weights=data.weights, shards=None if shards.single else shards,
    )  # fmt: skip


def imputed_label(settings: ModelSettings) -> float | str:
    """ỹ as it was given, or the default."""
    return defaults.IMPUTED if settings.imputed == "auto" else settings.imputed


def left_weights(settings: ModelSettings) -> Any:
    """a as it was given, or None."""
    return None if _is_auto(settings.left_weights) else settings.left_weights


def right_weights(settings: ModelSettings, data: FitData) -> Any:
    """b as it was given, or by name for the data."""
    return auto_weights(data) if _is_auto(settings.right_weights) else settings.right_weights


def _is_auto(weights: Any) -> bool:
    return isinstance(weights, str) and weights == "auto"


def auto_weights(data: FitData) -> str:
    """What ``right_weights="auto"`` stands for."""
    return defaults.default_right_weights(data.shape, data.observed, data.seen, data.described)


def _local_weights(name: str, weights: Any, rows: Rows) -> Any:
    """Weights of the local entities, cut from those of all; None and text are the same for all."""
    if weights is None or isinstance(weights, str) or rows.count == rows.total:
        return weights
    return rows.local_rows(name, check.weights(name, weights, rows.total))


def over_ids(settings: ModelSettings, data: FitData, dim: int) -> Problem:
    """The same pairs, ω and weights over ids, to fit the embeddings of single entities."""
    budget = settings.memory_budget
    if budget is not None:
        budget = max(1, check.memory_size("memory_budget", budget) - held_bytes(data, dim))
    changes = {"l2": 1.0, "embedding_l2": 0.0, "memory_budget": budget}
    problem = make_problem(settings.with_changes(**changes), replace(data, features=(None, None)))
    problem.graphs = False  # a few evaluations are over before recording them has paid
    return problem


def held_bytes(data: FitData, dim: int) -> int:
    """Bytes of all embeddings on a GPU while some are moved; on the host they are the model's own."""
    return 4 * sum(data.shape) * dim if data.device.type == "cuda" else 0


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


def iterations(settings: ModelSettings, data: FitData, problem: Problem, towers: Towers) -> int:
    """The most iterations: those given, or the optimizer's default for the problem, or that of the data."""
    asked = given(settings.max_iterations)
    if asked is not None:
        return asked
    solver = as_solver(settings.optimizer, dict(settings.solver_options()))
    found = solver.default_iterations(problem, towers)
    return defaults.default_iterations(data.seen) if found is None else found


def _is_linear_over_ids(settings: ModelSettings, data: FitData) -> bool:
    return settings.towers is None and data.hidden == ((), ()) and data.seen == defaults.IDS


def is_tiny(settings: ModelSettings, data: FitData) -> bool:
    """Whether an evaluation of linear towers over ids takes a CPU so little that it is not worth a second thread."""
    if not _is_linear_over_ids(settings, data) or data.device.type != "cpu":
        return False
    return bool(sum(data.shape) * data.dim**2 + 4 * data.observed * data.dim <= _TINY)


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
        return float(self.scores(point, (self.metric,))[self.metric])

    def without(self, point: Point, seed: int) -> list[float]:
        """The metric without each part of the users, drawn with a seed; empty for one that is not a mean over users."""
        values = self.scores(point, (self.metric,)).per_user.get(self.metric)
        return [] if values is None else means_without(values, deal(len(values), seed))

    def scores(self, point: Point, metrics: Sequence[str], known: tuple[Tensor, Tensor] | None = None) -> Scores:
        """Several metrics at a point, of one ranking; with other embeddings of known entities if they are given."""
        P, Q = known or (point.P, point.right_rows)
        processes = point.evaluation.constants.shards.group
        return evaluate_embeddings(P, Q, self.held_out, train=self.train, metrics=metrics, processes=processes)

    def fingerprint(self, shards: Shards) -> dict[str, str]:
        """What is measured, and on what, for a checkpoint's fingerprint."""
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

"""`gramtower.TwoTower`: pairs in, recommendations out.

scikit-learn conventions: the constructor keeps its arguments, `fit` learns, names that `fit` makes end in an
underscore, `get_params`/`set_params` and `sklearn.base.clone` work. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramtower import _checks as check
from gramtower.distributed.agreement import agree
from gramtower.distributed.group import current_group
from gramtower.distributed.shards import row_work
from gramtower.engine.kernels.losses import Loss
from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.mlp import check_hidden, mlp_towers
from gramtower.engine.towers.towers import Towers
from gramtower.estimator import defaults
from gramtower.estimator.fitted import Fitted
from gramtower.estimator.given import Given, own_weights, take_up
from gramtower.estimator.inputs import ids_alone
from gramtower.estimator.matrices import pattern_of
from gramtower.estimator.side import Side
from gramtower.estimator.validation import RankingValidator
from gramtower.estimator.warm_start import carry_over
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record, Result

if TYPE_CHECKING:
    from gramtower.tuning.report import Search


class TwoTower(Fitted):
    """Two networks whose dot product says how well a left and a right entity go together, learned from all pairs.

    Args:
        dim: k, the size of the embeddings; None picks it from the size of the data (see docs/choosing.md).
        hidden: widths of the hidden layers of each tower; ``()`` for linear factors; None for linear factors where ids
            are all that is known, hidden layers where there are features.
        activation: of the hidden layers.
        loss: on observed pairs.
        omega: ω, the weight of unobserved pairs; None scales it with the data (see docs/choosing.md).
        l2: λ.
        embedding_l2: μ, the penalty on embeddings that grows with how often an entity is seen; None scales it with the
            data.
        frequency_power: ν, how fast it grows.
        imputed: the label of unobserved pairs.
        left_weights: a, how much a left entity's unobserved pairs count: text such as "degree^0.5", an array, or None.
        right_weights: b, likewise for right entities; by default those of frequent ones count a little more.
        optimizer: see docs/choosing.md.
        optimizer_options: the method's own constants.
        max_iterations: stops after this many.
        time_limit: seconds of training after which it stops, or None.
        patience: with validation data, stops when the metric has not improved for this many iterations.
        metric: the validation metric.
        device: "auto", "cpu" or "cuda".
        seed: for the initial weights and for methods that draw.
        towers: a function from a Problem to Towers of your own, instead of the multi-layer ones.
        memory_budget: bytes that training may take beyond the data and the towers, such as "2GB"; see docs/choosing.md.
        precision: of matrix products on a GPU, "tf32" or "float32"; both end at the same objective
            (benchmarks/bench_gpu.py --same-objective).
        pair_precision: of embeddings gathered for each pair on a GPU, "float32" or "bfloat16".
        verbose: one line an iteration on standard error.
    """

    def __init__(
        self,
        dim: int | None = None,
        hidden: Sequence[int] | None = None,
        activation: str = "elu",
        loss: str | Loss = "logistic",
        omega: float | None = None,
        l2: float = defaults.L2,
        embedding_l2: float | None = None,
        frequency_power: float = 1.0,
        imputed: float = defaults.IMPUTED,
        left_weights: Any = None,
        right_weights: Any = defaults.RIGHT_WEIGHTS,
        optimizer: str = "newton-kron",
        optimizer_options: dict[str, Any] | None = None,
        max_iterations: int = 20,
        time_limit: float | None = None,
        patience: int = 5,
        metric: str = "map@5",
        device: str = "auto",
        seed: int = 0,
        towers: Callable[[Problem], Towers] | None = None,
        memory_budget: int | str | None = None,
        precision: str = "tf32",
        pair_precision: str = "float32",
        verbose: bool = False,
    ) -> None:
        self.dim, self.hidden, self.activation, self.loss = dim, hidden, activation, loss
        self.omega, self.l2, self.embedding_l2, self.frequency_power = omega, l2, embedding_l2, frequency_power
        self.imputed, self.left_weights, self.right_weights = imputed, left_weights, right_weights
        self.optimizer, self.optimizer_options = optimizer, optimizer_options
        self.max_iterations, self.time_limit, self.patience, self.metric = max_iterations, time_limit, patience, metric
        self.device, self.seed, self.towers, self.memory_budget = device, seed, towers, memory_budget
        self.precision, self.pair_precision, self.verbose = precision, pair_precision, verbose

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            name: getattr(self, name) for name in inspect.signature(type(self).__init__).parameters if name != "self"
        }

    def set_params(self, **params: Any) -> TwoTower:
        """Change constructor arguments by name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                check.fail("parameter", repr(name), "one of " + ", ".join(known))
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        given = inspect.signature(type(self).__init__).parameters
        changed = [
            f"{k}={v!r}"
            for k, v in self.get_params().items()
            if v is not given[k].default and (type(v) is not type(given[k].default) or v != given[k].default)
        ]
        return f"TwoTower({', '.join(changed)})"

    def fit(
        self,
        pairs: Any,
        left_features: Any = None,
        right_features: Any = None,
        validation: Any = None,
        warm_start: bool = False,
        checkpoint: str | Path | None = None,
        history: str | Path | None = None,
    ) -> TwoTower:
        """Learn from observed pairs.

        Args:
            pairs: :class:`~gramtower.Interactions`, or a scipy.sparse matrix whose rows and columns are then the ids.
                Inside an initialised torch.distributed process group all processes learn one model: every one gives
                the same pairs and keeps its share, or gives its :func:`~gramtower.data.partition.read_part`.
            left_features: what the left tower sees: None or "id" for ids alone, one row for each entity (scipy.sparse,
                numpy or torch), a :class:`~gramtower.data.tables.FeatureTable` joined by id, "history" for the entity's
                own observed right entities, or a list of these side by side, such as ``["id", "history", table]``.
            right_features: the same for the right tower, without "history".
            validation: held-out pairs (same ids) to stop early on.
            warm_start: start from this model's towers; entities it knows keep their weights, new ones are added.
            checkpoint: path of a checkpoint that an interrupted fit continues from.
            history: path of a JSONL file with one record an iteration.
        """
        options = {} if self.optimizer_options is None else self.optimizer_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            check.fail("optimizer_options", repr(options), "names and values")
        device = defaults.pick_device(self.device)
        problem, towers, given = self.prepare(pairs, left_features, right_features, validation, warm_start)
        towers = towers.to(device)
        result = minimize(
            problem, towers, self.optimizer, self.max_iterations, self.time_limit, self.seed,
            validation=self.make_validation(given), patience=None if given.test is None else self.patience,
            checkpoint=checkpoint, history=history, verbose=self.verbose, **options,
        )  # fmt: skip
        self._finish(problem, towers, given, result)
        return self

    def prepare(
        self,
        pairs: Any,
        left_features: Any = None,
        right_features: Any = None,
        validation: Any = None,
        warm_start: bool = False,
    ) -> tuple[Problem, Towers, Given]:
        """What ``fit`` minimises, over fresh towers or this model's, and its arguments as this process holds them."""
        given = self.take_up(pairs, left_features, right_features, validation)
        processes = given.shards.group.size
        if warm_start and processes > 1:
            check.fail("warm_start", f"True in {processes} processes", "False, or a fit in one process")
        if warm_start:
            self._check_fitted()  # its towers stay as large as they are, whatever the default for more data
            given.hidden, given.dim = self.hidden_, self.dim_
        problem = self.make_problem(given)
        towers = self.make_towers(problem, given)
        if warm_start:
            carry_over(self.towers_, (self.left_, self.right_), towers, given.inputs, given.ids)
        return problem, towers, given

    def tune(
        self,
        pairs: Any,
        *,
        trials: int = 50,
        time_limit: float | None = None,
        metric: str = "recall@20",
        validation: Any = 0.1,
        space: Mapping[str, Any] | None = None,
        storage: str | Path | None = None,
        seed: int = 0,
        left_features: Any = None,
        right_features: Any = None,
        refit: bool = True,
    ) -> Search:
        """Choose settings by how well they rank a validation part of the pairs, then fit all pairs with them.

        Searched is what this model was not given explicitly, or what ``space`` names. Trials stop early, are given up
        when their curve cannot reach the best, and start from a finished neighbour's solution where there is one. The
        same seed gives the same search. Needs optuna: ``pip install "gramtower[tune]"``.

        Args:
            pairs: as for ``fit``.
            trials: how many settings to try; the first are this model's own.
            time_limit: seconds for the whole search, without the last fit.
            metric: what to maximise.
            validation: the share of each user's pairs to rank, drawn with ``seed``, or pairs held out by yourself.
            space: names and what to search for each; see gramtower/tuning/space.py and docs/tuning.md.
            storage: a file that keeps the log, so that a search can be stopped and continued: SQLite if it ends in .db,
                otherwise a journal.
            seed: of the split and of the proposals.
            left_features: as for ``fit``.
            right_features: as for ``fit``.
            refit: whether this model takes the settings that were found and is fitted on all pairs; not after Ctrl-C,
                which ends a search with what it has found.

        Returns:
            The search: trials, importances, and ``config()``, a config file for ``gramtower fit``.
        """
        from gramtower.tuning.search import tune

        if (processes := current_group().size) > 1:
            check.fail("tune", f"{processes} processes", "one: trials do not run over several")
        return tune(
            self, pairs, trials=trials, time_limit=time_limit, metric=metric, validation=validation, space=space,
            storage=storage, seed=seed, left_features=left_features, right_features=right_features, refit=refit,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the model to one file with checksums; nothing is pickled, an old file stays whole if writing fails."""
        from gramtower.estimator.model_file import write_model  # which makes models of this class

        self._check_fitted()
        write_model(self, check.path("path", path))

    def take_up(
        self, pairs: Any, left_features: Any = None, right_features: Any = None, validation: Any = None
    ) -> Given:
        """The arguments of :meth:`fit` as this process holds them, and the sizes of the towers for so much data."""
        group = current_group()
        with group.together():
            device = defaults.pick_device(self.device)
            hidden = defaults.default_hidden(not (ids_alone(left_features) and ids_alone(right_features)))
            if self.hidden is not None and self.towers is None:
                hidden = check_hidden(self.hidden)
            given_dim = None if self.dim is None else check.count("dim", self.dim)
        agree(group, {"dim": given_dim, "hidden": hidden})
        room = defaults.room_for_training(device, group, self.memory_budget)

        def dim(shape: tuple[int, int]) -> int:
            return given_dim or defaults.default_dim(shape, hidden, device, room, group.size)

        given = take_up(
            group, pairs, left_features, right_features, validation, lambda shape: row_work(dim(shape), hidden)
        )
        given.hidden, given.dim = hidden, dim(given.shape)
        return given

    def make_problem(self, given: Given) -> Problem:
        """What :meth:`fit` minimises, ω and μ set by the data where they were left out."""
        size, shards, mu = (given.shape, given.pairs), given.shards, self.embedding_l2
        if mu is None:  # of towers of one's own the size is not known yet
            mu = defaults.default_embedding_l2(*size, given.dim if self.towers is None else self.dim or 1)
        return Problem(
            given.matrix, *given.features, loss=self.loss,
            omega=defaults.default_omega(*size) if self.omega is None else self.omega,
            l2=self.l2, imputed=self.imputed,
            left_weights=own_weights("left_weights", self.left_weights, shards.left),
            right_weights=own_weights("right_weights", self.right_weights, shards.right),
            embedding_l2=mu, frequency_power=self.frequency_power, memory_budget=self.memory_budget,
            precision=self.precision, pair_precision=self.pair_precision,
            pair_weights=given.weights, shards=None if shards.single else shards,
        )  # fmt: skip

    def make_towers(self, problem: Problem, given: Given) -> Towers:
        """Fresh towers for a problem, as the constructor's arguments say."""
        if self.towers is not None:
            return self.towers(problem)
        return mlp_towers(problem, given.hidden, given.dim, self.activation, self.seed)

    def _finish(self, problem: Problem, towers: Towers, given: Given, result: Result) -> None:
        point = problem.at(towers)
        _refuse_non_finite(problem, point, result)
        self.left_ = Side("left", given.ids[0], point.P.cpu(), given.inputs[0])
        self.right_ = Side("right", given.ids[1], point.right_rows.cpu(), given.inputs[1])
        self.seen_ = pattern_of(given.matrix)
        self.towers_, self.omega_, self.shards_ = towers, problem.omega, problem.shards
        self.dim_, self.hidden_ = point.Q.shape[1], () if self.towers is not None else given.hidden
        self.history_: list[Record] = result.history
        self.reason_, self.message_, self.best_metric_ = result.reason, result.message, result.best_metric

    def make_validation(self, given: Given) -> Callable[[Point], float] | None:
        """The metric of a point on held-out pairs, None without them."""
        return None if given.test is None else RankingValidator(self.metric, given.test, given.matrix)


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

"""`gramtower.TwoTower`: pairs in, recommendations out.

scikit-learn conventions: the constructor keeps its arguments, `fit` learns, names that `fit` makes end in an
underscore, `get_params`/`set_params` and `sklearn.base.clone` work. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.packing import pack_ids
from gramtower.distributed.group import SINGLE, current_group
from gramtower.distributed.shards import row_work
from gramtower.estimator import defaults, model_file, sharded_model
from gramtower.estimator.given import Given, own_weights, take_up
from gramtower.estimator.inputs import ids_alone
from gramtower.estimator.matrices import aligned, matrix_and_ids
from gramtower.estimator.side import Side, history_matrix, normalised
from gramtower.estimator.validation import ranking_validator
from gramtower.estimator.warm_start import carry_over
from gramtower.metrics import evaluate_embeddings
from gramtower.model.towers import Towers, mlp_towers
from gramtower.objective.evaluation import Point
from gramtower.objective.losses import Loss
from gramtower.objective.problem import Problem
from gramtower.retrieval.topk import top_k
from gramtower.training.loop import minimize
from gramtower.training.result import Record, Result

if TYPE_CHECKING:
    from gramtower.tuning.report import Search

METRICS = ("map@5", "recall@20", "ndcg@20")


class TwoTower:
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
        right_weights: b, likewise for right entities.
        optimizer: see docs/choosing.md.
        optimizer_options: the method's own constants.
        max_iterations: stops after this many.
        time_limit: seconds of training after which it stops, or None.
        patience: with validation data, stops when the metric has not improved for this many iterations.
        metric: the validation metric.
        device: "auto", "cpu" or "cuda".
        seed: for the initial weights and for methods that draw.
        towers: a function from a Problem to Towers of your own, instead of the multi-layer ones.
        memory_budget: bytes that an evaluation may keep, such as "2GB".
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
        right_weights: Any = None,
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
            if v is not given[k].default and (isinstance(v, np.ndarray) or v != given[k].default)
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
        device = defaults.pick_device(self.device)
        problem, towers, given = self.prepare(pairs, left_features, right_features, validation, warm_start)
        towers = Towers(towers.left.to(device), towers.right.to(device))
        result = minimize(
            problem, towers, self.optimizer, self.max_iterations, self.time_limit, self.seed,
            validation=self.make_validation(given), patience=None if given.test is None else self.patience,
            checkpoint=checkpoint, history=history, verbose=self.verbose, **(self.optimizer_options or {}),
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
        problem = self.make_problem(given)
        if not warm_start:
            return problem, self.make_towers(problem), given
        self._check_fitted()  # its towers stay as large as they are, whatever the default for more data
        same = TwoTower(**(self.get_params() | {"dim": self.dim_, "hidden": self.hidden_}))
        towers = same.make_towers(problem)
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

    def recommend(
        self,
        left: Any = None,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        allow: Sequence[Any] | None = None,
        deny: Sequence[Any] | None = None,
        left_features: Any = None,
        histories: Any = None,
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The k best right entities for each left one.

        Args:
            left: ids of left entities; None with ``left_features``, ``histories`` or both for entities not seen in
                training.
            k: how many.
            exclude_seen: leave out right entities observed with the left one in training (or listed in its history).
            allow: only these right ids.
            deny: never these right ids.
            left_features: features of new entities: rows of a matrix, or for a model fitted with a FeatureTable a frame
                or file with the same columns.
            histories: for models whose left features have a "history": a list of right ids for each new entity, or a
                scipy.sparse matrix with one column for each right entity.

        Returns:
            Ids and scores, one row for each left entity. Places without an answer hold None (−1 for numbers) and −inf.
        """
        self._check_fitted()
        check.count("k", k)
        new = left_features is not None or histories is not None
        if (left is None) != new:
            given = "None" if left is None else "ids, and features or histories"
            check.fail("left", given, "ids of left entities; or, for new ones, left_features, histories or both")
        if new:
            seen = None if histories is None else history_matrix(self.right_, histories)
            P = self._embed_new("left", left_features, seen)
        else:
            rows = self.left_.rows(left)
            P, seen = self.left_.embeddings[torch.from_numpy(rows)], self.seen_[rows]
        found, scores = top_k(
            P, self.right_.embeddings, min(k, len(self.right_)),
            exclude=seen if exclude_seen else None,
            allow=None if allow is None else self.right_.rows(allow),
            deny=None if deny is None else self.right_.rows(deny),
        )  # fmt: skip
        return self.right_.names(found), scores

    def similar(self, ids: Any, side: str = "right", k: int = 10) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The k entities of the same side whose embeddings point most alike (cosine), the entity itself left out."""
        self._check_fitted()
        this = self._side(side)
        rows = this.rows(ids)
        unit = normalised(this.embeddings)
        own = sp.csr_matrix((np.ones(len(rows)), (np.arange(len(rows)), rows)), shape=(len(rows), len(this)))
        found, scores = top_k(unit[torch.from_numpy(rows)], unit, min(check.count("k", k), len(this)), exclude=own)
        return this.names(found), scores

    def score(self, left: Any, right: Any) -> NDArray[np.float32]:
        """p_iᵀq_j for pairs of ids, element by element."""
        self._check_fitted()
        rows, columns = self.left_.rows(left), self.right_.rows(right)
        if len(rows) != len(columns):
            check.fail("left, right", f"{len(rows)} and {len(columns)} ids", "as many left as right ids")
        P, Q = self.left_.embeddings[torch.from_numpy(rows)], self.right_.embeddings[torch.from_numpy(columns)]
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

        Features and histories of new entities are those of :meth:`recommend`.
        """
        self._check_fitted()
        if left_features is not None or histories is not None:
            history = None if histories is None else history_matrix(self.right_, histories)
            return np.asarray(self._embed_new("left", left_features, history).numpy())
        if right_features is not None:
            return np.asarray(self._embed_new("right", right_features).numpy())
        this = self._side(side)
        rows = slice(None) if ids is None else torch.from_numpy(this.rows(ids))
        return np.asarray(this.embeddings[rows].numpy())

    def evaluate(
        self,
        test: Any,
        metrics: Sequence[str] = METRICS,
        *,
        exclude_seen: bool = True,
        by: str | None = None,
        left_features: Any = None,
        histories: Any = None,
    ) -> dict[str, float]:
        """Ranking metrics on held-out pairs; see docs/metrics.md for the definitions.

        With ``left_features``, ``histories`` or both, the left entities of ``test`` are taken as new ones, described as
        for :meth:`recommend`, one row for each row of ``test``; histories may be Interactions, such as those of
        :func:`gramtower.data.splits.held_out_users`, and are what counts as seen.
        """
        self._check_fitted()
        P, seen, processes = self.left_.embeddings, self.seen_, self.shards_.group
        if left_features is not None or histories is not None:
            if by is not None:
                check.fail("by", repr(by), "None for new entities, whose training pairs there are none of")
            matrix, (rows, _) = matrix_and_ids(test)
            if isinstance(histories, Interactions):
                histories = aligned(
                    "histories", histories, (rows, self.right_.ids), (matrix.shape[0], len(self.right_))
                )
            seen = None if histories is None else history_matrix(self.right_, histories)
            P = self._embed_new("left", left_features, seen)
            truth = aligned("test", test, (rows, self.right_.ids), (len(P), len(self.right_)))
            processes = SINGLE  # every process knows all new entities
        else:
            truth = self._align(test)
        return evaluate_embeddings(
            P, self.right_.embeddings, truth,
            train=seen, metrics=tuple(metrics), exclude_train=exclude_seen, by=by, processes=processes,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the model to one file; nothing is pickled, and an old file stays whole if writing fails."""
        self._check_fitted()
        arrays = {
            name: torch.from_numpy(check.as_float_array(name, value))
            for name in ("left_weights", "right_weights")
            if (value := getattr(self, name)) is not None and not isinstance(value, str)
        }
        params = {k: v for k, v in self.get_params().items() if k not in ("towers", "loss", *arrays)}
        params["loss"] = self.loss if isinstance(self.loss, str) else self.loss.name
        header = {
            "params": {k: list(v) if isinstance(v, tuple) else v for k, v in params.items()},
            "own_towers": self.towers is not None,
            "dim": self.dim_,
            "hidden": list(self.hidden_),
            "reason": self.reason_.name,
            "message": self.message_,
            "omega": self.omega_,
            "best_metric": self.best_metric_,
            "history": [asdict(record) for record in self.history_],
        }
        tensors = arrays | {
            "parameters": self.towers_.parameters().vector.cpu(),
            "left": self.left_.embeddings,
            "right": self.right_.embeddings,
            "seen_offsets": torch.from_numpy(self.seen_.indptr.astype(np.int64)),
            "seen_columns": torch.from_numpy(self.seen_.indices.astype(np.int32)),
        }
        for side in (self.left_, self.right_):
            tensors |= {f"{side.name}_{k}": t for k, t in pack_ids(side.ids).items()}
            tensors[f"{side.name}_inputs"] = model_file.pack_text(side.inputs.to_json())
        if self.shards_.single:
            model_file.write_model(Path(path), header, tensors)
        else:
            sharded_model.write_shards(Path(path), header, tensors, self.towers_.parameters(), self.shards_)

    def take_up(
        self, pairs: Any, left_features: Any = None, right_features: Any = None, validation: Any = None
    ) -> Given:
        """The arguments of :meth:`fit` as this process holds them: everything, or its share among several."""

        def work(shape: tuple[int, int]) -> float:
            hidden, dim = self._widths(shape, not (ids_alone(left_features) and ids_alone(right_features)))
            return row_work(dim, hidden)

        return take_up(current_group(), pairs, left_features, right_features, validation, work)

    def make_problem(self, given: Given) -> Problem:
        """What :meth:`fit` minimises, ω and μ set by the data where they were left out."""
        size, shards = (given.shape, given.pairs), given.shards
        return Problem(
            given.matrix, *given.features, loss=self.loss,
            omega=defaults.default_omega(*size) if self.omega is None else self.omega,
            l2=self.l2, imputed=self.imputed,
            left_weights=own_weights("left_weights", self.left_weights, shards.left),
            right_weights=own_weights("right_weights", self.right_weights, shards.right),
            embedding_l2=defaults.default_embedding_l2(*size) if self.embedding_l2 is None else self.embedding_l2,
            frequency_power=self.frequency_power, memory_budget=self.memory_budget,
            precision=self.precision, pair_precision=self.pair_precision,
            pair_weights=given.weights, shards=None if shards.single else shards,
        )  # fmt: skip

    def make_towers(self, problem: Problem) -> Towers:
        """Fresh towers for a problem, as the constructor's arguments say."""
        if self.towers is not None:
            return self.towers(problem)
        hidden, dim = self.layers(problem)
        return mlp_towers(problem, hidden, dim, self.activation, self.seed)

    def layers(self, problem: Problem) -> tuple[Sequence[int], int]:
        """Widths of hidden layers and of the embeddings: as given, or by the data."""
        return self._widths(problem.shape, problem.left.kind != "ids" or problem.right.kind != "ids")

    def _widths(self, shape: tuple[int, int], with_features: bool) -> tuple[Sequence[int], int]:
        hidden = defaults.default_hidden(with_features) if self.hidden is None else self.hidden
        dim = defaults.default_dim(shape, defaults.pick_device(self.device)) if self.dim is None else self.dim
        return hidden, dim

    def _finish(self, problem: Problem, towers: Towers, given: Given, result: Result) -> None:
        point = problem.at(towers)
        self.left_ = Side("left", given.ids[0], point.P.cpu(), given.inputs[0])
        self.right_ = Side("right", given.ids[1], point.right_rows.cpu(), given.inputs[1])
        self.seen_, self.towers_, self.omega_, self.shards_ = given.matrix, towers, problem.omega, problem.shards
        self.dim_, self.hidden_ = point.Q.shape[1], () if self.towers is not None else tuple(self.layers(problem)[0])
        self.history_: list[Record] = result.history
        self.reason_, self.message_, self.best_metric_ = result.reason, result.message, result.best_metric

    def make_validation(self, given: Given) -> Callable[[Point], float] | None:
        """The metric of a point on held-out pairs, None without them."""
        return None if given.test is None else ranking_validator(self.metric, given.test, given.matrix)

    def _embed_new(self, name: str, features: Any, history: sp.csr_matrix | None = None) -> Tensor:
        """New entities through their tower."""
        side = self._side(name)
        given = side.inputs.new(name, features, history)
        if self.towers_ is None:
            check.fail(
                "model", "loaded without its own towers", "gramtower.load(path, towers=...) to embed new entities"
            )
        rows = given.shape[0]
        empty = sp.csr_matrix((rows, 1) if name == "left" else (1, rows), dtype=np.float32)
        problem = Problem(empty, **{name: given})
        return self.towers_.embed(name, problem.left if name == "left" else problem.right).cpu()

    def _align(self, test: Any) -> sp.csr_matrix:
        """Held-out pairs of the left entities that this process knows."""
        rows, ids = self.shards_.left, (self.left_.ids, self.right_.ids)
        if ids[0] is not None or rows.count == rows.total:
            return aligned("test", test, ids, self.seen_.shape)
        return aligned("test", test, ids, (rows.total, self.shards_.right.total))[rows.first : rows.stop]

    def _side(self, side: str) -> Side:
        return self.left_ if check.choice("side", side, ("left", "right")) == "left" else self.right_

    def _check_fitted(self) -> None:
        if not hasattr(self, "left_"):
            raise ValueError("model: not fitted yet; call fit first")

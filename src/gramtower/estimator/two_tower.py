"""`gramtower.TwoTower`: pairs in, recommendations out.

scikit-learn conventions: the constructor keeps its arguments, `fit` learns, names that `fit` makes end in an
underscore, `get_params`/`set_params` and `sklearn.base.clone` work. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.packing import pack_ids
from gramtower.distributed.group import current_group
from gramtower.distributed.shards import row_work
from gramtower.estimator import defaults, model_file, sharded_model
from gramtower.estimator.given import Given, take_up
from gramtower.estimator.matrices import aligned, history_features, row_map
from gramtower.estimator.side import Side, normalised
from gramtower.metrics import evaluate_embeddings
from gramtower.model.towers import Towers, mlp_towers
from gramtower.objective.evaluation import Point
from gramtower.objective.losses import Loss
from gramtower.objective.problem import Problem
from gramtower.retrieval.topk import top_k
from gramtower.training.loop import minimize
from gramtower.training.result import Record, Result

METRICS = ("map@5", "recall@20", "ndcg@20")


class TwoTower:
    """Two networks whose dot product says how well a left and a right entity go together, learned from all pairs.

    Args:
        dim: k, the size of the embeddings.
        hidden: widths of the hidden layers of each tower; ``()`` for linear factors.
        activation: of the hidden layers.
        loss: on observed pairs.
        omega: ω, the weight of unobserved pairs; None scales it with the data (see docs/choosing.md).
        l2: λ.
        embedding_l2: μ, the penalty on embeddings that grows with how often an entity is seen; None scales it with the
            data.
        frequency_power: ν, how fast it grows.
        imputed: the label of unobserved pairs.
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
        verbose: one line an iteration on standard error.
    """

    def __init__(
        self,
        dim: int = 128,
        hidden: Sequence[int] = (256, 256),
        activation: str = "elu",
        loss: str | Loss = "logistic",
        omega: float | None = None,
        l2: float = defaults.L2,
        embedding_l2: float | None = None,
        frequency_power: float = 1.0,
        imputed: float = -1.0,
        optimizer: str = "newton-kron",
        optimizer_options: dict[str, Any] | None = None,
        max_iterations: int = 30,
        time_limit: float | None = None,
        patience: int = 5,
        metric: str = "map@5",
        device: str = "auto",
        seed: int = 0,
        towers: Callable[[Problem], Towers] | None = None,
        memory_budget: int | str | None = None,
        verbose: bool = False,
    ) -> None:
        self.dim, self.hidden, self.activation, self.loss = dim, hidden, activation, loss
        self.omega, self.l2, self.embedding_l2, self.frequency_power = omega, l2, embedding_l2, frequency_power
        self.imputed, self.optimizer, self.optimizer_options = imputed, optimizer, optimizer_options
        self.max_iterations, self.time_limit, self.patience, self.metric = max_iterations, time_limit, patience, metric
        self.device, self.seed, self.towers, self.memory_budget = device, seed, towers, memory_budget
        self.verbose = verbose

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
            f"{k}={v!r}" for k, v in self.get_params().items() if v is not given[k].default and v != given[k].default
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
            left_features: one row for each left entity (scipy.sparse, numpy or torch), a
                :class:`~gramtower.data.tables.FeatureTable` joined by id, "history" for the entity's own observed right
                entities, or None for ids alone.
            right_features: one row for each right entity, a FeatureTable, or None.
            validation: held-out pairs (same ids) to stop early on.
            warm_start: start from this model's towers; entities it knows keep their weights, new ones are added.
            checkpoint: path of a checkpoint that an interrupted fit continues from.
            history: path of a JSONL file with one record an iteration.
        """
        group, device = current_group(), defaults.pick_device(self.device)
        work = 1.0 if group.size == 1 else row_work(self.dim, self.hidden)
        given = take_up(group, pairs, left_features, right_features, validation, work)
        size = (given.shape, given.pairs)
        problem = Problem(
            given.matrix, *given.features, loss=self.loss,
            omega=defaults.default_omega(*size) if self.omega is None else self.omega,
            l2=self.l2, imputed=self.imputed,
            embedding_l2=defaults.default_embedding_l2(*size) if self.embedding_l2 is None else self.embedding_l2,
            frequency_power=self.frequency_power, memory_budget=self.memory_budget,
            pair_weights=given.weights, shards=None if group.size == 1 else given.shards,
        )  # fmt: skip
        towers = self.make_towers(problem)
        if warm_start and group.size > 1:
            check.fail("warm_start", f"True in {group.size} processes", "False, or a fit in one process")
        if warm_start:
            self._carry_over(towers, given.ids, problem)
        towers.left.to(device)
        towers.right.to(device)
        towers = Towers(towers.left, towers.right)
        result = minimize(
            problem, towers, self.optimizer, self.max_iterations, self.time_limit, self.seed,
            validation=self._validator(given), patience=None if given.test is None else self.patience,
            checkpoint=checkpoint, history=history, verbose=self.verbose, **(self.optimizer_options or {}),
        )  # fmt: skip
        self._finish(problem, towers, given, result)
        return self

    def recommend(
        self,
        left: Any = None,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        allow: Sequence[Any] | None = None,
        deny: Sequence[Any] | None = None,
        left_features: Any = None,
        histories: Sequence[Sequence[Any]] | None = None,
    ) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The k best right entities for each left one.

        Args:
            left: ids of left entities; None with ``left_features`` or ``histories`` for entities not seen in training.
            k: how many.
            exclude_seen: leave out right entities observed with the left one in training (or listed in its history).
            allow: only these right ids.
            deny: never these right ids.
            left_features: rows of features of new entities.
            histories: for models fitted with ``left_features="history"``: lists of right ids of new entities.

        Returns:
            Ids and scores, one row for each left entity. Places without an answer hold None (−1 for numbers) and −inf.
        """
        self._check_fitted()
        check.count("k", k)
        rows: NDArray[np.int64] | None = None
        if histories is not None:
            if self.left_.kind != "history":
                check.fail("histories", "lists of ids", 'a model fitted with left_features="history"')
            matrix = self._history_matrix(histories)
            P, seen = self._embed_rows("left", history_features(matrix)), matrix
        elif left_features is not None:
            P, seen = self._embed_rows("left", left_features), None
        elif left is not None:
            rows = self.left_.rows(left)
            P, seen = self.left_.embeddings[torch.from_numpy(rows)], self.seen_[rows]
        else:
            check.fail("left", "None", "ids of left entities, left_features or histories")
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
        self, ids: Any = None, side: str = "left", *, left_features: Any = None, right_features: Any = None
    ) -> NDArray[np.float32]:
        """Embeddings of entities by id, or of new entities by their features; all of a side when nothing is given."""
        self._check_fitted()
        for name, features in (("left", left_features), ("right", right_features)):
            if features is not None:
                return np.asarray(self._embed_rows(name, features).numpy())
        this = self._side(side)
        rows = slice(None) if ids is None else torch.from_numpy(this.rows(ids))
        return np.asarray(this.embeddings[rows].numpy())

    def evaluate(
        self, test: Any, metrics: Sequence[str] = METRICS, *, exclude_seen: bool = True, by: str | None = None
    ) -> dict[str, float]:
        """Ranking metrics on held-out pairs; see docs/metrics.md for the definitions."""
        self._check_fitted()
        return evaluate_embeddings(
            self.left_.embeddings, self.right_.embeddings, self._align(test),
            train=self.seen_, metrics=tuple(metrics), exclude_train=exclude_seen, by=by, processes=self.shards_.group,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the model to one file; nothing is pickled, and an old file stays whole if writing fails."""
        self._check_fitted()
        params = {k: v for k, v in self.get_params().items() if k not in ("towers", "loss")}
        params["loss"] = self.loss if isinstance(self.loss, str) else self.loss.name
        header = {
            "params": {k: list(v) if isinstance(v, tuple) else v for k, v in params.items()},
            "own_towers": self.towers is not None,
            "sides": {
                side.name: {"kind": side.kind, "width": side.width, "rows": rows.total}
                for side, rows in ((self.left_, self.shards_.left), (self.right_, self.shards_.right))
            },
            "reason": self.reason_,
            "omega": self.omega_,
            "best_metric": self.best_metric_,
            "history": [asdict(record) for record in self.history_],
        }
        tensors = {
            "parameters": self.towers_.parameters().vector.cpu(),
            "left": self.left_.embeddings,
            "right": self.right_.embeddings,
            "seen_offsets": torch.from_numpy(self.seen_.indptr.astype(np.int64)),
            "seen_columns": torch.from_numpy(self.seen_.indices.astype(np.int32)),
        }
        for side in (self.left_, self.right_):
            tensors |= {f"{side.name}_{k}": t for k, t in pack_ids(side.ids).items()}
        if self.shards_.single:
            model_file.write_model(Path(path), header, tensors)
        else:
            sharded_model.write_shards(Path(path), header, tensors, self.towers_.parameters(), self.shards_)

    def make_towers(self, problem: Problem) -> Towers:
        """Fresh towers for a problem, as the constructor's arguments say."""
        if self.towers is not None:
            return self.towers(problem)
        return mlp_towers(problem, self.hidden, self.dim, self.activation, self.seed)

    def _finish(self, problem: Problem, towers: Towers, given: Given, result: Result) -> None:
        point = problem.at(towers)
        sides = []
        for index, (name, features) in enumerate((("left", problem.left), ("right", problem.right))):
            embeddings = (point.P, point.right_rows)[index].cpu()
            kind = "history" if index == 0 and given.history else features.kind
            width = features.total if features.kind == "ids" else features.width
            sides.append(Side(name, given.ids[index], embeddings, kind, width))
        self.left_, self.right_ = sides
        self.seen_, self.towers_, self.omega_, self.shards_ = given.matrix, towers, problem.omega, problem.shards
        self.history_: list[Record] = result.history
        self.reason_, self.best_metric_ = result.message, result.best_metric

    def _validator(self, given: Given) -> Callable[[Point], float] | None:
        if given.test is None:
            return None

        def metric(point: Point) -> float:
            found = evaluate_embeddings(
                point.P.cpu(), point.right_rows.cpu(), given.test, train=given.matrix, metrics=(self.metric,),
                processes=given.shards.group,
            )  # fmt: skip
            return float(found[self.metric])

        return metric

    def _carry_over(
        self, towers: Towers, ids: tuple[NDArray[Any] | None, NDArray[Any] | None], problem: Problem
    ) -> None:
        """Copy this model's weights into fresh towers: table rows by id, everything else as it is."""
        self._check_fitted()
        before, after = self.towers_.parameters(), towers.parameters()
        for name, fresh in after.items():
            if name not in before.layout.shapes:
                check.fail("warm_start", f"towers with a new parameter {name}", "the same architecture as before")
            old = before[name].cpu()
            if old.shape == fresh.shape and not self._is_table(name, problem):
                fresh.copy_(old)
                continue
            side, index = (self.left_, 0) if name.startswith("left.") else (self.right_, 1)
            if not self._is_table(name, problem):
                given = f"{name} of shape {tuple(fresh.shape)}"
                check.fail("warm_start", given, f"the shape {tuple(old.shape)} it had before")
            known = row_map(side.ids, ids[index], len(side), len(fresh))
            fresh.mul_(0.1).add_(old.mean(0))  # a newcomer starts near the average of those known
            fresh[known >= 0] = old[known[known >= 0]]
        towers.load(after)

    @staticmethod
    def _is_table(name: str, problem: Problem) -> bool:
        features = problem.left if name.startswith("left.") else problem.right
        return features.kind == "ids" and name.endswith(".0.weight")

    def _embed_rows(self, name: str, features: Any) -> Tensor:
        """New entities through their tower."""
        side = self.left_ if name == "left" else self.right_
        if side.kind == "ids":
            check.fail(
                f"{name}_features", "features", f"a model fitted with {name}_features; this one knows {name} ids only"
            )
        if self.towers_ is None:
            check.fail(
                "model", "loaded without its own towers", "gramtower.load(path, towers=...) to embed new entities"
            )
        rows = features.shape[0] if hasattr(features, "shape") else len(features)
        empty = sp.csr_matrix((rows, 1) if name == "left" else (1, rows), dtype=np.float32)
        problem = Problem(empty, **{name: features})
        given = problem.left if name == "left" else problem.right
        if given.width != side.width:
            check.fail(f"{name}_features", f"{given.width} columns", f"{side.width}, as in training")
        return self.towers_.embed(name, given).cpu()

    def _history_matrix(self, histories: Sequence[Sequence[Any]]) -> sp.csr_matrix:
        columns = [self.right_.rows(list(history)) for history in histories]
        offsets = np.cumsum([0, *map(len, columns)])
        indices = np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)
        matrix = sp.csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(columns), len(self.right_)))
        matrix.sum_duplicates()
        matrix.data[:] = 1.0
        return matrix

    def _align(self, test: Any) -> sp.csr_matrix:
        rows, ids = self.shards_.left, (self.left_.ids, self.right_.ids)
        if ids[0] is not None or rows.count == rows.total:
            return aligned("test", test, ids, self.seen_.shape)
        return aligned("test", test, ids, (rows.total, self.shards_.right.total))[rows.first : rows.stop]

    def _side(self, side: str) -> Side:
        return self.left_ if check.choice("side", side, ("left", "right")) == "left" else self.right_

    def _check_fitted(self) -> None:
        if not hasattr(self, "left_"):
            raise ValueError("model: not fitted yet; call fit first")

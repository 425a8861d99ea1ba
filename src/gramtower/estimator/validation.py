"""A ranking metric of held-out pairs as a function of a point: what early stopping and tuning look at."""

from __future__ import annotations

from dataclasses import dataclass

import scipy.sparse as sp

from gramtower.distributed.shards import Shards
from gramtower.engine.objective.point import Point
from gramtower.metrics import evaluate_embeddings
from gramtower.training.fingerprint import sparse_digest


@dataclass(frozen=True)
class RankingValidator:
    """The metric of the held-out pairs, training pairs left out of the ranking; computed where the towers are.

    Over several processes both are those of own left rows, and the metric is that of all.
    """

    metric: str
    held_out: sp.csr_matrix
    train: sp.csr_matrix

    def __call__(self, point: Point) -> float:
        """The metric at a point."""
        processes = point.evaluation.constants.shards.group
        found = evaluate_embeddings(
            point.P, point.right_rows, self.held_out, train=self.train, metrics=(self.metric,), processes=processes
        )
        return float(found[self.metric])

    def marks(self, shards: Shards) -> dict[str, str]:
        """What is measured, and on what, for a checkpoint's fingerprint."""
        digests = (
            sparse_digest(x.indptr, x.indices, x.data, shards.left.first, x.shape[1]).text(shards.group)
            for x in (self.held_out, self.train)
        )
        return {"metric": self.metric, "validation": "held out {}, left out {}".format(*digests)}

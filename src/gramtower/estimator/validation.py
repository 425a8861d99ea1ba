"""A ranking metric of held-out pairs as a function of a point: what early stopping and tuning look at."""

from __future__ import annotations

from collections.abc import Callable

import scipy.sparse as sp

from gramtower.metrics import evaluate_embeddings
from gramtower.objective.evaluation import Point


def ranking_validator(metric: str, held_out: sp.csr_matrix, train: sp.csr_matrix) -> Callable[[Point], float]:
    """The metric of the held-out pairs, training pairs left out of the ranking; computed where the towers are.

    Over several processes both are those of own left rows, and the metric is that of all.
    """

    def measure(point: Point) -> float:
        processes = point.setting.shards.group
        found = evaluate_embeddings(
            point.P, point.right_rows, held_out, train=train, metrics=(metric,), processes=processes
        )
        return float(found[metric])

    return measure

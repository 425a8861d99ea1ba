"""A ranking metric of held-out pairs as a function of a point: what early stopping and tuning look at."""

from __future__ import annotations

from collections.abc import Callable

import scipy.sparse as sp

from gramtower.metrics import evaluate_embeddings
from gramtower.objective.evaluation import Point


def ranking_validator(metric: str, held_out: sp.csr_matrix, train: sp.csr_matrix) -> Callable[[Point], float]:
    """The metric of the held-out pairs, training pairs left out of the ranking; computed where the towers are."""

    def measure(point: Point) -> float:
        found = evaluate_embeddings(point.P, point.Q, held_out, train=train, metrics=(metric,))
        return float(found[metric])

    return measure

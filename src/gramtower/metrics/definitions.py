"""The metrics of one user's list: names and formulas; docs/metrics.md states them, eq:map is the paper's.

Each takes hits (users × K, is the item at this place relevant?) and how many items are relevant to each user, at least
one, and gives a value for each user. Checked by tests/test_metrics.py against slow loops and ir_measures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gramtower import _checks as check

DEFAULT = ("map@5", "recall@20", "ndcg@20")

Floats = NDArray[np.float64]
Hits = NDArray[np.bool_]


def _paper_map(hits: Hits, relevant: Floats) -> Floats:
    return np.asarray(_precisions(hits).mean(1))


def _precision(hits: Hits, relevant: Floats) -> Floats:
    return np.asarray(hits.mean(1))


def _recall(hits: Hits, relevant: Floats) -> Floats:
    return np.asarray(hits.sum(1) / relevant)


def _ndcg(hits: Hits, relevant: Floats) -> Floats:
    gains = 1 / np.log2(np.arange(2, hits.shape[1] + 2))
    ideal = np.append(np.nan, np.cumsum(gains))
    return np.asarray(hits @ gains / ideal[np.minimum(relevant, len(gains)).astype(int)])


def _average_precision(hits: Hits, relevant: Floats) -> Floats:
    return np.asarray((_precisions(hits) * hits).sum(1) / np.minimum(relevant, hits.shape[1]))


def _hit(hits: Hits, relevant: Floats) -> Floats:
    return np.asarray(hits.any(1), dtype=np.float64)


def _reciprocal_rank(hits: Hits, relevant: Floats) -> Floats:
    return np.where(hits.any(1), 1 / (hits.argmax(1) + 1), 0.0)


def _precisions(hits: Hits) -> Floats:
    """precision@κ for each κ = 1 … K."""
    return hits.cumsum(1) / np.arange(1, hits.shape[1] + 1)


AT_K: dict[str, Callable[[Hits, Floats], Floats]] = {
    "map": _average_precision,
    "paper_map": _paper_map,
    "precision": _precision,
    "recall": _recall,
    "ndcg": _ndcg,
    "hit": _hit,
    "mrr": _reciprocal_rank,
}
KNOWN = (*(f"{name}@K" for name in AT_K), "coverage@K", "auc")


@dataclass(frozen=True)
class Metric:
    """A metric asked for."""

    name: str  # as the caller wrote it, and the key of the result
    kind: str
    k: int  # 0 for the AUC


def parse(metrics: str | Sequence[str]) -> list[Metric]:
    """Metrics from names such as ``"recall@20"``; unknown ones are refused with the list of those there are."""
    parsed = []
    for name in [metrics] if isinstance(metrics, str) else check.listed("metrics", metrics, "names"):
        match = re.fullmatch(r"([a-z_]+)@([1-9][0-9]*)", name) if isinstance(name, str) else None
        if isinstance(name, str) and name == "auc":
            parsed.append(Metric("auc", "auc", 0))
        elif match and (match[1] in AT_K or match[1] == "coverage"):
            parsed.append(Metric(name, match[1], int(match[2])))
        else:
            check.fail("metrics", repr(name), "names such as 'recall@20', of " + ", ".join(KNOWN))
    if not parsed:
        check.fail("metrics", "none", "at least one of " + ", ".join(KNOWN))
    return parsed

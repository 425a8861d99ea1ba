"""Intervals around metrics: Student's t over folds, and the bootstrap over users.

t: mean ± t_{n−1}(½ + level/2) s/√n. Folds share training pairs, so that their values are not independent and the
interval is a guide rather than a promise. Bootstrap (percentiles): users are drawn with replacement, each with all its
values in all folds, so that a user who is in every fold does not count as several. Cost of the bootstrap:
O(replicates · users · folds · metrics) as matrix products, in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
_ELEMENTS = 1 << 22  # of a block of drawn users


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Of the mean of a few values; NaN for fewer than two."""
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    if n < 2:
        return (math.nan, math.nan)
    from scipy.special import stdtrit  # which `import gramtower` has no other use for

    half = float(stdtrit(n - 1, 0.5 + level / 2)) * float(array.std(ddof=1)) / math.sqrt(n)
    return (float(array.mean()) - half, float(array.mean()) + half)


def bootstrap_interval(
    folds: Sequence[tuple[NDArray[np.int64], NDArray[Any]]],
    *,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
) -> Interval:
    """Of the mean over folds of the means over users, for other users of the same kind.

    Args:
        folds: for each, the users as numbers that are the same in all folds, and their values; NaN for no value.
        level: share of replicates inside.
        replicates: how often users are drawn.
        seed: of the draws.
    """
    single = [(keys, np.asarray(values)[:, None]) for keys, values in folds]
    return bootstrap_intervals(single, level=level, replicates=replicates, seed=seed)[0]


def bootstrap_intervals(
    folds: Sequence[tuple[NDArray[np.int64], NDArray[Any]]],
    *,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
) -> list[Interval]:
    """Of several such means with the same draws of users, so that they can be of differences too.

    Args:
        folds: as for :func:`bootstrap_interval`, with values users × means.
        level: share of replicates inside.
        replicates: how often users are drawn.
        seed: of the draws.
    """
    users, width = 1 + max(int(keys.max(initial=-1)) for keys, _ in folds), folds[0][1].shape[1]
    sums, counts = np.zeros((users, width, len(folds))), np.zeros((users, width, len(folds)))
    for fold, (keys, values) in enumerate(folds):
        there = np.isfinite(values)
        sums[keys, :, fold] = np.where(there, values, 0.0)
        counts[keys, :, fold] = there
    known = counts.any((1, 2))
    users = int(known.sum())
    if not users:
        return [(math.nan, math.nan)] * width
    flat_sums, flat_counts = sums[known].reshape(users, -1), counts[known].reshape(users, -1)
    generator = np.random.default_rng(seed)
    size, found = max(1, _ELEMENTS // users), []
    for start in range(0, replicates, size):
        rows = min(size, replicates - start)
        chosen = generator.integers(users, size=(rows, users)) + users * np.arange(rows)[:, None]
        drawn = np.bincount(chosen.ravel(), minlength=rows * users).reshape(rows, users).astype(np.float64)
        weight = drawn @ flat_counts
        means = np.divide(drawn @ flat_sums, weight, out=np.full(weight.shape, np.nan), where=weight > 0)
        found.append(_mean_of_there(means.reshape(rows, width, len(folds))))
    replicated = np.concatenate(found)
    return [_span(values[np.isfinite(values)], level) for values in replicated.T]


def _mean_of_there(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over the last axis of what is not NaN; NaN where all is."""
    there = np.isfinite(means)
    total, count = np.where(there, means, 0.0).sum(-1), there.sum(-1)
    return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))


def _span(values: NDArray[np.float64], level: float) -> Interval:
    if not len(values):
        return (math.nan, math.nan)
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    return (float(low), float(high))

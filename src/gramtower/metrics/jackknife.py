"""How much of a difference between two models' metrics is due to the entities they happened to be measured on.

The entities are dealt to at most 20 parts at random, with a seed. With θ₍₋g₎ a model's metric without part g, and
d_g = θ₍₋g₎ of one model − θ₍₋g₎ of another, the standard error of the difference is the delete-a-group jackknife's,

    s² = (G − 1)/G · Σ_g (d_g − mean d)².

It is paired: what makes an entity hard for both models cancels. G numbers for each model are all that is kept, whatever
the number of entities. For a mean over entities, with parts of one entity each, it is the usual standard error of the
mean difference; for other metrics it is rather too large than too small (Efron and Stein, 1981). Cost: O(entities).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PARTS = 20


def deal(count: int, seed: int, parts: int = PARTS) -> NDArray[np.int64]:
    """The part of each entity, 0 to G − 1; parts differ by one entity in size at most."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int64) % max(1, min(parts, count)))


def means_without(values: NDArray[np.float64], parts: NDArray[np.int64]) -> list[float]:
    """The mean of the values without those of each part in turn, 0 where none is left; NaN is no value."""
    known = np.isfinite(values)
    values, of, count = values[known], parts[known], int(parts.max(initial=-1)) + 1
    sums, sizes = np.bincount(of, values, minlength=count), np.bincount(of, minlength=count)
    left = len(values) - sizes
    found = np.divide(values.sum() - sums, left, out=np.zeros(count), where=left > 0)
    return [float(value) for value in found]


def standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the difference of two metrics, from what each is without each part; infinite for fewer than two parts."""
    if len(one) != len(other):
        raise ValueError(f"other: got {len(other)} parts, expected {len(one)}")
    differences, count = np.subtract(one, other), len(one)
    if count < 2:
        return math.inf
    return float(np.sqrt((count - 1) / count * np.square(differences - differences.mean()).sum()))

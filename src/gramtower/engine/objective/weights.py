"""What the objective holds of single entities: their weights a and b of eq:loss, and the penalties on their embeddings.

Weights are as given, or by name from how often an entity is observed:

    "degree^s"   a_i = max(|O_i|, 1)^s / mean over i,      and b_j likewise; "degree^0" is None: ones, and no work

The mean is 1, so that Σ_ij a_i b_j = mn and ω keeps its meaning whatever the powers. An entity without pairs counts as
one with a single pair: its weight stays finite for s < 0 and does not vanish for s > 0, where a weight of zero would
leave its embedding to the penalties alone. The penalty on p_i is ½ μ c_i ‖p_i‖² with c_i = (|O_i| + ω Σ_j b_j)^ν, and
likewise on the right. O(m + n).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.distributed.group import SINGLE, Group

EXPECTED = 'an array of weights, or text such as "degree^0.5", "degree^-0.5", or "degree^0" for none'


def entity_weights(name: str, value: Any, degrees: NDArray[Any], group: Group = SINGLE) -> NDArray[Any] | None:
    """The weights of one side, from an array, from text such as ``"degree^0.5"``, or None for ones.

    Over several processes degrees and weights are those of local entities; the mean is over all.
    """
    if not isinstance(value, str):
        return check.weights(name, value, len(degrees))
    power = degree_power(name, value)
    if power == 0:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # refused by name below
        weights: NDArray[Any] = np.maximum(degrees, 1).astype(np.float64) ** power
        total, count = group.totals(float(weights.sum()), len(weights))
        weights /= np.float64(total) / count
    if not (np.isfinite(total) and np.isfinite(weights).all()):
        check.fail(name, repr(value), "a power that gives finite weights")
    return weights


def degree_power(name: str, value: str) -> float:
    """s of ``"degree^s"``; ``"degree"`` is s = 1."""
    match = re.fullmatch(r"\s*degree\s*(?:\^\s*([^\s]+)\s*)?", value)
    try:
        power = float(match[1] or 1.0) if match else math.nan
    except ValueError:
        power = math.nan
    if not math.isfinite(power):
        check.fail(name, repr(value), EXPECTED)
    return power


def embedding_penalties(
    mu: float, power: float, omega: float, counts: tuple[NDArray[Any], NDArray[Any]], sums: Sequence[float]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """μ c of the left and of the right entities.

    Args:
        mu: μ, the argument embedding_l2.
        power: ν, the argument frequency_power.
        omega: ω.
        counts: observed pairs of each left and of each right entity.
        sums: Σ_i a_i and Σ_j b_j.
    """
    with np.errstate(divide="ignore", over="ignore"):  # refused by name below
        left, right = (mu * (c + omega * other) ** power for c, other in zip(counts, sums[::-1], strict=True))
    for side, values in (("left", left), ("right", right)):
        if not np.isfinite(values).all():
            i = int(np.argmin(np.isfinite(values)))
            given = f"{power} (embedding_l2 {mu}, omega {omega})"
            expected = f"a power that gives finite penalties; {side} entity {i} would get {values[i]}"
            check.fail("frequency_power", given, expected)
    return left, right

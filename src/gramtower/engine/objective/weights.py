"""Entity weights a and b of eq:loss: as given, or by name from how often an entity is observed.

    "degree^s"   a_i = max(|O_i|, 1)^s / mean over i,      and b_j likewise; "degree^0" is None: ones, and no work

The mean is 1, so that Σ_ij a_i b_j = mn and ω keeps its meaning whatever the powers. An entity without pairs counts as
one with a single pair: its weight stays finite for s < 0 and does not vanish for s > 0, where a weight of zero would
leave its embedding to the penalties alone. O(m + n). Checked by tests/test_weights.py against explicit arrays.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower import _checks as check
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

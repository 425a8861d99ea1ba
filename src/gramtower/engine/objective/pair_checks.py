"""Labels and weights of observed pairs, checked by all threads before a problem takes them.

Cost: a pass or two over the pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.matrices import everywhere, extremes
from gramtower.data.pairs import Pairs
from gramtower.engine.kernels.losses import Loss


def checked_weights(value: Any, count: int) -> NDArray[Any] | None:
    """check.weights, by all threads where there is nothing wrong."""
    array = None if value is None else check.as_float_array("pair_weights", value)
    if array is not None and array.shape == (count,) and count:
        low, high = extremes(array)
        if low >= 0 and np.isfinite(high):
            return array
    return check.weights("pair_weights", array, count)


def check_labels(loss: Loss, labels: NDArray[Any], bounds: tuple[Any, Any], pairs: Pairs) -> None:
    """Refuse labels that are not finite, or that a loss does not take; ``bounds`` are the least and the largest."""
    low, high = bounds
    if not (np.isfinite(low) and np.isfinite(high)):
        check.finite("pairs", labels)
    if loss.labels is not None and len(labels):
        known = loss.labels
        if low == high and low in known:  # plain implicit feedback
            return
        if everywhere(lambda a, b: bool(np.isin(labels[a:b], known).all()), len(labels)):
            return
        wrong = ~np.isin(labels, loss.labels)
        if wrong.any():
            e = int(np.argmax(wrong))
            i = int(pairs.rows[e])
            allowed = " or ".join(f"{x:+g}" for x in loss.labels)
            check.fail(
                "pairs",
                f"label {labels[e]:g} at row {i}, column {int(pairs.columns[e])} ({int(wrong.sum())} such labels)",
                f"labels {allowed} for the {loss.name} loss: (matrix > 0) for counts, pairs read with a threshold for "
                'ratings, or loss="squared", which takes any label',
            )

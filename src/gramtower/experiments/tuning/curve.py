"""When a trial is given up, by its validation curve.

Curves of second-order methods rise steeply and bend: carried on in a straight line at the slope of the last few
iterations, they end too high. A trial whose curve stays below the best even so is pruned. The rule looks at one curve
alone, so it holds for trials that start cold and for those that start from a neighbour's solution.

A trial that starts warm comes from a point that other settings made, and its first values are theirs: what counts for
it is the value it settles at, not the best on the way.

On entities that training has not seen, curves are rough: few entities are held out, all rankings share them, and the
best point on the way is often an early one that is best for these alone. There a trial runs to its end, and counts with
the mean of its last points.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOK_BACK = 3  # iterations that a slope is taken over
COLD_START = 6  # iterations that a cold start is given before it is judged
SETTLED = 2e-3  # relative change over LOOK_BACK iterations under which a curve is flat


def hopeless(curve: Sequence[float], remaining: int, best: float | None, warm: bool, rough: bool = False) -> bool:
    """Whether a curve, carried on in a straight line for the remaining iterations, stays below the best.

    Args:
        curve: metric at the start and after each iteration.
        remaining: iterations to come.
        best: metric of the best trial so far, or None.
        warm: whether the trial started from another one's solution.
        rough: whether it is measured on entities that training has not seen; the line then begins at the best of the
            last few points.
    """
    iterations = len(curve) - 1
    if best is None or iterations < (LOOK_BACK if warm else COLD_START):
        return False
    if not (warm or rough) and max(curve) >= best:
        return False  # it counts with its best point
    slope = (curve[-1] - curve[-1 - LOOK_BACK]) / LOOK_BACK
    now = max(curve[-LOOK_BACK:]) if rough else curve[-1]
    return now + max(0.0, slope) * remaining < best


def settled(curve: Sequence[float]) -> bool:
    """Whether the last iterations changed next to nothing."""
    if len(curve) <= LOOK_BACK + 1:
        return False
    last = curve[-1 - LOOK_BACK :]
    return max(last) - min(last) <= SETTLED * abs(last[-1])


def outcome(curve: Sequence[float], warm: bool, rough: bool = False) -> tuple[float, int]:
    """A trial's value and its iteration: the best of a cold curve, the end of a warm one, of a rough one its mean."""
    if rough:
        last = curve[-min(LOOK_BACK, max(1, len(curve) - 1)) :]
        return sum(last) / len(last), len(curve) - 1
    if warm:
        return curve[-1], len(curve) - 1
    best = max(range(len(curve)), key=lambda i: curve[i])
    return curve[best], best

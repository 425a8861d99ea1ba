"""The value of lists that were not shown, from a log of entities that were shown with known probabilities.

Event t of the log has a shown entity, its reward r_t and its propensity p_t, the probability with which the logging
system showed it there. A new policy shows it with the target probability π_t; a list of k entities, each of which is
shown equally often, has π_t = 1/k for the entities in it and 0 for others. The value of the policy is the mean reward
of an event under it. With w_t = π_t / p_t, or the smaller of that and ``clip``,

    ips     (1/n) Σ w_t r_t
    snips   Σ w_t r_t / Σ w_t
    dr      (1/n) Σ (v_t + w_t (r_t − r̂_t))

where r̂_t is a prediction of the reward and v_t = Σ_a π_t(a) r̂_t(a) its mean under the new policy. ips and dr are
unbiased without ``clip`` if every entity that the new policy shows has p > 0; dr has less variance the better r̂ is.
snips has a bias of order 1/n and less variance. Events are independent. Cost: events, times ``samples`` with bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # its modules are loaded when they are used
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check

INTERVALS = ("normal", "bootstrap")
Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """An estimate of the value with its standard error and confidence interval."""

    value: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class OffPolicy:
    """Estimates of the value of a policy.

    Attributes:
        ips: by inverse propensities.
        snips: self-normalised.
        dr: doubly robust; None without predictions.
        events: number of events, n.
        matched: events with a target probability above 0.
        clipped: events whose weight was above ``clip``.
        effective_sample_size: (Σ w)² / Σ w², the number of events of equal weights that would say as much.
        logged: mean reward of the log, the value of the logging policy.
    """

    ips: Estimate
    snips: Estimate
    dr: Estimate | None
    events: int
    matched: int
    clipped: int
    effective_sample_size: float
    logged: float

    def rows(self) -> list[tuple[str, float, float, float, float]]:
        """Name, value, standard error and interval of each estimate."""
        found = {"ips": self.ips, "snips": self.snips, "dr": self.dr}
        return [(name, *one) for name, one in found.items() if one is not None]


def off_policy(
    rewards: ArrayLike,
    propensities: ArrayLike,
    targets: ArrayLike,
    *,
    predicted: ArrayLike | None = None,
    expected: ArrayLike | None = None,
    clip: float | None = None,
    confidence: float = 0.95,
    interval: str = "normal",
    samples: int = 1000,
    seed: int = 0,
) -> OffPolicy:
    """Estimate the mean reward of a policy from the log of another one.

    Args:
        rewards: reward of each event, such as 1 for a click and 0 for none.
        propensities: probability with which the logging policy showed the entity of each event, above 0 and at most 1.
        targets: probability with which the new policy shows it there, from 0 to 1; :func:`list_targets` has those of
            lists.
        predicted: predicted reward of each event, for the doubly robust estimate. The prediction must not have been
            learned from the same event; :func:`linear_rewards` learns one from the other half of the log.
        expected: mean predicted reward under the new policy at each event; with ``predicted``.
        clip: largest weight. It reduces the variance, and usually makes estimates too low if rewards are positive.
        confidence: of the intervals, between 0 and 1.
        interval: "normal" for standard errors times a quantile (the delta method for snips), or "bootstrap" for
            quantiles and standard errors of estimates on events drawn with replacement.
        samples: number of such draws.
        seed: of the draws.
    """
    r = _column("rewards", rewards)
    p, target = (_column(name, one, len(r)) for name, one in (("propensities", propensities), ("targets", targets)))
    if not ((p > 0) & (p <= 1)).all():
        check.fail("propensities", f"{p[(p <= 0) | (p > 1)][0]:g}", "probabilities above 0 and at most 1")
    if not ((target >= 0) & (target <= 1)).all():
        check.fail("targets", f"{target[(target < 0) | (target > 1)][0]:g}", "probabilities from 0 to 1")
    if not target.any():
        check.fail("targets", "0 for all events", "some events whose entity the new policy shows")
    if (predicted is None) != (expected is None):
        check.fail("predicted, expected", "one of them", "both or none")
    if not 0 < check.number("confidence", confidence) < 1:
        check.fail("confidence", confidence, "a number between 0 and 1")
    check.choice("interval", interval, INTERVALS)
    samples, draw = check.count("samples", samples, minimum=2), np.random.default_rng(check.seed(seed))
    most = np.inf if clip is None else check.number("clip", clip, above=0.0)
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        ratio = target / p
        w = np.minimum(ratio, most)
        terms = [w, w * r]
        if predicted is not None and expected is not None:
            guess, mean = _column("predicted", predicted, len(r)), _column("expected", expected, len(r))
            terms.append(mean + w * (r - guess))
        table = np.stack(terms, 1)
        if not np.isfinite(np.square(table).sum()):
            check.fail("propensities", f"weights up to {w.max():g}", "larger ones, or clip= for smaller weights")
    values = _estimates(table.mean(0))
    if interval == "normal":
        residuals = np.stack([w * r - values[0], w * (r - values[1]) / w.mean(), *(table[:, 2:] - values[2:]).T])
        errors = np.sqrt(np.square(residuals).sum(1) / max(1, len(r) - 1) / len(r))
        reach = float(scipy.special.ndtri(0.5 + confidence / 2)) * errors
        low, high = values - reach, values + reach
    else:
        drawn = np.stack([_estimates(table[draw.integers(len(r), size=len(r))].mean(0)) for _ in range(samples)])
        errors = np.nanstd(drawn, axis=0, ddof=1)
        low, high = np.nanquantile(drawn, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    ips, snips, *dr = (Estimate(*map(float, one)) for one in zip(values, errors, low, high, strict=True))
    counts = len(r), int((target > 0).sum()), int((ratio > most).sum())
    size = float(w.sum() ** 2 / np.square(w).sum())
    return OffPolicy(ips, snips, dr[0] if dr else None, *counts, size, float(r.mean()))


def _estimates(means: Floats) -> Floats:
    """ips, snips and dr from the means of w, w r and the terms of dr; snips is NaN if all weights are 0."""
    snips = means[1] / means[0] if means[0] > 0 else np.nan
    return np.array([means[1], snips, *means[2:]])


def list_targets(lists: ArrayLike, shown: Sequence[object] | NDArray[np.generic]) -> Floats:
    """The probability with which lists show the entity of each event, if each of their places is shown equally often.

    Args:
        lists: ids, events × k, as ``recommend`` returns them for the left entity of each event; None or −1 in places
            without an answer.
        shown: id of the entity of each event.
    """
    found, there = np.asarray(lists), check.as_array("shown", shown, "a list of ids")
    if found.ndim != 2 or there.shape != found.shape[:1]:
        check.fail("lists, shown", f"shapes {found.shape} and {there.shape}", "a list for each shown entity")
    empty = found == (None if found.dtype == object else -1)
    filled = np.maximum(found.shape[1] - np.sum(empty, 1), 1)
    return np.asarray((found == there[:, None]).any(1) / filled, dtype=np.float64)


def linear_rewards(rewards: ArrayLike, scores: ArrayLike, list_scores: ArrayLike) -> tuple[Floats, Floats]:
    """Predict rewards by a line through the scores of a model, for each half of the log by the other half.

    Even and odd events are the halves, so that no prediction has learned from its own event.

    Args:
        rewards: reward of each event.
        scores: the model's score of its entity.
        list_scores: scores of the list of each event, events × k, −inf in places without an answer.

    Returns:
        ``predicted`` and ``expected`` of :func:`off_policy`.
    """
    r = _column("rewards", rewards)
    x, lists = _column("scores", scores, len(r)), np.asarray(list_scores, dtype=np.float64)
    if len(r) < 4:
        check.fail("rewards", f"{len(r)} events", "at least 4")
    if lists.ndim != 2 or len(lists) != len(r):
        check.fail("list_scores", f"shape {lists.shape}", f"{len(r)} lists")
    filled = np.isfinite(lists)
    mean = np.where(filled, lists, 0.0).sum(1) / np.maximum(filled.sum(1), 1)
    predicted, expected = np.empty(len(r)), np.empty(len(r))
    for half, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        a, b = np.linalg.lstsq(np.stack([np.ones(len(x[other])), x[other]], 1), r[other], rcond=None)[0]
        predicted[half], expected[half] = a + b * x[half], a + b * mean[half]
    expected[~filled.any(1)] = 0.0
    return predicted, expected


def _column(name: str, given: ArrayLike, length: int | None = None) -> Floats:
    array = check.as_float_array(name, given).astype(np.float64)
    if array.ndim != 1 or not len(array) or (length is not None and len(array) != length):
        check.fail(name, f"shape {array.shape}", "a list of numbers" if length is None else f"{length}, as rewards")
    check.finite(name, array)
    return array

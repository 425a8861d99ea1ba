"""Probabilities of scores: calibration on held-out pairs, and reliability tables.

The population is every pair (i, j) of some left entities i and all right entities j that the model has not seen. A pair
is positive if it is held out. With n⁺ positive and n⁻ other pairs, a calibration is an increasing function from the
score to the probability that a pair of the population is positive, so that Σ probability ≈ n⁺ over the population:

    platt      σ(a s + b), fitted by maximum likelihood to the labels (n⁺ + 1) / (n⁺ + 2) and 1 / (n⁻ + 2), a > 0
    isotonic   the increasing function of least squares, constant on blocks of scores and linear between them

The scores of a population go into 2¹⁶ bins of equal width between −c and c, c = max‖p‖ · max‖q‖, in one pass; fits use
the mean score of each bin. All positive pairs are scored. If there are more than ``MOST`` other pairs, those of left
entities drawn at random are scored, and stand for all with weight n⁻ / (their number). Cost: pairs scored · dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import scipy  # its modules are loaded when they are used
import scipy.sparse as sp
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.matrices import union
from gramtower.retrieval.topk import Ranking

METHODS = ("auto", "platt", "isotonic")
POPULATIONS = ("all", "held-out")
_FEWEST, _ENOUGH = {"platt": 20, "isotonic": 200}, 1000  # held-out pairs; isotonic fits need more, "auto" most
MOST = 100_000_000  # pairs to score
_BINS = 1 << 16
_BLOCK = "16MB"  # of scores; their bins take four times as much
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A function from scores to probabilities, and the population that it was fitted on."""

    method: str  # "platt" or "isotonic"
    population: str  # left entities of the population: "all", or those with "held-out" pairs
    pairs: int  # size of the population
    positives: int  # held-out pairs in it
    slope: float = 0.0  # a of Platt's method
    intercept: float = 0.0  # b
    scores: list[float] = field(default_factory=list)  # isotonic: increasing scores with a known probability
    probabilities: list[float] = field(default_factory=list)  # theirs

    def __str__(self) -> str:
        return f"{self.method} on {self.positives:,} held-out pairs among {self.pairs:,} that were not seen"

    def __call__(self, scores: ArrayLike) -> Floats:
        """Probabilities of scores; beyond the scores of an isotonic fit, those of its ends."""
        given = np.asarray(scores, dtype=np.float64)
        if self.method == "platt":
            return np.asarray(scipy.special.expit(self.slope * given + self.intercept))
        return np.interp(given, self.scores, self.probabilities)

    def check(self) -> None:
        """Refuse what is no increasing function with values from 0 to 1, such as one of a damaged file."""
        check.choice("calibration.method", self.method, METHODS[1:])
        if not (math.isfinite(self.slope) and math.isfinite(self.intercept) and self.slope >= 0):
            check.fail("calibration.slope", f"{self.slope}, {self.intercept}", "finite numbers, and a slope >= 0")
        x, y = np.asarray(self.scores), np.asarray([0.0, *self.probabilities, 1.0])
        increasing = np.isfinite(x).all() and (np.diff(x) >= 0).all() and (np.diff(y) >= 0).all()
        if not increasing or len(x) != len(y) - 2 or (self.method == "isotonic" and not len(x)):
            check.fail("calibration.scores", f"{len(x)} scores", "increasing scores with probabilities from 0 to 1")


@dataclass(frozen=True)
class Counts:
    """Pairs of a population by score, in increasing order of scores."""

    scores: Floats  # mean score of each bin that has a pair
    pairs: Floats  # number of pairs, or its estimate
    positives: Floats  # held-out pairs among them


def count_scores(
    P: Tensor, Q: Tensor, held_out: sp.csr_matrix, seen: sp.csr_matrix, population: str, seed: int, most: int = MOST
) -> Counts:
    """The scores of a population, by bins; no pair of ``held_out`` is in ``seen``."""
    P, Q, out = P.float(), Q.float(), union(seen, held_out)
    rows = np.arange(len(P)) if population == "all" else np.flatnonzero(np.diff(held_out.indptr))
    others = len(Q) - np.diff(out.indptr)[rows]
    total = int(others.sum())
    fits = max(1, most // len(Q))
    if len(rows) > fits:
        drawn = np.sort(np.random.default_rng(seed).permutation(len(rows))[:fits])
        rows, others = rows[drawn], others[drawn]
    bound = float(P.norm(dim=1).max() * Q.norm(dim=1).max()) * (1 + 1e-6) or 1.0
    if not math.isfinite(bound):
        check.fail("model", "embeddings whose products overflow", "smaller ones")
    counts, sums = np.zeros((2, _BINS)), np.zeros((2, _BINS))

    def add(kind: int, scores: Floats) -> None:
        places = np.clip((scores + bound) * (_BINS / 2 / bound), 0, _BINS - 1).astype(np.int64)
        counts[kind] += np.bincount(places, minlength=_BINS)
        sums[kind] += np.bincount(places, scores, minlength=_BINS)

    for _, _, scores in Ranking(P, Q, sp.csr_matrix(out[rows]), ranked=rows).scores(_BLOCK):
        block = scores.numpy().ravel()
        add(0, block[np.isfinite(block)].astype(np.float64))
    i, j = held_out.nonzero()
    for start in range(0, len(i), step := max(1, (1 << 22) // P.shape[1])):
        part = slice(start, start + step)
        add(1, (P[torch.from_numpy(i[part])] * Q[torch.from_numpy(j[part])]).sum(1).double().numpy())
    weight = total / max(1, int(others.sum()))
    pairs = counts[1] + weight * counts[0]
    kept = np.flatnonzero(pairs)
    return Counts((sums[1] + weight * sums[0])[kept] / pairs[kept], pairs[kept], counts[1][kept])


def calibrate(counts: Counts, method: str, population: str) -> Calibration:
    """Fit a calibration."""
    positives = int(counts.positives.sum())
    if check.choice("method", method, METHODS) == "auto":
        method = "isotonic" if positives >= _ENOUGH else "platt"
    if positives < _FEWEST[method]:
        given = f"{positives} held-out pairs of known entities that the model has not learned from"
        check.fail("validation", given, f"at least {_FEWEST[method]} for {method}")
    facts = {"population": population, "pairs": round(counts.pairs.sum()), "positives": positives}
    if facts["pairs"] == positives:
        check.fail("validation", "every pair that was not seen", "other pairs as well")
    if method == "platt":
        slope, intercept = _platt(counts)
        if not slope > 0:
            check.fail("validation", "held-out pairs with no higher scores than others", "some that the model predicts")
        return Calibration(method=method, slope=slope, intercept=intercept, **facts)
    fitted = scipy.optimize.isotonic_regression(counts.positives / counts.pairs, weights=counts.pairs)
    ends = np.unique(np.append(fitted.blocks[:-1], fitted.blocks[1:] - 1))  # first and last bin of each block
    x, y = np.maximum.accumulate(counts.scores[ends]), np.clip(fitted.x[ends], 0.0, 1.0)
    return Calibration(method=method, scores=x.tolist(), probabilities=y.tolist(), **facts)


def _platt(counts: Counts) -> tuple[float, float]:
    """a and b by Newton's method with a trust region, on standardised scores."""
    if len(counts.scores) < 2:
        return 0.0, 0.0
    n, negatives = counts.positives.sum(), (counts.pairs - counts.positives).sum()
    labels = counts.positives * (n + 1) / (n + 2) + (counts.pairs - counts.positives) / (negatives + 2)
    mean = np.average(counts.scores, weights=counts.pairs)
    spread = math.sqrt(np.average((counts.scores - mean) ** 2, weights=counts.pairs)) or 1.0
    X = np.stack([(counts.scores - mean) / spread, np.ones(len(counts.scores))], 1)

    def loss(w: Floats) -> tuple[float, Floats]:
        z = X @ w
        value = (counts.pairs * np.logaddexp(0, z) - labels * z).sum() / n
        return value, (counts.pairs * scipy.special.expit(z) - labels) @ X / n

    def curvature(w: Floats) -> Floats:
        p = scipy.special.expit(X @ w)
        return np.asarray((X.T * (counts.pairs * p * (1 - p))) @ X / n)

    start = np.array([0.0, math.log(n / negatives)])
    found = scipy.optimize.minimize(
        loss, start, jac=True, hess=curvature, method="trust-exact", options={"gtol": 1e-9}
    ).x
    slope = float(found[0]) / spread
    return slope, float(found[1]) - slope * float(mean)


@dataclass(frozen=True)
class Reliability:
    """How often pairs are positive, by probability, in bins with about the same sum of probabilities each."""

    probability: Floats  #: mean probability of each bin, increasing
    observed: Floats  #: share of its pairs that are positive
    pairs: Floats  #: number of its pairs, or its estimate
    positives: Floats  #: held-out pairs among them

    @property
    def expected(self) -> float:
        """The sum of probabilities over the population, to compare with the sum of ``positives``."""
        return float(self.pairs @ self.probability)

    def rows(self) -> list[tuple[float, float, int, int]]:
        """Probability, share of positive pairs, pairs and positive pairs of each bin."""
        parts = self.probability, self.observed, self.pairs, self.positives
        return [(p, o, round(n), round(k)) for p, o, n, k in zip(*(part.tolist() for part in parts), strict=True)]

    def __str__(self) -> str:
        lines = [f"{p:>11.4g} {o:>11.4g} {n:>14,} {k:>10,}" for p, o, n, k in self.rows()]
        return "\n".join([f"{'probability':>11} {'observed':>11} {'pairs':>14} {'held out':>10}", *lines])


def reliability(counts: Counts, calibration: Calibration, bins: int) -> Reliability:
    """Compare probabilities with frequencies in at most so many bins."""
    said = calibration(counts.scores)
    share = counts.pairs * said
    middle = (np.cumsum(share) - share / 2) / (share.sum() or 1.0)
    part = np.minimum(middle * bins, bins - 1).astype(np.int64)
    sums = np.stack([np.bincount(part, x, minlength=bins) for x in (counts.pairs, counts.positives, share)])
    pairs, positives, expected = sums[:, sums[0] > 0]
    return Reliability(expected / pairs, positives / pairs, pairs, positives)

"""Rules of lists besides scores: filters, numbers added to scores, quotas, diversity, a least score, other scores.

Scores become s_ij = p_iᵀq_j + b_j with b_j = Σ_c boost_c x_jc + popularity · log(1 + n_j), where x_jc is the cell of
column c (0 if missing) and n_j the number of training pairs of j. Quotas and diversity choose one entity after the
other from a pool of the best by s: the next is the free one with the highest (1 − δ) r_j − δ max_l cos(q_j, q_l), l
among those chosen, where r is s brought to 0…1 within the pool; the maximum is 0 for the first. An entity is free while
fewer than ``at_most`` chosen ones share a value with it. With diversity the pool has 10k entities. If quotas leave a
list short, it is chosen from twice as many, until it is full or there are no more: without diversity it is exact.
Lists return s; or its percentile 100 (c − h) / c, with h of the c candidates of the row above it; or the calibrated
probability of p_iᵀq_j, without b. The least score is one of those that are returned.
Cost beyond the ranking: one addition per score; for choices k · pool · dim per list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.entity_table import EntityTable, Rows, TableError

Numbers = NDArray[np.float32]
Probability = Callable[[Numbers], NDArray[np.float64]]
Boost = Mapping[str, float] | Sequence[float] | NDArray[np.generic]
SCORES = ("raw", "probability", "percentile")
_LARGEST = 1e30  # added to a score; far from the end of float32
_POOL, _QUOTA_POOL = 10, 4  # entities of a pool for each place of a list, with diversity, and with only quotas


@dataclass(frozen=True)
class Rules:
    """Rules for the columns of a ranking, checked."""

    among: Rows | None = None  # the only columns to choose from, increasing
    added: Numbers | None = None  # b, added to the scores of each column
    groups: tuple[tuple[Rows, int], ...] = ()  # codes of values, columns × values of a cell, and how many may share one
    diversity: float = 0.0  # δ
    min_score: float | None = None  # least score, of those that are returned
    scores: str = "raw"  # what is returned, of SCORES
    probability: Probability | None = None  # of p_iᵀq_j

    def take(self, columns: Rows) -> Rules:
        """The rules for some of the columns."""
        added = None if self.added is None else self.added[columns]
        return replace(
            self, among=None, added=added, groups=tuple((codes[columns], most) for codes, most in self.groups)
        )

    def pool(self, k: int) -> int:
        """How many of the best columns a list of k is chosen from."""
        return k * (_POOL if self.diversity else _QUOTA_POOL if self.groups else 1)

    def choose(self, columns: Rows, values: Numbers, k: int, units: Numbers | None) -> NDArray[np.int64]:
        """Places in the pools of some rows, in the order of choice, −1 for none; ``units`` are rows × pool × dim."""
        rows, free = np.arange(len(columns)), columns >= 0
        worth = values.astype(np.float64)
        if units is not None:
            low, high = np.where(free, worth, np.inf).min(1, keepdims=True), worth.max(1, keepdims=True)
            worth = (1 - self.diversity) * np.where(free, worth - low, 0.0) / np.where(high > low, high - low, 1.0)
        codes = [made[np.maximum(columns, 0)] for made, _ in self.groups]
        used = [np.zeros(one.shape, np.int32) for one in codes]
        nearest, chosen = np.zeros(columns.shape), np.full((len(columns), k), -1)
        for place in range(k):
            best = np.where(free, worth - self.diversity * nearest if units is not None else worth, -np.inf).argmax(1)
            there = free[rows, best]
            if not there.any():
                break
            chosen[:, place] = np.where(there, best, -1)
            free[rows, best] = False
            if units is not None:
                cosines = np.matmul(units, units[rows, best][:, :, None])[:, :, 0]
                nearest = np.maximum(nearest, cosines) if place else cosines
            for one, counts, (_, most) in zip(codes, used, self.groups, strict=True):
                for value in one[rows, best].T:
                    counts += one == np.where(there & (value >= 0), value, -2)[:, None, None]
                free &= (counts < most).all(2)
        return chosen


def percentiles(values: Numbers, candidates: Rows) -> NDArray[np.float64]:
    """100 (c − h) / c of the best scores of rows that have c candidates each, in decreasing order."""
    places = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    same = np.pad(values[:, 1:] == values[:, :-1], ((0, 0), (1, 0)))  # equal scores have the place of the first
    higher = np.maximum.accumulate(np.where(same, 0, places), 1)
    return np.asarray(100.0 * (candidates[:, None] - higher) / np.maximum(candidates, 1)[:, None])


NO_RULES = Rules()


def need_calibration(probability: Probability | None) -> Probability:
    """The calibration of a model, refused if it has none."""
    if probability is None:
        expected = "a calibrated one: call model.calibrate(held_out_pairs), or gramtower calibrate RUN"
        check.fail("scores", "'probability' of a model that is not calibrated", expected)
    return probability


def make_rules(
    table: Callable[[], EntityTable], counts: Callable[[], NDArray[np.integer]], count: int,
    where: str | Mapping[str, object] | None = None, boost: Boost | None = None, popularity: float = 0.0,
    diversity: float = 0.0, at_most: Mapping[str, int] | None = None, min_score: float | None = None,
    scores: str = "raw", probability: Probability | None = None,
) -> Rules:  # fmt: skip
    """Check the arguments of ``recommend`` for ``count`` right entities, whose table and pairs are read if needed.

    ``probability`` is the calibration of the model, None if it has none.
    """
    popularity, diversity = check.number("popularity", popularity), check.number("diversity", diversity, minimum=0)
    if diversity > 1:
        check.fail("diversity", diversity, "a number from 0 to 1")
    least = None if min_score is None else check.number("min_score", min_score)
    calibrated = need_calibration(probability) if check.choice("scores", scores, SCORES) == "probability" else None
    added = np.zeros(count)
    if isinstance(boost, Mapping):
        for column, weight in boost.items():
            cells = table().numbers(column, "boost")
            if np.isinf(cells).any():
                raise TableError(f"boost: got infinity in column {column!r}, expected finite numbers")
            with np.errstate(over="ignore", invalid="ignore"):  # refused below
                added += check.number(f"boost[{column}]", weight) * np.nan_to_num(cells)
    elif boost is not None:
        given = check.as_array("boost", boost, "one number for each of model.right_.ids")
        if given.shape != (count,) or given.dtype.kind not in "biuf":
            expected = f"{count} numbers in the order of model.right_.ids, or a mapping of columns to weights"
            check.fail("boost", f"shape {given.shape} of {given.dtype}", expected)
        check.finite("boost", given)
        added += given
    if popularity:
        with np.errstate(over="ignore", invalid="ignore"):
            added += popularity * np.log1p(counts())
    if not (np.abs(added) < _LARGEST).all():
        check.fail("boost, popularity", "numbers that overflow", f"sums below {_LARGEST:g}")
    if calibrated is not None and least is not None and added.any():
        expected = "no boost and popularity with a least probability, as the most probable need not be the best then"
        check.fail("min_score", least, expected)
    if at_most is not None and not isinstance(at_most, Mapping):
        check.fail("at_most", type(at_most).__name__, 'a mapping such as {"category": 3}')
    quotas = {column: check.count(f"at_most[{column}]", most) for column, most in (at_most or {}).items()}
    return Rules(
        None if where is None else table().matching(where),
        added.astype(np.float32) if added.any() else None,
        tuple((table().codes(column, "at_most"), most) for column, most in quotas.items()),
        diversity,
        least,
        scores,
        calibrated,
    )

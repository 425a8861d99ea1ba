"""Splits of observed pairs into training and test: the same ids on both sides, a pair never in both.

Every split takes Interactions and a seed and is the same for the same seed. O(pairs log pairs) time at most. Users are
the left entities. Checked by tests/test_splits.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.times import moment


@dataclass(frozen=True)
class Split:
    """Training and test pairs of the same entities.

    Attributes:
        train: pairs to learn from.
        test: pairs held out.
        emptied_users: left entities that had pairs and have none in ``train``.
        emptied_items: right entities that had pairs and have none in ``train``.
        held_out_users: rows of left entities whose pairs were held out whole, for strong generalisation only.
        history: for strong generalisation, the pairs of held-out users that may be shown to the model; otherwise None.
    """

    train: Interactions
    test: Interactions
    emptied_users: int
    emptied_items: int
    held_out_users: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    history: Interactions | None = None

    def __repr__(self) -> str:
        history = "" if self.history is None else f", {len(self.history):,} as history"
        lost = f"{self.emptied_users:,} users and {self.emptied_items:,} items without training pairs"
        return f"Split({len(self.train):,} to train, {len(self.test):,} to test{history}; {lost})"


def random_pairs(pairs: Interactions, test: float = 0.1, *, seed: int = 0) -> Split:
    """Each test pair drawn from all pairs alike.

    Args:
        pairs: what to split.
        test: share of pairs to hold out, above 0 and below 1; rounded to whole pairs.
        seed: of the draw.
    """
    _checked(pairs)
    share = _share("test", test)
    chosen = np.zeros(len(pairs), dtype=bool)
    chosen[_generator(seed).permutation(len(pairs))[: round(share * len(pairs))]] = True
    return _split(pairs, chosen)


def per_user(pairs: Interactions, test: float = 0.2, *, minimum: int = 1, seed: int = 0) -> Split:
    """The same share of every user's pairs, rounded to the nearest whole number.

    Args:
        pairs: what to split.
        test: share of each user's pairs to hold out.
        minimum: pairs every user keeps for training, even when that leaves none to test.
        seed: of the draw.
    """
    _checked(pairs)
    share = _share("test", test)
    counts = np.diff(pairs.matrix.indptr).astype(np.int64)
    out = np.minimum(
        np.floor(share * counts + 0.5), counts - check.count("minimum", minimum, minimum=0, most=2**62)
    ).clip(0)
    rank = _ranks(pairs, _generator(seed).random(len(pairs)))
    return _split(pairs, rank < np.repeat(out, counts))


def leave_one_out(pairs: Interactions, *, minimum: int = 1, seed: int = 0) -> Split:
    """One pair of each user held out: the latest where there are times (ties drawn), otherwise one drawn at random.

    Args:
        pairs: what to split.
        minimum: pairs that must remain for training; users with fewer keep all of theirs.
        seed: of the draw.
    """
    _checked(pairs)
    counts = np.diff(pairs.matrix.indptr).astype(np.int64)
    draw = _generator(seed).random(len(pairs))
    rank = _ranks(pairs, draw, None if pairs.times is None else -pairs.times)
    enough = counts > check.count("minimum", minimum, minimum=0, most=2**62)
    return _split(pairs, (rank == 0) & np.repeat(enough, counts))


def by_time(pairs: Interactions, test: float | None = None, *, cut: Any = None, seed: int = 0) -> Split:
    """Training before, test from a moment on.

    Args:
        pairs: what to split; must have times.
        test: share of pairs to hold out, the latest ones; pairs of the same moment as the earliest of them are drawn.
            0.1 unless ``cut`` is given.
        cut: the moment, instead: pairs at or after it are held out. A number in the unit of the times, or a date,
            datetime, datetime64 or ISO 8601 text, UTC unless it has a zone.
        seed: of the draw.
    """
    _checked(pairs)
    generator = _generator(seed)
    if pairs.times is None:
        check.fail("pairs", "pairs without times", "pairs read with time=")
    if cut is not None:
        if test is not None:
            check.fail("cut", f"{cut} and test={test}", "one of them")
        return _split(pairs, pairs.times >= moment("cut", cut))
    share = _share("test", 0.1 if test is None else test)
    order = np.lexsort((generator.random(len(pairs)), pairs.times))
    chosen = np.zeros(len(pairs), dtype=bool)
    chosen[order[len(pairs) - round(share * len(pairs)) :]] = True
    return _split(pairs, chosen)


def held_out_users(pairs: Interactions, users: float = 0.1, *, history: float = 0.8, seed: int = 0) -> Split:
    """Strong generalisation: some users give no training pair at all.

    Args:
        pairs: what to split.
        users: share of the users with pairs to hold out, at least one.
        history: share of a held-out user's pairs that the model may be shown when it is asked (``Split.history``); the
            others are the test pairs. At least one of them is a test pair.
        seed: of the draw.
    """
    _checked(pairs)
    generator = _generator(seed)
    given = check.number("history", history, minimum=0.0)
    if given >= 1:
        check.fail("history", history, "a share from 0 to below 1")
    counts = np.diff(pairs.matrix.indptr)
    active = np.flatnonzero(counts)
    taken = max(1, round(_share("users", users) * len(active)))
    if taken >= len(active):
        check.fail("users", f"{users} of {len(active)} users with pairs", "a share that leaves some to learn from")
    rows = np.sort(generator.permutation(active)[:taken]).astype(np.int64)
    out = np.zeros(len(counts), dtype=bool)
    out[rows] = True
    held = np.repeat(out, counts)
    shown = np.minimum(np.floor(given * counts + 0.5), counts - 1)
    rank = _ranks(pairs, generator.random(len(pairs)))
    as_history = held & (rank < np.repeat(shown, counts))
    return _split(pairs, held & ~as_history, as_history, rows)


def _checked(pairs: object) -> None:
    if not isinstance(pairs, Interactions):
        check.fail("pairs", type(pairs).__name__, "gramtower.Interactions")


def _split(
    pairs: Interactions,
    test: NDArray[Any],
    history: NDArray[Any] | None = None,
    users: NDArray[np.int64] | None = None,
) -> Split:
    rest = ~test if history is None else ~(test | history)
    train, held = pairs.subset(rest), pairs.subset(test)
    for name, part in (("train", train), ("test", held)):
        if not len(part):
            check.fail("pairs", f"{len(pairs)} pairs, of which none would be in {name}", "a split with pairs in both")
    emptied = [int(((_degrees(pairs, axis) > 0) & (_degrees(train, axis) == 0)).sum()) for axis in (0, 1)]
    shown = None if history is None else pairs.subset(history)
    rows = np.empty(0, dtype=np.int64) if users is None else users
    return Split(train, held, emptied[0], emptied[1], rows, shown)


def _degrees(pairs: Interactions, axis: int) -> NDArray[Any]:
    if axis == 0:
        return np.asarray(np.diff(pairs.matrix.indptr))
    return np.bincount(pairs.matrix.indices, minlength=pairs.shape[1])


def _ranks(pairs: Interactions, draw: NDArray[Any], first: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """Place of each pair among its user's pairs, ordered by ``first`` and then by ``draw``."""
    counts = np.diff(pairs.matrix.indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((draw, rows) if first is None else (draw, first, rows))
    rank = np.empty(len(pairs), dtype=np.int64)
    rank[order] = np.arange(len(pairs)) - np.repeat(pairs.matrix.indptr[:-1], counts)
    return rank


def _share(name: str, value: object) -> float:
    share = check.number(name, value, above=0.0)
    if share >= 1:
        check.fail(name, value, "a share above 0 and below 1")
    return share


def _generator(seed: object) -> np.random.Generator:
    return np.random.default_rng(check.seed(seed))

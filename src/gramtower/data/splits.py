"""Splits of observed pairs into training and test parts; a pair is never in both.

Splits of pairs (random, per user, the last ones, by time, folds) keep the ids of both sides in all parts. Splits of
entities keep in each part only the entities that have pairs there: a held-out entity is not an empty row of the
training part, which a model would learn as an entity without any pairs.

Every split takes Interactions and a seed, and the same seed gives the same split. Users are the left entities and items
the right ones. Cost: O(pairs log pairs) time at most.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower.data.ids import moment
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import ranks


@dataclass(frozen=True)
class Split:
    """Training and test pairs.

    Attributes:
        train: training pairs.
        test: held-out pairs.
        emptied_users: number of left entities that had pairs and have none in ``train``.
        emptied_items: number of right entities that had pairs and have none in ``train``.
        held_out_users: rows of the held-out left entities in the pairs that were split.
        held_out_items: the same for right entities.
        history: for :func:`held_out_users`, the pairs of held-out users that may be shown to the model; otherwise None.
    """

    train: Interactions
    test: Interactions
    emptied_users: int
    emptied_items: int
    held_out_users: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    held_out_items: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    history: Interactions | None = None

    def __repr__(self) -> str:
        history = "" if self.history is None else f", {len(self.history):,} as history"
        lost = f"{self.emptied_users:,} users and {self.emptied_items:,} items without training pairs"
        return f"Split({len(self.train):,} to train, {len(self.test):,} to test{history}; {lost})"

    def _repr_html_(self) -> str:
        parts = {"train": self.train, "test": self.test, "history": self.history}
        rows = [(name, len(part), *part.shape) for name, part in parts.items() if part is not None]
        lost = f"{self.emptied_users:,} users and {self.emptied_items:,} items have no training pairs"
        return html.card("Split", html.table(("part", "pairs", "left", "right"), rows), html.note(lost))


def random_pairs(pairs: Interactions, test: float = 0.1, *, seed: int = 0) -> Split:
    """Hold out random pairs.

    Args:
        pairs: the pairs to split.
        test: share of pairs to hold out, above 0 and below 1; rounded to whole pairs.
        seed: seed of the random choice.
    """
    order = _generator(pairs, seed).permutation(len(pairs))
    return _split(pairs, _mask(len(pairs), order[: round(_share("test", test) * len(pairs))]))


def per_user(pairs: Interactions, test: float = 0.2, *, minimum: int = 1, seed: int = 0) -> Split:
    """Hold out the same share of every user's pairs, rounded to the nearest whole number.

    Args:
        pairs: the pairs to split.
        test: share of each user's pairs to hold out.
        minimum: pairs that every user keeps for training, even if none is left for the test.
        seed: seed of the random choice.
    """
    generator, share = _generator(pairs, seed), _share("test", test)
    return _split(pairs, per_user_mask(pairs.matrix, share, minimum, generator))


def per_user_mask(
    matrix: sp.csr_matrix, share: float, minimum: int, generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Which pairs :func:`per_user` holds out; the generator draws one number for each."""
    counts = np.diff(matrix.indptr).astype(np.int64)
    kept = check.count("minimum", minimum, minimum=0, most=2**62)
    out = np.minimum(np.floor(share * counts + 0.5), counts - kept).clip(0)
    return ranks(matrix, generator.random(matrix.nnz)) < np.repeat(out, counts)


def leave_one_out(pairs: Interactions, *, minimum: int = 1, seed: int = 0) -> Split:
    """Hold out one pair of each user: the latest (ties at random), or a random one without times.

    Args:
        pairs: the pairs to split.
        minimum: pairs that must remain for training; users with fewer keep all their pairs.
        seed: seed of the random choice.
    """
    return _split(pairs, _last(pairs, 1, minimum, seed))


def leave_last(pairs: Interactions, count: int = 1, *, minimum: int = 1, seed: int = 0) -> Split:
    """Hold out the latest pairs of each user; among pairs of the same time the choice is random.

    Args:
        pairs: the pairs to split; they must have times.
        count: number of pairs of each user to hold out.
        minimum: pairs that every user keeps for training, even if fewer than ``count`` are left for the test.
        seed: seed of the random choice.
    """
    _need_times(pairs)
    return _split(pairs, _last(pairs, check.count("count", count, most=2**62), minimum, seed))


def by_time(
    pairs: Interactions, test: float | None = None, *, cut: float | str | datetime.date | None = None, seed: int = 0
) -> Split:
    """Split by time: train on earlier pairs, test on later ones.

    Args:
        pairs: the pairs to split; they must have times.
        test: share of the latest pairs to hold out, 0.1 unless ``cut`` is given; among pairs at the time of the split
            the choice is random.
        cut: alternatively, the time from which on pairs are held out: a number in the unit of the times, or a date,
            datetime, datetime64 or ISO 8601 text, UTC unless it has a zone.
        seed: seed of the random choice.
    """
    generator, times = _generator(pairs, seed), _need_times(pairs)
    if cut is not None:
        if test is not None:
            check.fail("cut", f"{cut} and test={test}", "one of them")
        return _split(pairs, times >= moment("cut", cut))
    share = _share("test", 0.1 if test is None else test)
    order = np.lexsort((generator.random(len(pairs)), times))
    return _split(pairs, _mask(len(pairs), order[len(pairs) - round(share * len(pairs)) :]))


def held_out(pairs: Interactions, side: str = "left", share: float = 0.2, *, seed: int = 0) -> Split:
    """Hold out some entities of a side with all their pairs, to test a model on unseen entities.

    ``train`` has the entities with remaining pairs and ``test`` those of the held-out pairs. Entities of the other side
    that had pairs only with held-out entities are not in ``train`` either; they are counted.

    Args:
        pairs: the pairs to split.
        side: "left" or "right".
        share: share of the entities with pairs to hold out, at least one.
        seed: seed of the random choice.
    """
    axis = ("left", "right").index(check.choice("side", side, ("left", "right")))
    order = _entities(pairs, axis, seed)
    return _without(pairs, axis, order[: _taken("share", share, len(order), f"{side} entities")])


def held_out_users(pairs: Interactions, users: float = 0.1, *, history: float = 0.8, seed: int = 0) -> Split:
    """Hold out users; a part of their pairs can be shown to the model later (strong generalisation).

    ``train`` has the other users and their items, ``test`` and ``history`` only the held-out users.

    Args:
        pairs: the pairs to split.
        users: share of the users with pairs to hold out, at least one.
        history: share of a held-out user's pairs that may be shown to the model (``Split.history``); the others, at
            least one, are the test pairs.
        seed: seed of the random choice.
    """
    generator = _generator(pairs, seed)
    given = check.number("history", history, minimum=0.0)
    if given >= 1:
        check.fail("history", history, "a share from 0 to below 1")
    counts = np.diff(pairs.matrix.indptr)
    active = np.flatnonzero(counts)
    rows = generator.permutation(active)[: _taken("users", users, len(active), "users")]
    shown = np.minimum(np.floor(given * counts + 0.5), counts - 1)
    rank = ranks(pairs.matrix, generator.random(len(pairs)))
    return _without(pairs, 0, rows, rank < np.repeat(shown, counts))


def folds(pairs: Interactions, count: int = 5, *, by: str = "pairs", seed: int = 0) -> Iterator[Split]:
    """Yield the splits of a cross-validation; every pair is in the test part of one of them.

    Args:
        pairs: the pairs to split.
        count: number of folds, at least 2.
        by: "pairs", or "left" or "right" for the entities of a side with all their pairs, as in :func:`held_out`. The
            sizes of the folds differ by at most one pair or entity.
        seed: seed of the random choice.

    Returns:
        A generator of splits.
    """
    axis = ("left", "right", "pairs").index(check.choice("by", by, ("pairs", "left", "right")))
    order = _entities(pairs, axis, seed) if axis < 2 else _generator(pairs, seed).permutation(len(pairs))
    if check.count("count", count, minimum=2, most=2**62) > len(order):
        what = "pairs" if axis == 2 else f"{by} entities with pairs"
        check.fail("count", f"{count} folds of {len(order)} {what}", "at most one fold for each")
    bounds = [len(order) * fold // count for fold in range(count + 1)]
    parts = (order[first:last] for first, last in pairwise(bounds))
    return (_split(pairs, _mask(len(pairs), part)) if axis == 2 else _without(pairs, axis, part) for part in parts)


def _generator(pairs: object, seed: object) -> np.random.Generator:
    _checked(pairs)
    return np.random.default_rng(check.seed(seed))


def _checked(pairs: object) -> None:
    if not isinstance(pairs, Interactions):
        check.fail("pairs", type(pairs).__name__, "gramtower.Interactions")


def _need_times(pairs: Interactions) -> NDArray[np.float64]:
    _checked(pairs)
    if pairs.times is None:
        check.fail("pairs", "pairs without times", "pairs with times: name their column of times")
    return pairs.times


def _last(pairs: Interactions, count: int, minimum: object, seed: object) -> NDArray[np.bool_]:
    """A mask of the last pairs of each user, by time if there are times, that leaves ``minimum`` pairs."""
    generator, counts = _generator(pairs, seed), _degrees(pairs, 0).astype(np.int64)
    rank = ranks(pairs.matrix, generator.random(len(pairs)), *([] if pairs.times is None else [-pairs.times]))
    out = np.minimum(count, counts - check.count("minimum", minimum, minimum=0, most=2**62)).clip(0)
    return np.asarray(rank < np.repeat(out, counts))


def _entities(pairs: Interactions, axis: int, seed: object) -> NDArray[np.int64]:
    """The entities of a side that have pairs, in a random order."""
    return _generator(pairs, seed).permutation(np.flatnonzero(_degrees(pairs, axis)))


def _taken(name: str, share: object, there: int, what: str) -> int:
    taken = max(1, round(_share(name, share) * there))
    if taken >= there:
        check.fail(name, f"{share} of {there} {what} with pairs", "a share that leaves some to learn from")
    return taken


def _mask(size: int, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(size, dtype=bool)
    mask[places] = True
    return mask


def _without(
    pairs: Interactions, axis: int, entities: NDArray[np.int64], shown: NDArray[np.bool_] | None = None
) -> Split:
    """Hold out all pairs of some entities, except ``history``; no part has an entity without pairs."""
    own = np.sort(entities).astype(np.int64)
    out = _mask(pairs.shape[axis], own)
    held = np.repeat(out, np.diff(pairs.matrix.indptr)) if axis == 0 else out[pairs.matrix.indices]
    found = _split(pairs, held if shown is None else held & ~shown, None if shown is None else held & shown)
    names = ("train", "test") if found.history is None else ("train", "test", "history")
    changed: dict[str, Any] = {name: getattr(found, name).without_empty() for name in names}
    changed["held_out_users" if axis == 0 else "held_out_items"] = own
    return replace(found, **changed)


def _split(pairs: Interactions, test: NDArray[np.bool_], history: NDArray[np.bool_] | None = None) -> Split:
    rest = ~test if history is None else ~(test | history)
    train, held = pairs.subset(rest), pairs.subset(test)
    for name, part in (("train", train), ("test", held)):
        if not len(part):
            check.fail("pairs", f"{len(pairs)} pairs, of which none would be in {name}", "a split with pairs in both")
    users, items = (int(((_degrees(pairs, axis) > 0) & (_degrees(train, axis) == 0)).sum()) for axis in (0, 1))
    return Split(train, held, users, items, history=None if history is None else pairs.subset(history))


def _degrees(pairs: Interactions, axis: int) -> NDArray[np.integer]:
    if axis == 0:
        return np.asarray(np.diff(pairs.matrix.indptr))
    return np.bincount(pairs.matrix.indices, minlength=pairs.shape[1])


def _share(name: str, value: object) -> float:
    share = check.number(name, value, above=0.0)
    if share >= 1:
        check.fail(name, value, "a share above 0 and below 1")
    return share

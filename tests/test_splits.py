"""Splits: nothing lost, nothing in both parts, the promised shares, and the same draw for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from gramtower.data import splits
from gramtower.data.interactions import Interactions


def sample(times=True, seed=0):
    rng = np.random.default_rng(seed)
    left, right = rng.integers(0, 40, 900), (40 * rng.random(900) ** 2).astype(int)
    return Interactions.from_arrays(left, right, time=rng.integers(0, 50, 900) if times else None)


ALL = {
    "random": splits.random_pairs,
    "per_user": splits.per_user,
    "leave_one_out": splits.leave_one_out,
    "by_time": splits.by_time,
    "held_out_users": splits.held_out_users,
}


def dense(pairs):
    return pairs.matrix.toarray() != 0


@pytest.mark.parametrize("name", ALL)
def test_every_pair_is_in_one_part_only(name):
    pairs = sample()
    split = ALL[name](pairs, seed=1)
    parts = [split.train, split.test] + ([split.history] if split.history is not None else [])
    assert (sum(dense(part).astype(int) for part in parts) == dense(pairs)).all()
    assert all(part.left_ids is pairs.left_ids and part.right_ids is pairs.right_ids for part in parts)
    assert sum(part.times.sum() for part in parts) == pairs.times.sum()


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides(name):
    pairs = sample()
    first, again, other = (ALL[name](pairs, seed=seed) for seed in (5, 5, 6))
    assert (dense(first.test) == dense(again.test)).all()
    assert (dense(first.test) != dense(other.test)).any()


def test_random_pairs_takes_the_share():
    pairs = sample()
    assert len(splits.random_pairs(pairs, 0.25).test) == round(0.25 * len(pairs))


def test_per_user_takes_the_share_of_each_user():
    pairs = sample()
    split = splits.per_user(pairs, 0.3)
    counts, out = dense(pairs).sum(1), dense(split.test).sum(1)
    assert (abs(out - 0.3 * counts) <= 0.5).all()
    single = Interactions.from_arrays(list("abbbbb"), list("xxyzvw"))
    kept = splits.per_user(single, 0.6)
    assert (dense(kept.train).sum(1).tolist(), kept.emptied_users) == ([1, 2], 0)
    assert splits.per_user(single, 0.6, minimum=0).emptied_users == 1


def test_leave_one_out_holds_out_the_latest():
    pairs = Interactions.from_arrays(list("aaabc"), list("xyzxy"), time=[3, 9, 1, 5, 5])
    split = splits.leave_one_out(pairs)
    assert dense(split.test).tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert splits.leave_one_out(pairs, minimum=0).emptied_users == 2
    untimed = splits.leave_one_out(sample(times=False))
    counts = dense(untimed.train).sum(1) + dense(untimed.test).sum(1)
    assert (dense(untimed.test).sum(1) == (counts > 1)).all()


def test_by_time_trains_on_the_past():
    pairs = sample()
    split = splits.by_time(pairs, 0.2)
    assert len(split.test) == round(0.2 * len(pairs))
    assert split.train.times.max() <= split.test.times.min()
    at = splits.by_time(pairs, cut=25)
    assert at.train.times.max() < 25 <= at.test.times.min()


def test_held_out_users_give_no_training_pair():
    pairs = sample()
    split = splits.held_out_users(pairs, 0.25, history=0.6)
    rows = split.held_out_users
    assert len(rows) == 10 == split.emptied_users
    assert dense(split.train)[rows].sum() == 0
    shown, asked = dense(split.history)[rows].sum(1), dense(split.test)[rows].sum(1)
    assert (asked >= 1).all()
    assert (abs(shown - 0.6 * (shown + asked)) <= 0.5).all()
    others = np.setdiff1d(np.arange(40), rows)
    assert dense(split.test)[others].sum() == dense(split.history)[others].sum() == 0


def test_users_and_items_without_training_pairs_are_counted():
    pairs = Interactions.from_arrays(list("aab"), list("xyz"), time=[1, 2, 3])
    split = splits.by_time(pairs, cut=2)
    assert (split.emptied_users, split.emptied_items) == (1, 2)
    assert "1 users and 2 items without training pairs" in repr(split)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: splits.random_pairs(p, 1.0), "test: got 1.0"),
        (lambda p: splits.random_pairs(p, 0.1, seed=-1), "seed"),
        (lambda p: splits.random_pairs(p, 1e-6), "none would be in test"),
        (lambda p: splits.by_time(p), "pairs without times"),
        (lambda p: splits.held_out_users(p, 0.999), "leaves some to learn from"),
        (lambda p: splits.held_out_users(p, history=1.0), "history"),
        (lambda p: splits.leave_one_out(p, minimum=-1), "minimum"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(sample(times=False))

"""Splits: nothing lost, nothing in both parts, the promised shares, and the same draw for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

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
    "leave_last": lambda pairs, seed: splits.leave_last(pairs, 3, seed=seed),
    "by_time": splits.by_time,
    "held_out_users": splits.held_out_users,
    "held_out_left": lambda pairs, seed: splits.held_out(pairs, "left", seed=seed),
    "held_out_right": lambda pairs, seed: splits.held_out(pairs, "right", seed=seed),
    "fold": lambda pairs, seed: next(splits.folds(pairs, 4, seed=seed)),
    "fold_left": lambda pairs, seed: next(splits.folds(pairs, 4, by="left", seed=seed)),
    "fold_right": lambda pairs, seed: next(splits.folds(pairs, 4, by="right", seed=seed)),
}
OF_ENTITIES = ("held_out_users", "held_out_left", "held_out_right", "fold_left", "fold_right")


def dense(pairs):
    return pairs.matrix.toarray() != 0


def by_id(pairs):
    """Pairs of ids with what belongs to each."""
    entries = pairs.matrix.tocoo()
    ids = zip(pairs.left_ids[entries.row].tolist(), pairs.right_ids[entries.col].tolist(), strict=True)
    return dict(zip(ids, zip(entries.data, pairs.times, strict=True), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_every_pair_is_in_one_part_only(name):
    pairs = sample()
    split = ALL[name](pairs, seed=1)
    parts = [split.train, split.test] + ([split.history] if split.history is not None else [])
    joined = {}
    for part in parts:
        assert not joined.keys() & by_id(part).keys()
        joined |= by_id(part)
    assert joined == by_id(pairs)
    assert len(joined) == sum(map(len, parts))
    if name not in OF_ENTITIES:
        assert all(part.left_ids is pairs.left_ids and part.right_ids is pairs.right_ids for part in parts)


@pytest.mark.parametrize("name", OF_ENTITIES)
def test_entities_that_were_held_out_leave_no_empty_rows_or_columns(name):
    pairs = sample()
    split = ALL[name](pairs, seed=2)
    for part in (split.train, split.test, split.history):
        if part is not None:
            assert dense(part).any(0).all()
            assert dense(part).any(1).all()
    sides = (("left", split.held_out_users, 0), ("right", split.held_out_items, 1))
    for side, rows, axis in sides:
        held = set(getattr(pairs, f"{side}_ids")[rows].tolist())
        assert not held & set(getattr(split.train, f"{side}_ids").tolist())
        if held:
            assert held == set(getattr(split.test, f"{side}_ids").tolist())
        before = (dense(pairs).any(1 - axis)).sum()
        gone = (split.emptied_users, split.emptied_items)[axis]
        assert split.train.shape[axis] == before - gone
    assert len(split.held_out_users) + len(split.held_out_items) > 0


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides(name):
    pairs = sample()
    first, again, other = (by_id(ALL[name](pairs, seed=seed).test) for seed in (5, 5, 6))
    assert first == again
    assert first != other


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


def test_leave_last_holds_out_the_latest_of_each_user():
    pairs = sample()
    split = splits.leave_last(pairs, 4, minimum=2)
    counts, out = dense(pairs).sum(1), dense(split.test).sum(1)
    assert (out == np.minimum(4, counts - 2).clip(0)).all()
    train, test = split.train.matrix.copy(), split.test.matrix.copy()
    train.data, test.data = split.train.times + 1, split.test.times + 1  # above 0
    for row in np.flatnonzero(out):
        assert train[row].data.max() <= test[row].data.min()
    one = splits.leave_last(pairs, 1, seed=4)
    assert by_id(one.test) == by_id(splits.leave_one_out(pairs, seed=4).test)


def test_held_out_users_give_no_training_pair():
    pairs = sample()
    split = splits.held_out_users(pairs, 0.25, history=0.6)
    assert len(split.held_out_users) == 10 == split.emptied_users
    held = pairs.left_ids[split.held_out_users].tolist()
    assert split.test.left_ids.tolist() == held
    assert split.train.shape[0] == 30
    counts = dense(pairs)[split.held_out_users].sum(1)
    asked = dense(split.test).sum(1)
    assert (asked >= 1).all()
    assert (abs(counts - asked - 0.6 * counts) <= 0.5).all()
    assert set(split.history.left_ids.tolist()) <= set(held)


@pytest.mark.parametrize("side", ["left", "right"])
def test_held_out_takes_the_share_of_the_entities_with_pairs(side):
    pairs = sample()
    split = splits.held_out(pairs, side, 0.3)
    active = int(dense(pairs).any(1 if side == "left" else 0).sum())
    rows = split.held_out_users if side == "left" else split.held_out_items
    assert len(rows) == round(0.3 * active)
    assert len(split.test) == (dense(pairs)[rows] if side == "left" else dense(pairs)[:, rows]).sum()


def test_entities_without_pairs_before_the_split_are_not_in_its_parts():
    pairs = Interactions.from_matrix(sp.csr_matrix([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]]))
    split = splits.held_out(pairs, "left", 0.34)
    assert 1 not in {*split.train.left_ids.tolist(), *split.test.left_ids.tolist()}
    assert 2 not in {*split.train.right_ids.tolist(), *split.test.right_ids.tolist()}


@pytest.mark.parametrize("by", ["pairs", "left", "right"])
def test_folds_test_every_pair_once(by):
    pairs = sample()
    made = list(splits.folds(pairs, 7, by=by, seed=3))
    joined = {}
    for split in made:
        assert not joined.keys() & by_id(split.test).keys()
        joined |= by_id(split.test)
        assert by_id(split.test) | by_id(split.train) == by_id(pairs)
    assert joined == by_id(pairs)
    sizes = {
        "pairs": [len(split.test) for split in made],
        "left": [len(split.held_out_users) for split in made],
        "right": [len(split.held_out_items) for split in made],
    }[by]
    assert len(made) == 7
    assert max(sizes) - min(sizes) <= 1


def test_features_by_place_follow_the_ids_of_the_training_part():
    """The README's way with a matrix: rows of the training part are found by id."""
    pairs = sample()
    features = np.arange(pairs.shape[0])
    split = splits.held_out(pairs, "left", 0.3)
    assert (pairs.left_ids[features[pairs.left_rows(split.train.left_ids)]] == split.train.left_ids).all()


def test_users_and_items_without_training_pairs_are_counted():
    pairs = Interactions.from_arrays(list("aab"), list("xyz"), time=[1, 2, 3])
    split = splits.by_time(pairs, cut=2)
    assert (split.emptied_users, split.emptied_items) == (1, 2)
    assert "1 users and 2 items without training pairs" in repr(split)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: splits.random_pairs(p, 1.0), r"test.*1.0"),
        (lambda p: splits.random_pairs(p, 0.1, seed=-1), "seed"),
        (lambda p: splits.random_pairs(p, 1e-6), "none would be in test"),
        (lambda p: splits.by_time(p), "pairs without times"),
        (lambda p: splits.leave_last(p), "pairs without times"),
        (lambda p: splits.leave_last(sample(), 0), r"count.*0"),
        (lambda p: splits.held_out(p, "middle"), r"side.*'middle'.*'left'.*'right'"),
        (lambda p: splits.held_out(p, "left", 0), r"share.*0"),
        (lambda p: splits.held_out(p, "left", 1.5), r"share.*1.5"),
        (lambda p: splits.held_out(p, "right", 0.999), "of .* right entities with pairs, expected a share that leaves"),
        (lambda p: splits.folds(p, 1), r"count.*1"),
        (lambda p: splits.folds(p, 41, by="left"), r"count.*41.*40"),
        (lambda p: splits.folds(p, 10**6), r"count.*1000000"),
        (lambda p: splits.folds(p, by="user"), r"by:.*'user'"),
        (lambda p: splits.folds(p.matrix), r"pairs.*csr_matrix"),
        (lambda p: splits.held_out_users(p, 0.999), "leaves some to learn from"),
        (lambda p: splits.held_out_users(p, history=1.0), "history"),
        (lambda p: splits.leave_one_out(p, minimum=-1), "minimum"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(sample(times=False))

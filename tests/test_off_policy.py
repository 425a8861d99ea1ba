"""Off-policy estimates: against plain loops, against a known truth, in the shell, and bad input."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import numpy as np
import pytest

import gramtower as gt
from gramtower.metrics import linear_rewards, list_targets, off_policy


def loops(r, p, target, predicted, expected, clip):
    """The estimates, their standard errors and the effective sample size, one event after the other."""
    n = len(r)
    w = [min(target[t] / p[t], clip) for t in range(n)]
    ips = sum(w[t] * r[t] for t in range(n)) / n
    snips = sum(w[t] * r[t] for t in range(n)) / sum(w)
    terms = [expected[t] + w[t] * (r[t] - predicted[t]) for t in range(n)]
    dr = sum(terms) / n
    errors = [
        math.sqrt(sum((w[t] * r[t] - ips) ** 2 for t in range(n)) / (n - 1) / n),
        math.sqrt(sum((w[t] * (r[t] - snips)) ** 2 for t in range(n)) * n / (n - 1)) / sum(w),
        math.sqrt(sum((one - dr) ** 2 for one in terms) / (n - 1) / n),
    ]
    return [ips, snips, dr], errors, sum(w) ** 2 / sum(one * one for one in w)


def logged(n, seed, users=30, items=12, k=3):
    """Events of a random logging policy, the lists of a new one, and the true value of these lists."""
    rng = np.random.default_rng(seed)
    world = np.random.default_rng(0)  # the same for all seeds
    click = world.random((users, items)) ** 2
    policy = world.dirichlet(np.ones(items) * 2, users) * 0.8 + 0.2 / items
    lists = np.argsort(-(click + world.normal(size=click.shape) * 0.2), 1)[:, :k]
    user = rng.integers(users, size=n)
    item = (rng.random((n, 1)) > policy[user].cumsum(1)).sum(1).clip(0, items - 1)
    reward = (rng.random(n) < click[user, item]).astype(float)
    guess = np.clip(click + world.normal(size=click.shape) * 0.05, 0, 1)  # an imperfect prediction
    value = np.take_along_axis(click, lists, 1).mean()
    predicted, expected = guess[user, item], np.take_along_axis(guess, lists, 1).mean(1)[user]
    return reward, policy[user, item], list_targets(lists[user], item), predicted, expected, value


@pytest.mark.parametrize("clip", [math.inf, 2.5])
def test_estimates_and_errors_are_those_of_plain_loops(clip):
    r, p, target, predicted, expected, _ = logged(400, 1)
    given = {} if clip == math.inf else {"clip": clip}
    found = off_policy(r, p, target, predicted=predicted, expected=expected, confidence=0.9, **given)
    values, errors, size = loops(r, p, target, predicted, expected, clip)
    z = NormalDist().inv_cdf(0.95)
    for (name, *one), value, error in zip(found.rows(), values, errors, strict=True):
        assert one == pytest.approx([value, error, value - z * error, value + z * error]), name
    assert found.effective_sample_size == pytest.approx(size)
    assert found.events == 400
    assert found.matched == (target > 0).sum()
    assert found.clipped == (target / p > clip).sum()
    assert found.logged == pytest.approx(r.mean())


def test_estimates_are_unbiased_and_intervals_hold_the_truth():
    runs, n = 400, 300
    found, truth = [], 0.0
    for seed in range(runs):
        r, p, target, predicted, expected, truth = logged(n, seed)
        found.append(off_policy(r, p, target, predicted=predicted, expected=expected))
    for name in ("ips", "snips", "dr"):
        values = np.array([getattr(one, name).value for one in found])
        bias, error = values.mean() - truth, values.std() / math.sqrt(runs)
        assert abs(bias) < 4 * error, name
        said = np.mean([getattr(one, name).standard_error for one in found])
        assert said == pytest.approx(values.std(), rel=0.15), name
        inside = np.mean([getattr(one, name).low <= truth <= getattr(one, name).high for one in found])
        assert 0.9 < inside < 0.99, name
    spread = {name: np.std([getattr(one, name).value for one in found]) for name in ("ips", "snips", "dr")}
    assert spread["dr"] < spread["snips"] < spread["ips"]
    clipped = np.mean([off_policy(*logged(n, seed)[:3], clip=2.0).ips.value for seed in range(50)])
    assert clipped < truth - 0.01


def test_bootstrap_intervals_are_those_of_draws_and_of_a_seed():
    r, p, target, predicted, expected, _ = logged(2000, 3)
    options = dict(predicted=predicted, expected=expected)
    normal = off_policy(r, p, target, **options)
    drawn = off_policy(r, p, target, **options, interval="bootstrap", samples=400, seed=1)
    for a, b in zip(normal.rows(), drawn.rows(), strict=True):
        assert a[1] == b[1]
        assert b[2:] == pytest.approx(a[2:], rel=0.12)
    assert drawn == off_policy(r, p, target, **options, interval="bootstrap", samples=400, seed=1)
    assert drawn != off_policy(r, p, target, **options, interval="bootstrap", samples=400, seed=2)
    assert off_policy(r, p, target).dr is None


def test_the_policy_of_the_log_has_the_value_of_the_log():
    r, p, *_ = logged(500, 4)
    found = off_policy(r, p, p)
    assert found.ips.value == found.snips.value == pytest.approx(r.mean())
    assert found.effective_sample_size == pytest.approx(500)


def test_targets_of_lists_count_their_places():
    names = np.array([["a", "b", None], ["b", None, None], [None, None, None]], object)
    assert list_targets(names, ["b", "b", "b"]).tolist() == [0.5, 1.0, 0.0]
    assert list_targets([[3, 5], [4, -1]], np.array([5, 3])).tolist() == [0.5, 0.0]


def test_a_line_through_scores_learns_from_the_other_half():
    rng = np.random.default_rng(0)
    x, lists = rng.normal(size=40), rng.normal(size=(40, 3))
    lists[3], lists[4, 1:] = -math.inf, -math.inf
    predicted, expected = linear_rewards(2 + 3 * x, x, lists)
    np.testing.assert_allclose(predicted, 2 + 3 * x)
    assert expected[3] == 0
    assert expected[4] == pytest.approx(2 + 3 * lists[4, 0])
    np.testing.assert_allclose(expected[5:], 2 + 3 * lists[5:].mean(1))
    other = 2 + 3 * x
    other[::2] += 100
    assert linear_rewards(other, x, lists)[0][::2] == pytest.approx((2 + 3 * x)[::2])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rewards": [1, math.nan, 0]}, "rewards.*nan"),
        ({"rewards": [1, math.inf, 0]}, "rewards"),
        ({"rewards": []}, "rewards"),
        ({"rewards": "abc"}, "rewards"),
        ({"propensities": [0.5, 0.0, 1]}, "propensities"),
        ({"propensities": [0.5, 1.1, 1]}, "propensities.*1.1"),
        ({"propensities": [0.5, math.nan, 1]}, "propensities"),
        ({"propensities": [0.5, 0.1]}, "propensities"),
        ({"propensities": [0.5, 1e-320, 1]}, "propensities.*clip"),
        ({"targets": [0.5, -0.1, 1]}, "targets"),
        ({"targets": [0.5, 2, 1]}, "targets"),
        ({"targets": [0, 0, 0]}, "targets"),
        ({"targets": [[0.5, 0.1, 1]]}, "targets"),
        ({"predicted": [1, 1, 1]}, "predicted, expected"),
        ({"predicted": [1, 1], "expected": [1, 1, 1]}, "predicted"),
        ({"clip": 0}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"confidence": 1.0}, "confidence"),
        ({"interval": "t"}, "interval"),
        ({"samples": 1}, "samples"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_input_is_refused_by_name(change, name):
    given = {"rewards": [1, 0, 1], "propensities": [0.5, 0.2, 1], "targets": [1, 1, 0]} | change
    with pytest.raises(ValueError, match=f"^{name}"):
        off_policy(**given)


def test_lists_and_scores_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"^lists, shown"):
        list_targets([[1, 2]], [1, 2])
    with pytest.raises(ValueError, match=r"^list_scores"):
        linear_rewards([1, 0, 1, 0], [1, 2, 3, 4], [[1, 2]])
    with pytest.raises(ValueError, match=r"^rewards"):
        linear_rewards([1, 0], [1, 2], [[1], [2]])


def test_the_shell_estimates_the_reward_of_the_lists_of_a_model(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pytest.importorskip("polars", reason="the command line reads tables with polars")
    from gramtower.cli.program import run

    rng = np.random.default_rng(0)
    users, items = rng.integers(40, size=900), rng.integers(25, size=900)
    alike = users % 4 == items % 4
    pairs = gt.Interactions.from_arrays([f"u{i}" for i in users[alike]], [f"i{j}" for j in items[alike]])
    model = gt.TwoTower(dim=4, hidden=(), max_iterations=4, select=False, device="cpu").fit(pairs)
    model.save(tmp_path / "m.gramtower")
    user, item, p = rng.integers(42, size=600), rng.integers(26, size=600), rng.uniform(0.02, 0.2, 600)
    r = (rng.random(600) < np.where(user % 4 == item % 4, 0.5, 0.1)).astype(int)
    rows = [f"u{a},i{b},{c},{d}" for a, b, c, d in zip(user, item, r, p, strict=True)]
    (tmp_path / "log.csv").write_text("who,what,click,prob\n" + "\n".join(rows))
    base = ["off-policy", str(tmp_path / "m.gramtower"), str(tmp_path / "log.csv"), "--reward", "click", "-k", "5"]
    command = [*base, "--left", "who", "--right", "what", "--propensity", "prob"]
    assert run([*command, "--json", "--clip", "20"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    known = np.isin([f"u{a}" for a in user], model.left_.ids)
    assert f"{(~known).sum()} of 600 events" in err
    left, right = [f"u{a}" for a in user[known]], [f"i{b}" for b in item[known]]
    lists, scores = model.recommend(left, k=5)
    target = [0.2 if b in row else 0.0 for b, row in zip(right, lists.tolist(), strict=True)]
    there = np.isin(right, model.right_.ids)
    x = [model.predict(a, b)[0] if t else 0.0 for a, b, t in zip(left, right, there, strict=True)]
    predicted, expected = linear_rewards(r[known], x, scores)
    wanted = off_policy(r[known], p[known], target, predicted=predicted, expected=expected, clip=20)
    for one, row in zip(found["estimates"], wanted.rows(), strict=True):
        assert [*one.values()] == [row[0], *map(pytest.approx, row[1:])]
    assert found["matched"] == wanted.matched
    assert run(command) == 0
    assert "effective_sample_size" in capsys.readouterr().out
    (tmp_path / "bad.csv").write_text("left,right,reward,propensity\nu1,i1,1,0\nu2,i2,,0.5\n")
    for left, chance, text in (("who", "nope", "--propensity"), ("what", "prob", "LOG"), ("nope", "prob", "--left")):
        assert run([*base, "--left", left, "--right", "what", "--propensity", chance]) == 2
        assert text in capsys.readouterr().err
    assert run([*command[:2], str(tmp_path / "bad.csv"), "--include-seen", "-k", "25"]) == 2
    assert "rewards" in capsys.readouterr().err
    assert run([*command[:-1], "who"]) == 2
    assert "--propensity: got 'u" in capsys.readouterr().err

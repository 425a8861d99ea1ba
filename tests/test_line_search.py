"""Backtracking: the paper's sequence of steps, sufficient decrease, and an end at the rounding level."""

from __future__ import annotations

import pytest
import torch
from cases import make_case

from gramtower.optim.descent import Backtracking


def start(dtype=torch.float64, seed=0):
    case = make_case(m=8, n=7, seed=seed, dtype=dtype)
    point = case.problem.at(case.towers)
    return point, point.gradient()


def test_step_is_the_first_halving_with_sufficient_decrease():
    point, g = start()
    taken = Backtracking(1e-4).take(point, -g.dot(g), -g)
    assert taken.point.value <= point.value - 1e-4 * taken.size * g.dot(g)
    assert taken.size == 2.0 ** -(taken.trials - 1)
    longer = point.along(-g)(2 * taken.size)
    assert taken.trials == 1 or longer.value > point.value - 1e-4 * 2 * taken.size * g.dot(g)


def test_starts_from_the_last_step_and_doubles_every_five():
    rule = Backtracking(1e-4, initial_step=2.0**-12)
    point, g = start()
    sizes = []
    for _ in range(11):
        taken = rule.take(point, -g.dot(g), -g)
        sizes.append(taken.size)
        point, g = taken.point, taken.point.gradient()
    assert sizes == [2.0**-12] * 5 + [2.0**-11] * 5 + [2.0**-10]


def test_a_step_into_overflow_is_halved_like_any_other():
    point, g = start(torch.float32)
    taken = Backtracking(1e-4, initial_step=2.0**100, max_trials=200).take(point, -g.dot(g), -g)
    assert taken.point is not None
    assert taken.point.value < point.value


@pytest.mark.parametrize("power", range(0, 120, 8))
def test_a_trial_that_is_all_rounding_is_not_taken_for_a_decrease(power):
    """Far out the observed part is a huge negative number in float32; no loss here can be negative."""
    point, g = start(torch.float32)
    taken = Backtracking(1e-4, initial_step=2.0**power, max_trials=200).take(point, -g.dot(g), -g)
    assert 0 <= taken.point.value < point.value


def test_gives_up_where_no_decrease_can_be_measured():
    point, g = start(torch.float32)
    taken = Backtracking(1e-4).take(point, -1e-12 * g.dot(g), g * -1e-12)
    assert taken.point is None
    assert taken.trials == 0


def test_an_ascent_direction_is_given_up_at_once():
    point, g = start()
    assert Backtracking(1e-4).take(point, g.dot(g), g).point is None


def test_first_decrease_is_that_of_the_full_step():
    point, g = start()
    taken = Backtracking(1e-4, double_every=0).take(point, -g.dot(g), -g)
    assert taken.first_decrease == pytest.approx(point.value - point.along(-g)(1.0).value)

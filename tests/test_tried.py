"""Which trial wins: the best that is better than the defaults beyond noise, or the defaults."""

from __future__ import annotations

from gramtower.experiments.tuning.study import judge, pick
from gramtower.experiments.tuning.trial import Tried


def tried(number, value, spread=0.0, pruned=False, compared=True):
    """A trial whose gain over value 0.5 has a standard error of ``spread``."""
    without = [value - spread, value + spread] if compared else []  # s² = ½ Σ (± spread)²
    return Tried(number, {"l2": float(number)}, value, 1, [value], 0.0, pruned, "", without=without)


def test_pruned_trials_are_picked_only_among_their_like():
    assert pick([tried(0, 0.1), tried(1, 0.9, pruned=True), tried(2, 0.1)]).number == 0
    assert pick([tried(0, 0.1, pruned=True), tried(1, 0.9, pruned=True)]).number == 1


def test_a_trial_within_two_standard_errors_does_not_replace_the_defaults():
    verdict = judge([tried(0, 0.5), tried(1, 0.53, spread=0.02), tried(2, 0.4)])
    assert verdict.winner.number == 0
    assert verdict.text == "the defaults stay: the best trial, 1, gains 6.0 % ± 4.0 %"


def test_a_trial_beyond_two_standard_errors_replaces_them():
    verdict = judge([tried(0, 0.5), tried(1, 0.55, spread=0.02), tried(2, 0.4)])
    assert verdict.winner.number == 1
    assert verdict.text == "trial 1 replaces the defaults: it gains 10.0 % ± 4.0 % on the validation part"


def test_a_sure_trial_wins_over_a_lucky_one():
    verdict = judge([tried(0, 0.5), tried(1, 0.53, spread=0.01), tried(2, 0.55, spread=0.06)])
    assert verdict.winner.number == 1
    assert verdict.text.endswith("it gains 6.0 % ± 2.0 % on the validation part (the best, trial 2, 10.0 % ± 12.0 %)")


def test_what_was_given_up_or_not_compared_replaces_nothing():
    trials = [tried(0, 0.5), tried(1, 0.9, pruned=True), tried(2, 0.6, compared=False)]
    verdict = judge(trials)
    assert verdict.winner.number == 0
    assert verdict.text == "the defaults stay: the best trial, 2, gains 20.0 %"


def test_trials_that_were_refused_do_not_win():
    trials = [tried(0, 0.5), tried(1, 0.53, spread=0.01), tried(2, 0.55, spread=0.01)]
    assert judge(trials).winner.number == 2
    assert judge(trials, [2]).winner.number == 1
    assert judge(trials, [2, 1]).winner.number == 0


def test_the_defaults_stay_where_nothing_is_better():
    assert judge([tried(0, 0.5), tried(1, 0.5), tried(2, 0.1)]).text == "the defaults stay: no trial was better"
    assert judge([tried(0, 0.5)]).winner.number == 0


def test_without_parts_to_compare_by_the_best_wins_and_that_is_said():
    """Metrics of all lists together, such as coverage, and logs of earlier versions."""
    verdict = judge([tried(0, 0.5, compared=False), tried(1, 0.51, compared=False)])
    assert verdict.winner.number == 1
    assert (
        verdict.text == "trial 1 replaces the defaults: it gains 2.0 % on the validation part, not compared by entities"
    )


def test_defaults_that_failed_are_not_compared_with():
    verdict = judge([tried(1, 0.5), tried(2, 0.51, spread=9.0)])
    assert verdict.winner.number == 2
    assert "the defaults failed" in verdict.text


def test_gains_over_nothing_are_no_shares():
    verdict = judge([tried(0, 0.0), tried(1, 0.03, spread=0.01)])
    assert verdict.text == "trial 1 replaces the defaults: it gains 0.0300 ± 0.0100 on the validation part"

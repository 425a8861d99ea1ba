"""The standard error of a difference of metrics, against the textbook's and against repeated draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp

from gramtower.metrics import evaluate_embeddings
from gramtower.metrics.embedding_metrics import PARTS, deal, means_without, standard_error


def test_entities_are_dealt_evenly_and_by_the_seed():
    parts = deal(47, 0)
    assert np.bincount(parts).tolist() == [3] * 7 + [2] * 13
    assert np.array_equal(parts, deal(47, 0))
    assert not np.array_equal(parts, deal(47, 1))
    assert sorted(deal(5, 0)) == [0, 1, 2, 3, 4]  # no more parts than entities
    assert deal(0, 0).tolist() == []


def test_means_leave_out_one_part_each_and_what_is_no_value():
    values, parts = np.array([1.0, 2.0, np.nan, 4.0]), np.array([0, 1, 1, 2])
    assert means_without(values, parts) == pytest.approx([3.0, 2.5, 1.5])
    assert means_without(np.array([1.0, np.nan]), np.array([0, 1])) == [0.0, 1.0]
    assert means_without(np.empty(0), np.empty(0, dtype=np.int64)) == []


def test_for_parts_of_one_entity_it_is_the_standard_error_of_the_mean_difference():
    rng = np.random.default_rng(0)
    one, other = rng.random((2, 15))
    found = standard_error(*(means_without(x, np.arange(15)) for x in (one, other)))
    assert found == pytest.approx((one - other).std(ddof=1) / math.sqrt(15))


def test_what_both_models_find_hard_cancels():
    rng = np.random.default_rng(1)
    hard, parts = 100 * rng.random(200), deal(200, 0)
    small = standard_error(*(means_without(x, parts) for x in (hard, hard + 0.1 * rng.random(200))))
    assert small < 0.01
    assert standard_error(means_without(hard, parts), means_without(hard + 7, parts)) == pytest.approx(0.0, abs=1e-12)


def test_it_is_at_least_what_differences_vary_by_over_draws_of_entities():
    """Of ranked entities too, which all rankings share: leaving some out of them says how much hangs on these."""
    rng = np.random.default_rng(2)
    users, items, draws = 60, 120, 60
    P = rng.normal(size=(users, 4))

    def measured(kept, seed):
        """Metrics of two models without each part of the kept items, and with all of them."""
        of, found = deal(len(kept), seed), []
        for part in range(-1, PARTS):
            some = kept[of != part]
            truth = sp.csr_matrix(liked[:, some])
            found.append([evaluate_embeddings(P, Q[some], truth, metrics=("recall@5",))["recall@5"] for Q in models])
        return np.array(found)

    differences, errors = [], []
    for draw in range(draws):
        facts = rng.normal(size=(items, 4))
        liked = (P @ facts.T + rng.normal(size=(users, items)) > 3).astype(np.float32)
        models = [facts + scale * rng.normal(size=facts.shape) for scale in (0.5, 0.8)]
        found = measured(np.arange(items), draw)
        differences.append(found[0, 0] - found[0, 1])
        errors.append(standard_error(found[1:, 0], found[1:, 1]))
    ratio = np.mean(errors) / np.std(differences, ddof=1)
    assert 1.0 < ratio < 1.7  # rather too large: leaving an item out moves others up


def test_fewer_than_two_parts_say_nothing():
    assert standard_error([0.5], [0.4]) == math.inf
    assert standard_error([], []) == math.inf
    with pytest.raises(ValueError, match=r"other.*1"):
        standard_error([0.1, 0.2], [0.1])

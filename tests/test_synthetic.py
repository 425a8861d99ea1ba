"""Generated pairs: exact size, no repetition, reproducible, and with the structure that was planted."""

from __future__ import annotations

import numpy as np
import pytest

from gramtower.data.datasets import PAPER_SHAPES, paper_shape, planted_pairs


@pytest.mark.parametrize(
    ("m", "n", "observed"), [(200, 150, 3000), (1, 1, 0), (5, 4, 16), (3, 300, 700), (300, 3, 1), (40, 50, 1600)]
)
def test_shape_and_exact_number_of_different_pairs(m, n, observed):
    pairs = planted_pairs(m, n, observed, seed=3)
    assert pairs.shape == (m, n)
    assert pairs.nnz == observed
    assert (pairs.data == 1).all()
    pairs.sum_duplicates()
    assert pairs.nnz == observed


def test_the_seed_decides_everything():
    first, same, other = (planted_pairs(80, 60, 500, seed=seed) for seed in (1, 1, 2))
    assert (first != same).nnz == 0
    assert (first != other).nnz > 100


def spectrum(affinity):
    """Singular values of the pattern less what activity and popularity explain, in units of what noise would give."""
    R = planted_pairs(400, 300, 12_000, groups=4, affinity=affinity, skew=0.3, seed=0).toarray()
    expected = R.sum(1, keepdims=True) * R.sum(0, keepdims=True) / R.sum()
    noise = np.sqrt(expected.mean()) * (np.sqrt(400) + np.sqrt(300))
    return np.linalg.svd(R - expected, compute_uv=False) / noise


def test_groups_are_there_and_only_when_asked_for():
    planted, unplanted = spectrum(0.9), spectrum(0.0)
    assert planted[2] > 2 * planted[3]  # four groups: three directions apart from popularity
    assert planted[2] > 1.5
    assert unplanted[0] < 1.1


def test_activity_and_popularity_are_skewed():
    for axis in (0, 1):
        even, skewed = (np.asarray(planted_pairs(500, 400, 8000, skew=skew).sum(axis)).ravel() for skew in (0.0, 1.5))
        assert skewed.max() > 3 * even.max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, 1), r"m:.*0"),
        ((5, 2.5, 1), r"n:.*2.5"),
        ((5, 5, -1), r"observed.*-1"),
        ((5, 5, 21), r"observed.*21"),
        ((5, 5, 3, 0), r"groups.*0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        planted_pairs(*arguments)


def test_the_papers_shapes_are_known_by_name():
    pairs = paper_shape("ml1m")
    assert (*pairs.shape, pairs.nnz) == PAPER_SHAPES["ml1m"] == (6037, 3513, 517_770)
    with pytest.raises(ValueError, match=r"name:.*'ml2m'.*'ml1m'.*'ml10m'"):
        paper_shape("ml2m")

"""Stochastic gradients: unbiased, and exact when they see everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import make_case

from gramtower.engine.objective.subsampling import block_gradient, subset_gradient, subset_gramians

CASES = [
    dict(weights=True, imputed="low-rank", embedding_l2=0.2),
    dict(loss="squared", imputed=0.0, kinds=("dense", "sparse")),
    dict(tower="custom", kinds=("ids", "sparse"), weights=True),
]


def case_without_empty_rows(**options):
    for seed in range(50):
        case = make_case(m=9, n=7, density=0.5, seed=seed, **options)
        if case.problem.pairs.row_counts.min() > 0 and case.problem.pairs.column_counts.min() > 0:
            return case
    raise AssertionError("no such case")


@pytest.mark.parametrize("options", CASES)
def test_everything_drawn_gives_the_exact_gradient(options):
    case = case_without_empty_rows(**options)
    problem, towers = case.problem, case.towers
    exact = problem.at(towers).gradient().vector
    theta = towers.parameters()
    m, n = problem.shape
    whole = block_gradient(problem, towers, theta, torch.arange(m), torch.arange(n)).vector
    assert torch.allclose(whole, exact, rtol=1e-10, atol=1e-12)
    every = torch.arange(len(problem.pairs))
    twice = subset_gradient(problem, towers, theta, every, subset_gramians(problem, towers, theta, every), 1.0).vector
    assert torch.allclose(twice, exact, rtol=1e-10, atol=1e-12)


def within_confidence(samples: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the mean of samples lies within 5 standard errors of the exact vector along 20 fixed directions.

    Under the null the largest of 20 has probability under 2e-5 of leaving that band.
    """
    directions = torch.randn(len(exact), 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen, truth = samples @ directions, exact @ directions
    error = seen.std(0) / np.sqrt(len(samples))
    return bool(((seen.mean(0) - truth).abs() <= 5 * error).all())


@pytest.mark.parametrize("options", CASES)
def test_block_gradient_is_unbiased(options):
    case = case_without_empty_rows(**options)
    problem, towers = case.problem, case.towers
    exact, theta = problem.at(towers).gradient().vector, towers.parameters()
    rng, (m, n) = np.random.default_rng(0), problem.shape
    draw = lambda size, k: torch.from_numpy(np.sort(rng.choice(size, k, replace=False)))  # noqa: E731
    samples = torch.stack([block_gradient(problem, towers, theta, draw(m, 4), draw(n, 3)).vector for _ in range(1500)])
    assert within_confidence(samples, exact)
    assert not within_confidence(samples * 1.2, exact)  # the test has the power to see a wrong scale


@pytest.mark.parametrize("options", CASES)
def test_two_independent_subsets_are_unbiased(options):
    case = case_without_empty_rows(**options)
    problem, towers = case.problem, case.towers
    exact, theta = problem.at(towers).gradient().vector, towers.parameters()
    rng, size = np.random.default_rng(1), len(problem.pairs)
    draw = lambda: torch.from_numpy(np.sort(rng.choice(size, size // 3, replace=False)))  # noqa: E731

    def once():
        gramians = subset_gramians(problem, towers, theta, draw())
        return subset_gradient(problem, towers, theta, draw(), gramians, 0.1).vector

    samples = torch.stack([once() for _ in range(1500)])
    assert within_confidence(samples, exact)
    assert not within_confidence(samples * 1.2, exact)


def test_work_counts_the_share_that_was_seen():
    case = case_without_empty_rows()
    problem, towers = case.problem, case.towers
    theta = towers.parameters()
    block_gradient(problem, towers, theta, torch.arange(3), torch.arange(7))
    assert problem.work.data_passes == pytest.approx(3 / 9)
    assert problem.work.left_vjps == pytest.approx(3 / 9)
    assert problem.work.right_vjps == pytest.approx(1)

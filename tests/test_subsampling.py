"""Stochastic gradients: unbiased, and exact when they see everything."""

from __future__ import annotations

import itertools

import dense
import pytest
import torch
from cases import make_case

import gramtower as gt
from gramtower.engine.objective.subsampling import block_gradient, subset_gradient, subset_gramians, swapped_gradient

CASES = [
    dict(weights=True, imputed="low-rank", embedding_l2=0.2),
    dict(loss="squared", imputed=0.0, kinds=("dense", "sparse")),
    dict(tower="custom", kinds=("ids", "sparse"), weights=True),
]


def case_without_empty_rows(m=9, n=7, **options):
    for seed in range(50):
        case = make_case(m=m, n=n, density=0.5, seed=seed, **options)
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


def choices(size, k):
    """Every way to draw k of some things."""
    return [torch.tensor(chosen) for chosen in itertools.combinations(range(size), k)]


@pytest.mark.parametrize("options", CASES)
def test_block_gradient_is_unbiased(options):
    case = case_without_empty_rows(m=5, n=4, **options)
    problem, towers = case.problem, case.towers
    exact, theta = problem.at(towers).gradient().vector, towers.parameters()
    every = list(itertools.product(choices(5, 3), choices(4, 2)))
    drawn = torch.stack([block_gradient(problem, towers, theta, rows, columns).vector for rows, columns in every])
    assert torch.allclose(drawn.mean(0), exact, rtol=1e-10, atol=1e-12)  # all draws are as likely as one another
    assert drawn.std(0).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("options", CASES)
def test_two_independent_subsets_are_unbiased(options):
    case = case_without_empty_rows(m=4, n=3, **options)
    problem, towers = case.problem, case.towers
    exact, theta = problem.at(towers).gradient().vector, towers.parameters()
    every = choices(len(problem.pairs), 2)
    gramians = [subset_gramians(problem, towers, theta, entries) for entries in every]
    drawn = torch.stack(
        [
            subset_gradient(problem, towers, theta, entries, one, 0.1).vector
            for entries, one in itertools.product(every, gramians)
        ]
    )
    assert torch.allclose(drawn.mean(0), exact, rtol=1e-10, atol=1e-12)
    assert drawn.std(0).norm() > 0.1 * exact.norm()


@pytest.mark.parametrize("options", CASES)
def test_exchanged_subsets_agree_with_the_dense_twin_and_are_unbiased(options):
    case = case_without_empty_rows(m=4, n=3, **options)
    problem, towers = case.problem, case.towers
    exact, theta = problem.at(towers).gradient().vector, towers.parameters()
    every = choices(len(problem.pairs), 2)
    swapped, plain = [], []
    for first, second in itertools.product(every, every):
        found, running = swapped_gradient(problem, towers, theta, (first, second), None, 1.0, 0.1)
        swapped.append(found.vector)
        halves = [subset_gramians(problem, towers, theta, one) for one in (first, second)]
        assert all(torch.allclose(r, (a + b) / 2) for r, a, b in zip(running, *halves, strict=True))
        plain.append(subset_gradient(problem, towers, theta, first, halves[1], 0.1).vector)
    assert torch.allclose(torch.stack(swapped).mean(0), exact, rtol=1e-10, atol=1e-12)
    assert torch.stack(swapped).std(0).norm() < 0.95 * torch.stack(plain).std(0).norm()
    for place in (1, len(every), 3 * len(every) + 2):
        one, other = (every[at].tolist() for at in divmod(place, len(every)))
        once = dense.subset_gradient(case.dense, case.left, case.right, one, other)
        again = dense.subset_gradient(case.dense, case.left, case.right, other, one)
        assert torch.allclose(plain[place], once, rtol=1e-10, atol=1e-12)
        assert torch.allclose(swapped[place], (once + again) / 2, rtol=1e-10, atol=1e-12)


def test_running_gramians_of_exchanged_subsets_move_by_alpha_toward_both():
    case = case_without_empty_rows(weights=True)
    problem, towers, theta = case.problem, case.towers, case.towers.parameters()
    first, second = torch.arange(0, 8), torch.arange(5, 12)
    one, other = (subset_gramians(problem, towers, theta, entries) for entries in (first, second))
    found, running = swapped_gradient(problem, towers, theta, (first, second), one, 0.25, 0.1)
    for r, a, b in zip(running, one, other, strict=True):
        assert torch.allclose(r, 0.875 * a + 0.125 * b)
    halves = [(first, one.toward(other, 0.25)), (second, one)]
    parts = [subset_gradient(problem, towers, theta, entries, grams, 0.1).vector for entries, grams in halves]
    assert torch.allclose(found.vector, (parts[0] + parts[1]) / 2, rtol=1e-10, atol=1e-12)


def test_work_counts_the_share_that_was_seen():
    case = case_without_empty_rows()
    problem, towers = case.problem, case.towers
    theta = towers.parameters()
    block_gradient(problem, towers, theta, torch.arange(3), torch.arange(7))
    assert problem.work.data_passes == pytest.approx(3 / 9)
    assert problem.work.left_vjps == pytest.approx(3 / 9)
    assert problem.work.right_vjps == pytest.approx(1)


@pytest.mark.parametrize("optimizer", ["sampling", "sogram"])
def test_fitted_labels_are_refused_before_any_work(optimizer):
    case = make_case(imputed="fitted")
    with pytest.raises(ValueError, match=r"^imputed.*fitted"):
        gt.minimize(case.problem, case.towers, optimizer, max_iterations=1)

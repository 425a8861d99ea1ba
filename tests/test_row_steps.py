"""Steps of each row of an embedding table: compared with the dense blocks of the Gauss-Newton matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.kernels import cpu, reference
from gramtower.engine.kernels.reference import RowSystems
from gramtower.optim.sweeps import row_step, solves_rows

M, N, K = 14, 11, 4
OPTIONS = {
    "plain": {},
    "squared": {"loss": "squared", "imputed": 0.0},
    "weights and penalties": {"left_weights": "degree^0.5", "right_weights": "degree^0.3", "embedding_l2": 0.2},
    "imputed by pair": {"imputed": (np.linspace(-1, 0, M * 2).reshape(M, 2), np.linspace(0, 1, N * 2).reshape(N, 2))},
}


def point_of(dtype=torch.float64, kernels="auto", **options):
    pairs = planted_pairs(M, N, 50, groups=3, seed=4)
    problem = gt.Problem(pairs, **{"omega": 0.3, "l2": 0.1, "kernels": kernels, **options})
    towers = gt.mlp_towers(problem, hidden=(), dim=K, dtype=dtype, seed=1)
    with torch.no_grad():
        for tower in (towers.left, towers.right):
            tower[0].weight.mul_(4.0)
    return problem.at(towers)


def step_of(point, side, steps=30, tolerance=0.0):
    tables = [point.P, point.Q]
    out = torch.empty_like(tables[side])
    square = row_step(point.evaluation, side, steps, tolerance, out, tuple(torch.empty_like(x) for x in tables))
    return out - tables[side], square


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_a_step_solves_the_row_s_own_block_of_the_gauss_newton_matrix(kernels, name, side):
    point = point_of(kernels=kernels, **OPTIONS[name])
    gradient, G = point.gradient(), point.gauss_newton()
    table = list(gradient)[side]
    found, square = step_of(point, side)
    assert square == pytest.approx(float(gradient[table].square().sum()))
    for i in range(len(found)):
        block = torch.empty(K, K, dtype=torch.float64)
        for t in range(K):
            d = gradient.zeros()
            d[table][i, t] = 1.0
            block[t] = (G @ d)[table][i]
        assert torch.allclose(found[i], torch.linalg.solve(block, -gradient[table][i]), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("side", [0, 1])
def test_both_implementations_take_the_same_steps(side, steps, dtype):
    alone, both = (step_of(point_of(dtype, kernels), side, steps, 0.1)[0] for kernels in ("reference", "numba"))
    assert torch.allclose(alone, both, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-5)


@pytest.mark.parametrize("solve", ["solve_left", "solve_right"])
def test_rows_without_pairs_and_long_ones_are_solved_by_any_number_of_threads(solve):
    from gramtower.data.pairs import from_sparse

    matrix = planted_pairs(300, 90, 9000, seed=0).tolil()
    matrix[17] = 0
    pairs, _ = from_sparse("pairs", matrix.tocsr())
    rng = torch.Generator().manual_seed(0)
    rows, others = (300, 90) if solve == "solve_left" else (90, 300)
    x, c = (torch.rand(len(pairs), generator=rng) for _ in range(2))
    B, y, spectrum = torch.randn(others, 5, generator=rng), torch.randn(rows, 5, generator=rng), torch.rand(5)
    found = []
    before = torch.get_num_threads()
    try:
        for module, threads in ((reference.KERNELS, 1), (cpu.KERNELS, 1), (cpu.KERNELS, 3)):
            torch.set_num_threads(threads)
            systems = RowSystems(
                y.clone(), torch.ones(1, 5), torch.ones(rows), spectrum, torch.full((rows,), 0.2), 3, 0.0
            )
            square = getattr(module, solve)(pairs, x, c, B, systems)
            found.append((systems.y, float(square)))
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-3, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert torch.equal(found[1][0], found[2][0])


def test_without_any_penalty_rows_are_solved_all_the_same():
    point = point_of(l2=0.0)
    with torch.no_grad():
        point.Q[:, 0] = 0.0  # a direction that nothing says anything about
    step, _ = step_of(point, 0)
    assert step.isfinite().all()


def test_only_two_trained_tables_are_solved_by_rows():
    pairs = planted_pairs(M, M, 50, seed=0)
    problem, plain = (gt.Problem(pairs, omega=0.3, kernels=kernels) for kernels in ("auto", "reference"))
    tables = gt.mlp_towers(problem, hidden=(), dim=K)
    assert solves_rows(problem, tables)
    assert not solves_rows(plain, tables)
    assert not solves_rows(problem, gt.mlp_towers(problem, hidden=(3,), dim=K))
    shared = torch.nn.Embedding(M, K)
    assert not solves_rows(problem, gt.Towers(shared, shared))
    for parameter in tables.right.parameters():
        parameter.requires_grad_(False)
    assert not solves_rows(problem, gt.Towers(tables.left, tables.right))

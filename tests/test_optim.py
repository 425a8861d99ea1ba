"""Every method: it descends, finds known minima, and does what its definition says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import FEATURES, make_case
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective.subsampling import subset_gradient, subset_gramians
from gramtower.optim.descent import Diagonal
from gramtower.optim.second_order import LimitedMemory
from gramtower.optim.solvers import SOLVERS, as_solver
from gramtower.optim.stochastic import Subsets

DESCENDING = ("gd", "gd-diag", "newton", "newton-kron", "lbfgs")
SAMPLED = ("sogram", "sogram-diag", "sampling", "sampling-diag")


def planted(dtype=torch.float64, **options):
    problem = gt.Problem(planted_pairs(60, 50, 500, groups=4, seed=1), omega=2**-3, l2=0.5, **options)
    return problem, gt.mlp_towers(problem, hidden=(8,), dim=6, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DESCENDING)
def test_every_accepted_step_decreases_the_objective(name, dtype):
    problem, towers = planted(dtype)
    result = gt.minimize(problem, towers, name, max_iterations=25)
    values = [record.value for record in result.history]
    assert len(values) > 5
    assert all(after < before for before, after in itertools.pairwise(values))
    assert values[-1] < 0.92 * values[0]


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_methods_lower_the_objective(name):
    problem, towers = planted()
    options = {} if name.endswith("diag") else {"step_size": 2.0**-12}
    result = gt.minimize(problem, towers, name, max_iterations=15, ratio=0.2, steps=20, **options)
    assert result.value < 0.99 * result.history[0].value


@pytest.mark.parametrize("kinds", [(a, b) for a in FEATURES for b in FEATURES])
@pytest.mark.parametrize("shared", [False, True])
def test_newton_kron_on_all_features_and_shared_towers(kinds, shared):
    case = make_case(m=12, n=10, kinds=kinds, shared=shared, weights=True, embedding_l2=0.1, scale=0.3, seed=2)
    result = gt.minimize(case.problem, case.towers, max_iterations=15)
    values = [record.value for record in result.history]
    assert all(after < before for before, after in itertools.pairwise(values))


@pytest.mark.parametrize("name", ["newton", "newton-kron"])
def test_a_convex_problem_is_solved_to_its_closed_form(name):
    """Right tower fixed, left a free table, squared loss: each row of P solves its own normal equations."""
    case = make_case(m=9, n=8, tower="linear", variant=1, loss="squared", imputed=0.5, weights=True, l2=0.3, seed=3)
    for parameter in case.towers.right.parameters():
        parameter.requires_grad_(False)
    towers = gt.Towers(case.towers.left, case.towers.right)
    options = {"cg_tolerance": 1e-12, "cg_max_steps": 200}
    gt.minimize(case.problem, towers, name, max_iterations=60, tolerance=0.0, **options)
    Q, seen = towers.right.weight.detach().numpy(), ~np.isnan(case.dense.labels)
    for i in range(9):
        weight = np.where(seen[i], 1.0, 0.3 * case.dense.a[i] * case.dense.b)
        target = np.where(seen[i], np.nan_to_num(case.dense.labels[i]), 0.5)
        row = np.linalg.solve((Q.T * weight) @ Q + 0.3 * np.eye(3), Q.T @ (weight * target))
        assert np.abs(towers.left.weight[i].detach().numpy() - row).max() < 1e-8 * max(1, np.abs(row).max())


def test_newton_kron_goes_lower_than_the_papers_newton_for_the_same_products():
    problem, _ = planted()
    ends = {}
    for name in ("newton", "newton-kron"):
        towers = gt.mlp_towers(problem, hidden=(8,), dim=6, dtype=torch.float64)
        ends[name] = gt.minimize(
            problem, towers, name, max_iterations=100, callbacks=[lambda r, _: r.data_passes > 150]
        )
    assert ends["newton-kron"].value < ends["newton"].value


@pytest.mark.parametrize("most", [1, 2])
def test_newton_kron_never_makes_more_steps_than_the_most_allowed(most):
    problem, towers = planted()
    history = gt.minimize(problem, towers, gt.optim.NewtonKron(cg_max_steps=most), max_iterations=4).history
    assert {record.cg_steps for record in history[1:]} == {most}


def test_sogram_with_alpha_one_is_the_plain_two_subset_method():
    problem, towers = planted()
    theta = towers.parameters()
    source, rng = Subsets(seed=7, ratio=0.3, alpha=1.0), np.random.default_rng(7)
    total = len(problem.pairs)
    draw = lambda: torch.from_numpy(np.sort(rng.choice(total, round(0.3 * total), replace=False, shuffle=False)))  # noqa: E731
    for _ in range(3):
        first, second = draw(), draw()
        gramians = subset_gramians(problem, towers, theta, second)
        expected = subset_gradient(problem, towers, theta, first, gramians, 0.09).vector
        assert torch.equal(source.gradient(problem, towers, theta).vector, expected)


def test_sogram_averages_gramians_from_zero():
    problem = gt.Problem(planted_pairs(20, 15, 200, seed=1))
    assert problem.pairs.row_counts.min() > 0  # an entity without pair is not covered by eq:trans
    towers = gt.mlp_towers(problem, hidden=(8,), dim=6, dtype=torch.float64)
    theta, source = towers.parameters(), Subsets(seed=0, ratio=1.0, alpha=0.1)
    exact, _ = problem.at(towers).evaluation.gramians
    for step in range(1, 4):
        source.gradient(problem, towers, theta)
        assert torch.allclose(source.running.P, exact[0] * (1 - 0.9**step), rtol=1e-10)


def test_adagrad_divides_by_the_root_of_summed_squares():
    _, towers = planted()
    g, direction = towers.parameters(), Diagonal(mu=1e-8)
    for count in (1, 2, 3):
        s = direction.scaled(g).vector
        assert torch.allclose(s, -g.vector / (count * g.vector**2 + 1e-8).sqrt())


def test_lbfgs_direction_solves_a_quadratic_when_memory_suffices():
    """On a quadratic, with exact steps along coordinates, the two-loop recursion has the exact inverse Hessian."""
    case = make_case(m=3, n=2, tower="linear", variant=1, dim=1, loss="squared", density=1.0, seed=5)
    for parameter in case.towers.right.parameters():
        parameter.requires_grad_(False)
    towers = gt.Towers(case.towers.left, case.towers.right)
    direction, point = LimitedMemory(memory=10), case.problem.at(towers)
    for axis in torch.eye(3, dtype=torch.float64):
        direction.find(point.gradient(), point)
        point = point.along(point.parameters.from_vector(axis))(1.0)
    s = direction.find(point.gradient(), point).s
    assert point.along(s)(1.0).gradient().norm() < 1e-8 * point.gradient().norm()


def test_line_search_constants_are_the_papers():
    for name in ("gd", "gd-diag", "newton"):
        rule = as_solver(name, {}).method(0).rule
        assert (rule.eta, rule.initial, rule.double_every) == (1e-4, 1.0, 5)
    newton = as_solver("newton", {}).method(0).direction
    assert (newton.tolerance, newton.max_steps) == (0.1, 30)
    sogram = as_solver("sogram", {}).method(0)
    assert (sogram.source.ratio, sogram.source.alpha) == (0.01, 0.1)


def test_unknown_names_and_options_are_refused_by_name():
    problem, towers = planted()
    with pytest.raises(ValueError, match=r"optimizer.*'adam'.*'newton-kron'.*'gd'"):
        gt.minimize(problem, towers, "adam")
    with pytest.raises(ValueError, match=r"option of newton.*'cg_max_step'.*cg_max_steps"):
        gt.minimize(problem, towers, "newton", cg_max_step=3)
    with pytest.raises(ValueError, match=r"option of gd.*'alpha'.*sufficient_decrease"):
        gt.minimize(problem, towers, "gd", alpha=0.5)
    with pytest.raises(ValueError, match=r"ratio.*1\.5"):
        gt.minimize(problem, towers, "sampling", ratio=1.5)
    assert set(SOLVERS) == {*DESCENDING, *SAMPLED}


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_and_its_name_are_the_same_run(name):
    options = {"ratio": 0.2, "steps": 3} if name in SAMPLED else {"sufficient_decrease": 1e-3}
    ends = []
    for solver, given in ((name, options), (SOLVERS[name](**options), {})):
        problem, towers = planted()
        ends.append(gt.minimize(problem, towers, solver, max_iterations=2, seed=3, **given).parameters.vector)
    assert torch.equal(*ends)


def test_solvers_check_their_options_and_say_what_they_are():
    assert repr(gt.optim.NewtonKron(damping=0.5)).startswith("NewtonKron(damping=0.5, damping_up=2.5")
    with pytest.raises(ValueError, match=r"^damping.*-1\.0"):
        gt.optim.NewtonKron(damping=-1.0)
    with pytest.raises(ValueError, match=r"^memory.*0"):
        gt.optim.LBFGS(memory=0)
    problem, towers = planted()
    with pytest.raises(ValueError, match=r"^options.*damping"):
        gt.minimize(problem, towers, gt.optim.NewtonKron(), damping=0.1)
    with pytest.raises(ValueError, match=r"^optimizer.*<class"):
        gt.minimize(problem, towers, gt.optim.NewtonKron)


def test_an_embedding_table_that_both_towers_share_is_trained():
    matrix = planted_pairs(30, 30, 200, seed=3)
    table = nn.Embedding(30, 5, dtype=torch.float64)
    nn.init.normal_(table.weight, std=0.1)
    problem = gt.Problem(sp.csr_matrix(matrix), omega=0.1, l2=0.01)
    result = gt.minimize(problem, gt.Towers(table, table), max_iterations=10)
    assert result.value < 0.8 * result.history[0].value

"""Sweeps over the rows of two tables: that they decrease, lead, resume, and are left where they cannot go on."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective.problem import Point
from gramtower.engine.towers.towers import clone
from gramtower.optim.sweeps import Sweeps


def tables(m=240, n=180, pairs=3000, dim=8, dtype=torch.float64, **options):
    options = {"omega": 0.1, "l2": 0.03, "embedding_l2": 0.01, **options}
    problem = gt.Problem(planted_pairs(m, n, pairs, groups=6, seed=1), **options)
    return problem, gt.mlp_towers(problem, hidden=(), dim=dim, dtype=dtype)


def passes_to(run, level):
    """Passes over the observed pairs until a level was reached."""
    start = run.history[0].work["pair_passes"]
    return next((r.work["pair_passes"] - start for r in run.history if r.value <= level), float("inf"))


@pytest.mark.parametrize(
    "options", [{}, {"embedding_l2": 0.0, "l2": 0.5}, {"loss": "squared", "imputed": 0.0}, {"imputed": "fitted"}]
)
def test_they_need_fewer_passes_than_secants_lbfgs_and_plain_sweeps(options):
    problem, towers = tables(**options)
    ours = gt.minimize(problem, clone(towers), max_iterations=60, tolerance=0.0)
    for rival in (gt.optim.NewtonKron(sweeps=0), "lbfgs"):
        theirs = gt.minimize(problem, clone(towers), rival, max_iterations=150, tolerance=0.0)
        best = min(ours.value, theirs.value)
        for level in (0.1, 0.01):
            assert passes_to(ours, best * (1 + level)) < passes_to(theirs, best * (1 + level))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"loss": "squared"}, {"imputed": "fitted", "right_weights": "degree^0.5"}])
def test_every_sweep_decreases_the_objective_and_gradients_vanish(options, dtype):
    problem, towers = tables(dtype=dtype, **options)
    result = gt.minimize(problem, towers, max_iterations=80, tolerance=1e-3)
    values = [record.value for record in result.history]
    assert all(after < before for before, after in pairwise(values))
    assert problem.at(towers).gradient().norm() < 1e-2 * result.history[1].gradient_norm


def test_combined_sweeps_are_sooner_than_plain_ones():
    problem, towers = tables(loss="squared", imputed=0.0, l2=0.1, embedding_l2=0.0)
    values = []
    for plain in (True, False):
        sweeps, point = Sweeps(2), problem.at(clone(towers))
        for _ in range(15):
            point = sweeps.iterate(point)[0]
            if plain:
                sweeps.forget()
        values.append(point.value)
    best = gt.minimize(problem, clone(towers), max_iterations=100).value
    assert values[1] - best < 0.5 * (values[0] - best)


def test_the_combination_has_the_shortest_residual():
    problem, towers = tables()
    sweeps, point = Sweeps(2), problem.at(towers)
    starts, ends = [], []
    for _ in range(3):
        starts.append(point.parameters.vector)
        point = sweeps.iterate(point)[0]
        ends.append(sweeps.ends[-1].vector)
    right = slice(240 * 8, None)
    residuals = torch.stack([end - start for start, end in zip(starts, ends, strict=True)])[:, right]
    assert torch.allclose(sweeps.square, residuals[1:] @ residuals[1:].t())
    # With α = (γ, 1 − Σγ) it is least squares in the differences from the last residual.
    gamma = torch.linalg.lstsq((residuals[:-1] - residuals[-1]).t(), -residuals[-1]).solution
    expected = ends[-1] + gamma @ (torch.stack(ends[:-1]) - ends[-1])
    assert torch.allclose(point.parameters.vector, expected, rtol=1e-3, atol=1e-4)


def test_a_loss_that_overshoots_is_halved():
    steep = gt.Loss(
        lambda y, s: torch.nn.functional.softplus(-40 * y * s) / 40,
        lambda y, s: -y * torch.sigmoid(-40 * y * s),
        lambda y, s: 40 * torch.sigmoid(40 * y * s) * torch.sigmoid(-40 * y * s),
        name="steep",
    )
    problem, towers = tables(loss=steep, omega=1e-3, embedding_l2=0.0, l2=1e-3)
    result = gt.minimize(problem, towers, max_iterations=15, tolerance=0.0)
    values = [record.value for record in result.history]
    assert all(after < before for before, after in pairwise(values))
    assert max(record.trials for record in result.history) > 2


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_table_of_zeros_moves_first(side):
    problem, towers = tables(l2=0.1)
    with torch.no_grad():
        getattr(towers, side)[0].weight.zero_()
    gt.minimize(problem, towers, max_iterations=6)
    assert min(float(t[0].weight.detach().norm()) for t in (towers.left, towers.right)) > 1.0


@pytest.mark.parametrize("stop", [1, 2, 4, 7])
def test_a_resumed_run_equals_an_uninterrupted_one(stop, tmp_path):
    problem, towers = tables(dtype=torch.float32)
    whole = gt.minimize(problem, clone(towers), max_iterations=9)
    options = {"checkpoint": tmp_path / "run", "checkpoint_every": 1}
    gt.minimize(tables(dtype=torch.float32)[0], clone(towers), max_iterations=stop, **options)
    resumed = gt.minimize(tables(dtype=torch.float32)[0], clone(towers), max_iterations=9, **options)
    assert torch.equal(whole.parameters.vector, resumed.parameters.vector)
    assert [r.value for r in whole.history] == [r.value for r in resumed.history]


def plain(value):
    return value.vector if isinstance(value, gt.Parameters) else value


def test_states_stay_as_they_were():
    problem, towers = tables()
    method, point, states = gt.optim.NewtonKron().method(0), problem.at(towers), []
    for _ in range(6):
        point = method.iterate(problem, towers, point).point
        state = method.state()["sweeps"]
        states.append((state, {name: plain(value).clone() for name, value in state.items()}))
    for state, copy in states:
        assert all(torch.equal(plain(state[name]), tensor) for name, tensor in copy.items())


def test_where_rows_cannot_be_solved_any_more_it_goes_on_downhill():
    problem, towers = tables()
    method, point = gt.optim.NewtonKron().method(0), problem.at(towers)
    for _ in range(3):
        point = method.iterate(problem, towers, point).point
    plain, _ = tables(kernels="reference")  # as in several processes
    resumed = gt.optim.NewtonKron().method(0)
    resumed.restore(method.state())
    after = resumed.iterate(plain, towers, plain.at(towers, point.parameters)).point
    assert after.value < point.value
    assert resumed.state()["chosen"] == "descent"
    assert set(resumed.state()["sweeps"]) == {"square"}


def test_a_memory_budget_without_room_for_them_is_kept():
    problem, towers = tables(dim=64, dtype=torch.float32)
    tight, _ = tables(dim=64, dtype=torch.float32, memory_budget=problem.least_budget(towers))
    assert Sweeps(2).suit(problem, towers)
    assert not Sweeps(2).suit(tight, towers)
    assert not Sweeps(0).suit(problem, towers)


def test_an_empty_row_goes_to_zero_unless_imputed_labels_hold_it():
    pairs = sp.lil_matrix(planted_pairs(40, 30, 300, seed=0))
    pairs[3] = 0
    problem = gt.Problem(pairs.tocsr(), omega=0.01, l2=0.5, imputed=0.0)
    towers = gt.mlp_towers(problem, hidden=(), dim=4)
    gt.minimize(problem, towers, max_iterations=30)
    assert float(towers.left[0].weight[3].detach().norm()) < 1e-3


@pytest.mark.parametrize("side", [0, 1])
def test_sums_taken_for_a_side_that_stayed_are_those_it_has(side):
    problem, towers = tables(right_weights="degree^0.3")
    point = problem.at(towers)
    theta = point.parameters.clone()
    moved = theta["left.0.weight" if side == 0 else "right.0.weight"]
    moved += torch.randn(moved.shape, generator=torch.Generator().manual_seed(0), dtype=moved.dtype)
    tried, fresh = point.at(theta), point.at(theta)
    tried.evaluation.take_sums(1 - side, point.evaluation)
    assert tried.terms == fresh.terms
    assert tried.terms != point.terms


def test_a_state_without_sweeps_forgets_those_that_were_made():
    problem, towers = tables()
    sweeps, point = Sweeps(2), problem.at(towers)
    for _ in range(3):
        point = sweeps.iterate(point)[0]
    sweeps.restore({})
    assert (sweeps.starts, sweeps.ends, sweeps.square.shape) == ([], [], (0, 0))
    assert sweeps.iterate(point)[0].value < point.value


def test_no_point_has_other_parameters_than_it_was_made_with(monkeypatch):
    problem, towers = tables()
    made, init = [], Point.__init__

    def remember(self, evaluation, parameters, *rest, **options):
        for point, before in made:
            if point() is not None:
                assert torch.equal(point().parameters.vector, before)
        init(self, evaluation, parameters, *rest, **options)
        made.append((weakref.ref(self), parameters.vector.clone()))

    monkeypatch.setattr(Point, "__init__", remember)
    gt.minimize(problem, towers, max_iterations=6)
    assert len(made) > 10

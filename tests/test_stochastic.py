"""Methods that draw: the first step size, the way back after divergence, the length of iterations, and resuming."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.optim import stochastic
from gramtower.optim.solvers import as_solver
from gramtower.optim.stochastic import Subsets, most_steps, searched
from gramtower.training.result import Reason

SAMPLED = ("sogram", "sogram-diag", "sampling", "sampling-diag")


def planted(seed=0, m=80, n=50, pairs=700, dtype=torch.float32, **options):
    problem = gt.Problem(planted_pairs(m, n, pairs, groups=4, seed=seed), omega=2**-3, l2=0.5, **options)
    return problem, gt.mlp_towers(problem, hidden=(), dim=6, dtype=dtype)


def trajectory(result):
    return [(r.iteration, r.value, r.gradient_norm, r.step) for r in result.history]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SAMPLED)
def test_a_run_as_it_comes_never_ends_above_half_of_what_it_gained(name, seed):
    problem, towers = planted(seed)
    result = gt.minimize(problem, towers, name, max_iterations=6, seed=seed, ratio=0.05)
    assert result.reason is Reason.MAX_ITERATIONS
    values = [record.value for record in result.history]
    assert values[1] < values[0]
    for place in range(2, len(values)):
        best = min(values[:place])
        assert values[place] <= best + 0.5 * (values[0] - best)
    assert all(later.step <= earlier.step for earlier, later in itertools.pairwise(result.history[1:]))


@pytest.mark.parametrize("name", SAMPLED)
def test_a_far_too_long_step_is_halved_and_the_run_goes_on_from_the_last_good_point(name, monkeypatch):
    """The search is led to a step that diverges at once; without the way back the run would end there."""
    problem, towers = planted()
    method = as_solver(name, {"ratio": 0.1}).method(0)
    point = problem.at(towers)
    first = method.iterate(problem, towers, point)
    assert first.point.value < point.value
    method.step_size *= 2.0**14
    later = method.iterate(problem, towers, first.point)
    assert later.point.value <= 0.5 * (point.value + first.point.value)
    assert later.step < first.step * 2.0**14
    assert math.log2(first.step * 2.0**14 / later.step) == round(math.log2(first.step * 2.0**14 / later.step))
    given = as_solver(name, {"ratio": 0.1, "step_size": first.step * 2.0**14, "steps": 16}).method(0)
    moved = given.iterate(problem, towers, first.point)
    diverged = moved.parameters is None or not problem.at(towers, moved.parameters).value < point.value
    assert diverged  # what happens without it


def test_what_was_remembered_on_the_way_to_infinity_is_forgotten(monkeypatch):
    monkeypatch.setattr(stochastic, "_MOST_HALVINGS", 200)
    problem, towers = planted()
    method = as_solver("sogram-diag", {"ratio": 0.1}).method(0)
    first = method.iterate(problem, towers, problem.at(towers))
    method.step_size = 1e30
    later = method.iterate(problem, towers, first.point)
    assert later.point is not None
    assert later.step < 1e20
    assert torch.isfinite(method.direction.squares.vector).all()
    assert all(torch.isfinite(t).all() for t in method.source.running)


def test_a_step_that_no_halving_saves_ends_the_run_with_a_reason(monkeypatch):
    problem, towers = planted()
    monkeypatch.setattr(stochastic, "_MOST_HALVINGS", 2)
    start = towers.parameters().vector.clone()

    def spoil(record, point):
        spoiled.step_size = 1e30

    spoiled = as_solver("sampling", {"ratio": 0.1}).method(0)
    solver = dataclasses.make_dataclass("Spoiled", [], bases=(gt.optim.Solver,), frozen=True)()
    object.__setattr__(solver, "method", lambda seed: spoiled)
    result = gt.minimize(problem, towers, solver, max_iterations=3, callbacks=[spoil])
    assert result.reason is Reason.NO_DECREASE
    assert len(result.history) == 2
    assert result.value < result.history[0].value
    assert not torch.equal(result.parameters.vector, start)


def test_a_given_step_size_is_kept_whatever_happens():
    problem, towers = planted()
    result = gt.minimize(problem, towers, "sogram", max_iterations=4, ratio=0.1, step_size=1e-5, steps=10)
    assert {record.step for record in result.history[1:]} == {1e-5}
    problem, towers = planted()
    lost = gt.minimize(problem, towers, "sampling", max_iterations=9, ratio=0.1, step_size=1e30, steps=3)
    assert lost.reason is Reason.NON_FINITE


@pytest.mark.parametrize("name", ["sogram", "sogram-diag"])
def test_exchanged_subsets_are_resumed_bit_for_bit_and_counted_twice(name, tmp_path):
    options = dict(ratio=0.1, step_size=1e-3, steps=10)
    passes = []
    for swap in (False, True):
        problem, towers = planted()
        first, *_, last = gt.minimize(problem, towers, name, 2, swap=swap, **options).history
        passes.append(last.data_passes - first.data_passes)
    assert passes[1] == pytest.approx(2 * passes[0])
    found = []
    for stops in ((4,), (2, 4)):
        problem, towers = planted()
        path = tmp_path / str(len(stops))
        for stop in stops:
            found.append(gt.minimize(problem, towers, name, stop, swap=True, checkpoint=path, **options))
    assert trajectory(found[0]) == trajectory(found[2])
    assert found[0].value < found[0].history[0].value
    with pytest.raises(ValueError, match=r"^swap: got 'yes'"):
        gt.optim.Sogram(swap="yes")


@pytest.mark.parametrize("start", [1e-6, 1e-3, 1.0, 1e3])
def test_the_search_finds_the_size_from_both_sides(start):
    """On |log₄(size / 0.02)| with divergence above 0.3, whatever size it begins with."""
    sizes = []

    def look(size):
        sizes.append(size)
        value = 0.5 + abs(math.log(size / 0.02, 4)) / 100 if size < 0.3 else math.inf
        return stochastic._Trial(size, value, None, 0.0, {})

    found = searched(look, start, start=1.0)
    assert abs(math.log(found.size / 0.02, 4)) <= 0.5001
    assert len(sizes) == len(set(sizes)) <= stochastic._MOST_TRIALS


def test_a_search_without_any_good_size_ends(monkeypatch):
    looked = []
    found = searched(lambda s: looked.append(s) or stochastic._Trial(s, math.inf, None, math.nan, {}), 1.0, 1.0)
    assert len(looked) == stochastic._MOST_TRIALS
    assert found.value == math.inf


def test_the_first_iteration_is_the_steps_of_the_best_size_tried():
    """The search's own draws count: a run with the size it found, given, does the same first steps."""
    problem, towers = planted(dtype=torch.float64)
    start = problem.at(towers)
    method = as_solver("sampling-diag", {"ratio": 0.1}).method(5)
    found = method.iterate(problem, towers, start)
    given = as_solver("sampling-diag", {"ratio": 0.1, "step_size": found.step, "steps": stochastic._FIRST}).method(5)
    assert torch.equal(given.iterate(problem, towers, start).parameters.vector, found.point.parameters.vector)
    assert given.source.state() == method.source.state()


def test_running_gramians_begin_exact_when_the_step_is_searched():
    problem, towers = planted(dtype=torch.float64)
    source, point = Subsets(0, 0.1, 0.1), problem.at(towers)
    source.begin(point)
    exact = point.evaluation.gramians
    for kept, expected in zip(source.running, (*exact[0], *exact[1]), strict=True):
        assert torch.equal(kept, expected)


def test_iterations_grow_to_a_pass_over_the_data_and_no_further():
    problem, towers = planted()
    method = as_solver("sampling-diag", {"ratio": 0.02}).method(0)
    lengths, gradient = [], method.source.gradient
    counted = itertools.count()
    method.source.gradient = lambda *a: (next(counted), gradient(*a))[1]
    point, before = problem.at(towers), 0
    for _ in range(5):
        point = method.iterate(problem, towers, point).point
        now = next(counted)
        lengths.append(now - before)
        before = now + 1
    assert lengths[0] % stochastic._FIRST == 1  # one look at a drawn direction, and several tries
    assert lengths[1:3] == [16, 32]
    assert lengths[3:] == [50, 50]  # 1/ρ, if nothing was halved


@pytest.mark.parametrize("name", SAMPLED)
def test_a_long_iteration_is_a_second_of_work_but_not_less_than_its_value(name):
    sizes = {}
    for observed in (2_000, 200_000):
        problem = gt.Problem(planted_pairs(2000, 1500, observed))
        towers = gt.mlp_towers(problem, hidden=(64,), dim=32)
        source = as_solver(name, {"ratio": 0.001}).method(0).source
        sizes[observed] = most_steps(source, problem, towers.parameters().layout)
        assert 1 <= sizes[observed] <= 1000
        assert sizes[observed] * stochastic._LAUNCH <= 2 * max(stochastic._SECOND, observed * 1000)
    assert sizes[2_000] < 1000  # a thousand steps would be longer than a second
    assert sizes[200_000] <= sizes[2_000]


@pytest.mark.parametrize("name", SAMPLED)
def test_a_resumed_run_equals_an_uninterrupted_one_also_where_a_step_was_halved(name, tmp_path, monkeypatch):
    def run(iterations, path=None):
        problem, towers = planted(3)
        given = {} if path is None else {"checkpoint": path, "checkpoint_every": 1}
        return gt.minimize(problem, towers, name, max_iterations=iterations, seed=2, ratio=0.1, **given)

    monkeypatch.setattr(stochastic, "_FACTOR", 64.0)  # a coarse search, whose size is halved later
    whole = run(5)
    for stop in (1, 3):
        path = tmp_path / f"{stop}.safetensors"
        run(stop, path)
        resumed = run(5, path)
        assert trajectory(resumed) == trajectory(whole)
        assert torch.equal(resumed.parameters.vector, whole.parameters.vector)


@pytest.mark.parametrize("name", ["sogram", "sogram-diag"])
def test_subsets_of_no_pairs_are_refused_by_name(name):
    problem = gt.Problem(sp.csr_matrix((4, 3)), omega=0.1)
    towers = gt.mlp_towers(problem, hidden=(), dim=2)
    with pytest.raises(ValueError, match=r"pairs.*observed"):
        gt.minimize(problem, towers, name, max_iterations=1)

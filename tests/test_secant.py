"""Secant steps over the Kronecker preconditioner: what they are, when they are taken, and that they lead."""

from __future__ import annotations

from itertools import pairwise

import pytest
import scipy.sparse as sp
import torch
from cases import make_case
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective import kronecker
from gramtower.engine.towers.towers import clone
from gramtower.optim import second_order
from gramtower.optim.descent import Damping, StepResult, Verdict
from gramtower.optim.second_order import KroneckerSecant, Pair, inverse_product

SECANT = gt.optim.NewtonKron(sweeps=0)  # tables on a CPU are swept otherwise


def linear(m=240, n=180, pairs=3000, dim=8, dtype=torch.float64, **options):
    options = {"omega": 0.1, "l2": 0.03, "embedding_l2": 0.01, **options}
    problem = gt.Problem(planted_pairs(m, n, pairs, groups=6, seed=1), **options)
    return problem, gt.mlp_towers(problem, hidden=(), dim=dim, dtype=dtype)


def passes_to(problem, towers, optimizer, levels):
    """Passes over the observed pairs until each level was reached."""
    start, seen = problem.work.pair_passes, []

    def watch(record, _):
        seen.append((record.value, problem.work.pair_passes - start))
        return record.value <= min(levels)

    gt.minimize(problem, towers, optimizer, max_iterations=150, callbacks=[watch])
    return [next((passes for value, passes in seen if value <= level), float("inf")) for level in levels]


@pytest.mark.parametrize("options", [{}, {"embedding_l2": 0.0, "l2": 0.5}, {"loss": "squared", "imputed": 0.0}])
def test_linear_towers_need_fewer_passes_than_lbfgs_and_than_conjugate_gradient(options):
    problem, towers = linear(**options)
    best = gt.minimize(problem, clone(towers), SECANT, max_iterations=150, tolerance=1e-9).value
    levels = [best * (1 + level) for level in (0.1, 0.01, 0.001)]
    ours = passes_to(problem, clone(towers), SECANT, levels)
    for rival, wanted in (("lbfgs", levels), (gt.optim.NewtonKron(memory=0, sweeps=0), levels[:2])):
        theirs = passes_to(problem, clone(towers), rival, wanted)
        assert all(own < 0.7 * other for own, other in zip(ours, theirs, strict=False)), (ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kinds", [("ids", "ids"), ("sparse", "ids"), ("dense", "sparse")])
def test_every_step_decreases_the_objective(kinds, dtype):
    case = make_case(m=12, n=10, kinds=kinds, tower="linear", weights=True, embedding_l2=0.1, scale=0.3, seed=2)
    result = gt.minimize(case.problem, case.towers.to(dtype), SECANT, max_iterations=15)
    values = [record.value for record in result.history]
    assert all(record.cg_steps == 0 for record in result.history)
    assert all(after < before for before, after in pairwise(values))


def test_it_converges_to_a_vanishing_gradient():
    problem, towers = linear()
    result = gt.minimize(problem, towers, SECANT, max_iterations=300, tolerance=1e-6)
    assert problem.at(towers).gradient().norm() <= 2e-6 * result.history[1].gradient_norm


def test_one_side_moves_at_a_time_at_first():
    problem, towers = linear()
    seen = [towers.parameters()]
    three = gt.optim.NewtonKron(alternating=3, sweeps=0)
    gt.minimize(problem, towers, three, 4, callbacks=[lambda _, p: seen.append(p.parameters.clone())])
    moved = [
        {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        for before, after in pairwise(seen)
    ]
    assert moved == [{"left"}, {"right"}, {"left"}, {"left", "right"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_side_that_starts_at_zero_moves_first(side, dtype):
    problem, towers = linear(embedding_l2=0.0, dtype=dtype)
    nn.init.zeros_(next(getattr(towers, side).parameters()))
    start = problem.at(towers)
    result = gt.minimize(problem, towers, SECANT, max_iterations=12)
    assert start.evaluation.gramians[0][0 if side == "left" else 1].norm() == 0
    assert len(result.history) == 13
    assert result.value < 0.6 * start.value


def test_without_pairs_the_direction_is_half_the_preconditioned_gradient():
    problem, towers = linear()
    point = problem.at(towers)
    direction = KroneckerSecant(Damping(0.5, 2.5, 0.5), memory=3, alternating=0)
    found = direction.find(point.gradient(), point)
    expected = (point.preconditioner("kronecker", 0.5) @ point.gradient()).scale_(0.5)
    assert torch.allclose(found.s.vector, -expected.vector)
    assert found.slope == pytest.approx(-point.gradient().dot(expected))


def test_the_last_pair_is_met_exactly_where_its_curvature_was_enough():
    """The secant equation H y = s."""
    problem, towers = linear()
    point = problem.at(towers)
    direction = KroneckerSecant(Damping(1.0, 2.5, 0.5), memory=3, alternating=0)
    for _ in range(4):
        gradient = point.gradient()
        found = direction.find(gradient, point)
        point = point.along(found.s)(0.25)
        direction.learn(found, StepResult(point, 0.25, 1, 1.0))
    direction.find(point.gradient(), point)
    pair = direction.pairs[-1]
    M = point.preconditioner("kronecker", direction.damping.value)
    product = inverse_product(pair.change, direction.pairs, lambda q: M.product(q))
    assert torch.allclose(product.vector, pair.step.vector, rtol=1e-8, atol=1e-10)
    assert len(direction.pairs) == 3


@pytest.mark.parametrize("bend", [-3.0, 0.01])
def test_a_pair_of_too_little_curvature_gets_a_fifth_of_what_was_expected(bend):
    problem, towers = linear()
    like = problem.at(towers).parameters
    direction = KroneckerSecant(Damping(1.0, 2.5, 0.5), memory=3, alternating=0)
    before, s = like.zeros(), like.zeros()
    s.vector[0], before.vector[0], before.vector[1] = 1.0, -2.0, 5.0  # δ = 1: H⁻¹s = −∇L, sᵀH⁻¹s = 2
    after = before.clone()
    after.vector[0] += bend
    direction.last = Pair(s, before), 1.0
    direction._remember(after)
    assert direction.pairs[0].curvature == pytest.approx(0.2 * 2.0)
    change = direction.pairs[0].change.vector
    assert float(change[1]) != 0.0  # toward H⁻¹s, which has more than the step's own coordinate


def test_the_preconditioner_is_rescaled_once_a_full_step_was_refused():
    problem, towers = linear()
    point = problem.at(towers)
    direction = KroneckerSecant(Damping(0.0, 2.5, 0.5), memory=3, alternating=0)
    for size in (0.5, 1.0, 0.5):  # the first has no pairs to blame
        assert not direction.rescaled
        found = direction.find(point.gradient(), point)
        point = point.along(found.s)(size)
        direction.learn(found, StepResult(point, size, 1, 1.0))
    assert direction.rescaled
    gradient = point.gradient()
    found = direction.find(gradient, point)
    M, last = point.preconditioner("kronecker", direction.damping.value), direction.pairs[-1]
    gamma = last.curvature / (M @ last.change).dot(last.change)
    expected = inverse_product(gradient, direction.pairs, lambda q: M.product(q).scale_(gamma))
    assert torch.allclose(found.s.vector, -expected.vector, rtol=1e-10)


def test_damping_follows_the_promise():
    damping = Damping(1.0, 2.5, 0.5)
    assert (damping.learn(0.8, -1.0), damping.value) == (Verdict.GOOD, 0.5)
    assert (damping.learn(0.99, -1.0), damping.value) == (Verdict.GOOD, 0.0625)
    assert (damping.learn(0.5, -1.0), damping.value) == (Verdict.FAIR, 0.0625)
    assert (damping.learn(float("nan"), -1.0), damping.value) == (Verdict.POOR, 0.15625)
    damping.value = 1e-10
    assert (damping.learn(0.8, -1.0), damping.value) == (Verdict.GOOD, 0.0)
    assert (damping.retry(), damping.value) == (True, 0.1)


def steps_taken(problem, towers, **options):
    result = gt.minimize(problem, towers, max_iterations=3, sweeps=0, **options)
    return {record.cg_steps > 0 for record in result.history[1:]}


def test_conjugate_gradient_where_towers_are_not_linear_or_not_both_free():
    problem, towers = linear()
    assert steps_taken(problem, clone(towers)) == {False}
    assert steps_taken(problem, clone(towers), memory=0) == {True}
    assert steps_taken(problem, gt.mlp_towers(problem, hidden=(4,), dim=3)) == {True}
    for parameter in towers.right.parameters():
        parameter.requires_grad_(False)
    assert steps_taken(problem, gt.Towers(towers.left, towers.right)) == {True}
    square = gt.Problem(planted_pairs(30, 30, 200, seed=3), omega=0.1, l2=0.01)
    table = nn.Embedding(30, 5, dtype=torch.float64)
    assert steps_taken(square, gt.Towers(table, table)) == {True}


def test_a_memory_budget_without_room_for_pairs_is_kept():
    problem, towers = linear(dim=64)
    pair = 2 * 8 * towers.size
    least = problem.least_budget(towers)
    kept = []
    for spare in (0, 2 * pair, 100 * pair):
        tight = linear(dim=64, memory_budget=least + spare)[0]
        direction = SECANT.method(0).descent.direction
        point = tight.at(towers)
        direction.find(point.gradient(), point)
        kept.append(direction.secant.memory)
    assert kept[0] == 0
    assert 0 < kept[1] <= kept[2] == gt.optim.NewtonKron().memory


def test_the_preconditioner_is_kept_until_the_value_fell_by_two_percent_or_damping_grew(monkeypatch):
    problem, towers = linear()
    made = []
    make = gt.Point.preconditioner

    def counted(self, kind="kronecker", damping=0.0, side=None):
        (sides if side else made).append((self.value, side or damping))
        return make(self, kind, damping, side)

    sides = []
    monkeypatch.setattr(gt.Point, "preconditioner", counted)
    result = gt.minimize(problem, towers, SECANT, max_iterations=40)
    assert sides == [(result.history[i].value, "left" if i % 2 == 0 else "right") for i in range(4)]  # one at a time
    assert len(made) < len(result.history) / 2
    for (before, less), (after, more) in pairwise(made):
        assert after < 0.98 * before or more > less
    start = made[0][0]
    for record in result.history[4:-1]:  # where each iteration began
        start = next((value for value, _ in made if value == record.value), start)
        assert record.value >= 0.98 * start


def test_a_kept_preconditioner_keeps_no_parameters_alive():
    problem, towers = linear()
    point = problem.at(towers)
    M = point.preconditioner("kronecker", 0.1)
    assert M.shape == (towers.size, towers.size)
    assert M.like.vector.untyped_storage().nbytes() < 100


def test_without_room_for_a_pair_one_side_moves_at_a_time(tmp_path):
    roomy, towers = linear(dim=64, dtype=torch.float32)
    budget = roomy.least_budget(towers)
    free = gt.minimize(roomy, clone(towers), SECANT, max_iterations=9)

    def tight(start, **options):
        return gt.minimize(
            linear(dim=64, dtype=torch.float32, memory_budget=budget)[0], clone(start), sweeps=0, **options
        )

    whole = tight(towers, max_iterations=9)
    assert [record.cg_steps for record in whole.history] == [0] * 10
    assert [record.value for record in whole.history[:5]] == [record.value for record in free.history[:5]]
    assert any(record.cg_steps > 0 for record in tight(towers, max_iterations=2, alternating=0).history)
    for stop in (2, 5):
        path = {"checkpoint": tmp_path / f"run{stop}", "checkpoint_every": 1}
        tight(towers, max_iterations=stop, **path)
        assert torch.equal(tight(towers, max_iterations=9, **path).parameters.vector, whole.parameters.vector)
    sides = [tight(towers, max_iterations=count).parameters for count in (6, 7, 8)]
    moved = [
        {name for name in before if not torch.equal(before[name], after[name])} for before, after in pairwise(sides)
    ]
    assert [{name.split(".")[0] for name in names} for names in moved] == [{"left"}, {"right"}]


def test_a_side_that_cannot_move_leaves_it_to_the_other():
    roomy, towers = linear(dim=64, dtype=torch.float32)
    problem = linear(dim=64, dtype=torch.float32, memory_budget=roomy.least_budget(towers))[0]
    result = gt.minimize(problem, towers, SECANT, max_iterations=300, tolerance=0.0)
    best = gt.minimize(roomy, linear(dim=64, dtype=torch.float32)[1], SECANT, max_iterations=300, tolerance=0.0)
    assert result.value <= best.value * (1 + 1e-4)


def test_a_step_that_is_taken_makes_room_for_the_pair_that_follows():
    problem, towers = linear()
    point = problem.at(towers)
    direction = KroneckerSecant(Damping(1.0, 2.5, 0.5), memory=2, alternating=1)
    held = []
    for size in (1.0, 0.5, 1.0, 1.0, 1.0):
        found = direction.find(point.gradient(), point)
        step = found.s.vector.clone()
        point = point.along(found.s)(size)
        direction.learn(found, StepResult(point, size, 1, 1.0))
        vectors = [value.vector for value in direction.state().values() if isinstance(value, gt.Parameters)]
        held.append(len({vector.data_ptr() for vector in vectors}))
        if direction.last is not None:
            assert torch.equal(direction.last[0].step.vector, size * step)
    assert held == [0, 2, 4, 4, 4]  # vectors: the last step with its gradient, and all pairs but one


@pytest.mark.parametrize("stop", [1, 3, 5, 8])
def test_a_resumed_run_equals_an_uninterrupted_one(stop, tmp_path):
    problem, towers = linear(dtype=torch.float32)
    whole = gt.minimize(problem, clone(towers), SECANT, max_iterations=10)
    path = tmp_path / "run"
    options = {"checkpoint": path, "checkpoint_every": 1}
    gt.minimize(linear(dtype=torch.float32)[0], clone(towers), SECANT, max_iterations=stop, **options)
    resumed = gt.minimize(linear(dtype=torch.float32)[0], clone(towers), SECANT, max_iterations=10, **options)
    assert torch.equal(whole.parameters.vector, resumed.parameters.vector)
    assert [r.value for r in whole.history] == [r.value for r in resumed.history]


@pytest.mark.parametrize("spoilt", [0, 1])
def test_a_run_resumes_where_other_blocks_of_the_preconditioner_are_finite(spoilt, tmp_path, monkeypatch):
    invert, made = kronecker._invert, []

    def without_one(*arguments):
        block = invert(*arguments)
        made.append(block)
        return (lambda: None) if len(made) % 2 == spoilt else block

    options = {"checkpoint": tmp_path / "run", "max_iterations": 25, "tolerance": 0.0}
    with monkeypatch.context() as patched:
        patched.setattr(kronecker, "_invert", without_one)
        before = gt.minimize(*linear(), SECANT, **options)
    after = gt.minimize(*linear(), SECANT, **options | {"max_iterations": 28})
    assert after.history[-1].iteration == 28
    assert after.value < before.value


def network(hidden=16, **options):
    """Normalised networks over features, whose Gauss-Newton model is wrong near a minimum."""
    features = [sp.random(rows, 40, 0.15, "csr", random_state=seed) for rows, seed in ((120, 2), (90, 11))]
    problem = gt.Problem(planted_pairs(120, 90, 900, groups=6, seed=2), *features, omega=0.05, l2=0.01, **options)
    return problem, gt.mlp_towers(problem, (hidden,), 8, "relu", dtype=torch.float64, normalize=True)


def test_networks_go_on_by_secants_once_damping_has_outgrown_its_start():
    problem, towers = network()
    alone, both = (
        gt.minimize(problem, clone(towers), gt.optim.NewtonKron(network_memory=memory), 160, tolerance=0.0)
        for memory in (0, 10)
    )
    assert all(record.cg_steps for record in alone.history[1:])
    switch = next(record.iteration for record in both.history[1:] if record.cg_steps == 0)
    assert all(record.cg_steps == 0 for record in both.history[switch:])  # for good
    assert alone.history[switch].damping > 1.0 >= alone.history[1].damping
    passes = [run.history[-1].work["pair_passes"] - run.history[switch].work["pair_passes"] for run in (alone, both)]
    assert passes[1] < 0.7 * passes[0]
    assert both.value < alone.value


def test_damping_is_outgrown_above_its_start_after_it_was_far_below_or_far_above():
    newton = gt.optim.NewtonKron(damping=2.0).method(0).descent.direction.newton
    found = []
    for value in (50.0, 61.0, 1.0, 3.0, 0.1, 1.9, 2.1):
        newton.damping.value = value
        newton.was_low = newton.was_low or value < 0.2
        found.append(newton.model_failed)
    assert found == [False, True, False, False, False, False, True]


@pytest.fixture
def soon(monkeypatch):
    """Networks go over to secants in the second iteration."""
    monkeypatch.setattr(second_order, "_FAR_ABOVE", 1e-6)


@pytest.mark.usefixtures("soon")
def test_networks_without_room_for_a_pair_stay_with_conjugate_gradient():
    problem, towers = network(400)
    tight, _ = network(400, memory_budget=problem.least_budget(towers))
    for given, steps in ((problem, [True, False, False]), (tight, [True, True, True])):
        history = gt.minimize(given, clone(towers), max_iterations=3).history
        assert [record.cg_steps > 0 for record in history[1:]] == steps


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("stop", [1, 2, 6, 13])
def test_a_resumed_run_of_networks_equals_an_uninterrupted_one(stop, tmp_path):
    problem, towers = network()
    whole = gt.minimize(problem, clone(towers), max_iterations=15)
    options = {"checkpoint": tmp_path / "run", "checkpoint_every": 1}
    gt.minimize(network()[0], clone(towers), max_iterations=stop, **options)
    resumed = gt.minimize(network()[0], clone(towers), max_iterations=15, **options)
    assert torch.equal(whole.parameters.vector, resumed.parameters.vector)

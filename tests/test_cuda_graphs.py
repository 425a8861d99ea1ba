"""CUDA graphs give what the kernels give one by one; only on a GPU."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from cases import COSH, make_tower
from own_step import LINE, squashed

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective.cuda_graphs import GraphExecutor
from gramtower.engine.towers import stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def make(graphs, dtype=torch.float32, activation="elu", shape=(300, 200, 5000), **options):
    problem = gt.Problem(planted_pairs(*shape), embedding_l2=2**-8, **options)
    problem.graphs = graphs
    towers = gt.mlp_towers(problem, hidden=(24, 16), dim=12, dtype=dtype, activation=activation)
    return problem, gt.Towers(towers.left.cuda(), towers.right.cuda())


def test_value_gradient_and_product_are_the_same_and_counted_alike():
    results, works = [], []
    for graphs in (True, False):
        problem, towers = make(graphs)
        point = problem.at(towers)
        assert isinstance(point.executor, GraphExecutor) == graphs
        g = point.gradient()
        results.append((torch.tensor(point.value), g.vector, (point.gauss_newton(0.5) @ g).vector))
        works.append(asdict(problem.work))
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-3)  # damping is added at another moment
    assert works[0] == works[1]


def test_points_alive_at_the_same_time_do_not_disturb_each_other():
    problem, towers = make(True)
    theta = towers.parameters()
    points = [problem.at(towers, theta * scale) for scale in (1.0, 0.5, 1.5, 0.7, 1.2)]
    plain, same = make(False)
    for point, scale in zip(points, (1.0, 0.5, 1.5, 0.7, 1.2), strict=True):
        wanted = plain.at(same, theta * scale)
        assert point.value == wanted.value
        assert torch.equal(point.gradient().vector, wanted.gradient().vector)


def test_memory_of_points_that_are_gone_is_used_again():
    problem, towers = make(True)
    theta = towers.parameters()
    for step in range(20):
        point = problem.at(towers, theta * (1 + step))
        _ = point.value
        del point
    assert problem._graph_pool[1].made <= 2


@pytest.mark.parametrize("optimizer", ["newton-kron", "newton", "gd-diag", "lbfgs"])
def test_training_takes_the_same_path(optimizer):
    values = []
    for graphs in (True, False):
        problem, towers = make(graphs)
        values.append([r.value for r in gt.minimize(problem, towers, optimizer, max_iterations=5).history])
    damped = optimizer == "newton-kron"  # whose damping is added at another moment: the last bit differs, and grows
    assert values[0] == pytest.approx(values[1], rel=1e-4 if damped else 1e-5)


def test_two_runs_give_the_same_bits():
    runs = []
    for _ in range(2):
        problem, towers = make(True)
        runs.append(gt.minimize(problem, towers, max_iterations=6).parameters.vector)
    assert torch.equal(*runs)


def test_an_exchanged_layer_is_noticed():
    problem, towers = make(True)
    before = problem.at(towers).value
    towers.left[1] = torch.nn.ReLU().cuda()
    assert problem.at(towers).value != before


def test_float64_agrees_with_the_cpu():
    problem, towers = make(True, torch.float64)
    point = problem.at(towers)
    cpu = gt.Towers(*(m.cpu() for m in (towers.left, towers.right)))
    wanted = problem.at(cpu)
    assert point.value == pytest.approx(wanted.value, rel=1e-12)
    torch.testing.assert_close(point.gradient().vector.cpu(), wanted.gradient().vector, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", ["elu", "gelu"])
def test_a_product_may_come_before_a_gradient(activation):
    problem, towers = make(True, activation=activation)
    plain, same = make(False, activation=activation)
    theta = towers.parameters()
    for scale in (1.0, 0.5):
        point, wanted = problem.at(towers, theta * scale), plain.at(same, theta * scale)
        mine, expected = (p.gauss_newton() @ theta for p in (point, wanted))
        torch.testing.assert_close(mine.vector, expected.vector, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("activation", ["elu", "gelu"])
def test_preconditioners_alive_at_the_same_time_do_not_disturb_each_other(activation):
    problem, towers = make(True, activation=activation)
    plain, same = make(False, activation=activation)
    theta = towers.parameters()
    first, second = (problem.at(towers, theta * scale).preconditioner(damping=0.1) for scale in (1.0, 0.5))
    wanted = [plain.at(same, theta * scale).preconditioner(damping=0.1) @ theta for scale in (1.0, 0.5)]
    for M, expected in ((first, wanted[0]), (second, wanted[1]), (first, wanted[0])):
        torch.testing.assert_close((M @ theta).vector, expected.vector, rtol=1e-6, atol=1e-9)
    assert first.replay is second.replay is not None


def test_both_sides_at_once_do_not_race():
    """Whatever one side lets go of while the other still reads it would show now and then."""
    for seed in range(20):
        results = []
        for graphs in (True, False):
            problem = gt.Problem(planted_pairs(300, 200, 5000, seed=seed), embedding_l2=2**-8)
            problem.graphs = graphs
            towers = gt.mlp_towers(problem, hidden=(24, 16), dim=12, dtype=torch.float64, seed=seed)
            point = problem.at(gt.Towers(towers.left.cuda(), towers.right.cuda()))
            g = point.gradient()
            results.append((g.vector, (point.gauss_newton() @ g).vector))
        for mine, wanted in zip(*results, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


def compare(towers_of, tolerance, repeats=5, **options):
    """Gradient and product with and without graphs, several times over."""
    for _ in range(repeats):
        results = []
        for graphs in (True, False):
            problem, made = make(graphs, torch.float64, **options)
            towers = towers_of(made)
            point = problem.at(towers)
            assert isinstance(point.executor, GraphExecutor) == graphs
            g = point.gradient()
            results.append((torch.tensor(point.value), g.vector, (point.gauss_newton(0.1) @ g).vector))
        for mine, wanted in zip(*results, strict=True):
            assert float((mine - wanted).norm()) <= tolerance * float(wanted.norm())


def test_towers_with_a_tensor_in_common():
    def joined(towers):
        towers.right[2].weight = towers.left[2].weight
        return gt.Towers(towers.left, towers.right)

    compare(joined, 1e-12)


def test_one_module_for_both_sides():
    compare(lambda towers: gt.Towers(towers.left, towers.left), 1e-12, shape=(300, 300, 5000))


def test_a_step_of_a_user(monkeypatch):
    for module, line in LINE.items():
        monkeypatch.setitem(stack.STEPS, module, line)

    def own(_):
        torch.manual_seed(0)
        return gt.Towers(squashed(300, 12).double().cuda(), squashed(200, 12).double().cuda())

    compare(own, 1e-12)


@pytest.mark.parametrize("tower", ["skip", "gated", "residual", "layernorm", "rmsnorm"])
def test_branches_in_modules_of_a_user(tower):
    def own(_):
        torch.manual_seed(0)
        return gt.Towers(*(make_tower(tower, "ids", rows, 12).double().cuda() for rows in (300, 200)))

    compare(own, 1e-12)


def test_a_loss_of_a_user():
    compare(lambda towers: towers, 1e-12, loss=COSH)


def test_more_rows_than_a_block_of_sums():
    compare(lambda towers: towers, 1e-12, repeats=2, shape=(30_000, 9000, 100_000))


def test_bfloat16_gathers():
    compare(lambda towers: towers, 1e-6, pair_precision="bfloat16")


def sizes(count):
    """Shapes and numbers of pairs, of which no two that follow each other are alike."""
    for number in range(count):
        yield 400 + 211 * (7 * number % 23), 300 + 173 * (5 * number % 19), 10_000 + 6_000 * (3 * number % 17)


@pytest.mark.parametrize("options", [{"dim": 64}, {"dim": 32, "hidden": (48,)}], ids=["tables", "networks"])
def test_a_hundred_fits_leave_memory_as_ten_do(options):
    reserved = []
    for m, n, count in sizes(100):
        model = gt.TwoTower(device="cuda", max_iterations=3, **options).fit(planted_pairs(m, n, count))
        assert model.history_[-1].value < model.history_[0].value
        del model
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[9] + 2**26
    assert max(reserved) <= reserved[9] + 2**28


def test_problems_one_after_the_other_leave_memory_as_a_few_do():
    reserved = []
    for shape in sizes(40):
        problem, towers = make(True, shape=shape)
        gt.minimize(problem, towers, max_iterations=3)
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= max(reserved[:10]) + 2**28


def test_a_point_outlives_the_fits_that_follow():
    problem, towers = make(True)
    point = problem.at(towers)
    before = point.gradient().vector.clone()
    del problem, towers
    gt.TwoTower(device="cuda", dim=32, max_iterations=2).fit(planted_pairs(500, 400, 9000))
    assert torch.equal(point.gradient().vector, before)

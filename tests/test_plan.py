"""Planned against allocated bytes of training on a GPU, for shapes that stress each part of the memory model."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it comes with CUDA builds of torch)")

import numpy as np
import scipy.sparse as sp
from allocations import PROGRAMS, Allocations, Emulated, emulate
from test_gpu_kernels import COLUMN_ORDERS, pieces_of
from test_kernels import assert_same, make_operands, make_pairs, run

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.kernels import gpu, layout, programs
from gramtower.engine.objective import problem as problems
from gramtower.engine.objective.planning import Streamed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured by benchmarks/bench_scale.py")


@pytest.mark.parametrize("kind", ["together", "blocks in parts"])
def test_the_emulation_does_what_the_programs_do(kind, monkeypatch):
    pieces_of(monkeypatch, 3, 5)
    for name, value in COLUMN_ORDERS[kind].items():
        monkeypatch.setattr(layout, name, value)
    pairs = make_pairs("holes")
    operands = make_operands(pairs, 5, torch.float64)
    wanted = run(gpu.KERNELS, pairs, operands)
    emulate(monkeypatch)
    assert all(isinstance(getattr(programs, name), Emulated) for name in PROGRAMS)
    assert_same(run(gpu.KERNELS, pairs, operands), wanted, torch.float64)


def test_training_with_the_emulation_is_training_with_the_programs(monkeypatch):
    ends = []
    for emulated in (False, True):
        if emulated:
            emulate(monkeypatch)
        problem = gt.Problem(planted_pairs(7, 5, 14), kernels="triton", memory_budget="1GB")
        towers = gt.mlp_towers(problem, (6,), 4, dtype=torch.float64)
        ends.append([r.value for r in gt.minimize(problem, towers, max_iterations=1).history])
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def skewed(m, n, count, power):
    """Pairs of which some left entities have most."""
    rng = np.random.default_rng(0)
    share = np.arange(1, m + 1) ** -power
    keys = np.unique(rng.choice(m, count, p=share / share.sum()) * n + rng.integers(n, size=count))
    return sp.csr_matrix((np.ones(len(keys), np.float32), (keys // n, keys % n)), shape=(m, n))


def features(rows, columns, each):
    rng = np.random.default_rng(1)
    where = np.repeat(np.arange(rows), each), rng.integers(columns, size=rows * each)
    matrix = sp.csr_matrix((np.ones(rows * each, np.float32), where), shape=(rows, columns))
    matrix.sum_duplicates()
    return matrix


# Pairs, towers, options, and how the orders are made: what is large in each is what its name says.
SHAPES = {
    "vectors": (lambda: planted_pairs(8000, 3000, 40_000), (), 32, {}, {}),
    "pairs": (lambda: planted_pairs(2000, 1000, 120_000), (), 8, {}, {}),
    "long rows": (lambda: skewed(200, 4000, 150_000, 1.0), (), 16, {}, {}),
    "many columns": (lambda: planted_pairs(2000, 20_000, 100_000), (), 32, {}, {}),
    "many blocks, together": (lambda: planted_pairs(6000, 2000, 100_000), (), 32, {}, {"ROW_BLOCK": 500}),
    "many blocks, each": (
        lambda: planted_pairs(6000, 2000, 100_000), (), 32, {}, {"ROW_BLOCK": 500, "LINES": 1000}
    ),
    "no blocks": (lambda: planted_pairs(8000, 3000, 60_000), (), 32, {}, {"ROW_BLOCK": 100, "LINES": 1000}),
    "few pairs": (
        lambda: planted_pairs(6900, 5900, 47_700), (), 32, {"embedding_l2": 0.01},
        {"ROW_BLOCK": 100, "LINES": 1000},
    ),
    "wide": (lambda: planted_pairs(1200, 900, 20_000), (), 256, {}, {}),
    "hidden layers": (lambda: planted_pairs(5000, 2000, 40_000), (64, 48, 32), 24, {}, {}),
    "sparse features": (
        lambda: planted_pairs(4000, 1500, 40_000), (32,), 24,
        {"left": features(4000, 2000, 30), "right": features(1500, 900, 20)}, {},
    ),
}  # fmt: skip


def trained(name, monkeypatch, memory=0, iterations=2, **options):
    """The most bytes alive while newton-kron trains, and its plan."""
    make, hidden, dim, given, orders = SHAPES[name]
    for key, value in {"SORTED": 10_000, **orders}.items():  # of many more pairs, as on a GPU
        monkeypatch.setattr(layout, key, value)
    problem = gt.Problem(make(), kernels="triton", **given)
    problem.graphs = False  # they are for small problems, and for a GPU alone
    towers = gt.mlp_towers(problem, hidden, dim)
    for key, value in options.items():
        setattr(problem, key, value(problem, towers) if callable(value) else value)
    allocations = Allocations()
    emulate(monkeypatch, allocations)
    plan = problem.plan(towers)
    with allocations:
        gt.minimize(problem, towers, max_iterations=iterations, memory=memory)
    peak = allocations.peak
    gc.collect()
    return peak, plan


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_allocated_is_what_is_planned(name, monkeypatch):
    peak, plan = trained(name, monkeypatch, iterations=1, memory_budget=4 << 30)
    assert plan.streamed is None
    assert 0.6 * plan.bytes < peak <= plan.bytes


@pytest.mark.parametrize("name", ["many columns", "pairs", "hidden layers", "sparse features"])
def test_the_smallest_budget_is_kept(name, monkeypatch):
    peak, plan = trained(
        name, monkeypatch, iterations=1, memory_budget=lambda problem, towers: problem.least_budget(towers)
    )
    assert 0.5 * plan.budget < peak <= plan.budget
    assert plan.bytes <= plan.budget


def test_a_default_budget_that_no_plan_keeps_becomes_most_of_what_is_free(monkeypatch):
    def planned(free):
        monkeypatch.setattr(problems, "free_memory", lambda device: free)
        monkeypatch.setattr(problems, "default_budget", lambda device: free // 2)
        problem = gt.Problem(planted_pairs(6000, 5000, 30_000), kernels="triton")
        problem.graphs = False
        towers = gt.mlp_towers(problem, (), 32)
        plan = problem.plan(towers)
        assert problem.plan(towers) is plan
        return plan

    roomy = planned(10**12)
    assert roomy.budget == 5 * 10**11
    tight = planned(int(1.2 * roomy.needs.resident))
    assert roomy.needs.least > 0.6 * roomy.needs.resident  # half of what is free is too little, all of it is not
    assert tight.streamed is None
    assert tight.bytes <= tight.budget <= 1.08 * roomy.needs.resident
    scarce = planned(int(1.05 * roomy.needs.least))
    assert scarce.budget == int(1.05 * roomy.needs.least) * 9 // 10


@pytest.mark.parametrize("name", ["vectors", "hidden layers"])
def test_streamed_blocks_take_what_is_planned(name, monkeypatch):
    peak, plan = trained(name, monkeypatch, iterations=1, memory_budget=4 << 30, streamed=Streamed(1024, pinned=False))
    assert 0.6 * plan.bytes < peak <= plan.bytes


@pytest.mark.parametrize(
    ("name", "pairs"), [("vectors", 1), ("vectors", 2), ("vectors", 3), ("pairs", 1), ("many columns", 1)]
)
def test_secant_steps_remember_what_the_budget_leaves_room_for(name, pairs, monkeypatch):
    def room(problem, towers):
        problem.memory_budget = 4 << 30
        needed = (4 << 30) - problem.plan(towers).spare_bytes
        return max(problem.plan(towers).bytes, needed + 2 * pairs * 4 * towers.size)

    peak, plan = trained(name, monkeypatch, memory=3, iterations=9, memory_budget=room)
    assert min(3, plan.spare_bytes // (2 * plan.needs.theta)) >= pairs
    assert 0.85 * plan.budget < peak <= plan.budget


def test_without_room_for_a_pair_training_takes_less_than_by_conjugate_gradient(monkeypatch):
    peaks = {}
    for memory in (0, 3):
        found = trained("vectors", monkeypatch, memory, 6, memory_budget=lambda p, towers: p.least_budget(towers))
        peaks[memory], plan = found
        assert plan.spare_bytes < 2 * plan.needs.theta
        monkeypatch.undo()
    assert peaks[3] < peaks[0] <= plan.budget


@pytest.mark.parametrize("name", ["vectors", "many columns", "hidden layers"])
def test_a_budget_that_cannot_be_kept_is_refused_before_work(name, monkeypatch):
    def below(problem, towers):
        return problem.least_budget(towers) - 1

    with pytest.raises(ValueError, match=r"^memory_budget.*'\d+MB'"):
        trained(name, monkeypatch, memory_budget=below)


def test_orders_of_many_pieces_and_lines_are_part_of_the_plan(monkeypatch):
    found = {}
    for blocks in ("together", "each"):
        peak, plan = trained(f"many blocks, {blocks}", monkeypatch, iterations=1, memory_budget=4 << 30)
        found[blocks] = peak, plan.bytes, plan.needs.lines(plan.needs.orders.lines)
        monkeypatch.undo()
    lines = found["together"][2]
    assert lines > 10 * 2000 * 32 * 4  # many times V
    assert found["together"][1] - found["each"][1] > 0.5 * lines
    assert found["together"][0] - found["each"][0] > 0.5 * lines

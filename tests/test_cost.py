"""Cost as a tested property: passes of towers and pairs are counted, and nothing of m·n elements is ever made."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import make_case
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.kernels import cpu

VALUE = dict(left_forwards=1, right_forwards=1, pair_passes=1)
GRADIENT = dict(left_vjps=1, right_vjps=1, pair_passes=2)
PRODUCT = dict(left_jvps=1, left_vjps=1, right_jvps=1, right_vjps=1, pair_passes=2)
AGAIN = dict(left_forwards=1, right_forwards=1)  # a tower run again for a jvp or vjp, when nothing was kept


def work_of(problem, action):
    """The result of an action, and its non-zero counts of tower and pair passes."""
    before = problem.work.copy()
    result = action()
    done = asdict(problem.work.since(before))
    return result, {name: count for name, count in done.items() if count and name != "data_passes"}


@pytest.mark.parametrize("tower", ["elu", "residual", "custom"])
@pytest.mark.parametrize("kind", ["ids", "sparse"])
def test_passes_of_value_gradient_and_product(tower, kind):
    case = make_case(m=30, n=25, tower=tower, kinds=(kind, kind))
    problem = case.problem
    point, at = work_of(problem, lambda: problem.at(case.towers))
    _, value = work_of(problem, lambda: point.value)
    assert {**at, **value} == VALUE
    gradient, done = work_of(problem, point.gradient)
    assert done == GRADIENT
    G, done = work_of(problem, point.gauss_newton)
    assert done == {}
    for _ in range(2):
        assert work_of(problem, lambda: G @ gradient)[1] == PRODUCT


def test_asking_twice_for_the_value_costs_nothing_more():
    case = make_case()
    point = case.problem.at(case.towers)
    first = point.value
    again, done = work_of(case.problem, lambda: point.value)
    assert again == first
    assert done == {}


class Counted(nn.Module):
    """A tower that counts the rows it is shown."""

    def __init__(self, width, dim):
        super().__init__()
        self.table, self.last, self.rows = nn.Embedding(width, 5), nn.Linear(5, dim), 0

    def forward(self, x):
        self.rows += len(x)
        return self.last(torch.tanh(self.table(x)))


@pytest.mark.parametrize("activations", [None, 1])
def test_counted_forwards_are_the_real_ones(activations):
    m, n = 40, 30
    problem = gt.Problem(planted_pairs(m, n, 200))
    if activations is not None:
        problem.activations = activations
    towers = gt.Towers(Counted(m, 3), Counted(n, 3))
    problem.at(towers)  # the first evaluation also tries a few rows
    before, towers.left.rows, towers.right.rows = problem.work.copy(), 0, 0
    point = problem.at(towers)
    point.gauss_newton() @ point.gradient()
    done = problem.work.since(before)
    assert (towers.left.rows, towers.right.rows) == (m * done.left_forwards, n * done.right_forwards)
    assert done.left_forwards == (1 if activations is None else 4)  # evaluation; again for a vjp, a jvp and a vjp


def test_without_memory_towers_run_again_and_that_is_counted():
    case = make_case(m=50, n=40, activations=1)
    point, done = work_of(case.problem, lambda: case.problem.at(case.towers))
    assert done == AGAIN
    gradient, done = work_of(case.problem, point.gradient)
    assert done == {**GRADIENT, **AGAIN, "pair_passes": 3}  # the scores, not asked for before, are a pass too
    twice = {name: 2 * count for name, count in AGAIN.items()}
    assert work_of(case.problem, lambda: point.gauss_newton() @ gradient)[1] == {**PRODUCT, **twice}


def test_counted_pair_passes_are_the_real_ones(monkeypatch):
    calls = Counter()

    def counting(name, kernel):
        def run(*arguments):
            calls[name] += 1
            return kernel(*arguments)

        return run

    for name in ("dots", "left_sum", "right_sum", "curvature_left"):
        monkeypatch.setattr(cpu.KERNELS, name, counting(name, getattr(cpu.KERNELS, name)))
    case = make_case(kernels="numba")
    point = case.problem.at(case.towers)
    assert calls.total() == case.problem.work.pair_passes == 0
    assert point.value > 0
    assert calls == {"dots": 1}
    gradient = point.gradient()
    assert calls == {"dots": 1, "left_sum": 1, "right_sum": 1}
    point.gauss_newton() @ gradient
    assert calls.total() == case.problem.work.pair_passes == 5


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned, backward passes included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


M, N, WIDTH = 3000, 2500, 2000


def large_problem(kind, kernels):
    pairs = planted_pairs(M, N, 4000)
    if kind == "ids":
        return gt.Problem(pairs, kernels=kernels)
    rng = np.random.default_rng(0)
    left, right = (sp.random(rows, WIDTH, 0.002, format="csr", random_state=rng) for rows in (M, N))
    return gt.Problem(pairs, left, right, kernels=kernels)


@pytest.mark.parametrize("kernels", ["numba", "reference"])
@pytest.mark.parametrize("autodiff", [False, True])
@pytest.mark.parametrize("kind", ["ids", "sparse"])
def test_nothing_of_all_pairs_or_dense_features_is_ever_made(kind, autodiff, kernels):
    with Largest() as largest:
        problem = large_problem(kind, kernels)
        towers = gt.mlp_towers(problem, hidden=(5,), dim=4)
        if autodiff:
            for module in (towers.left, towers.right):
                module.register_forward_hook(lambda *_: None)  # a module with hooks is called as it is
        point = problem.at(towers)
        assert np.isfinite(point.value)
        point.gauss_newton() @ point.gradient()
    # θ has 27,500 + 2,500 numbers or so, the reference gathers 5 for each of 12,000 entries of features; all pairs
    # would be 7,500,000, dense features 6,000,000 and 5,000,000.
    assert len(point.parameters) * 0.5 < largest.elements <= 60_000


def test_the_watch_sees_what_it_should_and_inside_backward_too():
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            torch.outer(torch.ones(M), torch.ones(N))
            return g

    x = torch.ones(3, requires_grad=True)
    with Largest() as largest:
        y = Outer.apply(x).sum()
        assert largest.elements == 3
        y.backward()
    assert largest.elements == M * N

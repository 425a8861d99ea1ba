"""Unusual modules: every optimizer trains each module that maps rows one by one, whatever its layers are given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.optim.solvers import SOLVERS

M, N, WIDTH, DIM = 60, 50, 5, 3
FEATURES = np.random.default_rng(0).standard_normal((M, WIDTH))


class Odd(nn.Module):
    """Two layers, a table and some parameters, put together by a function."""

    def __init__(self, function, inputs, outputs=DIM, rows=WIDTH):
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(inputs, 4), nn.Linear(4, outputs)
        self.p, self.scale = nn.Parameter(torch.randn(rows, inputs)), nn.Parameter(torch.randn(outputs))
        self.table = nn.Embedding(rows, 4)
        self.tied = nn.Linear(inputs, 4)
        self.tied.weight = self.a.weight

    def forward(self, x):
        return self.function(self, x)


def flattened(t, x):
    return t.b(torch.tanh(t.a(x.reshape(-1, 1)))).view(len(x), -1, DIM).mean(1)


ODD = {
    "a weight that a layer makes of a parameter": (lambda t, x: x @ torch.tanh(t.b(t.a(t.p))), WIDTH),
    "a layer used for rows and for a parameter": (lambda t, x: t.b(t.a(x).tanh()) + t.b(t.a(t.p).tanh()).sum(0), WIDTH),
    "a layer used twice for rows": (lambda t, x: t.b(t.a(x).tanh() + torch.sort(t.a(2 * x)).values), WIDTH),
    "a layer of one row that is broadcast": (lambda t, x: t.b(t.a(x).tanh()) * t.b(t.a(t.p[0])).sigmoid(), WIDTH),
    "three dimensions": (lambda t, x: t.b(torch.tanh(t.a(x[:, :, None]))).mean(1), 1),
    "three dimensions, entities last": (lambda t, x: t.b(torch.tanh(t.a(x.t()[:, :, None]))).mean(0), 1),
    "entities times features as rows": (flattened, 1),
    "einsum": (lambda t, x: torch.einsum("nd,dk->nk", x, t.b(t.a(t.p))).tanh(), WIDTH),
    "elementwise parameters": (lambda t, x: torch.sin(t.scale.exp() * x[:, :DIM].cumsum(1) + t.scale), WIDTH),
    "a table of positions": (lambda t, x: t.b(x @ t.table(torch.arange(x.shape[1])).tanh()), WIDTH),
    "a layer called by keyword": (lambda t, x: t.b(input=t.a(input=x).sort(1).values), WIDTH),
    "tied layers, one for a parameter": (lambda t, x: t.b(t.a(x).tanh() * t.tied(t.p).mean(0)), WIDTH),
    "a result that is not used": (lambda t, x: (t.a(t.p), t.b(t.a(x).sort(1).values))[1], WIDTH),
}


def towers_of(name, dtype=torch.float64, rows=WIDTH):
    torch.manual_seed(0)
    function, inputs = ODD[name]
    return gt.Towers(Odd(function, inputs, rows=rows).to(dtype), nn.Embedding(N, DIM).to(dtype))


def problem_of(features=FEATURES):
    return gt.Problem(planted_pairs(M, N, 400, seed=0), features, omega=0.1, l2=0.01)


@pytest.mark.parametrize("optimizer", SOLVERS)
@pytest.mark.parametrize("name", ODD)
def test_every_optimizer_trains_it(name, optimizer):
    options = {"ratio": 0.3} if "sampling" in optimizer or "sogram" in optimizer else {}
    result = gt.minimize(problem_of(), towers_of(name), optimizer, max_iterations=6, tolerance=0.0, **options)
    values = [record.value for record in result.history]
    assert values[-1] < values[0]
    if optimizer == "newton-kron":
        assert all(after < before for before, after in pairwise(values))
        plain = gt.minimize(problem_of(), towers_of(name), "gd", max_iterations=6, tolerance=0.0)
        assert values[-1] <= plain.value


@pytest.mark.parametrize("name", ODD)
def test_the_preconditioner_is_positive_definite_and_covers_every_parameter(name):
    point = problem_of().at(towers_of(name))
    M = point.preconditioner(damping=0.1)
    eye = torch.eye(len(point.parameters), dtype=torch.float64)
    dense = M @ eye
    assert torch.allclose(dense, dense.t(), atol=1e-9 * float(dense.abs().max()))
    assert float(torch.linalg.eigvalsh(0.5 * (dense + dense.t())).min()) > 0


def test_flattened_entities_get_the_factors_of_three_dimensions():
    one, other = (
        problem_of().at(towers_of(name)).preconditioner(damping=0.1).tensors()
        for name in ("three dimensions", "entities times features as rows")
    )
    assert len(one) == len(other)
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(one, other, strict=True))


def test_a_parameter_with_as_many_rows_as_entities_does_no_harm():
    for rows in (M, 2 * M):
        towers = towers_of("a layer used for rows and for a parameter", rows=rows)
        result = gt.minimize(problem_of(), towers, max_iterations=6)
        assert result.value < 0.9 * result.history[0].value


def test_a_single_entity_can_be_trained():
    problem = gt.Problem(planted_pairs(1, N, 20, seed=0), FEATURES[:1], omega=0.1, l2=0.01)
    for name in ODD:
        result = gt.minimize(problem, towers_of(name), max_iterations=3)
        assert result.value < result.history[0].value


def test_a_module_without_second_derivatives_is_refused_by_name_where_they_are_needed():
    problem = gt.Problem(planted_pairs(M, N, 400, seed=0), omega=0.1, l2=0.01)

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.EmbeddingBag(M, DIM, mode="sum")

        def forward(self, ids):
            return self.bags(torch.stack([ids, 0 * ids], 1))

    with pytest.raises(ValueError, match=r"(?s)bags .*second derivative.*'lbfgs'"):
        gt.minimize(problem, gt.Towers(Bags(), nn.Embedding(N, DIM)), "newton", max_iterations=2)
    result = gt.minimize(problem, gt.Towers(Bags(), nn.Embedding(N, DIM)), "lbfgs", max_iterations=3)
    assert result.value < result.history[0].value

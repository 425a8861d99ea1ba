"""Operators compose, and take every kind of vector."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from cases import make_case
from test_engine import relative

import gramtower as gt
from gramtower.engine.objective.cuda_graphs import _GraphedApply


@pytest.fixture(scope="module")
def operators():
    case = make_case(m=9, n=7, tower="linear", weights=True, embedding_l2=0.1)
    point = case.problem.at(case.towers)
    G, M = point.gauss_newton(), point.preconditioner(damping=0.1)
    eye = torch.eye(G.shape[0], dtype=torch.float64)
    return G, M, (G @ eye).numpy(), (M @ eye).numpy(), point.gradient()


def test_products_are_of_the_kind_that_was_given(operators):
    G, _, dense, _, g = operators
    vector = g.to_vector()
    wanted = dense @ vector.numpy()
    assert isinstance(G @ g, gt.Parameters)
    assert isinstance(G @ vector, torch.Tensor)
    assert isinstance(G @ vector.numpy(), np.ndarray)
    for product in ((G @ g).vector.numpy(), (G @ vector).numpy(), G @ vector.numpy()):
        assert relative(product, wanted) < 1e-12
    columns = np.stack([wanted, 2 * wanted], 1)
    assert relative(G @ np.stack([vector.numpy(), 2 * vector.numpy()], 1), columns) < 1e-12


def test_sums_multiples_and_compositions_are_those_of_the_matrices(operators):
    G, M, dense_G, dense_M, g = operators
    v, eye = g.to_vector().numpy(), np.eye(len(dense_G))
    for composed, wanted in (
        (G + 0.5, dense_G + 0.5 * eye),
        (0.5 + G, dense_G + 0.5 * eye),
        (M + 0.5, dense_M + 0.5 * eye),
        (G - 0.5, dense_G - 0.5 * eye),
        (2.0 * G, 2.0 * dense_G),
        (-M, -dense_M),
        (G + M, dense_G + dense_M),
        (G - M * 3.0, dense_G - 3.0 * dense_M),
        (M @ G, dense_M @ dense_G),
        ((M @ G).T, (dense_M @ dense_G).T),
        ((G @ M + 2.0 * G).T, (dense_G @ dense_M + 2.0 * dense_G).T),
    ):
        assert relative(composed @ v, wanted @ v) < 1e-11


def test_damping_added_to_G_is_that_of_the_point(operators):
    case = make_case(tower="elu")
    point = case.problem.at(case.towers)
    d = point.gradient()
    wanted = point.gauss_newton(0.7) @ d
    assert torch.equal(((point.gauss_newton(0.2) + 0.5) @ d).vector, wanted.vector)
    assert torch.equal(((point.gauss_newton(0.2) + np.float32(0.5)) @ d).vector, wanted.vector)


def test_scipy_solves_with_them(operators):
    G, M, dense, _, g = operators
    b = g.to_vector().numpy()
    damped = G + 1.0
    x, failed = sla.cg(damped.to_scipy(), b, rtol=1e-10, M=M.to_scipy())
    assert failed == 0
    assert relative(x, np.linalg.solve(dense + np.eye(len(dense)), b)) < 1e-7
    transposed = (M @ G).to_scipy()
    assert relative(transposed.rmatvec(b), ((M @ G).T @ b)) < 1e-12


@pytest.mark.parametrize("bad", ["x", None, [1.0, 2.0], float("nan")])
def test_what_is_no_operator_and_no_vector_is_refused(operators, bad):
    G, *_ = operators
    with pytest.raises(ValueError, match=r"^(operator|d)"):
        G + bad
    with pytest.raises(ValueError, match=r"^d:"):
        G @ bad


def test_operators_over_other_parameters_are_refused(operators):
    other = make_case(m=5, n=4, tower="linear")
    with pytest.raises(ValueError, match=r"^operator.*other parameters"):
        operators[0] + other.problem.at(other.towers).gauss_newton()
    with pytest.raises(ValueError, match=r"^operator.*other parameters"):
        operators[0] @ other.problem.at(other.towers).gauss_newton()


class Recorded(_GraphedApply):
    """Records as a GPU does, for any device: what is replayed works on the memory of what was recorded."""

    def _record(self, M, r):
        held, self._r, self._out = M.copy(), r.clone(), r.empty()
        self._replay = lambda: held.compute(self._r, self._out)
        return held


def test_a_preconditioner_with_other_factors_than_the_recorded_one_is_recorded_anew():
    case = make_case(tower="elu")
    point = case.problem.at(case.towers)
    r, graphed = point.gradient(), Recorded()
    some, fewer = point.preconditioner(damping=0.1), point.preconditioner(damping=0.3)
    fewer._blocks = [block for block in fewer._blocks if block.weight != "left.2.weight"]
    for name in ("left.2.weight", "left.2.bias"):  # as if their factors were not finite
        fewer._diagonal[name] = torch.full_like(r[name], 0.5)
    for M in (some, fewer, some):
        assert torch.equal(graphed(M, r, r.empty()).vector, M.compute(r, r.zeros()).vector)

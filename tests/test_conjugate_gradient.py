"""Conjugate gradient against a dense solve."""

from __future__ import annotations

import pytest
import torch

from gramtower.engine.towers.parameters import Layout, Parameters
from gramtower.optim.second_order import conjugate_gradient


class Matrix:
    def __init__(self, dense):
        self.dense, self.calls = dense, 0

    def product(self, d, out=None):
        self.calls += 1
        result = self.dense @ d.vector
        if out is None:
            return Parameters(d.layout, result)
        out.vector.copy_(result)
        return out


def system(size=12, condition=1e4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    G = basis @ torch.diag(torch.logspace(0, torch.log10(torch.tensor(condition)), size, dtype=torch.float64)) @ basis.T
    b = torch.randn(size, dtype=torch.float64, generator=generator)
    return G, Parameters(Layout.of({"x": (size,)}), b)


def test_solves_in_as_many_steps_as_dimensions():
    G, b = system(condition=100)
    solved = conjugate_gradient(Matrix(G), b.clone(), tolerance=1e-9, max_steps=30)
    assert torch.allclose(solved.s.vector, torch.linalg.solve(G, b.vector), rtol=1e-6)
    assert solved.converged
    assert solved.steps <= 14


def test_residual_and_model_are_those_of_the_solution():
    G, b = system()
    solved = conjugate_gradient(Matrix(G), b.clone(), tolerance=0.0, max_steps=5)
    s = solved.s.vector
    assert torch.allclose(solved.residual.vector, b.vector - G @ s, atol=1e-10)
    assert solved.model == pytest.approx(float(0.5 * s @ G @ s - b.vector @ s), rel=1e-10)
    assert not solved.converged


def test_tolerance_is_relative_to_the_right_hand_side():
    G, b = system()
    solved = conjugate_gradient(Matrix(G), b.clone(), tolerance=0.1, max_steps=100)
    before = conjugate_gradient(Matrix(G), b.clone(), tolerance=0.0, max_steps=solved.steps - 1)
    assert solved.residual.norm() <= 0.1 * b.norm() < before.residual.norm()


def test_the_exact_inverse_as_preconditioner_needs_one_step():
    G, b = system()
    solved = conjugate_gradient(Matrix(G), b.clone(), tolerance=1e-9, preconditioner=Matrix(torch.linalg.inv(G)))
    assert solved.steps == 1
    assert torch.allclose(solved.s.vector, torch.linalg.solve(G, b.vector))


def test_a_diagonal_preconditioner_gives_the_same_solution():
    G, b = system()
    scale = torch.diag(1 / G.diagonal())
    solved = conjugate_gradient(Matrix(G), b.clone(), tolerance=1e-12, max_steps=60, preconditioner=Matrix(scale))
    assert torch.allclose(solved.s.vector, torch.linalg.solve(G, b.vector), rtol=1e-6)


def test_stops_when_the_model_no_longer_falls():
    G, b = system(size=60, condition=1e8)
    patient = conjugate_gradient(Matrix(G), b.clone(), tolerance=0.0, max_steps=60)
    hasty = conjugate_gradient(Matrix(G), b.clone(), tolerance=0.0, max_steps=60, progress=0.2)
    assert hasty.steps < patient.steps
    assert hasty.converged


def test_one_product_a_step_and_none_for_a_zero_right_hand_side():
    G, b = system()
    matrix = Matrix(G)
    assert conjugate_gradient(matrix, b, tolerance=0.0, max_steps=4).steps == matrix.calls == 4
    assert conjugate_gradient(matrix, b.zeros()).steps == 0

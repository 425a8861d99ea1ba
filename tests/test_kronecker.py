"""The preconditioner: symmetric, positive definite, close to the inverse where its form is exact, and useful."""

from __future__ import annotations

import pytest
import torch
from cases import FEATURES, LOSSES, TOWERS, make_case
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective import kronecker as kronecker_module
from gramtower.engine.towers.layers import Elementwise
from gramtower.engine.towers.steps import clamped_spectrum
from gramtower.optim.second_order import conjugate_gradient


def dense_of(operator):
    eye = torch.eye(operator.shape[0], dtype=torch.float64)
    return torch.stack([operator @ column for column in eye], 1)


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("shared", [False, True])
def test_symmetric_and_positive_definite(tower, kind, shared):
    case = make_case(m=6, n=5, tower=tower, kinds=(kind, kind), weights=True, embedding_l2=0.1, shared=shared, seed=1)
    M = dense_of(case.problem.at(case.towers).preconditioner("kronecker", damping=0.1))
    assert torch.allclose(M, M.T, rtol=1e-9, atol=1e-12)
    assert float(torch.linalg.eigvalsh(M).min()) > 0


@pytest.mark.parametrize("tower", ["linear", "elu"])
def test_one_side_alone_is_its_part_of_the_whole_and_zero_elsewhere(tower):
    case = make_case(m=6, n=5, tower=tower, weights=True, embedding_l2=0.1, seed=1)
    point = case.problem.at(case.towers)
    whole = point.preconditioner("kronecker", 0.1) @ point.gradient()
    for side in ("left", "right"):
        part = point.preconditioner("kronecker", 0.1, side) @ point.gradient()
        for name, tensor in part.items():
            expected = whole[name] if name.startswith(side) else torch.zeros_like(tensor)
            assert torch.allclose(tensor, expected, rtol=1e-10, atol=1e-14)


def test_one_side_alone_is_refused_where_towers_share_parameters():
    case = make_case(m=6, n=5, kinds=("dense", "dense"), shared=True, seed=1)
    with pytest.raises(ValueError, match=r"side:.*'left'"):
        case.problem.at(case.towers).preconditioner("kronecker", 0.1, "left")
    with pytest.raises(ValueError, match="side"):
        case.problem.at(case.towers).preconditioner("kronecker", 0.1, "up")


@pytest.mark.parametrize("embedding_l2", [0.0, 0.3])
def test_all_pairs_part_is_exact_for_a_linear_table_with_the_other_side_fixed(embedding_l2):
    """Without observed pairs G's left block is I ⊗ (S + λI) with S = ωQ_c + μcI, as c is the same for all rows. With
    A = I damping in halves is exact up to the product of the two shifts: a vanishing λ leaves the exact inverse."""
    case = make_case(
        m=6, n=5, density=0.0, tower="linear", variant=1, l2=1e-9, omega=0.5, embedding_l2=embedding_l2, seed=2
    )
    for parameter in case.towers.right.parameters():
        parameter.requires_grad_(False)
    point = case.problem.at(gt.Towers(case.towers.left, case.towers.right))
    M, G = dense_of(point.preconditioner()), dense_of(point.gauss_newton())
    assert torch.allclose(M @ G, torch.eye(len(M), dtype=torch.float64), atol=1e-3)


def test_moments_over_observed_pairs_are_those_of_dense_sums():
    case = make_case(m=8, n=7, loss="squared", weights=True, omega=0.3, seed=5)
    point = case.problem.at(case.towers)
    weights = torch.outer(torch.tensor(case.dense.a), torch.tensor(case.dense.b)).double()
    Z = torch.where(torch.tensor(case.dense.labels).isnan(), 0.0, 1 - 0.3 * weights)  # ∂²ℓ⁺ of the squared loss
    moments = point.evaluation.curvature_moments()
    for number, (curvatures, own, other) in enumerate(((Z, point.P, point.Q), (Z.T, point.Q, point.P))):
        expected = curvatures @ torch.stack([torch.ones(len(other)).double(), (other**2).sum(1)], 1)
        assert torch.allclose(moments.sums[number], expected)
        assert torch.allclose(moments.squares[number], own.T @ torch.diag(expected[:, 0]) @ own)


@pytest.mark.parametrize(
    ("tower", "kind"),
    [("elu", "ids"), ("residual", "ids"), ("custom", "dense"), ("layernorm", "ids")],
)
def test_needs_fewer_steps_than_plain_conjugate_gradient(tower, kind):
    case = make_case(m=60, n=50, density=0.1, tower=tower, kinds=(kind, kind), dim=4, l2=1e-2, omega=0.5, seed=3)
    point = case.problem.at(case.towers)
    G, b = point.gauss_newton(), -point.gradient()
    plain = conjugate_gradient(G, b.clone(), tolerance=0.0, max_steps=10)
    helped = conjugate_gradient(G, b, tolerance=0.0, max_steps=10, preconditioner=point.preconditioner())
    assert helped.model < plain.model  # a deeper point of the same quadratic model for the same products


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("imputed", [0.0, "low-rank"])
def test_works_for_every_loss_with_weights_and_penalty(loss, imputed):
    case = make_case(m=8, n=7, loss=loss, imputed=imputed, weights=True, embedding_l2=0.3, seed=4)
    point = case.problem.at(case.towers)
    result = point.preconditioner("kronecker", 1.0) @ point.gradient()
    assert result.is_finite()
    assert result.dot(point.gradient()) > 0


def test_same_result_every_time():
    case = make_case(tower="residual", seed=5)
    point = case.problem.at(case.towers)
    r = point.gradient()
    assert torch.equal((point.preconditioner() @ r).vector, (point.preconditioner() @ r).vector)


def test_means_of_slopes_are_summed_for_branching_towers_alone(monkeypatch):
    asked = []
    counted = Elementwise.moment_with_mean
    monkeypatch.setattr(Elementwise, "moment_with_mean", lambda *given: asked.append(1) or counted(*given))
    problem = gt.Problem(planted_pairs(20, 15, 60, groups=2), omega=0.1)

    class Branching(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.table, self.last = nn.Embedding(rows, 4), nn.Linear(4, 3)

        def forward(self, ids):
            h = self.table(ids)
            return self.last(torch.tanh(h) + h)

    problem.at(gt.mlp_towers(problem, hidden=(4,), dim=3)).preconditioner("kronecker")
    assert not asked
    problem.at(gt.Towers(Branching(20), Branching(15))).preconditioner("kronecker")
    assert len(asked) == 2


def test_more_damping_means_a_shorter_result():
    case = make_case(seed=6)
    point = case.problem.at(case.towers)
    r = point.gradient()
    lengths = [(point.preconditioner("kronecker", damping) @ r).norm() for damping in (0.0, 1.0, 100.0)]
    assert lengths == sorted(lengths, reverse=True)


def test_unknown_kind_is_refused():
    case = make_case()
    with pytest.raises(ValueError, match=r"kind:.*'jacobi'.*'kronecker'"):
        case.problem.at(case.towers).preconditioner("jacobi")


@pytest.mark.parametrize("bad", ["inf", "nan", "no convergence", "indefinite"])
def test_matrices_that_cannot_be_decomposed_still_give_a_positive_preconditioner(bad, monkeypatch):
    def eigh(matrix):
        raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")

    S = torch.diag(torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64))
    if bad == "no convergence":
        monkeypatch.setattr(torch.linalg, "eigh", eigh)
    else:
        S[1, 1] = {"inf": torch.inf, "nan": torch.nan, "indefinite": -1.0}[bad]
    values, vectors = clamped_spectrum(S)
    rebuilt = (vectors * values) @ vectors.T
    assert torch.allclose(rebuilt.diagonal()[[0, 2]], torch.tensor([4.0, 2.0], dtype=torch.float64))
    assert float(rebuilt[1, 1]) == (1.0 if bad == "no convergence" else 0.0)


def test_a_layer_whose_factors_overflow_is_preconditioned_by_damping_alone(monkeypatch):
    case = make_case(m=8, n=7, kinds=("dense", "dense"), tower="elu", seed=7)
    point = case.problem.at(case.towers)
    plain = kronecker_module.tower_factors

    def overflowing(*arguments):
        factors = plain(*arguments)
        factors.layers[-1].A[0, 0] = torch.inf
        return factors

    monkeypatch.setattr(kronecker_module, "tower_factors", overflowing)
    r = point.gradient()
    z = point.preconditioner("kronecker", 1.0) @ r
    assert z.is_finite()
    assert z.dot(r) > 0
    first = "left.0.weight"
    assert torch.allclose(z[first], r[first] / (0.1 + 1.0))

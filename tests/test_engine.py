"""Value, gradient and G·d against the dense double sum, for everything a problem can be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import FEATURES, LOSSES, TOWERS, make_case
from dense import evaluate
from hypothesis import given
from hypothesis import strategies as st

from gramtower.data.pairs import SEGMENT

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def relative(a, b):
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def assert_near(a, b, tolerance):
    """Relative to numbers around one where b is small: its terms may cancel to nothing but their rounding."""
    assert float((a.double() - b).norm()) <= tolerance * max(float(b.norm()), 1.0)


def compare(case, dtype=torch.float64):
    value, gradient, G = evaluate(case.dense, case.left, case.right)
    point = case.problem.at(case.towers)
    tolerance = TOLERANCE[dtype]
    assert abs(point.value - value) <= tolerance * max(abs(value), 1e-12)
    assert_near(point.gradient().to_vector(), gradient, tolerance)
    operator = point.gauss_newton()
    for seed in range(2):
        d = torch.randn(len(gradient), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert_near(operator @ d.to(dtype), G @ d, tolerance)
    return point


@pytest.mark.parametrize("kernels", ["numba", "reference"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("imputed", [-1.0, 0.0, "low-rank", "fitted"])
@pytest.mark.parametrize("weights", [False, True])
def test_losses_weights_and_imputation(loss, imputed, weights, kernels):
    compare(make_case(loss=loss, imputed=imputed, weights=weights, kernels=kernels, seed=1))


@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("tower", TOWERS)
def test_towers_and_features(tower, kind, variant):
    compare(make_case(tower=tower, kinds=(kind, kind), variant=variant, weights=True, seed=2))


@pytest.mark.parametrize("kinds", [("ids", "dense"), ("sparse", "ids"), ("dense", "sparse")])
def test_different_features_on_the_two_sides(kinds):
    compare(make_case(kinds=kinds, seed=3))


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("tower", ["elu", "residual", "custom", "linear"])
def test_one_module_for_both_sides(tower, kind):
    point = compare(make_case(tower=tower, kinds=(kind, kind), shared=True, weights=True, seed=4))
    assert all(name.startswith("left.") for name in point.parameters)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_embedding_penalty(power):
    compare(make_case(embedding_l2=0.3, frequency_power=power, weights=True, seed=5))


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_observed_pairs(loss):
    compare(make_case(loss=loss, pair_weights=True, weights=True, seed=15))


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("kind", FEATURES)
def test_float32(tower, kind):
    compare(make_case(tower=tower, kinds=(kind, kind), dtype=torch.float32, weights=True, seed=6), torch.float32)


@given(
    m=st.integers(1, 7), n=st.integers(1, 7), density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    loss=st.sampled_from(LOSSES), tower=st.sampled_from(TOWERS), kinds=st.tuples(*[st.sampled_from(FEATURES)] * 2),
    dim=st.integers(1, 4), weights=st.booleans(), imputed=st.sampled_from([-1.0, 0.0, 0.5, "low-rank", "fitted"]),
    omega=st.sampled_from([0.0, 2.0**-8, 1.0, 3.0]), l2=st.sampled_from([0.0, 0.5]),
    embedding_l2=st.sampled_from([0.0, 0.1]), shared=st.booleans(), pair_weights=st.booleans(),
    seed=st.integers(0, 5), variant=st.integers(0, 2),
    activations=st.sampled_from([None, 1]),
)  # fmt: skip
def test_anything(**drawn):
    compare(make_case(**drawn))


@pytest.mark.parametrize("shape", [(2, 2 * SEGMENT + 100), (2 * SEGMENT + 100, 2)], ids=["a row", "a column"])
def test_one_entity_whose_pairs_are_several_pieces(shape):
    case = make_case(*shape, density=0.9, tower="linear", dim=2, seed=7)
    pairs = case.problem.pairs
    assert max(pairs.row_counts.max(), pairs.column_counts.max()) > SEGMENT
    point = case.problem.at(case.towers)
    value, gradient, _ = evaluate(case.dense, case.left, case.right, with_matrix=False)
    assert abs(point.value - value) < 1e-10 * value
    assert relative(point.gradient().to_vector(), gradient) < 1e-10


@pytest.mark.parametrize("tower", ["elu", "residual", "normalised"])
def test_gradient_is_the_slope_of_the_value(tower):
    # Central differences: truncation h²·L'''/6 and rounding ε·L/h balance near h = 1e-5, at about 1e-9 of the slope.
    case = make_case(tower=tower, seed=8, embedding_l2=0.1, weights=True)
    point = case.problem.at(case.towers)
    gradient = point.gradient()
    for seed in range(3):
        d = gradient.from_vector(torch.randn(len(gradient), generator=torch.Generator().manual_seed(seed)))
        line, h = point.along(d), 1e-5
        slope = (line(h).value - line(-h).value) / (2 * h)
        assert slope == pytest.approx(gradient.dot(d), rel=1e-6, abs=1e-8)


def test_gauss_newton_is_symmetric_and_positive():
    case = make_case(m=7, n=6, loss="logistic", omega=0.5, seed=9)
    G = case.problem.at(case.towers).gauss_newton()
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        d, e = torch.randn(2, G.shape[0], dtype=torch.float64, generator=generator)
        assert float(e @ (G @ d)) == pytest.approx(float(d @ (G @ e)), rel=1e-10)
        assert float(d @ (G @ d)) >= 0.1 * float(d @ d) > 0  # at least λ‖d‖²


def test_damping_adds_to_the_diagonal():
    case = make_case(seed=10)
    point = case.problem.at(case.towers)
    d = torch.randn(len(point.parameters), dtype=torch.float64)
    assert relative(point.gauss_newton(0.7) @ d, point.gauss_newton() @ d + 0.7 * d) < 1e-12


def test_numpy_in_numpy_out():
    case = make_case(seed=11)
    G = case.problem.at(case.towers).gauss_newton()
    d = np.random.default_rng(0).normal(size=G.shape[0])
    result = G @ d
    assert isinstance(result, np.ndarray)
    assert relative(torch.from_numpy(result), G @ torch.from_numpy(d)) < 1e-14


def test_linear_towers_with_squared_loss_are_ials():
    """½Σ_O (r − p·q)² + ½ω Σ_∉O (p·q)² + ½λ(‖P‖² + ‖Q‖²), in the form of the iALS papers."""
    case = make_case(m=8, n=6, tower="linear", loss="squared", imputed=0.0, omega=0.2, l2=0.3, variant=1, seed=12)
    P, Q = (t.weight.detach().numpy() for t in (case.towers.left, case.towers.right))
    R, seen = np.nan_to_num(case.dense.labels), ~np.isnan(case.dense.labels)
    weight = np.where(seen, 1.0, 0.2)
    expected = 0.5 * (weight * (R - P @ Q.T) ** 2).sum() + 0.15 * ((P**2).sum() + (Q**2).sum())
    point = case.problem.at(case.towers)
    assert point.value == pytest.approx(expected, rel=1e-12)
    # The normal equations of one row, as iALS solves them: (QᵀC_iQ + λI) p_i − QᵀC_i r_i.
    i = 3
    row = (Q.T * weight[i]) @ Q @ P[i] + 0.3 * P[i] - (Q.T * weight[i]) @ R[i]
    assert np.allclose(point.gradient()["left.weight"][i].numpy(), row, rtol=1e-11)


def test_a_point_keeps_what_it_was_evaluated_at():
    case = make_case(seed=13)
    point = case.problem.at(case.towers)
    before = point.gradient().to_vector()
    with torch.no_grad():
        for parameter in case.towers.left.parameters():
            parameter.zero_()
    assert torch.equal(point.gradient().to_vector(), before)
    assert case.problem.at(case.towers).value != point.value


def test_frozen_parameters_are_constants():
    case = make_case(seed=14)
    for parameter in case.towers.right.parameters():
        parameter.requires_grad_(False)
    for parameter in case.right.parameters():
        parameter.requires_grad_(False)
    import gramtower as gt

    case.towers = gt.Towers(case.towers.left, case.towers.right)
    point = compare(case)
    assert all(name.startswith("left.") for name in point.parameters)

"""Losses: derivatives against autograd and finite differences, and scores far out."""

from __future__ import annotations

import math

import dense
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import make_case
from test_engine import compare

import gramtower as gt
from gramtower.engine.kernels.elementwise import LOSSES, as_loss
from gramtower.engine.objective.planning import Streamed

# Away from ŷ = ±1, where the second derivative of squared_hinge jumps.
SCORES = torch.tensor([-30.0, -4.3, -1.1, -0.9, -0.2, 0.0, 0.3, 0.95, 1.05, 2.7, 45.0], dtype=torch.float64)


@pytest.mark.parametrize("label", [-1.0, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_agree_with_autograd(name, label):
    loss, y = LOSSES[name], torch.full_like(SCORES, label)
    s = SCORES.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss.value(y, s).sum(), s)
    (second,) = torch.autograd.grad(loss.first(y, s).sum(), s)
    assert torch.allclose(loss.first(y, SCORES), first, rtol=1e-12, atol=1e-15)
    assert torch.allclose(loss.second(y, SCORES), second, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("label", [-1.0, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_are_slopes(name, label):
    # Central differences at h = 1e-5: truncation of about h² and rounding of about ε·ℓ/h, both near 1e-10.
    loss, y, h = LOSSES[name], torch.full_like(SCORES, label), 1e-5
    slope = (loss.value(y, SCORES + h) - loss.value(y, SCORES - h)) / (2 * h)
    bend = (loss.first(y, SCORES + h) - loss.first(y, SCORES - h)) / (2 * h)
    assert torch.allclose(loss.first(y, SCORES), slope, rtol=1e-8, atol=1e-8)
    assert torch.allclose(loss.second(y, SCORES), bend, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_far_scores_stay_finite_and_curvature_stays_nonnegative(name, dtype):
    s = torch.tensor([-1e4, -100.0, 100.0, 1e4], dtype=dtype)
    for y in (torch.ones_like(s), -torch.ones_like(s)):
        for function in (LOSSES[name].value, LOSSES[name].first, LOSSES[name].second):
            assert torch.isfinite(function(y, s)).all()
        assert (LOSSES[name].second(y, s) >= 0).all()
        assert (LOSSES[name].value(y, s) >= 0).all()


@pytest.mark.parametrize("margin", [-38.0, -25.0, -20.1, -1.0, 0.0, 1.0, 25.0])
def test_the_logistic_loss_has_all_its_digits(margin):
    exact = math.log1p(math.exp(-abs(margin))) + max(0.0, -margin)
    one = torch.ones(1, dtype=torch.float64)
    assert LOSSES["logistic"].value(-one, -margin * one).item() == pytest.approx(exact, rel=2e-16)


def test_known_values():
    one = torch.ones(1)
    assert LOSSES["logistic"].value(one, 0 * one).item() == pytest.approx(math.log(2))
    assert LOSSES["squared"].value(3 * one, one).item() == 2.0
    assert LOSSES["squared_hinge"].value(one, -one).item() == 2.0
    assert LOSSES["squared_hinge"].value(one, 1.5 * one).item() == 0.0


def test_names_and_own_losses():
    own = gt.Loss(value=lambda y, s: s, first=lambda y, s: 0 * s + 1, second=lambda y, s: 0 * s)
    assert as_loss(own) is own
    assert as_loss("squared").name == "squared"
    with pytest.raises(ValueError, match=r"loss:.*'cosine'.*'logistic'.*'squared'.*'squared_hinge'"):
        as_loss("cosine")


@pytest.mark.parametrize(("wrong", "message"), [
    ({"value": lambda y, s: (s - y).square().mean()}, r"loss\.value.*10"),
    ({"first": lambda y, s: (s - y)[:1]}, r"loss\.first.*\(1,\).*10"),
    ({"second": lambda y, s: 1.0}, r"loss\.second.*10"),
    ({"second": lambda y, s: s - y}, r"loss\.second.*-3.*label 1.*-2"),
])  # fmt: skip
def test_losses_of_another_shape_and_such_that_are_not_convex_are_refused(wrong, message):
    square = LOSSES["squared"]
    functions = {"value": square.value, "first": square.first, "second": square.second} | wrong
    with pytest.raises(ValueError, match=message):
        gt.Problem(sp.eye(3, format="csr"), loss=gt.Loss(**functions))


@pytest.mark.parametrize("kernels", ["reference", "numba", "triton"])
def test_a_new_loss_is_a_line_of_the_table(kernels, monkeypatch):
    """The recipe "a loss" of docs/architecture.md."""
    if kernels == "triton":
        pytest.importorskip("triton", reason="triton is not installed (it comes with CUDA builds of torch)")
    root = lambda y, s: torch.sqrt(1 + (s - y) ** 2)  # noqa: E731
    pseudo_huber = gt.Loss(
        value=lambda y, s: root(y, s) - 1,
        first=lambda y, s: (s - y) / root(y, s),
        second=lambda y, s: root(y, s) ** -3,
        name="pseudo_huber",
    )
    monkeypatch.setitem(LOSSES, "pseudo_huber", pseudo_huber)
    monkeypatch.setitem(dense.VALUES, "pseudo_huber", lambda y, s: (1 + (s - y) ** 2) ** 0.5 - 1)
    case = make_case(loss="pseudo_huber", kernels=kernels, weights=True, imputed="low-rank", pair_weights=True)
    compare(case)
    if kernels != "reference":
        case.problem.streamed = Streamed(2, False)
        compare(case)


@pytest.mark.parametrize(("wrong", "name"), [
    ({"first": lambda y, s: y - s}, "first"),
    ({"first": lambda y, s: 2 * (s - y)}, "first"),
    ({"second": lambda y, s: 2 * torch.ones_like(s)}, "second"),
    ({"value": lambda y, s: (s - y).square()}, "first"),
])  # fmt: skip
def test_derivatives_of_other_functions_are_refused(wrong, name):
    square = LOSSES["squared"]
    functions = {"value": square.value, "first": square.first, "second": square.second} | wrong
    with pytest.raises(ValueError, match=rf"^loss\.{name}"):
        gt.Problem(sp.eye(3, format="csr"), loss=gt.Loss(**functions))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_check_of_derivatives_takes_losses_of_any_scale_with_kinks_and_in_float32(scale):
    huber = lambda y, s: torch.nn.functional.huber_loss(s, y, reduction="none")  # noqa: E731
    for value in (huber, lambda y, s: huber(y.float(), s.float()), lambda y, s: (0.3 - s).clamp_min(0).square()):
        gt.Problem(sp.eye(3, format="csr"), loss=gt.Loss(lambda y, s, value=value: scale * value(y, s)))
    with pytest.raises(ValueError, match=r"^loss\.first"):
        gt.Problem(
            sp.eye(3, format="csr"), loss=gt.Loss(lambda y, s: scale * huber(y, s), lambda y, s: -scale * (s - y))
        )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_derivatives_by_autodiff_are_those_written_out(name):
    loss = LOSSES[name]
    by_value = gt.Loss(loss.value, labels=loss.labels)
    y = torch.tensor([1.0, -1.0] * 20, dtype=torch.float64)
    s = torch.linspace(-3.1, 3.3, 40, dtype=torch.float64)
    assert torch.allclose(by_value.first(y, s), loss.first(y, s), atol=1e-12)
    assert torch.allclose(by_value.second(y, s), loss.second(y, s), atol=1e-12)
    assert torch.allclose(gt.Loss(loss.value, loss.first).second(y, s), loss.second(y, s), atol=1e-12)
    assert gt.Loss(loss.value, labels=loss.labels) == by_value
    assert not by_value.first(y, s).requires_grad


@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_a_loss_given_by_its_value_trains_like_one_written_out(kernels):
    root = lambda y, s: torch.sqrt(1 + (s - y) ** 2)  # noqa: E731
    value = lambda y, s: root(y, s) - 1  # noqa: E731
    written = gt.Loss(value, lambda y, s: (s - y) / root(y, s), lambda y, s: root(y, s) ** -3)
    pairs = sp.random(30, 20, 0.2, random_state=0, data_rvs=lambda size: np.ones(size))
    found = []
    for loss in (written, gt.Loss(value)):
        problem = gt.Problem(pairs, loss=loss, imputed=0.0, omega=0.1, kernels=kernels)
        towers = gt.mlp_towers(problem, hidden=(8,), dim=4)
        found.append([record.value for record in gt.minimize(problem, towers, max_iterations=4).history])
    assert np.allclose(*found, rtol=1e-4)
    model = gt.TwoTower(loss=gt.Loss(value), max_iterations=2, device="cpu").fit(pairs)
    assert np.isfinite(model.embed()).all()

"""Regularisers other than ½‖θ‖²: compared with the dense twin, and in everything that uses λ."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import make_case
from test_engine import compare
from torch import Tensor

import gramtower as gt
from gramtower.engine.objective.regularizers import mean_curvatures
from gramtower.optim.solvers import SOLVERS
from gramtower.optim.sweeps import solves_rows

WEIGHTS = {"left.*weight": 3.0, "right.0.*": 0.25}


class Rounded(gt.Regularizer):
    """Σ (½θ² + cosh θ − 1): strongly convex, with a Hessian that depends on θ."""

    def value(self, theta):
        ones = theta.from_vector(torch.ones_like(theta.vector))
        return 0.5 * theta.inner(theta) + ones.inner(theta.from_vector(theta.vector.cosh() - 1))

    def gradient(self, theta):
        return theta.from_vector(theta.vector + theta.vector.sinh())

    def product(self, theta, d):
        return d.from_vector((1 + theta.vector.cosh()) * d.vector)


class Coupled(gt.Regularizer):
    """½‖θ‖² + ½(Σθ)²: its Hessian is not diagonal."""

    def value(self, theta):
        return 0.5 * theta.inner(theta) + 0.5 * theta.vector.double().sum() ** 2

    def gradient(self, theta):
        return self.product(theta, theta)

    def product(self, theta, d):
        return d.from_vector(d.vector + d.vector.sum())


def rounded(theta: list[Tensor]) -> Tensor:
    return sum((0.5 * t**2 + (t.exp() + (-t).exp()) / 2 - 1).sum() for t in theta)


def coupled(theta: list[Tensor]) -> Tensor:
    return sum(0.5 * (t**2).sum() for t in theta) + 0.5 * sum(t.sum() for t in theta) ** 2


def blocks(case):
    """½ Σ_t w_t ‖θ_t‖² with the weights of WEIGHTS, written out by name."""
    names = list(case.towers.parameters())

    def weight(name):
        if name.startswith("left.") and name.endswith("weight"):
            return 3.0
        return 0.25 if name.startswith("right.0.") else 1.0

    return lambda theta: sum(0.5 * weight(n) * (t**2).sum() for n, t in zip(names, theta, strict=True))


@pytest.mark.parametrize("kinds", [("ids", "ids"), ("dense", "sparse")])
@pytest.mark.parametrize("tower", ["elu", "custom", "tied"])
@pytest.mark.parametrize("psi", [(Rounded(), rounded), (Coupled(), coupled)], ids=["rounded", "coupled"])
def test_value_gradient_and_products_are_those_of_the_dense_twin(psi, tower, kinds):
    compare(make_case(tower=tower, kinds=kinds, psi=psi[1], regularizer=psi[0], embedding_l2=0.1, seed=3))


@pytest.mark.parametrize(("tower", "variant"), [("elu", 0), ("elu", 1), ("layernorm", 0)])
def test_block_weights_are_those_of_the_dense_twin(tower, variant):
    case = make_case(tower=tower, variant=variant, regularizer=WEIGHTS, weights=True, seed=4)
    case.dense.psi = blocks(case)
    point = compare(case)
    d = point.parameters.vector
    assert torch.allclose(point.gauss_newton(0.5) @ d, (point.gauss_newton() @ d) + 0.5 * d, rtol=1e-13)


def test_tables_have_their_own_weight():
    case = make_case(tower="linear", variant=1, regularizer={"left.*": 3.0}, seed=5)
    case.dense.psi = lambda theta: 1.5 * (theta[0] ** 2).sum() + 0.5 * (theta[1] ** 2).sum()
    compare(case)


def test_row_blocks_change_nothing():
    whole, parts = (make_case(m=9, regularizer=Rounded(), activations=a, seed=6) for a in (None, 1))
    one, other = (c.problem.at(c.towers) for c in (whole, parts))
    assert one.value == pytest.approx(other.value, rel=1e-14)
    assert torch.allclose(one.gradient().vector, other.gradient().vector, rtol=1e-12, atol=1e-13)


def test_equal_weights_are_a_larger_penalty():
    one = make_case(regularizer={"*": 2.5}, l2=0.1, seed=7)
    other = make_case(l2=0.25, seed=7)
    a, b = one.problem.at(one.towers), other.problem.at(other.towers)
    r = a.gradient()
    assert a.value == pytest.approx(b.value, rel=1e-14)
    assert torch.allclose(r.vector, b.gradient().vector, rtol=1e-13)
    assert torch.allclose((a.preconditioner() @ r).vector, (b.preconditioner() @ r).vector, rtol=1e-12)


def test_the_preconditioner_has_the_mean_curvature_of_each_tensor():
    case = make_case(regularizer=Rounded(), seed=8)
    theta = case.towers.parameters()
    found = mean_curvatures(case.problem.regularizer, theta)
    assert set(found) == set(theta)
    assert all(found[n] == pytest.approx(float(1 + t.cosh().mean())) for n, t in theta.items())


@pytest.mark.parametrize("psi", [Rounded(), WEIGHTS], ids=["rounded", "blocks"])
@pytest.mark.parametrize("optimizer", SOLVERS)
def test_every_optimizer_descends(optimizer, psi):
    case = make_case(m=12, n=9, regularizer=psi, l2=0.05, dtype=torch.float32, seed=9)
    start = case.problem.at(case.towers).value
    result = gt.minimize(case.problem, case.towers, optimizer=optimizer, max_iterations=3, seed=0)
    assert result.value < start


def test_sweeps_over_tables_reach_the_same_minimum_as_descent():
    ends = []
    for optimizer in ("newton-kron", "lbfgs"):
        case = make_case(m=12, n=9, tower="linear", variant=1, regularizer={"left.*": 4.0}, l2=0.5, seed=10)
        assert solves_rows(case.problem, case.towers)
        ends.append(gt.minimize(case.problem, case.towers, optimizer=optimizer, max_iterations=200).value)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    own = make_case(tower="linear", variant=1, regularizer=Rounded(), seed=10)
    assert not solves_rows(own.problem, own.towers)


def test_a_pattern_without_a_tensor_is_refused():
    case = make_case(regularizer={"middle.*": 2.0})
    with pytest.raises(ValueError, match=r"^regularizer: .*'middle.\*'"):
        case.problem.at(case.towers)
    for wrong in ({"left.*": 0.0}, {"left.*": -1.0}, {1: 2.0}, 3.0, "own"):
        with pytest.raises(ValueError, match=r"weights|regularizer"):
            gt.Problem(sp.eye(3, format="csr"), regularizer=wrong)


def test_a_model_is_saved_with_its_weights_and_fitted_again(tmp_path):
    pairs = sp.random(30, 20, 0.2, random_state=0, format="csr")
    pairs.data[:] = 1.0
    options = dict(dim=4, l2=0.3, select=False, max_iterations=3, seed=0)
    model = gt.TwoTower(regularizer=gt.BlockRidge({"left.*": 8.0}), **options).fit(pairs)
    plain = gt.TwoTower(**options).fit(pairs)
    assert np.linalg.norm(model.embed()) < np.linalg.norm(plain.embed())
    model.save(tmp_path / "model")
    loaded = gt.load(tmp_path / "model")
    assert loaded.regularizer == {"left.*": 8.0}
    assert np.allclose(loaded.fit(pairs).embed(), model.embed())
    own = gt.TwoTower(regularizer=Rounded(), **options).fit(pairs)
    own.save(tmp_path / "own")
    with pytest.raises(ValueError, match=r"^regularizer: .*'Rounded"):
        gt.load(tmp_path / "own").fit(pairs)


def test_explanations_use_the_weight_of_the_table():
    pairs = sp.random(30, 20, 0.2, random_state=0, format="csr")
    pairs.data[:] = 1.0
    options = dict(dim=4, hidden=(), l2=0.3, embedding_l2=0.0, select=False, max_iterations=200, loss="squared", seed=0)
    model = gt.TwoTower(regularizer={"*": 8.0}, **options).fit(pairs)
    same = gt.TwoTower(**options | {"l2": 2.4}).fit(pairs)
    one, other = (m.explain(3, 5) for m in (model, same))
    assert one.base == pytest.approx(other.base, rel=1e-3)


def test_the_command_line_takes_weights_and_keeps_them_in_its_config(tmp_path):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import run

    rng = np.random.default_rng(0)
    rows = sorted(
        {(int(a), int(b)) for a, b in zip(rng.integers(20, size=150), rng.integers(15, size=150), strict=True)}
    )
    (tmp_path / "pairs.csv").write_text("user,item\n" + "".join(f"{a},{b}\n" for a, b in rows))
    data = [str(tmp_path / "pairs.csv"), "--left", "user", "--right", "item", "--quiet"]
    small = [
        "--dim",
        "3",
        "--select",
        "off",
        "--max-iterations",
        "2",
        "--regularizer",
        "left.*=4",
        "--regularizer",
        "*=0.5",
    ]
    assert run(["fit", *data, *small, "--out", str(tmp_path / "one")]) == 0
    assert run(["fit", *data, "--config", str(tmp_path / "one/config.toml"), "--out", str(tmp_path / "two")]) == 0
    one, two = (gt.load(tmp_path / name / "model.gramtower") for name in ("one", "two"))
    assert one.regularizer == two.regularizer == {"left.*": 4, "*": 0.5}
    assert np.allclose(one.embed(), two.embed())

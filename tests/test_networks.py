"""Modules of a user's own: what is recognised in them, exact derivatives, the preconditioner, what is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import FEATURES, make_case
from test_engine import compare, relative
from test_towers import PAIRS, Then, X, assert_exact
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective.kronecker import tower_factors
from gramtower.engine.towers import stack
from gramtower.engine.towers.branches import Graph
from gramtower.engine.towers.layers import Affine, Elementwise, InputAffine, Normalise
from gramtower.engine.towers.opaque import Opaque
from gramtower.engine.towers.stack import steps
from gramtower.engine.towers.trace import Inputs


class Same(nn.Module):
    """The very layers of an nn.Sequential, as many write them."""

    def __init__(self, first, hidden, dim):
        super().__init__()
        self.first, self.layers = first, nn.ModuleList([nn.Linear(hidden, hidden), nn.Linear(hidden, dim)])
        self.drop = nn.Dropout(0.3).eval()

    def forward(self, x):
        h = F.relu(self.first(x))
        for layer in self.layers[:-1]:
            h = self.drop(layer(h)).relu()
        return self.layers[-1](h.flatten(1))


class Wrapped(nn.Module):
    """Any function of a first layer's result, with layers to use in it."""

    def __init__(self, function, first, width=4, dim=3):
        super().__init__()
        self.function, self.first = function, first
        self.square, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, dim)
        self.rms = nn.RMSNorm(width, eps=1e-5)

    def forward(self, x):
        return self.function(self, self.first(x))


def parts_of(module, kind, width=3):
    return [part for step in steps(module, Inputs(kind, width)) for part in step.parts]


@pytest.mark.parametrize("kind", FEATURES)
def test_a_class_with_the_layers_of_a_stack_becomes_its_steps_and_its_preconditioner(kind):
    case = make_case(m=9, n=8, kinds=(kind, kind), tower="elu", seed=1)
    results = []
    width = 9 if kind == "ids" else 3
    for written in (True, False):
        torch.manual_seed(0)
        own = Same(gt.InputLinear(width, 5), 5, 3).double()
        layers = [own.first, nn.ReLU(), own.layers[0], nn.ReLU(), own.layers[1]]
        left = nn.Sequential(*layers) if written else own
        assert [type(step) for step in steps(left, Inputs(kind, width))] == [
            InputAffine, Elementwise, Affine, Elementwise, Affine
        ]  # fmt: skip
        point = case.problem.at(gt.Towers(left, case.towers.right))
        g = point.gradient()
        results.append(torch.cat([g.vector, point.gauss_newton() @ g.vector, (point.preconditioner() @ g).vector]))
    assert torch.equal(*results)


@pytest.mark.parametrize("tower", ["custom", "residual", "layernorm", "rmsnorm", "skip", "gated"])
@pytest.mark.parametrize("kind", FEATURES)
def test_known_parts_of_own_classes_leave_nothing_to_autodiff(tower, kind):
    case = make_case(tower=tower, kinds=(kind, kind))
    assert all(step.analytic for step in case.problem.at(case.towers).evaluation.left.steps)


def test_what_has_no_step_is_autodiff_alone_and_named():
    case = make_case(tower="joined")
    parts = [part for step in case.problem.at(case.towers).evaluation.left.steps for part in step.parts]
    assert [part.label for part in parts if isinstance(part, Opaque)] == ["softmax"]
    assert sum(isinstance(part, InputAffine) for part in parts) == 2


def attended(*parts):
    """Attention over a list of two, for each row."""
    return F.scaled_dot_product_attention(*(part.view(-1, 2, 2) for part in parts)).flatten(1)


FUNCTIONS = {
    "residual": lambda m, h: m.out(h + m.square(torch.tanh(h))),
    "deep": lambda m, h: m.out(m.norm(h + m.square(F.silu(m.other(h))))),
    "twice": lambda m, h: m.out(h * h + h),
    "tied": lambda m, h: m.out(m.square(torch.tanh(m.square(h)))),
    "constants": lambda m, h: m.out(1 - (2 * h + 1) / 3 - h),
    "negative": lambda m, h: m.out(-h.exp().square()),
    "columns": lambda m, h: m.out(torch.cat([h[:, 2:], h[:, :2].sin()], 1)),
    "thirds": lambda m, h: m.out(torch.hstack(torch.split(h, [1, 3], dim=1)[::-1])),
    "functional": lambda m, h: m.out(F.layer_norm(F.linear(h, m.square.weight, m.square.bias), (4,), eps=0.1)),
    "normed": lambda m, h: m.out(F.elu(m.norm(h), 0.5) + F.leaky_relu(h, 0.2) + F.softplus(h, beta=2.0)),
    "in place": lambda m, h: m.out(F.silu(m.square(h), inplace=True).add_(h)),
    "in place, read again": lambda m, h: m.out(F.relu(h, inplace=True) + h),
    "view written": lambda m, h: m.out(h[:, :2].mul_(2.0).repeat(1, 2) + h),
    "bilinear": lambda m, h: torch.einsum("ri,rj,kij->rk", h, m.square(h), m.out.weight[:, :, None] * m.norm.weight),
    "list of rows": lambda m, h: m.out(torch.stack([h, m.square(h), m.other(h)], 1).softmax(1).sum(1)),
    "attention": lambda m, h: m.out(attended(m.square(h), m.other(h), m.norm(h))),
    "isinstance": lambda m, h: m.out(torch.tanh(h) if isinstance(h, torch.Tensor) else h),
    "last": lambda m, h: F.normalize(m.norm(h) * h, dim=-1)[:, :3],
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives_of_functions_in_own_classes_are_exact(name):
    torch.manual_seed(1)
    assert_exact(Wrapped(FUNCTIONS[name], nn.Linear(3, 4)), nn.Embedding(5, 3), X)


class Attending(nn.Module):
    """Attention over a list of codes, for each row."""

    def __init__(self, codes, dim):
        super().__init__()
        self.table, self.attention = nn.Embedding(codes, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, dim)

    def forward(self, codes):
        h = self.table(codes)
        h, _ = self.attention(h, h, h)
        return self.out(torch.relu(h.mean(1)))


def test_attention_over_a_list_goes_by_autodiff_and_the_layers_after_it_do_not():
    torch.manual_seed(3)
    codes = torch.tensor([[0, 6, 1], [1, 1, 0], [5, 2, 2], [3, 0, 4], [6, 6, 6], [2, 4, 5]])
    left, right = Attending(7, 3), nn.Embedding(5, 3)
    assert [type(step) for step in steps(left, Inputs("dense", 3, codes=True))] == [Opaque, Elementwise, Affine]
    assert_exact(left, right, codes)
    point = gt.Problem(PAIRS, codes, omega=0.5, l2=0.01).at(gt.Towers(left, right))
    helped = point.preconditioner() @ point.gradient()
    plain = point.gradient() * 100.0  # what 1/λ alone would do
    for name in ("left.table.weight", "left.attention.in_proj_weight", "left.attention.out_proj.weight"):
        assert 0 < float(helped[name].norm()) < 0.9 * float(plain[name].norm())


class Bare(nn.Module):
    """Products with parameters, and classes derived from those of torch."""

    def __init__(self, kind, width, dim):
        super().__init__()

        class Linear(nn.Linear):
            pass

        class Embedding(nn.Embedding):
            pass

        self.first = Embedding(width, 4) if kind == "ids" else Linear(width, 4)
        self.matrix, self.out = nn.Parameter(torch.randn(4, 4)), Linear(4, dim)
        self.table = nn.Parameter(torch.randn(width, 4))
        self.kind = kind

    def forward(self, x):
        looked_up = F.embedding(x, self.table) if self.kind == "ids" else x @ self.table
        return self.out(torch.relu((self.first(x) + looked_up) @ self.matrix))


@pytest.mark.parametrize("kind", FEATURES)
def test_products_with_parameters_are_layers(kind):
    torch.manual_seed(6)
    rows = {"ids": None, "dense": X, "sparse": sp.csr_matrix(X)}[kind]
    left = Bare(kind, 6 if kind == "ids" else 3, 3).double()
    assert {type(part) for part in parts_of(left, kind)} >= {InputAffine, Affine, Elementwise}
    assert not any(isinstance(part, Opaque) for part in parts_of(left, kind))
    if kind != "sparse":
        assert_exact(left, nn.Embedding(5, 3), rows)
    towers = gt.Towers(left, nn.Embedding(5, 3).double())
    point = gt.Problem(PAIRS, rows, omega=0.5, l2=0.1).at(towers)
    dense = gt.Problem(PAIRS, X if kind == "sparse" else rows, omega=0.5, l2=0.1).at(towers)
    d = torch.ones_like(point.parameters.vector)
    assert relative(point.gauss_newton() @ d, dense.gauss_newton() @ d) < 1e-12
    blocks = point.preconditioner()._blocks
    assert {"left.table", "left.first.weight", "left.matrix", "left.out.weight"} <= {block.weight for block in blocks}


def test_dense_features_may_be_read_several_times_and_before_any_layer():
    class Ahead(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one, self.two = nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.one(F.normalize(x)) * self.norm(x) + self.two(torch.cat([x, torch.tanh(x)], 1)) + x

    torch.manual_seed(2)
    assert_exact(Ahead(), nn.Embedding(5, 3), X)


@pytest.mark.parametrize("frozen", ["first.weight", "norm.weight", "scale", "out.bias", "skip.weight"])
def test_frozen_parts_of_branches_are_constants(frozen):
    case = make_case(tower="gated" if frozen == "scale" else "skip", seed=3)
    for module in (case.towers.left, case.left):
        module.get_parameter(frozen).requires_grad_(False)
    case.towers = gt.Towers(case.towers.left, case.towers.right)
    assert f"left.{frozen}" not in list(compare(case).parameters)
    assert (case.problem.at(case.towers).preconditioner() @ case.problem.at(case.towers).gradient()).is_finite()


# The preconditioner.

ONE_CURVE = {  # one nonlinear function above the first layer, so that its closed form is no approximation
    "residual": lambda m, h: m.out(h + m.square(torch.tanh(h))),
    "both ends": lambda m, h: m.out(m.other(h) - 2 * torch.tanh(m.square(h)) + h),
    "product": lambda m, h: m.out(m.square(h) * m.other(h) + h),
    "square": lambda m, h: m.out(h * h),
    "norm": lambda m, h: m.out(m.norm(m.square(h)) + h),
    "root mean square": lambda m, h: m.out(m.rms(m.square(h)) + h),
    "joined": lambda m, h: m.out(torch.cat([m.square(h)[:, 1:3], torch.tanh(h[:, :2])], 1)) + h[:, :3],
}


@pytest.mark.parametrize("name", ONE_CURVE)
def test_curvature_through_branches_is_the_mean_over_rows(name):
    """S of the first layer is Σ r_i J_iᵀ H J_i / m, J_i by autodiff; so are the blocks of biases and scales."""
    torch.manual_seed(3)
    module = Wrapped(ONE_CURVE[name], nn.Linear(3, 4)).double()
    problem = gt.Problem(PAIRS, X)
    tower = problem.at(gt.Towers(module, nn.Embedding(5, 3).double())).evaluation.left
    H = torch.randn(3, 3, dtype=torch.float64)
    H, r = H @ H.T, torch.tensor([0.5, 2.0, 0.1, 1.4, 1.0, 1.0], dtype=torch.float64)
    factors = tower_factors(tower, H, r, set(dict(module.named_parameters())), 4, 0)
    h = module.first(torch.tensor(X)).detach()
    J = torch.stack(
        [torch.autograd.functional.jacobian(lambda t: module.function(module, t[None])[0], row) for row in h]
    )
    expected = torch.einsum("r,rki,kl,rlj->ij", r, J, H, J) / len(r)
    (first,) = [factor for factor in factors.layers if factor.weight == "first.weight"]
    assert relative(first.S, expected) < 1e-12
    if name == "norm":
        normed = F.layer_norm(module.square(h), (4,)).detach()
        S = (module.out.weight.T @ H @ module.out.weight).detach()
        scale, matrix = factors.biases["norm.weight"]
        assert relative(scale * matrix, S * ((normed * r[:, None]).T @ normed)) < 1e-12


def test_factors_of_a_part_by_autodiff_agree_with_the_closed_form():
    """Enough drawn vectors give what the steps give, with weights that differ by row."""
    torch.manual_seed(4)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 3))
    problem = gt.Problem(sp.random(300, 5, 0.1, random_state=0, data_rvs=lambda n: np.ones(n)), rows)
    module = Wrapped(lambda m, h: m.out(h + m.square(torch.tanh(h))), nn.Linear(3, 4)).double()
    hooked = copy.deepcopy(module)
    hooked.register_forward_hook(lambda *_: None)
    H, r = torch.diag(torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)), torch.tensor(rng.random(300) * 2)
    found = []
    for left in (module, hooked):
        tower = problem.at(gt.Towers(left, nn.Embedding(5, 3).double())).evaluation.left
        factors = tower_factors(tower, H, r, set(dict(module.named_parameters())), 200, 0)
        found.append({factor.weight: factor for factor in factors.layers})
    assert isinstance(tower.steps[0], Opaque)
    for weight in ("first.weight", "square.weight", "out.weight"):
        assert relative(found[1][weight].A, found[0][weight].A) < 1e-12
        assert relative(found[1][weight].S, found[0][weight].S) < 0.03


@pytest.mark.parametrize(
    ("tower", "forwards"), [("elu", 0), ("gated", 0), ("skip", 0.5), ("joined", 0.5), ("branching", 0.5)]
)
def test_the_preconditioner_costs_a_share_of_a_forward_at_most(tower, forwards):
    case = make_case(m=4096, n=10, density=0.001, tower=tower, seed=5)
    point = case.problem.at(case.towers)
    r, before = point.gradient(), case.problem.work.copy()
    point.preconditioner() @ r
    work = case.problem.work.since(before)
    assert work.left_forwards == pytest.approx(forwards)
    assert work.left_jvps == work.left_vjps == 0


@pytest.mark.parametrize("tower", ["gated", "skip", "joined", "branching"])
@pytest.mark.parametrize("kind", FEATURES)
def test_the_preconditioner_does_not_depend_on_blocks_or_on_what_is_kept(tower, kind):
    products = []
    for activations in (None, 1):
        case = make_case(m=40, n=30, tower=tower, kinds=(kind, kind), weights=True, activations=activations, seed=6)
        point = case.problem.at(case.towers)
        products.append((point.preconditioner() @ point.gradient()).vector)
    assert not point.evaluation.left.plan.keep
    assert relative(*products) < 1e-7


@pytest.mark.parametrize("name", ["residual", "deep", "normed"])
def test_newton_on_traced_towers_is_at_least_as_good_as_by_autodiff(name):
    pairs = planted_pairs(200, 150, 3000, seed=0)
    values = []
    for hooked in (False, True):
        problem = gt.Problem(pairs, omega=0.05, l2=0.1)
        torch.manual_seed(0)
        towers = [Wrapped(FUNCTIONS[name], gt.InputLinear(n, 16), 16, 8) for n in pairs.shape]
        for tower in towers if hooked else ():
            tower.register_forward_hook(lambda *_: None)
        result = gt.minimize(problem, gt.Towers(*towers), "newton-kron", max_iterations=5)
        values.append(result.value)
    assert values[0] < 1.01 * values[1]


# What is refused, and by which name.


class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout().eval()

    def forward(self, x):
        y = self.drop(self.linear(x))
        self.drop.train()
        return y


class Untraced(Then):
    def forward(self, x):
        return super().forward(x) if x.shape[0] > 0 else x


@pytest.mark.parametrize("kind", [Then, Untraced])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y - y.mean(0), r"other rows.*step 2, mean"),
        (lambda y: torch.softmax(y, 0), r"other rows.*step 2, softmax"),
        (lambda y: torch.tanh(y) + torch.randn(3), r"same rows.*step 3, randn"),
        (lambda y: F.dropout(y, 0.5), r"same rows.*step 2, dropout"),
        (lambda y: F.one_hot(y.argmax(1), 3).float(), r"derivative.*step 2, argmax"),
        (lambda y: torch.tanh(y.detach()), r"derivative.*step 2, detach"),
        (lambda y: y.argmax(1, keepdim=True), r"output of torch.int64"),
    ],
    ids=["mean", "softmax", "noise", "dropout", "argmax", "detach", "integers"],
)
def test_the_step_that_fails_is_named(kind, function, message):
    with pytest.raises(ValueError, match=message):
        gt.Problem(PAIRS, X).at(gt.Towers(kind(3, function), nn.Embedding(5, 3)))


def test_a_module_that_changes_its_mode_is_refused():
    with pytest.raises(ValueError, match=r"Moody.*mode.*module drop \(Dropout\)"):
        gt.Problem(PAIRS, X).at(gt.Towers(Moody(), nn.Embedding(5, 3)))


def test_the_failing_step_is_named_with_its_module():
    left = nn.Sequential(nn.Linear(3, 4), Then(4, lambda y: y / y.sum(0)))
    with pytest.raises(ValueError, match=r"Sequential.*step 3, sum in module 1"):
        gt.Problem(PAIRS, X).at(gt.Towers(left, nn.Embedding(5, 3)))


def test_layers_set_to_another_mode_are_traced_anew():
    towers = gt.Towers(Same(nn.Linear(3, 4), 4, 3).eval(), nn.Embedding(5, 3))
    problem = gt.Problem(PAIRS, X)
    before = problem.at(towers).value
    towers.left.train()
    with pytest.raises(ValueError, match=r"module drop.*Dropout.*training"):
        problem.at(towers)
    towers.left.eval()
    assert problem.at(towers).value == before


def test_towers_that_were_traced_are_copied_and_pickled():
    towers = gt.Towers(Same(nn.Linear(3, 4), 4, 3), nn.Embedding(5, 3))
    problem = gt.Problem(PAIRS, X)
    value = problem.at(towers).value
    for copied in (copy.deepcopy(towers), pickle.loads(pickle.dumps(towers))):
        assert problem.at(copied).value == value


def test_branches_are_one_step_between_the_layers_around_them():
    module = Wrapped(FUNCTIONS["deep"], nn.Embedding(6, 4))
    assert [type(step) for step in steps(module, Inputs("ids"))] == [InputAffine, Graph, Normalise, Affine]


class Fields(nn.Module):
    """Columns of one feature matrix as two fields, each with a table of its own."""

    def __init__(self, cut, last, dim=3):
        super().__init__()
        self.cut, self.one, self.two = cut, nn.Linear(cut, 4), gt.InputLinear(last, 3)
        self.out = nn.Linear(7, dim)

    def forward(self, x):
        one, two = self.one(x[:, : self.cut]), self.two(x[:, self.cut :])
        return self.out(torch.cat([torch.relu(one), torch.tanh(two)], 1))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_columns_of_features_are_fields_with_tables_of_their_own(sparse, kept):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(6, 5)) * (rng.random((6, 5)) < 0.6)
    torch.manual_seed(5)
    module = Fields(2, 3)
    assert_exact(copy.deepcopy(module), nn.Embedding(5, 3), rows)
    problem = gt.Problem(PAIRS, sp.csr_matrix(rows) if sparse else rows, omega=0.5, l2=0.1)
    problem.activations = None if kept else 1
    towers = gt.Towers(module.double(), nn.Embedding(5, 3).double())
    tower = problem.at(towers).evaluation.left
    assert tower.plan.keep == kept
    assert all(step.analytic for step in tower.steps)
    if sparse:
        factors = tower_factors(
            tower, torch.eye(3).double(), torch.ones(6).double(), {"two.weight", "one.weight"}, 1, 0
        )
        diagonals = {factor.weight: factor.A for factor in factors.layers}
        assert relative(diagonals["two.weight"], (rows[:, 2:] ** 2).sum(0)) < 1e-12
        assert relative(diagonals["one.weight"], (rows[:, :2] ** 2).sum(0)) < 1e-12
        whole = gt.Problem(PAIRS, rows, omega=0.5, l2=0.1).at(towers)
        found = problem.at(towers)
        assert relative(found.gradient().vector, whole.gradient().vector) < 1e-12
        d = torch.ones_like(whole.parameters.vector)
        assert relative(found.gauss_newton() @ d, whole.gauss_newton() @ d) < 1e-12


@pytest.mark.parametrize("index", [0, (slice(None), 1), slice(3), (slice(None), slice(0, 3, 2))], ids=str)
def test_sparse_features_are_indexed_by_columns_only(index):
    left = Wrapped(lambda m, h: m.out(h), nn.Identity())
    left.function = lambda m, x: m.out(m.square(x[index]))
    with pytest.raises(ValueError, match=r"columns.*x\[:, start:stop\]"):
        gt.Problem(PAIRS, sp.csr_matrix(X)).at(gt.Towers(left, nn.Embedding(5, 3)))


def test_a_field_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"1 columns.*3"):
        gt.Problem(PAIRS, sp.csr_matrix(X)).at(gt.Towers(Fields(2, 3), nn.Embedding(5, 3)))


class Twice(nn.Module):
    """A layer and kept statistics under two names each."""

    def __init__(self, rows, branches):
        super().__init__()
        self.table, self.branches = nn.Embedding(rows, 3), branches
        self.one = self.two = nn.Linear(3, 3)
        self.norm = self.again = nn.BatchNorm1d(3).eval()

    def forward(self, x):
        h = self.norm(self.one(self.table(x)))
        if self.branches and h.sum() > 1e9:  # cannot be traced
            return h
        return self.again(self.two(torch.tanh(h)))


@pytest.mark.parametrize("how", ["traced", "called", "hooked"])
def test_a_layer_of_two_names_stays_in_its_module_and_is_trained(how):
    torch.manual_seed(6)
    left, right = (Twice(rows, how == "called") for rows in (6, 5))
    if how == "hooked":
        left.register_forward_hook(lambda *_: None)
    before = {**dict(left.named_parameters()), **dict(left.named_buffers())}
    problem, towers = gt.Problem(PAIRS, omega=0.5, l2=0.1), gt.Towers(left, right)
    result = gt.minimize(problem, towers, max_iterations=3)
    after = {**dict(left.named_parameters()), **dict(left.named_buffers())}
    assert {name: id(tensor) for name, tensor in after.items()} == {name: id(t) for name, t in before.items()}
    assert torch.equal(left.one.weight, result.parameters["left.one.weight"])
    assert torch.allclose(left(torch.arange(6)), problem.at(towers).P, atol=1e-6)
    assert_exact(left, right)


class Cube(torch.autograd.Function):
    """x³ with a derivative that autodiff cannot differentiate again, and one by forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g

    @staticmethod
    def jvp(ctx, d):
        return 3 * ctx.saved_tensors[0] ** 2 * d


class NoForward(Cube):
    """The same without forward mode."""

    jvp = torch.autograd.Function.jvp


class Cubed(nn.Module):
    """A layer and x³ by one of these functions, then another layer."""

    def __init__(self, width, cube):
        super().__init__()
        self.first, self.last, self.cube = gt.InputLinear(width, 4), nn.Linear(4, 3), cube

    def forward(self, x):
        h = self.first(x)
        return self.last(self.cube(h)) if len(h) >= 0 else h  # a branch cannot be traced


def test_a_module_without_a_second_derivative_is_differentiated_by_forward_mode():
    torch.manual_seed(0)
    assert_exact(Cubed(6, Cube.apply), Cubed(4, Cube.apply), None, np.random.default_rng(0).normal(size=(5, 4)))
    rows = sp.random(6, 7, 0.5, random_state=0, format="csr")
    problem, found = gt.Problem(PAIRS, rows, omega=0.5, l2=0.1), []
    for cube in (Cube.apply, lambda h: h**3):
        torch.manual_seed(1)
        point = problem.at(gt.Towers(Cubed(7, cube).double(), Cubed(5, cube).double()))
        g = point.gradient()
        found.append((point.gauss_newton() @ g).vector)
        assert bool((point.preconditioner() @ g).vector.isfinite().all())
    assert relative(*found) < 1e-12
    towers = gt.Towers(Cubed(7, Cube.apply), Cubed(5, Cube.apply))
    assert gt.minimize(problem, towers, "newton-kron", 3).value < problem.at(towers).value + 1e-9


@pytest.mark.parametrize("tower", ["custom", "residual", "branching", "layernorm"])
@pytest.mark.parametrize("kinds", FEATURES)
def test_forward_mode_agrees_with_double_backward_and_the_dense_twin(tower, kinds, monkeypatch):
    monkeypatch.setattr(stack, "steps", lambda module, *more: [stack.opaque(module)])
    case = make_case(tower=tower, kinds=kinds, seed=2)
    point = case.problem.at(case.towers)
    d = point.gradient()
    twice = (point.gauss_newton() @ d).vector
    monkeypatch.setattr(Opaque, "_push_twice", Opaque._push_forward)
    assert relative((point.gauss_newton() @ d).vector, twice) < 1e-12
    compare(make_case(tower=tower, kinds=kinds, seed=2))


@pytest.mark.parametrize(("cube", "calls"), [(lambda h: h**3, 0), (Cube.apply, 1)])
def test_a_product_calls_the_module_in_forward_mode_only(cube, calls):
    towers = gt.Towers(Cubed(6, cube), Cubed(5, cube))
    point = gt.Problem(PAIRS, omega=0.5, l2=0.1).at(towers)
    G, d, called = point.gauss_newton(), point.gradient(), []
    G @ d  # decides which derivative it is
    for module in (towers.left, towers.right):
        module.first.register_forward_hook(lambda *_: called.append(1))
    G @ d
    assert len(called) == 2 * calls


def test_a_module_without_either_derivative_is_refused_by_newton_and_trained_by_gradients():
    problem = gt.Problem(PAIRS, omega=0.5, l2=0.1)
    towers = gt.Towers(Cubed(6, NoForward.apply), Cubed(5, NoForward.apply))
    with pytest.raises(ValueError, match=r"^tower: Cubed.*'lbfgs'"):
        gt.minimize(problem, towers, "newton-kron", 2)
    assert len(gt.minimize(problem, towers, "lbfgs", 2).history) == 3

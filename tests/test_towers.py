"""Towers: written-out steps against autodiff, what is refused, the paper's network, parameters in and out."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import FEATURES, TOWERS, make_case
from dense import Dense, evaluate
from own_step import LINE, SquashStep, squashed
from test_engine import compare, relative
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.pairs import as_features
from gramtower.engine.kernels import elementwise, reference
from gramtower.engine.objective import planning as plan_module
from gramtower.engine.objective.planning import Streamed
from gramtower.engine.towers import stack, steps
from gramtower.engine.towers.layers import Affine, Elementwise, InputAffine
from gramtower.engine.towers.opaque import Opaque
from gramtower.engine.towers.steps import Values
from gramtower.engine.towers.towers import clone
from gramtower.engine.towers.trace import Inputs

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(6, 3)), RNG.normal(size=(5, 4))
SEEN = RNG.random((6, 5)) < 0.5
PAIRS = sp.coo_matrix((np.ones(SEEN.sum()), np.nonzero(SEEN)), shape=SEEN.shape)


def evaluate_all(problem, left, right):
    """Value, gradient and G·d, with d all ones."""
    point = problem.at(gt.Towers(left, right))
    gradient = point.gradient().to_vector()
    return torch.cat(
        [torch.tensor([point.value]).to(gradient), gradient, point.gauss_newton() @ gradient.new_ones(len(gradient))]
    )


def assert_exact(left, right, left_features=None, right_features=None):
    """The towers (made float64) on PAIRS give what the dense twin gives."""
    left, right = left.double(), right.double()
    inputs = [
        torch.arange(rows) if f is None else torch.as_tensor(f)
        for rows, f in zip(SEEN.shape, (left_features, right_features), strict=True)
    ]
    dense = Dense(np.where(SEEN, 1.0, np.nan), *inputs, omega=0.5, l2=0.1)
    value, gradient, G = evaluate(dense, left, right)
    expected = torch.cat([torch.tensor([value]), gradient, G.sum(1)])
    problem = gt.Problem(PAIRS, left_features, right_features, omega=0.5, l2=0.1)
    assert relative(evaluate_all(problem, left, right), expected) < 1e-10


@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("tower", TOWERS)
def test_written_out_steps_agree_with_autodiff(tower, kind, variant):
    case = make_case(tower=tower, kinds=(kind, kind), variant=variant, seed=20)
    plain = evaluate_all(case.problem, case.towers.left, case.towers.right)
    for module in (case.towers.left, case.towers.right):
        module.register_forward_hook(lambda *_: None)  # a module with hooks is called as it is
    hooked = case.problem.at(gt.Towers(case.towers.left, case.towers.right))
    assert [type(step) for step in (*hooked.evaluation.left.steps, *hooked.evaluation.right.steps)] == [
        Opaque,
        Opaque,
    ]
    assert relative(evaluate_all(case.problem, case.towers.left, case.towers.right), plain) < 1e-12


def test_a_hook_that_changes_the_output_of_a_bare_layer_is_heard():
    left = nn.Linear(3, 4)
    left.register_forward_hook(lambda module, inputs, y: 2 * y)
    assert_exact(left, nn.Embedding(5, 4), X)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_a_hook_that_comes_after_the_first_evaluation_is_heard(kind):
    case = make_case(tower="elu")
    before = case.problem.at(case.towers).P.clone()
    double = {"forward": lambda module, inputs, y: 2 * y, "forward_pre": lambda module, inputs: (2 * inputs[0],)}
    hook = getattr(case.towers.left[-1], f"register_{kind}_hook")(double[kind])
    hooked = case.problem.at(case.towers).P
    assert torch.allclose(hooked, case.towers.left(torch.arange(5)), rtol=1e-12)
    assert not torch.allclose(hooked, before)
    hook.remove()
    assert torch.equal(case.problem.at(case.towers).P, before)


@pytest.mark.parametrize("change", [
    lambda left: left.__setitem__(4, nn.Linear(4, 3)),
    lambda left: left[4].requires_grad_(False),
    lambda left: left.append(nn.Linear(3, 3)),
])  # fmt: skip
def test_parameters_exchanged_or_frozen_after_the_towers_were_made_are_refused(change):
    case = make_case(tower="elu", dtype=torch.float32)
    case.problem.at(case.towers)
    change(case.towers.left)
    with pytest.raises(ValueError, match=r"^left tower.*[45]\.(bias|weight)"):
        case.problem.at(case.towers)
    assert case.problem.at(gt.Towers(case.towers.left, case.towers.right)).value > 0


def test_features_that_were_embedded_are_not_kept():
    towers = gt.Towers(nn.Linear(3, 2), nn.Embedding(9, 2))
    features = as_features("left", X, len(X))
    gone = weakref.ref(features)
    assert torch.allclose(towers.embed("left", features), towers.left(torch.tensor(X, dtype=torch.float32)))
    del features
    gc.collect()
    assert gone() is None


def test_stacks_of_known_layers_are_written_out():
    case = make_case(tower="deep-tanh")
    kinds = [type(step) for step in case.problem.at(case.towers).evaluation.left.steps]
    assert kinds == [InputAffine, Elementwise, Affine, Elementwise, Affine]


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Dropout(), nn.AlphaDropout(), nn.RReLU()], ids=repr)
def test_modes_that_mix_rows_or_are_random_are_refused_and_fine_in_eval_mode(layer):
    left, right = nn.Sequential(nn.Linear(3, 4), copy.deepcopy(layer)), nn.Linear(4, 4)
    problem = gt.Problem(PAIRS, X, Y)
    with pytest.raises(ValueError, match=rf"left tower, module 1.*{type(layer).__name__}.*\.eval\(\)"):
        problem.at(gt.Towers(left, right))
    assert_exact(left.eval(), right, X, Y)


def test_dropout_that_drops_nothing_is_fine_in_training_mode():
    assert_exact(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)), nn.Linear(4, 4), X, Y)


class Then(nn.Module):
    """A linear layer and then any function."""

    def __init__(self, inputs, function, outputs=3):
        super().__init__()
        self.linear, self.function = nn.Linear(inputs, outputs), function

    def forward(self, x):
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y - y.mean(0), r"left tower.*Then.*other rows"),
        (lambda y: y.cumsum(0).flip(0), r"left tower.*Then.*other rows"),
        (lambda y: y + torch.randn(3), r"left tower.*Then.*same rows.*\.eval\(\)"),
        (lambda y: nn.functional.dropout(y), r"left tower.*Then.*same rows"),
    ],
    ids=["centred", "cumulated", "noisy", "dropped"],
)
def test_custom_modules_that_mix_rows_or_are_random_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        gt.Problem(PAIRS, X).at(gt.Towers(Then(3, function), nn.Embedding(5, 3)))


@pytest.mark.parametrize("option", [dict(max_norm=1.0), dict(scale_grad_by_freq=True), dict(padding_idx=0)], ids=str)
def test_tables_without_an_exact_derivative_are_refused(option):
    with pytest.raises(ValueError, match=r"right tower, module itself.*max_norm"):
        gt.Problem(PAIRS).at(gt.Towers(nn.Embedding(6, 2), nn.Embedding(5, 2, **option)))


class Before(nn.Module):
    """Any function and then a linear layer."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(self.function(x))


@pytest.mark.parametrize(
    "function",
    [torch.tanh, lambda x: torch.cat([x, x], 1), lambda x: x + 1, lambda x: x.float()],
    ids=["tanh", "cat", "plus", "method"],
)
def test_sparse_features_need_a_product_first(function):
    problem = gt.Problem(PAIRS, sp.csr_matrix(X))
    with pytest.raises(ValueError, match=r"sparse.*nn.Linear.*nn.EmbeddingBag"):
        problem.at(gt.Towers(Before(function), nn.Embedding(5, 3)))


def test_sparse_features_do_not_average_in_an_embedding_bag():
    with pytest.raises(ValueError, match=r'mode.*"sum"'):
        gt.Problem(PAIRS, sp.csr_matrix(X)).at(gt.Towers(nn.EmbeddingBag(3, 2), nn.Embedding(5, 2)))


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, codes):
        return self.last(torch.tanh(self.table(codes).sum(1)))


def test_integer_codes_reach_a_module_that_embeds_them():
    codes = torch.tensor([[0, 6], [1, 1], [5, 2], [3, 0], [6, 6], [2, 4]])
    assert_exact(Codes(), nn.Embedding(5, 3), codes)


def test_a_tower_without_parameters_has_fixed_embeddings():
    class Normalise(nn.Module):
        def forward(self, x):
            return nn.functional.normalize(x, dim=1)

    assert_exact(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)), Normalise(), X, Y)


class Total(nn.Module):
    """Autodiff answers with one stored number for the whole row, in both directions."""

    def forward(self, x):
        return x.sum(1, keepdim=True).expand(-1, 4)


def test_autodiff_results_that_share_memory_are_not_overwritten():
    left = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Total(), nn.ELU(), nn.Linear(4, 3))
    assert_exact(left, nn.Embedding(5, 3), X)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight"])
@pytest.mark.parametrize("hooked", [False, True])
def test_frozen_tensors_are_constants_wherever_they_stand(frozen, hooked):
    case = make_case(tower="elu", seed=21)
    for module in (case.towers.left, case.left):
        module.get_parameter(frozen).requires_grad_(False)
    if hooked:
        case.towers.left.register_forward_hook(lambda *_: None)
    case.towers = gt.Towers(case.towers.left, case.towers.right)
    assert f"left.{frozen}" not in list(compare(case).parameters)


def test_a_layer_common_to_both_towers_is_counted_once():
    common = nn.Linear(4, 3)
    left, right = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), common), nn.Sequential(nn.Embedding(5, 4), common)
    assert_exact(left, right, X)
    names = list(gt.Towers(left, right).parameters())
    assert names == ["left.0.weight", "left.0.bias", "left.2.weight", "left.2.bias", "right.0.weight"]


def test_parameters_come_out_and_go_back():
    problem = gt.Problem(PAIRS)
    towers, other = (gt.mlp_towers(problem, hidden=(4,), dim=3, seed=seed) for seed in (0, 1))
    before = problem.at(towers).value
    kept = towers.parameters()
    towers.load(other.parameters())
    assert problem.at(towers).value == problem.at(other).value != before
    towers.load(kept)
    assert problem.at(towers).value == before
    assert torch.equal(towers.left[0].weight, kept["left.0.weight"])


def test_parameters_of_other_towers_are_not_loaded():
    problem = gt.Problem(PAIRS)
    towers, other = (gt.mlp_towers(problem, hidden=hidden, dim=3) for hidden in ((4,), (1,)))
    with pytest.raises(ValueError, match=r"parameters.*other tensors"):
        towers.load(other.parameters())


def test_a_clone_has_tensors_of_its_own_and_keeps_sharing():
    module = nn.Linear(3, 3)
    towers = gt.Towers(module, module)
    copied = clone(towers)
    assert copied.left is copied.right
    copied.load(copied.parameters() * 0)
    assert float(module.weight.detach().abs().sum()) > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda towers: pickle.loads(pickle.dumps(towers))])
def test_towers_that_were_evaluated_can_be_copied_and_sent_to_other_processes(copied):
    problem = gt.Problem(PAIRS, omega=0.5)
    towers = gt.mlp_towers(problem, hidden=(4,), dim=3)
    value = problem.at(towers).value
    assert problem.at(copied(towers)).value == value


def test_a_flat_vector_is_loaded_like_parameters():
    problem = gt.Problem(PAIRS)
    towers, other = (gt.mlp_towers(problem, hidden=(4,), dim=3, seed=seed) for seed in (0, 1))
    towers.load(other.parameters().vector.double())
    assert torch.equal(towers.parameters().vector, other.parameters().vector)
    assert towers.size == len(towers.parameters())
    with pytest.raises(ValueError, match=rf"parameters.*\(2,\).*{towers.size}"):
        towers.load(torch.zeros(2))


def test_mlp_towers_are_the_papers_network():
    towers = gt.mlp_towers(gt.Problem(PAIRS))
    assert [repr(layer) for layer in towers.left] == [
        "InputLinear(in_features=6, out_features=256, bias=True)",
        "ELU(alpha=1.0)",
        "Linear(in_features=256, out_features=256, bias=True)",
        "ELU(alpha=1.0)",
        "Linear(in_features=256, out_features=128, bias=True)",
    ]
    assert towers.right[0].in_features == 5
    assert towers.dtype == torch.float32


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("scale", [0.01, 50.0])
def test_mlp_towers_start_small_whatever_the_features(kind, scale):
    features = np.random.default_rng(1).normal(size=(400, 30)) * scale
    features = {"ids": None, "dense": features, "sparse": sp.csr_matrix(features * (features > 0))}[kind]
    problem = gt.Problem(sp.eye(400, 5, format="csr"), left=features)
    towers = gt.mlp_towers(problem, hidden=(200, 100), dim=50)
    first = nn.Sequential(towers.left[0])
    P = problem.at(gt.Towers(first, nn.Embedding(5, 200))).P
    assert float(P.std()) == pytest.approx(0.1, rel=0.1)
    point = problem.at(towers)
    assert np.isfinite(point.value)
    assert 0.02 < float(point.P.std()) < 0.5  # neither a saddle at zero nor an explosion
    assert all(not bias.any() for name, bias in towers.parameters().items() if name.endswith("bias"))


def test_no_hidden_layer_means_linear_towers_without_bias():
    towers = gt.mlp_towers(gt.Problem(PAIRS, X), hidden=(), dim=2)
    assert {name: tuple(t.shape) for name, t in towers.parameters().items()} == {
        "left.0.weight": (3, 2),
        "right.0.weight": (5, 2),
    }


def test_mlp_towers_depend_on_their_seed_alone_and_leave_chance_elsewhere_alone():
    problem = gt.Problem(PAIRS)
    vectors = []
    for seed in (0, 0, 1):
        torch.rand(7)  # chance elsewhere
        before = torch.get_rng_state()
        vectors.append(gt.mlp_towers(problem, hidden=(4,), dim=3, seed=seed).parameters().vector)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


def test_input_linear_is_a_table_for_ids_and_a_product_for_rows():
    layer = gt.InputLinear(4, 3)
    nn.init.normal_(layer.bias)
    assert torch.equal(layer(torch.tensor([2, 0])), layer(torch.eye(4)[[2, 0]]))


def test_a_vjp_that_broke_off_leaves_nothing_behind(monkeypatch):
    problem = gt.Problem(planted_pairs(5000, 300, 20_000), memory_budget=10_000_000)
    towers = gt.mlp_towers(problem, hidden=(8,), dim=4, dtype=torch.float64)
    point = problem.at(towers)
    wanted = point.gradient()
    real, calls = InputAffine.vjp, []

    def breaking(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(InputAffine, "vjp", breaking)
    with pytest.raises(KeyboardInterrupt):
        point.gradient()
    assert torch.equal(point.gradient().vector, wanted.vector)


def test_deferred_sums_are_added_up_before_they_grow(monkeypatch):
    monkeypatch.setattr(plan_module, "_CPU_BLOCK", 2)
    problem = gt.Problem(planted_pairs(60, 30, 300))
    towers = gt.mlp_towers(problem, hidden=(8,), dim=4, dtype=torch.float64)
    wanted = problem.at(towers).gradient()
    monkeypatch.setattr(steps, "_LINES", 3)
    kept = []
    real = Values.defer_bias_sum

    def watched(self, *arguments):
        real(self, *arguments)
        kept.append(max((sum(map(len, lines)) for lines in self.pending_bias_rows.values()), default=0))

    monkeypatch.setattr(Values, "defer_bias_sum", watched)
    torch.testing.assert_close(problem.at(towers).gradient().vector, wanted.vector, rtol=1e-12, atol=1e-12)
    assert 0 < max(kept) <= 4


def test_a_workspace_is_never_the_memory_that_is_read():
    values = Values({}, reference.KERNELS, torch.float64, torch.device("cpu"))
    given = torch.zeros(5, 4, dtype=torch.float64)
    for rows, columns in ((5, 4), (5, 4), (5, 7), (3, 7), (3, 4), (0, 4)):
        made = values.workspace(given[:rows], columns)
        assert made.shape == (rows, columns)
        assert rows == 0 or made.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        given = made if rows else given
    assert len(values.scratch) <= 4


def test_towers_move_to_a_dtype_or_a_device():
    towers = gt.mlp_towers(gt.Problem(PAIRS), hidden=(4,), dim=3)
    moved = towers.to(torch.float64)
    assert moved.dtype == torch.float64
    assert moved.left is towers.left
    assert moved.to("meta").device == torch.device("meta")


@pytest.mark.parametrize("kind", elementwise.TABLE, ids=lambda kind: kind.module.__name__)
def test_every_activation_of_the_table_has_a_step_and_its_slope(kind):
    tower = nn.Sequential(nn.Linear(3, 4), kind.module(), nn.Linear(4, 3))
    assert [type(step) for step in stack.steps(tower, Inputs("dense"))] == [InputAffine, Elementwise, Affine]
    activation, z = elementwise.activation_of(kind.module()), torch.linspace(-2, 2, 9, dtype=torch.float64)
    if activation.slope_from_output:
        torch.testing.assert_close(activation.slope(activation.function(z)), activation.slope_at(z))
    assert_exact(tower, nn.Embedding(5, 3), X)


@pytest.fixture
def own_step(monkeypatch):
    """The recipe "a tower step" of docs/architecture.md."""
    for module, make in LINE.items():
        monkeypatch.setitem(stack.STEPS, module, make)


def own_towers():
    torch.manual_seed(0)
    return squashed(6, 3), squashed(5, 3)


def test_a_new_step_is_a_class_and_a_line(own_step):
    left, right = own_towers()
    assert [type(step) for step in stack.steps(left, Inputs("ids"))] == [
        InputAffine,
        SquashStep,
        Affine,
        SquashStep,
    ]
    assert_exact(left, right)
    fitted = gt.minimize(gt.Problem(PAIRS), gt.Towers(left.float(), right.float()), "newton-kron", max_iterations=3)
    values = [record.value for record in fitted.history]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


def planned(plan):
    """Gradient and G·d, and M·g, of towers with that step."""
    left, right = (module.double() for module in own_towers())
    options = dict(kernels="triton") if plan == "triton" else {}
    problem, towers = gt.Problem(PAIRS, omega=0.5, l2=0.1, **options), gt.Towers(left, right)
    problem.activations = 1 if plan == "recomputed" else None
    problem.streamed = Streamed(4, False) if plan == "swept" else None
    point = problem.at(towers)
    assert towers.sizes(problem.left, problem.right, point.evaluation.kernels).row_bytes[0] >= 8 * (6 + 6 + 3 + 3)
    g = point.gradient().vector
    return torch.cat([g, point.gauss_newton() @ g]), point.preconditioner(damping=0.1) @ g, towers.layer_widths()


@pytest.mark.parametrize("plan", ["kept", "blocks", "recomputed", "swept", "triton"])
def test_a_new_step_gives_what_autodiff_gives_however_it_is_planned(plan, monkeypatch, request):
    if plan == "triton":
        pytest.importorskip("triton", reason="triton is not installed (it comes with CUDA builds of torch)")
    monkeypatch.delitem(stack.STEPS, next(iter(LINE)), raising=False)  # from a test of several processes
    exact, M_exact, widths = planned("kept")
    assert widths is None  # by autodiff: not for CUDA graphs
    request.getfixturevalue("own_step")
    if plan == "blocks":
        monkeypatch.setattr(plan_module, "_CPU_BLOCK", 2)
    mine, M_mine, widths = planned(plan)
    assert widths == ([6, 0, 3, 0], [6, 0, 3, 0])
    assert relative(mine, exact) < 1e-12
    assert relative(M_mine, M_exact) < 1e-7  # the same drawn vectors; roots of rounded zeros differ

"""Bad input: each a ValueError that names the argument, the value and what was expected, before any work."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn

import gramtower as gt
from gramtower.engine.objective import problem as problems
from gramtower.engine.towers.linearization import Work

M, N = 4, 3
X = np.arange(8.0).reshape(M, 2)


def pairs(label=1.0, at=1):
    """Three pairs, the one at ``at`` with its own label."""
    labels = np.ones(3)
    labels[at] = label
    return sp.coo_matrix((labels, ([0, 1, 3], [2, 0, 1])), shape=(M, N))


def with_value(array, value):
    array = np.array(array, dtype=np.float64)
    array.flat[3] = value
    return array


NAN, INF = float("nan"), float("inf")
SPARSE_NAN = sp.csr_matrix(([1.0, NAN], ([0, 2], [1, 1])), shape=(M, 2))
BAD = [
    # labels and pairs
    (dict(pairs=np.ones((M, N))), r"^pairs: got ndarray, expected a scipy.sparse matrix"),
    (dict(pairs=pairs(NAN), loss="squared"), r"^pairs: got nan at 1 .*expected finite"),
    (dict(pairs=pairs(-INF), loss="squared"), r"^pairs: got -inf at 1 .*expected finite"),
    (
        dict(pairs=pairs(0.0)),
        r"^pairs: got label 0 at row 1, column 0 .*expected labels -1 or \+1 for the logistic loss: \(matrix > 0\)",
    ),
    (dict(pairs=pairs(2.0, 2), loss="squared_hinge"), r"^pairs: got label 2 at row 3, column 1 .*squared_hinge"),
    (dict(pairs=pairs().astype(complex)), r"^pairs: got dtype complex128, expected an array of real numbers"),
    (dict(pairs=sp.csr_matrix((0, N))), r"^pairs: got shape \(0, 3\), expected at least one row and one column"),
    (dict(pairs=sp.csr_matrix((M, 0))), r"^pairs: got shape \(4, 0\), expected at least one row and one column"),
    (dict(pairs=sp.coo_array(np.ones(3))), r"^pairs: got shape \(3,\), expected two dimensions"),
    (dict(pairs=sp.coo_matrix(([1.0, 1], ([2, 2], [1, 1])))), r"^pairs: got 1 duplicate pairs.*row 2, column 1"),
    (dict(pairs=sp.csr_matrix(([1.0, 1], [1, 1], [0, 2]))), r"^pairs: got 1 duplicate pairs.*row 0, column 1"),
    # features
    (dict(left=X[:3]), r"^left: got shape \(3, 2\), expected shape \(4, features\)"),
    (dict(right=sp.csr_matrix((M, 2))), r"^right: got shape \(4, 2\), expected shape \(3, features\)"),
    (dict(left=torch.zeros(3, 2, dtype=torch.int64)), r"^left: got shape \(3, 2\), expected shape \(4, features\)"),
    (dict(left=X[:, 0]), r"^left: got shape \(4,\), expected shape \(4, features\)"),
    (dict(left=X[:, :0]), r"^left: got shape \(4, 0\), expected shape \(4, features\)"),
    (dict(left=with_value(X, NAN)), r"^left: got nan at \(1, 1\) .*expected finite"),
    (dict(left=torch.tensor(with_value(X, INF))), r"^left: got inf at \(1, 1\) .*expected finite"),
    (dict(left=torch.tensor(with_value(X, NAN), dtype=torch.float32)), r"^left: got nan at \(1, 1\) .*expected finite"),
    (dict(left=SPARSE_NAN), r"^left: got nan at 1 .*expected finite"),
    (dict(left=sp.csr_matrix(([1.0, 1], [1, 1], [0, 0, 2, 2, 2]))), r"^left: got 1 duplicate pairs.*row 1, column 1"),
    (dict(left=X.tolist()), r"^left: got list, expected None \(one-hot ids\), scipy.sparse, numpy or torch 2-D"),
    (dict(left=X.astype(complex)), r"^left: got dtype complex128, expected an array of real numbers"),
    (dict(left=torch.zeros(M, 2, dtype=torch.complex64)), r"^left: got dtype complex64, expected an array of real"),
    (dict(left=X.astype(str)), r"^left: got dtype <U\d+, expected an array of real numbers"),
    (
        dict(left=torch.tensor(X).to_sparse()),
        r"^left: got a tensor of layout torch.sparse_coo, expected .*scipy.sparse",
    ),
    # numbers
    (dict(omega=-0.5), r"^omega: got -0.5, expected a finite number >= 0"),
    (dict(omega=NAN), r"^omega: got nan, expected a finite number >= 0"),
    (dict(omega="1"), r"^omega: got '1', expected a finite number >= 0"),
    (dict(omega=True), r"^omega: got True, expected a finite number >= 0"),
    (dict(omega=10**400), r"^omega: got 10+, expected a finite number >= 0"),
    (dict(l2=-1), r"^l2: got -1, expected a finite number >= 0"),
    (dict(l2=INF), r"^l2: got inf, expected a finite number >= 0"),
    (dict(embedding_l2=-1e-9), r"^embedding_l2: got -1e-09, expected a finite number >= 0"),
    (dict(frequency_power=NAN), r"^frequency_power: got nan, expected a finite number"),
    (
        dict(omega=0, embedding_l2=1, frequency_power=-1),
        r"^frequency_power: got -1.0 .*omega 0.0.*expected .*finite penalties; left entity 2 would get inf",
    ),
    (dict(embedding_l2=1, frequency_power=1e6), r"^frequency_power: got 1000000.0 .*finite penalties"),
    # weights
    (dict(left_weights=np.ones(N)), r"^left_weights: got shape \(3,\), expected shape \(4,\)"),
    (dict(right_weights=np.ones((N, 1))), r"^right_weights: got shape \(3, 1\), expected shape \(3,\)"),
    (dict(left_weights=[1, 2, -3, 4]), r"^left_weights: got -3.0 at 2, expected weights >= 0"),
    (dict(right_weights=[1, NAN, 1]), r"^right_weights: got nan at 1 .*expected finite"),
    (dict(right_weights=torch.tensor([1, INF, 1])), r"^right_weights: got inf at 1 .*expected finite"),
    (dict(left_weights=["1", "2", "3", "4"]), r"^left_weights: got dtype <U1, expected an array of real numbers"),
    (dict(left_weights=[1, [2], 3, 4]), r"^left_weights: got list, expected an array of real numbers"),
    # imputed labels
    (dict(imputed=NAN), r"^imputed: got nan, expected a finite number"),
    (dict(imputed=None), r"^imputed: got None, expected a finite number"),
    (dict(imputed="fited"), r"^imputed: got 'fited'"),
    (dict(imputed=(X,)), r"^imputed: got 1 arrays, expected a number or the two arrays"),
    (dict(imputed=(X, X)), r"^imputed\[1\]: got shape \(4, 2\), expected shape \(3, r\)"),
    (dict(imputed=(X, X[:3, :1])), r"^imputed: got widths 2 and 1, expected one common width r"),
    (dict(imputed=(with_value(X, INF), X[:3])), r"^imputed\[0\]: got inf at \(1, 1\) .*expected finite"),
    # the rest
    (dict(loss="hinge"), r"^loss: got 'hinge', expected one of 'logistic', 'squared', 'squared_hinge', or a gramtower"),
    (dict(loss=None), r"^loss: got None, expected one of"),
    (dict(memory_budget="lots"), r"^memory_budget: got 'lots', expected a positive number of bytes or text such as"),
    (dict(memory_budget=0), r"^memory_budget: got 0, expected a positive number of bytes"),
    (dict(kernels="cuda"), r"^kernels: got 'cuda', expected one of 'auto', 'reference', 'numba'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message[1:40] for _, message in BAD])
def test_a_bad_argument_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        gt.Problem(**{"pairs": pairs(), **arguments})


class Spy(nn.Module):
    """A tower that remembers how many rows it was shown at a time."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rows = inner, []

    def forward(self, x):
        self.rows.append(len(x))
        return self.inner(x)


class Then(nn.Module):
    """A linear layer and then any function."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(2, 2), function

    def forward(self, x):
        return self.function(self.linear(x))


BAD_TOWERS = [
    (lambda: nn.Linear(2, 3), r"^towers: got 3 columns left and 2 right, expected the same number of columns"),
    (lambda: Then(lambda y: y[:2]), r"^left tower: got an output of shape \(2, 2\) for 3 rows, expected \(3, k\)"),
    (lambda: Then(lambda y: y.sum(1)), r"^left tower: got an output of shape \(3,\) for 3 rows, expected \(3, k\)"),
    (lambda: Then(lambda y: y[..., None]), r"^left tower: got an output of shape \(3, 2, 1\) for 3 rows"),
    (lambda: Then(lambda y: y.double()), r"^left tower: got an output of torch.float64, expected torch.float32"),
    (lambda: Then(lambda y: (y, y)), r"^Then returned tuple, expected a tensor"),
    (lambda: nn.Linear(5, 2), r"^left tower: got a first layer for 5 inputs, expected one for 2 features"),
    (lambda: Then(lambda y: y @ torch.ones(5, 2)), r"^left tower: Then failed on a block of 3 rows: .*shapes"),
    (nn.Identity, r"^tower Identity: .*layer"),
]


@pytest.mark.parametrize(("make", "message"), BAD_TOWERS, ids=[message[1:50] for _, message in BAD_TOWERS])
def test_a_bad_tower_is_refused_before_it_sees_more_than_a_few_rows(make, message):
    problem, right = gt.Problem(pairs(), left=X), Spy(nn.Embedding(N, 2))
    with pytest.raises(ValueError, match=message):
        problem.at(gt.Towers(make(), right))
    assert all(rows <= 3 for rows in right.rows)
    assert problem.work == Work()


def test_a_tower_that_goes_wrong_only_on_many_rows_is_refused():
    problem = gt.Problem(pairs(), left=X)
    with pytest.raises(ValueError, match=r"^left tower.*\(3, 2\).*4"):
        problem.at(gt.Towers(Then(lambda y: y[:3]), nn.Embedding(N, 2)))


@pytest.mark.parametrize(("table", "message"), [(2, "a first layer for 2 inputs, expected one for 3 ids"), (5, None)])
def test_a_table_needs_a_row_for_each_id(table, message):
    problem, towers = gt.Problem(pairs()), gt.Towers(nn.Embedding(M, 2), nn.Embedding(table, 2))
    if message:
        with pytest.raises(ValueError, match=message):
            problem.at(towers)
    else:
        assert problem.at(towers).Q.shape == (N, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gt.Towers(nn.Linear(2, 2), len),
            r"^right.*builtin_function_or_method",
        ),
        (lambda: gt.Towers(nn.ELU(), nn.ELU()), r"^towers.*trainable"),
        (
            lambda: gt.Towers(nn.Linear(2, 2).double(), nn.Linear(2, 2)),
            r"^towers.*torch.float32.*torch.float64",
        ),
        (lambda: gt.Towers(nn.Linear(2, 2).half(), nn.Linear(2, 2).half()), r"^towers.*torch.float16"),
        (lambda: gt.Problem(pairs()).at(nn.Linear(2, 2)), r"^towers.*Linear"),
        (lambda: gt.Problem(pairs()).plan(nn.Linear(2, 2)), r"^towers.*Linear"),
        (lambda: gt.Problem(pairs()).least_budget(3), r"^towers.*int"),
    ],
)
def test_towers_are_checked_when_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dim=0), r"^dim.*0"),
        (dict(dim=2.0), r"^dim.*2.0"),
        (dict(hidden=(4, 0)), r"^hidden.*0"),
        (dict(hidden=8), r"^hidden.*8"),
        (dict(activation="swish"), r"^activation.*'swish'.*'elu'.*'relu'"),
        (dict(seed=-1), r"^seed.*-1"),
        (dict(dtype=torch.int64), r"^dtype.*torch.int64"),
    ],
)
def test_bad_arguments_of_mlp_towers(arguments, message):
    with pytest.raises(ValueError, match=message):
        gt.mlp_towers(gt.Problem(pairs()), **arguments)


def test_bad_arguments_at_a_point():
    problem = gt.Problem(pairs(), left=X)
    towers = gt.mlp_towers(problem, hidden=(), dim=2)
    point = problem.at(towers)
    with pytest.raises(ValueError, match=r"^parameters.*\(3,\)"):
        problem.at(towers, np.zeros(3))
    with pytest.raises(ValueError, match=r"^d:.*\(3,\)"):
        point.gauss_newton() @ torch.zeros(3, 1)
    with pytest.raises(ValueError, match=r"^direction.*other tensors"):
        point.along(gt.mlp_towers(problem, hidden=(2,), dim=2).parameters())
    with pytest.raises(ValueError, match=r"^damping.*-1"):
        point.gauss_newton(-1)


@pytest.mark.parametrize("convert", [np.float32, np.int64, bool])
def test_other_numbers_become_floats(convert):
    kinds = gt.Problem(pairs().astype(convert), left=X.astype(convert), left_weights=np.ones(M, dtype=convert))
    plain = gt.Problem(pairs(), left=X.astype(convert).astype(np.float64))
    towers = gt.mlp_towers(plain, hidden=(3,), dim=2, dtype=torch.float64)
    assert kinds.at(towers).value == pytest.approx(plain.at(towers).value, rel=1e-14)


def test_half_precision_features_are_taken():
    towers = gt.mlp_towers(gt.Problem(pairs(), left=X), hidden=(3,), dim=2)
    values = {gt.Problem(pairs(), left=torch.tensor(X).to(t)).at(towers).value for t in (torch.bfloat16, torch.float64)}
    assert len(values) == 1  # X holds small integers, which bfloat16 represents exactly


def test_features_belong_to_the_problem():
    features = X.copy()
    problem = gt.Problem(pairs(), left=features)
    towers = gt.mlp_towers(problem, hidden=(3,), dim=2)
    before = problem.at(towers).value
    features[:] = 0
    assert problem.at(towers).value == before


def test_a_point_owns_the_parameters_it_was_given():
    problem = gt.Problem(pairs())
    towers = gt.mlp_towers(problem, hidden=(), dim=2)
    given = towers.parameters()
    point = problem.at(towers, given)
    gradient = point.gradient().to_vector()
    given.vector.zero_()
    assert torch.equal(point.gradient().to_vector(), gradient)


def test_the_problem_says_what_it_is():
    assert repr(gt.Problem(pairs(), omega=0.5)) == "Problem(4 × 3, 3 observed, logistic, omega=0.5, l2=1)"


def test_interactions_are_taken_with_their_weights():
    pairs = gt.Interactions.from_arrays(["a", "a", "b"], ["x", "y", "x"], weight=[1.0, 2.0, 3.0])
    problem = gt.Problem(pairs)
    same = gt.Problem(pairs.matrix, pair_weights=pairs.weights)
    towers = gt.mlp_towers(problem, hidden=(), dim=2)
    assert problem.at(towers).value == same.at(towers).value != gt.Problem(pairs.matrix).at(towers).value


def test_the_memory_budget_stays_as_it_was_given(tmp_path):
    problem = gt.Problem(sp.eye(4, format="csr"))
    towers = gt.mlp_towers(problem, (), 2)
    gt.minimize(problem, towers, max_iterations=1, checkpoint=tmp_path / "run")
    assert problem.memory_budget is None
    planned = problem.planned_budgets[towers.device]
    assert planned > 2**20
    resumed = gt.Problem(sp.eye(4, format="csr"))
    gt.minimize(resumed, gt.mlp_towers(resumed, (), 2), max_iterations=2, checkpoint=tmp_path / "run")
    assert resumed.memory_budget is None
    assert resumed.planned_budgets == {towers.device: planned}  # the same blocks as before
    given = gt.Problem(sp.eye(4, format="csr"), memory_budget="1GB")
    gt.minimize(given, gt.mlp_towers(given, (), 2), max_iterations=3, checkpoint=tmp_path / "run")
    assert given.memory_budget == given.planned_budgets[towers.device] == 10**9


def test_each_device_has_a_budget_of_its_own(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(problems, "default_budget", {cpu: 10**9, gpu: 10**10}.get)
    problem = gt.Problem(sp.eye(4, format="csr"))
    for device, expected in ((cpu, 10**9), (gpu, 10**10), (cpu, 10**9)):
        assert problem._budget(SimpleNamespace(device=device)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(problem=3), r"^problem.*int"), (dict(towers=3), r"^towers.*int"),
        (dict(validation=3), r"^validation"), (dict(callbacks=3), r"^callbacks.*3"),
        (dict(callbacks=[3]), r"^callbacks"), (dict(validate_at=[]), r"^validate_at"),
    ],
)  # fmt: skip
def test_minimize_refuses_wrong_types_by_name(arguments, message):
    problem = gt.Problem(sp.eye(4, format="csr"))
    given = {"problem": problem, "towers": gt.mlp_towers(problem, (), 2), "max_iterations": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        gt.minimize(**given)


def test_towers_larger_than_the_memory_are_refused_before_they_are_made():
    problem = gt.Problem(sp.eye(4, format="csr"))
    with pytest.raises(ValueError, match=r"^dim.*10{12}"):
        gt.mlp_towers(problem, (), 10**12)
    with pytest.raises(ValueError, match=r"^hidden.*\(8, 10{12}\)"):
        gt.mlp_towers(problem, (8, 10**12), 2)
    with pytest.raises(ValueError, match=r"^problem.*str"):
        gt.mlp_towers("pairs")

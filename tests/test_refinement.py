"""Embeddings of known entities moved by their own pairs: against a plain sum, and what a model does with them."""

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

import gramtower as gt
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import least_budget, make_problem, make_towers, refine

M, N, K = 23, 17, 4


def _pairs(seed: int = 0, density: float = 0.2) -> sp.csr_matrix:
    pairs = sp.random(M, N, density, format="csr", random_state=np.random.default_rng(seed))
    pairs.data[:] = 1.0
    return pairs


def _embeddings(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(M, K, generator=draw, dtype=torch.float64),
        torch.randn(N, K, generator=draw, dtype=torch.float64),
    )


def _row_objective(p: torch.Tensor, start: torch.Tensor, Q: torch.Tensor, seen: NDArray, weights, omega, kappa):
    """What row i of the left embeddings minimises, as the plain sum over all right entities."""
    scores = Q @ p
    observed = torch.nn.functional.softplus(-scores[seen]).sum()
    rest = np.setdiff1d(np.arange(len(Q)), seen)
    unobserved = 0.5 * omega * (weights[rest] * (-0.5 - scores[rest]) ** 2).sum()
    return observed + unobserved + 0.5 * kappa * ((p - start) ** 2).sum()


@pytest.mark.parametrize("side", [0, 1])
def test_rows_are_where_the_dense_objective_of_each_has_no_slope(side):
    pairs, both = _pairs(), _embeddings()
    b = np.random.default_rng(2).uniform(0.5, 2, N)
    b /= b.mean()
    omega = 0.05
    problem = gt.Problem(pairs, omega=omega, l2=1.0, imputed=-0.5, right_weights=b)
    moved = refine(problem, both, (side == 0, side == 1))
    assert torch.equal(moved[1 - side], both[1 - side])
    others = both[1 - side]
    kappa = 2 * 0.25 * float(others.square().sum(1).mean())
    rows = pairs if side == 0 else sp.csr_matrix(pairs.T)
    weights = torch.from_numpy(b)
    for i in range(len(both[side])):
        p = moved[side][i].clone().requires_grad_()
        seen = rows.indices[rows.indptr[i] : rows.indptr[i + 1]]
        own = weights if side == 0 else weights[i].expand(M)
        value = _row_objective(p, both[side][i], others, seen, own, omega, kappa)
        value.backward()
        start = both[side][i].clone().requires_grad_()
        _row_objective(start, both[side][i], others, seen, own, omega, kappa).backward()
        assert p.grad.norm() < 5e-3 * max(0.1, float(start.grad.norm()))


def test_the_fewer_pairs_an_entity_has_the_nearer_it_stays_to_its_tower():
    rows = np.zeros((40, 30), dtype=np.float32)
    counts = np.repeat([0, 1, 4, 12], 10)
    rng = np.random.default_rng(0)
    for i, count in enumerate(counts):
        rows[i, rng.permutation(30)[:count]] = 1
    draw = torch.Generator().manual_seed(0)
    P, Q = torch.zeros(40, 8, dtype=torch.float64), torch.randn(30, 8, generator=draw, dtype=torch.float64)
    problem = gt.Problem(sp.csr_matrix(rows), omega=1e-3, l2=1.0, imputed=-0.5)
    far = (refine(problem, (P, Q), (True, False))[0] - P).norm(dim=1).numpy()
    means = [far[counts == count].mean() for count in (0, 1, 4, 12)]
    assert means == sorted(means)
    assert means[0] < 0.2 * means[1]


def test_scales_of_both_sides_that_cancel_in_scores_change_nothing():
    pairs, (P, Q) = _pairs(), _embeddings()
    problem = gt.Problem(pairs, omega=0.05, l2=1.0, imputed=-0.5)
    moved = refine(problem, (P, Q), (True, True))
    other = refine(problem, (10 * P, Q / 10), (True, True))
    for one, two in ((moved[0], other[0] / 10), (moved[1], other[1] * 10)):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_embeddings_that_are_zero_leave_the_other_side_where_it_is():
    P, Q = _embeddings()[0], torch.zeros(N, K, dtype=torch.float64)
    problem = gt.Problem(_pairs(), omega=0.05, l2=1.0, imputed=-0.5)
    assert torch.equal(refine(problem, (P, Q), (True, False))[0], P)


def _groups(seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix, sp.csr_matrix]:
    """Entities of four kinds that features tell, and favourites among right ones that they do not."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(4, size=120), rng.integers(4, size=60)
    liked = rng.random(60) < 0.3
    chance = 0.02 + (kinds[0][:, None] == kinds[1][None, :]) * np.where(liked, 0.6, 0.08)[None, :]
    pairs = sp.csr_matrix((rng.random(chance.shape) < chance).astype(np.float32))
    left, right = (sp.csr_matrix(np.eye(4, dtype=np.float32)[kind]) for kind in kinds)
    return pairs, left, right


def test_a_model_with_features_on_both_sides_is_refined_by_default():
    pairs, left, right = _groups()
    options = {"dim": 8, "hidden": (8,), "max_iterations": 6, "device": "cpu"}
    plain = gt.TwoTower(**options, refine=False).fit(pairs[:80], left[:80], right)
    model = gt.TwoTower(**options).fit(pairs[:80], left[:80], right)
    assert model.refine_
    assert not plain.refine_
    assert "moved by their own pairs" in repr(model)
    assert "moved" not in repr(plain)
    new = model.embed(left_features=left[80:])
    np.testing.assert_array_equal(new, plain.embed(left_features=left[80:]))

    def recall(one: gt.TwoTower) -> float:
        scores = new @ one.embed(side="right").T
        top = np.argsort(-scores, 1)[:, :5]
        return float(np.mean(np.take_along_axis(pairs[80:].toarray(), top, 1)))

    assert recall(model) > recall(plain) + 0.1  # favourites are known by their pairs alone


@pytest.mark.parametrize("sides", ["left", "right"])
def test_a_side_with_ids_is_neither_refined_nor_makes_the_other_be(sides):
    pairs, left, right = _groups()
    features = {f"{sides}_features": left if sides == "left" else right}
    options = {"dim": 4, "max_iterations": 2, "device": "cpu"}
    plain = gt.TwoTower(**options).fit(pairs, **features)
    assert not plain.refine_
    model = gt.TwoTower(**options, refine=True).fit(pairs, **features)
    other = "right" if sides == "left" else "left"
    np.testing.assert_array_equal(model.embed(side=other), plain.embed(side=other))
    assert np.abs(model.embed(side=sides) - plain.embed(side=sides)).max() > 1e-3


def test_refine_is_refused_where_nothing_is_known_but_ids():
    pairs, left, _ = _groups()
    with pytest.raises(ValueError, match=r"^refine.*features"):
        gt.TwoTower(refine=True, device="cpu").fit(pairs)
    with pytest.raises(ValueError, match=r"^refine.*features"):
        gt.TwoTower(refine=True, device="cpu").fit(pairs, ["id", left])
    with pytest.raises(ValueError, match=r"^refine.*2"):
        gt.TwoTower(refine=2, device="cpu").fit(pairs, left)


def test_a_memory_budget_without_room_for_it_turns_it_off_or_is_refused_first():
    pairs, left, right = _groups()
    options = {"dim": 8, "hidden": (), "max_iterations": 1, "device": "cpu"}  # towers of 64 numbers, 1,440 of entities
    model = gt.TwoTower(**options)
    data = prepare_data(model, pairs, left, right)
    problem = make_problem(model, data)
    least = problem.least_budget(make_towers(model, data, problem))
    assert gt.TwoTower(**options, memory_budget="1GB").fit(pairs, left, right).refine_
    assert not gt.TwoTower(**options, memory_budget=least).fit(pairs, left, right).refine_
    with pytest.raises(ValueError, match=r"^refine.*memory budget of \d+.*'.*'"):
        gt.TwoTower(**options, memory_budget=least, refine=True).fit(pairs, left, right)


def test_the_least_budget_is_counted_without_tables_of_all_entities():
    entities, dim = 1 << 18, 64
    problem = gt.Problem(sp.csr_matrix((entities, entities), dtype=np.float32))
    made = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.device.type != "meta":
                made.append(found.untyped_storage().nbytes())
            return found

    with Counted():
        least = least_budget(problem, dim, torch.device("cpu"), (True, True))
    assert least > 4 * entities * dim
    assert max(made) < 4 * entities * dim


def test_a_file_and_an_update_keep_it(tmp_path):
    pairs, left, right = _groups()
    model = gt.TwoTower(dim=4, hidden=(8,), max_iterations=3, device="cpu").fit(pairs, left, right)
    model.save(tmp_path / "model.gramtower")
    again = gt.load(tmp_path / "model.gramtower")
    assert again.refine_
    assert again.refine == "auto"
    np.testing.assert_array_equal(again.embed(side="left"), model.embed(side="left"))
    assert again.update(sp.csr_matrix(pairs.shape), left, right).refine_


def test_an_explanation_names_what_own_pairs_add():
    pairs, left, right = _groups()
    options = {"dim": 4, "hidden": (8,), "normalize": False, "max_iterations": 3, "device": "cpu"}
    model = gt.TwoTower(**options).fit(pairs, left, right)
    found = model.explain(5, 7, left_features=left[5])
    (own,) = [part for part in found.contributions if part.kind == "id"]
    by_features = float(model.embed(left_features=left[5])[0] @ model.embed(side="right")[7])
    assert own.name == 5
    assert math.isclose(own.value, found.score - by_features, abs_tol=1e-5)
    assert math.isclose(found.score, float(model.predict([5], [7])[0]), abs_tol=1e-5)
    assert abs(found.remainder) < 1e-5
    new = model.explain(right=7, left_features=left[5])
    assert not [part for part in new.contributions if part.kind == "id"]

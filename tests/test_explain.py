"""Parts of a score add up to it, agree with the dense computation, and name what carried it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from dense import Dense
from torch import nn

import gramtower as gt
from gramtower.model.explanation import Explainer

RNG = np.random.default_rng(0)
PAIRS = sp.csr_matrix((RNG.random((14, 11)) < 0.35) | (np.arange(14)[:, None] % 11 == np.arange(11)), dtype=np.float32)
DATA = gt.Interactions.from_arrays([f"u{i}" for i in PAIRS.nonzero()[0]], [f"i{j}" for j in PAIRS.nonzero()[1]])
OPTIONS = dict(dim=4, device="cpu", max_iterations=3)


def total(found):
    return found.base + sum(one.value for one in found.contributions) + found.remainder


def history_row(model, row):
    x = torch.zeros(model.trained_.shape[1], dtype=torch.float64)
    columns = model.trained_[row].indices
    x[columns] = float(np.float32(1 / np.sqrt(len(columns))))
    return x


def test_parts_of_a_linear_tower_are_those_of_the_dense_product():
    model = gt.TwoTower(hidden=(), **OPTIONS).fit(DATA, left_features="history")
    found = model.explain("u3", "i5")
    row, column = model.left_.rows(["u3"])[0], model.right_.rows(["i5"])[0]
    W = model.towers_.left[0].weight.detach().double()
    q = model.right_.embeddings[column].double()
    dense = dict(zip(model.right_.ids, (history_row(model, row) * (W @ q)).tolist(), strict=True))
    assert {one.name for one in found.contributions} == set(model.right_.ids[model.trained_[row].indices])
    for one in found.contributions:
        assert one.kind == "history"
        assert one.value == pytest.approx(dense[one.name], rel=1e-12, abs=1e-14)
    assert found.method == "linear"
    assert found.base == 0
    assert abs(found.remainder) < 1e-12
    assert found.score == pytest.approx(float(model.predict(["u3"], ["i5"])[0]), rel=1e-4, abs=1e-6)
    values = [one.value for one in found.contributions]
    assert values == sorted(values, reverse=True)


def brute(model, row, column, points=20000):
    """Integrated gradients by a fine midpoint rule through the whole dense tower."""
    tower = nn.Sequential(*model.towers_.left).double()
    q = model.right_.embeddings[column].double()
    x = history_row(model, row)
    t = (torch.arange(points, dtype=torch.float64) + 0.5)[:, None] / points
    at = (t * x).requires_grad_()
    (slopes,) = torch.autograd.grad((tower(at) @ q).sum(), at)
    base, score = (float((tower(one[None]) @ q).detach()) for one in (torch.zeros_like(x), x))
    return x * slopes.mean(0), base, score


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
def test_one_hidden_layer_is_exact(activation):
    model = gt.TwoTower(hidden=(6,), activation=activation, **OPTIONS).fit(DATA, left_features="history")
    found = model.explain("u2", "i7")
    row, column = model.left_.rows(["u2"])[0], model.right_.rows(["i7"])[0]
    parts, base, score = brute(model, row, column)
    assert abs(found.remainder) < 1e-12
    assert found.base == pytest.approx(base, abs=1e-12)
    assert found.score == pytest.approx(score, abs=1e-12)
    for one in found.contributions:
        assert one.value == pytest.approx(float(parts[model.right_.rows([one.name])[0]]), abs=1e-4)


def test_deeper_towers_say_what_quadrature_leaves():
    for activation, bound in (("tanh", 1e-6), ("relu", 1e-2)):
        model = gt.TwoTower(hidden=(6, 5), activation=activation, **OPTIONS).fit(DATA, left_features="history")
        found = model.explain("u2", "i7")
        parts, base, score = brute(model, model.left_.rows(["u2"])[0], model.right_.rows(["i7"])[0], 4000)
        assert found.method == "integrated gradients"
        assert abs(found.remainder) < bound
        assert total(found) == pytest.approx(score, abs=1e-12)
        assert found.base == pytest.approx(base, abs=1e-12)
        for one in found.contributions:
            assert one.value == pytest.approx(float(parts[model.right_.rows([one.name])[0]]), abs=1e-2)


class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(width, 4, generator=torch.Generator().manual_seed(width)))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


def test_towers_of_ones_own_are_explained_through_their_gradient():
    def towers(problem):
        return gt.Towers(Own(problem.left.width), Own(problem.right.width))

    rows = RNG.normal(size=(PAIRS.shape[0], 3)), RNG.normal(size=(PAIRS.shape[1], 5))
    model = gt.TwoTower(towers=towers, max_iterations=2, device="cpu").fit(PAIRS, *rows)
    found = model.explain(2, 4, left_features=rows[0][2:3])
    assert [one.name for one in sorted(found.contributions, key=lambda one: one.name)] == [0, 1, 2]
    assert abs(found.remainder) < 1e-6
    assert found.score == pytest.approx(float(model.predict([2], [4])[0]), abs=1e-5)
    other = model.explain(2, 4, side="right", right_features=rows[1][4:5])
    assert len(other.contributions) == 5
    assert other.score == pytest.approx(found.score, abs=1e-5)


def row_of_dense(model, row, omega, l2, mu, loss):
    """Gradient and Hessian of the plain double sum along one left entity's vector, by autograd."""
    labels = np.where(model.trained_.toarray() > 0, 1.0, np.nan)
    b = np.maximum(model.trained_.toarray().sum(0).astype(float), 1) ** 0.5
    twin = Dense(labels, None, None, loss, omega, 0.0, -0.5, None, b / b.mean(), mu)
    P, Q = model.left_.embeddings.double(), model.right_.embeddings.double()

    def objective(p):
        rows = torch.cat([P[:row], p[None], P[row + 1 :]])
        return twin.value(rows, Q, []) + 0.5 * l2 * (p**2).sum()

    p = P[row].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(p), p)
    return gradient, torch.autograd.functional.hessian(objective, P[row].clone())


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_ids_alone_are_explained_by_their_pairs_as_the_dense_hessian_says(loss):
    settings = dict(omega=0.3, l2=0.02, embedding_l2=0.01, frequency_power=1.0, right_weights="degree^0.5", loss=loss)
    model = gt.TwoTower(hidden=(), **(OPTIONS | settings)).fit(DATA)
    row, column = model.left_.rows(["u4"])[0], model.right_.rows(["i2"])[0]
    gradient, hessian = row_of_dense(model, row, 0.3, 0.02, 0.01, loss)
    found = model.explain("u4", "i2")
    q = model.right_.embeddings[column].double()
    v = torch.linalg.solve(hessian, q)
    assert found.method == "normal equations"
    assert found.remainder == pytest.approx(float(v @ gradient), abs=1e-9)
    assert total(found) == pytest.approx(float(q @ model.left_.embeddings[row].double()), abs=1e-12)
    assert {one.name for one in found.contributions} == set(model.right_.ids[model.trained_[row].indices])
    if loss == "squared":  # each part is then a constant of its pair times qᵀH⁻¹q_j: (1 − ω b_j ỹ) q_j
        b = np.maximum(model.trained_.toarray().sum(0).astype(float), 1) ** 0.5
        for one in found.contributions:
            j = model.right_.rows([one.name])[0]
            pull = 1 + 0.5 * 0.3 * b[j] / b.mean()
            assert one.value == pytest.approx(pull * float(model.right_.embeddings[j].double() @ v), abs=1e-9)


def test_the_remainder_of_a_row_vanishes_at_its_optimum_with_default_settings():
    early, late = (
        gt.TwoTower(dim=4, device="cpu", max_iterations=count, optimizer="newton").fit(DATA) for count in (1, 200)
    )
    for side in ("left", "right"):
        few, many = (abs(model.explain("u1", "i3", side=side).remainder) for model in (early, late))
        assert many < 1e-4
        assert many < 0.01 * few
    found = late.explain("u1", "i3", side="right")
    assert {one.name for one in found.contributions} <= set(late.left_.ids)


def test_fitted_labels_are_explained_by_pairs_and_the_mean_score():
    options = dict(dim=4, device="cpu", max_iterations=200, optimizer="newton", imputed="fitted", select=False)
    model = gt.TwoTower(**options).fit(DATA)
    found = model.explain("u1", "i3", side="left")
    P, Q = (torch.from_numpy(model.embed(side=side)).double() for side in ("left", "right"))
    b = np.maximum(model.trained_.toarray().sum(0).astype(float), 1) ** 0.1
    scores = P[model.left_.rows(["u1"])[0]] @ Q.T
    assert found.base == pytest.approx(float(scores @ torch.from_numpy(b / b.sum())), rel=1e-4, abs=1e-6)
    assert abs(found.remainder) < 1e-4
    other = model.explain("u1", "i3", side="right")
    assert total(other) == pytest.approx(found.score, rel=1e-9)


def test_low_rank_labels_are_in_the_base_also_of_a_loaded_model(tmp_path):
    rng = np.random.default_rng(3)
    options = dict(dim=4, device="cpu", max_iterations=200, optimizer="newton", right_weights="degree^0", l2=0.3)
    labels = rng.normal(size=(DATA.shape[0], 2)), rng.normal(size=(DATA.shape[1], 2))
    model = gt.TwoTower(**options, imputed=labels, embedding_l2=0.0, omega=0.2, loss="squared").fit(DATA)
    P, Q = (model.embed(side=side).astype(np.float64) for side in ("left", "right"))
    u, i = model.left_.rows(["u1"])[0], model.right_.rows(["i3"])[0]
    weights = np.where(model.trained_.toarray() > 0, 1.0, 0.2)  # at an optimum of the squared loss, row by row
    left = np.linalg.solve((Q.T * weights[u]) @ Q + 0.3 * np.eye(4), Q[i])
    right = np.linalg.solve((P.T * weights[:, i]) @ P + 0.3 * np.eye(4), P[u])
    imputed = 0.2 * labels[0] @ labels[1].T
    model.save(tmp_path / "m")
    for one in (model, gt.load(tmp_path / "m")):
        for side, base in (("left", imputed[u] @ Q @ left), ("right", imputed[:, i] @ P @ right)):
            found = one.explain("u1", "i3", side=side)
            assert found.base == pytest.approx(base, rel=1e-6)
            assert abs(found.remainder) < 1e-3


def test_ids_beside_a_history_have_a_part_of_their_own_and_new_entities_none():
    model = gt.TwoTower(hidden=(6,), **OPTIONS).fit(DATA, left_features=["id", "history"])
    found = model.explain("u3", "i5")
    assert [one.name for one in found.contributions if one.kind == "id"] == ["u3"]
    assert found.score == pytest.approx(float(model.predict(["u3"], ["i5"])[0]), abs=1e-5)
    new = model.explain(right="i5", histories=[["i1", "i2"]])
    assert sorted(one.name for one in new.contributions) == ["i1", "i2"]
    q, p = model.embed(["i5"], side="right")[0], model.embed(histories=[["i1", "i2"]])[0]
    assert new.score == pytest.approx(float(p @ q), abs=1e-5)
    assert total(new) == pytest.approx(new.score, abs=1e-12)


def test_columns_of_a_table_are_named_and_a_loaded_model_says_the_same(tmp_path):
    pytest.importorskip("polars")
    from gramtower.data.tables import FeatureTable

    ids = [str(key) for key in DATA.left_ids]
    cities = [["Oslo", "Rome"][i % 2] for i in range(len(ids))]
    columns = {"user": ids, "age": [20.0 + i for i in range(len(ids))], "city": cities}
    table = FeatureTable(columns, id="user", numeric=["age"], categorical=["city"])
    model = gt.TwoTower(hidden=(6,), **OPTIONS).fit(DATA, left_features=["history", table])
    row = {"age": [33.0], "city": ["Oslo"]}
    found = model.explain("u3", "i5", left_features=row)
    assert {"age", "city=Oslo"} == {one.name for one in found.contributions if one.kind == "feature"}
    assert "history" in {one.kind for one in found.contributions}
    model.save(tmp_path / "model")
    assert gt.load(tmp_path / "model").explain("u3", "i5", left_features=row) == found


@pytest.mark.parametrize(("bits", "apart"), [(15, True), (1, False)])
def test_hashed_text_is_named_by_its_words(bits, apart):
    pytest.importorskip("polars")
    ids = [str(key) for key in DATA.right_ids]
    table = gt.FeatureTable({"item": ids, "title": [f"film {i}" for i in ids]}, "item", text=["title"], hash_bits=bits)
    model = gt.TwoTower(hidden=(), store_features=True, **OPTIONS).fit(DATA, right_features=table)
    found = model.explain("u3", "i5", side="right", right_features={"title": ["Great Film"]}).contributions
    names = {one.name for one in found}
    assert {word for name in names for word in name.removeprefix("title=").split("|")} == {
        "great",
        "film",
        "great film",
    }
    assert (len(names) == 3) == apart
    stored = model.explain("u3", "i5", side="right").contributions
    assert all(one.name.startswith("title#") for one in stored)


def test_known_entities_are_explained_by_their_stored_rows(tmp_path):
    pytest.importorskip("polars")
    rows = {"user": DATA.left_ids.tolist()[:-1], "city": [["Oslo", "Rome"][i % 2] for i in range(13)]}
    places = {"user": DATA.left_ids.tolist(), "height": RNG.normal(size=14).tolist()}
    features = [
        "id",
        gt.FeatureTable(rows, id="user", categorical=["city"]),
        gt.FeatureTable(places, id="user", numeric=["height"]),
    ]
    model = gt.TwoTower(hidden=(6,), refine=False, store_features=True, **OPTIONS).fit(DATA, left_features=features)
    model.add(left_features=[{"user": ["new"], "city": ["Rome"]}, {"user": ["new"], "height": [0.3]}])
    model.save(tmp_path / "model")
    for key, place in (("u3", DATA.left_ids.tolist().index("u3")), ("new", None), (DATA.left_ids[-1], 13)):
        city = "Rome" if place is None else [*rows["city"], None][place]
        height = 0.3 if place is None else places["height"][place]
        given = [{"city": [city]}, {"height": [height]}]
        found = model.explain(key, "i5")
        assert found == model.explain(key, "i5", left_features=given)
        assert found == gt.load(tmp_path / "model").explain(key, "i5")
        assert found.score == pytest.approx(float(model.predict([key], ["i5"])[0]), abs=1e-5)
        assert ("id" in {one.kind for one in found.contributions}) == (key != "new")
    with pytest.raises(ValueError, match="left_features"):
        model.explain(right="i5", histories=[["i1"]])
    plain = gt.TwoTower(hidden=(6,), **OPTIONS).fit(DATA, left_features=features)
    with pytest.raises(ValueError, match=r"left_features.*store_features=True"):
        plain.explain("u3", "i5")


def test_stored_rows_of_matrices_explain_the_rows_of_both_sides():
    left, right = RNG.normal(size=(14, 3)), sp.random(11, 5, density=0.5, format="csr", random_state=0)
    model = gt.TwoTower(hidden=(6,), refine=False, store_features=True, **OPTIONS).fit(PAIRS, left, right)
    assert model.explain(2, 3) == model.explain(2, 3, left_features=left[2:3])
    assert model.explain(2, 3, side="right") == model.explain(2, 3, side="right", right_features=right[[3]])


def test_to_plain_keeps_the_largest_and_the_sum():
    model = gt.TwoTower(hidden=(), **OPTIONS).fit(DATA, left_features="history")
    found = model.explain("u3", "i5")
    plain = found.to_plain(2)
    assert len(plain["contributions"]) == 2
    assert plain["others"]["count"] == len(found.contributions) - 2
    shown = sum(one["value"] for one in plain["contributions"])
    assert plain["base"] + shown + plain["others"]["value"] + plain["remainder"] == pytest.approx(plain["score"])
    sizes = sorted(abs(one.value) for one in found.contributions)
    assert min(abs(one["value"]) for one in plain["contributions"]) >= sizes[-2]


def test_what_cannot_be_explained_is_refused_with_what_is_needed():
    ids = gt.TwoTower(hidden=(), **OPTIONS).fit(DATA)
    history = gt.TwoTower(hidden=(6,), **OPTIONS).fit(DATA, left_features="history")
    deep = gt.TwoTower(hidden=(6,), **OPTIONS).fit(DATA)
    rated = gt.TwoTower(hidden=(), loss="squared", **OPTIONS).fit(2 * PAIRS)
    rows = gt.TwoTower(hidden=(6,), **OPTIONS).fit(PAIRS, RNG.normal(size=(14, 3)))
    with pytest.raises(ValueError, match="layers"):
        deep.explain("u1", "i1")
    with pytest.raises(ValueError, match="weights"):
        rated.explain(1, 1)
    with pytest.raises(ValueError, match=r"left_features.*None"):
        rows.explain(1, 1)
    with pytest.raises(ValueError, match="entity"):
        rows.explain(1, 1, left_features=np.zeros((2, 3)))
    with pytest.raises(ValueError, match="nearest"):
        history.explain("u99", "i1")
    with pytest.raises(ValueError, match="one id"):
        history.explain(["u1", "u2"], "i1")
    with pytest.raises(ValueError, match=r"left.*None"):
        ids.explain(right="i1")
    with pytest.raises(ValueError, match="right_features"):
        ids.explain("u1", "i1", right_features=np.zeros((1, 3)))
    with pytest.raises(ValueError, match="histories"):
        ids.explain(right="i1", histories=[["i1"]])
    rows = history.left_.row("u1"), history.right_.row("i1")
    assert Explainer(history, history.fitted_).explain(*rows) == history.explain("u1", "i1")


def test_an_id_with_a_smaller_entry_adds_what_its_tower_makes_of_it():
    for side, own in (("left", "u3"), ("right", "i5")):
        rows = np.eye(len(DATA.left_ids if side == "left" else DATA.right_ids), 3) + 0.5
        model = gt.TwoTower(hidden=(6,), **OPTIONS).fit(DATA, **{f"{side}_features": ["id*0.25", rows]})
        place = (model.left_ if side == "left" else model.right_).rows([own])[0]
        found = model.explain("u3", "i5", side=side, **{f"{side}_features": rows[place : place + 1]})
        assert found.score == pytest.approx(float(model.predict(["u3"], ["i5"])[0]), abs=1e-5)
        assert total(found) == pytest.approx(found.score, abs=1e-12)
        assert [one.name for one in found.contributions if one.kind == "id"] == [own]

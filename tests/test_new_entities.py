"""Entities that were not there in training: ranked among the others, asked about, kept in the model and its file."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower._util.checks import LeftOutWarning
from gramtower.data.tables import FeatureTable
from gramtower.metrics import evaluate_embeddings
from gramtower.model.side import described, new_features

USERS, ITEMS = 30, 24
METRICS = ("recall@3", "map@3", "psp@3", "novelty@3", "coverage@3")


def small(**options):
    return gt.TwoTower(**{"dim": 6, "hidden": (8,), "max_iterations": 10, "device": "cpu", "select": False, **options})


def items(numbers):
    return {"item": [f"i{j}" for j in numbers], "kind": [str(j % 3) for j in numbers], "size": [j / 9 for j in numbers]}


def users(numbers):
    return {"user": [f"u{i}" for i in numbers], "group": [str(i % 3) for i in numbers]}


def item_table(numbers):
    return FeatureTable(items(numbers), "item", numeric=["size"], categorical=["kind"])


def user_table(numbers):
    return FeatureTable(users(numbers), "user", categorical=["group"])


def pairs(left=range(USERS), right=range(ITEMS), keep=lambda i, j: (i + j) % 4):
    rows = [(f"u{i}", f"i{j}") for i in left for j in right if i % 3 == j % 3 and keep(i, j)]
    return gt.Interactions.from_arrays(*zip(*rows, strict=True))


def fitted(left=None, right=("id",), **options):
    return small(**options).fit(pairs(), left or user_table(range(USERS)), [*right, item_table(range(ITEMS))])


@pytest.fixture(scope="module")
def model():
    return fitted()


NEW = range(ITEMS, ITEMS + 6)


def test_new_items_are_ranked_among_the_old_ones(model):
    whole = items([*range(ITEMS), *NEW])  # a catalogue, of which the model knows a part
    ids, scores = model.recommend(["u1", "u2"], k=20, right_features=whole)
    Q = np.concatenate([model.embed(side="right"), model.embed(right_features=items(NEW))])
    names = [*model.right_.ids, *(f"i{j}" for j in NEW)]
    for row, user in enumerate(("u1", "u2")):
        expected = model.embed([user])[0] @ Q.T
        seen = set(pairs().right_ids[pairs().matrix[pairs().left_rows(user)[0]].indices])
        best = sorted((-value, name) for value, name in zip(expected, names, strict=True) if name not in seen)[:20]
        np.testing.assert_allclose(scores[row], [-value for value, _ in best], rtol=1e-4, atol=1e-5)
        assert {f"i{j}" for j in NEW if j % 3 == int(user[1:]) % 3} <= set(ids[row, :8])  # those of its own kind
    only, _ = model.recommend("u1", k=2, right_features=item_table(NEW), allow=["i25", "i26"])
    assert only[0].tolist() == ["i25", "i26"]
    trained, _ = model.recommend("u1", k=30, right_features=items(NEW), candidates="trained")
    assert not {f"i{j}" for j in NEW} & set(trained[0])
    assert len(model.right_) == ITEMS  # one call changes nothing


def test_new_items_of_a_matrix_are_named_by_place():
    features = np.random.default_rng(0).normal(size=(ITEMS + 2, 3))
    named = small().fit(pairs(), right_features=features[:ITEMS])
    ids, scores = named.recommend("u1", k=ITEMS + 2, exclude_seen=False, right_features=features[ITEMS:])
    assert {("new", 0), ("new", 1)} <= set(ids[0])
    place = ids[0].tolist().index(("new", 1))
    expected = named.embed(["u1"])[0] @ named.embed(right_features=features[-1:])[0]
    assert scores[0, place] == pytest.approx(expected, rel=1e-5)
    assert named.predict(["u1"], [("new", 1)], right_features=features[ITEMS:])[0] == pytest.approx(expected, rel=1e-5)
    both = named.predict(["u1", "u1"], [("new", 1), "i3"], right_features=features[ITEMS:])
    assert both[1] == named.predict("u1", "i3")
    numbered = small().fit(pairs().matrix, right_features=features[:ITEMS])
    ids, _ = numbered.recommend([1], k=ITEMS + 2, exclude_seen=False, right_features=features[ITEMS:])
    assert sorted(ids[0]) == list(range(ITEMS + 2))


def test_tables_of_new_entities_are_joined_by_id_in_any_order():
    rng = np.random.default_rng(0)
    known, new = pairs().left_ids, ["n1", "n2"]
    ages, sizes = ({"id": list(known), name: rng.normal(size=len(known))} for name in ("age", "size"))
    first, second = (gt.FeatureTable(x, id="id", numeric=[n]) for x, n in ((ages, "age"), (sizes, "size")))
    model = small().fit(pairs(), left_features=[first, second])
    age = {"id": new, "age": [1.0, -1.0]}
    straight, turned = ({"id": new[::step], "size": [2.0, -2.0][::step]} for step in (1, -1))
    expected, found = (model.recommend(left_features=[age, x], k=5) for x in (straight, turned))
    assert found[0].tolist() == expected[0].tolist()
    assert np.array_equal(found[1], expected[1])
    rows = [model.embed(left_features=[age, x]) for x in (straight, turned)]
    assert np.array_equal(*rows)


def test_score_and_similar_know_new_entities_of_both_sides(model):
    left, right = users([31, 32]), items(NEW)
    found = model.predict(["u31", "u1"], ["i24", "i25"], left_features=left, right_features=right)
    P = np.stack([model.embed(left_features=left)[0], model.embed("u1")[0]])
    np.testing.assert_allclose(found, (P * model.embed(right_features=right)[:2]).sum(1), rtol=1e-4, atol=1e-5)
    ids, scores = model.similar("i24", k=ITEMS + 2, right_features=right)
    assert "i24" not in ids[0]
    assert {"i25", "i26"} <= set(ids[0])
    by_row, same = model.similar(k=ITEMS + 2, right_features=right)
    assert (by_row[0] == ids[0]).all()
    np.testing.assert_allclose(same[0], scores[0], rtol=1e-4, atol=1e-6)
    assert len(by_row) == len(NEW)
    alike, _ = model.similar(side="left", k=5, left_features=users([31]))
    assert all(int(name[1:]) % 3 == 1 for name in alike[0])


def dense_scores(model, test, right, train, new_left=None):
    """The same metrics from dense embeddings of the entities of a test, one by one."""
    known, fresh = set(model.left_.ids), new_left or {}
    P = np.stack([fresh[i] if i in fresh else model.embed(i)[0] for i in test.left_ids])
    assert all(i in known or i in fresh for i in test.left_ids)
    Q = np.concatenate([model.embed(side="right"), model.embed(right_features=right)])
    names = {name: place for place, name in enumerate([*model.right_.ids, *right["item"]])}

    def placed(given, rows):
        coo = given.matrix.tocoo()
        wanted = [(rows[given.left_ids[i]], names[given.right_ids[j]]) for i, j in zip(coo.row, coo.col, strict=True)
                  if given.left_ids[i] in rows]  # fmt: skip
        return sp.csr_matrix((np.ones(len(wanted)), tuple(zip(*wanted, strict=True))), shape=(len(rows), len(Q)))

    rows = {name: place for place, name in enumerate(test.left_ids)}
    every = {name: place for place, name in enumerate(train.left_ids)}
    seen = sp.csr_matrix((len(rows), len(Q))) if fresh else placed(train, rows)
    return evaluate_embeddings(P, Q, placed(test, rows), train=seen, metrics=METRICS, popularity=placed(train, every))


def test_metrics_of_new_items_and_of_new_users_with_them(model):
    right = items(NEW)
    test = pairs(right=[*range(ITEMS), *NEW], keep=lambda i, j: (i + j) % 4 == 0 or j >= ITEMS)
    found = model.evaluate(test, METRICS, right_features=right)
    assert found.left_out == {"unknown_left": 0, "unknown_right": 0, "seen": 0}
    assert dict(found) == pytest.approx(dict(dense_scores(model, test, right, pairs())), rel=1e-5)
    of_new = sum(name in right["item"] for name in test.right_ids[test.matrix.indices])
    with pytest.warns(LeftOutWarning):
        assert model.evaluate(test, METRICS).left_out == {"unknown_left": 0, "unknown_right": of_new, "seen": 0}
    left = users(range(40, 46))
    cold = pairs(left=range(40, 46), right=[*range(ITEMS), *NEW])
    found = model.evaluate(cold, METRICS, left_features=left, right_features=right)
    new_left = dict(zip(left["user"], model.embed(left_features=left), strict=True))
    assert dict(found) == pytest.approx(dict(dense_scores(model, cold, right, pairs(), new_left)), rel=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "hint"),
    [
        ([3, 40], [], r"left_features of evaluate describes new left entities\)$"),
        ([3], NEW, r"right_features of evaluate describes new right entities\)$"),
        ([3, 40], NEW, "left_features of evaluate describes new left entities, right_features of evaluate describes"),
    ],
)
def test_a_warning_of_unknown_entities_says_how_they_are_described(model, left, right, hint):
    with pytest.warns(LeftOutWarning, match=rf"'.*'.*{hint}"):
        model.evaluate(pairs(left=left, right=[*range(ITEMS), *right]), METRICS, exclude_seen=False)


def test_a_refusal_of_unknown_entities_says_how_they_are_described(model):
    cold = pairs(left=range(40, 46))
    with pytest.raises(ValueError, match=r"test:.*'u0'.*left_features"):
        model.evaluate(cold, METRICS)
    with pytest.raises(ValueError, match=r"histories.*evaluate"):
        small(max_iterations=1).fit(pairs(), "history").evaluate(cold, METRICS)
    ids = small(max_iterations=1).fit(pairs())
    with pytest.raises(ValueError, match=r"left_features"):
        ids.evaluate(cold, METRICS)
    both, asked = pairs(right=[*range(ITEMS), *NEW]), {"exclude_seen": False, "candidates": "trained"}
    with pytest.warns(LeftOutWarning) as told:  # as asked for, and nothing that more features would mend
        model.evaluate(both, METRICS, right_features=items(NEW), **asked)
    assert "right_features" not in str(told[0].message)


@pytest.mark.parametrize("side", ["left", "right"])
def test_added_entities_stay_in_the_model_and_in_its_file(side, tmp_path):
    model = fitted(left=["id", user_table(range(USERS))])
    given = {"left": {"left_features": users([3, 33, 34])}, "right": {"right_features": item_table([1, *NEW])}}[side]
    before = model.fitted_
    width = getattr(before, side).inputs.width
    assert model.add(**given) is model
    assert len(getattr(before, side)) == {"left": USERS, "right": ITEMS}[side]
    model.save(tmp_path / "m")
    for one in (model, gt.load(tmp_path / "m")):
        this = one.left_ if side == "left" else one.right_
        assert this.added == {"left": 2, "right": 6}[side]
        assert this.inputs.width == width  # no column of their own
        if side == "left":
            assert one.recommend("u34", k=3)[1] == pytest.approx(one.recommend(left_features=users([34]), k=3)[1])
            assert one.evaluate(pairs(left=[33, 34]), ("recall@8",))["recall@8"] > 0.9
        else:
            listed, scores = one.recommend("u1", k=30)
            there, _ = one.recommend("u1", k=30, candidates="trained")
            again, same = fitted(left=["id", user_table(range(USERS))]).recommend("u1", k=30, **given)
            assert set(listed[0]) - set(there[0]) == {f"i{j}" for j in NEW}
            assert (listed == again).all()
            np.testing.assert_allclose(scores, same, rtol=1e-5)
            assert "i25" in one.similar("i1", k=12)[0]
        assert repr(one).count("entities") == 2
    loaded = gt.load(tmp_path / "m").add(**given)  # known by now
    assert (loaded.left_.added, loaded.right_.added) == (model.left_.added, model.right_.added)
    warm = loaded.set_params(max_iterations=1).fit(pairs(), *_again(), warm_start=True)
    assert np.isfinite(warm.history_[-1].value)
    assert (warm.left_.added, warm.right_.added) == (0, 0)


def _again():
    return ["id", user_table(range(USERS))], ["id", item_table(range(ITEMS))]


def test_histories_of_added_users_count_as_seen(tmp_path):
    model = small().fit(pairs(), ["history", user_table(range(USERS))], [item_table(range(ITEMS))])
    model.add(users([31]), items(NEW), histories=[["i1", "i4", "i25"]])
    model.save(tmp_path / "m")
    for one in (model, gt.load(tmp_path / "m")):
        assert one.seen_[USERS].nnz == 3
        assert one.trained_[USERS].nnz == 0
        ids, scores = one.recommend("u31", k=30)
        assert not {"i1", "i4", "i25"} & set(ids[0][np.isfinite(scores[0])])
        known = one.recommend(left_features=users([31]), histories=[["i1", "i4", "i25"]], k=30)
        assert (known[0] == ids).all()
        test = gt.Interactions.from_arrays(["u31", "u31"], ["i4", "i7"])
        assert one.evaluate(test, ("auc",)).left_out["seen"] == 1
    only = small().fit(pairs(), "history")
    only.add(histories=[["i1", "i4"], ["i0"]], left_ids=["a", "b"])
    assert all(int(name[1:]) % 3 == 1 for name in only.similar("a", "left", k=3)[0][0])


def test_no_new_entities_have_no_embeddings():
    model = small(max_iterations=1).fit(pairs(), ["history", user_table(range(USERS))])
    assert model.embed(histories=[]).shape == (0, 6)
    assert model.recommend(histories=[], k=3)[0].shape == (0, 3)


def test_several_parts_are_joined_by_id_and_matrices_by_place():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(ITEMS + 6, 3))
    tags = {"item": items(range(ITEMS + 6))["item"], "tag": [str(j % 2) for j in range(ITEMS + 6)]}
    parts = [item_table(range(ITEMS)), dense[:ITEMS], FeatureTable(tags, "item", categorical=["tag"])]
    model = small().fit(pairs(), right_features=parts)
    new = [items(NEW), dense[ITEMS:], {name: cells[::-1] for name, cells in tags.items()}]  # in another order
    straight = [items(NEW), dense[ITEMS:], {name: cells[ITEMS:] for name, cells in tags.items()}]
    expected = model.embed(["u1"]) @ model.embed(right_features=straight).T
    found = model.predict(["u1"] * len(NEW), items(NEW)["item"], right_features=new)
    np.testing.assert_allclose(found, expected[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"right_features.*5.*6"):
        model.recommend("u1", right_features=[items(NEW), dense[ITEMS:-1], tags])
    missing = [items(NEW), dense[ITEMS:], None]
    assert len(model.add(right_features=missing).right_) == ITEMS + len(NEW)


def test_ids_of_new_entities_are_of_the_type_of_the_others():
    matrix = sp.csr_matrix(np.add.outer(np.arange(9), np.arange(6)) % 2, dtype=np.float32)
    numbers = gt.Interactions.from_arrays(*(x.astype(int) for x in matrix.nonzero()))
    kinds = {"id": [0, 1, 2, 3, 4, 5], "kind": list("ababab")}
    for given in (numbers, matrix):
        model = small().fit(given, right_features=FeatureTable(kinds, "id", categorical=["kind"]))
        for id in (7, "7"):
            ids, _ = model.recommend([1], k=7, exclude_seen=False, right_features={"id": [id], "kind": ["a"]})
            assert sorted(ids[0].tolist()) == [0, 1, 2, 3, 4, 5, 7]
        with pytest.raises(ValueError, match=r"right_features.*'x'"):
            model.recommend([1], right_features={"id": ["x"], "kind": ["a"]})
    text = fitted().add(right_features={"item": [7], "kind": ["0"], "size": [1.0]})
    assert text.right_.ids[-1] == "7"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.add(), r"left_features, right_features.*None"),
        (
            lambda m: m.add(right_features={"kind": ["0"], "size": [1.0]}),
            r"right_features.*without ids",
        ),
        (lambda m: m.add(right_features=items([40]), right_ids=["x"]), "right_ids"),
        (lambda m: m.recommend("u1", right_features=items([40, 40])), r"right_features.*'i40'"),
        (lambda m: m.recommend("u1", right_features=np.ones((1, 2))), r"right_features.*ndarray"),
        (lambda m: m.recommend("u1", candidates="some"), r"candidates.*'some'"),
        (lambda m: m.similar("i1", left_features=users([1])), "left_features"),
        (lambda m: m.similar(), r"ids.*None.*right_features"),
        (
            lambda m: small(max_iterations=1).fit(pairs()).add(right_features=items([40])),
            "this one knows right ids only",
        ),
        (lambda m: small(max_iterations=1).fit(pairs()).recommend("u1", right_features=items([1])), "right ids only"),
    ],
)
def test_what_cannot_be_added_is_refused_by_name(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_an_id_in_two_rows_of_a_large_table_is_found_at_once():
    numbers = [*range(ITEMS), *range(1000, 41_000), 40_999]  # a count for each id would look at 1.6 billion
    with pytest.raises(ValueError, match=r"right_features.*'i40999'"):
        fitted(max_iterations=0).add(right_features=items(numbers))


def test_a_column_that_rows_of_new_entities_lack_is_named(model, tmp_path):
    expected = "left_features: got a table of user, expected the column 'group' as well, as in training"
    with pytest.raises(ValueError, match=expected):
        model.recommend(left_features={"user": ["u99"]})
    path = tmp_path / "users.csv"
    path.write_text("user,age\nu99,3\n")
    with pytest.raises(ValueError, match=r"left_features.*'group'"):
        model.recommend(left_features=path)


def catalogue(count=600, users=300, picks=30):
    """Pairs of users with popular items and those of a group: of four fifths of the items, of the others; a table."""
    rng = np.random.default_rng(0)
    group, taste = np.arange(count) % 6, rng.normal(size=(users, 4))
    popularity = np.exp(4 * group / 6 + 0.7 * rng.normal(size=count))
    likings = np.exp(0.5 * taste @ rng.normal(size=(4, count))) * popularity  # which no feature tells
    likings *= np.where(group == np.arange(users)[:, None] % 6, 4.0, 1.0)
    picked = [rng.choice(count, picks, replace=False, p=row / row.sum()) for row in likings]
    names = [f"i{j}" for j in range(count)]
    table = {"item": names, "group": [str(g) for g in group], "color": [str(c) for c in rng.integers(5, size=count)]}
    every = gt.Interactions.from_arrays(
        np.repeat([f"u{i}" for i in range(users)], picks).tolist(), [names[j] for row in picked for j in row]
    )
    new = [names[j] for j in rng.permutation(count)[: count // 5]]
    held = np.isin(every.right_ids[every.matrix.indices], new)
    return every.subset(~held).without_empty(), every.subset(held).without_empty(), table


def group_table(table):
    return FeatureTable(table, "item", categorical=["group", "color"])


def without_expected_ids(monkeypatch):
    monkeypatch.setattr("gramtower.model.fitting.move_expected_ids", lambda *given: None)


@pytest.mark.parametrize(("hidden", "ids"), [((), "id"), ((16,), "id"), ((16,), "id*0.3")])
def test_ids_give_trained_items_no_constant_advantage_over_new_ones(hidden, ids, monkeypatch):
    train, test, table = catalogue()
    options = dict(dim=8, hidden=hidden, seed=1, max_iterations=10, device="cpu", select=False)
    found, known, share = {}, {}, {}
    for name in ("zero", "expected"):
        with monkeypatch.context() as patch:
            if name == "zero":
                without_expected_ids(patch)
            model = gt.TwoTower(**options).fit(train, right_features=[ids, group_table(table)])
        known[name] = model.embed(side="right")
        model.add(right_features=table)
        found[name] = model.evaluate(test, ("recall@20",))["recall@20"]
        share[name] = float(
            (model.right_.rows(model.recommend(model.left_.ids, 20)[0].ravel()) >= len(known[name])).mean()
        )
    assert np.array_equal(known["zero"], known["expected"])
    assert found["expected"] > 1.4 * found["zero"]
    assert 1.4 * share["zero"] < share["expected"] < 0.2  # of the catalogue they are a fifth


@pytest.mark.parametrize("hidden", [(), (8,)])
@pytest.mark.parametrize("normalize", [False, True])
def test_towers_with_expected_ids_embed_trained_entities_as_before(hidden, normalize):
    train, _, table = catalogue(60, 40)
    parity = {"user": list(train.left_ids), "parity": [str(int(u[1:]) % 2) for u in train.left_ids]}
    left = FeatureTable(parity, "user", categorical=["parity"])
    model = small(hidden=hidden, normalize=normalize).fit(
        train, ["id", "history", left], ["id*0.5", group_table(table)]
    )
    from gramtower.data.pairs import as_features
    from gramtower.model.fit_data import prepare_data

    data = prepare_data(model, train, ["id", "history", left], ["id*0.5", group_table(table)])
    for side, rows in zip(("left", "right"), data.features, strict=True):
        again = model.towers_.embed(side, as_features(side, rows, rows.shape[0]))
        np.testing.assert_allclose(again.numpy(), model.embed(side=side), atol=2e-5)


def test_expected_ids_are_those_of_the_file_and_of_exports(tmp_path):
    train, _, table = catalogue(60, 40)
    model = small().fit(train, right_features=["id", group_table(table)])
    expected = model.embed(right_features=table)
    model.save(tmp_path / "m")
    assert np.array_equal(gt.load(tmp_path / "m").embed(right_features=table), expected)
    added = gt.load(tmp_path / "m").add(right_features=table)
    new = [name for name in table["item"] if name not in set(train.right_ids)]
    rows = [table["item"].index(name) for name in new]
    np.testing.assert_allclose(added.embed(new, side="right"), expected[rows], atol=1e-6)


@pytest.mark.parametrize("seen", ["history", ["id", "history"]])
def test_an_entity_without_a_history_is_like_the_average_one(seen, tmp_path):
    train, _, _ = catalogue(60, 40, 8)
    model = small().fit(train, left_features=seen)
    unknown, known = model.embed(histories=[[], ["i3"]]), model.embed()
    spread = np.linalg.norm(known - known.mean(0), axis=1).mean()
    assert np.linalg.norm(unknown[0] - known.mean(0)) < 0.5 * spread
    assert np.allclose(unknown[1:], model.embed(histories=[["i3"]]), atol=1e-6)
    model.add(histories=[[]], left_ids=["nobody"])
    assert np.allclose(model.embed(["nobody"]), unknown[:1], atol=1e-6)
    model.save(tmp_path / "m")
    np.testing.assert_allclose(gt.load(tmp_path / "m").embed(histories=[[]]), unknown[:1], atol=1e-6)


def test_towers_of_ones_own_without_an_input_layer_stay_as_they_are():
    import torch

    def own(problem):
        return gt.Towers(torch.nn.Embedding(problem.left.rows, 4), torch.nn.Linear(problem.right.width, 4))

    train, _, table = catalogue(60, 40)
    model = small(towers=own).fit(train, right_features=["id", group_table(table)])
    x = new_features(model.right_, described(model.right_, table), None)
    bias = model.towers_.right.bias.detach().numpy()
    expected = x @ model.towers_.right.weight.detach().numpy().T + bias
    np.testing.assert_allclose(model.embed(right_features=table), expected, atol=1e-5)


def test_the_history_of_an_added_entity_never_counts_whoever_else_is_described():
    pairs = gt.Interactions.from_arrays(["a", "a", "b", "b", "c"], ["x", "y", "y", "z", "w"])
    model = gt.TwoTower(dim=2, hidden=(2,), max_iterations=1, device="cpu").fit(pairs, left_features="history")
    model.add(histories=[["x", "y"]], left_ids=["late"])
    test = gt.Interactions.from_arrays(["late", "late", "a"], ["x", "z", "w"])
    plain = model.evaluate(test, ["recall@2"])
    described = model.evaluate(test, ["recall@2"], histories=gt.Interactions.from_arrays(["a"], ["z"]))
    assert plain.left_out["seen"] == described.left_out["seen"] == 1
    assert plain.pairs == described.pairs == 2


def test_unknown_ids_suggest_only_what_the_model_can_embed():
    hint = "for new entities"
    by_id = small().fit(pairs())
    with pytest.raises(ValueError, match=r"^left ids: (?!.*left_features).*'who'"):
        by_id.recommend(["who"])
    with pytest.raises(ValueError, match=f"or left_features {hint}"):
        fitted(left=user_table(range(USERS))).recommend(["who"])
    with pytest.raises(ValueError, match=f"or histories {hint}"):
        fitted(left="history").recommend(["who"])

"""What counts as seen, in every answer and metric; joins by id, and counts of what they leave out."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower._util.checks import LeftOutWarning
from gramtower.data import frames
from gramtower.data.splits import random_pairs
from gramtower.data.tables import FeatureTable
from gramtower.metrics import evaluate_embeddings

METRICS = ("recall@5", "map@5", "psp@5", "novelty@5", "auc")


def small(**options):
    return gt.TwoTower(**{"dim": 6, "hidden": (8,), "max_iterations": 10, "device": "cpu", "select": False, **options})


def log(seed=0, users=60, items=45):
    rng = np.random.default_rng(seed)
    rows = [
        (f"u{u}", f"i{i}") for u in range(users) for i in range(items) if rng.random() < 0.05 + 0.6 * (u % 3 == i % 3)
    ]
    rng.shuffle(rows)
    return gt.Interactions.from_arrays(*zip(*rows, strict=True))


@pytest.fixture(scope="module")
def parts():
    """Training, validation and test pairs, and a model of the first two."""
    outer = random_pairs(log(), 0.2, seed=1)
    inner = random_pairs(outer.train, 0.2, seed=2)
    return inner.train, inner.test, outer.test, small(metric="recall@5").fit(inner.train, validation=inner.test)


def ones(*matrices):
    return sp.csr_matrix(sum(sp.csr_matrix(matrix).astype(bool).astype(np.float32) for matrix in matrices) > 0)


def test_no_list_holds_a_pair_of_training_or_of_validation(parts, tmp_path):
    train, validation, _, model = parts
    model.save(tmp_path / "m")
    known = ones(train.matrix, validation.matrix)
    assert known.nnz > train.matrix.nnz
    for one in (model, gt.load(tmp_path / "m")):
        assert (one.seen_ != known).nnz == 0
        assert (one.trained_ != ones(train.matrix)).nnz == 0
        ids, scores = one.recommend(train.left_ids, k=10)
        for row, (answer, values) in enumerate(zip(ids, scores, strict=True)):
            shown = set(answer[np.isfinite(values)])
            assert len(shown) == 10
            assert not shown & set(train.right_ids[known[row].indices])


def test_metrics_leave_out_validation_pairs_and_count_popularity_in_training(parts):
    train, validation, test, model = parts
    P, Q = model.embed(side="left"), model.embed(side="right")
    known = ones(train.matrix, validation.matrix)
    expected = evaluate_embeddings(P, Q, test.matrix, train=known, metrics=METRICS, popularity=train.matrix)
    assert dict(model.evaluate(test, METRICS)) == pytest.approx(dict(expected))
    wrong = evaluate_embeddings(P, Q, test.matrix, train=train.matrix, metrics=METRICS)
    assert wrong["recall@5"] < expected["recall@5"]  # validation pairs took places as misses
    by = model.evaluate(test, ("recall@5",), by="activity")
    mine = evaluate_embeddings(P, Q, test.matrix, train=train.matrix, exclude=validation.matrix, metrics=("recall@5",),
                               by="activity")  # fmt: skip
    assert dict(by) == pytest.approx(dict(mine))


def test_validation_pairs_count_when_they_are_what_is_tested(parts):
    train, validation, _, model = parts
    assert model.evaluate(validation, ("recall@5",))["recall@5"] == pytest.approx(model.best_metric_)
    assert model.evaluate(validation, ("recall@5",)).left_out == {"unknown_left": 0, "unknown_right": 0, "seen": 0}
    half = validation.subset(np.arange(len(validation)) % 2 == 0)
    rest = ones(train.matrix, validation.matrix).astype(int) - ones(half.matrix).astype(int)
    P, Q = model.embed(side="left"), model.embed(side="right")
    expected = evaluate_embeddings(P, Q, half.matrix, train=sp.csr_matrix(rest > 0), metrics=("recall@5",))
    assert dict(model.evaluate(half, ("recall@5",))) == pytest.approx(dict(expected))


def frame_of(pairs):
    coo = pairs.matrix.tocoo()
    return {"user": pairs.left_ids[coo.row].tolist(), "item": pairs.right_ids[coo.col].tolist()}


def test_given_pairs_are_left_out_of_lists_and_metrics(parts, tmp_path):
    train, validation, test, model = parts
    frame = frame_of(test)
    lines = [",".join(row) for row in zip(*frame.values(), strict=True)]
    (tmp_path / "more.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    everything = ones(train.matrix, validation.matrix, test.matrix)
    for given in (test, frame, tmp_path / "more.csv"):
        ids, scores = model.recommend(train.left_ids, k=5, exclude=given)
        for row, (answer, values) in enumerate(zip(ids, scores, strict=True)):
            assert not set(answer[np.isfinite(values)]) & set(train.right_ids[everything[row].indices])
    only, _ = model.recommend(train.left_ids, k=45, exclude=test, exclude_seen=False)
    assert not set(only[0]) & set(train.right_ids[test.matrix[0].indices])
    assert set(only[0]) >= set(train.right_ids[train.matrix[0].indices])
    half = np.arange(len(test)) % 2 == 0
    first, second = test.subset(half), test.subset(~half)
    P, Q = model.embed(side="left"), model.embed(side="right")
    known = ones(train.matrix, validation.matrix, second.matrix)
    expected = evaluate_embeddings(P, Q, first.matrix, train=known, metrics=METRICS, popularity=train.matrix)
    assert dict(model.evaluate(first, METRICS, exclude=second)) == pytest.approx(dict(expected))
    assert model.evaluate(test, METRICS, exclude=second).left_out["seen"] == len(second)


def test_pairs_of_others_to_leave_out_change_nothing(parts):
    _, _, test, model = parts
    others = gt.Interactions.from_arrays(["a"], ["b"])
    expected = model.recommend("u1", k=5)[0].tolist()
    with pytest.warns(LeftOutWarning, match=r"1 of 1.*exclude.*'a'"):
        assert model.recommend("u1", k=5, exclude=others)[0].tolist() == expected
    with pytest.warns(LeftOutWarning, match="exclude"):
        assert model.evaluate(test, METRICS, exclude=others) == model.evaluate(test, METRICS)


def test_a_file_of_new_entities_is_read_once(parts, tmp_path, monkeypatch):
    train, _, _, _ = parts
    users = {"user": [f"u{i}" for i in range(60)], "group": [str(i % 3) for i in range(60)]}
    model = small().fit(train, left_features=FeatureTable(users, categorical=["group"]))
    (tmp_path / "new.csv").write_text("user,group\nx,0\nu1,1\n")
    excluded = gt.Interactions.from_arrays(["x", "y"], ["i1", "i1"])
    real, read = frames.read_frame, []
    monkeypatch.setattr(frames, "read_frame", lambda name, path: read.append(name) or real(name, path))
    found = model.recommend(left_features=tmp_path / "new.csv", exclude=excluded, as_frame=True)
    assert read == ["left_features"]
    assert set(found["left"]) == {"x", "u1"}


def test_pairs_to_leave_out_of_new_entities(parts):
    train, _, _, _ = parts
    users = {"user": [f"u{i}" for i in range(60)], "group": [str(i % 3) for i in range(60)]}
    table = FeatureTable(users, categorical=["group"])
    model = small().fit(train, left_features=table)
    new = {"user": ["x", "y"], "group": ["0", "1"]}
    best, _ = model.recommend(left_features=new, k=1)
    pairs = gt.Interactions.from_arrays(["y", "z"], [best[1, 0], best[0, 0]])
    again, _ = model.recommend(left_features=new, k=1, exclude=pairs)
    assert again[0, 0] == best[0, 0]
    assert again[1, 0] != best[1, 0]
    matrix = sp.csr_matrix(([1.0], ([0], train.right_rows([best[0, 0]]))), shape=(2, train.shape[1]))
    assert model.recommend(left_features=new, k=1, exclude=matrix)[0][0, 0] != best[0, 0]
    with pytest.raises(ValueError, match=r"exclude.*ids"):
        model.recommend(left_features={"group": ["1"]}, exclude=pairs)


def test_pairs_of_unknown_entities_are_counted_by_reason(parts):
    train, _, test, model = parts
    frame = frame_of(test)
    more = {"user": ["stranger", "u1", "nobody"], "item": ["i1", "no such", "neither"]}
    grown = gt.Interactions.from_frame({name: frame[name] + more[name] for name in frame}, "user", "item")
    with pytest.warns(LeftOutWarning, match=r"^3 of \d+.*test"):
        found = model.evaluate(grown, ("recall@5",))
    assert found.left_out == {"unknown_left": 1, "unknown_right": 2, "seen": 0}
    assert found.pairs_left_out == 3
    assert dict(found) == dict(model.evaluate(test, ("recall@5",)))
    both = gt.Interactions.from_frame(
        {name: frame[name] + frame_of(train)[name][:7] + more[name][:1] for name in frame}, "user", "item"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one in a hundred and less is counted only
        found = model.evaluate(both, ("recall@5",)) if len(both) > 100 else pytest.fail("more pairs, please")
    assert found.left_out == {"unknown_left": 1, "unknown_right": 0, "seen": 7}


def test_row_numbers_of_another_matrix_are_not_joined(tmp_path):
    rng = np.random.default_rng(0)
    train, test = (sp.csr_matrix((rng.random((rows, 12)) < 0.3).astype(np.float32)) for rows in (30, 20))
    features = rng.normal(size=(50, 4))
    for pairs in (train, gt.Interactions.from_matrix(train)):
        small(max_iterations=2).fit(pairs, left_features=features[:30]).save(tmp_path / "m")
        model = gt.load(tmp_path / "m")
        others = gt.Interactions.from_matrix(test)
        with pytest.raises(ValueError, match=r"test:.*20"):
            model.evaluate(others, ("precision@1",))
        with pytest.raises(ValueError, match=r"^test.*(\(20, 12\)|without ids)"):
            model.evaluate(test, ("precision@1",))
        by_place = [model.evaluate(one, ("auc",), left_features=features[30:]) for one in (others, test)]
        expected = evaluate_embeddings(
            model.embed(left_features=features[30:]), model.embed(side="right"), test, metrics=("auc",)
        )
        assert [dict(one) for one in by_place] == [pytest.approx(dict(expected))] * 2
        with pytest.raises(ValueError, match=r"left_features.*19"):
            model.evaluate(others, ("auc",), left_features=features[31:])
    split = random_pairs(gt.Interactions.from_matrix(train), 0.2)
    model = small(max_iterations=2).fit(split.train)
    assert model.evaluate(split.test, ("auc",)) == model.evaluate(split.test.matrix, ("auc",))
    named = gt.Interactions.from_arrays(["a", "b"], ["c", "d"])
    with pytest.raises(ValueError, match=r"validation.*30"):
        small().fit(named, validation=split.test)


def test_features_are_joined_by_id_whatever_their_order(parts):
    train, _, test, _ = parts
    users = {"user": [f"u{i}" for i in range(60)], "group": [str(i % 3) for i in range(60)]}
    model = small().fit(train, left_features=FeatureTable(users, categorical=["group"]))
    order = np.random.default_rng(0).permutation(60)
    assert test.left_ids.tolist() != users["user"]
    shuffled = {name: [cells[i] for i in order] for name, cells in users.items()}
    rows = {name: [users[name][int(key[1:])] for key in test.left_ids] for name in users}
    expected = evaluate_embeddings(model.embed(left_features=rows), model.embed(side="right"), test.matrix,
                                   metrics=("map@5", "recall@5"))  # fmt: skip
    for given in (users, shuffled, FeatureTable(shuffled, categorical=["group"])):
        found = model.evaluate(test, ("map@5", "recall@5"), left_features=given, exclude_seen=False)
        assert dict(found) == pytest.approx(dict(expected))
    twice = {"user": ["u1", "u1"], "group": ["0", "1"]}
    with pytest.raises(ValueError, match=r"left_features.*'u1'"):
        model.evaluate(test, left_features=twice)


def test_what_known_entities_have_is_left_out_when_they_are_described(parts):
    train, validation, test, _ = parts
    users = {"user": [f"u{i}" for i in range(60)], "group": [str(i % 3) for i in range(60)]}
    model = small().fit(train, left_features=FeatureTable(users, categorical=["group"]), validation=validation)
    known = ones(train.matrix, validation.matrix)
    ids, scores = model.recommend(left_features={"user": ["u7", "stranger", None], "group": ["1", "1", "1"]}, k=45)
    seen = set(train.right_ids[known[train.left_rows("u7")[0]].indices])
    assert not seen & set(ids[0][np.isfinite(scores[0])])
    assert seen <= set(ids[1])
    assert (ids[2] == ids[1]).all()
    rows = {name: [users[name][int(key[1:])] for key in test.left_ids] for name in users}
    expected = evaluate_embeddings(
        model.embed(left_features=rows), model.embed(side="right"), test.matrix, train=known, metrics=METRICS,
        popularity=train.matrix,
    )  # fmt: skip
    assert dict(model.evaluate(test, METRICS, left_features=users)) == pytest.approx(dict(expected))


def test_only_some_left_entities_may_be_described(parts):
    train, validation, test, _ = parts
    users = {"user": [f"u{i}" for i in range(60)], "group": [str(i % 3) for i in range(60)]}
    model = small().fit(train, left_features=FeatureTable(users, categorical=["group"]), validation=validation)
    rows = [("u1", i) for i in test.right_ids[test.matrix[test.left_rows("u1")[0]].indices]]
    rows += [("new", "i3"), ("stranger", "i1")]
    pairs = gt.Interactions.from_arrays(*zip(*rows, strict=True))
    with pytest.warns(LeftOutWarning):
        found = model.evaluate(pairs, ("auc",), left_features={"user": ["new"], "group": ["0"]})
    assert found.left_out == {"unknown_left": 1, "unknown_right": 0, "seen": 0}
    mine = model.evaluate(pairs.subset(pairs.matrix.tocoo().row == 0), ("auc",))
    theirs = model.evaluate(
        gt.Interactions.from_arrays(["new"], ["i3"]), ("auc",), left_features={"user": ["new"], "group": ["0"]}
    )
    assert found["auc"] == pytest.approx((mine["auc"] + theirs["auc"]) / 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, p: m.recommend("u1", exclude=sp.eye(60, 45)), r"exclude.*ids"),
        (lambda m, p: m.recommend("u1", exclude={"user": ["u1"]}), r"exclude.*table.*1"),
        (lambda m, p: m.recommend("u1", exclude=3), r"exclude.*int"),
        (lambda m, p: m.evaluate(p, exclude=np.ones((2, 2))), r"exclude.*ndarray"),
        (lambda m, p: small().fit(p, left_features=p), r"left_features.*Interactions"),
        (lambda m, p: small().fit(p, right_features=gt.Problem(p.matrix)), r"right_features.*Problem"),
        (
            lambda m, p: small(metric="gini@5").fit(p, validation=p),
            r"metric.*'gini@5'",
        ),
        (lambda m, p: small().tune(p, metric="gini@5"), r"metric.*'gini@5'"),
        (lambda m, p: small().tune(p, metric=("auc", "mrr")), "metric"),
    ],
)
def test_what_cannot_be_joined_or_maximised_is_refused_by_name(parts, call, message):
    with pytest.raises(ValueError, match=message):
        call(parts[3], parts[2])

"""What towers see, part by part: side by side in training, for new entities, after saving, and on grown data."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower.data.splits import held_out_users
from gramtower.data.tables import FeatureTable
from gramtower.distributed.group import SINGLE
from gramtower.distributed.shards import Rows
from gramtower.model.feature_spec import FeatureSpec, training_inputs, training_parts
from gramtower.model.side import Side, described, new_features

pytest.importorskip("polars", reason="feature tables need polars")

SIZE = 24


def pairs(size=SIZE, users=None):
    """Even users like even items and odd ones odd items, each except its own number."""
    rows, columns = np.nonzero((np.add.outer(np.arange(size), np.arange(size)) % 2 == 0) & ~np.eye(size, dtype=bool))
    kept = rows < (size if users is None else users)
    return gt.Interactions.from_arrays([f"u{i}" for i in rows[kept]], [f"i{j}" for j in columns[kept]])


def frame(numbers, name="user"):
    return {
        name: [f"{name[0]}{i}" for i in numbers],
        "group": ["odd" if i % 2 else "even" for i in numbers],
        "size": [float(i) for i in numbers],
    }


def table(numbers=range(SIZE), name="user"):
    return FeatureTable(frame(numbers, name), id=name, categorical=["group"], numeric=["size"])


def unscaled(side, given, ids, matrix):
    """Inputs and features as they came."""
    parts = training_parts(side, given, ids, matrix)
    return training_inputs(side, parts, Rows((0, matrix.shape[0])), SINGLE, scale=False)


def small(**options):
    return gt.TwoTower(**{"dim": 8, "hidden": (16,), "max_iterations": 20, "device": "cpu", "select": False, **options})


def test_parts_stand_side_by_side_in_the_order_given():
    observed = pairs()
    dense = np.arange(2.0 * SIZE).reshape(SIZE, 2)
    inputs, features = unscaled("left", ["id", "history", table(), dense], observed.left_ids, observed.matrix)
    assert inputs.kind == "id + history + table + dense"
    expected = [
        np.eye(SIZE),
        observed.matrix.toarray() / np.sqrt(observed.matrix.sum(1)),
        table().encode(observed.left_ids).toarray(),
        dense,
    ]
    assert [part.width for part in inputs.parts] == [part.shape[1] for part in expected]
    np.testing.assert_allclose(features.toarray(), np.hstack(expected), rtol=1e-6)


def new_of(inputs, side, features, history):
    this = Side(side, None, torch.empty(0, 1), inputs)
    return new_features(this, None if features is None else described(this, features), history)


def test_one_part_is_handed_over_as_it_is():
    observed = pairs()
    assert unscaled("left", None, observed.left_ids, observed.matrix)[1] is None
    assert unscaled("left", ["id"], observed.left_ids, observed.matrix)[1] is None
    dense = np.ones((SIZE, 3))
    assert unscaled("right", dense, observed.right_ids, observed.matrix.T)[1] is dense


def test_what_is_not_known_of_a_new_entity_is_empty_or_missing():
    observed = pairs()
    inputs, features = unscaled("left", ["id", "history", table()], observed.left_ids, observed.matrix)
    history = sp.csr_matrix(observed.matrix[3])
    row = new_of(inputs, "left", frame([3]), history).toarray()[0]
    assert not row[:SIZE].any()  # no id
    np.testing.assert_allclose(row[SIZE:], features.toarray()[3, SIZE:], rtol=1e-6)
    alone = new_of(inputs, "left", None, history).toarray()[0]
    np.testing.assert_allclose(alone[SIZE : 2 * SIZE], row[SIZE : 2 * SIZE])
    np.testing.assert_array_equal(alone[2 * SIZE :], table().encode(["nobody"]).toarray()[0])
    assert not new_of(inputs, "left", frame([3]), None).toarray()[0, : 2 * SIZE].any()


@pytest.mark.parametrize("parts", [["table"], ["id", "table"], ["id", "history", "table"], ["history", "table"]])
def test_new_users_get_the_items_of_their_group_before_and_after_saving(parts, tmp_path):
    observed = pairs(users=20)
    fitted = small().fit(observed, left_features=[table() if part == "table" else part for part in parts])
    fitted.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    new = frame([21, 22])
    options = (
        {"histories": [[f"i{j}" for j in range(1, 15, 2)], [f"i{j}" for j in range(0, 12, 2)]]}
        if "history" in parts
        else {}
    )
    ids, scores = fitted.recommend(left_features=new, k=2, **options)
    assert all(int(item[1:]) % 2 == 1 for item in ids[0])
    assert all(int(item[1:]) % 2 == 0 for item in ids[1])
    if options:
        assert not set(options["histories"][0]) & set(ids[0])  # seen by this user
    again, same = loaded.recommend(left_features=new, k=2, **options)
    assert (again == ids).all()
    assert np.array_equal(same, scores)
    for given in (new, table([21, 22])):  # a table stands for the frame it was made from
        assert np.array_equal(loaded.embed(left_features=given), fitted.embed(left_features=new))
    assert loaded.left_.inputs.kind == " + ".join(parts)
    assert loaded.left_.inputs.to_plain() == fitted.left_.inputs.to_plain()


def test_new_rows_are_encoded_as_in_training_and_not_by_their_own_mean():
    fitted = small(max_iterations=2, refine=False).fit(pairs(), table(), table(name="item"))
    known = fitted.embed(["u3"])
    np.testing.assert_allclose(fitted.embed(left_features=frame([3])), known, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fitted.embed(left_features=table([3])), known, rtol=1e-5, atol=1e-6)
    right = fitted.embed(["i4"], side="right")
    np.testing.assert_allclose(fitted.embed(right_features=frame([4], "item")), right, rtol=1e-5, atol=1e-6)


def test_files_are_features_too(tmp_path):
    lines = ["user,group,size"] + [f"u{i},{'odd' if i % 2 else 'even'},{i}" for i in range(SIZE)]
    (tmp_path / "users.csv").write_text("\n".join(lines) + "\n")
    fitted = small(max_iterations=2).fit(pairs(), left_features=FeatureTable.inferred(tmp_path / "users.csv"))
    other = small(max_iterations=2).fit(pairs(), left_features=table())
    assert [r.value for r in fitted.history_] == pytest.approx([r.value for r in other.history_], rel=1e-5)
    assert np.allclose(fitted.embed(left_features=tmp_path / "users.csv"), fitted.embed(), atol=1e-5)


def test_a_matrix_without_ids_is_joined_by_row_number():
    numbers = FeatureTable({"user": [2, 0, 1], "x": ["c", "a", "b"]}, categorical=["x"])
    fitted = small(max_iterations=1).fit(sp.eye(3, 4, format="csr", dtype=np.float32), left_features=numbers)
    np.testing.assert_allclose(fitted.embed(left_features={"x": ["a", "b", "c"]}), fitted.embed(), rtol=1e-5)
    assert numbers.report["ids_without_features"] == 0


@pytest.mark.parametrize("parts", [["id"], ["id", "history"], ["history", "table"], ["id", "table"]])
def test_a_warm_start_carries_features_over_by_name(parts, monkeypatch):
    monkeypatch.setattr("gramtower.model.fitting.move_expected_ids", lambda *given: None)  # between ids and features
    first, grown = pairs(20), pairs(SIZE)

    def features(size):
        return [table(range(size)[::-1]) if part == "table" else part for part in parts]

    model = small().fit(first, left_features=features(20))
    old = {name: value.clone() for name, value in model.towers_.parameters().items()}
    cold = small(max_iterations=0).fit(grown, left_features=features(SIZE)).history_[0].value
    model.set_params(max_iterations=0).fit(grown, left_features=features(SIZE), warm_start=True)
    assert model.history_[0].value < cold
    kept = dict(model.towers_.parameters().items())
    if "id" in parts:
        row, before = grown.left_rows("u7")[0], first.left_rows("u7")[0]
        assert np.array_equal(kept["left.0.weight"][row], old["left.0.weight"][before])
    if parts[-1] == "table":
        assert np.array_equal(kept["left.0.weight"][-3:], old["left.0.weight"][-3:])  # even, odd, size


def nothing():
    """A table of the left entities in which every list is missing."""
    return FeatureTable({"user": [f"u{i}" for i in range(SIZE)], "x": [None] * SIZE}, id="user", lists=["x"])


def numbers():
    """As many rows as there are left entities, in another order, with their ids among the columns."""
    return pytest.importorskip("polars").DataFrame({"user": range(SIZE)[::-1], "size": range(SIZE)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: small().fit(pairs(), left_features=["id", "id"]), r"left_features.*id . id"),
        (lambda m: small().fit(pairs(), left_features=[]), "at least one part"),
        (lambda m: small().fit(pairs(), left_features=[3]), r"left_features.*int"),
        (lambda m: small().fit(pairs(), left_features=np.ones((3, 2))), r"got ndarray of shape \(3, 2\)"),
        (lambda m: small().fit(pairs(), right_features="history"), r"right_features.*'history'"),
        (lambda m: small().fit(pairs(), right_features="items.csv"), "expected 'id', or a FeatureTable, which takes"),
        (
            lambda m: small().fit(pairs(), left_features=["id", table(name="item")]),
            "none of them with the id of a left",
        ),
        (lambda m: small().fit(pairs(), left_features=nothing()), "a table without a value in x"),
        (lambda m: small().fit(pairs(), left_features=numbers()), r"left_features.*DataFrame"),
        (lambda m: m.embed(["u1"], left_features=frame([1])), r"ids.*(features|histories)"),
        (lambda m: m.embed(histories=[["i1"]], right_features=frame([1])), "got features of both sides, expected"),
        (
            lambda m: m.embed(left_features={"size": [1.0]}),
            r"left_features.*table.*'group'",
        ),
        (lambda m: m.recommend(left_features=frame([1, 2]), histories=[["i1"]]), "2 and 1 rows"),
        (lambda m: m.recommend("u1", left_features=frame([1])), "left:"),
        (lambda m: m.recommend(histories=sp.eye(2, 3)), r"histories.*\(2, 3\)"),
        (lambda m: m.embed(right_features=np.ones((1, 2))), "this one knows right ids only"),
        (
            lambda m: m.fit(pairs(), left_features="history", warm_start=True),
            r"left_features.*'history'.*'history . table'",
        ),
    ],
)
def test_bad_features_are_refused(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


@pytest.fixture(scope="module")
def model():
    return small(max_iterations=1).fit(pairs(), left_features=["history", table()])


def test_inputs_survive_json():
    observed = pairs()
    inputs, _ = unscaled("left", ["id", "history", table()], observed.left_ids, observed.matrix)
    again = FeatureSpec.from_plain(inputs.to_plain())
    new = frame([5, 40]) | {"group": ["odd", "unheard of"]}
    assert (new_of(again, "left", new, None) != new_of(inputs, "left", new, None)).nnz == 0
    assert again.to_plain() == inputs.to_plain()


def test_held_out_users_are_evaluated_by_their_histories_and_features():
    observed = pairs()
    split = held_out_users(observed, 0.25, history=0.5, seed=0)
    model = small().fit(split.train, left_features=["history", table()])
    held = observed.left_ids[split.held_out_users]
    rows = frame([int(name[1:]) for name in held])
    found = model.evaluate(split.test, ("recall@20", "hit@1"), histories=split.history, left_features=rows)
    assert held.tolist() == split.test.left_ids.tolist()
    assert not set(held) & set(model.left_.ids)  # no rows of the model, learned as going with nothing
    shown = [
        split.history.right_ids[split.history.matrix[row].indices].tolist() for row in split.history.left_rows(held)
    ]
    ids, _ = model.recommend(histories=shown, left_features=rows, k=20)
    recalls = []
    for row, answer in enumerate(ids):
        liked = set(split.test.right_ids[split.test.matrix[row].indices])
        recalls.append(len(liked & set(answer)) / len(liked))
    assert found["recall@20"] == pytest.approx(np.mean(recalls))
    with pytest.raises(ValueError, match="known"):  # nothing is known of them otherwise
        model.evaluate(split.test, ("recall@20",))
    seen = model.evaluate(split.test, ("hit@1",), histories=split.history, exclude_seen=False)
    assert seen["hit@1"] <= found["hit@1"]
    with pytest.raises(ValueError, match=r"by:.*'activity'"):
        model.evaluate(split.test, histories=split.history, by="activity")


def test_ids_beside_features_may_have_a_smaller_entry_and_so_a_larger_penalty(tmp_path):
    given = ["id*0.25", table(name="item")]
    inputs, rows = unscaled("right", given, np.array([f"i{j}" for j in range(SIZE)], dtype=object), pairs().matrix.T)
    assert np.array_equal(rows.toarray()[:, :SIZE], 0.25 * np.eye(SIZE))
    again = FeatureSpec.from_plain(inputs.to_plain())
    assert (again.parts[0].factor, again.parts[0].name, again.parts[0].width) == (0.25, "id*0.25", SIZE)
    new = new_of(again, "right", frame([3], "item"), None)
    assert new[:, :SIZE].nnz == 0
    model = small(max_iterations=3).fit(pairs(), right_features=given)
    assert "id*0.25 + table" in str(model.fitted_)
    model.save(tmp_path / "m.gramtower")
    loaded = gt.load(tmp_path / "m.gramtower")
    assert np.array_equal(
        loaded.embed(right_features=frame([3], "item")), model.embed(right_features=frame([3], "item"))
    )
    with pytest.raises(ValueError, match=r"right_features.*'id \+ table'.*'id\*0.25 \+ table'"):
        loaded.fit(pairs(), right_features=["id", table(name="item")], warm_start=True)
    ids = small(max_iterations=3).fit(pairs(), left_features=["id*0.5", "history"])
    ids.update(gt.Interactions.from_arrays(["u1"], ["i2"]))
    assert ids.left_.inputs.parts[0].factor == 0.5


@pytest.mark.parametrize("given", ["id*0", "id*x", "id*-1", "id*nan", "id*inf", "id*", "history*0.5", "id*0.5"])
def test_entries_of_ids_that_cannot_be_are_refused(given):
    wanted = [given, table(name="item")] if given != "id*0.5" else given  # which is nothing alone
    with pytest.raises(ValueError, match="right_features"):
        small().fit(pairs(), right_features=wanted)


def test_embeddings_lean_less_on_ids_whose_entry_is_smaller():
    rng = np.random.default_rng(0)
    items = {"item": [f"i{j}" for j in range(80)], "kind": [f"k{x}" for x in rng.integers(4, size=80)]}
    rows, columns = np.nonzero(
        rng.random((100, 80)) < 0.1 + 0.2 * (rng.normal(size=(100, 3)) @ rng.normal(size=(3, 80)) > 1)
    )
    observed = gt.Interactions.from_arrays([f"u{i}" for i in rows], [f"i{j}" for j in columns])
    kinds, apart = FeatureTable(items, id="item", categorical=["kind"]), []
    for name in ("id", "id*0.3", "id*0.1"):
        model = small(hidden=(), l2=1.0, select=False).fit(observed, right_features=[name, kinds])
        ids = model.right_.ids.tolist()
        alone = dict(zip(*items.values(), strict=True))
        new = model.embed(right_features={"kind": [alone[key] for key in ids]})
        known = model.embed(side="right")
        apart.append(np.linalg.norm(known - new) / np.linalg.norm(known))
    assert apart[0] > apart[1] > apart[2] > 0.01

"""More pairs for a fitted model: what it knew stays, what is new is added, an increment is not taken for the whole."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.cli.program import run
from gramtower.cli.reading import open_model
from gramtower.data.datasets import planted_pairs
from gramtower.data.interactions import Interactions, union
from gramtower.data.tables import FeatureTable
from gramtower.training.checkpoint import locked

OPTIONS = dict(dim=8, hidden=(), max_iterations=12, device="cpu", omega=0.05, select=False)


def whole(kind=str):
    matrix = planted_pairs(80, 60, 1500, groups=4, seed=3)
    ids = ([f"u{i}" for i in range(80)], [f"i{j}" for j in range(60)]) if kind is str else (range(80), range(100, 160))
    return Interactions.from_matrix(matrix, *ids)


def cut(pairs, share=0.8):
    """Old pairs of the first entities, and the others, which bring new entities with them."""
    coo = pairs.matrix.tocoo()
    drawn = np.random.default_rng(0).random(len(pairs))
    old = (coo.row < 70) & (coo.col < 55) & (drawn < share)
    return pairs.subset(old).without_empty(), pairs.subset(~old).without_empty()


def as_set(pairs):
    coo = pairs.matrix.tocoo()
    ids = pairs.left_ids.tolist(), pairs.right_ids.tolist()
    return {(ids[0][i], ids[1][j]) for i, j in zip(coo.row, coo.col, strict=True)}


def known(model):
    return as_set(Interactions(model.seen_, model.left_.ids, model.right_.ids))


@pytest.mark.parametrize("kind", [str, int])
def test_an_update_keeps_what_was_known_and_adds_what_is_new(kind):
    pairs = whole(kind)
    old, more = cut(pairs)
    model = gt.TwoTower(**OPTIONS).fit(old)
    cold = gt.TwoTower(**OPTIONS | dict(max_iterations=3)).fit(union(old, more))
    model.update(more, iterations=3)
    assert known(model) == as_set(pairs)
    assert model.left_.ids[: old.shape[0]].tolist() == old.left_ids.tolist()
    assert model.right_.ids[: old.shape[1]].tolist() == old.right_ids.tolist()
    assert model.left_.ids.dtype == old.left_ids.dtype
    assert model.history_[-1].iteration == 3
    assert model.history_[-1].value < cold.history_[-1].value  # the same objective, from weights that were learned
    assert model.history_[0].value < 0.7 * cold.history_[0].value
    ids, scores = model.recommend(pairs.left_ids, k=60)
    seen = known(model)
    for user, names, numbers in zip(pairs.left_ids, ids, scores, strict=True):
        assert not any((user, name) in seen for name in names[np.isfinite(numbers)])
    assert model.max_iterations == 12


def test_entities_of_before_keep_their_weights_and_new_ones_start_near_the_average():
    old, more = cut(whole())
    model = gt.TwoTower(**OPTIONS).fit(old)
    before = model.embed(old.left_ids)
    model.update(more, iterations=0)
    assert np.allclose(model.embed(old.left_ids), before, atol=1e-6)
    new = [name for name in model.left_.ids if name not in set(old.left_ids)]
    assert np.abs(model.embed(new) - before.mean(0)).max() < np.abs(before - before.mean(0)).max()


def test_a_warm_start_on_an_increment_is_refused_and_points_to_update():
    old, more = cut(whole())
    model = gt.TwoTower(**OPTIONS).fit(old)
    fitted = model.fitted_
    increment = more.subset(np.arange(len(more)) < 40).without_empty()
    with pytest.raises(ValueError, match=r"^pairs.*\d+.*70 left.*update"):
        model.fit(increment, warm_start=True)
    assert model.fitted_ is fitted
    matrix = sp.csr_matrix(([1.0], ([0], [0])), shape=(80, 60))
    numbers = gt.TwoTower(**OPTIONS).fit(whole().matrix)
    with pytest.raises(ValueError, match=r"^pairs.*1.*80"):
        numbers.fit(matrix, warm_start=True)
    model.fit(union(old, more), warm_start=True)
    assert known(model) == as_set(whole())


def test_a_model_of_a_matrix_grows_by_numbers():
    pairs = whole().matrix
    model = gt.TwoTower(**OPTIONS).fit(pairs[:70, :55])
    model.update(pairs)
    assert model.left_.ids is None
    assert (model.seen_ != pairs).nnz == 0
    with pytest.raises(ValueError, match=r"more_pairs.*Interactions"):
        model.update(whole())


def test_histories_and_loaded_models_are_updated_too(tmp_path):
    old, more = cut(whole())
    model = gt.TwoTower(**OPTIONS).fit(old, left_features=["id", "history"])
    model.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    for one in (model, loaded):
        one.update(more, iterations=2)
        assert one.left_.inputs.kind == "id + history"
    assert np.array_equal(model.embed(), loaded.embed())
    assert known(loaded) == as_set(whole())


def table(ids):
    return FeatureTable({"user": list(ids), "age": [float(len(x) + ord(x[-1])) for x in ids]}, "user", numeric=["age"])


def test_features_of_all_entities_are_needed_again():
    old, more = cut(whole())
    model = gt.TwoTower(**OPTIONS).fit(old, left_features=["id", table(old.left_ids)])
    with pytest.raises(ValueError, match=r"left_features.*id \+ table"):
        model.update(more)
    new = sorted(set(more.left_ids) - set(old.left_ids))
    with pytest.raises(ValueError, match=r"left_features.*0.*70"):
        model.update(more, left_features=["id", table(new)])
    model.update(more, left_features=["id", table(whole().left_ids)])
    assert known(model) == as_set(whole())


@pytest.mark.parametrize("kind", ["labels", "weights"])
def test_models_of_labels_or_weights_are_refused(kind, tmp_path):
    old, more = cut(whole())
    values = np.linspace(0.5, 2, len(old), dtype=np.float32)
    if kind == "labels":
        matrix = sp.csr_matrix((values, old.matrix.indices, old.matrix.indptr), shape=old.shape)
        given = Interactions(matrix, old.left_ids, old.right_ids)
    else:
        given = Interactions(old.matrix, old.left_ids, old.right_ids, weights=values)
    model = gt.TwoTower(**OPTIONS | dict(max_iterations=1, loss="squared")).fit(given)
    model.save(tmp_path / "m")
    for one in (model, gt.load(tmp_path / "m")):
        with pytest.raises(ValueError, match=r"model.*labels.*weights"):
            one.update(more)


def test_a_union_takes_repeated_pairs_from_the_second_with_its_weight_and_time():
    first = Interactions.from_arrays(["a", "b"], [1, 2], value=[1.0, 2.0], labels=True, time=[5.0, 6.0])
    second = Interactions.from_arrays(
        ["b", "c"], ["2", "3"], value=[4.0, 5.0], labels=True, weight=[0.5, 3.0], time=[7, 8]
    )
    both = union(first, second)
    assert both.left_ids.tolist() == ["a", "b", "c"]
    assert both.right_ids.tolist() == [1, 2, 3]
    assert both.matrix.toarray().tolist() == [[1, 0, 0], [0, 4, 0], [0, 0, 5]]
    assert both.weights.tolist() == [1, 0.5, 3]
    assert both.times.tolist() == [5, 7, 8]
    assert both.matrix.has_canonical_format
    assert as_set(union(first, second, add_new=False)) == {("a", 1), ("b", 2)}
    with pytest.raises(ValueError, match=r"more.*right ids.*'x'"):
        union(first, Interactions.from_arrays(["a"], ["x"]))
    nothing = first.subset([])
    assert as_set(union(nothing, first)) == as_set(first)
    assert as_set(union(first, nothing)) == as_set(first)


def test_the_shell_updates_a_run(tmp_path, capsys):
    old, more = cut(whole())
    for name, part in (("old", old), ("more", more)):
        lines = "".join(f"{user},{item}\n" for user, item in sorted(as_set(part)))
        (tmp_path / f"{name}.csv").write_text("user,item\n" + lines)
    given = ["--left", "user", "--right", "item", "--dim", "8", "--hidden", "none", "--max-iterations", "12"]
    out = tmp_path / "run"
    assert run(["fit", str(tmp_path / "old.csv"), *given, "--device", "cpu", "--out", str(out), "--quiet"]) == 0
    expected = gt.load(out / "model.gramtower").update(
        Interactions.from_csv(tmp_path / "more.csv", "user", "item"), iterations=2
    )
    capsys.readouterr()
    command = ["update", str(out), str(tmp_path / "more.csv"), "--iterations", "2", "--quiet", "--json"]
    assert run([*command, "--out", str(tmp_path / "next")]) == 0
    assert len(gt.load(out / "model.gramtower").left_) == 70
    capsys.readouterr()
    assert run(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["new_left"], facts["new_right"], facts["added_pairs"]) == (10, 5, len(more))
    for there in (out, tmp_path / "next"):
        loaded = gt.load(there / "model.gramtower")
        assert known(loaded) == as_set(whole())
        assert np.array_equal(loaded.embed(), expected.embed())
        assert loaded.max_iterations == 12
    records = gt.read_history(out / "history.jsonl")
    assert [record.iteration for record in records] == [0, 1, 2]  # of the model that is there, as the summary is
    assert run(["report", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"
    assert run(["update", str(out), str(tmp_path / "none.csv")]) == 2
    assert "MORE: no such file or folder" in capsys.readouterr().err
    with locked(out):  # of another update, whose pairs this one would not know
        assert run(command) == 2
    assert "is being written by another run" in capsys.readouterr().err


def test_an_update_reads_the_model_when_no_other_can_write_it(tmp_path, monkeypatch, capsys):
    old, more = cut(whole())
    gt.TwoTower(**OPTIONS).fit(old).save(tmp_path / "model.gramtower")
    (tmp_path / "more.csv").write_text("user,item\n" + "".join(f"{u},{i}\n" for u, i in sorted(as_set(more))))

    def reading(path):
        with pytest.raises(ValueError, match="another run"), locked(path, name="out"):
            pass
        return open_model(path)

    monkeypatch.setattr("gramtower.cli.reading.open_model", reading)
    flags = ["--left", "user", "--right", "item", "--quiet"]
    assert run(["update", str(tmp_path), str(tmp_path / "more.csv"), *flags]) == 0
    assert known(gt.load(tmp_path / "model.gramtower")) == as_set(whole())


def item_table(count):
    columns = {"item": [f"i{j}" for j in range(count)], "kind": [str(j % 4) for j in range(count)]}
    return FeatureTable(columns, "item", categorical=["kind"])


@pytest.mark.parametrize("tables", [1, 2])
def test_an_update_keeps_what_was_added_and_no_other_row_of_the_table(tables, tmp_path):
    pairs = whole()
    features = ["id", *[item_table(100)] * tables]
    model = gt.TwoTower(**OPTIONS).fit(pairs, right_features=features)
    rows = {"item": ["i80", "i81"], "kind": ["0", "1"]}
    model.add(right_features=rows if tables == 1 else [rows] * tables)
    more = Interactions.from_arrays(["u1", "u2", "u3"], ["i70", "i80", "i2"])
    model.save(tmp_path / "m")
    for one in (model, gt.load(tmp_path / "m")):
        one.update(more, right_features=features, iterations=1)
        assert set(one.right_.ids) == {*pairs.right_ids, "i70", "i80", "i81"}
        assert (one.right_.ids[-1], one.right_.added) == ("i81", 1)  # i80 has a pair now
        again = one.embed(right_features=rows if tables == 1 else [rows] * tables)[1]
        assert np.allclose(one.embed(["i81"], side="right")[0], again, atol=1e-6)
        one.update(more, right_features=["id", *[item_table(60)] * tables], iterations=0)
        assert one.right_.ids[-1] == "i81"  # as an entity of which nothing is known but that it is there
    wide = gt.TwoTower(**OPTIONS).fit(pairs, right_features=features, candidates="all")
    wide.update(more, right_features=["id", *[item_table(120)] * tables], iterations=0)
    assert set(wide.right_.ids) == {f"i{j}" for j in range(100)}


STORED = OPTIONS | dict(max_iterations=3, store_features=True)


def rich_rows(ids, kinds=4):
    """Rows with numbers, categories, lists and text; some cells are missing."""
    number = [int(key[1:]) for key in ids]
    return pl.DataFrame({
        "item": list(ids),
        "price": [None if n % 11 == 10 else float(n % 7) for n in number],
        "kind": [f"k{n % kinds}" for n in number],
        "tags": ["|".join({f"t{n % 3}", f"t{n % 5}"}) for n in number],
        "title": [f"word{n % 6} word{n % 4}" for n in number],
    })  # fmt: skip


def rich_table(rows):
    return FeatureTable(rows, "item", ["price"], ["kind"], ["tags"], ["title"], hash_bits=6)


def same(first, second):
    return all(np.array_equal(first.embed(side=side), second.embed(side=side)) for side in ("left", "right"))


@pytest.mark.parametrize("form", ["table", "id + table", "two tables"])
def test_stored_rows_stand_for_those_of_unchanged_entities(form, tmp_path):
    old, more = cut(whole())
    everyone, new = whole().right_ids.tolist(), sorted(set(more.right_ids) - set(old.right_ids))
    table = rich_table(rich_rows(everyone))
    features = {"table": [table], "id + table": ["id", table], "two tables": ["id", table, table]}[form]
    few = rich_rows(new) if form != "two tables" else [rich_rows(new)] * 2
    stored = gt.TwoTower(**STORED).fit(old, right_features=features)
    plain = gt.TwoTower(**STORED | dict(store_features=False)).fit(old, right_features=features)
    stored.save(tmp_path / "m")
    for model, given in ((stored, few), (gt.load(tmp_path / "m"), few), (gt.load(tmp_path / "m"), features)):
        model.update(more, right_features=given)
        assert known(model) == as_set(whole())
        assert model.store_features
    plain.update(more, right_features=features)
    assert same(stored, plain)
    assert same(stored, model)
    again = Interactions.from_arrays(["u1", "u2"], ["i3", "i57"])  # rows of the update are stored in their turn
    assert same(stored.update(again), plain.update(again, right_features=features))


def test_new_values_and_changed_rows_count_as_if_all_rows_were_given(tmp_path):
    old, more = cut(whole())
    rows = rich_rows(old.right_ids, 3)  # without missing categories
    first = gt.TwoTower(**STORED).fit(old, right_features=["id", rich_table(rows)])
    first.save(tmp_path / "m")
    fresh = [*sorted(set(more.right_ids) - set(old.right_ids)), "i3"]  # the last one is known, and has changed
    few = rich_rows(fresh, 40).with_columns(pl.when(pl.col("item") != "i56").then("kind").alias("kind"))
    every = pl.concat([rows.filter(~pl.col("item").is_in(fresh)), few])
    second, third = gt.load(tmp_path / "m"), gt.load(tmp_path / "m")
    for model, given in ((first, few), (second, every), (third, few.filter(pl.col("item") != "i3"))):
        model.update(more, right_features=given)
        names = model.right_.inputs.parts[1].table.feature_names
        assert {"kind=k18", "kind (missing)"} <= set(names)
    assert same(first, second)
    assert not same(first, third)


@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_stored_rows_of_a_matrix_go_on_with_those_of_new_entities(kind, tmp_path):
    pairs, rows = whole().matrix, np.random.default_rng(1).random((60, 5))
    options = OPTIONS | dict(max_iterations=3)
    plain = gt.TwoTower(**options).fit(pairs[:, :55], right_features=["id", kind(rows[:55])])
    plain.update(pairs, right_features=["id", kind(rows)])
    gt.TwoTower(**STORED).fit(pairs[:, :55], right_features=["id", kind(rows[:55])]).save(tmp_path / "m")
    for given in (kind(rows[55:]), kind(rows), ["id", kind(rows)]):
        assert same(gt.load(tmp_path / "m").update(pairs, right_features=given), plain)
    with pytest.raises(ValueError, match=r"right_features.*7 rows.*5"):
        gt.load(tmp_path / "m").update(pairs, right_features=kind(rows[:7]))


def test_rows_that_are_neither_stored_nor_given_are_an_error(tmp_path):
    old, more = cut(whole())
    model = gt.TwoTower(**STORED).fit(old, right_features=["id", rich_table(rich_rows(old.right_ids))])
    fitted = model.fitted_
    with pytest.raises(ValueError, match=r"right_features.*5 new"):
        model.update(more)
    with pytest.raises(ValueError, match=r"right_features.*history"):
        model.update(more, right_features=["history", rich_rows(more.right_ids)])
    with pytest.raises(ValueError, match=r"right_features.*ids"):
        model.update(more, right_features=rich_rows(more.right_ids).drop("item"))
    with pytest.raises(ValueError, match=r"store_features"):
        gt.TwoTower(**STORED | dict(store_features="yes")).fit(old)
    assert model.fitted_ is fitted
    plain = gt.TwoTower(**OPTIONS).fit(old, right_features=["id", rich_table(rich_rows(old.right_ids))])
    with pytest.raises(ValueError, match=r"right_features.*store_features"):
        plain.update(more)


def test_rows_of_added_entities_are_stored_too(tmp_path):
    pairs = whole()
    model = gt.TwoTower(**STORED).fit(pairs, right_features=["id", rich_table(rich_rows(pairs.right_ids))])
    model.add(right_features=rich_rows(["i80", "i81"]))
    model.save(tmp_path / "m")
    more = Interactions.from_arrays(["u2"], ["i80"])
    for one in (model, gt.load(tmp_path / "m")):
        one.update(more, iterations=1)
        assert (one.right_.ids[-1], one.right_.added) == ("i81", 1)
        expected = one.embed(right_features=rich_rows(["i81"]))
        assert np.allclose(one.embed(["i81"], side="right"), expected, atol=1e-6)
        one.update(Interactions.from_arrays(["u3"], ["i81"]), iterations=0)
        assert one.right_.added == 0


def test_files_with_stored_rows_that_do_not_fit_are_refused(tmp_path):
    pairs = whole()
    model = gt.TwoTower(**STORED).fit(pairs, right_features=[rich_table(rich_rows(pairs.right_ids))])
    part = model.right_.inputs.parts[0]
    rows = part.stored
    part.__dict__["stored"] = type(rows)(rows.entities[::-1].copy(), rows.rows)
    model.save(tmp_path / "m")
    with pytest.raises(ValueError, match=r"damaged.*entities"):
        gt.load(tmp_path / "m")


def test_the_shell_updates_with_the_rows_of_new_entities(tmp_path, capsys):
    old, more = cut(whole())
    for name, part in (("old", old), ("more", more)):
        lines = "".join(f"{user},{item}\n" for user, item in sorted(as_set(part)))
        (tmp_path / f"{name}.csv").write_text("user,item\n" + lines)
    new = sorted(set(more.right_ids) - set(old.right_ids))
    for name, ids in (("items", whole().right_ids), ("new", new)):
        rich_rows(ids).write_csv(tmp_path / f"{name}.csv")
    flags = ["--left", "user", "--right", "item", "--dim", "8", "--hidden", "none", "--max-iterations", "3"]
    flags += ["--device", "cpu", "--select", "off", "--right-features", str(tmp_path / "items.csv"), "--right-identity"]
    for out, further in (("stored", ["--store-features"]), ("plain", [])):
        assert run(["fit", str(tmp_path / "old.csv"), *flags, *further, "--out", str(tmp_path / out), "--quiet"]) == 0
    assert run(["update", str(tmp_path / "plain"), str(tmp_path / "more.csv"), "--quiet"]) == 0
    (tmp_path / "items.csv").unlink()
    command = ["update", str(tmp_path / "stored"), str(tmp_path / "more.csv"), "--quiet"]
    assert run(command) == 2
    assert "right_features" in capsys.readouterr().err
    assert run([*command, "--right-features", str(tmp_path / "new.csv")]) == 0
    stored, plain = (gt.load(tmp_path / name / "model.gramtower") for name in ("stored", "plain"))
    assert same(stored, plain)
    assert "items.csv" in (tmp_path / "stored" / "config.toml").read_text()
    assert run(command) == 0  # the same pairs again, of known entities

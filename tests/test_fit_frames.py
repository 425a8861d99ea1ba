"""Frames in: `fit(frame, left="user", right="item")`; and lists as frames."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import gramtower as gt
from gramtower.data.interactions import Interactions
from gramtower.data.list_files import lists_frame
from gramtower.data.tables import FeatureTable

pl = pytest.importorskip("polars")
rng = np.random.default_rng(0)
COLUMNS = {
    "user": rng.integers(1000, 1030, size=500), "item": [f"i{x}" for x in rng.integers(25, size=500)],
    "stars": rng.integers(1, 6, size=500).astype(float), "when": rng.permutation(500).astype(float),
}  # fmt: skip
NAMES = dict(left="user", right="item")


def small(**options):
    return gt.TwoTower(**dict(dim=3, hidden=(), max_iterations=3, device="cpu", select=False, omega=0.1) | options)


def frame(kind):
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(COLUMNS)
    if kind == "pyarrow":
        return pytest.importorskip("pyarrow").table(COLUMNS)
    made = pl.DataFrame(COLUMNS)
    return {"polars": made, "lazy": made.lazy(), "mapping": COLUMNS}[kind]


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "pyarrow", "mapping"])
def test_a_frame_is_fitted_as_the_pairs_in_it(kind):
    model = small().fit(frame(kind), **NAMES, value="stars", threshold=4, time="when")
    expected = small().fit(Interactions.from_frame(frame("polars"), **NAMES, value="stars", threshold=4, time="when"))
    assert np.array_equal(model.embed(), expected.embed())
    assert model.left_.ids.dtype == np.int64
    assert isinstance(model.right_.ids[0], str)
    assert model.recommend([int(model.left_.ids[0])], k=2)[0].shape == (1, 2)


def test_values_without_a_threshold_are_labels_and_validation_has_the_same_columns():
    made = frame("polars")
    model = small(loss="squared").fit(made, **NAMES, value="stars")
    pairs = Interactions.from_frame(made, **NAMES, value="stars", labels=True)
    assert np.array_equal(model.embed(), small(loss="squared").fit(pairs).embed())
    halves = made[:400], made[400:]
    found = small().fit(halves[0], **NAMES, validation=halves[1], refit=True)
    parts = [Interactions.from_frame(half, **NAMES) for half in halves]
    expected = small().fit(parts[0], validation=parts[1], refit=True)
    assert found.best_metric_ == expected.best_metric_ is not None
    assert np.array_equal(found.embed(), expected.embed())
    assert found.update(halves[1], **NAMES).history_[-1].iteration == 2


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ("polars", {}, r"pairs.*left.*right"),
        ("pandas", dict(left="user"), r"pairs.*left.*right"),
        (
            "polars",
            dict(left="user", right="film"),
            r"right.*'film'",
        ),
        (
            "pairs",
            NAMES,
            r"pairs.*Interactions.*'user'.*'item'",
        ),
        ("polars", NAMES | dict(threshold=3), "threshold"),
    ],
)
def test_columns_without_a_frame_and_frames_without_columns_are_refused(given, arguments, message):
    pairs = Interactions.from_frame(frame("polars"), **NAMES) if given == "pairs" else frame(given)
    with pytest.raises(ValueError, match=message):
        small().fit(pairs, **arguments)


@pytest.mark.parametrize("package", ["polars", "pandas"])
def test_lists_become_a_table_without_empty_places(package, monkeypatch):
    pytest.importorskip(package)
    if package == "pandas":
        monkeypatch.setitem(sys.modules, "polars", None)
    scores = np.array([[0.9, 0.5], [0.7, -np.inf]], dtype=np.float32)
    table = lists_frame([7, 8], np.array([["a", "b"], ["c", None]], dtype=object), scores, ("user", "item"))
    assert type(table).__module__.split(".")[0] == package
    assert list(table.columns) == ["user", "rank", "item", "score"]
    assert [list(table[name]) for name in ("user", "rank", "item")] == [[7, 7, 8], [1, 2, 1], ["a", "b", "c"]]
    assert list(table["score"]) == pytest.approx([0.9, 0.5, 0.7])


def test_lists_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"asked, ids, scores.*1.*\(2, 1\)"):
        lists_frame([1], np.zeros((2, 1)), np.zeros((2, 1)))
    for package in ("polars", "pandas"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "gramtower\[io\]"'):
        lists_frame([1], np.zeros((1, 1)), np.zeros((1, 1)))


def titled(**more):
    return {"id": [f"i{x}" for x in range(20)], "title": [f"Film {x}" for x in range(20)], **more}


def test_recommendations_as_a_frame_say_what_the_arrays_say():
    model = small().fit(frame("polars"), **NAMES)
    asked = model.left_.ids[:3].tolist()
    ids, scores = model.recommend(asked, k=4)
    table = model.recommend(asked, k=4, as_frame=True, table=titled(year=list(range(1990, 2010))))
    assert table.columns == ["user", "rank", "item", "score", "title", "year"]
    assert table["user"].to_list() == [key for key in asked for _ in range(4)]
    assert table["user"].dtype == pl.Int64  # as they came in
    assert table["item"].to_list() == ids.ravel().tolist()
    assert table["score"].to_list() == scores.ravel().tolist()
    expected = [f"Film {int(key[1:])}" if int(key[1:]) < 20 else None for key in ids.ravel()]
    assert None in expected  # some have no row
    assert table["title"].to_list() == expected
    full = model.recommend(asked, k=25, as_frame=True)  # fewer than 25 have not been seen
    assert len(full) == sum(np.isfinite(row).sum() for row in model.recommend(asked, k=25)[1])


@pytest.mark.parametrize("names", [("rank", "item"), ("page", "page"), ("user", "score")])
def test_names_of_the_data_that_are_not_free_stay_left_and_right(names, tmp_path):
    left, right = (COLUMNS[name] for name in ("user", "item"))
    model = small().fit(Interactions.from_arrays(left, right, left_name=names[0], right_name=names[1]))
    assert model.recommend([left[0]], k=1, as_frame=True).columns == ["left", "rank", "right", "score"]
    model.recommend_all(tmp_path / "lists.csv", k=1)
    assert pl.read_csv(tmp_path / "lists.csv").columns == ["left", "rank", "right", "score"]


def test_files_of_lists_have_the_columns_of_frames(tmp_path):
    model = small().fit(frame("polars"), **NAMES)
    model.recommend_all(tmp_path / "lists.parquet", k=2)
    assert pl.read_parquet(tmp_path / "lists.parquet").equals(
        model.recommend(model.left_.ids.tolist(), k=2, as_frame=True).cast({"rank": pl.Int32})
    )


def test_similar_entities_as_a_frame():
    model = small().fit(frame("polars"), **NAMES)
    ids, scores = model.similar(["i3", "i4"], k=3)
    pandas = pytest.importorskip("pandas")
    table = model.similar(["i3", "i4"], k=3, as_frame=True, table=pandas.DataFrame(titled()))
    assert table.columns == ["item", "rank", "similar", "score", "title"]
    assert table["item"].to_list() == ["i3"] * 3 + ["i4"] * 3
    assert table["similar"].to_list() == ids.ravel().tolist()
    assert table["score"].to_list() == scores.ravel().tolist()


def test_new_left_entities_are_called_by_the_ids_of_their_table_or_by_row(tmp_path):
    users = {"user": list(range(1000, 1030)), "age": [float(x) for x in range(30)]}
    model = small().fit(frame("polars"), **NAMES, left_features=FeatureTable(users, id="user", numeric=["age"]))
    new = {"user": [1, None, 1002], "age": [3.0, 4.0, 5.0]}
    table = model.recommend(left_features=new, k=1, as_frame=True)
    assert table["user"].to_list() == [1, None, 1002]
    assert model.recommend(left_features={"age": [3.0, 4.0]}, k=1, as_frame=True)["user"].to_list() == [0, 1]
    lines = ["film,title,year", *(f"i{x},0{x},{1990 + x}" for x in range(1, 25))]
    (tmp_path / "films.csv").write_text("\n".join(lines))
    table = model.recommend([1002], k=1, as_frame=True, table=tmp_path / "films.csv")
    number = int(table["item"][0][1:])
    assert table.select("title", "year").rows() == [(f"0{number}", 1990 + number)]  # numbers, but no codes
    typed = pl.DataFrame({"film": [f"i{x}" for x in range(1, 25)], "price": 2.0, "shelf": "7"})
    typed.write_parquet(tmp_path / "films.parquet")
    table = model.recommend([1002], k=1, as_frame=True, table=tmp_path / "films.parquet")
    assert table.schema["price"] == pl.Float64  # Parquet has types
    assert table["shelf"][0] == "7"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (titled(score=[0.0] * 20), r"table.*'score'.*'user'"),
        ({"id": ["x", "y"], "title": ["a", "b"]}, r"table.*2"),
        ({"id": ["i1", "i1"], "title": ["a", "b"]}, r"table.*'id'"),
        ({}, r"table.*columns"),
    ],
)
def test_tables_that_cannot_be_put_beside_lists_are_refused(table, message):
    model = small().fit(frame("polars"), **NAMES)
    with pytest.raises(ValueError, match=message):
        model.recommend([1001], as_frame=True, table=table)
    with pytest.raises(ValueError, match="as_frame"):
        model.recommend([1001], table=titled())


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "pyarrow", "mapping"])
def test_test_pairs_and_exclusions_may_be_frames(kind, tmp_path):
    model = small().fit(frame("polars")[:300], **NAMES)
    expected = model.evaluate(Interactions.from_frame(frame("polars"), **NAMES))
    assert model.evaluate(frame(kind)) == expected  # the first two columns
    turned = {name: COLUMNS[name] for name in ("stars", "item", "user")}
    assert model.evaluate(turned, **NAMES) == expected
    liked = Interactions.from_frame(frame("polars"), **NAMES, value="stars", threshold=4)
    assert model.evaluate(turned, **NAMES, value="stars", threshold=4) == model.evaluate(liked) != expected
    pl.DataFrame(COLUMNS).write_csv(tmp_path / "test.csv")
    assert model.evaluate(tmp_path / "test.csv") == expected

    with pytest.raises(ValueError, match=r"test:.*1"):
        model.evaluate({"user": [1]})
    with pytest.raises(ValueError, match=r"test:.*'user'"):
        model.evaluate(liked, left="user", right="item")


def test_excluded_pairs_of_a_frame_are_in_no_list():
    model = small().fit(frame("polars")[:300], **NAMES)
    more = frame("polars")[300:]
    table = model.recommend(model.left_.ids.tolist(), k=25, as_frame=True, exclude=more)
    listed = set(zip(table["user"], table["item"], strict=True))
    assert listed
    assert not listed & set(zip(more["user"].to_list(), more["item"], strict=True))


def test_histories_tuning_and_cross_validation_take_frames():
    made = frame("polars")
    model = small().fit(made[:400], **NAMES, left_features="history")
    seen, test = made[400:450], made[450:]
    parts = [Interactions.from_frame(part, **NAMES) for part in (seen, test)]
    assert model.evaluate(test, histories=seen) == model.evaluate(parts[1], histories=parts[0])
    pairs = Interactions.from_frame(made, **NAMES, value="stars", threshold=3)
    chosen = NAMES | dict(value="stars", threshold=3)
    found = gt.cross_validate(small(), made, folds=2, **chosen)
    assert found.mean == gt.cross_validate(small(), pairs, folds=2).mean
    pytest.importorskip("optuna")
    search = small(max_iterations=2).tune(made, trials=1, space={"omega": [0.1, 0.2]}, **chosen)
    assert search.data == small(max_iterations=2).tune(pairs, trials=1, space={"omega": [0.1, 0.2]}).data


USERS = {
    "user": list(range(1040, 990, -1)),  # in another order than the pairs, and more of them
    "age": [None if i % 7 == 0 else float(i) for i in range(50)],
    "town": [("oslo", "rome", "lima")[i % 3] for i in range(50)],
    "tags": ["a|b", "b|c", "c"] * 16 + ["d", None],
}
ITEMS = {"id": [f"i{x}" for x in range(25)], "price": [float(x) for x in range(25)]}


def of_kind(columns, kind):
    made = pl.DataFrame(columns)
    return {
        "polars": made, "lazy": made.lazy(), "mapping": columns,
        "pandas": kind == "pandas" and pytest.importorskip("pandas").DataFrame(columns),
    }[kind]  # fmt: skip


def same(one, other):
    assert all(np.array_equal(one.embed(side=side), other.embed(side=side)) for side in ("left", "right"))
    assert [side.inputs.to_plain() for side in one.fitted_.sides] == [s.inputs.to_plain() for s in other.fitted_.sides]


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "mapping"])
def test_frames_of_features_are_the_tables_that_are_inferred_from_them(kind):
    model = small(select=False).fit(frame("polars"), ["id", of_kind(USERS, kind)], of_kind(ITEMS, kind), **NAMES)
    tables = FeatureTable.inferred(USERS, "user"), FeatureTable.inferred(ITEMS, "id")
    expected = small(select=False).fit(frame("polars"), ["id", tables[0]], tables[1], **NAMES)
    same(model, expected)
    assert tables[0].kinds == {"age": "numeric", "town": "categorical", "tags": "list"}
    more = pl.DataFrame({"user": [1035, 1001], "item": ["i3", "i4"]})
    model.update(more, ["id", of_kind(USERS, kind)], of_kind(ITEMS, kind), **NAMES)
    same(model, expected.update(more, ["id", tables[0]], tables[1], **NAMES))


def test_an_update_reads_a_frame_as_the_table_of_the_fit_was_read():
    chosen = dict(id="user", categorical=["age"], text=["town"], lists=["tags"], hash_bits=4, separator="-")
    tags = USERS | {"tags": ["a-b", "c"] * 25}
    model = small(select=False).fit(frame("polars"), FeatureTable(tags, **chosen), **NAMES)
    more = pl.DataFrame({"user": [1035], "item": ["i3"]})
    wider = pl.DataFrame(tags | {"unknown": range(50)})
    expected = gt.TwoTower(**model.get_params())
    expected.fitted_ = model.fitted_
    expected.update(more, FeatureTable(tags, **chosen), **NAMES)
    same(model.update(more, wider, **NAMES), expected)
    with pytest.raises(ValueError, match=r"left_features: .*'town' as well"):
        model.update(more, wider.drop("town"), **NAMES)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"age": [1.0] * 30, "town": ["a"] * 30}, r"left_features: .*age, town.*'user' or 'id'"),
        (USERS | {"user": [1] * 50}, r"left_features: id: .*50 rows"),
        ({"user": USERS["user"]}, r"left_features: columns"),
    ],
)
def test_frames_of_features_that_cannot_be_joined_are_refused(features, message):
    for method in ("fit", "tune"):
        with pytest.raises(ValueError, match=message):
            getattr(small(), method)(frame("polars"), left_features=pl.DataFrame(features), **NAMES)


def test_ids_in_the_index_of_pandas_are_asked_for_as_a_column():
    table = pytest.importorskip("pandas").DataFrame(USERS).set_index("user")
    with pytest.raises(ValueError, match=r"left_features: .*reset_index"):
        small().fit(frame("polars"), left_features=table, **NAMES)


def test_cross_validation_and_benchmarks_take_frames_of_features():
    pairs = Interactions.from_frame(frame("polars"), **NAMES)
    tables = [pl.DataFrame(USERS), FeatureTable.inferred(USERS, "user")]
    found = [gt.cross_validate(small(select=False), pairs, folds=2, left_features=table).mean for table in tables]
    assert found[0] == found[1]
    runs = [
        gt.benchmark(pairs, models={"own": small(select=False)}, baselines=[], seeds=[0], left_features=table)
        for table in tables
    ]
    settings = [run.summary["models"]["own"]["settings"] for run in runs]
    assert settings[0] == settings[1]  # which recognise the runs of a folder
    assert runs[0].runs[0].metrics == runs[1].runs[0].metrics

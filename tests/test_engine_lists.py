"""Lists on Spark, Ray and DuckDB: those of `recommend_all`, with filters, exclusions and other rules."""

from __future__ import annotations

import engines
import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.launch import arrow
from gramtower.launch import ray as on_ray
from gramtower.launch import spark as on_spark

pl = pytest.importorskip("polars", reason="lists are compared as frames of polars")
pa = pytest.importorskip("pyarrow", reason="lists are Arrow batches")
pytestmark = [pytest.mark.filterwarnings(line) for line in engines.QUIET]

M, N, K = 30, 24, 5
TABLE = pl.DataFrame({"id": [f"i{j}" for j in range(N)], "kind": ["abc"[j % 3] for j in range(N)]})
MATRIX = sp.random(M, N, 0.2, "csr", random_state=0, data_rvs=lambda size: np.ones(size))


@pytest.fixture(scope="module")
def model():
    found = MATRIX.tocoo()
    pairs = gt.Interactions.from_arrays(1000 + found.row, [f"i{j}" for j in found.col])
    return gt.TwoTower(dim=4, hidden=(), max_iterations=3, device="cpu", select=False).fit(pairs)


def exclude(model):
    return gt.Interactions.from_arrays(model.left_.ids[:9], [f"i{j}" for j in range(9)])


OPTIONS = {
    "none": lambda model: {},
    "seen": lambda model: {"exclude_seen": False, "deny": ["i1", "i2"]},
    "pairs": lambda model: {"exclude": exclude(model), "min_score": 0.0},
    "filter": lambda model: {"where": "kind != 'a'", "table": TABLE, "boost": np.linspace(0, 1, len(model.right_))},
    "quota": lambda model: {
        "at_most": {"kind": 1},
        "table": TABLE,
        "diversity": 0.3,
        "allow": TABLE["id"][:20].to_list(),
    },
}


def several(model):
    """Some of each, for engines that start slowly."""
    return OPTIONS["pairs"](model) | {"where": "kind != 'a'", "table": TABLE, "deny": ["i1"], "popularity": 0.5}


@pytest.fixture(params=OPTIONS)
def options(model, request):
    return OPTIONS[request.param](model)


def check(found, model, k, options, tmp_path):
    """Rows of answers against the file that recommend_all writes."""
    model.recommend_all(tmp_path / "lists.parquet", k, **options)
    expected = pl.read_parquet(tmp_path / "lists.parquet")
    found = pl.DataFrame(found).sort("left", "rank")
    assert found.columns == expected.columns
    expected = expected.sort("left", "rank")
    for name in ("left", "rank", "right"):
        assert found[name].to_list() == expected[name].to_list()
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-5, atol=1e-6)
    assert len(found)


def test_an_arrow_stream_gives_the_lists_of_recommend_all(model, options, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_ANSWERS", 4 * K)  # several batches of answers for one of ids
    source = pa.table({"age": np.zeros(len(model.left_)), "user": model.left_.ids.astype(np.int32)})
    check(arrow.recommend(model, source, K, column="user", **options).read_all(), model, K, options, tmp_path)


def test_duckdb_reads_and_writes_them(model, tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="needs duckdb, which is not installed")
    model.save(tmp_path / "model.gramtower")
    asked = duckdb.connect().from_arrow(pa.table({"user": model.left_.ids})).filter('"user" >= 0')
    lists = arrow.recommend(tmp_path / "model.gramtower", asked, K)
    duckdb.connect().from_arrow(lists).write_parquet(str(tmp_path / "answers.parquet"))
    check(pl.read_parquet(tmp_path / "answers.parquet"), model, K, {}, tmp_path)


def test_spark_gives_the_lists_of_recommend_all(session, model, tmp_path):
    options = several(model)
    frame = session.createDataFrame([(0.5, int(key)) for key in model.left_.ids], "age double, user int")
    found = on_spark.recommend(model, frame, K, column="user", **options)
    check([row.asDict() for row in found.collect()], model, K, options, tmp_path)


def test_ray_gives_the_lists_of_recommend_all(cluster, model, tmp_path):
    options = several(model)
    data = pytest.importorskip("ray.data").from_items([{"user": int(key)} for key in model.left_.ids])
    found = on_ray.recommend(model, data, K, concurrency=1, **options)
    check(found.take_all(), model, K, options, tmp_path)


def test_text_ids_and_row_numbers_keep_their_types(model):
    numbered = gt.TwoTower(dim=4, hidden=(), max_iterations=2, device="cpu", select=False).fit(MATRIX)
    found = arrow.recommend(numbered, pa.table({"row": [3, 7]}), 2).read_all()
    assert [str(kind) for kind in found.schema.types] == ["int64", "int32", "int64", "float"]
    assert found["left"].to_pylist() == [3, 3, 7, 7]
    assert arrow.lists_of(model).schema.field("right").type == pa.string()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", {"k": 0}),
        ("column", {"column": "item"}),
        ("model", {"model": 7}),
        ("source", {"source": [1, 2]}),
        ("wher", {"wher": "kind == 'a'"}),
        ("min_score", {"min_score": "high"}),
    ],
)
def test_bad_arguments_are_refused(name, change, model):
    given = {"model": model, "source": pa.table({"user": [1000]}), "k": K} | change
    with pytest.raises(ValueError, match=name):
        arrow.recommend(**given)


def test_an_unknown_id_is_named(model):
    with pytest.raises(ValueError, match="987"):
        arrow.recommend(model, pa.table({"user": [1000, 987]}), K).read_all()

"""Feature tables: what each kind of column becomes, the join by id, and the encoding kept as JSON."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from datetime import date

import numpy as np
import pytest

from gramtower.data.encoders import grams
from gramtower.data.tables import FeatureTable, infer_kinds

pl = pytest.importorskip("polars", reason="reading tables needs polars")

FRAME = pl.DataFrame(
    {
        "user": ["007", "b", None, "c"],
        "age": [20.0, 40.0, 1000.0, None],
        "zip": ["02", None, "99", "1"],
        "genres": ["Drama|War", "War", "", None],
        "title": ["The Mask", "mask, the!", "x", None],
    }
)


def test_numbers_are_standardised_and_missing_ones_marked():
    table = FeatureTable(FRAME, numeric=["age"])
    assert table.feature_names == ["age", "age (missing)"]
    assert table.encode(["c", "b", "007"]).toarray().tolist() == [[0, 1], [1, 0], [-1, 0]]
    assert table.report["missing"] == {"age": 1}
    assert table.report["rows_without_id"] == 1
    whole = FeatureTable({"user": ["a", "b"], "age": [3, 3]}, numeric=["age"])
    assert (whole.feature_names, whole.encode(["a", "b"]).nnz) == (["age"], 0)


def test_categories_and_list_elements_have_columns_of_their_own():
    table = FeatureTable(FRAME, categorical=["zip"], lists=["genres"])
    assert table.feature_names == ["zip=02", "zip=1", "zip (missing)", "genres=Drama", "genres=War"]
    expected = [[1, 0, 0, 1, 1], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert table.encode(["007", "b", "c"]).toarray().tolist() == expected
    lists = pl.DataFrame({"user": ["a", "b"], "tags": [["x", "y", "x"], None]})
    assert FeatureTable(lists, lists=["tags"]).encode(["b", "a"]).toarray().tolist() == [[0, 0], [1, 1]]


def test_rows_follow_the_ids_and_unknown_ids_are_all_missing():
    table = FeatureTable(FRAME, numeric=["age"], categorical=["zip"], lists=["genres"], text=["title"], hash_bits=6)
    matrix = table.encode(["nobody", "b", "b"])
    assert matrix.shape == (3, len(table.feature_names)) == (3, 2 + 3 + 2 + 64)
    assert np.flatnonzero(matrix[0].toarray()).tolist() == [1, 4]
    assert (matrix[1] != matrix[2]).nnz == 0
    assert (table.report["ids_without_features"], table.report["features_without_ids"]) == (1, 2)
    assert matrix.dtype == np.float32


def test_strict_joins_refuse_what_does_not_match():
    table = FeatureTable(FRAME, numeric=["age"], strict=True)
    with pytest.raises(ValueError, match=r"1 without features.*'nobody'"):
        table.encode(["007", "b", "c", "nobody"])
    with pytest.raises(ValueError, match=r"2 rows.*id"):
        table.encode(["007"])
    assert table.encode(["007", "b", "c"]).shape == (3, 2)


def test_text_is_hashed_into_unit_rows():
    table = FeatureTable(FRAME, text=["title"], hash_bits=12)
    rows = table.encode(["007", "b", "c"])
    np.testing.assert_allclose(np.asarray(rows.multiply(rows).sum(1)).ravel(), [1, 1, 0], rtol=1e-6)
    shared = float((rows[0] @ rows[1].T).toarray()[0, 0])
    assert shared == pytest.approx(2 / 3)  # both words of "the", "mask", and not the pair in order
    assert grams("The Élan", "word") == ["the", "elan", "the elan"]
    assert grams("ab", "char") == ["<ab", "ab>", "<ab>"]


def test_the_hash_is_the_same_in_another_process():
    code = (
        "from gramtower.data.tables import FeatureTable as T;"
        "print(T({'user': ['a'], 't': ['ein Wort']}, text=['t']).encode(['a']).indices.tolist())"
    )
    runs = {subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": s}) for s in ("1", "2")}
    here = FeatureTable({"user": ["a"], "t": ["ein Wort"]}, text=["t"]).encode(["a"]).indices.tolist()
    assert [json.loads(run) for run in runs] == [here]


def test_new_entities_are_encoded_alike_also_from_json():
    options = dict(numeric=["age"], categorical=["zip"], lists=["genres"], text=["title"], hash_bits=6)
    table = FeatureTable(FRAME, **options)
    again = FeatureTable.encoder_from_json(table.to_json())
    known = FRAME.filter(pl.col("user").is_not_null())
    for one in (table, again):
        assert (one.encode_frame(known) != table.encode(known["user"].to_list())).nnz == 0
        assert one.feature_names == table.feature_names
    new = {"age": [60], "zip": ["77"], "genres": ["War|Noir"], "title": ["Mask"]}
    row = again.encode_frame(new).toarray()[0]
    assert row[:7].tolist() == [3, 0, 0, 0, 1, 0, 1]
    assert again.report["unseen_values"] == {"zip": 1, "genres": 1}
    with pytest.raises(ValueError, match="encode_frame"):
        again.encode(["007"])


def test_files_keep_ids_and_categories_as_text(tmp_path):
    path = tmp_path / "users.csv"
    path.write_text("user,zip,age\n007,02460,1\n8,2460,3\n")
    FRAME.write_parquet(tmp_path / "users.parquet")
    table = FeatureTable(path, numeric=["age"], categorical=["zip"])
    assert table.feature_names == ["age", "zip=02460", "zip=2460"]
    assert table.encode(["8", "007"]).toarray().tolist() == [[1, 0, 1], [-1, 1, 0]]
    assert FeatureTable(tmp_path / "users.parquet", lists=["genres"]).encode(["b"]).toarray().tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (FRAME, {}, r"columns.*none"),
        (FRAME, {"numeric": "age"}, r"numeric.*'age'"),
        (FRAME, {"numeric": ["agee"]}, r"numeric.*'agee'"),
        (FRAME, {"numeric": ["title"]}, r"numeric.*'The Mask'.*'title'"),
        (FRAME, {"numeric": ["age"], "id": "uid"}, r"id:.*'uid'"),
        ({"user": ["a", "a"], "x": [1, 2]}, {"numeric": ["x"]}, r"id:.*'a'.*2"),
        (FRAME, {"text": ["title"], "hash_bits": 60}, "hash_bits"),
        (FRAME, {"text": ["title"], "ngrams": "letters"}, r"ngrams.*'letters'"),
    ],
)
def test_bad_tables_are_named(frame, options, message):
    with pytest.raises(ValueError, match=message):
        FeatureTable(frame, **options)


KINDS = {
    "age": (["31", "40", "-2.5e1"], "numeric"),
    "score": ([1.5, None, 2.0], "numeric"),
    "zip": (["02139", "10001", "02140"], "categorical"),
    "member": ([True, False, None], "categorical"),
    "genres": (["War|Drama", "War", "Drama|War"], "list"),
    "tags": ([["a"], None, ["b", "c"]], "list"),
    "title": (["The Mask", "Heat, a film", "Up"], "text"),
    "plan": (["gold", "gold", "basic plan"], "categorical"),
    "formula": (["a|b", "c|d", "e|f"], "text"),
    "since": ([date(2020, 1, 1), None, date(2021, 1, 1)], "skip"),
    "empty": ([None, None, None], "skip"),
}


@pytest.mark.parametrize("column", KINDS)
def test_kinds_are_told_from_the_content(column):
    cells, kind = KINDS[column]
    repeated = cells * 2 if column == "plan" else cells
    table = pl.DataFrame([pl.Series("id", range(len(repeated))), pl.Series(column, repeated, strict=False)])
    assert infer_kinds(table, "id", {}, "|") == {column: kind}


@pytest.mark.parametrize("ending", ["frame", ".csv", ".tsv", ".csv.gz", ".parquet"])
def test_inferred_tables_are_those_with_the_kinds_written_out(ending, tmp_path):
    source = FRAME
    if ending == ".parquet":
        FRAME.write_parquet(source := tmp_path / "f.parquet")
    elif ending != "frame":
        text = FRAME.write_csv(separator="\t" if ending == ".tsv" else ",").encode()
        source = tmp_path / f"f{ending}"
        source.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
    found = FeatureTable.inferred(source, "user", {"zip": "skip", "genres": "list", "title": "text"}, hash_bits=4)
    assert found.kinds == {"age": "numeric", "genres": "list", "title": "text"}
    assert found.report["skipped"] == ["zip"]
    written = FeatureTable(FRAME, numeric=["age"], lists=["genres"], text=["title"], hash_bits=4)
    assert found.to_json() == written.to_json()
    assert (found.encode(["c", "007"]) != written.encode(["c", "007"])).nnz == 0
    assert (found.encode_frame(source) != written.encode_frame(FRAME)).nnz == 0


def test_wrong_kinds_are_named():
    for kinds, message in [
        ({"agee": "numeric"}, r"kinds.*'agee'.*'age'"),
        ({"age": "number"}, r"kinds\['age'\]: got 'number'"),
        (dict.fromkeys(FRAME.columns[1:], "skip"), r"columns.*age, zip, genres, title"),
        ({"title": "numeric"}, r"numeric.*'The Mask'"),
    ]:
        with pytest.raises(ValueError, match=message):
            FeatureTable.inferred(FRAME, "user", kinds)


def test_foreign_json_is_refused():
    good = json.loads(FeatureTable(FRAME, numeric=["age"]).to_json())
    kinds = [{"kind": "magic"}]
    for text, message in [
        ("{", "no JSON"),
        ("[1]", "gramtower.features"),
        (json.dumps({**good, "version": 99}), "version 99"),
        (json.dumps({**good, "columns": kinds}), r"kind.*'magic'"),
        (json.dumps({**good, "columns": [{"kind": "numeric", "x": 1}]}), r"a numeric column.*'x'"),
    ]:
        with pytest.raises(ValueError, match=message):
            FeatureTable.encoder_from_json(text)


def test_wide_tables_take_linear_time(tmp_path):
    start = time.monotonic()
    path = tmp_path / "wide.csv"
    path.write_text("user," + ",".join(f"c{k}" for k in range(5000)) + "\nu" + ",1" * 5000 + "\nv" + ",2" * 5000 + "\n")
    assert FeatureTable.inferred(path).encode(["u", "v"]).shape == (2, 5000)
    assert time.monotonic() - start < 30  # a dozen calls of polars for each column took more


def test_a_table_says_what_it_holds():
    table = FeatureTable(FRAME, numeric=["age"], lists=["genres"])
    assert repr(table) == "FeatureTable(3 rows by 'user', 4 features: age numeric, genres list)"
    assert repr(FeatureTable.encoder_from_json(table.to_json())).startswith("FeatureTable(0 rows by 'user', 4 features")

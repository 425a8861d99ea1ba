"""A folder of Parquet parts: the pairs of one file; what is wrong with a part is said by its name."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from datetime import date

import numpy as np
import pytest
import torch

from gramtower._util import host
from gramtower._util.checks import LeftOutWarning
from gramtower.data import parquet
from gramtower.data.interactions import Interactions

pl = pytest.importorskip("polars", reason="reading tables needs polars")
pyarrow = pytest.importorskip("pyarrow", reason="reading Parquet needs pyarrow")
pytest.importorskip("pyarrow.parquet", reason="reading Parquet needs pyarrow")

ROWS = 4000


def table(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    user, item = rng.integers(300, size=rows), rng.integers(80, size=rows)
    return pl.DataFrame(
        {
            "user": [f"ü-{k}" for k in user],
            "item": item * 10**12 - 5,
            "rating": rng.integers(1, 6, size=rows).astype(np.float64),
            "weight": rng.integers(1, 5, size=rows),
            "day": [date(2020, 1, 1 + int(k) % 28) for k in rng.integers(28, size=rows)],
        }
    )


def write(folder, frame, cuts=(0, 1500, 1500, 3999)):
    """Four parts, one of them without rows, with what writers leave beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    bounds = [*cuts, len(frame)]
    for k, start in enumerate(cuts):
        frame[start : bounds[k + 1]].write_parquet(folder / f"part-{k:05d}.snappy.parquet", row_group_size=700)
    for name in ("_SUCCESS", "._SUCCESS.crc", ".part-00000.snappy.parquet.crc", "part-00000.crc", "_metadata"):
        (folder / name).write_bytes(b"not a part")
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "part-00000.parquet").write_bytes(b"half written")
    return folder


def same(one, other):
    for name in ("indptr", "indices", "data"):
        assert np.array_equal(getattr(one.matrix, name), getattr(other.matrix, name)), name
    for name in ("left_ids", "right_ids", "times", "weights"):
        x, y = getattr(one, name), getattr(other, name)
        assert (x is None) == (y is None), name
        assert x is None or (x.dtype == y.dtype and np.array_equal(x, y)), name
    assert one.report == other.report
    assert (one.left_name, one.right_name) == (other.left_name, other.right_name)


READ = {
    "pairs": {},
    "threshold": {"value": "rating", "threshold": 4},
    "everything": {"value": "rating", "labels": True, "weight": "weight", "time": "day", "duplicates": "last"},
    "sums": {"value": "rating", "labels": True, "weight": "weight", "duplicates": "sum"},
}


@pytest.mark.parametrize("kind", READ)
def test_a_folder_gives_the_pairs_of_one_file(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "STEP", 900)
    frame = table().with_columns(pl.when(pl.col("rating") == 2).then(None).otherwise(pl.col("rating")).alias("rating"))
    folder = write(tmp_path / "parts", frame)
    with pytest.warns(LeftOutWarning) if READ[kind] else nullcontext():
        same(
            Interactions.from_parquet(folder, "user", "item", **READ[kind]),
            Interactions.from_frame(frame, "user", "item", **READ[kind]),
        )


def test_ids_of_every_kind_and_any_number_of_workers_give_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "STEP", 600)
    frame = table().select(
        pl.col("user").cast(pl.Categorical), pl.col("item").cast(pl.Float64).floor().mod(97).alias("item")
    )
    folder, before = write(tmp_path / "parts", frame, cuts=(0, 100, 1000, 2500, 3000)), torch.get_num_threads()
    expected = Interactions.from_frame(frame, 0, 1)
    assert expected.right_ids.dtype == np.int64
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            same(Interactions.from_parquet(folder, 0, 1), expected)
    finally:
        torch.set_num_threads(before)


def test_text_is_the_same_with_and_without_a_dictionary_in_the_file(tmp_path):
    frame = table()
    for name, coded in (("plain", False), ("coded", True)):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(frame.to_arrow(), tmp_path / name / "p.parquet", use_dictionary=coded)
        same(Interactions.from_parquet(tmp_path / name, "user", "item"), Interactions.from_frame(frame, "user", "item"))
        read = Interactions.from_parquet(tmp_path / name / "p.parquet", "user", "item")
        same(read, Interactions.from_frame(frame, "user", "item"))


def test_a_long_text_in_many_rows_takes_its_memory_once(tmp_path):
    users = pyarrow.DictionaryArray.from_arrays(np.arange(4000, dtype=np.int32) % 2, ["x" * 10_000_000, "y"])
    given = pyarrow.table({"user": users, "item": range(4000)})  # 20 GB without codes
    pyarrow.parquet.write_table(given, tmp_path / "p.parquet", store_schema=False, dictionary_pagesize_limit=1 << 30)
    for path in (tmp_path, tmp_path / "p.parquet"):
        assert Interactions.from_parquet(path, "user", "item").shape == (2, 4000)


def test_ids_too_long_to_be_sent_as_they_are_give_the_same(tmp_path):
    frame = table(rows=300).with_columns(pl.col("user") + "x" * 200_000)  # 60 MB of text, in three parts
    folder = write(tmp_path / "parts", frame, cuts=(0, 200, 290))
    same(Interactions.from_parquet(folder, "user", "item"), Interactions.from_frame(frame, "user", "item"))


def test_a_column_may_be_an_id_and_a_number_at_once(tmp_path):
    frame = table().with_columns(pl.col("rating").cast(pl.Int64).cast(pl.String).alias("stars"))
    form = {"value": "stars", "threshold": 4}
    read = Interactions.from_parquet(write(tmp_path / "parts", frame), "user", "stars", **form)
    same(read, Interactions.from_frame(frame, "user", "stars", **form))
    assert sorted(read.right_ids) == ["4", "5"]


def test_progress_ends_with_all_rows_and_parts(tmp_path):
    seen = []
    Interactions.from_parquet(write(tmp_path / "parts", table()), "user", "item", progress=seen.append)
    assert max(state.rows for state in seen) == ROWS == seen[0].all_rows
    assert (seen[-1].parts, seen[-1].all_parts) == (4, 4)
    assert seen[-1].rate > 0
    assert "4,000 of 4,000 rows, 4 of 4 parts" in str(max(seen, key=lambda state: state.rows))


def test_folders_called_key_and_value_are_columns(tmp_path):
    frame = table(rows=900)
    days = frame["day"].unique().sort().to_list()[:3]
    kept = frame.filter(pl.col("day").is_in(days))
    for day in days:
        for item in (7, 12):
            part = kept.filter(pl.col("day") == day).select("user", pl.col("rating"))
            write(tmp_path / "parts" / f"day={day}" / f"shop%2Fno={item}", part, cuts=(0,))
    found = Interactions.from_parquet(tmp_path / "parts", "user", "shop/no", time="day", value="rating", labels=True)
    assert sorted(found.right_ids.tolist()) == [7, 12]
    assert found.report["rows"] == 2 * len(kept)
    seconds = {(d - date(1970, 1, 1)).days * 86400.0 for d in days}
    assert set(found.times) <= seconds
    expected = kept.group_by("user").agg(pl.col("rating").max())
    row = found.left_rows(expected["user"].to_list())
    assert np.array_equal(found.matrix[row, 0].toarray().ravel(), expected["rating"].to_numpy())


def test_text_is_read_as_numbers_and_times_where_these_are_asked_for(tmp_path):
    frame = table().with_columns(
        pl.col("rating").cast(pl.String).alias("rating"),
        pl.col("day").cast(pl.Datetime).dt.strftime("%Y-%m-%d %H:%M:%S").alias("day"),
    )
    folder, form = write(tmp_path / "parts", frame), {"value": "rating", "threshold": 3, "time": "day"}
    same(
        Interactions.from_parquet(folder, "user", "item", **form),
        Interactions.from_frame(frame, "user", "item", **form),
    )
    with pytest.raises(ValueError, match=r"value.*'ü-\d+'.*'user'.*part-0000\d"):
        Interactions.from_parquet(folder, "user", "item", value="user", labels=True)


def refused(folder, match, **form):
    with pytest.raises(ValueError, match=match):
        Interactions.from_parquet(folder, "user", "item", **form)


def test_a_part_that_cannot_be_read_is_named(tmp_path):
    folder = write(tmp_path / "parts", table())
    bad = folder / "part-00003.snappy.parquet"
    whole = (folder / "part-00000.snappy.parquet").read_bytes()
    for data, why in (
        (b"PAR1 nothing PAR1", "which cannot be read"),
        (whole[: len(whole) // 2], "which cannot be read"),
        (whole[:100] + b"\xff" * 200 + whole[300:], "which cannot be read"),
        (b"", "which is empty"),
    ):
        bad.write_bytes(data)
        refused(folder, rf"path: got .*part-00003\.snappy\.parquet, {why}")


def test_a_part_with_fewer_rows_than_it_declares_is_named(tmp_path, monkeypatch):
    folder = write(tmp_path / "parts", table())
    read = parquet._describe

    def more(part, choices):
        found = read(part, choices)
        return dataclasses.replace(found, rows=found.rows + 1) if "00003" in part.name else found

    monkeypatch.setattr(parquet, "_describe", more)
    refused(folder, r"part-00003\.snappy\.parquet, which cannot be read .*declares, 2")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            pl.col("item").cast(pl.Int32).alias("item"),
            r"part-1\.parquet, whose column 'item' is of Int32, expected Int64",
        ),
        (
            pl.col("item").alias("thing"),
            r"part-1\.parquet, which has the column 'thing', expected the columns of part-0",
        ),
        (
            pl.lit(None, dtype=pl.String).alias("user"),
            r"left: got .*part-1\.parquet, in which 2 rows .* have no 'user'",
        ),
    ],
)
def test_parts_that_differ_and_ids_that_are_missing_are_refused_by_name(change, match, tmp_path):
    frame = pl.DataFrame({"user": ["a", "b"], "item": [1, 2]})
    frame.write_parquet(tmp_path / "part-0.parquet")
    frame.with_columns(change).write_parquet(tmp_path / "part-1.parquet")
    refused(tmp_path, match)


def test_types_that_are_no_ids_or_numbers_are_refused(tmp_path):
    frame = pl.DataFrame({"user": [True, False], "item": ["a", "b"], "at": [date(2020, 1, 1)] * 2, "x": [[1], [2]]})
    frame.write_parquet(tmp_path / "p.parquet")
    refused(tmp_path, "left: got column 'user' of Boolean in .*p.parquet, expected ids")
    for column in ("at", "x"):
        with pytest.raises(ValueError, match=rf"value.*'{column}'.*p.parquet"):
            Interactions.from_parquet(tmp_path, "item", "item", value=column, labels=True)
    refused(tmp_path, "time: got 'nothing', expected one of the columns present: user, item, at, x", time="nothing")
    pl.DataFrame({"user": [0.5], "item": [1]}).write_parquet(tmp_path / "p.parquet")
    refused(tmp_path, r"left: got 0\.5, expected ids .* \(reading .*p\.parquet\)")


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path):
    folder = write(tmp_path / "parts", table())
    first = folder / "part-00000.snappy.parquet"

    def touched(_):
        os.utime(first, ns=(1, 1))

    def more(_):
        (folder / "part-9.parquet").write_bytes(b"x")

    refused(folder, r"part-00000\.snappy\.parquet, which was written to while", progress=touched)
    refused(folder, r"part-9\.parquet, which was added while", progress=more)
    listed = parquet.list_parts(folder)
    (folder / "part-9.parquet").unlink()
    with pytest.raises(ValueError, match=r"part-9\.parquet"):
        parquet.check_unchanged(folder, listed)


def test_folders_that_are_none_of_parts_are_refused(tmp_path):
    refused(tmp_path, "a folder without .parquet or .pq files")
    write(tmp_path / "parts", table(rows=10), cuts=(0,))
    (tmp_path / "parts" / "README.md").write_text("what this is")
    refused(tmp_path / "parts", r"README\.md among the parts, expected a folder of Parquet parts")
    (tmp_path / "parts" / "_delta_log").mkdir()
    refused(tmp_path / "parts", "a Delta table")
    for name in ("day=1", "hour=1"):
        write(tmp_path / "keys" / name, table(rows=10), cuts=(0,))
    refused(tmp_path / "keys", r"hour=1/part-00000\S* below hour, expected folders key=value of day")
    empty = write(tmp_path / "empty", table(rows=10)[:0], cuts=(0,))
    refused(empty, "rows: got none to keep")


def test_more_rows_than_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "memory_size", lambda: 10_000)
    refused(write(tmp_path / "parts", table()), r"parts with 4,000 rows, expected rows that fit in memory")


def test_the_error_of_a_callback_ends_the_reading(tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interactions.from_parquet(write(tmp_path / "parts", table()), "user", "item", progress=stop)


def test_which_folders_are_taken_for_parts(tmp_path):
    assert not parquet.is_parts(tmp_path)
    write(tmp_path / "parts" / "day=1", table(rows=10), cuts=(0,))
    assert parquet.is_parts(tmp_path / "parts")
    assert not parquet.is_parts(tmp_path / "parts" / "day=1" / "part-00000.snappy.parquet")
    (tmp_path / "parts" / "ratings.csv").write_text("")
    assert not parquet.is_parts(tmp_path / "parts")


def test_fit_reads_a_folder_and_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import run

    monkeypatch.setattr("gramtower.cli.formats._EVERY", 0.0)
    folder = write(tmp_path / "parts", table())
    form = ["--left", "user", "--right", "item", "--value", "rating", "--threshold", "4"]
    small = ["--dim", "4", "--hidden", "none", "--max-iterations", "1"]
    assert run(["fit", str(folder), *form, *small, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "reading: 4,000 of 4,000 rows, " in said
    assert "M rows/s" in said
    assert (tmp_path / "run" / "model.gramtower").exists()
    (folder / "part-00001.snappy.parquet").write_bytes(b"PAR1")
    assert run(["fit", str(folder), *form, *small, "--out", str(tmp_path / "other")]) != 0
    assert "part-00001.snappy.parquet, which cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()

"""Folders of Parquet parts: engines write them, processes share them, and the fit is that of one table."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import scipy.sparse as sp
import shared_fits
from processes import HERE, run_group

import gramtower as gt
from gramtower.data import sources
from gramtower.data.batches import pair_batches
from gramtower.distributed import partition
from gramtower.distributed.partition import read_part, write_batches, write_partition

pl = pytest.importorskip("polars", reason="partitions are tables")
pa = pytest.importorskip("pyarrow", reason="Parquet is read by pyarrow")


def table(user="u{:02d}".format):
    """Pairs in no order, with a weight and with rows that repeat a pair."""
    pairs = shared_fits.interactions(user)
    coo = pairs.matrix.tocoo()
    left, right = pairs.left_ids[coo.row].tolist(), pairs.right_ids[coo.col].tolist()
    rows = pl.DataFrame({"item": right, "user": left, "weight": pairs.weights})
    return pl.concat([rows, rows[:20]]).sample(fraction=1.0, shuffle=True, seed=1)


def by_polars(rows, folder):
    """Folders key=value, by a hash."""
    rows.with_columns(part=pl.col("user").hash() % 5).write_parquet(folder, partition_by="part")


def by_polars_ranges(rows, folder):
    """Plain files with a range of left ids each."""
    folder.mkdir()
    for number, part in enumerate(rows.sort("user").partition_by("user", maintain_order=True)):
        part.write_parquet(folder / f"{number % 7}-{number}.parquet")


def by_polars_sink(rows, folder):
    """A stream to folders of several files each."""
    if not hasattr(pl, "PartitionBy"):
        pytest.skip("this version of polars has no PartitionBy")
    keyed = rows.lazy().with_columns(part=pl.col("user").hash() % 5)
    keyed.sink_parquet(pl.PartitionBy(folder, key="part", max_rows_per_file=20), mkdir=True)


def by_duckdb(rows, folder):
    duckdb = pytest.importorskip("duckdb", reason="DuckDB writes this folder")
    query = 'SELECT *, hash("user") % 5 AS part FROM rows'
    duckdb.sql(f"COPY ({query}) TO '{folder}' (FORMAT parquet, PARTITION_BY (part))")


def by_spark(rows, folder):
    sql = pytest.importorskip("pyspark.sql", reason="Spark writes this folder")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")
    settings = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = sql.SparkSession.builder.master("local[1]")
    session = builder.config(map=settings).getOrCreate()
    try:
        frame = session.createDataFrame(rows.rows(), rows.columns)
        frame.repartition(6, "user").write.parquet(str(folder))
    finally:
        session.stop()
    assert (folder / "_SUCCESS").exists()  # and .crc files, which are left out


def test_engines_write_folders_that_processes_fit_like_one_table(tmp_path):
    folders = []
    for write in (by_polars, by_polars_sink, by_duckdb):
        with contextlib.suppress(pytest.skip.Exception):
            write(table(), tmp_path / write.__name__)
            folders.append(tmp_path / write.__name__)
    assert_same_fits(tmp_path, folders, (2, 3))


def test_spark_writes_folders_that_processes_fit_like_one_table(tmp_path):
    by_spark(table(), tmp_path / "spark")
    assert_same_fits(tmp_path, [tmp_path / "spark"], (2,))


def assert_same_fits(tmp_path, folders, sizes):
    for size in sizes:
        many = run_group("shared_fits:fits_of_shares", size, tmp_path / f"{size}", *folders)
        assert all(found == many[0] for found in many)
        for parts, fitted in zip(folders, many[0], strict=True):
            whole = gt.Interactions.from_parquet(parts, "user", "item")
            coo = whole.matrix.tocoo()
            read = zip(whole.left_ids[coo.row].tolist(), whole.right_ids[coo.col].tolist(), strict=True)
            assert sorted(read) == sorted(table().select("user", "item").unique().rows())
            one = shared_fits.fit_of_shares(tmp_path, parts, "user", "item")
            assert fitted["values"] == pytest.approx(one["values"], rel=1e-6)
            assert fitted["best"] == one["best"]
            alone, found = (gt.load(place / f"{parts.name}.gramtower") for place in (tmp_path, tmp_path / f"{size}"))
            for side in ("left", "right"):
                assert getattr(found, f"{side}_").ids.tolist() == getattr(alone, f"{side}_").ids.tolist()
                np.testing.assert_allclose(found.embed(side=side), alone.embed(side=side), atol=1e-4)
            assert found.recommend(["u03", "u17"], k=3)[0].tolist() == alone.recommend(["u03", "u17"], k=3)[0].tolist()
            assert (found.seen_ != alone.seen_).nnz == 0


def of_one_set(folder):
    rng = np.random.default_rng(0)
    rows = {(f"p{a}", f"p{b}") for a, b in rng.integers(60, size=(1500, 2)) if a != b}
    by_polars(pl.DataFrame(sorted(rows), schema=["user", "item"], orient="row"), folder)


def of_one_large_part(folder):
    folder.mkdir()
    for number, users in enumerate((range(30), [31], [32])):
        rows = {"user": np.repeat(users, 5), "item": np.tile(np.arange(5), len(users))}
        pl.DataFrame(rows).write_parquet(folder / f"{number}.parquet")


def of_numbers(folder):
    by_polars_ranges(table(lambda number: number * 10**12), folder)


def test_processes_read_what_one_reads(tmp_path):
    makers = (lambda folder: by_polars_ranges(table(), folder), of_numbers, of_one_large_part, of_one_set)
    folders = [tmp_path / str(number) for number in range(len(makers))]
    for make, folder in zip(makers, folders, strict=True):
        make(folder)
    every = run_group("shared_fits:shares_of", 3, tmp_path / "run", *folders)
    for folder, found in zip(folders, zip(*every, strict=True), strict=True):
        whole = gt.Interactions.from_parquet(folder, "user", "item")
        items = [whole.right_ids[whole.matrix[row].indices].tolist() for row in range(whole.shape[0])]
        assert [key for one in found for key in one["left"]] == whole.left_ids.tolist()
        assert [list(one) for part in found for one in part["pairs"].values()] == items
        for one in found:
            assert one["right"] == whole.right_ids.tolist()
            assert one["report"] == whole.report
            assert one["shape"] == list(whole.shape)
            assert one["one_set"] == whole.one_set == (folder is folders[3])
    assert max(len(one[0]["left"]) for one in every) < 20  # of 40
    assert sorted(len(one[2]["left"]) for one in every) == [0, 2, 30]  # a process may be without rows
    fitted = run_group("shared_fits:fits_of_shares", 3, tmp_path / "fit", folders[2])[0][0]
    one = shared_fits.fit_of_shares(tmp_path, folders[2], "user", "item")
    assert fitted["values"] == pytest.approx(one["values"], rel=1e-6)


def spread_over_parts(folder):
    pl.DataFrame({"user": ["u39"], "item": ["i1"], "weight": [1.0]}).cast({"weight": pl.Float32}).write_parquet(
        folder / "part-00000-more.parquet"
    )


def of_other_type(folder):
    frame = pl.DataFrame({"user": [7], "item": ["i1"], "weight": [1.0]}).cast({"weight": pl.Float32})
    frame.write_parquet(folder / "part-00009.parquet")


def without_id(folder):
    frame = pl.DataFrame({"user": ["new", None], "item": ["i1", "i2"], "weight": [1.0, 1.0]})
    frame.cast({"weight": pl.Float32}).write_parquet(folder / "part-00009.parquet")


def cut_short(folder):
    path = folder / "part-00002.parquet"
    path.write_bytes(path.read_bytes()[:-20])


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


FAULTS = [
    (spread_over_parts, "left id 'u39' in part-00000-more.parquet and in part-00003.parquet"),
    (of_other_type, "part-00009.parquet.*of Int64"),
    (without_id, "part-00009.parquet.*have no 'user'"),
    (lambda folder: pl.DataFrame({"user": ["a"]}).write_parquet(folder / "x.parquet"), "x.parquet.*no column"),
    (cut_short, "part-00002.parquet.*cannot be read"),
    (emptied, "without .parquet"),
    (lambda folder: (folder / "part-00001.parquet").write_bytes(b""), "part-00001.parquet.*empty"),
    (lambda folder: (folder / "notes.txt").write_text("x"), "notes.txt among the parts"),
]


@pytest.mark.parametrize(("spoil", "match"), FAULTS)
def test_a_folder_with_faults_is_refused_by_name(spoil, match, tmp_path):
    pairs = shared_fits.interactions().renamed("user", "item")
    write_partition(pairs, tmp_path / "parts", 4)
    spoil(tmp_path / "parts")
    with pytest.raises(ValueError, match=match):
        read_part(tmp_path / "parts", "user", "item", weight="weight")


def test_every_process_says_which_file_is_wrong(tmp_path):
    pairs = shared_fits.interactions().renamed("user", "item")
    faults = [FAULTS[0], FAULTS[4], (lambda folder: (folder / "part-00003.parquet").unlink(), "3 parts.*at least 4")]
    folders = [tmp_path / str(number) for number in range(len(faults))]
    for folder, (spoil, _) in zip(folders, faults, strict=True):
        write_partition(pairs, folder, 4)
        spoil(folder)
    for every in run_group("shared_fits:shares_of", 4, tmp_path / "run", *folders):
        for one, (_, match) in zip(every, faults, strict=True):
            assert re.search(match, one["error"])


def test_files_that_engines_leave_beside_the_parts_do_not_count(tmp_path):
    pairs = shared_fits.interactions()
    write_partition(pairs, tmp_path / "parts", 3)
    for name in ("_SUCCESS", ".part-00000.parquet.crc", "part-00000.parquet.crc", "_temporary/0/part-00009.parquet"):
        (tmp_path / "parts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "parts" / name).write_bytes(b"unfinished")
    assert len(read_part(tmp_path / "parts")) == len(pairs)


@pytest.mark.parametrize("user", [str, int])
def test_a_partition_gives_back_what_was_written(user, tmp_path):
    pairs = shared_fits.interactions(user)
    sizes = write_partition(pairs, tmp_path / "parts", 4)
    part = read_part(tmp_path / "parts", weight="weight")
    assert part.left_ids.tolist() == pairs.left_ids.tolist()
    assert part.left_ids.dtype == pairs.left_ids.dtype
    columns = pairs.right_rows(part.right_ids)
    assert (part.matrix != pairs.matrix[:, columns]).nnz == 0
    assert sum(sizes) == len(pairs)
    assert max(sizes) - min(sizes) <= 2 * pairs.matrix.getnnz(1).max()


@pytest.mark.parametrize("name", ["thesis.tex", "part-00000-1234.snappy.parquet"])
def test_a_partition_is_not_written_over_other_files(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="other files"):
        write_partition(shared_fits.interactions(), tmp_path, 3)
    assert (tmp_path / name).read_text() == "mine"


def test_a_stream_is_written_while_few_rows_are_held(tmp_path, monkeypatch):
    rng, alive, most = np.random.default_rng(0), [], []
    users, items = rng.integers(300, size=20_000), rng.integers(50, size=20_000)
    monkeypatch.setattr(partition, "_HELD", 1000)

    def batches():
        for start in range(0, len(users), 250):
            rows = {"user": users[start : start + 250], "item": items[start : start + 250]}
            alive.append(weakref.ref(batch := pl.DataFrame(rows)))
            yield batch
            del batch
            most.append(sum(len(there) for one in alive if (there := one()) is not None))

    real = {name: getattr(pl.DataFrame, name) for name in ("sort", "write_parquet")}
    for name, method in real.items():  # runs, groups of parts, and parts

        def spy(frame, *args, _real=method, **options):
            most.append(len(frame))
            return _real(frame, *args, **options)

        monkeypatch.setattr(pl.DataFrame, name, spy)
    written = write_batches(batches(), tmp_path / "parts", 40)
    monkeypatch.undo()
    assert max(most) <= 1000
    assert sorted(os.listdir(tmp_path / "parts")) == [f"part-{number:05d}.parquet" for number in range(40)]
    found = read_part(tmp_path / "parts")  # in which no left id is in two parts
    expected = gt.Interactions.from_arrays(users, items)
    assert found.shape == expected.shape == (written["left"], written["right"])
    assert len(found) == len(expected) == written["pairs"]
    assert_same_pairs(found, expected)


def assert_same_pairs(shard, pairs):
    rows, columns = pairs.left_rows(shard.left_ids), pairs.right_rows(shard.right_ids)
    assert shard.shape == pairs.shape
    assert (shard.matrix != pairs.matrix[rows][:, columns]).nnz == 0
    if pairs.weights is not None:
        weights = sp.csr_matrix((pairs.weights, pairs.matrix.indices, pairs.matrix.indptr), pairs.shape)
        np.testing.assert_array_equal(shard.weights, weights[rows][:, columns].sorted_indices().data)


def odd_csv(path):
    """Ids with separators, quotes and line breaks, blank lines, missing cells, and values of several forms."""
    lines, rng = ['user,"the\nitem",stars,w,day', ""], np.random.default_rng(1)
    for row in range(400):
        user, item = rng.choice(
            ['"a,\nb"', '"say ""hi"""', "007", "7", "ann", ""], 2, p=[0.2, 0.2, 0.2, 0.2, 0.18, 0.02]
        )
        stars = rng.choice(["1", "4", "4.5", "", " 5 "])
        lines += [f"{user},{item},{stars},{row % 7 + 1},2020-01-{row % 28 + 1:02d}", *[""] * (row % 50 == 0)]
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    "options", [{}, dict(value="stars", threshold=4), dict(value="stars", labels=True, time="day")]
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_file_is_streamed_as_it_is_read(options, packed, tmp_path, monkeypatch):
    odd_csv(path := tmp_path / "pairs.csv")
    if packed:
        path = tmp_path / "pairs.csv.gz"
        path.write_bytes(gzip.compress((tmp_path / "pairs.csv").read_bytes()))
    with pytest.warns(gt.data.matrices.LeftOutWarning):
        expected = gt.Interactions.from_csv(path, "user", "the\nitem", weight="w", **options)
    monkeypatch.setattr(sources, "CHUNK", 300)
    with pytest.warns(gt.data.matrices.LeftOutWarning):
        batches = list(pair_batches(path, "user", "the\nitem", weight="w", separator=",", **options))
    assert len(batches) > 20
    assert sum(map(len, batches)) == expected.report["rows"] - sum(
        expected.report[name] for name in ("rows_without_id", "rows_without_number", "rows_below_threshold")
    )
    write_batches(batches, tmp_path / "parts", 3)
    labels = {"value": "value", "labels": True} if options.get("labels") else {}
    assert_same_pairs(read_part(tmp_path / "parts", "user", "the\nitem", weight="weight", **labels), expected)


def test_the_error_of_a_stream_says_where_in_the_file_it_is(tmp_path, monkeypatch):
    text = "user,item,stars\n" + "a,b,1\n" * 500 + "a,b,many\n" + "a,b,1\n" * 500
    (tmp_path / "pairs.csv").write_text(text)
    monkeypatch.setattr(sources, "CHUNK", 300)
    stream = pair_batches(tmp_path / "pairs.csv", "user", "item", value="stars", labels=True, separator=",")
    with pytest.raises(ValueError, match=r"'many' in column 'stars'"):
        list(stream)
    (tmp_path / "pairs.csv").write_bytes(text.replace("b,many", "\xff,1").encode("latin-1"))
    stream = pair_batches(tmp_path / "pairs.csv", "user", "item", separator=",")
    with pytest.raises(ValueError, match=r"utf8.*line 4\d\d .*pairs\.csv"):
        list(stream)
    (tmp_path / "pairs.csv").write_text("user,item\n")
    with pytest.raises(ValueError, match="rows"):
        list(pair_batches(tmp_path / "pairs.csv", "user", "item", separator=","))


def test_folders_with_keys_are_streamed_as_they_are_read(tmp_path):
    rows = pl.DataFrame({"user": [3, 3, 5, 9], "item": ["a", None, "b", "c"], "day": ["x", "y", "x", "x"]})
    rows.drop_nulls().write_parquet(tmp_path / "keyed", partition_by="user")
    for left, right in (("user", "item"), ("item", "day")):
        write_batches(pair_batches(tmp_path / "keyed", left, right), tmp_path / "parts", 2)
        expected = gt.Interactions.from_parquet(tmp_path / "keyed", left, right)
        found = read_part(tmp_path / "parts", left, right)
        assert found.left_ids.dtype == expected.left_ids.dtype
        assert_same_pairs(found, expected)
    rows.write_parquet(tmp_path / "one.parquet")
    with pytest.warns(gt.data.matrices.LeftOutWarning):
        (batch,) = pair_batches(tmp_path / "one.parquet", "user", "item")
    assert batch.rows() == [(3, "a"), (5, "b"), (9, "c")]
    rows.write_parquet(tmp_path / "gaps", partition_by="user")
    with pytest.raises(ValueError, match=r"right:.*1 .*'item'"):
        list(pair_batches(tmp_path / "gaps", "user", "item"))


@pytest.mark.parametrize("earlier", [True, False])
def test_a_partition_that_was_killed_can_be_written_again(earlier, tmp_path, monkeypatch):
    pairs, folder = shared_fits.interactions(), tmp_path / "parts"
    if earlier:
        write_partition(pairs, folder, 2)
    real = pl.DataFrame.write_parquet

    def killed(frame, path):
        real(frame, path)
        if path.name == "part-00001.parquet":
            raise KeyboardInterrupt

    monkeypatch.setattr(pl.DataFrame, "write_parquet", killed)
    with pytest.raises(KeyboardInterrupt):
        write_partition(pairs, folder, 3)
    monkeypatch.undo()
    assert folder.exists() == earlier
    if earlier:
        assert len(read_part(folder)) == len(pairs)  # the old one is whole
    write_partition(pairs, folder, 4)
    assert len(read_part(folder)) == len(pairs)
    assert len(list(folder.iterdir())) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_partitions_of_the_old_format_are_refused(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import run

    (tmp_path / "manifest.json").write_text('{"format": "gramtower-partition", "version": 2}')
    (tmp_path / "part-00000-0a1b2c3d.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"Parquet.*gramtower partition"):
        read_part(tmp_path)
    assert run(["fit", str(tmp_path), "--left", "user", "--right", "item", "--out", str(tmp_path / "run")]) == 2
    assert "no longer read" in capsys.readouterr().err


def test_the_command_line_says_how_much_of_a_folder_it_has_written(tmp_path, capsys, monkeypatch):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli import formats
    from gramtower.cli.program import run

    monkeypatch.setattr(formats, "_EVERY", 0.0)
    by_polars(table(), tmp_path / "log")
    command = ["partition", str(tmp_path / "log"), "--left", "user", "--right", "item", "--parts", "3"]
    assert run([*command, "--out", str(tmp_path / "parts"), "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["right"] == table()["item"].n_unique()
    lines = re.findall(r"reading: ([\d,]+) of 277 rows, (\d) of (\d) parts", found.err)
    assert lines[-1] == ("277", lines[-1][2], lines[-1][2])
    assert len(lines) == int(lines[0][2]) > 1
    assert run([*command, "--out", str(tmp_path / "parts"), "--quiet"]) == 0
    assert "reading" not in capsys.readouterr().err


def test_the_command_line_fits_a_partition_with_one_and_two_processes_alike(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import run

    table().write_csv(tmp_path / "pairs.csv")
    known = set(table().select("user", "item").rows())
    new = [(f"u{u:02d}", f"i{i}") for u in range(40) for i in range(0, 30, 7)]
    held = pl.DataFrame([pair for pair in new if pair not in known], schema=["user", "item"], orient="row")
    held.with_columns(weight=1.0).write_parquet(tmp_path / "valid.parquet")
    columns, parts = ["--left", "user", "--right", "item", "--weight", "weight"], str(tmp_path / "parts")
    assert run(["partition", str(tmp_path / "pairs.csv"), *columns, "--parts", "3", "--out", parts, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["parts"], facts["pairs"], facts["columns"]) == (3, 257, ["user", "item", "weight"])
    assert run(["info", parts, *columns, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 257
    fit = ["fit", parts, *columns, "--dim", "4", "--hidden", "8", "--device", "cpu", "--quiet", "--max-iterations", "3"]
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for name, validation in (("share", "0.2"), ("file", str(tmp_path / "valid.parquet"))):
        more = ["--validation", validation, *(["--refit"] if name == "share" else []), "--out"]
        assert run([*fit, *more, str(tmp_path / f"one-{name}")]) == 0
        two = [*launcher, "gramtower", *fit, *more, str(tmp_path / f"two-{name}")]
        done = subprocess.run(two, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        one, two = (json.loads((tmp_path / f"{n}-{name}/summary.json").read_text()) for n in ("one", "two"))
        assert two["processes"] == 2
        assert one["metric_value"] == pytest.approx(two["metric_value"], rel=1e-12)
        for key in ("pairs", "validation_pairs", "left", "right", "rows_left_out"):
            assert one[key] == two[key], key
        assert two["objective"] == pytest.approx(one["objective"], rel=1e-6)
        assert one["validation_pairs"] > 0

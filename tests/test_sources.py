"""Files that are none, broken, named oddly or exploding: each ends in a ValueError or OSError that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import time
import zipfile
import zlib

import pytest

from gramtower._util import host
from gramtower._util.checks import LeftOutWarning
from gramtower.cli.options import parse_option, read_config
from gramtower.data import readers, sources
from gramtower.data.interactions import Interactions
from gramtower.data.readers.mediawiki import mediawiki_links
from gramtower.data.readers.ratings import netflix
from gramtower.data.tables import FeatureTable
from gramtower.experiments.tuning.space import read_space

pl = pytest.importorskip("polars", reason="reading tables needs polars")

TABLE = b"user,item\n1,a\n2,b\n"


def zstd(data):
    pyarrow = pytest.importorskip("pyarrow", reason="zstd is written by pyarrow; polars 1.32 writes none")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


PACKERS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


def pairs_of(found):
    coo = found.matrix.tocoo()
    return {(found.left_ids[i], found.right_ids[j]) for i, j in zip(coo.row, coo.col, strict=True)}


def table(path):
    return Interactions.from_csv(path, "user", "item")


@pytest.mark.parametrize("name", ["data[12].csv", "~da*ta?.csv"])
def test_names_are_no_patterns(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in ("data1.csv", "data2.csv"):
        (tmp_path / other).write_bytes(b"user,item\nwrong,x\n")
    (tmp_path / name).write_bytes(TABLE)
    assert pairs_of(table(name)) == {("1", "a"), ("2", "b")}
    assert FeatureTable(name, categorical=["item"]).feature_names == ["item=a", "item=b"]
    assert FeatureTable.inferred(name, kinds={"item": "categorical"}).report["rows"] == 2
    pl.DataFrame({"user": ["1"], "item": ["a"]}).write_parquet(target := io.BytesIO())
    path = tmp_path / name.replace(".csv", ".parquet")
    path.write_bytes(target.getvalue())
    assert pairs_of(Interactions.from_parquet(path.name, "user", "item")) == {("1", "a")}
    assert FeatureTable(path.name, categorical=["item"]).feature_names == ["item=a"]


def test_a_folder_called_like_a_partition_adds_no_column(tmp_path):
    folder = tmp_path / "item=9"
    folder.mkdir()
    pl.DataFrame({"user": ["1"], "item": ["a"]}).write_parquet(folder / "t.parquet")
    assert pairs_of(Interactions.from_parquet(folder / "t.parquet", "user", "item")) == {("1", "a")}


READERS = {
    "csv": table,
    "parquet": lambda path: Interactions.from_parquet(path, "user", "item"),
    "features": lambda path: FeatureTable(path, categorical=["item"]),
    "lists": readers.item_lists,
    "edges": readers.edge_list,
    "extreme": readers.extreme_classification,
    "config": read_config,
    "space": read_space,
}


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_file_is_named(kind, tmp_path):
    read = READERS[kind]
    with pytest.raises(FileNotFoundError, match="nothing"):
        read(tmp_path / "nothing")
    folder = "a folder without .parquet or .pq files" if kind == "parquet" else "which is a folder, expected a file"
    with pytest.raises(ValueError, match=rf"{tmp_path.name}, {folder}"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"/dev/zero.*device"):
        read("/dev/zero")
    with pytest.raises(OSError, match=r"name too long|no such file"):
        read(tmp_path / ("x" * 5000))
    with pytest.raises((OSError, ValueError)):
        read(str(tmp_path / "a\0b"))
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ValueError, match=r"empty\.csv.*empty"):
        read(tmp_path / "empty.csv")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe.*device"):
        read(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(TABLE)
    path.chmod(0)
    for read in (table, readers.item_lists, read_config):
        with pytest.raises(PermissionError, match=r"t\.csv"):
            read(path)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst"])
def test_damaged_compressed_files_are_named(ending, tmp_path):
    path = tmp_path / f"t.csv{ending}"
    path.write_bytes(PACKERS[ending](b"user,item\n" + b"".join(b"%d,a\n" % k for k in range(999))))
    whole = path.read_bytes()
    assert len(table(path)) == 999
    assert len(readers.item_lists(path, separator=",")) == 1000
    middle = len(whole) // 2
    damaged = [whole[:middle], TABLE, whole[:9]]
    if ending != ".zst":  # which need not have a checksum
        damaged.append(whole[:middle] + b"\xff" * 9 + whole[middle + 9 :])
    for data in damaged:
        path.write_bytes(data)
        for read in (table, lambda path: readers.item_lists(path, separator=",")):
            with pytest.raises(ValueError, match=rf"t\.csv{ending}"):
                read(path)


def test_compressed_files_are_known_by_their_content(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(gzip.compress(TABLE))
    assert len(table(path)) == 2
    path.write_bytes(zlib.compress(TABLE))
    with pytest.raises(ValueError, match=r"t\.csv.*zlib"):
        table(path)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(gzip.compress(TABLE)))
    with pytest.raises(ValueError, match="compressed twice"):
        table(tmp_path / "t.csv.gz")


ZEROS = bytes(3_000_000)


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2", ".zst", ".zip"])
def test_what_explodes_is_refused(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "memory_size", lambda: 4_000_000)
    path = tmp_path / (f"ratings.csv{ending}" if ending != ".zip" else "ml.zip")
    if ending == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ratings.csv", ZEROS)
    else:
        path.write_bytes(PACKERS[ending](ZEROS))
    kinds = (readers.movielens,) if ending == ".zip" else (table, readers.item_lists, readers.movielens)
    for read in kinds:
        with pytest.raises(ValueError, match=rf"{path.name}.*0.001 GB"):
            read(path)


def test_streamed_files_may_not_explode_either(tmp_path, monkeypatch):
    class Small(sources.Budget):
        def __init__(self, path, most=None):
            super().__init__(path, 1_000_000)

    monkeypatch.setattr(sources, "Budget", Small)
    (tmp_path / "combined_data_1.txt.gz").write_bytes(gzip.compress(ZEROS))
    with pytest.raises(ValueError, match=r"combined_data_1.txt.gz.*decompresses"):
        netflix(tmp_path / "combined_data_1.txt.gz")
    entry = tarfile.TarInfo("training_set/mv_0000001.txt")
    entry.size = len(ZEROS)
    with tarfile.open(tmp_path / "training_set.tar.gz", "w:gz") as archive:
        archive.addfile(entry, io.BytesIO(ZEROS))
    with pytest.raises(ValueError, match=r"training_set.tar.gz.*decompresses"):
        netflix(tmp_path / "training_set.tar.gz")
    with zipfile.ZipFile(tmp_path / "nf.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        for movie in range(4):
            zipped.writestr(f"mv_000000{movie}.txt", ZEROS[:400_000])
    with pytest.raises(ValueError, match=r"nf.zip.*decompresses"):
        netflix(tmp_path / "nf.zip")


def test_zips_by_other_methods_and_tars_without_end_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "nf.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("mv_0000001.txt", "1:\n7,4,2000-01-01\n")
    with pytest.raises(ValueError, match=r"nf\.zip.*mv_0000001\.txt.*method 12"):
        netflix(tmp_path / "nf.zip")
    data = b"1:\n7,4,2000-01-01\n"
    for depth, name in enumerate(["mv_0000001.txt", *["training_set.tar"] * 4]):
        target = io.BytesIO()
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        with tarfile.open(fileobj=target, mode="w") as tar:
            tar.addfile(entry, io.BytesIO(data))
        data = target.getvalue()
        (tmp_path / f"training_set{depth}.tar").write_bytes(data)
    assert len(netflix(tmp_path / "training_set2.tar")) == 1
    with pytest.raises(ValueError, match=r"training_set4\.tar.*tars"):
        netflix(tmp_path / "training_set4.tar")


@pytest.mark.parametrize("read", [table, lambda path: readers.item_lists(path, separator=",")])
def test_byte_order_marks_are_no_part_of_the_text(read, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TABLE)
    assert pairs_of(read(path)) >= {("1", "a"), ("2", "b")}
    assert not any("\ufeff" in text for text in read(path).left_ids)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + TABLE))
    assert len(read(tmp_path / "t.csv.gz")) == len(read(path))
    path.write_bytes(TABLE.decode().encode("utf-16"))
    with pytest.raises(ValueError, match=r"t\.csv.*UTF-16.*encoding='utf-16'"):
        read(path)
    assert len(Interactions.from_csv(path, "user", "item", encoding="utf-16")) == 2


def test_encodings_are_checked(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("user,item\nJosé,a\n".encode("latin-1"))
    assert pairs_of(Interactions.from_csv(path, "user", "item", encoding="latin-1")) == {("José", "a")}
    for name in ("klingon", "rot13", "a\0b", 5):
        with pytest.raises(ValueError, match="encoding"):
            Interactions.from_csv(path, "user", "item", encoding=name)
        with pytest.raises(ValueError, match="encoding"):
            readers.item_lists(path, encoding=name)
    with pytest.raises(ValueError, match=r"t\.csv.*utf8.*byte 13, line 2"):
        readers.item_lists(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'user,item\n1,a\n2,"b\n3,c\n', "in line 3 a quote is never closed"),
        (b'user,item\n1,a\n2,"b"x\n', "in line 3 there is text after a closing quote"),
        (b"user,item\n1,a\n2,b,c\n", "line 3 has 3 fields, the first line 2"),
        (b"user,item\n1,a\n\xff,b\n", "not utf8 text at byte 14, in line 3"),
        (b"user,item\r1,a\r", r"columns present: user, item\r1, a"),
        (b"user,item,user\n1,a,2\n", "whose header has 'user' twice"),
    ],
)
def test_broken_lines_are_placed(text, message, tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"t\.csv.*{message}|{message}.*t\.csv"):
        table(path)


def test_mixed_line_ends_and_columns_twice_by_position(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"user,item,user\r\n1,a,5\n2,b,6\r\n")
    assert pairs_of(Interactions.from_csv(path, 2, "item")) == {("5", "a"), ("6", "b")}
    for separator in ("::", "", "é", "\n", None):
        with pytest.raises(ValueError, match="separator"):
            Interactions.from_csv(path, "user", "item", separator=separator)
    for option in ({"quote": "''"}, {"quote": ","}, {"comment": ""}):
        with pytest.raises(ValueError, match=rf"{next(iter(option))}"):
            Interactions.from_csv(path, 0, "item", **option)


def test_values_that_are_no_numbers_name_the_file_and_the_column(tmp_path):
    path = tmp_path / "t.csv"
    for cell, message in [
        ("x", "'x' in column 'rating'"),
        ("inf", "inf in column"),
        ("1e300", "1e300 in column|e.300"),
    ]:
        path.write_text(f"user,item,rating\n1,a,4\n2,b,{cell}\n3,c,nan\n")
        with pytest.raises(ValueError, match=message) as caught:
            Interactions.from_csv(path, "user", "item", value="rating", threshold=4)
        assert "t.csv" in str(caught.value)
    path.write_text("user,item,rating\n1,a,4\n3,c,nan\n")
    with pytest.warns(LeftOutWarning, match="1 of 2 rows"):
        read = Interactions.from_csv(path, "user", "item", value="rating", threshold=4)
    assert read.report["rows_without_number"] == 1


def test_damaged_parquet_files_are_named_and_end_no_process(tmp_path):
    path = tmp_path / "t.parquet"
    pl.DataFrame({"user": ["1", "2"] * 9, "item": ["a", "b"] * 9}).write_parquet(path, compression="uncompressed")
    whole = bytearray(path.read_bytes())
    levels = whole.index(b"\x02\x00\x00\x00\x24\x01")  # definition levels: their length, a run of 18 ones
    whole[levels + 4 : levels + 6] = b"\xff\xff"  # a run without end, for which polars asks for 2 exabytes
    for data in (bytes(whole), bytes(whole[:-9]), b"PAR1" * 9, TABLE):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"t\.parquet.*cannot be read"):
            Interactions.from_parquet(path, "user", "item")


def test_parquet_files_of_more_rows_than_memory_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    pl.DataFrame({"user": ["1"] * 1_000_000, "item": "a"}).write_parquet(path)
    monkeypatch.setattr(host, "memory_size", lambda: 10_000_000)
    with pytest.raises(ValueError, match=r"1,000,000 rows.*memory"):
        Interactions.from_parquet(path, "user", "item")


def test_separators_of_several_characters_do_not_move_tabs(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("a\tx->b\nc->d\n")
    assert pairs_of(readers.edge_list(path, separator="->")) == {("a\tx", "b"), ("c", "d")}
    path.write_bytes("a\u00a0x b\n".encode())
    assert pairs_of(readers.item_lists(path)) == {("a\u00a0x", "b")}


def test_white_space_and_long_lines_take_linear_time(tmp_path):
    start = time.monotonic()
    path = tmp_path / "edges.txt"
    path.write_bytes(b"a b\nc" + b" \t" * 200_000 + b"d\n")
    assert pairs_of(readers.edge_list(path)) == {("a", "b"), ("c", "d")}
    for name in ("page", "redirect", "pagelinks"):
        (tmp_path / f"{name}.sql").write_bytes(b"CREATE TABLE `x` (\n" + b"\n" * 400_000 + b"`a` int\n) x;\n")
    with pytest.raises(ValueError, match=r"page\.sql.*page_id"):
        mediawiki_links(tmp_path)
    head = b"CREATE TABLE `page` (\n`page_id` x,\n`page_namespace` x,\n`page_title` x,\n`page_is_redirect` x\n);\n"
    (tmp_path / "page.sql").write_bytes(head + b"INSERT INTO `page` VALUES (1,0,'a',0)," + b" " * 900_000)
    with pytest.raises(ValueError, match=r"page\.sql.*byte"):
        mediawiki_links(tmp_path)
    (tmp_path / "page.sql").write_bytes(b"-- " + b"x" * 30_000_000)
    with pytest.raises(ValueError, match=r"page\.sql.*CREATE TABLE"):
        mediawiki_links(tmp_path)
    assert time.monotonic() - start < 30  # quadratic, it took minutes


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 1000)
    monkeypatch.setattr(sources, "_LONGEST", 5000)
    (tmp_path / "combined_data_1.txt").write_bytes(b"1" * 20_000)
    with pytest.raises(ValueError, match=r"5,000 bytes.*combined_data_1\.txt"):
        netflix(tmp_path / "combined_data_1.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [" * 5000, "more than|lines|TOML"),
        ("x = " + "[" * 1900, "not a TOML file"),
        ("a" + ".a" * 40_000 + " = 1", "lines of 2,000"),
        ("[model]\nomega = " + "9" * 400, "omega"),
        ("[model]\nomega = 2020-01-01", "a number"),
        ("model = 1", r"a table \[model\]"),
        ("[model]\nhidden = {a = 1}", "text"),
    ],
)
def test_broken_configs_name_the_file(text, message, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_config(path).estimator_arguments()
    assert "c.toml" in str(caught.value)


def test_options_that_no_toml_parser_takes_are_text():
    for value in ("[" * 3000, "9" * 5000):
        assert parse_option(f"x={value}") == ("x", value)


def test_chunks_end_at_lines_that_are_not_between_quotes(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 16)
    text = b'a,"x\ny\nz"\n' * 20 + b"b,1\n"
    chunks = list(sources.whole_lines([text[i : i + 7] for i in range(0, len(text), 7)], b'"'))
    assert b"".join(chunks) == text
    assert all(chunk.count(b'"') % 2 == 0 and chunk.endswith(b"\n") for chunk in chunks)
    assert len(chunks) > 5

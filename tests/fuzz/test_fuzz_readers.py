"""Broken files of every format through the readers: a parse, or an error that names the file; nothing else, and soon.

Files are broken byte by byte (also below their compression) and by their grammar: numbers become huge, negative or NaN,
separators change, headers and bodies disagree. What CSV gives is compared with Python's csv module.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import tarfile
import zipfile

import pytest
from harness import ACCEPTED, Fuzz, mutated

from gramtower.cli.compare import load_experiment
from gramtower.cli.options import read_config
from gramtower.data import readers
from gramtower.data.interactions import Interactions
from gramtower.data.readers.mediawiki import mediawiki_links
from gramtower.data.readers.ratings import netflix
from gramtower.data.tables import FeatureTable
from gramtower.experiments.tuning.space import read_space

pl = pytest.importorskip("polars", reason="reading tables needs polars")

CSV = b'user,item,rating,day\nu1,a,5,2020-01-01\nu2,"b, c",3.5,2020-01-02\n"u ""3""",a,4,2020-02-01\nu1,d,,\n'
CSV += b"".join(b"u%d,i%d,%d,2021-01-%02d\n" % (k, k * 7 % 5, k % 6, k % 28 + 1) for k in range(12))
RATINGS = b"".join(b"%d::%d::%d::9783007%02d\n" % (k % 4, k % 5, k % 6, k) for k in range(12))
NETFLIX = b"1:\n7,4,2005-09-06\n8,5,2005-05-13\n2:\n7,3,2004-01-01\n9,5,2000-01-31\n"
LISTS = b"0 5 6\n1\n2 6  5 5\n3\t7 8 9\n"
WORDS = "swift,quick,like lightning\nslow,poky\ncafé,bar\n".encode()
EDGES = b"# a graph\na b 2\n a\tc  1\nb c 4\n"
EXTREME = b"3 4 5\n0,4 0:0.5 3:2\n 1:1\n2 2:1.5 0:-1e-3\n"
FEATURES = b"user,age,zip,genres,title\n007,20,02460,Drama|War,The Mask\nb,40,,War,mask, the!\nc,,1,,x\n".replace(
    b"mask, the!", b'"mask, the!"'
)
CONFIG = b'[data]\nleft = "user"\nright = "item"\nthreshold = 4\n[model]\ndim = 8\nhidden = [16, 8]\nomega = 0.01\n'
CONFIG += (
    b'[train]\noptimizer = "newton"\niterations = 3\n[train.option]\ncg_iterations = 5\n[features]\nhash-bits = 6\n'
)
SPACE = b'[space]\nomega = [0.001, 0.1]\nhidden = ["none", "64,64", [32]]\ndim = [8, 16]\nleft-power = true\n'
EXPERIMENT = (
    b"[data]\nshape = [20, 10, 40]\n[problem]\nomega = 0.1\n[towers]\ndim = 4\n[optimizers.gd]\n[run]\niterations = 2\n"
)

pytestmark = pytest.mark.filterwarnings("ignore::gramtower._util.checks.LeftOutWarning")


def dump(table, columns, rows):
    lines = [f"-- dump of `{table}`", f"CREATE TABLE `{table}` ("] + [f"  `{name}` varbinary(255)," for name in columns]
    lines += [") ENGINE=InnoDB;", f"INSERT INTO `{table}` VALUES {rows};", f"INSERT INTO `{table}` VALUES {rows};", ""]
    return "\n".join(lines).encode()


WIKI = {
    "page.sql": dump(
        "page",
        ["page_id", "page_namespace", "page_title", "page_is_redirect"],
        "(1,0,'Apple',0),(2,0,'O\\'Brien',0),(3,0,'Apples',1)",
    ),
    "redirect.sql": dump("redirect", ["rd_from", "rd_namespace", "rd_title", "rd_interwiki"], "(3,0,'Apple',NULL)"),
    "pagelinks.sql": dump("pagelinks", ["pl_from", "pl_namespace", "pl_title"], "(1,0,'O\\'Brien'),(2,0,'Apples')"),
}
WIKI_NEW = {**WIKI, "pagelinks.sql": dump("pagelinks", ["pl_from", "pl_target_id"], "(1,12),(2,11)")}
WIKI_NEW["linktarget.sql"] = dump(
    "linktarget", ["lt_id", "lt_namespace", "lt_title"], "(11,0,'Apple'),(12,0,'O\\'Brien')"
)


def zipped(files):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target.getvalue()


def tarred(files, mode="w"):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return target.getvalue()


def zstd(data):
    pyarrow = pytest.importorskip("pyarrow", reason="zstd is written by pyarrow; polars 1.32 writes none")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def parquet(data):
    """CSV as Parquet; what is no CSV any more as it is."""
    target = io.BytesIO()
    try:
        pl.read_csv(data, truncate_ragged_lines=True, infer_schema_length=2).write_parquet(target)
    except (pl.exceptions.PolarsError, OSError):
        return data
    return target.getvalue()


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


def table(path):
    Interactions.from_csv(path, "user", "item", value="rating", time="day", threshold=3)
    return Interactions.from_csv(path, "user", 1)


def features(path):
    FeatureTable.inferred(path, "user", hash_bits=4).encode(["b", "nobody"])
    given = FeatureTable(path, "user", ["age"], ["zip"], ["genres"], ["title"], hash_bits=4, ngrams="char")
    return given.encode_frame(path)


def extreme(path):
    found = readers.extreme_classification(path)
    assert found.features.shape[0] == found.pairs.shape[0]


FOLDERS = {  # their files, and how they are read
    "citeulike": (
        {"users.dat": b"2 0 2\n0\n", "words.dat": b"2 3:1 0:4\n0\n1 1:2\n", "vocabulary.dat": b"a\nb\nc\nd\n"},
        readers.citeulike,
    ),
    "musae": (
        {
            "edges.csv": b"id_1,id_2\n0,7\n7,3\n",
            "features.json": b'{"7": [2, 0], "0": [1], "3": []}',
            "pages.csv": b"id,name\n0,A\n3,C\n7,D\n",
        },
        readers.musae,
    ),
    "wikispeedia": (
        {"links.tsv": b"# x\nA%C3%A9\tB\nB\tC_c\n", "categories.tsv": b"# y\n\nB\ts.Food\nB\ts.Drink\n"},
        readers.wikispeedia,
    ),
}
# format: the file's name, its content, how it may be packed, how it is read
FILES = {
    "csv": ("t.csv", CSV, tuple(PACKERS), table),
    "movielens": ("ratings.dat", RATINGS, ("", ".gz", ".zst"), readers.movielens),
    "movielens table": (
        "movies.dat",
        b"1::Up (2009)::A|B\n2::Heat::C\n",
        ("",),
        lambda p: readers.movielens_table(p, "movies"),
    ),
    "netflix combined": ("combined_data_1.txt", NETFLIX, ("", ".gz", ".xz"), lambda p: netflix(p, times=True)),
    "netflix movie": ("mv_0000001.txt", NETFLIX, ("",), lambda p: netflix(p, threshold=None, labels=True)),
    "lists": ("train.txt", LISTS, tuple(PACKERS), readers.item_lists),
    "thesaurus": ("words.txt", WORDS, ("", ".xz"), readers.thesaurus),
    "edges": ("edges.txt", EDGES, ("", ".gz"), lambda p: readers.edge_list(p, value=2, threshold=2)),
    "edges ->": ("edges.txt", EDGES.replace(b" ", b"->"), ("",), lambda p: readers.edge_list(p, separator="->")),
    "extreme": ("train.txt", EXTREME, ("", ".bz2"), extreme),
    "features csv": ("f.csv", FEATURES, ("", ".gz", ".zst"), features),
    "config": ("c.toml", CONFIG, ("",), lambda p: read_config(p).estimator_arguments()),
    "space": ("s.toml", SPACE, ("",), read_space),
    "experiment": ("e.toml", EXPERIMENT, ("",), load_experiment),
}
ARCHIVES = {
    "movielens zip": ("ml.zip", lambda data: zipped({"ml/ratings.dat": data}), RATINGS, readers.movielens),
    "netflix zip": ("nf.zip", lambda data: zipped({"x/mv_0000001.txt": data}), NETFLIX, netflix),
    "netflix tar": ("training_set.tar", lambda data: tarred({"x/mv_0000001.txt": data}), NETFLIX, netflix),
    "netflix tar.gz": (
        "nf_prize_dataset.tar.gz",
        lambda data: tarred({"training_set.tar": tarred({"mv_0000001.txt": data})}, "w:gz"),
        NETFLIX,
        netflix,
    ),
}
PARQUET = {
    "parquet": (
        "t.parquet",
        parquet,
        CSV,
        lambda p: Interactions.from_parquet(p, "user", 1, value="rating", labels=True),
    ),
    "features parquet": ("f.parquet", parquet, FEATURES, lambda p: FeatureTable.inferred(p, "user", hash_bits=4)),
}
_NUMBERS = [
    b"-1",
    b"0",
    b"9" * 19,
    b"9" * 40,
    b"1e309",
    b"1e38",
    b"nan",
    b"NaN",
    b"inf",
    b"-inf",
    b"1_0",
    b"0x1",
    b"",
    b"x",
]
_MARKS = [
    b",",
    b";",
    b"\t",
    b"::",
    b":",
    b" ",
    b"  ",
    b"|",
    b"\n",
    b"\r\n",
    b"\r",
    b'"',
    b"'",
    b"(",
    b")",
    b"`",
    b"=",
    b"[",
]


def bent(data, rng):
    """Changes that know of numbers, separators and lines."""
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        if kind == 0:
            found = list(re.finditer(rb"-?\d+(\.\d+)?", data))
            if found:
                at = rng.choice(found)
                data = data[: at.start()] + rng.choice(_NUMBERS) + data[at.end() :]
        elif kind == 1:
            old = rng.choice(_MARKS)
            data = data.replace(old, rng.choice(_MARKS), rng.choice([1, 2, -1]))
        elif kind == 2:
            lines = data.split(b"\n")
            at = rng.randrange(len(lines))
            lines[at : at + 1] = rng.choice([[], [lines[at]] * 2, [b""], [lines[0]], [lines[at] + b"," + lines[at]]])
            data = b"\n".join(lines)
        elif kind == 3:
            data = rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x1f\x8b", b" ", b"\n", b"x\x01"]) + data
        elif kind == 4:
            place = rng.randrange(len(data) + 1)
            data = data[:place] + rng.choice(_MARKS) * rng.choice([1, 2, 3000]) + data[place:]
        else:
            data = data.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b""]), rng.choice([1, -1]))
    return data


def broken(data, rng):
    return (mutated if rng.random() < 0.5 else bent)(data, rng)


def read(fuzz, kind, path, reader):
    """The answer of a reader; an error must name the file (or folder)."""

    def call():
        try:
            return reader(path)
        except ACCEPTED as error:
            if path.name not in str(error):
                raise AssertionError(f"no file is named: {error}") from error
            raise

    def shown():
        return path.read_bytes() if path.is_file() else {file.name: file.read_bytes() for file in path.iterdir()}

    answer = fuzz.attempt(f"{kind} {path.name} {shown()!r}", call)
    fuzz.outcomes[kind] += 1
    return answer


def test_broken_folders_are_read_or_named(tmp_path):
    fuzz = Fuzz("readers_folders", small=150)
    for rng in fuzz:
        kind = rng.choice(sorted(FOLDERS))
        files, reader = FOLDERS[kind]
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        victim = rng.choice(sorted(files))
        for name, data in files.items():
            (folder / name).write_bytes(broken(data, rng) if name == victim else data)
        read(fuzz, kind, folder, reader)


def test_broken_text_files_are_read_or_named(tmp_path):
    fuzz = Fuzz("readers_text", small=260)
    for rng in fuzz:
        kind = "csv" if rng.random() < 0.15 else rng.choice(list(FILES))
        name, data, endings, reader = FILES[kind]
        ending = rng.choice(endings)
        content = broken(data, rng) if rng.random() < 0.8 else data
        packed = PACKERS[ending](content)
        if ending and rng.random() < 0.4:
            packed = mutated(packed, rng)
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(packed)
        found = read(fuzz, kind, path, reader)
        if kind == "csv" and ending == "" and found is not None:
            _agrees_with_csv(content, found, fuzz)
        path.unlink()


def _agrees_with_csv(content, found, fuzz):
    """The pairs of a table are those that Python's csv module reads, where it reads the text."""
    text = content.removeprefix(b"\xef\xbb\xbf").decode()
    if re.search(r"\r(?!\n)", text):
        return  # a line's end to csv, a letter to us
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error:
        return
    place = rows[0].index("user") if rows and "user" in rows[0] else None
    if place is None:
        return
    cells = [(row + [""] * 9)[:9] for row in rows[1:]]
    expected = {(row[place], row[1]) for row in cells if row[place] and row[1]}
    pairs = found.matrix.tocoo()
    given = {(found.left_ids[i], found.right_ids[j]) for i, j in zip(pairs.row, pairs.col, strict=True)}
    assert {pair for pair in given if all(pair)} == expected, f"input {fuzz.number}: {content!r}"
    fuzz.outcomes["agreed with csv"] += 1


@pytest.mark.parametrize(("name", "kinds", "small"), [("archives", ARCHIVES, 80), ("parquet", PARQUET, 3)])
def test_broken_archives_and_parquet_files_are_read_or_named(name, kinds, small, tmp_path):
    fuzz = Fuzz(f"readers_{name}", small)
    for rng in fuzz:
        kind = rng.choice(list(kinds))
        name, pack, data, reader = kinds[kind]
        packed = pack(broken(data, rng) if rng.random() < 0.5 else data)
        if rng.random() < 0.7:
            packed = mutated(packed, rng)
        path = tmp_path / name
        path.write_bytes(packed)
        read(fuzz, kind, path, reader)
        path.unlink()


def test_broken_dumps_are_read_or_named(tmp_path):
    fuzz = Fuzz("readers_dumps", small=100)
    for rng in fuzz:
        files = rng.choice([WIKI, WIKI_NEW])
        folder = tmp_path / "wiki"
        folder.mkdir()
        wrong = rng.choice(list(files))
        for name, data in files.items():
            (folder / name).write_bytes(broken(data, rng) if name == wrong else data)
        read(fuzz, "mediawiki", folder, mediawiki_links)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

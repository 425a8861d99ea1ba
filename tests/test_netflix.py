"""The Netflix Prize in the layouts it comes in: the same pairs from each, whatever the chunks, and damage named."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile

import pytest

from gramtower.data import sources
from gramtower.data.readers.ratings import is_netflix, netflix

pytest.importorskip("polars", reason="reading tables needs polars")

MOVIES = {
    1: ["1488844,3,2005-09-06", "822109,5,2005-05-13", "885013,4,2005-10-19"],
    2: ["2059652,4,2005-09-05", "885013,5,2005-09-06"],
    3: ["7,1,2000-01-01"],
    17770: ["822109,4,2005-01-01", "7,5,2003-02-03"],
}
PAIRS = {("822109", "1"), ("885013", "1"), ("2059652", "2"), ("885013", "2"), ("822109", "17770"), ("7", "17770")}


def text(movie, end="\n"):
    return end.join([f"{movie}:", *MOVIES[movie]]) + end


def pack_tar(path, files, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def layout(kind, folder, end="\n"):
    """Writes a layout and returns the path to give."""
    movies = {f"training_set/mv_{movie:07d}.txt": text(movie, end).encode() for movie in MOVIES}
    combined = {
        "combined_data_1.txt": (text(1, end) + text(2, end)).encode(),
        "combined_data_2.txt": (text(3, end) + text(17770, end)).encode(),
    }
    if kind in ("training_set", "combined", "combined.gz"):
        for name, data in (movies if kind == "training_set" else combined).items():
            target = folder / (name + ".gz" if kind == "combined.gz" else name)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(gzip.compress(data) if kind == "combined.gz" else data)
        return folder
    if kind.endswith("zip"):
        path = folder / "archive.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (combined if kind == "combined.zip" else movies).items():
                archive.writestr(f"some/{name}", data)
        return path
    pack_tar(inner := folder / "training_set.tar", movies)
    if kind == "training_set.tar":
        return inner
    if kind == "folder with tar":
        return folder
    pack_tar(outer := folder / "nf_prize_dataset.tar.gz", {"download/training_set.tar": inner.read_bytes()}, "w:gz")
    inner.unlink()
    return outer


KINDS = ["training_set", "training_set.zip", "training_set.tar", "folder with tar", "nf_prize_dataset.tar.gz",
         "combined", "combined.gz", "combined.zip"]  # fmt: skip


def pairs_of(found):
    coo = found.matrix.tocoo()
    return {(found.left_ids[i], found.right_ids[j]) for i, j in zip(coo.row, coo.col, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_ratings_of_4_and_5(kind, tmp_path):
    path = layout(kind, tmp_path)
    assert is_netflix(path)
    found = netflix(path)
    assert pairs_of(found) == PAIRS
    assert found.left_ids.tolist() == ["822109", "885013", "2059652", "7"]  # by first appearance
    assert (found.left_name, found.right_name) == ("user", "movie")
    assert {key: found.report[key] for key in ("rows", "rows_below_threshold", "pairs")} == {
        "rows": 8, "rows_below_threshold": 2, "pairs": 6,
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 7, 20, 33, 64, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_chunks_may_end_anywhere(size, end, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", size)
    path = layout("combined", tmp_path, end)
    found = netflix(path, times=True)
    assert pairs_of(found) == PAIRS
    assert found.times.min() == 1044230400  # 2003-02-03


def test_ratings_can_be_labels(tmp_path):
    found = netflix(layout("combined", tmp_path), threshold=None, labels=True)
    assert found.matrix.nnz == 8
    assert found.matrix[found.left_rows("1488844"), found.right_rows("1")] == 3
    assert netflix(layout("combined", tmp_path), threshold=5).matrix.nnz == 3
    assert found.times is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1:\n7,4,2000-01-01\n7;4;2001\n", "a line '7;4;2001'"),
        (b"1:\n7,4,2000-01-01\n7,,2001-01-01\n", "a line '7,,2001-01-01'"),
        (b"7,4,2000-01-01\n", "before any line 'movie:'"),
        (b"1:\nx,4,2000-01-01\n", "a line 'x,4,2000-01-01'"),
        (b"1:\n7,four,2000-01-01\n", "a line '7,four,2000-01-01' below '1:'"),
        (b"1:\n", "no rating"),
        (b"one:\n7,4,2000-01-01\n", "a line 'one:' before any line 'movie:'"),
        (b"1:\n7,4,2000-01-01\ntwo:\n8,5,2000-01-01\n", "a line 'two:' below '1:'"),
        (b"1:\n7,4,2000-01-01\n99999999999:\n8,5,2000-01-01\n", "a line '99999999999:' below '1:'"),
        (b"1:\n7,inf,2000-01-01\n", "a line '7,inf,2000-01-01' below '1:'"),
        (b"1:\n7,1e39,2000-01-01\n", "finite rating"),
        (b"1:\n,5,2000-01-01\n", "a line ',5,2000-01-01'"),
        (b"1:\n7,5,2000-01-01,x\n", "a line .*7,5,2000-01-01,x"),
        (b",,\n\n", "no rating"),
        ("1:\n7,4,2000-01-01\n".encode("utf-16"), "begins like UTF-16"),
    ],
)
def test_lines_that_are_no_ratings_are_shown(content, message, tmp_path):
    (tmp_path / "combined_data_1.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        netflix(tmp_path)


def test_marks_of_utf8_and_ratings_that_are_nan(tmp_path):
    for movie in (1, 2):
        content = b"\xef\xbb\xbf%d:\n%d,5,2000-01-01\n9,nan,2000-01-01\n" % (movie, movie)
        (tmp_path / f"mv_000000{movie}.txt").write_bytes(content)
    found = netflix(tmp_path)
    assert pairs_of(found) == {("1", "1"), ("2", "2")}
    counted = {name: found.report[name] for name in ("rows", "rows_without_number", "rows_below_threshold")}
    assert counted == {"rows": 4, "rows_without_number": 2, "rows_below_threshold": 0}


def test_ratings_without_a_movie_do_not_go_to_the_movie_of_the_file_before(tmp_path):
    (tmp_path / "mv_0000001.txt").write_text("1:\n7,4,2000-01-01\n")
    (tmp_path / "mv_0000002.txt").write_text("8,5,2000-01-01\n")
    with pytest.raises(ValueError, match=r"'8,5,2000-01-01'.*'movie:'"):
        netflix(tmp_path)


def test_damaged_ambiguous_and_foreign_sources_are_refused(tmp_path):
    path = layout("nf_prize_dataset.tar.gz", tmp_path)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ValueError, match="damaged"):
        netflix(path)
    path.unlink()
    layout("combined", tmp_path)
    layout("training_set", tmp_path)
    with pytest.raises(ValueError, match="more than once"):
        netflix(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"training_set.*mv_"):
        netflix(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        netflix(tmp_path / "nothing")


def test_ratings_below_the_threshold_alone_leave_nothing(tmp_path):
    (tmp_path / "combined_data_1.txt").write_text("1:\n7,1,2000-01-01\n")
    with pytest.raises(ValueError, match="none"):
        netflix(tmp_path)

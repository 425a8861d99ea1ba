"""Ratings: MovieLens (all editions) and the Netflix Prize.

MovieLens folders, zips or files are read whole. The Netflix ratings come in two layouts:

    training_set/mv_0000001.txt …    one file for each movie, in a folder, zip or tar (also training_set.tar in a tar)
    combined_data_1.txt …            the same contents concatenated, in a folder or zip

Both have lines ``movie:`` followed by the ratings ``user,rating,date``. They are read in chunks: each rating kept takes
8 bytes (16 with times), and about 50 while the matrix is built. Ratings of NaN are dropped and counted; infinite
ratings and any other lines are refused.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower.data import frames, sources
from gramtower.data.frames import Column
from gramtower.data.ids import Coded, as_objects
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import Rule, assemble
from gramtower.data.readers.item_lists import one_byte
from gramtower.data.sources import BOM, PathLike, existing, members, read_members, reading

if TYPE_CHECKING:
    from polars import DataFrame


_ENDING = r"\.(dat|csv|data)(\.(xz|gz|bz2|zst))?"
_COLUMNS = {  # of MovieLens files without a header line
    "ratings": ("user", "movie", "rating", "timestamp"),
    "movies": ("movie", "title", "genres"),
    "users": ("user", "gender", "age", "occupation", "zip"),
}
_RENAMED = {"userId": "user", "movieId": "movie"}


def movielens(
    path: PathLike, *, threshold: float | None = 4.0, labels: bool = False, times: bool | None = None
) -> Interactions:
    """Read the ratings of MovieLens: ``ratings.dat`` (1M, 10M), ``ratings.csv`` (20M and later) or ``u.data`` (100K).

    Args:
        path: folder, zip, or the ratings file itself, possibly compressed.
        threshold: smallest rating that makes a pair; None keeps all ratings.
        labels: with ``threshold=None``, whether ratings are the labels.
        times: whether to keep timestamps; by default they are kept if the file has them.

    Returns:
        Interactions of ``"user"`` and ``"movie"``.
    """
    with reading(path):
        name, data = _movielens_file(path, "ratings")
        text, options, present = _movielens_layout(name, data, "ratings")
        if times and "timestamp" not in present:
            check.fail("times", f"True with {name}", "a ratings file with timestamps")
        column = {plain: place for place, plain in enumerate(present)}
        options["time"] = column.get("timestamp") if times is None or times else None
        user, movie, rating = (column[name] for name in _COLUMNS["ratings"][:3])
        found = Interactions.from_csv(text, user, movie, value=rating, threshold=threshold, labels=labels, **options)
        return found.renamed("user", "movie")


def movielens_table(path: PathLike, table: str) -> DataFrame:
    """``"movies"`` (movie, title, genres separated by ``|``) or ``"users"`` (user, gender, age, occupation, zip).

    All columns are text. Pass the frame to :class:`~gramtower.data.tables.FeatureTable`.
    """
    check.choice("table", table, ("movies", "users"))
    with reading(path):
        name, data = _movielens_file(path, table)
        text, options, present = _movielens_layout(name, data, table)
        try:
            text.decode()
        except UnicodeDecodeError:
            options["encoding"] = "latin-1"  # what the .dat files of 1M are in
        chosen: list[tuple[str, Column]] = [("table", place) for place in range(len(present))]
        series = frames.read_csv(text, chosen, **options)
        made: DataFrame = frames.polars().DataFrame(
            [column.alias(name) for column, name in zip(series, present, strict=True)]
        )
        return made


def _movielens_file(path: PathLike, table: str) -> tuple[str, bytes]:
    """Name and decompressed content of a table in a folder or zip, or of the file given."""
    place = existing("path", path, folder=True)
    if not place.is_dir() and not zipfile.is_zipfile(place):
        return place.name, sources.content(place)
    stems = r"(ratings\w*|u)" if table == "ratings" else table
    found = members(place, re.compile(stems + _ENDING, re.IGNORECASE))
    if not found:
        listing = ", ".join(members(place, re.compile(".*"))[:20]) or "nothing"
        kind = "folder" if place.is_dir() else "zip"
        check.fail("path", f"{place}, which holds {listing}", f"a {kind} with {table}.dat or {table}.csv")
    if place.is_dir():
        return found[0], sources.content(place / found[0])
    return found[0], b"".join(read_members(place, found[:1], most=host.memory_size() // 4)).rstrip(b"\r\n")


def _movielens_layout(name: str, data: bytes, table: str) -> tuple[bytes, dict[str, Any], list[str]]:
    """Text with one-character separators, how to read it, and its columns under our names."""
    first = data.split(b"\n", 1)[0].strip().removeprefix(BOM)
    for separator in (b"::", b"\t"):
        if separator in first:
            text, single = one_byte(data, separator) if len(separator) > 1 else (data, "\t")
            present = list(_COLUMNS[table][: first.count(separator) + 1])
            options: dict[str, Any] = {"separator": single, "header": False, "quote": None}
            break
    else:
        present = [_RENAMED.get(column, column) for column in first.decode("utf-8", "replace").split(",")]
        text, options = data, {"separator": ",", "header": True}
    needed = _COLUMNS[table][:3]
    if not set(needed) <= set(present):
        check.fail("path", f"{name}, which begins with {first[:60]!r}", f"MovieLens {table}: {', '.join(needed)}")
    return text, options, present


_COMBINED = re.compile(r"combined_data_\d+\.txt(\.gz|\.xz|\.bz2)?")
_MOVIES = re.compile(r"mv_\d+\.txt")
_TARS = re.compile(r"(training_set|nf_prize_dataset)\.(tar|tar\.gz|tgz)")
_NONE = -1  # the movie of lines before the first 'movie:' of a file
_FORGET = b"\n:\n"  # between files: what follows belongs to no movie yet
_EXPECTED = "training_set with mv_*.txt (folder, zip or tar), or combined_data_*.txt (folder, zip or one of them)"


def netflix(
    path: PathLike, *, threshold: float | None = 4.0, labels: bool = False, times: bool = False
) -> Interactions:
    """Read the ratings of the Netflix Prize.

    Args:
        path: a folder, zip or tar of either layout, or one file of it.
        threshold: smallest rating that makes a pair; None keeps all ratings.
        labels: with ``threshold=None``, whether ratings are the labels.
        times: whether to keep the dates.

    Returns:
        Interactions of ``"user"`` and ``"movie"``.
    """
    rule = Rule(threshold, labels, "max")
    place = existing("path", path, folder=True)
    with reading(place):
        kept: dict[str, list[NDArray[Any]]] = {"user": [], "movie": [], "value": [], "time": []}
        counts = {"rows": 0, "rows_without_number": 0}
        movie = _NONE
        for chunk in sources.whole_lines(_content(place)):
            columns, movie = _ratings(chunk, movie, rule, times, counts)
            for name, column in columns.items():
                kept[name].append(column)
        if not counts["rows"]:
            check.fail("path", f"{place}, in which there is no rating", "lines 'movie:' and 'user,rating,date'")
        below = counts["rows"] - counts["rows_without_number"] - sum(map(len, kept["user"]))
        numbers = {name: np.concatenate(kept.pop(name)) for name in ("value", "time") if kept[name]}
        users, movies = (_coded(np.concatenate(kept.pop(name))) for name in ("user", "movie"))
        found = assemble(users, movies, numbers, Rule(None, labels, "max"))
        counts["rows_without_number"] += found.report["rows_without_number"]  # those without a date
        return Interactions(**vars(found)).renamed("user", "movie", **counts, rows_below_threshold=below)


def is_netflix(path: Path) -> bool:
    """Whether a folder or archive has one of the layouts."""
    return bool(_TARS.fullmatch(path.name) or any(sources.members(path, p) for p in (_COMBINED, _MOVIES, _TARS)))


def _content(path: Path) -> Iterator[bytes]:
    """The lines of all files of either layout, one after the other."""
    if sources.is_tar(path):
        return sources.read_tar(path, _MOVIES, _FORGET)
    combined, movies = sources.members(path, _COMBINED), sources.members(path, _MOVIES)
    tars = [path / name for name in sources.members(path, _TARS)] if path.is_dir() else []
    if sum(map(bool, (combined, movies, tars))) > 1:
        given = f"{path}, which holds the ratings more than once ({(combined + movies)[0]}, ...)"
        check.fail("path", given, "one of the layouts")
    if tars:
        return sources.read_tar(tars[0], _MOVIES, _FORGET)
    if combined or movies:
        return sources.read_members(path, combined or movies, _FORGET)
    if path.is_dir() or not (_COMBINED.fullmatch(path.name) or _MOVIES.fullmatch(path.name)):
        check.fail("path", path, _EXPECTED)
    return sources.read_pieces(path)


def _ratings(
    chunk: bytes, movie: int, rule: Rule, times: bool, counts: dict[str, int]
) -> tuple[dict[str, NDArray[Any]], int]:
    """Columns of the ratings kept of a chunk, and the movie that it ends with; adds to the counts."""
    pl = frames.polars()
    table = _fields(chunk).filter(~pl.all_horizontal(pl.all().is_null()))  # without blank lines
    if not len(table):
        return {}, movie
    bare = pl.col("rating").is_null() & pl.col("date").is_null()
    heads = pl.when(bare).then(pl.col("user").str.extract(r"^(\d*):[ \t]*$").replace("", str(_NONE)))
    table = table.with_columns(
        heads.cast(pl.Int32, strict=False).alias("head"),
        pl.col("user").cast(pl.Int32, strict=False).alias("id"),
        pl.col("rating").str.strip_chars(" \t").cast(pl.Float32, strict=False).alias("value"),
    ).with_columns(pl.col("head").forward_fill().fill_null(movie).alias("movie"))
    ratings = table.filter(pl.col("head").is_null())
    movie = table["movie"][-1]
    wrong = ratings.filter(
        pl.col("id").is_null() | pl.col("value").is_null() | pl.col("value").is_infinite() | (pl.col("movie") == _NONE)
    )
    if len(wrong):
        line = ",".join(cell or "" for cell in wrong.row(0)[:3]).rstrip(",")
        below = "before any line 'movie:'" if wrong["movie"][0] == _NONE else f"below '{wrong['movie'][0]}:'"
        check.fail("path", f"a line {line[:60]!r} {below}", "'movie:' or 'user,rating,date' with a finite rating")
    counts["rows"] += len(ratings)
    kept = ratings.filter(pl.col("value").is_not_nan())
    counts["rows_without_number"] += len(ratings) - len(kept)
    if rule.threshold is not None:
        kept = kept.filter(pl.col("value") >= rule.threshold)
    columns = {"user": kept["id"].to_numpy(), "movie": kept["movie"].to_numpy()}
    if rule.labels:
        columns["value"] = kept["value"].to_numpy()
    if times:
        columns["time"] = frames.seconds("times", kept["date"]).to_numpy()
    return columns, movie


def _fields(chunk: bytes) -> Any:
    """The lines of a chunk as columns of text: user, rating and date."""
    pl = frames.polars()
    try:
        return pl.read_csv(b"user,rating,date\n" + chunk, infer_schema=False, quote_char=None)
    except pl.exceptions.ComputeError:
        for line in chunk.splitlines():
            if line.count(b",") > 2:
                check.fail("path", f"a line {line[:60]!r}", "'movie:' or 'user,rating,date'")
        raise


def _coded(numbers: NDArray[np.int32]) -> Coded:
    """Ids without another reference, so that assemble can free them."""
    return Coded(numbers, lambda places: as_objects([str(number) for number in numbers[places].tolist()]))

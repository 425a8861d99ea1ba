"""The Netflix Prize ratings, in both layouts that are in circulation.

    training_set/mv_0000001.txt …    a file for each movie, in a folder, zip or tar (also training_set.tar in a tar)
    combined_data_1.txt …            the same contents one after the other, in a folder or zip

Both are lines ``movie:`` followed by its ratings ``user,rating,date``. Read once in chunks: besides one chunk 8 bytes
are held for each rating kept (16 with times), and about 50 while the matrix is put together. Checked by
tests/test_netflix.py; benchmarks/bench_dumps.py measures time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data import frames, streams
from gramtower.data.assembly import Rule, assemble
from gramtower.data.frames import PathLike
from gramtower.data.ids import Coded, as_objects
from gramtower.data.interactions import Interactions

_COMBINED = re.compile(r"combined_data_\d+\.txt(\.gz|\.xz|\.bz2)?")
_MOVIES = re.compile(r"mv_\d+\.txt")
_TARS = re.compile(r"(training_set|nf_prize_dataset)\.(tar|tar\.gz|tgz)")
_EXPECTED = "training_set with mv_*.txt (folder, zip or tar), or combined_data_*.txt (folder, zip or one of them)"


def netflix(
    path: PathLike, *, threshold: float | None = 4.0, labels: bool = False, times: bool = False
) -> Interactions:
    """Ratings of the Netflix Prize.

    Args:
        path: a folder, zip or tar of either layout, or one file of it.
        threshold: smallest rating that makes a pair; None keeps all of them.
        labels: with ``threshold=None``, whether ratings are the labels.
        times: whether to keep the dates.

    Returns:
        Interactions of ``"user"`` and ``"movie"``.
    """
    rule = Rule(threshold, labels, "max")
    place = frames.existing("path", path)
    kept: dict[str, list[NDArray[Any]]] = {"user": [], "movie": [], "value": [], "time": []}
    total, movie = 0, None
    for chunk in streams.whole_lines(_content(place)):
        columns, rows, movie = _ratings(chunk, movie, rule, times)
        total += rows
        for name, column in columns.items():
            kept[name].append(column)
    if not total:
        check.fail("path", f"{place}, in which there is no rating", "lines 'movie:' and 'user,rating,date'")
    counts = {"rows": total, "rows_below_threshold": total - sum(map(len, kept["user"]))}
    numbers = {name: np.concatenate(kept.pop(name)) for name in ("value", "time") if kept[name]}
    rule = Rule(None, labels, "max")
    found = assemble(_coded(np.concatenate(kept.pop("user"))), _coded(np.concatenate(kept.pop("movie"))), numbers, rule)
    return Interactions(**vars(found)).renamed("user", "movie", **counts)


def is_netflix(path: Path) -> bool:
    """Whether a folder or archive holds one of the layouts."""
    return bool(_TARS.fullmatch(path.name) or any(streams.members(path, p) for p in (_COMBINED, _MOVIES, _TARS)))


def _content(path: Path) -> Iterator[bytes]:
    """The lines of all files of either layout, one after the other."""
    if streams.is_tar(path):
        return streams.read_tar(path, _MOVIES)
    combined, movies = streams.members(path, _COMBINED), streams.members(path, _MOVIES)
    tars = [path / name for name in streams.members(path, _TARS)] if path.is_dir() else []
    if sum(map(bool, (combined, movies, tars))) > 1:
        given = f"{path}, which holds the ratings more than once ({(combined + movies)[0]}, ...)"
        check.fail("path", given, "one of the layouts")
    if tars:
        return streams.read_tar(tars[0], _MOVIES)
    if combined or movies:
        return streams.read_members(path, combined or movies)
    if path.is_dir() or not (_COMBINED.fullmatch(path.name) or _MOVIES.fullmatch(path.name)):
        check.fail("path", path, _EXPECTED)
    return streams.read_pieces(path)


def _ratings(
    chunk: bytes, movie: int | None, rule: Rule, times: bool
) -> tuple[dict[str, NDArray[Any]], int, int | None]:
    """Columns of the ratings kept of a chunk, how many ratings it has, and the movie that it ends with."""
    pl = frames.polars()
    kinds = {"user": pl.String, "rating": pl.Float32, "date": pl.String}
    if not chunk.strip():
        return {}, 0, movie
    try:
        lines = pl.read_csv(b"user,rating,date\n" + chunk, schema_overrides=kinds, quote_char=None).filter(
            pl.col("user").is_not_null()
        )
    except pl.exceptions.PolarsError as error:
        check.fail("path", f"ratings that cannot be read ({str(error).splitlines()[0]})", "lines 'user,rating,date'")
    heads = pl.when(pl.col("rating").is_null()).then(pl.col("user").str.extract(r"^(\d+):$").cast(pl.Int32))
    table = lines.with_columns(
        pl.coalesce(heads.forward_fill(), pl.lit(movie, dtype=pl.Int32)).alias("movie"),
        pl.col("user").cast(pl.Int32, strict=False).alias("id"),
    )
    head = table["user"].str.ends_with(":") & table["rating"].is_null()
    wrong = table.filter(~head & (pl.col("id").is_null() | pl.col("rating").is_null() | pl.col("movie").is_null()))
    if len(wrong):
        cells = ("" if cell is None else f"{cell:g}" if isinstance(cell, float) else cell for cell in wrong.row(0)[:3])
        line = ",".join(cells).rstrip(",")
        reason = " before any line 'movie:'" if wrong["id"][0] is not None and wrong["movie"][0] is None else ""
        check.fail("path", f"a line {line[:60]!r}{reason}", "'movie:' or 'user,rating,date'")
    last = table["movie"][-1]
    ratings = table.filter(~head)
    rows = len(ratings)
    if rule.threshold is not None:
        ratings = ratings.filter(pl.col("rating") >= rule.threshold)
    columns = {"user": ratings["id"].to_numpy(), "movie": ratings["movie"].to_numpy()}
    if rule.labels:
        columns["value"] = ratings["rating"].to_numpy()
    if times:
        columns["time"] = frames.seconds("times", ratings["date"]).to_numpy()
    return columns, rows, last


def _coded(numbers: NDArray[np.int32]) -> Coded:
    """Ids as they are, the only reference to them, so that assemble can free them."""
    return Coded(numbers, lambda places: as_objects([str(number) for number in numbers[places].tolist()]))

"""MovieLens folders and zips, of every edition. Reads the whole file: O(size)."""

from __future__ import annotations

import re
import zipfile
from typing import TYPE_CHECKING, Any

from gramtower._util import checks as check
from gramtower._util import host
from gramtower.data import frames
from gramtower.data.frames import Column
from gramtower.data.interactions import Interactions
from gramtower.data.readers.lists import one_byte
from gramtower.data.sources import BOM, PathLike, existing, reading
from gramtower.data.streams import members, read_members

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
    """Ratings of MovieLens: ``ratings.dat`` (1M, 10M), ``ratings.csv`` (20M and later) or ``u.data`` (100K).

    Args:
        path: folder, zip or the ratings file itself, which may be compressed.
        threshold: smallest rating that makes a pair; None keeps all of them.
        labels: with ``threshold=None``, whether ratings are the labels.
        times: whether to keep timestamps; by default, where the file has them.

    Returns:
        Interactions of ``"user"`` and ``"movie"``.
    """
    with reading(path):
        name, data = _movielens_file(path, "ratings")
        text, options, present = _movielens_layout(name, data, "ratings")
        if times and "timestamp" not in present:
            check.fail("times", f"True with {name}", "a ratings file with timestamps")
        column = {plain: place for place, plain in enumerate(present)}
        with_times = "timestamp" in column if times is None else times
        found = Interactions.from_csv(
            text,
            column["user"],
            column["movie"],
            value=column["rating"],
            time=column["timestamp"] if with_times else None,
            threshold=threshold,
            labels=labels,
            **options,
        )
        return found.renamed("user", "movie")


def movielens_table(path: PathLike, table: str) -> DataFrame:
    """``"movies"`` (movie, title, genres separated by ``|``) or ``"users"`` (user, gender, age, occupation, zip).

    All columns are text. Give the frame to :class:`~gramtower.data.tables.FeatureTable`.
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
    stems = r"(ratings\w*|u)" if table == "ratings" else table
    archive = place.is_dir() or zipfile.is_zipfile(place)
    if not archive:
        return place.name, frames.content(place)
    found = members(place, re.compile(stems + _ENDING, re.IGNORECASE))
    if not found:
        listing = ", ".join(members(place, re.compile(".*"))[:20]) or "nothing"
        kind = "folder" if place.is_dir() else "zip"
        check.fail("path", f"{place}, which holds {listing}", f"a {kind} with {table}.dat or {table}.csv")
    if place.is_dir():
        return found[0], frames.content(place / found[0])
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

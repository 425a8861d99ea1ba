"""Readers of the layouts that public data sets come in.

MovieLens folders and zips, ``user item item …`` lists, edge lists, thesaurus lines, and the text format of extreme
classification. Each reads the whole file: O(size) time and memory. Checked by tests/test_readers.py.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from gramtower import _checks as check
from gramtower.data import frames
from gramtower.data.frames import Column, PathLike
from gramtower.data.interactions import Interactions

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
    place = frames.existing("path", path)
    stems = r"(ratings\w*|u)" if table == "ratings" else table
    wanted = re.compile(stems + _ENDING, re.IGNORECASE)
    if place.is_dir():
        names = [file for file in sorted(place.iterdir()) if wanted.fullmatch(file.name)]
        if not names:
            there = ", ".join(file.name for file in sorted(place.iterdir())) or "nothing"
            check.fail("path", f"{place}, which holds {there}", f"a folder with {table}.dat or {table}.csv")
        return names[0].name, frames.content(names[0])
    if zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            members = [name for name in sorted(archive.namelist()) if wanted.fullmatch(Path(name).name)]
            if not members:
                there = ", ".join(archive.namelist())
                check.fail("path", f"{place}, which holds {there}", f"a zip with {table}.dat or {table}.csv")
            return Path(members[0]).name, archive.read(members[0])
    return place.name, frames.content(place)


def _movielens_layout(name: str, data: bytes, table: str) -> tuple[bytes, dict[str, Any], list[str]]:
    """Text with one-character separators, how to read it, and its columns under our names."""
    first = data.split(b"\n", 1)[0].strip()
    if b"::" in first:
        present = list(_COLUMNS[table][: first.count(b"::") + 1])
        return data.replace(b"::", b"\t"), {"separator": "\t", "header": False, "quote": None}, present
    if b"\t" in first:
        return (
            data,
            {"separator": "\t", "header": False, "quote": None},
            list(_COLUMNS[table][: first.count(b"\t") + 1]),
        )
    present = [_RENAMED.get(column, column) for column in first.decode("utf-8-sig", "replace").split(",")]
    needed = _COLUMNS[table][:3]
    if not set(needed) <= set(present):
        check.fail("path", f"{name}, which begins with {first[:60]!r}", f"MovieLens {table}: {', '.join(needed)}")
    return data, {"separator": ",", "header": True}, present


def item_lists(path: PathLike, *, separator: str | None = None, encoding: str = "utf8") -> Interactions:
    """Lines ``user item item …``: one left entity and its right entities.

    Args:
        path: the file, which may be compressed.
        separator: between ids; None for any run of spaces and tabs.
        encoding: of the text.

    Returns:
        Interactions of ``"user"`` and ``"item"``. A line without items makes no pair and is counted in the report as
        ``lines_without_pairs``.
    """
    return _lists(path, separator, encoding, "user", "item")


def thesaurus(path: PathLike, *, separator: str = ",", encoding: str = "utf8") -> Interactions:
    """Lines ``head,word,word,…``: Interactions of ``"head"`` and ``"word"``; words may contain spaces."""
    return _lists(path, separator, encoding, "head", "word")


def _lists(path: PathLike, separator: str | None, encoding: str, left_name: str, right_name: str) -> Interactions:
    heads: list[str] = []
    lengths: list[int] = []
    members: list[str] = []
    alone = 0
    for _, line in _lines(path, encoding):
        fields = line.split(separator) if separator is None else [f for x in line.split(separator) if (f := x.strip())]
        if len(fields) < 2:
            alone += len(fields)
            continue
        heads.append(fields[0])
        lengths.append(len(fields) - 1)
        members += fields[1:]
    if not members:
        check.fail(
            "path", f"{path}, which has no line with two ids", f"lines '{left_name} {right_name} {right_name} …'"
        )
    left = np.repeat(np.asarray(heads, dtype=object), lengths)
    found = Interactions.from_arrays(left, members, left_name=left_name, right_name=right_name)
    return found.renamed(left_name, right_name, lines_without_pairs=alone)


def edge_list(
    path: PathLike,
    *,
    separator: str | None = None,
    left: Column = 0,
    right: Column = 1,
    header: bool = False,
    comment: str | None = "#",
    encoding: str = "utf8",
    **options: Any,
) -> Interactions:
    """Lines of two ids, perhaps with more columns.

    Args:
        path: the file, which may be compressed.
        separator: between columns; None for any run of spaces and tabs.
        left: column of left ids, by position from 0, or by name where there is a header.
        right: column of right ids.
        header: whether the first line names the columns.
        comment: lines that begin with this are left out.
        encoding: of the text.
        options: ``value``, ``weight``, ``time``, ``threshold``, ``labels``, ``duplicates`` as in
            :meth:`Interactions.from_csv`.
    """
    source: PathLike | bytes = path
    if separator is None or len(separator) > 1:
        data = frames.content(frames.existing("path", path))
        if separator is None:
            source = re.sub(rb"[ \t]+", b"\t", re.sub(rb"[ \t]*\r?\n[ \t]*", b"\n", data.strip(b" \t")))
        else:
            source = data.replace(separator.encode(), b"\t")
        separator = "\t"
    found = Interactions.from_csv(
        source,
        left,
        right,
        separator=separator,
        header=header,
        quote=None,
        comment=comment,
        encoding=encoding,
        **options,
    )
    return found if header else found.renamed("left", "right")


@dataclass(frozen=True)
class Extreme:
    """A multi-label data set.

    Attributes:
        pairs: points × labels; ids are row numbers, and points without labels have an empty row.
        features: points × features, float32, in the same order of points.
    """

    pairs: Interactions
    features: sp.csr_matrix


def extreme_classification(path: PathLike) -> Extreme:
    """The text format of the extreme classification repository.

    The first line is ``points features labels``; each other line is ``l1,l2,… f:v f:v …``, beginning with a space when
    the point has no label.
    """
    lines = _lines(path, "utf8", keep_blank=True)
    try:
        points, features, labels = (int(x) for x in next(lines)[1].split())
    except ValueError:
        check.fail("path", f"{path}, whose first line is not three numbers", "a first line 'points features labels'")
    label_columns: list[int] = []
    label_counts: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    counts: list[int] = []
    for number, line in lines:
        head, _, rest = line.partition(" ")
        try:
            own = [int(x) for x in head.split(",")] if head else []
            cells = [cell.split(":") for cell in rest.split()]
            columns += [int(place) for place, _ in cells]
            values += [float(value) for _, value in cells]
        except ValueError:
            check.fail("path", f"line {number} of {path}: {line[:60]!r}", "a line 'l1,l2,… f:v f:v …'")
        label_columns += own
        label_counts.append(len(own))
        counts.append(len(cells))
    if len(counts) != points:
        check.fail("path", f"{len(counts)} points in {path}", f"{points}, as its first line says")
    matrix = _sparse("labels", np.ones(len(label_columns)), label_columns, label_counts, labels)
    pairs = Interactions.from_matrix(matrix, left_name="point", right_name="label")
    return Extreme(pairs, _sparse("features", np.asarray(values), columns, counts, features))


def _sparse(name: str, values: Any, columns: list[int], counts: list[int], width: int) -> sp.csr_matrix:
    if columns and not 0 <= min(columns) <= max(columns) < width:
        check.fail("path", f"{name} numbered {min(columns)} to {max(columns)}", f"numbers from 0 to {width - 1}")
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    matrix = sp.csr_matrix((values.astype(np.float32), columns, offsets), shape=(len(counts), width))
    matrix.sum_duplicates()
    if name == "labels":
        matrix.data[:] = 1  # a label named twice
    return matrix


def _lines(path: PathLike, encoding: str, keep_blank: bool = False) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file without their ends; blank ones left out unless asked for."""
    data = frames.content(frames.existing("path", path))
    try:
        text = data.decode("utf-8-sig" if encoding in ("utf8", "utf-8") else encoding)
    except UnicodeDecodeError as error:
        check.fail("path", f"{path}, which is not {encoding} text ({error.reason})", "UTF-8, or the encoding= it has")
    for number, line in enumerate(text.rstrip("\n").split("\n"), start=1):
        line = line.rstrip("\r")
        if keep_blank or line.strip():
            yield number, line

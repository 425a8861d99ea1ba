"""Readers of the layouts that public data sets come in.

MovieLens folders and zips, ``user item item …`` lists, edge lists, thesaurus lines, and the text format of extreme
classification. Each reads the whole file: O(size) time and memory. Checked by tests/test_readers.py.
"""

from __future__ import annotations

import re
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from gramtower import _checks as check
from gramtower.data import frames
from gramtower.data.frames import Column
from gramtower.data.interactions import Interactions
from gramtower.data.sources import BOM, PathLike, decoded, existing, memory, reading
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
_UNNAMED = 1 << 22  # labels that a header may speak of besides one for each character of the file
_LARGEST = float(np.finfo(np.float32).max)


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
        there = ", ".join(members(place, re.compile(".*"))[:20]) or "nothing"
        kind = "folder" if place.is_dir() else "zip"
        check.fail("path", f"{place}, which holds {there}", f"a {kind} with {table}.dat or {table}.csv")
    if place.is_dir():
        return found[0], frames.content(place / found[0])
    return found[0], b"".join(read_members(place, found[:1], most=memory() // 4)).rstrip(b"\r\n")


def _movielens_layout(name: str, data: bytes, table: str) -> tuple[bytes, dict[str, Any], list[str]]:
    """Text with one-character separators, how to read it, and its columns under our names."""
    first = data.split(b"\n", 1)[0].strip().removeprefix(BOM)
    for separator in (b"::", b"\t"):
        if separator in first:
            text, own = _one_byte(data, separator) if len(separator) > 1 else (data, "\t")
            present = list(_COLUMNS[table][: first.count(separator) + 1])
            options: dict[str, Any] = {"separator": own, "header": False, "quote": None}
            break
    else:
        present = [_RENAMED.get(column, column) for column in first.decode("utf-8", "replace").split(",")]
        text, options = data, {"separator": ",", "header": True}
    needed = _COLUMNS[table][:3]
    if not set(needed) <= set(present):
        check.fail("path", f"{name}, which begins with {first[:60]!r}", f"MovieLens {table}: {', '.join(needed)}")
    return text, options, present


def _one_byte(data: bytes, separator: bytes) -> tuple[bytes, str]:
    """The text with a separator of one byte, which does not occur in it, for one of several."""
    free = next((byte for byte in b"\t\x1f\x1e\x1d\x1c\x02\x03\x04" if byte not in data), None)
    if free is None:
        check.fail("path", "text with every control character", f"text with {separator!r} between fields")
    return data.replace(separator, bytes([free])), chr(free)


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
    with reading(path):
        return _lists(path, separator, encoding, "user", "item")


def thesaurus(path: PathLike, *, separator: str = ",", encoding: str = "utf8") -> Interactions:
    """Lines ``head,word,word,…``: Interactions of ``"head"`` and ``"word"``; words may contain spaces."""
    with reading(path):
        return _lists(path, separator, encoding, "head", "word")


def _lists(path: PathLike, separator: str | None, encoding: str, left_name: str, right_name: str) -> Interactions:
    if separator is not None and not (isinstance(separator, str) and separator):
        check.fail("separator", repr(separator), "what stands between ids, or None")
    heads: list[str] = []
    lengths: list[int] = []
    members: list[str] = []
    alone = 0
    for _, line in _lines(path, encoding):
        if separator is None:
            fields = [field for field in line.replace("\t", " ").split(" ") if field]
        else:
            fields = [field for part in line.split(separator) if (field := part.strip())]
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
    if separator is not None and not (isinstance(separator, str) and separator):
        check.fail("separator", repr(separator), "what stands between columns, or None")
    source: PathLike | bytes = path
    with reading(path):
        if separator is None or len(separator) > 1:
            data = frames.text_bytes(existing("path", path), encoding)
            if separator is None:
                source = re.sub(rb"\t?\r?\n\t?", b"\n", re.sub(rb"[ \t]+", b"\t", data.strip(b" \t")))
                separator = "\t"
            else:
                source, separator = _one_byte(data, separator.encode())
            encoding = "utf8"
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
    the point has no label. Values that float32 cannot hold, NaN among them, are refused.
    """
    with reading(path):
        lines = _lines(path, "utf8", keep_blank=True)
        numbers = next(lines)[1].split()
        if len(numbers) != 3 or not all(x.isascii() and x.isdecimal() and len(x) <= 10 for x in numbers):
            check.fail("path", f"{path}, whose first line is not three numbers", "a line 'points features labels'")
        points, features, labels = map(int, numbers)
        label_columns, columns, values = array("q"), array("q"), array("d")
        label_counts: list[int] = []
        counts: list[int] = []
        size = 0
        for number, line in lines:
            try:
                own, places, cells = _point(line)
                label_columns.extend(own)
                columns.extend(places)
                values.extend(cells)
            except (ValueError, OverflowError):
                check.fail("path", f"line {number} of {path}: {line[:60]!r}", "a line 'l1,l2,… f:v f:v …'")
            label_counts.append(len(own))
            counts.append(len(places))
            size += len(line)
        if len(counts) != points:
            check.fail("path", f"{len(counts)} points in {path}", f"{points}, as its first line says")
        if labels > _UNNAMED + size:  # each takes memory, named in the file or not
            check.fail("path", f"{labels:,} labels in a file of {size:,} characters", f"at most {_UNNAMED + size:,}")
        matrix = _sparse("labels", np.ones(len(label_columns)), label_columns, label_counts, labels)
        pairs = Interactions.from_matrix(matrix, left_name="point", right_name="label")
        return Extreme(pairs, _sparse("features", np.asarray(values), columns, counts, features))


def _point(line: str) -> tuple[list[int], list[int], list[float]]:
    """Labels, places and values of features of a line."""
    head, _, rest = line.partition(" ")
    cells = [cell.split(":") for cell in rest.split()]
    values = [float(value) for _, value in cells]
    if "_" in line or not all(-_LARGEST <= value <= _LARGEST for value in values):  # int takes 1_0 for 10
        raise ValueError
    return [int(x) for x in head.split(",")] if head else [], [int(place) for place, _ in cells], values


def _sparse(name: str, values: Any, columns: Any, counts: list[int], width: int) -> sp.csr_matrix:
    places = np.asarray(columns)
    if len(places) and not 0 <= places.min() <= places.max() < width:
        check.fail("path", f"{name} numbered {places.min()} to {places.max()}", f"numbers from 0 to {width - 1}")
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    matrix = sp.csr_matrix((values.astype(np.float32), places, offsets), shape=(len(counts), width))
    matrix.sum_duplicates()
    if name == "labels":
        matrix.data[:] = 1  # a label named twice
    check.finite(name, matrix.data)  # a feature named twice is added
    return matrix


def _lines(path: PathLike, encoding: str, keep_blank: bool = False) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file without their ends; blank ones left out unless asked for."""
    text = frames.text_bytes(existing("path", path), encoding)
    for number, line in enumerate(decoded(path, text, "utf8").rstrip("\n").split("\n"), start=1):
        line = line.rstrip("\r")
        if keep_blank or line.strip():
            yield number, line

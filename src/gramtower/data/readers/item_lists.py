"""Lines of ids: lists ``user item item …``, thesaurus lines, edge lists, CiteULike and extreme classification.

Files are read whole: O(size). CiteULike (citeulike-a, citeulike-t) has users, their articles and the words of each
article; articles and words are numbered by their lines from 0:

    users.dat               one line per user: the number of articles, then their numbers
    words.dat or mult.dat   one line per article: the number of words, then word:count
    vocabulary.dat          one line per word
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.frames import Column
from gramtower.data.interactions import Interactions
from gramtower.data.sources import PathLike, decoded, existing, file_in, reading


def item_lists(path: PathLike, *, separator: str | None = None, encoding: str = "utf8") -> Interactions:
    """Lines ``user item item …``: one left entity and its right entities.

    Args:
        path: the file, possibly compressed.
        separator: separator of ids; None for any run of spaces and tabs.
        encoding: text encoding.

    Returns:
        Interactions of ``"user"`` and ``"item"``. Lines without items are counted in the report as
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
    without_pairs = 0
    for _, line in lines(path, encoding):
        if separator is None:
            fields = [field for field in line.replace("\t", " ").split(" ") if field]
        else:
            fields = [field for part in line.split(separator) if (field := part.strip())]
        if len(fields) < 2:
            without_pairs += len(fields)
            continue
        heads.append(fields[0])
        lengths.append(len(fields) - 1)
        members += fields[1:]
    if not members:
        expected = f"lines '{left_name} {right_name} {right_name} …'"
        check.fail("path", f"{path}, which has no line with two ids", expected)
    left = np.repeat(np.asarray(heads, dtype=object), lengths)
    found = Interactions.from_arrays(left, members, left_name=left_name, right_name=right_name)
    return found.renamed(left_name, right_name, lines_without_pairs=without_pairs)


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
    """Read lines of two ids, possibly with more columns.

    Args:
        path: the file, possibly compressed.
        separator: separator of columns; None for any run of spaces and tabs.
        left: column of left ids, by position from 0, or by name if there is a header.
        right: column of right ids.
        header: whether the first line names the columns.
        comment: lines that begin with this text are skipped.
        encoding: text encoding.
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
                source, separator = one_byte(data, separator.encode())
            encoding = "utf8"
        form: dict[str, Any] = {"separator": separator, "header": header, "quote": None, "comment": comment}
        found = Interactions.from_csv(source, left, right, encoding=encoding, **form, **options)
    return found if header else found.renamed("left", "right")


def lines(path: PathLike, encoding: str, keep_blank: bool = False) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of a file without line ends; blank lines are skipped by default."""
    text = frames.text_bytes(existing("path", path), encoding)
    for number, line in enumerate(decoded(path, text, "utf8").rstrip("\n").split("\n"), start=1):
        line = line.rstrip("\r")
        if keep_blank or line.strip():
            yield number, line


def one_byte(data: bytes, separator: bytes) -> tuple[bytes, str]:
    """Replace a separator of several bytes by one byte that does not occur in the text."""
    free = next((byte for byte in b"\t\x1f\x1e\x1d\x1c\x02\x03\x04" if byte not in data), None)
    if free is None:
        check.fail("path", "text with every control character", f"text with {separator!r} between fields")
    return data.replace(separator, bytes([free])), chr(free)


@dataclass(frozen=True)
class CiteULike:
    """Users, articles and words.

    Attributes:
        pairs: users × articles; ids are line numbers from 0; articles without users are columns too.
        words: articles × words, float32 counts, in the order of the columns of ``pairs``.
        vocabulary: the words.
    """

    pairs: Interactions
    words: sp.csr_matrix
    vocabulary: Sequence[str]


def citeulike(path: PathLike) -> CiteULike:
    """Read the articles of users and the words of articles.

    Args:
        path: folder with users.dat, words.dat (or mult.dat) and vocabulary.dat, each of which may be compressed.

    Returns:
        Pairs of ``"user"`` and ``"article"``, and the words. Give ``words`` as ``right_features``.
    """
    users = file_in(path, r"users\.dat", "users.dat")
    words = file_in(path, r"(words|mult)\.dat", "words.dat or mult.dat")
    listed = file_in(path, r"vocabulary\.dat", "vocabulary.dat")
    with reading(listed):
        vocabulary = [line.strip() for _, line in lines(listed, "utf8", keep_blank=True)]
    with reading(words):
        counts = _matrix(words, "words", len(vocabulary), counted=True)
    with reading(users):
        pairs = _matrix(users, "articles", counts.shape[0], counted=False)
    if not pairs.nnz:
        check.fail("path", f"{users}, in which no user has an article", "lines 'count article article …'")
    return CiteULike(Interactions.from_matrix(pairs, left_name="user", right_name="article"), counts, vocabulary)


def _matrix(path: PathLike, what: str, width: int, counted: bool) -> sp.csr_matrix:
    """One row for each line: its numbers, or its number:count cells, after how many there are."""
    form = "count word:times word:times …" if counted else "count article article …"
    columns, values, counts = array("q"), array("d"), list[int]()
    for number, line in lines(path, "utf8", keep_blank=True):
        try:
            many, *cells = line.split()
            parts = [cell.split(":") for cell in cells]
            if not line.isascii() or "_" in line or int(many) != len(cells) or {len(x) for x in parts} - {1 + counted}:
                raise ValueError
            places = [int(part[0]) for part in parts]
            times = [int(part[1]) for part in parts] if counted else [1] * len(parts)
            if any(not 0 < x < 2**24 for x in times):  # what float32 counts exactly
                raise ValueError
        except ValueError:
            check.fail("path", f"line {number} of {path}: {line[:60]!r}", f"a line '{form}'")
        if places and not 0 <= min(places) <= max(places) < width:
            given = f"{what} numbered {min(places)} to {max(places)} in line {number} of {path}"
            check.fail("path", given, f"numbers from 0 to {width - 1}")
        columns.extend(places)
        values.extend(times)
        counts.append(len(places))
    return _sparse(what, values, columns, counts, width)


_UNNAMED = 1 << 22  # labels that a header may speak of besides one for each character of the file
_LARGEST = float(np.finfo(np.float32).max)


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
        numbered = lines(path, "utf8", keep_blank=True)
        numbers = next(numbered)[1].split()
        if len(numbers) != 3 or not all(x.isascii() and x.isdecimal() and len(x) <= 10 for x in numbers):
            check.fail("path", f"{path}, whose first line is not three numbers", "a line 'points features labels'")
        points, features, labels = map(int, numbers)
        label_columns, columns, values, size = array("q"), array("q"), array("d"), 0
        label_counts, counts = list[int](), list[int]()
        for number, line in numbered:
            try:
                point_labels, places, cells = _point(line)
                label_columns.extend(point_labels)
                columns.extend(places)
                values.extend(cells)
            except (ValueError, OverflowError):
                check.fail("path", f"line {number} of {path}: {line[:60]!r}", "a line 'l1,l2,… f:v f:v …'")
            label_counts.append(len(point_labels))
            counts.append(len(places))
            size += len(line)
        if len(counts) != points:
            check.fail("path", f"{len(counts)} points in {path}", f"{points}, as its first line says")
        if labels > _UNNAMED + size:  # each takes memory, named in the file or not
            check.fail("path", f"{labels:,} labels in a file of {size:,} characters", f"at most {_UNNAMED + size:,}")
        matrix = _sparse("labels", np.ones(len(label_columns)), label_columns, label_counts, labels)
        pairs = Interactions.from_matrix(matrix, left_name="point", right_name="label")
        return Extreme(pairs, _sparse("features", values, columns, counts, features))


def _point(line: str) -> tuple[list[int], list[int], list[float]]:
    """Labels, places and values of features of a line."""
    head, _, rest = line.partition(" ")
    cells = [cell.split(":") for cell in rest.split()]
    values = [float(value) for _, value in cells]
    if "_" in line or not all(-_LARGEST <= value <= _LARGEST for value in values):  # int takes 1_0 for 10
        raise ValueError
    return [int(x) for x in head.split(",")] if head else [], [int(place) for place, _ in cells], values


def _sparse(name: str, values: ArrayLike, columns: array[int], counts: list[int], width: int) -> sp.csr_matrix:
    places = np.asarray(columns)
    if len(places) and not 0 <= places.min() <= places.max() < width:
        check.fail("path", f"{name} numbered {places.min()} to {places.max()}", f"numbers from 0 to {width - 1}")
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    matrix = sp.csr_matrix((np.asarray(values).astype(np.float32), places, offsets), shape=(len(counts), width))
    matrix.sum_duplicates()
    if name in ("articles", "labels"):
        matrix.data[:] = 1  # one may be named twice
    check.finite(name, matrix.data)  # a feature named twice is added
    return matrix

"""CiteULike: users and their articles, with the words of each article (citeulike-a, citeulike-t).

    users.dat               a line a user: how many articles, then their numbers
    words.dat or mult.dat   a line an article: how many words, then word:count
    vocabulary.dat          a line a word

Articles are numbered by their lines, words too, both from 0. Reads the whole files: O(size). Checked by
tests/test_readers.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.readers.folders import file_in
from gramtower.data.readers.lists import lines
from gramtower.data.sources import PathLike, reading


@dataclass(frozen=True)
class CiteULike:
    """Users, articles and words.

    Attributes:
        pairs: users × articles; ids are line numbers from 0, and articles that nobody has are columns too.
        words: articles × words, float32 counts, in the order of the columns of ``pairs``.
        vocabulary: the words.
    """

    pairs: Interactions
    words: sp.csr_matrix
    vocabulary: Sequence[str]


def citeulike(path: PathLike) -> CiteULike:
    """The articles that users have, and the words of the articles.

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
    columns, values, offsets = array("q"), array("d"), array("q", [0])
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
        offsets.append(len(columns))
    entries = (np.asarray(values, dtype=np.float32), np.asarray(columns), np.asarray(offsets))
    matrix = sp.csr_matrix(entries, shape=(len(offsets) - 1, width))
    matrix.sum_duplicates()
    if not counted:
        matrix.data[:] = 1  # an article named twice
    return matrix

"""Links between articles from the SQL dumps of a MediaWiki, such as https://dumps.wikimedia.org/simplewiki.

    page        page_id, page_namespace, page_title, page_is_redirect
    redirect    rd_from, rd_namespace, rd_title, rd_interwiki
    pagelinks   pl_from, pl_namespace, pl_title      or, since 2023, pl_from, pl_target_id with
    linktarget  lt_id, lt_namespace, lt_title

A pair is (article, article it links to), both of namespace 0. Redirects are followed and are not articles themselves.
Links from other pages, to pages that do not exist, to other namespaces, and of a page to itself are dropped and
counted; repeated links are merged. Ids are titles with spaces.

Each dump is read once, in pieces. Memory: a piece, the titles of namespace 0, the targets of linktarget (12 bytes each)
and 8 bytes for each link.

Dumps are SQL statements with rows in ``INSERT INTO `t` VALUES (…),(…);``, each statement on lines of its own and each
row within a line, as mysqldump writes them. Rows are matched one after the other without a gap, so that quotes and
brackets inside text cannot be mistaken for the end of a row.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import sources
from gramtower.data.ids import as_objects
from gramtower.data.interactions import Interactions
from gramtower.data.sources import PathLike, existing, reading

Row = tuple[bytes, ...]
_ENDING = r"\.sql(\.gz|\.bz2|\.xz)?"
_ARTICLES = b"0"


def mediawiki_links(path: PathLike) -> Interactions:
    """Read the links between articles.

    Args:
        path: folder with the dumps ``page``, ``pagelinks``, ``redirect`` and, for dumps since 2023, ``linktarget``:
            ``simplewiki-20200901-page.sql.gz`` or ``page.sql``.

    Returns:
        Interactions of ``"from"`` and ``"to"``; articles without links are on neither side.
    """
    folder = existing("path", path, folder=True)
    pages = _read_pages(folder)
    rows, columns, counts = _read_links(folder, pages)
    left, right = np.unique(rows), np.unique(columns)
    if not len(left):
        check.fail("path", f"{folder}, in which no article links to another", "dumps of the same wiki and day")
    entries = (np.ones(len(rows), np.float32), (np.searchsorted(left, rows), np.searchsorted(right, columns)))
    matrix = sp.csr_matrix(entries, shape=(len(left), len(right)))
    matrix.sort_indices()
    names = [[pages.titles[number].decode("utf-8", "backslashreplace") for number in side] for side in (left, right)]
    articles, linked = (as_objects([name.replace("_", " ") for name in side]) for side in names)
    report = counts | {"pairs": matrix.nnz, "left": len(left), "right": len(right)}
    return Interactions(matrix, articles, linked, left_name="from", right_name="to", report=report)


def is_mediawiki(path: Path) -> bool:
    """Whether a folder has a dump of links."""
    return path.is_dir() and bool(_dumps(path, "pagelinks"))


@dataclass(frozen=True)
class _Pages:
    """Pages of namespace 0, numbered in the order of the dump."""

    titles: list[bytes]  # title of each number, as in the database
    numbers: dict[bytes, int]  # number of each title
    articles: dict[int, int]  # number of each page id that is an article
    target: NDArray[np.int64]  # for each number the article that a link to it leads to, −1 for none
    redirects: int  # how many pages are redirects


def _read_pages(folder: Path) -> _Pages:
    titles: list[bytes] = []
    by_id: dict[int, int] = {}
    is_redirect: list[bool] = []
    with _rows(folder, "page", "page_id", "page_namespace", "page_title", "page_is_redirect") as batches:
        for page, namespace, title, flag in chain.from_iterable(batches):
            if namespace == _ARTICLES:
                by_id[number_of(page)] = len(titles)
                titles.append(text_of(title))
                is_redirect.append(flag != b"0")
    if not titles:
        check.fail("path", f"{folder}, whose page dump has no page of namespace 0", "a whole page dump")
    numbers = {title: number for number, title in enumerate(titles)}
    leads_to = np.where(is_redirect, -1, np.arange(len(titles)))
    with _rows(folder, "redirect", "rd_from", "rd_namespace", "rd_title", "rd_interwiki") as batches:
        for source, namespace, title, interwiki in chain.from_iterable(batches):
            number = by_id.get(number_of(source))
            if number is not None and is_redirect[number] and namespace == _ARTICLES and not text_of(interwiki):
                leads_to[number] = numbers.get(text_of(title), -1)
    articles = {page: number for page, number in by_id.items() if not is_redirect[number]}
    return _Pages(titles, numbers, articles, _resolved(leads_to, np.array(is_redirect)), sum(is_redirect))


def _resolved(leads_to: NDArray[np.int64], is_redirect: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The final target of each page; −1 for redirects to nowhere or in a circle."""
    target = np.append(leads_to, -1)  # so that −1 leads to −1
    for _ in range(max(1, len(target)).bit_length() + 1):  # each round doubles the length of the chains followed
        target = target[target]
    return np.where(np.append(is_redirect, True)[target], -1, target)[:-1]


def _read_links(folder: Path, pages: _Pages) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """Distinct links as numbers of pages, and what was counted."""
    path = _dump(folder, "pagelinks")
    present = _Dump(path).columns()
    counts = {"pages": len(pages.articles), "redirects": pages.redirects, "rows": 0}
    counts |= dict.fromkeys(("rows_not_from_articles", "rows_to_no_article", "rows_to_itself", "rows_merged"), 0)
    by_title = "pl_title" in present
    if not by_title and "pl_target_id" not in present:
        check.fail("path", f"{path} with columns {', '.join(present)}", "a column pl_title or pl_target_id")
    columns = ("pl_from", "pl_namespace", "pl_title") if by_title else ("pl_from", "pl_target_id")
    find = _by_title(pages) if by_title else _by_target(folder, pages)
    size = len(pages.titles)
    kept: list[NDArray[np.int64]] = []
    with _rows(folder, "pagelinks", *columns) as batches:
        for rows in batches:
            sources = np.array([pages.articles.get(number_of(row[0]), -1) for row in rows], dtype=np.int64)
            targets = find(rows)
            of_articles, to_articles = sources >= 0, targets >= 0
            linked = of_articles & to_articles
            other = linked & (sources != targets)
            counts["rows"] += len(rows)
            counts["rows_not_from_articles"] += int((~of_articles).sum())
            counts["rows_to_no_article"] += int((of_articles & ~to_articles).sum())
            counts["rows_to_itself"] += int((linked & ~other).sum())
            kept.append(_distinct(sources[other] * size + targets[other]))
    joined = np.concatenate(kept) if kept else np.empty(0, np.int64)
    del kept
    distinct = _distinct(joined)
    shown = counts["rows_not_from_articles"] + counts["rows_to_no_article"] + counts["rows_to_itself"]
    counts["rows_merged"] = counts["rows"] - shown - len(distinct)
    return distinct // size, distinct % size, counts


def _by_title(pages: _Pages) -> Callable[[list[Row]], NDArray[np.int64]]:
    """Targets of rows (from, namespace, title)."""

    def find(rows: list[Row]) -> NDArray[np.int64]:
        known = [pages.numbers.get(text_of(title), -1) if place == _ARTICLES else -1 for _, place, title in rows]
        found = np.array(known, dtype=np.int64)
        return np.where(found < 0, -1, pages.target[found])

    return find


def _by_target(folder: Path, pages: _Pages) -> Callable[[list[Row]], NDArray[np.int64]]:
    """Targets of rows (from, target id), which linktarget explains."""
    ids: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int32]] = []
    with _rows(folder, "linktarget", "lt_id", "lt_namespace", "lt_title") as batches:
        for rows in batches:
            numbers = [
                (number_of(key), number)
                for key, namespace, title in rows
                if namespace == _ARTICLES and (number := pages.numbers.get(text_of(title))) is not None
            ]
            found = np.array(numbers, dtype=np.int64).reshape(-1, 2)
            ids.append(found[:, 0])
            targets.append(pages.target[found[:, 1]].astype(np.int32))
    known = np.concatenate([np.empty(0, np.int64), *ids])
    order = np.argsort(known, kind="stable")
    known, meant = known[order], np.concatenate([np.empty(0, np.int32), *targets])[order]

    def find(rows: list[Row]) -> NDArray[np.int64]:
        asked = np.array([number_of(row[1]) for row in rows], dtype=np.int64)
        if not len(known):
            return np.full(len(rows), -1)
        place = np.searchsorted(known, asked).clip(max=len(known) - 1)
        return np.where(known[place] == asked, meant[place], -1)

    return find


def _distinct(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The keys in order, each once; sorts them in place."""
    keys.sort()
    return np.asarray(keys[np.diff(keys, prepend=-1) != 0])


def _dumps(folder: Path, table: str) -> list[str]:
    return sources.members(folder, re.compile(rf"(.*-)?{table}{_ENDING}"))


def _dump(folder: Path, table: str) -> Path:
    found = _dumps(folder, table) if folder.is_dir() else []
    if len(found) != 1:
        given = f"{folder} with {' and '.join(found) if found else f'no {table}.sql'}"
        check.fail("path", given, f"a folder with one dump {table}.sql.gz (or .sql, .bz2, .xz) of the wiki")
    return folder / found[0]


@contextmanager
def _rows(folder: Path, table: str, *columns: str) -> Iterator[Iterator[list[Row]]]:
    """Open a dump and give some columns of all rows, many rows at a time; errors inside name the file."""
    path = _dump(folder, table)
    with reading(path):
        yield _Dump(path).rows(columns)


_END = ord(";")
_LARGEST = 10**18
_WIDEST = 100  # columns of a table
_TEXT = rb"'[^'\\]*+(?:(?:\\.|'')[^'\\]*+)*+'"
_VALUE = rb"(?:NULL|-?[0-9][-+0-9.eE]*+|(?:_binary )?" + _TEXT + rb"|0x[0-9A-Fa-f]*+)"
_COLUMN = re.compile(rb"^[ \t]*+`(\w+)`")
_INSERT = re.compile(rb"INSERT INTO `?\w+`?(?: \(([^)]*)\))? VALUES\s*+")
_ESCAPE = re.compile(rb"\\(.)|''", re.DOTALL)
_ESCAPED = {b"0": b"\0", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"Z": b"\x1a"}


def number_of(value: bytes) -> int:
    """A whole number of at most 18 digits."""
    try:
        found = int(value)
        if -_LARGEST < found < _LARGEST:
            return found
    except ValueError:
        pass
    check.fail("path", f"{value[:60].decode(errors='replace')!r} in a column of ids", "whole numbers")


def text_of(value: bytes) -> bytes:
    """The bytes of a quoted value; NULL is empty."""
    if value == b"NULL":
        return b""
    if not value.endswith(b"'"):
        check.fail("path", f"{value[:60].decode(errors='replace')!r} in a column of text", "quoted text or NULL")
    inner = value[1:-1] if value[:1] == b"'" else value[value.index(b"'") + 1 : -1]
    if b"\\" not in inner and b"'" not in inner:
        return inner
    return _ESCAPE.sub(lambda found: b"'" if found[1] is None else _ESCAPED.get(found[1], found[1]), inner)


class _Dump:
    """The lines of a dump."""

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, 0  # bytes before the current line
        self._lines = self._read()

    def _read(self) -> Iterator[bytes]:
        for chunk in sources.whole_lines(sources.read_pieces(self.path)):
            for line in io.BytesIO(chunk):
                yield line
                self.before += len(line)

    def columns(self) -> list[str]:
        """Find and read the CREATE TABLE statement."""
        for line in self._lines:
            if line.startswith((b"CREATE TABLE", b"INSERT INTO")):
                break
        else:
            line = b""
        if not line.startswith(b"CREATE TABLE"):
            check.fail("path", f"{self.path} without CREATE TABLE before its rows", "a MySQL dump of one table")
        names = []
        for line in self._lines:
            if line.startswith(b")"):
                break
            names += [name.decode() for name in _COLUMN.findall(line)]
        if len(names) > _WIDEST or len(set(names)) < len(names):
            check.fail("path", f"{self.path} with {len(names)} columns", f"at most {_WIDEST}, each once")
        return names

    def rows(self, wanted: Sequence[str]) -> Iterator[list[Row]]:
        """Yield some columns of the rows of a line, as they are written: ``b"12"``, ``b"'Title'"``, ``b"NULL"``."""
        present = self.columns()
        for name in wanted:
            if name not in present:
                check.fail("path", f"{self.path} with columns {', '.join(present)}", f"a column {name}")
        values = [b"(" + _VALUE + b")" if name in wanted else _VALUE for name in present]
        row = re.compile(rb"\s*+\(" + b",".join(values) + rb"\)\s*+[,;]", re.DOTALL)
        captured = [name for name in present if name in wanted]
        order = [captured.index(name) for name in wanted]
        inside = False  # an INSERT
        for line in self._lines:
            at, batch = 0, list[Row]()
            if not inside:
                if not line.startswith((b"INSERT INTO", b"CREATE TABLE")):
                    continue
                at, inside = self._values_of(line, present), True
            while inside and (found := row.match(line, at)):
                at, inside = found.end(), line[found.end() - 1] != _END
                batch.append(found.groups())
            yield batch if order == sorted(order) else [tuple(groups[place] for place in order) for groups in batch]
            if inside and line.endswith(b"\n") and line[at:].strip():
                shown = line[at : at + 60].decode(errors="replace")
                given = f"{self.path}, where a row at byte {self.before + at} begins {shown!r}"
                check.fail("path", given, "rows that fit its CREATE TABLE")
        if inside:
            check.fail("path", f"{self.path}, which ends inside a row at byte {self.before}", "a whole file")

    def _values_of(self, line: bytes, present: list[str]) -> int:
        """Where the rows of an INSERT begin."""
        if line.startswith(b"CREATE TABLE"):
            check.fail("path", f"{self.path} with two tables", "a MySQL dump of one table")
        if (head := _INSERT.match(line)) is None:
            check.fail("path", f"{self.path} with {line[:60]!r} at byte {self.before}", "INSERT INTO … VALUES …")
        named = None if head[1] is None else [x.strip(" `") for x in head[1].decode(errors="replace").split(",")]
        if named is not None and named != present:
            given = f"{self.path}, whose rows have columns {', '.join(named)}"
            check.fail("path", given, f"those of its CREATE TABLE, {', '.join(present)}")
        return head.end()

"""Links between articles from the SQL dumps of a MediaWiki, such as https://dumps.wikimedia.org/simplewiki.

    page        page_id, page_namespace, page_title, page_is_redirect
    redirect    rd_from, rd_namespace, rd_title, rd_interwiki
    pagelinks   pl_from, pl_namespace, pl_title      or, since 2023, pl_from, pl_target_id with
    linktarget  lt_id, lt_namespace, lt_title

A pair is (article, article it links to), both of namespace 0. A link to a redirect counts as one to the page that the
redirect leads to, also over several redirects; redirects themselves are no articles. Left out and counted are links
from other pages, to pages that do not exist, to other namespaces, and of a page to itself; links that become the same
are merged. Ids are titles with spaces.

The dumps are read once each, in pieces. Held besides a piece: the titles of namespace 0, the targets of linktarget
(12 bytes each) and 8 bytes for each link.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import streams
from gramtower.data.ids import as_objects
from gramtower.data.interactions import Interactions
from gramtower.data.readers.sqldump import columns_of, number_of, read_rows, text_of
from gramtower.data.sources import PathLike, existing, reading

_ENDING = r"\.sql(\.gz|\.bz2|\.xz)?"
_ARTICLES = b"0"


def mediawiki_links(path: PathLike) -> Interactions:
    """The links between articles.

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
    articles, linked = (as_objects([_readable(pages.titles[number]) for number in side]) for side in (left, right))
    report = counts | {"pairs": matrix.nnz, "left": len(left), "right": len(right)}
    return Interactions(matrix, articles, linked, left_name="from", right_name="to", report=report)


def is_mediawiki(path: Path) -> bool:
    """Whether a folder holds a dump of links."""
    return path.is_dir() and bool(_dumps(path, "pagelinks"))


@dataclass(frozen=True)
class _Pages:
    """Pages of namespace 0, numbered in the order of the dump.

    Attributes:
        titles: title of each number, as in the database.
        numbers: number of each title.
        articles: number of each page id that is an article.
        target: for each number the article that a link to it leads to, −1 for none.
        redirects: how many pages are redirects.
    """

    titles: list[bytes]
    numbers: dict[bytes, int]
    articles: dict[int, int]
    target: NDArray[np.int64]
    redirects: int


def _read_pages(folder: Path) -> _Pages:
    titles: list[bytes] = []
    by_id: dict[int, int] = {}
    is_redirect: list[bool] = []
    wanted = ("page_id", "page_namespace", "page_title", "page_is_redirect")
    path = _dump(folder, "page")
    with reading(path):
        for page, namespace, title, flag in chain.from_iterable(read_rows(path, wanted)):
            if namespace == _ARTICLES:
                by_id[number_of(page)] = len(titles)
                titles.append(text_of(title))
                is_redirect.append(flag != b"0")
    if not titles:
        check.fail("path", f"{folder}, whose page dump has no page of namespace 0", "a whole page dump")
    numbers = {title: number for number, title in enumerate(titles)}
    leads_to = np.where(is_redirect, -1, np.arange(len(titles)))
    wanted = ("rd_from", "rd_namespace", "rd_title", "rd_interwiki")
    path = _dump(folder, "redirect")
    with reading(path):
        for source, namespace, title, interwiki in chain.from_iterable(read_rows(path, wanted)):
            number = by_id.get(number_of(source))
            if number is not None and is_redirect[number] and namespace == _ARTICLES and not text_of(interwiki):
                leads_to[number] = numbers.get(text_of(title), -1)
    articles = {page: number for page, number in by_id.items() if not is_redirect[number]}
    return _Pages(titles, numbers, articles, _resolved(leads_to, np.array(is_redirect)), sum(is_redirect))


def _resolved(leads_to: NDArray[np.int64], is_redirect: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where each page leads in the end: the articles themselves, −1 for redirects to nowhere or in a circle."""
    target = np.append(leads_to, -1)  # so that −1 leads to −1
    for _ in range(max(1, len(target)).bit_length() + 1):  # each round doubles the length of the chains followed
        target = target[target]
    return np.where(np.append(is_redirect, True)[target], -1, target)[:-1]


def _read_links(folder: Path, pages: _Pages) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, int]]:
    """Distinct links as numbers of pages, and what was counted."""
    path = _dump(folder, "pagelinks")
    present = columns_of(path)
    counts = {"pages": len(pages.articles), "redirects": pages.redirects, "rows": 0}
    counts |= dict.fromkeys(("rows_not_from_articles", "rows_to_no_article", "rows_to_itself", "rows_merged"), 0)
    by_title = "pl_title" in present
    if not by_title and "pl_target_id" not in present:
        check.fail("path", f"{path} with columns {', '.join(present)}", "a column pl_title or pl_target_id")
    columns = ("pl_from", "pl_namespace", "pl_title") if by_title else ("pl_from", "pl_target_id")
    find = _by_title(pages) if by_title else _by_target(folder, pages)
    size = len(pages.titles)
    kept: list[NDArray[np.int64]] = []
    with reading(path):
        for rows in read_rows(path, columns):
            articles = pages.articles
            sources = np.array([articles.get(number_of(row[0]), -1) for row in rows], dtype=np.int64)
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


def _by_title(pages: _Pages) -> Callable[[list[tuple[bytes, ...]]], NDArray[np.int64]]:
    """Targets of rows (from, namespace, title)."""

    def find(rows: list[tuple[bytes, ...]]) -> NDArray[np.int64]:
        numbers = pages.numbers
        known = [numbers.get(text_of(title), -1) if place == _ARTICLES else -1 for _, place, title in rows]
        found = np.array(known, dtype=np.int64)
        return np.where(found < 0, -1, pages.target[found])

    return find


def _by_target(folder: Path, pages: _Pages) -> Callable[[list[tuple[bytes, ...]]], NDArray[np.int64]]:
    """Targets of rows (from, target id), which linktarget explains."""
    ids: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int32]] = []
    path = _dump(folder, "linktarget")
    with reading(path):
        for rows in read_rows(path, ("lt_id", "lt_namespace", "lt_title")):
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

    def find(rows: list[tuple[bytes, ...]]) -> NDArray[np.int64]:
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
    return streams.members(folder, re.compile(rf"(.*-)?{table}{_ENDING}"))


def _dump(folder: Path, table: str) -> Path:
    found = _dumps(folder, table) if folder.is_dir() else []
    if len(found) != 1:
        given = f"{folder} with {' and '.join(found) if found else f'no {table}.sql'}"
        check.fail("path", given, f"a folder with one dump {table}.sql.gz (or .sql, .bz2, .xz) of the wiki")
    return folder / found[0]


def _readable(title: bytes) -> str:
    return title.decode("utf-8", "backslashreplace").replace("_", " ")

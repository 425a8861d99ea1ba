"""Wikispeedia: the links between articles of a small Wikipedia, and the categories of the articles.

    links.tsv         from<TAB>to, titles URL-encoded
    categories.tsv    article<TAB>category, several lines for an article with several

Lines that begin with # and blank ones are left out. Reads the whole files: O(size).
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import numpy as np

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.ids import as_objects
from gramtower.data.readers.folders import file_in
from gramtower.data.readers.graph import Graph, links, ones
from gramtower.data.readers.lists import lines
from gramtower.data.sources import PathLike, reading


def wikispeedia(path: PathLike) -> Graph:
    """Links between articles as pairs of ``"from"`` and ``"to"``, and categories as features.

    Args:
        path: folder with links.tsv and categories.tsv, each of which may be compressed.

    Returns:
        All articles on both sides, in order of their titles, decoded and with spaces; the frame of nodes has columns
        ``article`` and ``categories``, separated by ``|``, as :class:`~gramtower.data.tables.FeatureTable` takes them.
    """
    linked, listed = file_in(path, r"links\.tsv", "links.tsv"), file_in(path, r"categories\.tsv", "categories.tsv")
    with reading(linked):
        ends = [(_title(a), _title(b)) for a, b in _fields(linked, "from<TAB>to")]
    with reading(listed):
        kinds = sorted({(_title(a), category) for a, category in _fields(listed, "article<TAB>category")})
    titles = sorted({title for pair in ends for title in pair} | {title for title, _ in kinds})
    index = {title: row for row, title in enumerate(titles)}
    categories = {name: place for place, name in enumerate(sorted({name for _, name in kinds}))}
    rows = np.asarray([(index[a], index[b]) for a, b in ends], dtype=np.int64).reshape(-1, 2)
    with reading(linked):
        pairs = links(linked, rows[:, 0], rows[:, 1], as_objects(titles), ("from", "to"))
    places = ([index[title] for title, _ in kinds], [categories[name] for _, name in kinds])
    own: list[list[str]] = [[] for _ in titles]
    for title, name in kinds:
        own[index[title]].append(name)
    nodes = frames.polars().DataFrame({"article": titles, "categories": ["|".join(names) for names in own]})
    return Graph(pairs, ones(*places, (len(titles), max(1, len(categories)))), nodes)


def _fields(path: Path, form: str) -> list[tuple[str, str]]:
    found = []
    for number, line in lines(path, "utf8"):
        if line.startswith("#"):
            continue
        first, tab, second = line.partition("\t")
        if not (tab and first.strip() and second.strip()) or "\t" in second:
            check.fail("path", f"line {number} of {path}: {line[:60]!r}", f"lines '{form}'")
        found.append((first.strip(), second.strip()))
    return found


def _title(text: str) -> str:
    return unquote(text).replace("_", " ")

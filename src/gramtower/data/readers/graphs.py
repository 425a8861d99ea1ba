"""Graphs whose nodes have features: MUSAE and Wikispeedia. Files are read whole: O(size).

MUSAE, such as Facebook pages that like each other:

    *edges.csv                    a header, then two nodes on each line
    *features.json                {"node": [feature, feature, …], …}
    *target.csv or *pages.csv     a header, then one line per node: its id first, then name, kind and so on

Wikispeedia, the links between articles of a small Wikipedia and their categories:

    links.tsv         from<TAB>to, titles URL-encoded
    categories.tsv    article<TAB>category, several lines for an article with several categories

Blank lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.ids import as_ids, as_objects, index_of, rows_of
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import ones_at
from gramtower.data.readers.item_lists import lines
from gramtower.data.sources import PathLike, file_in, reading

if TYPE_CHECKING:
    from polars import DataFrame

_UNNAMED = 1 << 22  # features that a file may speak of besides one for each number in it


@dataclass(frozen=True)
class Graph:
    """Nodes, their links and their features.

    Attributes:
        pairs: nodes × nodes, the same on both sides and in the order of ``nodes``, with those without links.
        features: nodes × features of ones, float32, in the same order: left and right features alike.
        nodes: a polars frame with one row for each node; all columns are text, ids come first.
    """

    pairs: Interactions
    features: sp.csr_matrix
    nodes: DataFrame


def _links(
    path: PathLike,
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    ids: NDArray[Any],
    names: tuple[str, str],
    both: bool = False,
) -> Interactions:
    """Make distinct pairs of links (rows of their ends), in both directions with ``both``.

    Links of a node to itself are dropped and counted as ``self_links``.
    """
    others = left != right
    rows, columns = left[others], right[others]
    if both:
        rows, columns = np.concatenate([rows, columns]), np.concatenate([columns, rows])
    if not len(rows):
        check.fail("path", f"{path}, in which no node is linked to another", "a graph with links")
    pairs = Interactions.from_matrix(ones_at(rows, columns, (len(ids), len(ids))), ids, ids)
    named = pairs.renamed(*names, self_links=int(len(others) - others.sum()))
    return replace(named, same_entities=True)


def musae(path: PathLike, *, directed: bool = False) -> Graph:
    """A graph with features: ``edges.csv``, ``features.json`` and ``pages.csv`` or ``target.csv`` of a folder.

    Args:
        path: the folder; its files may be compressed and have a prefix such as ``musae_facebook_``.
        directed: whether a line of edges makes a pair in one direction only.

    Returns:
        Pairs of ``"node"`` and ``"neighbour"``, features, and the table of nodes. Links of a node to itself are left
        out and counted in the report as ``self_links``.
    """
    both = not check.flag("directed", directed)
    edges = file_in(path, r".*edges\.csv", "edges.csv")
    described = file_in(path, r".*features\.json", "features.json")
    listed = file_in(path, r".*(target|pages)\.csv", "pages.csv or target.csv")
    with reading(listed):
        nodes = frames.read_frame("path", listed)
        ids = as_ids("path", nodes.to_series(0).to_list())
    index = index_of(ids)
    with reading(described):
        features = _features(described, index)
    with reading(edges):
        columns = frames.read_csv(edges, [("path", 0), ("path", 1)])
        expected = f"links of the {len(index):,} nodes that are listed"
        left, right = (rows_of("path", column.to_list(), index, expected) for column in columns)
        pairs = _links(edges, left, right, ids, ("node", "neighbour"), both)
    return Graph(pairs, features, nodes)


def _features(path: Path, index: dict[Any, int]) -> sp.csr_matrix:
    """One row for each node, with a 1 at each of its features."""
    try:
        given = json.loads(frames.text_bytes(path, "utf8"))
    except json.JSONDecodeError as error:
        check.fail("path", f"{path}, which is no JSON ({error})", '{"node": [feature, …], …}')
    if not isinstance(given, dict):
        check.fail("path", f"{path}, which holds a {type(given).__name__}", '{"node": [feature, …], …}')
    columns, rows = array("q"), array("q")
    for key, listed in given.items():
        if key not in index:
            check.fail("path", f"{path} with features of {key!r}", f"the {len(index):,} nodes that are listed")
        if not isinstance(listed, list) or not all(type(x) is int and 0 <= x < 2**40 for x in listed):
            check.fail("path", f"{path}, where {key!r} has {str(listed)[:60]}", "a list of feature numbers from 0")
        columns.extend(listed)
        rows.extend([index[key]] * len(listed))
    width = 1 + max(columns, default=0)
    if width > _UNNAMED + len(columns):
        check.fail("path", f"{path} with feature {width - 1:,}", f"numbers below {_UNNAMED + len(columns):,}")
    return ones_at(rows, columns, (len(index), width))


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
    titles = as_objects(sorted({title for pair in ends for title in pair} | {title for title, _ in kinds}))
    names = as_objects(sorted({name for _, name in kinds}))
    index, categories = index_of(titles), index_of(names)
    rows = np.asarray([(index[a], index[b]) for a, b in ends], dtype=np.int64).reshape(-1, 2)
    with reading(linked):
        pairs = _links(linked, rows[:, 0], rows[:, 1], titles, ("from", "to"))
    places = ([index[title] for title, _ in kinds], [categories[name] for _, name in kinds])
    own: list[list[str]] = [[] for _ in titles]
    for title, name in kinds:
        own[index[title]].append(name)
    nodes = frames.polars().DataFrame({"article": titles.tolist(), "categories": ["|".join(some) for some in own]})
    return Graph(pairs, ones_at(*places, (len(titles), max(1, len(categories)))), nodes)


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

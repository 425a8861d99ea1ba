"""Graphs of the MUSAE collection, such as Facebook pages that like each other, with features of each node.

    *edges.csv                    a header, then two nodes on each line
    *features.json                {"node": [feature, feature, …], …}
    *target.csv or *pages.csv     a header, then a line a node: its id first, then name, kind and the like

Reads the whole files: O(size).
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.ids import as_ids
from gramtower.data.lookup import index_of
from gramtower.data.readers.folders import file_in
from gramtower.data.readers.graph import Graph, links, ones
from gramtower.data.sources import PathLike, reading

if TYPE_CHECKING:
    from polars import Series

_UNNAMED = 1 << 22  # features that a file may speak of besides one for each number in it


def musae(path: PathLike, *, directed: bool = False) -> Graph:
    """A graph with features: ``edges.csv``, ``features.json`` and ``pages.csv`` or ``target.csv`` of a folder.

    Args:
        path: the folder; its files may be compressed and have a prefix such as ``musae_facebook_``.
        directed: whether a line of edges is a pair one way only; otherwise it is one both ways.

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
        left, right = (_rows(edges, column, index) for column in columns)
        pairs = links(edges, left, right, ids, ("node", "neighbour"), both)
    return Graph(pairs, features, nodes)


def _rows(path: Path, column: Series, index: dict[Any, int]) -> NDArray[np.int64]:
    found = np.asarray([index.get(key, -1) for key in column.to_list()], dtype=np.int64)
    if len(found) and found.min() < 0:
        key = column.to_list()[int(found.argmin())]
        check.fail("path", f"{path} with a link of {key!r}", f"links of the {len(index):,} nodes that are listed")
    return found


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
    return ones(rows, columns, (len(index), width))

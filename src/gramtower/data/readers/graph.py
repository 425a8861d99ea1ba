"""Graphs whose nodes have features: what the readers of such sets return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.sources import PathLike

if TYPE_CHECKING:
    from polars import DataFrame


@dataclass(frozen=True)
class Graph:
    """Nodes, their links and their features.

    Attributes:
        pairs: nodes × nodes, the same on both sides and in the order of ``nodes``, with those without links.
        features: nodes × features of ones, float32, in the same order: left and right features alike.
        nodes: what is known of each node: a polars frame, all columns as text, ids first.
    """

    pairs: Interactions
    features: sp.csr_matrix
    nodes: DataFrame


def links(
    path: PathLike,
    left: NDArray[np.int64],
    right: NDArray[np.int64],
    ids: NDArray[Any],
    names: tuple[str, str],
    both: bool = False,
) -> Interactions:
    """Links between rows as pairs, each once; those of a node to itself are left out and counted as ``self_links``.

    Args:
        path: the file, for errors.
        left: rows of one end of each link.
        right: rows of the other end.
        ids: of the nodes.
        names: of both sides.
        both: whether a link is a pair both ways.
    """
    others = left != right
    rows, columns = left[others], right[others]
    if both:
        rows, columns = np.concatenate([rows, columns]), np.concatenate([columns, rows])
    if not len(rows):
        check.fail("path", f"{path}, in which no node is linked to another", "a graph with links")
    pairs = Interactions.from_matrix(ones(rows, columns, (len(ids), len(ids))), ids, ids)
    named = pairs.renamed(*names, self_links=int(len(others) - others.sum()))
    return replace(named, same_entities=True)


def ones(rows: Any, columns: Any, shape: tuple[int, int]) -> sp.csr_matrix:
    """A float32 matrix with a 1 at each place, also at one that is named twice."""
    entries = (np.ones(len(rows), dtype=np.float32), (np.asarray(rows), np.asarray(columns)))
    matrix = sp.csr_matrix(entries, shape=shape)
    matrix.sum_duplicates()  # which scipy 1.13.0 leaves
    matrix.data[:] = 1
    return matrix

"""Readers for the layouts of public data sets."""

from gramtower.data.readers.graphs import Graph, musae, wikispeedia
from gramtower.data.readers.item_lists import (
    CiteULike,
    Extreme,
    citeulike,
    edge_list,
    extreme_classification,
    item_lists,
    thesaurus,
)
from gramtower.data.readers.ratings import movielens, movielens_table

__all__ = [
    "CiteULike",
    "Extreme",
    "Graph",
    "citeulike",
    "edge_list",
    "extreme_classification",
    "item_lists",
    "movielens",
    "movielens_table",
    "musae",
    "thesaurus",
    "wikispeedia",
]

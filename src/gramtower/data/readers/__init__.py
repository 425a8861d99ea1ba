"""Readers of the layouts that public data sets come in: one file a layout, the functions to call named here."""

from gramtower.data.readers.citeulike import CiteULike, citeulike
from gramtower.data.readers.extreme import Extreme, extreme_classification
from gramtower.data.readers.graph import Graph
from gramtower.data.readers.lists import edge_list, item_lists, thesaurus
from gramtower.data.readers.movielens import movielens, movielens_table
from gramtower.data.readers.musae import musae
from gramtower.data.readers.wikispeedia import wikispeedia

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

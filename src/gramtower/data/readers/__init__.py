"""Readers of the layouts that public data sets come in: one file a layout, the functions to call named here."""

from gramtower.data.readers.extreme import Extreme, extreme_classification
from gramtower.data.readers.lists import edge_list, item_lists, thesaurus
from gramtower.data.readers.movielens import movielens, movielens_table

__all__ = ["Extreme", "edge_list", "extreme_classification", "item_lists", "movielens", "movielens_table", "thesaurus"]

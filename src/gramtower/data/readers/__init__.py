"""Readers for the layouts of public data sets."""

from gramtower.data.readers.graphs import Graph as Graph
from gramtower.data.readers.graphs import musae as musae
from gramtower.data.readers.graphs import wikispeedia as wikispeedia
from gramtower.data.readers.item_lists import CiteULike as CiteULike
from gramtower.data.readers.item_lists import Extreme as Extreme
from gramtower.data.readers.item_lists import citeulike as citeulike
from gramtower.data.readers.item_lists import edge_list as edge_list
from gramtower.data.readers.item_lists import extreme_classification as extreme_classification
from gramtower.data.readers.item_lists import item_lists as item_lists
from gramtower.data.readers.item_lists import thesaurus as thesaurus
from gramtower.data.readers.ratings import movielens as movielens
from gramtower.data.readers.ratings import movielens_table as movielens_table

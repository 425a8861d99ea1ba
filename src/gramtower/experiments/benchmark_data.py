"""The split that all models of a benchmark share: what they learn from, what is seen, and what is relevant to whom.

Seen is the library's one rule (model/fitted.py): the pairs that are learned from and, where both sides are one set,
every entity with itself. All right entities are candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import union, without
from gramtower.data.splits import random_pairs
from gramtower.data.tables import FeatureTable
from gramtower.metrics.definitions import parse
from gramtower.metrics.evaluation import ranking_metrics
from gramtower.metrics.tally import Scores
from gramtower.model.fit_data import aligned, own_pairs

_REFUSED = {
    "auc": "it needs scores of all items, and a model here gives lists",
    "mrr": "mrr@K: a model here gives lists",
    "diversity": "it is measured in a model's own embeddings, which differ from model to model",
}


@dataclass(frozen=True, eq=False)
class Cut:
    """One split.

    Attributes:
        train: pairs to learn from.
        seen: pairs that are left out of lists, users × items.
        users: rows of users with relevant items.
        relevant: their relevant items, one row for each of them.
    """

    train: Interactions
    seen: sp.csr_matrix
    users: NDArray[np.int64]
    relevant: sp.csr_matrix

    def measure(self, lists: NDArray[np.int64], metrics: list[str]) -> Scores:
        """Metrics of lists, one for each of ``users``; refuses lists with what is seen.

        Raises:
            ValueError: if a list has another form, an item twice or one that is seen.
        """
        if lists.shape[0] != len(self.users):
            check.fail("lists", f"{lists.shape[0]} lists", f"{len(self.users)}, one for each user")
        taken = seen_places(lists, sp.csr_matrix(self.seen[self.users]))
        if taken:
            expected = "none: those that a user has in the training pairs are left out for every model"
            check.fail("lists", f"{taken:,} items that are seen", expected)
        return ranking_metrics(lists, self.relevant, metrics, popularity=self.train.matrix)


def known_pairs(pairs: Any) -> Interactions:
    """Pairs as Interactions."""
    known = Interactions.from_matrix(pairs) if sp.issparse(pairs) else pairs
    if not isinstance(known, Interactions):
        check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")
    if not len(known):
        check.fail("pairs", "none", "at least two pairs")
    return known


def checked_metrics(metrics: Any) -> list[str]:
    """Names of metrics that lists alone decide."""
    for metric in (found := parse(metrics)):
        if metric.kind in _REFUSED and (metric.kind == "diversity" or not metric.k):
            check.fail("metrics", repr(metric.name), f"metrics of lists: {_REFUSED[metric.kind]}")
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        check.fail("metrics", ", ".join(names), "each metric once")
    return names


def make_cut(pairs: Interactions, test: Any, seed: int) -> Cut:
    """The split of a seed: a share of the pairs drawn at random, or pairs to test that are the same for every seed."""
    if isinstance(test, (Interactions, sp.spmatrix, sp.sparray)):
        train, held_out = pairs, test
    else:
        split = random_pairs(pairs, test, seed=seed)
        train, held_out = split.train, split.test
    ids = train.left_ids, train.right_ids
    found = aligned("test", held_out, ids, train.shape, train.numbered)
    seen = union(train.matrix, own_pairs(ids, train.shape)) if train.one_set else union(train.matrix)
    relevant = without(sp.csr_matrix((found > 0).astype(np.float32)), seen)
    users = np.flatnonzero(np.diff(relevant.indptr)).astype(np.int64)
    if not len(users):
        check.fail("test", f"{found.nnz:,} pairs, none of them both positive and new", "at least one that is")
    return Cut(train, seen, users, sp.csr_matrix(relevant[users]))


def seen_places(lists: NDArray[np.int64], seen: sp.csr_matrix) -> int:
    """How many places of lists hold an item of the same row of ``seen``."""
    rows, places = np.nonzero(lists >= 0)
    shown = sp.csr_matrix((np.ones(len(rows), dtype=np.float32), (rows, lists[rows, places])), shape=seen.shape)
    return int(shown.multiply(seen).nnz)


def digest_of(*values: Any) -> str:
    """A fingerprint of arrays, matrices, ids and text."""
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        if sp.issparse(value):
            csr = value.tocsr()
            parts = [np.asarray(csr.shape), csr.indptr.astype(np.int64), csr.indices.astype(np.int64), csr.data]
        elif isinstance(value, torch.Tensor):
            parts = [value.detach().cpu().numpy()]
        else:
            parts = [np.asarray(value)]
        for part in parts:
            plain = part.dtype.kind in "biufc"
            content = np.ascontiguousarray(part).tobytes() if plain else repr(part.tolist()).encode(errors="replace")
            found.update(f"{part.shape}{part.dtype}".encode() + content)
    return found.hexdigest()


def describe(value: Any, ids: NDArray[Any] | None = None) -> Any:
    """Settings and features in JSON, the same for the same ones: arrays and tables by a fingerprint.

    Args:
        value: anything.
        ids: the entities whose rows of a table count.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): describe(part, ids) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part, ids) for part in value]
    if isinstance(value, FeatureTable):
        rows = [] if ids is None else [value.encode(ids)]
        return {"table": value.kinds, "fingerprint": digest_of(value.to_json(), *rows)}
    if sp.issparse(value) or isinstance(value, (np.ndarray, torch.Tensor)):
        return {"shape": list(value.shape), "fingerprint": digest_of(value)}
    if isinstance(value, Interactions):
        return {"pairs": len(value), "fingerprint": digest_of(value.matrix, value.left_ids, value.right_ids)}
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is not None:
        return f"{value.__module__}.{name}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text

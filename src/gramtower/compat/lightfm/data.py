"""`Dataset`: ids and names of features as row and column numbers, and the matrices that LightFM's interface takes.

Numbers are given in the order in which ids and names first appear. With identity features, which are the default, each
user or item is a feature of its own as well, numbered among the named ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NoReturn

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check

Numbers = dict[Hashable, int]
Described = Iterable[tuple[Hashable, Iterable[Hashable] | Mapping[Hashable, float]]]


class Dataset:
    """Numbers of users, items and their features, and matrices with these rows and columns.

    Args:
        user_identity_features: whether each user is a feature of its own.
        item_identity_features: whether each item is a feature of its own.

    Example:
        >>> from gramtower.compat.lightfm import Dataset
        >>> dataset = Dataset()
        >>> dataset.fit(["ann", "bob"], ["tea", "milk"], item_features=["hot"])
        >>> dataset.build_interactions([("ann", "tea"), ("bob", "milk", 2.0)])[1].toarray().tolist()
        [[1.0, 0.0], [0.0, 2.0]]
        >>> dataset.build_item_features([("tea", ["hot"])]).toarray().tolist()
        [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """

    def __init__(self, user_identity_features: bool = True, item_identity_features: bool = True) -> None:
        self._own = {
            "user": check.flag("user_identity_features", user_identity_features),
            "item": check.flag("item_identity_features", item_identity_features),
        }
        self._clear()

    def fit(
        self,
        users: Iterable[Hashable],
        items: Iterable[Hashable],
        user_features: Iterable[Hashable] | None = None,
        item_features: Iterable[Hashable] | None = None,
    ) -> None:
        """Number the ids of users and items and the names of their features from 0."""
        self._clear()
        self.fit_partial(users, items, user_features, item_features)

    def fit_partial(
        self,
        users: Iterable[Hashable] | None = None,
        items: Iterable[Hashable] | None = None,
        user_features: Iterable[Hashable] | None = None,
        item_features: Iterable[Hashable] | None = None,
    ) -> None:
        """Number further ids and names; those that are known keep their numbers."""
        for side, entities, named in (("user", users, user_features), ("item", items, item_features)):
            ids, features = self._ids[side], self._features[side]
            for one in entities or ():
                ids.setdefault(one, len(ids))
                if self._own[side]:
                    features.setdefault(one, len(features))
            for name in named or ():
                features.setdefault(name, len(features))

    def build_interactions(
        self, data: Iterable[tuple[Hashable, Hashable] | tuple[Hashable, Hashable, float]]
    ) -> tuple[sp.coo_matrix, sp.coo_matrix]:
        """The matrices of interactions (ones, int32) and of their weights (float32), from pairs or triples.

        Args:
            data: (user, item) or (user, item, weight); the usual weight is 1.
        """
        rows, columns, weights = [], [], []
        for datum in data:
            if len(datum) not in (2, 3):
                check.fail("data", repr(datum), "(user, item) or (user, item, weight)")
            rows.append(self._number("user", datum[0]))
            columns.append(self._number("item", datum[1]))
            weights.append(datum[2] if len(datum) == 3 else 1.0)
        return (
            _assembled(np.ones(len(rows)), rows, columns, self.interactions_shape(), np.int32),
            _assembled(weights, rows, columns, self.interactions_shape(), np.float32),
        )

    def build_user_features(self, data: Described, normalize: bool = True) -> sp.csr_matrix:
        """The matrix of users × features.

        Args:
            data: (user, names of features), or (user, {name: weight}).
            normalize: whether the weights of each row are divided by the sum of their sizes.
        """
        return self._described("user", data, normalize)

    def build_item_features(self, data: Described, normalize: bool = True) -> sp.csr_matrix:
        """The matrix of items × features; see :meth:`build_user_features`."""
        return self._described("item", data, normalize)

    def interactions_shape(self) -> tuple[int, int]:
        """Number of users and of items."""
        return len(self._ids["user"]), len(self._ids["item"])

    def user_features_shape(self) -> tuple[int, int]:
        """Number of users and of their features."""
        return len(self._ids["user"]), len(self._features["user"])

    def item_features_shape(self) -> tuple[int, int]:
        """Number of items and of their features."""
        return len(self._ids["item"]), len(self._features["item"])

    def model_dimensions(self) -> tuple[int, int]:
        """Number of features of users and of items, which are the rows of a model's embeddings."""
        return len(self._features["user"]), len(self._features["item"])

    def mapping(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Numbers of the users, of their features, of the items, and of their features."""
        return self._ids["user"], self._features["user"], self._ids["item"], self._features["item"]

    def _clear(self) -> None:
        self._ids: dict[str, Numbers] = {"user": {}, "item": {}}
        self._features: dict[str, Numbers] = {"user": {}, "item": {}}

    def _number(self, side: str, one: Hashable) -> int:
        found = self._ids[side].get(one)
        return _unknown(side, one) if found is None else found

    def _described(self, side: str, data: Described, normalize: bool) -> sp.csr_matrix:
        ids, features, normalize = self._ids[side], self._features[side], check.flag("normalize", normalize)
        own = ids if self._own[side] else {}
        rows, columns = [number for _, number in own.items()], [features[one] for one in own]
        weights = [1.0] * len(rows)
        for datum in data:
            if len(datum) != 2:
                check.fail("data", repr(datum), f"({side}, features)")
            row, described = self._number(side, datum[0]), datum[1]
            for name, weight in described.items() if isinstance(described, Mapping) else ((x, 1.0) for x in described):
                if name not in features:
                    _unknown(f"{side} feature", name)
                rows.append(row)
                columns.append(features[name])
                weights.append(weight)
        matrix = _assembled(weights, rows, columns, (len(ids), len(features)), np.float32).tocsr()
        if normalize:
            sizes = np.asarray(abs(matrix).sum(axis=1)).ravel()
            if (sizes == 0).any():
                given = f"none for {int((sizes == 0).sum())} of {len(sizes)} {side}s"
                check.fail("data", given, "features with weight for each, or normalize=False")
            matrix = sp.csr_matrix(sp.diags(1.0 / sizes).astype(np.float32) @ matrix)
        return matrix


def _unknown(kind: str, one: Hashable) -> NoReturn:
    check.fail("data", f"the unknown {kind} {one!r}", "those that fit or fit_partial was given")


def _assembled(
    values: Iterable[float], rows: list[int], columns: list[int], shape: tuple[int, int], dtype: type
) -> sp.coo_matrix:
    numbers = np.asarray(rows, np.int32), np.asarray(columns, np.int32)
    try:
        return sp.coo_matrix((np.asarray(values, dtype), numbers), shape=shape)
    except (TypeError, ValueError):
        check.fail("data", "weights that are not numbers", "real numbers")

"""`TwoTower` with the methods, arguments, return shapes and exceptions of the recommenders of `implicit`.

    - from implicit.als import AlternatingLeastSquares
    + from gramtower.compat.implicit import TwoTower as AlternatingLeastSquares

Users and items are row and column numbers. Checked by tests/test_compat_implicit.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower.data.matrices import canonical
from gramtower.estimator.model_file import load as load_estimator
from gramtower.estimator.side import normalised
from gramtower.estimator.two_tower import TwoTower as Estimator
from gramtower.retrieval.topk import top_k

Answer = tuple[NDArray[Any], NDArray[Any]]


class TwoTower:
    """A two-tower model behind implicit's interface.

    Args:
        factors: size of the embeddings.
        regularization: λ; None takes the estimator's default.
        iterations: outer iterations.
        random_state: seed.
        history: let the user tower see the user's items instead of the user's number, so that users not seen in
            training can be recommended to with ``recalculate_user=True``.
        options: further arguments of :class:`gramtower.TwoTower`.
    """

    def __init__(
        self,
        factors: int = 128,
        regularization: float | None = None,
        iterations: int = 20,
        random_state: int | None = None,
        history: bool = False,
        **options: Any,
    ) -> None:
        if regularization is not None:
            options["l2"] = regularization
        self.factors, self.iterations, self.history = factors, iterations, history
        self.model = Estimator(dim=factors, max_iterations=iterations, seed=random_state or 0, **options)

    @property
    def user_factors(self) -> NDArray[np.float32]:
        """Embeddings of the users."""
        return self.model.embed(side="left")

    @property
    def item_factors(self) -> NDArray[np.float32]:
        """Embeddings of the items."""
        return self.model.embed(side="right")

    def fit(
        self,
        user_items: Any,
        show_progress: bool = True,
        callback: Callable[[int, float], Any] | None = None,
    ) -> None:
        """Learn from a sparse users × items matrix; entries that are not zero are observed pairs.

        ``callback`` is called with the iteration and the seconds it took, once training has ended.
        """
        matrix = sp.csr_matrix(canonical("user_items", user_items), dtype=np.float32, copy=True)
        matrix.eliminate_zeros()
        matrix.data[:] = 1.0
        self.model.set_params(verbose=show_progress)
        self.model.fit(matrix, left_features="history" if self.history else None)
        if callback is not None:
            records = self.model.history_
            for before, after in itertools.pairwise(records):
                callback(after.iteration - 1, after.seconds - before.seconds)

    def recommend(
        self,
        userid: Any,
        user_items: Any,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Sequence[int] | None = None,
        recalculate_user: bool = False,
        items: Sequence[int] | None = None,
    ) -> Answer:
        """The N best items for a user or for several; arrays of ids and scores, with one row for each user asked."""
        users = np.atleast_1d(np.asarray(userid))
        if filter_already_liked_items or recalculate_user:
            if not isinstance(user_items, (sp.csr_matrix, sp.csr_array)):
                raise ValueError("user_items needs to be a CSR sparse matrix")
            if user_items.shape[0] != len(users):
                raise ValueError("user_items must contain 1 row for every user in userids")
        if items is not None and filter_items is not None:
            raise ValueError("Can't specify both items and filter_items")
        if recalculate_user:
            if not self.history:
                raise NotImplementedError("recalculate_user needs a model made with history=True")
            P = torch.from_numpy(self.model.embed(histories=user_items))
        else:
            P = self.model.left_.embeddings[self._known(users, len(self.model.left_), "userid")]
        return self._ranked(
            P, self.model.right_.embeddings, N, np.isscalar(userid),
            exclude=user_items if filter_already_liked_items else None,
            allow=self._chosen(items), deny=filter_items,
        )  # fmt: skip

    def similar_items(
        self,
        itemid: Any,
        N: int = 10,
        recalculate_item: bool = False,
        item_users: Any = None,
        filter_items: Sequence[int] | None = None,
        items: Sequence[int] | None = None,
    ) -> Answer:
        """The N items most alike by cosine, the item itself first."""
        if recalculate_item:
            raise NotImplementedError("recalculate_item isn't supported with this model")
        return self._similar(itemid, self.model.right_.embeddings, "itemid", N, filter_items, items)

    def similar_users(
        self,
        userid: Any,
        N: int = 10,
        filter_users: Sequence[int] | None = None,
        users: Sequence[int] | None = None,
    ) -> Answer:
        """The N users most alike by cosine, the user itself first."""
        return self._similar(userid, self.model.left_.embeddings, "userid", N, filter_users, users)

    def save(self, file: str | Path) -> None:
        """Write the model to a file."""
        self.model.save(file)

    @classmethod
    def load(cls, file: str | Path) -> TwoTower:
        """A model that :meth:`save` wrote."""
        model = load_estimator(file)
        made = cls(model.dim_, model.l2, model.max_iterations, model.seed, history=model.left_.inputs.has_history)
        made.model = model
        return made

    def _similar(self, which: Any, factors: torch.Tensor, name: str, N: int, deny: Any, allow: Any) -> Answer:
        if allow is not None and deny is not None:
            raise ValueError("Can't specify both a list to choose from and a filter")
        unit = normalised(factors)
        rows = self._known(np.atleast_1d(np.asarray(which)), len(factors), name)
        return self._ranked(unit[rows], unit, N, np.isscalar(which), None, allow, deny)

    @staticmethod
    def _ranked(
        P: torch.Tensor, factors: torch.Tensor, N: int, single: bool, exclude: Any, allow: Any, deny: Any
    ) -> Answer:
        for chosen in (allow, deny):
            if chosen is not None and len(chosen) and (np.max(chosen) >= len(factors) or np.min(chosen) < 0):
                raise IndexError("Some itemids in the items parameter in are not in the model")
        limit = len(factors) if allow is None else len(allow)
        found, scores = top_k(
            P, factors, min(N, limit), exclude=exclude,
            allow=None if allow is None else np.asarray(allow), deny=None if deny is None else np.asarray(deny),
        )  # fmt: skip
        return (found[0], scores[0]) if single else (found, scores)

    @staticmethod
    def _known(rows: NDArray[Any], count: int, name: str) -> NDArray[Any]:
        if len(rows) and (rows.max() >= count or rows.min() < 0):
            raise IndexError(f"{name} is out of bounds of the model: it knows 0 to {count - 1}")
        return rows

    @staticmethod
    def _chosen(items: Sequence[int] | None) -> NDArray[Any] | None:
        return None if items is None else np.sort(np.asarray(items))

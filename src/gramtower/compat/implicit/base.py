"""The interface that all models share with implicit, and the forms of arguments that implicit takes.

Lists are exact and ranked in float32. As in implicit, filtered items are not missing from a list that has space for
them: they come last, with the lowest score. Lists are never longer than the number of items to choose from.
"""

from __future__ import annotations

import copy
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.matrices import SparseMatrix, canonical
from gramtower.retrieval.topk import top_k

Factors: TypeAlias = NDArray[Any]  # rows of float32 or float64
RowsLike: TypeAlias = int | Sequence[int] | NDArray[Any]  # one row number or several
Seed: TypeAlias = int | np.random.RandomState | np.random.Generator | None
_FAR = 2**62


class ParameterWarning(Warning):
    """An argument had to be converted."""


def warn_of_conversion(message: str) -> None:
    """Warn with implicit's ParameterWarning if implicit is imported, so that its filters work, else with ours."""
    theirs = getattr(sys.modules.get("implicit.utils"), "ParameterWarning", ParameterWarning)
    warnings.warn(message, theirs, stacklevel=4)


def warn_of_ignored(**given: tuple[object, object]) -> None:
    """Warn about arguments without effect that were given another value than the default."""
    ignored = [f"{name}={value!r}" for name, (value, usual) in given.items() if value != usual]
    if ignored:
        warnings.warn(f"these arguments have no effect here: {', '.join(ignored)}", UserWarning, stacklevel=3)


def check_csr(name: str, matrix: SparseMatrix, columns: int | None = None) -> sp.csr_matrix:
    """A sparse matrix as canonical CSR, with a warning if it has another format.

    A matrix with fewer columns than ``columns`` gets empty ones, as a model may have grown since.
    """
    if not sp.issparse(matrix):
        check.fail(name, type(matrix).__name__, "a scipy.sparse matrix")
    made = canonical(name, matrix)
    if matrix.format != "csr":
        warn_of_conversion(f"{name} is converted from {type(matrix).__name__} to CSR")
    if columns is None or made.shape[1] == columns:
        return made
    if made.shape[1] > columns:
        check.fail(name, f"{made.shape[1]} columns", f"at most {columns}, as the model has")
    return sp.csr_matrix((made.data, made.indices, made.indptr), shape=(made.shape[0], columns))


def row_numbers(name: str, value: RowsLike) -> NDArray[np.int64]:
    """One row number or several, as an array."""
    return np.array([check.count(name, row, minimum=-_FAR, most=_FAR) for row in check.ids(name, value)], np.int64)


def known_rows(name: str, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The row numbers, if the model has all of them; otherwise raises IndexError, as implicit does."""
    if len(rows) and (rows.max() >= count or rows.min() < 0):
        raise IndexError(f"{name} is out of bounds of the model: it knows 0 to {count - 1}")
    return rows


def as_seed(random_state: Seed) -> int:
    """A seed from None, a number, or a numpy generator of either kind."""
    if random_state is None:
        return 0
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return check.seed(random_state)


def as_device(use_gpu: bool | None) -> torch.device:
    """The device; None is a GPU if there is one."""
    there = torch.cuda.is_available()
    if use_gpu and not there:
        check.fail("use_gpu", "True", "False or None on a machine without a GPU")
    return torch.device("cuda" if (there if use_gpu is None else use_gpu) else "cpu")


Answer = tuple[NDArray[np.int32], Factors]
Callback = Callable[[int, float, float | None], Any]
_LOWEST = -float(np.finfo(np.float32).max)


class Recommender(ABC):
    """A model with factors of users and items."""

    use_gpu: bool | None = None

    @abstractmethod
    def fit(self, user_items: SparseMatrix, show_progress: bool = True, callback: Callback | None = None) -> None:
        """Fit to a sparse users × items matrix of confidences."""

    @abstractmethod
    def recalculate_user(self, userid: RowsLike, user_items: SparseMatrix) -> Factors:
        """Factors of users from their items, without storing them."""

    @abstractmethod
    def recalculate_item(self, itemid: RowsLike, item_users: SparseMatrix) -> Factors:
        """Factors of items from their users, without storing them."""

    @abstractmethod
    def _factors(self, side: str) -> Factors:
        """Factors of the users ("left") or of the items ("right")."""

    def _directions(self, side: str) -> Factors:
        """Factors by which entities of a side are compared; a row of zeros is similar to no other."""
        return self._factors(side)

    def recommend(
        self,
        userid: RowsLike,
        user_items: SparseMatrix,
        N: int = 10,
        filter_already_liked_items: bool = True,
        filter_items: Sequence[int] | None = None,
        recalculate_user: bool = False,
        items: Sequence[int] | None = None,
    ) -> Answer:
        """The N best items for one user or several.

        Args:
            userid: one row number or several.
            user_items: CSR matrix of liked items, one row for each user.
            N: length of the lists.
            filter_already_liked_items: whether entries of ``user_items`` come last.
            filter_items: items that come last for all users.
            recalculate_user: whether to compute factors from ``user_items``.
            items: items to rank; None for all.

        Returns:
            Items and scores, best first: one row for each user, or flat arrays for a single row number.
        """
        filtered = check.flag("filter_already_liked_items", filter_already_liked_items)
        recalculated = check.flag("recalculate_user", recalculate_user)
        users, Q = row_numbers("userid", userid), self._factors("right")
        if filtered or recalculated:
            if not sp.issparse(user_items) or user_items.format != "csr":
                raise ValueError("user_items needs to be a CSR sparse matrix")
            if user_items.shape[0] != len(users):
                raise ValueError("user_items must contain 1 row for every user in userids")
        if recalculated:
            P = np.atleast_2d(self.recalculate_user(userid, user_items))
        else:
            P = self._factors("left")
            P = P[known_rows("userid", users, len(P))]
        liked = check_csr("user_items", user_items, len(Q)) if filtered else None
        return self._ranked(P, Q, N, np.isscalar(userid), liked, items, filter_items)

    def similar_items(
        self,
        itemid: RowsLike,
        N: int = 10,
        recalculate_item: bool = False,
        item_users: SparseMatrix | None = None,
        filter_items: Sequence[int] | None = None,
        items: Sequence[int] | None = None,
    ) -> Answer:
        """The N most similar items by cosine, the item itself first; an item without pairs has similarity 0."""
        own = self.recalculate_item(itemid, item_users) if check.flag("recalculate_item", recalculate_item) else None
        return self._similar(itemid, "right", "itemid", N, filter_items, items, own)

    def similar_users(
        self,
        userid: RowsLike,
        N: int = 10,
        filter_users: Sequence[int] | None = None,
        users: Sequence[int] | None = None,
    ) -> Answer:
        """The N most similar users by cosine, the user itself first."""
        return self._similar(userid, "left", "userid", N, filter_users, users)

    def rank_items(
        self, userid: RowsLike, user_items: SparseMatrix, selected_items: Sequence[int], recalculate_user: bool = False
    ) -> Answer:
        """Up to ten of the selected items, best first. Deprecated in implicit: use ``recommend`` with ``items``."""
        warnings.warn("rank_items is deprecated: use recommend with items", DeprecationWarning, stacklevel=2)
        return self.recommend(userid, user_items, 10, False, None, recalculate_user, selected_items)

    def recommend_all(
        self,
        user_items: SparseMatrix,
        N: int = 10,
        recalculate_user: bool = False,
        filter_already_liked_items: bool = True,
        filter_items: Sequence[int] | None = None,
        users_items_offset: int = 0,
    ) -> NDArray[np.int32]:
        """Items for the users of all rows. Deprecated in implicit: use ``recommend`` with several users."""
        warnings.warn("recommend_all is deprecated: use recommend with many users", DeprecationWarning, stacklevel=2)
        first = check.count("users_items_offset", users_items_offset, minimum=0)
        users = np.arange(user_items.shape[0]) + first
        return self.recommend(users, user_items, N, filter_already_liked_items, filter_items, recalculate_user)[0]

    def to_gpu(self) -> Self:
        """A copy of this model that trains and ranks on a GPU."""
        return self._moved(True)

    def to_cpu(self) -> Self:
        """A copy of this model that trains and ranks on the CPU."""
        return self._moved(False)

    def _moved(self, use_gpu: bool) -> Self:
        as_device(use_gpu)
        made = copy.deepcopy(self)
        made.use_gpu = use_gpu
        return made

    def _similar(
        self,
        which: RowsLike,
        side: str,
        name: str,
        N: int,
        deny: RowsLike | None,
        allow: RowsLike | None,
        own: Factors | None = None,
    ) -> Answer:
        unit = _unit(self._directions(side))
        rows = row_numbers(name, which)
        P = unit[known_rows(name, rows, len(unit))] if own is None else _unit(np.atleast_2d(own))
        found, scores = self._ranked(P, unit, N, False, None, allow, deny)
        if own is None and found.shape[1]:
            listed = np.isin(rows, np.arange(len(unit)) if allow is None else row_numbers("items", allow))
            listed &= P.any(1) & ~np.isin(rows, [] if deny is None else row_numbers("items", deny))
            _put_first(found, scores, rows, listed)
        return (found[0], scores[0]) if np.isscalar(which) else (found, scores)

    def _ranked(
        self,
        P: Factors,
        Q: Factors,
        N: int,
        single: bool,
        liked: sp.csr_matrix | None,
        allow: RowsLike | None,
        deny: RowsLike | None,
    ) -> Answer:
        chosen, denied = (None if given is None else row_numbers("items", given) for given in (allow, deny))
        if chosen is not None and denied is not None and len(denied):
            raise ValueError("Can't specify both items and filter_items")
        for rows in (chosen, denied):
            known_rows("items", np.empty(0, np.int64) if rows is None else rows, len(Q))
        choice = np.arange(len(Q)) if chosen is None else np.unique(chosen)
        width = min(check.count("N", N), len(choice))
        found, scores = np.empty((len(P), 0), np.int64), np.empty((len(P), 0), np.float32)
        if width:
            device = as_device(self.use_gpu)
            left, right = (torch.from_numpy(np.ascontiguousarray(rows)).to(device) for rows in (P, Q))
            found, scores = top_k(left, right, width, exclude=liked, allow=chosen, deny=denied)
        if P.dtype == np.float64:
            found, scores = _scored_again(P, Q, found)
        for row in np.flatnonzero((found < 0).any(1)):
            empty = found[row] < 0
            found[row, empty] = np.setdiff1d(choice, found[row])[: empty.sum()]
            scores[row, empty] = _LOWEST
        ids = found.astype(np.int32)
        return (ids[0], scores[0]) if single else (ids, scores)


def _unit(factors: Factors) -> Factors:
    """Rows normalised to length 1; rows of zeros stay zero."""
    lengths = np.linalg.norm(factors, axis=1, keepdims=True)
    return np.asarray(np.divide(factors, lengths, out=np.zeros_like(factors), where=lengths > 0))


def _put_first(found: NDArray[np.int32], scores: Factors, rows: NDArray[np.int64], listed: NDArray[np.bool_]) -> None:
    """Move each listed entity to the start of its own list, also if others are equal up to rounding."""
    for row in np.flatnonzero(listed & (found[:, 0] != rows)):
        place = np.flatnonzero(found[row] == rows[row])
        end = place[0] if len(place) else found.shape[1] - 1
        found[row, 1 : end + 1], scores[row, 1 : end + 1] = found[row, :end].copy(), scores[row, :end].copy()
        found[row, 0] = rows[row]


def _scored_again(P: Factors, Q: Factors, found: NDArray[np.int64]) -> tuple[NDArray[np.int64], Factors]:
    """Lists sorted by scores in the precision of the factors; empty places stay at the end."""
    scores = np.einsum("rk,rjk->rj", P, Q[found])
    scores[found < 0] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(found, order, 1), np.take_along_axis(scores, order, 1)

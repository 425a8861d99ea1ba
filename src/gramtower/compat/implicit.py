"""`TwoTower` with the methods, arguments, return shapes and exceptions of the recommenders of `implicit`.

    - from implicit.als import AlternatingLeastSquares
    + from gramtower.compat.implicit import TwoTower as AlternatingLeastSquares

Users and items are row and column numbers. Arguments keep implicit's meaning, order and names; those without a meaning
here warn when they are given. Checked by tests/test_compat_implicit.py.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.data.interactions import Interactions
from gramtower.estimator.side import normalised
from gramtower.retrieval.topk import top_k
from gramtower.two_tower import TwoTower as Estimator
from gramtower.two_tower import load as load_estimator

_FAR = 2**62
Answer = tuple[NDArray[Any], NDArray[Any]]


class TwoTower:
    """A two-tower model behind implicit's interface.

    Args:
        factors: size of the embeddings.
        regularization: λ; None takes the estimator's default.
        alpha: confidence of an entry: its value times alpha weighs the pair's loss, beside ω of a pair without one.
        dtype: float32 whatever is given.
        use_native: no meaning here.
        use_cg: no meaning here.
        use_gpu: True asks for a GPU, False for the CPU, None takes what there is.
        iterations: outer iterations.
        calculate_training_loss: the objective is worked out in any case, and shown with ``show_progress``.
        num_threads: no meaning here: ``torch.set_num_threads`` is for the whole process.
        random_state: a seed, or a numpy generator to draw one from.
        history: let the user tower see the user's items instead of the user's number, so that users not seen in
            training can be recommended to with ``recalculate_user=True``.
        options: further arguments of :class:`gramtower.TwoTower`.
    """

    def __init__(
        self,
        factors: int = 100,
        regularization: float | None = None,
        alpha: float = 1.0,
        dtype: Any = np.float32,
        use_native: bool = True,
        use_cg: bool = True,
        use_gpu: bool | None = None,
        iterations: int = 15,
        calculate_training_loss: bool = False,
        num_threads: int = 0,
        random_state: Any = None,
        *,
        history: bool = False,
        **options: Any,
    ) -> None:
        _warn_of_what_is_ignored(dtype, use_native, use_cg, num_threads)
        if regularization is not None:
            options["l2"] = regularization
        if use_gpu is not None:
            options.setdefault("device", "cuda" if check.flag("use_gpu", use_gpu) else "cpu")
        self.factors, self.iterations, self.history = factors, iterations, history
        self.alpha = check.number("alpha", alpha, above=0.0)
        self.model = Estimator(dim=factors, max_iterations=iterations, seed=_seed(random_state), **options)

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
        """Learn from a sparse users × items matrix of confidences; entries that are not zero are observed pairs.

        An entry weighs its pair's loss by alpha times its size. A negative one is a dislike: a pair labelled −1.
        ``callback`` is called with the iteration and the seconds it took, once training has ended.
        """
        self.model.set_params(verbose=show_progress)
        self.model.fit(self._pairs(user_items), left_features="history" if self.history else None)
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
        users = self._numbers("userid", userid)
        filter_already_liked_items = check.flag("filter_already_liked_items", filter_already_liked_items)
        recalculate_user = check.flag("recalculate_user", recalculate_user)
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
            allow=items, deny=filter_items,
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
        """The N items most alike by cosine, the item itself first; one without any pair is like no other: 0."""
        if recalculate_item:
            raise NotImplementedError("recalculate_item isn't supported with this model")
        return self._similar(itemid, "right", "itemid", N, filter_items, items)

    def similar_users(
        self,
        userid: Any,
        N: int = 10,
        filter_users: Sequence[int] | None = None,
        users: Sequence[int] | None = None,
    ) -> Answer:
        """The N users most alike by cosine, the user itself first."""
        return self._similar(userid, "left", "userid", N, filter_users, users)

    def save(self, file: str | Path) -> None:
        """Write the model to a file."""
        self.model.save(file)

    @classmethod
    def load(cls, file: str | Path) -> TwoTower:
        """A model that :meth:`save` wrote; alpha, which only ``fit`` uses, is 1 again."""
        model = load_estimator(file)
        made = cls(
            model.dim_, model.l2, iterations=model.max_iterations or 20, random_state=model.seed,
            history=model.left_.inputs.has_history,
        )  # fmt: skip
        made.model = model
        return made

    def _pairs(self, user_items: Any) -> Any:
        """Labels ±1 by the entries' signs, and their sizes as weights where they are not all one."""
        if not sp.issparse(user_items):
            check.fail("user_items", type(user_items).__name__, "a scipy.sparse matrix of users × items")
        matrix = Interactions.from_matrix(user_items).matrix
        matrix.eliminate_zeros()
        weights = np.abs(matrix.data) * np.float32(self.alpha)
        check.finite("alpha · user_items", weights)
        if self.history and (matrix.data < 0).any():
            given = f"{int((matrix.data < 0).sum())} negative entries"
            check.fail("user_items", given, "likes alone with history=True, where a user is what they liked")
        matrix.data = np.sign(matrix.data)
        return matrix if (weights == 1).all() else replace(Interactions.from_matrix(matrix), weights=weights)

    def _similar(self, which: Any, side: str, name: str, N: int, deny: Any, allow: Any) -> Answer:
        if allow is not None and deny is not None:
            raise ValueError("Can't specify both a list to choose from and a filter")
        factors = (self.model.left_ if side == "left" else self.model.right_).embeddings
        unit = normalised(factors)
        unit[torch.from_numpy(~self.model.has_direction(side))] = 0.0
        rows = self._known(self._numbers(name, which), len(factors), name)
        return self._ranked(unit[rows], unit, N, np.isscalar(which), None, allow, deny)

    @staticmethod
    def _ranked(
        P: torch.Tensor, factors: torch.Tensor, N: int, single: bool, exclude: Any, allow: Any, deny: Any
    ) -> Answer:
        chosen, left_out = (
            None if given is None else TwoTower._numbers("items", given) for given in (allow, deny)
        )  # fmt: skip
        for rows in (chosen, left_out):
            if rows is not None and len(rows) and (rows.max() >= len(factors) or rows.min() < 0):
                raise IndexError("Some itemids in the items parameter in are not in the model")
        limit = max(1, len(factors) if chosen is None else len(chosen))
        found, scores = top_k(P, factors, min(check.count("N", N), limit), exclude=exclude, allow=chosen, deny=left_out)
        return (found[0], scores[0]) if single else (found, scores)

    @staticmethod
    def _known(rows: NDArray[Any], count: int, name: str) -> NDArray[Any]:
        if len(rows) and (rows.max() >= count or rows.min() < 0):
            raise IndexError(f"{name} is out of bounds of the model: it knows 0 to {count - 1}")
        return rows

    @staticmethod
    def _numbers(name: str, value: Any) -> NDArray[np.int64]:
        """Row numbers, of one or of several."""
        rows = check.ids(name, value)
        return np.array([check.count(name, row, minimum=-_FAR, most=_FAR) for row in rows], dtype=np.int64)


def _warn_of_what_is_ignored(dtype: Any, use_native: bool, use_cg: bool, num_threads: int) -> None:
    given = {"use_native": (use_native, True), "use_cg": (use_cg, True), "num_threads": (num_threads, 0)}
    ignored = [f"{name}={value!r}" for name, (value, usual) in given.items() if value != usual]
    if dtype not in (np.float32, "float32", np.dtype(np.float32)):
        ignored.insert(0, f"dtype={dtype!r}")
    if ignored:
        warnings.warn(f"no meaning here, and ignored: {', '.join(ignored)}", UserWarning, stacklevel=3)


def _seed(random_state: Any) -> int:
    """A seed from what implicit takes: None, a number, or a generator of numpy, old or new."""
    if random_state is None:
        return 0
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return check.seed(random_state)

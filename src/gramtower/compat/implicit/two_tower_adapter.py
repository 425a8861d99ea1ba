"""`TwoTower`: this library's model, with its own objective and towers, behind implicit's interface.

    - from implicit.als import AlternatingLeastSquares
    + from gramtower.compat.implicit import TwoTower as AlternatingLeastSquares

Users and items are row and column numbers. Arguments have the names, order and meaning of implicit; those without
effect warn. als.py has implicit's own objective.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gramtower._util import checks as check
from gramtower.compat.implicit import base
from gramtower.compat.implicit.base import Callback, Factors, Recommender, RowsLike, Seed
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import SparseMatrix
from gramtower.model.settings import given
from gramtower.model.two_tower import TwoTower as Estimator
from gramtower.model.two_tower import load as load_estimator


class TwoTower(Recommender):
    """A two-tower model behind implicit's interface.

    Args:
        factors: dimension of the embeddings.
        regularization: λ; None for the estimator's default.
        alpha: multiplier of the entries; the weight of an observed pair is alpha times its entry, of others it is ω.
        dtype: has no effect; factors are float32.
        use_native: has no effect.
        use_cg: has no effect.
        use_gpu: True for a GPU, False for the CPU, None for a GPU if there is one.
        iterations: outer iterations.
        calculate_training_loss: whether the callback gets the objective.
        num_threads: has no effect, as ``torch.set_num_threads`` is for the whole process.
        random_state: seed, or numpy generator to draw one from.
        history: whether the input of the user tower is the user's items instead of the user's number, so that
            ``recalculate_user=True`` gives lists for users that were not in training.
        options: further arguments of :class:`gramtower.TwoTower`.
    """

    def __init__(
        self,
        factors: int = 100,
        regularization: float | None = None,
        alpha: float = 1.0,
        dtype: DTypeLike = np.float32,
        use_native: bool = True,
        use_cg: bool = True,
        use_gpu: bool | None = None,
        iterations: int = 15,
        calculate_training_loss: bool = False,
        num_threads: int = 0,
        random_state: Seed = None,
        *,
        history: bool = False,
        **options: Any,
    ) -> None:
        usual = dtype if dtype in (np.float32, "float32", np.dtype(np.float32)) else np.float32
        base.warn_of_ignored(
            dtype=(dtype, usual), use_native=(use_native, True), use_cg=(use_cg, True), num_threads=(num_threads, 0)
        )
        if regularization is not None:
            options["l2"] = regularization
        self.use_gpu = None if use_gpu is None else check.flag("use_gpu", use_gpu)
        if use_gpu is not None:
            options.setdefault("device", "cuda" if use_gpu else "cpu")
        self.factors, self.iterations, self.history = factors, iterations, history
        self.alpha = check.number("alpha", alpha, above=0.0)
        self.calculate_training_loss = check.flag("calculate_training_loss", calculate_training_loss)
        self.model = Estimator(dim=factors, max_iterations=iterations, seed=base.as_seed(random_state), **options)

    @property
    def user_factors(self) -> NDArray[np.float32]:
        """Embeddings of the users."""
        return self.model.embed(side="left")

    @property
    def item_factors(self) -> NDArray[np.float32]:
        """Embeddings of the items."""
        return self.model.embed(side="right")

    def fit(self, user_items: SparseMatrix, show_progress: bool = True, callback: Callback | None = None) -> None:
        """Fit to a sparse users × items matrix of confidences, whose non-zero entries are the observed pairs.

        The weight of a pair is alpha times the absolute value of its entry; a negative entry is a dislike, with label
        −1. After training, ``callback`` is called for each iteration with its number, its seconds and the objective
        (None unless ``calculate_training_loss``).
        """
        self.model.set_params(verbose=show_progress)
        self.model.fit(self._pairs(user_items), left_features="history" if self.history else None)
        if callback is not None:
            for before, after in itertools.pairwise(self.model.history_):
                value = after.value if self.calculate_training_loss else None
                callback(after.iteration - 1, after.seconds - before.seconds, value)

    def recalculate_user(self, userid: RowsLike, user_items: SparseMatrix) -> Factors:
        """Embeddings of users from their items, with ``history=True``.

        Raises:
            NotImplementedError: without ``history=True``, as then only the user's number is known.
        """
        if not self.history:
            raise NotImplementedError("recalculate_user needs a model with history=True")
        rows = self.model.embed(histories=user_items)
        return np.asarray(rows[0] if np.isscalar(userid) else rows)

    def recalculate_item(self, itemid: RowsLike, item_users: SparseMatrix) -> Factors:
        """Not supported, as items are known by their number only: always raises NotImplementedError."""
        raise NotImplementedError("recalculate_item isn't supported with this model")

    def save(self, file: str | Path | IO[bytes]) -> None:
        """Write the model to a path or an open file, which :func:`gramtower.load` can read."""
        if isinstance(file, (str, Path)):
            self.model.save(file)
            return
        with tempfile.TemporaryDirectory() as folder:
            self.model.save(Path(folder, "model"))
            file.write(Path(folder, "model").read_bytes())

    @classmethod
    def load(cls, file: str | Path | IO[bytes]) -> TwoTower:
        """Read a file of :meth:`save`; alpha, which only ``fit`` uses, is 1."""
        if isinstance(file, (str, Path)):
            model = load_estimator(file)
        else:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "model").write_bytes(file.read())
                model = load_estimator(Path(folder, "model"))
        made = cls(
            model.dim_, given(model.l2), iterations=given(model.max_iterations) or 20, random_state=model.seed,
            history=model.left_.inputs.has_history,
        )  # fmt: skip
        made.model = model
        return made

    def _factors(self, side: str) -> Factors:
        """The model's own array, which must not be changed; a copy for each list would be slow."""
        if not hasattr(self.model, "fitted_"):
            raise ValueError("model: not fitted yet; call fit first")
        return np.asarray(self.model.fitted_.side(side).embeddings.numpy())

    def _directions(self, side: str) -> Factors:
        directed = self.model.has_direction(side)
        return self._factors(side) if directed.all() else self._factors(side) * directed[:, None]

    def _moved(self, use_gpu: bool) -> TwoTower:
        made = super()._moved(use_gpu)
        made.model.set_params(device="cuda" if use_gpu else "cpu")
        return made

    def _pairs(self, user_items: SparseMatrix) -> Interactions | SparseMatrix:
        """Labels ±1 by the signs of entries, and weights by their absolute values unless all are 1."""
        matrix = Interactions.from_matrix(base.check_csr("user_items", user_items)).matrix
        matrix.eliminate_zeros()
        weights = np.abs(matrix.data) * np.float32(self.alpha)
        check.finite("alpha · user_items", weights)
        if self.history and (matrix.data < 0).any():
            given = f"{int((matrix.data < 0).sum())} negative entries"
            check.fail("user_items", given, "positive entries only with history=True")
        matrix.data = np.sign(matrix.data)
        return matrix if (weights == 1).all() else replace(Interactions.from_matrix(matrix), weights=weights)

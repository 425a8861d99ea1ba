"""`AlternatingLeastSquares`: implicit's model, objective and interface, minimised by this library.

    - from implicit.als import AlternatingLeastSquares
    + from gramtower.compat.implicit.als import AlternatingLeastSquares

The objective is exactly that of implicit,

    Σ_O c_ij (t_ij − x_i·y_j)² + Σ_∉O (x_i·y_j)² + λ (‖X‖² + ‖Y‖²)  =  2 L(θ),    c = |α r|,  t = 1 if r > 0 else 0,

as a :class:`gramtower.Problem` with the squared loss ½(t − ŷ)², pair weights c, ω = 1, imputed labels 0, no entity
weights, and linear towers whose parameters θ = (X, Y) are the factors. A stored entry of 0 has c = 0, so its pair has
no weight. Cost of a value: O(|O| k + (m + n) k²); a Gauss-Newton product takes about twice that.

It is minimised over both sides at once by preconditioned Gauss-Newton (`newton-kron`) instead of by alternating, and at
the end over the users only, so that stored and recalculated users agree. Factors differ from implicit's: they are other
coordinates, or another minimum, of the same objective.

Factors of single rows while the other side stays fixed have a closed form, in float64:

    A = YᵀY + λI + Σ_j (c_j − 1) y_j y_jᵀ,   b = Σ_(c_j liked) c_j y_j,   x = A⁻¹ b

is the minimiser over x of Σ_j c_j (t_j − x·y_j)² + λ‖x‖² over all items j, where c_j = 1 and t_j = 0 without an entry;
the shortest one if λ = 0 and the factors do not span all dimensions. Cost: n k² once, then entries · k² + k³ per row.
"""

from __future__ import annotations

import inspect
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from gramtower._util import checks as check
from gramtower._util.files import replacing
from gramtower._util.host import free_memory, readable
from gramtower.compat.implicit import base
from gramtower.compat.implicit.base import Callback, Factors, Recommender, RowsLike, Seed, check_csr
from gramtower.data.matrices import SparseMatrix
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.mlp import mlp_towers
from gramtower.engine.towers.towers import Towers
from gramtower.optim.solvers import NewtonKron
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record

Array = NDArray[np.float64]
_NEWTON = NewtonKron(memory=0)  # an iteration costs about one of alternating least squares
_EXACTLY = NewtonKron(memory=0, damping=0.0, cg_steps=40, cg_tolerance=1e-6, cg_progress=1e-9)
_WENT_WELL = (Reason.MAX_ITERATIONS, Reason.NO_DECREASE, Reason.TOLERANCE)


class AlternatingLeastSquares(Recommender):
    """Factors of users and items that minimise Σ_O c (t − x·y)² + Σ_∉O (x·y)² + λ (‖X‖² + ‖Y‖²).

    c is alpha times an entry's size, t is 1 for positive entries and 0 for negative ones.

    Args:
        factors: number of factors k.
        regularization: λ.
        alpha: multiplier of the entries.
        dtype: float32 or float64; float16 becomes float32 with a warning.
        use_native: has no effect; False warns.
        use_cg: has no effect; False warns.
        use_gpu: True for a GPU, False for the CPU, None for a GPU if there is one.
        iterations: Gauss-Newton iterations; fewer if the objective no longer decreases.
        calculate_training_loss: whether the callback gets the loss, at no cost.
        num_threads: has no effect, as ``torch.set_num_threads`` is for the whole process; other values than 0 warn.
        random_state: seed, or numpy generator to draw one from; None is a fixed seed.

    Attributes:
        user_factors: users × k, None before ``fit``.
        item_factors: items × k, None before ``fit``.
    """

    def __init__(
        self,
        factors: int = 100,
        regularization: float = 0.01,
        alpha: float = 1.0,
        dtype: DTypeLike = np.float32,
        use_native: bool = True,
        use_cg: bool = True,
        use_gpu: bool | None = None,
        iterations: int = 15,
        calculate_training_loss: bool = False,
        num_threads: int = 0,
        random_state: Seed = None,
    ) -> None:
        base.warn_of_ignored(use_native=(use_native, True), use_cg=(use_cg, True), num_threads=(num_threads, 0))
        self.factors = check.count("factors", factors)
        self.regularization = check.number("regularization", regularization, minimum=0.0)
        self.alpha = check.number("alpha", alpha, above=0.0)
        self.dtype = _as_dtype(dtype)
        self.use_native, self.use_cg = check.flag("use_native", use_native), check.flag("use_cg", use_cg)
        self.use_gpu = None if use_gpu is None else check.flag("use_gpu", use_gpu)
        self.iterations = check.count("iterations", iterations, minimum=0)
        self.calculate_training_loss = check.flag("calculate_training_loss", calculate_training_loss)
        self.num_threads = check.count("num_threads", num_threads, minimum=0)
        self.random_state = random_state
        self.user_factors: Factors | None = None
        self.item_factors: Factors | None = None

    def fit(self, user_items: SparseMatrix, show_progress: bool = True, callback: Callback | None = None) -> None:
        """Fit the factors, starting from those of an earlier fit if there are any.

        Args:
            user_items: sparse users × items matrix of confidences in CSR; other formats are converted with a warning.
                Entries of the same pair are added. A negative entry is a dislike; a stored 0 has no weight.
            show_progress: whether to write one line per iteration to standard error.
            callback: called after each iteration with its number, its seconds and the loss (None unless
                ``calculate_training_loss``).
        """
        device, seed = base.as_device(self.use_gpu), base.as_seed(self.random_state)
        confident = confidences("user_items", check_csr("user_items", user_items), self.alpha)
        problem = make_problem(confident, self.regularization)
        dtype = torch.float64 if self.dtype == np.float64 else torch.float32
        towers = factor_towers(problem, self.user_factors, self.item_factors, self.factors, seed, dtype).to(device)
        weight, before = total_weight(confident), 0.0

        def report(record: Record, _: Point) -> None:
            nonlocal before
            if callback is not None and record.iteration > 0:
                loss = 2.0 * record.value / weight if self.calculate_training_loss else None
                callback(record.iteration - 1, record.seconds - before, loss)
            before = record.seconds

        minimize_factors(problem, towers, self.iterations, report, check.flag("show_progress", show_progress))
        liked = confident.data > 0
        tables = [next(tower.parameters()).detach().cpu().numpy().copy() for tower in (towers.left, towers.right)]
        for table, entries in zip(tables, (confident.tocoo().row, confident.indices), strict=True):
            table[np.bincount(entries[liked], minlength=len(table)) == 0] = 0.0  # the minimiser for rows without likes
        self.user_factors, self.item_factors = tables

    def recalculate_user(self, userid: RowsLike, user_items: SparseMatrix) -> Factors:
        """Factors that are optimal for users, given the items' factors; the model does not change.

        Args:
            userid: one row number or several.
            user_items: one row for each user.
        """
        return self._recalculated("user", userid, user_items, self._factors("right"))

    def recalculate_item(self, itemid: RowsLike, item_users: SparseMatrix) -> Factors:
        """Factors that are optimal for items, given the users' factors; see :meth:`recalculate_user`."""
        return self._recalculated("item", itemid, item_users, self._factors("left"))

    def partial_fit_users(self, userids: Sequence[int], user_items: SparseMatrix) -> None:
        """Replace the factors of some users by those that are optimal for their items; new users are added.

        Args:
            userids: row numbers; users between the last known and a new one get zeros.
            user_items: one row for each user.
        """
        self.user_factors = self._replaced("user", userids, self.recalculate_user(userids, user_items), "left")

    def partial_fit_items(self, itemids: Sequence[int], item_users: SparseMatrix) -> None:
        """Replace the factors of some items by those that are optimal for their users; new items are added."""
        self.item_factors = self._replaced("item", itemids, self.recalculate_item(itemids, item_users), "right")

    def explain(
        self, userid: int, user_items: SparseMatrix, itemid: int, user_weights: Factors | None = None, N: int = 10
    ) -> tuple[float, list[tuple[int, float]], NDArray[np.float64]]:
        """Explain the score of an item, with recalculated factors, as a sum over the user's liked items.

        Args:
            userid: row of ``user_items``.
            user_items: users × items.
            itemid: item to explain.
            user_weights: third value of an earlier call for this user, to save time.
            N: number of liked items to return.

        Returns:
            The score, the N liked items with the largest contributions, and the user's weights.
        """
        Y = self._factors("right")
        matrix = check_csr("user_items", user_items, len(Y))
        (user,) = base.known_rows("userid", base.row_numbers("userid", [userid]), matrix.shape[0])
        (item,) = base.known_rows("itemid", base.row_numbers("itemid", [itemid]), len(Y))
        if user_weights is not None and np.shape(user_weights) != (self.factors, self.factors):
            given = f"shape {np.shape(user_weights)}"
            check.fail("user_weights", given, f"the weights that explain returned, {self.factors} × {self.factors}")
        confident = confidences("user_items", matrix[user], self.alpha)
        Y = Y.astype(np.float64)
        if user_weights is None:
            user_weights = scipy.linalg.pinvh(_equations(confident, 0, Y, Y.T @ Y, self.regularization)[0])
        liked, c = confident.indices[confident.data > 0], confident.data[confident.data > 0]
        added = (Y[liked] @ (user_weights @ Y[item])) * c  # y_itemᵀ A⁻¹ y_j c_j
        most = np.argsort(-added, kind="stable")[: check.count("N", N)]
        return float(added.sum()), [(int(liked[j]), float(added[j])) for j in most], user_weights

    def save(self, fileobj_or_path: str | Path | IO[bytes]) -> None:
        """Write an .npz file that :meth:`load` and implicit can read; a generator as random_state is not saved."""
        kept = {name: value for name, value in vars(self).items() if value is not None and not name.startswith("_")}
        if not isinstance(self.random_state, (int, np.integer)):
            kept.pop("random_state", None)
        kept["dtype"] = self.dtype.name
        if hasattr(fileobj_or_path, "write"):
            np.savez(fileobj_or_path, **kept)
            return
        with replacing(_with_suffix(fileobj_or_path)) as partial, partial.open("wb") as opened:
            np.savez(opened, **kept)

    @classmethod
    def load(cls, fileobj_or_path: str | Path | IO[bytes]) -> Self:
        """Read a file of :meth:`save` or of implicit's ALS on the CPU; nothing is unpickled."""
        settings = inspect.signature(cls).parameters
        found = _read_npz(fileobj_or_path, [*settings, "user_factors", "item_factors", "cg_steps"])
        found.pop("cg_steps", None)  # a setting of implicit only
        tables = [found.pop(name, None) for name in ("user_factors", "item_factors")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the settings warned when the model was created
            made = cls(**found)
        for name, table in zip(("user_factors", "item_factors"), tables, strict=True):
            if table is not None:
                if table.ndim != 2 or table.shape[1] != made.factors or table.dtype.kind != "f":
                    given = f"{name} of shape {table.shape} in {table.dtype}"
                    check.fail("file", given, f"floating-point rows of {made.factors} factors")
                check.finite(name, table)
                table = table.astype(made.dtype)
            setattr(made, name, table)
        return made

    def _factors(self, side: str) -> Factors:
        found = self.user_factors if side == "left" else self.item_factors
        if found is None:
            raise ValueError("model: not fitted yet; call fit first")
        return found

    def _recalculated(self, kind: str, which: RowsLike, matrix: SparseMatrix, others: Factors) -> Factors:
        name = "user_items" if kind == "user" else "item_users"
        given = check_csr(name, matrix, len(others))
        count = len(base.row_numbers(f"{kind}id", which))
        if given.shape[0] != count:
            raise ValueError(f"{name} must contain 1 row for every {kind} in {kind}ids")
        rows = solve_rows(confidences(name, given, self.alpha), others, self.regularization).astype(self.dtype)
        return np.asarray(rows[0] if np.isscalar(which) else rows)

    def _replaced(self, kind: str, which: RowsLike, rows: Factors, side: str) -> Factors:
        """The factors of a side with some rows replaced, extended if necessary."""
        numbers, factors = base.row_numbers(f"{kind}ids", which), self._factors(side)
        if len(numbers) and numbers.min() < 0:
            raise IndexError(f"{kind}ids: got {numbers.min()}, expected numbers >= 0")
        rows_then, free = max(len(factors), int(numbers.max(initial=-1)) + 1), free_memory(torch.device("cpu"))
        if rows_then * self.factors * self.dtype.itemsize > free:
            check.fail(f"{kind}ids", f"{rows_then - 1}", f"numbers whose factors fit into {readable(free)}")
        grown = np.zeros((rows_then, self.factors), dtype=self.dtype)
        grown[: len(factors)] = factors
        grown[numbers] = rows
        return grown


def _as_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        check.fail("dtype", repr(dtype), "float32 or float64")
    if found == np.float16:
        base.warn_of_conversion("dtype=float16: factors are float32 here")
        return np.dtype(np.float32)
    if found not in (np.float32, np.float64):
        check.fail("dtype", repr(dtype), "float32 or float64")
    return np.dtype(found)


def confidences(name: str, matrix: sp.csr_matrix, alpha: float = 1.0) -> sp.csr_matrix:
    """The entries times α, in float64."""
    scaled = alpha * matrix.data.astype(np.float64)
    check.finite(f"alpha · {name}", scaled)
    return sp.csr_matrix((scaled, matrix.indices, matrix.indptr), shape=matrix.shape)


def make_problem(confident: sp.csr_matrix, regularization: float) -> Problem:
    """The problem with half of implicit's objective."""
    if 0 in confident.shape:
        check.fail("user_items", f"shape {confident.shape}", "at least one user and one item")
    labels = (confident.data > 0).astype(np.float64)
    pairs = sp.csr_matrix((labels, confident.indices, confident.indptr), shape=confident.shape)
    weights = np.abs(confident.data)
    return Problem(pairs, loss="squared", omega=1.0, l2=regularization, imputed=0.0, pair_weights=weights)


def total_weight(confident: sp.csr_matrix) -> float:
    """The sum of the weights of all m·n pairs, by which implicit divides its loss."""
    m, n = confident.shape
    return float(np.abs(confident.data).sum() + m * n - confident.nnz)


def factor_towers(
    problem: Problem, X: Factors | None, Y: Factors | None, factors: int, seed: int, dtype: torch.dtype
) -> Towers:
    """Linear towers whose parameters are the factors; factors that are None are random."""
    towers = mlp_towers(problem, hidden=(), dim=factors, seed=seed, dtype=dtype)
    with torch.no_grad():
        for tower, given in ((towers.left, X), (towers.right, Y)):
            (table,) = tower.parameters()
            if given is not None:
                if given.shape != tuple(table.shape):
                    expected = f"shape {tuple(table.shape)}, from the matrix and factors"
                    check.fail("factors", f"shape {given.shape}", f"{expected}; use a new model for other data")
                table.copy_(torch.from_numpy(np.ascontiguousarray(given)))
    return towers


def minimize_factors(
    problem: Problem, towers: Towers, iterations: int, report: Callable[[Record, Point], None], verbose: bool
) -> None:
    """Minimise over both sides together, then over the users with the items fixed.

    The second problem is quadratic and its rows are independent: one Newton step without damping solves it.
    """
    result = minimize(problem, towers, _NEWTON, iterations, callbacks=[report], tolerance=0.0, verbose=verbose)
    if iterations and result.reason in _WENT_WELL:
        towers.right.requires_grad_(False)
        try:
            result = minimize(problem, Towers(towers.left, towers.right), _EXACTLY, max_iterations=1, tolerance=0.0)
        finally:
            towers.right.requires_grad_(True)
    if result.reason is Reason.NON_FINITE:
        given = f"NaN or infinite numbers: {', '.join(result.non_finite)}"
        check.fail("fit", given, "confidences whose objective is finite: a smaller alpha")


def calculate_loss(Cui: SparseMatrix, X: ArrayLike, Y: ArrayLike, regularization: float, num_threads: int = 0) -> float:
    """implicit's training loss: the objective divided by the sum of the weights of all pairs.

    implicit's own function adds the weights of dislikes to the objective, a constant that is left out here.

    Args:
        Cui: confidences, users × items.
        X: factors of the users.
        Y: factors of the items.
        regularization: λ.
        num_threads: has no effect.
    """
    confident = confidences("Cui", check_csr("Cui", Cui))
    tables = [check.as_float_array(name, value) for name, value in (("X", X), ("Y", Y))]
    for name, table in zip(("X", "Y"), tables, strict=True):
        if table.ndim != 2 or 0 in table.shape:
            check.fail(name, f"shape {table.shape}", "a matrix with one row of factors for each entity")
        check.finite(name, table)
    dtype = torch.float64 if any(table.dtype == np.float64 for table in tables) else torch.float32
    problem = make_problem(confident, check.number("regularization", regularization, minimum=0.0))
    towers = factor_towers(problem, tables[0], tables[1], tables[0].shape[1], 0, dtype)
    return 2.0 * problem.at(towers).value / total_weight(confident)


def solve_rows(confident: sp.csr_matrix, factors: Factors, regularization: float) -> Array:
    """The optimal factors of each row of confidences, given those of its columns."""
    Y = factors.astype(np.float64)
    gramian = Y.T @ Y
    found = np.zeros((confident.shape[0], Y.shape[1]))
    for row in range(confident.shape[0]):
        A, b = _equations(confident, row, Y, gramian, regularization)
        if not b.any():
            continue  # without likes the minimiser is 0
        if regularization > 0:
            found[row] = scipy.linalg.solve(A, b, assume_a="pos")
        else:
            found[row] = np.linalg.lstsq(A, b, rcond=None)[0]
    return found


def _equations(
    confident: sp.csr_matrix, row: int, Y: Array, gramian: Array, regularization: float
) -> tuple[Array, Array]:
    """A and b of one row of confidences."""
    part = slice(confident.indptr[row], confident.indptr[row + 1])
    own, c = Y[confident.indices[part]], confident.data[part]
    A = gramian + (own.T * (np.abs(c) - 1.0)) @ own
    A[np.diag_indices_from(A)] += regularization
    return A, own.T @ np.maximum(c, 0.0)


def _read_npz(file: str | Path | IO[bytes], names: Collection[str]) -> dict[str, Any]:
    """Read a file that has some of these names; scalars become Python values."""
    source = file if hasattr(file, "read") else _with_suffix(file)
    try:
        content = np.load(source, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            check.fail("file", "an .npy array", "an .npz file of a model")
        with content:
            arrays = {name: content[name] for name in content.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        check.fail("file", str(error) or "an empty file", "an .npz file of a model")
    if unknown := sorted(arrays.keys() - set(names)):
        check.fail("file", "settings such as " + ", ".join(unknown[:3]), "those of this model: " + ", ".join(names))
    return {name: value.item() if value.shape == () else value for name, value in arrays.items()}


def _with_suffix(file: object) -> Path:
    path = check.path("file", file)
    return path if path.name.endswith(".npz") else path.with_name(path.name + ".npz")

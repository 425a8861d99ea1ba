"""`LightFM`: the model and interface of LightFM, learned by this library from all pairs.

    - from lightfm import LightFM
    + from gramtower.compat.lightfm import LightFM

With rows f of features and tables E of embeddings and b of biases, which have one row for each feature, a score is

    ŷ_ij = (f_i E_u)·(f_j E_v) + f_i b_u + f_j b_v = p_i·q_j,  p_i = (f_i E_u, f_i b_u, 1),  q_j = (f_j E_v, 1, f_j b_v)

so that a :class:`gramtower.Problem` over towers with the outputs p and q has biases too. It is minimised over all four
tables at once by `newton-kron`. The objective is one of two:

    all pairs       Σ_O w ln(1 + exp(−ŷ)) + ½ω Σ_∉O b_j (ỹ − ŷ)² + penalties          bpr, warp and warp-kos
    observed pairs  Σ_O w ln(1 + exp(−R ŷ)) + penalties, R = ±1                       logistic, if there are dislikes

The penalties are ½ Σ λ ‖table‖², λ = λ₀ + α |O| with α of the table's side, and ½μ Σ c ‖p‖² (problem.py); the larger α
is, the smaller are λ₀ and μ. Cost of a value: O(|O| k + (m + n) k² + entries of features · k); a Gauss-Newton product
takes about twice that.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import nn

from gramtower._util import checks as check
from gramtower.compat.implicit.base import RowsLike, warn_of_ignored
from gramtower.compat.lightfm.cross_validation import as_random_state
from gramtower.data.matrices import SparseMatrix, canonical, checked
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.layers import InputLinear
from gramtower.engine.towers.towers import Towers
from gramtower.model import defaults
from gramtower.model.two_tower import TwoTower
from gramtower.optim.solvers import NewtonKron
from gramtower.training.loop import minimize
from gramtower.training.result import Reason

Table = NDArray[np.float32]
LOSSES, SCHEDULES = ("logistic", "bpr", "warp", "warp-kos"), ("adagrad", "adadelta")
_MOST_PENALTY, _PAIRS_PENALTY = 0.02, 1.0  # μ with all pairs: at most, and times |O| / √(mn)
_OBSERVED_L2, _OBSERVED_PENALTY = 3.0, 0.02  # λ₀ and μ with observed pairs only
_LEAST_SHARE = 0.01  # of λ₀ and μ that stays next to a large α
_FIRST = 0.1  # standard deviation of the initial representations
_BLOCK = 1 << 22  # numbers of a block of scores or of gathered rows


class LightFM:
    """Embeddings and biases of the features of users and items, whose sums are the users' and items' own.

    Args:
        no_components: number of columns of the embeddings.
        k: has no effect; other values warn, as for all arguments without effect.
        n: has no effect.
        learning_schedule: has no effect, as there are no learning rates.
        loss: "logistic" learns from dislikes (entries that are not positive) with the logistic loss of observed pairs;
            without any, and for "bpr", "warp" and "warp-kos", all pairs without an entry have the label −½ and a low
            weight, and entries that are not positive are left out.
        learning_rate: has no effect.
        rho: has no effect.
        epsilon: has no effect.
        item_alpha: L2 penalty of the items' tables for each entry, in addition to the usual penalty.
        user_alpha: L2 penalty of the users' tables, likewise.
        max_sampled: has no effect, as no pairs are sampled.
        random_state: seed or RandomState of the initial embeddings.

    Attributes:
        user_embeddings: user features × components, None before ``fit``.
        user_biases: one for each user feature.
        item_embeddings: item features × components.
        item_biases: one for each item feature.
    """

    def __init__(
        self,
        no_components: int = 10,
        k: int = 5,
        n: int = 10,
        learning_schedule: str = "adagrad",
        loss: str = "logistic",
        learning_rate: float = 0.05,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        item_alpha: float = 0.0,
        user_alpha: float = 0.0,
        max_sampled: int = 10,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        warn_of_ignored(
            k=(k, 5), n=(n, 10), learning_schedule=(learning_schedule, "adagrad"), rho=(rho, 0.95),
            learning_rate=(learning_rate, 0.05), epsilon=(epsilon, 1e-6), max_sampled=(max_sampled, 10),
        )  # fmt: skip
        self.no_components, self.k, self.n, self.max_sampled = no_components, k, n, max_sampled
        self.learning_schedule, self.loss, self.learning_rate = learning_schedule, loss, learning_rate
        self.rho, self.epsilon, self.item_alpha, self.user_alpha = rho, epsilon, item_alpha, user_alpha
        self.random_state = as_random_state(random_state)
        self._check_settings()
        self.user_embeddings: Table | None = None
        self.user_biases: Table | None = None
        self.item_embeddings: Table | None = None
        self.item_biases: Table | None = None

    def fit(
        self,
        interactions: SparseMatrix,
        user_features: SparseMatrix | None = None,
        item_features: SparseMatrix | None = None,
        sample_weight: SparseMatrix | None = None,
        epochs: int = 1,
        num_threads: int = 1,
        verbose: bool = False,
    ) -> Self:
        """Learn from interactions, starting from random embeddings.

        Args:
            interactions: sparse users × items. Positive entries are likes; their sizes have no effect. Others are
                dislikes for the logistic loss. Entries of the same pair are added.
            user_features: sparse, one row for each user; None for one feature of its own for each user.
            item_features: the same for the items.
            sample_weight: COO matrix with the weights of the interactions, whose entries are in the same order. Their
                mean has no effect.
            epochs: Gauss-Newton iterations; fewer if the objective no longer decreases.
            num_threads: has no effect, as ``torch.set_num_threads`` is for the whole process; others than 1 warn.
            verbose: whether to write one line per iteration to standard error.
        """
        warn_of_ignored(num_threads=(num_threads, 1))
        return self._train(None, interactions, (user_features, item_features), sample_weight, epochs, verbose)

    def fit_partial(
        self,
        interactions: SparseMatrix,
        user_features: SparseMatrix | None = None,
        item_features: SparseMatrix | None = None,
        sample_weight: SparseMatrix | None = None,
        epochs: int = 1,
        num_threads: int = 1,
        verbose: bool = False,
    ) -> Self:
        """Learn from interactions, starting from the present embeddings if there are any; see :meth:`fit`."""
        warn_of_ignored(num_threads=(num_threads, 1))
        known = None if self.user_embeddings is None else self._tables()
        return self._train(known, interactions, (user_features, item_features), sample_weight, epochs, verbose)

    def predict(
        self,
        user_ids: RowsLike,
        item_ids: RowsLike,
        item_features: SparseMatrix | None = None,
        user_features: SparseMatrix | None = None,
        num_threads: int = 1,
    ) -> Table:
        """Scores of pairs of a user and an item, in float32.

        Args:
            user_ids: row numbers of users, one for each pair, or one for all pairs.
            item_ids: row numbers of items, one for each pair.
            item_features: sparse rows of the items; None if each has one feature of its own.
            user_features: the same for the users.
            num_threads: has no effect.
        """
        user, item = self._tables()
        items = _numbers("item_ids", item_ids)
        users = _numbers("user_ids", user_ids)
        users = np.repeat(users, len(items)) if np.isscalar(user_ids) else users
        if len(users) != len(items):
            check.fail("user_ids", f"{len(users)} numbers", f"{len(items)}, as item_ids has, or one number")
        (left, users), (right, items) = (np.unique(numbers, return_inverse=True) for numbers in (users, items))
        X = _represent("user_features", user_features, user, left)
        Y = _represent("item_features", item_features, item, right)
        found, size = np.empty(len(users), np.float32), max(1, _BLOCK // X.shape[1])
        for start in range(0, len(users), size):
            part = slice(start, start + size)
            P, Q = X[users[part]], Y[items[part]]
            found[part] = np.einsum("rk,rk->r", P[:, :-1], Q[:, :-1]) + P[:, -1] + Q[:, -1]
        return found

    def predict_rank(
        self,
        test_interactions: SparseMatrix,
        train_interactions: SparseMatrix | None = None,
        item_features: SparseMatrix | None = None,
        user_features: SparseMatrix | None = None,
        num_threads: int = 1,
        check_intersections: bool = True,
    ) -> sp.csr_matrix:
        """The rank of each test item among all items that the user does not have in training, 0 for the first.

        Items with the same score all count as ranked before each other.

        Args:
            test_interactions: sparse users × items, whose entries are ranked.
            train_interactions: pairs that are left out of the ranking.
            item_features: sparse rows of all items; None if each has one feature of its own.
            user_features: the same for the users.
            num_threads: has no effect.
            check_intersections: whether to refuse pairs that are in both matrices.

        Returns:
            The ranks, a matrix with the entries of ``test_interactions``.
        """
        user, item = self._tables()
        check.count("num_threads", num_threads)
        test = canonical("test_interactions", test_interactions)
        train = sp.csr_matrix(test.shape) if train_interactions is None else train_interactions
        train = canonical("train_interactions", train, test.shape)
        if check.flag("check_intersections", check_intersections) and (shared := test.multiply(train).nnz):
            given = f"{shared} pairs that are in train_interactions too"
            check.fail("test_interactions", given, "other pairs, or check_intersections=False")
        X = _represent("user_features", user_features, user, np.arange(test.shape[0]), whole=True)
        Y = _represent("item_features", item_features, item, np.arange(test.shape[1]), whole=True)
        ranks, size = np.empty(test.nnz, np.float32), max(1, _BLOCK // max(1, len(Y)))
        for start in range(0, len(X), size):
            scores = (X[start : start + size, :-1] @ Y[:, :-1].T + Y[:, -1]).astype(np.float32)
            for row, values in enumerate(scores, start):
                part = slice(test.indptr[row], test.indptr[row + 1])
                own, left_out = test.indices[part], train.indices[train.indptr[row] : train.indptr[row + 1]]
                asked = values[own]
                values[left_out] = -np.inf
                itself = np.isfinite(values[own])
                ranks[part] = len(values) - np.searchsorted(np.sort(values), asked) - itself
        return sp.csr_matrix((ranks, test.indices, test.indptr), shape=test.shape)

    def get_user_representations(self, features: SparseMatrix | None = None) -> tuple[Table, Table]:
        """Biases and embeddings of users with these features; None for those of the features themselves."""
        return self._representations("user_features", features, self._tables()[0])

    def get_item_representations(self, features: SparseMatrix | None = None) -> tuple[Table, Table]:
        """Biases and embeddings of items with these features; None for those of the features themselves."""
        return self._representations("item_features", features, self._tables()[1])

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor; ``deep`` has no effect."""
        return {name: getattr(self, name) for name in signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; embeddings stay until the next ``fit``."""
        known = self.get_params()
        if unknown := sorted(params.keys() - known.keys()):
            check.fail("params", ", ".join(unknown), "names such as " + ", ".join(known))
        try:
            vars(self).update(params)
            self.random_state = as_random_state(self.random_state)
            self._check_settings()
        except ValueError:
            vars(self).update(known)
            raise
        return self

    __sklearn_tags__ = TwoTower.__sklearn_tags__  # for searches of scikit-learn

    def _check_settings(self) -> None:
        check.choice("loss", self.loss, LOSSES)
        check.choice("learning_schedule", self.learning_schedule, SCHEDULES)
        for name in ("no_components", "k", "n", "max_sampled"):
            check.count(name, getattr(self, name))
        for name in ("item_alpha", "user_alpha", "epsilon"):
            check.number(name, getattr(self, name), minimum=0.0)
        check.number("learning_rate", self.learning_rate)
        if not 0.0 < check.number("rho", self.rho) < 1.0:
            check.fail("rho", self.rho, "a number above 0 and below 1")

    def _tables(self) -> tuple[Table, Table]:
        """The embeddings of each side, with the biases as last column."""
        parts = self.user_embeddings, self.user_biases, self.item_embeddings, self.item_biases
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            raise ValueError("model: not fitted yet; call fit first")
        user, item = (np.column_stack(found[side : side + 2]).astype(np.float32) for side in (0, 2))
        return user, item

    def _representations(self, name: str, features: SparseMatrix | None, table: Table) -> tuple[Table, Table]:
        if features is None:
            return table[:, -1], table[:, :-1]
        rows = np.arange(checked(name, features).shape[0])
        found = _represent(name, features, table, rows).astype(np.float32)
        return found[:, -1], found[:, :-1]

    def _train(
        self,
        known: tuple[Table, Table] | None,
        interactions: SparseMatrix,
        given: tuple[SparseMatrix | None, SparseMatrix | None],
        sample_weight: SparseMatrix | None,
        epochs: int,
        verbose: bool,
    ) -> Self:
        self._check_settings()
        epochs, verbose = check.count("epochs", epochs, minimum=0), check.flag("verbose", verbose)
        matrix, observed_only = self._signed(interactions, sample_weight)
        features, tables = [], []
        for side, (name, rows) in enumerate(zip(("user_features", "item_features"), matrix.shape, strict=True)):
            found = _features(name, given[side], rows)
            width = rows if found is None else found.shape[1]
            if known is not None and width != len(known[side]):
                check.fail(name, f"{width} features", f"{len(known[side])}, as before; fit starts from new ones")
            features.append(found)
            tables.append(self._draw(width, found) if known is None else known[side])
        if epochs and matrix.data.any():
            tables = self._minimised(matrix, observed_only, features, tables, epochs, verbose)
        (self.user_embeddings, self.user_biases), (self.item_embeddings, self.item_biases) = (
            (table[:, :-1].copy(), table[:, -1].copy()) for table in tables
        )
        return self

    def _signed(self, interactions: SparseMatrix, sample_weight: SparseMatrix | None) -> tuple[sp.csr_matrix, bool]:
        """The weights of the pairs, negative for dislikes, and whether only observed pairs count."""
        entries = checked("interactions", interactions).tocoo()
        weights = np.ones(len(entries.data))
        if sample_weight is not None:
            if self.loss == "warp-kos":
                raise NotImplementedError("sample_weight isn't supported with loss='warp-kos'; use 'warp'")
            if not sp.issparse(sample_weight) or sample_weight.format != "coo":
                check.fail("sample_weight", type(sample_weight).__name__, "a COO matrix")
            given = checked("sample_weight", sample_weight, entries.shape)
            if not (np.array_equal(given.row, entries.row) and np.array_equal(given.col, entries.col)):
                check.fail("sample_weight", "other entries", "those of interactions, in the same order")
            weights = given.data.astype(np.float64)
            if (weights < 0).any():
                check.fail("sample_weight", weights.min(), "weights >= 0")
            weights /= weights[weights > 0].mean() if weights.any() else 1.0
        liked = entries.data > 0
        observed_only = self.loss == "logistic" and bool((weights[~liked] > 0).any())
        signed = np.where(liked, weights, -weights if observed_only else 0.0)
        matrix = sp.coo_matrix((signed, (entries.row, entries.col)), entries.shape)
        return canonical("interactions", matrix), observed_only

    def _draw(self, width: int, features: sp.csr_matrix | None) -> Table:
        """Random embeddings and biases of 0, for representations with a fixed deviation."""
        square = 1.0 if features is None else float(features.multiply(features).sum()) / max(1, features.shape[0])
        table = np.zeros((width, self.no_components + 1), np.float32)
        table[:, :-1] = self.random_state.normal(size=(width, self.no_components)) * (_FIRST / math.sqrt(square or 1.0))
        return table

    def _minimised(
        self,
        matrix: sp.csr_matrix,
        observed_only: bool,
        features: list[sp.csr_matrix | None],
        tables: list[Table],
        epochs: int,
        verbose: bool,
    ) -> list[Table]:
        """The tables after training."""
        m, n = matrix.shape
        weights, entries = np.abs(matrix.data), int((matrix.data != 0).sum())
        labels = sp.csr_matrix((np.where(matrix.data < 0, -1.0, 1.0), matrix.indices, matrix.indptr), shape=(m, n))
        (left, right), popular = features, None
        l2, mu, omega = _OBSERVED_L2, _OBSERVED_PENALTY, 0.0
        if not observed_only:
            l2, omega = defaults.default_l2((m, n), entries, defaults.IDS), defaults.default_omega((m, n), entries)
            mu = min(_MOST_PENALTY, _PAIRS_PENALTY * math.sqrt(m * n) / entries)
            popular = defaults.default_right_weights((m, n), entries, defaults.IDS, (False, False))
        typical = (1.0 if observed_only else 3.0) * entries / math.sqrt(m * n)  # c of a typical entity
        own = 0.5 * (self.user_alpha + self.item_alpha) * entries / (l2 + mu * typical)
        l2, mu = (max(_LEAST_SHARE, 1.0 - own) * usual for usual in (l2, mu))
        user_l2, item_l2 = l2 + self.user_alpha * entries, l2 + self.item_alpha * entries
        problem = Problem(
            labels, left, right, omega=omega, l2=item_l2, imputed=defaults.IMPUTED, right_weights=popular,
            embedding_l2=mu, pair_weights=weights,
        )  # fmt: skip
        scales = math.sqrt(item_l2 / user_l2), 1.0  # a table that is a multiple of the parameter has another penalty
        modules = [_tower(*side) for side in zip(tables, scales, (0, 1), strict=True)]
        towers = Towers(*modules).to(defaults.pick_device("auto"))
        result = minimize(problem, towers, NewtonKron(), epochs, tolerance=1e-4, verbose=verbose)
        if result.reason is Reason.NON_FINITE:
            given = f"NaN or infinite numbers: {', '.join(result.non_finite)}"
            check.fail("fit", given, "features and weights of a size for which the objective is finite")
        trained = (next(tower.parameters()).detach().cpu().numpy() for tower in modules)
        return [np.float32(scale) * table for scale, table in zip(scales, trained, strict=True)]


def _tower(table: Table, scale: float, side: int) -> nn.Sequential:
    """f ↦ (f E, f b, 1) for users and (f E, 1, f b) for items, where ``scale`` times the parameter is (E, b)."""
    k = table.shape[1] - 1
    first = InputLinear(len(table), k + 1, bias=False, draw=False)
    last = nn.Linear(k + 1, k + 2, device="meta").to_empty(device="cpu")  # draws no random numbers
    with torch.no_grad():
        first.weight.copy_(torch.from_numpy(table / scale))
        last.weight.copy_(scale * torch.eye(k + 2, k + 1))
        last.bias.copy_(torch.eye(k + 2)[k + 1 - side])
        if side == 1:
            last.weight[[k, k + 1]] = last.weight[[k + 1, k]]
    return nn.Sequential(first, last.requires_grad_(False))


def _features(name: str, given: SparseMatrix | None, rows: int) -> sp.csr_matrix | None:
    """Rows of features as float32 CSR; there may be more rows than entities."""
    if given is None:
        return None
    matrix = canonical(name, given).astype(np.float32)
    if matrix.shape[0] < rows:
        check.fail(name, f"{matrix.shape[0]} rows", f"at least {rows}, as interactions has")
    return matrix[:rows]


def _represent(
    name: str, given: SparseMatrix | None, table: Table, rows: NDArray[np.int64], whole: bool = False
) -> NDArray[np.float64]:
    """Embeddings and biases of some rows, in float64; with ``whole``, features must be as many as in training."""
    count = int(rows.max(initial=-1)) + 1
    matrix = _features(name, given, count)
    width = count if matrix is None else matrix.shape[1]
    if width > len(table) or (whole and width != len(table)):
        check.fail(name, f"{width} features", f"{'' if whole else 'at most '}{len(table)}, as in training")
    wide = table[:width].astype(np.float64)
    return np.asarray(wide[rows] if matrix is None else matrix[rows] @ wide)


def _numbers(name: str, given: RowsLike) -> NDArray[np.int64]:
    """Row numbers as an array."""
    array = np.atleast_1d(check.as_array(name, given, "row numbers"))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        check.fail(name, f"{array.dtype} of shape {array.shape}", "row numbers")
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        check.fail(name, f"{array.min()} to {array.max()}", "row numbers >= 0")
    return array.astype(np.int64)

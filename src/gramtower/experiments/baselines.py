"""Baseline models, each a few lines on top of numpy, scipy, torch or ``implicit``.

All learn from the pattern of the positive pairs, X (users × items, ones), without weights or features.

    Popularity  score of item j: its number of pairs
    ItemKNN     X S, S the cosines of each item's K nearest ones, itself among them (implicit's CosineRecommender)
    EASE        X B, B = argmin ‖X − XB‖² + λ‖B‖² with zeros on its diagonal (Steck 2019), in closed form:
                P = (XᵀX + λI)⁻¹, B_ij = −P_ij / P_jj. O(n³) time, 3 n² float64: refused beyond ``most_items``
    ALS         p_iᵀq_j by implicit's AlternatingLeastSquares, with its defaults for options that are not given
    OfImplicit  a model of implicit that the caller has made, whose factors or similarities are ranked
    OfEstimator an estimator of the caller, such as gramtower.TwoTower; it learns from Interactions, with features

``fit(pairs, seed)`` learns from a matrix, users × items, or Interactions. ``lists(rows, k, seen)`` returns the k best
items of some users, best first, −1 where there is none, without their rows of ``seen``; ties go to the smaller column,
as in retrieval/topk.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.checks import install_line, need
from gramtower._util.host import memory_size
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import canonical
from gramtower.experiments.cross_validation import Estimator, fit_copy
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem
from gramtower.model.settings import ModelSettings
from gramtower.optim.solvers import as_solver
from gramtower.retrieval.topk import best, top_k

Lists = NDArray[np.int64]
Pairs: TypeAlias = sp.csr_matrix | Interactions
SEEDS = ("seed", "random_state")  # names of a model's argument
_BLOCK = 8192  # users that an estimator is asked about at once
_BLOCK_BYTES = 64_000_000  # of scores made at once
_USE = "this baseline"  # in errors about missing packages
_COPIES = 3  # n × n float64 matrices that EASE holds at once


class ImplicitModel(Protocol):
    """A model of implicit: with factors of users and items, or with similarities of items."""

    @property
    def fit(self) -> Callable[..., object]: ...


@dataclass
class Popularity:
    """Recommends the items with most pairs to every user."""

    scores_: NDArray[np.float32] = field(init=False, repr=False, compare=False)

    def fit(self, pairs: Pairs, seed: int = 0) -> Popularity:
        matrix = _ones(pairs)
        self.scores_ = np.bincount(matrix.indices, minlength=matrix.shape[1]).astype(np.float32)
        return self

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        alike = np.ones((len(rows), 1), dtype=np.float32)
        return top_k(alike, self.scores_[:, None], k, exclude=seen[rows])[0]


@dataclass
class EASE:
    """A linear model from a user's items to all items.

    Attributes:
        l2: penalty λ.
        most_items: the largest number of items that is accepted.
    """

    l2: float = 500.0
    most_items: int = 20_000
    pairs_: sp.csr_matrix = field(init=False, repr=False, compare=False)
    weights_: NDArray[np.float32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check.number("l2", self.l2, above=0.0)
        check.count("most_items", self.most_items)

    def too_large(self, items: int) -> str | None:
        """Return why so many items are refused, None if they are not."""
        needed, there = _COPIES * 8 * items**2, memory_size()
        if items > self.most_items:
            return f"{items:,} items are more than {self.most_items:,}, and its time grows with their cube"
        if needed > there // 2:
            return f"{items:,} items need {needed / 1e9:.1f} GB, more than half of the {there / 1e9:.1f} GB there are"
        return None

    def fit(self, pairs: Pairs, seed: int = 0) -> EASE:
        if reason := self.too_large(pairs.shape[1]):
            check.fail("pairs", reason, "fewer items")
        self.pairs_ = _ones(pairs)
        counts = self.pairs_.astype(np.float64)
        gram = torch.from_numpy((counts.T @ counts).toarray())
        gram.diagonal().add_(self.l2)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
        inverse /= -inverse.diagonal().clone()
        inverse.fill_diagonal_(0.0)
        self.weights_ = inverse.to(torch.float32).numpy()
        return self

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        return lists_by_products(self.pairs_, self.weights_, rows, k, seen)


class OfImplicit:
    """A model of implicit, which is fitted itself."""

    values: ClassVar[type[np.floating]] = np.float32

    def __init__(self, model: ImplicitModel) -> None:
        self.model = model

    def make(self, seed: int) -> ImplicitModel:
        """Return the model to fit."""
        if hasattr(self.model, "random_state"):
            self.model.random_state = seed
        return self.model

    def fit(self, pairs: Pairs, seed: int = 0) -> Self:
        self.pairs_ = _ones(pairs)
        self.model_: Any = self.make(seed)
        with as_implicit_asks() if type(self.model_).__module__.startswith("implicit.") else nullcontext():
            self.model_.fit(self.pairs_.astype(self.values), show_progress=False)
        return self

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        if (similarity := getattr(self.model_, "similarity", None)) is not None:
            return lists_by_products(self.pairs_, similarity, rows, k, seen)
        factors = [getattr(self.model_, name) for name in ("user_factors", "item_factors")]
        on_host = (one.to_numpy() if hasattr(one, "to_numpy") else one for one in factors)  # also from a GPU
        users, items = (np.asarray(one, dtype=np.float32) for one in on_host)
        return top_k(users[rows], items, k, exclude=seen[rows])[0]


@dataclass
class ItemKNN(OfImplicit):
    """Recommends items that are similar to those of a user; needs the package implicit.

    Attributes:
        neighbours: number of neighbours of each item, K.
    """

    neighbours: int = 20
    values: ClassVar[type[np.floating]] = np.float64

    def __post_init__(self) -> None:
        check.count("neighbours", self.neighbours)

    @property
    def similarity_(self) -> sp.csr_matrix:
        """Cosines of the nearest items."""
        return self.model_.similarity

    def make(self, seed: int) -> ImplicitModel:
        recommenders = need("implicit.nearest_neighbours", _USE)
        made: ImplicitModel = recommenders.CosineRecommender(self.neighbours, num_threads=torch.get_num_threads())
        return made


@dataclass
class ALS(OfImplicit):
    """Weighted matrix factorisation by alternating least squares; needs the package implicit.

    Attributes:
        options: arguments of implicit.als.AlternatingLeastSquares; the others keep implicit's defaults.
    """

    options: dict[str, object] = field(default_factory=dict)

    def make(self, seed: int) -> ImplicitModel:
        given = {"use_gpu": False, "random_state": seed, "num_threads": torch.get_num_threads(), **self.options}
        with as_implicit_asks():
            made: ImplicitModel = need("implicit.als", _USE).AlternatingLeastSquares(**given)
        return made


class Recommender(Estimator, Protocol):
    """An estimator that makes lists."""

    @property
    def recommend(self) -> Callable[..., tuple[object, object]]: ...


class OfEstimator:
    """Gives an estimator the interface of a baseline."""

    def __init__(self, model: Recommender, arguments: Mapping[str, object]) -> None:
        self.model, self.arguments = model, dict(arguments)

    def check(self, pairs: Interactions) -> None:
        """Refuse settings and features of towers that do not fit the data; other estimators check when they fit."""
        if isinstance(self.model, ModelSettings):
            known = {name: one for name, one in self.arguments.items() if name in ("left_features", "right_features")}
            as_solver(self.model.optimizer, dict(self.model.solver_options()))
            data = prepare_data(self.model, pairs, **known)
            make_problem(self.model, data)
            if (asked := self.model.with_changes().max_iterations) is not None:
                check.count("max_iterations", asked, minimum=0)

    def fit(self, pairs: Interactions, seed: int = 0) -> None:
        seeds = {name: seed for name in SEEDS if name in self.model.get_params()}
        self.model, self.pairs = fit_copy(self.model, pairs, self.arguments, **seeds), pairs

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        index, found = index_of(self.pairs.right_ids), np.full((len(rows), k), -1, dtype=np.int64)
        for start in range(0, len(rows), _BLOCK):
            users = self.pairs.left_ids[rows[start : start + _BLOCK]]
            ids, scores = self.model.recommend(users.tolist(), k)
            names, filled = np.asarray(ids), np.asarray(scores) > -np.inf
            if names.ndim != 2 or names.shape != filled.shape or len(names) != len(users):
                expected = f"ids and scores of shape ({len(users)}, {k} or fewer)"
                check.fail("recommend", f"ids of shape {names.shape} and scores of shape {filled.shape}", expected)
            columns = join(names[filled], index)
            if (columns < 0).any():
                check.fail("recommend", f"{names[filled][columns < 0].tolist()[0]!r}", "ids of the training pairs")
            width = min(k, names.shape[1])
            block = np.full(names.shape, -1, dtype=np.int64)
            block[filled] = columns
            found[start : start + len(users), :width] = block[:, :width]
        return found


BuiltIn = Popularity | ItemKNN | EASE | ALS


def settings_of(model: BuiltIn) -> dict[str, object]:
    """Return the arguments that a baseline was constructed with."""
    return {part.name: getattr(model, part.name) for part in fields(model) if part.init}


def needs_implicit(model: BuiltIn) -> str | None:
    """Return why a baseline cannot run here, None if it can."""
    if isinstance(model, (ItemKNN, ALS)) and importlib.util.find_spec("implicit") is None:
        return f"the package implicit is not installed: {install_line('implicit')}"
    return None


def lists_by_products(
    pairs: sp.csr_matrix,
    across: sp.csr_matrix | NDArray[np.float32],
    rows: NDArray[np.int64],
    k: int,
    seen: sp.csr_matrix,
) -> Lists:
    """Return lists by the product of users' rows with an item × item matrix, sparse or dense, in blocks of users."""
    n = pairs.shape[1]
    k, found = min(k, n), np.full((len(rows), k), -1, dtype=np.int64)
    size = max(1, _BLOCK_BYTES // (16 * n))  # in float64, and again in float32
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        product = pairs[part] @ across
        scores = (product.toarray() if sp.issparse(product) else np.asarray(product)).astype(np.float32)
        left_out = sp.csr_matrix(seen[part])
        scores[np.repeat(np.arange(len(part)), np.diff(left_out.indptr)), left_out.indices] = -np.inf
        found[start : start + len(part), :k] = best(torch.from_numpy(scores), k)[0].numpy()
    return found


@contextmanager
def as_implicit_asks() -> Iterator[None]:
    """Limit BLAS to one thread, as implicit has its own, and hide implicit's warnings about its own conversions."""
    with importlib.import_module("threadpoolctl").threadpool_limits(1, "blas"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Method expects CSR input")
        yield


def _ones(pairs: Pairs) -> sp.csr_matrix:
    """Return the pattern of the positive pairs, as ones."""
    matrix = canonical("pairs", pairs.matrix if isinstance(pairs, Interactions) else pairs)
    kept = sp.csr_matrix((matrix.data > 0, matrix.indices, matrix.indptr), shape=matrix.shape, copy=True)
    kept.eliminate_zeros()
    return kept.astype(np.float32)

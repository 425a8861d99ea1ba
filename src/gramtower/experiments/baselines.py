"""Baseline models, each a few lines on top of numpy, scipy, torch or ``implicit``.

All learn from the pattern of the positive pairs, X (users × items, ones), without weights or features.

    Popularity  score of item j: its number of pairs
    ItemKNN     X S, S the cosines of each item's K nearest ones, itself among them (implicit's CosineRecommender)
    EASE        X B, B = argmin ‖X − XB‖² + λ‖B‖² with zeros on its diagonal (Steck 2019), in closed form:
                P = (XᵀX + λI)⁻¹, B_ij = −P_ij / P_jj. O(n³) time, 3 n² float64: refused beyond ``most_items``
    ALS         p_iᵀq_j by implicit's AlternatingLeastSquares, with its defaults for options that are not given

The caller passes the seen pairs that lists leave out; ties go to the smaller column, as in retrieval/topk.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.checks import install_line, need
from gramtower._util.host import memory_size
from gramtower.data.matrices import canonical
from gramtower.retrieval.topk import best, top_k

Lists = NDArray[np.int64]
_BLOCK_BYTES = 64_000_000  # of scores made at once
_COPIES = 3  # n × n float64 matrices that EASE holds at once


class ImplicitModel(Protocol):
    """A model of implicit: with factors of users and items, or with similarities of items."""

    @property
    def fit(self) -> Callable[..., object]: ...


class Baseline(Protocol):
    """The interface of a model in a benchmark."""

    def fit(self, pairs: sp.csr_matrix, seed: int = 0) -> object:
        """Learn from the positive pairs, users × items."""

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        """Return the k best items of some users, best first, −1 where there is none, without their rows of ``seen``."""


@dataclass
class Popularity:
    """Recommends the items with most pairs to every user."""

    scores_: NDArray[np.float32] = field(init=False, repr=False, compare=False)

    def fit(self, pairs: sp.csr_matrix, seed: int = 0) -> Popularity:
        matrix = _ones(pairs)
        self.scores_ = np.bincount(matrix.indices, minlength=matrix.shape[1]).astype(np.float32)
        return self

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        alike = np.ones((len(rows), 1), dtype=np.float32)
        return top_k(alike, self.scores_[:, None], k, exclude=seen[rows])[0]


@dataclass
class ItemKNN:
    """Recommends items that are similar to those of a user; needs the package implicit.

    Attributes:
        neighbours: number of neighbours of each item, K.
    """

    neighbours: int = 20
    pairs_: sp.csr_matrix = field(init=False, repr=False, compare=False)
    similarity_: sp.csr_matrix = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check.count("neighbours", self.neighbours)

    def fit(self, pairs: sp.csr_matrix, seed: int = 0) -> ItemKNN:
        self.pairs_ = _ones(pairs)
        found = _implicit("nearest_neighbours").CosineRecommender(self.neighbours, num_threads=torch.get_num_threads())
        with as_implicit_asks():
            found.fit(self.pairs_.astype(np.float64), show_progress=False)
        self.similarity_ = found.similarity
        return self

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        return lists_by_products(self.pairs_, self.similarity_, rows, k, seen)


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

    def fit(self, pairs: sp.csr_matrix, seed: int = 0) -> EASE:
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


@dataclass
class ALS:
    """Weighted matrix factorisation by alternating least squares; needs the package implicit.

    Attributes:
        options: arguments of implicit.als.AlternatingLeastSquares; the others keep implicit's defaults.
    """

    options: dict[str, object] = field(default_factory=dict)
    model_: Any = field(init=False, repr=False, compare=False)

    def fit(self, pairs: sp.csr_matrix, seed: int = 0) -> ALS:
        given = {"use_gpu": False, "random_state": seed, "num_threads": torch.get_num_threads(), **self.options}
        with as_implicit_asks():
            self.model_ = _implicit("als").AlternatingLeastSquares(**given)
            self.model_.fit(_ones(pairs), show_progress=False)
        return self

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        return lists_of_factors(self.model_, rows, k, seen)


BuiltIn = Popularity | ItemKNN | EASE | ALS


def settings_of(model: BuiltIn) -> dict[str, object]:
    """Return the arguments that a baseline was constructed with."""
    return {part.name: getattr(model, part.name) for part in fields(model) if part.init}


def needs_implicit(model: BuiltIn) -> str | None:
    """Return why a baseline cannot run here, None if it can."""
    if isinstance(model, (ItemKNN, ALS)) and importlib.util.find_spec("implicit") is None:
        return f"the package implicit is not installed: {install_line('implicit')}"
    return None


def lists_of_factors(model: ImplicitModel, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
    """Return the lists of a model of implicit that has factors of users and items."""
    users, items = (_on_host(getattr(model, name)) for name in ("user_factors", "item_factors"))
    return top_k(users[rows], items, k, exclude=seen[rows])[0]


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


def _ones(pairs: sp.csr_matrix) -> sp.csr_matrix:
    """Return the pattern of the positive pairs, as ones."""
    matrix = canonical("pairs", pairs)
    kept = sp.csr_matrix((matrix.data > 0, matrix.indices, matrix.indptr), shape=matrix.shape, copy=True)
    kept.eliminate_zeros()
    return kept.astype(np.float32)


def _on_host(factors: object) -> NDArray[np.float32]:
    """Return factors as a numpy array, also those of implicit on a GPU."""
    return np.asarray(factors.to_numpy() if hasattr(factors, "to_numpy") else factors, dtype=np.float32)


def _implicit(module: str) -> Any:
    return need(f"implicit.{module}", "this baseline")

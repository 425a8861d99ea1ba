"""Imputed labels of unobserved pairs, ỹ_ij = p̃_iᵀ q̃_j (eq:tYij), constant or of low rank r.

A constant c is p̃_i = (c), q̃_j = (1): rank one. It is never stored as a matrix; column sums take its place.
The paper takes r = k; any r works, because P̃ and Q̃ enter only through r × k products. Checked by
tests/test_engine.py against the dense twin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.pairs import Pairs
from gramtower.distributed.shards import Shards
from gramtower.kernels import Kernels
from gramtower.objective.gramians import column_sums, gram


class Imputed:
    """P̃ and Q̃, or a constant standing for them."""

    def __init__(self, constant: float, factors: tuple[Tensor, Tensor] | None) -> None:
        self.constant, self.factors = constant, factors

    def to(self, dtype: torch.dtype, device: torch.device, shared: Imputed | None = None) -> Imputed:
        """The same labels in another dtype or on another device; Q̃ is that of ``shared`` where given."""
        if self.factors is None:
            return self
        right = self.factors[1].to(device, dtype) if shared is None or shared.factors is None else shared.factors[1]
        return Imputed(0.0, (self.factors[0].to(device, dtype), right))

    def take(self, left: Tensor, right: Tensor) -> Imputed:
        """The labels of some left and right entities."""
        return self if self.factors is None else Imputed(0.0, (self.factors[0][left], self.factors[1][right]))

    def left_rows(self, rows: slice) -> Imputed:
        """The labels of a range of left entities with all right ones."""
        return self if self.factors is None else Imputed(0.0, (self.factors[0][rows], self.factors[1]))

    def cross_gram(self, side: int, weight: Tensor | None, embeddings: Tensor) -> Tensor:
        """P̂_c = P̃ᵀAP (side 0) or Q̂_c = Q̃ᵀBQ (side 1), r × k in float64 (eq:gramian)."""
        if self.factors is not None:
            return gram(self.factors[side], embeddings, weight)
        scale = self.constant if side == 0 else 1.0
        return scale * column_sums(embeddings, weight)[None, :]

    def subtract_product(self, side: int, matrix: Tensor, out: Tensor) -> None:
        """out −= P̃ matrix (side 0) or Q̃ matrix (side 1), with an r × k matrix."""
        if self.factors is not None:
            out.addmm_(self.factors[side], matrix, alpha=-1.0)
        else:
            scale = self.constant if side == 0 else 1.0
            out.sub_(matrix[0], alpha=scale)

    def square_sum(self, a: Tensor | None, b: Tensor | None, shards: Shards) -> float:
        """⟨P̃_c, Q̃_c⟩ = Σ_ij a_i b_j ỹ_ij²."""
        if self.factors is not None:
            P, Q = self.factors
            left, right = shards.group.sum_all(gram(P, P, a), gram(Q, Q, b))
            return float((left * right).sum())
        counts = shards.left.count, shards.right.count
        own = (float(k) if w is None else float(w.double().sum()) for w, k in zip((a, b), counts, strict=True))
        sums = shards.group.totals(*own)
        return self.constant * self.constant * sums[0] * sums[1]  # a power would raise where this is infinite

    def at_pairs(self, pairs: Pairs, kernels: Kernels, shards: Shards) -> Tensor | float:
        """ỹ on the observed pairs."""
        if self.factors is None:
            return self.constant
        return kernels.dots(pairs, self.factors[0], shards.gather(self.factors[1]).wait())


def as_imputed(value: Any, shape: tuple[int, int]) -> Imputed:
    """Imputed labels from a number or from (P̃, Q̃) of shapes (m, r) and (n, r)."""
    if not isinstance(value, (tuple, list)):
        return Imputed(check.number("imputed", value), None)
    if len(value) != 2:
        check.fail("imputed", f"{len(value)} arrays", "a number or the two arrays (P̃, Q̃)")
    arrays = [check.as_float_array(f"imputed[{side}]", array) for side, array in enumerate(value)]
    for side, array in enumerate(arrays):
        if array.ndim != 2 or array.shape[0] != shape[side] or array.shape[1] == 0:
            check.fail(f"imputed[{side}]", f"shape {array.shape}", f"shape ({shape[side]}, r)")
        check.finite(f"imputed[{side}]", array)
    if arrays[0].shape[1] != arrays[1].shape[1]:
        check.fail("imputed", f"widths {arrays[0].shape[1]} and {arrays[1].shape[1]}", "one common width r")
    left, right = (torch.tensor(array) for array in arrays)
    common = torch.promote_types(left.dtype, right.dtype)
    return Imputed(0.0, (left.to(common), right.to(common)))

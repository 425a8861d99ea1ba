"""Imputed labels of unobserved pairs, ỹ_ij = p̃_iᵀ q̃_j (eq:tYij), constant or of low rank r.

A constant c is p̃_i = (c), q̃_j = (1): rank one. It is never stored as a matrix (constants.py). The paper takes r = k;
any r works, because P̃ and Q̃ enter only through r × k products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramtower._util import checks as check


@dataclass(frozen=True)
class Imputed:
    """P̃ and Q̃, or a constant standing for them.

    Attributes:
        constant: ỹ of all unobserved pairs; 0 with factors.
        factors: P̃ (m × r) and Q̃ (n × r), or None.
        fitted: whether each left entity's label is fitted, so that scores are margins above their mean.
    """

    constant: float
    factors: tuple[Tensor, Tensor] | None
    fitted: bool = False


def as_imputed(value: Any, shape: tuple[int, int]) -> Imputed:
    """Imputed labels from a number or from (P̃, Q̃) of shapes (m, r) and (n, r)."""
    if isinstance(value, str):
        if value != "fitted":
            check.fail("imputed", repr(value), 'a number, "fitted", or the two arrays (P̃, Q̃)')
        return Imputed(0.0, None, True)
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

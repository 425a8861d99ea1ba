"""The constants of the objective: weights, penalties and imputed labels, checked and as tensors on a device.

Weights (eq:loss) are arrays, or text: "degree^s" means a_i = max(|O_i|, 1)^s divided by its mean, so that Σ_ij a_i b_j
is mn and ω keeps its meaning for every power. The penalty on p_i is ½ μ c_i ‖p_i‖² with c_i = (|O_i| + ω Σ_j b_j)^ν.

Imputed labels ỹ_ij = p̃_iᵀq̃_j (eq:tYij) are of low rank, constant or fitted. A constant has rank one: p̃_i = ỹ and
q̃_j = 1 are numbers here, never matrices. The paper takes r = k; any r works, because P̃ and Q̃ enter only through r × k
products. Fitted labels centre the right embeddings (:meth:`Constants.centred`). Cost: O(m + n + |O|), once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.matrices import everywhere, extremes
from gramtower.data.pairs import Pairs
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Shards
from gramtower.engine.kernels.elementwise import Loss, LossTerms
from gramtower.engine.objective.formulas import Side, column_sums
from gramtower.engine.objective.regularizers import Regularizer

Numbers: TypeAlias = NDArray[np.floating[Any]]
WeightsLike: TypeAlias = str | Sequence[float] | NDArray[np.generic] | Tensor | None  # accepted as weights of entities
ImputedLike: TypeAlias = float | str | Sequence[NDArray[np.generic] | Tensor]  # accepted as imputed labels


@dataclass(frozen=True)
class Constants:
    """What the objective holds of all entities, in one dtype on one device (problem.py has the formula)."""

    left: Side  # the left entities held here
    right: Side  # the right entities held here
    omega: float  # ω
    l2: float  # λ
    imputed_square: float  # ⟨P̃_c, Q̃_c⟩ = Σ_ij a_i b_j ỹ_ij²
    scalars: Tensor  # ω, and ỹ where it is one number, on the device
    precision: str  # of matrix products on a GPU
    pair_precision: str  # of what Gauss-Newton products gather on a GPU
    shards: Shards  # which process holds which rows
    regularizer: Regularizer | None = None  # Ψ, None for ½‖θ‖²
    fitted_total: float | None = None  # Σ_j b_j over all processes where labels are fitted, otherwise None

    def centred(self, E: Tensor, out: Tensor | None = None) -> Tensor:
        """E less its mean over the right entities, weighted by b, where labels are fitted; E itself otherwise."""
        if self.fitted_total is None:
            return E
        (total,) = self.shards.group.sum_all(column_sums(E, self.right.weight))
        return torch.sub(E, (total / self.fitted_total).to(E.dtype), out=out)

    def centre_adjoint_(self, V: Tensor) -> Tensor:
        """Apply the transpose of :meth:`centred` in place: V − b (Σ_j v_j)ᵀ / Σ_j b_j."""
        if self.fitted_total is None:
            return V
        (total,) = self.shards.group.sum_all(column_sums(V))
        mean = (total / self.fitted_total).to(V.dtype)
        return V.sub_(mean) if self.right.weight is None else V.addr_(self.right.weight, mean, alpha=-1.0)


@dataclass(frozen=True)
class PairConstants:
    """The observed pairs of some left rows."""

    pairs: Pairs  # their pattern, rows numbered from the first of these
    terms: LossTerms  # what ℓ⁺ needs of them besides the scores

    def sampled(self, pairs: Pairs, entries: Tensor) -> PairConstants:
        """Some of the pairs, by number, with their pattern."""
        return PairConstants(pairs, self.terms.at(entries))


EXPECTED = 'an array of weights, or text such as "degree^0.5", "degree^-0.5", or "degree^0" for none'


def entity_weights(name: str, value: WeightsLike, degrees: NDArray[np.int64], group: Group = SINGLE) -> Numbers | None:
    """The weights of one side, from an array, from text such as ``"degree^0.5"``, or None for ones.

    Over several processes degrees and weights are those of local entities; the mean is over all.
    """
    if isinstance(value, str):
        return _by_degree(name, value, degrees, group)
    return check.weights(name, value, len(degrees))


def weights_of_pairs(value: WeightsLike, degrees: NDArray[np.int64], group: Group = SINGLE) -> Numbers | None:
    """The weights of observed pairs in row order, from an array, or from text by the degree of their left entities.

    ``degrees`` are those of the local rows; the mean over the pairs of all processes is 1.
    """
    if not isinstance(value, str):
        return _checked("pair_weights", value, int(degrees.sum()))
    known = degrees[degrees > 0]
    weights = _by_degree("pair_weights", value, known, group, of_pairs=True)
    return None if weights is None else np.repeat(weights, known)


def _by_degree(
    name: str, value: str, degrees: NDArray[np.int64], group: Group, of_pairs: bool = False
) -> Numbers | None:
    """A power of degrees whose mean over all entities, or over all of their pairs, is 1; None for ones."""
    power = degree_power(name, value)
    if power == 0:
        return None
    degrees = np.maximum(degrees, 1)
    local = np.bincount(degrees)
    here = [np.flatnonzero(local).tolist(), local[local > 0].tolist()]
    found = np.hstack(group.gather_json(here), dtype=np.int64, casting="unsafe")  # floats where a process has none
    levels, place = np.unique(found[0], return_inverse=True)
    counts = np.bincount(place, found[1]) * (levels if of_pairs else 1)
    with np.errstate(over="ignore", invalid="ignore"):  # refused by name below
        powers = levels.astype(np.float64) ** power
        total = (counts * powers).sum()  # over degrees: processes that divide entities in any way get the same sum
        table = np.zeros(levels.max(initial=0) + 1)
        table[levels] = powers / (total / counts.sum())
        weights: Numbers = table[degrees]
    if not (np.isfinite(total) and np.isfinite(weights).all()):
        check.fail(name, repr(value), "a power that gives finite weights")
    return weights


def degree_power(name: str, value: str) -> float:
    """s of ``"degree^s"``; ``"degree"`` is s = 1."""
    match = re.fullmatch(r"\s*degree\s*(?:\^\s*([^\s]+)\s*)?", value)
    try:
        power = float(match[1] or 1.0) if match else math.nan
    except ValueError:
        power = math.nan
    if not math.isfinite(power):
        check.fail(name, repr(value), EXPECTED)
    return power


def embedding_penalties(
    mu: float, power: float, omega: float, counts: Sequence[NDArray[np.int64]], sums: Sequence[float]
) -> tuple[Numbers, Numbers]:
    """μ c of the left and of the right entities, with μ = ``mu`` and ν = ``power``.

    ``counts`` are the observed pairs of each left and of each right entity, ``sums`` are Σ_i a_i and Σ_j b_j.
    """
    with np.errstate(divide="ignore", over="ignore"):  # refused by name below
        left, right = (mu * (c + omega * other) ** power for c, other in zip(counts, sums[::-1], strict=True))
    for side, values in (("left", left), ("right", right)):
        if not np.isfinite(values).all():
            i = int(np.argmin(np.isfinite(values)))
            given = f"{power} (embedding_l2 {mu}, omega {omega})"
            expected = f"a power that gives finite penalties; {side} entity {i} would get {values[i]}"
            check.fail("frequency_power", given, expected)
    return left, right


@dataclass(frozen=True)
class Imputed:
    """P̃ and Q̃, or a constant standing for them."""

    constant: float  # ỹ of all unobserved pairs; 0 with factors
    factors: tuple[Tensor, Tensor] | None  # P̃ (m × r) and Q̃ (n × r), or None
    fitted: bool = False  # whether each left entity's label is fitted, so that scores are margins above their mean


def as_imputed(value: ImputedLike, shape: tuple[int, int]) -> Imputed:
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


def _checked(name: str, value: WeightsLike, count: int) -> Numbers | None:
    """check.weights, by all threads where there is nothing wrong."""
    array = None if value is None else check.as_float_array(name, value)
    if array is not None and array.shape == (count,) and count:
        low, high = extremes(array)
        if low >= 0 and np.isfinite(high):
            return array
    return check.weights(name, array, count)


def check_labels(loss: Loss, labels: Numbers, bounds: tuple[float, float], pairs: Pairs) -> None:
    """Refuse labels that are not finite, or that a loss does not take; ``bounds`` are the least and the largest."""
    low, high = bounds
    if not (np.isfinite(low) and np.isfinite(high)):
        check.finite("pairs", labels)
    known = loss.labels
    if known is None or not len(labels) or (low == high and low in known):  # equal: plain implicit feedback
        return
    if everywhere(lambda a, b: bool(np.isin(labels[a:b], known).all()), len(labels)):
        return
    wrong = ~np.isin(labels, known)
    e = int(np.argmax(wrong))
    check.fail(
        "pairs",
        f"label {labels[e]:g} at row {int(pairs.rows[e])}, column {int(pairs.columns[e])} "
        f"({int(wrong.sum())} such labels)",
        f"labels {' or '.join(f'{x:+g}' for x in known)} for the {loss.name} loss: (matrix > 0) for counts, pairs read "
        'with a threshold for ratings, or loss="squared", which takes any label',
    )

"""The embedding of an entity known by its id alone, as a sum over the entities that it was observed with.

A linear tower over ids gives every entity a vector of its own, and where training ended, the gradient of the objective
along the vector p of left entity i is

    r = Σ_(j∈O_i) ∂ℓ⁺_ij q_j + ω a_i (Q_c p − Q̂) + (μ c_i + λ) p,      Q_c = QᵀBQ,  Q̂ = ỹ Σ_j b_j q_j.

With the curvatures ∂²ℓ⁺ of its pairs, H = Σ_(j∈O_i) ∂²ℓ⁺_ij q_j q_jᵀ + ω a_i Q_c + (μ c_i + λ) I is the Hessian along
p, and for any p, whatever the loss,

    p = H⁻¹ ( Σ_(j∈O_i) (∂²ℓ⁺_ij s_ij − ∂ℓ⁺_ij) q_j + ω a_i Q̂ + r ),      s_ij = p·q_j.

The product with q gives the score as one part for each observed j, one for all unobserved pairs, and q·H⁻¹r, which is
zero at the row's optimum. For the squared loss the first factor is a constant of the pair and these are the normal
equations of least squares, as in implicit's ``explain``; for other losses those of the last Newton step. Of a right
entity alike, with both sides exchanged.

Cost: O(|O| + n k²) once, then O(|O_i| k² + k³) a pair. In float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.kernels.losses import LossTerms, Scored, as_loss
from gramtower.engine.objective.gramians import column_sums, gram
from gramtower.engine.objective.problem import Problem
from gramtower.model import defaults
from gramtower.model.fit_data import seen_by_towers
from gramtower.model.fitted import FittedModel
from gramtower.model.settings import ModelSettings

_BLOCK = 8192
Array = NDArray[np.float64]


class RowEquations:
    """Of the entities of one side.

    Args:
        settings: the model's arguments.
        fitted: the model.
        side: "left" or "right".
    """

    def __init__(self, settings: ModelSettings, fitted: FittedModel, side: str) -> None:
        place = 0 if side == "left" else 1
        if settings.towers is not None or fitted.hidden[place] or fitted.normalize:
            given = f"{side} entities known by their id alone, through layers of their own"
            check.fail("model", given, f"features or a history on the {side}, or ids with hidden=(), not normalised")
        if not fitted.plain_pairs:
            given = "fitted with labels or weights, of which a model keeps nothing"
            check.fail("model", given, f"pairs without values, or features or a history on the {side}")
        m, n = fitted.left.trained, fitted.right.trained
        pairs = fitted.trained if fitted.shape == (m, n) else fitted.trained[:m, :n]
        problem = _objective(settings, fitted, pairs)
        self._loss, self._omega, self._imputed = problem.loss, problem.omega, problem.imputed.constant
        self._l2 = problem.l2
        self._pairs = sp.csr_matrix(pairs if side == "left" else pairs.T)
        this, that = (fitted.left, fitted.right) if side == "left" else (fitted.right, fitted.left)
        self._own, self._others = this.embeddings, that.embeddings[: n if side == "left" else m]
        weights, penalties = problem.weight_arrays, problem.penalty_arrays
        self._weight, self._other_weight = weights[place], weights[1 - place]
        self._penalty = penalties[place]
        self._gramian, self._sum = _sums(self._others, self._other_weight)

    def parts(self, row: int, q: Tensor) -> tuple[NDArray[np.int64], Array, float, float]:
        """The entities observed with one, what each adds to its score with q, what all pairs add, and the score."""
        columns = self._pairs.indices[self._pairs.indptr[row] : self._pairs.indptr[row + 1]].astype(np.int64)
        p, Q = self._own[row].double(), self._others[torch.from_numpy(columns)].double()
        own = 1.0 if self._weight is None else float(self._weight[row])
        pair_weight = torch.full((len(columns),), own, dtype=torch.float64)
        if self._other_weight is not None:
            pair_weight *= torch.from_numpy(self._other_weight[columns])
        ones = torch.ones(len(columns), dtype=torch.float64)
        constants = torch.tensor([self._omega, self._imputed], dtype=torch.float64)
        terms = LossTerms(self._loss, ones, self._omega, self._imputed, pair_weight, None, constants)
        scores = Q @ p
        pairs = Scored(terms, scores)
        ridge = self._l2 + (0.0 if self._penalty is None else float(self._penalty[row]))
        H = Q.t() @ (pairs.curvatures[:, None] * Q) + self._omega * own * self._gramian
        H += ridge * torch.eye(len(H), dtype=torch.float64)
        v = torch.from_numpy(scipy.linalg.pinvh(H.numpy()) @ q.numpy())
        values = (pairs.curvatures * scores - pairs.slopes) * (Q @ v)
        return columns, values.numpy(), self._omega * own * self._imputed * float(self._sum @ v), float(p @ q)


def _objective(settings: ModelSettings, fitted: FittedModel, pairs: sp.csr_matrix) -> Problem:
    """What the model was fitted to, without the features."""
    seen = seen_by_towers((fitted.left.inputs, fitted.right.inputs))
    size, right = (pairs.shape, pairs.nnz), settings.right_weights
    l2, mu = fitted.l2, fitted.embedding_l2
    described = fitted.left.inputs.described, fitted.right.inputs.described
    if l2 is None or mu is None:  # a file of before they were kept
        l2 = defaults.default_l2(*size, seen) if settings.l2 is None else settings.l2
        mu = settings.embedding_l2
        mu = defaults.default_embedding_l2(*size, fitted.dim, seen) if mu is None else mu
    if isinstance(right, str) and right == "auto":
        right = fitted.auto_weights or defaults.default_right_weights(*size, seen, described)
    return Problem(
        pairs, loss=as_loss(settings.loss), omega=fitted.omega,
        l2=l2, imputed=settings.imputed, left_weights=settings.left_weights, right_weights=right, embedding_l2=mu,
        frequency_power=settings.frequency_power,
    )  # fmt: skip


def _sums(Q: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
    """QᵀBQ and Σ_j b_j q_j, from rows in float64 a block at a time."""
    total, summed = (
        Q.new_zeros(Q.shape[1], Q.shape[1], dtype=torch.float64),
        Q.new_zeros(Q.shape[1], dtype=torch.float64),
    )
    for start in range(0, len(Q), _BLOCK):
        rows = Q[start : start + _BLOCK].double()
        b = None if weight is None else torch.from_numpy(np.asarray(weight[start : start + _BLOCK], np.float64))
        total += gram(rows, rows, b)
        summed += column_sums(rows, b)
    return total, summed

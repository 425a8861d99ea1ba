"""ℓ⁺ on the observed pairs (eq:lij): its sum, its slopes X (eq:Xij) and its curvatures.

    ℓ⁺   = w ℓ(R, ŷ) − ½ω a_i b_j (ỹ − ŷ)²
    ∂ℓ⁺  = w ℓ′ − ω a_i b_j (ŷ − ỹ)
    ∂²ℓ⁺ = w ℓ″ − ω a_i b_j

Kernels that can, do all three in the pass over O that makes the scores, or work out X or Z in the pass that sums over
rows, without scores; otherwise each is worked out from the scores when it is asked for, in torch, for any loss.
O(|O| k) for the scores, O(|O|) for the rest. Checked by tests/test_engine.py, tests/test_swept.py and
tests/test_gpu_kernels.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs
from gramtower.kernels import Kernels, LossTerms
from gramtower.objective.losses import LOSSES, Function, Loss

_CHUNK = 1 << 22  # pairs whose loss is worked out at a time


class Observed(Protocol):
    """ℓ⁺ at some scores."""

    @property
    def value(self) -> Tensor:
        """Σ_O ℓ⁺, a float64 scalar on the device."""

    @property
    def slopes(self) -> Tensor:
        """X of eq:Xij: ∂ℓ⁺/∂ŷ on O, in row order."""

    @property
    def curvatures(self) -> Tensor:
        """∂²ℓ⁺/∂ŷ² on O, in row order."""


def observe(kernels: Kernels, pairs: Pairs, P: Tensor, Q: Tensor, loss: Loss, terms: LossTerms) -> Observed:
    """One pass over O."""
    if _known(kernels, loss):
        fused: Any = kernels
        return _Fused(*fused.losses(pairs, P, Q, terms))
    return _Scored(loss, terms, kernels.dots(pairs, P, Q))


def add_slopes(
    kernels: Kernels, pairs: Pairs, P: Tensor, Q: Tensor, loss: Loss, terms: LossTerms, out: Tensor
) -> tuple[Tensor, int]:
    """X of eq:Xij, and out += X Q; and in how many passes over O."""
    if _in_one_pass(kernels, loss, P, Q):
        fused: Any = kernels
        return fused.loss_left(pairs, P, Q, terms, out), 1
    x = observe(kernels, pairs, P, Q, loss, terms).slopes
    kernels.left_sum(pairs, x, Q, out)
    return x, 2


def add_curved(
    kernels: Kernels,
    pairs: Pairs,
    P: Tensor,
    W: Tensor,
    Q: Tensor,
    gathered: tuple[Tensor, Tensor],
    loss: Loss,
    terms: LossTerms,
    out: Tensor,
) -> tuple[Tensor, int]:
    """Z of eq:final_Gd with (Q, H) as ``gathered``, and out += Z Q; and in how many passes over O."""
    if gathered[0].dtype == Q.dtype and _in_one_pass(kernels, loss, P, Q):
        fused: Any = kernels
        return fused.loss_left(pairs, P, Q, terms, out, (W, gathered[1])), 1
    c = observe(kernels, pairs, P, Q, loss, terms).curvatures
    return kernels.curvature_left(pairs, c, P, W, *gathered, out), 2


def _in_one_pass(kernels: Kernels, loss: Loss, P: Tensor, Q: Tensor) -> bool:
    """Whether kernels can do without the scores."""
    return P.shape[1] <= getattr(kernels, "LONGEST", 0) and P.dtype == Q.dtype and _known(kernels, loss)


def _known(kernels: Kernels, loss: Loss) -> bool:
    """Whether kernels have this loss written out: one of the library's own that is in their table of losses."""
    return loss.name in getattr(kernels, "LOSSES", ()) and loss is LOSSES.get(loss.name)


class _Fused:
    """All three from one kernel."""

    def __init__(self, value: Tensor, slopes: Tensor, curvatures: Tensor) -> None:
        self.value, self.slopes, self.curvatures = value, slopes, curvatures


class _Scored:
    """Each from the scores, when asked for."""

    def __init__(self, loss: Loss, terms: LossTerms, scores: Tensor) -> None:
        self.loss, self.terms, self.scores = loss, terms, scores

    @cached_property
    def value(self) -> Tensor:
        t = self.terms
        total = torch.zeros((), dtype=torch.float64, device=self.scores.device)
        for part in self._parts():
            total += self._loss(self.loss.value, part).sum(dtype=torch.float64)
            square = self._gap(part).square_()
            if t.pair_weight is not None:
                square *= t.pair_weight[part]
            total -= 0.5 * t.omega * square.sum(dtype=torch.float64)
        return total

    @property
    def slopes(self) -> Tensor:
        t, x = self.terms, torch.empty_like(self.scores)
        for part in self._parts():
            pull = self._gap(part)
            if t.pair_weight is not None:
                pull *= t.pair_weight[part]
            torch.add(self._loss(self.loss.first, part), pull, alpha=-t.omega, out=x[part])
        return x

    @property
    def curvatures(self) -> Tensor:
        t, c = self.terms, torch.empty_like(self.scores)
        for part in self._parts():
            c[part] = self._loss(self.loss.second, part) - t.omega * (
                1.0 if t.pair_weight is None else t.pair_weight[part]
            )
        return c

    def _parts(self) -> list[slice]:
        return [slice(start, start + _CHUNK) for start in range(0, len(self.scores), _CHUNK)]

    def _loss(self, function: Function, part: slice) -> Tensor:
        """A loss function on some pairs, times the weights of those pairs."""
        values = function(self.terms.labels[part], self.scores[part])
        return values if self.terms.loss_weight is None else values * self.terms.loss_weight[part]

    def _gap(self, part: slice) -> Tensor:
        """ŷ − ỹ on some pairs; a new tensor."""
        imputed = self.terms.imputed
        return self.scores[part] - (imputed[part] if isinstance(imputed, Tensor) else imputed)

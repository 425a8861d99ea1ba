"""The objective at a point: value (eq:Ln_brief) and gradient (eq:final_grad) without ever visiting all m·n pairs.

    L  = Σ_O ℓ⁺(R_ij, ŷ_ij) + ω L⁻ + ½λ‖θ‖² + embedding penalty
    ℓ⁺ = ℓ − ½ω a_i b_j (ỹ_ij − ŷ_ij)²                                  (eq:lij)
    L⁻ = ½⟨P̃_c, Q̃_c⟩ − ⟨P̂_c, Q̂_c⟩ + ½⟨P_c, Q_c⟩                       (eq:Ln_brief)

Cost (eq:com_fun_val): one forward of each tower, one pass over O, O((m+n)k²). The gradient after it: one vjp of each
tower and two passes over O. Compared with the dense twin of tests/dense.py in tests/test_engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.pairs import Pairs
from gramtower.distributed.group import Pending
from gramtower.distributed.shards import Shards
from gramtower.kernels import Kernels
from gramtower.model.linearization import Linearization, Work
from gramtower.model.parameters import Parameters, as_parameters
from gramtower.model.towers import Towers
from gramtower.objective.gramians import gram, square_norms
from gramtower.objective.imputation import Imputed
from gramtower.objective.losses import Function, Loss

if TYPE_CHECKING:
    from gramtower.objective.curvature import GaussNewton
    from gramtower.objective.kronecker import Kronecker

_CHUNK = 1 << 22  # pairs whose loss is worked out at a time


@dataclass(frozen=True)
class Setting:
    """The constants of the objective in one dtype on one device (see problem.py for the formula)."""

    pairs: Pairs
    labels: Tensor
    loss: Loss
    omega: float
    l2: float
    weights: tuple[Tensor | None, Tensor | None]  # a, b
    pair_weight: Tensor | None  # a_i b_j on O, None for ones
    loss_weight: Tensor | None  # weight of each observed pair's loss, None for ones
    imputed: Imputed
    pair_imputed: Tensor | float  # ỹ on O
    imputed_square: float  # ⟨P̃_c, Q̃_c⟩
    penalties: tuple[Tensor | None, Tensor | None]  # μ c_i, μ c_j
    shards: Shards  # which process holds which rows; everything above is this process's own


@dataclass(frozen=True)
class Terms:
    """The value, term by term."""

    observed: float  # Σ_O ℓ⁺
    all_pairs: float  # ω L⁻
    l2: float
    embedding_l2: float

    @property
    def total(self) -> float:
        """L(θ)."""
        return self.observed + self.all_pairs + self.l2 + self.embedding_l2

    def non_finite(self) -> list[str]:
        """Names of the terms that are NaN or infinite."""
        return [name for name, value in asdict(self).items() if not math.isfinite(value)]


class Point:
    """The problem evaluated at parameters θ. Made by :meth:`gramtower.Problem.at`.

    Attributes:
        parameters: θ, this object's own copy.
        P: left embeddings, m × k.
        Q: right embeddings, n × k.

    Over several processes P and Q are this process's own rows; values, Gramians and dot products are those of all.
    """

    def __init__(
        self,
        setting: Setting,
        towers: Towers,
        parameters: Parameters,
        left: Linearization,
        right: Linearization,
        kernels: Kernels,
        work: Work,
        at: Callable[[Parameters], Point],
        share: tuple[float, float] = (1, 1),
    ) -> None:
        self.setting, self.towers, self.parameters = setting, towers, parameters
        self.left, self.right, self.kernels, self.work, self._at = left, right, kernels, work, at
        self.P, self.Q = left.outputs, right.outputs
        self.share = share  # of the observed pairs, and of all pairs, that this evaluation covers

    @property
    def value(self) -> float:
        """L(θ), accumulated in float64."""
        return self.terms.total

    @cached_property
    def terms(self) -> Terms:
        """The value, term by term."""
        s = self.setting
        self.work.data_passes += self.share[1]
        observed = 0.0
        for part, scores in self._pair_chunks():
            observed += float(self._weighted(s.loss.value, part, scores).sum(dtype=torch.float64))
            square = self._gap(part, scores).square_()
            if s.pair_weight is not None:
                square *= s.pair_weight[part]
            observed -= 0.5 * s.omega * float(square.sum(dtype=torch.float64))
        Pc, Qc = self.gramians
        hPc, hQc = self.cross_gramians
        all_pairs = 0.5 * s.imputed_square - float((hPc * hQc).sum()) + 0.5 * float((Pc * Qc).sum())
        penalty = 0.0
        for weight, embeddings in zip(s.penalties, (self.P, self.Q), strict=True):
            if weight is not None:
                penalty += 0.5 * float((weight * square_norms(embeddings)).sum(dtype=torch.float64))
        observed, penalty = s.shards.group.totals(observed, penalty)
        return Terms(observed, s.omega * all_pairs, 0.5 * s.l2 * self.parameters.dot(self.parameters), penalty)

    @cached_property
    def right_rows(self) -> Tensor:
        """The right embeddings of all processes, n × k: what this process's pairs are with."""
        return self.setting.shards.gather(self.Q).wait()

    @cached_property
    def scores(self) -> Tensor:
        """ŷ_ij on the observed pairs, in row order. One pass over O."""
        self.work.pair_passes += self.share[0]
        return self.kernels.dots(self.setting.pairs, self.P, self.right_rows)

    @cached_property
    def gramians(self) -> tuple[Tensor, Tensor]:
        """P_c = PᵀAP and Q_c = QᵀBQ in float64 (eq:gramian)."""
        a, b = self.setting.weights
        Pc, Qc = self.setting.shards.group.sum_all(gram(self.P, self.P, a), gram(self.Q, self.Q, b))
        return Pc, Qc

    @cached_property
    def cross_gramians(self) -> tuple[Tensor, Tensor]:
        """P̂_c = P̃ᵀAP and Q̂_c = Q̃ᵀBQ, r × k, in float64 (eq:gramian)."""
        s = self.setting
        a, b = s.weights
        own = s.imputed.cross_gram(0, a, self.P), s.imputed.cross_gram(1, b, self.Q)
        hPc, hQc = s.shards.group.sum_all(*own)
        return hPc, hQc

    @torch.no_grad()
    def gradient(self) -> Parameters:
        """∇L(θ) by eq:final_grad: one vjp of each tower, two passes over O."""
        return self.pull_back(*self.output_gradients(self.gramians, self.cross_gramians), self.parameters)

    def output_gradients(
        self, gramians: tuple[Tensor, Tensor], cross_gramians: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """∂L/∂P and ∂L/∂Q, the brackets of eq:final_grad, with these (P_c, Q_c) and (P̂_c, Q̂_c)."""
        s = self.setting
        x = self.slopes()
        outputs = []
        for side, own in enumerate((self.P, self.Q)):
            U = own @ (s.omega * gramians[1 - side]).to(own.dtype)  # ω P Q_c
            s.imputed.subtract_product(side, (s.omega * cross_gramians[1 - side]).to(own.dtype), U)  # − ω P̃ Q̂_c
            U = self.weigh(side, U, own)
            outputs.append(U)
        self.kernels.left_sum(s.pairs, x, self.right_rows, outputs[0])  # + X Q
        self.add_right_sum(x, outputs[1]).wait()  # + Xᵀ P
        self.work.pair_passes += self.share[0] * 2
        self.work.data_passes += self.share[1]
        return outputs[0], outputs[1]

    def gauss_newton(self, damping: float = 0.0) -> GaussNewton:
        """G of eq:general_G as a linear operator; ``G @ d`` by eq:final_Gd. ``damping`` is added to λ in G alone."""
        from gramtower.objective.curvature import GaussNewton

        return GaussNewton(self, check.number("damping", damping, minimum=0.0))

    def preconditioner(self, kind: str = "kronecker", damping: float = 0.0) -> Kronecker:
        """M with M @ r ≈ (G + damping·I)⁻¹ r, made of Kronecker factors of the all-pairs curvature."""
        from gramtower.objective.kronecker import kronecker

        check.choice("kind", kind, ("kronecker",))
        return kronecker(self, check.number("damping", damping, minimum=0.0))

    @property
    def rounding(self) -> float:
        """Differences of the value below this are noise: the last place of the sums it is made of."""
        s = self.setting
        Pc, Qc = self.gramians
        sums = 0.5 * s.omega * (s.imputed_square + abs(float((Pc * Qc).sum())))
        sums += sum(abs(term) for term in asdict(self.terms).values())
        return float(torch.finfo(self.P.dtype).eps * sums)

    def along(self, direction: Parameters) -> Callable[[float], Point]:
        """The problem along a line: ``point.along(d)(δ)`` is the point at θ + δ d."""
        direction = as_parameters("direction", direction, self.parameters)
        return lambda step: self._at(self.parameters.clone().axpy_(step, direction))

    def slopes(self) -> Tensor:
        """X of eq:Xij on O: ∂ℓ⁺/∂ŷ = ℓ′ − ω a_i b_j (ŷ − ỹ)."""
        s = self.setting
        x = torch.empty_like(self.scores)
        for part, scores in self._pair_chunks():
            pull = self._gap(part, scores)
            if s.pair_weight is not None:
                pull *= s.pair_weight[part]
            torch.add(self._weighted(s.loss.first, part, scores), pull, alpha=-s.omega, out=x[part])
        return x

    def curvatures(self) -> Tensor:
        """∂²ℓ⁺/∂ŷ² = ℓ″ − ω a_i b_j on O."""
        s = self.setting
        c = torch.empty_like(self.scores)
        for part, scores in self._pair_chunks():
            second = self._weighted(s.loss.second, part, scores)
            c[part] = second - s.omega * (1.0 if s.pair_weight is None else s.pair_weight[part])
        return c

    def add_right_sum(self, x: Tensor, V: Tensor) -> Pending:
        """V += Xᵀ P, over the pairs of all processes; under way until waited for."""
        return self.setting.shards.add_right_sum(
            V, lambda out: self.kernels.right_sum(self.setting.pairs, x, self.P, out)
        )

    def weigh(self, side: int, U: Tensor, embeddings: Tensor) -> Tensor:
        """diag(a) U + diag(μ c) embeddings: how a side's weights and penalty enter gradient and G·d alike."""
        weight, penalty = self.setting.weights[side], self.setting.penalties[side]
        if weight is not None:
            U *= weight[:, None]
        if penalty is not None:
            U.addcmul_(embeddings, penalty[:, None])
        return U

    def pull_back(
        self, U: Tensor, V: Tensor | Pending, regularised: Parameters, extra: float = 0.0, out: Parameters | None = None
    ) -> Parameters:
        """(⟨Jᵘ, U⟩, ⟨Jᵛ, V⟩) + (λ + extra) · regularised, written over ``out`` if given."""
        out = regularised.empty() if out is None else out
        torch.mul(regularised.vector, self.setting.l2 + extra, out=out.vector)
        out.begin_sum_()
        self.left.vjp(U, self.towers.own("left", out))
        self.right.vjp(V.wait() if isinstance(V, Pending) else V, self.towers.own("right", out))
        return out.end_sum_()

    def _weighted(self, function: Function, part: slice, scores: Tensor) -> Tensor:
        """A loss function on some pairs, times the weights of those pairs."""
        s = self.setting
        values = function(s.labels[part], scores)
        return values if s.loss_weight is None else values * s.loss_weight[part]

    def _gap(self, part: slice, scores: Tensor) -> Tensor:
        """ŷ − ỹ on some pairs; a new tensor."""
        imputed = self.setting.pair_imputed
        return scores - (imputed[part] if isinstance(imputed, Tensor) else imputed)

    def _pair_chunks(self) -> list[tuple[slice, Tensor]]:
        scores = self.scores
        parts = (slice(start, start + _CHUNK) for start in range(0, len(scores), _CHUNK))
        return [(part, scores[part]) for part in parts]

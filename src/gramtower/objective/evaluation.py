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
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gramtower import _checks as check
from gramtower.distributed.group import Pending
from gramtower.kernels import Kernels
from gramtower.kernels.lanes import Lane
from gramtower.kernels.losses import Observed
from gramtower.kernels.precision import products_in
from gramtower.model.linearization import Linearization, Work
from gramtower.model.parameters import Parameters, as_parameters
from gramtower.model.towers import Towers
from gramtower.objective.gramians import gram, square_norms
from gramtower.objective.setting import Setting

if TYPE_CHECKING:
    from gramtower.objective.curvature import GaussNewton
    from gramtower.objective.kronecker import Kronecker


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


@dataclass(frozen=True)
class Moments:
    """Sums over the observed pairs of ∂²ℓ⁺, for the preconditioner.

    Attributes:
        sums: for each left entity Σ_j ∂²ℓ⁺_ij (1, ‖q_j‖²), and likewise for each right one.
        squares: Pᵀ diag(c) P with c_i = Σ_j ∂²ℓ⁺_ij, and Qᵀ diag(c) Q with c_j = Σ_i ∂²ℓ⁺_ij, in float64.
    """

    sums: tuple[Tensor, Tensor]
    squares: tuple[Tensor, Tensor]


class Recorded(Protocol):
    """An evaluation with gradient and products of its own: replayed (captured.py) or block by block (swept.py)."""

    def gradient_now(self) -> Parameters:
        """∇L."""

    def product_now(self, d: Parameters, damping: float, out: Parameters) -> Parameters:
        """(G + damping·I) d, written to ``out``."""

    def attach(self, M: Kronecker) -> Kronecker:
        """A preconditioner made here, made to be applied in the best way."""


class Point:
    """The problem evaluated at parameters θ. Made by :meth:`gramtower.Problem.at`.

    Its tensors are valid as long as it is: on a GPU their memory may be used again afterwards.

    Attributes:
        parameters: θ, this object's own copy.

    Over several processes P and Q are this process's own rows; values, Gramians and dot products are those of all.
    """

    slot: Recorded | None = None  # what has gradient and products of its own, if something does
    lane = Lane()  # where the right side's work goes on beside the left one's

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
        self.share = share  # of the observed pairs, and of all pairs, that this evaluation covers

    @property
    def P(self) -> Tensor:
        """The left embeddings, m × k."""
        return self.left.outputs

    @property
    def Q(self) -> Tensor:
        """The right embeddings, n × k."""
        return self.right.outputs

    @property
    def value(self) -> float:
        """L(θ), accumulated in float64."""
        return self.terms.total

    @cached_property
    def terms(self) -> Terms:
        """The value, term by term."""
        self.work.data_passes += self.share[1]
        observed, cross, gramian, penalty, square = self._sums
        s = self.setting
        all_pairs = s.omega * (0.5 * s.imputed_square - cross + 0.5 * gramian)
        return Terms(observed, all_pairs, 0.5 * s.l2 * square, penalty)

    @cached_property
    def sums(self) -> Tensor:
        """Σ_O ℓ⁺, ⟨P̂_c, Q̂_c⟩, ⟨P_c, Q_c⟩, the embedding penalty and ‖θ‖²: what the value is made of, on the device.

        Over several processes they are the sums over all of them.
        """
        fit = self.observed.value  # the longest pass first: what is short is launched while a GPU is busy with it
        Pc, Qc = self.gramians
        hPc, hQc = self.cross_gramians
        penalty = torch.zeros((), dtype=torch.float64, device=self.P.device)
        for weight, embeddings in zip(self.setting.penalties, (self.P, self.Q), strict=True):
            if weight is not None:
                penalty += 0.5 * (weight * square_norms(embeddings)).sum(dtype=torch.float64)
        square = self.parameters.inner(self.parameters)
        observed, penalty = self.setting.shards.group.sum_all(fit, penalty)
        return torch.stack([observed, (hPc * hQc).sum(), (Pc * Qc).sum(), penalty, square])

    @cached_property
    def _sums(self) -> list[float]:
        return [float(x) for x in self.sums.tolist()]

    @cached_property
    def observed(self) -> Observed:
        """ℓ⁺ on the observed pairs, with its derivatives. One pass over O."""
        s = self.setting
        self.work.pair_passes += self.share[0]
        return self.kernels.losses(s.pairs, self.P, self.right_rows, s.loss_terms)

    @cached_property
    def right_rows(self) -> Tensor:
        """The right embeddings of all processes, n × k: what this process's pairs are with."""
        return self.setting.shards.gather(self.Q).wait()

    @cached_property
    def gramians(self) -> tuple[Tensor, Tensor]:
        """P_c = PᵀAP and Q_c = QᵀBQ in float64 (eq:gramian)."""
        a, b = self.setting.weights
        with products_in(self.setting.precision):
            own = gram(self.P, self.P, a), gram(self.Q, self.Q, b)
        Pc, Qc = self.setting.shards.group.sum_all(*own)
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
        return self.pull_gradient() if self.slot is None else self.slot.gradient_now()

    def pull_gradient(self, out: Parameters | None = None) -> Parameters:
        """The gradient, written over ``out`` if given."""
        outputs = self.output_gradients(self.gramians, self.cross_gramians)
        return self.pull_back(*outputs, self.parameters, 0.0, out)

    def output_gradients(
        self, gramians: tuple[Tensor, Tensor], cross_gramians: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Pending]:
        """∂L/∂P and ∂L/∂Q, the brackets of eq:final_grad, with these (P_c, Q_c) and (P̂_c, Q̂_c)."""
        s = self.setting
        x = self.observed.slopes
        P, Q, right_rows = self.P, self.Q, self.right_rows

        def all_pairs(side: int, own: Tensor) -> Tensor:
            U = own @ (s.omega * gramians[1 - side]).to(own.dtype)  # ω P Q_c
            s.imputed.subtract_product(side, (s.omega * cross_gramians[1 - side]).to(own.dtype), U)  # − ω P̃ Q̂_c
            return weigh(s, side, U, own)

        with products_in(s.precision):
            U = all_pairs(0, P)
            self.kernels.left_sum(s.pairs, x, right_rows, U)  # + X Q
            self.lane.fork()
            with self.lane.within():
                V = self.add_right_sum(x, P, all_pairs(1, Q))  # + Xᵀ P
        self.work.pair_passes += self.share[0] * 2
        self.work.data_passes += self.share[1]
        return U, V

    def gauss_newton(self, damping: float = 0.0) -> GaussNewton:
        """G of eq:general_G as a linear operator; ``G @ d`` by eq:final_Gd. ``damping`` is added to λ in G alone."""
        from gramtower.objective.curvature import GaussNewton

        return GaussNewton(self, check.number("damping", damping, minimum=0.0))

    def preconditioner(self, kind: str = "kronecker", damping: float = 0.0) -> Kronecker:
        """M with M @ r ≈ (G + damping·I)⁻¹ r, made of Kronecker factors of the all-pairs curvature."""
        from gramtower.objective.kronecker import kronecker

        check.choice("kind", kind, ("kronecker",))
        M = kronecker(self, check.number("damping", damping, minimum=0.0))
        return M if self.slot is None else self.slot.attach(M)

    @property
    def rounding(self) -> float:
        """Differences of the value below this are noise: the last place of the sums it is made of."""
        s = self.setting
        sums = 0.5 * s.omega * (s.imputed_square + abs(self._sums[2]))
        sums += sum(abs(term) for term in asdict(self.terms).values())
        return float(torch.finfo(self.parameters.vector.dtype).eps * sums)

    def along(self, direction: Parameters) -> Callable[[float], Point]:
        """The problem along a line: ``point.along(d)(δ)`` is the point at θ + δ d."""
        direction = as_parameters("direction", direction, self.parameters)
        return lambda step: self._at(self.parameters.clone().axpy_(step, direction))

    def _table(self, side: str, other: str) -> str | None:
        """The name in Parameters of a tower's table that its vjp writes whole; none that the other tower adds to."""
        own = (self.left if side == "left" else self.right).fusable_table
        name = self.towers.own_names(side).get(own) if own is not None else None
        return None if name in self.towers.own_names(other).values() else name

    @property
    def gathers_halves(self) -> bool:
        """Whether Gauss-Newton products gather embeddings in bfloat16."""
        return self.setting.pair_precision == "bfloat16" and self.kernels.GATHERS_BFLOAT16

    def gathered(self, embeddings: Tensor) -> Tensor:
        """Embeddings as Gauss-Newton products gather them for each pair."""
        return embeddings.bfloat16() if self.gathers_halves else embeddings

    def add_right_sum(self, x: Tensor, P: Tensor, V: Tensor) -> Pending:
        """V += Xᵀ P, over the pairs of all processes; under way, in the lane it is asked for, until waited for."""
        s = self.setting
        pending = s.shards.add_right_sum(V, lambda out: self.kernels.right_sum(s.pairs, x, P, out))

        read = None if self.lane.stream is None else (x, P)

        def finish(_: object = read) -> Tensor:  # nobody may let go of what is read in a lane
            self.lane.join()
            return pending.wait()

        return Pending(finish)

    def pull_back(
        self, U: Tensor, V: Pending, regularised: Parameters, extra: float = 0.0, out: Parameters | None = None
    ) -> Parameters:
        """(⟨Jᵘ, U⟩, ⟨Jᵛ, V⟩) + (λ + extra) · regularised, written over ``out`` if given."""
        out, bases = self.begin_pull(regularised, extra, out)
        with products_in(self.setting.precision):
            lane = Lane() if self.towers.share_parameters else self.lane  # who adds to the same tensors takes turns
            lane.fork()
            self.left.vjp(U, self.towers.own("left", out), bases[0])
            with lane.within():
                self.right.vjp(V.wait(), self.towers.own("right", out), bases[1])
            lane.join()
        return out.end_sum_()

    def begin_pull(
        self, regularised: Parameters, extra: float, out: Parameters | None
    ) -> tuple[Parameters, list[tuple[Tensor, float] | None]]:
        """(λ + extra) · regularised in ``out``, but for tables that a vjp writes whole: those as its ``base``."""
        out = regularised.empty() if out is None else out
        scale = self.setting.l2 + extra
        names = [self._table(side, other) for side, other in (("left", "right"), ("right", "left"))]
        for part in regularised.layout.without({name for name in names if name is not None}):
            torch.mul(regularised.vector[part], scale, out=out.vector[part])
        out.begin_sum_()  # leaves tables alone: over several processes each row of them has one owner
        return out, [None if name is None else (regularised[name], scale) for name in names]

    def curvature_moments(self) -> Moments:
        """What the preconditioner needs of the observed pairs. Two passes over O with two columns."""
        s, c = self.setting, self.observed.curvatures
        norms = square_norms(self.P), square_norms(self.right_rows)
        left, right = (torch.stack([torch.ones_like(n), n], 1) for n in norms)
        sums = torch.zeros_like(left), self.Q.new_zeros(len(self.Q), 2)
        self.kernels.left_sum(s.pairs, c, right, sums[0])
        s.shards.add_right_sum(sums[1], lambda out: self.kernels.right_sum(s.pairs, c, left, out)).wait()
        self.work.pair_passes += 4 / self.Q.shape[1]
        grams = gram(self.P, self.P, sums[0][:, 0]), gram(self.Q, self.Q, sums[1][:, 0])
        P_square, Q_square = s.shards.group.sum_all(*grams)
        return Moments(sums, (P_square, Q_square))


def weigh(setting: Setting, side: int, U: Tensor, embeddings: Tensor) -> Tensor:
    """diag(a) U + diag(μ c) embeddings: how a side's weights and penalty enter gradient and G·d alike."""
    weight, penalty = setting.weights[side], setting.penalties[side]
    if weight is not None:
        U *= weight[:, None]
    if penalty is not None:
        U.addcmul_(embeddings, penalty[:, None])
    return U

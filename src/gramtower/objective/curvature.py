"""The Gauss-Newton matrix (eq:general_G) as an operator: G·d by eq:final_Gd.

    W = J_f dᵘ,  H = J_g dᵛ                                              (eq:Jvp)
    Z_ij = ∂²ℓ⁺ (w_i·q_j + p_i·h_j) on O
    G d = ⟨Jᵘ, ZQ + ωA(W Q_c + P H_c)⟩, ⟨Jᵛ, ZᵀP + ωB(H P_c + Q W_c)⟩ + (λ + damping) d

Cost: one jvp and one vjp of each tower, two passes over O, O((m+n)k²); no forward. Compared with the explicit matrix
of tests/dense.py in tests/test_engine.py; the counts are asserted in tests/test_cost.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramtower.kernels.precision import products_in
from gramtower.model.parameters import Parameters, as_parameters
from gramtower.objective.evaluation import Point, weigh
from gramtower.objective.gramians import gram


class GaussNewton:
    """G + damping·I at a point. Symmetric, and positive definite when λ + damping > 0."""

    def __init__(self, point: Point, damping: float) -> None:
        self.point, self.damping = point, damping
        if point.slot is not None:
            return
        with torch.no_grad():
            self._c = point.observed.curvatures
        omega, dtype = point.setting.omega, point.P.dtype
        self._Pc, self._Qc = ((omega * g).to(dtype) for g in point.gramians)
        # Results of a product's steps, the same memory in every product: fresh pages would cost as much as a layer.
        self._W, self._U = torch.empty_like(point.P), torch.empty_like(point.P)
        self._H, self._V = torch.empty_like(point.Q), torch.empty_like(point.Q)
        self._each_P, (self._each_Q, self._each_H) = point.gathered(point.P), _beside(point)
        self._every = None if point.setting.shards.single else torch.empty_like(point.right_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(D, D)."""
        return len(self.point.parameters), len(self.point.parameters)

    def __matmul__(self, d: Any) -> Any:
        """G d for Parameters, or for a flat torch or numpy vector; the result is of the same kind."""
        product = self.product(as_parameters("d", d, self.point.parameters))
        if isinstance(d, Parameters):
            return product
        return product.vector.cpu().numpy() if isinstance(d, np.ndarray) else product.vector

    @torch.no_grad()
    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """G d, written over ``out`` if given: a solver saves itself a fresh vector of θ's size in each step."""
        at, s = self.point, self.point.setting
        if at.slot is not None:
            return at.slot.product_now(d, self.damping, d.empty() if out is None else out)
        group, P, Q = s.shards.group, at.P, at.Q
        sent = group.total_bytes
        with products_in(s.precision):
            at.lane.fork()
            with at.lane.within():
                H = at.right.jvp(at.towers.own("right", d), self._H)  # d → J_g d
                every = s.shards.gather(H, self._every)  # travels during the left tower's jvp
                gram_H = gram(H, Q, s.weights[1])
            W = at.left.jvp(at.towers.own("left", d), self._W)  # d → J_f d
            gram_W = gram(W, P, s.weights[0])
            at.lane.join()
            Wc, Hc = ((s.omega * g).to(P.dtype) for g in group.sum_all(gram_W, gram_H))  # ω Wᵀ A P, ω Hᵀ B Q
            U = self._all_pairs(0, W, self._Qc, P, Hc, self._U)  # ωA (W Q_c + P H_c)
            gathered = every.wait() if self._each_H is None else self._each_H.copy_(every.wait())
            z = at.kernels.curvature_left(s.pairs, self._c, P, W, self._each_Q, gathered, U)  # + Z Q
            at.lane.fork()
            with at.lane.within():
                V = self._all_pairs(1, H, self._Pc, Q, Wc, self._V)  # ωB (H P_c + Q W_c)
                right = at.add_right_sum(z, self._each_P, V)  # + Zᵀ P, travels during the left tower's vjp
        at.work.pair_passes += 2
        at.work.data_passes += 1
        product = at.pull_back(U, right, d, self.damping, out)
        group.product_bytes = group.total_bytes - sent
        return product

    def _all_pairs(self, side: int, moved: Tensor, gramian: Tensor, own: Tensor, cross: Tensor, out: Tensor) -> Tensor:
        torch.mm(moved, gramian, out=out).addmm_(own, cross)
        return weigh(self.point.setting, side, out, moved)


def _beside(point: Point) -> tuple[Tensor, Tensor | None]:
    """Q as products gather it and, where that is in another precision, room for H: both rows of an entity together."""
    Q = point.right_rows
    if not point.gathers_halves:
        return Q, None
    both = torch.empty(len(Q), 2 * Q.shape[1], dtype=torch.bfloat16, device=Q.device)
    each_Q, each_H = both.tensor_split(2, dim=1)
    return each_Q.copy_(Q), each_H

"""The Gauss-Newton matrix (eq:general_G) as an operator: G·d by eq:final_Gd.

    W = J_f dᵘ,  H = J_g dᵛ                                              (eq:Jvp)
    Z_ij = ∂²ℓ⁺ (w_i·q_j + p_i·h_j) on O
    G d = ⟨Jᵘ, ZQ + ωA(W Q_c + P H_c)⟩, ⟨Jᵛ, ZᵀP + ωB(H P_c + Q W_c)⟩ + λ∇²Ψ(θ) d + damping d

H and H_c come first; then for each block of left rows W, U and Z, pulled back immediately; then W_c and V. Cost: one
jvp and one vjp of each tower, two passes over O and O((m+n)k²); no forward pass if left rows are resident.

The same product is replayed from CUDA graphs (cuda_graphs.py) if the point has them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.host import products_in
from gramtower.engine.objective.blocks import LeftBlock
from gramtower.engine.objective.formulas import gram, output_curvature
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.parameters import LinearOperator, Parameters


class Executor(Protocol):
    """Runs the work of a point in another way than kernel by kernel."""

    def product(self, d: Parameters, damping: float, out: Parameters) -> Parameters: ...  # (G + damping·I) d


class GaussNewton(LinearOperator):
    """G + damping·I at a point. Symmetric, and positive definite when λ + damping > 0 and Ψ is strongly convex."""

    def __init__(self, at: Evaluation, damping: float, executor: Executor | None = None) -> None:
        super().__init__(at.parameters)
        self.at, self.damping, self.executor = at, damping, executor

    def __add__(self, other: LinearOperator | float) -> LinearOperator:
        """A number is added to the damping, which costs nothing."""
        if isinstance(other, LinearOperator):
            return super().__add__(other)
        damping = self.damping + check.number("operator", other)
        return super().__add__(other) if damping < 0 else GaussNewton(self.at, damping, self.executor)

    __radd__ = __add__

    @torch.no_grad()
    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """G d, written over ``out`` if given: a solver then needs no new vector of θ's size in each step."""
        out = d.empty() if out is None else out
        return self.compute(d, out) if self.executor is None else self.executor.product(d, self.damping, out)

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """G d, kernel by kernel."""
        at, c, buffers = self.at, self.at.constants, self._buffers
        towers, group, Q = at.towers, c.shards.group, at.Q
        sent = group.total_bytes
        tangent = towers.local_tensors("left", d)
        Pc, Qc = buffers.gramians
        with products_in(c.precision):
            at.stream.fork()
            with at.stream.within():
                H = at.right.jvp(towers.local_tensors("right", d), buffers.H)  # d → J_g d
                H = c.centred(H, buffers.centred_H)
                gathered = c.shards.gather(H, buffers.gathered_H)  # overlaps the left tower's jvp
                gram_H = gram(H, Q, c.right.weight)
            Wc: list[Tensor] = []
            right: list[Tensor] = []  # ω Hᵀ B Q, and H as it is gathered for each pair

            def rows(block: LeftBlock, out: Tensor | None) -> tuple[Tensor, Tensor]:
                P = block.P
                W = block.tower.jvp(tangent, _first(buffers.W, len(P)))  # d → J_f d
                part = gram(W, P, block.side.weight)
                Wc[:] = [Wc[0] + part] if Wc else [part]
                if not right:
                    at.stream.join()
                    right[:] = at.scaled(group.sum_all(gram_H)[0]), buffers.for_pairs(gathered.wait())
                place = _first(buffers.U, len(P)) if out is None else out
                U = output_curvature(block.side, P, W, Qc, right[0], place)  # ωA (W Q_c + P H_c)
                return U, block.add_curvatures(W, buffers.each_Q, right[1], U)  # + Z Q

            def finish(V: Tensor) -> Tensor:
                d_gramian = at.scaled(group.sum_all(Wc[0])[0])  # ω Wᵀ A P
                return V.add_(output_curvature(c.right, Q, H, Pc, d_gramian, buffers.V))  # ωB (H P_c + Q W_c)

            product = at.pull_back(rows, finish, d, self.damping, out, at.gathers_bfloat16)
        at.work.data_passes += 1
        group.product_bytes = group.total_bytes - sent
        return product

    @cached_property
    def _buffers(self) -> _Buffers:
        return _Buffers(self.at)


def _first(buffer: Tensor | None, rows: int) -> Tensor | None:
    return None if buffer is None else buffer[:rows]


class _Buffers:
    """Results of a product's steps, the same memory in every product: fresh pages would cost as much as a layer."""

    def __init__(self, at: Evaluation) -> None:
        Q, c = at.Q, at.constants
        (Pc, Qc), _ = at.gramians
        self.gramians = at.scaled(Pc), at.scaled(Qc)
        computed = [tower.viewed_table is None for tower in (at.left, at.right)]  # otherwise jvps are views of d
        self.W = Q.new_empty(at.pairs.largest, Q.shape[1]) if computed[0] else None
        self.U = Q.new_empty(at.pairs.largest, Q.shape[1]) if at.left_table is None else None
        self.H, self.V = torch.empty_like(Q) if computed[1] else None, torch.empty_like(Q)
        self.centred_H = None if c.fitted_total is None else torch.empty_like(Q)
        rows = at.right_rows
        self.gathered_H = None if c.shards.single else torch.empty_like(rows)
        self.each_Q: Tensor = rows
        self._each_H: Tensor | None = None
        if at.gathers_bfloat16:  # q_j and h_j adjacent in memory
            both = torch.empty(len(rows), 2 * rows.shape[1], dtype=torch.bfloat16, device=rows.device)
            self.each_Q, self._each_H = both.tensor_split(2, dim=1)
            self.each_Q.copy_(rows)

    def for_pairs(self, H: Tensor) -> Tensor:
        """H of all right rows as it is gathered for each pair."""
        return H if self._each_H is None else self._each_H.copy_(H)

"""The objective at a point when the memory budget is small: one block of left rows after the other, nothing kept of it.

Everything that the formulas of evaluation.py and curvature.py need of a left row is made while its block is worked on
and forgotten afterwards: activations, embeddings, directions, the pairs' slopes. A block adds to the sums over left
rows (Gramians, the right side's pairs) and finishes its own rows of the result. The right side is as elsewhere; its
rows are what pairs gather. Differs from one pass over everything by rounding alone.

Cost beyond evaluation.py and curvature.py: a forward of both towers (two of the right one in a product) and a pass over
O in each gradient and product, unless kernels work out the loss in the pass that sums over rows.
Memory: θ's vectors, the right side, one block, and the pairs or two blocks of them (row_blocks.py). Compared with the
dense twin in tests/test_swept.py; timed by benchmarks/bench_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gramtower.kernels import Kernels
from gramtower.kernels.losses import Observed
from gramtower.kernels.precision import products_in
from gramtower.model.linearization import Linearization, Work
from gramtower.model.parameters import Parameters
from gramtower.model.towers import Towers
from gramtower.objective.evaluation import Moments, Point, Recorded, weigh
from gramtower.objective.gramians import gram, square_norms
from gramtower.objective.kronecker import Kronecker
from gramtower.objective.row_blocks import Make, RowBlocks
from gramtower.objective.setting import Setting


@dataclass
class _Block:
    """A block of left rows at θ."""

    start: int
    stop: int
    setting: Setting
    P: Tensor
    saved: list[Any]


@dataclass
class _Sums:
    """What the value needs of all left rows, in float64."""

    gramian: Tensor  # P_c
    cross: Tensor  # P̂_c
    observed: Tensor  # Σ_O ℓ⁺
    penalty: Tensor  # ½ Σ μ c_i ‖p_i‖²


class Swept(Point):
    """A point whose left rows are visited block by block; see the module's first lines.

    ``P`` is computed each time it is asked for.
    """

    def __init__(
        self,
        setting: Setting,
        blocks: RowBlocks,
        make: Make,
        towers: Towers,
        parameters: Parameters,
        left: Linearization,
        right: Linearization,
        kernels: Kernels,
        work: Work,
        at: Callable[[Parameters], Point],
    ) -> None:
        super().__init__(setting, towers, parameters, left, right, kernels, work, at)
        self._blocks, self._make = blocks, make

    @property
    def slot(self) -> Recorded:  # type: ignore[override]
        """This point itself; not kept as an attribute, which would keep it alive."""
        return self

    def _visit(self, by_columns: bool = True) -> Iterator[_Block]:
        """The blocks of left rows with their embeddings; counted as a forward."""
        for start, stop, setting in self._blocks.visit(self._make, by_columns):
            yield _Block(start, stop, setting, *self._run(start, stop))
            del setting  # before the next one is made
        self.work.add("left", "forwards")

    def _run(self, start: int, stop: int) -> tuple[Tensor, list[Any]]:
        with products_in(self.setting.precision):
            return self.left.forward_block(start, stop)

    def _observe(self, block: _Block) -> Observed:
        s = block.setting
        return self.kernels.losses(s.pairs, block.P, self.Q, s.loss_terms)

    @property
    def P(self) -> Tensor:
        """See Point; a forward of the left tower."""
        with products_in(self.setting.precision):
            return self.left.outputs

    @property
    def observed(self) -> Observed:
        """Not here."""
        raise RuntimeError("a point that goes block by block keeps nothing of single pairs")

    @cached_property
    @torch.no_grad()
    def _left_sums(self) -> _Sums:
        gramian = torch.zeros(2 * self.Q.shape[1:], dtype=torch.float64, device=self.Q.device)
        cross, values, penalties = gramian.new_zeros(1, gramian.shape[1]), [], [gramian.new_zeros(())]
        with products_in(self.setting.precision):
            for block in self._visit(by_columns=False):
                s, a = block.setting, block.setting.weights[0]
                gramian += gram(block.P, block.P, a)
                cross = cross + s.imputed.cross_gram(0, a, block.P)
                values.append(self._observe(block).value)
                if s.penalties[0] is not None:
                    penalties.append(0.5 * (s.penalties[0] * square_norms(block.P)).sum(dtype=torch.float64))
                del block, s, a  # before the next one is made
        sums = _Sums(gramian, cross, torch.stack(values).sum(), torch.stack(penalties).sum())
        self.work.pair_passes += 1
        return sums

    @cached_property
    def gramians(self) -> tuple[Tensor, Tensor]:
        """See Point."""
        with products_in(self.setting.precision):
            return self._left_sums.gramian, gram(self.Q, self.Q, self.setting.weights[1])

    @cached_property
    def cross_gramians(self) -> tuple[Tensor, Tensor]:
        """See Point."""
        s = self.setting
        return self._left_sums.cross, s.imputed.cross_gram(1, s.weights[1], self.Q)

    @cached_property
    def sums(self) -> Tensor:
        """See Point."""
        (Pc, Qc), (hPc, hQc), left = self.gramians, self.cross_gramians, self._left_sums
        penalty, weight = left.penalty, self.setting.penalties[1]
        if weight is not None:
            penalty = penalty + 0.5 * (weight * square_norms(self.Q)).sum(dtype=torch.float64)
        square = self.parameters.inner(self.parameters)
        return torch.stack([left.observed, (hPc * hQc).sum(), (Pc * Qc).sum(), penalty, square])

    @torch.no_grad()
    def gradient_now(self) -> Parameters:
        """∇L by eq:final_grad: a forward and a vjp of the left tower, two or three passes over O."""
        s, Q, omega = self.setting, self.Q, self.setting.omega
        (Pc, Qc), (hPc, hQc) = (
            ((omega * g).to(Q.dtype) for g in pair) for pair in (self.gramians, self.cross_gramians)
        )
        out, bases = self.begin_pull(self.parameters, 0.0, None)
        pairs_V, passes = torch.zeros_like(Q), 0  # Xᵀ P
        self.left.start_vjp()
        with products_in(s.precision):
            for block in self._visit():
                own, P = block.setting, block.P
                U = P @ Qc
                own.imputed.subtract_product(0, hQc, U)
                weigh(own, 0, U, P)
                x, passes = self.kernels.loss_left(own.pairs, P, Q, own.loss_terms, U)
                self.kernels.right_sum(own.pairs, x, P, pairs_V)
                self._pull_block(block, U, out, bases[0])
                del block, own, P, x, U  # before the next one is made
            self.left.flush_bias_sums(self.towers.own("left", out))
            V = Q @ Pc
            s.imputed.subtract_product(1, hPc, V)
            self.right.vjp(weigh(s, 1, V, Q).add_(pairs_V), self.towers.own("right", out), bases[1])
        self._count(passes + 1)
        return out

    @torch.no_grad()
    def product_now(self, d: Parameters, damping: float, out: Parameters) -> Parameters:
        """(G + damping·I) d by eq:final_Gd: a forward, jvp and vjp of the left tower, two or three passes over O."""
        s, Q, omega = self.setting, self.Q, self.setting.omega
        dtype = Q.dtype
        Pc, Qc = ((omega * g).to(dtype) for g in self.gramians)
        out, bases = self.begin_pull(d, damping, out)
        tangent, pairs_V, Wc = self.towers.own("left", d), torch.zeros_like(Q), torch.zeros_like(self.gramians[0])
        passes = 0
        self.left.start_vjp()
        with products_in(s.precision):
            H = self.right.jvp(self.towers.own("right", d))
            Hc = (omega * gram(H, Q, s.weights[1])).to(dtype)
            gathered = self.gathered(Q), self.gathered(H)
            for block in self._visit():
                own, P = block.setting, block.P
                W, U = torch.empty_like(P), torch.empty_like(P)
                self.left.jvp_block(block.saved, tangent, W)
                Wc += gram(W, P, own.weights[0])
                weigh(own, 0, torch.mm(W, Qc, out=U).addmm_(P, Hc), W)
                terms = own.loss_terms
                z, passes = self.kernels.loss_left(own.pairs, P, Q, terms, U, (W, gathered[1]), gathered[0])
                self.kernels.right_sum(own.pairs, z, self.gathered(P), pairs_V)
                self._pull_block(block, U, out, bases[0])
                del block, own, P, W, U, z, terms  # before the next one is made
            self.left.flush_bias_sums(self.towers.own("left", out))
            V = (H @ Pc).addmm_(Q, (omega * Wc).to(dtype))
            self.right.vjp(weigh(s, 1, V, H).add_(pairs_V), self.towers.own("right", out), bases[1])
        self.work.add("left", "jvps")
        self._count(passes + 1)
        return out

    def attach(self, M: Kronecker) -> Kronecker:
        """The same: nothing is recorded."""
        return M

    @torch.no_grad()
    def curvature_moments(self) -> Moments:
        """See Point. A forward of the left tower and a pass over O more."""
        Q = self.Q
        left, right = Q.new_zeros(self.left.features.rows, 2), Q.new_zeros(len(Q), 2)
        square = torch.zeros(Q.shape[1], Q.shape[1], dtype=torch.float64, device=Q.device)
        each_Q = _with_ones(Q)
        for block in self._visit():
            pairs, c = block.setting.pairs, self._observe(block).curvatures
            rows = left[block.start : block.stop]
            self.kernels.left_sum(pairs, c, each_Q, rows)
            self.kernels.right_sum(pairs, c, _with_ones(block.P), right)
            square += gram(block.P, block.P, rows[:, 0])
            del block, pairs, c, rows  # before the next one is made
        self.work.pair_passes += 1 + 4 / Q.shape[1]
        return Moments((left, right), (square, gram(Q, Q, right[:, 0])))

    def _pull_block(self, block: _Block, U: Tensor, out: Parameters, base: tuple[Tensor, float] | None) -> None:
        self.left.vjp_block(block.start, block.stop, block.saved, U, self.towers.own("left", out), base)

    def _count(self, pair_passes: float) -> None:
        self.work.add("left", "vjps")
        self.work.pair_passes += pair_passes
        self.work.data_passes += 1


def _with_ones(embeddings: Tensor) -> Tensor:
    """(1, ‖·‖²) of each row."""
    norms = square_norms(embeddings)
    return torch.stack([torch.ones_like(norms), norms], 1)

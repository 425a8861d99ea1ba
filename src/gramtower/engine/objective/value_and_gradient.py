"""The objective at parameters θ: value (eq:Ln_brief), gradient (eq:final_grad), and what G and M need of it.

    L  = Σ_O ℓ⁺(R_ij, ŷ_ij) + ω L⁻ + λΨ(θ) + embedding penalty
    ℓ⁺ = ℓ − ½ω a_i b_j (ỹ_ij − ŷ_ij)²                                  (eq:lij)
    L⁻ = ½⟨P̃_c, Q̃_c⟩ − ⟨P̂_c, Q̂_c⟩ + ½⟨P_c, Q_c⟩                       (eq:Ln_brief)

If each left entity's label is fitted, the scores are margins above their mean over the right entities: Q stands for
Q − 1 q̄ᵀ everywhere, with q̄ = Σ_j b_j q_j / Σ_j b_j (Constants.centred and its transpose; O(nk) each).

There is one evaluation: a loop over blocks of left rows (blocks.py), resident or streamed, and then the right side.
Cost (eq:com_fun_val): one forward of each tower, one pass over O, O((m+n)k²). The gradient after it: one vjp of each
tower and two passes over O; with streamed blocks, one more forward of the left tower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor

from gramtower._util.host import SideStream, products_in
from gramtower.distributed.group import Pending
from gramtower.engine.kernels import Kernels
from gramtower.engine.kernels.reference import Scaled
from gramtower.engine.objective.blocks import LeftBlock, PairBlocks
from gramtower.engine.objective.constants import Constants, PairConstants
from gramtower.engine.objective.formulas import SideSums, gram, output_gradient, pair_moments, side_sums, value_terms
from gramtower.engine.towers.linearization import Linearization, Work
from gramtower.engine.towers.parameters import Parameters, as_parameters
from gramtower.engine.towers.towers import Towers

Gramians = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]  # (P_c, Q_c), (P̂_c, Q̂_c)


@dataclass(frozen=True)
class Moments:
    """Sums over the observed pairs of ∂²ℓ⁺, for the preconditioner."""

    sums: tuple[Tensor, Tensor]  # for each left entity Σ_j ∂²ℓ⁺_ij (1, ‖q_j‖²), and likewise for each right one
    # Pᵀ diag(c) P with c_i = Σ_j ∂²ℓ⁺_ij, which the right side needs, and Qᵀ diag(c) Q with c_j = Σ_i ∂²ℓ⁺_ij, which
    # the left side needs, in float64; None where they were not asked for
    squares: tuple[Tensor | None, Tensor | None]


@dataclass(eq=False, repr=False)
class Evaluation:
    """The objective at parameters θ. Its public interface is Point.

    Over several processes P and Q are the rows held here; values, Gramians and dot products are those of all.
    """

    constants: Constants  # of the objective
    towers: Towers
    parameters: Parameters  # θ, a private copy
    pairs: PairBlocks  # the observed pairs, in blocks of left rows
    left: Linearization  # the left tower: at θ over all rows if they are resident, not yet run if they are streamed
    right: Linearization  # the right tower at θ
    kernels: Kernels
    work: Work  # counts what is done
    share: tuple[float, float] = (1, 1)  # of the observed pairs, and of all pairs, that this evaluation covers
    stream: SideStream = field(default_factory=SideStream)  # for the right side's work
    _taken: dict[int, SideSums] = field(default_factory=dict)  # sums of another evaluation, by side
    _block: LeftBlock | None = None  # of all rows, if they are resident

    @property
    def P(self) -> Tensor:
        """The left embeddings, m × k; a forward each time they are asked for where they are not kept."""
        with products_in(self.constants.precision):
            return self.left.outputs

    @property
    def gathers_bfloat16(self) -> bool:
        """Whether Gauss-Newton products gather embeddings in bfloat16."""
        return self.constants.pair_precision == "bfloat16" and self.kernels.GATHERS_BFLOAT16

    @property
    def Q(self) -> Tensor:
        """The right embeddings, n × k; less their mean where labels are fitted."""
        return self.right.outputs if self.constants.fitted_total is None else self._centred_Q

    @cached_property
    def _centred_Q(self) -> Tensor:
        return self.constants.centred(self.right.outputs)

    @cached_property
    def right_rows(self) -> Tensor:
        """The right embeddings of all processes, n × k: the columns of the local pairs."""
        return self.constants.shards.gather(self.Q).wait()

    @cached_property
    def right_outputs(self) -> Tensor:
        """The right tower's outputs of all processes: ``right_rows`` before their mean is subtracted."""
        c = self.constants
        return self.right_rows if c.fitted_total is None else c.shards.gather(self.right.outputs).wait()

    @cached_property
    def sums(self) -> Tensor:
        """What the value is made of (formulas.value_terms), over all processes, on the device."""
        (left, right), observed = self._side_sums
        theta, psi = self.parameters, self.constants.regularizer
        square = theta.inner(theta) if psi is None else 2 * torch.as_tensor(psi.value(theta)).to(observed)
        return value_terms(left, right, observed, square)

    @property
    def gramians(self) -> Gramians:
        """P_c = PᵀAP and Q_c = QᵀBQ, P̂_c = P̃ᵀAP and Q̂_c = Q̃ᵀBQ, in float64 (eq:gramian)."""
        (left, right), _ = self._side_sums
        return (left.gramian, right.gramian), (left.cross, right.cross)

    @cached_property
    @torch.no_grad()
    def _side_sums(self) -> tuple[tuple[SideSums, SideSums], Tensor]:
        """Both sides' sums and Σ_O ℓ⁺. One pass over O."""
        parts: list[SideSums] = []
        values: list[Tensor] = []

        def add(block: LeftBlock) -> None:
            values.append(block.observed.value)  # the longest pass first: the rest is launched while a GPU is busy
            if 0 not in self._taken:
                part = side_sums(block.side, block.P)
                parts[:] = [parts[0] + part] if parts else [part]

        self.visit(add, by_columns=False)
        if 1 not in self._taken:
            with products_in(self.constants.precision):
                parts.append(side_sums(self.constants.right, self.Q))
        observed = values[0] if len(values) == 1 else torch.stack(values).sum()
        local = [tensor for part in parts for tensor in part.tensors()]
        *totals, observed = self.constants.shards.group.sum_all(*local, observed)
        found = iter([SideSums(*totals[i : i + 3]) for i in range(0, len(totals), 3)])
        left, right = (self._taken[side] if side in self._taken else next(found) for side in (0, 1))
        return (left, right), observed

    def take_sums(self, side: int, other: Evaluation) -> None:
        """Take another evaluation's sums of a side, 0 for the left one, that is the same there."""
        self._taken[side] = other._side_sums[0][side]

    def scaled(self, gramian: Tensor) -> Tensor:
        """ω times a Gramian, in the embeddings' dtype."""
        return (self.constants.omega * gramian).to(self.Q.dtype)

    def side_gramians(self) -> Gramians:
        """``gramians`` without a pass over O."""
        parts: list[SideSums] = []
        self.visit(lambda block: parts.append(side_sums(block.side, block.P)), by_columns=False)
        with products_in(self.constants.precision):
            right = side_sums(self.constants.right, self.Q)
        left = sum(parts[1:], parts[0])
        P, hP, Q, hQ = self.constants.shards.group.sum_all(left.gramian, left.cross, right.gramian, right.cross)
        return (P, Q), (hP, hQ)

    def visit(self, action: Callable[[LeftBlock], None], by_columns: bool = True) -> None:
        """Call ``action`` with each block of left rows, in order; passes over O are counted.

        A streamed block is valid during the call. An action that only sums over rows does not need the order of the
        pairs ``by_columns``, which is not copied then.
        """
        passes = 0.0  # over its pairs that each block made
        with products_in(self.constants.precision):
            Q = self.right_rows
            for start, stop, pairs in self.pairs.visit(by_columns):
                block = self._block or self._make_block(start, stop, pairs, Q)
                del pairs
                before = block.passes
                action(block)
                passes = block.passes - before
                if self.pairs.resident:
                    self._block = block
                del block  # before the next one is made
        self.work.pair_passes += self.share[0] * passes

    def _make_block(self, start: int, stop: int, pairs: PairConstants, Q: Tensor) -> LeftBlock:
        side, tower, resident = self.constants.left, self.left, self.pairs.resident
        if not resident:
            side, tower = side.rows(start, stop), tower.over(start, stop)
        return LeftBlock(start, side, pairs.pairs, pairs.terms, tower, Q, self.kernels, resident)

    @torch.no_grad()
    def gradient(
        self, gramians: Gramians | None = None, scale: float = 1.0, out: Parameters | None = None
    ) -> Parameters:
        """∇L(θ) by eq:final_grad: one vjp of each tower, two passes over O.

        Args:
            gramians: (P_c, Q_c) and (P̂_c, Q̂_c) instead of those at θ.
            scale: of everything but λ∇Ψ(θ).
            out: written over if given.
        """
        c, Q = self.constants, self.Q
        (Pc, Qc), (hPc, hQc) = self.gramians if gramians is None else gramians

        def rows(block: LeftBlock, out: Tensor | None) -> tuple[Tensor, Tensor]:
            U = output_gradient(block.side, block.P, self.scaled(Qc), self.scaled(hQc), out)
            x = block.add_slopes(U)  # + X Q
            return U if scale == 1.0 else U.mul_(scale), x

        def finish(V: Tensor) -> Tensor:
            V += output_gradient(c.right, Q, self.scaled(Pc), self.scaled(hPc))
            return V if scale == 1.0 else V.mul_(scale)

        self.work.data_passes += self.share[1]
        return self.pull_back(rows, finish, None, 0.0, out)

    def pull_back(
        self,
        rows: Callable[[LeftBlock, Tensor | None], tuple[Tensor, Tensor]],
        finish: Callable[[Tensor], Tensor],
        direction: Parameters | None,
        extra: float = 0.0,
        out: Parameters | None = None,
        bfloat16: bool = False,
    ) -> Parameters:
        """(⟨Jᵘ, U⟩, ⟨Jᵛ, V⟩) + λ∇Ψ(θ), or + λ∇²Ψ(θ) d + extra · d: how gradient and G·d become parameters.

        Args:
            rows: gives a block's rows of U, made in the tensor that it is given if any, and a number x for each of
                its pairs.
            finish: is given Xᵀ P over all blocks and processes, and makes V of it.
            direction: d, or None for the gradient.
            extra: multiple of d that is added.
            out: written over if given.
            bfloat16: whether P is gathered in bfloat16 for Xᵀ P.
        """
        pending_sums: list[tuple[Pending, Tensor | None]] = []
        V = torch.zeros_like(self.Q)

        start = cache(lambda: self._start_pull(direction, extra, out))  # called while a GPU is busy with pairs
        table = self.left_table

        def visit(block: LeftBlock) -> None:
            # The gradient of a table whose rows are the outputs is U and a multiple of θ or d: made in place.
            U, x = rows(block, None if table is None else block.rows_of(start()[0][table]))
            P = block.gathered_P if bfloat16 else block.P
            total, initial = start()
            self.stream.fork()
            with self.stream.within():
                pending = self.constants.shards.add_right_sum(V, lambda total: block.right_sum(x, P, total))
            # What the side stream reads may not be freed before the join.
            pending_sums.append((pending, None if self.stream.stream is None else x))
            block.tower.vjp(U, self.towers.local_tensors("left", total), initial[0], flush=False)

        self.left.values.start_bias_sums()
        self.visit(visit)
        total, initial = start()
        self.left.values.flush_bias_sums(self.towers.local_tensors("left", total))

        def pull_right() -> None:
            for pending, _ in pending_sums:
                pending.wait()
            gradients = self.towers.local_tensors("right", total)
            self.right.vjp(self.constants.centre_adjoint_(finish(V)), gradients, initial[1])

        with products_in(self.constants.precision):
            if self.towers.share_parameters:  # both add to the same tensors: one after the other
                self.stream.join()
                pull_right()
            else:
                with self.stream.within():
                    pull_right()
                self.stream.join()
        return total.end_sum_()

    def _start_pull(
        self, direction: Parameters | None, extra: float, out: Parameters | None
    ) -> tuple[Parameters, list[Scaled | None]]:
        """The part of Ψ in ``out``, but for tables whose gradient is fused with it: those for their vjp."""
        regularised, scale = self._regularised(direction, extra)
        out = regularised.empty() if out is None else out
        names = [self._fusable(side, other) for side, other in (("left", "right"), ("right", "left"))]
        for part in regularised.layout.without({name for name in names if name is not None}):
            torch.mul(regularised.vector[part], scale, out=out.vector[part])
        out.begin_sum_()  # does not touch tables: over several processes each row of them has one owner
        return out, [None if name is None else (regularised[name], scale) for name in names]

    def _regularised(self, d: Parameters | None, extra: float) -> tuple[Parameters, float]:
        """λ∇Ψ(θ) without a direction, λ∇²Ψ(θ) d + extra · d with one, as a vector and a factor of it."""
        theta, l2, psi = self.parameters, self.constants.l2, self.constants.regularizer
        if psi is None:
            return theta if d is None else d, l2 + extra
        if d is None:
            return as_parameters("regularizer.gradient", psi.gradient(theta), theta) * l2, 1.0
        found = as_parameters("regularizer.product", psi.product(theta, d), theta) * l2
        return found.axpy_(extra, d), 1.0

    def table_ridge(self, side: int) -> float:
        """λ of the rows of a side's only tensor, a table."""
        (name,) = self.towers.local_names(("left", "right")[side]).values()
        psi = self.constants.regularizer
        return self.constants.l2 * (1.0 if psi is None else psi.ridge(name) or 0.0)

    @property
    def left_table(self) -> str | None:
        """The name in Parameters of the trained table whose rows are P, and nothing else; None if P is computed."""
        return None if self.left.viewed_table is None else self._fusable("left", "right")

    def _fusable(self, side: str, other: str) -> str | None:
        """The name in Parameters of the table that a tower's vjp writes in full; None if the other tower adds to it."""
        local = (self.left if side == "left" else self.right).fusable_table
        name = self.towers.local_names(side).get(local) if local is not None else None
        return None if name in self.towers.local_names(other).values() else name

    @torch.no_grad()
    def curvature_moments(self, sides: Collection[int] = (0, 1)) -> Moments:
        """What the preconditioner of some sides needs of the observed pairs. Two passes over O with two columns."""
        c, Q = self.constants, self.Q
        each_Q = pair_moments(self.right_rows)
        left, right = Q.new_zeros(c.shards.left.count, 2), Q.new_zeros(len(Q), 2)
        P_squares: list[Tensor] = []

        def add(block: LeftBlock) -> None:
            P, curvatures = block.P, block.observed.curvatures
            sums = left[block.start : block.start + len(P)]
            block.left_sum(curvatures, each_Q, sums)
            each_P = pair_moments(P)
            c.shards.add_right_sum(right, lambda total: block.right_sum(curvatures, each_P, total)).wait()
            if 1 in sides:
                part = gram(P, P, sums[:, 0])
                P_squares[:] = [P_squares[0].add_(part) if P_squares else part]

        self.visit(add)
        squares = P_squares + ([gram(Q, Q, right[:, 0])] if 0 in sides else [])
        found = iter(c.shards.group.sum_all(*squares))
        return Moments((left, right), (next(found) if 1 in sides else None, next(found) if 0 in sides else None))

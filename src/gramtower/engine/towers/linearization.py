"""One tower evaluated at θ for all its entities: outputs, jvp (eq:Jvp) and vjp (eq:ten-mat).

The forward pass runs once; each jvp or vjp then costs one pass of the tower and no forward pass, unless the memory
budget requires recomputation. Results do not depend on how the rows are divided into blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.host import BlockPlan
from gramtower.data.pairs import Block, Features
from gramtower.engine.kernels.reference import Scaled
from gramtower.engine.towers.steps import Change, Cotangent, Named, Op, Shifted, Values, materialise


@dataclass
class Work:
    """Counts of the work done so far. A pass over some of the rows or pairs counts as that fraction."""

    left_forwards: float = 0
    left_jvps: float = 0
    left_vjps: float = 0
    right_forwards: float = 0
    right_jvps: float = 0
    right_vjps: float = 0
    pair_passes: float = 0  # passes over the observed pairs
    data_passes: float = 0  # how often all m·n pairs were taken into account (once by each value, gradient and G·d)

    def add(self, side: str, what: str, share: float = 1) -> None:
        """Count a pass of a tower over a share of its rows."""
        name = f"{side}_{what}"
        setattr(self, name, getattr(self, name) + share)

    def since(self, earlier: Work) -> Work:
        """The difference to an earlier copy."""
        return Work(**{k: v - getattr(earlier, k) for k, v in vars(self).items()})

    def plus(self, other: Work) -> Work:
        """The sum with other work."""
        return Work(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def copy(self) -> Work:
        """A copy that later work does not change."""
        return Work(**vars(self))

    def reset(self, other: Work) -> None:
        """Set the counts to those of ``other``."""
        vars(self).update(vars(other))


def check_shape(side: str, y: Tensor, rows: int, columns: int | None) -> None:
    """Refuse a tower's output that is not rows × columns, any number of columns for None."""
    if y.dim() != 2 or y.shape[0] != rows or (columns is not None and y.shape[1] != columns):
        expected = f"({rows}, {'k' if columns is None else columns})"
        check.fail(f"{side} tower", f"an output of shape {tuple(y.shape)} for {rows} rows", expected)


def viewed_table(steps: list[Op], features: Features) -> str | None:
    """The table of a tower that only looks up its rows, in order: a single step without other parameters."""
    table = steps[0].fusable_table(features) if len(steps) == 1 else None
    return table if steps[0].parameters == (table,) else None


class Linearization:
    """A tower at θ over the rows of its features, or over a range of them.

    ``jvp`` and ``vjp`` process all rows; ``forward_block``, ``jvp_block`` and ``vjp_block`` process one block, for
    callers that loop over the blocks and count the work themselves.
    """

    def __init__(
        self,
        side: str,
        steps: list[Op],
        features: Features,
        values: Values,
        plan: BlockPlan,
        work: Work,
        columns: int,
        span: tuple[int, int] | None = None,
    ) -> None:
        self.side, self.steps, self.features, self.values, self.plan = side, steps, features, values, plan
        self.work, self.columns = work, columns
        self._first, stop = (0, features.rows) if span is None else span
        self.rows = stop - self._first
        parent = features if features.parent is None else features.parent
        self._share = 1 if self.rows == parent.rows else self.rows / max(1, parent.rows)
        self._kept: list[list[object]] = []
        self._outputs: Tensor | None = None
        if self.viewed_table is not None:
            self.plan = plan = replace(plan, rows=max(1, self.rows))
        if plan.outputs:
            self._outputs = self._forward_all()

    @property
    def linear(self) -> bool:
        """Whether the outputs are linear in the parameters: the tower is a single layer."""
        return len(self.steps) == 1 and self.steps[0].linear

    def over(self, start: int, stop: int) -> Linearization:
        """The same tower over a range of rows, evaluated and kept in one block."""
        plan = BlockPlan(max(1, stop - start), keep=True)
        span = self._first + start, self._first + stop
        return Linearization(self.side, self.steps, self.features, self.values, plan, self.work, self.columns, span)

    @property
    def outputs(self) -> Tensor:
        """The embeddings, rows × k; recomputed at each access if the plan does not keep them."""
        return self._forward_all() if self._outputs is None else self._outputs

    def _forward_all(self) -> Tensor:
        outputs: Tensor | None = None
        rows = self.rows
        for start, stop in self.blocks():
            y, saved = self.forward_block(start, stop, None if outputs is None else outputs[start:stop])
            if outputs is None:
                outputs = y if stop == rows else y.new_empty(rows, y.shape[1])
            if y.data_ptr() != outputs[start:stop].data_ptr():
                outputs[start:stop] = y
            if self.plan.keep:
                self._kept.append(saved)
        assert outputs is not None
        self.work.add(self.side, "forwards", self._share)
        return outputs.contiguous()

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Row ranges, in order; one empty range if this process has no rows."""
        for start in range(0, max(1, self.rows), self.plan.rows):
            yield start, min(self.rows, start + self.plan.rows)

    def saved_blocks(self) -> Iterator[tuple[int, int, list[object]]]:
        """Row ranges with the values that each step kept, or recomputed block by block if it did not."""
        for index, (start, stop) in enumerate(self.blocks()):
            yield start, stop, self._kept[index] if self.plan.keep else self.forward_block(start, stop)[1]
        if not self.plan.keep:
            self.work.add(self.side, "forwards", self._share)

    @property
    def viewed_table(self) -> str | None:
        """Name of the table whose rows are the outputs, in order; None if outputs are computed.

        With such a table the outputs are a view of θ, and their change is a view of the direction.
        """
        return viewed_table(self.steps, self.features)

    @torch.no_grad()
    def jvp(self, tangent: Named, out: Tensor | None = None) -> Tensor:
        """The change of all outputs along a direction of this tower's parameters: rows × k, in ``out`` if given.

        With a :attr:`viewed_table` that is trained it is a view of ``tangent``.
        """
        table = self.viewed_table
        if table is not None and table in tangent:
            self.work.add(self.side, "jvps", self._share)
            return self._own_rows(tangent[table])
        out = torch.empty_like(self.outputs) if out is None else out
        for start, stop, saved in self.saved_blocks():
            self.jvp_block(saved, tangent, out[start:stop])
            del saved  # before the next block's are computed
        self.work.add(self.side, "jvps", self._share)
        return out

    def jvp_block(self, saved: list[object], tangent: Named, rows: Tensor) -> None:
        """The jvp of one block, written to ``rows``."""
        dy: Change | None = None
        for step, kept in zip(self.steps, saved, strict=True):
            dy = step.jvp(kept, dy, self.values, tangent, rows if step is self.steps[-1] else None)
        if isinstance(dy, Shifted):
            dy.materialise(rows)
        elif dy is not None and dy.data_ptr() != rows.data_ptr():
            rows.copy_(dy)

    @property
    def fusable_table(self) -> str | None:
        """Name of the table whose gradient the kernels can write fused with ``initial`` (no separate add), or None."""
        if self.viewed_table is not None:
            return self.viewed_table
        if len(self.steps) > 1 and self.steps[1].fuses_initial(self.values):
            return self.steps[0].fusable_table(self.features)
        return None

    @torch.no_grad()
    def vjp(self, cotangent: Tensor, out: Named, initial: Scaled | None = None, flush: bool = True) -> None:
        """Add Σ_i (∂y_i/∂θ)ᵀ cotangent_i to ``out``, tensor by tensor.

        With ``initial`` the tensor :attr:`fusable_table` of ``out`` is overwritten with its gradient plus
        initial[0] · initial[1]; for a :attr:`viewed_table` the cotangent may be that tensor's rows themselves. Without
        ``flush`` the sums for biases stay deferred: the caller calls ``values.start_bias_sums`` first and
        ``values.flush_bias_sums`` last, once for several ranges of rows.
        """
        if initial is not None and self.viewed_table is not None:
            rows, scale = self._own_rows(out[self.viewed_table]), initial[1]
            torch.add(cotangent, self._own_rows(initial[0]), alpha=scale, out=rows)
            self.work.add(self.side, "vjps", self._share)
            return
        if flush:
            self.values.start_bias_sums()
        for start, stop, saved in self.saved_blocks():
            self.vjp_block(start, stop, saved, cotangent[start:stop], out, initial)
            del saved  # before the next block's are computed
        if flush:
            self.values.flush_bias_sums(out)
        self.work.add(self.side, "vjps", self._share)

    def vjp_block(
        self,
        start: int,
        stop: int,
        saved: list[object],
        cotangent: Tensor,
        out: Named,
        initial: Scaled | None = None,
    ) -> None:
        """Add the vjp of one block to ``out``, as ``vjp`` does, between ``start_bias_sums`` and ``flush_bias_sums``."""
        steps, values, first = self.steps, self.values, self._first
        g: Cotangent | None = cotangent.clone() if steps[-1].overwrites_cotangent else cotangent
        for index in range(len(steps) - 1, -1, -1):
            assert g is not None  # only the first step returns None
            if index == 1 and initial is not None:
                rows = steps[0].table_rows(saved[0], out)
                own = initial[0][first + start : first + stop], initial[1]
                lines = steps[1].vjp_fused(saved[1], g, values, rows, own)
                steps[0].vjp_bias(lines, values, out)
                return
            g = steps[index].vjp(saved[index], g, values, out, index > 0)

    def _own_rows(self, table: Tensor) -> Tensor:
        """This tower's range of a table's rows."""
        return table[self._first : self._first + self.rows]

    def precompute(self) -> None:
        """Compute the values that the first jvp or vjp would compute from the saved activations."""
        for saved in self._kept:
            for step, kept in zip(self.steps, saved, strict=True):
                step.precompute(kept)

    @torch.no_grad()
    def forward_block(self, start: int, stop: int, out: Tensor | None = None) -> tuple[Tensor, list[object]]:
        """Outputs of one block, in ``out`` if the last layer can write there, and the values that the steps keep."""
        y, saved = self._forward(self.inputs(start, stop), out)
        check_shape(self.side, y, stop - start, self.columns)
        return y, saved

    @torch.no_grad()
    def forward_some(self, rows: slice) -> list[object]:
        """The values that the steps keep of some rows; counted as that fraction of a forward pass."""
        values, chosen = self.values, torch.arange(self.features.rows)[rows]
        some = self.features.take(chosen, values.dtype, values.device)
        self.work.add(self.side, "forwards", self._share * len(chosen) / self.features.rows)
        return self._forward(some.block(0, len(chosen), values.dtype, values.device))[1]

    def inputs(self, start: int, stop: int) -> Block:
        """The features of one block."""
        first = self._first
        return self.features.block(first + start, first + stop, self.values.dtype, self.values.device)

    def _forward(self, block: Block, out: Tensor | None = None) -> tuple[Tensor, list[object]]:
        x: Any = block
        saved: list[object] = []
        for step in self.steps:
            x, kept = step.forward(x, self.values, out if step is self.steps[-1] else None)
            saved.append(kept)
        return materialise(x), saved

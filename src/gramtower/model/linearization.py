"""One tower evaluated at θ for all its entities: outputs, jvp (eq:Jvp) and vjp (eq:ten-mat).

Forward once; each jvp or vjp after it costs one pass of the tower and no forward, unless the memory budget asks
for recomputation. Rows never depend on how they are cut into blocks. Checked by tests/test_engine.py; counted in
:class:`Work` and asserted in tests/test_cost.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gramtower.data.features import Features
from gramtower.model.deferred import Shifted, settled
from gramtower.model.memory import BlockPlan
from gramtower.model.opaque import Opaque
from gramtower.model.ops import Affine, Elementwise, InputAffine, Named, Op, Values
from gramtower.model.slopes import FromInput


@dataclass
class Work:
    """What has been done so far. A pass over some of the rows or pairs counts as that fraction.

    Attributes:
        data_passes: how often all m·n pairs were taken into account (one value, gradient or G·d each: once).
        pair_passes: passes over the observed pairs.
    """

    left_forwards: float = 0
    left_jvps: float = 0
    left_vjps: float = 0
    right_forwards: float = 0
    right_jvps: float = 0
    right_vjps: float = 0
    pair_passes: float = 0
    data_passes: float = 0

    def add(self, side: str, what: str, share: float = 1) -> None:
        """Count a pass of a tower over a share of its rows."""
        name = f"{side}_{what}"
        setattr(self, name, getattr(self, name) + share)

    def since(self, earlier: Work) -> Work:
        """The difference to an earlier copy."""
        return Work(**{k: v - getattr(earlier, k) for k, v in asdict(self).items()})

    def plus(self, other: Work) -> Work:
        """The sum with other work."""
        return Work(**{k: v + getattr(other, k) for k, v in asdict(self).items()})

    def copy(self) -> Work:
        """A copy that later work does not change."""
        return Work(**asdict(self))


class Linearization:
    """A tower at θ over all rows of its features.

    ``jvp`` and ``vjp`` are over all rows; ``run``, ``push`` and ``pull`` are the same for one block, for callers that
    go through the rows block by block themselves and count what they did.
    """

    def __init__(
        self,
        side: str,
        steps: list[Op],
        features: Features,
        values: Values,
        plan: BlockPlan,
        work: Work,
        check_output: Callable[[Tensor, int], None],
    ) -> None:
        self.side, self.steps, self.features, self.values, self.plan = side, steps, features, values, plan
        self.work = work
        self._share = 1 if features.whole is None else features.rows / max(1, features.whole.rows)
        self._check_output = check_output
        self._kept: list[list[Any]] = []
        self._outputs: Tensor | None = None
        if plan.outputs:
            self._outputs = self._run_all()

    @property
    def outputs(self) -> Tensor:
        """The embeddings, rows × k; where the plan does not keep them, a forward each time they are asked for."""
        return self._run_all() if self._outputs is None else self._outputs

    def _run_all(self) -> Tensor:
        outputs: Tensor | None = None
        rows = self.features.rows
        for start, stop in self.blocks():
            y, saved = self.run(start, stop, None if outputs is None else outputs[start:stop])
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
        for start in range(0, max(1, self.features.rows), self.plan.rows):
            yield start, min(self.features.rows, start + self.plan.rows)

    def saved_blocks(self) -> Iterator[tuple[int, int, list[Any]]]:
        """Row ranges with what each step kept, recomputed block by block if it was not kept."""
        for index, (start, stop) in enumerate(self.blocks()):
            yield start, stop, self._kept[index] if self.plan.keep else self.run(start, stop)[1]
        if not self.plan.keep:
            self.work.add(self.side, "forwards", self._share)

    @torch.no_grad()
    def jvp(self, tangent: Named, out: Tensor | None = None) -> Tensor:
        """The change of every output along a direction of this tower's parameters: rows × k, in ``out`` if given."""
        out = torch.empty_like(self.outputs) if out is None else out
        for start, stop, saved in self.saved_blocks():
            self.push(saved, tangent, out[start:stop])
            del saved  # before the next block's are made
        self.work.add(self.side, "jvps", self._share)
        return out

    def push(self, saved: list[Any], tangent: Named, rows: Tensor) -> None:
        """The jvp of one block, written to ``rows``."""
        dy: Any = None
        for step, kept in zip(self.steps, saved, strict=True):
            dy = step.jvp(kept, dy, self.values, tangent, rows if step is self.steps[-1] else None)
        if isinstance(dy, Shifted):
            dy.own(rows)
        elif dy.data_ptr() != rows.data_ptr():
            rows.copy_(dy)

    @property
    def whole_table(self) -> str | None:
        """Name of the table whose part of a vjp can be written in one go with what it is added to, if there is one.

        So it is for float32 ids in order, followed by an activation that kernels differentiate from its output.
        """
        first, second = [*self.steps, None, None][:2]
        if (
            isinstance(first, InputAffine)
            and isinstance(second, Elementwise)
            and second.keeps_output(self.values.kernels)
            and first.inputs_first
            and first.width == self.features.rows
            and self.features.kind == "ids"
            and self.features.whole is None
            and self.values.dtype == torch.float32
        ):
            return first.weight
        return None

    @torch.no_grad()
    def vjp(self, cotangent: Tensor, out: Named, base: tuple[Tensor, float] | None = None) -> None:
        """Add Σ_i (∂y_i/∂θ)ᵀ cotangent_i to ``out``, tensor by tensor.

        With ``base`` the tensor :attr:`whole_table` of ``out`` is written, not added to: base[0] · base[1] + its part.
        """
        self.begin()
        for start, stop, saved in self.saved_blocks():
            self.pull(start, stop, saved, cotangent[start:stop], out, base)
            del saved  # before the next block's are made
        self.settle(out)
        self.work.add(self.side, "vjps", self._share)

    def pull(
        self, start: int, stop: int, saved: list[Any], cotangent: Tensor, out: Named, base: tuple[Tensor, float] | None
    ) -> None:
        """The vjp of one block, added to ``out``; see ``vjp`` for ``base``. After ``begin``, and before ``settle``."""
        g: Any = cotangent
        if not isinstance(self.steps[-1], (InputAffine, Affine, Opaque)):
            g = g.clone()  # the step may work in place, the cotangent is the caller's
        for index in range(len(self.steps) - 1, -1, -1):
            step, first = self.steps[index], self.steps[0]
            if index == 1 and base is not None:
                assert isinstance(step, Elementwise)
                assert isinstance(first, InputAffine)
                rows = first.rows_of(saved[0], out)
                g = step.vjp_into(saved[1], g, self.values, rows, base[0][start:stop], base[1])
            else:
                g = step.vjp(saved[index], g, self.values, out, index > 0)

    def work_out_slopes(self) -> None:
        """φ′ of all activations whose slope does not follow from their output, now and not when first asked for."""
        for saved in self._kept:
            for step, kept in zip(self.steps, saved, strict=True):
                if isinstance(step, Elementwise) and isinstance(kept, FromInput):
                    kept.slopes()

    def begin(self) -> None:
        """Forget what a vjp that did not come to its end has put off."""
        self.values.owed.clear()

    def settle(self, out: Named) -> None:
        """Add the sums over all blocks that ``pull`` put off."""
        self.values.settle(out)

    @torch.no_grad()
    def run(self, start: int, stop: int, out: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Outputs of one block, in ``out`` if the last layer can write there, and what the steps keep."""
        y, saved = self._forward(self.inputs(start, stop), out)
        self._check_output(y, stop - start)
        return y, saved

    @torch.no_grad()
    def run_some(self, rows: slice) -> list[Any]:
        """What the steps keep of some rows; counted as the share of a forward that it is."""
        values, chosen = self.values, torch.arange(self.features.rows)[rows]
        some = self.features.take(chosen, values.dtype, values.device)
        self.work.add(self.side, "forwards", self._share * len(chosen) / self.features.rows)
        return self._forward(some.block(0, len(chosen), values.dtype, values.device))[1]

    def inputs(self, start: int, stop: int) -> Any:
        """The features of one block."""
        return self.features.block(start, stop, self.values.dtype, self.values.device)

    def _forward(self, x: Any, out: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        saved = []
        for step in self.steps:
            if step is self.steps[-1] and isinstance(step, Affine):
                x, kept = step.forward(x, self.values, out)
            else:
                x, kept = step.forward(x, self.values)
            saved.append(kept)
        return settled(x), saved

"""The steps a tower is made of, each with its value, its jvp and its vjp.

    forward   x ↦ y                       keeps what the derivatives need
    jvp       (dx, dθ) ↦ dy               eq:Jvp, forward mode
    vjp       g ↦ gᵀ∂y/∂x, gᵀ∂y/∂θ       the tensor-matrix product of eq:ten-mat, reverse mode

Neither jvp nor vjp runs ``forward`` again. Both may overwrite the tensor handed to them (dx, g) and return one that
may be overwritten, or something of deferred.py. Here are the steps that are written out; opaque.py wraps any other
module by autodiff.

Agreement of the written-out steps with Opaque is tests/test_towers.py; of both with the dense twin,
tests/test_engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gramtower.data.features import Block, IdBlock
from gramtower.kernels import Kernels
from gramtower.kernels.activations import Activation
from gramtower.model.deferred import Shifted, Summed, pulled, settled
from gramtower.model.slopes import FromInput, FromOutput

Named = dict[str, Tensor]
_BLOCKS, _LINES = 64, 1 << 13  # blocks and lines of them that are kept before they are added up: a few megabytes
Scratch = dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class Values:
    """The tensors of one tower at θ (trainable and frozen, by the module's own names), its kernels, its scratch."""

    tensors: Named
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    transposed: Named = field(default_factory=dict)
    scratch: Scratch = field(default_factory=dict)
    owed: dict[str, list[Tensor]] = field(default_factory=dict)  # lines whose sums belong to a bias, block after block

    def transpose(self, name: str) -> Tensor:
        """A matrix transposed, made once."""
        if name not in self.transposed:
            self.transposed[name] = self.tensors[name].t().contiguous()
        return self.transposed[name]

    def room(self, owner: Op, like: Tensor, columns: int) -> Tensor:
        """A rows × columns buffer for a step's result; the same memory in every block and every product.

        A step's result is read by its neighbour only, so that two buffers of a width are enough.
        """
        key, rows = (owner.parity, columns), like.shape[0]
        if key not in self.scratch or self.scratch[key].shape[0] < rows:
            self.scratch[key] = like.new_empty(rows, columns)
        return self.scratch[key][:rows]

    def owe(self, bias: str | None, g: Any, out: Named) -> None:
        """Remember the column sums of g for a bias in ``out``; ``settle`` adds them when all blocks are done."""
        if bias is None or bias not in out:
            return
        lines = g.lines if isinstance(g, Summed) else self.kernels.column_lines(g)
        owed = self.owed.setdefault(bias, [])
        owed.append(lines)
        if len(owed) > _BLOCKS or sum(map(len, owed)) > _LINES:
            owed[:] = [self.kernels.column_sums(torch.cat(owed))[None]]

    def settle(self, out: Named) -> None:
        """Add to ``out`` what is owed: once for all blocks, as each launch costs a GPU as much as a block's lines."""
        for bias, lines in self.owed.items():
            out[bias] += self.kernels.column_sums(lines[0] if len(lines) == 1 else torch.cat(lines))
        self.owed.clear()


class Op:
    """One step of a tower; see the module's first lines. ``Saved`` is whatever forward keeps."""

    parity = 0  # differs between steps that hand results to each other; set by stack.steps

    def forward(self, x: Any, values: Values) -> tuple[Tensor, Any]:
        """y and what to keep."""
        raise NotImplementedError

    def jvp(self, saved: Any, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """dy along (dx, tangent), a tensor or Shifted, in ``out`` where given; frozen tensors have no tangent."""
        raise NotImplementedError

    def vjp(self, saved: Any, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """Add gᵀ∂y/∂θ to ``out``, at once or by ``Values.owe``; return gᵀ∂y/∂x if asked, a tensor or Summed."""
        raise NotImplementedError


@dataclass
class InputAffine(Op):
    """First step: x ↦ xᵀW + b on ids, sparse rows or dense rows.

    Attributes:
        weight: the tensor's name.
        bias: the bias' name or None.
        inputs_first: whether W is stored inputs × outputs (Embedding, EmbeddingBag, InputLinear) or outputs ×
            inputs (Linear).
        width: features expected; for ids, the largest number of entities.
    """

    weight: str
    bias: str | None
    inputs_first: bool
    width: int

    def forward(self, x: Block, values: Values) -> tuple[Any, Block]:
        """XW + b; for ids without a bias, a view of W."""
        weight = values.tensors[self.weight]
        if isinstance(x, Tensor):
            x = x.to(weight.dtype)
        y = self._product(x, weight, values, True)
        return (y if self.bias is None else Shifted(y, values.tensors[self.bias])), x

    def jvp(self, saved: Block, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """X dW + db."""
        if self.weight in tangent:
            dy = self._product(saved, tangent[self.weight], values, False)
        else:
            weight = values.tensors[self.weight]
            rows = len(saved) if isinstance(saved, IdBlock) else saved.shape[0]
            dy = weight.new_zeros(rows, weight.shape[1 if self.inputs_first else 0])
        return Shifted(dy, None if self.bias is None else tangent.get(self.bias))

    def rows_of(self, saved: IdBlock, tensors: Named) -> Tensor:
        """The rows of a table that a block looks up."""
        return tensors[self.weight][saved.start : saved.stop]

    def vjp(self, saved: Block, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """XᵀG and the column sums of G."""
        values.owe(self.bias, g, out)
        g = pulled(g)
        if self.weight in out and g is not None:
            total = out[self.weight]
            if isinstance(saved, IdBlock):
                if saved.rows is None:
                    total[saved.start : saved.stop] += g
                else:
                    total.index_add_(0, saved.rows, g)
            elif isinstance(saved, Tensor):
                if self.inputs_first:
                    total.addmm_(saved.t(), g)
                else:
                    total.addmm_(g.t(), saved)
            else:
                target = total if self.inputs_first else g.new_zeros(self.width, g.shape[1])
                values.kernels.right_sum(saved.pattern, saved.values, g.contiguous(), target)
                if not self.inputs_first:
                    total += target.t()
        return None

    def _product(self, x: Block, matrix: Tensor, values: Values, is_weight: bool) -> Tensor:
        if isinstance(x, IdBlock):
            return matrix[x.start : x.stop] if x.rows is None else matrix[x.rows]
        if isinstance(x, Tensor):
            return x @ (matrix if self.inputs_first else matrix.t())
        if not self.inputs_first:
            matrix = values.transpose(self.weight) if is_weight else matrix.t().contiguous()
        y = matrix.new_zeros(x.shape[0], matrix.shape[1])
        values.kernels.left_sum(x.pattern, x.values, matrix, y)
        return y


@dataclass
class Affine(Op):
    """nn.Linear after the first step: x ↦ xWᵀ + b."""

    weight: str
    bias: str | None

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """XWᵀ + b, in ``out`` where given."""
        x, weight = settled(x), values.tensors[self.weight]
        if self.bias is None:
            return torch.mm(x, weight.t(), out=out), x
        return torch.addmm(values.tensors[self.bias], x, weight.t(), out=out), x

    def jvp(self, saved: Tensor, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """dX Wᵀ + X dWᵀ + db."""
        weight = values.tensors[self.weight]
        out = values.room(self, saved, weight.shape[0]) if out is None else out
        bias = None if self.bias is None else tangent.get(self.bias)
        dx = settled(dx)
        dy = torch.mm(dx, weight.t(), out=out) if bias is None else torch.addmm(bias, dx, weight.t(), out=out)
        return dy.addmm_(saved, tangent[self.weight].t()) if self.weight in tangent else dy

    def vjp(self, saved: Tensor, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """GᵀX, column sums of G, and G W."""
        values.owe(self.bias, g, out)
        g = pulled(g)
        if self.weight in out:
            out[self.weight].addmm_(g.t(), saved)
        if not need_input:
            return None
        weight = values.tensors[self.weight]
        return torch.mm(g, weight, out=values.room(self, g, weight.shape[1]))


@dataclass
class Elementwise(Op):
    """An activation φ applied to every number by itself."""

    activation: Activation

    def forward(self, x: Any, values: Values) -> tuple[Tensor, FromInput | FromOutput]:
        """φ(x)."""
        if not self.keeps_output(values.kernels):
            x = settled(x)
            return self.activation.function(x), FromInput(x, self.activation)
        if isinstance(x, Shifted) and x.bias is not None:
            y = values.kernels.activate(x.tensor, x.bias, self.activation)
        else:
            y = self.activation.function(settled(x))
        return y, FromOutput(y, self.activation)

    def keeps_output(self, kernels: Kernels) -> bool:
        """Whether φ′ is computed from the output wherever it is needed."""
        return kernels.SLOPES_FROM_OUTPUTS and self.activation.slope_from_output

    def jvp(self, saved: Any, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """φ′ ∘ dx."""
        given = dx if isinstance(dx, Shifted) else Shifted(dx, None)
        if isinstance(saved, FromOutput):
            room = values.room(self, given.tensor, saved.y.shape[1]) if given is dx else given.tensor
            values.kernels.slope_product(given.tensor, given.bias, saved.y, self.activation, room)
            return room
        own = given.own(values.room(self, given.tensor, given.tensor.shape[1])) if given is dx else given.tensor
        return own.mul_(saved.slopes())

    def vjp(self, saved: Any, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """φ′ ∘ g."""
        g = pulled(g)
        if isinstance(saved, FromOutput):
            lines = values.kernels.slope_product(g, None, saved.y, self.activation, g, sums=True)
            assert lines is not None
            return Summed(g, lines)
        return g.mul_(saved.slopes())

    def vjp_into(self, saved: FromOutput, g: Any, values: Values, rows: Tensor, base: Tensor, scale: float) -> Any:
        """φ′ ∘ g + scale·base, written to ``rows``."""
        lines = values.kernels.slope_product(pulled(g), None, saved.y, self.activation, rows, base, scale, sums=True)
        assert lines is not None
        return Summed(None, lines)

"""The steps a tower is made of, each with its value, its jvp and its vjp.

    forward   x ↦ y                       keeps what the derivatives need
    jvp       (dx, dθ) ↦ dy               eq:Jvp, forward mode
    vjp       g ↦ gᵀ∂y/∂x, gᵀ∂y/∂θ       the tensor-matrix product of eq:ten-mat, reverse mode

Neither jvp nor vjp runs ``forward`` again. Both may overwrite the tensor handed to them (dx, g) and return one that
may be overwritten. :class:`InputAffine`, :class:`Affine` and :class:`Elementwise` are
written out; :class:`Opaque` wraps any other module by autodiff: its vjp is back-propagation, its jvp the
derivative of that back-propagation with respect to the vector it is fed, which is linear.

Agreement of the written-out steps with Opaque is tests/test_towers.py; of both with the dense twin,
tests/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gramtower.data.features import Block, IdBlock, SparseBlock
from gramtower.kernels import Kernels
from gramtower.model.sparse import SparseRows

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Values:
    """The tensors of one tower at θ (trainable and frozen, by the module's own names), its kernels, its scratch."""

    tensors: Named
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    transposed: Named = field(default_factory=dict)  # made once, for nn.Linear over sparse rows
    scratch: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def room(self, owner: Op, like: Tensor, columns: int) -> Tensor:
        """A rows × columns buffer for a step's result; the same memory in every block and every product."""
        key, rows = (id(owner), columns), like.shape[0]
        if key not in self.scratch or self.scratch[key].shape[0] < rows:
            self.scratch[key] = like.new_empty(rows, columns)
        return self.scratch[key][:rows]


class Op:
    """One step of a tower; see the module's first lines. ``Saved`` is whatever forward keeps."""

    def forward(self, x: Any, values: Values) -> tuple[Tensor, Any]:
        """Y and what to keep."""
        raise NotImplementedError

    def jvp(self, saved: Any, dx: Tensor | None, values: Values, tangent: Named) -> Tensor:
        """Dy along (dx, tangent); frozen tensors have no tangent."""
        raise NotImplementedError

    def vjp(self, saved: Any, g: Tensor, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """Add gᵀ∂y/∂θ to ``out``; return gᵀ∂y/∂x if asked."""
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

    def forward(self, x: Block, values: Values) -> tuple[Tensor, Block]:
        """XW + b; for ids without a bias, a view of W."""
        weight = values.tensors[self.weight]
        if isinstance(x, Tensor):
            x = x.to(weight.dtype)
        y = self._product(x, weight, values, True)
        return (y if self.bias is None else y + values.tensors[self.bias]), x

    def jvp(self, saved: Block, dx: Tensor | None, values: Values, tangent: Named) -> Tensor:
        """X dW + db."""
        if self.weight in tangent:
            dy = self._product(saved, tangent[self.weight], values, False)
        else:
            weight = values.tensors[self.weight]
            rows = len(saved) if isinstance(saved, IdBlock) else saved.shape[0]
            dy = weight.new_zeros(rows, weight.shape[1 if self.inputs_first else 0])
        if self.bias is not None and self.bias in tangent:
            return torch.add(dy, tangent[self.bias], out=values.room(self, dy, dy.shape[1]))
        return dy.clone() if isinstance(saved, IdBlock) else dy  # a row of the direction itself is not ours to change

    def vjp(self, saved: Block, g: Tensor, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """XᵀG and the column sums of G."""
        if self.bias is not None and self.bias in out:
            out[self.bias] += g.sum(0)
        if self.weight in out:
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
            if is_weight:
                matrix = values.transposed.setdefault(self.weight, matrix.t().contiguous())
            else:
                matrix = matrix.t().contiguous()
        y = matrix.new_zeros(x.shape[0], matrix.shape[1])
        values.kernels.left_sum(x.pattern, x.values, matrix, y)
        return y


@dataclass
class Affine(Op):
    """nn.Linear after the first step: x ↦ xWᵀ + b."""

    weight: str
    bias: str | None

    def forward(self, x: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """XWᵀ + b."""
        bias = values.tensors[self.bias] if self.bias is not None else None
        return nn.functional.linear(x, values.tensors[self.weight], bias), x

    def jvp(self, saved: Tensor, dx: Tensor | None, values: Values, tangent: Named) -> Tensor:
        """DX Wᵀ + X dWᵀ + db."""
        assert dx is not None
        weight = values.tensors[self.weight]
        dy = torch.mm(dx, weight.t(), out=values.room(self, dx, weight.shape[0]))
        if self.weight in tangent:
            dy.addmm_(saved, tangent[self.weight].t())
        if self.bias is not None and self.bias in tangent:
            dy += tangent[self.bias]
        return dy

    def vjp(self, saved: Tensor, g: Tensor, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """GᵀX, column sums of G, and G W."""
        if self.weight in out:
            out[self.weight].addmm_(g.t(), saved)
        if self.bias is not None and self.bias in out:
            out[self.bias] += g.sum(0)
        weight = values.tensors[self.weight]
        return torch.mm(g, weight, out=values.room(self, g, weight.shape[1])) if need_input else None


class _Slope:
    """A pre-activation z that turns into φ′(z) when first asked for."""

    def __init__(self, z: Tensor) -> None:
        self.z: Tensor | None = z
        self.slope: Tensor | None = None

    def of(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.slope is None:
            assert self.z is not None
            z = self.z.detach().requires_grad_()
            with torch.enable_grad():
                (self.slope,) = torch.autograd.grad(function(z).sum(), z)
            self.z = None
        return self.slope


@dataclass
class Elementwise(Op):
    """An activation φ applied to every number by itself."""

    function: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, values: Values) -> tuple[Tensor, _Slope]:
        """φ(x)."""
        return self.function(x), _Slope(x)

    def jvp(self, saved: _Slope, dx: Tensor | None, values: Values, tangent: Named) -> Tensor:
        """φ′ ∘ dx."""
        assert dx is not None
        return dx.mul_(saved.of(self.function))

    def vjp(self, saved: _Slope, g: Tensor, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """φ′ ∘ g."""
        return g.mul_(saved.of(self.function))


@dataclass
class _Graph:
    """What Opaque keeps: the graph of y, and, once a jvp was asked for, the graph of v ↦ Jᵀv."""

    x: Any  # the input as the module was given it
    y: Tensor
    leaves: list[Tensor]
    names: list[str | None]  # None for the input
    v: Tensor | None = None
    pulled: tuple[Tensor | None, ...] = ()


@dataclass
class Opaque(Op):
    """Any other module, by autodiff.

    Attributes:
        module: called with its parameters replaced by those of θ.
        names: the module's trainable parameters: local name → name within the tower.
    """

    module: nn.Module
    names: dict[str, str]

    def forward(self, x: Any, values: Values) -> tuple[Tensor, _Graph]:
        """module(x), keeping the graph."""
        leaves = {local: values.tensors[name].detach().requires_grad_() for local, name in self.names.items()}
        inputs: list[Tensor] = []
        if isinstance(x, SparseBlock):
            x = SparseRows(x, values.kernels)
        elif isinstance(x, IdBlock):
            x = x.tensor(values.device)
        elif x.is_floating_point():
            x = x.detach().requires_grad_()
            inputs = [x]
        with torch.enable_grad():
            y = torch.func.functional_call(self.module, leaves, (x,))
        if not isinstance(y, Tensor):
            raise ValueError(f"{type(self.module).__name__} returned {type(y).__name__}, expected a tensor")
        names = [None] * len(inputs) + list(self.names.values())
        return y.detach(), _Graph(x, y, inputs + list(leaves.values()), names)

    def jvp(self, saved: _Graph, dx: Tensor | None, values: Values, tangent: Named) -> Tensor:
        """∂(Jᵀv)/∂v applied to the direction, which is J d."""
        if not len(saved.y):  # a process without rows; some modules cannot be differentiated twice there
            return torch.zeros_like(saved.y)
        if saved.v is None:
            saved.v = torch.zeros_like(saved.y, requires_grad=True)
            if saved.y.requires_grad:
                saved.pulled = torch.autograd.grad(saved.y, saved.leaves, saved.v, create_graph=True, allow_unused=True)
        pulled, along = [], []
        for name, part in zip(saved.names, saved.pulled, strict=False):
            direction = dx if name is None else tangent.get(name)
            if part is not None and part.requires_grad and direction is not None:
                pulled.append(part)
                along.append(direction)
        if not pulled:
            return torch.zeros_like(saved.y)
        (dy,) = torch.autograd.grad(pulled, saved.v, along, retain_graph=True, allow_unused=True)
        return torch.zeros_like(saved.y) if dy is None else _own(dy, along)

    def vjp(self, saved: _Graph, g: Tensor, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """Back-propagation of g."""
        pulled: tuple[Tensor | None, ...] = (None,) * len(saved.leaves)
        if saved.y.requires_grad and len(saved.y):
            pulled = torch.autograd.grad(saved.y, saved.leaves, g, retain_graph=True, allow_unused=True)
        dx = None
        for name, leaf, part in zip(saved.names, saved.leaves, pulled, strict=True):
            if name is None:
                dx = torch.zeros_like(leaf) if part is None else _own(part, [g])
            elif part is not None:
                out[name] += part
        return dx if need_input else None


def _own(result: Tensor, given: list[Tensor]) -> Tensor:
    """The result in memory of its own: autodiff may hand back what it was given, or one row standing for many."""
    storage = result.untyped_storage().data_ptr()
    shared = any(storage == t.untyped_storage().data_ptr() for t in given)
    return result.clone(memory_format=torch.contiguous_format) if shared or 0 in result.stride() else result

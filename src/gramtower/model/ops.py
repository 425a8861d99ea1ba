"""The steps a tower is made of, each with its value, its jvp and its vjp.

    forward   x ↦ y                       keeps what the derivatives need
    jvp       (dx, dθ) ↦ dy               eq:Jvp, forward mode
    vjp       g ↦ gᵀ∂y/∂x, gᵀ∂y/∂θ       the tensor-matrix product of eq:ten-mat, reverse mode

Neither jvp nor vjp runs ``forward`` again. Both may overwrite the tensor handed to them (dx, g) and return one that
may be overwritten, or a :class:`Shifted` one, which may not. :class:`InputAffine`, :class:`Affine` and
:class:`Elementwise` are written out; :class:`Opaque` wraps any other module by autodiff: its vjp is back-propagation,
its jvp the derivative of that back-propagation with respect to the vector it is fed, which is linear.

Agreement of the written-out steps with Opaque is tests/test_towers.py; of both with the dense twin,
tests/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramtower.data.features import Block, IdBlock, SparseBlock
from gramtower.kernels import Kernels
from gramtower.model.sparse import SparseRows

Named = dict[str, Tensor]
Scratch = dict[tuple[int, int], Tensor]
ALL = slice(None)


@dataclass(frozen=True)
class Values:
    """The tensors of one tower at θ (trainable and frozen, by the module's own names), its kernels, its scratch."""

    tensors: Named
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    transposed: Named = field(default_factory=dict)  # made once, for nn.Linear over sparse rows
    scratch: Scratch = field(default_factory=dict)

    def room(self, owner: Op, like: Tensor, columns: int) -> Tensor:
        """A rows × columns buffer for a step's result; the same memory in every block and every product.

        A step's result is read by its neighbour only, so that two buffers of a width are enough.
        """
        key, rows = (owner.parity, columns), like.shape[0]
        if key not in self.scratch or self.scratch[key].shape[0] < rows:
            self.scratch[key] = like.new_empty(rows, columns)
        return self.scratch[key][:rows]


@dataclass(frozen=True)
class Shifted:
    """A tensor of somebody else's plus a bias, not yet added: saves a pass where the next step can add it."""

    tensor: Tensor
    bias: Tensor | None

    def own(self, room: Tensor | None = None) -> Tensor:
        """The sum, in memory of its own."""
        if self.bias is None:
            return self.tensor.clone() if room is None else room.copy_(self.tensor)
        return torch.add(self.tensor, self.bias, out=room)


@dataclass(frozen=True)
class Summed:
    """What a vjp hands on together with its column sums; no tensor if it was added to its place already."""

    tensor: Tensor | None
    sums: Tensor


def settled(x: Any) -> Any:
    """x with its bias added, if it has one to add."""
    return x.own() if isinstance(x, Shifted) else x


class Op:
    """One step of a tower; see the module's first lines. ``Saved`` is whatever forward keeps."""

    parity = 0  # differs between steps that hand results to each other; set by stack.steps

    def forward(self, x: Any, values: Values) -> tuple[Tensor, Any]:
        """Y and what to keep."""
        raise NotImplementedError

    def jvp(self, saved: Any, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """Dy along (dx, tangent), a tensor or Shifted, in ``out`` where given; frozen tensors have no tangent."""
        raise NotImplementedError

    def vjp(self, saved: Any, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """Add gᵀ∂y/∂θ to ``out``; return gᵀ∂y/∂x if asked, a tensor or Summed."""
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
        """XW + b; for ids without a bias, a view of W; with a bias, Shifted where kernels can add it later."""
        weight = values.tensors[self.weight]
        if isinstance(x, Tensor):
            x = x.to(weight.dtype)
        y = self._product(x, weight, values, True)
        if self.bias is None:
            return y, x
        shifted = Shifted(y, values.tensors[self.bias])
        return (shifted if hasattr(values.kernels, "shifted_elu") else shifted.own()), x

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
        if self.bias is not None and self.bias in out:
            out[self.bias] += _column_sums(g, values)
        g = g.tensor if isinstance(g, Summed) else g
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

    def forward(self, x: Any, values: Values) -> tuple[Tensor, Tensor]:
        """XWᵀ + b."""
        x = settled(x)
        bias = values.tensors[self.bias] if self.bias is not None else None
        return nn.functional.linear(x, values.tensors[self.weight], bias), x

    def jvp(self, saved: Tensor, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """DX Wᵀ + X dWᵀ + db."""
        dx = settled(dx)
        weight = values.tensors[self.weight]
        out = values.room(self, dx, weight.shape[0]) if out is None else out
        bias = None if self.bias is None else tangent.get(self.bias)
        dy = torch.mm(dx, weight.t(), out=out) if bias is None else torch.addmm(bias, dx, weight.t(), out=out)
        return dy.addmm_(saved, tangent[self.weight].t()) if self.weight in tangent else dy

    def vjp(self, saved: Tensor, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """GᵀX, column sums of G, and G W."""
        if self.bias is not None and self.bias in out:
            out[self.bias] += _column_sums(g, values)
        g = g.tensor if isinstance(g, Summed) else g
        if self.weight in out:
            out[self.weight].addmm_(g.t(), saved)
        weight = values.tensors[self.weight]
        return torch.mm(g, weight, out=values.room(self, g, weight.shape[1])) if need_input else None


def _column_sums(g: Any, values: Values) -> Tensor:
    """Column sums of g, unless they came with it."""
    if isinstance(g, Summed):
        return g.sums
    kernel: Any = getattr(values.kernels, "column_sums", None)
    result: Tensor = g.sum(0) if kernel is None else kernel(g)
    return result


class _Slope:
    """A pre-activation z that turns into φ′(z) when first asked for."""

    def __init__(self, z: Tensor) -> None:
        self.z: Tensor | None = z
        self.slope: Tensor | None = None

    def of(self, function: Callable[[Tensor], Tensor], rows: slice = ALL) -> Tensor:
        """φ′, of some rows."""
        if self.slope is None:
            assert self.z is not None
            z = self.z.detach().requires_grad_()
            with torch.enable_grad():
                (self.slope,) = torch.autograd.grad(function(z).sum(), z)
            self.z = None
        return self.slope[rows]


class _FromOutput:
    """An activation's output y, from which φ′ is worked out wherever it is needed."""

    def __init__(self, y: Tensor, activation: tuple[int, float]) -> None:
        self.y, self.activation = y, activation

    def of(self, function: Callable[[Tensor], Tensor], rows: slice = ALL) -> Tensor:
        """φ′, of some rows."""
        return slope_from_output(self.activation, self.y[rows])


@dataclass
class Elementwise(Op):
    """An activation φ applied to every number by itself.

    Attributes:
        function: φ.
        activation: φ by number (see :func:`by_output`), if φ′ follows from φ's output; then kernels that can save
            themselves from keeping it.
    """

    function: Callable[[Tensor], Tensor]
    activation: tuple[int, float] | None = None

    def forward(self, x: Any, values: Values) -> tuple[Tensor, Any]:
        """φ(x)."""
        kernels: Any = values.kernels
        if isinstance(x, Shifted) and x.bias is not None and self._is_elu() and x.tensor.dtype == torch.float32:
            assert self.activation is not None
            y: Tensor = kernels.shifted_elu(x.tensor, x.bias, self.activation[1])
        else:
            x = settled(x)
            y = self.function(x)
        if self.activation is not None and hasattr(kernels, "slope_product"):
            return y, _FromOutput(y, self.activation)
        return y, _Slope(x)

    def _is_elu(self) -> bool:
        return self.activation is not None and self.activation[0] == 0

    def jvp(self, saved: Any, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """φ′ ∘ dx."""
        given = dx if isinstance(dx, Shifted) else Shifted(dx, None)
        if isinstance(saved, _FromOutput):
            room = values.room(self, given.tensor, saved.y.shape[1]) if given is dx else given.tensor
            kernels: Any = values.kernels
            kernels.slope_product(given.tensor, given.bias, saved.y, saved.activation, room)
            return room
        own = given.own(values.room(self, given.tensor, given.tensor.shape[1])) if given is dx else given.tensor
        return own.mul_(saved.of(self.function))

    def vjp(self, saved: Any, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """φ′ ∘ g."""
        g = g.tensor if isinstance(g, Summed) else g
        if isinstance(saved, _FromOutput):
            kernels: Any = values.kernels
            return Summed(g, kernels.slope_product(g, None, saved.y, saved.activation, g, sums=True))
        return g.mul_(saved.of(self.function))

    def vjp_into(self, saved: _FromOutput, g: Any, values: Values, rows: Tensor, base: Tensor, scale: float) -> Any:
        """φ′ ∘ g + scale·base, written to ``rows``."""
        g = g.tensor if isinstance(g, Summed) else g
        kernels: Any = values.kernels
        return Summed(None, kernels.slope_product(g, None, saved.y, saved.activation, rows, base, scale, sums=True))


def by_output(module: nn.Module) -> tuple[int, float] | None:
    """The number and constant under which kernels know an activation whose slope follows from its output."""
    if type(module) is nn.ELU and module.alpha > 0:
        return 0, module.alpha
    if type(module) is nn.ReLU:
        return 1, 0.0
    if type(module) is nn.LeakyReLU and module.negative_slope == float(np.float32(module.negative_slope)) > 0:
        return 1, module.negative_slope
    return {nn.Tanh: (2, 0.0), nn.Sigmoid: (3, 0.0)}.get(type(module))


def slope_from_output(activation: tuple[int, float], y: Tensor) -> Tensor:
    """φ′(z) from y = φ(z)."""
    kind, alpha = activation
    if kind == 0:
        return torch.where(y > 0, 1.0, y + alpha)
    if kind == 1:
        return torch.where(y > 0, 1.0, alpha).to(y.dtype)
    return 1 - y.square() if kind == 2 else y * (1 - y)


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
        x = settled(x)
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

    def jvp(self, saved: _Graph, dx: Any, values: Values, tangent: Named, out: Tensor | None = None) -> Any:
        """∂(Jᵀv)/∂v applied to the direction, which is J d."""
        if not len(saved.y):  # a process without rows; some modules cannot be differentiated twice there
            return torch.zeros_like(saved.y)
        dx = settled(dx)
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

    def vjp(self, saved: _Graph, g: Any, values: Values, out: Named, need_input: bool) -> Any:
        """Back-propagation of g."""
        g = g.tensor if isinstance(g, Summed) else g
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

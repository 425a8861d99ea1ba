"""Any module as a step of a tower, by autodiff: see ops.py.

Its vjp is back-propagation, its jvp the derivative of that back-propagation with respect to the vector it is fed, which
is linear. Checked by tests/test_towers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramtower.data.features import IdBlock, SparseBlock
from gramtower.model.deferred import pulled, settled
from gramtower.model.ops import Named, Op, Values
from gramtower.model.sparse import SparseRows


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
        g = pulled(g)
        parts: tuple[Tensor | None, ...] = (None,) * len(saved.leaves)
        if saved.y.requires_grad and len(saved.y):
            parts = torch.autograd.grad(saved.y, saved.leaves, g, retain_graph=True, allow_unused=True)
        dx = None
        for name, leaf, part in zip(saved.names, saved.leaves, parts, strict=True):
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

"""Any module as a step of a tower, by autodiff; see steps.py.

Its vjp is back-propagation, its jvp the derivative of that back-propagation with respect to the vector it is fed, which
is linear. For the preconditioner, hooks find A and S of the layers inside, S from vectors drawn at the output. Checked
by tests/test_towers.py and tests/test_kronecker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gramtower.data.features import Features, IdBlock, SparseBlock
from gramtower.distributed.group import Group
from gramtower.engine.towers.layer_factors import Factors, column_squares, outer, root
from gramtower.engine.towers.layers import InputLinear
from gramtower.engine.towers.sparse import SparseRows
from gramtower.engine.towers.steps import CurvatureContext, Named, Op, Shifted, Summed, Values, materialise, plain

_LAYERS = (nn.Linear, nn.Embedding, nn.EmbeddingBag, InputLinear)


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

    analytic = False
    overwrites_cotangent = False
    kept_copies = 3  # a graph is kept twice over once a jvp was taken through it

    @property
    def label(self) -> str:
        """See Op: the module's class."""
        return type(self.module).__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """See Op."""
        return tuple(self.names.values())

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Tensor, _Graph]:
        """module(x), keeping the graph."""
        x = materialise(x)
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
            raise ValueError(f"{self.label} returned {type(y).__name__}, expected a tensor")
        names = [None] * len(inputs) + list(self.names.values())
        return y.detach(), _Graph(x, y, inputs + list(leaves.values()), names)

    def jvp(
        self, saved: _Graph, dx: Tensor | Shifted | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """∂(Jᵀv)/∂v applied to the direction, which is J d."""
        if not len(saved.y):  # a process without rows; some modules cannot be differentiated twice there
            return torch.zeros_like(saved.y)
        dx = None if dx is None else materialise(dx)
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

    def vjp(self, saved: _Graph, g: Tensor | Summed, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """Back-propagation of g."""
        g = plain(g)
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

    def least_block(self, features: Features) -> int:
        """See Op: the gradient of a table is as large as the table, in every block."""
        return features.rows if features.kind == "ids" else super().least_block(features)

    def id_tables(self, side: str, features: Features) -> list[str]:
        """See Op: those of the layers inside."""
        known = {id(p): local for local, p in self.module.named_parameters()}
        tables = [
            known[id(part.weight)]
            for part in self.module.modules()
            if isinstance(part, (nn.Embedding, InputLinear)) and len(part.weight) == features.rows
        ]
        if not tables:
            return super().id_tables(side, features)
        return [self.names[local] for local in tables if local in self.names]

    def pull_curvature(self, S: Tensor, moment: Tensor | None, context: CurvatureContext) -> Tensor:
        """Factors of the layers inside, diagonals of the other parameters, and S at the input. A forward."""
        values, factors, group, noise = context.values, context.factors, context.group, context.noise
        layers = {name: part for name, part in self.module.named_modules() if type(part) in _LAYERS}
        known = {id(p): name for name, p in self.module.named_parameters()}
        found: dict[str, _Moments] = {name: _Moments() for name in layers}
        inside = {known.get(id(p)) for part in layers.values() for p in (part.weight, getattr(part, "bias", None))}
        others = {
            local: name for local, name in self.names.items() if local not in inside and name in factors.trainable
        }
        squares: dict[str, Tensor] = {}
        R = root(S)
        below: Tensor | None = None
        for start, stop, saved in context.saved_blocks():
            leaves = {local: values.tensors[name].detach().requires_grad_() for local, name in self.names.items()}
            calls: list[tuple[str, Any, Tensor]] = []
            hooks = [part.register_forward_hook(_recorder(name, calls)) for name, part in layers.items()]
            x = saved.x
            inputs = [x] if isinstance(x, Tensor) and x.is_floating_point() else []
            try:
                with torch.enable_grad():
                    y = torch.func.functional_call(self.module, leaves, (x,))
            finally:
                for hook in hooks:
                    hook.remove()
            r = context.weight[start:stop]
            for name, x_in, _ in calls:
                found[name].add_inputs(layers[name], x_in, r, stop - start)
            targets = [out for _, _, out in calls] + inputs + [leaves[local] for local in others]
            if not y.requires_grad:
                continue
            for draw in range(noise.draws):
                v = noise.rows(draw, start, stop, R)
                grads = torch.autograd.grad(y, targets, v.to(y.dtype), retain_graph=True, allow_unused=True)
                for (name, _, _), g in zip(calls, grads, strict=False):
                    if g is not None:
                        found[name].add_outputs(g)
                if inputs and not context.is_first and (g := grads[len(calls)]) is not None:
                    part = (g.t() @ g).double() / (noise.draws * context.rows)
                    below = part if below is None else below + part
                for local, g in zip(others, grads[len(calls) + len(inputs) :], strict=True):
                    if g is not None:
                        part = g.double().square() / noise.draws
                        squares[local] = squares[local] + part if local in squares else part
        names = {key: self.names.get(local) for key, local in known.items()}
        for name, layer in layers.items():
            found[name].add_up(group, names.get(id(layer.weight)) in context.owned)
            found[name].into(factors, layer, names)
        for local, square in squares.items():
            factors.diagonals[others[local]] = group.sum_(square)
        context.count_forward()
        return torch.zeros(1, 1, dtype=torch.float64) if below is None else group.sum_(below)


def _own(result: Tensor, given: list[Tensor]) -> Tensor:
    """The result in memory of its own: autodiff may hand back what it was given, or one row standing for many."""
    storage = result.untyped_storage().data_ptr()
    shared = any(storage == t.untyped_storage().data_ptr() for t in given)
    return result.clone(memory_format=torch.contiguous_format) if shared or 0 in result.stride() else result


class _Moments:
    """A and S of one layer inside a module, gathered block by block."""

    def __init__(self) -> None:
        self.A: Tensor | None = None
        self.S: Tensor | None = None
        self.total, self.count = torch.zeros(()), 0.0

    def add_inputs(self, layer: nn.Module, x: Any, r: Tensor, rows: int) -> None:
        if isinstance(x, SparseRows):
            part = column_squares(x.block, r)
        elif not x.is_floating_point():
            assert isinstance(layer.weight, Tensor)
            part = torch.zeros(len(layer.weight), dtype=torch.float64, device=r.device)
            spread = r.double()[:, None].expand(rows, x.numel() // max(1, rows)).reshape(-1)
            part.index_add_(0, x.reshape(-1), spread)
        else:
            flat = x.detach().reshape(-1, x.shape[-1])
            spread = r[:, None].expand(rows, len(flat) // max(1, rows)).reshape(-1)
            part = outer(flat, spread, getattr(layer, "bias", None) is not None)
        self.A = part if self.A is None else self.A + part
        self.total = self.total.to(r.device) + r.sum(dtype=torch.float64)

    def add_outputs(self, g: Tensor) -> None:
        flat = g.reshape(-1, g.shape[-1])
        part = (flat.t() @ flat).double()
        self.S = part if self.S is None else self.S + part
        self.count += len(flat)

    def add_up(self, group: Group, table: bool) -> None:
        """The sums over all processes; A of a table of own rows stays that of own rows."""
        if self.A is not None and not table:
            group.sum_(self.A)
        if self.S is not None:
            group.sum_(self.S)
        if group.size > 1:
            total, self.count = group.totals(float(self.total), self.count)
            self.total = torch.full_like(self.total, total)

    def into(self, factors: Factors, layer: nn.Module, names: dict[int, str | None]) -> None:
        if self.A is None or self.S is None:
            return
        weight, bias = names.get(id(layer.weight)) or "", names.get(id(getattr(layer, "bias", None)))
        S = self.S / self.count  # the mean over rows and draws
        factors.add(weight, bias, type(layer) is not nn.Linear, self.A, S, self.total)


def _recorder(name: str, calls: list[tuple[str, Any, Tensor]]) -> Callable[[nn.Module, Any, Tensor], None]:
    def record(_: nn.Module, inputs: Any, output: Tensor) -> None:
        calls.append((name, inputs[0], output))

    return record

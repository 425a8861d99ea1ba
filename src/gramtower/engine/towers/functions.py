"""Which torch functions inside a module's ``forward`` have steps of their own; trace.py asks for each call.

Activations by function and by method (``torch.relu(h)``, ``h.tanh()``), F.linear, F.layer_norm, sums, differences,
products, multiples, concatenation and columns. A call is recognised when its operands are rows × columns of the same
rows, or numbers, or parameters; anything else is left to autodiff.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from gramtower.engine.kernels.activations import Activation, activation_of
from gramtower.engine.towers.analytic import Affine, Elementwise
from gramtower.engine.towers.joins import Columns, Concat, Product, Sum
from gramtower.engine.towers.scales import Normalise, Scale
from gramtower.engine.towers.steps import Op

Found = tuple[Op, list[fx.Node]]  # a step and what it reads

_ACTIVATIONS: dict[Any, type[nn.Module]] = {
    F.relu: nn.ReLU, torch.relu: nn.ReLU, "relu": nn.ReLU, F.elu: nn.ELU, F.gelu: nn.GELU, F.silu: nn.SiLU,
    F.tanh: nn.Tanh, torch.tanh: nn.Tanh, "tanh": nn.Tanh, F.sigmoid: nn.Sigmoid, torch.sigmoid: nn.Sigmoid,
    "sigmoid": nn.Sigmoid, F.softplus: nn.Softplus, F.leaky_relu: nn.LeakyReLU, F.selu: nn.SELU, torch.selu: nn.SELU,
    F.mish: nn.Mish, F.celu: nn.CELU, torch.celu: nn.CELU, F.softsign: nn.Softsign, F.hardswish: nn.Hardswish,
    F.relu6: nn.ReLU6, F.logsigmoid: nn.LogSigmoid, F.hardtanh: nn.Hardtanh,
}  # fmt: skip
_POINTWISE: dict[Any, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, key)
    for key in ("exp", "expm1", "log1p", "sin", "cos", "square", "erf")
    for name in (getattr(torch, key), key)
}
_SAME = {
    "view", "reshape", "flatten", "contiguous", "clone", "to", "float", "double", "type_as",
    torch.flatten, torch.reshape, torch.clone,
}  # fmt: skip
_CAT = {torch.cat, torch.concat, torch.concatenate, torch.hstack}
_ADD = {operator.add, operator.iadd, torch.add, "add", "__add__", "add_"}
_SUB = {operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_"}
_MUL = {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "multiply", "mul_"}
_DIV = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_"}
_MATMUL = {operator.matmul, torch.matmul, torch.mm, "matmul", "mm", "__matmul__"}
_NEG = {operator.neg, torch.neg, "neg"}
_SPLIT = {torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split"}


class Functions:
    """Recognises calls of functions and methods in a traced graph.

    Args:
        shapes: the shape of each call's result that is rows × columns of float numbers.
        parameters: name within the tower and shape of each parameter that the graph reads.
    """

    def __init__(
        self,
        shapes: Mapping[fx.Node, torch.Size],
        values: Mapping[fx.Node, Any],
        parameters: Mapping[fx.Node, tuple[str, torch.Size]],
    ) -> None:
        self.shapes, self.values, self.parameters = shapes, values, parameters

    def step(self, node: fx.Node) -> Found | fx.Node | None:
        """A step and what it reads; a node that the result is the same as; or None for anything else."""
        target = node.target
        args: tuple[Any, ...] = node.args
        kwargs: dict[str, Any] = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        if node not in self.shapes or not args:
            return None
        if target is operator.getitem:
            return self._columns(node)
        if target in _CAT:
            return self._concatenation(node)
        x = args[0]
        if target in _MUL | _ADD | _SUB | _DIV:
            return self._arithmetic(node) if not kwargs and len(args) == 2 else None
        if not isinstance(x, fx.Node) or x not in self.shapes:
            return None
        same = self.shapes[x] == self.shapes[node] and self.values[x].dtype == self.values[node].dtype
        if target in _ACTIVATIONS:
            module = _ACTIVATIONS[target]
            constants = [a for a in args[1:] if not isinstance(a, bool)]  # a bool is ``inplace``
            plain = not any(isinstance(c, fx.Node) for c in (*constants, *kwargs.values()))
            return (Elementwise(activation_of(module(*constants, **kwargs))), [x]) if plain else None
        if target in _POINTWISE and len(args) == 1 and not kwargs:
            return Elementwise(Activation(_POINTWISE[target])), [x]
        if target in _NEG:
            return Sum((-1.0,)), [x]
        if target in _SAME and same:
            return x
        if target is F.dropout and not kwargs.get("training", args[2] if len(args) > 2 else True):
            return x
        if target is F.linear or target in _MATMUL:
            layer = self.layer(node)
            return None if layer is None else (Affine(*layer[:3]), [x])
        return self._layer_norm(x, *args[1:], **kwargs) if target is F.layer_norm else None

    def layer(self, node: fx.Node) -> tuple[str, str | None, bool, int] | None:
        """Weight, bias, whether the weight is stored inputs × outputs, and inputs, of a product with a parameter."""
        args, kwargs = node.args[1:], dict(node.kwargs)
        if node.target in _MATMUL:
            weight, bias, inputs_first = args[0] if args else None, None, True
        elif node.target is F.embedding:
            rest = [*args[1:], *(value for key, value in kwargs.items() if key != "weight")]
            weight, bias, inputs_first = kwargs.get("weight", args[0] if args else None), None, True
            if any(option not in (None, False, 2.0) for option in rest):
                return None
        elif node.target is F.linear:
            weight, bias = ([*args, None, None])[:2]
            weight, bias, inputs_first = kwargs.get("weight", weight), kwargs.get("bias", bias), False
        else:
            return None
        named = [self.parameters.get(p) if isinstance(p, fx.Node) else None for p in (weight, bias)]
        if named[0] is None or len(named[0][1]) != 2 or (bias is not None and named[1] is None):
            return None
        (name, shape), width = named[0], 0 if inputs_first else 1
        return name, None if named[1] is None else named[1][0], inputs_first, shape[width]

    def _layer_norm(
        self, x: fx.Node, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Found | None:
        names = [None if p is None else self.parameters.get(p) for p in (weight, bias)]
        missing = any(p is not None and name is None for p, name in zip((weight, bias), names, strict=True))
        if missing or tuple(shape) != tuple(self.shapes[x][1:]):
            return None
        gamma, beta = (None if name is None else name[0] for name in names)
        return Normalise(gamma, beta, eps), [x]

    def _arithmetic(self, node: fx.Node) -> Found | None:
        target, (a, b) = node.target, node.args
        numbers = [t for t in (a, b) if isinstance(t, (int, float)) and not isinstance(t, bool)]
        rows = [t for t in (a, b) if isinstance(t, fx.Node) and self.shapes.get(t) == self.shapes[node]]
        if len(rows) == 2:
            if target in _MUL:
                return Product(), rows
            return None if target in _DIV else (Sum((1.0, 1.0 if target in _ADD else -1.0)), rows)
        if len(rows) != 1:
            return None
        if numbers:
            c, flipped = float(numbers[0]), rows[0] is b
            if target in _MUL:
                return Sum((c,)), rows
            if target in _ADD:
                return Sum((1.0,), c), rows
            if target in _SUB:
                return (Sum((-1.0,), c) if flipped else Sum((1.0,), -c)), rows
            return None if flipped or c == 0 else (Sum((1 / c,)), rows)
        other = b if rows[0] is a else a
        if target in _MUL and isinstance(other, fx.Node) and other in self.parameters:
            name, shape = self.parameters[other]
            return (Scale(name), rows) if len(shape) < 2 else None
        return None

    def _concatenation(self, node: fx.Node) -> Found | None:
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        parts = node.args[0]
        sideways = node.target is torch.hstack or dim in (1, -1)
        if not sideways or not isinstance(parts, (list, tuple)):
            return None
        nodes = [part for part in parts if isinstance(part, fx.Node) and part in self.shapes]
        if len(nodes) != len(parts):
            return None
        return Concat(tuple(self.shapes[part][1] for part in nodes)), nodes

    def _columns(self, node: fx.Node) -> Found | None:
        x, index = node.args
        if not isinstance(x, fx.Node):
            return None
        if x in self.shapes:
            if not isinstance(index, tuple) or len(index) != 2 or index[0] != slice(None):
                return None
            columns = index[1]
            if not isinstance(columns, slice) or any(isinstance(t, fx.Node) for t in (columns.start, columns.stop)):
                return None
            width = self.shapes[x][1]
            start, stop, step = columns.indices(width)
            return (Columns(start, stop, width), [x]) if step == 1 else None
        source = x.args[0] if x.args else None  # one of the parts that a split gives
        if x.target not in _SPLIT or not isinstance(source, fx.Node) or source not in self.shapes:
            return None
        dim = x.kwargs.get("dim", x.args[2] if len(x.args) > 2 else 0)
        if dim not in (1, -1) or not isinstance(index, int):
            return None
        widths = [part.shape[1] for part in self.values[x]]
        index %= len(widths)
        start = sum(widths[:index])
        return Columns(start, start + widths[index], self.shapes[source][1]), [source]

"""Tracing of a custom module's ``forward`` into steps, so that it costs no more than the layers it is made of.

torch.fx records the calls that ``forward`` makes, and their shapes are computed without data (on torch's "meta"
device). Layers (stack.py) and functions (``Functions``) that have steps become nodes of a graph; the calls between them
are grouped into the smallest parts that map rows to rows, each differentiated by autodiff (``Opaque``). The graph is
cut wherever later calls read a single result, so that a chain of layers becomes the same steps as an nn.Sequential of
them. A submodule whose ``forward`` cannot be traced, for example because it branches on values, becomes one ``Opaque``
part; so does the whole module if nothing in it can be traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from gramtower.engine.kernels.elementwise import TABLE, Activation, activation_of
from gramtower.engine.towers.branches import Columns, Concat, Graph, Node, Product, Sum
from gramtower.engine.towers.layers import Affine, Elementwise, InputAffine, Normalise, Scale
from gramtower.engine.towers.opaque import Opaque, call_with
from gramtower.engine.towers.steps import Op

Found = tuple[Op, list[fx.Node]]  # a step and its inputs
Read = fx.Node | None

_ACTIVATIONS: dict[Any, type[nn.Module]] = {function: kind.module for kind in TABLE for function in kind.functions}
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


@dataclass
class Functions:
    """Recognises calls of functions and methods in a traced graph."""

    shapes: Mapping[fx.Node, torch.Size]  # of results that are floating-point matrices of rows × columns
    values: Mapping[fx.Node, Any]  # all results on the meta device
    parameters: Mapping[fx.Node, tuple[str, torch.Size]]  # those that are read: names within the tower, and shapes

    def step(self, node: fx.Node) -> Found | fx.Node | None:
        """A step with its inputs; or a node whose result is the same; or None if the call is not recognised."""
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
        """Weight, bias, whether the weight is stored inputs × outputs, and number of inputs, of a linear function."""
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
        self, x: fx.Node, shape: Sequence[int], weight: Read = None, bias: Read = None, eps: float = 1e-5
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


_ROWS = 10007  # number of rows of the example; a number that is not the width of any layer
_READ_FEATURES = (Affine, InputAffine, Scale, Normalise, Opaque)  # steps with parameters that accept features as input


class Untraceable(Exception):
    """The module cannot be converted to steps."""


@dataclass(frozen=True)
class Inputs:
    """The features that a tower reads."""

    kind: str  # "ids", "dense" or "sparse"
    width: int = 0  # number of feature columns; only needed for modules that are traced
    codes: bool = False  # whether dense features are integers

    def example(self, dtype: torch.dtype) -> Tensor:
        """A tensor of their shape and type on the meta device."""
        if self.kind == "ids":
            return torch.empty(_ROWS, dtype=torch.int64, device="meta")
        return torch.empty(_ROWS, self.width, dtype=torch.int64 if self.codes else dtype, device="meta")


# (module, whether it reads features) → its step, True if it returns its input, None if it has no step
Recognise = Callable[[nn.Module, bool], Op | Literal[True] | None]


def trace(module: nn.Module, inputs: Inputs, names: Mapping[int, str], recognise: Recognise) -> list[Op]:
    """The module as a chain of steps; raises :class:`Untraceable` if it cannot be converted.

    ``names`` maps the id of a parameter to its name within the tower, and ``recognise`` finds the step of a layer.
    """
    return _Builder(module, inputs, names, recognise).steps()


class _Tracer(fx.Tracer):
    def __init__(self, module: nn.Module, recognise: Recognise) -> None:
        super().__init__()
        parts = [part for part in module.modules() if parametrize.is_parametrized(part)]
        parts += [part for part in module.modules() for first in (False, True) if recognise(part, first) is not None]
        self._known = {id(part) for part in parts}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._known or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Trace a submodule; one that cannot be traced becomes a single call."""
        before, stack = len(self.graph.nodes), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # a user's code may raise anything when it is called with proxies
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            self.module_stack = stack
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


class _Shapes(fx.Interpreter):
    """Runs the graph on the meta device and keeps each result."""

    def __init__(self, graph: fx.GraphModule, recognise: Recognise) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.found: dict[fx.Node, Any] = {}
        self._first: dict[fx.Node, Tensor] = {}  # results of first layers, whose input may be sparse
        for node in graph.graph.nodes:
            if node.op == "call_module" and [_is_columns(x) for x in node.all_input_nodes] == [True]:
                layer: Any = graph.get_submodule(str(node.target))
                step = recognise(layer, True)
                if isinstance(step, InputAffine):
                    width = layer.weight.shape[1 if step.inputs_first else 0]
                    self._first[node] = torch.empty(_ROWS, width, dtype=layer.weight.dtype, device="meta")

    def run_node(self, n: fx.Node) -> object:
        result = self._first[n] if n in self._first else super().run_node(n)
        if n.op == "get_attr" and isinstance(result, Tensor):
            result = result.to("meta")
        self.found[n] = result
        return result


class _Ran(nn.Module):
    """A module whose ``forward`` runs the interpreter, so that ``call_with`` can replace its parameters."""

    def __init__(self, graph: fx.GraphModule, run: fx.Interpreter) -> None:
        super().__init__()
        self.graph, self._run = graph, run

    def forward(self, x: Tensor) -> object:
        return self._run.run(x)


class _Builder:
    def __init__(self, module: nn.Module, inputs: Inputs, names: Mapping[int, str], recognise: Recognise) -> None:
        self.names, self.recognise, self.inputs = names, recognise, inputs
        modes = {part: part.training for part in module.modules()}
        try:
            graph = _Tracer(module, recognise).trace(module)
            self.graph = fx.GraphModule(module, graph)
            self.graph.graph.eliminate_dead_code()
            self.values = self._shapes()
        except Exception as error:  # a user's code may raise anything when it is called with proxies
            raise Untraceable(str(error)) from error
        finally:
            changed = [part for part, training in modes.items() if part.training != training]
            for part in changed:
                part.training = modes[part]
        if changed:
            raise Untraceable("it changes its mode")
        self.shapes = {node: v.shape for node, v in self.values.items() if _is_rows(v)}
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        if not placeholders or any(node.users for node in placeholders[1:]):
            raise Untraceable("it takes other inputs than rows of features")
        self.input = placeholders[0]
        self.features = {self.input: inputs.width}  # the input, and columns of sparse features, with their widths
        if inputs.kind != "dense":
            self.shapes.pop(self.input, None)
        self.parameters = self._parameters()
        self.functions = Functions(self.shapes, self.values, self.parameters)
        self.nodes: list[Node] = []
        self.slots: dict[fx.Node, int] = {self.input: 0}
        self.active = [False]

    def _shapes(self) -> dict[fx.Node, Any]:
        tensors = {**dict(self.graph.named_parameters()), **dict(self.graph.named_buffers())}
        floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
        meta = {f"graph.{name}": torch.empty_like(t, device="meta") for name, t in tensors.items()}
        run = _Shapes(self.graph, self.recognise)
        with torch.no_grad():
            x = self.inputs.example(floats[0] if floats else torch.get_default_dtype())
            call_with(_Ran(self.graph, run), meta, x)
        return run.found

    def _parameters(self) -> dict[fx.Node, tuple[str, torch.Size]]:
        owners = dict(self.graph.named_parameters(remove_duplicate=False))
        return {
            node: (self.names[id(owners[str(node.target)])], owners[str(node.target)].shape)
            for node in self.graph.graph.nodes
            if node.op == "get_attr" and str(node.target) in owners and id(owners[str(node.target)]) in self.names
        }

    def steps(self) -> list[Op]:
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        result = output.args[0]
        if not isinstance(result, fx.Node) or result not in self.shapes:
            raise Untraceable("its result is not one tensor of rows × columns")
        for node in self.graph.graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                self._refuse_writing(node)
                self._add(node)
        return self._chain(self.slots[result])

    def _refuse_writing(self, node: fx.Node) -> None:
        """Refuse a call that overwrites its input if another call reads that too."""
        module = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        in_place = getattr(module, "inplace", False) or node.kwargs.get("inplace") or "out" in node.kwargs
        in_place = in_place or (node.op != "call_module" and name.endswith("_") and not name.endswith("__"))
        in_place = in_place or (node.op == "call_function" and (name in _WRITING or any(a is True for a in node.args)))
        if in_place and not (node.args and isinstance(node.args[0], fx.Node) and self._is_fresh(node.args[0])):
            raise Untraceable(f"{name or type(module).__name__} writes over its input")

    def _is_fresh(self, x: fx.Node) -> bool:
        """Whether a result has memory of its own and is read by only one call."""
        slot = self.slots.get(x, 0)
        shared = sum(other == slot for other in self.slots.values()) > 1
        return (
            slot > 0 and len(x.users) == 1 and not shared and not isinstance(self.nodes[slot - 1].op, (Opaque, Columns))
        )

    def _add(self, node: fx.Node) -> None:
        found = self._recognised(node)
        if isinstance(found, fx.Node):
            self.slots[node] = self.slots[found]
            if found in self.features:
                self.features[node] = self.features[found]
            if found not in self.shapes:
                self.shapes.pop(node, None)
        elif found is not None:
            op, read = found
            self._append(node, op, tuple(self.slots[x] for x in read))
            if node in self.features:
                self.shapes.pop(node, None)
        elif node in self.shapes:
            self._append(node, *self._opaque(node))

    def _append(self, node: fx.Node, op: Op, inputs: tuple[int, ...]) -> None:
        self.nodes.append(Node(op, inputs, 0 if node in self.features else self.shapes[node][1]))
        self.active.append(bool(op.parameters) or any(self.active[i] for i in inputs))
        self.slots[node] = len(self.nodes)

    def _recognised(self, node: fx.Node) -> Found | fx.Node | None:
        """The step of a call with its inputs, if these are results of steps; see ``Functions.step``."""
        found: Any = None
        if self.inputs.kind == "sparse" and node.op == "call_function" and _is_columns(node):
            return self._sparse_columns(node)
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node):
            x, module = node.args[0], self.graph.get_submodule(str(node.target))
            fixed = x in self.features
            if self.inputs.kind == "dense" and x in self.shapes and x in self.slots:
                fixed = not self.active[self.slots[x]]
            step = self.recognise(module, True) if fixed else None
            if isinstance(step, InputAffine) and self.inputs.kind == "sparse" and step.width != self.features[x]:
                raise Untraceable("a layer for another number of features")
            if step is None and x in self.shapes and node in self.shapes:
                step = self.recognise(module, False)
            found = None if step is None else x if step is True else (step, [x])
        elif node.op != "call_module":
            layer = self._first_product(node)
            found = self.functions.step(node) if layer is None else (layer, [node.args[0]])
        if found is None or isinstance(found, fx.Node):
            return found if found in self.slots else None
        op, read = found
        if any(x not in self.slots for x in read):
            return None
        if op.parameters and not isinstance(op, _READ_FEATURES) and not any(self.active[self.slots[x]] for x in read):
            return None
        return op, read

    def _first_product(self, node: fx.Node) -> InputAffine | None:
        """The step of a function that multiplies features with a parameter."""
        x = node.args[0] if node.args else None
        if not isinstance(x, fx.Node) or x not in self.features or node not in self.shapes:
            return None
        layer = self.functions.layer(node)
        if layer is None or (node.target is F.embedding) != (self.inputs.kind == "ids"):
            return None
        if self.inputs.kind == "sparse" and layer[3] != self.features[x]:
            raise Untraceable("a layer for another number of features")
        return InputAffine(*layer)

    def _sparse_columns(self, node: fx.Node) -> Found | None:
        x: Any = node.args[0]
        columns: Any = node.args[1][1]  # type: ignore[index]
        if x not in self.features:
            return None
        width = self.features[x]
        start, stop, step = columns.indices(width)
        self.features[node] = stop - start
        return (Columns(start, stop, width), [x]) if step == 1 and stop > start else None

    def _opaque(self, node: fx.Node) -> tuple[Op, tuple[int, ...]]:
        """An autodiff step for a call without a step, including the calls that lead to it from results of steps."""
        inside: set[fx.Node] = set()
        read: list[fx.Node] = []

        def collect(n: fx.Node) -> None:
            inside.add(n)
            for x in n.all_input_nodes:
                if x in self.slots:
                    read.extend([x] if x not in read else [])
                elif x not in inside:
                    collect(x)

        collect(node)
        calls = [n for n in self.graph.graph.nodes if n in inside and n.op != "get_attr"]
        module: nn.Module
        if len(calls) == 1 and node.op == "call_module" and node.args == tuple(read) and not node.kwargs:
            module, title = self.graph.get_submodule(str(node.target)), ""
        else:
            module, title = self._part(inside, read, node), ", ".join(dict.fromkeys(map(_name, calls)))
        names = {local: self.names[id(p)] for local, p in module.named_parameters() if p.requires_grad}
        return Opaque(module, names, title), tuple(self.slots[x] for x in read)

    def _part(self, inside: set[fx.Node], read: list[fx.Node], result: fx.Node) -> fx.GraphModule:
        part = fx.Graph()
        copies = {x: part.placeholder(f"x{i}") for i, x in enumerate(read)}
        for node in self.graph.graph.nodes:
            if node in inside:
                copies[node] = part.node_copy(node, lambda n: copies[n])
        part.output(copies[result])
        return fx.GraphModule(self.graph, part)

    def _chain(self, last: int) -> list[Op]:
        """The nodes that lead to a result, cut where later nodes read a single result."""
        order = sorted(_ancestors(self.nodes, last))
        if not order:
            raise Untraceable("it returns its features")
        chain: list[Op] = []
        start, segment = 0, []  # node whose result the segment begins with
        for position, number in enumerate(order):
            segment.append(number)
            later = {i for n in order[position + 1 :] for i in self.nodes[n - 1].inputs}
            if number != last and (not self.active[number] or any(i < number for i in later)):
                continue
            chain.append(self._segment(segment, start))
            start, segment = number, []
        return chain

    def _segment(self, segment: list[int], start: int) -> Op:
        first = self.nodes[segment[0] - 1]
        if len(segment) == 1:
            plain = start > 0 or isinstance(first.op, (InputAffine, Opaque))
            if plain and len(first.inputs) == 1:
                return first.op
        places = {start: 0} | {number: place for place, number in enumerate(segment, 1)}
        nodes = [self.nodes[number - 1] for number in segment]
        return Graph([Node(n.op, tuple(places[i] for i in n.inputs), n.width) for n in nodes], start == 0)


_WRITING = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "pow", "matmul")} | {"setitem"}


def _ancestors(nodes: list[Node], last: int) -> set[int]:
    found, waiting = set(), [last]
    while waiting:
        number = waiting.pop()
        if number and number not in found:
            found.add(number)
            waiting += nodes[number - 1].inputs
    return found


def _is_columns(node: fx.Node) -> bool:
    """Whether a node is the features, or a slice of their columns."""
    if node.op == "placeholder":
        return True
    index = node.args[1] if node.target is operator.getitem else None
    sliced = isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], slice)
    return sliced and isinstance(node.args[0], fx.Node) and _is_columns(node.args[0])


def _is_rows(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and len(value) == _ROWS and value.is_floating_point()


def _name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))

"""Any module as a step of a tower, differentiated by autodiff.

The vjp is back-propagation; the jvp is the derivative of the vjp with respect to its cotangent, in which it is linear.
This double backward uses the graph that was kept, while forward mode computes the outputs again in each product, which
takes longer (benchmarks/bench_modules.py --derivatives). Forward mode is for a module with an operation that cannot be
differentiated twice. Where a module calls an autograd.Function of its own, double backward may leave out what is behind
it without an error, so that forward mode is tried first, and the first jvp must be the adjoint of the vjp.

For the preconditioner, hooks find A and S of the layers inside the module, S from random vectors at the output of a
sample of rows. A ⊗ S assumes that the layer is called for each entity, once or several times; a layer that is called
with something else, such as a parameter from which it computes a weight, gets a diagonal like all other parameters.

Sparse features reach a module as :class:`SparseRows`. Its first product, by ``nn.Linear``,
``nn.EmbeddingBag(mode="sum")`` or ``x @ weight``, uses the pair kernels, so that nothing becomes dense. The products
X W and Xᵀ G are each other's derivative, so that double backward works.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.nn.attention import SDPBackend, sdpa_kernel

from gramtower.data.pairs import Block, Features, IdBlock, SparseBlock
from gramtower.distributed.group import Group
from gramtower.engine.kernels import Kernels
from gramtower.engine.towers.branches import Join
from gramtower.engine.towers.layers import InputAffine, InputLinear
from gramtower.engine.towers.steps import Blocks, CurvatureContext, Moment, Named, Values, column_squares, outer, root


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], *inputs: object) -> Any:
    """Call ``module(*inputs)`` with some parameters and buffers replaced, by their first names, and restore them.

    torch.func.functional_call would replace and restore a module that is registered under two names twice, and
    leave it with the replacement. Here every tensor of every module is replaced once.
    """
    names = {id(tensor): name for name, tensor in chain(module.named_parameters(), module.named_buffers())}
    places: dict[str, Tensor] = {}
    for path, part in module.named_modules():  # each once, however many names it has
        for attribute, tensor in chain(part._parameters.items(), part._buffers.items()):
            name = names.get(id(tensor), "")
            if name in tensors:
                places[f"{path}.{attribute}" if path else attribute] = tensors[name]
    return torch.func.functional_call(module, places, inputs, tie_weights=False)


Calls = list[tuple[str, Any, Tensor]]  # names of the layers inside a module that were called, inputs and results
Kwargs = Mapping[str, Any]
_Directions = Mapping[str | int, Tensor | None]  # of parameters by name and of inputs by position
FIRST_LAYER = (
    'a tower over sparse features must begin with nn.Linear, nn.EmbeddingBag(mode="sum"), gramtower.InputLinear or '
    "x @ weight, of all columns or of some, x[:, start:stop]"
)


class SparseRows:
    """A block of sparse rows that supports the few torch functions a first layer calls."""

    def __init__(self, block: SparseBlock, kernels: Kernels) -> None:
        self.block, self.kernels = block, kernels
        self.shape, self.dtype, self.device = torch.Size(block.shape), block.values.dtype, block.values.device

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 2

    def __getitem__(self, index: tuple[slice, slice]) -> SparseRows:
        """Some columns of all rows, ``x[:, start:stop]``."""
        match index:
            case (rows, slice() as columns) if rows == slice(None) and columns.step in (None, 1):
                start, stop, _ = columns.indices(self.shape[1])
                return SparseRows(self.block.columns(start, max(start, stop)), self.kernels)
        raise ValueError(f"sparse features were indexed by {index!r}; only columns can be taken: x[:, start:stop]")

    def __matmul__(self, weight: Tensor) -> Tensor:
        if weight.dim() != 2 or len(weight) != self.shape[1]:
            raise ValueError(f"{self.shape[1]} columns of sparse features met a layer for {len(weight)}")
        return _product(weight, self.block, self.kernels, False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is nn.functional.linear:
            x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            y = x @ weight.t()
            return y if bias is None else y + bias
        if func is nn.functional.embedding_bag:
            if kwargs.get("mode", "mean") != "sum":
                raise ValueError('EmbeddingBag on sparse features: mode must be "sum", so that values are weights')
            return args[0] @ args[1]
        if func in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__):
            return args[0] @ args[1]
        raise ValueError(f"sparse features reached {getattr(func, '__name__', func)}; {FIRST_LAYER}")


def module_input(block: Block, values: Values) -> Any:
    """A block of features, or a step's result, as a module gets it: sparse rows, a tensor of ids, or dense rows."""
    if isinstance(block, SparseBlock):
        return SparseRows(block, values.kernels)
    return block.tensor(values.device) if isinstance(block, IdBlock) else block


class _Product(torch.autograd.Function):
    """B ↦ X B, or Xᵀ B if ``transposed``."""

    @staticmethod
    def forward(ctx: Any, B: Tensor, block: SparseBlock, kernels: Kernels, transposed: bool) -> Tensor:
        ctx.block, ctx.kernels, ctx.transposed = block, kernels, transposed
        out = B.new_zeros(block.shape[transposed], B.shape[1])
        add = kernels.right_sum if transposed else kernels.left_sum
        add(block.pattern, block.values, B.contiguous(), out)
        return out

    @staticmethod
    def jvp(ctx: Any, *d: Any) -> Tensor:
        return _product(d[0], ctx.block, ctx.kernels, ctx.transposed)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None, None, None]:
        return _product(g[0], ctx.block, ctx.kernels, not ctx.transposed), None, None, None


_product: Callable[[Tensor, SparseBlock, Kernels, bool], Tensor] = _Product.apply


@dataclass
class _Kept:
    """The autodiff graph of y and, after the first jvp, that of v ↦ Jᵀv."""

    x: list[Any]  # the inputs of the module
    y: Tensor
    leaves: list[Tensor]
    names: list[str | int]  # names of parameters, positions of inputs
    tables: list[tuple[str, Any]]  # layers inside that look up ids or sparse rows, and their inputs
    v: Tensor | None = None
    pulled: tuple[Tensor | None, ...] = ()


@dataclass
class Opaque(Join):
    """Any module of one or more inputs, differentiated by autodiff."""

    module: nn.Module  # called with its parameters replaced by those of θ
    names: dict[str, str]  # the module's trainable parameters: local name → name within the tower
    title: str = ""  # name for messages; the module's class if empty
    forward_mode: bool | None = None  # whether the jvp is by forward mode; None until the first one

    analytic = False
    kept_copies = 3  # the first jvp adds a second graph

    @property
    def label(self) -> str:
        return self.title or type(self.module).__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.names.values())

    @cached_property
    def _layers(self) -> dict[str, Any]:
        return {name: part for name, part in self.module.named_modules() if type(part) in InputAffine.modules}

    def join(self, x: list[Any], values: Values, out: Tensor | None) -> tuple[Tensor, _Kept]:
        """module(*x), keeping the graph."""
        given: list[Any] = []
        inputs: dict[int, Tensor] = {}
        for position, block in enumerate(x):
            part = module_input(block, values)
            if _is_float(part):
                inputs[position] = part = part.detach().requires_grad_()
            given.append(part)
        y, leaves, calls = self._call(given, values)
        names: list[str | int] = [*inputs, *self.names.values()]
        tables = [(name, x_in) for name, x_in, _ in calls if not _is_float(x_in)]
        return y.detach(), _Kept(given, y, [*inputs.values(), *leaves], names, tables)

    def _call(self, x: list[Any], values: Values) -> tuple[Tensor, list[Tensor], Calls]:
        """The module's result, its parameters as leaves of the graph, and the calls of the layers inside."""
        leaves = {local: values.tensors[name].detach().requires_grad_() for local, name in self.names.items()}
        calls: Calls = []
        hooks = [
            part.register_forward_hook(_recorder(name, calls), with_kwargs=True) for name, part in self._layers.items()
        ]
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the only attention with a second derivative
                y = call_with(self.module, leaves, *x)
        finally:
            for hook in hooks:
                hook.remove()
        if not isinstance(y, Tensor):
            raise ValueError(f"{self.label} returned {type(y).__name__}, expected a tensor")
        return y, list(leaves.values()), calls

    def push(self, saved: _Kept, dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        """J d, by double backward or by forward mode; the first call decides."""
        if not len(saved.y):  # a process without rows; some modules cannot be differentiated twice there
            return torch.zeros_like(saved.y)
        directions = {name: dx[name] if isinstance(name, int) else tangent.get(name) for name in saved.names}
        if self.forward_mode is not None:
            return (self._push_forward if self.forward_mode else self._push_twice)(saved, directions, values)
        own, why = _has_own_functions(saved.y), "a derivative by a function of its own is not that of its gradient"
        for forward in (True, False) if own else (False, True):
            push = self._push_forward if forward else self._push_twice
            try:
                dy = push(saved, directions, values)
                good = not own or _is_adjoint(saved, directions, partial(push, saved, values=values))
            except RuntimeError as error:  # NotImplementedError is one
                if not isinstance(error, NotImplementedError) and "jvp" not in str(error):
                    raise
                why, saved.v, saved.pulled = str(error), None, ()
                continue
            if good:
                self.forward_mode = forward
                return dy
        raise ValueError(
            f"tower: {self.label} has neither a second derivative nor one by forward mode, and this optimizer needs "
            f"one of them ({why}); use optimizer 'lbfgs', 'gd-diag' or 'gd', or other torch functions in the module"
        )

    def _push_twice(self, saved: _Kept, directions: _Directions, values: Values) -> Tensor:
        """∂(Jᵀv)/∂v applied to the direction."""
        if saved.v is None:
            saved.v = torch.zeros_like(saved.y, requires_grad=True)
            if saved.y.requires_grad:
                saved.pulled = torch.autograd.grad(saved.y, saved.leaves, saved.v, create_graph=True, allow_unused=True)
        pulled, along = [], []
        for name, part in zip(saved.names, saved.pulled, strict=False):
            direction = directions[name]
            if part is not None and part.requires_grad and direction is not None:
                pulled.append(part)
                along.append(direction)
        if not pulled:
            return torch.zeros_like(saved.y)
        (dy,) = torch.autograd.grad(pulled, saved.v, along, retain_graph=True, allow_unused=True)
        return torch.zeros_like(saved.y) if dy is None else _own(dy, along)

    def _push_forward(self, saved: _Kept, directions: _Directions, values: Values) -> Tensor:
        """The result of the module on numbers that carry the direction."""
        _prepare_forward_mode()
        with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            duals = {
                name: forward_ad.make_dual(leaf.detach(), direction)  # type: ignore[no-untyped-call]
                for name, leaf in zip(saved.names, saved.leaves, strict=True)
                if (direction := directions[name]) is not None
            }
            tensors = {local: duals.get(name, values.tensors[name]) for local, name in self.names.items()}
            y = call_with(self.module, tensors, *(duals.get(place, x) for place, x in enumerate(saved.x)))
            dy: Tensor | None = forward_ad.unpack_dual(y).tangent  # type: ignore[no-untyped-call]
            given = [d for d in directions.values() if d is not None]
            return torch.zeros_like(saved.y) if dy is None else _own(dy, given)

    def pull(self, saved: _Kept, g: Tensor, values: Values, out: Named, needed: list[bool]) -> list[Tensor | None]:
        """Back-propagation of g."""
        result: list[Tensor | None] = [None] * len(needed)
        parts: tuple[Tensor | None, ...] = (None,) * len(saved.leaves)
        if saved.y.requires_grad and len(saved.y):
            parts = torch.autograd.grad(saved.y, saved.leaves, g, retain_graph=True, allow_unused=True)
        for name, leaf, part in zip(saved.names, saved.leaves, parts, strict=True):
            if isinstance(name, int):
                if needed[name]:
                    result[name] = torch.zeros_like(leaf) if part is None else _own(part, [g])
            elif part is not None:
                out[name] += part
        return result

    def least_block(self, features: Features) -> int:
        # With ids the gradient of a table is as large as the table in every block.
        return features.rows if features.kind == "ids" else super().least_block(features)

    def id_tables(self, side: str, features: Features) -> list[str]:
        """Tables of the layers inside the module."""
        known = {id(p): local for local, p in self.module.named_parameters()}
        tables = [
            known[id(part.weight)]
            for part in self.module.modules()
            if isinstance(part, (nn.Embedding, InputLinear)) and len(part.weight) == features.rows
        ]
        if not tables:
            return super().id_tables(side, features)
        return [self.names[local] for local in tables if local in self.names]

    # The preconditioner.

    def moment(self, saved: _Kept, r: Tensor, some: slice, stride: int) -> Moment:
        """The diagonals of the tables inside, from all rows; a list with one entry per layer."""
        moments: dict[str, Tensor] = {}
        for name, x in saved.tables:
            part = _table_squares(self._layers[name], x, r)
            moments[name] = moments[name] + part if name in moments else part
        return [moments.get(name) for name in self._layers]

    def reduce_moment(self, moment: Moment, group: Group, owned: Collection[str]) -> None:
        known = self._tower_names()
        for layer, part in zip(self._layers.values(), moment if isinstance(moment, list) else (), strict=False):
            if part is not None and known.get(id(layer.weight)) not in owned:
                group.sum_(part)

    def _tower_names(self) -> dict[int, str | None]:
        return {id(p): self.names.get(local) for local, p in self.module.named_parameters()}

    def pull_blocks(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Blocks:
        """Factors of the layers inside, diagonals of the other parameters, and S at the inputs.

        Cost: one forward pass of a sample of rows, and a backward pass for each random vector.
        """
        assert isinstance(moment, list)
        group, sample = context.group, context.sample()
        known, saved = self._tower_names(), sample.saved
        y, leaves, calls = self._call(saved.x, context.values)
        times, tensors = self._calls_per_entity(calls, len(sample.weight), group), {}
        for name in times:
            part = self._layers[name]
            tensors[name] = {known.get(id(part.weight)), known.get(id(getattr(part, "bias", None)))}
        apart = {tensor for name, count in times.items() if not count for tensor in tensors[name]} - {None}
        inside = {tensor for name in times for tensor in tensors[name]} - apart
        others = {
            name: leaf
            for name, leaf in zip(self.names.values(), leaves, strict=True)
            if name not in inside and name in context.factors.trainable
        }
        inputs = {name: x for name, x in zip(saved.names, saved.leaves, strict=True) if isinstance(name, int)}
        draws = self._draws(y, [out for *_, out in calls] + [*inputs.values(), *others.values()], S, context)
        share = 1 / (context.noise.draws * context.rows)
        first = len(calls)
        for position, (name, layer) in enumerate(self._layers.items()):
            own = [(i, x, out) for i, (called, x, out) in enumerate(calls) if called == name]
            if not own or apart & tensors[name]:
                continue
            A = moment[position]
            if A is None:
                parts = [_input_squares(layer, x, sample.weight) for _, x, _ in own]
                A = group.sum_(torch.stack(parts).sum(0))
            squares = [_square(grads[i], grads[i]) for grads in draws for i, *_ in own]
            out_S = group.sum_(torch.stack(squares).sum(0)) * (share / times[name])
            weight, bias = known.get(id(layer.weight)) or "", known.get(id(getattr(layer, "bias", None)))
            context.factors.add(
                weight, bias, type(layer) is not nn.Linear, A, out_S, context.total_weight * times[name]
            )
        for i, name in enumerate(others, first + len(inputs)):
            totals = torch.stack([grads[i].double() for grads in draws])
            totals = totals if name in context.owned else group.sum_(totals)
            context.factors.add_diagonal(name, totals.square().mean(0))
        if context.is_first:
            return {}
        return {
            (a, b): group.sum_(sum((_square(grads[i], grads[j]) for grads in draws), S.new_zeros(()))) * share
            for i, a in enumerate(inputs, first)
            for j, b in enumerate(inputs, first)
        }

    def _calls_per_entity(self, calls: Calls, rows: int, group: Group) -> dict[str, int]:
        """The number of results of each layer for an entity, over all its calls; 0 if some call is not per entity.

        All processes agree, including those without rows and those whose number of rows matches by chance.
        """
        found: dict[str, int] = {}
        for name, x, out in calls:
            count = out.shape[:-1].numel()
            if rows:
                each = 0 if count % rows or _in_bags(self._layers[name], x) else count // rows
            else:
                each = 0 if count else out.shape[1:-1].numel()
            found[name] = 0 if not each or found.get(name) == 0 else found.get(name, 0) + each
        if group.size == 1:
            return found
        everywhere = group.gather_json(found)
        return {
            name: 0 if any(other.get(name) == 0 for other in everywhere) else max(o.get(name, 1) for o in everywhere)
            for name in found
        }

    @staticmethod
    def _draws(y: Tensor, targets: list[Tensor], S: Tensor, context: CurvatureContext) -> list[list[Tensor]]:
        """Random vectors with covariance r_i S at y, pulled back to the targets."""
        noise, sample, R = context.noise, context.sample(), root(S).to(y.dtype)
        result = []
        for draw in range(noise.draws):
            grads: tuple[Tensor | None, ...] = (None,) * len(targets)
            if y.requires_grad and len(y):
                v = noise.rows(draw, sample.numbers, sample.weight, R)
                grads = torch.autograd.grad(y, targets, v, retain_graph=True, allow_unused=True)
            pairs = zip(grads, targets, strict=True)
            result.append([torch.zeros_like(t) if g is None else g for g, t in pairs])
        return result


@cache
def _prepare_forward_mode() -> None:
    """Let torch compile its rules once, without its warnings about its own means of doing so."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore", DeprecationWarning)
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


def _has_own_functions(y: Tensor) -> bool:
    """Whether y was computed with an autograd.Function other than that of sparse rows."""
    seen: set[Any] = set()
    waiting: list[Any] = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction) and type(node).__name__ != f"{_Product.__name__}Backward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def _is_adjoint(saved: _Kept, directions: _Directions, push: Callable[[_Directions], Tensor]) -> bool:
    """Whether ⟨v, J d⟩ = ⟨Jᵀv, d⟩ for random v and d up to rounding, which tf32 makes larger than that of float32."""
    rng = torch.Generator().manual_seed(0)
    drawn = {name: None if d is None else torch.randn(d.shape, generator=rng).to(d) for name, d in directions.items()}
    v, dy = torch.randn(saved.y.shape, generator=rng).to(saved.y), push(drawn)
    pulled = torch.autograd.grad(saved.y, saved.leaves, v, retain_graph=True, allow_unused=True)
    both = zip(pulled, drawn.values(), strict=True)
    back = sum(float((g * d).sum(dtype=torch.float64)) for g, d in both if g is not None and d is not None)
    gap = abs(back - float((v * dy).sum(dtype=torch.float64)))
    level = 1e-8 if dy.dtype == torch.float64 else 3e-3
    return gap <= level * (abs(back) + float(torch.linalg.vector_norm(dy, dtype=torch.float64)))


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _square(g: Tensor, h: Tensor) -> Tensor:
    """Σ g hᵀ over rows, and over all other dimensions before the columns."""
    return (g.reshape(-1, g.shape[-1]).t() @ h.reshape(-1, h.shape[-1])).double()


def _table_squares(layer: Any, x: Any, r: Tensor) -> Tensor:
    """Σ r_i x_ij² for each input j of a layer that looks up ids or sparse rows; zeros if ids do not match entities."""
    if isinstance(x, SparseRows):
        return column_squares(x.block, r)
    part = torch.zeros(len(layer.weight), dtype=torch.float64, device=r.device)
    if not len(r) or x.numel() % len(r) or _in_bags(layer, x):
        return part
    return part.index_add_(0, x.reshape(-1), r.double().repeat_interleave(x.numel() // len(r)))


def _in_bags(layer: nn.Module, x: object) -> bool:
    """Whether the ids of all bags are in one list, so that their entities are unknown."""
    return isinstance(layer, nn.EmbeddingBag) and isinstance(x, Tensor) and x.dim() == 1


def _input_squares(layer: nn.Module, x: Tensor, r: Tensor) -> Tensor:
    """Σ r x xᵀ, with the bias as an input of 1."""
    flat = x.detach().reshape(-1, x.shape[-1])
    spread = r.repeat_interleave(len(flat) // len(r)) if len(r) else r
    return outer(flat, spread, getattr(layer, "bias", None) is not None)


def _own(result: Tensor, given: list[Tensor]) -> Tensor:
    """The result in memory of its own: autodiff may return one of its inputs, or an expanded row."""
    storage = result.untyped_storage().data_ptr()
    shared = any(storage == t.untyped_storage().data_ptr() for t in given)
    return result.clone(memory_format=torch.contiguous_format) if shared or 0 in result.stride() else result


def _recorder(name: str, calls: Calls) -> Callable[..., None]:
    def record(_: nn.Module, inputs: tuple[object, ...], named: dict[str, object], output: Tensor) -> None:
        calls.append((name, inputs[0] if inputs else named.get("input", named.get("x")), output))

    return record

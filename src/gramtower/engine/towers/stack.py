"""Conversion of torch modules to steps, checks of modules, and the memory they need.

``nn.Sequential`` containers are opened at any depth, and the layers of layers.py become steps. The ``forward`` of any
other class is traced (trace.py). Whatever cannot be traced, and modules with hooks, are differentiated by autodiff.

An exact objective over all pairs needs a module that is deterministic, maps every row independently of the others, does
not change its mode, and is differentiable. To check this, a few rows are run through the module, and the torch
functions that ``forward`` calls are recorded, so that an error names the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramtower._util import checks as check
from gramtower.data.pairs import Block, Features
from gramtower.engine.kernels import layout
from gramtower.engine.towers.layers import Affine, Elementwise, InputAffine, Normalise
from gramtower.engine.towers.opaque import Opaque, call_with, module_input
from gramtower.engine.towers.steps import Names, Op, Values
from gramtower.engine.towers.trace import Inputs, Untraceable, trace

STEPS: dict[type[nn.Module], Callable[[Any, Names], Op | None]] = {  # by exact type, above the first layer
    module: step.of_module for step in (Affine, Normalise, Elementwise) for module in step.modules
}
Args = tuple[object, ...]
Kwargs = dict[str, object] | None
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RReLU)


def refuse_unfit(side: str, module: nn.Module) -> None:
    """Refuse modules that mix rows or are random in their current mode."""
    for name, part in module.named_modules():
        where = f"{side} tower, module {name or 'itself'}: {type(part).__name__}"
        if isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None):
            raise ValueError(
                f"{where} in training mode makes rows depend on each other, which the objective over all pairs does "
                "not allow; call .eval() on it, or use nn.LayerNorm"
            )
        if isinstance(part, _DROPOUTS) and part.training and getattr(part, "p", 1.0) > 0:
            raise ValueError(
                f"{where} in training mode is random, so the objective would not be exact; call .eval() on it (or on "
                "the whole tower) and regularise with l2 and embedding_l2"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and (
            part.max_norm is not None or part.scale_grad_by_freq or part.padding_idx is not None
        ):
            raise ValueError(
                f"{where} with max_norm, scale_grad_by_freq or padding_idx has no exact derivative; leave them out"
            )


def steps(module: nn.Module, inputs: Inputs) -> list[Op]:
    """The module as a list of steps."""
    names = {id(p): name for name, p in module.named_parameters()}  # a tensor used twice has one name
    if _has_hooks(module):
        return [opaque(module)]
    try:
        return _stacked(module, inputs.kind, names) or trace(
            module, inputs, names, partial(_recognised, inputs.kind, names)
        )
    except Untraceable:
        return [opaque(module)]


def _stacked(module: nn.Module, kind: str, names: Names) -> list[Op] | None:
    """The steps of nested nn.Sequential containers of known layers; None for anything else."""
    result: list[Op] = []
    for part in _leaves(module):
        step = _recognised(kind, names, part, not result)
        if step is None or (step is not True and not result and not isinstance(step, InputAffine)):
            return None
        if step is not True:
            result.append(step)
    if not result:
        raise ValueError(f"tower {type(module).__name__}: it has no layer; expected at least one")
    return result


def _recognised(kind: str, names: Names, part: nn.Module, first: bool) -> Op | Literal[True] | None:
    """The step of a layer, ``first`` if it reads features; True for a layer that does nothing."""
    if type(part) is nn.Identity or (isinstance(part, _DROPOUTS) and not isinstance(part, nn.RReLU)):
        return True  # refuse_unfit ensures that Dropout is in eval mode
    if first:
        return InputAffine.of_input(part, kind, names)
    return STEPS[type(part)](part, names) if type(part) in STEPS else None


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Parts of nested plain nn.Sequential containers, in order."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def opaque(module: nn.Module) -> Opaque:
    """The whole module as one step, differentiated by autodiff."""
    return Opaque(module, {name: name for name, p in module.named_parameters() if p.requires_grad})


def is_stack(module: nn.Module) -> bool:
    """Whether a module consists only of nested nn.Sequential containers and layers that have steps."""
    known = (*STEPS, *InputAffine.modules, nn.Sequential, nn.Identity, nn.Dropout)
    return all(type(part) in known for part in module.modules()) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return any(map(is_hooked, module.modules()))


def is_hooked(part: nn.Module) -> bool:
    """Whether a module has hooks; those of its submodules do not count."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


_LARGEST_FEATURE = {torch.float32: 1e15, torch.float64: 1e150}  # the squares of 10⁸ rows add up within the dtype


def try_module(side: str, module: nn.Module, rows: Block, row: Block, values: Values) -> tuple[Any, Any]:
    """The results for some rows and for only the first, ``row``; raises ValueError if the module cannot be a tower."""
    where = f"{side} tower: {type(module).__name__}"
    first = _run(module, rows, values)
    second, single = _run(module, rows, values), _run(module, row, values)
    if differ(second.result, first.result):
        raise ValueError(
            f"{where} gives different results for the same rows{_first_difference(second, first)}; the objective over "
            "all pairs needs a deterministic module: call .eval() or remove the noise"
        )
    if differ(single.result, first.result):
        raise ValueError(
            f"{where} gives a row another result when the block has other rows{_first_difference(single, first)}; "
            "each row must be mapped independently (use nn.LayerNorm, not batch statistics)"
        )
    if isinstance(first.result, Tensor) and not first.result.requires_grad:
        stops = [call.name for call in first.calls if call.stops]
        if stops:
            raise ValueError(
                f"{where} has no derivative: its result no longer depends on any trainable parameter after step "
                f"{stops[-1]}; expected a differentiable result (no argmax, detach, no_grad or integers)"
            )
    return first.result, single.result


def check_magnitude(side: str, features: Features, dtype: torch.dtype) -> None:
    """Refuse features whose sums of squares over many rows would overflow the dtype."""
    if not features.arrays or not (numbers := features.arrays[-1]).numel() or not numbers.is_floating_point():
        return
    most = _LARGEST_FEATURE[dtype]
    if float(torch.stack(numbers.aminmax()).abs().max()) > most:
        place = int(numbers.abs().argmax())
        if features.kind == "sparse":
            offsets, columns, _ = features.arrays
            row, column = int(torch.searchsorted(offsets, place, right=True)) - 1, int(columns[place])
        else:
            row, column = divmod(place, features.width)
        given = f"{float(numbers.reshape(-1)[place]):g} at row {row}, column {column}"
        kind = str(dtype).removeprefix("torch.")
        expected = f"numbers of at most {most:g} with towers in {kind}: divide the column by its largest number"
        check.fail(f"{side} features", given, expected)


@contextmanager
def same_mode(side: str, module: nn.Module) -> Iterator[None]:
    """Refuse a module that changes its mode, or that of a submodule, while it is called."""
    modes = [(name, part, part.training) for name, part in module.named_modules()]
    yield
    for name, part, training in modes:
        if part.training != training:
            part.training = training
            raise ValueError(
                f"{side} tower: {type(module).__name__} changes its mode while it is called: module {name or 'itself'} "
                f"({type(part).__name__}) was {'' if training else 'not '}in training mode before; set the mode once, "
                "before it becomes a tower"
            )


@dataclass(frozen=True)
class _Call:
    """One call of a torch function: its name and place, its result, and whether no gradient passes through it."""

    name: str
    result: Any
    stops: bool


@dataclass
class _Calls(TorchFunctionMode):
    """Records the torch functions that a module calls."""

    calls: list[_Call] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    result: Any = None

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            given = any(isinstance(x, Tensor) and x.requires_grad for x in _flat((args, kwargs)))
            place = f" in module {self.inside[-1]}" if self.inside and self.inside[-1] else ""
            name = f"{len(self.calls) + 1}, {getattr(func, '__name__', str(func))}{place}"
            self.calls.append(_Call(name, result, given and not result.requires_grad))
        return result


def _run(module: nn.Module, block: Block, values: Values) -> _Calls:
    """Call the module at θ with gradients enabled."""
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    tensors = {name: t.detach().requires_grad_(name in trainable) for name, t in values.tensors.items()}
    calls = _Calls()

    def leave(*_: object) -> None:
        calls.inside.pop()

    hooks = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, name=name: calls.inside.append(name)))
        hooks.append(part.register_forward_hook(leave))
    try:
        with torch.enable_grad(), calls:
            calls.result = call_with(module, tensors, module_input(block, values))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _flat(x: object) -> Iterator[object]:
    if isinstance(x, (list, tuple)):
        for part in x:
            yield from _flat(part)
    elif isinstance(x, dict):
        yield from _flat(list(x.values()))
    else:
        yield x


def differ(some: object, all_rows: object) -> bool:
    """Whether two results differ by more than rounding in the rows that both have; only floating-point tensors can."""
    if not isinstance(some, Tensor) or not isinstance(all_rows, Tensor) or not some.is_floating_point():
        return False
    if some.dim() and all_rows.dim() and some.shape[1:] == all_rows.shape[1:]:
        all_rows = all_rows[: len(some)]
    if some.shape != all_rows.shape or not some.numel():
        return False
    a, b = some.detach(), all_rows.detach()
    tolerance = 1e-3 if b.dtype == torch.float32 else 1e-7
    return float((a - b).abs().max()) > tolerance * (float(b.abs().max()) + 1e-30)


def _first_difference(some: _Calls, all_rows: _Calls) -> str:
    """A phrase that names the first call whose results differ."""
    for one, other in zip(some.calls, all_rows.calls, strict=False):
        if differ(one.result, other.result):
            return f", first at step {other.name}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of both towers, for planning memory; pairs are (left, right)."""

    columns: int  # k
    row_bytes: tuple[int, int]  # bytes of an entity's activations, with buffers for their changes
    kept_bytes: tuple[int, int] | None = None  # of row_bytes, what is kept as long as a point; None for all of it
    least_block: tuple[int, int] = (1, 1)  # smallest sensible number of rows in a block
    extra: int = 0  # bytes of the preconditioner's factors, and of gradients that autodiff makes
    viewed: tuple[bool, bool] = (False, False)  # whether the outputs are views of θ, which need no memory
    # number of rows in a block → bytes of the features on a GPU, including buffers for passes over sparse features
    features: Callable[[int], int] = lambda rows: 0


def feature_bytes(features: Features, ops: list[Op], values: Values, columns: int) -> Callable[[int], int]:
    """Bytes of the features on a GPU: dense rows; or columns, values, their orders and partial sums of sparse rows."""
    item = values.dtype.itemsize
    if features.kind != "sparse":
        return lambda rows: 0 if features.kind == "ids" else item * features.entries
    offsets, entries, _ = features.arrays
    counts = torch.bincount(entries, minlength=features.width)
    width = ops[0].layer_width(values.tensors) or columns
    bounds = offsets.cpu().numpy()

    def size(rows: int) -> int:
        most = int(np.diff(np.append(bounds[:-1:rows], bounds[-1])).max(initial=0))
        pieces, lines = layout.block_order(counts, features.rows, rows, most)
        pieces = min(pieces, 2 * features.entries + features.rows)
        return (16 + item) * features.entries + 16 * features.rows + layout.PIECE_BYTES * pieces + lines * width * item

    return size


def factor_bytes(ops: list[Op], kind: str, values: Values) -> int:
    """Bytes of A and S of each layer in float64, damped, factorised and inverted."""
    sides: list[int] = []
    first = ops[0].parts
    inputs = {id(op) for op in first if len(first) == 1 or isinstance(op, InputAffine)}
    for part in (part for op in ops for part in op.parts):
        shapes = [values.tensors[name].shape for name in part.parameters if name in values.tensors]
        for shape in (shape for shape in shapes if len(shape) == 2):
            table = kind != "dense" and id(part) in inputs
            sides += [min(shape)] if table else list(shape)  # A of a table is diagonal
    sides += [op.live_columns for op in ops]
    return 8 * 4 * sum(side * side for side in sides)

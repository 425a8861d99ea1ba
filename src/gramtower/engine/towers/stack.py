"""From a torch module to the steps of steps.py, and the refusal of modules that cannot be a tower.

Linear, Embedding, EmbeddingBag, InputLinear, LayerNorm, RMSNorm and elementwise activations have steps of their own.
``nn.Sequential`` is opened, however nested; the ``forward`` of any other class is traced (trace.py); what remains, and
any module that carries hooks, is called as it is.

A few rows through a module as it is, before it becomes a tower: refuses what the objective cannot use, by name.

An objective over all pairs with exact derivatives needs a module that gives the same result each time, maps every row
by itself, keeps its mode, and has a derivative; and features whose squares the dtype can hold. The torch functions that
``forward`` calls are recorded, so that the message names the step that fails.

How many bytes towers take: activations of an entity, features on a GPU, factors of the preconditioner.

What the memory plan (engine/objective/plan.py) asks of towers before anything is allocated. Checked by
tests/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramtower._util import checks as check
from gramtower.data.features import Block, Features, IdBlock, SparseBlock
from gramtower.engine.kernels import layout
from gramtower.engine.kernels.activations import TABLE, activation_of
from gramtower.engine.towers.layers import Affine, Elementwise, InputAffine, InputLinear, Normalise
from gramtower.engine.towers.opaque import Opaque, SparseRows, call_with
from gramtower.engine.towers.steps import Op, Values
from gramtower.engine.towers.trace import Inputs, Untraceable, trace

Names = Mapping[int, str]  # id of a parameter → its name within the tower


def _layer_norm(layer: nn.LayerNorm, names: Names) -> Op | None:
    if len(layer.normalized_shape) > 1:
        return None
    return Normalise(names.get(id(layer.weight)), names.get(id(layer.bias)), layer.eps)


def _rms_norm(layer: nn.RMSNorm, names: Names) -> Op | None:
    if len(layer.normalized_shape) > 1 or layer.eps is None:  # without eps it is that of the dtype
        return None
    return Normalise(names.get(id(layer.weight)), None, layer.eps, centred=False)


STEPS: dict[type[nn.Module], Callable[[Any, Names], Op | None]] = {  # by exact type; first steps are in _input_step
    nn.Linear: lambda layer, names: Affine(names[id(layer.weight)], names.get(id(layer.bias))),
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    **{kind.module: lambda module, names: Elementwise(activation_of(module)) for kind in TABLE},
}
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RReLU)


def refuse_unfit(side: str, module: nn.Module) -> None:
    """Refuse modules known to mix rows or to be random in the mode they are in."""
    for name, part in module.named_modules():
        where = f"{side} tower, module {name or 'itself'}: {type(part).__name__}"
        if isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None):
            raise ValueError(
                f"{where} in training mode makes rows of a block depend on each other, which an objective over "
                "all pairs cannot use; call .eval() on it, or use nn.LayerNorm"
            )
        if isinstance(part, _DROPOUTS) and part.training and getattr(part, "p", 1.0) > 0:
            raise ValueError(
                f"{where} in training mode is random, so that the objective would have no exact value; call .eval() "
                "on it (or on the whole tower) and regularise with l2 and embedding_l2"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and (
            part.max_norm is not None or part.scale_grad_by_freq or part.padding_idx is not None
        ):
            raise ValueError(
                f"{where} with max_norm, scale_grad_by_freq or padding_idx has no exact derivative; leave them out"
            )


def steps(module: nn.Module, kind: str, width: int = 0, codes: bool = False) -> list[Op]:
    """The module as a list of steps.

    Args:
        module: the tower.
        kind: of its features, "ids", "dense" or "sparse".
        width: columns of features; needed for modules other than stacks of known layers.
        codes: whether dense features are integers.
    """
    names = {id(p): name for name, p in module.named_parameters()}  # a tensor used twice has one name
    if _has_hooks(module):
        return [opaque(module)]
    result = _stacked(module, kind, names)
    if result is None:
        try:
            result = trace(module, Inputs(kind, width, codes), names, partial(_recognised, kind, names))
        except Untraceable:
            result = [opaque(module)]
    return result


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
        raise ValueError(f"tower {type(module).__name__}: it does nothing; expected at least one layer")
    return result


def _recognised(kind: str, names: Names, part: nn.Module, first: bool) -> Op | Literal[True] | None:
    """The step of a layer that reads features, or the results of other steps; True if it does nothing."""
    if type(part) is nn.Identity or (isinstance(part, _DROPOUTS) and not isinstance(part, nn.RReLU)):
        return True  # Dropout here is in eval mode: refuse_unfit has seen to that
    if first:
        return _input_step(part, kind, names)
    return STEPS[type(part)](part, names) if type(part) in STEPS else None


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Parts of nested plain nn.Sequential containers, in order."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _leaves(child)
    else:
        yield module


def _input_step(part: nn.Module, kind: str, names: Names) -> Op | None:
    if type(part) is InputLinear:
        return InputAffine(names[id(part.weight)], names.get(id(part.bias)), True, part.in_features)
    if type(part) is nn.Linear and kind != "ids":
        return InputAffine(names[id(part.weight)], names.get(id(part.bias)), False, part.in_features)
    if type(part) is nn.Embedding and kind == "ids":
        return InputAffine(names[id(part.weight)], None, True, part.num_embeddings)
    if type(part) is nn.EmbeddingBag and kind == "sparse" and part.mode == "sum":
        return InputAffine(names[id(part.weight)], None, True, part.num_embeddings)
    return None


def opaque(module: nn.Module) -> Opaque:
    """The whole module as one step, called as it is."""
    return Opaque(module, {name: name for name, p in module.named_parameters() if p.requires_grad})


def is_stack(module: nn.Module) -> bool:
    """Whether it is nothing but nested nn.Sequential containers of layers that have steps."""
    known = (*STEPS, nn.Sequential, nn.Identity, nn.Embedding, nn.EmbeddingBag, InputLinear, nn.Dropout)
    return all(type(part) in known for part in module.modules()) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return any(map(is_hooked, module.modules()))


def is_hooked(part: nn.Module) -> bool:
    """Whether a module itself carries hooks; those of modules inside do not count."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)


_LARGEST_FEATURE = {torch.float32: 1e15, torch.float64: 1e150}  # the squares of 10⁸ rows add up within the dtype


def try_module(side: str, module: nn.Module, rows: Block, row: Block, values: Values) -> tuple[Any, Any]:
    """The module's results for some rows, and for ``row`` alone, which is the first of them.

    Raises:
        ValueError: if it cannot be a tower.
    """
    where = f"{side} tower: {type(module).__name__}"
    first = _run(module, rows, values)
    second, alone = _run(module, rows, values), _run(module, row, values)
    if differ(second.result, first.result):
        raise ValueError(
            f"{where} gives different results for the same rows{_first_difference(second, first)}; the objective over "
            "all pairs needs a deterministic module: call .eval() or take the noise out"
        )
    if differ(alone.result, first.result):
        raise ValueError(
            f"{where} gives a row another result when other rows stand beside it{_first_difference(alone, first)}; "
            "each row must be mapped by itself (use nn.LayerNorm, not batch statistics)"
        )
    if isinstance(first.result, Tensor) and not first.result.requires_grad:
        stops = [call.name for call in first.calls if call.stops]
        if stops:
            raise ValueError(
                f"{where} has no derivative: no trainable parameter reaches its result by derivatives after step "
                f"{stops[-1]}; expected a result that can be differentiated (not argmax, detach, no_grad or integers)"
            )
    return first.result, alone.result


def check_magnitude(side: str, features: Features, dtype: torch.dtype) -> None:
    """Refuse features whose sums of squares over many rows are beyond the dtype."""
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
    """Refuse a module that changes its mode, or that of a module inside, while it is called."""
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
    """One call of a torch function: where and which, its result, and whether derivatives end there."""

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            given = any(isinstance(x, Tensor) and x.requires_grad for x in _flat((args, kwargs)))
            place = f" in module {self.inside[-1]}" if self.inside and self.inside[-1] else ""
            name = f"{len(self.calls) + 1}, {getattr(func, '__name__', str(func))}{place}"
            self.calls.append(_Call(name, result, given and not result.requires_grad))
        return result


def _run(module: nn.Module, block: Block, values: Values) -> _Calls:
    """The module called once at θ, with derivatives."""
    x: Any = block
    if isinstance(block, SparseBlock):
        x = SparseRows(block, values.kernels)
    elif isinstance(block, IdBlock):
        x = block.tensor(values.device)
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    tensors = {name: t.detach().requires_grad_(name in trainable) for name, t in values.tensors.items()}
    calls = _Calls()
    hooks = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(partial(_enter, calls.inside, name)))
        hooks.append(part.register_forward_hook(partial(_leave, calls.inside)))
    try:
        with torch.enable_grad(), calls:
            calls.result = call_with(module, tensors, x)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _enter(inside: list[str], name: str, module: nn.Module, inputs: Any) -> None:
    inside.append(name)


def _leave(inside: list[str], module: nn.Module, inputs: Any, result: Any) -> None:
    inside.pop()


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for part in x:
            yield from _flat(part)
    elif isinstance(x, dict):
        yield from _flat(list(x.values()))
    else:
        yield x


def differ(some: Any, all_rows: Any) -> bool:
    """Whether two results differ beyond rounding where both have rows; what is no tensor of numbers does not count."""
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
    """Where the first call stands whose results differ."""
    for one, other in zip(some.calls, all_rows.calls, strict=False):
        if differ(one.result, other.result):
            return f", first at step {other.name}"
    return ""


@dataclass(frozen=True)
class Sizes:
    """Columns of both towers, bytes of an entity's activations and the least sensible block on each side.

    Attributes:
        factor_bytes: of the preconditioner's factors with what is needed to invert them.
        autodiff: whether a module is differentiated by autodiff, which allocates gradients.
        kept_bytes: of row_bytes, what is kept as long as a point.
        viewed: whether each side's outputs are views of θ, which take nothing.
        feature_bytes: of features on a GPU, and of what passes over sparse ones take in blocks of so many rows.
    """

    columns: int
    row_bytes: tuple[int, int]
    least_block: tuple[int, int]
    factor_bytes: int
    autodiff: bool
    kept_bytes: tuple[int, int]
    viewed: tuple[bool, bool]
    feature_bytes: Callable[[int], int]


def feature_bytes(features: Features, ops: list[Op], values: Values, columns: int) -> Callable[[int], int]:
    """Features as a GPU reads them: dense rows; of sparse ones columns and values, their orders, and lines of sums."""
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
    """A and S of each layer in float64, damped, factorised and inverted."""
    sides: list[int] = []
    first = ops[0].parts
    inputs = {id(op) for op in first if len(first) == 1 or isinstance(op, InputAffine)}
    for part in (part for op in ops for part in op.parts):
        shapes = [values.tensors[name].shape for name in part.parameters if name in values.tensors]
        for shape in (shape for shape in shapes if len(shape) == 2):
            table = kind != "dense" and id(part) in inputs
            sides += [min(shape)] if table else list(shape)  # of a table A is a diagonal
    sides += [op.live_columns for op in ops]
    return 8 * 4 * sum(side * side for side in sides)

"""A few rows through a module as it is, before it becomes a tower: refuses what the objective cannot use, by name.

An objective over all pairs with exact derivatives needs a module that gives the same result each time, maps every row
by itself, keeps its mode, and has a derivative; and features whose squares the dtype can hold. The torch functions that
``forward`` calls are recorded, so that the message names the step that fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gramtower._util import checks as check
from gramtower.data.features import Block, Features, IdBlock, SparseBlock
from gramtower.engine.towers.calls import call_with
from gramtower.engine.towers.sparse import SparseRows
from gramtower.engine.towers.steps import Values

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

"""From a torch module to the steps of steps.py, and the refusal of modules that cannot be a tower.

Linear, Embedding, EmbeddingBag, InputLinear, LayerNorm, RMSNorm and elementwise activations have steps of their own.
``nn.Sequential`` is opened, however nested; the ``forward`` of any other class is traced (trace.py); what remains, and
any module that carries hooks, is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from torch import nn

from gramtower.engine.kernels.activations import TABLE, activation_of
from gramtower.engine.towers.analytic import Affine, Elementwise, InputAffine
from gramtower.engine.towers.layers import InputLinear
from gramtower.engine.towers.opaque import Opaque
from gramtower.engine.towers.scales import Normalise
from gramtower.engine.towers.steps import Op
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

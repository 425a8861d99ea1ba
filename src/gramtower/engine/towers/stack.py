"""From a torch module to the steps of steps.py, and the refusal of modules that cannot be a tower.

``nn.Sequential`` is opened, however nested; Linear, Embedding, EmbeddingBag, InputLinear and elementwise
activations have steps of their own; anything else, and any module that carries hooks, is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from gramtower.engine.kernels.activations import TABLE, activation_of
from gramtower.engine.towers.analytic import Affine, Elementwise, InputAffine
from gramtower.engine.towers.layers import InputLinear
from gramtower.engine.towers.opaque import Opaque
from gramtower.engine.towers.steps import Op

Names = Mapping[int, str]  # id of a parameter → its name within the tower
STEPS: dict[type[nn.Module], Callable[[Any, Names], Op]] = {  # by exact type; first steps are in _input_step
    nn.Linear: lambda layer, names: Affine(names[id(layer.weight)], names.get(id(layer.bias))),
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


def steps(module: nn.Module, kind: str) -> list[Op]:
    """The module as a list of steps for features of that kind ("ids", "dense" or "sparse")."""
    names = {id(p): name for name, p in module.named_parameters()}  # a tensor used twice has one name
    if _has_hooks(module):
        return [_opaque(module, names)]
    result: list[Op] = []
    for part in _leaves(module):
        if not result and (first := _input_step(part, kind, names)) is not None:
            result.append(first)
        elif result and type(part) in STEPS:
            result.append(STEPS[type(part)](part, names))
        elif type(part) is nn.Identity or (isinstance(part, _DROPOUTS) and not isinstance(part, nn.RReLU)):
            continue  # Dropout here is in eval mode: refuse_unfit has seen to that
        else:
            result.append(_opaque(part, names))
    if not result:
        raise ValueError(f"tower {type(module).__name__}: it does nothing; expected at least one layer")
    return result


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


def _opaque(part: nn.Module, names: Names) -> Opaque:
    return Opaque(part, {local: names[id(p)] for local, p in part.named_parameters() if p.requires_grad})


def _has_hooks(module: nn.Module) -> bool:
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )

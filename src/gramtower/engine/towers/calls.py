"""A module called with other tensors in the place of its own, and left as it was.

torch.func.functional_call puts back what it replaced name by name. A module that stands in another under two names, as
a layer used twice does, is replaced twice then, and put back to what the first replacement was. Here every tensor of
every module is replaced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def call_with(module: nn.Module, tensors: Mapping[str, Tensor], *inputs: Any) -> Any:
    """module(*inputs) with some parameters and buffers replaced, by their first names; those used twice everywhere."""
    names = {id(tensor): name for name, tensor in chain(module.named_parameters(), module.named_buffers())}
    places: dict[str, Tensor] = {}
    for path, part in module.named_modules():  # each once, however many names it has
        for attribute, tensor in chain(part._parameters.items(), part._buffers.items()):
            name = names.get(id(tensor), "")
            if name in tensors:
                places[f"{path}.{attribute}" if path else attribute] = tensors[name]
    return torch.func.functional_call(module, places, inputs, tie_weights=False)

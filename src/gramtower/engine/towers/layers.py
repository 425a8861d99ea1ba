"""A first layer whose table is stored feature by feature: x ↦ xᵀW + b for ids, sparse rows and dense rows.

``nn.Embedding`` takes ids and has no bias, ``nn.Linear`` keeps its weight as outputs × inputs, so that one
feature's numbers lie far apart. This layer is both at once; :func:`gramtower.mlp_towers` begins with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class InputLinear(nn.Module):
    """A first layer for towers of your own that takes ids, sparse rows and dense rows alike.

    An affine map of an entity's features, with one contiguous row of weights for each feature.

    Args:
        in_features: number of features, or of entities when they come as ids.
        out_features: number of columns made.
        bias: whether to add a learned row to every output.
        draw: whether weights start as normal numbers from torch's generator; if not, they are what the memory holds.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, draw: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if draw:
            nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the table for ids (LongTensor, one dimension); x W otherwise."""
        y = self.weight[x] if x.dtype == torch.int64 and x.dim() == 1 else x @ self.weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

"""What an activation φ keeps for its derivatives, and how φ′ follows from it.

From the input z by autodiff, for any φ; from the output y where φ′ is a function of it (elu, relu, leaky relu, tanh,
sigmoid), so that nothing is kept besides what the next layer keeps anyway. Checked by tests/test_towers.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

ALL = slice(None)


class FromInput:
    """A pre-activation z that turns into φ′(z) when first asked for."""

    def __init__(self, z: Tensor) -> None:
        self.z: Tensor | None = z
        self.slope: Tensor | None = None

    def of(self, function: Callable[[Tensor], Tensor], rows: slice = ALL) -> Tensor:
        """φ′, of some rows."""
        if self.slope is None:
            assert self.z is not None
            z = self.z.detach().requires_grad_()
            with torch.enable_grad():
                (self.slope,) = torch.autograd.grad(function(z).sum(), z)
            self.z = None
        return self.slope[rows]


class FromOutput:
    """An activation's output y, from which φ′ is worked out wherever it is needed."""

    def __init__(self, y: Tensor, activation: tuple[int, float]) -> None:
        self.y, self.activation = y, activation

    def of(self, function: Callable[[Tensor], Tensor], rows: slice = ALL) -> Tensor:
        """φ′, of some rows."""
        return slope_from_output(self.activation, self.y[rows])


def by_output(module: nn.Module) -> tuple[int, float] | None:
    """The number and constant under which kernels know an activation whose slope follows from its output."""
    if type(module) is nn.ELU and module.alpha > 0:
        return 0, module.alpha
    if type(module) is nn.ReLU:
        return 1, 0.0
    if type(module) is nn.LeakyReLU and module.negative_slope == float(np.float32(module.negative_slope)) > 0:
        return 1, module.negative_slope
    return {nn.Tanh: (2, 0.0), nn.Sigmoid: (3, 0.0)}.get(type(module))


def slope_from_output(activation: tuple[int, float], y: Tensor) -> Tensor:
    """φ′(z) from y = φ(z)."""
    kind, alpha = activation
    if kind == 0:
        return torch.where(y > 0, 1.0, y + alpha)
    if kind == 1:
        return torch.where(y > 0, 1.0, alpha).to(y.dtype)
    return 1 - y.square() if kind == 2 else y * (1 - y)

"""The elementwise activations φ that have analytic steps: one table for users, modules, functions and GPU programs.

An entry of ``TABLE`` defines an activation. If φ′ is a function of the output y = φ(z), it needs no memory besides that
of the next layer's input (on backends with SLOPES_FROM_OUTPUTS); otherwise autodiff computes φ′, which is stored.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gramtower._util import checks as check

ELU, LEAKY_RELU, TANH, SIGMOID = range(4)  # numbers of the GPU programs, see ``_slope`` in programs.py


def _elu_alpha(module: nn.Module) -> float | None:
    return module.alpha if isinstance(module, nn.ELU) and module.alpha > 0 else None


def _leaky_slope(module: nn.Module) -> float | None:
    """The slope below zero, if float32, the type of GPU programs' constants, holds it exactly."""
    slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else 0.0
    return slope if slope == float(np.float32(slope)) > 0 else None


def _no_constant(module: nn.Module) -> float | None:
    return 0.0


def _leaky(y: Tensor, alpha: float) -> Tensor:
    return torch.where(y > 0, 1.0, alpha).to(y.dtype)


@dataclass(frozen=True)
class Kind:
    """An entry of the table."""

    module: type[nn.Module]  # the module that is recognised, by its exact type
    name: str | None = None  # name for users (``mlp_towers(activation=…)``), or None
    slope: Callable[[Tensor, float], Tensor] | None = None  # (y, α) ↦ φ′, if φ′ follows from the output
    # the α of a module, or None if φ′ does not follow from the output with the module's own constants
    constant: Callable[[nn.Module], float | None] = _no_constant
    program: int | None = None  # number of φ′ in the GPU programs; without one, ``slope`` computes it in torch
    # torch functions, and names of tensor methods, that compute the same
    functions: tuple[Callable[..., Tensor] | str, ...] = ()


TABLE = (
    Kind(nn.ELU, "elu", lambda y, alpha: torch.where(y > 0, 1.0, y + alpha), _elu_alpha, ELU, (F.elu,)),
    Kind(nn.ReLU, "relu", _leaky, _no_constant, LEAKY_RELU, (F.relu, torch.relu, "relu")),
    Kind(nn.GELU, "gelu", functions=(F.gelu,)),
    Kind(nn.Tanh, "tanh", lambda y, _: 1 - y.square(), _no_constant, TANH, (F.tanh, torch.tanh, "tanh")),
    Kind(nn.SiLU, "silu", functions=(F.silu,)),
    Kind(nn.Sigmoid, "sigmoid", lambda y, _: y * (1 - y), _no_constant, SIGMOID, (F.sigmoid, torch.sigmoid, "sigmoid")),
    Kind(nn.Softplus, "softplus", functions=(F.softplus,)),
    Kind(nn.LeakyReLU, "leaky_relu", _leaky, _leaky_slope, LEAKY_RELU, (F.leaky_relu,)),
    Kind(nn.SELU, "selu", functions=(F.selu, torch.selu)),
    Kind(nn.Mish, "mish", functions=(F.mish,)),
    Kind(nn.CELU, functions=(F.celu, torch.celu)),
    Kind(nn.Softsign, functions=(F.softsign,)),
    Kind(nn.Hardswish, functions=(F.hardswish,)),
    Kind(nn.ReLU6, functions=(F.relu6,)),
    Kind(nn.LogSigmoid, functions=(F.logsigmoid,)),
    Kind(nn.Hardtanh, functions=(F.hardtanh,)),
)
ACTIVATIONS = {kind.name: kind.module for kind in TABLE if kind.name is not None}
_WITH_SLOPE = re.compile(r"leaky_relu\((0?\.\d{1,6})\)")


def make_activation(argument: str, name: object) -> nn.Module:
    """A new module by name: one of ``ACTIVATIONS``, or "leaky_relu(0.25)" with a slope between 0 and 1."""
    if isinstance(name, str) and (found := _WITH_SLOPE.fullmatch(name)) and float(found[1]):
        return nn.LeakyReLU(float(found[1]))
    return ACTIVATIONS[check.choice(argument, name, (*ACTIVATIONS, "leaky_relu(0.25)"))]()


@dataclass(frozen=True)
class Activation:
    """One module's φ."""

    function: Callable[[Tensor], Tensor]  # φ
    kind: Kind | None = None  # its entry in the table, if φ′ follows from the output; None if φ′ is stored
    alpha: float = 0.0  # its constant

    @property
    def slope_from_output(self) -> bool:
        """Whether φ′ is a function of y = φ(z)."""
        return self.kind is not None

    @property
    def program(self) -> int | None:
        """Number of φ′ in the GPU programs."""
        return None if self.kind is None else self.kind.program

    def slope(self, y: Tensor) -> Tensor:
        """φ′(z) from y = φ(z)."""
        assert self.kind is not None
        assert self.kind.slope is not None
        return self.kind.slope(y, self.alpha)

    def slope_at(self, z: Tensor) -> Tensor:
        """φ′(z) by autodiff."""
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.function(z).sum(), z)
        return slope


def activation_of(module: nn.Module) -> Activation:
    """The activation of a module whose exact type has an entry in the table."""
    kind = next(kind for kind in TABLE if kind.module is type(module))
    alpha = None if kind.slope is None else kind.constant(module)
    function = _out_of_place(module)
    return Activation(function) if alpha is None else Activation(function, kind, alpha)


def _out_of_place(module: nn.Module) -> nn.Module:
    if getattr(module, "inplace", False):
        module = copy.copy(module)
        setattr(module, "inplace", False)  # noqa: B010
    return module

"""Elementwise functions: activations φ of a layer's results, and losses ℓ(y, ŷ) of observed pairs (eq:loss) by name.

An entry of ``TABLE`` defines an activation for users, modules, functions and GPU programs. If φ′ is a function of the
output y = φ(z), it needs no memory besides that of the next layer's input (on backends with SLOPES_FROM_OUTPUTS);
otherwise autodiff computes φ′, which is stored.

    logistic        log(1 + exp(−y ŷ))          labels ±1, the paper's choice
    squared         ½ (y − ŷ)²                  any label; ω = 1 then weighs all pairs alike
    squared_hinge   ½ max(0, 1 − y ŷ)²          labels ±1; equals squared where the margin is under one

    ℓ⁺   = w ℓ(R, ŷ) − ½ω a_i b_j (ỹ − ŷ)²      what the objective is made of (eq:lij)
    ∂ℓ⁺  = w ℓ′ − ω a_i b_j (ŷ − ỹ)             the entries of X (eq:Xij)
    ∂²ℓ⁺ = w ℓ″ − ω a_i b_j

:class:`Scored` computes ℓ⁺ from scores in torch, for any loss; programs.py repeats the three losses for GPUs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

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


Function = Callable[[Tensor, Tensor], Tensor]
LOSS_CHUNK = 1 << 22  # pairs whose loss is computed at a time
_STEP = 1e-3  # of the differences that derivatives are compared with: works for functions that compute in float32


@dataclass(frozen=True)
class Loss:
    """The cost of a wrong score of an observed pair: a loss of your own, as functions of labels and scores.

    It must be convex and twice differentiable in the score ŷ. Each function takes two tensors of one shape, labels y
    and scores ŷ, and returns one number for each pair. A :class:`~gramtower.Problem` compares the derivatives with
    differences of the values at a few points, and refuses a loss whose functions do not agree.

    Attributes:
        value: ℓ(y, ŷ).
        first: ∂ℓ/∂ŷ; None for torch's automatic differentiation of ``value``, element by element.
        second: ∂²ℓ/∂ŷ², never negative; None for automatic differentiation of ``first``, or of ``value`` twice.
        labels: the labels allowed, or None for any finite number.
        name: for messages and saved files.
        program: the number under which the GPU programs (``_terms`` in programs.py) repeat these very functions. None,
            for every loss they do not know, has it computed from the scores by the functions above.

    Example:
        >>> cosh = gt.Loss(
        ...     value=lambda y, s: torch.log(torch.cosh(s - y)),
        ...     first=lambda y, s: torch.tanh(s - y),
        ...     second=lambda y, s: 1 - torch.tanh(s - y) ** 2,
        ...     name="log-cosh",
        ... )
        >>> problem = gt.Problem(sp.eye(4, 3, format="csr"), loss=cosh, imputed=0.0)
        >>> by_value = gt.Loss(value=lambda y, s: torch.log(torch.cosh(s - y)))
        >>> by_value.first(torch.zeros(2), torch.tensor([0.0, 20.0]))
        tensor([0., 1.])
    """

    value: Function
    first: Function = None  # type: ignore[assignment]  # a function once it is made
    second: Function = None  # type: ignore[assignment]
    labels: tuple[float, ...] | None = None
    name: str = "custom"
    program: int | None = None

    def __post_init__(self) -> None:
        if self.first is None:
            object.__setattr__(self, "first", _Derivative(self.value))
        if self.second is None:
            object.__setattr__(self, "second", _Derivative(self.first))


@dataclass(frozen=True)
class _Derivative:
    """∂/∂ŷ of a function of labels and scores, element by element, by torch's automatic differentiation."""

    function: Function

    def __call__(self, y: Tensor, s: Tensor) -> Tensor:
        with torch.enable_grad():
            at = s if s.requires_grad else s.detach().requires_grad_()  # a derivative of a derivative keeps the graph
            values = self.function(y, at)
            if not values.requires_grad:  # does not depend on the score
                return torch.zeros_like(s)
            total, keep = values.sum(), s.requires_grad
            (found,) = torch.autograd.grad(total, at, create_graph=keep, allow_unused=True)
        return torch.zeros_like(s) if found is None else found


def _margin_left(y: Tensor, s: Tensor) -> Tensor:
    return (1 - y * s).clamp_min(0)


LOSSES = {
    loss.name: loss
    for loss in (
        Loss(
            value=lambda y, s: F.softplus(-y * s, threshold=40.0),  # at 20, the default, float64 would lose digits
            first=lambda y, s: -y * torch.sigmoid(-y * s),
            second=lambda y, s: torch.sigmoid(s) * torch.sigmoid(-s),
            labels=(-1.0, 1.0),
            name="logistic",
            program=0,
        ),
        Loss(
            value=lambda y, s: 0.5 * (y - s).square(),
            first=lambda y, s: s - y,
            second=lambda y, s: torch.ones_like(s),
            name="squared",
            program=1,
        ),
        Loss(
            value=lambda y, s: 0.5 * _margin_left(y, s).square(),
            first=lambda y, s: -y * _margin_left(y, s),
            second=lambda y, s: (y * s < 1).to(s.dtype),
            labels=(-1.0, 1.0),
            name="squared_hinge",
            program=2,
        ),
    )
}


def as_loss(loss: str | Loss) -> Loss:
    """A loss by name, or a custom one, whose functions are tried on a few labels and scores."""
    if isinstance(loss, Loss):
        _check_functions(loss)
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        loaded = "; a model that was fitted with its own is loaded with gt.load(path, loss=…)"
        check.fail("loss", repr(loss), f"one of {', '.join(map(repr, LOSSES))}, or a gramtower.Loss{loaded}")
    return LOSSES[loss]


def _check_functions(loss: Loss) -> None:
    """Refuse functions that are not elementwise, a negative curvature, and derivatives that are those of others."""
    labels = torch.tensor(loss.labels or (0.0, 1.0), dtype=torch.float64)
    scores = torch.tensor([-2.0137, -0.2914, 0.0453, 0.7183, 3.0612], dtype=torch.float64)  # unlikely to be kinks
    y, s = labels.repeat_interleave(len(scores)), scores.repeat(len(labels))
    found = {name: _tried(name, getattr(loss, name), y, s) for name in ("value", "first", "second")}
    _compare("first", "value", loss, found, y, s)
    if bool((found["second"] < 0).any()):
        e = int(found["second"].argmin())
        given = f"{float(found['second'][e]):g} at label {float(y[e]):g} and score {float(s[e]):g}"
        check.fail("loss.second", given, "numbers >= 0: the loss must be convex in the score")
    _compare("second", "first", loss, found, y, s)


def _compare(name: str, other: str, loss: Loss, found: dict[str, Tensor], y: Tensor, s: Tensor) -> None:
    """Refuse a derivative that differs from central differences of the function that it should be the derivative of."""
    function = getattr(loss, other)
    slope = (function(y, s + _STEP) - function(y, s - _STEP)) / (2 * _STEP)
    larger = torch.maximum(slope.abs(), found[name].abs())
    noise = 1e-2 * larger + 1e-4 * found[other].abs().nan_to_num(0.0, 0.0, 0.0).max()
    wrong = (found[name] - slope).abs() > noise  # never where something is not finite
    if loss.labels is None:  # the label of plain pairs; formulas of losses for ±1 may hold for no others
        wrong &= y == 1
    if bool(wrong.any()):
        e = int(wrong.int().argmax())
        given = f"{float(found[name][e]):.4g} at label {float(y[e]):g} and score {float(s[e]):g}"
        expected = f"the derivative of loss.{other} in the score, there about {float(slope[e]):.4g}"
        check.fail(f"loss.{name}", given, f"{expected}; or None, for automatic differentiation")


def _tried(name: str, function: Function, y: Tensor, s: Tensor) -> Tensor:
    """The numbers of one function of a loss."""
    found = function(y, s)
    if not isinstance(found, Tensor) or found.shape != s.shape:
        given = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        check.fail(f"loss.{name}", f"{given} for {len(s)} pairs", "a tensor with one number for each pair")
    return found


@dataclass(frozen=True)
class LossTerms:
    """The inputs of ℓ⁺ besides the scores, on the observed pairs in row order."""

    loss: Loss  # ℓ
    labels: Tensor  # R_ij; of stride 0 if all are equal
    omega: float  # ω
    imputed: Tensor | float  # ỹ_ij, or one number for all
    pair_weight: Tensor | None  # a_i b_j, None for ones
    loss_weight: Tensor | None  # w, the weight of each pair's loss, None for ones
    constants: Tensor  # ω and the one number for all, on the device

    def at(self, entries: Tensor) -> LossTerms:
        """Those of some pairs, by number."""
        return replace(
            self,
            labels=self.labels[entries],
            imputed=self.imputed[entries] if isinstance(self.imputed, Tensor) else self.imputed,
            pair_weight=None if self.pair_weight is None else self.pair_weight[entries],
            loss_weight=None if self.loss_weight is None else self.loss_weight[entries],
        )


class Fused(NamedTuple):
    """ℓ⁺ with its derivatives, all from one program."""

    value: Tensor  # Σ_O ℓ⁺, a float64 scalar on the device
    slopes: Tensor  # X of eq:Xij: ∂ℓ⁺/∂ŷ on O, in row order
    curvatures: Tensor  # ∂²ℓ⁺/∂ŷ² on O, in row order


class Scored:
    """ℓ⁺ from the scores ŷ; each quantity is computed when it is needed."""

    def __init__(self, terms: LossTerms, scores: Tensor) -> None:
        self.terms, self.scores = terms, scores

    @cached_property
    def value(self) -> Tensor:
        t = self.terms
        total = torch.zeros((), dtype=torch.float64, device=self.scores.device)
        for part in self._parts():
            total += self._loss(t.loss.value, part).sum(dtype=torch.float64)
            square = self._gap(part).square_()
            if t.pair_weight is not None:
                square *= t.pair_weight[part]
            total -= 0.5 * t.omega * square.sum(dtype=torch.float64)
        return total

    @property
    def slopes(self) -> Tensor:
        t, x = self.terms, torch.empty_like(self.scores)
        for part in self._parts():
            pull = self._gap(part)
            if t.pair_weight is not None:
                pull *= t.pair_weight[part]
            torch.add(self._loss(t.loss.first, part), pull, alpha=-t.omega, out=x[part])
        return x

    @property
    def curvatures(self) -> Tensor:
        t, c = self.terms, torch.empty_like(self.scores)
        for part in self._parts():
            weight = 1.0 if t.pair_weight is None else t.pair_weight[part]
            c[part] = self._loss(t.loss.second, part) - t.omega * weight
        return c

    def _parts(self) -> list[slice]:
        return [slice(start, start + LOSS_CHUNK) for start in range(0, len(self.scores), LOSS_CHUNK)]

    def _loss(self, function: Function, part: slice) -> Tensor:
        """A loss function on some pairs, times the weights of those pairs."""
        values = function(self.terms.labels[part], self.scores[part])
        return values if self.terms.loss_weight is None else values * self.terms.loss_weight[part]

    def _gap(self, part: slice) -> Tensor:
        """ŷ − ỹ on some pairs; a new tensor."""
        imputed = self.terms.imputed
        return self.scores[part] - (imputed[part] if isinstance(imputed, Tensor) else imputed)


Observed: TypeAlias = Scored | Fused  # ℓ⁺ at some scores, with its derivatives

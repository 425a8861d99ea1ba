"""Losses ℓ(y, ŷ) on observed pairs (eq:loss): value, first and second derivative in ŷ, elementwise in torch.

    logistic        log(1 + exp(−y ŷ))          labels ±1, the paper's choice
    squared         ½ (y − ŷ)²                  any label; ω = 1 then weighs all pairs alike
    squared_hinge   ½ max(0, 1 − y ŷ)²          labels ±1; equals squared where the margin is under one

Checked against finite differences and autograd in tests/test_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gramtower import _checks as check

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss, convex and twice differentiable in the score ŷ.

    Each function takes two tensors of one shape, labels y and scores ŷ, and returns one number for each pair.

    Attributes:
        value: ℓ(y, ŷ).
        first: ∂ℓ/∂ŷ.
        second: ∂²ℓ/∂ŷ², never negative.
        labels: the labels allowed, or None for any finite number.
        name: for messages and saved files.
    """

    value: Function
    first: Function
    second: Function
    labels: tuple[float, ...] | None = None
    name: str = "custom"


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
        ),
        Loss(
            value=lambda y, s: 0.5 * (y - s).square(),
            first=lambda y, s: s - y,
            second=lambda y, s: torch.ones_like(s),
            name="squared",
        ),
        Loss(
            value=lambda y, s: 0.5 * _margin_left(y, s).square(),
            first=lambda y, s: -y * _margin_left(y, s),
            second=lambda y, s: (y * s < 1).to(s.dtype),
            labels=(-1.0, 1.0),
            name="squared_hinge",
        ),
    )
}


def as_loss(loss: str | Loss) -> Loss:
    """A loss by name, or the caller's own."""
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str) or loss not in LOSSES:
        check.fail("loss", repr(loss), "one of " + ", ".join(map(repr, LOSSES)) + ", or a gramtower.Loss")
    return LOSSES[loss]

"""Results that a tower's steps hand to each other before they are worked out, so that the next step can join in.

    Shifted   a tensor plus a bias            the next step adds it while it reads the tensor
    Summed    a tensor and lines that add up to its column sums   for the bias of the layer before

Each saves a pass over a rows × width matrix. Used by ops.py; checked by tests/test_towers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shifted:
    """A tensor of somebody else's plus a bias, not yet added."""

    tensor: Tensor
    bias: Tensor | None

    def own(self, room: Tensor | None = None) -> Tensor:
        """The sum, in memory of its own."""
        if self.bias is None:
            return self.tensor.clone() if room is None else room.copy_(self.tensor)
        return torch.add(self.tensor, self.bias, out=room)


@dataclass(frozen=True)
class Summed:
    """What a vjp hands on with its column sums, not yet added up; no tensor if it was added to its place already."""

    tensor: Tensor | None
    lines: Tensor


def settled(x: Any) -> Any:
    """What forward and jvp hand on, as a plain tensor."""
    return x.own() if isinstance(x, Shifted) else x


def pulled(g: Any) -> Any:
    """What vjp hands on, as a plain tensor; None if it is in its place already."""
    return g.tensor if isinstance(g, Summed) else g

"""What an activation φ keeps for its derivatives: its input z, or its output y where φ′ follows from it."""

from __future__ import annotations

from torch import Tensor

from gramtower.kernels.activations import Activation

ALL = slice(None)


class FromInput:
    """A pre-activation z that turns into φ′(z) when first asked for."""

    def __init__(self, z: Tensor, activation: Activation) -> None:
        self.z: Tensor | None = z
        self.activation = activation
        self.slope: Tensor | None = None

    def slopes(self, rows: slice = ALL) -> Tensor:
        """φ′, of some rows."""
        if self.slope is None:
            assert self.z is not None
            self.slope, self.z = self.activation.slope_at(self.z), None
        return self.slope[rows]


class FromOutput:
    """An activation's output y, from which φ′ is computed wherever it is needed."""

    def __init__(self, y: Tensor, activation: Activation) -> None:
        self.y, self.activation = y, activation

    def slopes(self, rows: slice = ALL) -> Tensor:
        """φ′, of some rows."""
        return self.activation.slope(self.y[rows])

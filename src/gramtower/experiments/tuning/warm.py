"""Solutions of finished trials, to start a neighbour from: towers of the same shape, other ω, λ, μ, ν or weights.

A solution is a file with the towers' parameters. Files beyond the budget are dropped, worst trials first, so that what
a trial starts from depends on the finished trials alone and a resumed search goes the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramtower._util.files import replacing
from gramtower.experiments.tuning.space import LOGARITHMIC

SAME = (
    "dim",
    "hidden",
    "normalize",
    "loss",
    "imputed",
    "features",
)  # must be equal: another shape, or another scale of scores
RADIUS = 4.0  # octaves of ω, λ, μ, or quarters of a power, beyond which a cold start is as good


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two settings are apart: octaves of ω, λ, μ and quarters of powers; infinite for other towers."""
    if any(one.get(name) != other.get(name) for name in SAME):
        return math.inf
    steps = []
    for name in ("omega", "l2", "penalty", "frequency_power", "left_power", "right_power"):
        if name in one and name in other:
            a, b = float(one[name]), float(other[name])
            if name in LOGARITHMIC:
                steps.append(math.inf if min(a, b) <= 0 < max(a, b) else math.log2(a / b) if a > 0 else 0.0)
            else:
                steps.append(4 * (a - b))
    return math.hypot(*steps)


def weights_beside(storage: str | Path) -> Path:
    """The folder of solutions that belongs to a log."""
    return Path(str(storage) + ".weights")


class Solutions:
    """Parameters of finished trials in a folder.

    Args:
        folder: where the files are.
        budget: most bytes of files.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        folder.mkdir(parents=True, exist_ok=True)

    def nearest(self, settings: dict[str, Any], finished: Iterable[tuple[int, dict[str, Any]]]) -> int | None:
        """The finished trial with a solution that is nearest to settings, or None if none is near."""
        found = [(distance(settings, other), number) for number, other in finished if self._path(number).exists()]
        near = min(found, default=(math.inf, -1))
        return near[1] if near[0] <= RADIUS else None

    def load(self, number: int) -> Tensor:
        """The parameters of a trial."""
        from safetensors.torch import load_file

        return load_file(self._path(number))["parameters"]

    def keep(self, number: int, parameters: Tensor) -> None:
        """Keep a trial's parameters."""
        from safetensors.torch import save_file

        with replacing(self._path(number)) as partial:
            save_file({"parameters": parameters.detach().to("cpu", torch.float32).contiguous()}, partial)

    def drop(self, values: dict[int, float]) -> None:
        """Drop what is beyond the budget, the worst by ``values`` (number → metric) first."""
        there = sorted((n for n in values if self._path(n).exists()), key=lambda n: (values[n], -n))
        while there and sum(self._path(n).stat().st_size for n in there) > self.budget:
            self._path(there.pop(0)).unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

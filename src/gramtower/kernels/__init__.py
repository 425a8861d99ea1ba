"""The sparse pair operations and a long dot product, and the one place where their implementation is chosen.

Every implementation is a module with these functions, same names, same signatures, same meaning:

    dots(pairs, A, B)                       x_e = a_i · b_j                    for each pair e = (i, j)
    left_sum(pairs, x, B, out)              out += X B                         X the m × n matrix holding x
    right_sum(pairs, x, A, out)             out += Xᵀ A
    curvature_left(pairs, c, P, W, Q, H, out)   z_e = c_e (w_i·q_j + p_i·h_j);  out += Z Q;  returns z
    dot(a, b)                               Σ a_e b_e of two long vectors, accumulated in float64

``reference`` (plain torch) is their definition and works on every device; ``numba`` is for the CPU. The
agreement of all of them is tests/test_kernels.py. Each costs O(|O| k) and makes nothing larger than its result
and a fixed-size buffer.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Protocol, cast

import torch
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.pairs import Pairs

_MODULES = {"reference": "gramtower.kernels.reference", "numba": "gramtower.kernels.cpu"}
BACKENDS = ("auto", *_MODULES)


class Kernels(Protocol):
    """What a kernel module provides; see the first lines of this file."""

    def dots(self, pairs: Pairs, A: Tensor, B: Tensor) -> Tensor:
        """x_e = a_i · b_j."""

    def left_sum(self, pairs: Pairs, x: Tensor, B: Tensor, out: Tensor) -> None:
        """Out += X B."""

    def right_sum(self, pairs: Pairs, x: Tensor, A: Tensor, out: Tensor) -> None:
        """Out += Xᵀ A."""

    def curvature_left(
        self, pairs: Pairs, c: Tensor, P: Tensor, W: Tensor, Q: Tensor, H: Tensor, out: Tensor
    ) -> Tensor:
        """z_e = c_e (w_i·q_j + p_i·h_j) returned; out += Z Q."""

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Σ a_e b_e in float64."""


def select(device: torch.device, backend: str = "auto") -> Kernels:
    """The kernels for a device; ``backend`` asks for one by name.

    Raises:
        ValueError: if ``backend`` is unknown or does not run on ``device``.
    """
    check.choice("kernels", backend, BACKENDS)
    if backend == "auto":
        backend = "reference"
        if device.type == "cpu":
            if importlib.util.find_spec("numba") is not None:
                backend = "numba"
            else:
                warnings.warn(
                    "numba is not installed: pair operations run in plain torch, several times slower "
                    "(pip install numba)",
                    RuntimeWarning,
                    stacklevel=2,
                )
    if backend == "numba" and device.type != "cpu":
        check.fail("kernels", f"'numba' with parameters on {device}", "'auto' or 'reference' on that device")
    return cast(Kernels, importlib.import_module(_MODULES[backend]))

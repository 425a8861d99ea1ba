"""The sparse pair operations and a long dot product, and the one place where their implementation is chosen.

Every implementation is a module with these functions, same names, same signatures, same meaning:

    dots(pairs, A, B)                       x_e = a_i · b_j                    for each pair e = (i, j)
    left_sum(pairs, x, B, out)              out += X B                         X the m × n matrix holding x
    right_sum(pairs, x, A, out)             out += Xᵀ A
    curvature_left(pairs, c, P, W, Q, H, out)   z_e = c_e (w_i·q_j + p_i·h_j);  out += Z Q;  returns z
    inner(a, b)                             Σ a_e b_e of two long vectors, accumulated in float64
    column_sums(x, weight, dtype)           Σ_i weight_i x_i over the rows of a matrix

``reference`` (plain torch) is their definition and works on every device; ``numba`` is for the CPU, ``triton`` for
NVIDIA GPUs. ``triton`` has more, which save passes over memory:

    losses(pairs, P, Q, terms)              Σ_O ℓ⁺, ∂ℓ⁺/∂ŷ, ∂²ℓ⁺/∂ŷ²           for the losses it knows
    loss_left(pairs, P, Q, terms, out, …)   X = ∂ℓ⁺/∂ŷ, or ∂²ℓ⁺ (w·q + p·h); out += X Q; returns x
    slope_product(g, bias, y, φ, out, …)    (g + bias) ∘ φ′                    φ′ from the activation's output y
    column_lines(x, weight, dtype)          fewer rows with the same column sums
    shifted_elu(x, bias, α)                 elu(x + bias)
    take_order(pairs), give_order(…)        the order of the pairs, to be kept in host memory and brought back

The agreement of all of them is tests/test_kernels.py and tests/test_gpu_kernels.py. Each costs O(|O| k) and makes
nothing larger than its result, a fixed-size buffer and a few lines for rows that several programs share.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

import gramtower.kernels.threads  # noqa: F401  # from the start: it sees to processes that are forked
from gramtower import _checks as check
from gramtower.data.pairs import Pairs

_MODULES = {
    "reference": "gramtower.kernels.reference",
    "numba": "gramtower.kernels.cpu",
    "triton": "gramtower.kernels.gpu",
}
_NEEDS = {"numba": ("cpu", "numba"), "triton": ("cuda", "triton")}  # device type, package
BACKENDS = ("auto", *_MODULES)


@dataclass(frozen=True)
class LossTerms:
    """What ℓ⁺ (eq:lij) needs besides the scores, on the observed pairs in row order.

    Attributes:
        loss: the name of a loss.
        labels: R_ij; of stride 0 if all are equal.
        omega: ω.
        imputed: ỹ_ij, or one number for all.
        pair_weight: a_i b_j, None for ones.
        loss_weight: weight of each pair's loss, None for ones.
        constants: ω and the one number for all, on the device.
    """

    loss: str
    labels: Tensor
    omega: float
    imputed: Tensor | float
    pair_weight: Tensor | None
    loss_weight: Tensor | None
    constants: Tensor


class Kernels(Protocol):
    """What a kernel module provides; see the first lines of this file."""

    def dots(self, pairs: Pairs, A: Tensor, B: Tensor) -> Tensor:
        """x_e = a_i · b_j."""

    def left_sum(self, pairs: Pairs, x: Tensor, B: Tensor, out: Tensor) -> None:
        """out += X B."""

    def right_sum(self, pairs: Pairs, x: Tensor, A: Tensor, out: Tensor) -> None:
        """out += Xᵀ A."""

    def curvature_left(
        self, pairs: Pairs, c: Tensor, P: Tensor, W: Tensor, Q: Tensor, H: Tensor, out: Tensor
    ) -> Tensor:
        """z_e = c_e (w_i·q_j + p_i·h_j) returned; out += Z Q."""

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ a_e b_e in float64, a scalar on the device."""

    def column_sums(self, x: Tensor, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Σ_i weight_i x_i in ``dtype`` or that of x."""


def select(device: torch.device, backend: str = "auto") -> Kernels:
    """The kernels for a device; ``backend`` asks for one by name.

    Raises:
        ValueError: if ``backend`` is unknown or does not run on ``device``.
    """
    check.choice("kernels", backend, BACKENDS)
    if backend == "auto":
        backend = next((name for name, (kind, _) in _NEEDS.items() if kind == device.type), "reference")
        package = _NEEDS.get(backend, ("", ""))[1]
        if package and not _installed(package):
            backend = "reference"
            warnings.warn(
                f"{package} is not installed: pair operations run in plain torch, several times slower "
                f"(pip install {package})",
                RuntimeWarning,
                stacklevel=2,
            )
    kind = _NEEDS.get(backend, (device.type, ""))[0]
    if kind != device.type and not (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"):
        check.fail("kernels", f"{backend!r} with parameters on {device}", "'auto' or 'reference' on that device")
    return cast(Kernels, importlib.import_module(_MODULES[backend]))


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

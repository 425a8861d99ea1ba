"""The operations over pairs, rows and long vectors, and the one place where their implementation is chosen.

Every implementation ("backend") is a module with the functions of :class:`Kernels`. ``reference`` (plain torch) defines
them and works on every device; ``numba`` is for the CPU, ``triton`` for NVIDIA GPUs. X is the m × n matrix with the
numbers x_e of the pairs e = (i, j). Each operation costs O(|O| k), or O(size) of its matrix, and allocates nothing
larger than its result, a fixed-size buffer and a few lines for rows that several programs share.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

import gramtower._util.host  # noqa: F401  # registers its fork handler
from gramtower._util import checks as check
from gramtower._util.checks import install_line
from gramtower.data.pairs import Pairs
from gramtower.engine.kernels.elementwise import Activation, LossTerms, Observed
from gramtower.engine.kernels.layout import Order
from gramtower.engine.kernels.reference import RowSystems

_MODULES = {
    "reference": "gramtower.engine.kernels.reference",
    "numba": "gramtower.engine.kernels.cpu",
    "triton": "gramtower.engine.kernels.gpu",
}
_NEEDS = {"numba": ("cpu", "numba"), "triton": ("cuda", "triton")}  # device type, package
BACKENDS = ("auto", *_MODULES)


class Kernels(Protocol):
    """The operations of a backend; reference.py defines and documents each of them."""

    SLOPES_FROM_OUTPUTS: bool  # whether φ′ is computed from activations' outputs if it can be, and not stored
    GATHERS_BFLOAT16: bool  # whether gathered rows may be bfloat16 while the others are float32
    SOLVES_ROWS: bool  # whether systems of rows are worth their time

    def dots(self, pairs: Pairs, A: Tensor, B: Tensor) -> Tensor: ...
    def left_sum(self, pairs: Pairs, x: Tensor, B: Tensor, out: Tensor) -> None: ...
    def right_sum(self, pairs: Pairs, x: Tensor, A: Tensor, out: Tensor) -> None: ...
    def curvature_left(
        self, pairs: Pairs, c: Tensor, P: Tensor, W: Tensor, Q: Tensor, H: Tensor, out: Tensor
    ) -> Tensor: ...
    def solve_left(self, pairs: Pairs, x: Tensor, c: Tensor, B: Tensor, rows: RowSystems) -> Tensor: ...
    def solve_right(self, pairs: Pairs, x: Tensor, c: Tensor, A: Tensor, rows: RowSystems) -> Tensor: ...
    def losses(self, pairs: Pairs, P: Tensor, Q: Tensor, terms: LossTerms) -> Observed: ...
    def loss_left(
        self,
        pairs: Pairs,
        P: Tensor,
        Q: Tensor,
        terms: LossTerms,
        out: Tensor,
        tangents: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None: ...
    def inner(self, a: Tensor, b: Tensor) -> Tensor: ...
    def column_sums(self, x: Tensor, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor: ...
    def column_lines(self, x: Tensor) -> Tensor: ...
    def activate(self, x: Tensor, bias: Tensor, activation: Activation) -> Tensor: ...
    def slope_product(
        self,
        g: Tensor,
        bias: Tensor | None,
        y: Tensor,
        activation: Activation,
        out: Tensor,
        initial: Tensor | None = None,
        scale: float = 1.0,
        sums: bool = False,
    ) -> Tensor | None: ...
    def export_order(self, pairs: Pairs) -> tuple[Order | None, dict[str, Tensor]]: ...
    def import_order(self, pairs: Pairs, order: Order | None, by_columns: dict[str, Tensor] | None) -> None: ...


if TYPE_CHECKING:
    from gramtower.engine.kernels import cpu, gpu, reference

    _complete: tuple[Kernels, ...] = (reference, cpu, gpu)  # checked by mypy: every backend has every operation


def select(device: torch.device, backend: str = "auto") -> Kernels:
    """The kernels for a device, or those of a ``backend`` by name.

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
                f"({install_line(package)})",
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

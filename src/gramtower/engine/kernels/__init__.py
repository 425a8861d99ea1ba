"""The operations over pairs, rows and long vectors, and the one place where their implementation is chosen.

Every implementation ("backend") is a module whose ``KERNELS`` has the methods of :class:`Kernels`. ``reference`` (plain
torch) defines them and works on every device; ``numba`` is for the CPU, ``triton`` for NVIDIA GPUs. X is the
m × n matrix with the numbers x_e of the pairs e = (i, j). Each operation costs O(|O| k), or O(size) of its matrix, and
allocates nothing larger than its result, a fixed-size buffer and a few lines for rows that several programs share.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from functools import cache

import torch

import gramtower._util.host  # noqa: F401  # registers its fork handler
from gramtower._util import checks as check
from gramtower._util.checks import install_line
from gramtower.engine.kernels.reference import Kernels as Kernels

_MODULES = {
    "reference": "gramtower.engine.kernels.reference",
    "numba": "gramtower.engine.kernels.cpu",
    "triton": "gramtower.engine.kernels.gpu",
}
_NEEDS = {"numba": ("cpu", "numba"), "triton": ("cuda", "triton")}  # device type, package
BACKENDS = ("auto", *_MODULES)


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
    found: Kernels = importlib.import_module(_MODULES[backend]).KERNELS
    return found


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

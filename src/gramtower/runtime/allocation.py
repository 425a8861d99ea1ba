"""Large vectors on a CPU, in huge pages where the system has them.

A solver makes several vectors of θ's size in each iteration. The system hands out fresh memory page by page, which
takes longer than writing to it: a copy of 36 MB took 16 ms, and 5 to 8 in huge pages. numpy asks for them, torch does
not. Checked by tests/test_parameters.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes: two huge pages
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def empty_like(vector: Tensor) -> Tensor:
    """An uninitialised vector of the same length, type and device."""
    if vector.device.type != "cpu" or vector.nbytes < _LARGE or vector.dtype not in _NUMPY:
        return torch.empty_like(vector)
    return torch.from_numpy(np.empty(len(vector), _NUMPY[vector.dtype]))

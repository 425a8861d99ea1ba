"""Large vectors on a CPU, in huge pages where the system has them.

A solver makes several vectors of θ's size in each iteration. The system hands out fresh memory page by page, which
takes longer than writing to it: a copy of 36 MB took 16 ms, and 5 to 8 in huge pages. numpy asks for them, torch does
not. :class:`Vectors` does without fresh memory where one iteration drops what the next one needs. Checked by
tests/test_parameters.py.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LARGE = 1 << 22  # bytes: two huge pages
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def empty_like(vector: Tensor) -> Tensor:
    """An uninitialised vector of the same length, type and device."""
    if vector.device.type != "cpu" or vector.nbytes < _LARGE or vector.dtype not in _NUMPY:
        return torch.empty_like(vector)
    return torch.from_numpy(np.empty(len(vector), _NUMPY[vector.dtype]))


class Vectors:
    """Uninitialised vectors on a CPU whose memory is used again once neither they nor views of them are in use.

    They are as many as were ever in use at once, and freed with this object.
    """

    def __init__(self) -> None:
        self._idle: list[NDArray[np.floating]] = []

    def empty_like(self, vector: Tensor) -> Tensor:
        """One of the same length and type."""
        dtype = _NUMPY[vector.dtype]
        fitting = (i for i, array in enumerate(self._idle) if array.dtype == dtype and len(array) == len(vector))
        place = next(fitting, None)
        array = np.empty(len(vector), dtype) if place is None else self._idle.pop(place)
        lent = array.view()  # torch refers to this object as long as any tensor over its memory lives
        weakref.finalize(lent, self._idle.append, array).atexit = False
        return torch.from_numpy(lent)

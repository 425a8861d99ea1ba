"""The sums of group.Digest over the entries of sparse rows, compiled by numba; imported only for many entries."""

from __future__ import annotations

from typing import Any

import numpy as np

from gramtower._util.compiled import compiled
from gramtower.distributed.group import mix

_mix: Any = compiled(inline="always")(mix)


@compiled(nogil=True)
def entry_sums(offsets, columns, values, first, width):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Compute both sums for the rows of ``offsets``; the first row has the global number ``first``."""
    number = np.empty(1, np.float64)
    bits = number.view(np.uint64)
    one, other = np.uint64(0), np.uint64(0)
    for r in range(len(offsets) - 1):
        base = np.uint64(first + r) * np.uint64(width)
        for e in range(offsets[r], offsets[r + 1]):
            number[0] = values[e]
            mixed = _mix(base + np.uint64(columns[e]) + _mix(bits[0]))
            one += mixed
            other += _mix(mixed)
    return np.array([one, other])

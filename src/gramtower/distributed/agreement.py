"""Facts that must be equal in every process, compared before the computation starts.

:func:`agree` compares named facts, and its error names the process that differs. :class:`Digest` is a fingerprint of
rows that does not depend on how they are spread over processes: the sum, modulo 2⁶⁴, of a hash of each entry.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check
from gramtower._util.host import parallel_for
from gramtower.distributed.group import Group

_CHUNK = 1 << 16  # entries at a time, so that what numpy makes of them on the way stays in cache


def agree(group: Group, facts: Mapping[str, object]) -> None:
    """Check that facts are equal in all processes."""
    reports = group.gather_json(dict(facts))
    for name, value in reports[0].items():
        for rank, other in enumerate(reports):
            if other.get(name) != value:
                check.fail(name, f"{other.get(name)!r} in process {rank} of {group.size}", f"{value!r} as in process 0")


def versions() -> dict[str, str]:
    """Versions of packages that must be equal in every process."""
    from importlib.metadata import version

    torch_version = str(torch.__version__).split("+")[0]
    return {
        "version of gramtower": version("gramtower"),
        "version of torch": torch_version,
        "version of numpy": np.__version__,
        "version of python": platform.python_version(),
    }


class Digest:
    """A fingerprint of entries (key, value) in any order: two 64-bit sums."""

    def __init__(self) -> None:
        self._sums = np.zeros(2, dtype=np.uint64)

    def add(self, keys: NDArray[np.integer], values: NDArray[np.number]) -> Digest:
        """Add entries: a distinct integer and a number for each."""
        return self._add(len(keys), lambda part: keys[part].astype(np.uint64), values)

    def add_rows(self, array: ArrayLike | None, first: int) -> Digest:
        """Add an array whose first row has the global number ``first``; None adds nothing."""
        if array is None:
            return self
        plain = np.asarray(array)
        begin = first * (plain[:1].size or 1)
        flat = np.ascontiguousarray(plain).reshape(-1)
        return self._add(
            len(flat), lambda part: np.arange(part.start + begin, part.stop + begin, dtype=np.uint64), flat
        )

    def add_sums(self, sums: NDArray[np.uint64]) -> Digest:
        """Add the sums of another Digest or of entry_sums."""
        with np.errstate(over="ignore"):
            self._sums = self._sums + sums
        return self

    def text(self, group: Group) -> str:
        """The sums over all processes, in hexadecimal."""
        parts = group.gather_json([int(x) for x in self._sums])
        return "".join(f"{sum(part[half] for part in parts) % 2**64:016x}" for half in range(2))

    def _add(self, total: int, keys: Callable[[slice], NDArray[np.uint64]], values: NDArray[np.number]) -> Digest:
        bounds = [*range(0, total, _CHUNK), total]
        sums: NDArray[np.uint64] = np.zeros((len(bounds), 2), np.uint64)

        def work(start: int, stop: int) -> None:
            with np.errstate(over="ignore"):
                part = slice(start, stop)
                bits = np.ascontiguousarray(values[part], dtype=np.float64).view(np.uint64)
                mixed = mix(keys(part) + mix(bits))
                sums[start // _CHUNK] = mixed.sum(), mix(mixed).sum()

        parallel_for(work, bounds)
        return self.add_sums(sums.sum(axis=0, dtype=np.uint64))


def mix(x: Any) -> Any:
    """Apply the final steps of splitmix64 to a number or an array: every bit of x changes every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)

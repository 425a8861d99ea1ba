"""What the host has: its memory, or what a container or a batch job may have of it; numba."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALL = 1 << 18  # bytes; the system keeps count of mappings, and allows some ten thousand
_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of cgroups, version 2 and 1
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_CPU_V1 = Path("/sys/fs/cgroup/cpu")
_OWN_GROUPS = "/proc/self/cgroup"  # lines of number:controllers:group; version 2 has no controllers there


def memory_size() -> int:
    """Bytes of the host, whoever uses them now; in a container or a batch job at most its limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files():
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such control, or "max"
            continue
    return min(limits)


def memory_left() -> int | None:
    """Bytes that a container or a batch job may still take; None without a limit.

    Its files that are in memory, and were not used lately, count as free: the system gives them up for others.
    """
    left = []
    for path in _limit_files():
        with contextlib.suppress(OSError, ValueError):
            limit = int(path.read_text())
            used = _number(path.with_name(_USED.get(path.name, path.name + "-used")))
            left.append(max(0, min(limit, limit - used + _inactive_files(path.with_name("memory.stat")))))
    return min(left, default=None)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _inactive_files(path: Path) -> int:
    """Of a memory.stat; version 1 counts those of inner groups apart."""
    with contextlib.suppress(OSError, ValueError):
        found = dict(line.split() for line in path.read_text().splitlines())
        return int(found.get("total_inactive_file", found.get("inactive_file", 0)))
    return 0


def _limit_files() -> list[Path]:
    """Where limits of this process may stand: of the outermost control group, its own, and those between."""
    files = [Path(path) for path in _CONTAINER]
    with contextlib.suppress(OSError):  # a system without control groups
        for line in Path(_OWN_GROUPS).read_text().splitlines():
            controllers, group = line.split(":", 2)[1:]
            if not controllers or "memory" in controllers.split(","):
                root = Path(_CONTAINER[1 if controllers else 0])
                inner = Path(group.lstrip("/"))
                files += [root.parent / folder / root.name for folder in (inner, *inner.parents)]
    return files


def cpu_count() -> int:
    """CPUs that this process may use: those of its affinity mask, and at most the quota of its container."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # no such mask on this system
        count = os.cpu_count() or 1
    quotas = [count]
    for folder in {path.parent for path in _limit_files()}:
        with contextlib.suppress(OSError, ValueError, IndexError):
            quota, period = (folder / "cpu.max").read_text().split()[:2]
            quotas.append(math.ceil(int(quota) / int(period)))
    with contextlib.suppress(OSError, ValueError):  # version 1
        most, of = (int((_CPU_V1 / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if most > 0:
            quotas.append(math.ceil(most / of))
    return max(1, min(quotas))


def running_tasks() -> int:
    """Threads of all processes that run or could run now, this one among them; 1 where the system does not tell."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1


def own_pages(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """An array in small pages of its own, unless it is small itself; nothing is in it yet.

    Only what has been written to takes memory, and the system gets it back as soon as the array is freed. Arrays of the
    C library's heap leave holes there, which count as memory in use until something fits into them.
    """
    kind = np.dtype(dtype)
    if size * kind.itemsize < _SMALL:
        return np.empty(size, kind)
    pages = mmap.mmap(-1, size * kind.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # huge ones are taken whole as soon as one byte is written
        with contextlib.suppress(OSError):  # the system knows of none
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, kind)


def return_memory() -> None:
    """Give what was freed back to the system, where the C library has a call for it; it may keep it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


@cache
def has_numba() -> bool:
    """Whether compiled code can be had; without numba everything runs in numpy, scipy and torch."""
    return importlib.util.find_spec("numba") is not None

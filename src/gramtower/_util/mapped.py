"""Pages of a mapped file that this process need not keep: they stay in the system's cache, and come back when read.

Only what /proc/self/maps calls a mapping of that very file is given up, and only pages that nothing was written to:
anything else is left as it is, as are all systems but Linux.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from torch import Tensor

_DONT_NEED = 4  # MADV_DONTNEED
_FIELDS = 5  # of a line of /proc/self/smaps before the path


def release(path: Path, tensor: Tensor) -> int:
    """Give up a tensor's pages of a mapped file; returns how many bytes."""
    start = tensor.data_ptr()
    span = _mapping(path, start, start + tensor.numel() * tensor.element_size())
    if span is None or not tensor.is_contiguous():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    first, size = span
    return size if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONT_NEED) == 0 else 0


def _mapping(path: Path, start: int, stop: int) -> tuple[int, int] | None:
    """The whole pages between two addresses, first and size, if they are an unwritten mapping of the file."""
    if sys.platform != "linux":
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-start // page) * page, stop // page * page
    try:
        inode, lines = path.stat().st_ino, Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    inside = False
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):  # the head of a mapping: addresses, rights, offset, device, inode, path
            low, _, high = words[0].partition("-")
            inside = int(low, 16) <= first and last <= int(high, 16) and words[_FIELDS - 1] == str(inode)
        elif inside and words[0] in ("Private_Dirty:", "Anonymous:") and words[1] != "0":
            return None  # something was written into it, which only this process has
        elif inside and words[0] == "VmFlags:":
            return (first, last - first) if last > first else None
    return None

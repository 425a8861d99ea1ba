"""What the host has: its memory, or what a container may have of it. Checked by tests/test_memory.py."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_size() -> int:
    """Bytes of the host, whoever uses them now; in a container at most its limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CONTAINER:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such control, or "max"
            continue
    return min(limits)

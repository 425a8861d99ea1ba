"""Circumstances of a timing: versions, machine, and the load by other processes."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from gramtower import __version__

_PACKAGE = Path(__file__).resolve().parent.parent
_STAT = Path("/proc/stat")


def environment() -> dict[str, object]:
    """Return the machine and the versions that a run runs with."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        processor = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), processor)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gramtower": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str | None:
    """Return the commit of this code, with a + if files were changed since; None outside its repository."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # not a repository, or another project's that this package is only installed in
    head = _git("rev-parse", "--short=12", "HEAD")
    return head if head is None or not _git("status", "--porcelain", "--", ".") else head + "+"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class OthersBusy:
    """Measures how many cores other processes keep busy, starting from its construction."""

    def __init__(self) -> None:
        self.start = _reading()

    def cores(self) -> float | None:
        """Return the average number of cores that others kept busy so far; None on systems other than Linux."""
        now = _reading()
        if self.start is None or now is None:
            return None
        wall, total, process = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, total - process) / max(wall, 1e-9)


def _reading() -> tuple[float, float, float] | None:
    """Return wall time, CPU seconds of all processes, and CPU seconds of this process."""
    try:
        fields = [int(x) for x in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    idle = fields[3] + fields[4]  # also waiting for disks
    process = os.times()
    return time.monotonic(), (sum(fields) - idle) / ticks, process.user + process.system

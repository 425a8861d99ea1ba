"""What every benchmark shares: timing, the environment it ran in, and the result file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gramtower


def median_seconds(function: Callable[[], Any], repeats: int = 9, warmup: int = 2) -> float:
    """Median wall time of a call."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def side_by_side(functions: dict[str, Callable[[], Any]], repeats: int = 25, warmup: int = 3) -> dict[str, list[float]]:
    """Wall times of several calls taken in turn, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if repeat >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(times: dict[str, list[float]], name: str, floor: str) -> float:
    """Median over repeats of time over floor, both from the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[floor], strict=True))


def environment() -> dict[str, Any]:
    """Where and with what this ran."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            processor = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), processor)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gramtower": gramtower.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Save a result with its environment under benchmarks/results/."""
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"environment": environment(), **result}, indent=2) + "\n")
    partial.replace(path)
    return path

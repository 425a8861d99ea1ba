"""What every benchmark shares: timing, the environment it ran in, and the result file."""

from __future__ import annotations

import json
import lzma
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

import gramtower
from gramtower._util.files import write_text


def median_seconds(function: Callable[[], Any], repeats: int = 9, warmup: int = 2) -> float:
    """Median wall time of a call."""
    return statistics.median(side_by_side({"": function}, repeats, warmup)[""])


def best_seconds(function: Callable[[], Any], repeats: int = 9, warmup: int = 1) -> float:
    """Least wall time of a call."""
    return min(side_by_side({"": function}, repeats, warmup)[""])


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


def movielens_pairs(path: Path, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Ratings of 4 and 5 as pairs labelled 1, split 9:1 at random into training and test, as in the paper's ml1m."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        ratings = np.array([[int(x) for x in line.split("::")[:3]] for line in lines])
    liked = ratings[ratings[:, 2] >= 4]
    users, rows = np.unique(liked[:, 0], return_inverse=True)
    items, columns = np.unique(liked[:, 1], return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(liked))
    cut = len(liked) // 10

    def matrix(chosen: np.ndarray) -> sp.csr_matrix:
        ones = np.ones(len(chosen), dtype=np.float32)
        return sp.csr_matrix((ones, (rows[chosen], columns[chosen])), shape=(len(users), len(items)))

    return matrix(order[cut:]), matrix(order[:cut])


def random_pairs(m: int, n: int, count: int, device: torch.device, seed: int = 0) -> sp.csr_matrix:
    """Exactly ``count`` different pairs, made on a device; entities have log-normal popularity."""
    generator = torch.Generator(device).manual_seed(seed)
    shares = [
        torch.randn(size, generator=generator, device=device, dtype=torch.float64).mul(1.2).exp().cumsum(0)
        for size in (m, n)
    ]

    def draw(share: torch.Tensor, size: int) -> torch.Tensor:
        u = torch.rand(size, generator=generator, device=device, dtype=torch.float64) * share[-1]
        return torch.searchsorted(share, u).clamp_max(len(share) - 1)

    keys = torch.empty(0, dtype=torch.int64, device=device)
    while len(keys) < count:
        more = int(1.1 * (count - len(keys))) + 1000
        keys = torch.cat([keys, draw(shares[0], more) * n + draw(shares[1], more)]).unique()
    keys = keys[torch.randperm(len(keys), generator=generator, device=device)[:count].sort().values]
    columns = (keys % n).to(torch.int32).cpu().numpy()
    counts = torch.bincount(keys // n, minlength=m)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu().numpy()
    return sp.csr_matrix((np.ones(count, np.float32), columns, offsets), shape=(m, n))


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


def write_result(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Save a result with its environment under benchmarks/results/, or in another folder."""
    folder = Path(__file__).parent / "results" if folder is None else folder
    path = folder / f"{name}.json"
    write_text(path, json.dumps({"environment": environment(), **result}, indent=2) + "\n")
    return path

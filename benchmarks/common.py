"""Helpers of all benchmarks: timing, data sets, and the result files."""

from __future__ import annotations

import json
import lzma
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from gramtower._util.files import write_text
from gramtower.experiments.run_store import environment

RESULTS = Path(__file__).resolve().parent / "results"


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


def write_result(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Save a result with its environment in benchmarks/results/ or in another folder.

    ``FILE/SECTION`` replaces one section of FILE.json and keeps the others; a plain name is a file with one result.
    """
    stem, _, section = name.partition("/")
    path = (RESULTS if folder is None else folder) / f"{stem}.json"
    found = {"environment": environment(), **result}
    if section:
        found = {**(json.loads(path.read_text()) if path.exists() else {}), section: found}
    write_text(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return path


def read_result(name: str, folder: Path | None = None) -> dict[str, Any]:
    """The result that was saved under a name, or an empty dictionary."""
    stem, _, section = name.partition("/")
    path = (RESULTS if folder is None else folder) / f"{stem}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found.get(section, {}) if section else found

"""Helpers of all benchmarks: timing, data sets, and the result files.

Results go to benchmarks/results/, or to the folder GRAMTOWER_RESULTS. GRAMTOWER_COMMIT is the commit that they name
where the code is a copy outside its repository.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from gramtower._util.compiled import compiled
from gramtower._util.files import write_text
from gramtower._util.host import parallel_for
from gramtower.experiments import run_store

_SCALE = 1.0 / (1 << 53)
_FIRST = 10.0  # added to ranks, so that the most popular entity does not have most pairs
_OWN = 0.6  # share of draws from the row's own group
_HERE = Path(__file__).resolve().parent / "results"
RESULTS = Path(os.environ.get("GRAMTOWER_RESULTS", _HERE))
#: Whether results go elsewhere, as those of a try do: then any size is written.
ELSEWHERE = RESULTS.resolve() != _HERE


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    given = os.environ.get("GRAMTOWER_COMMIT")
    return run_store.environment() | ({"commit": given} if given else {})


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


def random_pairs(
    m: int, n: int, count: int, device: torch.device, seed: int = 0, groups: int = 1, affinity: float = 0.8
) -> sp.csr_matrix:
    """Exactly ``count`` different pairs, made on a device; entities have log-normal popularity.

    With more groups than one, so many parts of the right entities belong to as many parts of the left ones, and a share
    ``affinity`` of the draws stays within them, so that there is something to learn.
    """
    generator = torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float64}
    left, right = (torch.randn(size, **options).mul(1.2).exp().cumsum(0) for size in (m, n))
    ends = right[torch.arange(1, groups + 1, device=device) * n // groups - 1]
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])

    def draw(size: int) -> torch.Tensor:
        rows = torch.searchsorted(left, torch.rand(size, **options) * left[-1]).clamp_max(m - 1)
        u = torch.rand(size, **options)
        if groups == 1:
            place = u * right[-1]
        else:
            own, group = torch.rand(size, **options) < affinity, rows % groups
            low, high = torch.where(own, starts[group], 0.0), torch.where(own, ends[group], right[-1])
            place = low + u * (high - low)
        return rows * n + torch.searchsorted(right, place).clamp_max(n - 1)

    keys = torch.empty(0, dtype=torch.int64, device=device)
    while len(keys) < count:
        more = int(1.1 * (count - len(keys))) + 1000
        keys = torch.cat([keys, draw(more)]).unique()
    keys = keys[torch.randperm(len(keys), generator=generator, device=device)[:count].sort().values]
    columns = (keys % n).to(torch.int32).cpu().numpy()
    counts = torch.bincount(keys // n, minlength=m)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu().numpy()
    return sp.csr_matrix((np.ones(count, np.float32), columns, offsets), shape=(m, n))


def grouped_pairs(m: int, n: int, count: int, groups: int = 64, seed: int = 0) -> sp.csr_matrix:
    """Exactly ``count`` different pairs, made by all cores; ``count`` is at least m, and far below m · n.

    Left entities have log-normal numbers of pairs, at least one each. Right entities are drawn with probabilities that
    fall with the power 3/4 of their rank; three of five draws are from the group of the left entity, so that a low
    rank explains most pairs. Every row has a generator of its own, seeded by its number, so that the pairs do not
    depend on the number of threads. Cost: some 0.2 µs for each pair and core, 12 bytes for each pair, 28 for each row.
    """
    most = max(1, min(n // 4, 400))
    bounds = [*range(0, m, 1 << 16), m]
    weights = np.empty(m, np.float32)
    parallel_for(lambda low, high: _draw_weights(low, high, seed, weights), bounds)
    weights *= (count - m) / weights.sum(dtype=np.float64)
    counts = np.minimum(1 + weights.astype(np.int64), most)
    while (missing := count - int(counts.sum())) > 0:
        able = np.flatnonzero(counts < most)[:missing]
        if not len(able):
            raise ValueError(f"count: got {count}, expected at most {m * most}")
        counts[able] += 1
    offsets = np.zeros(m + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    factor = int(0.618 * n) | 1  # spreads popular entities over all numbers
    while math.gcd(factor, n) > 1:
        factor += 2
    columns = np.empty(count, np.int32)
    parallel_for(lambda low, high: _draw_columns(low, high, seed, n, groups, factor, offsets, columns), bounds)
    return sp.csr_matrix((np.ones(count, np.float32), columns, offsets), shape=(m, n))


@compiled(nogil=True, inline="always")
def _next(state):
    """The next state of splitmix64, and a number from 0 to 1 made of it."""
    state += np.uint64(0x9E3779B97F4A7C15)
    z = state
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return state, np.float64(z >> np.uint64(11)) * _SCALE


@compiled(nogil=True, inline="always")
def _seeded(seed, row):
    state, _ = _next(np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(row) * np.uint64(0xA24BAED4963EE407))
    return state


@compiled(nogil=True)
def _draw_weights(low, high, seed, weights):
    """Log-normal numbers of the rows ``low`` to ``high``."""
    for i in range(low, high):
        state = _seeded(seed + 1, i)
        state, u = _next(state)
        state, v = _next(state)
        weights[i] = np.exp(np.sqrt(-2.0 * np.log(1.0 - u)) * np.cos(2.0 * np.pi * v))


@compiled(nogil=True)
def _draw_columns(low, high, seed, n, groups, factor, offsets, columns):
    """Different columns for each of the rows ``low`` to ``high``, increasing."""
    first = _FIRST**0.25
    width = (n + _FIRST) ** 0.25 - first
    for i in range(low, high):
        state, own = _seeded(seed, i), i % groups
        start, end, e = offsets[i], offsets[i + 1], offsets[i]
        while e < end:
            state, u = _next(state)
            root = first + u * width
            root *= root
            rank = min(n - 1, np.int64(root * root - _FIRST))
            state, u = _next(state)
            if u < _OWN and rank - rank % groups + own < n:
                rank += own - rank % groups
            j = rank * factor % n
            place = e
            while place > start and columns[place - 1] > j:
                place -= 1
            if place > start and columns[place - 1] == j:
                continue
            for after in range(e, place, -1):
                columns[after] = columns[after - 1]
            columns[place] = j
            e += 1


def write_result(name: str, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Save a result with its environment in benchmarks/results/ or in another folder.

    ``FILE/SECTION`` replaces one section of FILE.json and keeps the others; a plain name is a file with one result.
    """
    stem, _, section = name.partition("/")
    path = (RESULTS if folder is None else folder) / f"{stem}.json"
    found = {"environment": environment(), **result}
    if section:
        found = {**(json.loads(path.read_text()) if path.exists() else {}), section: found}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    lists = re.sub(r"\[\s+([^][{}\"]+?)\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    write_text(path, lists + "\n")  # a list of numbers is on one line
    return path


def read_result(name: str, folder: Path | None = None) -> dict[str, Any]:
    """The result that was saved under a name, or an empty dictionary."""
    stem, _, section = name.partition("/")
    path = (RESULTS if folder is None else folder) / f"{stem}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found.get(section, {}) if section else found

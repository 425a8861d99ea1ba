"""Lists of all left entities, against their score products: `python benchmarks/bench_lists.py [--device cuda]`.

100,000 x 100,000 entities at dimension 128 by default, lists of 100, ten seen pairs a left entity left out, text ids.
Timed by turns, medians of the ratios within each round:

    products   the scores of everyone and nothing else, in blocks of whole rows into one buffer
    tiles      the same in the tiles that lists are made of, each thread for itself (CPU only)
    lists      products and ranking, lists handed out in memory
    file       `recommend_all`: lists to a Parquet file, ids and the join of its parts included; left out, with a line
               that says so, where polars is not installed, and the memory of the host with it

The floor of a round is the faster of the two products. Bounds: lists and file at most 1.3 times the floor on two
cores, and lists at most 2 times the products on a GPU, where the file, which the host writes, is timed as well.
Processor seconds are kept too: they say more where others use the machine. Peak memory is that of a fresh process
beyond the model. Embeddings are random: what is timed does not depend on how good they are, but ranking is cheaper
where the best columns come first. Writes the section <device> of benchmarks/results/lists.json at the default sizes.

With --rules: lists by rules (docs/how-to/ranking.md) against plain ones, by turns, for 10,000 left entities and lists
of 10, and for one left entity. Rules are read once from a table of the right entities, whose seconds are printed.
Bound: 1.5 times for filters, allow lists, boosts, popularity and least scores; quotas and diversity have none. Writes
the section <device>-rules.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from bench_engine import _resident, _status
from common import ELSEWHERE, median_ratio, write_result

from gramtower._util.host import pool
from gramtower.data.entity_table import EntityTable
from gramtower.model.feature_spec import Ids
from gramtower.model.fitted import write_lists
from gramtower.retrieval.list_rules import Rules, make_rules
from gramtower.retrieval.topk import Ranking, checked_ranking, ranking, rows_in_block, tile_shape

WRITES = importlib.util.find_spec("polars") is not None


def made(left: int, right: int, dim: int, seen: int) -> tuple[Ids, tuple[int, int], Ranking]:
    """Text ids of entities, their numbers, and a ranking by random embeddings with seen pairs."""
    g, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    P, Q = torch.randn(left, dim, generator=g), torch.randn(right, dim, generator=g)
    columns = rng.integers(0, right, (left, seen)).astype(np.int32)
    pairs = sp.csr_matrix(
        (np.ones(columns.size, np.float32), columns.ravel(), np.arange(left + 1) * seen), (left, right)
    )
    pairs.sum_duplicates()
    users = np.array([f"user-{i:07d}" for i in range(left)], object)
    items = np.array([f"item-{i:07d}" for i in range(right)], object)
    return (users, items), (left, right), ranking(P, Q, exclude=pairs)


def products(P: torch.Tensor, Q: torch.Tensor) -> None:
    size = rows_in_block(len(Q), len(P), P.device)
    buffer = torch.empty(size, len(Q), device=P.device)
    for start in range(0, len(P), size):
        part = P[start : start + size]
        torch.mm(part, Q.t(), out=buffer[: len(part)])
    if P.is_cuda:
        torch.cuda.synchronize()


def tile_products(P: torch.Tensor, Q: torch.Tensor) -> None:
    threads = torch.get_num_threads()
    height, width = tile_shape(len(P), len(Q), threads)
    across = [Q[first : first + width].t() for first in range(0, len(Q), width)]

    def work(start: int) -> None:
        part = P[start : start + height]
        buffer = torch.empty(len(part) * width)
        for right in across:
            torch.mm(part, right, out=buffer[: len(part) * right.shape[1]].view(len(part), -1))

    for _ in pool(threads).map(work, range(0, len(P), height)):
        pass


def measured(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Wall and processor seconds of each way, by turns, after a warm-up."""
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in ways} for kind in ("wall", "processor")}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            wall, processor = time.perf_counter(), time.process_time()
            way()
            if repeat:
                times["wall"][name].append(time.perf_counter() - wall)
                times["processor"][name].append(time.process_time() - processor)
    return times


def times_of(options: argparse.Namespace) -> dict[str, Any]:
    ids, shape, ranked = made(options.left, options.right, options.dim, options.seen)
    device = torch.device(options.device)
    P, Q = ranked.P.to(device), ranked.Q.to(device)

    def lists() -> None:
        for _ in ranked._replace(P=P, Q=Q).lists(options.k):
            pass

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lists.parquet"
        ways: dict[str, Callable[[], Any]] = {"products": lambda: products(P, Q)}
        if device.type == "cpu":
            ways["tiles"] = lambda: tile_products(P, Q)
        ways["lists"] = lists
        if WRITES:
            ways["file"] = lambda: write_lists(ids, shape, ranked, path, options.k, device, False, None)
        times = measured(ways, options.repeats)
        size = path.stat().st_size if WRITES else None
    for kind in times:
        floors = [times[kind][name] for name in ("products", "tiles") if name in ways]
        times[kind]["floor"] = [min(several) for several in zip(*floors, strict=True)]
    listed = [name for name in ("lists", "file") if name in ways]
    ratios = {kind: {name: median_ratio(times[kind], name, "floor") for name in listed} for kind in times}
    seconds = {kind: {name: statistics.median(found) for name, found in times[kind].items()} for kind in times}
    bounds = {"lists": 1.3, "file": 1.3} if device.type == "cpu" else {"lists": 2.0}
    for kind in times:
        print(f"{kind} seconds: " + ", ".join(f"{name} {found:.3f}" for name, found in seconds[kind].items()))
        for name, ratio in ratios[kind].items():
            bound = f" (<= {bounds[name]})" if name in bounds and kind == "wall" else ""
            print(f"  {name} over the floor: {ratio:.2f}{bound}")
    if device.type == "cuda":
        print(f"peak memory of the GPU: {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")
    if size is not None:
        print(f"the file: {size / 1e6:.1f} MB")
    return {"seconds": seconds, "ratios": ratios, "times": times, "file_bytes": size}


def rules_of(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of lists by each rule, and their ratios to plain ones."""
    import polars as pl

    ids, _, plain = made(options.left, options.right, options.dim, options.seen)
    rng, device, n = np.random.default_rng(1), torch.device(options.device), options.right
    cells = {
        "id": ids[1].tolist(),
        "category": [f"c{c}" for c in rng.integers(0, 30, n)],
        "year": rng.integers(1970, 2026, n),
    }
    frame = pl.DataFrame(cells | {"in_stock": rng.random(n) < 0.5})
    start = time.perf_counter()
    table = EntityTable.of(frame, ids[1], n)
    joined = time.perf_counter() - start
    given: dict[str, dict[str, Any]] = {
        "where half": {"where": "in_stock"},
        "where few": {"where": "category in ['c1', 'c2'] and year >= 2000"},
        "boost": {"boost": {"year": 0.01, "in_stock": 1.0}},
        "popularity": {"popularity": -0.5},
        "min_score": {"min_score": 20.0},
        "at_most": {"at_most": {"category": 2}},
        "diversity": {"diversity": 0.3},
    }
    counts = np.bincount(plain.exclude.indices, minlength=n)  # type: ignore[union-attr]
    rules = {name: make_rules(lambda: table, lambda: counts, n, **one) for name, one in given.items()}
    start = time.perf_counter()
    for one in given.values():
        make_rules(lambda: table, lambda: counts, n, **one)
    print(f"the table is joined in {joined:.3f} s, all rules are read in {time.perf_counter() - start:.3f} s")
    own = made(options.left, n, 1, 200)[2].exclude
    P, Q, found = plain.P.to(device), plain.Q.to(device), {}
    for rows, repeats in ((options.left, options.repeats), (1, 50 * options.repeats)):
        part, out = P[:rows], plain.exclude[:rows]  # type: ignore[index]

        def ranked(rule: Rules, only: sp.csr_matrix | None = None, part: Any = part, out: Any = out) -> None:
            checked_ranking(part, Q, out, None, None, only, rule).top(options.k, loaded=True)

        plainly = partial(ranked, Rules())
        ways = {"allow 200 of each": partial(ranked, Rules(), own[:rows])}
        seconds, ratios = dict[str, float](), dict[str, float]()
        print(f"{rows:,} lists, ratios to plain ones:")
        for name, way in (ways | {name: partial(ranked, one) for name, one in rules.items()}).items():
            times = measured({"plain": plainly, name: way}, repeats)["wall"]
            seconds |= {one: statistics.median(taken) for one, taken in times.items()}
            ratios[name] = median_ratio(times, name, "plain")
            bound = "" if name in ("at_most", "diversity") else " (<= 1.5)"
            print(f"  {name}: {seconds[name]:.4f} s, {ratios[name]:.2f}{bound}")
        found[f"{rows} lists"] = {"seconds": seconds, "ratios": ratios}
    return {"joined_seconds": joined, **found}


def memory(options: argparse.Namespace) -> int:
    """Peak resident memory of `recommend_all` beyond its model; run in a fresh process."""
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        few = made(2048, options.right, options.dim, options.seen)
        write_lists(*few, Path(folder) / "few.parquet", options.k, device, False, None)  # loads libraries, compiles
        del few
        ids, shape, ranked = made(options.left, options.right, options.dim, options.seen)
        before = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        write_lists(ids, shape, ranked, Path(folder) / "lists.parquet", options.k, device, False, None)
        return _status("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("left", None),
        ("right", 100_000),
        ("dim", 128),
        ("k", None),
        ("seen", 10),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rules", action="store_true", help="time rules of lists instead")
    options = parser.parse_args()
    default = {"left": 10_000 if options.rules else 100_000, "k": 10 if options.rules else 100}
    parser.set_defaults(**default)
    options = parser.parse_args()
    if options.memory_child:
        print(json.dumps(memory(options)))
        return
    sizes = {name: getattr(options, name) for name in ("left", "right", "dim", "k", "seen")}
    print(f"{sizes} on {options.device}, {torch.get_num_threads()} threads")
    if options.rules:
        found = rules_of(options)
        if ELSEWHERE or all(parser.get_default(name) == size for name, size in sizes.items()):
            print(write_result(f"lists/{options.device}-rules", {"sizes": sizes, **found}))
        return
    if not WRITES:
        print("file, and the memory of the host: left out, as polars, which writes Parquet files, is not installed")
    found = times_of(options)
    if WRITES:
        child = [sys.executable, *sys.argv, "--memory-child"]
        again = subprocess.run(child, check=True, capture_output=True, text=True)
        found["extra_bytes"] = json.loads(again.stdout.splitlines()[-1])
        print(f"peak memory of the host beyond the model: {found['extra_bytes'] / 1e6:.0f} MB")
    if ELSEWHERE or all(parser.get_default(name) == size for name, size in sizes.items()):
        print(write_result(f"lists/{options.device}", {"sizes": sizes, **found}))


if __name__ == "__main__":
    main()

"""Evaluation against its score products. `python benchmarks/bench_evaluation.py [time|memory|all] [--scale 1]`.

time    recall@20 and NDCG@20 of all users at the gowalla shape (29,858 × 40,981, dim 128, 810,128 training pairs left
        out, 217,242 test pairs), against only the products of the scores, alternating: in blocks of whole rows, the
        usual way, and in the tiles that the evaluation makes; the ratio is to whichever is faster in a round
memory  peak memory of the same evaluation beyond embeddings and pairs, in a fresh process

Embeddings are random: what is timed does not depend on how good they are. Prints the ratio and the bound it is held to
and, at full scale, writes a section of benchmarks/results/lists.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import scipy.sparse as sp
import torch
from bench_engine import _resident, _status
from common import ELSEWHERE, median_ratio, side_by_side, write_result

from gramtower._util.host import pool
from gramtower.data.datasets import planted_pairs
from gramtower.metrics import evaluate_embeddings
from gramtower.retrieval.topk import rows_in_block, tile_shape

USERS, ITEMS, TRAIN, TEST, DIM = 29_858, 40_981, 810_128, 217_242, 128
METRICS = ("recall@20", "ndcg@20")


def gowalla_shape(scale: float) -> tuple[torch.Tensor, torch.Tensor, sp.csr_matrix, sp.csr_matrix]:
    """Random embeddings, training and test pairs; users shrink with the scale, items stay."""
    users = max(1, round(USERS * scale))
    g = torch.Generator().manual_seed(0)
    P, Q = torch.randn(users, DIM, generator=g), torch.randn(ITEMS, DIM, generator=g)
    train, test = (planted_pairs(users, ITEMS, round(pairs * scale), seed=s) for s, pairs in ((0, TRAIN), (1, TEST)))
    return P, Q, sp.csr_matrix(train), sp.csr_matrix(test)


def products(P: torch.Tensor, Q: torch.Tensor) -> None:
    """The scores of everyone, block by block into one buffer, and nothing else."""
    size = rows_in_block(len(Q), len(P), P.device)
    buffer = torch.empty(size, len(Q))
    for start in range(0, len(P), size):
        part = P[start : start + size]
        torch.mm(part, Q.t(), out=buffer[: len(part)])


def tile_products(P: torch.Tensor, Q: torch.Tensor) -> None:
    """The same in tiles, each thread for itself."""
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


def time(scale: float, repeats: int) -> None:
    P, Q, train, test = gowalla_shape(scale)
    measured = torch.from_numpy(test.getnnz(1) > 0)
    scored = P[measured]  # users without test pairs are not evaluated
    ways = {
        "evaluation": lambda: evaluate_embeddings(P, Q, test, train=train, metrics=METRICS),
        "products": lambda: products(scored, Q),
        "tile_products": lambda: tile_products(scored, Q),
    }
    times = side_by_side(ways, repeats=repeats, warmup=1)
    times["floor"] = [min(pair) for pair in zip(times["products"], times["tile_products"], strict=True)]
    seconds = {name: statistics.median(found) for name, found in times.items()}
    ratios = {name: median_ratio(times, "evaluation", name) for name in ("products", "tile_products", "floor")}
    print(f"{len(scored)} users, medians of {repeats} rounds")
    for name, ratio in ratios.items():
        bound = " (<= 1.3)" if name == "floor" else ""
        print(f"evaluation {seconds['evaluation']:.2f} s, {name} {seconds[name]:.2f} s: ratio {ratio:.2f}{bound}")
    if scale == 1 or ELSEWHERE:
        write_result(
            "lists/evaluation-time", {"users": len(scored), "seconds": seconds, "ratios": ratios, "times": times}
        )


def memory(scale: float) -> None:
    command = [sys.executable, __file__, "memory-child", "--scale", str(scale)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak {found['extra_bytes'] / 1e6:.0f} MB beyond embeddings and pairs (< 500)")
    if scale == 1 or ELSEWHERE:
        write_result("lists/evaluation-memory", found)


def memory_child(scale: float) -> None:
    """Peak resident memory of an evaluation beyond its inputs; run in a fresh process."""
    P, Q, train, test = gowalla_shape(scale)
    few = slice(0, 64)  # compiles, and fills the caches of libraries
    evaluate_embeddings(P[few], Q, test[few], train=train[few], metrics=METRICS)
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    evaluate_embeddings(P, Q, test, train=train, metrics=METRICS)
    print(json.dumps({"extra_bytes": _status("VmHWM") - before}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["time", "memory", "memory-child", "all"])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the users and pairs; default 1")
    parser.add_argument("--repeats", type=int, default=9, help="rounds, each way once in a round; default 9")
    arguments = parser.parse_args()
    if arguments.what == "memory-child":
        memory_child(arguments.scale)
    if arguments.what in ("time", "all"):
        time(arguments.scale, arguments.repeats)
    if arguments.what in ("memory", "all"):
        memory(arguments.scale)

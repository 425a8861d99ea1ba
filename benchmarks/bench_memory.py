"""Peaks of training against the memory budget, and ten fits in one process: `python benchmarks/bench_memory.py`.

budget    100,000 × 50,000 entities, 2,000,000 pairs, dimension 128, linear towers and a hidden layer of 256: growth of
          the resident memory while newton-kron trains, for the smallest budget that is accepted and for half as much
          again (bound: the budget)
fits      ten fits of one model in one process: resident memory after the third and after the tenth (bound: 5%)

Each measurement is a process of its own. Linux only: /proc/self/clear_refs and /proc/self/status. Writes
the section memory of benchmarks/results/fit.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from common import write_result

import gramtower as gt
from gramtower.data.datasets import planted_pairs

TOWERS = {"linear": (), "hidden": (256,)}


def main(scale: str) -> None:
    runs = []
    for towers in TOWERS:
        for share in ("1", "1.5"):
            found = _child("budget", towers, share, scale)
            ratio = found["peak_bytes"] / found["budget_bytes"]
            runs.append(found | {"towers": towers, "ratio": ratio})
            peak, given = found["peak_bytes"] / 1e6, found["budget_bytes"] / 1e6
            print(f"{towers} towers, budget {given:.0f} MB: peak {peak:.0f} MB, {ratio:.2f} of it (<= 1)")
    fits = _child("fits")
    growth = fits["bytes"][9] / fits["bytes"][2]
    print(f"ten fits: {fits['bytes'][2] / 1e6:.0f} MB after three, {growth:.3f} of it after ten (<= 1.05)")
    write_result("fit/memory", {"runs": runs, "fits": fits | {"growth": growth}})


def _child(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def budget(towers: str, share: str, scale: str) -> None:
    """Train with a multiple of the smallest budget; prints both."""
    _train(gt.Problem(planted_pairs(300, 200, 4000)), (8,), 4)  # compiles kernels, fills library caches
    sizes = (round(float(scale) * size) for size in (100_000, 50_000, 2_000_000))
    problem = gt.Problem(planted_pairs(*sizes), embedding_l2=0.01, right_weights="degree^0.1")
    print(json.dumps(_train(problem, TOWERS[towers], 128, float(share))))


def _train(problem: gt.Problem, hidden: tuple[int, ...], dim: int, share: float = 2.0) -> dict[str, int]:
    towers = gt.mlp_towers(problem, hidden, dim)
    problem.memory_budget = int(problem.least_budget(towers) * share)
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    gt.minimize(problem, towers, max_iterations=8)  # of linear towers the first four move one side at a time
    return {"peak_bytes": _status("VmHWM") - before, "budget_bytes": problem.memory_budget}


def fits() -> None:
    """Ten fits; prints the resident memory after each."""
    pairs, sizes = planted_pairs(20_000, 10_000, 300_000), []
    for _ in range(10):
        gt.TwoTower(dim=64, hidden=(64,), max_iterations=2, device="cpu").fit(pairs)
        sizes.append(_resident())
    print(json.dumps({"bytes": sizes}))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _resident() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="what one process measures; nothing for all of it")
    parser.add_argument("--scale", default="1", help="share of the entities and pairs of budget, for a try")
    given = parser.parse_args()
    what = given.what
    {"budget": budget, "fits": fits}[what[0]](*what[1:]) if what else main(given.scale)

"""Value, gradient, G·d and preconditioner at the ml1m shape, of this source tree and of another one, by turns.

    git worktree add /tmp/before 9b219b2
    python benchmarks/bench_centre.py --base /tmp/before/src [--rounds 3] [--device cpu]     results/centre.json

Generated pairs of the paper's shape, (256, 256) and 128, float32. Prints the least milliseconds of each tree and their
ratios; let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gramtower as gt
from gramtower.data.datasets import paper_shape

HERE = Path(__file__).resolve()


def least(function: Callable[[], object], device: str, repeats: int) -> float:
    """Least milliseconds of a call."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def measure(device: str) -> dict[str, float]:
    """The four quantities with whatever gramtower is imported."""
    problem = gt.Problem(paper_shape("ml1m"))
    drawn = gt.mlp_towers(problem)
    towers = gt.Towers(drawn.left.to(device), drawn.right.to(device))
    point = problem.at(towers)
    gradient, G = point.gradient(), point.gauss_newton()
    return {
        "product": least(lambda: G @ gradient, device, 9),
        "gradient": least(lambda: problem.at(towers).gradient(), device, 5),
        "value": least(lambda: problem.at(towers).value, device, 5),
        "preconditioner": least(lambda: point.preconditioner("kronecker"), device, 5),
    }


def main() -> None:
    """Both trees by turns, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, help="src folder of the tree to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", action="store_true", help="print one tree's figures as JSON")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.device)))
        return
    trees = {"base": given.base, "now": HERE.parents[1] / "src"}
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for name, tree in trees.items():
            if tree is not None:
                command = [sys.executable, str(HERE), "--measure", "--device", given.device]
                environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found.setdefault(name, []).append(json.loads(done.stdout))
    best = {name: {key: min(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}
    ratios = {key: best["now"][key] / value for key, value in best.get("base", {}).items()}
    print(json.dumps({**best, "ratios": ratios}, indent=1))
    from common import write_result

    write_result("centre", {"device": given.device, "runs": found, "least": best, "ratios": ratios})


if __name__ == "__main__":
    main()

"""Linear towers against implicit's ALS (128 factors, 15 iterations) on ALS' own objective, in turns.

    python benchmarks/bench_als.py [--sets ml1m,gowalla] [--data ../shared/data]     # needs implicit==0.7.3

Linear towers, squared loss, imputed 0: time of newton-kron, from a matrix of pairs, to the objective that ALS ends
with, over ALS' own time from the same matrix; at most 0.5 is aimed for. Both use as many threads as torch does; BLAS
gets one inside ALS, which has threads of its own and asks for that. Where DATA lacks a set, pairs of its shape are
generated, which the result notes. Writes the section als-SET of benchmarks/results/solvers.json for
each set. The methods against each other are bench_solvers.py and bench_compare.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from bench_solvers import SOURCES
from common import write_result

import gramtower as gt
from gramtower.training.result import Result

SETS = ("ml1m", "gowalla")
OMEGA, L2, DIM = 2.0**-4, 1.0, 128


def als(pairs: sp.csr_matrix, seed: int) -> tuple[float, list[np.ndarray]]:
    """Seconds of implicit's ALS, and its factors."""
    from implicit.cpu.als import AlternatingLeastSquares
    from threadpoolctl import threadpool_limits  # which implicit needs too

    with threadpool_limits(1, user_api="blas"):
        # Σ_O (1/ω)(1 − x·y)² + Σ_∉O (x·y)² + (λ/ω)‖θ‖² is 2/ω times our objective.
        model = AlternatingLeastSquares(
            factors=DIM, regularization=L2 / OMEGA, alpha=1 / OMEGA, iterations=15, random_state=seed,
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        start = time.perf_counter()
        model.fit(pairs, show_progress=False)
        return time.perf_counter() - start, [np.asarray(model.user_factors), np.asarray(model.item_factors)]


def value(pairs: sp.csr_matrix, factors: list[np.ndarray]) -> float:
    """Our objective at given factors."""
    problem = gt.Problem(pairs, loss="squared", imputed=0.0, omega=OMEGA, l2=L2)
    towers = gt.mlp_towers(problem, hidden=(), dim=DIM)
    with torch.no_grad():
        for tower, found in zip((towers.left, towers.right), factors, strict=True):
            tower[0].weight.copy_(torch.from_numpy(found))
    return problem.at(towers).value


def newton_kron(pairs: sp.csr_matrix, seed: int, level: float) -> tuple[float, float, Result]:
    """Seconds until the objective is at most ``level``, those of them before the first iteration, and the run."""
    start = time.perf_counter()
    problem = gt.Problem(pairs, loss="squared", imputed=0.0, omega=OMEGA, l2=L2)
    towers = gt.mlp_towers(problem, hidden=(), dim=DIM, seed=seed)
    setup = time.perf_counter() - start
    result = gt.minimize(
        problem, towers, max_iterations=500, tolerance=0.0, callbacks=[lambda record, _: record.value <= level]
    )
    return setup + result.history[-1].seconds, setup, result


def measure(pairs: sp.csr_matrix, repeats: int) -> dict[str, Any]:
    """Both in turns; the first round warms them up."""
    rounds = []
    for repeat in range(repeats + 1):
        theirs, factors = als(pairs, repeat)
        level = value(pairs, factors)
        ours, setup, result = newton_kron(pairs, repeat, level)
        last = result.history[-1]
        if last.value > level:
            ours = float("inf")
        if repeat:
            rounds.append({
                "als_s": theirs, "als_value": level, "newton_kron_s": ours, "setup_s": setup,
                "iterations": last.iteration, "ratio": ours / theirs,
            })  # fmt: skip
            print(f"  ALS {theirs:.2f} s to {level:.0f}; newton-kron {ours:.2f} s ({setup:.2f} s before the first of "
                  f"{last.iteration} iterations): ratio {ours / theirs:.2f}", flush=True)  # fmt: skip
    return {"rounds": rounds, "median_ratio": statistics.median(found["ratio"] for found in rounds)}


def main(options: argparse.Namespace) -> None:
    """Measure the sets asked for."""
    for name in options.sets:
        data = SOURCES[name].load(options.data, False)
        about = "generated, same shape" if data.generated else name
        found = {"data": about, "shape": [*data.pairs.shape, data.pairs.nnz], **measure(data.pairs, options.repeats)}
        print(f"{name} ({about}): median ratio {found['median_ratio']:.2f} (<= 0.5)", flush=True)
        print(write_result(f"solvers/als-{name}", found))


def parse() -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="names separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared" / "data", help="folder of data sets")
    options = parser.parse_args()
    options.sets = options.sets.split(",")
    if unknown := [name for name in options.sets if name not in SETS]:
        parser.error(f"got {', '.join(unknown)}, expected names among {', '.join(SETS)}")
    return options


if __name__ == "__main__":
    main(parse())

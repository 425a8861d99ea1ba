"""Linear towers against implicit's ALS (128 factors, 15 iterations) on ALS' own objective, in turns.

    python benchmarks/bench_als.py [--ml1m RATINGS]        # needs: pip install implicit==0.7.3

Linear towers, squared loss, imputed 0: time of newton-kron to the objective that ALS ends with, over ALS' own time.
RATINGS is MovieLens-1M's ratings file (user::movie::rating, .xz allowed); without it a synthetic problem of that shape
stands in, and the result says so. Writes benchmarks/results/als.json. The methods against each other are
`gramtower compare` and `make reproduce`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from common import movielens_pairs, write_result

import gramtower as gt
from gramtower.data.synthetic import paper_shape


def main(ml1m: str | None, repeats: int) -> None:
    from implicit.cpu.als import AlternatingLeastSquares

    real = ml1m is not None
    pairs, data = (movielens_pairs(Path(ml1m))[0], "ml1m") if real else (paper_shape("ml1m"), "synthetic, ml1m shape")
    omega, l2, dim = 2.0**-4, 1.0, 128
    problem = gt.Problem(pairs, loss="squared", imputed=0.0, omega=omega, l2=l2)
    towers = gt.mlp_towers(problem, hidden=(), dim=dim)
    gt.minimize(problem, towers, max_iterations=1)
    rounds = []
    for repeat in range(repeats + 1):
        # Σ_O (1/ω)(1 − x·y)² + Σ_∉O (x·y)² + (λ/ω)‖θ‖² is 2/ω times our objective.
        model = AlternatingLeastSquares(
            factors=dim, regularization=l2 / omega, alpha=1 / omega, iterations=15, random_state=repeat,
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        start = time.perf_counter()
        model.fit(pairs.astype(np.float32), show_progress=False)
        theirs = time.perf_counter() - start
        with torch.no_grad():
            towers.left[0].weight.copy_(torch.from_numpy(np.asarray(model.user_factors)))
            towers.right[0].weight.copy_(torch.from_numpy(np.asarray(model.item_factors)))
        level = problem.at(towers).value
        fresh = gt.mlp_towers(problem, hidden=(), dim=dim, seed=repeat)
        result = gt.minimize(
            problem,
            fresh,
            max_iterations=500,
            tolerance=0.0,
            callbacks=[lambda record, _, level=level: record.value <= level],
        )
        hit = next((record for record in result.history if record.value <= level), None)
        ours = float("inf") if hit is None else hit.seconds
        if repeat:  # the first round warms both up
            rounds.append({"als_s": theirs, "als_value": level, "newton_kron_s": ours, "ratio": ours / theirs})
            print(f"ALS {theirs:.2f} s to {level:.0f}; newton-kron {ours:.2f} s, {len(result.history) - 1} iterations: "
                  f"ratio {ours / theirs:.2f} (<= 1)", flush=True)  # fmt: skip
    ratio = statistics.median(r["ratio"] for r in rounds)
    print(f"{data}: median ratio {ratio:.2f} (<= 1)")
    write_result("als", {"data": data, "rounds": rounds, "median_ratio": ratio})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml1m", help="MovieLens-1M ratings file")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    main(options.ml1m, options.repeats)

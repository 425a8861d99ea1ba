"""All methods from one start on one machine: time and data passes to fixed objective levels.

    python benchmarks/bench_methods.py compare [--ml1m RATINGS] [--seconds 60] [--optimizers a,b,…]
    python benchmarks/bench_methods.py als [--ml1m RATINGS]        # needs: pip install implicit==0.7.3

compare   the paper's network on ml1m (ratings of 4 and 5, 9:1 split), ω = 2⁻⁴ and λ = 2²: each method runs alone for
          the given training time; prints when each reached a level, and newton-kron's lead over the others
als       linear towers, squared loss, imputed 0: time of newton-kron to the objective that implicit's ALS (128 factors,
          15 iterations) ends with, against ALS' own time, in turns

RATINGS is MovieLens-1M's ratings file (user::movie::rating, .xz allowed); without it a synthetic problem of that shape
stands in, and the result says so. Results go to benchmarks/results/methods_<name>.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from common import movielens_pairs, write_result

import gramtower as gt
from gramtower.data.synthetic import paper_shape
from gramtower.optim.methods import OPTIMIZERS

LEVELS = (900e3, 800e3, 700e3, 600e3, 500e3, 440e3, 400e3, 350e3, 300e3, 275e3, 260e3, 250e3)


def load(path: str | None):
    """Training pairs and what to call them."""
    if path is None:
        return paper_shape("ml1m"), "synthetic, ml1m shape"
    return movielens_pairs(Path(path))[0], "ml1m"


def first_below(history: list[gt.Record], level: float) -> gt.Record | None:
    """The first record at or below a level."""
    return next((record for record in history if record.value <= level), None)


def compare(arguments: argparse.Namespace) -> None:
    pairs, data = load(arguments.ml1m)
    problem = gt.Problem(pairs, omega=2.0**-4, l2=4.0)
    print(f"{data}: {problem}")
    gt.minimize(problem, gt.mlp_towers(problem), max_iterations=1)  # compiles kernels
    runs: dict[str, list[gt.Record]] = {}
    for name in arguments.optimizers.split(","):
        result = gt.minimize(
            problem,
            gt.mlp_towers(problem, seed=0),
            name,
            max_iterations=10**6,
            time_limit=arguments.seconds,
            tolerance=0.0,
        )
        runs[name] = result.history
        last = result.history[-1]
        print(f"{name:14s} L {last.value:12.1f} after {last.seconds:5.1f} s, {last.iteration} iterations, "
              f"{last.data_passes:8.1f} data passes ({result.reason.name})", flush=True)  # fmt: skip
    print("\nseconds / data passes to reach a level")
    print(f"{'':14s}" + "".join(f"{level / 1e3:>14.0f}k" for level in LEVELS))
    table: dict[str, dict[str, list[float] | None]] = {}
    for name, history in runs.items():
        hits = {f"{level:.0f}": first_below(history, level) for level in LEVELS}
        table[name] = {level: None if hit is None else [hit.seconds, hit.data_passes] for level, hit in hits.items()}
        cells = (f"{hit.seconds:7.2f}/{hit.data_passes:7.1f}" if hit else "-" for hit in hits.values())
        print(f"{name:14s}" + "".join(f"{cell:>15}" for cell in cells))
    leads = {}
    if "newton-kron" in runs:
        for name, history in runs.items():
            hit = first_below(runs["newton-kron"], history[-1].value)
            if name != "newton-kron" and hit is not None:
                leads[name] = history[-1].seconds / hit.seconds
                print(f"newton-kron reached {name}'s final level {history[-1].value:.0f} in {hit.seconds:.2f} s: "
                      f"{leads[name]:.1f} times sooner")  # fmt: skip
    final = {
        name: {"value": h[-1].value, "seconds": h[-1].seconds, "data_passes": h[-1].data_passes}
        for name, h in runs.items()
    }
    write_result(
        "methods_compare",
        {"data": data, "seconds": arguments.seconds, "final": final, "to_level": table, "times_sooner": leads},
    )


def als(arguments: argparse.Namespace) -> None:
    import numpy as np
    import torch
    from implicit.cpu.als import AlternatingLeastSquares

    pairs, data = load(arguments.ml1m)
    omega, l2, dim = 2.0**-4, 1.0, 128
    problem = gt.Problem(pairs, loss="squared", imputed=0.0, omega=omega, l2=l2)
    towers = gt.mlp_towers(problem, hidden=(), dim=dim)
    gt.minimize(problem, towers, max_iterations=1)
    rounds = []
    for repeat in range(arguments.repeats + 1):
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
        hit = first_below(result.history, level)
        ours = float("inf") if hit is None else hit.seconds
        if repeat:  # the first round warms both up
            rounds.append({"als_s": theirs, "als_value": level, "newton_kron_s": ours, "ratio": ours / theirs})
            print(f"ALS {theirs:.2f} s to {level:.0f}; newton-kron {ours:.2f} s, {len(result.history) - 1} iterations: "
                  f"ratio {ours / theirs:.2f} (<= 1)", flush=True)  # fmt: skip
    ratio = statistics.median(r["ratio"] for r in rounds)
    print(f"{data}: median ratio {ratio:.2f} (<= 1)")
    write_result("methods_als", {"data": data, "rounds": rounds, "median_ratio": ratio})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "als"])
    parser.add_argument("--ml1m", help="MovieLens-1M ratings file")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each method")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    {"compare": compare, "als": als}[options.what](options)

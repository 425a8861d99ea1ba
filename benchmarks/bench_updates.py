"""Ten updates against a full fit: `python benchmarks/bench_updates.py [--ml1m RATINGS] [--iterations 1 2 3 5]`.

A tenth of each user's pairs is held out. Of the others, in order of time, all but the last ones are fitted; those
arrive in ten daily parts, each added by `model.update`. Afterwards the model has seen the pairs of a full fit, and is
measured on the same held-out pairs: MAP@5 and Recall@20 of both, their ratio, seconds of the full fit and of the
updates (median), and how many users and items were new. Aims: within 1% of the full fit,
each update in under a tenth of its time.

Data: generated pairs, whose users arrive at different times; and ml-1m (given the ratings file), which has no times:
the place of a row is its time, in two readings. "users" is the order of the file, which has one user after the other,
so that every part brings new users. "rows" takes the place of a row among its user's, so that all users go on at once.
Run it on a quiet machine. Writes the section updates of benchmarks/results/fit.json.
"""

from __future__ import annotations

import argparse
import lzma
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.interactions import Interactions
from gramtower.data.splits import per_user

METRICS = ("map@5", "recall@20")


def generated(left: int, right: int, count: int) -> Interactions:
    """Planted groups; the first pair of a user comes at any time up to the last."""
    coo = planted_pairs(left, right, count, groups=max(2, right // 50), seed=0).tocoo()
    rng = np.random.default_rng(1)
    arrival = rng.random(left) ** 3  # most are there early
    times = arrival[coo.row] + (1 - arrival[coo.row]) * rng.random(coo.nnz)
    return Interactions.from_arrays(coo.row, coo.col, time=times)


def movielens(path: Path, order: str) -> Interactions:
    """Ratings of 4 and 5; the time of a row is its place in the file, or among its user's rows."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        ratings = np.array([[int(x) for x in line.split("::")[:3]] for line in lines])
    users, items, _ = ratings[ratings[:, 2] >= 4].T
    places = np.arange(len(users), dtype=np.float64)
    if order == "rows":
        _, first, counts = np.unique(users, return_index=True, return_counts=True)  # users come one after the other
        places = (places - np.repeat(first, counts)) / np.repeat(counts, counts)
    return Interactions.from_arrays(users, items, time=places)


def daily(pairs: Interactions, share: float, days: int) -> Iterator[Interactions]:
    """The pairs before the last days, then those of each day, a share of all pairs each."""
    assert pairs.times is not None
    order = np.argsort(pairs.times, kind="stable")
    size = max(1, round(share * len(pairs)))
    ends = [0, *(len(pairs) - size * (days - day) for day in range(days + 1))]
    for first, last in pairwise(ends):
        yield pairs.subset(np.sort(order[first:last])).without_empty()


def measure(name: str, pairs: Interactions, args: argparse.Namespace) -> dict[str, Any]:
    split = per_user(pairs, 0.1, seed=0)
    train = split.train.without_empty()  # so that both models know the same entities
    start = time.perf_counter()
    full = gt.TwoTower(device=args.device).fit(train)
    seconds = time.perf_counter() - start
    reached = {metric: float(full.evaluate(split.test, METRICS)[metric]) for metric in METRICS}
    found: dict[str, Any] = {"pairs": len(train), "days": args.days, "share": args.share}
    found["full"] = reached | {"seconds": seconds}
    for iterations in args.iterations:
        first, *parts = daily(train, args.share, args.days)
        model = gt.TwoTower(device=args.device).fit(first)
        before, taken = (len(model.left_), len(model.right_)), []
        for part in parts:
            start = time.perf_counter()
            model.update(part, iterations=iterations)
            taken.append(time.perf_counter() - start)
        assert model.seen_.nnz == len(train)
        after = {metric: float(model.evaluate(split.test, METRICS)[metric]) for metric in METRICS}
        ratio = {f"{metric} ratio": after[metric] / reached[metric] for metric in METRICS}
        found[f"{iterations} iterations"] = after | ratio | {
            "seconds": statistics.median(taken), "time ratio": statistics.median(taken) / seconds,
            "new left": len(model.left_) - before[0], "new right": len(model.right_) - before[1],
        }  # fmt: skip
        print(f"{name:16s} {iterations} iterations: " + ", ".join(
            f"{metric} {after[metric]:.4f} ({ratio[f'{metric} ratio']:.3f} of a full fit)" for metric in METRICS
        ) + f", {statistics.median(taken):.2f} s ({statistics.median(taken) / seconds:.3f})", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml1m", type=Path, help="ratings file, plain or .xz")
    parser.add_argument("--shape", type=int, nargs=3, default=(20_000, 5_000, 800_000), help="of the generated pairs")
    parser.add_argument("--iterations", type=int, nargs="+", default=(1, 2, 3, 5))
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.01, help="of all pairs that a day brings")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--orders", nargs="+", default=("users", "rows"), help="of ml-1m")
    parser.add_argument("--dry", action="store_true", help="write no result")
    args = parser.parse_args()
    gt.TwoTower(device=args.device, max_iterations=1).fit(planted_pairs(50, 40, 300, groups=2, seed=0))  # compiles
    found = {"generated": measure("generated", generated(*args.shape), args)}
    if args.ml1m is not None:
        for order in args.orders:
            found[f"ml1m, {order}"] = measure(f"ml1m, {order}", movielens(args.ml1m, order), args)
    if not args.dry:
        print(write_result("fit/updates", found))


if __name__ == "__main__":
    main()

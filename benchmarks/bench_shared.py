"""Fits on a machine that others use as well: `python benchmarks/bench_shared.py [--data ../shared/data]`.

Seconds of one fit of MovieLens-1M (generated pairs of its shape without the data) with two threads: by itself, two fits
at once, and next to one busy loop, in processes of their own. Each is measured as it is (`short waits`, set by
gramtower/__init__.py), as before (`long waits`, GNU OpenMP's default of some 300,000 turns), and where torch was
imported first, so that its waits stay long and fits that find the machine busy take one thread. `select=False`.

Bounds: two at once at most 2.5 times one by itself, next to a busy loop at most 2 times, by itself within 3% of long
waits. Run it on a machine with two CPUs and nothing else to do. Writes the section shared of
benchmarks/results/fit.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import scipy.sparse as sp
from common import movielens_pairs, write_result

from gramtower.data.datasets import planted_pairs

FIT = """
import sys, time
{first}
import gramtower as gt, scipy.sparse as sp, torch
torch.set_num_threads(2)
pairs = sp.load_npz(sys.argv[1])
gt.TwoTower(select=False, max_iterations=1, device="cpu").fit(pairs)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    gt.TwoTower(select=False, device="cpu").fit(pairs)
    print(time.perf_counter() - start, flush=True)
"""
VARIANTS = {
    "short waits": ("", {}),
    "long waits": ("", {"GOMP_SPINCOUNT": "300000"}),
    "torch imported first": ("import torch", {}),
}


def fits(variant: str, path: Path, count: int, repeats: int) -> list[float]:
    """Seconds of the fits of so many processes that begin together."""
    first, more = VARIANTS[variant]
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")} | more
    command = [sys.executable, "-c", FIT.format(first=first), str(path), str(repeats)]
    started = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    return [float(line) for process in started for line in process.communicate()[0].split()]


def main() -> None:
    """Measure, print, save."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared" / "data")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", default="short waits,long waits,torch imported first")
    given = parser.parse_args()
    ratings = given.data / "ml-1m" / "ratings_no_timestamp.dat.xz"
    pairs = movielens_pairs(ratings)[0] if ratings.exists() else planted_pairs(6038, 3533, 517_770)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.npz"
        sp.save_npz(path, pairs)
        for variant in given.variants.split(","):
            alone = fits(variant, path, 1, given.repeats)
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                neighbour = fits(variant, path, 1, given.repeats)
            finally:
                busy.kill()
                busy.wait()
            two = fits(variant, path, 2, 1 if variant == "long waits" else given.repeats)
            seconds = {"alone": alone, "next to a busy loop": neighbour, "two at once": two}
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            found[variant] = {"seconds": seconds, "ratios": {k: v / medians["alone"] for k, v in medians.items()}}
            print(variant, {k: round(v, 2) for k, v in medians.items()}, found[variant]["ratios"], flush=True)
    print(write_result("fit/shared", {"generated": not ratings.exists(), "variants": found}))


if __name__ == "__main__":
    main()

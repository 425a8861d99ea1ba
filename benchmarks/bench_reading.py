"""Reading a CSV of pairs with string ids: time and peak memory against polars alone reading and dictionary-encoding it.

    python benchmarks/bench_reading.py [--rows 10000000] [--rounds 3]

Each run is a fresh process that times the work after its imports; peak memory is that of the process less what it
held before the work (Linux). Rounds alternate between the two; ratios are those of the medians. Bounds: time ≤ 1.5,
memory ≤ 2.5. Writes benchmarks/results/reading.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import write_result

TIME_BOUND, MEMORY_BOUND = 1.5, 2.5

MEASURE = """
import json, re, sys, time
import polars as pl
import scipy.sparse
from gramtower.data.interactions import Interactions

def peak(reset=False):
    if reset:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def with_polars(path):
    ids = dict.fromkeys(["user", "item"], pl.String)
    return pl.read_csv(path, schema_overrides=ids).with_columns(pl.col("user", "item").cast(pl.Categorical))

def with_gramtower(path):
    return Interactions.from_csv(path, "user", "item")

before = peak(reset=True)
start = time.perf_counter()
made = {"polars": with_polars, "gramtower": with_gramtower}[sys.argv[1]](sys.argv[2])
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "bytes": peak() - before, "made": str(getattr(made, "shape", ""))}))
"""


def generate(path: Path, rows: int, seed: int = 0) -> None:
    """Pairs of skewed popularity, in no order, with ids of 9 to 14 letters."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(seed)
    users, items = max(rows // 20, 1), max(rows // 100, 1)
    user = (users * rng.random(rows) ** 1.5).astype(np.int64) * 7919 % users
    item = (items * rng.random(rows) ** 2.5).astype(np.int64) * 104729 % items
    frame = pl.DataFrame({"user": user, "item": item})
    text = [pl.format("user-{}", "user").alias("user"), pl.format("item_{}", "item").alias("item")]
    frame.select(text).write_csv(path)


def run(name: str, path: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", MEASURE, name, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"polars": [], "gramtower": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.csv"
        generate(path, options.rows)
        size = path.stat().st_size
        for _ in range(options.rounds):
            for name, found in runs.items():
                found.append(run(name, path))
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in ("seconds", "bytes")}
        for name, found in runs.items()
    }
    ratios = {key: medians["gramtower"][key] / medians["polars"][key] for key in ("seconds", "bytes")}
    print(f"{options.rows:,} rows, {size / 1e6:.0f} MB, medians of {options.rounds} rounds")
    for name, found in medians.items():
        print(f"  {name:10} {found['seconds']:7.2f} s {found['bytes'] / 1e6:8.0f} MB")
    for key, bound in (("seconds", TIME_BOUND), ("bytes", MEMORY_BOUND)):
        print(f"  {key:8} ratio {ratios[key]:.2f}, bound {bound}: {'met' if ratios[key] <= bound else 'MISSED'}")
    bounds = {"seconds": TIME_BOUND, "bytes": MEMORY_BOUND}
    name = "reading" if options.rows == 10_000_000 else f"reading_{options.rows}"
    result = {"rows": options.rows, "file_bytes": size, "runs": runs, "ratios": ratios, "bounds": bounds}
    print(write_result(name, result))


if __name__ == "__main__":
    main()

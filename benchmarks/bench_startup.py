"""How soon a process answers, and how soon a small fit is over: `python benchmarks/bench_startup.py [--load]`.

    import   `import gramtower` and `from gramtower import TwoTower`, over `import torch, scipy.sparse`    <= 1.1
    help     `python -m gramtower --help`, and whether it loads torch                                     no torch
    first    a process's first fit of 10,000 pairs (1,000 x 1,000), in the first process, which compiles, and in the
             next ones, which find compiled code in the cache; the import is not counted
    warm     the same fit again in a process                                            <= 0.3 s of wall time, 2 cores

Every process is a new one, with bytecode and compiled code in folders of this run; ratios alternate between the
candidates and their median is printed. Wall and processor seconds are both kept: the latter say more where others use
the machine; how many cores those kept busy is in the file. Prints objective and products too: the same fit must end at
the same value whatever the cache holds. Writes the section startup of benchmarks/results/fit.json; `--repeats` and
`--small` are for a try.

With `--load`, the time to load saved models instead, section loading of that file:

    towers   60,000 left and 40,000 right entities with text ids, hidden layers, 500,000 pairs to leave out of lists
    tables   100,000 and 100,000 entities, linear, 128 columns: the tables are the file
    large    1,000,000 and 1,000,000 entities, likewise: 1 GB

It prints the time of `gramtower.load` in a process that has imported the library (bound for towers: 0.5 s), its ratio
to the same without the checksums of the tensors (bound: 1.1; both taken in turn), and whether the loaded model's lists
equal the saved one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import ELSEWHERE, median_ratio, side_by_side, write_result

import gramtower as gt
from gramtower._util.tensors import TensorFile
from gramtower.data.datasets import planted_pairs
from gramtower.experiments.run_store import OthersBusy

IMPORTS = {
    "torch and scipy": "import torch, scipy.sparse",
    "gramtower": "import gramtower",
    "TwoTower": "from gramtower import TwoTower",
}
HELP = "import sys; from gramtower.cli.program import run; run(['--help']); sys.exit('torch' in sys.modules)"
FIT = """
import json, sys, time
import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.model.two_tower import TwoTower
m, n, count, fits = map(int, sys.argv[1:])
pairs = gt.Interactions.from_matrix(planted_pairs(m, n, count))
for _ in range(fits):
    wall, processor = time.perf_counter(), time.process_time()
    model = TwoTower().fit(pairs)
    print(json.dumps({
        "wall": time.perf_counter() - wall, "processor": time.process_time() - processor,
        "objective": model.history_[-1].value, "iterations": model.history_[-1].iteration,
        "cg_steps": sum(record.cg_steps for record in model.history_), "dim": model.dim_,
    }))
"""


def process(arguments: list[str], folder: Path) -> tuple[dict[str, float], str]:
    """Wall and processor seconds of a new process, and what it printed."""
    own = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "NUMBA_CACHE_DIR": str(folder / "compiled")}
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | own
    before, start = os.times(), time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=True)
    wall, after = time.perf_counter() - start, os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": wall, "processor": processor}, done.stdout


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {kind: statistics.median(run[kind] for run in runs) for kind in ("wall", "processor")}


def imports(folder: Path, repeats: int) -> dict[str, Any]:
    """Times of the imports, by turns, and the ratios within each turn."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in IMPORTS}
    for repeat in range(repeats + 1):
        for name, line in IMPORTS.items():
            seconds, _ = process(["-c", line], folder)
            if repeat:  # the first turn writes the bytecode
                runs[name].append(seconds)
    floor, *others = runs
    ratios = {
        name: {
            kind: statistics.median(a[kind] / b[kind] for a, b in zip(runs[name], runs[floor], strict=True))
            for kind in ("wall", "processor")
        }
        for name in others
    }
    return {"seconds": {name: medians(found) for name, found in runs.items()}, "ratio": ratios}


def fits(folder: Path, size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """First and later fits of new processes, of which the very first finds no compiled code."""

    def run(count: int) -> list[dict[str, Any]]:
        _, printed = process(["-c", FIT, *map(str, (*size, count))], folder)
        return [json.loads(line) for line in printed.splitlines()]

    compiling, *later = run(1)[0], *(run(1)[0] for _ in range(repeats))
    warm = run(repeats + 1)[1:]
    every = [compiling, *later, *warm]
    return {
        "size": size,
        "first process": {kind: compiling[kind] for kind in ("wall", "processor")},
        "next processes": medians(later),
        "warm": medians(warm),
        "same objective": len({fit["objective"] for fit in every}) == 1,
        "counts": {name: compiling[name] for name in ("objective", "iterations", "cg_steps", "dim")},
    }


CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "towers": (60_000, 40_000, 500_000, {"hidden": (256, 256)}),
    "tables": (100_000, 100_000, 500_000, {"hidden": ()}),
    "large": (1_000_000, 1_000_000, 2_000_000, {"hidden": (), "optimizer": "gd"}),
}


def load_unverified(path: Path) -> gt.TwoTower:
    """The model, its tensors taken as they are."""
    verified = TensorFile.read

    def read(file: TensorFile, name: str, first: int = 0, stop: int | None = None) -> Any:
        tensor = file._file.get_tensor(name)
        return tensor if stop is None else tensor[first:stop]

    TensorFile.read = read  # type: ignore[method-assign]
    try:
        return gt.load(path)
    finally:
        TensorFile.read = verified  # type: ignore[method-assign]


def measured(m: int, n: int, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """One case in numbers."""
    ids = [f"user-{i:07d}" for i in range(m)], [f"item-{j:07d}" for j in range(n)]
    pairs = gt.Interactions.from_matrix(planted_pairs(m, n, count, seed=0), *ids)
    model = gt.TwoTower(dim=128, max_iterations=1, device="cpu", **options).fit(pairs)
    asked = ids[0][:: max(1, m // 60)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gramtower"
        model.save(path)
        loaded = gt.load(path)
        lists = zip(model.recommend(asked, k=20), loaded.recommend(asked, k=20), strict=True)
        same = all(np.array_equal(a, b) for a, b in lists)
        del model, loaded
        calls = {"load": lambda: gt.load(path), "unverified": lambda: load_unverified(path)}
        times = side_by_side(calls, repeats=7 if m < 500_000 else 3, warmup=1)
        size = path.stat().st_size
    ratio, seconds = median_ratio(times, "load", "unverified"), statistics.median(times["load"])
    return {"seconds": seconds, "ratio_of_verified": ratio, "bytes": size, "same_lists": same}


def loading(small: bool) -> None:
    """Seconds of `gramtower.load`, printed and saved."""
    results = {}
    for name, case in CASES.items():
        if small and name == "large":
            continue
        found = results[name] = measured(*case)
        print(
            f"{name}: load {found['seconds']:.2f} s of {found['bytes'] / 1e6:.0f} MB; {found['ratio_of_verified']:.3f} "
            f"of the time without checksums (<= 1.1); same lists: {found['same_lists']}"
        )
    if not small:
        write_result("fit/loading", results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="100 x 100 with 1,000 pairs, nothing written")
    parser.add_argument("--load", action="store_true", help="time to load saved models instead")
    options = parser.parse_args()
    if options.load:
        loading(options.small)
        return
    others, start = OthersBusy(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = {"imports": imports(folder, options.repeats)}
        runs = [process(["-c", HELP], folder)[0] for _ in range(options.repeats + 1)]  # fails if torch was loaded
        found["help"] = medians(runs[1:])
        size = (100, 100, 1000) if options.small else (1000, 1000, 10_000)
        found["fit"] = fits(folder, size, options.repeats)
    busy, spent = others.cores(), os.times()
    own = (spent.children_user + spent.children_system) / (time.perf_counter() - start)
    found["others_busy"] = None if busy is None else max(0.0, busy - own)
    for kind in ("wall", "processor"):
        ratios = ", ".join(f"{name} {ratio[kind]:.2f}" for name, ratio in found["imports"]["ratio"].items())
        print(f"{kind}: import over torch and scipy {ratios} (<= 1.1); --help {found['help'][kind]:.2f} s, no torch")
        first, later, warm = (found["fit"][name][kind] for name in ("first process", "next processes", "warm"))
        print(
            f"  first fit {first:.2f} s compiling, {later:.2f} s in the next process, {warm:.2f} s warm (<= 0.3 wall)"
        )
    print(f"fit: {found['fit']['counts']}, the same objective in all: {found['fit']['same objective']}")
    print(f"cores that others kept busy: {found['others_busy']}")
    if not options.small or ELSEWHERE:
        print(write_result("fit/startup", found))


if __name__ == "__main__":
    main()

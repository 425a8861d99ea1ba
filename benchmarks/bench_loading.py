"""Time to load saved models, and what the checksums add to it: `python benchmarks/bench_loading.py`.

    towers   60,000 left and 40,000 right entities with text ids, hidden layers, 500,000 pairs to leave out of lists
    tables   100,000 and 100,000 entities, linear, 128 columns: the tables are the file
    large    1,000,000 and 1,000,000 entities, likewise: 1 GB

Prints the time of `gramtower.load` in a process that has imported the library (bound for towers: 0.5 s), its ratio to
the same without a look at the checksums of the tensors (bound: 1.1; both taken in turn), and whether the loaded model's
lists equal the saved one's. Writes benchmarks/results/loading.json. `--small` leaves out the large one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import median_ratio, side_by_side, write_result

import gramtower as gt
from gramtower._util.tensors import TensorFile
from gramtower.data.datasets import planted_pairs

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    chosen = {name: case for name, case in CASES.items() if name != "large" or not parser.parse_args().small}
    results = {}
    for name, case in chosen.items():
        found = results[name] = measured(*case)
        print(
            f"{name}: load {found['seconds']:.2f} s of {found['bytes'] / 1e6:.0f} MB; {found['ratio_of_verified']:.3f} "
            f"of the time without checksums (<= 1.1); same lists: {found['same_lists']}"
        )
    write_result("loading", results)


if __name__ == "__main__":
    main()

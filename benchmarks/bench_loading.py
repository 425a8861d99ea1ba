"""Time to load a saved model of 100,000 entities: `python benchmarks/bench_loading.py`.

60,000 left and 40,000 right entities with text ids, the default towers, 500,000 pairs to leave out of lists. Prints the
time of `gramtower.load` in a process that has imported the library (bound: 0.5 s) and whether the loaded model's lists
equal the saved one's. Writes benchmarks/results/loading.json.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from common import median_seconds, write_result

import gramtower as gt
from gramtower.data.synthetic import planted_pairs


def main() -> None:
    matrix = planted_pairs(60_000, 40_000, 500_000, seed=0)
    pairs = gt.Interactions.from_matrix(
        matrix, [f"user-{i:06d}" for i in range(60_000)], [f"item-{j:06d}" for j in range(40_000)]
    )
    model = gt.TwoTower(dim=128, hidden=(256, 256), max_iterations=1, device="cpu").fit(pairs)
    asked = [f"user-{i:06d}" for i in range(0, 60_000, 997)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gramtower"
        model.save(path)
        size, seconds = path.stat().st_size, median_seconds(lambda: gt.load(path), repeats=5, warmup=1)
        loaded = gt.load(path)
        pairs_of_lists = zip(model.recommend(asked, k=20), loaded.recommend(asked, k=20), strict=True)
        same = all(np.array_equal(a, b) for a, b in pairs_of_lists)
    print(f"load {seconds:.2f} s (<= 0.5) of {size / 1e6:.0f} MB; same lists: {same}")
    write_result("loading", {"seconds": seconds, "bytes": size, "same_lists": same})


if __name__ == "__main__":
    main()

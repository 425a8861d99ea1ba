"""Where the estimator's defaults come from: quality against the weight of unobserved pairs and the embedding penalty.

    python benchmarks/bench_penalties.py [--ml1m RATINGS] [--lists NAME=FILE ...] [--device auto]

On the bundled thesaurus, on ml1m and on `user item item …` lists, one pair in ten held out at random (of whatever was
given: a public test part is not touched). 30 iterations of TwoTower at dimension 128 with hidden layers 256-256; ω is
given as the total weight of unobserved pairs over the number of observed ones. Writes results/penalties.json.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from bench_defaults import METRICS, halves
from common import movielens_pairs, write_result

import gramtower as gt
from gramtower.demo import thesaurus

GRID = [
    *({"share": 2.0, "embedding_l2": 2.0**-power} for power in (9, 8, 7, 5)),
    {"share": 1.0, "embedding_l2": 2.0**-8},
    {"share": 4.0, "embedding_l2": 2.0**-8},
    {"share": 2.0, "embedding_l2": 2.0**-8, "l2": 2.0**-2},
    {"share": 2.0, "embedding_l2": 2.0**-8, "dim": 256},
    {"share": 2.0, "embedding_l2": 2.0**-8, "hidden": ()},
    {"share": 2.0, "embedding_l2": 0.0, "l2": 4.0},
]


def read_lists(path: Path) -> sp.csr_matrix:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [np.array(line.split(), dtype=np.int64) for line in lines]
    users = np.concatenate([np.full(len(row) - 1, row[0]) for row in rows])
    items = np.concatenate([row[1:] for row in rows])
    matrix = sp.csr_matrix((np.ones(len(users), np.float32), (users, items)))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def main(arguments: argparse.Namespace) -> None:
    sets = {"moby": halves(thesaurus().matrix)}
    if arguments.ml1m:
        sets["ml1m"] = movielens_pairs(Path(arguments.ml1m))
    for given in arguments.lists:
        name, _, path = given.partition("=")
        sets[name] = halves(read_lists(Path(path)))
    results: dict[str, list[dict[str, object]]] = {}
    for name, (train, test) in sets.items():
        results[name] = []
        for setting in GRID:
            options = {"l2": 2.0**-4, "dim": 128, "hidden": (256, 256), **setting}
            m, n = train.shape
            options["omega"] = options.pop("share") * train.nnz / (m * n - train.nnz)
            model = gt.TwoTower(max_iterations=30, device=arguments.device, **options).fit(train)
            found = {
                metric: float(value) for metric, value in model.evaluate(test, METRICS).items() if metric in METRICS
            }
            results[name].append({**setting, **found, "seconds": model.history_[-1].seconds})
            values = "".join(f"{found[metric]:9.4f}" for metric in METRICS)
            print(f"{name:9s}{values}{model.history_[-1].seconds:8.1f} s  {setting}", flush=True)
    write_result("penalties", {"data": results})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml1m", help="MovieLens-1M ratings file")
    parser.add_argument("--lists", nargs="*", default=[], metavar="NAME=FILE", help="user item item … lists")
    parser.add_argument("--device", default="auto")
    main(parser.parse_args())

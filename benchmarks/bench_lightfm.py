"""`compat.lightfm` against LightFM on LightFM's quickstart example: ratings of 5, loss warp, 30 epochs, in turns.

    PYTHONPATH=path/to/lightfm python benchmarks/bench_lightfm.py [--ml100k path/to/u.data] [--data ../shared/data]

LightFM 1.17 has to be compiled: in a clone of it, `python setup.py build_ext --inplace` compiles the C files that are
there. Sets: ml100k, MovieLens 100k if its file is given; ml1m; and ml1m-943, 943 of its users at random, which is as
many as MovieLens 100k has. A tenth of each set's pairs is for testing. Aimed for: a ratio of times of at most 1, and
precision@5, recall@10 and AUC of at least LightFM's. Both get as many threads as torch has. Writes
the section lightfm of benchmarks/results/quality.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from common import RESULTS, read_result, write_result

from gramtower.compat.lightfm import LightFM, evaluation
from gramtower.compat.lightfm.cross_validation import random_train_test_split
from gramtower.data.readers import movielens

SETS = ("ml100k", "ml1m", "ml1m-943")
EPOCHS = {"lightfm": (30,), "gramtower": (10, 30)}
COMPONENTS = (10, 30)


def load(name: str, options: argparse.Namespace) -> sp.csr_matrix | None:
    """Users × items with a 1 for each rating of 5, or None without the data."""
    path = options.ml100k if name == "ml100k" else options.data / "ml-1m" / "ratings_no_timestamp.dat.xz"
    if path is None or not path.exists():
        return None
    pairs = movielens(path, threshold=5).matrix
    if name == "ml1m-943":
        pairs = pairs[np.sort(np.random.default_rng(0).choice(pairs.shape[0], 943, replace=False))]
        pairs = pairs[:, np.flatnonzero(np.diff(pairs.tocsc().indptr))]
    return sp.csr_matrix(pairs)


def measure(model: Any, train: sp.csr_matrix, test: sp.csr_matrix, **given: int) -> dict[str, float]:
    """Seconds of a fit, and the metrics of our evaluation, which are those of LightFM's."""
    start = time.perf_counter()
    model.fit(train, **given)
    found = {"seconds": time.perf_counter() - start}
    found["precision@5"] = float(evaluation.precision_at_k(model, test, train, k=5).mean())
    found["recall@10"] = float(evaluation.recall_at_k(model, test, train, k=10).mean())
    found["auc"] = float(evaluation.auc_score(model, test, train).mean())
    return found


def compare(pairs: sp.csr_matrix, repeats: int) -> dict[str, dict[str, float]]:
    """Medians over repeats, each with a seed of its own for the split and the fits; the first round warms up."""
    from lightfm import LightFM as Theirs

    rounds: dict[str, list[dict[str, float]]] = {}
    for seed in range(repeats + 1):
        train, test = (part.tocsr() for part in random_train_test_split(pairs, 0.1, random_state=seed))
        for width in COMPONENTS:
            for library, make in (("lightfm", Theirs), ("gramtower", LightFM)):
                for epochs in EPOCHS[library]:
                    model = make(no_components=width, loss="warp", random_state=seed)
                    threads = torch.get_num_threads()
                    given = {"epochs": epochs} | ({"num_threads": threads} if library == "lightfm" else {})
                    found = measure(model, train, test, **given)
                    rounds.setdefault(f"{library}, {width} components, {epochs} epochs", []).append(found)
    return {
        name: {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}
        for name, found in rounds.items()
    }


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SETS), help="names separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ml100k", type=Path, help="u.data of MovieLens 100k")
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared" / "data", help="folder of data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    options = parser.parse_args()
    sets = read_result("quality/lightfm", options.out).get("sets", {})
    for name in options.sets.split(","):
        pairs = load(name, options)
        if pairs is None:
            print(f"{name} is left out: there is no such file")
            continue
        found = compare(pairs, options.repeats)
        sets[name] = {"shape": [*pairs.shape, pairs.nnz], "models": found}
        for model, values in found.items():
            print(f"{name:9} {model:36}", "  ".join(f"{key} {value:.4f}" for key, value in values.items()), flush=True)
        best = min(found[f"gramtower, {COMPONENTS[0]} components, {e} epochs"]["seconds"] for e in EPOCHS["gramtower"])
        ratio = best / found[f"lightfm, {COMPONENTS[0]} components, 30 epochs"]["seconds"]
        print(f"{name}: ratio of times {ratio:.2f} (<= 1)", flush=True)
        print(write_result("quality/lightfm", {"sets": sets}, options.out))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

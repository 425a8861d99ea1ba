"""The default estimator against popularity and implicit's ALS: `python benchmarks/bench_defaults.py [--ml1m RATINGS]`.

On ml1m (given the ratings file) and on the bundled thesaurus, one pair in ten held out at random: paper_map@5,
Recall@20, NDCG@20 and fit time of `gramtower.TwoTower()` without any option, of the most popular items, and of
`implicit.als.AlternatingLeastSquares(factors=128)` with its default alpha and with alpha=40 (needs
implicit 0.7.3).
Target: a paper MAP@5 of at least 0.22 on ml1m in at most 60 s. The defaults were chosen on split 0
(docs/evidence/defaults.md); split 1 is another draw of the same data. Writes the section split<seed> of
benchmarks/results/defaults.json.

With `--tune MINUTES`, on the training part of ml1m (or of the thesaurus): the default model and the model that
`TwoTower.tune` chose on a validation part of the training data within the time, both fitted on the whole training part
and scored once on the held-out pairs. Target on two cores: within 1% of the best validation metric known (`--best`) in
30 minutes. Writes the section tuning-NAME of benchmarks/results/quality.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from common import movielens_pairs, write_result

import gramtower as gt
from gramtower.data.datasets import thesaurus
from gramtower.experiments.tuning.trial import chosen_features
from gramtower.metrics import evaluate_embeddings

METRICS = ("paper_map@5", "recall@20", "ndcg@20")


def halves(matrix: sp.csr_matrix, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """One pair in ten for testing."""
    coo, held = matrix.tocoo(), np.random.default_rng(seed).random(matrix.nnz) < 0.1
    return tuple(
        sp.csr_matrix((coo.data[mask], (coo.row[mask], coo.col[mask])), shape=matrix.shape) for mask in (~held, held)
    )


def compare(name: str, train: sp.csr_matrix, test: sp.csr_matrix) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}

    def show(label: str, P: torch.Tensor, Q: torch.Tensor, seconds: float) -> None:
        found = evaluate_embeddings(P, Q, test, train=train, metrics=METRICS)
        rows[label] = {**{metric: float(found[metric]) for metric in METRICS}, "seconds": seconds}
        print(f"{name:6s} {label:22s}" + "".join(f"{found[m]:9.4f}" for m in METRICS) + f"{seconds:8.1f} s", flush=True)

    popularity = torch.from_numpy(np.bincount(train.indices, minlength=train.shape[1]).astype(np.float32))
    show("popularity", torch.ones(train.shape[0], 1), popularity[:, None], 0.0)
    start = time.perf_counter()
    model = gt.TwoTower(device="cpu").fit(train)
    show("gramtower.TwoTower()", model.left_.embeddings, model.right_.embeddings, time.perf_counter() - start)
    try:
        from implicit.cpu.als import AlternatingLeastSquares
    except ImportError:
        print("implicit is not installed: its rows are left out")
        return rows
    for label, options in (("implicit ALS", {}), ("implicit ALS alpha=40", {"alpha": 40.0})):
        als = AlternatingLeastSquares(factors=128, random_state=0, num_threads=torch.get_num_threads(), **options)
        start = time.perf_counter()
        als.fit(train, show_progress=False)
        seconds = time.perf_counter() - start
        show(label, *(torch.from_numpy(np.asarray(f)) for f in (als.user_factors, als.item_factors)), seconds)
    return rows


def tune(arguments: argparse.Namespace, metric: str = "paper_map@5") -> None:
    """The defaults against a search of settings."""
    name = "ml1m" if arguments.ml1m else "moby"
    train, test = (
        movielens_pairs(Path(arguments.ml1m), arguments.seed)
        if arguments.ml1m
        else halves(thesaurus().matrix, arguments.seed)
    )
    rows = {"default": dict(gt.TwoTower(device="cpu").fit(train).evaluate(test, METRICS))}
    start = time.perf_counter()
    search = gt.TwoTower(device="cpu", max_iterations=20).tune(
        train, trials=200, time_limit=60 * arguments.tune, metric=metric, refit=False
    )
    seconds = time.perf_counter() - start
    tuned = gt.TwoTower(device="cpu", **search.arguments)
    seen, _ = chosen_features({"features": search.features}, (None, None))
    rows["tuned"] = dict(tuned.fit(train, seen).evaluate(test, METRICS))
    best = search.best
    print(f"{name}: {len(search.trials)} trials in {seconds:.0f} s, {metric} {best.value:.4f} on validation pairs "
          f"(trial {best.number}; the default: {search.trials[0].value:.4f})")  # fmt: skip
    if arguments.best:
        print(f"over the best known, {arguments.best}: {best.value / arguments.best:.4f} (target 0.99)")
    for label, row in rows.items():
        print(f"{label:10s}" + "".join(f"{metric} {row[metric]:.4f}   " for metric in METRICS))
    write_result(
        f"quality/tuning-{name}",
        {
            "metric": metric, "trials": len(search.trials), "seconds": seconds, "validation": best.value,
            "validation_default": search.trials[0].value, "best_known": arguments.best, "settings": best.settings,
            "test": rows,
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml1m", help="MovieLens-1M ratings file")
    parser.add_argument("--seed", type=int, default=1, help="of the split; the defaults were chosen on split 0")
    parser.add_argument("--tune", type=float, metavar="MINUTES", help="compare with a search of settings instead")
    parser.add_argument("--best", type=float, help="the best validation metric known, for --tune")
    arguments = parser.parse_args()
    if arguments.tune is not None:
        tune(arguments)
        return
    results = {"moby": compare("moby", *halves(thesaurus().matrix, arguments.seed))}
    if arguments.ml1m:
        results["ml1m"] = compare("ml1m", *movielens_pairs(Path(arguments.ml1m), arguments.seed))
    write_result(f"defaults/split{arguments.seed}", {"split": arguments.seed, **results})


if __name__ == "__main__":
    main()

"""What tuning finds, and in what time: `python benchmarks/bench_tuning.py [--ml1m RATINGS] [--minutes 30]`.

On the training part of ml1m (given the ratings file; otherwise of the bundled thesaurus), one pair in ten put aside at
random: the default model, then the model that `TwoTower.tune` chose on a validation part of the training data within
the time, both fitted on the whole training part and scored once on the pairs put aside. Target on two cores: within 1%
of the best validation metric known (`--best`) in 30 minutes. The report of the search goes to
benchmarks/quality/logs/NAME-tune/. Writes benchmarks/results/tuning_NAME.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench_defaults import METRICS, halves
from common import movielens_pairs, write_result

import gramtower as gt
from gramtower.data.datasets import thesaurus
from gramtower.experiments.tuning.trial import chosen_features


def main(arguments: argparse.Namespace) -> None:
    name = "ml1m" if arguments.ml1m else "moby"
    train, test = (
        movielens_pairs(Path(arguments.ml1m), arguments.seed)
        if arguments.ml1m
        else halves(thesaurus().matrix, arguments.seed)
    )
    default = gt.TwoTower(device=arguments.device).fit(train)
    rows = {"default": dict(default.evaluate(test, METRICS))}
    model = gt.TwoTower(device=arguments.device, max_iterations=20)
    start = time.perf_counter()
    search = model.tune(
        train, trials=arguments.trials, time_limit=60 * arguments.minutes, metric=arguments.metric, refit=False,
        storage=arguments.storage,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    tuned = gt.TwoTower(device=arguments.device, **search.arguments)
    seen, _ = chosen_features({"features": search.features}, (None, None))
    rows["tuned"] = dict(tuned.fit(train, seen).evaluate(test, METRICS))
    search.write(Path(__file__).parent / "quality" / "logs" / f"{name}-tune")
    best = search.best
    print(f"{name}: {len(search.trials)} trials in {seconds:.0f} s, {arguments.metric} {best.value:.4f} on validation "
          f"pairs (trial {best.number}; the default: {search.trials[0].value:.4f})")  # fmt: skip
    if arguments.best:
        print(f"over the best known, {arguments.best}: {best.value / arguments.best:.4f} (target 0.99)")
    for label, row in rows.items():
        print(f"{label:10s}" + "".join(f"{metric} {row[metric]:.4f}   " for metric in METRICS))
    write_result(
        f"tuning_{name}",
        {
            "metric": arguments.metric, "trials": len(search.trials), "seconds": seconds, "validation": best.value,
            "validation_default": search.trials[0].value, "best_known": arguments.best, "settings": best.settings,
            "importance": search.importance, "test": rows,
        },
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml1m", help="MovieLens-1M ratings file")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--metric", default="paper_map@5")
    parser.add_argument("--best", type=float, help="the best validation metric known")
    parser.add_argument("--storage", help="log of the search, to go on from")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs put aside")
    parser.add_argument("--device", default="auto")
    main(parser.parse_args())

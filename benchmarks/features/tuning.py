"""`gt.TwoTower()` against the same tuned by new entities, on the sets with features.

    python benchmarks/features/tuning.py ml1m,eurlex --minutes 10     results/features_tuning_<set>.json, one for each

Both are scored on the new entities of the split, which tuning does not see: of the others of that side it holds out a
fifth (``validation_side``) and goes by precision@5 for documents and labels, by map@5 for the others. Scores are those
of defaults.py. Split 2 was seen by no choice of defaults. How trials count, and in which order they come, was changed
after looking at split 2 of ml1m: take another split for a figure of that set. Runs without polars; sets may run at the
same time, in processes of their own. With ``--threads 2 --device cpu`` it is what two cores find.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from defaults import given_features, scores
from sets import DATA, NAMES, FeatureSet, load

import gramtower as gt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import write_result

ONE_SET = ("facebook",)  # links within one set of entities: those that are held out are on neither side


def tuned(name: str, one: FeatureSet, minutes: float, share: float, device: str, trials: int) -> dict[str, Any]:
    """Scores of the defaults and of what a search finds, with its trials."""
    began = time.perf_counter()
    given = given_features(one)
    plain = gt.TwoTower(device=device).fit(one.train, **given)
    defaults = {**scores(plain, one), "seconds": round(time.perf_counter() - began, 2)}
    print(name, "defaults", defaults, plain, flush=True)
    pairs = gt.Interactions.from_matrix(one.train, same_entities=name in ONE_SET)
    metric = "precision@5" if name in ("eurlex", "delicious") else "map@5"
    model, began = gt.TwoTower(device=device), time.perf_counter()
    search = model.tune(
        pairs, trials=trials, time_limit=60 * minutes, metric=metric, validation=share, validation_side=one.side,
        **given, refit=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    model.set_params(**search.arguments).fit(one.train, **given)
    fitted = time.perf_counter() - began - seconds
    found = {**scores(model, one), "seconds": round(seconds, 2), "last fit": round(fitted, 2)}
    print(name, "tuned", found, search.arguments, flush=True)
    print(search.markdown(), flush=True)
    trained = [trial.seconds for trial in search.trials]
    return {
        "set": name, "minutes": minutes, "share": share, "device": device, "metric": metric, "held_out": search.data,
        "defaults": defaults, "tuned": found, "trials": len(search.trials),
        "given_up": sum(trial.pruned for trial in search.trials),
        "warm": sum(trial.warm_from is not None for trial in search.trials),
        "seconds_of_a_trial": {"first": trained[0], "mean": sum(trained) / len(trained), "largest": max(trained)},
        "validation": {"defaults": search.trials[0].value, "best": search.best.value, "trial": search.winner},
        "settings": search.best.settings, "arguments": search.arguments, "importance": search.importance,
        "log": [
            {"settings": t.settings, "value": t.value, "iterations": len(t.curve) - 1, "seconds": t.seconds,
             "note": t.note, "curve": [round(x, 5) for x in t.curve]} for t in search.trials
        ],
    }  # fmt: skip


def main() -> None:
    """Tune, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="?", default=",".join(NAMES), help="names, separated by commas")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each search")
    parser.add_argument("--share", type=float, default=0.2, help="of the side's entities, held out of trials")
    parser.add_argument("--trials", type=int, default=100_000, help="at most")
    parser.add_argument("--split", type=int, default=2, help="seed of the new entities")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, help="of torch and of compiled code")
    parser.add_argument("--out", type=Path, help="folder of the results [default: benchmarks/results]")
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    for name in given.sets.split(","):
        one = load(name, given.split, data=given.data)
        found = tuned(name, one, given.minutes, given.share, given.device, given.trials)
        write_result(f"features_tuning_{name}", {"split": given.split, **found}, given.out)


if __name__ == "__main__":
    main()

"""`gt.TwoTower()` against the same tuned by new entities, on the sets with features.

    python benchmarks/features/tuning.py eurlex --minutes 10 --threads 2 --device cpu     one set
    python benchmarks/features/tuning.py ml1m,delicious --minutes 10 --within 12          one after the other

Both are scored on the new entities of the split, which tuning does not see: of the others of that side it holds out a
fifth (``validation_side``) and goes by nDCG@5 for documents and labels, which are judged by P@1/3/5, and by nDCG@20 for
the others, which are judged by MAP@5 and Recall@20. Scores are those of defaults.py. Split 3 was seen by no choice of
defaults. Where the defaults stay, the tuned model is theirs, and is not fitted again.

Every step is printed when it is done, as is each trial, and the section tuning-<set> of results/features.json is
written after each, so that a run may be killed at any time: "state" says how far it came, and ``--finish`` fits and
scores what had been found by then. ``--within`` cuts the search so that both fits end in time. The last line printed is
the result as JSON. Runs without polars.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from defaults import given_features, scores
from sets import DATA, NAMES, FeatureSet, load

import gramtower as gt
from gramtower.experiments.tuning.report import Search
from gramtower.experiments.tuning.search import tune

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import read_result, write_result

ONE_SET = ("facebook",)  # links within one set of entities: those that are held out are on neither side
LABELS = ("eurlex", "delicious")
NAME = "features/tuning-{}"
_LAST_FIT = 1.3  # times the seconds of the first fit that are kept back for the last one, with --within


class Progress:
    """What is known so far, printed and saved step by step."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.out, self.began = name, given.out, time.perf_counter()
        self.printed = 0
        self.known: dict[str, Any] = {
            "set": name, "split": given.split, "minutes": given.minutes, "share": given.share, "device": given.device,
            "threads": torch.get_num_threads(), "metric": given.metric or ("ndcg@5" if name in LABELS else "ndcg@20"),
        }  # fmt: skip

    def step(self, state: str, **more: Any) -> None:
        """Add to what is known, print that and save all."""
        elapsed = round(time.perf_counter() - self.began, 1)
        self.known |= {"state": state, "total_seconds": elapsed, **more}
        print(f"{self.name} {elapsed:.0f} s: {state} {json.dumps(more) if more else ''}", flush=True)
        self.save()

    def trial(self, search: Search) -> None:
        """Take in a search as it is now, and print the trials that are new."""
        for t in search.trials[self.printed :]:
            changed = {k: v for k, v in t.settings.items() if v != search.trials[0].settings[k]}
            print(f"{self.name} trial {t.number}: {search.metric} {t.value:.4f}, {len(t.curve) - 1} iterations, "
                  f"{t.seconds:.1f} s {t.note} {json.dumps(changed)}", flush=True)  # fmt: skip
        self.printed = len(search.trials)
        print(f"{self.name} {search.verdict}", flush=True)
        trained = [trial.seconds for trial in search.trials]
        self.known |= {
            "held_out": search.data, "trials": len(search.trials), "verdict": search.verdict,
            "given_up": sum(trial.pruned for trial in search.trials), "search_seconds": round(search.seconds, 1),
            "seconds_of_a_trial": {"first": trained[0], "mean": sum(trained) / len(trained), "largest": max(trained)},
            "validation": {
                "defaults": search.trials[0].value, "best": max(t.value for t in search.trials),
                "found": search.best.value, "trial": search.winner,
            },
            "arguments": search.arguments,
        }  # fmt: skip
        self.save()

    def save(self) -> None:
        """Write the file."""
        write_result(NAME.format(self.name), self.known, self.out)


def run(name: str, one: FeatureSet, given: argparse.Namespace) -> dict[str, Any]:
    """The defaults, a search, and what it found, each scored on the new entities."""
    told = Progress(name, given)
    features, began = given_features(one), time.perf_counter()
    plain = gt.TwoTower(device=given.device).fit(one.train, **features)
    seconds = time.perf_counter() - began
    defaults = scores(plain, one)
    told.step("defaults fitted", defaults=defaults, seconds_of_a_fit=round(seconds, 1), model=str(plain))
    limit = 60 * given.minutes
    if given.within is not None:
        left = 60 * given.within - (time.perf_counter() - told.began)
        limit = max(1.0, min(limit, left - _LAST_FIT * seconds))
    search = tune(
        gt.TwoTower(device=given.device), gt.Interactions.from_matrix(one.train, same_entities=name in ONE_SET),
        trials=given.trials, time_limit=limit, metric=told.known["metric"], validation=given.share, space=None,
        storage=None, seed=0, features=(one.left, one.right), validation_side=one.side, progress=told.trial,
    )  # fmt: skip
    told.step("search ended", search_seconds=round(search.seconds, 1))
    return last_fit(told, one, given.device)


def finish(name: str, one: FeatureSet, given: argparse.Namespace) -> dict[str, Any]:
    """What a run that was killed had found, fitted and scored."""
    told = Progress(name, given)
    told.known = read_result(NAME.format(name), given.out)
    told.known.pop("environment", None)
    if "arguments" not in told.known or told.known["split"] != given.split:
        raise SystemExit(f"{name}: no trial of split {given.split} had ended; run it without --finish")
    told.began -= told.known["total_seconds"]
    return last_fit(told, one, given.device)


def last_fit(told: Progress, one: FeatureSet, device: str) -> dict[str, Any]:
    """Score the settings that were found."""
    arguments = dict(told.known["arguments"])
    if arguments:
        if "hidden" in arguments:  # from JSON
            arguments["hidden"] = tuple(tuple(x) if isinstance(x, (list, tuple)) else x for x in arguments["hidden"])
        tuned = gt.TwoTower(device=device, **arguments).fit(one.train, **given_features(one))
        told.step("tuned model fitted", tuned=scores(tuned, one))
    else:
        told.step("defaults stay", tuned=told.known["defaults"])
    return told.known


def main() -> None:
    """Tune, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="?", default=",".join(NAMES), help="names, separated by commas")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each search")
    parser.add_argument("--within", type=float, help="minutes of everything: searches are cut so that the fits fit in")
    parser.add_argument("--finish", action="store_true", help="fit and score what a run that was killed had found")
    parser.add_argument("--metric", help="of the search [default: ndcg@5 for labels, ndcg@20 for others]")
    parser.add_argument("--share", type=float, default=0.2, help="of the side's entities, held out of trials")
    parser.add_argument("--trials", type=int, default=100_000, help="at most")
    parser.add_argument("--split", type=int, default=3, help="seed of the new entities")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, help="of torch and of compiled code")
    parser.add_argument("--out", type=Path, help="folder of the results [default: benchmarks/results]")
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    for name in given.sets.split(","):
        known = (finish if given.finish else run)(name, load(name, given.split, data=given.data), given)
        print(json.dumps(known), flush=True)


if __name__ == "__main__":
    main()

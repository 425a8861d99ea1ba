"""`gt.TwoTower()` with default settings on the sets with features, compared with linear towers: new and known entities.

    python benchmarks/features/defaults.py [--sets eurlex,…] [--splits 1,2]     results/features.json
    python benchmarks/features/defaults.py --vary '[{"embedding_l2": 0.005}]' --log log.jsonl    defaults changed singly

P@1/3/5 for documents and labels; MAP@5 and Recall@20 for the others. Settings were chosen on splits 0 and 1;
no choice looked at split 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sets import DATA, NAMES, FeatureSet, dense, load, metrics, warm

import gramtower as gt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import write_result

MODELS: dict[str, dict[str, Any]] = {"two towers": {}, "linear": {"hidden": ()}}


def ranked(one: FeatureSet, options: dict[str, Any], beside: bool) -> dict[str, Any]:
    """Metrics and seconds of one model."""
    began = time.perf_counter()
    given = given_features(one)
    if beside:
        given = {name: ["id", rows] for name, rows in given.items()}
    model = gt.TwoTower(**options).fit(one.train, **given)
    seconds = time.perf_counter() - began
    return {**scores(model, one), "seconds": round(seconds, 2)}


def given_features(one: FeatureSet) -> dict[str, Any]:
    """The arguments of ``fit`` for the features of a set."""
    return {f"{side}_features": rows for side, rows in (("left", one.left), ("right", one.right)) if rows is not None}


def scores(model: gt.TwoTower, one: FeatureSet) -> dict[str, float]:
    """Metrics of a model on what is asked about a set."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    P, Q = (torch.from_numpy(model.embed(side=side)).to(device) for side in ("left", "right"))
    seen = None
    if one.new is None:
        seen = dense(one.train).to(device)
    else:
        new = torch.from_numpy(model.embed(**{f"{one.side}_features": one.new})).to(device)
        P, Q = (new, Q) if one.side == "left" else (P, new)
    return metrics(P, Q, dense(one.truth).to(device), seen)


def vary(given: argparse.Namespace) -> None:
    """New entities by the defaults with some of them changed, a line for each."""
    for name in given.sets.split(","):
        for split in map(int, given.splits.split(",")):
            one = load(name, split, data=given.data)
            for options in given.vary:
                line = {"set": name, "split": split, "options": options, "metrics": ranked(one, options, False)}
                with given.log.open("a") as log:
                    log.write(json.dumps(line) + "\n")


def main() -> None:
    """Fit, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", default=",".join(NAMES))
    parser.add_argument("--splits", default="2")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--no-warm", action="store_true", help="leave out the pairs of known entities")
    parser.add_argument("--vary", type=json.loads, help="a list of arguments of TwoTower: ranks new entities")
    parser.add_argument("--log", type=Path, default=Path("defaults.jsonl"), help="where the results of --vary go")
    parser.add_argument("--out", type=Path, help="folder of the result, for sets that run at the same time")
    given = parser.parse_args()
    if given.vary is not None:
        vary(given)
        return
    found: dict[str, Any] = {}
    for name in given.sets.split(","):
        for split in map(int, given.splits.split(",")):
            one = load(name, split, data=given.data)
            tasks = {"new": one} | ({} if given.no_warm else {"known": warm(one, split)})
            for task, part in tasks.items():
                runs = {model: (options, False) for model, options in MODELS.items()}
                runs["two towers, ids beside"] = ({}, True)
                if task == "known":
                    runs["ids alone"] = ({}, False)
                for model, (options, beside) in runs.items():
                    ids = FeatureSet(part.train, None, None, part.side, None, part.truth)
                    done = ranked(ids if model == "ids alone" else part, options, beside)
                    found[f"{name} split {split} {task} {model}"] = done
                    print(name, split, task, model, done, flush=True)
    write_result("features/defaults", {"runs": found}, given.out)


if __name__ == "__main__":
    main()

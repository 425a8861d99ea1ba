"""Do weights by age, recent histories and context help? `python benchmarks/bench_time.py [FOLDER …] [--seeds 0 1 2]`.

Trains on the first nine tenths of the pairs by time and tests on the others, with default settings:

    half-life none, 1/2, 1/4, 1/8, 1/16   weights 2^(−age / half-life), half-lives as shares of the time of training
    history, last=20, decay=20            towers over all right entities of a left one, its last 20, or with values that
                                          halve with every 20 newer ones; hidden layers of 64

on two generated data sets, of users whose tastes turn by a right angle in the time of the data and of users whose
tastes stay, and on each FOLDER of MovieLens with timestamps (ratings of 4 and 5). Prints Recall@20 and NDCG@20, means
over the seeds. Aim: where tastes turn, some half-life gains at least 10%.

With --context instead: generated users choose items on three devices by their tastes and by what is popular on the
device, or by their tastes only. A model with context=["device"] and one without it are tested on a quarter of the
pairs, device by device, in the contexts of training and in combinations of user and device that training does not
have. Aim: at least 10% where the device matters.

Writes the sections time or context of benchmarks/results/features.json. Times do not matter here, so that other
programs may run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from common import write_result

import gramtower as gt
from gramtower.data.readers import movielens
from gramtower.data.splits import by_time

METRICS = ("recall@20", "ndcg@20")
DAYS = 365
DEVICES = ("phone", "tv", "web")
SHARES = (None, 2, 4, 8, 16)
HISTORIES = ("history", "history:last=20", "history:decay=20")
_USERS, _ITEMS, _DIM, _PAIRS = 1000, 600, 8, 60  # of generated data; pairs of a user


def generated(turn: float, seed: int) -> gt.Interactions:
    """Pairs of users whose tastes turn by an angle in a year; a user draws items by scores of that day's tastes."""
    rng = np.random.default_rng(seed)
    items, start, end = (rng.normal(size=(size, _DIM)) for size in (_ITEMS, _USERS, _USERS))
    end -= start * (end * start).sum(1, keepdims=True) / (start**2).sum(1, keepdims=True)
    left, right, days = [], [], []
    for user in range(_USERS):
        time = np.sort(rng.random(_PAIRS))
        tastes = np.cos(turn * time)[:, None] * start[user] + np.sin(turn * time)[:, None] * end[user]
        scores = tastes @ items.T + rng.gumbel(size=(_PAIRS, _ITEMS))
        for day, row in zip(time, scores, strict=True):
            row[[j for i, j in zip(left[-_PAIRS:], right[-_PAIRS:], strict=True) if i == user]] = -np.inf
            left.append(user)
            right.append(int(row.argmax()))
            days.append(day * DAYS * 86_400)
    return gt.Interactions.from_arrays(left, right, time=days)


def data_sets(folders: list[Path], seed: int) -> Iterator[tuple[str, gt.Interactions]]:
    """Names of data sets, and their pairs."""
    yield "generated, tastes turn", generated(np.pi / 2, seed)
    yield "generated, tastes stay", generated(0.0, seed)
    for folder in folders:
        found: Any = movielens(folder)
        yield folder.name, getattr(found, "pairs", found)


def measured(pairs: gt.Interactions, seed: int) -> dict[str, dict[str, float]]:
    """Metrics on the last tenth of the pairs, by model."""
    split = by_time(pairs, 0.1, seed=seed)
    train, times = split.train, split.train.times
    assert times is not None
    span, found = times.max() - times.min(), {}
    for share in SHARES:
        half_life = None if share is None else f"{span / share:.0f}s"
        name = "half-life none" if share is None else f"half-life 1/{share}"
        found[name] = gt.TwoTower(seed=seed).fit(train, half_life=half_life).evaluate(split.test, METRICS)
    for history in HISTORIES:
        model = gt.TwoTower(seed=seed, hidden=((64,), ())).fit(train, left_features=history)
        found[history] = model.evaluate(split.test, METRICS)
    return {name: {metric: float(scores[metric]) for metric in METRICS} for name, scores in found.items()}


def in_context(matters: float, seed: int) -> dict[str, dict[str, float]]:
    """Metrics of models with and without context, for users on devices; a tenth of the combinations is unseen."""
    rng = np.random.default_rng(seed)
    tastes = 0.7 * rng.normal(size=(_USERS, _DIM)) @ rng.normal(size=(_DIM, _ITEMS))
    popular = matters * rng.normal(size=(len(DEVICES), _ITEMS))
    rows = {"user": [], "device": [], "item": [], "part": []}  # type: dict[str, list[Any]]
    for user in range(_USERS):
        unseen = rng.random(len(DEVICES)) < 0.1
        for device, name in enumerate(DEVICES):
            scores = tastes[user] + popular[device] + rng.gumbel(size=_ITEMS)
            for item in np.argsort(-scores)[:8]:
                part = "unseen" if unseen[device] else "test" if rng.random() < 0.25 else "train"
                for column, cell in zip(rows, (user, name, int(item), part), strict=True):
                    rows[column].append(cell)
    frame = pl.DataFrame(rows)
    train = frame.filter(part="train")
    models = {
        "without context": gt.TwoTower(seed=seed).fit(train, left="user", right="item"),
        "with context": gt.TwoTower(seed=seed).fit(train, left="user", right="item", context=["device"]),
    }
    found: dict[str, dict[str, float]] = {}
    for part, (name, model) in itertools.product(("test", "unseen"), models.items()):
        context = [] if name == "without context" else ["device"]
        scores = [
            model.evaluate(
                gt.Interactions.from_frame(frame.filter(part=part, device=one), "user", "item", context=context),
                METRICS,
            )
            for one in DEVICES
        ]
        label = f"{name}, {'contexts of training' if part == 'test' else 'unseen combinations'}"
        found[label] = {metric: statistics.mean(float(one[metric]) for one in scores) for metric in METRICS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="folder of the result [default: benchmarks/results]")
    parser.add_argument("--context", action="store_true")
    given = parser.parse_args()
    runs: dict[str, list[dict[str, dict[str, float]]]] = {}
    for seed in given.seeds:
        if given.context:
            runs.setdefault("generated, devices matter", []).append(in_context(1.0, seed))
            runs.setdefault("generated, devices do not matter", []).append(in_context(0.0, seed))
        for name, pairs in [] if given.context else data_sets(given.folders, seed):
            runs.setdefault(name, []).append(measured(pairs, seed))
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name, found in runs.items():
        result[name] = {}
        print(f"{name:46}" + "".join(f"{metric:>12}" for metric in METRICS))
        for model in found[0]:
            means = {metric: round(statistics.mean(one[model][metric] for one in found), 4) for metric in METRICS}
            result[name][model] = means
            print(f"  {model:44}" + "".join(f"{means[metric]:12.4f}" for metric in METRICS))
    write_result(
        f"features/{'context' if given.context else 'time'}", {"seeds": given.seeds, "data": result}, given.out
    )
    first = {name: means["ndcg@20"] for name, means in next(iter(result.values())).items()}
    with_it, base = [name for name in first if name.startswith("half-life 1")], "half-life none"
    if given.context:
        with_it, base = ["with context, contexts of training"], "without context, contexts of training"
    print(f"best gain on the first data: {max(first[name] for name in with_it) / first[base]:.2f} times (aim: 1.10)")


if __name__ == "__main__":
    main()

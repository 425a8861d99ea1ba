"""New films ranked among all: `python benchmarks/bench_new_items.py FOLDER [--seeds 0 1 2] [--known]`.

FOLDER is ml-1m. A fifth of the items (of ratings of 4 and 5) is held out with all pairs. A model learns from the others
with genres and titles as features of the right side; then the held-out items are described by theirs and ranked among
all items, what a user has seen left out. Recall@20 and MAP@5 of the held-out pairs, also among new items only, and the
share of the places of all lists of 20 that new items take, of `gt.TwoTower()` with default settings:

    features             genres and titles only
    id + features        and an id of each item next to them
    id*0.3 + features    the same with a larger penalty on what ids learn, and id*0.1
    zero id + features   as id + features, without the id vectors that are expected of new items
                         (model/unseen.py)

next to lists that are the same for all users, which say of new items

    popularity               nothing: they come after all known ones
    popularity by genres     the mean number of pairs of the known items of each of their genres
    popularity, told         the number of their held-out pairs, which nobody knows: the best that counts could do
    chance                   20 of all items, expected

Aim: at least 2 times popularity's Recall@20. With --known a tenth of the other pairs is held out too, and "known" are
the same metrics of those, ranked among all items and among the known ones: what new items cost there.
Writes the section new-items of benchmarks/results/features.json, with --known new-items-known.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import write_result
from numpy.typing import NDArray

import gramtower as gt
import gramtower.model.fitting as fitting
from gramtower.data.interactions import Interactions
from gramtower.data.readers import movielens, movielens_table
from gramtower.data.splits import held_out, random_pairs
from gramtower.data.tables import FeatureTable
from gramtower.metrics import evaluate_embeddings
from gramtower.model.fit_data import align

METRICS = ("recall@20", "map@5")
MODELS: dict[str, list[str]] = {
    "features": [],
    "id + features": ["id"],
    "id*0.3 + features": ["id*0.3"],
    "id*0.1 + features": ["id*0.1"],
    "zero id + features": ["id"],
}


def by_genres(genres: NDArray[np.bool_], counts: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.float64]:
    """For each item the mean count of the known items of a genre, over its genres."""
    per_genre = genres[known].T @ counts[known] / np.maximum(genres[known].sum(0), 1)
    return np.asarray(genres @ per_genre / np.maximum(genres.sum(1), 1))


def popularity(train: Interactions, test: Interactions, films: Any) -> dict[str, dict[str, float]]:
    """Metrics of lists that are the same for all users."""
    new = [key for key in test.right_ids.tolist() if key not in set(train.right_ids.tolist())]
    ids = train.left_ids, np.array([*train.right_ids.tolist(), *new], dtype=train.right_ids.dtype)
    shape = len(ids[0]), len(ids[1])
    seen, truth = (align(name, part, ids, shape).pairs for name, part in (("train", train), ("test", test)))
    counts, told = (np.asarray((x > 0).sum(0), dtype=np.float64).ravel() for x in (seen, truth))
    known = np.arange(shape[1]) < train.shape[1]
    table = FeatureTable(films, id="movie", lists=["genres"])
    genres = np.asarray(table.encode(ids[1]).todense()) > 0
    readings = {
        "popularity": counts,
        "popularity by genres": np.where(known, counts, by_genres(genres, counts, known)),
        "popularity, told": np.where(known, counts, told),
    }
    ones = np.ones((shape[0], 1))
    found = {
        name: dict(evaluate_embeddings(ones, values[:, None], truth, train=seen, metrics=METRICS))
        for name, values in readings.items()
    }
    return found | {"chance": {"recall@20": 20 / shape[1]}}


def measure(pairs: Interactions, films: Any, seed: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    split = held_out(pairs, "right", 0.2, seed=seed)
    train, held = split.train, None
    if args.known:
        again = random_pairs(train, 0.1, seed=seed)
        train, held = again.train, again.test
    found = popularity(train, split.test, films)
    table = FeatureTable(films, id="movie", lists=["genres"], text=["title"])
    for name in args.models:
        with patch.object(fitting, "move_expected_ids") if name.startswith("zero") else nullcontext():
            model = gt.TwoTower(device=args.device, seed=seed).fit(train, right_features=[*MODELS[name], table])
        new = split.test.right_ids.tolist()
        model.add(right_features=films.filter(films["movie"].is_in(new)))
        found[name] = dict(model.evaluate(split.test, METRICS))
        among = model.evaluate(split.test, METRICS, allow=new)
        found[name] |= {f"{metric} among new": float(among[metric]) for metric in METRICS}
        found[name]["places"] = float(np.isin(model.recommend(model.left_.ids, 20)[0], new).mean())
        if held is not None:
            for where, candidates in (("all", "all"), ("known", "trained")):
                known = model.evaluate(held, METRICS, candidates=candidates)
                found[name] |= {f"known, {metric} among {where}": float(known[metric]) for metric in METRICS}
        print(seed, name, {metric: round(value, 4) for metric, value in found[name].items()}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of ml-1m")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0,), help="of the items held out and of the models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--known", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dry", action="store_true", help="write no result")
    args = parser.parse_args()
    pairs, films = movielens(args.folder), movielens_table(args.folder, "movies")
    found = [measure(pairs, films, seed, args) for seed in args.seeds]
    mean = {
        name: {metric: statistics.mean(one[name][metric] for one in found) for metric in values}
        for name, values in found[0].items()
    }
    for name, values in mean.items():
        print(f"{name:22s}", {metric: round(value, 4) for metric, value in values.items()})
    if not args.dry:
        seeds = {str(seed): one for seed, one in zip(args.seeds, found, strict=True)}
        print(
            write_result(
                "features/new-items-known" if args.known else "features/new-items", {"mean": mean, "seeds": seeds}
            )
        )


if __name__ == "__main__":
    main()

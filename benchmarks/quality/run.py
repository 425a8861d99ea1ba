"""One command for each public split: train by the stored settings, write the lists, score them given a test part.

    python benchmarks/quality/run.py gowalla                       # trains, writes lists and validation figures
    python benchmarks/quality/run.py gowalla --test test.txt       # scores those lists: Recall@20, NDCG@20, MAP@5
    python benchmarks/quality/run.py ml1m                          # its test part is made from the ratings, with a seed

Lists are `user item item …`, the 20 best items not in the training part, ids as in the files, in OUT/NAME/ROW.txt.xz.
The validation figures come from the same settings trained on nine tenths of the training part; with them the table of a
run is complete without a test part. Settings are in settings.toml; docs/evidence/quality.md says how they were chosen.
Needs torch, numpy, scipy and numba; implicit for its row. Writes the section NAME of benchmarks/results/quality.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import FILES, Data, inner_split, load, read_lists, write_result
from models import METRICS, ROWS, stored, train

from gramtower._util.files import replacing, write_text
from gramtower.metrics import evaluate_embeddings, ranking_metrics
from gramtower.retrieval.topk import top_k

K = 20
#: Recall@20, NDCG@20 of all items not in training, as published: the BARS leaderboard and NESCL's README.
PUBLISHED = {
    "gowalla": {
        "MF-BPR": (0.1627, 0.1378), "EASE": (0.1765, 0.1467), "YoutubeDNN": (0.1754, 0.1473),
        "LightGCN": (0.1820, 0.1547), "UltraGCN": (0.1862, 0.1580), "SimpleX": (0.1872, 0.1557),
        "NESCL": (0.1917, 0.1617),
    },
    "yelp2018": {
        "MF-BPR": (0.0576, 0.0468), "EASE": (0.0657, 0.0552), "YoutubeDNN": (0.0686, 0.0567),
        "LightGCN": (0.0653, 0.0532), "UltraGCN": (0.0683, 0.0561), "SimpleX": (0.0701, 0.0575),
        "GF-CF": (0.0697, 0.0571),
    },
}  # fmt: skip


def write_lists(path: Path, data: Data, lists: np.ndarray) -> None:
    """Lines `user item item …` by ids, in one step; −1, a place without an item, is left out."""
    with replacing(path) as partial, lzma.open(partial, "wt", encoding="utf-8") as file:
        for user, row in zip(data.left, lists.tolist(), strict=True):
            file.write(data.separator.join([user, *(data.right[item] for item in row if item >= 0)]) + "\n")


def read_predictions(path: Path, data: Data) -> np.ndarray:
    """The lists of a file as users × K row numbers, −1 where there is no item."""
    lists = np.full((len(data.left), K), -1, dtype=np.int64)
    rows, columns = ({key: place for place, key in enumerate(ids)} for ids in (data.left, data.right))
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            user, *items = line.rstrip("\n").split(data.separator)
            lists[rows[user], : len(items)] = [columns[item] for item in items]
    return lists


def make_row(row: str, data: Data, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a row twice: on the inner part for its validation figures, on all of it for the lists."""
    settings, pairs = stored(data.name, row), data.train
    record: dict[str, Any] = {"settings": settings}
    inner, held = inner_split(pairs)
    P, Q, seconds = train(row, inner, settings, arguments.device)
    found = evaluate_embeddings(P, Q, held, train=inner, metrics=METRICS)
    record["validation"] = {metric: float(found[metric]) for metric in METRICS} | {"seconds": seconds}
    P, Q, record["seconds"] = train(row, pairs, settings, arguments.device)
    write_lists(arguments.out / data.name / f"{row}.txt.xz", data, top_k(P, Q, K, exclude=pairs)[0])
    return record


def main(arguments: argparse.Namespace) -> None:
    name = arguments.data
    data = load(name, arguments.folder)
    test = data.test
    if arguments.test is not None:
        if test is not None:
            raise ValueError(f"test: got {arguments.test}, expected none: {name} has its own")
        test = read_lists(arguments.test, data.train.shape)
    log = arguments.out / name / "rows.json"
    rows: dict[str, Any] = json.loads(log.read_text()) if log.exists() else {}
    for row in arguments.rows:
        done = rows.get(row, {}).get("settings") == stored(name, row) and not arguments.again
        if not done:
            try:
                rows[row] = make_row(row, data, arguments)
            except ImportError as error:
                rows[row] = {"missing": f"{error.name or error} is not installed"}
        if test is not None and "missing" not in rows[row]:
            lists = read_predictions(arguments.out / name / f"{row}.txt.xz", data)
            scores = ranking_metrics(lists, test, METRICS)
            rows[row]["test"] = {metric: float(scores[metric]) for metric in METRICS} | {"users": scores.users}
        write_text(log, json.dumps(rows, indent=1) + "\n")
        show(row, rows[row])
    for label, (recall, ndcg) in PUBLISHED.get(name, {}).items():
        print(f"{label:12s} {'published':>10s}  {recall:8.4f}{ndcg:9.4f}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    published = {k: dict(zip(METRICS[:2], v, strict=True)) for k, v in PUBLISHED.get(name, {}).items()}
    write_result(f"quality/{name}", {"data": name, "gpu": gpu, "rows": rows, "published": published})


def show(row: str, record: dict[str, Any]) -> None:
    if "missing" in record:
        print(f"{row:12s} {record['missing']}")
        return
    for part in ("validation", "test"):
        if part in record:
            values = "".join(f"{record[part][metric]:9.4f}" for metric in METRICS)
            seconds = record["validation"]["seconds"] if part == "validation" else record["seconds"]
            print(f"{row:12s} {part:>10s} {values}{seconds:9.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=tuple(FILES))
    parser.add_argument("--test", type=Path, help="the public test part: user item item … lists")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--folder", type=Path, default=Path(".local-data"), help="where the data files are")
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="where lists are written")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--again", action="store_true", help="train again what is there")
    main(parser.parse_args())

"""Label-text augmentation: `gt.TwoTower()` with and without an extra left row for each right entity, on new entities.

    python benchmarks/features/labels.py [--sets delicious,…] [--splits 1,2]     results/features.json

The extra row of a right entity has the entity's own text as left features and one pair, the one with that entity. In
search, wikispeedia, moby and npm both sides have text of one vocabulary. In delicious, a tag has a row if it is one of
the words that describe documents.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sets import DATA, FeatureSet, dense, load, metrics

import gramtower as gt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import write_result


def with_labels(one: FeatureSet, texts: sp.csr_matrix) -> FeatureSet:
    """The set with a left row for each right entity that has text."""
    own = np.flatnonzero(np.diff(texts.indptr))
    pairs = sp.csr_matrix((np.ones(len(own), np.float32), (np.arange(len(own)), own)), (len(own), one.train.shape[1]))
    return replace(
        one, train=sp.csr_matrix(sp.vstack([one.train, pairs])), left=sp.csr_matrix(sp.vstack([one.left, texts[own]]))
    )


def label_texts(name: str, one: FeatureSet, data: Path) -> sp.csr_matrix:
    """The right entities' own text in the columns of the left features."""
    if one.right is not None:
        return one.right
    tags, words = (
        (data / name.partition("*")[0] / f"{kind}.txt").read_text().split("\n") for kind in ("tags", "words")
    )
    place = {word.strip(): column for column, word in enumerate(words) if word.strip()}
    found = [(row, place[tag.strip()]) for row, tag in enumerate(tags) if tag.strip() in place]
    rows, columns = np.array(found).T
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (one.train.shape[1], one.left.shape[1]))


def ranked(one: FeatureSet) -> dict[str, float]:
    """Metrics of the default settings on the new left entities."""
    model = gt.TwoTower().fit(one.train, one.left, one.right)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    new, Q = model.embed(left_features=one.new), model.embed(side="right")
    P, Q = (torch.from_numpy(rows).to(device) for rows in (new, Q))
    return metrics(P, Q, dense(one.truth).to(device), None)


def main() -> None:
    """Fit, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", default="search,search*0.1,delicious,wikispeedia")
    parser.add_argument("--splits", default="1,2")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, help="folder of the result, for sets that run at the same time")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.sets.split(","):
        for split in map(int, given.splits.split(",")):
            one = load(name, split, data=given.data)
            texts = label_texts(name, one, given.data)
            for kind, part in (("without", one), ("with", with_labels(one, texts))):
                done = ranked(part)
                found[f"{name} split {split} {kind} label rows"] = done
                print(name, split, kind, part.train.shape, done, flush=True)
    write_result("features/labels", {"runs": found}, given.out)


if __name__ == "__main__":
    main()

"""The default penalty μ of ids alone, and multiples of it, on sets of other shapes than those the rule began with.

    python benchmarks/quality/penalty.py npm,delicious,eurlex --factors 0.5,1,2,4 --split 1

npm and moby are bundled; wikispeedia, gowalla, yelp2018 and the pairs of benchmarks/features/sets.py (documents and
labels, users and articles, …) are read from --data. A tenth of each left entity's pairs is ranked, nothing of a public
test part. Figures are in docs/evidence/defaults.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from data import inner_split, read_lists

import gramtower as gt
from gramtower.data.datasets import packages, thesaurus
from gramtower.data.readers.item_lists import edge_list
from gramtower.metrics import evaluate_embeddings
from gramtower.model import defaults

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "features"))
from sets import DATA, load


def pairs_of(name: str, folder: Path) -> sp.csr_matrix:
    """The pairs of a set, labelled 1."""
    if name in ("npm", "moby"):
        matrix = (packages() if name == "npm" else thesaurus()).matrix
    elif name == "wikispeedia":
        matrix = edge_list(folder / name / "links.tsv.xz").matrix
    elif name in ("gowalla", "yelp2018"):
        matrix = read_lists(folder / name / "train.txt.xz")
    else:
        matrix = load(name, 0, data=folder).train
    pairs = sp.csr_matrix(matrix, dtype=np.float32)
    pairs.data[:] = 1.0
    return pairs


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets")
    parser.add_argument("--factors", default="0.5,1,2,4")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    for name in given.sets.split(","):
        train, held = inner_split(pairs_of(name, given.data), seed=given.split)
        dim = gt.TwoTower(max_iterations=0).fit(train).dim_
        usual = defaults.default_embedding_l2(train.shape, train.nnz, dim, defaults.IDS)
        for factor in map(float, given.factors.split(",")):
            model = gt.TwoTower(embedding_l2=usual * factor).fit(train)
            P, Q = (torch.from_numpy(model.embed(side=side)) for side in ("left", "right"))
            found = evaluate_embeddings(P, Q, held, train=train, metrics=("recall@20", "map@5"))
            values = f"recall@20 {found['recall@20']:.4f} map@5 {found['map@5']:.4f}"
            print(f"{name} {train.shape} dimension {dim}, {factor:g} · {usual:.4f}: {values}", flush=True)


if __name__ == "__main__":
    main()

"""What else serves new entities: popularity, one classifier a label (napkinXC) and LightFM, on the sets of sets.py.

    python benchmarks/features/baselines.py eurlex,delicious --out log.jsonl      one line a model and set

    popularity      the right entities that have most pairs, the same list for everyone; of new ones nothing is known
    one-vs-rest     a regularised logistic regression for each right entity over the left features (LIBLINEAR)
    label tree      the same in a tree of labels, as Parabel has it
    lightfm         embeddings of entities are sums over their features; WARP loss

``pip install napkinxc==0.7.2`` and ``pip install lightfm-next==1.19.0``; what is not installed is left out, and said.
Features are scaled as ours are (search.py). The settings are those of the libraries, but LightFM's: 64 components, 30
epochs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from search import dense, metrics, scaled
from sets import DATA, NAMES, FeatureSet, load

K = 20


def popularity(one: FeatureSet) -> dict[str, float]:
    """Counts of training pairs; new right entities have none."""
    if one.side == "right":
        P, Q = np.ones((one.truth.shape[0], 1)), np.zeros((one.truth.shape[1], 1))
    else:
        counts = np.bincount(one.train.indices, minlength=one.train.shape[1])
        P, Q = np.ones((one.truth.shape[0], 1)), counts[:, None].astype(float)
    return metrics(torch.tensor(P), torch.tensor(Q), dense(one.truth).double())


def classifiers(one: FeatureSet, tree: bool) -> dict[str, float]:
    """napkinXC's label tree, or one classifier for each label, over the words of new documents."""
    from napkinxc.models import OVR, PLT

    assert one.left is not None
    assert one.new is not None
    labels = [one.train.indices[a:b].tolist() for a, b in zip(one.train.indptr[:-1], one.train.indptr[1:], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        model = (PLT if tree else OVR)(folder, seed=0)
        model.fit(scaled("logidf", one.left, one.left), labels)
        found = model.predict(scaled("logidf", one.left, one.new), top_k=K)
    scores = np.zeros(one.truth.shape)
    for row, answer in enumerate(found):
        scores[row, answer] = np.arange(len(answer), 0, -1)
    return metrics(torch.tensor(scores), torch.eye(one.truth.shape[1]).double(), dense(one.truth).double())


def lightfm(one: FeatureSet) -> dict[str, float]:
    """LightFM with the features of both sides; entities without features are known by id."""
    from lightfm import LightFM

    sides = {}
    for side, rows, count in (("left", one.left, one.train.shape[0]), ("right", one.right, one.train.shape[1])):
        known = sp.identity(count, format="csr", dtype=np.float32) if rows is None else scaled("logidf", rows, rows)
        asked = known if side != one.side else scaled("logidf", rows, one.new)
        sides[side] = known, asked
    model = LightFM(no_components=64, loss="warp", random_state=0)
    model.fit(one.train, user_features=sides["left"][0], item_features=sides["right"][0], epochs=30, num_threads=2)
    (left_bias, left), (right_bias, right) = (
        model.get_user_representations(sides["left"][1]), model.get_item_representations(sides["right"][1])
    )  # fmt: skip
    P = np.column_stack([left, np.ones(len(left)), left_bias])
    Q = np.column_stack([right, right_bias, np.ones(len(right))])
    return metrics(torch.tensor(P), torch.tensor(Q), dense(one.truth).to(torch.tensor(P).dtype))


def main() -> None:
    """Fit what is installed and fits the set."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", help="names, separated by commas: " + ", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("baselines.jsonl"))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--split", type=int, default=2)
    given = parser.parse_args()
    for name in given.sets.split(","):
        one = load(name, given.split, data=given.data)
        models = {"popularity": (lambda one: popularity(one), None), "lightfm": (lightfm, "lightfm")}
        if one.left is not None and one.right is None:
            models["one-vs-rest"] = lambda one: classifiers(one, False), "napkinxc"
            models["label tree"] = lambda one: classifiers(one, True), "napkinxc"
        for model, (fit, package) in models.items():
            if package is not None and find_spec(package) is None:
                print(f"{name}: {model} left out, {package} is not installed")
                continue
            began = time.perf_counter()
            line = {"set": name, "split": given.split, "model": model, "metrics": fit(one)}
            line["seconds"] = round(time.perf_counter() - began, 1)
            print(line, flush=True)
            with given.out.open("a") as log:
                log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

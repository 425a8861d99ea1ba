"""`gramtower demo`: learns which words mean alike from a bundled core of the Moby thesaurus, and shows what it found.

The data: 8,655 words that are heads of the public-domain Moby Thesaurus II and occur in it at least sixty times, with
their 675,000 links. One link in ten is held out. Takes under a minute on two cores.
"""

from __future__ import annotations

import lzma
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import TextIO

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._files import replacing
from gramtower.data.interactions import Interactions
from gramtower.estimator.two_tower import TwoTower
from gramtower.metrics import ranking_metrics
from gramtower.training.result import Reason

WORDS = ("swift", "melancholy", "storm", "brilliant", "whisper", "wise")
METRICS = ("map@5", "recall@20")


def thesaurus() -> Interactions:
    """The bundled words: pairs (head, word)."""
    packed = files("gramtower.data").joinpath("bundled", "moby-core.txt.xz").read_bytes()
    heads: list[str] = []
    words: list[str] = []
    for line in lzma.decompress(packed).decode().splitlines():
        head, *others = line.split(",")
        heads += [head] * len(others)
        words += others
    return Interactions.from_arrays(np.array(heads, dtype=object), np.array(words, dtype=object))


def run(seconds: float | None = None, seed: int = 0, out: Path | None = None, stream: TextIO | None = None) -> Path:
    """Train, compare, show; returns the folder with model, history and picture.

    Args:
        seconds: limit of training time for the two-tower model.
        seed: for the split and the initial weights.
        out: where to write; None makes a new temporary folder.
        stream: where to print.
    """
    stream = stream or sys.stdout
    out = out or Path(tempfile.mkdtemp(prefix="gramtower-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    links = thesaurus()
    m, n = links.shape
    held = np.random.default_rng(seed).random(len(links)) < 0.1
    train, test = links.subset(~held), links.subset(held)
    print(
        f"{m:,} × {n:,} words: {m * n:,} pairs, {len(train):,} links to learn from, {len(test):,} held out\n",
        file=stream,
    )

    linear, linear_time = _fit(TwoTower(dim=256, hidden=(), max_iterations=8, seed=seed), train)
    model = TwoTower(dim=256, hidden=(256, 256), max_iterations=15, time_limit=seconds, seed=seed, verbose=True)
    model, model_time = _fit(model, train, out / "history.jsonl")
    model.save(out / "model.gramtower")
    if model.reason_ is Reason.INTERRUPTED:
        raise KeyboardInterrupt(f"the model so far is {out / 'model.gramtower'}; the demo itself starts anew")

    print(f"\n{'held-out links':24s}{'MAP@5':>9s}{'Recall@20':>11s}{'seconds':>9s}", file=stream)
    popular = _popularity(train.matrix, test.matrix)
    for name, found, taken in (
        ("most linked words", popular, 0.0),
        ("linear factors", linear.evaluate(test, METRICS), linear_time),
        ("two towers", model.evaluate(test, METRICS), model_time),
    ):
        print(f"{name:24s}{found['map@5']:9.3f}{found['recall@20']:11.3f}{taken:9.1f}", file=stream)

    print("\nWhat it would add to the thesaurus (✓ = the link exists and had been held out):", file=stream)
    answers, _ = model.recommend(list(WORDS), k=9)
    held_out = test.matrix
    for word, row, found in zip(WORDS, train.left_rows(list(WORDS)), answers, strict=True):
        known = set(test.right_ids[held_out.indices[held_out.indptr[row] : held_out.indptr[row + 1]]])
        others = [w for w in found if w != word][:8]  # a word is not its own synonym in the data, but close to itself
        shown = ", ".join(f"{w} ✓" if w in known else str(w) for w in others)
        print(f"  {word:12s} {shown}", file=stream)
    picture = draw(model, out / "run.png")
    print(f"\nmodel    {out / 'model.gramtower'}\nhistory  {out / 'history.jsonl'}", file=stream)
    print(f"picture  {picture}" if picture else 'picture  not drawn: pip install "gramtower[plots]"', file=stream)
    return out


def draw(model: TwoTower, path: Path) -> Path | None:
    """The objective against time as a PNG, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([r.seconds for r in model.history_], [r.value for r in model.history_], marker="o", markersize=3)
    axes.set_yscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("objective over all pairs")
    axes.set_title(f"{model.optimizer}, {len(model.left_):,} × {len(model.right_):,} words")
    axes.grid(True, which="both", alpha=0.3)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return path


def _fit(model: TwoTower, train: Interactions, history: Path | None = None) -> tuple[TwoTower, float]:
    start = time.perf_counter()
    model.fit(train, history=history)
    if history is None and model.reason_ is Reason.INTERRUPTED:
        raise KeyboardInterrupt("nothing was kept; the demo starts anew")
    return model, time.perf_counter() - start


def _popularity(train: sp.csr_matrix, test: sp.csr_matrix) -> dict[str, float]:
    """The same words for everyone: those linked most, without the ones already linked."""
    order = np.argsort(-np.bincount(train.indices, minlength=train.shape[1]), kind="stable")
    lists: list[NDArray[np.int64]] = []
    for row in range(train.shape[0]):
        seen = train.indices[train.indptr[row] : train.indptr[row + 1]]
        first = order[: 20 + len(seen)]
        lists.append(first[~np.isin(first, seen)][:20])
    return dict(ranking_metrics(np.stack(lists), test, metrics=METRICS))

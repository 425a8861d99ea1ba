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
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower._files import replacing
from gramtower.data.interactions import Interactions
from gramtower.metrics import ranking_metrics
from gramtower.training.result import Reason
from gramtower.two_tower import TwoTower

WORDS = ("swift", "melancholy", "storm", "brilliant", "whisper", "wise")
METRICS = ("map@5", "recall@20")
NO_PICTURE = 'not drawn: pip install "gramtower[plots]"'


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


def run(
    seconds: float | None = None, seed: int = 0, out: str | Path | None = None, verbose: bool = True
) -> dict[str, Any]:
    """Train and compare; returns what was found, with the folder of model, history and picture.

    Args:
        seconds: limit of training time for the two-tower model.
        seed: for the split and the initial weights.
        out: where to write; None makes a new temporary folder.
        verbose: one line an iteration on standard error.
    """
    check.seed(seed)
    if seconds is not None:
        check.number("seconds", seconds, above=0.0)
    out = Path(tempfile.mkdtemp(prefix="gramtower-demo-") if out is None else out)
    out.mkdir(parents=True, exist_ok=True)
    links = thesaurus()
    held = np.random.default_rng(seed).random(len(links)) < 0.1
    train, test = links.subset(~held), links.subset(held)
    if verbose:
        m, n = links.shape
        counts = f"{m:,} × {n:,} words: {m * n:,} pairs, {len(train):,} links to learn from, {len(test):,} held out"
        print(counts, file=sys.stderr)
    linear, linear_time = _fit(TwoTower(dim=256, hidden=(), max_iterations=8, seed=seed), train)
    model = TwoTower(dim=256, hidden=(256, 256), max_iterations=15, time_limit=seconds, seed=seed, verbose=verbose)
    model, model_time = _fit(model, train, out / "history.jsonl")
    model.save(out / "model.gramtower")
    if model.reason_ is Reason.INTERRUPTED:
        raise KeyboardInterrupt(f"the model so far is {out / 'model.gramtower'}; the demo itself starts anew")
    picture = draw(model, out / "run.png")
    return {
        "left": len(links.left_ids),
        "right": len(links.right_ids),
        "links": len(train),
        "held_out": len(test),
        "methods": {
            "most linked words": _popularity(train.matrix, test.matrix) | {"seconds": 0.0},
            "linear factors": linear.evaluate(test, METRICS) | {"seconds": linear_time},
            "two towers": model.evaluate(test, METRICS) | {"seconds": model_time},
        },
        "words": _additions(model, train, test),
        "model": str(out / "model.gramtower"),
        "history": str(out / "history.jsonl"),
        "picture": None if picture is None else str(picture),
    }


def show(found: dict[str, Any]) -> None:
    """What was found, for people."""
    print(f"\n{'held-out links':24s}{'MAP@5':>9s}{'Recall@20':>11s}{'seconds':>9s}")
    for name, numbers in found["methods"].items():
        print(f"{name:24s}{numbers['map@5']:9.3f}{numbers['recall@20']:11.3f}{numbers['seconds']:9.1f}")
    print("\nWhat it would add to the thesaurus (✓ = the link exists and had been held out):")
    for word, added in found["words"].items():
        print(f"  {word:12s} " + ", ".join(f"{one['word']} ✓" if one["held_out"] else one["word"] for one in added))
    print(f"\nmodel    {found['model']}\nhistory  {found['history']}")
    print(f"picture  {found['picture'] or NO_PICTURE}")


def _additions(model: TwoTower, train: Interactions, test: Interactions) -> dict[str, list[dict[str, Any]]]:
    """For each of WORDS what the model would link it with, and whether that link had been held out."""
    answers, _ = model.recommend(list(WORDS), k=9)
    held_out, found = test.matrix, {}
    for word, row, answer in zip(WORDS, train.left_rows(list(WORDS)), answers, strict=True):
        known = set(test.right_ids[held_out.indices[held_out.indptr[row] : held_out.indptr[row + 1]]])
        others = [str(w) for w in answer if w != word][:8]  # not its own synonym in the data, but close to itself
        found[word] = [{"word": w, "held_out": w in known} for w in others]
    return found


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

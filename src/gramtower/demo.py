"""`gramtower demo`: what else will a new npm package need, given the common tools that it uses?

The data: packages of npm in 2016 and what they depend on (data/datasets.py). The 64 dependencies that are used most are
the tools, which describe a package; the others are what is to be found. A fifth of the packages is held out whole. The
left tower sees a package's tools, so that any combination of them can be asked about; the right one knows dependencies
by id. For comparison: linear towers over the same features, and the dependencies that are used most. Linear towers add
up what each tool suggests; a hidden layer can learn what two of them need together.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gramtower._util import checks as check
from gramtower._util.checks import install_line
from gramtower._util.files import replacing
from gramtower.data.datasets import packages
from gramtower.data.interactions import Interactions
from gramtower.data.splits import held_out
from gramtower.data.tables import FeatureTable
from gramtower.metrics import evaluate_embeddings
from gramtower.model.fit_data import aligned
from gramtower.model.two_tower import TwoTower
from gramtower.training.result import Reason

USES = (("gulp", "browserify"), ("grunt", "karma"), ("karma", "webpack", "mocha"), ("express", "mocha"))
METRICS = ("map@5", "recall@20")
TOOLS, LEAST = 64, 2  # of tools; a package is described by at least so many of them
SHOWN, NEW = 7, 3  # dependencies of a list; packages of the test part that are shown
DIM, WIDTH = 128, 256  # smaller than the defaults, for a minute on two cores
NO_PICTURE = f"not drawn: {install_line('matplotlib')}"


def run(
    seconds: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    verbose: bool = True,
    uses: Sequence[Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Train and compare; returns what was found, with the folder of model, history and picture.

    Args:
        seconds: limit of training time for each of the two models.
        seed: for the split and the initial weights.
        out: where to write; None makes a new temporary folder.
        verbose: one line an iteration on standard error.
        uses: tools of packages to query, in addition to some of the held-out ones; None for USES.
    """
    check.seed(seed)
    if seconds is not None:
        check.number("seconds", seconds, above=0.0)
    needs, tools = described(packages())
    known = sorted({tool for its in tools.values() for tool in its})
    asked = [list(its) for its in USES] if uses is None else [_known(its, known) for its in uses]
    out = check.local_path("out", tempfile.mkdtemp(prefix="gramtower-demo-") if out is None else out)
    out.mkdir(parents=True, exist_ok=True)
    split = held_out(needs, side="left", share=0.2, seed=seed)
    train, test = split.train, split.test
    if verbose:
        m, n = train.shape
        counts = f"{m:,} packages, known by their tools, × {n:,} dependencies: {m * n:,} pairs, {len(train):,} observed"
        print(f"{counts}; {test.shape[0]:,} other packages are held out", file=sys.stderr)
    new = {"uses": ["|".join(tools[name]) for name in test.left_ids]}
    linear, linear_time = _fit(TwoTower(dim=DIM, hidden=(), time_limit=seconds, seed=seed), train, tools)
    model = TwoTower(dim=DIM, hidden=((WIDTH,), ()), time_limit=seconds, seed=seed, verbose=verbose)
    model, model_time = _fit(model, train, tools, out / "history.jsonl")
    model.save(out / "model.gramtower")
    if model.reason_ is Reason.INTERRUPTED:
        raise KeyboardInterrupt(f"the model so far is {out / 'model.gramtower'}; the demo itself starts again")
    picture = draw(model, out / "run.png")
    drawn = np.random.default_rng(seed).permutation(test.shape[0])[:NEW]
    return {
        "left": train.shape[0],
        "right": train.shape[1],
        "links": len(train),
        "new": test.shape[0],
        "held_out": len(test),
        "tools": known,
        "methods": {
            "used most": _popularity(train, test) | {"seconds": 0.0},
            "linear towers": linear.evaluate(test, METRICS, left_features=new) | {"seconds": linear_time},
            "two towers": model.evaluate(test, METRICS, left_features=new) | {"seconds": model_time},
        },
        "new_packages": [
            {"package": str(name)} | _answer([linear, model], tools[name], test.right_ids[test.matrix[row].indices])
            for row, name in zip(drawn, test.left_ids[drawn], strict=True)
        ],
        "uses": [_answer([linear, model], its) for its in asked],
        "model": str(out / "model.gramtower"),
        "history": str(out / "history.jsonl"),
        "picture": None if picture is None else str(picture),
    }


def described(pairs: Interactions) -> tuple[Interactions, dict[str, list[str]]]:
    """Pairs of packages with their dependencies other than tools, and the tools of each package."""
    matrix = pairs.matrix
    order = np.argsort(-np.bincount(matrix.indices, minlength=matrix.shape[1]), kind="stable")
    is_tool = np.zeros(matrix.shape[1], dtype=bool)
    is_tool[order[:TOOLS]] = True
    tools: dict[str, list[str]] = {}
    kept = np.zeros(len(pairs), dtype=bool)
    for row, name in enumerate(pairs.left_ids):
        own = slice(matrix.indptr[row], matrix.indptr[row + 1])
        its = matrix.indices[own]
        if is_tool[its].sum() >= LEAST and not is_tool[its].all():
            tools[str(name)] = [str(tool) for tool in pairs.right_ids[its[is_tool[its]]]]
            kept[own] = ~is_tool[its]
    return pairs.subset(kept).without_empty(), tools


def show(found: dict[str, Any]) -> None:
    """What was found, for people."""
    print(f"\n{'needs of new packages':24s}{'MAP@5':>9s}{'Recall@20':>11s}{'seconds':>9s}")
    for name, numbers in found["methods"].items():
        print(f"{name:24s}{numbers['map@5']:9.3f}{numbers['recall@20']:11.3f}{numbers['seconds']:9.1f}")
    print("\nNew packages, known by the tools they use (✓ = it depends on that):")
    for one in found["new_packages"]:
        _print_lists(f"{one['package']}: ", one)
    print('\nTools of your own: gramtower demo --uses "gulp, browserify"')
    for one in found["uses"]:
        _print_lists("", one)
    print(f"\nmodel    {found['model']}\nhistory  {found['history']}")
    print(f"picture  {found['picture'] or NO_PICTURE}")


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
    axes.set_title(f"{model.optimizer}, {len(model.left_):,} packages × {len(model.right_):,} dependencies")
    axes.grid(True, which="both", alpha=0.3)
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return path


def _print_lists(name: str, one: dict[str, Any]) -> None:
    print(f"  {name}{' + '.join(one['uses'])}")
    for method in ("linear towers", "two towers"):
        shown = (f"{d['dependency']} ✓" if d["held_out"] else d["dependency"] for d in one[method])
        print(f"    {method:15s}" + ", ".join(shown))


def _known(asked: Sequence[str], tools: list[str]) -> list[str]:
    """The tools that were asked about; at least one, and none that the data do not have."""
    for tool in asked if asked else [""]:
        if tool not in tools:
            check.fail("uses", repr(tool), "tools out of " + ", ".join(tools))
    return list(asked)


def _fit(
    model: TwoTower, train: Interactions, tools: dict[str, list[str]], history: Path | None = None
) -> tuple[TwoTower, float]:
    """The model fitted to packages by their tools, and the seconds that it took."""
    start = time.perf_counter()
    names = [str(name) for name in train.left_ids]
    columns = {"package": names, "uses": ["|".join(tools[name]) for name in names]}
    table = FeatureTable(columns, "package", lists=["uses"])
    model.fit(train, left_features=table, history=history)
    if history is None and model.reason_ is Reason.INTERRUPTED:
        raise KeyboardInterrupt("nothing was kept; the demo starts again")
    return model, time.perf_counter() - start


def _popularity(train: Interactions, test: Interactions) -> dict[str, float]:
    """The same for every package: what is used most."""
    counts = np.bincount(train.matrix.indices, minlength=train.shape[1]).astype(np.float32)
    truth = aligned("test", test, (test.left_ids, train.right_ids), (test.shape[0], train.shape[1]))
    everybody = np.ones((test.shape[0], 1), np.float32)
    return dict(evaluate_embeddings(everybody, counts[:, None], truth, metrics=METRICS))


def _answer(models: Sequence[TwoTower], tools: Sequence[str], own: Iterable[object] = ()) -> dict[str, Any]:
    """What a package with these tools will need by each model, and whether it is among its own dependencies."""
    found: dict[str, Any] = {"uses": list(tools)}
    needed = set(map(str, own))
    for name, model in zip(("linear towers", "two towers"), models, strict=True):
        answers, _ = model.recommend(left_features={"uses": ["|".join(tools)]}, k=SHOWN)
        found[name] = [{"dependency": str(d), "held_out": str(d) in needed} for d in answers[0]]
    return found

"""Run ``gt.benchmark``: models × seeds, one after the other, each finished run kept.

There is one split for each seed, shared by all models; for each model a fit, lists of the users with test pairs, and
their metrics. The pairs that are learned from count as seen, and so does every entity with itself where both sides are
one set; all right entities are candidates. An error ends a run, not the benchmark. Cost: that of the fits and lists,
and of the bootstrap.

A model of the caller is a baseline of this package; an estimator with ``get_params``, ``fit(pairs, …)`` and
``recommend(ids, k)``, such as :class:`gramtower.TwoTower`; or a model of ``implicit``. Each run fits a copy, with the
seed of the run if the model takes one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import plain
from gramtower._util.host import ResidentPeak
from gramtower._util.tensors import digest_of
from gramtower.data.ids import Ids
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import SparseMatrix, union, without
from gramtower.data.splits import random_pairs
from gramtower.data.tables import FeaturesLike, FeatureTable
from gramtower.distributed.group import current_group
from gramtower.experiments.baselines import (
    ALS,
    EASE,
    SEEDS,
    BuiltIn,
    ItemKNN,
    Lists,
    OfEstimator,
    OfImplicit,
    Popularity,
    Recommender,
    needs_implicit,
    settings_of,
)
from gramtower.experiments.benchmark_report import (
    Benchmark,
    Manifest,
    ModelFacts,
    Run,
    build,
    read_run,
    summarise,
)
from gramtower.experiments.cross_validation import known_pairs
from gramtower.experiments.run_store import OthersBusy, RunStore, environment
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.metrics.embedding_metrics import Scores, ranking_metrics
from gramtower.model.fit_data import aligned, own_pairs
from gramtower.model.fitting import joined_features
from gramtower.model.two_tower import TwoTower
from gramtower.training.callbacks import progress_lines
from gramtower.training.checkpoint import locked

_MOST_SEEDS = 1000
Test = float | Interactions | SparseMatrix  # a share of the pairs, or held-out pairs
_REFUSED = {
    "auc": "it needs scores of all items, and a model here gives lists",
    "mrr": "mrr@K: a model here gives lists",
    "diversity": "it is measured in a model's own embeddings, which differ from model to model",
}


def benchmark(
    pairs: Interactions | SparseMatrix,
    test: Test = 0.1,
    *,
    metrics: str | Sequence[str] = DEFAULT,
    models: Mapping[str, object] | None = None,
    baselines: Sequence[str] | None = None,
    left_features: FeaturesLike = None,
    right_features: FeaturesLike = None,
    seeds: int | Sequence[int] = 3,
    reference: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    title: str = "",
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
    verbose: bool | None = None,
) -> Benchmark:
    """Compare models on the same split, with the same candidates, under several seeds.

    Everything is checked before the first fit. A model that fails or cannot run here is reported, and the others run.

    Args:
        pairs: :class:`~gramtower.Interactions`, or a scipy.sparse matrix.
        test: the share of pairs to test on, drawn at random with each seed; or held-out pairs, the same for all seeds,
            while ``pairs`` are those to learn from.
        metrics: names, see docs/metrics.md; the first decides which model is best. Metrics must be of lists: not auc,
            mrr without K or diversity.
        models: your own models by name. A model is a :class:`gramtower.TwoTower` or another estimator with
            ``get_params``, ``fit(pairs, …)`` and ``recommend(ids, k)``, which leaves out seen items; a tuple of an
            estimator and the arguments of its fit; one of :mod:`gramtower.experiments.baselines`; or a model of
            implicit. Each run fits a copy with its ``seed`` or ``random_state`` set to the seed of the run.
        baselines: names of built-in models: popularity, item-knn, ease, als, gramtower-linear,
            gramtower-linear-features and gramtower-hidden-features. None runs all of them, the last two only if there
            are features.
        left_features: input of the left tower, as for ``TwoTower.fit``, for the built-in models with features and for
            your own.
        right_features: the same for the right tower.
        seeds: the number of seeds, starting from 0; or a list of seeds.
        reference: the model that others are compared with; None for the best.
        out: folder for report.html, summary.json, benchmark.json and the finished runs. A benchmark that was stopped
            continues there, and other models and seeds are added. None keeps nothing.
        fresh: whether to replace a benchmark that the folder holds.
        title: title of the page; None or empty for the folder's name.
        command: the command line, for the page.
        progress: called with a line for each run that ends, instead of printing it.
        verbose: whether to print these lines on standard error; None for yes in a terminal or a notebook. The logger
            ``gramtower.benchmark`` gets them at level INFO.

    Returns:
        Means, intervals, differences, times and memory. Printing it shows a table and the best model.
    """
    if (processes := current_group().size) > 1:
        check.fail("benchmark", f"{processes} processes", "one: models do not run over several")
    known, names, numbers = known_pairs(pairs), checked_metrics(metrics), checked_seeds(seeds)
    if not len(known):
        check.fail("pairs", "none", "at least two pairs")
    features = joined_features((left_features, right_features), known)
    given = {"left_features": features[0], "right_features": features[1]}
    entries = make_entries(known, baselines, models, {name: one for name, one in given.items() if one is not None})
    if reference is not None and reference not in (able := [e.name for e in entries if e.facts.left_out is None]):
        check.fail("reference", repr(reference), "one of " + ", ".join(able))
    first = make_cut(known, test, numbers[0])
    folder = None if out is None else check.path("out", out)
    if folder is not None and folder.is_file():
        check.fail("out", folder, "a folder")
    manifest = Manifest(
        title=title or (folder.resolve().name if folder is not None else "models"),
        data=_about(known, test),
        fixed_test=isinstance(test, Interactions) or sp.issparse(test),
        metrics=names,
        seeds=numbers,
        reference=reference,
        models={e.name: plain(asdict(e.facts)) for e in entries},
        commands=[] if command is None else [command],
    )
    for entry in entries:
        try:
            if entry.facts.left_out is None and isinstance(candidate := entry.make(), OfEstimator):
                candidate.check(first.train)
        except ValueError as error:
            raise ValueError(f"models[{entry.name!r}]: {error}") from error
    lines = progress or progress_lines("gramtower.benchmark", verbose) or (lambda text: None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if folder is None else locked(folder, name="out"):
        store = None if folder is None else RunStore(folder, "benchmark", "out")
        if store is not None:
            manifest = _joined(store, manifest, check.flag("fresh", fresh))
            store.write_manifest(manifest)
        runner = _Runner(known, test, manifest, {e.name: e for e in entries}, store, lines)
        runner.run()
        if folder is not None:
            return build(folder)
        return Benchmark(summarise(runner.manifest, runner.runs), runner.runs)


def checked_seeds(seeds: object) -> list[int]:
    """Return seeds: the given ones, or as many as given, starting from 0."""
    if isinstance(seeds, (int, np.integer)) and not isinstance(seeds, bool):
        return list(range(check.count("seeds", seeds, most=_MOST_SEEDS)))
    found = [check.seed(one) for one in check.listed("seeds", seeds, "seeds")]
    if not found or len(set(found)) < len(found) or len(found) > _MOST_SEEDS:
        check.fail("seeds", f"{found}", f"1 to {_MOST_SEEDS} different seeds, or how many")
    return found


@dataclass
class _Runner:
    """The loop over seeds and models."""

    pairs: Interactions
    test: Test
    manifest: Manifest
    entries: dict[str, Entry]
    store: RunStore | None
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self.runs: list[Run] = []
        self.k = max(metric.k for metric in parse(self.manifest.metrics))

    def run(self) -> None:
        """Run all runs that have not ended."""
        manifest, store = self.manifest, self.store
        asked = [
            (seed, entry)
            for seed in manifest.seeds
            for name, entry in self.entries.items()
            if entry.facts.left_out is None and seed in manifest.seeds_of(name)
        ]
        waiting = [(seed, e) for seed, e in asked if store is None or read_run(store, e.name, seed) is None]
        if len(waiting) < len(asked):
            self.progress(f"{len(asked) - len(waiting)} of {len(asked)} runs are there already")
        if any(entry.facts.kind == "towers" for _, entry in waiting):
            _prepare()
        if waiting:
            self.progress(f"{len(waiting)} runs to do; first: {waiting[0][1].name}, seed {waiting[0][0]}")
        where, cut, of = environment(), None, 0
        for place, (seed, entry) in enumerate(waiting, start=1):
            if cut is None or (seed != of and not manifest.fixed_test):
                cut, of = make_cut(self.pairs, self.test, seed), seed
            text = self._one(entry, seed, cut, where)
            then = "".join(f"; next: {after.name}, seed {its}" for its, after in waiting[place : place + 1])
            ended = len(asked) - len(waiting) + place
            self.progress(f"{ended}/{len(asked)}  {entry.name}, seed {seed}: {text}{then}")

    def _one(self, entry: Entry, seed: int, cut: Cut, where: dict[str, object]) -> str:
        """Run a model once and keep the run if it ends well; return a line about it."""
        failures = {name: dict(errors) for name, errors in self.manifest.failures.items()}
        before = failures.get(entry.name, {}).pop(str(seed), None)
        try:
            run = replace(measure(entry, seed, cut, self.k, self.manifest.metrics), environment=where)
        except Exception as error:  # of whatever kind: models may be anyone's
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "  # whose text names the argument
            text = kind + " ".join(str(error).split())
            failures.setdefault(entry.name, {})[str(seed)] = text
            self._note(failures)
            return f"failed, {text}"
        if before is not None:
            self._note({name: errors for name, errors in failures.items() if errors})
        self.runs.append(run)
        if self.store is not None:
            self.store.write_run(f"{run.name}-{run.seed}", run)
        metric = self.manifest.metrics[0]
        return f"{metric} {run.metrics[metric]:.4f}, {run.seconds:.2f} s"

    def _note(self, failures: dict[str, dict[str, str]]) -> None:
        self.manifest = replace(self.manifest, failures=failures)
        if self.store is not None:
            self.store.write_manifest(self.manifest)


def measure(entry: Entry, seed: int, cut: Cut, k: int, metrics: list[str]) -> Run:
    """Run a model once: fit, lists, metrics."""
    candidate, peak, others = entry.make(), ResidentPeak(), OthersBusy()
    began = time.perf_counter()
    candidate.fit(cut.train, seed)
    fitted = time.perf_counter()
    lists = candidate.lists(cut.users, min(k, cut.train.shape[1]), cut.seen)
    ended, largest, busy = time.perf_counter(), peak.bytes(), others.cores()
    scores = cut.measure(lists, metrics)
    return Run(
        entry.name, seed, {name: float(scores[name]) for name in metrics}, cut.users,
        {name: np.asarray(values, dtype=np.float64) for name, values in scores.per_user.items()},
        fitted - began, ended - fitted, largest, peak.start, busy,
    )  # fmt: skip


def _prepare() -> None:
    """Compile the functions that all towers share, so that no model is charged for it."""
    few = sp.csr_matrix(np.eye(8, dtype=np.float32))
    TwoTower(dim=2, hidden=(), max_iterations=2).fit(few)
    TwoTower(dim=2, hidden=(2,), max_iterations=2).fit(few, ["id", few], ["id", few])


def _about(pairs: Interactions, test: Test) -> dict[str, object]:
    given, weights = isinstance(test, Interactions) or sp.issparse(test), [pairs.weights] * (pairs.weights is not None)
    return {
        "left": pairs.shape[0],
        "right": pairs.shape[1],
        "pairs": len(pairs),
        "test": "a given test" if given else f"a share of {test:g} drawn at random for the test, again with each seed",
        "fingerprint": digest_of(pairs.matrix, pairs.left_ids, pairs.right_ids, *weights),
        "test_fingerprint": digest_of(str(describe(test))) if given else None,
    }


def _joined(store: RunStore, now: Manifest, fresh: bool) -> Manifest:
    """Return the request together with the one in the folder; refuse a folder of another benchmark."""
    before: Manifest | None = store.continued(now, fresh, ("data", "fixed_test", "metrics"))
    if before is None:
        for path in store.folder.glob("runs/*.tensors"):  # runs of an earlier version
            path.unlink()
        return now
    shared = [name for name in now.models if name in before.models]
    marks = [[replace(one.facts(name), left_out=None) for name in shared] for one in (before, now)]
    store.refuse(name for name, was, will in zip(shared, *marks, strict=True) if was != will)
    return replace(
        now,
        title=before.title,
        seeds=list(dict.fromkeys([*before.seeds, *now.seeds])),
        reference=before.reference if now.reference is None else now.reference,
        models={**before.models, **now.models},
        failures=before.failures,
        commands=list(dict.fromkeys([*before.commands, *now.commands])),
    )


@dataclass(frozen=True, eq=False)
class Cut:
    """The split of one seed."""

    train: Interactions  # pairs to learn from
    seen: sp.csr_matrix  # pairs that are left out of lists, users × items
    users: NDArray[np.int64]  # rows of the users with relevant items
    relevant: sp.csr_matrix  # their relevant items, one row for each user

    def measure(self, lists: NDArray[np.int64], metrics: list[str]) -> Scores:
        """Return the metrics of lists, one list for each of ``users``."""
        if lists.shape[0] != len(self.users):
            check.fail("lists", f"{lists.shape[0]} lists", f"{len(self.users)}, one for each user")
        taken = seen_places(lists, sp.csr_matrix(self.seen[self.users]))
        if taken:
            expected = "none: those that a user has in the training pairs are left out for every model"
            check.fail("lists", f"{taken:,} items that are seen", expected)
        return ranking_metrics(lists, self.relevant, metrics, popularity=self.train.matrix)


def checked_metrics(metrics: str | Sequence[str]) -> list[str]:
    """Return the names of metrics, all of which can be computed from lists."""
    for metric in (found := parse(metrics)):
        if metric.kind in _REFUSED and (metric.kind == "diversity" or not metric.k):
            check.fail("metrics", repr(metric.name), f"metrics of lists: {_REFUSED[metric.kind]}")
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        check.fail("metrics", ", ".join(names), "each metric once")
    return names


def make_cut(pairs: Interactions, test: Test, seed: int) -> Cut:
    """Return the split of a seed: a share of the pairs drawn at random, or test pairs, the same for every seed."""
    if isinstance(test, (Interactions, sp.spmatrix, sp.sparray)):
        train, held_out = pairs, test
    else:
        split = random_pairs(pairs, test, seed=seed)
        train, held_out = split.train, split.test
    ids = train.left_ids, train.right_ids
    found = aligned("test", held_out, ids, train.shape, train.numbered)
    seen = union(train.matrix, own_pairs(ids, train.shape)) if train.one_set else union(train.matrix)
    relevant = without(sp.csr_matrix((found > 0).astype(np.float32)), seen)
    users = np.flatnonzero(np.diff(relevant.indptr)).astype(np.int64)
    if not len(users):
        check.fail("test", f"{found.nnz:,} pairs, none of them both positive and new", "at least one that is")
    return Cut(train, seen, users, sp.csr_matrix(relevant[users]))


def seen_places(lists: NDArray[np.int64], seen: sp.csr_matrix) -> int:
    """Count the places of lists that hold an item of the same row of ``seen``."""
    rows, places = np.nonzero(lists >= 0)
    shown = sp.csr_matrix((np.ones(len(rows), dtype=np.float32), (rows, lists[rows, places])), shape=seen.shape)
    return int(shown.multiply(seen).nnz)


def describe(value: object, ids: Ids | None = None) -> object:
    """Describe settings and features in JSON; equal ones have equal descriptions. Arrays and tables become digests.

    Of a table only the rows of ``ids`` count.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): describe(part, ids) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part, ids) for part in value]
    if isinstance(value, FeatureTable):
        rows = [] if ids is None else [value.encode(ids)]
        return {"table": value.kinds, "fingerprint": digest_of(value.to_json(), *rows)}
    if isinstance(value, (np.ndarray, torch.Tensor, sp.spmatrix, sp.sparray)):
        return {"shape": list(value.shape), "fingerprint": digest_of(value)}
    if isinstance(value, Interactions):
        return {"pairs": len(value), "fingerprint": digest_of(value.matrix, value.left_ids, value.right_ids)}
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is not None:
        return f"{value.__module__}.{name}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


BASELINES: dict[str, Callable[[], BuiltIn]] = {"popularity": Popularity, "item-knn": ItemKNN, "ease": EASE, "als": ALS}
TOWERS: dict[str, Callable[[], TwoTower]] = {
    "gramtower-linear": lambda: TwoTower(hidden=()),
    "gramtower-linear-features": lambda: TwoTower(hidden=()),
    "gramtower-hidden-features": TwoTower,
}
BUILT_IN = (*BASELINES, *TOWERS)
_LONGEST = 60  # letters of a name


class Candidate(Protocol):
    """A model in one run, with the interface of a baseline."""

    def fit(self, pairs: Interactions, seed: int = 0) -> object: ...
    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists: ...


@dataclass(frozen=True)
class Entry:
    """A model of a benchmark."""

    name: str  # name of the model
    make: Callable[[], Candidate]  # returns an unfitted copy of it
    facts: ModelFacts  # its description, to recognise its runs


def make_entries(
    pairs: Interactions,
    baselines: Sequence[str] | None,
    models: Mapping[str, object] | None,
    features: Mapping[str, object],
) -> list[Entry]:
    """Return the models of a benchmark after checking them."""
    entries = [
        _baseline(name, BASELINES[name](), pairs)
        if name in BASELINES
        else _estimator(name, TOWERS[name](), features if name.endswith("-features") else {}, pairs, "towers")
        for name in _chosen(baselines, bool(features))
    ]
    if models is not None and not isinstance(models, Mapping):
        check.fail("models", type(models).__name__, "names and models, such as {'mine': gramtower.TwoTower(dim=32)}")
    for name, given in (models or {}).items():
        if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST or not name.isprintable():
            check.fail("models", f"the name {name!r}", f"text of 1 to {_LONGEST} letters")
        if name in BUILT_IN:
            check.fail("models", f"the name {name!r}", "a name other than " + ", ".join(BUILT_IN))
        entries.append(_own(name, given, pairs, features))
    if not any(entry.facts.left_out is None for entry in entries):
        reasons = "; ".join(f"{entry.name}: {entry.facts.left_out}" for entry in entries)
        check.fail("models", f"none that can run ({reasons})" if entries else "none", "at least one model")
    return entries


def _chosen(names: Sequence[str] | None, with_features: bool) -> list[str]:
    fitting = [name for name in BUILT_IN if with_features or not name.endswith("-features")]
    if names is None:
        return fitting
    chosen = [names] if isinstance(names, str) else check.listed("baselines", names, "names")
    for name in chosen:
        if name not in BUILT_IN:
            near = check.near(name, BUILT_IN, 1) if isinstance(name, str) else []
            hint = f"{near[0]!r}, or another of " if near else ""
            check.fail("baselines", repr(name), hint + ", ".join(BUILT_IN))
        if name not in fitting:
            check.fail("baselines", repr(name), "left_features or right_features for it to see")
    if len(set(chosen)) < len(chosen):
        check.fail("baselines", ", ".join(chosen), "each name once")
    return chosen


def _baseline(name: str, model: BuiltIn, pairs: Interactions) -> Entry:
    reason = needs_implicit(model)
    if reason is None and isinstance(model, EASE):
        reason = model.too_large(pairs.shape[1])
    shown = {"model": type(model).__name__} | {name: describe(value) for name, value in settings_of(model).items()}
    facts = ModelFacts("baseline", shown, isinstance(model, ALS), reason)
    return Entry(name, lambda: copy.deepcopy(replace(model)), facts)


def _own(name: str, given: object, pairs: Interactions, features: Mapping[str, object]) -> Entry:
    paired = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    model: Any = given  # of any of the kinds below
    arguments: Mapping[str, object] = features
    if paired:
        model, arguments = model
    if isinstance(model, (Popularity, ItemKNN, EASE, ALS)) and not paired:
        return _baseline(name, model, pairs)
    if not isinstance(model, type) and all(
        callable(getattr(model, n, None)) for n in ("get_params", "fit", "recommend")
    ):
        return _estimator(name, model, arguments, pairs, "own")
    of_implicit = hasattr(model, "user_factors") or hasattr(model, "similarity")
    if of_implicit and not isinstance(model, type) and callable(getattr(model, "fit", None)) and not paired:
        plain = {n: v for n, v in vars(model).items() if isinstance(v, (bool, int, float, str)) and n not in SEEDS}
        facts = ModelFacts("own", {"model": type(model).__name__, **plain}, True)
        return Entry(name, lambda: OfImplicit(copy.deepcopy(model)), facts)
    shown = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    expected = (
        "a model with get_params, fit and recommend such as gramtower.TwoTower(), a pair of it and the arguments of "
        "its fit, one of gramtower.experiments.baselines, or one of implicit"
    )
    check.fail(f"models[{name!r}]", shown, expected)


def _estimator(name: str, model: Recommender, arguments: Mapping[str, object], pairs: Interactions, kind: str) -> Entry:
    """Return a model that is an estimator; matrices of features must have a row for each entity."""
    given = {}
    for part, value in arguments.items():
        ids = {"left_features": pairs.left_ids, "right_features": pairs.right_ids}.get(part)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if ids is not None and hasattr(one, "shape") and one.shape[0] != len(ids):
                check.fail(part, f"{one.shape[0]} rows", f"{len(ids)}, one for each entity of pairs")
        given[part] = describe(value, ids)
    settings = {n: describe(v) for n, v in model.get_params().items() if n not in ("verbose", *SEEDS)}
    shown = {"model": type(model).__name__, **settings, **({"fit": given} if given else {})}
    return Entry(name, lambda: OfEstimator(model, arguments), ModelFacts(kind, shown, True))

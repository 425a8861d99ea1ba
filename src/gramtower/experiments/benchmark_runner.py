"""Run ``gt.benchmark``: models × seeds, one after the other, each finished run kept.

There is one split for each seed, shared by all models; for each model a fit, lists of the users with test pairs, and
their metrics. An error ends a run, not the benchmark. Cost: that of the fits and lists, and of the bootstrap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower._util.files import plain
from gramtower._util.host import ResidentPeak
from gramtower._util.tensors import digest_of
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import SparseMatrix
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import current_group
from gramtower.experiments.benchmark_models import (
    Cut,
    Entry,
    OfEstimator,
    Test,
    checked_metrics,
    describe,
    make_cut,
    make_entries,
)
from gramtower.experiments.benchmark_report import Benchmark, Manifest, Run, build, read_run, store_of, summarise
from gramtower.experiments.cross_validation import known_pairs
from gramtower.experiments.machine import OthersBusy, environment
from gramtower.experiments.run_store import RunStore
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.model.two_tower import TwoTower
from gramtower.training.callbacks import progress_lines
from gramtower.training.checkpoint import locked

_MOST_SEEDS = 1000


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
    given = {"left_features": left_features, "right_features": right_features}
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
        store = None if folder is None else store_of(folder, "out")
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

"""Turn the runs of a benchmark into numbers, a table and a page.

A mean is that over seeds of the means over users. For intervals, users are drawn with replacement, each with all its
values under every seed, with the same draws for all models. A difference is that of a user's values under the same
seed, model − reference, so that whatever makes a user hard for both cancels. Metrics of all users together (coverage,
Gini) have means only. Cost: O(replicates · users · seeds · models) for each metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from gramtower._util import checks as check
from gramtower._util.files import build as build_from_json
from gramtower._util.files import plain, write_json, write_text
from gramtower.experiments.cross_validation import LEVEL, Interval, bootstrap_intervals, span, text_table
from gramtower.experiments.figures import BUSY, PAGE, SUMMARY, Page, interval_figure, table
from gramtower.experiments.run_store import RunStore
from gramtower.metrics.definitions import LOWER_IS_BETTER, parse

Summary = dict[str, Any]  # the content of summary.json, see ``summarise``
REPLICATES = 1000


@dataclass(frozen=True)
class ModelFacts:
    """A model as the manifest describes it."""

    kind: str  # "baseline", "towers" or "own"
    settings: dict[str, Any]  # settings of the model, for JSON and to recognise its runs
    random: bool  # whether its result depends on the seed
    left_out: str | None = None  # why it does not run; None if it runs


@dataclass(frozen=True)
class Manifest:
    """The request: which models are compared on which data."""

    title: str  # title of the page
    data: dict[str, Any]  # counts, a digest, and how pairs are held out
    fixed_test: bool  # whether all seeds test the same pairs
    metrics: list[str]  # names; the first decides which model is best
    seeds: list[int]  # seeds of the runs
    reference: str | None  # the model that others are compared with; None for the best
    models: dict[str, dict[str, Any]]  # by name, in order
    failures: dict[str, dict[str, str]] = field(default_factory=dict)  # errors of models, by seed
    commands: list[str] = field(default_factory=list)  # command lines, if any

    def __post_init__(self) -> None:
        if not self.metrics or not self.seeds or not self.models:
            raise ValueError("no models, metrics or seeds")
        for name in self.models:
            self.facts(name)

    def facts(self, name: str) -> ModelFacts:
        """Return the description of a model."""
        return build_from_json(f"models[{name!r}]", ModelFacts, self.models[name])

    def seeds_of(self, name: str) -> list[int]:
        """Return the seeds that a model runs with: one, if neither it nor the split depends on the seed."""
        return self.seeds if self.facts(name).random or not self.fixed_test else self.seeds[:1]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run of a model."""

    name: str  # name of the model
    seed: int  # seed of the split and of the model
    metrics: dict[str, Any]  # by name
    users: Any  # array with the rows of the users that metrics are means over
    per_user: dict[str, Any]  # array with their values, for each metric that is a mean over users
    seconds: float  # time of the fit
    list_seconds: float  # time of the lists
    peak_bytes: int | None = None  # the largest resident set during the run; None if unknown
    start_bytes: int | None = None  # the resident set before
    others_busy: float | None = None  # cores that other processes kept busy during the run; None if unknown
    environment: dict[str, Any] = field(default_factory=dict)  # machine and versions

    def __post_init__(self) -> None:  # JSON has lists for arrays, and null for NaN
        users = np.asarray(self.users, dtype=np.int64)
        values = {name: np.asarray(each, dtype=np.float64) for name, each in self.per_user.items()}
        if any(each.shape != users.shape for each in values.values()):
            raise ValueError("metrics of single users have another length than users")
        metrics = {name: math.nan if value is None else float(value) for name, value in self.metrics.items()}
        for name, value in (("users", users), ("per_user", values), ("metrics", metrics)):
            object.__setattr__(self, name, value)


def read_run(store: RunStore, name: str, seed: int) -> Run | None:
    """Return a finished run, None if there is none."""
    run = store.read_run(f"{name}-{seed}", Run)
    if run is not None and (run.name, run.seed) != (name, seed):
        check.fail("folder", f"a run of {run.name!r} with seed {run.seed}", f"one of {name!r} with seed {seed}")
    return run


def summarise(manifest: Manifest, runs: list[Run], replicates: int = REPLICATES, seed: int = 0) -> Summary:
    """Return the numbers of a benchmark, for JSON. Times of a model are medians and bytes maxima over its seeds."""
    return _Numbers(manifest, {(run.name, run.seed): run for run in runs}, replicates, seed).summary(runs)


@dataclass(frozen=True)
class _Numbers:
    """Finished runs by name and seed, and how their intervals are drawn."""

    manifest: Manifest
    found: dict[tuple[str, int], Run]
    replicates: int
    seed: int

    def summary(self, runs: list[Run]) -> Summary:
        manifest, first = self.manifest, self.manifest.metrics[0]
        models = {name: self.facts(name) for name in manifest.models}
        complete = [name for name, facts in models.items() if facts["status"] == "finished"]
        ranked = sorted(complete, key=lambda name: _key(first, self.mean(name, first)))
        best = ranked[0] if ranked else None
        reference = manifest.reference if manifest.reference in complete else best
        shown = [name for name in manifest.models if models[name]["runs"]]
        for metric in manifest.metrics:
            spans, differences = self.intervals(shown, reference, metric)
            for name in shown:
                models[name]["metrics"][metric] = {
                    "mean": self.mean(name, metric),
                    "interval": spans.get(name),
                    "by_seed": {str(seed): run.metrics[metric] for seed, run in self.by_seed(name).items()},
                    "difference": differences.get(name),
                }
        environments: dict[str, dict[str, object]] = {}  # machines and versions, each once
        for run in runs:
            key = str({name: value for name, value in run.environment.items() if name != "date"})
            environments.setdefault(key, run.environment)
        return {
            "title": manifest.title,
            "data": manifest.data,
            "metrics": manifest.metrics,
            "seeds": manifest.seeds,
            "users": {str(run.seed): len(run.users) for run in runs},
            "best": best,
            "reference": reference,
            "ranking": ranked,
            "models": models,
            "intervals": {"level": LEVEL, "over": "users", "replicates": self.replicates, "seed": self.seed},
            "environments": list(environments.values()),
            "commands": manifest.commands,
            "verdict": self.verdict(first, ranked, models),
        }

    def verdict(self, metric: str, ranked: list[str], models: dict[str, Summary]) -> str:
        """Say which model is best, by how much, and whether the interval of the difference excludes zero."""
        if not ranked:
            return "No model has ended yet, so none won."
        winner = models[ranked[0]]["metrics"][metric]
        whole = all(facts["status"] in ("finished", "left out") for facts in models.values())
        text = "" if whole else "Of the models whose runs have all ended, "
        text += f"{ranked[0]} has the best {metric}, {winner['mean']:.4f}{_shown(winner['interval'])}"
        if len(ranked) == 1:
            return text + "; no other model ran to compare it with."
        second = ranked[1]
        by = self.intervals(ranked[:2], second, metric)[1].get(ranked[0])
        if by is None:
            gap = winner["mean"] - models[second]["metrics"][metric]["mean"]
            return (
                f"{text}, {gap:+.4f} against {second}, the next; {metric} has no values of single users to judge it by."
            )
        text += f": {by['mean']:+.4f}{_shown(by['interval'])} against {second}, the next. "
        if by["excludes_zero"]:
            return text + "The interval excludes zero."
        return text + "The interval includes zero: these users cannot tell the two apart."

    def by_seed(self, name: str) -> dict[int, Run]:
        """Return the runs of a model by seed; a run that depends on no seed stands for all seeds."""
        own = self.manifest.seeds_of(name)
        keys = {seed: (name, seed if seed in own else own[0]) for seed in self.manifest.seeds}
        return {seed: self.found[key] for seed, key in keys.items() if key in self.found}

    def mean(self, name: str, metric: str) -> float:
        return float(np.mean([run.metrics[metric] for run in self.by_seed(name).values()]))

    def facts(self, name: str) -> Summary:
        """Return status, times and memory of a model."""
        manifest = self.manifest
        facts, failed, seeds = manifest.facts(name), manifest.failures.get(name, {}), manifest.seeds_of(name)
        runs = [self.found[name, seed] for seed in seeds if (name, seed) in self.found]
        missing = len(seeds) - len(runs)
        status, message = "finished", ""
        if facts.left_out is not None and missing:
            status, message = "left out", facts.left_out
        elif missing and failed:
            status, message = "failed", "; ".join(f"seed {seed}: {text}" for seed, text in failed.items())
        elif missing:
            status, message = "unfinished", f"{missing} of {len(seeds)} runs have not ended"
        return {
            "kind": facts.kind,
            "status": status,
            "message": message,
            "runs": len(runs),
            "fit_seconds": float(np.median([run.seconds for run in runs])) if runs else None,
            "list_seconds": float(np.median([run.list_seconds for run in runs])) if runs else None,
            "fit_seconds_by_seed": {str(run.seed): run.seconds for run in runs},
            "peak_bytes": _most(run.peak_bytes for run in runs),
            "added_bytes": _most(
                max(0, run.peak_bytes - run.start_bytes) for run in runs if run.peak_bytes and run.start_bytes
            ),
            "others_busy": _most(run.others_busy for run in runs),
            "settings": facts.settings,
            "metrics": {},
        }

    def intervals(
        self, names: list[str], reference: str | None, metric: str
    ) -> tuple[dict[str, Interval], dict[str, Summary]]:
        """Return intervals of the means of models, and means and intervals of their differences from one of them."""
        own = {name: self.by_seed(name) for name in names}
        measured = [name for name in names if all(metric in run.per_user for run in own[name].values())]
        if not measured:
            return {}, {}
        others = [name for name in measured if name != reference] if reference in measured else []
        folds = []
        for seed in self.manifest.seeds:
            there = {name: own[name][seed] for name in measured if seed in own[name]}
            if there:  # one column of users' values for each model and each difference, NaN where a run is missing
                users = next(iter(there.values())).users  # the same for all: they share the split
                nothing = np.full(len(users), np.nan)
                values = {name: there[name].per_user[metric] if name in there else nothing for name in measured}
                apart = [values[name] - values[str(reference)] for name in others]
                folds.append((users, np.stack([*values.values(), *apart], axis=1)))
        spans = bootstrap_intervals(folds, replicates=self.replicates, seed=self.seed)
        differences = {}
        for place, name in enumerate(others, start=len(measured)):
            columns = [values[:, place] for _, values in folds]
            means = [float(np.nanmean(column)) for column in columns if np.isfinite(column).any()]
            low, high = spans[place]
            excludes = bool(np.isfinite(spans[place]).all() and (low > 0 or high < 0))
            mean = float(np.mean(means)) if means else math.nan
            differences[name] = {"mean": mean, "interval": spans[place], "excludes_zero": excludes}
        return dict(zip(measured, spans, strict=False)), differences


def _most(values: Iterable[float | None]) -> float | None:
    """Return the largest of the known values."""
    return max((value for value in values if value is not None), default=None)


def _key(metric: str, value: float) -> float:
    """Return a key that sorts the best value first and NaN last."""
    if not math.isfinite(value):
        return math.inf
    return value if parse(metric)[0].kind in LOWER_IS_BETTER else -value


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else f" (95% {interval[0]:.4f} to {interval[1]:.4f})"


def _ran(summary: Summary) -> list[tuple[str, Summary]]:
    """Return models with a run and their numbers, the best first, those that have not ended last."""
    models, ranked = summary["models"], summary["ranking"]
    names = [*ranked, *(name for name in models if name not in ranked)]
    return [(name, models[name]) for name in names if models[name]["runs"]]


def table_of(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the plain table: models with a run, the best first."""
    first, *others = summary["metrics"]
    apart = [f"difference from {summary['reference']}"] if len(summary["ranking"]) > 1 else []
    heads = ["model", first, "95%", *apart, *others, "fit s", "peak MB", "added MB"]
    rows = []
    for name, facts in _ran(summary):
        found = facts["metrics"][first]
        cells = [name, f"{found['mean']:.4f}", span(found["interval"])]
        cells += [_difference(found["difference"]) for _ in apart]
        cells += [f"{facts['metrics'][metric]['mean']:.4f}" for metric in others]
        rows.append([*cells, f"{facts['fit_seconds']:.2f}", *_megabytes(facts)])
    return heads, rows


def notes_of(summary: Summary) -> list[str]:
    """Return a line for each model that did not end."""
    models = summary["models"].items()
    return [f"{name} {one['status']}: {one['message']}" for name, one in models if one["status"] != "finished"]


def _difference(found: Summary | None) -> str:
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['mean']:+.4f} ({low:+.4f} to {high:+.4f})"


def _megabytes(facts: Summary) -> list[str]:
    sizes = (facts["peak_bytes"], facts["added_bytes"])
    return ["-" if size is None else f"{size / 1e6:,.0f}" for size in sizes]


_EXPLAINED = (
    "All models learn from the same pairs, rank all items for the same users, and leave out a user's training "
    "pairs. Means are over seeds of means over users. Intervals: percentiles of {replicates:,} bootstrap "
    "replicates, in which users are drawn with replacement, the same draws for all models. A difference is that of the "
    "same users under the same seeds. Each is a statement about one pair of models: with many of them, some exclude "
    "zero by chance."
)
_COSTS = (
    "Seconds are medians over seeds, of the fit and of the lists of all users. Memory is the resident set of "
    "the process: its largest size during fit and lists, and by how much that is above the size before, the "
    "largest over seeds. Memory of a GPU is not in it. Models run one after the other; nothing else should."
)


def page(summary: Summary) -> str:
    """Build the page of the numbers of :func:`summarise`."""
    made, models = Page(f"Benchmark of models: {summary['title']}"), summary["models"].values()
    made.text(about(summary))
    made.text(summary["verdict"], strong=True)
    if notes := "".join(f"<li>{escape(line)}</li>" for line in notes_of(summary)):
        made.add(f'<div class="warn"><p>Not all models are compared:</p><ul>{notes}</ul></div>')
    if ran := _ran(summary):
        for metric in summary["metrics"]:
            _add_metric(made, summary, metric)
        made.heading("Time and memory")
        costs = [(name, f"{m['fit_seconds']:.2f}", f"{m['list_seconds']:.2f}", *_megabytes(m)) for name, m in ran]
        made.add(table(["model", "fit, seconds", "lists, seconds", "peak, MB", "added, MB"], costs))
        made.text(_COSTS, "soft")
        if (busy := max(one["others_busy"] or 0.0 for one in models)) > BUSY:
            made.text(f"Other processes kept up to {busy:.2f} cores busy meanwhile; times are no measurement.", "warn")
        first, seeds = summary["metrics"][0], summary["seeds"]
        made.heading(f"{first} of each seed")
        values = {name: [one["metrics"][first]["by_seed"].get(str(seed)) for seed in seeds] for name, one in ran}
        rows = [[name, *("–" if x is None else f"{x:.4f}" for x in by_seed)] for name, by_seed in values.items()]
        made.add(table(["model", *(f"seed {seed}" for seed in seeds)], rows))
    made.heading("How it was measured")
    made.text(_EXPLAINED.format(replicates=summary["intervals"]["replicates"]))
    settings = {name: one["settings"] for name, one in summary["models"].items()}
    machines = {f"machine {place}": one for place, one in enumerate(summary["environments"], start=1)}
    made.circumstances(summary["commands"], settings | {"data": summary["data"]}, machines)
    return made.html()


def about(summary: Summary) -> str:
    """Return a sentence about the data."""
    data, users = summary["data"], summary["users"]
    counts = {seed: users[str(seed)] for seed in summary["seeds"] if str(seed) in users}
    if len(set(counts.values())) == 1:
        tested = f"{next(iter(counts.values())):,} users have test pairs"
    else:
        each = ", ".join(f"{count:,} with seed {seed}" for seed, count in counts.items())
        tested = f"users with test pairs: {each}" if each else "no run has ended yet"
    return f"{data['left']:,} × {data['right']:,} entities, {data['pairs']:,} pairs; {data['test']}; {tested}."


def _add_metric(page: Page, summary: Summary, metric: str) -> None:
    """Add means, intervals and differences of a metric, as a figure and as a table."""
    found = [(name, one["metrics"][metric]) for name, one in _ran(summary)]
    rows = []
    for name, one in found:
        apart = one["difference"]
        excludes = "" if apart is None else "yes" if apart["excludes_zero"] else "no"
        rows.append([name, f"{one['mean']:.4f}", span(one["interval"]), _difference(apart), excludes])
    page.heading(metric)
    shown = [(name, one["mean"], one["interval"]) for name, one in found]
    page.figure(lambda: interval_figure(metric, shown), f"{metric} of each model with its 95% interval")
    apart_from = f"difference from {summary['reference']}"
    page.add(table(["model", metric, "95% interval", apart_from, "interval excludes zero"], rows))


@dataclass(frozen=True, repr=False, eq=False)
class Benchmark:
    """The result of a benchmark.

    Attributes:
        summary: all numbers: for each model its status, settings, seconds, bytes, and for each metric the mean, the 95%
            interval, the value of each seed and the difference from the reference.
        runs: the finished runs, with the values of each user.
    """

    summary: Summary
    runs: list[Run]

    @property
    def best(self) -> str | None:
        """The model with the best mean of the first metric; None if none has ended."""
        best: str | None = self.summary["best"]
        return best

    @property
    def verdict(self) -> str:
        """Sentences: which model is best, by how much, and whether the interval excludes zero."""
        return str(self.summary["verdict"])

    def to_dict(self) -> dict[str, object]:
        """Return all numbers, for JSON."""
        return dict(plain(self.summary))

    def to_html(self) -> str:
        """Return the page, which needs no other file."""
        return page(self.summary)

    def __repr__(self) -> str:
        return "\n".join([*text_table(*table_of(self.summary)), *notes_of(self.summary), self.verdict])


def build(folder: Path) -> Benchmark:
    """Rebuild summary.json and report.html of a folder from benchmark.json and the finished runs."""
    store = RunStore(folder, "benchmark")
    manifest = store.read_manifest(Manifest)
    if manifest is None:
        check.fail("folder", folder, f"a folder with {store.manifest.name}, which gramtower benchmark writes")
    asked = [(name, seed) for name in manifest.models for seed in manifest.seeds_of(name)]
    runs = [run for name, seed in asked if (run := read_run(store, name, seed)) is not None]
    found = Benchmark(summarise(manifest, runs), runs)
    write_json(folder / SUMMARY, found.to_dict())
    write_text(folder / PAGE, found.to_html())
    return found

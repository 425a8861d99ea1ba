"""Turn the runs of a benchmark into numbers, a table and a page.

A mean is that over seeds of the means over users. For intervals, users are drawn with replacement, each with all its
values under every seed, with the same draws for all models. A difference is that of a user's values under the same
seed, model − reference, so that whatever makes a user hard for both cancels. Metrics of all users together (coverage,
Gini) have means only. Cost: O(replicates · users · seeds · models) for each metric.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import build as build_from_json
from gramtower._util.files import plain, write_json, write_text
from gramtower._util.html import document
from gramtower.experiments.cross_validation import Interval, bootstrap_intervals, span, text_table
from gramtower.experiments.figures import interval_figure
from gramtower.experiments.page import BUSY, PAGE, SUMMARY, circumstances, drawn, table
from gramtower.experiments.run_store import RunStore
from gramtower.metrics.definitions import LOWER_IS_BETTER, parse


@dataclass(frozen=True)
class ModelFacts:
    """A model as the manifest describes it; see :class:`gramtower.experiments.benchmark_models.Entry`."""

    kind: str
    settings: dict[str, Any]
    random: bool
    left_out: str | None = None


class Difference(TypedDict):
    """A paired difference from the reference."""

    mean: float
    interval: Interval
    excludes_zero: bool


class MetricSummary(TypedDict):
    """A metric of a model."""

    mean: float
    interval: Interval | None
    by_seed: dict[str, float]
    difference: Difference | None


class ModelSummary(TypedDict):
    """A model in the summary; times are medians and bytes maxima over seeds."""

    kind: str
    status: str
    message: str
    runs: int
    fit_seconds: float | None
    list_seconds: float | None
    fit_seconds_by_seed: dict[str, float]
    peak_bytes: int | None
    added_bytes: int | None
    others_busy: float | None
    settings: dict[str, object]
    metrics: dict[str, MetricSummary]


class Summary(TypedDict):
    """All numbers of a benchmark."""

    title: str
    data: dict[str, object]
    metrics: list[str]
    seeds: list[int]
    users: dict[str, int]
    best: str | None
    reference: str | None
    ranking: list[str]
    models: dict[str, ModelSummary]
    intervals: dict[str, object]
    environments: list[dict[str, object]]
    commands: list[str]
    verdict: str


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


def store_of(folder: Path, argument: str = "folder") -> RunStore:
    """Return the files of a benchmark; errors call the folder by the name of the argument."""
    return RunStore(folder, "benchmark", argument)


def read_run(store: RunStore, name: str, seed: int) -> Run | None:
    """Return a finished run, None if there is none."""
    run = store.read_run(f"{name}-{seed}", Run)
    if run is not None and (run.name, run.seed) != (name, seed):
        check.fail("folder", f"a run of {run.name!r} with seed {run.seed}", f"one of {name!r} with seed {seed}")
    return run


REPLICATES = 1000
#: The possible states of a model, with their meaning.
STATUSES = {
    "finished": "all its runs ended",
    "failed": "a run raised an error",
    "unfinished": "not all its runs have ended; the same benchmark continues them",
    "left out": "it was not run",
}


def summarise(manifest: Manifest, runs: list[Run], replicates: int = REPLICATES, seed: int = 0) -> Summary:
    """Return the numbers of a benchmark, for JSON."""
    found = {(run.name, run.seed): run for run in runs}
    models = {name: _facts(manifest, name, found) for name in manifest.models}
    complete = [name for name, facts in models.items() if facts["status"] == "finished"]
    first = manifest.metrics[0]
    ranked = sorted(complete, key=lambda name: _key(first, _mean(manifest, name, found, first)))
    best = ranked[0] if ranked else None
    reference = manifest.reference if manifest.reference in complete else best
    shown = [name for name in manifest.models if models[name]["runs"]]
    for metric in manifest.metrics:
        spans, differences = _intervals(manifest, found, shown, reference, metric, replicates, seed)
        for name in shown:
            models[name]["metrics"][metric] = {
                "mean": _mean(manifest, name, found, metric),
                "interval": spans.get(name),
                "by_seed": {str(s): run.metrics[metric] for s, run in _runs(manifest, name, found).items()},
                "difference": differences.get(name),
            }
    summary: Summary = {
        "title": manifest.title,
        "data": manifest.data,
        "metrics": manifest.metrics,
        "seeds": manifest.seeds,
        "users": {str(run.seed): len(run.users) for run in runs},
        "best": best,
        "reference": reference,
        "ranking": ranked,
        "models": models,
        "intervals": {"level": 0.95, "over": "users", "replicates": replicates, "seed": seed},
        "environments": _environments(runs),
        "commands": manifest.commands,
        "verdict": "",
    }
    summary["verdict"] = verdict(summary, found, manifest, replicates, seed)
    return summary


def verdict(summary: Summary, found: dict[tuple[str, int], Run], manifest: Manifest, replicates: int, seed: int) -> str:
    """Return sentences: which model is best, by how much, and whether the interval of the difference excludes zero."""
    metric, ranked, models = summary["metrics"][0], summary["ranking"], summary["models"]
    if not ranked:
        return "No model has ended yet, so none won."
    winner = models[ranked[0]]["metrics"][metric]
    whole = all(facts["status"] in ("finished", "left out") for facts in models.values())
    text = "" if whole else "Of the models whose runs have all ended, "
    text += f"{ranked[0]} has the best {metric}, {winner['mean']:.4f}{_shown(winner['interval'])}"
    if len(ranked) == 1:
        return text + "; no other model ran to compare it with."
    second = ranked[1]
    by = _intervals(manifest, found, ranked[:2], second, metric, replicates, seed)[1].get(ranked[0])
    if by is None:
        gap = winner["mean"] - models[second]["metrics"][metric]["mean"]
        return f"{text}, {gap:+.4f} against {second}, the next; {metric} has no values of single users to judge it by."
    text += f": {by['mean']:+.4f}{_shown(by['interval'])} against {second}, the next. "
    if by["excludes_zero"]:
        return text + "The interval excludes zero."
    return text + "The interval includes zero: these users cannot tell the two apart."


def _key(metric: str, value: float) -> float:
    """Return a key that sorts the best value first and NaN last."""
    if not math.isfinite(value):
        return math.inf
    return value if parse(metric)[0].kind in LOWER_IS_BETTER else -value


def _runs(manifest: Manifest, name: str, found: dict[tuple[str, int], Run]) -> dict[int, Run]:
    """Return the runs of a model by seed; a run that depends on no seed stands for all seeds."""
    own = manifest.seeds_of(name)
    return {seed: found[key] for seed in manifest.seeds if (key := (name, seed if seed in own else own[0])) in found}


def _mean(manifest: Manifest, name: str, found: dict[tuple[str, int], Run], metric: str) -> float:
    return float(np.mean([run.metrics[metric] for run in _runs(manifest, name, found).values()]))


def _facts(manifest: Manifest, name: str, found: dict[tuple[str, int], Run]) -> ModelSummary:
    """Return status, times and memory of a model."""
    facts, failed = manifest.facts(name), manifest.failures.get(name, {})
    runs = [found[name, seed] for seed in manifest.seeds_of(name) if (name, seed) in found]
    missing = len(manifest.seeds_of(name)) - len(runs)
    status, message = "finished", ""
    if facts.left_out is not None and missing:
        status, message = "left out", facts.left_out
    elif missing and failed:
        status, message = "failed", "; ".join(f"seed {seed}: {text}" for seed, text in failed.items())
    elif missing:
        status, message = "unfinished", f"{missing} of {len(manifest.seeds_of(name))} runs have not ended"
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    added = [max(0, run.peak_bytes - run.start_bytes) for run in runs if run.peak_bytes and run.start_bytes]
    return {
        "kind": facts.kind,
        "status": status,
        "message": message,
        "runs": len(runs),
        "fit_seconds": float(np.median([run.seconds for run in runs])) if runs else None,
        "list_seconds": float(np.median([run.list_seconds for run in runs])) if runs else None,
        "fit_seconds_by_seed": {str(run.seed): run.seconds for run in runs},
        "peak_bytes": max(peaks, default=None),
        "added_bytes": max(added, default=None),
        "others_busy": max((run.others_busy for run in runs if run.others_busy is not None), default=None),
        "settings": facts.settings,
        "metrics": {},
    }


def _environments(runs: list[Run]) -> list[dict[str, object]]:
    """Return the machines and versions of the runs, each once."""
    found: dict[str, dict[str, object]] = {}
    for run in runs:
        found.setdefault(str({key: value for key, value in run.environment.items() if key != "date"}), run.environment)
    return list(found.values())


def _intervals(
    manifest: Manifest,
    found: dict[tuple[str, int], Run],
    names: list[str],
    reference: str | None,
    metric: str,
    replicates: int,
    seed: int,
) -> tuple[dict[str, Interval], dict[str, Difference]]:
    """Return intervals of the means of models, and means and intervals of their differences from one of them."""
    own = {name: _runs(manifest, name, found) for name in names}
    measured = [name for name in names if all(metric in run.per_user for run in own[name].values())]
    if not measured:
        return {}, {}
    others = [name for name in measured if name != reference] if reference in measured else []
    folds = []
    for one in manifest.seeds:
        there = {name: own[name][one] for name in measured if one in own[name]}
        if there:
            users = next(iter(there.values())).users  # the same for all: they share the split
            folds.append((users, _columns(there, measured, others, reference, metric, len(users))))
    spans = bootstrap_intervals(folds, replicates=replicates, seed=seed)
    differences: dict[str, Difference] = {}
    for place, name in enumerate(others):
        values = [values[:, len(measured) + place] for _, values in folds]
        means = [float(np.nanmean(part)) for part in values if np.isfinite(part).any()]
        span = spans[len(measured) + place]
        excludes = bool(np.isfinite(span).all() and (span[0] > 0 or span[1] < 0))
        mean = float(np.mean(means)) if means else math.nan
        differences[name] = {"mean": mean, "interval": span, "excludes_zero": excludes}
    return dict(zip(measured, spans, strict=False)), differences


def _columns(
    there: dict[str, Run], measured: list[str], others: list[str], reference: str | None, metric: str, users: int
) -> NDArray[np.float64]:
    """Return one column of users' values for each model and for each difference, NaN where a run is missing."""
    nothing = np.full(users, np.nan)
    values = {name: there[name].per_user[metric] if name in there else nothing for name in measured}
    apart = [values[name] - values[reference] for name in others if reference is not None]
    return np.stack([*(values[name] for name in measured), *apart], axis=1)


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else f" (95% {interval[0]:.4f} to {interval[1]:.4f})"


def ordered(summary: Summary) -> list[tuple[str, ModelSummary]]:
    """Return models and their numbers, the best first, those that have not ended last."""
    models, ranked = summary["models"], summary["ranking"]
    return [(name, models[name]) for name in (*ranked, *(name for name in models if name not in ranked))]


def table_of(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the plain table: models with a run, the best first."""
    first, *others = summary["metrics"]
    apart = [f"difference from {summary['reference']}"] if len(summary["ranking"]) > 1 else []
    heads = ["model", first, "95%", *apart, *others, "fit s", "peak MB", "added MB"]
    rows = []
    for name, facts in ordered(summary):
        if facts["runs"]:
            found = facts["metrics"][first]
            cells = [name, f"{found['mean']:.4f}", span(found["interval"])]
            cells += [difference(found["difference"]) for _ in apart]
            cells += [f"{facts['metrics'][metric]['mean']:.4f}" for metric in others]
            cells += [f"{facts['fit_seconds']:.2f}", megabytes(facts["peak_bytes"]), megabytes(facts["added_bytes"])]
            rows.append(cells)
    return heads, rows


def notes_of(summary: Summary) -> list[str]:
    """Return a line for each model that did not end."""
    return [
        f"{name} {facts['status']}: {facts['message']}"
        for name, facts in summary["models"].items()
        if facts["status"] != "finished"
    ]


def difference(found: Difference | None) -> str:
    """Format a difference and its interval."""
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['mean']:+.4f} ({low:+.4f} to {high:+.4f})"


def megabytes(value: int | None) -> str:
    """Format bytes as megabytes; - if they are unknown."""
    return "-" if value is None else f"{value / 1e6:,.0f}"


_DIGITS = 4
_EXPLAINED = (
    "All models learn from the same pairs, rank all items for the same users, and leave out a user's training "
    "pairs. Means are over seeds of means over users. Intervals: percentiles of {replicates:,} bootstrap "
    "replicates, in which users are drawn with replacement, the same draws for all models. A difference is that of the "
    "same users under the same seeds. Each is a statement about one pair of models: with many of them, some exclude "
    "zero by chance."
)


def page(summary: Summary) -> str:
    """Build the page of the numbers of :func:`summarise`."""
    problems: list[str] = []
    settings = {name: one["settings"] for name, one in summary["models"].items()}
    machines = {f"machine {place}": one for place, one in enumerate(summary["environments"], start=1)}
    body = [
        f"<p>{escape(about(summary))}</p>",
        f"<p><strong>{escape(summary['verdict'])}</strong></p>",
        *_troubles(summary),
        *(part for metric in summary["metrics"] for part in _metric(summary, metric, problems)),
        *_costs(summary),
        *_seeds(summary),
        *circumstances(summary["commands"], settings | {"data": summary["data"]}, machines),
    ]
    return document(f"Benchmark of models: {summary['title']}", body)


def about(summary: Summary) -> str:
    """Return a sentence about the data."""
    data, users = summary["data"], summary["users"]
    counts = {seed: users[str(seed)] for seed in summary["seeds"] if str(seed) in users}
    if len(set(counts.values())) == 1:
        tested = f"{next(iter(counts.values())):,} users have test pairs"
    else:
        each = ", ".join(f"{count:,} with seed {seed}" for seed, count in counts.items())
        tested = f"users with test pairs: {each}" if each else "no run has ended yet"
    return (
        f"{data['left']:,} left × {data['right']:,} right entities, {data['pairs']:,} pairs; {data['test']}; {tested}."
    )


def _troubles(summary: Summary) -> list[str]:
    found = [(name, one) for name, one in summary["models"].items() if one["status"] != "finished"]
    if not found:
        return []
    lines = [f"<li>{escape(name)} {one['status']}: {escape(one['message'])}</li>" for name, one in found]
    return [f'<div class="warn"><p>Not all models are compared:</p><ul>{"".join(lines)}</ul></div>']


def _metric(summary: Summary, metric: str, problems: list[str]) -> list[str]:
    """Return means, intervals and differences of a metric, as a figure and as a table."""
    found = {name: one["metrics"][metric] for name, one in ordered(summary) if one["runs"]}
    if not found:
        return []
    reference = summary["reference"]
    rows = [[name, f"{one['mean']:.{_DIGITS}f}", span(one["interval"]), difference(one["difference"]),
             "" if one["difference"] is None else "yes" if one["difference"]["excludes_zero"] else "no"]
            for name, one in found.items()]  # fmt: skip
    heads = ["model", metric, "95% interval", f"difference from {reference}", "interval excludes zero"]
    shown = [(name, one["mean"], one["interval"]) for name, one in found.items()]
    caption = f"{metric} of each model with its 95% interval"
    chart = drawn(lambda: interval_figure(metric, shown), caption, problems)
    return [f"<h2>{escape(metric)}</h2>", chart, table(heads, rows)]


def _costs(summary: Summary) -> list[str]:
    rows = [
        [name, f"{one['fit_seconds']:.2f}", f"{one['list_seconds']:.2f}", megabytes(one["peak_bytes"]),
         megabytes(one["added_bytes"])]
        for name, one in ordered(summary) if one["runs"]
    ]  # fmt: skip
    heads = ["model", "fit, seconds", "lists, seconds", "peak, MB", "added, MB"]
    note = (
        "Seconds are medians over seeds, of the fit and of the lists of all users. Memory is the resident set of "
        "the process: its largest size during fit and lists, and by how much that is above the size before, the "
        "largest over seeds. Memory of a GPU is not in it. Models run one after the other; nothing else should."
    )
    busy = max((one["others_busy"] or 0.0 for one in summary["models"].values()), default=0.0)
    warned = (
        [f'<p class="warn">Other processes kept up to {busy:.2f} cores busy meanwhile; times are no measurement.</p>']
        if busy > BUSY
        else []
    )
    return ["<h2>Time and memory</h2>", table(heads, rows), f'<p class="soft">{note}</p>', *warned] if rows else []


def _seeds(summary: Summary) -> list[str]:
    metric = summary["metrics"][0]
    rows = []
    for name, one in ordered(summary):
        if one["runs"]:
            values = one["metrics"][metric]["by_seed"]
            cells = (values.get(str(seed)) for seed in summary["seeds"])
            rows.append([name, *("–" if value is None else f"{value:.{_DIGITS}f}" for value in cells)])
    heads = ["model", *(f"seed {seed}" for seed in summary["seeds"])]
    explained = _EXPLAINED.format(replicates=summary["intervals"]["replicates"])
    tables = [f"<h2>{escape(metric)} of each seed</h2>", table(heads, rows)] if rows else []
    return [*tables, "<h2>How it was measured</h2>", f"<p>{escape(explained)}</p>"]


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
        return self.summary["best"]

    @property
    def verdict(self) -> str:
        """Sentences: which model is best, by how much, and whether the interval excludes zero."""
        return self.summary["verdict"]

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
    store = store_of(folder)
    manifest = store.read_manifest(Manifest)
    if manifest is None:
        check.fail("folder", folder, f"a folder with {store.manifest.name}, which gramtower benchmark writes")
    asked = [(name, seed) for name in manifest.models for seed in manifest.seeds_of(name)]
    runs = [run for name, seed in asked if (run := read_run(store, name, seed)) is not None]
    found = Benchmark(summarise(manifest, runs), runs)
    write_json(folder / SUMMARY, found.to_dict())
    write_text(folder / PAGE, found.to_html())
    return found

"""From finished runs to numbers: means over seeds, bootstrap intervals over users, paired differences, who won.

A mean is that over seeds of the means over users. Intervals: users are drawn with replacement, each with all its values
under every seed, the same draws for all models (intervals.py). A difference is that of a user's values under
the same seed, model − reference, so that what makes a user hard for both cancels. Metrics that are of all users
together (coverage, Gini) have means alone. Cost: O(replicates · users · seeds · models) for each metric. Checked by
tests/test_benchmark.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower.experiments.benchmark_store import Manifest, Run
from gramtower.experiments.intervals import Interval, bootstrap_intervals
from gramtower.metrics.definitions import LOWER_IS_BETTER, parse

REPLICATES = 1000
#: What can become of a model, and what that means.
STATUSES = {
    "finished": "all its runs ended",
    "failed": "a run raised an error",
    "unfinished": "not all its runs have ended; the same benchmark goes on",
    "left out": "it was not run",
}


def summarise(manifest: Manifest, runs: list[Run], replicates: int = REPLICATES, seed: int = 0) -> dict[str, Any]:
    """The numbers of a benchmark, for JSON.

    Args:
        manifest: what was asked for.
        runs: those that ended.
        replicates: of the bootstrap.
        seed: of the bootstrap.
    """
    found = {(run.name, run.seed): run for run in runs}
    models = {name: _facts(manifest, name, found) for name in manifest.models}
    complete = [name for name, facts in models.items() if facts["status"] == "finished"]
    first = manifest.metrics[0]
    ranked = sorted(complete, key=lambda name: _key(first, models[name]["means"][first]))
    best = ranked[0] if ranked else None
    reference = manifest.reference if manifest.reference in complete else best
    shown = [name for name in manifest.models if models[name]["runs"]]
    for metric in manifest.metrics:
        spans, differences = _intervals(manifest, found, shown, reference, metric, replicates, seed)
        for name in shown:
            models[name]["metrics"][metric] = {
                "mean": models[name]["means"][metric],
                "interval": spans.get(name),
                "by_seed": {str(s): run.metrics[metric] for s, run in _runs(manifest, name, found).items()},
                "difference": differences.get(name),
            }
    for facts in models.values():
        del facts["means"]
    summary: dict[str, Any] = {
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
    }
    return summary | {"verdict": verdict(summary, found, manifest, replicates, seed)}


def verdict(
    summary: dict[str, Any], found: dict[tuple[str, int], Run], manifest: Manifest, replicates: int, seed: int
) -> str:
    """Who won, by how much, and whether chance could say the same."""
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
    """For sorting, the best first; a value that is none comes last."""
    if not math.isfinite(value):
        return math.inf
    return value if parse(metric)[0].kind in LOWER_IS_BETTER else -value


def _runs(manifest: Manifest, name: str, found: dict[tuple[str, int], Run]) -> dict[int, Run]:
    """The runs of a model by seed; one that depends on no seed stands for all."""
    own = manifest.seeds_of(name)
    return {seed: found[key] for seed in manifest.seeds if (key := (name, seed if seed in own else own[0])) in found}


def _facts(manifest: Manifest, name: str, found: dict[tuple[str, int], Run]) -> dict[str, Any]:
    """Status, times and memory of a model."""
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
    means = {
        metric: float(np.mean([run.metrics[metric] for run in _runs(manifest, name, found).values()]))
        for metric in (manifest.metrics if runs else [])
    }
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
        "means": means,
        "metrics": {},
    }


def _environments(runs: list[Run]) -> list[dict[str, Any]]:
    """The machines and versions that runs ran on, each once."""
    found: dict[str, dict[str, Any]] = {}
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
) -> tuple[dict[str, Interval], dict[str, dict[str, Any]]]:
    """Intervals of the means of models, and means and intervals of their differences from one of them."""
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
    differences = {}
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
    """One column of users' values for each model, and one for each difference; NaN where a run is missing."""
    nothing = np.full(users, np.nan)
    values = {name: there[name].per_user[metric] if name in there else nothing for name in measured}
    apart = [values[name] - values[reference] for name in others if reference is not None]
    return np.stack([*(values[name] for name in measured), *apart], axis=1)


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else f" (95% {interval[0]:.4f} to {interval[1]:.4f})"

"""Compare optimizers on one problem: the run of one optimizer, the saved comparison, and its numbers.

    comparison.json   data, settings, commands and the outcome of each optimizer
    NAME.jsonl        the history of one optimizer
    NAME.safetensors  its checkpoint while it runs

An interrupted optimizer continues from its checkpoint. However an optimizer ends (a limit, divergence, an error, an
iteration longer than the time limit), the end is an outcome with a status; none of them ends the comparison.

relative difference   (L − L*) / L*, where L* is the lowest value that any optimizer reached (Section "A Comparison on
                      the Convergence Speed")
reached               the first record at or below a level; times are not interpolated between records
speed-up of A over B  B's seconds to a level over A's. If B never reached the level, it is at least B's whole time over
                      A's; if A never did, it is at most B's time over A's whole time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.files import write_json
from gramtower._util.schema import fits
from gramtower.engine.objective.point import Point
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.experiments.machine import OthersBusy, environment
from gramtower.training.checkpoint import remove_checkpoint
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record, Result, read_history

MANIFEST = "comparison.json"
_TYPES = {  # of what is read from it
    "methods": dict[str, dict[str, Any]], "data": dict[str, Any], "settings": dict[str, dict[str, Any]],
    "commands": list[str], "environment": dict[str, Any],
}  # fmt: skip
_COUNTS = {"left": int, "right": int, "pairs": int, "validation_pairs": int | None}
_OUTCOME = {
    "status": str, "message": str, "options": dict[str, Any], "environment": dict[str, Any],
    "others_busy": float | None,
}  # fmt: skip


@dataclass(frozen=True)
class MethodRun:
    """The run of one method of a comparison.

    Attributes:
        name: of the method.
        history: its records; empty if it never started.
        outcome: ``status`` (one of STATUSES), ``message`` and what else is known of its run.
    """

    name: str
    history: list[Record]
    outcome: dict[str, Any] = field(default_factory=dict)


#: What can become of a method, and what that means.
STATUSES = {
    "finished": "stopped by a limit or at a minimum",
    "diverged": "its objective became NaN or infinite, or ended above its start",
    "too slow": "its first iteration took longer than the time limit",
    "failed": "it raised an error",
    "unknown": "there is no method of this name",
    "unfinished": "it was interrupted; the same command goes on",
}


#: Those of methods that ran; what they were worth is in the report.
RAN = ("finished", "diverged", "too slow")


@dataclass(frozen=True)
class Comparison:
    """A folder's content: its methods in the order they were asked for, and what comparison.json says of the rest."""

    folder: Path
    methods: list[MethodRun]
    about: dict[str, Any]

    @property
    def title(self) -> str:
        """What was compared on."""
        return str(self.about.get("title") or self.folder.resolve().name)

    @property
    def metric(self) -> str | None:
        """The validation metric that was recorded, if any was."""
        measured = any(r.metric is not None for method in self.methods for r in method.history)
        return str(self.about.get("metric") or "metric") if measured else None


def history_path(folder: Path, name: str) -> Path:
    """Where the history of a method is."""
    return folder / f"{name}.jsonl"


def checkpoint_path(folder: Path, name: str) -> Path:
    """Where the checkpoint of a method is."""
    return folder / f"{name}.safetensors"


def read_comparison(folder: Path) -> Comparison:
    """The comparison in a folder.

    Raises:
        ValueError: if there is none, or a file of it is damaged.
    """
    about = read_manifest(folder) or {}
    outcomes: dict[str, dict[str, Any]] = about.pop("methods", {})
    found = {path.stem for path in folder.glob("*.jsonl")}
    names = [*outcomes, *sorted(found - set(outcomes))]
    if not names:
        check.fail("folder", folder, f"a folder with {MANIFEST} or histories NAME.jsonl, as gramtower compare writes")
    histories = {name: _history(folder, name) if name in found else [] for name in names}
    return Comparison(folder, [MethodRun(n, h, _outcome(outcomes.get(n, {}), h)) for n, h in histories.items()], about)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """comparison.json, or None if there is none.

    Raises:
        ValueError: if it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or "methods" not in about:
            raise ValueError("no methods")
        _check_types("", about, _TYPES)
        _check_types("data.", about.get("data", {}), _COUNTS)
        _check_types("settings.", about.get("settings", {}), {"limits": dict[str, float | int | None]})
        for name, outcome in about["methods"].items():
            _check_types(f"methods.{name}.", outcome, _OUTCOME)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"folder: {path} is damaged or of something else ({error})") from error
    return about


def _check_types(where: str, found: dict[str, Any], types: dict[str, Any]) -> None:
    for name, kind in types.items():
        if name in found and not fits(kind, found[name]):
            raise ValueError(f"got {where}{name} of type {type(found[name]).__name__}, expected {kind}")


def write_manifest(folder: Path, about: dict[str, Any]) -> None:
    """Save comparison.json in one step."""
    write_json(folder / MANIFEST, about)


def _history(folder: Path, name: str) -> list[Record]:
    path = history_path(folder, name)
    try:
        return read_history(path)
    except ValueError as error:
        raise ValueError(f"folder: {path} is not a history: {error}") from error


def _outcome(outcome: dict[str, Any], history: list[Record]) -> dict[str, Any]:
    if outcome.get("status") in STATUSES:
        return outcome
    return {**outcome, "status": "unfinished", "message": "no end was recorded" if history else "not started yet"}


_ALL, _GROWTH = 20, 1.05
_CHECKPOINT_SECONDS = 5.0
_ERRORS = (ValueError, RuntimeError, ArithmeticError, MemoryError)


@dataclass
class Runner:
    """What all methods have in common.

    Attributes:
        problem: what is minimised.
        start: makes the towers that every method starts from.
        validation: the metric of a point, or None.
        time_limit: seconds of training for each method.
        max_iterations: the same in iterations, or None.
        seed: for methods that draw.
        options: constants of methods, by name of the method.
        folder: where histories and checkpoints are.
        verbose: one line an iteration on standard error.
        note: called with the name of each method that starts.
    """

    problem: Problem
    start: Callable[[], Towers]
    validation: Callable[[Point], float] | None
    time_limit: float
    max_iterations: int | None
    seed: int
    folder: Path
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    verbose: bool = False
    note: Callable[[str], None] = print  # to standard output

    def prepare(self) -> None:
        """Compile and cache what all methods share, so that none is charged for it."""
        point = self.problem.at(self.start())
        point.gauss_newton() @ point.gradient()

    def run(self, name: str) -> dict[str, Any]:
        """Run a method, or go on with it; returns what became of it."""
        options = self.options.get(name, {})
        checkpoint, others = checkpoint_path(self.folder, name), OthersBusy()
        about = {"options": options, "resumed": checkpoint.exists(), "environment": environment()}
        if self.verbose:
            self.note(f"-- {name}" + (" goes on from its checkpoint" if about["resumed"] else ""))
        if not about["resumed"]:
            self.forget([name])  # what a run without a checkpoint has left
        try:
            result = minimize(
                self.problem, self.start(), name, self.max_iterations or 10**9, self.time_limit, self.seed,
                validation=self.validation, validate_at=measured_at, history=history_path(self.folder, name),
                checkpoint=checkpoint, checkpoint_every=1, checkpoint_seconds=_CHECKPOINT_SECONDS,
                verbose=self.verbose, **options,
            )  # fmt: skip
        except _ERRORS as error:
            return {"status": "failed", "message": f"{type(error).__name__}: {' '.join(str(error).split())}", **about}
        status, message = judge(result, self.time_limit)
        return {"status": status, "message": message, "others_busy": others.cores(), **about}

    def forget(self, names: Iterable[str]) -> None:
        """Remove what methods have left, so that they start anew."""
        for name in names:
            remove_checkpoint(checkpoint_path(self.folder, name))
            history_path(self.folder, name).unlink(missing_ok=True)


def measured_at(iteration: int) -> bool:
    """Whether the metric is computed after an iteration: the first 20, then at steps of a twentieth.

    A rule of the iteration alone, so that an interrupted run measures what an uninterrupted one does.
    """
    if iteration <= _ALL:
        return True
    place = math.log(iteration, _GROWTH)
    return math.floor(place) > math.floor(math.log(iteration - 1, _GROWTH))


def judge(result: Result, time_limit: float) -> tuple[str, str]:
    """Status and message of a run that ended without an error."""
    first, last = result.history[0], result.history[-1]
    if result.reason is Reason.INTERRUPTED:
        return "unfinished", result.message
    if result.reason is Reason.NON_FINITE:
        return "diverged", result.message
    longest = last.seconds if last.iteration == 0 else last.seconds - first.seconds
    if result.reason is Reason.TIME_LIMIT and last.iteration <= 1 and longest >= time_limit:
        what = "the first iteration" if last.iteration else "evaluating the start"
        return "too slow", f"{what} took {longest:.3g} s, longer than the time limit of {time_limit:g} s"
    if last.value > first.value:
        return "diverged", f"ended above its start, at {last.value:.6g} from {first.value:.6g}: {result.message}"
    return "finished", result.message


#: Relative differences that tables are made for.
LEVELS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_WON = 0.01  # who is first within this of L* has won

SpeedUp = dict[str, Any]  # {"times": float, "bound": "" or ">" or "<"}


def lowest_value(methods: list[MethodRun]) -> float | None:
    """L*: the lowest value that any method reached, None without records."""
    return min((record.value for method in methods for record in method.history), default=None)


def relative_difference(value: float, lowest: float) -> float:
    """(L − L*) / |L*|."""
    return (value - lowest) / abs(lowest) if lowest else value - lowest


def reached(history: list[Record], lowest: float, level: float) -> Record | None:
    """The first record whose relative difference is at most a level."""
    return next((record for record in history if relative_difference(record.value, lowest) <= level), None)


def speed_up(a: list[Record], b: list[Record], lowest: float, level: float) -> SpeedUp | None:
    """How many times sooner A reached a level than B; None if neither did, or one has no records."""
    if not a or not b:
        return None
    at_a, at_b = reached(a, lowest, level), reached(b, lowest, level)
    if at_a is None and at_b is None:
        return None
    bound = "" if at_a is not None and at_b is not None else ">" if at_b is None else "<"
    return {"times": (at_b or b[-1]).seconds / (at_a or a[-1]).seconds, "bound": bound}


def summarise(comparison: Comparison) -> dict[str, Any]:
    """All numbers of a comparison, as in summary.json."""
    methods = comparison.methods
    lowest = lowest_value(methods)
    found: dict[str, Any] = {
        "lowest": lowest,
        "metric": comparison.metric,
        "levels": list(LEVELS),
        "methods": {method.name: _method(method, lowest) for method in methods},
        "speed_up": {},
        "first": {},
    }
    if lowest is not None:
        ran = [method for method in methods if method.history]
        for level in LEVELS:
            table = {
                a.name: {b.name: speed_up(a.history, b.history, lowest, level) for b in ran if b is not a} for a in ran
            }
            found["speed_up"][f"{level:g}"] = table
            found["first"][f"{level:g}"] = _first(ran, lowest, level, _time_limit(comparison))
    return found | {"verdict": verdict(found)}


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: who won for this data, which is to be within 1% of L* first, and by how much."""
    first = summary["first"].get(f"{_WON:g}")
    ran = [name for name, found in summary["methods"].items() if "lowest" in found]
    if first is None:
        return "For this data nobody won: no method ran."
    name, seconds = first["method"], f"{first['seconds']:.3g} s"
    if len(ran) == 1:
        return f"For this data {name} ran alone, and was within {_WON:.0%} of its lowest objective after {seconds}."
    if first["next"] is not None:
        lead = f"{first['times']:.3g} times sooner than the next, {first['next']}"
    elif first["times"] is not None and first["times"] > 1:
        lead = f"at least {first['times']:.3g} times sooner than any other, as no other came so near in its time"
    else:
        lead = "and no other came so near in its time"
    return f"For this data {name} won: within {_WON:.0%} of the lowest objective of all after {seconds}, {lead}."


def _method(method: MethodRun, lowest: float | None) -> dict[str, Any]:
    history = method.history
    found: dict[str, Any] = {"status": method.outcome["status"], "message": method.outcome.get("message", "")}
    if not history or lowest is None:
        return found
    best, last = min(history, key=lambda record: record.value), history[-1]
    metrics = [record.metric for record in history if record.metric is not None]
    return found | {
        "iterations": last.iteration,
        "seconds": last.seconds,
        "data_passes": last.data_passes,
        "lowest": best.value,
        "relative_difference": relative_difference(best.value, lowest),
        "best_metric": max(metrics, default=None),
        "last_metric": metrics[-1] if metrics else None,
        "seconds_to": _to(history, lowest, lambda record: record.seconds),
        "passes_to": _to(history, lowest, lambda record: record.data_passes),
    }


def _to(history: list[Record], lowest: float, what: Callable[[Record], float]) -> dict[str, float | None]:
    records = {f"{level:g}": reached(history, lowest, level) for level in LEVELS}
    return {level: None if record is None else what(record) for level, record in records.items()}


def _time_limit(comparison: Comparison) -> float:
    """The seconds that every method had, 0 if nothing is known of a limit in time alone."""
    limits = comparison.about.get("settings", {}).get("limits", {})
    return float(limits.get("time_limit") or 0.0) if limits.get("max_iterations") is None else 0.0


def _first(ran: list[MethodRun], lowest: float, level: float, limit: float) -> dict[str, Any] | None:
    """Who reached a level first, and how many times sooner than the next (at least so many if no other did).

    A method that stopped before the level gives no bound on how long it would take.
    """
    times = [(record.seconds, m) for m in ran if (record := reached(m.history, lowest, level)) is not None]
    if not times:
        return None
    seconds, winner = min(times, key=lambda pair: pair[0])
    others = [(time, m) for time, m in times if m is not winner]
    found: dict[str, Any] = {"method": winner.name, "seconds": seconds}
    if others:
        time, second = min(others, key=lambda pair: pair[0])
        return found | {"next": second.name, "times": time / seconds, "bound": ""}
    going = [m for m in ran if m is not winner and m.outcome["status"] not in ("diverged", "failed")]
    ends = [m.history[-1].seconds for m in going if m.history[-1].seconds >= limit]
    return found | {"next": None, "times": min(ends) / seconds if ends else None, "bound": ">"}

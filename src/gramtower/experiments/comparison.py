"""Compare optimizers on one problem: the run of one optimizer, the saved comparison, and its numbers.

    comparison.json   data, settings, commands and the names of the optimizers
    runs/NAME.json    the outcome of one optimizer
    NAME.jsonl        its history
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

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.files import build, fits
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.towers import Towers
from gramtower.experiments.run_store import OthersBusy, RunStore, environment
from gramtower.training.checkpoint import remove_checkpoint
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record, Result, read_history

#: What can become of an optimizer, and the meaning of each.
STATUSES = {
    "finished": "stopped by a limit or at a minimum",
    "diverged": "its objective became NaN or infinite, or ended above its start",
    "too slow": "its first iteration took longer than the time limit",
    "failed": "it raised an error",
    "unknown": "there is no method of this name",
    "unfinished": "it was interrupted; the same command continues it",
}
#: Statuses of optimizers that ran; the report says how well.
RAN = ("finished", "diverged", "too slow")
_COUNTS = {"left": int, "right": int, "pairs": int, "validation_pairs": int | None}


@dataclass(frozen=True)
class Outcome:
    """The end of an optimizer's run."""

    status: str = ""  # one of STATUSES
    message: str = ""  # why it stopped
    options: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    resumed: bool = False  # whether it continued from a checkpoint
    environment: dict[str, Any] = field(default_factory=dict)  # machine and versions
    others_busy: float | None = None  # cores that other processes kept busy during the run; None if unknown


@dataclass(frozen=True)
class Request:
    """comparison.json: which optimizers run on which problem."""

    methods: list[str] | dict[str, dict[str, Any]] = field(default_factory=list)  # names; earlier versions: outcomes
    title: str = ""  # title of the page; the folder's name if it is empty
    synthetic: str | None = None  # a notice for generated pairs, None for real ones
    metric: str | None = None  # name of the validation metric
    data: dict[str, Any] = field(default_factory=dict)  # path, counts and a digest of the pairs
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of problem, towers and limits
    commands: list[str] = field(default_factory=list)  # command lines
    environment: dict[str, Any] = field(default_factory=dict)  # machine and versions

    def __post_init__(self) -> None:
        limits = self.settings.get("limits", {})
        if not fits(dict[str, float | int | None], limits):
            raise ValueError("settings.limits are not numbers")
        for name, kind in _COUNTS.items():
            if name in self.data and not fits(kind, self.data[name]):
                raise ValueError(f"data.{name} is {self.data[name]!r}")


@dataclass(frozen=True)
class MethodRun:
    """The run of one optimizer: its name, its records (none if it never started) and its end."""

    name: str
    history: list[Record]
    outcome: Outcome = Outcome()


@dataclass(frozen=True)
class Comparison:
    """The content of a folder: optimizers in the order of the request, and the request, None if it is missing."""

    folder: Path
    methods: list[MethodRun]
    request: Request | None = None

    @property
    def about(self) -> Request:
        """The request, an empty one if it is missing."""
        return self.request or Request()

    @property
    def title(self) -> str:
        """The title, or the name of the folder."""
        return self.about.title or self.folder.resolve().name

    @property
    def metric(self) -> str | None:
        """The validation metric that was recorded, if any was."""
        measured = any(r.metric is not None for method in self.methods for r in method.history)
        return str(self.about.metric or "metric") if measured else None


def history_path(folder: Path, name: str) -> Path:
    """Return the file with the history of an optimizer."""
    return folder / f"{name}.jsonl"


def checkpoint_path(folder: Path, name: str) -> Path:
    """Return the file with the checkpoint of an optimizer."""
    return folder / f"{name}.safetensors"


def read_records(path: Path) -> list[Record]:
    """Return the records of a run, none if it has no file yet."""
    try:
        return read_history(path) if path.exists() else []
    except ValueError as error:
        raise ValueError(f"folder: {path} is not a history: {error}") from error


def read_outcomes(store: RunStore, request: Request | None) -> dict[str, Outcome]:
    """Return the recorded end of each optimizer of a request."""
    if request is None:
        return {}
    outcomes = {name: store.read_run(name, Outcome) or Outcome() for name in request.methods}
    if isinstance(request.methods, dict):  # earlier versions kept them in comparison.json
        try:
            before = {name: build(f"methods.{name}", Outcome, end) for name, end in request.methods.items()}
        except ValueError as error:
            raise ValueError(f"{store.argument}: {store.manifest} is damaged ({error})") from error
        outcomes = {name: end if end.status else before[name] for name, end in outcomes.items()}
    return outcomes


def read_comparison(folder: Path) -> Comparison:
    """Return the comparison in a folder. Histories are enough: without comparison.json only the request is missing."""
    store = RunStore(folder, "comparison")
    request = store.read_manifest(Request)
    outcomes = read_outcomes(store, request)
    found = {path.stem for path in folder.glob("*.jsonl")}
    names = [*outcomes, *sorted(found - set(outcomes))]
    if not names:
        expected = f"a folder with {store.manifest.name} or histories NAME.jsonl, which gramtower compare writes"
        check.fail("folder", folder, expected)
    methods = []
    for name in names:
        history, outcome = read_records(history_path(folder, name)), outcomes.get(name, Outcome())
        if outcome.status not in STATUSES:
            why = "no end was recorded" if history else "not started yet"
            outcome = replace(outcome, status="unfinished", message=why)
        methods.append(MethodRun(name, history, outcome))
    return Comparison(folder, methods, request)


_ALL, _GROWTH = 20, 1.05
_CHECKPOINT_SECONDS = 5.0
_ERRORS = (ValueError, RuntimeError, ArithmeticError, MemoryError)


@dataclass
class Runner:
    """Runs optimizers on one problem from one start."""

    problem: Problem
    start: Callable[[], Towers]  # returns the towers that every optimizer starts from
    validation: Callable[[Point], float] | None  # the metric of a point, or None
    time_limit: float  # seconds of training for each optimizer
    max_iterations: int | None  # iterations of each optimizer, or None
    seed: int  # seed of optimizers that draw
    folder: Path  # folder of histories and checkpoints
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # options of optimizers, by name
    verbose: bool = False  # whether to print one line for each iteration on standard error
    note: Callable[[str], None] = print  # called with the name of each optimizer that starts
    checkpoints: bool = True  # whether to write them, so that an interrupted optimizer can continue

    def prepare(self) -> None:
        """Compile and cache everything that optimizers share, so that none is charged for it."""
        point = self.problem.at(self.start())
        point.gauss_newton() @ point.gradient()

    def run(self, name: str) -> Outcome:
        """Run an optimizer, or continue it; return its outcome."""
        checkpoint, others = checkpoint_path(self.folder, name), OthersBusy()
        options = self.options.get(name, {})
        about = Outcome(options=options, resumed=checkpoint.exists(), environment=environment())
        if self.verbose:
            self.note(f"-- {name}" + (" continues from its checkpoint" if about.resumed else ""))
        if not about.resumed:
            self.forget([name])  # files of a run without a checkpoint
        try:
            result = minimize(
                self.problem, self.start(), name, self.max_iterations or 10**9, self.time_limit, self.seed,
                validation=self.validation, validate_at=measured_at, history=history_path(self.folder, name),
                checkpoint=checkpoint if self.checkpoints else None, checkpoint_every=1,
                checkpoint_seconds=_CHECKPOINT_SECONDS, verbose=self.verbose, **options,
            )  # fmt: skip
        except _ERRORS as error:
            return replace(about, status="failed", message=f"{type(error).__name__}: {' '.join(str(error).split())}")
        status, message = judge(result, self.time_limit)
        return replace(about, status=status, message=message, others_busy=others.cores())

    def forget(self, names: Iterable[str]) -> None:
        """Remove the files of optimizers, so that they start again."""
        for name in names:
            remove_checkpoint(checkpoint_path(self.folder, name))
            history_path(self.folder, name).unlink(missing_ok=True)


def measured_at(iteration: int) -> bool:
    """Return whether the metric is computed after an iteration: in the first 20, then at steps of a twentieth.

    The rule depends only on the iteration, so that a resumed run measures at the same iterations.
    """
    if iteration <= _ALL:
        return True
    place = math.log(iteration, _GROWTH)
    return math.floor(place) > math.floor(math.log(iteration - 1, _GROWTH))


def judge(result: Result, time_limit: float) -> tuple[str, str]:
    """Return status and message of a run that ended without an error."""
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


def lowest_value(methods: list[MethodRun]) -> float | None:
    """Return L*, the lowest value that any optimizer reached, None without records."""
    return min((record.value for method in methods for record in method.history), default=None)


def relative_difference(value: float, lowest: float) -> float:
    """Return (L − L*) / |L*|."""
    return (value - lowest) / abs(lowest) if lowest else value - lowest


def reached(history: list[Record], lowest: float, level: float) -> Record | None:
    """Return the first record whose relative difference is at most a level."""
    return next((record for record in history if relative_difference(record.value, lowest) <= level), None)


def speed_up(a: list[Record], b: list[Record], lowest: float, level: float) -> dict[str, float | str] | None:
    """Return how many times sooner A reached a level than B, with its bound; None if neither did or one is empty."""
    if not a or not b:
        return None
    at_a, at_b = reached(a, lowest, level), reached(b, lowest, level)
    if at_a is None and at_b is None:
        return None
    bound = "" if at_a is not None and at_b is not None else ">" if at_b is None else "<"
    return {"times": (at_b or b[-1]).seconds / (at_a or a[-1]).seconds, "bound": bound}


def summarise(comparison: Comparison) -> dict[str, Any]:
    """Return all numbers of a comparison, as in summary.json."""
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
        limits = comparison.about.settings.get("limits", {})
        only_time = limits.get("max_iterations") is None  # every optimizer had the time limit, and no other
        time_limit = float(limits.get("time_limit") or 0.0) if only_time else 0.0
        for level in LEVELS:
            table = {
                a.name: {b.name: speed_up(a.history, b.history, lowest, level) for b in ran if b is not a} for a in ran
            }
            found["speed_up"][f"{level:g}"] = table
            found["first"][f"{level:g}"] = _first(ran, lowest, level, time_limit)
    return found | {"verdict": verdict(found)}


def verdict(summary: dict[str, Any]) -> str:
    """Return a sentence: which optimizer was within 1% of L* first, and how much sooner than the next."""
    first = summary["first"].get(f"{_WON:g}")
    ran = [name for name, found in summary["methods"].items() if "lowest" in found]
    if first is None:
        return "For this data no method ran."
    name, seconds = first["method"], f"{first['seconds']:.3g} s"
    if len(ran) == 1:
        return f"For this data only {name} ran; it was within {_WON:.0%} of its lowest objective after {seconds}."
    if first["next"] is not None:
        lead = f"{first['times']:.3g} times sooner than the next, {first['next']}"
    elif first["times"] is not None and first["times"] > 1:
        lead = f"at least {first['times']:.3g} times sooner than any other, as no other came so near in its time"
    else:
        lead = "and no other came so near in its time"
    return f"For this data {name} won: within {_WON:.0%} of the lowest objective of all after {seconds}, {lead}."


def _method(method: MethodRun, lowest: float | None) -> dict[str, Any]:
    history = method.history
    found: dict[str, Any] = {"status": method.outcome.status, "message": method.outcome.message}
    if not history or lowest is None:
        return found
    best, last = min(history, key=lambda record: record.value), history[-1]
    metrics = [record.metric for record in history if record.metric is not None]
    at = {f"{level:g}": reached(history, lowest, level) for level in LEVELS}
    return found | {
        "iterations": last.iteration,
        "seconds": last.seconds,
        "data_passes": last.data_passes,
        "lowest": best.value,
        "relative_difference": relative_difference(best.value, lowest),
        "best_metric": max(metrics, default=None),
        "last_metric": metrics[-1] if metrics else None,
        "seconds_to": {level: None if record is None else record.seconds for level, record in at.items()},
        "passes_to": {level: None if record is None else record.data_passes for level, record in at.items()},
    }


def _first(ran: list[MethodRun], lowest: float, level: float, limit: float) -> dict[str, Any] | None:
    """Return the optimizer that reached a level first, and how many times sooner than the next.

    If no other reached it, the factor is a lower bound, taken from those that used all their time.
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
    going = [m for m in ran if m is not winner and m.outcome.status not in ("diverged", "failed")]
    ends = [m.history[-1].seconds for m in going if m.history[-1].seconds >= limit]
    return found | {"next": None, "times": min(ends) / seconds if ends else None, "bound": ">"}

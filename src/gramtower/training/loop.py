"""`gramtower.minimize`: the loop that runs every method.

Order of an iteration: method.iterate → finite? → validation → record → log, callbacks → checkpoint → limits. Time and
work are counted only during method.iterate. That includes values that a method computes to choose a step; a sampling
method with a given step size computes none, and the value for its record is not counted.

An iteration is complete once it has its record: a single assignment then makes the next `_Reached` the current one. An
iteration that is interrupted, or finds no point, has no effect; checkpoints and results contain only complete ones.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramtower._util import checks as check
from gramtower._util.files import is_remote
from gramtower._util.host import explained
from gramtower.distributed.group import Group, agree, versions
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import IterationResult, Method, State
from gramtower.optim.solvers import Solver, as_solver
from gramtower.training.callbacks import Callback, Log, Started
from gramtower.training.checkpoint import (
    Saved,
    StoredHistory,
    fingerprint,
    locked,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from gramtower.training.result import Reason, Record, Result, write_history

_Signal = Callable[[], bool]  # whether SIGTERM was received
_WRITE_EVERY = 5.0  # seconds between writes of the records to an object
_SAME = 1e-3  # a larger relative difference of the objective is not explained by another machine's rounding


def minimize(
    problem: Problem,
    towers: Towers,
    optimizer: str | Solver = "newton-kron",
    max_iterations: int = 30,
    time_limit: float | None = None,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    *,
    tolerance: float = 1e-6,
    validation: Callable[[Point], float] | None = None,
    validate_at: Callable[[int], bool] | None = None,
    patience: int | None = None,
    history: str | Path | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 5,
    checkpoint_seconds: float = 0.0,
    verbose: bool = False,
    **options: Any,
) -> Result:
    """Train two towers: minimise the problem over their parameters, which are updated.

    During the run the modules' tensors are those of the current point; callbacks may read but not change them.
    Afterwards they are new tensors.

    Args:
        problem: the objective.
        towers: the towers, whose parameters are the starting point and are updated.
        optimizer: a solver such as ``gt.optim.NewtonKron(damping=0.1)``, or one by name: newton-kron, gd, gd-diag,
            newton, sogram, sogram-diag, sampling, sampling-diag or lbfgs.
        max_iterations: stop after this many iterations.
        time_limit: stop after the iteration in which the training time exceeds this many seconds.
        seed: seed of methods that sample.
        callbacks: functions called with each record and point; if one returns True, the run stops. The module
            gramtower.training.callbacks has callbacks, and describes their optional methods.
        tolerance: stop when ``Record.gradient_norm`` is at most tolerance times that of the first iteration
            (methods with exact gradients).
        validation: a metric of a point, larger is better and NaN is never best. The towers end at the best point, the
            first one if several are equal. Every process calls it, and the result of the first process is used.
        validate_at: a function that returns whether to validate an iteration; None validates all.
        patience: stop when the metric has not improved for this many validations; None disables this.
        history: path of a JSONL file with one record per iteration.
        checkpoint: path of a checkpoint. If the file exists, its run continues; problem, towers, method, metric and
            seed must be the same, while limits may differ. Unless the problem has a memory budget, the run uses the
            same blocks of rows as before, and so has the same rounding.
        checkpoint_every: iterations between checkpoints.
        checkpoint_seconds: least seconds of training between checkpoints.
        verbose: whether to print one line per iteration to standard error.
        options: options of a solver given by name, which are the fields of its class in gramtower.optim.

    Returns:
        The reason for stopping, the history and the final parameters.

    Example:
        >>> problem = gt.Problem(sp.eye(4, 3, format="csr"), omega=0.1, l2=0.01)
        >>> result = gt.minimize(problem, gt.mlp_towers(problem, hidden=(8,), dim=2), max_iterations=3)
        >>> result.reason.name, len(result.history), result.value < result.history[0].value
        ('MAX_ITERATIONS', 4, True)
    """
    called = _Callbacks(callbacks)
    path = None if checkpoint is None else check.path("checkpoint", checkpoint)
    written = None if history is None else check.path("history", history)
    if patience is not None and validation is None:
        check.fail("patience", patience, "None, or a validation metric: patience requires `validation`")
    limits = _Limits(max_iterations, time_limit, tolerance, patience)
    seconds = check.number("checkpoint_seconds", checkpoint_seconds, minimum=0.0)
    spacing = check.count("checkpoint_every", checkpoint_every), seconds
    solver = as_solver(optimizer, options)
    run = _Run(problem, towers, solver, seed, limits, validation, validate_at, path, spacing, written)
    run.warn_of_tf32()
    group = run.group
    log = Log((max_iterations, time_limit)) if check.flag("verbose", verbose) and group.rank == 0 else None
    run.agree()
    with nullcontext() if path is None else locked(path, group):
        try:
            run.begin()
            if log is not None:
                for record in run.records:
                    log(record)
            called.begin(Started(run.records[-1], max_iterations, run.settings(), group.rank == 0))
            with _sigterm_deferred(group) as sigterm:
                stop = run.loop(called, log, sigterm)
            if log is not None:
                log.end(stop.message)
            result = run.finish(stop)
        except BaseException:
            called.end(None)
            raise
        else:
            called.end(result)
            return result
        finally:
            with suppress(torch.OutOfMemoryError):  # the towers may stay views of the last point
                towers.unbind()


class _Callbacks:
    """The callbacks of one run; every callback whose ``begin`` was called gets a call of ``end``."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.callbacks = check.functions("callbacks", callbacks)
        self._ends: list[Callable[[Result | None], object]] = []

    def begin(self, started: Started) -> None:
        for one in self.callbacks:
            if hasattr(one, "begin"):
                one.begin(started)
            if hasattr(one, "end"):
                self._ends.append(one.end)

    def __call__(self, record: Record, point: Point) -> int:
        """Call all callbacks after an iteration; return how many of them ask to stop."""
        answers = [one(record, point) for one in self.callbacks]
        return sum(isinstance(answer, (bool, np.bool_)) and bool(answer) for answer in answers)

    def end(self, result: Result | None) -> None:
        """Call ``end`` of all callbacks, even if one of them fails; None, after an error, raises no other one."""
        with nullcontext() if result is not None else suppress(Exception), ExitStack() as stack:
            while self._ends:
                stack.callback(self._ends.pop(0), result)


@contextmanager
def _sigterm_deferred(group: Group) -> Iterator[_Signal]:
    """Defer SIGTERM until the loop ends, because several processes must stop after the same iteration.

    The caller's handler runs after the loop. Nothing changes for a single process, or if the caller has no handler.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if group.size == 1 or not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[tuple[int, Any]] = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append((number, frame)))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, handler)
        if received:
            handler(*received[0])


@dataclass(frozen=True)
class _Stop:
    """The reason why a run stops, as in :class:`Result`."""

    reason: Reason
    message: str
    non_finite: tuple[str, ...] = ()


class _Limits:
    """The limits of a run, checked; the arguments are those of ``minimize``."""

    def __init__(self, max_iterations: int, time_limit: float | None, tolerance: float, patience: int | None) -> None:
        self.max_iterations = check.count("max_iterations", max_iterations, minimum=0)
        self.time_limit = None if time_limit is None else check.number("time_limit", time_limit, minimum=0.0)
        self.tolerance = check.number("tolerance", tolerance, minimum=0.0)
        self.patience = None if patience is None else check.count("patience", patience)

    def reached(self, now: _Reached) -> _Stop | None:
        """The reason to stop after this iteration, or None."""
        if self.patience is not None and now.waited >= self.patience:
            return _Stop(Reason.EARLY_STOP, Reason.EARLY_STOP.value.format(patience=self.patience))
        if now.iteration >= self.max_iterations:
            return _Stop(Reason.MAX_ITERATIONS, Reason.MAX_ITERATIONS.value.format(iterations=self.max_iterations))
        if self.time_limit is not None and now.seconds >= self.time_limit:
            return _Stop(Reason.TIME_LIMIT, Reason.TIME_LIMIT.value.format(seconds=self.time_limit))
        return None


@dataclass(frozen=True)
class _Reached:
    """The state of a run after a complete iteration; the next iteration does not change it."""

    point: Point
    method: State
    iteration: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)
    waited: int = 0
    first_norm: float | None = None
    best: Parameters | None = None
    best_metric: float | None = None


def products_used(problem: Problem, towers: Towers) -> str:
    """The precision of matrix products: "tf32" on a GPU that rounds their inputs, otherwise the towers' dtype."""
    dtype = str(towers.dtype).removeprefix("torch.")
    rounded = problem.precision == "tf32" and towers.device.type == "cuda" and dtype == "float32"
    return "tf32" if rounded else dtype


def _non_finite(what: str, names: list[str]) -> _Stop:
    return _Stop(Reason.NON_FINITE, Reason.NON_FINITE.value.format(what=what), tuple(names))


@dataclass
class _Run:
    """A run with its settings and the state that it has reached."""

    problem: Problem
    towers: Towers
    solver: Solver
    seed: int
    limits: _Limits
    validation: Callable[[Point], float] | None
    validate_at: Callable[[int], bool] | None
    path: Path | None  # of the checkpoint
    spacing: tuple[int, float]  # least iterations and seconds between checkpoints
    written: Path | None  # the file of the records; None in all processes but the first
    records: list[Record] = field(default_factory=list)
    written_at: float = -math.inf  # time of the last write of the records to an object
    saved_at: float = 0.0  # seconds at the last checkpoint
    reached: _Reached = field(init=False)
    fingerprint: dict[str, str] = field(default_factory=dict)
    stored: StoredHistory | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            check.fail("problem", type(self.problem).__name__, "a gramtower.Problem")
        if not isinstance(self.towers, Towers):
            check.fail("towers", type(self.towers).__name__, "a gramtower.Towers")
        for name in ("validation", "validate_at"):
            check.functions(name, [one for one in (getattr(self, name),) if one is not None])
        self.method: Method = self.solver.method(check.seed(self.seed))
        self.group = self.problem.shards.group
        self.written = self.written if self.group.rank == 0 else None

    def warn_of_tf32(self) -> None:
        """Warn if products are tf32 and the optimizer is not safe with it."""
        if not self.solver.tf32 and self.group.rank == 0 and products_used(self.problem, self.towers) == "tf32":
            warnings.warn(
                f'precision: "tf32" with the optimizer {self.solver.name!r}, which may stall far from a minimum with '
                'it; use precision="float32", or an optimizer that is safe with tf32, such as newton-kron',
                stacklevel=3,
            )

    def agree(self) -> None:
        """Refuse processes of one run whose settings differ, before anything is computed."""
        if self.group.size > 1:
            p, options = self.problem, vars(self.solver).items()
            more = {f"option {name}": json.dumps(value, default=str) for name, value in options}
            more |= {name: getattr(p, name) for name in ("frequency_power", "precision", "pair_precision")}
            more |= {"dtype": str(self.towers.dtype), "device": self.towers.device.type, "checkpoint": str(self.path)}
            agree(self.group, versions() | self._named() | more | vars(self.limits))

    def settings(self) -> dict[str, object]:
        """The settings of the run, for callbacks."""
        shards = self.problem.shards
        sizes = {"left": shards.left.total, "right": shards.right.total}
        metric = {} if self.validation is None else {"metric": getattr(self.validation, "metric", "validation")}
        return self._named() | vars(self.solver) | sizes | metric

    def _named(self) -> dict[str, object]:
        objective = {name: getattr(self.problem, name) for name in ("omega", "l2", "embedding_l2")}
        return {"optimizer": self.solver.name, "seed": self.seed, "loss": self.problem.loss.name} | objective

    def begin(self) -> None:
        """Evaluate the start, or resume from a checkpoint."""
        problem, towers, path = self.problem, self.towers, self.path
        towers.join(problem.shards, problem.left, problem.right)
        if path is not None:
            identity = self.solver.name, dict(vars(self.solver)), self.seed, self.validation, self.limits.patience
            self.fingerprint = fingerprint(problem, towers, *identity)
            self.stored = StoredHistory(path)
        if path is not None and self.group.from_first(path.exists()):
            self._resume(path)
            return
        earlier, start = problem.work.copy(), time.perf_counter()
        point = problem.at(towers)
        towers.bind(point.parameters)
        _ = point.terms
        seconds = self._first(time.perf_counter() - start)
        first = _Reached(point, self.method.state(), seconds=seconds, work=problem.work.since(earlier))
        first, metric = self._validate(first)
        self._keep([self._record(first, None, point.value, metric)])
        self.reached = first

    def _keep(self, records: list[Record]) -> None:
        """Make these the records of the run, also in the file."""
        self.records = list(records)
        if self.written is not None:
            write_history(self.written, records)

    def _append(self, record: Record, path: Path) -> None:
        """Add a record to the file; an object is written as a whole, every few seconds and at the end."""
        if not is_remote(path):
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(record.to_json() + "\n")
        elif time.monotonic() > self.written_at + _WRITE_EVERY:
            write_history(path, self.records)
            self.written_at = time.monotonic()

    def _resume(self, path: Path) -> None:
        problem, like = self.problem, self.towers.parameters()
        saved, self.stored = read_checkpoint(path, self.fingerprint, like, problem.shards, self.towers.device)
        if saved.memory_budget:  # the same blocks and rounding, unless the problem has a budget
            problem.planned_budgets[self.towers.device] = saved.memory_budget
        point = problem.at(self.towers, saved.parameters)
        self.towers.bind(point.parameters)
        last = saved.history[-1]
        if abs(point.value - last.value) > _SAME * abs(last.value) + 100 * point.value_noise:
            raise ValueError(
                f"checkpoint: {path} belongs to another run: at its parameters the objective is {point.value:.6g} "
                f"instead of {last.value:.6g}, so the towers or the loss differ; choose another path, or delete the "
                "file to start again"
            )
        restore(path, self.method, saved.method)
        self.saved_at = saved.seconds
        self.reached = _Reached(
            point, self.method.state(), last.iteration, saved.seconds, Work(**saved.work), saved.waited,
            saved.first_norm, saved.best, saved.best_metric,
        )  # fmt: skip
        self._keep(saved.history)

    def loop(self, callbacks: _Callbacks, log: Log | None, sigterm: _Signal) -> _Stop:
        """Iterate until there is a reason to stop."""
        if bad := self.reached.point.terms.non_finite():
            return _non_finite("at the start, the term " + ", ".join(bad), bad)
        try:
            while (stop := self.limits.reached(self.reached)) is None:
                result, seconds, work = self._iterate()
                if (stop := self._failed(result)) is not None:
                    break
                record = self._step_to(result, seconds, work)
                if log is not None:
                    log(record)
                asked = callbacks(record, self.reached.point)
                every, pause = self.spacing
                if record.iteration % every == 0 and record.seconds - self.saved_at >= pause:
                    self._save()
                stopping, terminated = self.group.totals(asked, sigterm())
                assert self.reached.first_norm is not None
                small = result.gradient_norm <= self.limits.tolerance * self.reached.first_norm and result.trials
                if terminated or stopping or small:
                    reason = Reason.INTERRUPTED if terminated else Reason.CALLBACK if stopping else Reason.TOLERANCE
                    stop = _Stop(reason, reason.value)
                    break
        except KeyboardInterrupt:
            if self.group.size > 1:  # processes may be in different iterations: only the last checkpoint is consistent
                raise
            stop = _Stop(Reason.INTERRUPTED, Reason.INTERRUPTED.value)
            self._keep(self.records[: self.reached.iteration + 1])
        self._save()
        assert stop is not None
        if stop.reason is Reason.INTERRUPTED and self.group.size > 1:
            raise KeyboardInterrupt
        return stop

    def _iterate(self) -> tuple[IterationResult, float, Work]:
        """Run one iteration of the method; return its result, and the seconds and the work of the run so far."""
        before, earlier, start = self.reached, self.problem.work.copy(), time.perf_counter()
        with explained(self.problem.memory_budget):
            result = self.method.iterate(self.problem, self.towers, before.point)
        seconds = self._first(before.seconds + time.perf_counter() - start)
        work = before.work.plus(self.problem.work.since(earlier))
        if result.parameters is not None:
            result.point = self.problem.at(self.towers, result.parameters)
        return result, seconds, work

    def _step_to(self, result: IterationResult, seconds: float, work: Work) -> Record:
        """Validate and record the new point, and make it the current point."""
        assert result.point is not None
        before = self.reached
        self.towers.bind(result.point.parameters)  # avoids a second copy of θ
        now = replace(
            before, point=result.point, method=self.method.state(), iteration=before.iteration + 1, seconds=seconds,
            work=work, first_norm=result.gradient_norm if before.first_norm is None else before.first_norm,
        )  # fmt: skip
        now, metric = self._validate(now)
        record = self._record(now, result, before.point.value, metric)
        self.records.append(record)
        if self.written is not None:
            self._append(record, self.written)
        self.reached = now
        return record

    def finish(self, stop: _Stop) -> Result:
        """Set the towers to the best point and return the result."""
        reached = self.reached
        parameters, value = reached.point.parameters, reached.point.value
        if reached.best is not None:
            parameters = reached.best
            value = next(r.value for r in self.records if r.metric == reached.best_metric)  # the first of equals
        self.towers.bind(parameters)
        if self.written is not None and is_remote(self.written):
            write_history(self.written, self.records)
        return Result(
            stop.reason, stop.message, self.records, parameters, value, reached.best_metric, list(stop.non_finite)
        )

    def _failed(self, result: IterationResult) -> _Stop | None:
        """The reason to stop if an iteration found no point, or one that is not finite."""
        if result.point is None:
            if result.gradient_norm < float("inf"):
                used = products_used(self.problem, self.towers)
                more = {"tf32": 'precision="float32"', "float32": "towers.to(torch.float64)"}.get(used)
                further = "" if more is None else f"; {more} can go further"
                return _Stop(Reason.NO_DECREASE, Reason.NO_DECREASE.value.format(precision=used, further=further))
            return _non_finite("the gradient", ["gradient"])
        if bad := result.point.terms.non_finite():
            return _non_finite("the term " + ", ".join(bad), bad)
        return None

    def _first(self, number: float) -> float:
        """The number of the first process, so that all processes decide the same."""
        return self.group.totals(number if self.group.rank == 0 else 0.0)[0]

    def _validate(self, now: _Reached) -> tuple[_Reached, float | None]:
        """Compute the metric if this iteration is validated; return the updated state and the metric."""
        if self.validation is None or (self.validate_at is not None and not self.validate_at(now.iteration)):
            return now, None
        metric = self._first(float(self.validation(now.point)))
        if not math.isnan(metric) and (now.best_metric is None or metric > now.best_metric):
            return replace(now, best_metric=metric, best=now.point.parameters, waited=0), metric
        return replace(now, waited=now.waited + 1), metric

    def _record(self, now: _Reached, result: IterationResult | None, before: float, metric: float | None) -> Record:
        value = now.point.value
        passes = {k: round(v, 6) for k, v in vars(now.work).items()}  # a resumed run adds them in another order
        made = IterationResult(None, 0.0) if result is None else result
        return Record(
            iteration=now.iteration, seconds=now.seconds, value=value,
            relative_decrease=(before - value) / abs(before) if before else 0.0,
            gradient_norm=None if result is None else result.gradient_norm, cg_steps=made.cg_steps, step=made.step,
            damping=made.damping, trials=made.trials, data_passes=passes.pop("data_passes"), work=passes,
            terms=dict(vars(now.point.terms)), metric=metric, processes=self.group.size,
            bytes=self.group.total_bytes, product_bytes=self.group.product_bytes,
        )  # fmt: skip

    def _save(self) -> None:
        """Write a checkpoint, if the run has a path for it."""
        if self.path is None or self.stored is None:
            return
        reached = self.reached
        budget = self.problem.planned_budgets.get(self.towers.device, 0)
        saved = Saved(
            reached.point.parameters, reached.method, reached.seconds, dict(vars(reached.work)), budget,
            self.records, reached.best, reached.best_metric, reached.waited, reached.first_norm,
        )  # fmt: skip
        write_checkpoint(self.path, self.fingerprint, saved, self.stored, self.problem.shards)
        self.saved_at = reached.seconds

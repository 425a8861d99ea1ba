"""`gramtower.minimize`: the one loop that runs every method.

Order of an iteration: method.iterate → finite? → validation → record → log, callbacks → checkpoint → limits. The clock
runs, and work is counted, during method.iterate only (for methods with a line search the values it looks at are part
of that; for the others the value is wanted by the record alone).
Checked by tests/test_training.py and tests/test_checkpoint.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gramtower import _checks as check
from gramtower.distributed.agreement import agree, versions
from gramtower.model.linearization import Work
from gramtower.model.memory import explained
from gramtower.model.parameters import Parameters
from gramtower.model.towers import Towers
from gramtower.objective.evaluation import Point
from gramtower.objective.problem import Problem
from gramtower.optim.methods import Method, Moved, make_method
from gramtower.training.checkpoint import (
    Saved,
    as_parameters_like,
    fingerprint,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from gramtower.training.lock import locked
from gramtower.training.log import Log
from gramtower.training.result import History, Reason, Record, Result

Callback = Callable[[Record, Point], Any]


def minimize(
    problem: Problem,
    towers: Towers,
    optimizer: str = "newton-kron",
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
    """Minimise the problem over the towers' parameters, which are updated.

    While it runs, the modules' tensors are those of the present point: to be looked at, not to be changed. Afterwards
    they are new ones.

    Args:
        problem: what is minimised.
        towers: where to start, and what is updated.
        optimizer: newton-kron, gd, gd-diag, newton, sogram, sogram-diag, sampling, sampling-diag or lbfgs.
        max_iterations: stops after this many iterations.
        time_limit: stops after the iteration in which training time passes this many seconds.
        seed: for methods that draw.
        callbacks: called with each record and point; one that returns True stops the run.
        tolerance: stops when ‖∇L‖ ≤ tolerance · ‖∇L‖ at the start (exact-gradient methods).
        validation: a metric of a point, larger is better; the best point is what the towers are left with. Over
            several processes every one calls it, and the first one's answer counts.
        validate_at: which iterations are validated; None is all of them.
        patience: stops when the metric has not improved for this many iterations; None never stops so.
        history: path of a JSONL file with one record an iteration.
        checkpoint: path of a checkpoint; if the file exists, the run it holds is continued.
        checkpoint_every: iterations between checkpoints.
        checkpoint_seconds: seconds of training that must lie between them too.
        verbose: one line an iteration on standard error.
        options: constants of the method; see gramtower/optim/methods.py for names and defaults.

    Returns:
        The reason for stopping, the history and the final parameters.
    """
    run = _Run(problem, towers, optimizer, seed, options, validation, validate_at)
    limits = _Limits(max_iterations, time_limit, tolerance, patience if validation is not None else None)
    if patience is not None and validation is None:
        check.fail("patience", patience, "a validation metric to be patient about: give validation as well")
    spacing = check.count("checkpoint_every", checkpoint_every), check.number("checkpoint_seconds", checkpoint_seconds)
    group = problem.shards.group
    log = Log((max_iterations, time_limit)) if verbose and group.rank == 0 else None
    records = History(None if history is None or group.rank > 0 else Path(history))
    path = None if checkpoint is None else Path(checkpoint)
    watchers = list(callbacks)
    run.agree(path, limits)
    with locked(path, group):
        try:
            run.begin(path, records)
            if log is not None:
                for record in records.records:
                    log(record)
            reason, message = run.loop(limits, records, watchers, log, path, spacing)
            if log is not None:
                log.end(message)
            return run.finish(reason, message, records)
        finally:
            with suppress(torch.OutOfMemoryError):  # views of the last point serve as well
                towers.keep()


class _Limits:
    """The stopping rules that the caller sets."""

    def __init__(self, max_iterations: int, time_limit: float | None, tolerance: float, patience: int | None) -> None:
        self.max_iterations = check.count("max_iterations", max_iterations, minimum=0)
        self.time_limit = None if time_limit is None else check.number("time_limit", time_limit, minimum=0.0)
        self.tolerance = check.number("tolerance", tolerance, minimum=0.0)
        self.patience = None if patience is None else check.count("patience", patience)

    def reached(self, iteration: int, seconds: float, waited: int) -> tuple[Reason, str] | None:
        if self.patience is not None and waited >= self.patience:
            return Reason.EARLY_STOP, Reason.EARLY_STOP.value.format(patience=self.patience)
        if iteration >= self.max_iterations:
            return Reason.MAX_ITERATIONS, Reason.MAX_ITERATIONS.value
        if self.time_limit is not None and seconds >= self.time_limit:
            return Reason.TIME_LIMIT, Reason.TIME_LIMIT.value
        return None


class _Run:
    """The state of a run: where it is, what its method remembers, the best point so far."""

    def __init__(
        self,
        problem: Problem,
        towers: Towers,
        optimizer: str,
        seed: int,
        options: dict[str, Any],
        validation: Callable[[Point], float] | None,
        validate_at: Callable[[int], bool] | None,
    ) -> None:
        if not isinstance(problem, Problem):
            check.fail("problem", type(problem).__name__, "a gramtower.Problem")
        self.problem, self.towers, self.group = problem, towers, problem.shards.group
        self.method: Method = make_method(optimizer, check.count("seed", seed, minimum=0), options)
        self._identity = (optimizer, options, seed)
        self.validation, self.validate_at = validation, validate_at
        self.seconds, self.iteration, self.waited = 0.0, 0, 0
        self.saved_at = 0.0  # seconds at the last checkpoint
        self.first_norm: float | None = None
        self.best: Parameters | None = None
        self.best_metric: float | None = None
        self.point: Point
        self.marks: dict[str, str] = {}

    def agree(self, path: Path | None, limits: _Limits) -> None:
        """Refuse processes of one run that were given different things, before anything is computed."""
        if self.group.size == 1:
            return
        p, (optimizer, options, seed) = self.problem, self._identity
        objective = {"loss": p.loss.name, "omega": p.omega, "l2": p.l2, "embedding_l2": p.embedding_l2}
        objective |= {"frequency_power": p.frequency_power, "dtype": str(self.towers.dtype)}
        objective |= {"precision": p.precision, "pair_precision": p.pair_precision}
        run = {"optimizer": optimizer, "options": json.dumps(options, sort_keys=True, default=str), "seed": seed}
        places = {"device": self.towers.device.type, "checkpoint": None if path is None else str(path)}
        agree(self.group, versions() | objective | run | places | vars(limits))

    def begin(self, path: Path | None, records: History) -> None:
        """Evaluate the start, or take up the run that a checkpoint holds."""
        problem, towers = self.problem, self.towers
        towers.join(problem.shards, problem.left, problem.right)
        if path is not None:
            self.marks = fingerprint(problem, towers, *self._identity)
        if path is not None and self.group.from_first(path.exists()):
            saved = read_checkpoint(path, self.marks, towers.parameters(), problem.shards, towers.device)
            problem.memory_budget = saved.memory_budget or problem.memory_budget  # the same blocks and rounding
            self.work = Work(**saved.work)
            self._go_on(problem.at(towers, as_parameters_like(saved.parameters, towers.parameters())))
            _ = self.point.terms
            restore(path, self.method, saved.method)
            self.seconds, self.waited, self.first_norm = saved.seconds, saved.waited, saved.first_norm
            self.saved_at = saved.seconds
            self.best_metric = saved.best_metric
            self.best = None if saved.best is None else as_parameters_like(saved.best, towers.parameters())
            self.iteration = saved.history[-1].iteration
            records.begin(saved.history)
            return
        earlier, start = problem.work.copy(), time.perf_counter()
        self._go_on(problem.at(towers))
        _ = self.point.terms
        self.seconds = self._first(time.perf_counter() - start)
        self.work = problem.work.since(earlier)
        metric = self._validate()
        records.begin([])
        records.add(self._record(None, self.point.value, metric))

    def loop(
        self,
        limits: _Limits,
        records: History,
        callbacks: list[Callback],
        log: Log | None,
        path: Path | None,
        spacing: tuple[int, float],
    ) -> tuple[Reason, str]:
        """Iterate until a rule says stop."""
        if bad := self.point.terms.non_finite():
            return Reason.NON_FINITE, Reason.NON_FINITE.value.format(what="at the start, the term " + ", ".join(bad))
        try:
            while (stop := limits.reached(self.iteration, self.seconds, self.waited)) is None:
                before, earlier = self.point, self.problem.work.copy()
                start = time.perf_counter()
                with explained(self.problem.memory_budget):
                    moved = self.method.iterate(self.problem, self.towers, before)
                self.seconds = self._first(self.seconds + time.perf_counter() - start)
                self.work = self.work.plus(self.problem.work.since(earlier))
                if moved.parameters is not None:
                    moved.point = self.problem.at(self.towers, moved.parameters)
                if (stop := self._failed(moved)) is not None:
                    break
                assert moved.point is not None
                self._go_on(moved.point)
                self.iteration += 1
                if self.first_norm is None:
                    self.first_norm = moved.gradient_norm
                record = self._record(moved, before.value, self._validate())
                records.add(record)
                if log is not None:
                    log(record)
                asked = [callback(record, self.point) for callback in callbacks]
                due = self.iteration % spacing[0] == 0 and self.seconds - self.saved_at >= spacing[1]
                if path is not None and due:
                    self._save(path, records)
                if self.group.totals(sum(answer is True for answer in asked))[0]:
                    stop = Reason.CALLBACK, Reason.CALLBACK.value
                    break
                if moved.gradient_norm <= limits.tolerance * self.first_norm and moved.trials:
                    stop = Reason.TOLERANCE, Reason.TOLERANCE.value
                    break
        except KeyboardInterrupt:
            if self.group.size > 1:  # processes stand at different places: only the last checkpoint is whole
                raise
            stop = Reason.INTERRUPTED, Reason.INTERRUPTED.value
        if path is not None:
            self._save(path, records)
        assert stop is not None
        return stop

    def _go_on(self, point: Point) -> None:
        """The point to go on from; the towers need no copy of its parameters."""
        self.point = point
        self.towers.lend(point.parameters)

    def finish(self, reason: Reason, message: str, records: History) -> Result:
        """Leave the towers at the best point."""
        parameters, value = self.point.parameters, self.point.value
        if self.best is not None:
            parameters = self.best
            value = next(r.value for r in reversed(records.records) if r.metric == self.best_metric)
        self.towers.lend(parameters)
        return Result(reason, message, records.records, parameters, value, self.best_metric)

    def _failed(self, moved: Moved) -> tuple[Reason, str] | None:
        """The reason to stop if an iteration led to no point, or to one that is not finite."""
        if moved.point is None:
            if moved.gradient_norm < float("inf"):
                dtype = str(self.towers.dtype).removeprefix("torch.")
                return Reason.NO_DECREASE, Reason.NO_DECREASE.value.format(dtype=dtype)
            return Reason.NON_FINITE, Reason.NON_FINITE.value.format(what="the gradient")
        if bad := moved.point.terms.non_finite():
            return Reason.NON_FINITE, Reason.NON_FINITE.value.format(what="the term " + ", ".join(bad))
        return None

    def _first(self, number: float) -> float:
        """The first process's number, so that all decide alike."""
        return self.group.totals(number if self.group.rank == 0 else 0.0)[0]

    def _validate(self) -> float | None:
        if self.validation is None or (self.validate_at is not None and not self.validate_at(self.iteration)):
            return None
        metric = self._first(float(self.validation(self.point)))
        if self.best_metric is None or metric > self.best_metric:
            self.best_metric, self.best, self.waited = metric, self.point.parameters, 0
        else:
            self.waited += 1
        return metric

    def _record(self, moved: Moved | None, before: float, metric: float | None) -> Record:
        value = self.point.value
        return Record(
            iteration=self.iteration,
            seconds=self.seconds,
            value=value,
            relative_decrease=(before - value) / abs(before) if before else 0.0,
            gradient_norm=None if moved is None else moved.gradient_norm,
            cg_steps=0 if moved is None else moved.cg_steps,
            step=0.0 if moved is None else moved.step,
            damping=None if moved is None else moved.damping,
            trials=0 if moved is None else moved.trials,
            data_passes=round(self.work.data_passes, 6),  # a resumed run adds fractions in another order
            work={k: v for k, v in asdict(self.work).items() if k != "data_passes"},
            terms=asdict(self.point.terms),
            metric=metric,
            processes=self.group.size,
            bytes=self.group.total_bytes,
            product_bytes=self.group.product_bytes,
        )

    def _save(self, path: Path, records: History) -> None:
        saved = Saved(
            self.point.parameters.vector,
            self.method.state(),
            self.seconds,
            asdict(self.work),
            self.problem.memory_budget or 0,
            records.records,
            None if self.best is None else self.best.vector,
            self.best_metric,
            self.waited,
            self.first_norm,
        )
        write_checkpoint(path, self.marks, saved, self.point.parameters, self.problem.shards)
        self.saved_at = self.seconds

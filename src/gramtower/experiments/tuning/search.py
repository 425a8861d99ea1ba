"""`TwoTower.tune`: optuna proposes settings, trials rank them on an inner validation part, and the best are confirmed.

The loop asks for settings (the first are the defaults), trains while watching the curve, and records the outcome.
Proposals depend only on the seed and on the finished trials, so that a search is the same each time, and a resumed one
goes the same way. The defaults are trained in full, and stay unless a trial is better beyond noise (study.py) on two
draws of the validation part: the best of many trials on one draw is partly the best by chance. Validation pairs that
the user gives cannot be drawn again.

A time limit covers everything from the first split to the last confirmation, whose time is reserved. Only the first
trial runs to its end whatever the limit. Larger towers are tried only while there is time for many trials.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from pathlib import Path

import numpy as np

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions, PairsLike
from gramtower.distributed.group import current_group
from gramtower.experiments.tuning.report import Search
from gramtower.experiments.tuning.space import NAMES, Space, Value, as_space, default_space, effective, linear
from gramtower.experiments.tuning.study import Gain, Log, Verdict, gain, judge, pick, request
from gramtower.experiments.tuning.trial import (
    Both,
    Parts,
    Tried,
    changed_arguments,
    make_parts,
    make_parts_of_entities,
    model_arguments,
    run_trial,
    start_values,
    validation_part,
)
from gramtower.metrics.definitions import to_maximise
from gramtower.model.feature_spec import JSON
from gramtower.model.fit_data import prepare_data
from gramtower.model.fitted import Selection
from gramtower.model.penalty_path import select
from gramtower.model.settings import ModelSettings
from gramtower.training.checkpoint import locked

#: Arguments of the model that a name of the space stands for, where they differ.
_ARGUMENT = {"penalty": "embedding_l2", "left_power": "left_weights", "right_power": "right_weights"}
_FAILURES = (ValueError, RuntimeError, MemoryError, ArithmeticError)  # of a trial, which the search outlives
_CONFIRM = 3  # trials that are confirmed on other held-out data, at most
_ROOM = 12  # times the first trial's seconds, which must be left for larger towers to be tried


def tune(
    model: ModelSettings,
    pairs: PairsLike,
    *,
    trials: int,
    time_limit: float | None,
    metric: str,
    validation: object,
    space: Mapping[str, object] | None,
    storage: str | Path | None,
    seed: int,
    features: Both,
    validation_side: str | None = None,
    progress: Callable[[Search], None] | None = None,
) -> Search:
    """Search for settings; see :meth:`gramtower.TwoTower.tune`. ``progress`` is called after each trial."""
    if (processes := current_group().size) > 1:
        check.fail("tune", f"{processes} processes", "one: trials do not run over several")
    count = check.count("trials", trials)
    limit = None if time_limit is None else check.number("time_limit", time_limit, above=0.0)
    to_maximise(metric)
    check.seed(seed)
    began = time.perf_counter()
    if model.towers is not None:
        check.fail("towers", "towers of your own", "a model with dim and hidden layers to choose")

    def draw(seed: int) -> Parts:
        if validation_side is None:
            return make_parts(pairs, validation, features, seed, model.device)
        return make_parts_of_entities(model, pairs, validation, validation_side, features, seed)

    parts = draw(seed)
    others = partial(draw, _other(seed)) if isinstance(validation, Real) else None
    path = None
    if model.select:
        path, _ = select(model, parts.train, parts.features, validation_part(parts))
        model = model.with_changes(**_lasting(path))
    data = prepare_data(model, parts.train, *parts.features)
    start = start_values(model, parts, data)
    chosen = make_space(model, start, space, parts)
    about = request(parts, data, chosen, metric, seed, model)
    del data
    with _folder(storage) as folder, locked(folder, name="storage"):
        # with held-out entities trials are few: each builds on the best so far
        log = Log(folder, about, chosen, start, from_best=parts.unseen is not None)
        run = _Run(model, parts, start, chosen, metric, seed, log, limit, began, others, path)
        run.search(count, progress)
        found = run.result() if others is None else run.confirm_on_others()
    if progress is not None:
        progress(found)
    return found


def _lasting(path: Selection) -> JSON:
    """Return the chosen settings that hold for trials: not the iterations, nor the sizes that they were found with."""
    if "max_iterations" not in path.chosen:
        return path.chosen
    sized = ("max_iterations", "dim", *(["hidden"] if any(path.chosen.get("hidden", ())) else []))
    return {name: value for name, value in path.chosen.items() if name not in sized}


@contextmanager
def _folder(storage: str | Path | None) -> Iterator[Path]:
    """Yield the folder of the log. A new one is removed at the end if no trial ended, a temporary one always."""
    if storage is None:
        with tempfile.TemporaryDirectory(prefix="gramtower-tune-") as scratch:
            yield Path(scratch)
        return
    folder = check.local_path("storage", storage)
    if folder.exists() and not folder.is_dir():
        given = f"{storage}, which is a file"
        check.fail("storage", given, "a folder; logs of earlier versions, which were files, cannot be continued")
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if not there and not list(folder.glob("*.json")):
            shutil.rmtree(folder, ignore_errors=True)


def _other(seed: int) -> int:
    """Return the seed of the second validation part and start."""
    return (seed + 1) % 2**63


def make_space(
    model: ModelSettings, start: Mapping[str, Value], given: Mapping[str, object] | None, parts: Parts
) -> Space:
    """Return the space to search: the given one, or everything that the model does not set explicitly."""
    labels = not np.isin(parts.matrix.data, (-1.0, 1.0)).all()
    with_features = any(features is not None for features in parts.features)
    whole = default_space(start, labels=labels, given_features=with_features, unseen=parts.unseen is not None)
    if given is not None:
        return as_space(given, whole)
    default = ModelSettings().get_params()

    def is_given(name: str) -> bool:
        argument = _ARGUMENT.get(name, name)
        value = getattr(model, argument, None)
        return value is not default.get(argument) and (isinstance(value, np.ndarray) or value != default.get(argument))

    left_out = [] if with_features else ["features"]  # history is slower and seldom better: only by name
    left_out += ["activation"] if is_given("hidden") and linear(start["hidden"]) else []
    return as_space({name: True for name in NAMES if name not in left_out and not is_given(name)}, whole)


@dataclass
class _Run:
    """The state of a search."""

    model: ModelSettings
    parts: Parts
    start: Mapping[str, Value]
    space: Space
    metric: str
    seed: int
    log: Log
    limit: float | None
    began: float
    others: Callable[[], Parts] | None  # draws a second validation part
    path: Selection | None
    interrupted: bool = False
    again: list[Tried] = field(default_factory=list)  # trials that were trained once more
    first_seconds: float = 0.0  # of the first trial, looks included

    @cached_property
    def second(self) -> Parts | None:
        """A second validation part, of other pairs or entities; None if there is none."""
        try:
            return None if self.others is None else self.others()
        except ValueError:  # of few entities another draw may leave nothing to find
            return None

    def search(self, trials: int, progress: Callable[[Search], None] | None) -> None:
        """Run trials until there are enough of them or time is up."""
        self.first_seconds = next((t.seconds for t in self.log.trials), 0.0)
        while self.log.ended < trials and not self._late(self._kept_back()) and not self.interrupted:
            self._trial()
            if progress is not None and not self.interrupted:
                progress(self.result())

    def _confirmed(self, tried: Tried) -> Tried | None:
        """Return the record of a trial on the second part, from the log or now; None without time or memory."""
        known = next((t for t in self.log.confirmations if t.number == tried.number), None)
        if known is None:
            if self._late():
                return None
            try:
                known = self._train(tried.number, tried.settings, self.second)
            except KeyboardInterrupt:
                self.interrupted = True
            except _FAILURES:
                pass
            if known is None:
                return None
            self.log.confirm(known)
        self.again.append(known)
        return known

    def confirm_on_others(self) -> Search:
        """Return the result; its winner was better on other held-out data too, from another start.

        Few entities say little, and so does one start: networks that begin elsewhere differ by as much as settings do.
        The defaults and the winner are trained once more, and the winner must gain more than one standard error.
        """
        tried, refused = [t for t in self.log.trials if t.same_as is None], list[int]()
        if not tried:
            raise KeyboardInterrupt
        first, verdict, text = tried[0], judge(tried), ""
        while verdict.winner is not first and first.without and not self.interrupted:
            winner, found = verdict.winner, None if len(refused) == _CONFIRM else self._gain_on_others(verdict.winner)
            if self.interrupted:
                break
            if found is not None and found.likely:
                verdict = Verdict(winner, f"{verdict.text}, and {found} on other held-out data")
                break
            but = "it could not be confirmed" if found is None else f"{found} on other held-out data"
            text = text or f"the defaults stay: trial {winner.number} gains {gain(winner, first)}, but {but}"
            refused.append(winner.number)
            verdict = Verdict(first, text) if found is None else judge(tried, refused)
        return self.result(verdict=Verdict(first, text) if verdict.winner is first and text else verdict)

    def _gain_on_others(self, winner: Tried) -> Gain | None:
        """Return the gain of a trial on the second part; None if there is no time."""
        if self.second is None:
            return None
        first = self.again[0] if self.again else self._confirmed(self.log.trials[0])
        other = None if first is None else self._confirmed(winner)
        return None if other is None or first is None else gain(other, first)

    def result(self, verdict: Verdict | None = None) -> Search:
        """Return the search so far."""
        if not self.log.trials:
            raise KeyboardInterrupt
        verdict = verdict or judge([t for t in self.log.trials if t.same_as is None])
        best, unseen = verdict.winner, self.parts.unseen
        train = self.parts.train
        chosen = {} if self.path is None else _lasting(self.path)
        arguments = {}
        if not chosen or best.number > 0:  # otherwise a fit by itself is best: it chooses on fewer held-out pairs
            arguments = chosen | changed_arguments(best.settings, self.model, self.parts.matrix, self.start)
            if unseen is None:  # otherwise a trial has the iterations that a fit has by itself
                arguments["max_iterations"] = max(1, best.iteration)
        return Search(
            metric=self.metric,
            trials=list(self.log.trials),
            winner=best.number,
            importance=self.log.importance(),
            arguments=arguments,
            features=str(best.settings.get("features", "given")),
            space={name: str(part) for name, part in self.space.items()},
            data={
                "names": train.entity_names if isinstance(train, Interactions) else ("left", "right"),
                "left": self.parts.matrix.shape[0],
                "right": self.parts.matrix.shape[1],
                "pairs": int(self.parts.matrix.nnz),
                "validation_users": self.parts.users,
                "ranked_users": self.parts.shown,
                **({} if unseen is None else {f"held_out_{unseen.side}": unseen.count}),
            },
            seconds=time.perf_counter() - self.began,
            base={k: v for k, v in self.model.by_name().get_params().items() if k not in ("towers", "verbose")},
            interrupted=self.interrupted,
            verdict=verdict.text,
            confirmations=list(self.again),
        )

    def _trial(self) -> None:
        number, settings = self.log.ended, self.log.ask(self._larger_affordable())
        finished, wanted = list(self.log.trials), effective(settings, self.start)
        same = next((t for t in finished if effective(t.settings, self.start) == wanted), None)
        if same is not None:
            first = same.number if same.same_as is None else same.same_as
            self.log.keep(replace(same, number=number, settings=settings, seconds=0.0, same_as=first))
            return
        asked = time.perf_counter()
        try:
            tried = self._train(number, settings)
        except KeyboardInterrupt:
            self.interrupted = True
            return
        except _FAILURES as error:
            if not finished:
                raise  # the defaults themselves cannot be trained: bad input, not bad luck
            self.log.fail(settings, f"{type(error).__name__}: {error}")
            return
        if tried is None:
            return  # a resumed search tries it again
        if not math.isfinite(tried.value):
            self.log.fail(settings, f"the metric became {tried.value}")
            return
        self.log.keep(tried)
        if not finished:
            self.first_seconds = time.perf_counter() - asked

    def _train(self, number: int, settings: dict[str, Value], second: Parts | None = None) -> Tried | None:
        """Train a trial, on the second part from another start; return None if time was up before its end."""
        before = self.log.trials if second is None else self.again
        first = before[0].value if before else None  # of the defaults
        best = pick(before).value if before and second is None else first
        arguments = model_arguments(settings, self.model, self.parts.matrix, self.start) | {"metric": self.metric}
        arguments |= {} if second is None else {"seed": _other(self.model.seed)}
        deadline = None if self.limit is None else self.began + self.limit
        if deadline is not None and second is None:
            deadline = deadline - self._kept_back() if before else None  # the defaults are trained in full
        return run_trial(
            self.model.with_changes(**arguments), settings, second or self.parts, number=number, first=first, best=best,
            deadline=deadline, seed=self.seed if second is None else _other(self.seed),
        )  # fmt: skip

    def _kept_back(self) -> float:
        """Return the seconds that a confirmation on other held-out data takes: two fits."""
        return 0.0 if self.others is None else 2 * self.first_seconds

    def _larger_affordable(self) -> bool:
        """Return whether towers larger than the first trial's may be tried: they take up to three times as long."""
        return self.limit is None or not self._late(_ROOM * self.first_seconds)

    def _late(self, kept_back: float = 0.0) -> bool:
        return self.limit is not None and time.perf_counter() - self.began >= self.limit - kept_back

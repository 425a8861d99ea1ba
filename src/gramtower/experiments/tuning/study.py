"""The log of a search: records of trials, which of them wins, and what is tried next.

A trial replaces the defaults only if it is better by more than the choice of validation entities explains: its gain,
the difference of both metrics, must exceed two standard errors of that difference (metrics/embedding_metrics.py),
paired over the entities that both were measured on. These are the held-out entities, or the users where pairs were held
out. The best of the trials that pass wins if it also gains on a second draw of the validation part. If none does, the
defaults stay.

optuna proposes settings. Its study is rebuilt from the records before each proposal, so that a proposal depends only on
the seed and on the trials that ended, and a resumed search goes the same way. The records are in a
:class:`~gramtower.experiments.run_store.RunStore`, which refuses a folder of other data, space, metric or seed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gramtower._util import checks as check
from gramtower._util.checks import need
from gramtower._util.tensors import digest_of
from gramtower.engine.kernels.elementwise import Loss
from gramtower.experiments.run_store import RunStore
from gramtower.experiments.tuning.space import (
    SIZES,
    Choices,
    Range,
    Space,
    Value,
    describe,
    first_settings,
    larger,
    searched,
)
from gramtower.experiments.tuning.trial import Parts, Tried
from gramtower.metrics.embedding_metrics import standard_error
from gramtower.model.fit_data import FitData
from gramtower.model.settings import ModelSettings

if TYPE_CHECKING:
    import optuna


def pick(trials: Sequence[Tried]) -> Tried:
    """Return the trial with the largest metric, the earliest of equals; one that was stopped early only if all were."""
    return max(trials, key=lambda trial: (not trial.pruned, trial.value, -trial.number))


class Verdict(NamedTuple):
    """The trial that wins, and a sentence that says what it was compared with."""

    winner: Tried
    text: str


@dataclass(frozen=True)
class Gain:
    """How much better a trial is than the defaults."""

    value: float  # the difference of their metrics
    error: float  # its standard error; infinite if it is unknown
    base: float  # the metric of the defaults

    @property
    def likely(self) -> bool:
        """Whether a single comparison is beyond noise."""
        return self.value > self.error

    @property
    def sure(self) -> bool:
        """Whether it is beyond noise although the trial is the best of many."""
        return self.value > 2 * self.error

    def __str__(self) -> str:
        scale, unit, digits = (100 / self.base, " %", 1) if self.base > 0 else (1.0, "", 4)
        known = f" ± {scale * self.error:.{digits}f}{unit}" if math.isfinite(self.error) else ""
        return f"{scale * self.value:.{digits}f}{unit}{known}"


def gain(trial: Tried, first: Tried) -> Gain:
    """Return the gain of a trial over the first one, paired over the entities of both."""
    error = standard_error(trial.without, first.without) if trial.without else math.inf
    return Gain(trial.value - first.value, error, first.value)


def judge(trials: Sequence[Tried], refused: Collection[int] = ()) -> Verdict:
    """Return the best trial that is better than the defaults, trial 0, beyond noise; the defaults if there is none."""
    first, best = trials[0], pick(trials)
    if first.number != 0:
        return Verdict(best, f"trial {best.number} is the best; the defaults failed, and are not compared with it")
    if best is first:
        return Verdict(first, "the defaults stay: no trial was better")
    if not first.without:
        text = f"trial {best.number} replaces the defaults: it gains {gain(best, first)} on the validation part"
        return Verdict(best, f"{text}, not compared by entities")
    better = [t for t in trials if gain(t, first).sure and not t.pruned and t.number not in refused]
    if not better:
        return Verdict(first, f"the defaults stay: the best trial, {best.number}, gains {gain(best, first)}")
    winner = pick(better)
    text = f"trial {winner.number} replaces the defaults: it gains {gain(winner, first)} on the validation part"
    if winner is not best:
        text += f" (the best, trial {best.number}, {gain(best, first)})"
    return Verdict(winner, text)


_STARTUP = 8  # trials drawn at random before proposals learn from them


@dataclass(frozen=True)
class Request:
    """search.json: what must be the same for a stored search to be continued, with digests of arrays."""

    pairs: str
    validation: str
    space: dict[str, Any]
    metric: str
    seed: int
    model: dict[str, str]
    labels: str
    weights: str
    left_features: str
    right_features: str


def request(parts: Parts, data: FitData, space: Space, metric: str, seed: int, model: ModelSettings) -> Request:
    """Describe a search: its data, space, metric, seed and model. Cost: one pass over the data."""
    entities = "" if parts.unseen is None else f"{parts.unseen.count} {parts.unseen.side} entities, "
    fixed = {k: v for k, v in model.get_params().items() if k not in ("device", "verbose", "memory_budget", "metric")}
    m, n = parts.matrix.shape
    pattern, held = (digest_of(matrix.indptr, matrix.indices) for matrix in (parts.matrix, parts.held_out))
    left, right = ("ids" if rows is None else f"{rows.shape}, {digest_of(rows)}" for rows in data.features)
    return Request(
        pairs=f"{m} × {n}, {parts.matrix.nnz} pairs, {pattern}",
        validation=f"{entities}{parts.held_out.nnz} pairs, {held}",
        space=describe(space),
        metric=metric,
        seed=seed,
        model={name: _text(name, value) for name, value in fixed.items()},
        labels=digest_of(data.matrix.data),
        weights="none" if data.weights is None else digest_of(data.weights),
        left_features=left,
        right_features=right,
    )


def _text(name: str, value: object) -> str:
    """Return a setting as text that is the same in every process: weights by a digest, a custom loss by its name."""
    if isinstance(value, Loss):
        return value.name
    if name in ("left_weights", "right_weights") and not isinstance(value, (str, type(None))):
        return digest_of(check.as_float_array(name, value).astype(np.float64))
    return str(value)


@dataclass(frozen=True)
class _Failed:
    """A trial that raised an error."""

    number: int
    settings: dict[str, Value]
    why: str


_Record = TypeVar("_Record", Tried, _Failed)


class Log:
    """The records of a search; trials are numbered as they end."""

    def __init__(
        self, folder: Path, about: Request, space: Space, start: Mapping[str, Value], from_best: bool = False
    ) -> None:
        self.optuna = need("optuna", "tuning")
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        self.store, self.about, self.space = RunStore(folder, "search", "storage"), about, space
        self.first, self.from_best = first_settings(space, start), from_best
        choices = {name: part.values for name, part in space.items() if isinstance(part, Choices)}
        self.fixed = {name: values[0] for name, values in choices.items() if len(values) == 1}
        self.store.continued(about, False, [part.name for part in fields(Request)])
        self.trials: list[Tried] = []
        self.failed: list[_Failed] = []
        self.confirmations: list[Tried] = []
        while True:
            if (tried := self.store.read_run(f"trial-{self.ended}", Tried)) is not None:
                self.trials.append(tried)
            elif (failed := self.store.read_run(f"failed-{self.ended}", _Failed)) is not None:
                self.failed.append(failed)
            else:
                break
        while (again := self.store.read_run(f"confirmation-{len(self.confirmations)}", Tried)) is not None:
            self.confirmations.append(again)

    @property
    def ended(self) -> int:
        """How many trials ended, with a value or with an error."""
        return len(self.trials) + len(self.failed)

    def keep(self, tried: Tried) -> None:
        """Add the record of a trial."""
        self.trials.append(self._written(f"trial-{tried.number}", tried))

    def fail(self, settings: dict[str, Value], why: str) -> None:
        """Add a trial without a value."""
        self.failed.append(self._written(f"failed-{self.ended}", _Failed(self.ended, settings, why)))

    def confirm(self, again: Tried) -> None:
        """Add the record of a trial that was trained once more."""
        self.confirmations.append(self._written(f"confirmation-{len(self.confirmations)}", again))

    def _written(self, name: str, record: _Record) -> _Record:
        if not self.store.manifest.exists():  # only now: a search whose defaults cannot be trained leaves nothing
            self.store.write_manifest(self.about)
        self.store.write_run(name, record)
        return record

    def ask(self, allow_larger: bool = True) -> dict[str, Value]:
        """Return the next settings to try."""
        number = self.ended
        if number < len(self.first):
            settings = self._first(number)
            if allow_larger or not larger(settings, self.first[0]):  # those that are larger come last of all
                return self.fixed | settings
        sampler = self.optuna.samplers.TPESampler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed = self.about.seed * 100_003 + number
            trial = self._study(sampler(seed=seed, n_startup_trials=_STARTUP, multivariate=True)).ask()
            settings = {}
            for name in searched(self.space):
                part = self.space[name]
                if isinstance(part, Range):
                    settings[name] = trial.suggest_float(name, part.low, part.high, log=part.log)
                else:
                    value: Any = trial.suggest_categorical(name, part.values)
                    settings[name] = value
        if not allow_larger and larger(settings, self.first[0]):
            settings |= {name: self.first[0][name] for name in SIZES if name in settings}
        return self.fixed | settings

    def _first(self, number: int) -> dict[str, Value]:
        """Return the settings of one of the first trials."""
        given, start = self.first[number], self.first[0]
        if not self.from_best or not self.trials:
            return given
        best = pick(self.trials).settings
        return {name: value if value != start[name] else best[name] for name, value in given.items()}

    def _study(self, sampler: optuna.samplers.BaseSampler | None = None) -> optuna.Study:
        """Rebuild optuna's study from the records.

        Pruned trials are complete ones with the value that they reached: optuna's own rule ranks trials that were
        pruned late before those that were pruned early, whatever their values.
        """
        distributions = self.optuna.distributions
        space = {
            name: distributions.FloatDistribution(part.low, part.high, log=part.log)
            if isinstance(part := self.space[name], Range)
            else distributions.CategoricalDistribution(part.values)
            for name in searched(self.space)
        }
        study: optuna.Study = self.optuna.create_study(direction="maximize", sampler=sampler)
        for t in self.trials:
            params = {name: t.settings[name] for name in space}
            study.add_trial(self.optuna.create_trial(params=params, distributions=space, value=t.value))
        return study

    def importance(self) -> dict[str, float]:
        """Return the share of the metric's variation that each name explains (PED-ANOVA), empty for few trials."""
        if len(self.trials) < 4 or len({t.value for t in self.trials}) < 2:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by = self.optuna.importance.PedAnovaImportanceEvaluator()  # the default of optuna 4 needs scikit-learn
            found = self.optuna.importance.get_param_importances(self._study(), evaluator=by)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

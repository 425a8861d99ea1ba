"""The record of a trial, and which trial wins.

A trial replaces the defaults where it is better beyond what the choice of validation entities explains: its gain, the
difference of both metrics, must exceed one standard error of that difference (gramtower/metrics/jackknife.py), paired
over the entities that both were measured on. Held-out entities are what varies where some were held out, users where
pairs were. Of the trials that pass, the best wins; if none does, the defaults stay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from gramtower.experiments.tuning import curve as curves
from gramtower.experiments.tuning.space import Value
from gramtower.metrics.jackknife import standard_error
from gramtower.training.result import Reason

#: Metrics that a report has next to the one that is maximised: lists can gain by one and lose by another.
REPORTED = ("map@5", "recall@20", "ndcg@20")


@dataclass
class Outcome:
    """How a trial ended."""

    curve: list[float]
    seconds: float
    reason: Reason
    pruned: bool
    late: bool
    warm: bool
    parameters: Tensor
    rough: bool = False
    without: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The metric that counts for it."""
        return curves.outcome(self.curve, self.warm, self.rough)[0]

    @property
    def iteration(self) -> int:
        """The iteration it was reached at."""
        return curves.outcome(self.curve, self.warm, self.rough)[1]


@dataclass(frozen=True)
class Tried:
    """One trial.

    Attributes:
        number: trials are numbered as they end, from 0.
        settings: by the names of the search space, fixed ones too.
        value: the metric that counts: the best on the way for a cold start, the last for a warm one; the mean of the
            last ones where entities were held out.
        iteration: where it was reached.
        curve: metric at the start and after each iteration.
        seconds: of training.
        pruned: whether it was given up on the way.
        warm_from: the trial whose solution it started from, or None for a cold start.
        reason: why it stopped.
        confirmed: for a winner that started warm, its value then; ``value`` is that of the cold start after it.
        without: the metric at its end without each part of the validation entities, for the defaults and for what
            was better than they; empty for a metric that is of no single entities.
        metrics: several metrics at its end (``REPORTED`` and the one that is maximised), for the same trials; empty in
            a log of an earlier version.
        same_as: the trial whose settings come to the same, and whose results these are; None if it was trained.
    """

    number: int
    settings: dict[str, Value]
    value: float
    iteration: int
    curve: list[float]
    seconds: float
    pruned: bool
    warm_from: int | None
    reason: str
    confirmed: float | None = None
    without: list[float] = field(default_factory=list)
    same_as: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def started_cold(self) -> bool:
        """Whether its value is that of a cold start."""
        return self.warm_from is None or self.confirmed is not None

    @property
    def note(self) -> str:
        """How it started, and whether it was given up or trained again, for people."""
        if self.same_as is not None:
            return f"same as {self.same_as}"
        notes = [f"warm from {self.warm_from}"] if self.warm_from is not None else []
        notes += ["given up"] if self.pruned else []
        notes += [f"confirmed cold; {self.confirmed:.4f} warm"] if self.confirmed is not None else []
        return ", ".join(notes)

    @classmethod
    def of(cls, number: int, settings: dict[str, Value], outcome: Outcome, warm_from: int | None) -> Tried:
        """A record from how a trial ended."""
        return cls(
            number, settings, outcome.value, outcome.iteration, outcome.curve, outcome.seconds, outcome.pruned,
            warm_from, outcome.reason.name, without=outcome.without, metrics=outcome.metrics,
        )  # fmt: skip

    @property
    def repeated(self) -> str:
        """How it was trained once more, for people; of the record of such a training."""
        return "on other held-out entities" if self.confirmed is None else f"cold start; {self.confirmed:.4f} warm"

    def again(self, outcome: Outcome) -> Tried:
        """The record of the same settings trained once more: from a cold start, or where it had one, on other data."""
        once_more = Tried.of(self.number, self.settings, outcome, self.warm_from)
        return once_more if self.started_cold else replace(once_more, confirmed=self.value, pruned=False)


def pick(trials: Sequence[Tried]) -> Tried:
    """The trial with the largest metric; the earliest of equals. One that was given up only where all were."""
    return max(trials, key=_rank)


def _rank(trial: Tried) -> tuple[bool, float, int]:
    return not trial.pruned, trial.value, -trial.number


@dataclass(frozen=True)
class Verdict:
    """Which trial wins, and why.

    Attributes:
        winner: the trial.
        text: a sentence that says what it was compared with, and how that came out.
    """

    winner: Tried
    text: str


@dataclass(frozen=True)
class Gain:
    """How much better a trial is than the defaults.

    Attributes:
        value: the difference of their metrics.
        error: its standard error; infinite where it is not known.
        base: the metric of the defaults.
    """

    value: float
    error: float
    base: float

    @property
    def sure(self) -> bool:
        """Whether it is beyond noise."""
        return self.value > self.error

    def __str__(self) -> str:
        scale, unit, digits = (100 / self.base, " %", 1) if self.base > 0 else (1.0, "", 4)
        known = f" ± {scale * self.error:.{digits}f}{unit}" if math.isfinite(self.error) else ""
        return f"{scale * self.value:.{digits}f}{unit}{known}"


def gain(trial: Tried, first: Tried) -> Gain:
    """What a trial has more than the first one, paired over the entities of both."""
    error = standard_error(trial.without, first.without) if trial.without else math.inf
    return Gain(trial.value - first.value, error, first.value)


def judge(trials: Sequence[Tried], refused: Collection[int] = ()) -> Verdict:
    """The best trial that is better than the defaults, trial 0, beyond noise; the defaults if there is none.

    Args:
        trials: in order.
        refused: numbers of trials that may not win.
    """
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

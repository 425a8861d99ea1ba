"""The log of a search: records of trials, which of them wins, and what is tried next.

A trial replaces the defaults only if it is better by more than the choice of validation entities explains: its gain,
the difference of both metrics, must exceed one standard error of that difference (metrics/tally.py), paired over
the entities that both were measured on. These are the held-out entities, or the users where pairs were held out. The
best of the trials that pass wins; if none does, the defaults stay.

optuna proposes settings. Its study is kept in memory, in a journal file (text, one JSON object a line) or in an SQLite
file (``.db``, ``.sqlite``). A study remembers which data, space, metric and seed it belongs to, and refuses others.

Solutions of finished trials are files with the towers' parameters, to start a neighbour from: towers of the same shape,
other ω, λ, μ, ν or weights. Files beyond the budget are dropped, worst trials first, so that the start of a trial
depends only on the finished trials and a resumed search goes the same way.
"""

from __future__ import annotations

import glob
import json
import math
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.files import replacing
from gramtower._util.optional import need
from gramtower._util.schema import build
from gramtower.engine.kernels.losses import Loss
from gramtower.experiments.tuning.space import LOGARITHMIC, SIZES, Range, Space, Value, describe, searched
from gramtower.experiments.tuning.space import larger as is_larger
from gramtower.experiments.tuning.trial import Outcome, Parts
from gramtower.metrics.tally import standard_error
from gramtower.model.fit_data import FitData
from gramtower.model.settings import ModelSettings

if TYPE_CHECKING:
    import optuna


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


SAME = (
    "dim",
    "hidden",
    "normalize",
    "loss",
    "imputed",
    "features",
)  # must be equal: another shape, or another scale of scores
RADIUS = 4.0  # octaves of ω, λ, μ, or quarters of a power, beyond which a cold start is as good


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two settings are apart: octaves of ω, λ, μ and quarters of powers; infinite for other towers."""
    if any(one.get(name) != other.get(name) for name in SAME):
        return math.inf
    steps = []
    for name in ("omega", "l2", "penalty", "frequency_power", "left_power", "right_power"):
        if name in one and name in other:
            a, b = float(one[name]), float(other[name])
            if name in LOGARITHMIC:
                steps.append(math.inf if min(a, b) <= 0 < max(a, b) else math.log2(a / b) if a > 0 else 0.0)
            else:
                steps.append(4 * (a - b))
    return math.hypot(*steps)


def weights_beside(storage: str | Path) -> Path:
    """The folder of solutions that belongs to a log."""
    return Path(str(storage) + ".weights")


class Solutions:
    """Parameters of finished trials in a folder.

    Args:
        folder: where the files are.
        budget: most bytes of files.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget = folder, budget
        folder.mkdir(parents=True, exist_ok=True)

    def nearest(self, settings: dict[str, Any], finished: Iterable[tuple[int, dict[str, Any]]]) -> int | None:
        """The finished trial with a solution that is nearest to settings, or None if none is near."""
        found = [(distance(settings, other), number) for number, other in finished if self._path(number).exists()]
        near = min(found, default=(math.inf, -1))
        return near[1] if near[0] <= RADIUS else None

    def load(self, number: int) -> Tensor:
        """The parameters of a trial."""
        from safetensors.torch import load_file

        return load_file(self._path(number))["parameters"]

    def keep(self, number: int, parameters: Tensor) -> None:
        """Keep a trial's parameters."""
        from safetensors.torch import save_file

        with replacing(self._path(number)) as partial:
            save_file({"parameters": parameters.detach().to("cpu", torch.float32).contiguous()}, partial)

    def drop(self, values: dict[int, float]) -> None:
        """Drop what is beyond the budget, the worst by ``values`` (number → metric) first."""
        there = sorted((n for n in values if self._path(n).exists()), key=lambda n: (values[n], -n))
        while there and sum(self._path(n).stat().st_size for n in there) > self.budget:
            self._path(there.pop(0)).unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"


_NAME = "gramtower"
_AGAIN = "confirmations"
_RECORD = b'{"op_code"'  # how every line of a journal begins
_SQLITE, _SQLITE_ENDINGS = b"SQLite format 3", (".db", ".sqlite", ".sqlite3")
_STARTUP = 8  # trials drawn at random before proposals learn from them


def open_study(storage: str | Path | None, identity: dict[str, Any], seed: int) -> Log:
    """A new study, or the stored one if it is of the same search.

    Raises:
        ImportError: without optuna.
        ValueError: if the storage holds another search, or is damaged.
    """
    optuna = need("optuna", "tuning")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _check_file(storage)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(
                storage=_backend(storage), study_name=_NAME, direction="maximize", load_if_exists=True
            )
        log, known = Log(study, seed), study.user_attrs.get("identity")
        log.check()
    except (OSError, ImportError):
        raise
    except Exception as error:  # what optuna and SQLite raise for a damaged log is of many kinds
        if storage is None or is_interrupt(error):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"storage: got {storage}, which is damaged ({why}), expected the log of a search, or a new file"
        ) from error
    plain = json.loads(json.dumps(identity))
    if known is None:
        study.set_user_attr("identity", plain)
    else:
        for name, value in plain.items():
            if known.get(name, value) != value:  # logs of earlier versions say less
                check.fail(
                    "storage", f"{storage}, a search with other {name}: {known.get(name)}", f"{value}, or another file"
                )
    return log


@contextmanager
def gone_if_refused(storage: str | Path | None) -> Iterator[list[Exception]]:
    """Take a new log away again where the defaults cannot be trained, by errors put into the list that this yields.

    Nothing is in it, and it would refuse the same search with what was wrong mended as another one.
    """
    new, refused = storage is not None and not Path(storage).exists(), list[Exception]()
    try:
        yield refused
    finally:
        if storage is not None and new and refused:
            Path(storage).unlink(missing_ok=True)
            shutil.rmtree(weights_beside(storage), ignore_errors=True)


def _check_file(storage: str | Path | None) -> None:
    """Refuse a folder, and a file that begins with something else than a log does."""
    if storage is None:
        return
    path = Path(storage)
    if path.is_dir():
        check.fail("storage", storage, "a file: .db or .sqlite for SQLite, anything else for a journal")
    begins = _SQLITE if path.suffix in _SQLITE_ENDINGS else _RECORD
    start = _first_bytes(path, len(begins))
    if not begins.startswith(start):
        check.fail("storage", f"{storage}, which begins with {start!r}", "the log of a search, or a new file")


def _backend(storage: str | Path | None) -> Any:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if storage is None:
        return None
    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in _SQLITE_ENDINGS:
        return RDBStorage(f"sqlite:///{path}")
    _mend(path)
    return JournalStorage(JournalFileBackend(str(path)))


def _first_bytes(path: Path, count: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return file.read(count)


def _mend(path: Path) -> None:
    """Take away what a killed process left of its last line, and its lock, which optuna would wait for.

    Nobody else is at work: a search holds a lock on its log.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.lock*"):
        if left.is_symlink() or left.suffix == ".rename":
            left.unlink(missing_ok=True)
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class Log:
    """The study of a search; trials are numbered as they end."""

    def __init__(self, study: optuna.Study, seed: int) -> None:
        self.study, self.seed = study, seed
        self.first: list[dict[str, Value]] = []
        self.from_best = False

    def check(self) -> None:
        """Read all records; what is missing or of another type raises an exception."""
        identity = self.study.user_attrs.get("identity", {})
        if not isinstance(identity, dict):
            raise ValueError(f"an identity that is a {type(identity).__name__}")
        for trial in self.finished():
            build(f"trial {trial.number}", Tried, {**trial.user_attrs["result"], "settings": {}})
        self.confirmations({})

    def begin(self, first: Sequence[dict[str, Value]], from_best: bool = False) -> None:
        """Set the settings to be tried first, and forget trials that a stopped run left unfinished.

        Those come again by themselves: what is tried next depends on the trials that ended alone.

        Args:
            first: settings; those after the first of them each change something of it.
            from_best: make these changes to the best settings so far instead.
        """
        from optuna.trial import TrialState

        self.first, self.from_best = list(first), from_best
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)

    def ask(self, space: Space, larger: bool = True) -> Trial:
        """The next settings to try. The proposal depends on the seed and on the trials that ended alone.

        Args:
            space: what is searched.
            larger: whether towers may be larger than at the start. If not, what is proposed gets those of the start.
        """
        from optuna.samplers import TPESampler
        from optuna.trial import TrialState

        number = self.ended()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.study.sampler = TPESampler(
                seed=self.seed * 100_003 + number, n_startup_trials=_STARTUP, multivariate=True
            )
            waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if number < len(self.first) and not waiting:  # one may be left by a kill just after this
                first = self._first(number)
                if larger or not is_larger(first, self.first[0]):  # those that are come last of all
                    self.study.enqueue_trial(first)
            trial, settings = self._propose(space)
            if not larger and is_larger(settings, self.first[0]):
                self.study.tell(trial, state=TrialState.FAIL)  # it was no trial, and counts as none
                self.study.enqueue_trial({**settings, **{n: self.first[0][n] for n in SIZES if n in settings}})
                trial, settings = self._propose(space)
        return Trial(self, trial, settings, number)

    def _propose(self, space: Space) -> tuple[optuna.Trial, dict[str, Value]]:
        """What waits to be tried, or what optuna proposes."""
        trial = self.study.ask()
        settings: dict[str, Value] = {}
        for name in searched(space):
            part = space[name]
            if isinstance(part, Range):
                settings[name] = trial.suggest_float(name, part.low, part.high, log=part.log)
            else:
                value: Any = trial.suggest_categorical(name, part.values)
                settings[name] = value
        return trial, settings

    def _first(self, number: int) -> dict[str, Value]:
        """The settings to be tried as trial ``number``, one of the first."""
        given, start, tried = self.first[number], self.first[0], self.tried({}) if self.from_best else []
        if not tried:
            return given
        return {**pick(tried).settings, **{name: value for name, value in given.items() if value != start[name]}}

    def ended(self) -> int:
        """How many trials ended, with a value or with an error."""
        failed = [t for t in self.study.get_trials(deepcopy=False) if "failed" in t.user_attrs]
        return len(self.finished()) + len(failed)

    def finished(self) -> list[Any]:
        """Trials with a value, in order of their end, those given up on the way too.

        They are told to optuna as complete with what they had reached: its own rule for pruned trials puts those that
        were pruned late before those that were pruned early, and a warm start is judged early.
        """
        from optuna.trial import TrialState

        found = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return sorted(found, key=lambda trial: int(trial.user_attrs["result"]["number"]))

    def tried(self, fixed: Mapping[str, Value]) -> list[Tried]:
        """Finished trials as plain records."""
        return [
            Tried(**{**trial.user_attrs["result"], "settings": {**fixed, **trial.params}}) for trial in self.finished()
        ]

    def confirm(self, again: Tried) -> None:
        """Keep the record of a trial that was trained once more."""
        record = asdict(again)
        del record["settings"]
        self.study.set_user_attr(_AGAIN, [*self.study.user_attrs.get(_AGAIN, []), record])

    def confirmations(self, fixed: Mapping[str, Value]) -> list[Tried]:
        """Records of trials that were trained once more, in order."""
        settings = {trial.number: trial.settings for trial in self.tried(fixed)}
        return [
            Tried(**record, settings=settings[record["number"]]) for record in self.study.user_attrs.get(_AGAIN, [])
        ]

    def importance(self, tried: Sequence[Tried]) -> dict[str, float]:
        """How much of the metric's variation each searched name explains, by PED-ANOVA; empty for fewer than four."""
        import optuna

        if len(tried) < 4 or len({t.value for t in tried}) < 2:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by = optuna.importance.PedAnovaImportanceEvaluator()  # the default of optuna 4 needs scikit-learn
            found = optuna.importance.get_param_importances(self.study, evaluator=by)
        return dict(sorted(found.items(), key=lambda item: -item[1]))


class Trial:
    """Settings being tried."""

    def __init__(self, log: Log, trial: optuna.Trial, settings: dict[str, Value], number: int) -> None:
        self._log, self._trial, self.settings, self.number = log, trial, settings, number

    def report(self, iteration: int, value: float) -> None:
        """Put a point of the curve into the log."""
        self._trial.report(value, iteration)

    def tell(self, outcome: Outcome, warm_from: int | None) -> int:
        """End the trial; returns its number."""
        record = asdict(Tried.of(self.number, self.settings, outcome, warm_from))
        del record["settings"]
        self._trial.set_user_attr("result", record)
        self._log.study.tell(self._trial, outcome.value)
        return self.number

    def tell_same(self, other: Tried) -> None:
        """End the trial as another one ended, whose settings come to the same."""
        first = other.number if other.same_as is None else other.same_as
        record = asdict(replace(other, number=self.number, seconds=0.0, same_as=first))
        del record["settings"]
        self._trial.set_user_attr("result", record)
        self._log.study.tell(self._trial, other.value)

    def fail(self, why: str) -> None:
        """End the trial without a value."""
        from optuna.trial import TrialState

        self._trial.set_user_attr("failed", why)
        self._log.study.tell(self._trial, state=TrialState.FAIL)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception was raised while Ctrl-C was dealt with."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def identity(parts: Parts, space: Space, metric: str, seed: int, model: ModelSettings) -> dict[str, Any]:
    """What must be the same for a stored search to be continued, beside what :func:`learned_from` says."""
    marks = _marks(parts.matrix.indptr, parts.matrix.indices)
    held = _marks(parts.held_out.indptr, parts.held_out.indices)
    unseen = parts.unseen
    entities = "" if unseen is None else f"{unseen.count} {unseen.side} entities, "
    fixed = {k: v for k, v in model.get_params().items() if k not in ("device", "verbose", "memory_budget", "metric")}
    return {
        "pairs": f"{parts.matrix.shape[0]} × {parts.matrix.shape[1]}, {parts.matrix.nnz} pairs, {marks}",
        "validation": f"{entities}{parts.held_out.nnz} pairs, {held}",
        "space": describe(space),
        "metric": metric,
        "seed": seed,
        "model": {name: _text(name, value) for name, value in fixed.items()},
    }


def _text(name: str, value: Any) -> str:
    """A setting in one form in every process: weights by all their numbers, a loss of one's own by its name."""
    if isinstance(value, Loss):
        return value.name
    if name in ("left_weights", "right_weights") and not isinstance(value, (str, type(None))):
        return str(_marks(check.as_float_array(name, value).astype(np.float64)))
    return str(value)


def learned_from(data: FitData) -> dict[str, Any]:
    """Labels, weights and features of a fit, by checksums."""
    weights = "none" if data.weights is None else str(_marks(data.weights))
    return {
        "labels": str(_marks(data.matrix.data)),
        "weights": weights,
        "left features": _features_mark(data.features[0]),
        "right features": _features_mark(data.features[1]),
    }


def _features_mark(rows: Any) -> str:
    if rows is None:
        return "ids"
    arrays = (rows.indptr, rows.indices, rows.data) if sp.issparse(rows) else (np.asarray(rows),)
    return f"{rows.shape[0]} × {rows.shape[1]}, {_marks(*arrays)}"


def _marks(*arrays: NDArray[Any]) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(array).tobytes()) for array in arrays]

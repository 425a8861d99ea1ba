"""The log of a search: optuna's study behind the few questions that the search asks of it.

Kept in memory, in a journal file (text, one JSON object a line) or in an SQLite file (``.db``, ``.sqlite``). A study
remembers which data, space, metric and seed it belongs to, and refuses others. Needs optuna.
"""

from __future__ import annotations

import glob
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramtower._util import checks as check
from gramtower._util.optional import need
from gramtower._util.schema import build
from gramtower.experiments.tuning.space import SIZES, Range, Space, Value, searched
from gramtower.experiments.tuning.space import larger as is_larger
from gramtower.experiments.tuning.tried import Tried, pick
from gramtower.experiments.tuning.warm import weights_beside

if TYPE_CHECKING:
    import optuna

    from gramtower.experiments.tuning.tried import Outcome

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

"""A fit over processes that an engine starts: its checked arguments, the work of one process, and the result.

The processes read their shares of a partition and have the folder of the run in common. Both may be URLs of object
storage:

    model.gramtower          the model, when the fit has ended
    history.jsonl            one record an iteration
    checkpoint/              the last checkpoint, from which another attempt, or another call, continues
    error.json               the last error of a process

An engine starts all processes again when one is lost. Another attempt does not mend bad arguments or bad data, so a
process ends normally after a ``ValueError``, later attempts end at once, and the caller gets the error from the file.
A process of an earlier attempt that still runs when another one has taken over a URL ends with an ``OSError``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.files import is_remote, write_json
from gramtower.data.frames import Column
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import Group, PeerError
from gramtower.distributed.partition import read_part, refuse_old
from gramtower.model.settings import ModelSettings
from gramtower.model.two_tower import TwoTower
from gramtower.optim.solvers import as_solver
from gramtower.training.callbacks import Callback
from gramtower.training.checkpoint import locked
from gramtower.training.result import Record, read_history

COLUMNS = ("left", "right", "value", "weight")
_TRIES = 30  # to lock the folder of a run, one in a second


@dataclass(frozen=True)
class Launched:
    """The result of a fit that an engine ran.

    Attributes:
        model: path of the saved model, for ``gramtower.load``.
        history: one record per iteration, including the start.
    """

    model: Path
    history: list[Record]


@dataclass(frozen=True)
class Job:
    """The arguments of a fit, as every process gets them."""

    path: Path  # the partition
    columns: dict[str, Any]  # its columns, by argument of read_part
    out: Path  # the folder of the run
    params: dict[str, Any]  # arguments of TwoTower
    left_features: FeaturesLike
    right_features: FeaturesLike

    @property
    def checkpoint(self) -> Path:
        """The checkpoint, in a folder with all that belongs to it."""
        return self.out / "checkpoint" / "fit.safetensors"

    @property
    def _error(self) -> Path:
        return self.out / "error.json"

    @property
    def refused(self) -> bool:
        """Whether an earlier attempt found an error that every attempt would find."""
        return self._error.exists() and bool(json.loads(self._error.read_text("utf-8"))["refused"])

    def begin(self) -> None:
        """Make the folder of the run, without the error of an earlier call."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self._error.unlink(missing_ok=True)

    def work(self, group: Group, callbacks: Iterable[Callback] = ()) -> None:
        """Fit the model as one process of ``group``, from the last checkpoint if there is one, and save it."""
        try:
            with self._held(group):
                model = TwoTower(**self.params)
                model.fit(
                    read_part(self.path, group=group, **self.columns), self.left_features, self.right_features,
                    checkpoint=self.checkpoint, history=self.out / "history.jsonl", callbacks=callbacks,
                )  # fmt: skip
                model.save(self.out / "model.gramtower")
        except Exception as error:
            refused = isinstance(error, ValueError)
            if not (isinstance(error, PeerError) and self._error.exists()):  # the loss of a process explains less
                where = "" if refused else f"process {group.rank} of {group.size}: {type(error).__name__}: "
                write_json(self._error, {"refused": refused, "text": f"{where}{error}"})
            if not refused:
                raise

    @contextmanager
    def _held(self, group: Group) -> Iterator[None]:
        """Lock the folder; the processes of an earlier attempt, which may still be ending, have some time for it.

        A URL cannot be locked, so that this attempt takes it over at once.
        """
        with ExitStack() as stack:
            for attempt in range(_TRIES):
                try:
                    stack.enter_context(locked(self.out, group, "out"))
                    break
                except ValueError:
                    if attempt == _TRIES - 1:
                        raise
                    time.sleep(1.0)
            yield

    def launched(self) -> Launched:
        """The result, after the engine has ended without an error."""
        if self.refused:
            raise ValueError(json.loads(self._error.read_text("utf-8"))["text"])
        self._error.unlink(missing_ok=True)
        return Launched(self.out / "model.gramtower", read_history(self.out / "history.jsonl"))

    def failed(self, engine: str, error: Exception) -> Exception:
        """The error for the caller, after the engine has ended with one: that of a process, if a process wrote it."""
        if not self._error.exists():
            return RuntimeError(f"{engine} could not run the fit: {' '.join(str(error).split())[:1000]}")
        found = json.loads(self._error.read_text("utf-8"))
        if found["refused"]:
            return ValueError(found["text"])
        return RuntimeError(f"the fit failed after the attempts that {engine} allows, in {found['text']}")


def make_job(
    path: str | Path,
    columns: Mapping[str, Column] | None,
    settings: ModelSettings,
    out: str | Path,
    left_features: FeaturesLike,
    right_features: FeaturesLike,
) -> Job:
    """Check the arguments of a fit, before an engine starts anything."""
    folder, run = check.path("path", path).absolute(), check.path("out", out).absolute()
    refuse_old("path", folder)
    if not folder.is_dir():
        check.fail("path", folder, "a folder of Parquet files in which no left id is in two parts")
    named = {"left": 0, "right": 1} if columns is None else columns
    if not isinstance(named, Mapping) or not set(named) <= set(COLUMNS):
        check.fail("columns", repr(columns), f"names or places of columns by {', '.join(COLUMNS)}")
    if not isinstance(settings, ModelSettings):
        check.fail("settings", type(settings).__name__, "a gramtower.TwoTower with the settings of the fit")
    as_solver(settings.optimizer, dict(settings.solver_options()))
    if is_remote(run):
        from gramtower._util.remote import check_writable

        check_writable(run, "out")
    if run.exists() and not run.is_dir():
        check.fail("out", f"{run}, which is a file", "a folder that all processes can write")
    return Job(folder, dict(named), run, settings.with_changes().get_params(), left_features, right_features)

"""What a run returns: a record for each iteration, the reason it stopped, and the point it ended at.

The limits that a caller sets to a run: iterations, seconds of training, tolerance, and patience with a metric.

The tolerance is compared with the gradient in loop.py, which knows it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from gramtower._util import checks as check
from gramtower._util import html
from gramtower._util.files import write_text
from gramtower._util.schema import build
from gramtower.engine.towers.parameters import Parameters


class Reason(Enum):
    """Why training stopped, as a name; the value is the explanation."""

    MAX_ITERATIONS = "finished the planned iterations ({iterations})"
    TIME_LIMIT = "finished the planned training time ({seconds:g} s)"
    TOLERANCE = "the gradient norm fell below tolerance times its first value: a stationary point"
    NO_DECREASE = (
        "the objective no longer decreases measurably in {dtype}: most often this is a minimum to within rounding"
        "{further}"
    )
    NON_FINITE = (
        "{what} became NaN or infinite; the last good point was kept. Likely causes: a step size that is too large, "
        "towers whose outputs grow without bound, or labels of an extreme size"
    )
    EARLY_STOP = "the validation metric did not improve for {patience} evaluations; the best point was restored"
    CALLBACK = "a callback asked to stop"
    INTERRUPTED = "interrupted; the best point so far was kept"


@dataclass(frozen=True)
class Stop:
    """Why a run stops, in words, and what was not finite, if that is why; see :class:`Result`."""

    reason: Reason
    message: str
    non_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What is known of one iteration of training; iteration 0 is the start.

    Attributes:
        iteration: number of the iteration.
        seconds: training time so far; validation, checkpoints and, for sampled methods with a given step size, the
            value of this record are not counted.
        value: objective L after the iteration.
        relative_decrease: ``(L before − L) / |L before|``.
        gradient_norm: ‖∇L‖ where the iteration started. For sampled methods it is that of the last sample. For sweeps
            of ``newton-kron`` over two tables it is √(‖∇₁L‖² + ‖∇₂L‖²), where each table's gradient is taken when that
            table moves, so that the second one is at another θ. It vanishes where ‖∇L‖ does.
        cg_steps: conjugate gradient steps.
        step: step size δ.
        damping: damping in force, or None.
        trials: values the line search looked at.
        data_passes: how often the method took all m·n pairs into account so far; what ``seconds`` leaves out is not
            counted here either.
        work: tower passes and passes over the observed pairs so far.
        terms: the value, term by term.
        metric: validation metric, or None.
        processes: how many processes the run has.
        bytes: bytes that the first process has sent and received so far.
        product_bytes: the same for one G·d, the last.
    """

    iteration: int
    seconds: float
    value: float
    relative_decrease: float
    gradient_norm: float | None
    cg_steps: int
    step: float
    damping: float | None
    trials: int
    data_passes: float
    work: dict[str, float]
    terms: dict[str, float]
    metric: float | None
    processes: int = 1
    bytes: int = 0
    product_bytes: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class Result:
    """How a run of ``minimize`` ended: why, with which history, and with which weights.

    Attributes:
        reason: why it stopped.
        message: the same with particulars.
        history: one record an iteration, the start included.
        parameters: the parameters that the towers were left with.
        value: the objective there.
        best_metric: the best validation metric seen, or None.
        non_finite: with ``Reason.NON_FINITE``, the terms of the objective that were NaN or infinite, or "gradient".
    """

    reason: Reason
    message: str
    history: list[Record]
    parameters: Parameters
    value: float
    best_metric: float | None = None
    non_finite: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        last = self.history[-1]
        return f"Result({self.reason.name}, value={self.value:.6g}, {last.iteration} iterations, {last.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        """A card for notebooks: how the run went and why it stopped."""
        last = self.history[-1]
        facts: dict[str, object] = {"objective": self.value, "iterations": last.iteration, "seconds": last.seconds}
        if self.best_metric is not None:
            facts["best validation metric"] = self.best_metric
        drawn = html.curve([record.value for record in self.history], "objective, iteration by iteration")
        return html.card("Result", html.facts(facts), drawn, html.note(f"Stopped: {self.message}"))


@dataclass
class History:
    """Records kept in memory and, with a path, appended to a JSONL file as they come."""

    path: Path | None = None
    records: list[Record] = field(default_factory=list)

    def begin(self, records: list[Record]) -> None:
        """Start with the records of an earlier run, or with none; rewrites the file."""
        self.records = list(records)
        if self.path is not None:
            write_text(self.path, "".join(record.to_json() + "\n" for record in records))

    def cut(self, count: int) -> None:
        """Keep the first ``count`` records alone, and whole lines of them in the file."""
        self.begin(self.records[:count])

    def add(self, record: Record) -> None:
        """Keep a record."""
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(record.to_json() + "\n")


def read_history(path: str | Path) -> list[Record]:
    """Read the records of a training run from its JSONL file.

    An unfinished last line, left by a kill, is ignored.

    Raises:
        ValueError: naming the line, if any other is not a record.
    """
    records: list[Record] = []
    lines = check.path("path", path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            values = line
        records.append(build(f"{path}, line {number}", Record, values))
    return records


class Limits:
    """The limits, checked; the arguments are those of ``minimize``, with patience None where nothing is validated."""

    def __init__(self, max_iterations: int, time_limit: float | None, tolerance: float, patience: int | None) -> None:
        self.max_iterations = check.count("max_iterations", max_iterations, minimum=0)
        self.time_limit = None if time_limit is None else check.number("time_limit", time_limit, minimum=0.0)
        self.tolerance = check.number("tolerance", tolerance, minimum=0.0)
        self.patience = None if patience is None else check.count("patience", patience)

    def reached(self, iteration: int, seconds: float, waited: int) -> Stop | None:
        """Why to stop after so many iterations and seconds, and validations without a better metric; None goes on."""
        if self.patience is not None and waited >= self.patience:
            return Stop(Reason.EARLY_STOP, Reason.EARLY_STOP.value.format(patience=self.patience))
        if iteration >= self.max_iterations:
            return Stop(Reason.MAX_ITERATIONS, Reason.MAX_ITERATIONS.value.format(iterations=self.max_iterations))
        if self.time_limit is not None and seconds >= self.time_limit:
            return Stop(Reason.TIME_LIMIT, Reason.TIME_LIMIT.value.format(seconds=self.time_limit))
        return None

"""The result of a run: a record for each iteration, the reason for stopping, and the final point."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from gramtower._util import checks as check
from gramtower._util import html
from gramtower._util.files import build, write_text
from gramtower.engine.towers.parameters import Parameters


class Reason(Enum):
    """The reason why training stopped; the value is the explanation."""

    MAX_ITERATIONS = "finished the planned iterations ({iterations})"
    TIME_LIMIT = "finished the planned training time ({seconds:g} s)"
    TOLERANCE = "the gradient norm fell below tolerance times its first value: a stationary point"
    NO_DECREASE = (
        "the objective no longer decreases measurably in {precision}: in most cases this is a minimum up to rounding"
        "{further}"
    )
    NON_FINITE = (
        "{what} became NaN or infinite; the last finite point was kept. Likely causes are a step size that is too "
        "large, towers whose outputs grow without bound, or extreme labels"
    )
    EARLY_STOP = "the validation metric did not improve for {patience} evaluations; the best point was restored"
    CALLBACK = "a callback asked to stop"
    INTERRUPTED = "interrupted; the best point so far was kept"


@dataclass(frozen=True)
class Record:
    """The record of one iteration of training; iteration 0 is the start.

    Attributes:
        iteration: number of the iteration.
        seconds: training time so far, without validation and checkpoints, and for sampling methods with a given step
            size without the computation of ``value``.
        value: objective L after the iteration.
        relative_decrease: ``(L before − L) / |L before|``.
        gradient_norm: ‖∇L‖ at the start of the iteration. For sampling methods it is the norm of the last estimate. For
            sweeps of ``newton-kron`` over two tables it is √(‖∇₁L‖² + ‖∇₂L‖²), where each table's gradient is computed
            when that table moves, so that the second one is at another θ. It vanishes where ‖∇L‖ does.
        cg_steps: number of conjugate gradient steps.
        step: step size δ.
        damping: the damping that was used, or None.
        trials: number of objective values computed by the line search.
        data_passes: how often the method took all m·n pairs into account so far, counted like ``seconds``.
        work: tower passes and passes over the observed pairs so far.
        terms: the value, term by term.
        metric: validation metric, or None.
        processes: number of processes of the run.
        bytes: bytes that the first process has sent and received so far.
        product_bytes: bytes that it sent and received for the last G·d.
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
        """The record as one line of JSON."""
        return json.dumps(asdict(self))


@dataclass
class Result:
    """The result of ``minimize``.

    Attributes:
        reason: the reason for stopping.
        message: the reason with details.
        history: one record per iteration, including the start.
        parameters: the final parameters of the towers.
        value: the objective at these parameters.
        best_metric: the best validation metric, or None.
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
        """A card for notebooks, with the course of the run and the reason for stopping."""
        last = self.history[-1]
        facts: dict[str, object] = {"objective": self.value, "iterations": last.iteration, "seconds": last.seconds}
        if self.best_metric is not None:
            facts["best validation metric"] = self.best_metric
        drawn = html.curve([record.value for record in self.history], "objective, iteration by iteration")
        return html.card("Result", html.facts(facts), drawn, html.note(f"Stopped: {self.message}"))


def write_history(path: Path, records: Iterable[Record]) -> None:
    """Write records to a JSONL file, in one step."""
    write_text(path, "".join(record.to_json() + "\n" for record in records))


def read_history(path: str | Path) -> list[Record]:
    """Read the records of a training run from its JSONL file.

    An incomplete last line, left by a killed run, is ignored.

    Raises:
        ValueError: if any other line is not a record.
    """
    records: list[Record] = []
    lines = check.path("path", path).read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break
            values = line
        records.append(build(f"{path}, line {number}", Record, values))
    return records

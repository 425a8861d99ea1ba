"""The folder of a comparison, and how it is read and written.

    comparison.json   what was compared and what became of each method; rewritten after every method
    NAME.jsonl        history of a method: one record an iteration
    NAME.safetensors  checkpoint of a method that has not ended

Everything else in the folder (summary.json, figures, report.html) is made from these by comparison_build.py. Histories
alone are enough: without comparison.json the page lacks only what is written there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.files import write_json
from gramtower._util.schema import fits
from gramtower.training.result import Record, read_history

MANIFEST = "comparison.json"
_TYPES = {  # of what is read from it
    "methods": dict[str, dict[str, Any]], "data": dict[str, Any], "settings": dict[str, dict[str, Any]],
    "commands": list[str], "environment": dict[str, Any],
}  # fmt: skip
_COUNTS = {"left": int, "right": int, "pairs": int, "validation_pairs": int | None}
_OUTCOME = {
    "status": str, "message": str, "options": dict[str, Any], "environment": dict[str, Any],
    "others_busy": float | None,
}  # fmt: skip


@dataclass(frozen=True)
class MethodRun:
    """The run of one method of a comparison.

    Attributes:
        name: of the method.
        history: its records; empty if it never started.
        outcome: ``status`` (one of STATUSES), ``message`` and what else is known of its run.
    """

    name: str
    history: list[Record]
    outcome: dict[str, Any] = field(default_factory=dict)


#: What can become of a method, and what that means.
STATUSES = {
    "finished": "stopped by a limit or at a minimum",
    "diverged": "its objective became NaN or infinite, or ended above its start",
    "too slow": "its first iteration took longer than the time limit",
    "failed": "it raised an error",
    "unknown": "there is no method of this name",
    "unfinished": "it was interrupted; the same command goes on",
}


#: Those of methods that ran; what they were worth is in the report.
RAN = ("finished", "diverged", "too slow")


@dataclass(frozen=True)
class Comparison:
    """A folder's content: its methods in the order they were asked for, and what comparison.json says of the rest."""

    folder: Path
    methods: list[MethodRun]
    about: dict[str, Any]

    @property
    def title(self) -> str:
        """What was compared on."""
        return str(self.about.get("title") or self.folder.resolve().name)

    @property
    def metric(self) -> str | None:
        """The validation metric that was recorded, if any was."""
        measured = any(r.metric is not None for method in self.methods for r in method.history)
        return str(self.about.get("metric") or "metric") if measured else None


def history_path(folder: Path, name: str) -> Path:
    """Where the history of a method is."""
    return folder / f"{name}.jsonl"


def checkpoint_path(folder: Path, name: str) -> Path:
    """Where the checkpoint of a method is."""
    return folder / f"{name}.safetensors"


def read_comparison(folder: Path) -> Comparison:
    """The comparison in a folder.

    Raises:
        ValueError: if there is none, or a file of it is damaged.
    """
    about = read_manifest(folder) or {}
    outcomes: dict[str, dict[str, Any]] = about.pop("methods", {})
    found = {path.stem for path in folder.glob("*.jsonl")}
    names = [*outcomes, *sorted(found - set(outcomes))]
    if not names:
        check.fail("folder", folder, f"a folder with {MANIFEST} or histories NAME.jsonl, as gramtower compare writes")
    histories = {name: _history(folder, name) if name in found else [] for name in names}
    return Comparison(folder, [MethodRun(n, h, _outcome(outcomes.get(n, {}), h)) for n, h in histories.items()], about)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """comparison.json, or None if there is none.

    Raises:
        ValueError: if it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict) or "methods" not in about:
            raise ValueError("no methods")
        _check_types("", about, _TYPES)
        _check_types("data.", about.get("data", {}), _COUNTS)
        _check_types("settings.", about.get("settings", {}), {"limits": dict[str, float | int | None]})
        for name, outcome in about["methods"].items():
            _check_types(f"methods.{name}.", outcome, _OUTCOME)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"folder: {path} is damaged or of something else ({error})") from error
    return about


def _check_types(where: str, found: dict[str, Any], types: dict[str, Any]) -> None:
    for name, kind in types.items():
        if name in found and not fits(kind, found[name]):
            raise ValueError(f"got {where}{name} of type {type(found[name]).__name__}, expected {kind}")


def write_manifest(folder: Path, about: dict[str, Any]) -> None:
    """Save comparison.json in one step."""
    write_json(folder / MANIFEST, about)


def _history(folder: Path, name: str) -> list[Record]:
    path = history_path(folder, name)
    try:
        return read_history(path)
    except ValueError as error:
        raise ValueError(f"folder: {path} is not a history: {error}") from error


def _outcome(outcome: dict[str, Any], history: list[Record]) -> dict[str, Any]:
    if outcome.get("status") in STATUSES:
        return outcome
    return {**outcome, "status": "unfinished", "message": "no end was recorded" if history else "not started yet"}

"""The folder of a benchmark, and how it is read and written.

    benchmark.json          what is compared on what; rewritten when a run failed
    runs/NAME-SEED.tensors  a finished run: times, memory, metrics, and the values of each user

summary.json and report.html are made from these by benchmark_build.py. A finished run is never made again, so that
the same benchmark goes on after a kill; a failed one is tried again.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import schema as _schema
from gramtower._util import tensors as _tensors
from gramtower._util.files import plain, write_json

MANIFEST, RUNS = "benchmark.json", "runs"
KIND, VERSION = "gramtower benchmark", 1
_RUN_KIND = "run of a gramtower benchmark"


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it runs; see Entry."""

    kind: str
    settings: dict[str, Any]
    random: bool
    left_out: str | None = None


@dataclass(frozen=True)
class Manifest:
    """What is compared on what.

    Attributes:
        title: of the page.
        data: counts, a fingerprint, and how pairs are held out.
        fixed_test: whether all seeds test the same pairs.
        metrics: names; the first decides.
        seeds: of the runs.
        reference: the model that others are compared with; None for the best.
        models: by name, in order.
        failures: of models, by seed: the error.
        commands: command lines, if any.
        kind: of the file.
        version: of the file.
    """

    title: str
    data: dict[str, Any]
    fixed_test: bool
    metrics: list[str]
    seeds: list[int]
    reference: str | None
    models: dict[str, dict[str, Any]]
    failures: dict[str, dict[str, str]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    kind: str = KIND
    version: int = VERSION

    def facts(self, name: str) -> ModelFacts:
        """Of a model."""
        return _schema.build(f"models[{name!r}]", ModelFacts, self.models[name])

    def seeds_of(self, name: str) -> list[int]:
        """The seeds that a model is run with: one, if neither it nor the split depends on it."""
        return self.seeds if self.facts(name).random or not self.fixed_test else self.seeds[:1]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run of a model.

    Attributes:
        name: of the model.
        seed: of the split and of the model.
        metrics: by name.
        users: rows of the users that metrics are means over.
        per_user: their values, for metrics that are means over users.
        seconds: of the fit.
        list_seconds: of the lists.
        peak_bytes: the largest resident set meanwhile; None if unknown.
        start_bytes: the resident set before.
        others_busy: cores that other processes kept busy meanwhile; None if unknown.
        environment: where and with what it ran.
    """

    name: str
    seed: int
    metrics: dict[str, float]
    users: NDArray[np.int64]
    per_user: dict[str, NDArray[np.float64]]
    seconds: float
    list_seconds: float
    peak_bytes: int | None = None
    start_bytes: int | None = None
    others_busy: float | None = None
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Header:
    name: str
    seed: int
    metrics: dict[str, float | None]
    seconds: float
    list_seconds: float
    peak_bytes: int | None
    start_bytes: int | None
    others_busy: float | None
    environment: dict[str, Any]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Save benchmark.json in one step."""
    write_json(folder / MANIFEST, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """benchmark.json, or None if there is none.

    Raises:
        ValueError: if it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("kind") == KIND and content.get("version") != VERSION:
            raise ValueError(f"version {content.get('version')!r}, expected {VERSION}")
        found = _schema.build("benchmark", Manifest, content)
        for name in found.models:
            found.facts(name)
        if found.kind != KIND or not found.metrics or not found.seeds or not found.models:
            raise ValueError("no models, metrics or seeds")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"folder: {path} is damaged or of something else ({error})") from error
    return found


def run_path(folder: Path, name: str, seed: int) -> Path:
    """Where a finished run is; names that differ have different files."""
    letters = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "model"
    return folder / RUNS / f"{letters}-{zlib.crc32(name.encode()):08x}-{seed}.tensors"


def write_run(folder: Path, run: Run) -> None:
    """Save a finished run in one step."""
    header = {part.name: getattr(run, part.name) for part in fields(_Header)}
    tensors = {"users": torch.from_numpy(run.users)}
    tensors |= {f"metric {name}": torch.from_numpy(values) for name, values in run.per_user.items()}
    _tensors.write(run_path(folder, run.name, run.seed), _RUN_KIND, VERSION, plain(header), tensors)


def read_run(folder: Path, name: str, seed: int) -> Run | None:
    """A finished run, or None if there is none.

    Raises:
        ValueError: if its file is damaged or of another run.
    """
    path = run_path(folder, name, seed)
    if not path.exists():
        return None
    file = _tensors.TensorFile(path, _RUN_KIND, VERSION)
    try:
        header = _schema.build(str(path), _Header, file.header)
        users = file.read("users").numpy().copy() if "users" in file.shapes else np.empty(0, dtype=np.int64)
        prefix = "metric "
        values = {key.removeprefix(prefix): file.read(key).numpy().copy() for key in file.shapes if key != "users"}
    finally:
        file.close()
    if (header.name, header.seed) != (name, seed) or any(len(part) != len(users) for part in values.values()):
        check.fail("folder", f"{path}, a run of {header.name!r} with seed {header.seed}", f"one of {name!r}, {seed}")
    metrics = {key: float("nan") if value is None else value for key, value in header.metrics.items()}
    return Run(**vars(header) | {"metrics": metrics, "users": users, "per_user": values})


def read_runs(folder: Path, manifest: Manifest) -> list[Run]:
    """All finished runs of a benchmark."""
    asked = [(name, seed) for name in manifest.models for seed in manifest.seeds_of(name)]
    return [run for name, seed in asked if (run := read_run(folder, name, seed)) is not None]

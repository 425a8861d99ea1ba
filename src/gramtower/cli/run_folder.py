"""The folder of a run: model.gramtower, config.toml, history.jsonl, summary.json and, while it runs, a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gramtower._util import checks as check
from gramtower.cli.options import Settings, read_config
from gramtower.distributed.group import SINGLE, Group
from gramtower.model.two_tower import TwoTower, load
from gramtower.training.checkpoint import locked

MODEL, CONFIG, HISTORY, SUMMARY = "model.gramtower", "config.toml", "history.jsonl", "summary.json"
CHECKPOINT = "checkpoint.safetensors"


def for_writing(out: Path | None) -> Path:
    """The folder that a command is to write, there or not; one that cannot be is refused before anything is read."""
    if out is None:
        check.fail("out", "nothing", "a folder")
    there = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    if not there.is_dir():
        check.fail("out", out if there == out.absolute() else f"{out}, where {there} is a file", "a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        check.fail("out", f"{out}, with no permission to write in {there}", "a folder that can be written")
    return out


@contextmanager
def held(out: Path, group: Group = SINGLE) -> Iterator[None]:
    """The folder that a command writes, made if need be and locked.

    If the command fails before it wrote anything, folders that were made for it go again.
    """
    new = [one for one in (out, *out.parents) if not one.exists()]
    with group.together():
        out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out, group, "out"):
            yield
    except BaseException:
        with suppress(OSError):  # something is in it
            for one in new:
                one.rmdir()
        raise


def is_model(path: Path) -> bool:
    """Whether a path is a run's folder or a model file."""
    return (path / MODEL).exists() or (path / CONFIG).exists() or path.suffix == ".gramtower"


def model_file(run: Path) -> Path:
    """The model file of a run (a folder, or the file itself)."""
    path = run / MODEL if run.is_dir() else run
    if not path.exists():
        hint = "; its fit has not finished: run the same fit command to continue" if (run / CHECKPOINT).exists() else ""
        raise ValueError(f"run: got {run}, expected a folder that holds {MODEL}, or a model file{hint}")
    return path


def open_model(run: Path) -> tuple[TwoTower, Settings]:
    """Load the model of a run (a folder or a model file) and the settings it was made with."""
    path = model_file(run)
    config = path.parent / CONFIG
    return load(path), read_config(config) if config.exists() else Settings()

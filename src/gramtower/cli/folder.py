"""The folder of a run: model.gramtower, config.toml, history.jsonl, summary.json and, while it runs, a checkpoint."""

from __future__ import annotations

from pathlib import Path

from gramtower.cli.config import Settings, read_config
from gramtower.two_tower import TwoTower, load

MODEL, CONFIG, HISTORY, SUMMARY = "model.gramtower", "config.toml", "history.jsonl", "summary.json"
CHECKPOINT = "checkpoint.safetensors"


def is_model(path: Path) -> bool:
    """Whether a path is a run's folder or a model file."""
    return (path / MODEL).exists() or (path / CONFIG).exists() or path.suffix == ".gramtower"


def model_file(run: Path) -> Path:
    """The model file of a run (a folder, or the file itself).

    Raises:
        ValueError: if there is none.
    """
    path = run / MODEL if run.is_dir() else run
    if not path.exists():
        hint = "; its fit has not ended: the same fit command goes on" if (run / CHECKPOINT).exists() else ""
        raise ValueError(f"run: got {run}, expected a folder that holds {MODEL}, or a model file{hint}")
    return path


def open_model(run: Path) -> tuple[TwoTower, Settings]:
    """The model of a run (a folder, or the model file alone) and the settings it was made with.

    Raises:
        ValueError: if there is none, or it is damaged or foreign.
    """
    path = model_file(run)
    config = path.parent / CONFIG
    return load(path), read_config(config) if config.exists() else Settings()

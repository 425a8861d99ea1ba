"""The folder of a run: model.gramtower, config.toml, history.jsonl, summary.json and, while it runs, a checkpoint."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramtower._files import write_text
from gramtower.cli.config import Settings, read_config
from gramtower.cli.machine import commit
from gramtower.cli.output import clean
from gramtower.estimator.model_file import load
from gramtower.estimator.two_tower import TwoTower

MODEL, CONFIG, HISTORY, SUMMARY = "model.gramtower", "config.toml", "history.jsonl", "summary.json"
CHECKPOINT = "checkpoint.safetensors"


def is_model(path: Path) -> bool:
    """Whether a path is a run's folder or a model file."""
    return (path / MODEL).exists() or (path / CONFIG).exists() or path.suffix == ".gramtower"


def open_model(run: Path) -> tuple[TwoTower, Settings]:
    """The model of a run (a folder, or the model file alone) and the settings it was made with.

    Raises:
        ValueError: if there is none, or it is damaged or foreign.
    """
    path = run / MODEL if run.is_dir() else run
    if not path.exists():
        hint = "; its fit has not ended: the same fit command goes on" if (run / CHECKPOINT).exists() else ""
        raise ValueError(f"run: got {run}, expected a folder that holds {MODEL}, or a model file{hint}")
    config = path.parent / CONFIG
    return load(path), read_config(config) if config.exists() else Settings()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Save a JSON file in one step."""
    write_text(path, json.dumps(clean(content), indent=2, ensure_ascii=False) + "\n")


def environment() -> dict[str, Any]:
    """Where and with what a run ran."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        processor = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), processor)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gramtower": version("gramtower"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }

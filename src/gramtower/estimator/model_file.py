"""A fitted model as one safetensors file with JSON in its header: no code runs when it is read.

Ids are stored as one block of UTF-8 text with offsets (data/packing.py). Written under another name and renamed.
Several processes write one file each (sharded_model.py). Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT, KEY = "gramtower-model", "model"
VERSION = 1


def write_model(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Save a model; the file at ``path`` is replaced in one step and stays whole if anything fails."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    head = {"format": FORMAT, "version": VERSION, **header}
    try:
        save_file({k: t.contiguous() for k, t in tensors.items()}, partial, {KEY: json.dumps(head)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load a model's header and tensors.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a model, damaged, or of a later version.
    """
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(f"model: {path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            header: dict[str, Any] = json.loads(texts[KEY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if "index" in texts:
            from gramtower.estimator.sharded_model import read_shards

            header, tensors = read_shards(path)
        if header.get("format") != FORMAT:
            raise KeyError(str(header.get("format")))
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ValueError(f"model: {path} is damaged or not a gramtower model ({error})") from error
    if header["version"] > VERSION:
        raise ValueError(
            f"model: {path} was written by a later version (format {header['version']}, this reads up to {VERSION}); "
            "upgrade gramtower"
        )
    return header, tensors

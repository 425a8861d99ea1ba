"""A fitted model as one safetensors file with JSON in its header: no code runs when it is read.

Ids are stored as one block of UTF-8 text with offsets (data/packing.py). Written under another name and renamed.
Several processes write one file each (sharded_model.py). Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramtower._files import replacing

FORMAT, KEY = "gramtower-model", "model"
VERSION = 3  # 2 had embeddings beside the tables they are; 1 no inputs (what becomes of features), no reason's name


def write_model(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Save a model; the file at ``path`` is replaced in one step and stays whole if anything fails."""
    from safetensors.torch import save_file

    head = {"format": FORMAT, "version": VERSION, **header}
    with replacing(path) as partial:
        save_file({k: t.contiguous() for k, t in tensors.items()}, partial, {KEY: json.dumps(head)})


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


def pack_text(text: str) -> Tensor:
    """Text as UTF-8 bytes."""
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())


def unpack_text(data: Tensor) -> str:
    """Text from UTF-8 bytes."""
    return data.numpy().tobytes().decode()

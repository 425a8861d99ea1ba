"""A fitted model as one safetensors file with JSON in its header: no code runs when it is read.

Ids are stored as one block of UTF-8 text with offsets, so that a hundred thousand of them load in milliseconds.
Written under another name and renamed. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._files import replacing

FORMAT = "gramtower-model"
VERSION = 2  # version 1 had no inputs (what becomes of features), and a reason without its name


def write_model(path: Path, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Save a model; the file at ``path`` is replaced in one step and stays whole if anything fails."""
    from safetensors.torch import save_file

    head = {"format": FORMAT, "version": VERSION, **header}
    with replacing(path) as partial:
        save_file({k: t.contiguous() for k, t in tensors.items()}, partial, {"model": json.dumps(head)})


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
            header: dict[str, Any] = json.loads((file.metadata() or {})["model"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
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


def pack_ids(ids: NDArray[Any] | None) -> dict[str, Tensor]:
    """Ids as bytes and offsets."""
    if ids is None:
        return {}
    encoded = [str(key).encode() for key in ids.tolist()]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    text = np.frombuffer(b"".join(encoded) or b"\0", dtype=np.uint8)
    return {"text": torch.from_numpy(text.copy()), "offsets": torch.from_numpy(offsets)}


def unpack_ids(text: Tensor | None, offsets: Tensor | None) -> NDArray[Any] | None:
    """Ids from bytes and offsets."""
    if text is None or offsets is None:
        return None
    data, bounds = text.numpy().tobytes(), offsets.tolist()
    ids = np.empty(len(bounds) - 1, dtype=object)
    ids[:] = [data[a:b].decode() for a, b in itertools.pairwise(bounds)]
    return ids

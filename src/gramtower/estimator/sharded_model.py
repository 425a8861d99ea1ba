"""A model that several processes hold, written by all of them and read by one as if one had written it.

Rows of embeddings, of tables, of ids and of seen pairs come from their owners (training/shards_file.py). Checked by
tests/test_distributed_fit.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramtower.distributed.shards import Shards
from gramtower.estimator.model_file import FORMAT, KEY, VERSION
from gramtower.model.parameters import Parameters
from gramtower.training import shards_file

_RAGGED = {"seen": ("seen_columns", "seen_offsets"), "left": ("left_text", "left_offsets")}


def write_shards(
    path: Path, header: dict[str, Any], tensors: dict[str, Tensor], parameters: Parameters, shards: Shards
) -> None:
    """Write a model of several processes.

    Args:
        path: the main file; the others are written beside it.
        header: as for one process.
        tensors: as for one process, with own rows where they are left rows.
        parameters: of this process's towers.
        shards: who holds what.
    """
    stored = dict(tensors)
    rows: dict[str, str] = {name: name for name in ("left", "right") if name in tensors}
    rows |= {name: "left" for name in ("left_numbers",) if name in tensors}
    if "right" in tensors:
        stored["right"] = tensors["right"][shards.right.first : shards.right.stop]
    del stored["parameters"]
    for name, part in parameters.items():
        stored[f"parameters|{name}"] = part.cpu()
        if name in parameters.layout.owned:
            rows[f"parameters|{name}"] = "left" if name.startswith("left.") else "right"
    for values, offsets in _RAGGED.values():
        if offsets in stored:
            stored[f"{offsets}|counts"] = stored.pop(offsets).diff()
            rows[f"{offsets}|counts"] = "left"
            rows[values] = "left ragged"
    header = {"format": FORMAT, "version": VERSION, **header, "tensors": list(parameters)}
    shards_file.write(path, KEY, header, stored, rows, shards)


def read_shards(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A model that write_shards wrote, in the form that one process writes."""
    file = shards_file.Reader(path, KEY)
    tensors = {name: file.read(name) for name in file.names}
    for _, offsets in _RAGGED.values():
        if f"{offsets}|counts" in tensors:
            counts = tensors.pop(f"{offsets}|counts")
            tensors[offsets] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    names = file.header["tensors"]
    tensors["parameters"] = torch.cat([tensors.pop(f"parameters|{name}").reshape(-1) for name in names])
    file.close()
    return file.header, tensors

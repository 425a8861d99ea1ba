"""Tensors of a run in safetensors files: one file from one process, one from each of several, with an index.

The main file holds JSON, what all processes hold alike, and the first process's rows of tables; every other process
writes its rows beside it. The main file names the others and says which rows are where, so that any number of processes
can read what any number wrote, each reading its own rows alone. The main file is renamed into place after all others
are written: whoever is killed at any moment leaves the old set or the new one. Nothing is pickled.

Used for checkpoints (training/checkpoint.py) and models (estimator/model_file.py). Checked by tests/test_checkpoint.py
and tests/test_distributed_fit.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramtower._files import replacing
from gramtower.distributed.shards import Rows, Shards


def write(
    path: Path, key: str, header: dict[str, Any], tensors: dict[str, Tensor], rows: dict[str, str], shards: Shards
) -> None:
    """Write a set of tensors; the set at ``path`` is replaced in one step.

    Args:
        path: the main file.
        key: name of the header in the main file.
        header: what JSON can hold; the first process's is written.
        tensors: the same names in every process.
        rows: tensor → "left" or "right", for tensors that hold this process's rows of that side; "left ragged" for
            those whose rows have lengths of their own, which are read whole.
        shards: who holds which rows.
    """
    group = shards.group
    own = {name: tensor for name, tensor in tensors.items() if group.rank == 0 or name in rows}
    token = group.from_first(secrets.token_hex(4)) if group.size > 1 else ""
    names = [path.name, *(f"{path.name}.{token}.{rank}-of-{group.size}" for rank in range(1, group.size))]
    with group.together():
        path.parent.mkdir(parents=True, exist_ok=True)
        if group.rank > 0:
            _save(path.with_name(names[group.rank]), own, {})
    with group.together():
        if group.rank == 0:
            index = {"rows": rows, "left": shards.left.bounds, "right": shards.right.bounds, "files": names}
            _save(path, own, {key: json.dumps(header), "index": json.dumps(index)})
            for other in others(path):
                if other.name not in names:
                    other.unlink(missing_ok=True)


def _save(path: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
    from safetensors.torch import save_file

    with replacing(path) as partial:
        save_file({k: t.detach().contiguous().clone() for k, t in tensors.items()}, partial, texts)


class Reader:
    """A set of tensors on disk.

    Attributes:
        header: the JSON that was written.

    Raises:
        SafetensorError, KeyError, ValueError, OSError: if a file is missing, damaged or of another kind.
    """

    def __init__(self, path: Path, key: str, device: torch.device | str = "cpu") -> None:
        self._path, self._device = path, str(device)
        self._stack = contextlib.ExitStack()
        self._files: dict[int, Any] = {0: self._open(path.name)}
        texts = self._files[0].metadata() or {}
        self.header: dict[str, Any] = json.loads(texts[key])
        index = json.loads(texts["index"])
        self._names, self._rows = index["files"], index["rows"]
        self._bounds: dict[str, list[int]] = {side: index[side] for side in ("left", "right")}
        self.names = list(self._files[0].keys())

    def spread(self, name: str) -> bool:
        """Whether several processes wrote rows of a tensor."""
        return name in self._rows

    def read(self, name: str, own: Rows | None = None) -> Tensor:
        """A tensor, whole or the rows ``own`` of it."""
        if name not in self._rows:
            if own is None:
                whole: Tensor = self._files[0].get_tensor(name)
                return whole
            part: Tensor = self._files[0].get_slice(name)[own.first : own.stop]
            return part
        if self._rows[name].endswith(" ragged"):
            return torch.cat([self._file(number).get_tensor(name) for number in range(len(self._names))])
        bounds = self._bounds[self._rows[name]]
        first, stop = (0, bounds[-1]) if own is None else (own.first, own.stop)
        parts = [self._file(0).get_slice(name)[0:0]]
        for file, (a, b) in enumerate(itertools.pairwise(bounds)):
            low, high = max(a, first), min(b, stop)
            if low < high:
                parts.append(self._file(file).get_slice(name)[low - a : high - a])
        return parts[1] if len(parts) == 2 else torch.cat(parts)

    def total(self, side: str) -> int:
        """Rows of a side, of all processes."""
        return self._bounds[side][-1]

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def _open(self, name: str) -> Any:
        from safetensors import safe_open

        return self._stack.enter_context(safe_open(self._path.with_name(name), framework="pt", device=self._device))

    def _file(self, number: int) -> Any:
        if number not in self._files:
            self._files[number] = self._open(self._names[number])
        return self._files[number]


def others(path: Path) -> list[Path]:
    """The files beside a main file that other processes wrote."""
    return sorted(path.parent.glob(f"{path.name}.*-of-*"))


def remove(path: Path) -> None:
    """Remove a main file and those beside it."""
    path.unlink(missing_ok=True)
    for other in others(path):
        other.unlink(missing_ok=True)

"""Tensors of a run on disk: one file for each process, with an index. Nothing is pickled.

The main file has JSON, the replicated tensors, and the first process's rows of tables; every other process writes its
rows to a file next to it. The main file lists the others and the rows of each, so that any number of processes can read
files of any number, each reading only its local rows. The main file is renamed into place after all others are written:
an interruption leaves the old set or the new one. Each file has checksums (tensors.py).

Used for checkpoints (training/checkpoint.py) and models (model/model_file.py).
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramtower._util import tensors as _tensors
from gramtower._util.files import build
from gramtower._util.tensors import Damaged, TensorFile
from gramtower.distributed.shards import Rows, Shards

_THREADS = 2
_SIDES = ("left", "right", "left ragged")


@dataclass
class Index:
    """The rows in each file."""

    rows: dict[str, str]  # tensor → the side whose rows it holds; "left ragged" if rows have lengths of their own
    left: list[int]  # first left rows of the processes, and their number
    right: list[int]  # the same for right rows
    files: list[str]  # names of the files, the main one first


def write(
    path: Path,
    kind: tuple[str, int],
    header: Mapping[str, object],
    tensors: dict[str, Tensor],
    rows: dict[str, str],
    shards: Shards,
) -> None:
    """Write a set of tensors; the set at ``path`` is replaced atomically."""
    group = shards.group
    local = {name: tensor for name, tensor in tensors.items() if group.rank == 0 or name in rows}
    token = group.from_first(secrets.token_hex(4)) if group.size > 1 else ""
    names = [path.name, *(f"{path.name}.{token}.{rank}-of-{group.size}" for rank in range(1, group.size))]
    with group.together():
        path.parent.mkdir(parents=True, exist_ok=True)
        if group.rank > 0:
            _tensors.write(path.with_name(names[group.rank]), *kind, {"file": names[group.rank]}, local)
    with group.together():
        if group.rank == 0:
            index = Index(rows, list(shards.left.bounds), list(shards.right.bounds), names)
            _tensors.write(path, *kind, {"content": header, "index": asdict(index)}, local)
            for other in others(path):
                if other.name not in names:
                    other.unlink(missing_ok=True)


class Reader:
    """A set of tensors on disk.

    Attributes:
        header: the JSON that was written.
        shapes: name → shape, of all processes' rows together; None for the rows of ragged ones.
        dtypes: name → type.
    """

    def __init__(self, path: Path, kind: tuple[str, int], device: torch.device | str = "cpu") -> None:
        self._path, self._kind, self._device = path, kind, torch.device(device)
        self._stack = ExitStack()
        main = TensorFile(path, *kind)
        self._files = {0: main}
        self._stack.callback(main.close)
        if set(main.header) != {"content", "index"} or type(main.header["content"]) is not dict:
            raise Damaged(f"{path}: got a header of {', '.join(main.header)[:60]}, expected content and index")
        self.header: dict[str, Any] = main.header["content"]
        self._index = index = build(f"{path}: index", Index, main.header["index"])
        self._bounds = {"left": index.left, "right": index.right}
        self._check_index()
        self.dtypes = main.dtypes
        self.shapes: dict[str, tuple[int | None, ...]] = dict(main.shapes)
        for name, side in index.rows.items():
            rows = None if side == "left ragged" else self._bounds[side][-1]
            self.shapes[name] = (rows, *main.shapes[name][1:])
            self._check_rows(main, 0, name)

    def spread(self, name: str) -> bool:
        """Whether several processes wrote rows of a tensor."""
        return name in self._index.rows

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        """Read a tensor, or ``rows`` of it."""
        files = range(len(self._index.files))
        if not self.spread(name):
            found = self._file(0).read(name, *(() if rows is None else (rows.first, rows.stop)))
        elif self._index.rows[name] == "left ragged":
            found = torch.cat([self._file(number).read(name) for number in files])
        else:
            bounds = self._bounds[self._index.rows[name]]
            first, stop = (0, bounds[-1]) if rows is None else (rows.first, rows.stop)
            parts = [self._file(0).read(name, 0, 0)]
            for file, (a, b) in enumerate(itertools.pairwise(bounds)):
                low, high = max(a, first), min(b, stop)
                if low < high:
                    parts.append(self._file(file).read(name, low - a, high - a))
            found = parts[1] if len(parts) == 2 else torch.cat(parts)
        return found.to(self._device)

    @contextmanager
    def reading(self) -> Iterator[Callable[[str], Tensor]]:
        """Read all tensors in a few threads while the block runs, small ones first.

        Yields a function that waits for one tensor; the end of the block waits for all. Checksums cost little time this
        way, because numpy and zlib release the GIL.
        """
        for number in range(len(self._index.files)):
            self._file(number)
        names = sorted(self.shapes, key=lambda name: math.prod(size or 0 for size in self.shapes[name]))
        with ThreadPoolExecutor(_THREADS) as pool:
            jobs = {name: pool.submit(self.read, name) for name in names}
            yield lambda name: jobs[name].result()
            for job in jobs.values():
                job.result()

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def _check_index(self) -> None:
        index, names = self._index, self._files[0].shapes
        for side, bounds in self._bounds.items():
            rising = all(a <= b for a, b in itertools.pairwise(bounds))
            if len(bounds) != len(index.files) + 1 or bounds[0] != 0 or not rising:
                given = f"{side} rows of the files {bounds[:8]}"
                raise Damaged(f"{self._path}: got {given}, expected numbers that rise from 0")
        if len(set(index.files)) < len(index.files) or any(not _plain(name) for name in index.files):
            raise Damaged(f"{self._path}: got files {index.files[:8]}, expected distinct names in the same folder")
        for name, side in index.rows.items():
            if name not in names or not names[name] or side not in _SIDES:
                raise Damaged(f"{self._path}: got rows {side!r} of {name!r}, expected rows of a tensor of the file")

    def _check_rows(self, file: TensorFile, number: int, name: str) -> None:
        shape, full, side = file.shapes.get(name, ()), self.shapes[name], self._index.rows[name]
        bounds = self._bounds["left" if side == "left ragged" else side]
        count = None if side == "left ragged" else bounds[number + 1] - bounds[number]
        same = len(shape) == len(full) and shape[1:] == full[1:] and file.dtypes[name] == self.dtypes[name]
        if not same or count not in (None, shape[0]):
            raise Damaged(f"{self._path}: got {name} of shape {shape} in file {number}, expected {(count, *full[1:])}")

    def _file(self, number: int) -> TensorFile:
        if number not in self._files:
            name = self._index.files[number]
            file = TensorFile(self._path.with_name(name), *self._kind)
            self._stack.callback(file.close)
            if file.header != {"file": name} or set(file.shapes) != set(self._index.rows):
                raise Damaged(f"{self._path.with_name(name)} does not belong to {self._path}")
            for tensor in self._index.rows:
                self._check_rows(file, number, tensor)
            self._files[number] = file
        return self._files[number]


def _plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def others(path: Path) -> list[Path]:
    """The files of other processes next to a main file."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.\d+-of-\d+")
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    return sorted(other for other in there if name.fullmatch(other.name))


def remove(path: Path) -> None:
    """Remove a main file and the files of other processes."""
    path.unlink(missing_ok=True)
    for other in others(path):
        other.unlink(missing_ok=True)

"""A folder of pairs cut by left entity, from which each process of a fit reads its own part and nothing else.

    manifest.json            shape, counts, and which rows are in which part
    part-00000.safetensors   offsets, columns and labels of the part's rows, weights and held-out pairs if any, left ids
    right.safetensors        right ids

Parts hold about equal work: pairs plus tower work. A process of N takes a run of whole parts, so there must be at least
N. Left rows keep the order of the Interactions that were written, so that a fit is the same for any N. Files are
written first and the manifest last, by renaming. Checked by tests/test_partition.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower._files import replacing, write_text
from gramtower.data.interactions import Interactions
from gramtower.data.packing import pack_ids, unpack_ids
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Rows, Shards, balanced, entity_costs

MANIFEST, _RIGHT = "manifest.json", "right.safetensors"
_FORMAT, _VERSION = "gramtower-partition", 1
_ROW_WORK = 200.0  # tower work of an entity in units of a pair's, for the default towers


@dataclass(frozen=True)
class Part:
    """What one process reads of a folder.

    Attributes:
        matrix: own left rows × all right columns.
        weights: of the pairs, or None.
        held_out: pairs to validate on, in the same form, or None.
        left_ids: ids of the own left rows.
        folder: where it was read from.
        shards: who holds what.
        pairs: number of pairs of all processes.
        held_out_pairs: number of held-out pairs of all processes, or None.
    """

    matrix: sp.csr_matrix
    weights: NDArray[np.float32] | None
    held_out: sp.csr_matrix | None
    left_ids: NDArray[Any]
    folder: Path
    shards: Shards
    pairs: int
    held_out_pairs: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of all processes."""
        return self.shards.left.total, self.shards.right.total

    def __len__(self) -> int:
        return self.pairs

    def right_ids(self, own: bool = False) -> NDArray[Any]:
        """Ids of all right entities, or of the own ones."""
        rows = self.shards.right
        tensors = _read(self.folder / _RIGHT)
        ids = unpack_ids(tensors)
        assert ids is not None
        return ids[rows.first : rows.stop] if own else ids


def write_partition(
    pairs: Interactions,
    folder: str | Path,
    parts: int,
    held_out: Interactions | None = None,
    row_work: float = _ROW_WORK,
) -> dict[str, Any]:
    """Write pairs as a folder of parts; returns the manifest.

    Args:
        pairs: what is learned from.
        folder: a new or empty folder, or one that holds an earlier partition, which is replaced.
        parts: how many; at least as many as there will ever be processes.
        held_out: pairs of the same entities to validate on.
        row_work: tower work of a left entity in units of one pair's, for even parts.
    """
    folder = Path(folder)
    check.count("parts", parts)
    if held_out is not None and held_out.shape != pairs.shape:
        check.fail("held_out", f"shape {held_out.shape}", f"shape {pairs.shape}: pairs of the same entities")
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        check.fail("folder", f"{folder}, which holds other files", "a new or empty folder, or an earlier partition")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / MANIFEST, *folder.glob("part-*.safetensors"), folder / _RIGHT):
        old.unlink(missing_ok=True)
    counts = np.diff(pairs.matrix.indptr)
    bounds = balanced(entity_costs(counts, row_work), parts)
    listed = []
    for number in range(parts):
        first, stop = bounds[number : number + 2]
        name = f"part-{number:05d}.safetensors"
        tensors = _rows(pairs.matrix, first, stop, "")
        if pairs.weights is not None:
            span = slice(int(pairs.matrix.indptr[first]), int(pairs.matrix.indptr[stop]))
            tensors["weights"] = torch.from_numpy(pairs.weights[span].copy())
        if held_out is not None:
            tensors |= _rows(held_out.matrix, first, stop, "held_out_")
        tensors |= {f"left_{key}": t for key, t in pack_ids(pairs.left_ids[first:stop]).items()}
        _write(folder / name, tensors)
        listed.append({"file": name, "rows": [int(first), int(stop)], "pairs": int(counts[first:stop].sum())})
    _write(folder / _RIGHT, pack_ids(pairs.right_ids))
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "shape": list(pairs.shape),
        "pairs": len(pairs),
        "held_out": None if held_out is None else len(held_out),
        "weights": pairs.weights is not None,
        "left": pairs.left_name,
        "right": pairs.right_name,
        "parts": listed,
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def is_partition(path: Path) -> bool:
    """Whether a path is a folder that write_partition made."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        ValueError: if there is none, or it is of another kind or a later version.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"folder: {folder} is not a partition ({error}); gramtower partition makes one") from error
    if manifest.get("format") != _FORMAT or manifest.get("version") != _VERSION:
        given = f"{manifest.get('format')} version {manifest.get('version')}"
        check.fail("folder", f"{folder} with {given}", f"{_FORMAT} version {_VERSION}")
    return manifest


def read_part(folder: str | Path, group: Group = SINGLE) -> Part:
    """This process's part of a folder; one process alone reads all of it.

    Raises:
        ValueError: in every process, if the folder is not a partition, is damaged or has too few parts.
    """
    folder = Path(folder)
    with group.together():
        manifest = read_manifest(folder)
        listed = manifest["parts"]
        if len(listed) < group.size:
            check.fail("folder", f"{len(listed)} parts in {folder}", f"at least {group.size}, one for each process")
        costs = [part["pairs"] + _ROW_WORK * (part["rows"][1] - part["rows"][0]) for part in listed]
        cuts = balanced(costs, group.size)
        own = listed[cuts[group.rank] : cuts[group.rank + 1]]
        ends = [*(part["rows"][0] for part in listed), manifest["shape"][0]]
        left = Rows(tuple(ends[cut] for cut in cuts), group.rank)
        right = Rows(balanced(np.ones(manifest["shape"][1]), group.size), group.rank)
        tensors = [_read(folder / part["file"]) for part in own]
        n = manifest["shape"][1]
        ids = [unpack_ids(t, "left_") for t in tensors or [_read(folder / listed[0]["file"])]]
        part = Part(
            _stack(tensors, "", n, left.count),
            np.concatenate([t["weights"].numpy() for t in tensors]) if manifest["weights"] and tensors else None,
            None if manifest["held_out"] is None else _stack(tensors, "held_out_", n, left.count),
            np.concatenate([x for x in ids if x is not None])[: left.count],  # of no part, none of the first's
            folder,
            Shards(group, left, right),
            manifest["pairs"],
            manifest["held_out"],
        )
    return part


def _rows(matrix: sp.csr_matrix, first: int, stop: int, prefix: str) -> dict[str, Tensor]:
    offsets = matrix.indptr[first : stop + 1].astype(np.int64)
    span = slice(int(offsets[0]), int(offsets[-1]))
    return {
        f"{prefix}offsets": torch.from_numpy(offsets - offsets[0]),
        f"{prefix}columns": torch.from_numpy(matrix.indices[span].astype(np.int32)),
        f"{prefix}labels": torch.from_numpy(matrix.data[span].astype(np.float32)),
    }


def _stack(tensors: list[dict[str, Tensor]], prefix: str, n: int, rows: int) -> sp.csr_matrix:
    counts = [np.diff(t[f"{prefix}offsets"].numpy()) for t in tensors]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))])
    columns = [np.empty(0, np.int32), *(t[f"{prefix}columns"].numpy() for t in tensors)]
    labels = [np.empty(0, np.float32), *(t[f"{prefix}labels"].numpy() for t in tensors)]
    return sp.csr_matrix((np.concatenate(labels), np.concatenate(columns), offsets), shape=(rows, n))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    with replacing(path) as partial:
        save_file(tensors, partial)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"folder: {path} is missing or damaged ({error}); make the partition anew") from error

"""Partitions: folders of pairs split by left entity, of which each process of a fit reads only its shard.

    manifest.json                  shape, counts, which rows are in which part, the names of the files, a checksum
    part-00000-TOKEN.safetensors   offsets, columns and labels of the part's rows, weights and held-out pairs if any,
                                   left ids
    right-TOKEN.safetensors        right ids

Parts have about equal work: pairs plus tower work. Each of N processes takes consecutive whole parts, so there must be
at least N. Left rows keep their order, so a fit is the same for any N. A new partition in the same folder gets new file
names, the manifest is replaced atomically, and then the old files are removed: an interruption leaves the old partition
or the new one. Files have checksums (tensors.py) and are checked against the manifest.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import tensors as _tensors
from gramtower._util.files import as_path, build, is_left_over, write_text
from gramtower.data.ids import Ids, pack_ids, unpack_ids
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import pattern
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Rows, Shards, balanced, entity_costs

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "gramtower-partition", 2
_KIND = ("gramtower-part", _VERSION)
_FILE_NAME = re.compile(r"(part-\d+|right)-[0-9a-f]{8}\.safetensors")
_TYPES = {"offsets": torch.int64, "columns": torch.int32, "labels": torch.float32}
_ROW_WORK = 200.0  # tower work of an entity in units of a pair's, for the default towers


@dataclass(frozen=True)
class Listed:
    """A part in the manifest: its file, its left rows (first, stop) and their number of pairs."""

    file: str
    rows: list[int]
    pairs: int


@dataclass(frozen=True)
class Manifest:
    """The content of a partition."""

    format: str  # the name of the format
    version: int  # version of the format
    shape: list[int]  # numbers of left and right entities
    pairs: int  # number of pairs
    held_out: int | None  # number of held-out pairs, or None
    weights: bool  # whether pairs have weights
    left: str  # name of the left column
    right: str  # name of the right column
    ids: str  # file of the right ids
    parts: list[Any]  # the parts, in order of their rows


@dataclass(frozen=True)
class Shard:
    """The rows of a partition that one process reads."""

    matrix: sp.csr_matrix  # local left rows × all right columns
    weights: NDArray[np.float32] | None  # weights of the pairs, or None
    held_out: sp.csr_matrix | None  # validation pairs in the same form, or None
    left_ids: NDArray[Any]  # ids of the local left rows
    folder: Path  # the folder of the partition
    shards: Shards  # the row ranges of all processes
    pairs: int  # number of pairs of all processes
    held_out_pairs: int | None = None  # number of held-out pairs of all processes, or None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of all processes."""
        return self.shards.left.total, self.shards.right.total

    def __len__(self) -> int:
        return self.pairs

    def right_ids(self) -> Ids:
        """Ids of all right entities."""
        with _refusing(self.folder):
            return _ids(_read(self.folder, read_manifest(self.folder).ids), "", self.shards.right.total)


def write_partition(
    pairs: Interactions,
    folder: str | Path,
    parts: int,
    held_out: Interactions | None = None,
    row_work: float = _ROW_WORK,
) -> Manifest:
    """Write pairs as a folder of parts; returns the manifest.

    Args:
        pairs: the training pairs.
        folder: a new or empty folder, or one with an earlier partition, which is replaced.
        parts: number of parts; at least the largest number of processes that will read them.
        held_out: validation pairs of the same entities.
        row_work: tower work of a left entity, in units of the work of one pair.
    """
    folder = as_path(folder)
    check.count("parts", parts)
    if held_out is not None and held_out.shape != pairs.shape:
        check.fail("held_out", f"shape {held_out.shape}", f"shape {pairs.shape}: pairs of the same entities")
    if folder.exists() and not folder.is_dir():
        check.fail("folder", f"{folder}, which is a file", "a new or empty folder, or an earlier partition")
    there = [path.name for path in folder.iterdir()] if folder.exists() else []
    others = [name for name in there if name != MANIFEST and not _FILE_NAME.fullmatch(name) and not is_left_over(name)]
    known = _format_of(folder)
    if known not in (None, _FORMAT) or (others and known != _FORMAT):
        given = f"{folder}, which holds other files such as {[*others, MANIFEST][0]}"
        check.fail("folder", given, "a new or empty folder, or an earlier partition")
    token = secrets.token_hex(4)
    counts = np.diff(pairs.matrix.indptr)
    bounds = balanced(entity_costs(counts, row_work), parts)
    listed = []
    for number, (first, stop) in enumerate(itertools.pairwise(map(int, bounds))):
        tensors = _rows(pairs.matrix, first, stop, "")
        if pairs.weights is not None:
            span = slice(int(pairs.matrix.indptr[first]), int(pairs.matrix.indptr[stop]))
            tensors["weights"] = torch.from_numpy(pairs.weights[span].copy())
        if held_out is not None:
            tensors |= _rows(held_out.matrix, first, stop, "held_out_")
        tensors |= {f"left_{key}": t for key, t in pack_ids(pairs.left_ids[first:stop]).items()}
        part = Listed(f"part-{number:05d}-{token}.safetensors", [first, stop], int(counts[first:stop].sum()))
        _tensors.write(folder / part.file, *_KIND, asdict(part), tensors)
        listed.append(asdict(part))
    ids = f"right-{token}.safetensors"
    _tensors.write(folder / ids, *_KIND, {"file": ids}, pack_ids(pairs.right_ids))
    held = None if held_out is None else len(held_out)
    manifest = Manifest(
        _FORMAT, _VERSION, list(pairs.shape), len(pairs), held, pairs.weights is not None, pairs.left_name,
        pairs.right_name, ids, listed,
    )  # fmt: skip
    write_text(folder / MANIFEST, json.dumps(asdict(manifest) | {"checksum": _checksum(manifest)}, indent=1) + "\n")
    for old in folder.iterdir():
        if _FILE_NAME.fullmatch(old.name) and token not in old.name:
            old.unlink(missing_ok=True)
    return manifest


def is_partition(path: Path) -> bool:
    """Whether a path is a partition."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a partition."""
    try:
        plain = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except ConnectionError:  # which says nothing about the file
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"folder: {folder} is not a partition ({error}); gramtower partition makes one") from error
    found = plain if isinstance(plain, dict) else {}
    if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
        given = f"{str(found.get('format'))[:40]} version {str(found.get('version'))[:20]}"
        check.fail("folder", f"{folder} with {given}", f"{_FORMAT} version {_VERSION}")
    with _refusing(folder):
        checksum = found.pop("checksum", None)
        manifest = build(MANIFEST, Manifest, found)
        if checksum != _checksum(manifest):
            raise ValueError(f"{MANIFEST} does not match its checksum")
        _check_manifest(manifest)
    return manifest


def read_part(folder: str | Path, group: Group = SINGLE) -> Shard:
    """Read this process's shard of a partition; a single process reads all of it."""
    folder = as_path(folder)
    with group.together():
        manifest = read_manifest(folder)
        listed = [build("parts", Listed, part) for part in manifest.parts]
        m, n = manifest.shape
        if len(listed) < group.size:
            check.fail("folder", f"{len(listed)} parts in {folder}", f"at least {group.size}, one for each process")
        cuts = balanced([part.pairs + _ROW_WORK * (part.rows[1] - part.rows[0]) for part in listed], group.size)
        ends = [*(part.rows[0] for part in listed), m]
        left = Rows(tuple(ends[cut] for cut in cuts), group.rank)
        right = Rows(balanced(np.ones(n), group.size), group.rank)
        with _refusing(folder):
            own = listed[cuts[group.rank] : cuts[group.rank + 1]]
            # without an own part, another one says of which type ids are
            read = [_read_listed(folder, manifest, part) for part in own or listed[:1]]
        local = [tensors for tensors, _ in read] if own else []
        shard = Shard(
            _stack(local, "", n, left.count),
            np.concatenate([t["weights"].numpy() for t in local]) if manifest.weights and local else None,
            None if manifest.held_out is None else _stack(local, "held_out_", n, left.count),
            np.concatenate([ids for _, ids in read])[: left.count],
            folder,
            Shards(group, left, right),
            manifest.pairs,
            manifest.held_out,
        )
    return shard


def _check_manifest(manifest: Manifest) -> None:
    if len(manifest.shape) != 2 or not all(1 <= size < 2**31 for size in manifest.shape):
        check.fail("shape", manifest.shape[:4], "two numbers of entities")
    parts = [build("parts", Listed, part) for part in manifest.parts]
    names = [manifest.ids, *(part.file for part in parts)]
    wrong = next((name for name in names if not _FILE_NAME.fullmatch(name)), None)
    if wrong is not None or len(set(names)) < len(names):
        given = f"a file {(names[0] if wrong is None else wrong)[:80]!r}"
        check.fail("parts", given, "distinct names such as part-00000-0a1b2c3d.safetensors")
    at, total = 0, sum(part.pairs for part in parts)
    for part in parts:
        if len(part.rows) != 2 or part.rows[0] != at or part.rows[1] < at or part.pairs < 0:
            check.fail("parts", f"rows {part.rows[:4]} with {part.pairs} pairs", f"rows from {at} on")
        at = part.rows[1]
    if at != manifest.shape[0] or total != manifest.pairs or (manifest.held_out or 0) < 0:
        check.fail("parts", f"{at} rows and {total} pairs in the parts", f"{manifest.shape[0]} and {manifest.pairs}")


def _read_listed(folder: Path, manifest: Manifest, part: Listed) -> tuple[dict[str, Tensor], Ids]:
    """Read the tensors and ids of a part, checked against the manifest."""
    tensors = _read(folder, part.file, asdict(part))
    rows = part.rows[1] - part.rows[0]
    pairs = [""] if manifest.held_out is None else ["", "held_out_"]
    dtypes = {f"{p}{name}": dtype for p in pairs for name, dtype in _TYPES.items()}
    dtypes |= {"weights": torch.float32} if manifest.weights else {}
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith("left_")}
    if {name: tensor.dtype for name, tensor in found.items()} != dtypes or any(t.dim() != 1 for t in found.values()):
        check.fail(part.file, f"tensors {', '.join(found)[:80]}", f"{', '.join(dtypes)} of their types")
    for p in pairs:
        offsets, columns, labels = (found[f"{p}{name}"].numpy() for name in _TYPES)
        pattern(f"{part.file}: {p}columns", columns, offsets, (rows, manifest.shape[1]))
        if len(labels) != len(columns) or (not p and len(columns) != part.pairs):
            check.fail(part.file, f"{len(columns)} pairs and {len(labels)} labels", f"{part.pairs} of each")
        check.finite(f"{part.file}: {p}labels", labels)
    if manifest.weights:
        check.weights(f"{part.file}: weights", found["weights"].numpy(), part.pairs)
    return tensors, _ids(tensors, "left_", rows)


def _ids(tensors: dict[str, Tensor], prefix: str, rows: int) -> Ids:
    ids = unpack_ids(tensors, prefix)
    if ids is None or len(ids) != rows:
        check.fail(f"{prefix}ids", "none" if ids is None else f"{len(ids)} ids", f"{rows} ids")
    return ids


def _rows(matrix: sp.csr_matrix, first: int, stop: int, prefix: str) -> dict[str, Tensor]:
    offsets = matrix.indptr[first : stop + 1].astype(np.int64)
    span = slice(int(offsets[0]), int(offsets[-1]))
    return {
        f"{prefix}offsets": torch.from_numpy(offsets - offsets[0]),
        f"{prefix}columns": torch.from_numpy(matrix.indices[span].astype(np.int32)),
        f"{prefix}labels": torch.from_numpy(matrix.data[span].astype(np.float32)),
    }


def _stack(tensors: list[dict[str, Tensor]], prefix: str, n: int, rows: int) -> sp.csr_matrix:
    def joined(name: str, dtype: type) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *(t[prefix + name].numpy() for t in tensors)])

    counts = [np.diff(t[f"{prefix}offsets"].numpy()) for t in tensors]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *counts]))])
    return sp.csr_matrix((joined("labels", np.float32), joined("columns", np.int32), offsets), shape=(rows, n))


def _read(folder: Path, name: str, header: dict[str, object] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a file, whose header must match the manifest."""
    with closing(_tensors.TensorFile(folder / name, *_KIND)) as file:
        if file.header != (header or {"file": name}):
            check.fail(name, "the header of another file", "that of its place in the manifest")
        return {key: file.read(key) for key in file.shapes}


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except ConnectionError:  # which says nothing about the file
        raise
    except (ValueError, OSError) as error:
        raise ValueError(f"folder: {folder} is missing or damaged ({error}); write the partition again") from error


def _checksum(manifest: Manifest) -> int:
    return zlib.crc32(json.dumps(asdict(manifest), sort_keys=True).encode())


def _format_of(folder: Path) -> object:
    """The format that the manifest of a folder states; None without a readable manifest."""
    try:
        plain = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return plain.get("format", "other") if isinstance(plain, dict) else "other"

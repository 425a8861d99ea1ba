"""JSON and tensors in one safetensors file with checksums: the format of models, checkpoints and partitions.

    metadata   kind and version of the content; a checksum for each MiB of each tensor; one over all of this and over
               the names, types and shapes of the tensors
    "header"   the JSON as a tensor of bytes, so that its length is not limited
    others     the caller's tensors

Tensors are memory-mapped and compared with their checksums before they are returned; if only some rows are read, only
the mebibytes with these rows are compared. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util.files import replacing

CHUNK = 1 << 20  # bytes that one checksum covers
_ROWS, _HEADER = 128, "header"
_TYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class Damaged(ValueError):
    """A file that differs from what was written, or is of another kind."""


def write(path: Path, kind: str, version: int, header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write JSON and tensors; the file at ``path`` is replaced atomically."""
    from safetensors.torch import save_file

    text = np.frombuffer(json.dumps(header, ensure_ascii=False).encode(), dtype=np.uint8)
    stored = _apart(tensors) | {_HEADER: torch.from_numpy(text.copy())}
    sums = {name: [checksum(chunk) for chunk in _chunks(tensor)] for name, tensor in stored.items()}
    content = {name: [_NAMES[tensor.dtype], list(tensor.shape), sums[name]] for name, tensor in stored.items()}
    facts = {"kind": kind, "version": str(version), "checksums": json.dumps(sums)}
    with replacing(path) as partial:
        save_file(stored, partial, facts | {"checksum": _seal(kind, version, content)})


class TensorFile:
    """An open file that :func:`write` wrote.

    Attributes:
        header: the JSON, parsed and compared with its checksum.
        shapes: name → shape of the tensors.
        dtypes: name → type of the tensors.
    """

    def __init__(self, path: Path, kind: str, version: int) -> None:
        from safetensors import SafetensorError, safe_open

        self._path, self._stack = path, ExitStack()
        if path.stat() and not path.is_file():
            raise Damaged(f"{path} is no file")
        with path.open("rb"):  # the system's own error if it cannot be read
            pass
        try:
            self._file = self._stack.enter_context(safe_open(path, framework="pt"))
            facts = self._file.metadata() or {}
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
            content = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{path} is no safetensors file, or not all of one") from error
        self._check_kind(facts, kind, version)
        self._sums = self._checksums(facts, content)
        summed = {name: [dtype, list(shape), self._sums[name]] for name, (dtype, shape) in content.items()}
        if facts.get("checksum") != _seal(kind, version, summed):
            raise Damaged(f"{path}: its table of contents does not match its checksum")
        unknown = [dtype for dtype, _ in content.values() if dtype not in _TYPES]
        if unknown or _HEADER not in content or content[_HEADER][0] != "U8":
            raise Damaged(f"{path}: got tensors of type {', '.join(unknown) or 'other than those written'}")
        self.header = _parsed(path, self.read(_HEADER).numpy().tobytes())
        del content[_HEADER]
        self.shapes = {name: shape for name, (_, shape) in content.items()}
        self.dtypes = {name: _TYPES[dtype] for name, (dtype, _) in content.items()}

    def read(self, name: str, first: int = 0, stop: int | None = None) -> Tensor:
        """Read a tensor, or rows ``first:stop`` of it, and compare its checksums."""
        tensor: Tensor = self._file.get_tensor(name)
        part = tensor if stop is None else tensor[first:stop]
        if tensor.numel() and part.numel():
            row = tensor.element_size() * (tensor.numel() // max(1, len(tensor)) if tensor.dim() else 1)
            span = (0, tensor.numel() * tensor.element_size()) if stop is None else (first * row, stop * row)
            low, high = span[0] // CHUNK, -(-span[1] // CHUNK)
            if [checksum(chunk) for chunk in _chunks(tensor)[low:high]] != self._sums[name][low:high]:
                raise Damaged(f"{self._path}: tensor {name!r} does not match its checksum")
        return part

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        self._stack.close()

    def _check_kind(self, facts: dict[str, str], kind: str, version: int) -> None:
        if facts.get("kind") != kind:
            raise Damaged(f"{self._path} is no {kind}")
        found = facts.get("version", "")
        if found != str(version):
            if found.isascii() and found.isdigit() and len(found) < 9 and int(found) > version:
                raise Damaged(
                    f"{self._path} was written by a later version (format {found}, this reads {version}); "
                    "upgrade gramtower"
                )
            raise Damaged(f"{self._path} is of another version of the format, {found[:20]!r}; this reads {version}")

    def _checksums(
        self, facts: dict[str, str], content: dict[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, list[int]]:
        sums = _parsed(self._path, facts.get("checksums", "").encode())
        if set(sums) != set(content):
            raise Damaged(f"{self._path}: got checksums of other tensors than it holds")
        for name, (dtype, shape) in content.items():
            size = _TYPES[dtype].itemsize if dtype in _TYPES else 1
            for length in shape:
                size *= length
            if type(sums[name]) is not list or len(sums[name]) != -(-size // CHUNK):
                raise Damaged(f"{self._path}: got other checksums of tensor {name!r} than its size asks for")
        return sums


def checksum(data: NDArray[np.uint8]) -> int:
    """The checksum of at most ``CHUNK`` bytes.

    CRC-32 of the bytes; for a whole chunk CRC-32 of the sums of its 64-bit words by rows and by columns, which finds
    every change of up to three words and takes a quarter of the time.
    """
    if len(data) < CHUNK:
        return zlib.crc32(data.data)
    words = data.view(np.uint64).reshape(_ROWS, -1)
    return zlib.crc32(words.sum(0), zlib.crc32(words.sum(1)))


def _chunks(tensor: Tensor) -> list[NDArray[np.uint8]]:
    if not tensor.numel():
        return []
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each in memory of its own, as safetensors requires."""
    found: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in places or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        places.add(plain.untyped_storage().data_ptr())
        found[name] = plain
    return found


def _seal(kind: str, version: int, content: Mapping[str, object]) -> str:
    return str(zlib.crc32(json.dumps([kind, version, content], sort_keys=True).encode()))


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise Damaged(f"{path}: a key of its JSON occurs twice")
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: its JSON cannot be read ({error})") from error
    if type(parsed) is not dict:
        raise Damaged(f"{path}: its JSON is no object")
    return parsed


def digest_of(*values: object) -> str:
    """Return a digest of arrays, sparse matrices, tensors, ids and text: 16 digits, the same in every process."""
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        if sp.issparse(value):
            csr = value.tocsr()  # type: ignore[attr-defined]
            parts = [np.asarray(csr.shape), csr.indptr.astype(np.int64), csr.indices.astype(np.int64), csr.data]
        elif isinstance(value, torch.Tensor):
            parts = [value.detach().cpu().numpy()]
        else:
            parts = [np.asarray(value)]
        for part in parts:
            numbers = part.dtype.kind in "biufc"
            found.update(f"{part.shape}{part.dtype}".encode())
            if numbers:
                found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            else:
                found.update(repr(part.tolist()).encode(errors="replace"))
    return found.hexdigest()

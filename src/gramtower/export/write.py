"""A fitted model written for other programs, into a folder.

    onnx          left.onnx, right.onnx: the towers (export/networks.py)
    torchscript   left.pt, right.pt: the same for torch.jit.load
    numpy         left.npy, right.npy: the embeddings
    parquet       left.parquet, right.parquet: columns id and embedding, a list of fixed length
    faiss         right.faiss: a flat index of inner products; left.npy: what to search it with

With all but Parquet, left_ids.json and right_ids.json hold the ids in the order of the rows. export.json says what was
written, and for networks their inputs and how tables are encoded. Every file is replaced in one step. The export.json
of an earlier export is removed first and the new one is written last: a folder that has one holds all of one model.
Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramtower._util import checks as check
from gramtower._util.files import replacing, write_json, write_text
from gramtower._util.optional import need
from gramtower.data import frames
from gramtower.data.encoders import to_plain
from gramtower.export.networks import example, network_of
from gramtower.model.fitted import FittedModel
from gramtower.model.inputs import Inputs
from gramtower.model.side import Side

FORMATS = ("onnx", "torchscript", "numpy", "parquet", "faiss")
_OPSET, _LARGEST = 18, 2**31 - 2**20  # bytes that one file of ONNX can hold


def write_export(folder: Path, fitted: FittedModel, to: str) -> list[Path]:
    """Write a model into a folder, and say which files.

    Raises:
        ValueError: if the format is unknown, a package it needs is missing, or the towers are not there.
    """
    check.choice("to", to, FORMATS)
    if not fitted.shards.single:
        check.fail("model", f"one in {fitted.shards.group.size} processes", "a loaded model, in one")
    if folder.exists() and not folder.is_dir():
        check.fail("path", str(folder), "a folder, or a new name for one")
    _need(to)
    (folder / "export.json").unlink(missing_ok=True)
    sides: dict[str, dict[str, Any]] = {}
    files: list[Path] = []
    for side in (fitted.left, fitted.right):
        sides[side.name] = {"entities": len(side)}
        if to != "parquet" and side.ids is not None:
            files.append(folder / f"{side.name}_ids.json")
            write_text(files[-1], json.dumps(side.ids.tolist(), ensure_ascii=False))
        if to in ("onnx", "torchscript"):
            name, inputs = _write_network(folder, fitted, side, to)
            sides[side.name] |= inputs
        else:
            name = _EMBEDDINGS[to](folder, side)
        files.append(folder / name)
        sides[side.name] |= {"file": name, "ids": None if side.ids is None or to == "parquet" else files[-2].name}
    files.append(folder / "export.json")
    write_json(files[-1], {"format": "gramtower.export", "version": 1, "to": to, "dim": fitted.dim, "sides": sides})
    return files


def _write_network(folder: Path, fitted: FittedModel, side: Side, to: str) -> tuple[str, dict[str, Any]]:
    towers = fitted.known_towers("export its towers")
    network = network_of(towers.left if side.name == "left" else towers.right, side.inputs)
    given = example(network, side.inputs.width)
    name = f"{side.name}.{'onnx' if to == 'onnx' else 'pt'}"
    with replacing(folder / name) as partial, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if to == "onnx":
            _write_onnx(partial, network, given)
        else:
            torch.jit.trace(network, given).save(str(partial))  # type: ignore[no-untyped-call]
    return name, {"inputs": list(network.names), "parts": described_parts(side.inputs)}


def _write_onnx(path: Path, network: Any, given: tuple[torch.Tensor, ...]) -> None:
    size = sum(p.numel() * p.element_size() for p in network.parameters())
    if size > _LARGEST:
        check.fail(
            "to", f"'onnx' of {size / 2**30:.1f} GiB of weights", "towers below 2 GiB; or torchscript, or parquet"
        )
    batch = torch.export.Dim("batch")
    axes: list[Any] = [{0: batch} for _ in given]
    if len(given) == 2:
        length = torch.export.Dim("length")
        axes = [{0: batch, 1: length}] * 2
    noisy = logging.getLogger("torch.onnx")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        torch.onnx.export(
            network, given, str(path), dynamo=True, opset_version=_OPSET, input_names=list(network.names),
            output_names=["embedding"], dynamic_shapes=tuple(axes), external_data=False, verbose=False,
        )  # fmt: skip
    finally:
        noisy.setLevel(level)


def described_parts(inputs: Inputs) -> list[dict[str, Any]]:
    """The columns of the parts, and how tables become columns; scaling is in the network."""
    parts, first = [], 0
    for part in inputs.parts:
        one: dict[str, Any] = {"kind": part.kind, "first_column": first, "columns": part.width}
        if part.table is not None:
            one["table"] = [to_plain(encoder) | {"columns": encoder.width} for encoder in part.table.encoders]
        parts.append(one)
        first += part.width
    return parts


def _write_numpy(folder: Path, side: Side) -> str:
    with replacing(folder / f"{side.name}.npy") as partial, partial.open("wb") as file:
        np.save(file, side.embeddings.numpy(), allow_pickle=False)
    return f"{side.name}.npy"


def _write_parquet(folder: Path, side: Side) -> str:
    pl = frames.polars()
    ids = np.arange(len(side)) if side.ids is None else side.ids
    kind = pl.Int64 if ids.dtype.kind == "i" else pl.String
    table = pl.DataFrame(
        {
            "id": pl.Series("id", ids.tolist(), kind),
            "embedding": pl.Series(
                "embedding", side.embeddings.numpy(), pl.Array(pl.Float32, side.embeddings.shape[1])
            ),
        }
    )
    with replacing(folder / f"{side.name}.parquet") as partial:
        table.write_parquet(partial)
    return f"{side.name}.parquet"


def _write_faiss(folder: Path, side: Side) -> str:
    if side.name == "left":
        return _write_numpy(folder, side)
    faiss = need("faiss", "export --to faiss")
    index = faiss.IndexFlatIP(side.embeddings.shape[1])
    index.add(np.ascontiguousarray(side.embeddings.float().numpy()))
    with replacing(folder / "right.faiss") as partial:
        faiss.write_index(index, str(partial))
    return "right.faiss"


_EMBEDDINGS: dict[str, Callable[[Path, Side], str]] = {
    "numpy": _write_numpy, "parquet": _write_parquet, "faiss": _write_faiss,
}  # fmt: skip
_PACKAGES = {"onnx": ("onnx", "onnxscript"), "faiss": ("faiss",), "parquet": ("polars",)}


def _need(to: str) -> None:
    for package in _PACKAGES.get(to, ()):
        need(package, f"export --to {to}")

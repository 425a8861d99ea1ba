"""A fitted model written for other programs, into a folder.

    onnx          left.onnx, right.onnx: the towers
    torchscript   left.pt, right.pt: the same for torch.jit.load
    numpy         left.npy, right.npy: the embeddings
    parquet       left.parquet, right.parquet: columns id and embedding, a list of fixed length
    faiss         right.faiss: a flat index of inner products; left.npy: what to search it with

With all but Parquet, left_ids.json and right_ids.json hold the ids in the order of the rows. export.json says what was
written, and for networks their inputs and how tables are encoded. Every file is replaced in one step. The export.json
of an earlier export is removed first and the new one is written last: a folder that has one holds all of one model.
Nothing is pickled.

A tower as one network from features, as they come, to embeddings: scaling included, any number of rows.

    what the tower sees           inputs
    ids                           rows (batch), the row number of each entity
    a dense matrix                features (batch × width)
    anything else                 columns and values (batch × length): of each entity the columns with a value and these
                                  values, in any order; −1 fills up shorter rows. The columns of the parts follow one
                                  another: ids have the value 1 in their own, histories 1 in those of their entities,
                                  tables and matrices what they are encoded as; a dense matrix among them has all. An
                                  entity without a history gets the mean one of training.

Scaling is in float64 as in the model, the rest in float32. Cost of sparse rows: batch × length × width of the first
layer.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower._util.checks import need
from gramtower._util.files import replacing, write_json, write_text
from gramtower.data import frames
from gramtower.data.encoders import to_plain
from gramtower.data.pairs import MatrixLike
from gramtower.engine.towers.layers import InputLinear, split_first
from gramtower.model.feature_spec import JSON, MOST_DEVIATIONS, FeatureSpec, Part
from gramtower.model.fitted import FittedModel
from gramtower.model.side import Side

FORMATS = ("onnx", "torchscript", "numpy", "parquet", "faiss")
_OPSET, _LARGEST = 18, 2**31 - 2**20  # bytes that one file of ONNX can hold


def write_export(folder: Path, fitted: FittedModel, to: str) -> list[Path]:
    """Write a model into a folder, and say which files."""
    check.choice("to", to, FORMATS)
    fitted.need_whole()
    if folder.exists() and not folder.is_dir():
        check.fail("path", str(folder), "a folder, or a new name for one")
    for package in _PACKAGES.get(to, ()):
        need(package, f"export --to {to}")
    (folder / "export.json").unlink(missing_ok=True)
    sides: dict[str, dict[str, Any]] = {}
    files: list[Path] = []
    for side in fitted.sides:
        ids = None
        if to != "parquet" and side.ids is not None:
            ids = f"{side.name}_ids.json"
            files.append(folder / ids)
            write_text(files[-1], json.dumps(side.ids.tolist(), ensure_ascii=False))
        network = to in ("onnx", "torchscript")
        name, inputs = _write_network(folder, fitted, side, to) if network else (_EMBEDDINGS[to](folder, side), {})
        files.append(folder / name)
        sides[side.name] = {"entities": len(side), **inputs, "file": name, "ids": ids}
    files.append(folder / "export.json")
    write_json(files[-1], {"format": "gramtower.export", "version": 1, "to": to, "dim": fitted.dim, "sides": sides})
    return files


def _write_network(folder: Path, fitted: FittedModel, side: Side, to: str) -> tuple[str, JSON]:
    network = network_of(getattr(fitted.known_towers("export its towers"), side.name), side.inputs)
    names, given = _inputs(side.inputs)
    name = f"{side.name}.{'onnx' if to == 'onnx' else 'pt'}"
    with replacing(folder / name) as partial, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if to == "onnx":
            _write_onnx(partial, network, names, given)
        else:
            torch.jit.trace(network, given).save(str(partial))  # type: ignore[no-untyped-call]
    return name, {"inputs": names, "parts": described_parts(side.inputs)}


def _write_onnx(path: Path, network: nn.Module, names: list[str], given: tuple[Tensor, ...]) -> None:
    size = sum(p.numel() * p.element_size() for p in network.parameters())
    if size > _LARGEST:
        given_size = f"'onnx' of {size / 2**30:.1f} GiB of weights"
        check.fail("to", given_size, "towers below 2 GiB; or torchscript, or parquet")
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    axes: list[Any] = [{0: batch}] if len(given) == 1 else [{0: batch, 1: length}] * 2
    noisy = logging.getLogger("torch.onnx")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        torch.onnx.export(
            network, given, str(path), dynamo=True, opset_version=_OPSET, input_names=names,
            output_names=["embedding"], dynamic_shapes=tuple(axes), external_data=False, verbose=False,
        )  # fmt: skip
    finally:
        noisy.setLevel(level)


def described_parts(inputs: FeatureSpec) -> list[JSON]:
    """The columns of the parts, and how tables become columns; scaling is in the network."""
    parts = []
    for part, span in inputs.spans:
        one: dict[str, Any] = {"kind": part.kind, "first_column": span.start, "columns": part.width}
        if part.table is not None:
            one["table"] = [to_plain(encoder) | {"columns": encoder.width} for encoder in part.table.encoders]
        parts.append(one)
    return parts


def _write_numpy(folder: Path, side: Side) -> str:
    with replacing(folder / f"{side.name}.npy") as partial, partial.open("wb") as file:
        np.save(file, side.embeddings.numpy(), allow_pickle=False)
    return f"{side.name}.npy"


def _write_parquet(folder: Path, side: Side) -> str:
    pl = frames.polars()
    ids = np.arange(len(side)) if side.ids is None else side.ids
    kind = pl.Int64 if ids.dtype.kind == "i" else pl.String
    rows = pl.Series("embedding", side.embeddings.numpy(), pl.Array(pl.Float32, side.embeddings.shape[1]))
    table = pl.DataFrame({"id": pl.Series("id", ids.tolist(), kind), "embedding": rows})
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


class DenseNetwork(nn.Module):
    """Rows of a dense matrix, as the caller has them → embeddings."""

    def __init__(self, tower: nn.Module, part: Part) -> None:
        super().__init__()
        self.tower = tower
        scale = _Columns([part])
        self.shift, self.factor, self.limit = scale.shift, scale.factor, scale.limit

    def forward(self, features: Tensor) -> Tensor:
        scaled = (features.double() - self.shift) * self.factor
        scaled = torch.minimum(torch.maximum(scaled, -self.limit), self.limit)
        return self.tower(scaled.float())  # type: ignore[no-any-return]


class SparseNetwork(nn.Module):
    """Columns and values of several parts side by side → embeddings."""

    def __init__(self, tower: nn.Module, inputs: FeatureSpec) -> None:
        super().__init__()
        self.scale, self.width = _Columns(list(inputs.parts)), inputs.width
        first, self.rest = split_first(tower)
        self.table: nn.Parameter | None = None
        self.bias: Tensor | None = None
        if first is not None:
            weight = first.weight if isinstance(first, InputLinear) else first.weight.t().contiguous()
            self.table, self.bias = _constant(weight.detach()), None if first.bias is None else _constant(first.bias)
        self.usual: nn.Parameter | None = None  # of entities without a history, before the bias
        self.first, self.stop = 0, 0
        for part, span in inputs.spans:
            if part.usual is not None:
                self.first, self.stop, row = span.start, span.stop, torch.zeros(1, self.width)
                row[0, span] = torch.from_numpy(part.usual.toarray()[0])
                self.usual = _constant(row if self.table is None else row @ self.table)

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        there = columns >= 0
        at = torch.where(there, columns, torch.zeros_like(columns))
        scaled = self.scale(at, there, values)
        if self.table is None:
            rows = torch.zeros(columns.shape[0], self.width).scatter_add(1, at, scaled)
        else:
            rows = torch.matmul(scaled.unsqueeze(1), self.table[at]).squeeze(1)
            rows = rows if self.bias is None else rows + self.bias
        if self.usual is not None:
            seen = there & (columns >= self.first) & (columns < self.stop)
            rows = rows + (seen.float().sum(1, keepdim=True) == 0).float() * self.usual
        return self.rest(rows)  # type: ignore[no-any-return]


class _Columns(nn.Module):
    """What becomes of the value of each column, as arrays over all columns."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        factor, shift, limit, unit, group = [], [], [], [], []
        self.groups = 0
        for part in parts:
            scaling, one = part.scaling, np.ones(part.width)
            factor.append(part.factor * one if scaling is None else scaling.factor)
            dense = scaling is not None and scaling.shift is not None
            shift.append(0 * one if scaling is None or scaling.shift is None else scaling.shift)
            limit.append(one * (MOST_DEVIATIONS / math.sqrt(part.width) if dense else np.inf))
            unit.append(one * (0.0 if scaling is None or scaling.unit is None else scaling.unit))
            member = np.full(part.width, -1, np.int64)  # of the columns whose values are together of length one
            if part.kind == "history" or (scaling is not None and not dense):
                member[:] = self.groups
                member[list(scaling.apart) if scaling is not None else []] = -1
                self.groups += 1
            group.append(member)
        self.factor, self.shift, self.limit, self.unit = (
            _constant(torch.from_numpy(np.concatenate(arrays).astype(np.float64)))
            for arrays in (factor, shift, limit, unit)
        )
        self.group = _constant(torch.from_numpy(np.concatenate(group)))
        self.logs = bool((self.unit > 0).any())

    def forward(self, at: Tensor, there: Tensor, values: Tensor) -> Tensor:
        made = values.double()
        if self.logs:
            unit = self.unit[at]
            log = torch.sign(made) * torch.log1p(made.abs() / torch.where(unit > 0, unit, torch.ones_like(unit)))
            made = torch.where(unit > 0, log, made)
        limit, group = self.limit[at], self.group[at]
        made = (made - self.shift[at]) * self.factor[at]
        made = torch.minimum(torch.maximum(made, -limit), limit)
        made = torch.where(there, made, torch.zeros_like(made))
        for number in range(self.groups):
            own = group == number
            length = torch.where(own, made * made, torch.zeros_like(made)).sum(1, keepdim=True).sqrt()
            made = torch.where(own, made / torch.where(length > 0, length, torch.ones_like(length)), made)
        return made.float()


def network_of(tower: nn.Module, inputs: FeatureSpec) -> nn.Module:
    """The tower of a side with the scaling of what it sees, as a module on the CPU that nothing else shares."""
    tower = copy.deepcopy(tower).cpu().float().eval().requires_grad_(False)
    if inputs.kind == "id":
        return tower
    return DenseNetwork(tower, inputs.parts[0]) if inputs.kind == "dense" else SparseNetwork(tower, inputs)


def _inputs(inputs: FeatureSpec) -> tuple[list[str], tuple[Tensor, ...]]:
    """The names of a network's inputs, and an example of two rows to trace it with."""
    if inputs.kind == "id":
        return ["rows"], (torch.zeros(2, dtype=torch.int64),)
    if inputs.kind == "dense":
        return ["features"], (torch.zeros(2, inputs.width),)
    last = inputs.width - 1
    rows = torch.tensor([[0, last, -1], [last, -1, -1]]), torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    return ["columns", "values"], rows


def as_columns(rows: MatrixLike) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sparse rows as ``columns`` and ``values``, filled up with −1 and 0."""
    matrix = sp.csr_matrix(rows)
    counts = np.diff(matrix.indptr)
    there = np.arange(max(1, counts.max(initial=0))) < counts[:, None]
    columns, values = np.full(there.shape, -1, np.int64), np.zeros(there.shape, np.float32)
    columns[there], values[there] = matrix.indices, matrix.data
    return columns, values


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)

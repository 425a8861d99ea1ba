"""Checkpoints: safetensors with JSON in the header, written under another name and renamed.

A run that is killed at any moment leaves either the old checkpoint or the new one. Nothing is unpickled. The header
holds a fingerprint of problem, towers, method and options; another run's file, or a damaged one, is refused. Parameters
are stored tensor by tensor, rows of tables by whoever holds them (shards_file.py), so that a run can go on with another
number of processes. Checked by tests/test_checkpoint.py and tests/test_distributed_fit.py.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramtower.data.features import Features
from gramtower.distributed.agreement import Digest
from gramtower.distributed.group import Group
from gramtower.distributed.shards import Shards
from gramtower.model.parameters import Layout, Parameters
from gramtower.model.towers import Towers
from gramtower.objective.problem import Problem
from gramtower.optim.parts import State, join_state, split_state
from gramtower.training import shards_file
from gramtower.training.result import Record

_FORMAT, _KEY = "gramtower-checkpoint-2", "run"


@dataclass
class Saved:
    """A run as it stood after an iteration."""

    parameters: Tensor
    method: State
    seconds: float
    work: dict[str, float]
    memory_budget: int
    history: list[Record]
    best: Tensor | None
    best_metric: float | None
    waited: int
    first_norm: float | None


def fingerprint(problem: Problem, towers: Towers, optimizer: str, options: dict[str, Any], seed: int) -> dict[str, str]:
    """What must agree for a run to be continued, part by part, so that an error can name what differs."""
    group, rows = problem.shards.group, (problem.shards.left.first, problem.shards.right.first)
    a, b = problem.weight_arrays
    numbers = [problem.omega, problem.l2, problem.embedding_l2, problem.frequency_power, problem.loss.name]
    pairs = _pair_digest(problem, problem.labels)
    weights = [Digest().add_rows(array, first) for array, first in zip((a, b), rows, strict=True)]
    weights.append(Digest() if problem.pair_weights is None else _pair_digest(problem, problem.pair_weights))
    imputed = problem.imputed_arrays
    if len(imputed) == 1:
        numbers.append(float(imputed[0]))
    else:
        weights += [Digest().add_rows(array, first) for array, first in zip(imputed, rows, strict=True)]
    layout = towers.parameters().layout
    return {
        "pairs": json.dumps(problem.shape) + pairs.text(group),
        "features": "".join(_features_text(side, group) for side in (problem.left, problem.right)),
        "objective": json.dumps(numbers) + "".join(digest.text(group) for digest in weights),
        "towers": json.dumps(_global_shapes(layout, problem.shards)) + str(towers.dtype),
        "optimizer": optimizer,
        "options": json.dumps(options, sort_keys=True, default=str),
        "seed": str(seed),
    }


def _pair_digest(problem: Problem, values: Any) -> Digest:
    """The pairs with a number each, whichever process holds them."""
    pairs = problem.pairs
    return _sparse_digest(
        pairs.offsets.numpy(), pairs.columns.numpy(), values, problem.shards.left.first, problem.shape[1]
    )


def _sparse_digest(offsets: Any, columns: Any, values: Any, first: int, width: int) -> Digest:
    """Rows of a sparse matrix, of which these begin with row ``first`` of all processes' rows."""
    rows, digest = len(offsets) - 1, Digest()
    step = max(1, (1 << 20) * rows // max(1, len(columns)))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        part = slice(int(offsets[start]), int(offsets[stop]))
        numbers = np.arange(start, stop) + first
        keys = np.repeat(numbers, np.diff(offsets[start : stop + 1])) * width + columns[part]
        digest.add(keys, values[part])
    return digest


def _features_text(features: Features, group: Group) -> str:
    """Kind, size and content of one side's features, whichever process holds which rows."""
    arrays = [array.numpy() for array in features.arrays]
    if features.kind == "sparse":
        offsets, columns, values = arrays
        digest = _sparse_digest(offsets, columns, values, features.first, features.width)
    else:
        digest = Digest().add_rows(arrays[0] if arrays else None, features.first)
    width = features.total if features.kind == "ids" else features.width
    return f"{features.kind} {features.total} × {width} {digest.text(group)} "


def _global_shapes(layout: Layout, shards: Shards) -> dict[str, list[int]]:
    shapes = {name: list(shape) for name, shape in layout.shapes.items()}
    for name in layout.owned:
        shapes[name][0] = (shards.left if name.startswith("left.") else shards.right).total
    return shapes


def write_checkpoint(path: Path, marks: dict[str, str], saved: Saved, like: Parameters, shards: Shards) -> None:
    """Save a run; what is at ``path`` is replaced in one step.

    ``like`` gives the layout of this process's vectors: parameters, and what of the method's state has their length.
    """
    tensors, values = split_state({"method": saved.method})
    tensors["parameters"] = saved.parameters
    if saved.best is not None:
        tensors["best"] = saved.best
    stored: dict[str, Tensor] = {}
    rows: dict[str, str] = {}
    for key, tensor in tensors.items():
        if tensor.shape != like.vector.shape:
            stored[key] = tensor
            continue
        for name, part in Parameters(like.layout, tensor).items():
            stored[f"{key}|{name}"] = part
            if name in _tables(like.layout, shards):
                rows[f"{key}|{name}"] = "left" if name.startswith("left.") else "right"
    header = {
        "format": _FORMAT,
        "fingerprint": marks,
        "values": values,
        "seconds": saved.seconds,
        "work": saved.work,
        "memory_budget": saved.memory_budget,
        "best_metric": saved.best_metric,
        "waited": saved.waited,
        "first_norm": saved.first_norm,
        "history": [asdict(record) for record in saved.history],
    }
    shards_file.write(path, _KEY, header, stored, rows, shards)


def read_checkpoint(path: Path, marks: dict[str, str], like: Parameters, shards: Shards, device: torch.device) -> Saved:
    """Load a run, of the tables the rows that this process holds.

    Raises:
        ValueError: if a file is damaged or missing, not a checkpoint, or belongs to another run.
    """
    from safetensors import SafetensorError

    with shards.group.together():
        try:
            file = shards_file.Reader(path, _KEY, device)
            header = file.header
            if header["format"] != _FORMAT:
                raise KeyError(header["format"])
            _refuse_another_run(path, header, marks)
            tensors = _read_tensors(file, like, shards)
            file.close()
        except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as error:
            raise ValueError(
                f"checkpoint: {path} is damaged or not a checkpoint of this version ({error}); delete it to start anew"
            ) from error
    parameters, best = tensors.pop("parameters"), tensors.pop("best", None)
    state = join_state(tensors, header["values"])
    return Saved(
        parameters,
        state.get("method", {}),
        header["seconds"],
        header["work"],
        header["memory_budget"],
        [Record(**record) for record in header["history"]],
        best,
        header["best_metric"],
        header["waited"],
        header["first_norm"],
    )


def _refuse_another_run(path: Path, header: dict[str, Any], marks: dict[str, str]) -> None:
    differing = [key for key in marks if header["fingerprint"].get(key) != marks[key]]
    if differing:
        hint = "; without dim, the size of the embeddings follows the machine" if "towers" in differing else ""
        raise ValueError(
            f"checkpoint: {path} belongs to another run, which differs in {', '.join(differing)}; give this run "
            f"another path, or delete the file to start anew{hint}"
        )


def _tables(layout: Layout, shards: Shards) -> frozenset[str]:
    """Tensors that hold one row for each own entity; with one process none needs to be told apart."""
    return layout.owned if shards.group.size > 1 else frozenset()


def _read_tensors(file: shards_file.Reader, like: Parameters, shards: Shards) -> dict[str, Tensor]:
    """The stored tensors, those of the parameters' layout put together to vectors."""
    sides = {"left": shards.left, "right": shards.right}
    tensors: dict[str, Tensor] = {}
    vectors: dict[str, dict[str, Tensor]] = {}
    for stored in file.names:
        key, _, name = stored.partition("|")
        if not name:
            tensors[key] = file.read(stored)
            continue
        side = sides["left" if name.startswith("left.") else "right"]
        part = file.read(stored, side if file.spread(stored) or name in like.layout.owned else None)
        vectors.setdefault(key, {})[name] = part
    for key, parts in vectors.items():
        tensors[key] = torch.cat([parts[name].reshape(-1) for name in like.layout.shapes])
    return tensors


def as_parameters_like(vector: Tensor, like: Parameters) -> Parameters:
    """A stored vector as parameters of a layout."""
    return Parameters(like.layout, vector.to(like.vector))

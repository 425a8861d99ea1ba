"""Checkpoints: JSON and tensors with checksums (_tensors.py), written under another name and renamed.

A run that is killed at any moment leaves either the old checkpoint or the new one. Nothing is unpickled. The header
holds a fingerprint of problem, towers, method and options; another run's file, or a damaged one, is refused. Parameters
are stored tensor by tensor, rows of tables by whoever holds them (shards_file.py), so that a run can go on with another
number of processes. Checked by tests/test_checkpoint.py and tests/test_distributed_fit.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramtower._schema import build
from gramtower.data.features import Features
from gramtower.distributed.agreement import Digest
from gramtower.distributed.group import Group
from gramtower.distributed.shards import Shards
from gramtower.model.linearization import Work
from gramtower.model.parameters import Layout, Parameters
from gramtower.model.towers import Towers
from gramtower.objective.problem import Problem
from gramtower.optim.parts import Part, State, join_state, split_state
from gramtower.training import shards_file
from gramtower.training.result import Record

_KIND = ("gramtower-checkpoint", 3)


@dataclass
class _Header:
    """What a checkpoint holds beside its tensors."""

    fingerprint: dict[str, str]
    values: dict[str, Any]
    seconds: float
    work: dict[str, float]
    memory_budget: int
    best_metric: float | None
    waited: int
    first_norm: float | None
    history: list[dict[str, Any]]


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
        "fingerprint": marks,
        "values": values,
        "seconds": saved.seconds,
        "work": saved.work,
        "memory_budget": saved.memory_budget,
        "best_metric": saved.best_metric,
        "waited": saved.waited,
        "first_norm": saved.first_norm,
        "history": [vars(record) for record in saved.history],
    }
    shards_file.write(path, _KIND, header, stored, rows, shards)


def read_checkpoint(path: Path, marks: dict[str, str], like: Parameters, shards: Shards, device: torch.device) -> Saved:
    """Load a run, of the tables the rows that this process holds.

    Raises:
        ValueError: if a file is damaged or missing, not a checkpoint, or belongs to another run.
    """
    with shards.group.together():
        with _refusing(path):
            file = shards_file.Reader(path, _KIND, device)
            header = build("header", _Header, file.header)
        _refuse_another_run(path, header.fingerprint, marks)
        with _refusing(path):
            tensors = _read_tensors(file, like, shards)
            file.close()
            history = [build("history", Record, record) for record in header.history]
            build("work", Work, header.work)
            if not history or "parameters" not in tensors:
                raise ValueError("got neither parameters nor records, expected both")
            parameters, best = tensors.pop("parameters"), tensors.pop("best", None)
            state = _joined(tensors, header.values)
    return Saved(
        parameters, state, header.seconds, header.work, header.memory_budget, history, best, header.best_metric,
        header.waited, header.first_norm,
    )  # fmt: skip


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Say of which file an error is."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(
            f"checkpoint: {path} is damaged or not a checkpoint of this version ({error}); delete it to start anew"
        ) from error


def restore(path: Path, method: Part, state: State) -> None:
    """Give a method its stored state back.

    Raises:
        ValueError: if it is not the state of such a method.
    """
    with _refusing(path):
        _check_state("method", state, method.state())
        try:
            method.restore(state)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"got another method's state: {error!r}") from error
        if _names(method.state()) != _names(state):
            raise ValueError("got another method's state")


def _check_state(name: str, state: Any, like: Any) -> None:
    """Refuse values of another kind than a fresh method has; tensors may be there that it does not have yet."""
    if isinstance(like, dict):
        if not isinstance(state, dict):
            raise ValueError(f"got {name} of type {type(state).__name__}, expected a part of the method's state")
        values = {key for key, value in like.items() if not isinstance(value, (Tensor, dict))}
        extra = [key for key, value in state.items() if key not in like and not isinstance(value, Tensor)]
        if extra or not values <= set(state):
            raise ValueError(f"got {name} with {', '.join(map(str, state))[:60]}, expected {', '.join(like)}")
        for key in state.keys() & like.keys():
            _check_state(f"{name}.{key}", state[key], like[key])
    elif not isinstance(like, Tensor):
        number = (int, float, type(None))
        kinds = number if isinstance(like, number) and not isinstance(like, bool) else (type(like),)
        same = isinstance(state, kinds) and isinstance(state, bool) == isinstance(like, bool)
        if not same or (isinstance(state, float) and not math.isfinite(state)):
            raise ValueError(f"got {name} {str(state)[:40]!r}, expected {type(like).__name__}")


def _names(state: Any) -> Any:
    """A state without its values; an empty part counts as none."""
    below = {key: _names(value) for key, value in state.items()} if isinstance(state, dict) else None
    return {key: value for key, value in below.items() if value != {}} if below is not None else None


def _joined(tensors: dict[str, Tensor], values: dict[str, Any]) -> State:
    """The method's state; every name lies below "method"."""
    if any(name.split("/")[0] != "method" for name in (*tensors, *values)):
        raise ValueError(f"got {', '.join((*tensors, *values))[:60]}, expected the state of a method")
    try:
        state: State = join_state(tensors, values).get("method", {})
    except (TypeError, AttributeError) as error:
        raise ValueError("got a value below a value in the state of the method") from error
    return state


def _refuse_another_run(path: Path, found: dict[str, str], marks: dict[str, str]) -> None:
    differing = [key for key in marks if found.get(key) != marks[key]]
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
    shapes = _global_shapes(like.layout, shards)
    for stored, shape in file.shapes.items():
        key, _, name = stored.partition("|")
        kinds = (like.vector.dtype,) if name else (torch.float32, torch.float64)
        if file.dtypes[stored] not in kinds or (name and list(shape) != shapes.get(name)):
            raise ValueError(f"got {stored} of shape {shape} and {file.dtypes[stored]}")
        if not name:
            tensors[key] = file.read(stored)
            continue
        side = sides["left" if name.startswith("left.") else "right"]
        part = file.read(stored, side if file.spread(stored) or name in like.layout.owned else None)
        vectors.setdefault(key, {})[name] = part
    for key, parts in vectors.items():
        if key in tensors or set(parts) != set(like.layout.shapes):
            raise ValueError(f"got {key} without {', '.join(set(like.layout.shapes) - set(parts))}")
        tensors[key] = torch.cat([parts[name].reshape(-1) for name in like.layout.shapes])
    return tensors


def as_parameters_like(vector: Tensor, like: Parameters) -> Parameters:
    """A stored vector as parameters of a layout."""
    return Parameters(like.layout, vector.to(like.vector))

"""Checkpoints: JSON and tensors with checksums (_tensors.py), written under another name and renamed.

A run that is killed at any moment leaves either the old checkpoint or the new one. Nothing is unpickled. The header
holds a fingerprint of the run (fingerprint.py); another run's file, or a damaged one, is refused. Records are in a file
beside it (stored_history.py). Parameters are stored tensor by tensor, rows of tables by whoever holds them
(distributed/shard_files.py), so that a run can go on with another number of processes. Checked by
tests/test_checkpoint.py and tests/test_distributed_fit.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramtower._schema import build
from gramtower.distributed import shard_files
from gramtower.distributed.shards import Shards
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Layout, Parameters, side_of
from gramtower.optim.parts import State, Stateful, join_state, split_state
from gramtower.training.fingerprint import global_shapes
from gramtower.training.result import Record
from gramtower.training.stored_history import StoredHistory, history_path, read_stored

_KIND = ("gramtower-checkpoint", 4)


@dataclass
class _Header:
    """What a checkpoint holds besides its tensors."""

    fingerprint: dict[str, str]
    values: dict[str, Any]
    seconds: float
    work: dict[str, float]
    memory_budget: int
    best_metric: float | None
    waited: int
    first_norm: float | None
    history: dict[str, int]


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


def write_checkpoint(
    path: Path, marks: dict[str, str], saved: Saved, log: StoredHistory, like: Parameters, shards: Shards
) -> None:
    """Save a run; what is at ``path`` is replaced in one step, and ``log``, its file of records, appended to.

    ``like`` gives the layout of this process's vectors: parameters, and what of the method's state has their length. A
    tensor of the state whose name ends in ``rows_left`` or ``rows_right`` has one entry for each local entity.
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
            if (side := _side_of(key)) is not None and shards.group.size > 1:
                rows[key] = side
            continue
        for name, part in Parameters(like.layout, tensor).items():
            stored[f"{key}|{name}"] = part
            if name in _tables(like.layout, shards):
                rows[f"{key}|{name}"] = side_of(name)
    with shards.group.together():
        if shards.group.rank == 0:
            log.append(saved.history)
    header = {
        "fingerprint": marks,
        "values": values,
        "seconds": saved.seconds,
        "work": saved.work,
        "memory_budget": saved.memory_budget,
        "best_metric": saved.best_metric,
        "waited": saved.waited,
        "first_norm": saved.first_norm,
        "history": log.mark,
    }
    shard_files.write(path, _KIND, header, stored, rows, shards)


def read_checkpoint(
    path: Path, marks: dict[str, str], like: Parameters, shards: Shards, device: torch.device
) -> tuple[Saved, StoredHistory]:
    """Load a run, of the tables the rows that this process holds, and the file of its records.

    Raises:
        ValueError: if a file is damaged or missing, not a checkpoint, or belongs to another run.
    """
    with shards.group.together():
        with _refusing(path):
            file = shard_files.Reader(path, _KIND, device)
            header = build("header", _Header, file.header)
        _refuse_another_run(path, header.fingerprint, marks)
        with _refusing(path):
            tensors = _read_tensors(file, like, shards)
            file.close()
            build("work", Work, header.work)
            if "parameters" not in tensors:
                raise ValueError("got no parameters, expected those of the run")
            parameters, best = tensors.pop("parameters"), tensors.pop("best", None)
            state = _joined(tensors, header.values)
            stored, records = read_stored(path, header.history)
    saved = Saved(
        parameters, state, header.seconds, header.work, header.memory_budget, records, best, header.best_metric,
        header.waited, header.first_norm,
    )  # fmt: skip
    return saved, stored


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint with all files that belong to it."""
    shard_files.remove(path)
    history_path(path).unlink(missing_ok=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Say of which file an error is."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(
            f"checkpoint: {path} is damaged or not a checkpoint of this version ({error}); delete it to start anew"
        ) from error


def restore(path: Path, method: Stateful, state: State) -> None:
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
    """Tensors that hold one row for each local entity; none with one process."""
    return layout.owned if shards.group.size > 1 else frozenset()


def _side_of(key: str) -> str | None:
    """The side whose entities a tensor of the method's state has one entry for each of."""
    return next((side for side in ("left", "right") if key.endswith(f"rows_{side}")), None)


def _read_tensors(file: shard_files.Reader, like: Parameters, shards: Shards) -> dict[str, Tensor]:
    """The stored tensors, those of the parameters' layout put together to vectors."""
    sides = {"left": shards.left, "right": shards.right}
    tensors: dict[str, Tensor] = {}
    vectors: dict[str, dict[str, Tensor]] = {}
    shapes = global_shapes(like.layout, shards)
    for stored, shape in file.shapes.items():
        key, _, name = stored.partition("|")
        kinds = (like.vector.dtype,) if name else (torch.float32, torch.float64)
        if file.dtypes[stored] not in kinds or (name and list(shape) != shapes.get(name)):
            raise ValueError(f"got {stored} of shape {shape} and {file.dtypes[stored]}")
        if not name:
            side = _side_of(key)
            tensors[key] = file.read(stored, None if side is None else sides[side])
            continue
        local = sides[side_of(name)]
        part = file.read(stored, local if file.spread(stored) or name in like.layout.owned else None)
        vectors.setdefault(key, {})[name] = part
    for key, parts in vectors.items():
        if key in tensors or set(parts) != set(like.layout.shapes):
            raise ValueError(f"got {key} without {', '.join(set(like.layout.shapes) - set(parts))}")
        tensors[key] = torch.cat([parts[name].reshape(-1) for name in like.layout.shapes])
    return tensors


def as_parameters_like(vector: Tensor, like: Parameters) -> Parameters:
    """A stored vector as parameters of a layout."""
    return Parameters(like.layout, vector.to(like.vector))

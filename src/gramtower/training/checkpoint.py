"""Checkpoints: JSON and tensors with checksums (_util/tensors.py), written under another name and renamed.

A run that is killed at any moment leaves either the old checkpoint or the new one. Nothing is unpickled. The header
holds a fingerprint of the run (fingerprint.py); another run's file, or a damaged one, is refused. Records are in a file
next to it (stored_history.py). Parameters are stored tensor by tensor, and rows of tables by the process that holds
them (distributed/shard_files.py), so that a run can go on with another number of processes; the types of the values in
a method's state say what is cut how (optim/parts.py).
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

from gramtower._util.schema import build
from gramtower.distributed import shard_files
from gramtower.distributed.shards import Sharded, Shards
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Parameters, side_of
from gramtower.optim.parts import STORED, State, Stateful, Stored, join_state, split_state
from gramtower.training.fingerprint import global_shapes
from gramtower.training.result import Record
from gramtower.training.stored_history import StoredHistory, history_path, read_stored

_KIND = ("gramtower-checkpoint", 5)


@dataclass
class _Header:
    """What a checkpoint holds besides its tensors; ``sides`` names the tensors that have rows of a side's entities."""

    fingerprint: dict[str, str]
    values: dict[str, Any]
    seconds: float
    work: dict[str, float]
    memory_budget: int
    best_metric: float | None
    waited: int
    first_norm: float | None
    history: dict[str, int]
    sides: dict[str, str]


@dataclass
class Saved:
    """A run as it stood after an iteration."""

    parameters: Parameters
    method: State
    seconds: float
    work: dict[str, float]
    memory_budget: int
    history: list[Record]
    best: Parameters | None
    best_metric: float | None
    waited: int
    first_norm: float | None


def write_checkpoint(path: Path, marks: dict[str, str], saved: Saved, log: StoredHistory, shards: Shards) -> None:
    """Save a run; what is at ``path`` is replaced in one step, and ``log``, its file of records, appended to."""
    tensors, values = split_state({"method": saved.method})
    tensors["parameters"] = saved.parameters
    if saved.best is not None:
        tensors["best"] = saved.best
    stored: dict[str, Tensor] = {}
    rows: dict[str, str] = {}
    sides = {key: one.side for key, one in tensors.items() if isinstance(one, Sharded)}
    for key, one in tensors.items():
        if isinstance(one, Parameters):
            stored |= {f"{key}|{name}": part for name, part in one.items()}
            rows |= {f"{key}|{name}": side_of(name) for name in one.layout.owned}
        else:
            stored[key] = one.tensor if isinstance(one, Sharded) else one
    rows = rows | sides if shards.group.size > 1 else {}
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
        "sides": sides,
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
            tensors = _read_tensors(file, header.sides, like, shards)
            file.close()
            build("work", Work, header.work)
            parameters, best = tensors.pop("parameters", None), tensors.pop("best", None)
            if not isinstance(parameters, Parameters) or not isinstance(best, (Parameters, type(None))):
                raise ValueError("got no parameters, expected those of the run")
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
        values = {key for key, value in like.items() if not isinstance(value, (*STORED, dict))}
        extra = [key for key, value in state.items() if key not in like and not isinstance(value, STORED)]
        if extra or not values <= set(state):
            raise ValueError(f"got {name} with {', '.join(map(str, state))[:60]}, expected {', '.join(like)}")
        for key in state.keys() & like.keys():
            _check_state(f"{name}.{key}", state[key], like[key])
    elif isinstance(like, STORED):
        if not isinstance(state, type(like)):
            raise ValueError(f"got {name} of type {type(state).__name__}, expected {type(like).__name__}")
    else:
        number = (int, float, type(None))
        kinds = number if isinstance(like, number) and not isinstance(like, bool) else (type(like),)
        same = isinstance(state, kinds) and isinstance(state, bool) == isinstance(like, bool)
        if not same or (isinstance(state, float) and not math.isfinite(state)):
            raise ValueError(f"got {name} {str(state)[:40]!r}, expected {type(like).__name__}")


def _names(state: Any) -> Any:
    """A state without its values; an empty part counts as none."""
    below = {key: _names(value) for key, value in state.items()} if isinstance(state, dict) else None
    return {key: value for key, value in below.items() if value != {}} if below is not None else None


def _joined(tensors: dict[str, Stored], values: dict[str, Any]) -> State:
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


def _read_tensors(
    file: shard_files.Reader, held: dict[str, str], like: Parameters, shards: Shards
) -> dict[str, Stored]:
    """The stored tensors: vectors of the parameters' layout, rows of the entities that are here, and others."""
    sides = {"left": shards.left, "right": shards.right}
    tensors: dict[str, Stored] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    shapes = global_shapes(like.layout, shards)
    for stored, shape in file.shapes.items():
        key, _, name = stored.partition("|")
        kinds = (like.vector.dtype,) if name else (torch.float32, torch.float64)
        if file.dtypes[stored] not in kinds or (name and list(shape) != shapes.get(name)):
            raise ValueError(f"got {stored} of shape {shape} and {file.dtypes[stored]}")
        if name:
            local = sides[side_of(name)] if file.spread(stored) or name in like.layout.owned else None
            parts.setdefault(key, {})[name] = file.read(stored, local)
        elif key in held:
            side = sides.get(held[key])
            if side is None or not shape or shape[0] != side.total:
                raise ValueError(f"got {key} of shape {shape} with rows of {held[key][:20]!r} entities")
            tensors[key] = Sharded(file.read(stored, side), held[key])
        else:
            tensors[key] = file.read(stored)
    for key, found in parts.items():
        if key in tensors or set(found) != set(like.layout.shapes):
            raise ValueError(f"got {key} without {', '.join(set(like.layout.shapes) - set(found))}")
        tensors[key] = Parameters(like.layout, torch.cat([found[name].reshape(-1) for name in like.layout.shapes]))
    return tensors

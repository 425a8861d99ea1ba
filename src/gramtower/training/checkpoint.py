"""Checkpoints of a run: the files, the fingerprint that says which run they belong to, and the lock on them.

A checkpoint is JSON and tensors with checksums (_util/tensors.py), written under another name and renamed: a run that
is killed at any moment leaves either the old checkpoint or the new one. Rows of tables are stored by the process that
holds them (distributed/shard_files.py), so that a run can continue with another number of processes.

The records are lines of JSON in a file next to the checkpoint, which is appended to and never rewritten. The checkpoint
stores how many bytes of that file belong to it, and their checksum; anything after them is ignored and overwritten.

The fingerprint covers everything that shapes the objective, the steps and the choice of the best point. Limits
(iterations, seconds, tolerance) are not part of it, because a run may continue with larger ones. A damaged file, or one
of another run, is refused. There are no locks on systems without POSIX locks.
"""

from __future__ import annotations

import json
import math
import os
import platform
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramtower._util import host
from gramtower._util.files import build, is_remote, replacing, take_lock
from gramtower.data.pairs import Features
from gramtower.distributed import shard_files
from gramtower.distributed.group import SINGLE, Digest, Group
from gramtower.distributed.shards import Rows, Sharded, Shards
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Layout, Parameters, side_of
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import STORED, State, Stateful, Stored, join_state, split_state
from gramtower.training.result import Record

_MANY = 1 << 20  # entries from which on compiled code takes them

#: Attributes that every module has, and sizes of first layers.
_INTERNAL = {*vars(nn.Module()), "in_features", "num_embeddings"}


def fingerprint(
    problem: Problem,
    towers: Towers,
    optimizer: str,
    options: dict[str, object],
    seed: int,
    validation: Callable[[Point], float] | None = None,
    patience: int | None = None,
) -> dict[str, str]:
    """The properties that must agree for a run to continue, by name, so that an error can name the one that differs.

    A ``validation`` with a method ``fingerprint(shards)`` describes its metric and data; any other function is
    identified only by its name.
    """
    group, rows = problem.shards.group, (problem.shards.left.first, problem.shards.right.first)
    (a, b), loss = problem.weight_arrays, problem.loss
    numbers = [problem.omega, problem.l2, problem.embedding_l2, problem.frequency_power]
    offsets, columns = problem.pairs.offsets.numpy(), problem.pairs.columns.numpy()
    pairs, by_pair = (
        Digest() if values is None else sparse_digest(offsets, columns, values, rows[0], problem.shape[1])
        for values in (problem.labels, problem.pair_weights)
    )
    weights = [*(Digest().add_rows(array, first) for array, first in zip((a, b), rows, strict=True)), by_pair]
    imputed = problem.imputed_arrays
    if len(imputed) == 1:
        numbers.append(float(imputed[0]))
    else:
        weights += [Digest().add_rows(array, first) for array, first in zip(imputed, rows, strict=True)]
    psi = "" if problem.regularizer is None else repr(problem.regularizer)
    layout = towers.parameters().layout
    metric = {"metric": "none" if validation is None else _name(validation), "validation": "none"}
    if validation is not None and hasattr(validation, "fingerprint"):
        metric = dict(validation.fingerprint(problem.shards))
    return {
        "pairs": json.dumps(problem.shape) + pairs.text(group),
        "features": "".join(features_text(side, group) for side in (problem.left, problem.right)),
        "objective": json.dumps(numbers) + "".join(digest.text(group) for digest in weights) + psi,
        "loss": " ".join([loss.name, *map(_name, (loss.value, loss.first, loss.second))]),
        "precision": problem.precision,
        "pair_precision": problem.pair_precision,
        "towers": json.dumps(global_shapes(layout, problem.shards)),
        "architecture": _architecture(towers, problem),
        "dtype": str(towers.dtype).removeprefix("torch."),
        "optimizer": optimizer,
        "options": json.dumps(options, sort_keys=True, default=str),
        "seed": str(seed),
        "patience": str(patience),
        **metric,
    }


def _name(function: object) -> str:
    """The module and name of a function, or of the class of another callable."""
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _architecture(towers: Towers, problem: Problem) -> str:
    """Every module of both towers: its class, its settings, its buffers and its frozen parameters.

    Sizes of first layers are left out, because processes have local rows; "towers" has the sizes of all rows.
    """
    lines = []
    sides = ("left", towers.left, problem.shards.left), ("right", towers.right, problem.shards.right)
    for side, module, rows in sides:
        for name, part in module.named_modules():
            settings = {key: value for key, value in vars(part).items() if key not in _INTERNAL}
            held = {**settings, **dict(part.named_buffers(recurse=False))}
            held |= {key: p for key, p in part.named_parameters(recurse=False) if not p.requires_grad}
            texts = [f"{key}={_text(held[key], rows, problem.shards.group)}" for key in sorted(held)]
            lines.append(f"{side}.{name}: {_name(part)}({', '.join(texts)})")
    return "\n".join(lines)


def _text(value: object, rows: Rows, group: Group) -> str:
    """A module's attribute as text: plain values, digests of tensors, and the names of other objects."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, rows, group) for item in value)}]"
    if isinstance(value, (Tensor, np.ndarray)):
        array = torch.as_tensor(value).detach().cpu().to(torch.float64).numpy()
        # A table over ids holds local rows; the digest is over the rows of all processes.
        table = group.from_first(bool(array.ndim) and len(array) == rows.count)
        digest = Digest().add_rows(np.atleast_1d(array), rows.first if table else 0)
        shape = f"rows of {array.shape[1:]}" if table else array.shape
        return f"{shape} {digest.text(group if table else SINGLE)}"
    return _name(value)


def sparse_digest(
    offsets: NDArray[np.int64], columns: NDArray[np.integer], values: NDArray[np.generic], first: int, width: int
) -> Digest:
    """A digest of rows of a sparse matrix from row ``first`` on, independent of how processes divide them."""
    rows = len(offsets) - 1
    if len(columns) < _MANY or not host.has_numba():
        keys = np.repeat(np.arange(first, first + rows), np.diff(offsets)) * width + columns
        return Digest().add(keys, np.asarray(values))
    from gramtower.distributed.entry_sums import entry_sums  # compiled by numba

    cuts = np.linspace(0, len(columns), 8 * torch.get_num_threads() + 1)[1:-1]
    bounds = [0, *np.searchsorted(offsets, cuts).tolist(), rows]
    parts: list[Any] = []
    host.parallel_for(
        lambda a, b: parts.append(entry_sums(offsets[a : b + 1], columns, np.asarray(values), first + a, width)), bounds
    )
    digest = Digest()
    for part in parts:
        digest.add_sums(part)
    return digest


def features_text(features: Features, group: Group) -> str:
    """Kind, size and digest of one side's features, independent of how processes divide the rows."""
    arrays = [array.numpy() for array in features.arrays]
    if features.kind == "sparse":
        offsets, columns, values = arrays
        digest = sparse_digest(offsets, columns, values, features.first, features.width)
    else:
        digest = Digest().add_rows(arrays[0] if arrays else None, features.first)
    width = features.total if features.kind == "ids" else features.width
    return f"{features.kind} {features.total} × {width} {digest.text(group)} "


def global_shapes(layout: Layout, shards: Shards) -> dict[str, list[int]]:
    """Shapes of the tensors over all processes."""
    shapes = {name: list(shape) for name, shape in layout.shapes.items()}
    for name in layout.owned:
        shapes[name][0] = (shards.left if side_of(name) == "left" else shards.right).total
    return shapes


class StoredHistory:
    """The file of records next to a checkpoint, up to the last checkpoint."""

    def __init__(self, checkpoint: Path, count: int = 0, size: int = 0, checksum: int = 0) -> None:
        self.path = history_path(checkpoint)
        self.count, self.size, self.checksum = count, size, checksum
        self.content = b""  # of an object, which is written as a whole

    @property
    def mark(self) -> dict[str, int]:
        """The entry of the checkpoint's header about the file."""
        return {"records": self.count, "bytes": self.size, "checksum": self.checksum}

    def append(self, records: Sequence[Record]) -> None:
        """Append the new records of a run, and flush them to disk."""
        text = "".join(record.to_json() + "\n" for record in records[self.count :]).encode()
        if is_remote(self.path):
            with replacing(self.path) as partial:
                partial.write_bytes(self.content + text)
            self.content += text
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)  # Windows would change line ends
            with open(os.open(self.path, flags, 0o666), "r+b") as file:
                file.seek(self.size)
                file.write(text)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        self.checksum = zlib.crc32(text, self.checksum)
        self.count, self.size = len(records), self.size + len(text)


def read_stored(checkpoint: Path, mark: Mapping[str, int]) -> tuple[StoredHistory, list[Record]]:
    """The records that belong to a checkpoint; raises ValueError or OSError if the file is missing or damaged."""
    path = history_path(checkpoint)
    try:
        known = StoredHistory(checkpoint, mark["records"], mark["bytes"], mark["checksum"])
        with path.open("rb") as file:
            content = file.read(known.size)
        if len(content) != known.size or zlib.crc32(content) != known.checksum:
            raise ValueError("another checksum")
        records = [build("history", Record, json.loads(line)) for line in content.splitlines()]
        if len(records) != known.count or not records:
            raise ValueError("another number of records")
        known.content = content if is_remote(path) else b""
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} next to it is damaged: {error}") from error
    return known, records


def history_path(checkpoint: Path) -> Path:
    """The path of a checkpoint's records."""
    return checkpoint.with_name(checkpoint.name + ".history")


@contextmanager
def locked(path: Path, group: Group = SINGLE, name: str = "checkpoint") -> Iterator[None]:
    """Hold a lock on a file or folder in the first process. Errors say ``name``.

    The lock of a folder is a file in it; that of a file is next to it. If another run holds it, every process raises
    ValueError. A URL cannot be locked: the run that started last holds it (remote.py).
    """
    if is_remote(path):
        from gramtower._util.remote import holding

        with ExitStack() as stack:
            with group.together():
                if group.rank == 0:
                    stack.enter_context(holding(path))
            yield
        return
    file: int | None = None
    lock = path / ".gramtower.lock" if path.is_dir() else path.with_name(path.name + ".lock")
    with group.together():
        if group.rank == 0:
            file = _take(lock, path, name)
    try:
        yield
    finally:
        if file is not None:
            lock.unlink(missing_ok=True)
            os.close(file)


def _take(lock: Path, path: Path, name: str) -> int | None:
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = take_lock(lock)
    except BlockingIOError:
        holder = lock.read_text(errors="replace").strip() or "unknown"
        raise ValueError(
            f"{name}: {path} is being written by another run (process {holder}); wait until it ends, or choose another "
            "path"
        ) from None
    if file is not None:
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()} on {platform.node()}".encode())
    return file


_KIND = ("gramtower-checkpoint", 5)


@dataclass
class _Header:
    """The header of a checkpoint; ``sides`` has the side of each tensor with rows of entities."""

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
    """The state of a run after an iteration."""

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


def write_checkpoint(path: Path, own: dict[str, str], saved: Saved, log: StoredHistory, shards: Shards) -> None:
    """Save a run with its ``own`` fingerprint: append records to ``log``, and replace the file ``path`` atomically."""
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
    progress = ("seconds", "work", "memory_budget", "best_metric", "waited", "first_norm")
    header = {"fingerprint": own, "values": values} | {name: getattr(saved, name) for name in progress}
    header |= {"history": log.mark, "sides": sides}
    shard_files.write(path, _KIND, header, stored, rows, shards)


def read_checkpoint(
    path: Path, own: dict[str, str], like: Parameters, shards: Shards, device: torch.device
) -> tuple[Saved, StoredHistory]:
    """Load a run, with this process's rows of the tables, and the file of its records.

    Raises:
        ValueError: if a file is damaged or missing, is not a checkpoint, or has another fingerprint than ``own``.
    """
    with shards.group.together():
        with _refusing(path):
            file = shard_files.Reader(path, _KIND, device)
            header = build("header", _Header, file.header)
        _refuse_another_run(path, header.fingerprint, own)
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
    """Remove a checkpoint and all files that belong to it."""
    shard_files.remove(path)
    history_path(path).unlink(missing_ok=True)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Add the file name to errors."""
    try:
        yield
    except ConnectionError:  # which says nothing about the file
        raise
    except (ValueError, OSError) as error:
        raise ValueError(
            f"checkpoint: {path} is damaged or not a checkpoint of this version ({error}); delete it to start again"
        ) from error


def restore(path: Path, method: Stateful, state: State) -> None:
    """Restore the stored state of a method; raises ValueError if it is the state of another method."""
    with _refusing(path):
        _check_state("method", state, method.state())
        try:
            method.restore(state)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"got another method's state: {error!r}") from error
        if _names(method.state()) != _names(state):
            raise ValueError("got another method's state")


def _check_state(name: str, state: object, like: object) -> None:
    """Refuse values whose types differ from those of a new method; additional tensors are allowed."""
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


def _names(state: object) -> object:
    """The names in a state, without empty parts."""
    below = {key: _names(value) for key, value in state.items()} if isinstance(state, dict) else None
    return {key: value for key, value in below.items() if value != {}} if below is not None else None


def _joined(tensors: dict[str, Stored], values: dict[str, object]) -> State:
    """The method's state; all names must be below "method"."""
    if any(name.split("/")[0] != "method" for name in (*tensors, *values)):
        raise ValueError(f"got {', '.join((*tensors, *values))[:60]}, expected the state of a method")
    try:
        state: State = join_state(tensors, values).get("method", {})
    except (TypeError, AttributeError) as error:
        raise ValueError("got a value below a value in the state of the method") from error
    return state


def _refuse_another_run(path: Path, found: dict[str, str], own: dict[str, str]) -> None:
    differing = [key for key in own if found.get(key) != own[key]]
    if differing:
        hint = "; without dim, the size of the embeddings depends on the machine" if "towers" in differing else ""
        raise ValueError(
            f"checkpoint: {path} belongs to another run, which differs in {', '.join(differing)}; choose another path, "
            f"or delete the file to start again{hint}"
        )


def _read_tensors(
    file: shard_files.Reader, held: dict[str, str], like: Parameters, shards: Shards
) -> dict[str, Stored]:
    """The stored tensors: Parameters, rows of this process's entities, and other tensors."""
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

"""Checkpoints: one safetensors file with JSON in its header, written under another name and renamed.

A run that is killed at any moment leaves either the old file or the new one. Nothing is unpickled. The header holds a
fingerprint of problem, towers, method and options; another run's file, or a damaged one, is refused. Checked by
tests/test_checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramtower._files import replacing
from gramtower.model.parameters import Parameters
from gramtower.model.towers import Towers
from gramtower.objective.problem import Problem
from gramtower.optim.parts import State, join_state, split_state
from gramtower.training.result import Record

_FORMAT = "gramtower-checkpoint-1"


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
    a, b = problem.weight_arrays
    numbers = [problem.omega, problem.l2, problem.embedding_l2, problem.frequency_power, problem.loss.name]
    layout = {name: list(shape) for name, shape in towers.parameters().layout.shapes.items()}
    return {
        "pairs": _digest(problem.pairs.offsets, problem.pairs.columns, problem.labels),
        "features": _digest(*problem.left.arrays) + _digest(*problem.right.arrays),
        "objective": json.dumps(numbers) + _digest(a, b, problem.pair_weights, *problem.imputed_arrays),
        "towers": json.dumps(layout) + str(towers.dtype),
        "optimizer": optimizer,
        "options": json.dumps(options, sort_keys=True, default=str),
        "seed": str(seed),
    }


def write_checkpoint(path: Path, marks: dict[str, str], saved: Saved) -> None:
    """Save a run; the file at ``path`` is replaced in one step."""
    from safetensors.torch import save_file

    tensors, values = split_state({"method": saved.method})
    tensors["parameters"] = saved.parameters
    if saved.best is not None:
        tensors["best"] = saved.best
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
    with replacing(path) as partial:
        save_file({k: t.contiguous().clone() for k, t in tensors.items()}, partial, {"run": json.dumps(header)})


def read_checkpoint(path: Path, marks: dict[str, str], device: torch.device) -> Saved:
    """Load a run.

    Raises:
        ValueError: if the file is damaged, not a checkpoint, or belongs to another run.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {})["run"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if header["format"] != _FORMAT:
            raise KeyError(header["format"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ValueError(
            f"checkpoint: {path} is damaged or not a checkpoint of this version ({error}); delete it to start anew"
        ) from error
    differing = [key for key in marks if header["fingerprint"].get(key) != marks[key]]
    if differing:
        raise ValueError(
            f"checkpoint: {path} belongs to another run, which differs in {', '.join(differing)}; give this run "
            "another path, or delete the file to start anew"
        )
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


def _digest(*arrays: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        if array is None:
            digest.update(b"none")
        else:
            plain = np.ascontiguousarray(array.cpu().numpy() if isinstance(array, Tensor) else array)
            digest.update(f"{plain.dtype}{plain.shape}".encode())
            digest.update(plain.data)
    return digest.hexdigest()


def as_parameters_like(vector: Tensor, like: Parameters) -> Parameters:
    """A stored vector as parameters of a layout."""
    return Parameters(like.layout, vector.to(like.vector))

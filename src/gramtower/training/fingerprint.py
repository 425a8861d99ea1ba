"""What a run is of: everything that shapes its function, its objective, its steps or its choice of a point.

Digests of pairs, features and weights, the towers' modules with their settings, the method with its options, the metric
and what it is measured on. Limits (iterations, seconds, tolerance) are left out: a run may be given more of them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramtower._util import host
from gramtower._util.torch_runtime import parallel_for
from gramtower.data.features import Features
from gramtower.distributed.agreement import Digest
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Rows, Shards
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.parameters import Layout, side_of
from gramtower.engine.towers.towers import Towers

_MANY = 1 << 20  # entries from which on compiled code takes them

#: Attributes that every module has, and sizes of first layers.
_INTERNAL = {*vars(nn.Module()), "in_features", "num_embeddings"}


def fingerprint(
    problem: Problem,
    towers: Towers,
    optimizer: str,
    options: dict[str, Any],
    seed: int,
    validation: Any = None,
    patience: int | None = None,
) -> dict[str, str]:
    """What must agree for a run to be continued, part by part, so that an error can name what differs.

    A ``validation`` with a method ``marks`` says itself what it measures, and on what; another function is known by its
    name alone.
    """
    group, rows = problem.shards.group, (problem.shards.left.first, problem.shards.right.first)
    (a, b), loss = problem.weight_arrays, problem.loss
    numbers = [problem.omega, problem.l2, problem.embedding_l2, problem.frequency_power]
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
        "features": "".join(features_text(side, group) for side in (problem.left, problem.right)),
        "objective": json.dumps(numbers) + "".join(digest.text(group) for digest in weights),
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
        **_validation_marks(validation, problem.shards),
    }


def _validation_marks(validation: Any, shards: Shards) -> dict[str, str]:
    if hasattr(validation, "marks"):
        marks: dict[str, str] = validation.marks(shards)
        return marks
    return {"metric": "none" if validation is None else _name(validation), "validation": "none"}


def _name(function: Any) -> str:
    """Where a function, or the class of another callable, was defined."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _architecture(towers: Towers, problem: Problem) -> str:
    """Every module of both towers: its class, what it was set to, and what it holds and does not learn.

    Sizes of first layers are left out: over processes they count local rows. "towers" has them for all rows.
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


def _text(value: Any, rows: Rows, group: Group) -> str:
    """A module's attribute: plain values as they are, tensors by their content, anything else by its name."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, rows, group) for item in value)}]"
    if isinstance(value, (Tensor, np.ndarray)):
        array = torch.as_tensor(value).detach().cpu().to(torch.float64).numpy()
        # A table over ids holds local rows; its content is that of all processes' rows.
        table = group.from_first(bool(array.ndim) and len(array) == rows.count)
        digest = Digest().add_rows(np.atleast_1d(array), rows.first if table else 0)
        return f"{'rows of ' if table else ''}{array.shape[1:] if table else array.shape} " + digest.text(
            group if table else SINGLE
        )
    return _name(value)


def _pair_digest(problem: Problem, values: Any) -> Digest:
    """The pairs with a number each, whichever process holds them."""
    pairs = problem.pairs
    return sparse_digest(
        pairs.offsets.numpy(), pairs.columns.numpy(), values, problem.shards.left.first, problem.shape[1]
    )


def sparse_digest(offsets: Any, columns: Any, values: Any, first: int, width: int) -> Digest:
    """Rows of a sparse matrix, of which these begin with row ``first`` of all processes' rows."""
    rows = len(offsets) - 1
    if len(columns) < _MANY or not host.has_numba():
        keys = np.repeat(np.arange(first, first + rows), np.diff(offsets)) * width + columns
        return Digest().add(keys, np.asarray(values))
    from gramtower.distributed.entry_sums import entry_sums  # compiled by numba

    cuts = np.linspace(0, len(columns), 8 * torch.get_num_threads() + 1)[1:-1]
    bounds = [0, *np.searchsorted(offsets, cuts).tolist(), rows]
    parts: list[Any] = []
    parallel_for(
        lambda a, b: parts.append(entry_sums(offsets[a : b + 1], columns, np.asarray(values), first + a, width)), bounds
    )
    digest = Digest()
    for part in parts:
        digest.add_sums(part)
    return digest


def features_text(features: Features, group: Group) -> str:
    """Kind, size and content of one side's features, whichever process holds which rows."""
    arrays = [array.numpy() for array in features.arrays]
    if features.kind == "sparse":
        offsets, columns, values = arrays
        digest = sparse_digest(offsets, columns, values, features.first, features.width)
    else:
        digest = Digest().add_rows(arrays[0] if arrays else None, features.first)
    width = features.total if features.kind == "ids" else features.width
    return f"{features.kind} {features.total} × {width} {digest.text(group)} "


def global_shapes(layout: Layout, shards: Shards) -> dict[str, list[int]]:
    """Shapes of the tensors of all processes together."""
    shapes = {name: list(shape) for name, shape in layout.shapes.items()}
    for name in layout.owned:
        shapes[name][0] = (shards.left if side_of(name) == "left" else shards.right).total
    return shapes

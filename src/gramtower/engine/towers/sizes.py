"""How many bytes towers take: activations of an entity, features on a GPU, factors of the preconditioner.

What the memory plan (engine/objective/plan.py) asks of towers before anything is allocated. Checked by
tests/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gramtower.data.features import Features
from gramtower.engine.kernels import layout
from gramtower.engine.towers.analytic import InputAffine
from gramtower.engine.towers.steps import Op, Values


@dataclass(frozen=True)
class Sizes:
    """Columns of both towers, bytes of an entity's activations and the least sensible block on each side.

    Attributes:
        factor_bytes: of the preconditioner's factors with what is needed to invert them.
        autodiff: whether a module is differentiated by autodiff, which allocates gradients.
        kept_bytes: of row_bytes, what is kept as long as a point.
        viewed: whether each side's outputs are views of θ, which take nothing.
        feature_bytes: of features on a GPU, and of what passes over sparse ones take in blocks of so many rows.
    """

    columns: int
    row_bytes: tuple[int, int]
    least_block: tuple[int, int]
    factor_bytes: int
    autodiff: bool
    kept_bytes: tuple[int, int]
    viewed: tuple[bool, bool]
    feature_bytes: Callable[[int], int]


def feature_bytes(features: Features, ops: list[Op], values: Values, columns: int) -> Callable[[int], int]:
    """Features as a GPU reads them: dense rows; of sparse ones columns and values, their orders, and lines of sums."""
    item = values.dtype.itemsize
    if features.kind != "sparse":
        return lambda rows: 0 if features.kind == "ids" else item * features.entries
    offsets, entries, _ = features.arrays
    counts = torch.bincount(entries, minlength=features.width)
    width = ops[0].layer_width(values.tensors) or columns
    bounds = offsets.cpu().numpy()

    def size(rows: int) -> int:
        most = int(np.diff(np.append(bounds[:-1:rows], bounds[-1])).max(initial=0))
        pieces, lines = layout.block_order(counts, features.rows, rows, most)
        pieces = min(pieces, 2 * features.entries + features.rows)
        return (16 + item) * features.entries + 16 * features.rows + layout.PIECE_BYTES * pieces + lines * width * item

    return size


def factor_bytes(ops: list[Op], kind: str, values: Values) -> int:
    """A and S of each layer in float64, damped, factorised and inverted."""
    sides: list[int] = []
    first = ops[0].parts
    inputs = {id(op) for op in first if len(first) == 1 or isinstance(op, InputAffine)}
    for part in (part for op in ops for part in op.parts):
        shapes = [values.tensors[name].shape for name in part.parameters if name in values.tensors]
        for shape in (shape for shape in shapes if len(shape) == 2):
            table = kind != "dense" and id(part) in inputs
            sides += [min(shape)] if table else list(shape)  # of a table A is a diagonal
    sides += [op.live_columns for op in ops]
    return 8 * 4 * sum(side * side for side in sides)

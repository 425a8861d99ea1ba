"""What training takes, and how it is made to fit the memory budget.

Counted is what training by newton-kron needs: θ and the four vectors of conjugate gradient; the pairs with the orders
in which they are visited; slopes, curvatures and products on the pairs; outputs and directions of both sides; the
preconditioner's factors; activations. On a CPU, where the towers hold θ already, the count of θ stands for the best one
of early stopping. A budget on a CPU below all that, with activations recomputed in the smallest blocks, is refused.

On a GPU, if all that, with activations recomputed, exceeds the budget, left rows go block by block (blocks.py). Where
it makes larger blocks possible, the pairs are sent from host memory: a GPU waits for many small launches longer than
for the pairs. Features of entities are not counted. Checked by tests/test_blocks.py and, against the resident memory
of a process, by tests/test_memory.py and benchmarks/bench_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gramtower.model.towers import Sizes

if TYPE_CHECKING:
    from gramtower.objective.problem import Problem

_LARGEST, _SMALLEST = 1 << 16, 1 << 10  # rows of a block: small ones are launches more than work
_VECTORS = 5  # of θ's size: θ itself, the solution, the residual, the direction and its product
_ORDERS = 12  # bytes of a pair: its column, its row and its place in the order by columns
_FEWEST = 256  # rows of a block on a CPU: with fewer, towers run many times slower
_UNSORTED = 20  # more of it on a CPU, while it is sorted by columns
_SENT = 2  # blocks of pairs on the device at a time, one of them on the way


@dataclass(frozen=True)
class Footprint:
    """Sizes that the memory of an evaluation follows from.

    Attributes:
        parameters: numbers in θ.
        rows: m and n.
        columns: k.
        row_bytes: bytes of an entity's activations on each side.
        pairs: |O|.
        most_pairs: the most pairs in a block of so many left rows.
        per_pair: numbers kept for each pair besides its place, such as weights.
        item: bytes of a number.
        extra: bytes of the preconditioner's factors, and of gradients that autodiff makes.
        on_cpu: whether pairs are sorted, and losses worked out, in plain passes.
    """

    parameters: int
    rows: tuple[int, int]
    columns: int
    row_bytes: tuple[int, int]
    pairs: int
    most_pairs: Callable[[int], int]
    per_pair: int
    item: int
    extra: int = 0
    on_cpu: bool = False

    @property
    def vectors(self) -> int:
        """Vectors of θ's size, and the right side's outputs, direction and results."""
        return self.item * (_VECTORS * self.parameters + 5 * self.rows[1] * self.columns)

    @property
    def stored_pairs(self) -> int:
        """The pairs, their orders and their weights."""
        return self.pairs * (_ORDERS + self.item * self.per_pair)

    @property
    def whole(self) -> int:
        """All but activations, when everything is done at once."""
        left = 3 * self.rows[0] * self.columns
        passes = self.pairs * (_UNSORTED + 3 * self.item) if self.on_cpu else 0
        return self.vectors + self.stored_pairs + self.item * (3 * self.pairs + left) + passes + self.extra

    @property
    def least(self) -> int:
        """The smallest budget that is kept on a CPU: activations recomputed, in the smallest blocks."""
        return self.whole + 3 * max(min(_FEWEST, n) * size for n, size in zip(self.rows, self.row_bytes, strict=True))

    def block(self, rows: int, sent: bool) -> int:
        """A block of left rows: activations and room for their changes, P, W, U, and its pairs' values."""
        own = max(self.row_bytes) + 3 * self.item * self.columns
        orders = _ORDERS - (4 if self.rows[1] <= _LARGEST else 2)  # rows, and few columns, in 16 bits
        pair = 3 * self.item + (_SENT * (orders + self.item * self.per_pair) if sent else 0)
        return int(rows * own + pair * self.most_pairs(rows))


def footprint(problem: Problem, parameters: int, sizes: Sizes, dtype: torch.dtype, on_cpu: bool) -> Footprint:
    """What evaluations of a problem take with towers of these sizes."""
    a, b = problem.weight_arrays
    labels = problem.labels
    kept = (
        a is not None or b is not None,
        problem.pair_weights is not None,
        problem.imputed.factors is not None,
        bool(len(labels)) and bool((labels != labels[0]).any()),  # one number stands for labels that are all alike
    )
    offsets, item = problem.pairs.offsets.cpu().numpy(), torch.finfo(dtype).bits // 8

    def most_pairs(rows: int) -> int:
        return int(np.diff(np.append(offsets[:-1:rows], offsets[-1])).max(initial=0))

    return Footprint(
        parameters, problem.shape, sizes.columns, sizes.row_bytes, len(problem.pairs), most_pairs, sum(kept), item,
        sizes.factor_bytes + 2 * item * parameters * sizes.autodiff, on_cpu,
    )  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """Left rows go block by block.

    Attributes:
        rows: of a block.
        streamed: whether pairs are sent from host memory.
    """

    rows: int
    streamed: bool


def plan_sweep(budget: int, needs: Footprint) -> Sweep | None:
    """How to stay within ``budget`` bytes; None if there is no need to go block by block."""
    recomputed = 3 * min(16 * _SMALLEST, max(needs.rows)) * max(needs.row_bytes)
    if needs.whole + recomputed <= budget:
        return None
    kept, sent = (
        _rows(budget - needs.vectors - pairs, needs, streamed)
        for pairs, streamed in ((needs.stored_pairs, False), (0, True))
    )
    return Sweep(max(kept, sent, _SMALLEST), streamed=sent > kept or kept < _SMALLEST)


def _rows(room: int, needs: Footprint, streamed: bool) -> int:
    """Rows of the largest blocks that fit, all about as large; half the smallest sensible number if none do."""
    rows = _LARGEST
    while True:
        blocks = -(-needs.rows[0] // rows)
        even = -(-needs.rows[0] // (blocks * _SMALLEST)) * _SMALLEST
        if needs.block(even, streamed) <= room:
            return even
        if even <= _SMALLEST:
            return _SMALLEST // 2
        rows = max(_SMALLEST, min(rows * 7 // 8, even - 1))

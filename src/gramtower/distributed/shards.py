"""The rows of each process: contiguous ranges of the left and of the right entities.

Process r holds its left entities with their features and all their pairs (local left rows × all right columns), and its
right entities with their features. Rows of id tables are held by one process each. Right rows of other processes
are exchanged by ``gather`` and ``add_right_sum``; with one process both do nothing. :func:`balanced` makes work even.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.distributed.group import SINGLE, Group, Pending


@dataclass(frozen=True)
class Sharded:
    """A tensor with a row for each entity of a side that this process holds."""

    tensor: Tensor  # the rows
    side: str  # "left" or "right"


@dataclass(frozen=True)
class Rows:
    """One side's entities cut into ranges; process r holds ``bounds[r]:bounds[r + 1]``.

    ``first``, ``stop`` and ``count`` are of the rows held here, ``total`` and ``counts`` of all processes.
    """

    bounds: tuple[int, ...]
    rank: int = 0

    @property
    def first(self) -> int:
        return self.bounds[self.rank]

    @property
    def stop(self) -> int:
        return self.bounds[self.rank + 1]

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def total(self) -> int:
        return self.bounds[-1]

    @property
    def counts(self) -> list[int]:
        return [b - a for a, b in itertools.pairwise(self.bounds)]

    def local(self, rows: Tensor) -> Tensor:
        """Select the local rows among increasing global row numbers, and return their local numbers."""
        return rows if len(self.bounds) == 2 else rows[(rows >= self.first) & (rows < self.stop)] - self.first

    def local_rows(self, name: str, rows: Any) -> Any:
        """Select the local rows of an array or sparse matrix of the side; None and text are returned unchanged."""
        if rows is None or isinstance(rows, str) or self.count == self.total:
            return rows
        if rows.shape[0] != self.total:
            check.fail(name, f"{rows.shape[0]} rows", f"{self.total}, one for each of all entities of that side")
        return rows[self.first : self.stop]

    def take(self, rows: Tensor) -> Rows:
        """The ranges of a subset of global rows (increasing), renumbered from 0."""
        cuts = torch.searchsorted(rows, torch.tensor(self.bounds, device=rows.device))
        return Rows(tuple(cuts.tolist()), self.rank)


@dataclass(frozen=True)
class Shards:
    """The ranges of both sides and the group they are spread over."""

    group: Group
    left: Rows
    right: Rows

    @property
    def single(self) -> bool:
        """Whether one process holds everything."""
        return self.group.size == 1

    def gather(self, rows: Tensor, out: Tensor | None = None) -> Pending:
        """All-gather the right rows."""
        return self.group.gather_rows(rows, self.right.counts, out)

    def add_right_sum(self, out: Tensor, add: Callable[[Tensor], None]) -> Pending:
        """Call ``add`` on zeros (n, …) in every process, reduce-scatter them, and add the local rows to ``out``."""
        if self.single:
            add(out)
            return Pending(lambda: out)
        partial = out.new_zeros(self.right.total, *out.shape[1:])
        add(partial)
        pending = self.group.reduce_scatter_rows(partial, self.right.counts)
        return Pending(lambda: out.add_(pending.wait()))


def unsharded(shape: tuple[int, int]) -> Shards:
    """All rows in one process."""
    return Shards(SINGLE, Rows((0, shape[0])), Rows((0, shape[1])))


def spread(group: Group, left_costs: ArrayLike, right_costs: ArrayLike) -> Shards:
    """Ranges of about equal cost, one for each process."""
    left, right = (balanced(costs, group.size) for costs in (left_costs, right_costs))
    return Shards(group, Rows(left, group.rank), Rows(right, group.rank))


def balanced(costs: ArrayLike, parts: int) -> tuple[int, ...]:
    """Bounds of ``parts`` contiguous ranges whose costs differ by no more than about one entity's cost."""
    costs = np.asarray(costs, dtype=np.float64)
    if costs.ndim != 1 or (costs < 0).any():
        check.fail("costs", f"shape {costs.shape}", "one number >= 0 for each entity")
    ends = np.cumsum(costs)
    total = float(ends[-1]) if len(ends) else 0.0
    wanted = total * np.arange(1, parts) / parts
    after = np.searchsorted(ends, wanted)
    # cut before or after the entity in which the wanted sum falls, whichever is nearer
    before = np.where(after > 0, ends[np.maximum(after - 1, 0)], 0.0) if len(ends) else wanted
    nearer = (wanted - before) > (np.append(ends, total)[after] - wanted)
    cuts = np.minimum(after + nearer, len(costs))
    return (0, *np.maximum.accumulate(cuts).tolist(), len(costs))


def row_work(dim: int, hidden: Sequence[int] = ()) -> float:
    """Tower work of one entity in a G·d, in units of one observed pair's work.

    A layer of a × b weights takes 8ab operations in jvp and vjp, a pair 8k in the two passes; a pair's operations take
    about four times as long, because each gathers its rows from memory.
    """
    widths = [*hidden, check.count("dim", dim)]
    weights = sum(a * b for a, b in itertools.pairwise(widths))
    return max(1.0, weights / (4.0 * dim))


def entity_costs(pair_counts: NDArray[np.integer], work: float) -> NDArray[np.float64]:
    """Cost of each left entity: its pairs plus its tower work."""
    return np.asarray(pair_counts, dtype=np.float64) + work

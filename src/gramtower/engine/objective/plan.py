"""The one planner of memory: what training takes, and how evaluations stay within the memory budget.

Counted is what training by newton-kron needs: θ and the four vectors of conjugate gradient; the pairs with the orders
in which they are visited; slopes, curvatures and products on the pairs; outputs and directions of both sides; the
preconditioner's factors; activations. On a CPU, where the towers hold θ already, the count of θ stands for the best one
of early stopping. Over several processes each counts the rows and pairs that it holds, and outputs of all right rows.
Features of entities are not counted. What is kept follows from that, in this order:

    resident, kept         everything at once, activations kept between forward, jvp and vjp
    resident, recomputed   activations of a tower that does not fit run again, block by block
    streamed               on a GPU: left rows go block by block through the whole evaluation (blocks.py)
    streamed, pinned       and their pairs come from pinned host memory, where that makes larger blocks possible: a GPU
                           waits for many small launches longer than for the pairs

A budget on a CPU below the smallest of these is refused. Small problems on a GPU run from CUDA graphs as well. Checked
by tests/test_memory.py and tests/test_blocks.py, and against the memory of a process by benchmarks/bench_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gramtower.runtime.memory import BlockPlan, readable

_LARGEST, _SMALLEST = 1 << 16, 1 << 10  # rows of a block: small ones are launches more than work
_VECTORS = 5  # of θ's size: θ itself, the solution, the residual, the direction and its product
_ORDERS = 12  # bytes of a pair: its column, its row and its place in the order by columns
_FEWEST = 256  # rows of a block on a CPU: with fewer, towers run many times slower
_UNSORTED = 20  # more of it on a CPU, while it is sorted by columns
_IN_FLIGHT = 2  # blocks of pairs on the device at a time, one of them on the way
_CPU_BLOCK, _GPU_BLOCK = 2048, 3 << 15  # rows that a tower works on; on a CPU a block's activations stay in cache
_GRAPHED = 1 << 30  # bytes of parameters, activations and pairs above which launches no longer matter


@dataclass(frozen=True)
class Footprint:
    """Sizes that the memory of an evaluation follows from.

    Attributes:
        parameters: numbers in θ.
        rows: entities held here on each side.
        columns: k.
        row_bytes: bytes of an entity's activations on each side.
        pairs: |O|.
        most_pairs: the most pairs in a block of so many left rows.
        per_pair: numbers kept for each pair besides its place, such as weights.
        item: bytes of a number.
        extra: bytes of the preconditioner's factors, and of gradients that autodiff makes.
        on_cpu: whether pairs are sorted, and losses computed, in plain passes.
        all_right: right entities of all processes; 0 for those held here.
        least_block: smallest sensible block of rows on each side.
        graph_numbers: numbers that a CUDA graph would hold; 0 where there is nothing to gain from one.
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
    all_right: int = 0
    least_block: tuple[int, int] = (1, 1)
    graph_numbers: int = 0

    @property
    def vectors(self) -> int:
        """Vectors of θ's size, and the right side's outputs, direction and results."""
        return self.item * (_VECTORS * self.parameters + 5 * (self.all_right or self.rows[1]) * self.columns)

    @property
    def stored_pairs(self) -> int:
        """The pairs, their orders and their weights."""
        return self.pairs * (_ORDERS + self.item * self.per_pair)

    @property
    def resident(self) -> int:
        """All but activations, with everything resident."""
        left = 3 * self.rows[0] * self.columns
        passes = self.pairs * (_UNSORTED + 3 * self.item) if self.on_cpu else 0
        return self.vectors + self.stored_pairs + self.item * (3 * self.pairs + left) + passes + self.extra

    @property
    def least(self) -> int:
        """The smallest budget that is kept on a CPU: activations recomputed, in the smallest blocks."""
        return self.resident + 3 * max(
            min(_FEWEST, n) * size for n, size in zip(self.rows, self.row_bytes, strict=True)
        )

    def block(self, rows: int, pinned: bool) -> int:
        """A block of left rows: activations and buffers for their changes, P, W, U, and its pairs' values."""
        per_row = max(self.row_bytes) + 3 * self.item * self.columns
        orders = _ORDERS - (4 if self.rows[1] <= _LARGEST else 2)  # rows, and few columns, in 16 bits
        pair = 3 * self.item + (_IN_FLIGHT * (orders + self.item * self.per_pair) if pinned else 0)
        return int(rows * per_row + pair * self.most_pairs(rows))


@dataclass(frozen=True)
class Streamed:
    """Left rows go block by block.

    Attributes:
        rows: of a block.
        pinned: whether pairs come from pinned host memory.
    """

    rows: int
    pinned: bool


@dataclass(frozen=True, repr=False)
class Plan:
    """How evaluations stay within the memory budget.

    Attributes:
        budget: bytes.
        needs: what there is to plan.
        activations: bytes left for activations.
        left: row blocks of the left tower.
        right: row blocks of the right tower.
        streamed: left rows in blocks, or None where they are resident.
        graphs: whether evaluations run from CUDA graphs.
    """

    budget: int
    needs: Footprint
    activations: int
    left: BlockPlan
    right: BlockPlan
    streamed: Streamed | None
    graphs: bool

    @property
    def bytes(self) -> int:
        """What training is planned to take."""
        n, towers = self.needs, zip((self.left, self.right), self.needs.rows, self.needs.row_bytes, strict=True)
        if self.streamed is not None:
            pairs = 0 if self.streamed.pinned else n.stored_pairs
            return n.vectors + pairs + n.block(self.streamed.rows, self.streamed.pinned)
        kept = [(rows if plan.keep else 3 * plan.rows) * size for plan, rows, size in towers]
        return n.resident + sum(kept)

    def blocks_for(self, rows: tuple[int, int]) -> tuple[BlockPlan, BlockPlan]:
        """Row blocks for a sample of so many rows."""
        return plan_blocks(self.activations, rows, self.needs)

    def __repr__(self) -> str:
        def tower(side: str, plan: BlockPlan) -> str:
            return f"{side} activations {'kept' if plan.keep else f'recomputed in blocks of {plan.rows:,} rows'}"

        if self.streamed is None:
            how = [tower("left", self.left), tower("right", self.right)]
        else:
            source = "from pinned host memory" if self.streamed.pinned else "on the device"
            how = [f"left rows streamed in blocks of {self.streamed.rows:,}, their pairs {source}"]
        graphs = ["CUDA graphs"] if self.graphs else []
        return f"Plan({readable(self.bytes)} of {readable(self.budget)}: {'; '.join(how + graphs)})"


def make_plan(
    budget: int,
    needs: Footprint,
    streamed: Streamed | None = None,
    graphs: bool = True,
    activations: int | None = None,
) -> Plan:
    """The plan for a budget.

    Args:
        budget: bytes.
        needs: what there is to plan.
        streamed: asks for these blocks of left rows, whatever the budget.
        graphs: whether CUDA graphs may be used.
        activations: bytes for activations, whatever the budget leaves for them.
    """
    if streamed is None and not needs.on_cpu and not needs.all_right:
        streamed = plan_streaming(budget, needs)
    if activations is None:
        activations = budget - needs.resident if budget > needs.resident else budget // 8
    if streamed is not None:
        blocks = BlockPlan(streamed.rows, keep=False, outputs=False), BlockPlan(streamed.rows, keep=False)
        return Plan(budget, needs, activations, *blocks, streamed, False)
    size = needs.item * needs.graph_numbers
    replayed = graphs and 0 < size < _GRAPHED and 4 * size < activations
    return Plan(budget, needs, activations, *plan_blocks(activations, needs.rows, needs), None, replayed)


def plan_blocks(activations: int, rows: tuple[int, int], needs: Footprint) -> tuple[BlockPlan, BlockPlan]:
    """Row blocks of both towers over ``rows`` within so many bytes of activations; the smaller side is kept first."""
    usual = _CPU_BLOCK if needs.on_cpu else _GPU_BLOCK
    plans: dict[int, BlockPlan] = {}
    left_over = activations
    for side in sorted((0, 1), key=lambda s: rows[s] * needs.row_bytes[s]):
        need = rows[side] * needs.row_bytes[side]
        block = max(1, min(rows[side], max(usual, needs.least_block[side])))
        if need <= left_over:
            plans[side] = BlockPlan(block, True)
            left_over -= need
        else:  # a block is alive together with temporaries of about twice its size
            fitting = max(16, left_over // (3 * max(1, needs.row_bytes[side])))
            plans[side] = BlockPlan(min(block, fitting), False)
    return plans[0], plans[1]


def plan_streaming(budget: int, needs: Footprint) -> Streamed | None:
    """How to stay within ``budget`` bytes on a GPU; None if there is no need to go block by block."""
    recomputed = 3 * min(16 * _SMALLEST, max(needs.rows)) * max(needs.row_bytes)
    if needs.resident + recomputed <= budget:
        return None
    resident, copied = (
        _rows(budget - needs.vectors - pairs, needs, pinned)
        for pairs, pinned in ((needs.stored_pairs, False), (0, True))
    )
    rows = max(resident, copied, _SMALLEST, needs.least_block[0])
    return Streamed(rows, pinned=copied > resident or resident < _SMALLEST)


def _rows(left_over: int, needs: Footprint, pinned: bool) -> int:
    """Rows of the largest blocks that fit, all about as large; half the smallest sensible number if none do."""
    rows = _LARGEST
    while True:
        blocks = -(-needs.rows[0] // rows)
        even = -(-needs.rows[0] // (blocks * _SMALLEST)) * _SMALLEST
        if needs.block(even, pinned) <= left_over:
            return even
        if even <= _SMALLEST:
            return _SMALLEST // 2
        rows = max(_SMALLEST, min(rows * 7 // 8, even - 1))

"""The one planner of memory: how evaluations stay within the memory budget, from what training takes (footprint.py).

What is kept follows from the largest moment of training, in this order:

    resident, kept         everything at once, activations kept between forward, jvp and vjp
    resident, recomputed   activations of a tower that does not fit run again, block by block
    streamed               on a GPU: left rows go block by block through the whole evaluation (blocks.py)
    streamed, pinned       and their pairs come from pinned host memory, where that makes larger blocks possible: a GPU
                           waits for many small launches longer than for the pairs

A budget below the smallest of these is refused before work, with the smallest that would do. Small problems on a GPU
run from CUDA graphs as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gramtower._util.host import BlockPlan, readable
from gramtower.engine.objective.footprint import GPU_BLOCK, LARGEST, SMALLEST, Footprint

_CPU_BLOCK = 1 << 13  # rows that a tower works on; each block goes through a first layer's matrix
_GRAPHED = 1 << 30  # bytes of parameters, activations and pairs above which launches no longer matter


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

    @cached_property
    def bytes(self) -> int:
        """What training is planned to take, without what secant steps remember."""
        n = self.needs
        if self.streamed is not None:
            return n.streamed(self.streamed.rows, self.streamed.pinned)
        return max(n.moments(self._kept).values()) + self._working - self._kept

    @cached_property
    def spare_bytes(self) -> int:
        """What the budget leaves for the pairs of vectors that secant steps remember."""
        if self.streamed is not None:  # points hold nothing of the pairs, and a search as many vectors as a solution
            return max(0, self.budget - self.bytes)
        needed = max(self.needs.secant_moments(self._kept).values()) + self._working - self._kept
        return max(0, self.budget - needed)

    @property
    def _working(self) -> int:
        """Activations of both towers, kept or recomputed, with buffers for their changes."""
        n = self.needs
        return sum(
            (rows if plan.keep else 3 * plan.rows) * size
            for plan, rows, size in zip((self.left, self.right), n.rows, n.row_bytes, strict=True)
        )

    @property
    def _kept(self) -> int:
        """What a point keeps of them."""
        left, right = (
            rows if plan.keep else 0 for plan, rows in zip((self.left, self.right), self.needs.rows, strict=True)
        )
        return self.needs.kept((left, right))

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

    def blocks_for(self, rows: tuple[int, int]) -> tuple[BlockPlan, BlockPlan]:
        """Row blocks for a sample of so many rows."""
        return plan_blocks(self.activations, rows, self.needs)


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
        if budget > needs.resident:  # two points hold them during a line search
            activations = min(activations, (budget - needs.moments(0)["line search"]) // 2)
    if streamed is not None:
        blocks = BlockPlan(streamed.rows, keep=False, outputs=False), BlockPlan(streamed.rows, keep=False)
        return Plan(budget, needs, activations, *blocks, streamed, False)
    size = needs.item * needs.graph_numbers
    replayed = graphs and 0 < size < _GRAPHED and 4 * size < activations
    return Plan(budget, needs, activations, *plan_blocks(activations, needs.rows, needs), None, replayed)


def plan_blocks(activations: int, rows: tuple[int, int], needs: Footprint) -> tuple[BlockPlan, BlockPlan]:
    """Row blocks of both towers over ``rows`` within so many bytes of activations; the smaller side is kept first."""
    usual = _CPU_BLOCK if needs.on_cpu else GPU_BLOCK
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
    if needs.resident + needs.recomputed <= budget:
        return None
    resident = _rows(budget, needs, False)
    copied = _rows(budget, needs, True) if needs.can_pin else 0
    rows = max(resident, copied, SMALLEST, needs.least_block[0])
    return Streamed(rows, pinned=needs.can_pin and (copied > resident or resident < SMALLEST))


def _rows(budget: int, needs: Footprint, pinned: bool) -> int:
    """Rows of the largest blocks that fit, all about as large; half the smallest sensible number if none do."""
    blocks = -(-needs.rows[0] // LARGEST)
    while True:
        even = -(-needs.rows[0] // (blocks * SMALLEST)) * SMALLEST
        if needs.streamed(even, pinned) <= budget:
            return even
        if even <= SMALLEST:
            return SMALLEST // 2
        blocks += max(1, blocks // 8)

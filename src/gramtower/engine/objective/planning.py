"""Memory of training, counted before anything is allocated, and the plan that keeps it within a budget.

:class:`Footprint` counts the memory of newton-kron at its peak, the largest of these moments:

    solving        θ and the four vectors of conjugate gradient, slopes, curvatures and products of the pairs, outputs
                   and directions of both sides, partial lines of the passes over pairs (kernels/layout.py)
    line search    θ, the step and the next θ, and two evaluations: at the current point and at the trial point
    factors        θ, the gradient, and some numbers for each entity, for the preconditioner
    sorting        θ, the gradient, and a part of the pairs while it is sorted by columns

each with the pairs, their orders, activations, and features in the form that towers read. Outputs that are rows of a
table are views of θ and take no memory. Secant steps hold two vectors of θ's size for each pair that they remember
(``Plan.spare_bytes``). On a CPU the towers already hold θ, and the count of θ stands for the best one of early
stopping; features and the columns of the pairs are not counted. Each process counts its own rows and pairs, and the
outputs of all right rows. The first of these plans that fits the budget is used; a budget below all is refused:

    resident, kept         everything at once, activations kept between forward, jvp and vjp
    resident, recomputed   activations of a tower that does not fit are recomputed block by block
    streamed               on a GPU: left rows go block by block through the whole evaluation (blocks.py)
    streamed, pinned       and their pairs come from pinned host memory, if that makes larger blocks possible
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from gramtower._util.host import BlockPlan, readable
from gramtower.engine.kernels import layout
from gramtower.engine.kernels.elementwise import LOSS_CHUNK
from gramtower.engine.towers.stack import Sizes

_CPU_BLOCK = 1 << 13  # rows that a tower works on; each block goes through a first layer's matrix
_GRAPHED = 1 << 30  # bytes of parameters, activations and pairs above which launches no longer matter


@dataclass(frozen=True)
class Streamed:
    """Left rows go block by block."""

    rows: int  # of a block
    pinned: bool  # whether pairs come from pinned host memory


@dataclass(frozen=True, repr=False)
class Plan:
    """How evaluations stay within the memory budget."""

    budget: int  # bytes
    needs: Footprint  # what there is to plan
    activations: int  # bytes left for activations
    left: BlockPlan  # row blocks of the left tower
    right: BlockPlan  # row blocks of the right tower
    streamed: Streamed | None  # left rows in blocks, or None where they are resident
    graphs: bool  # whether evaluations run from CUDA graphs

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
    budget: int, needs: Footprint, streamed: Streamed | None = None, graphs: bool = True, activations: int | None = None
) -> Plan:
    """The plan for a budget in bytes.

    ``streamed`` blocks of left rows, and bytes for ``activations``, are used whatever the budget if they are given.
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


LARGEST, SMALLEST = 1 << 16, 1 << 10  # rows of a block: small ones are launches more than work
GPU_BLOCK = 3 << 15  # rows that a tower works on there
_VECTORS = 5  # of θ's size: θ itself, the solution, the residual, the direction and its product
_SEARCH, _SECANT = 3, 2  # of them in a line search: θ, the step, the next θ; more of them for secant steps
_ORDERS = 12  # bytes of a pair: its column, its row and its place in the order by columns
_FEWEST = 256  # rows of a block on a CPU: with fewer, towers run many times slower
_COLUMN = 4  # of them its column, which is part of the data on a CPU
_SEGMENTS = 24  # bytes of an entity on a CPU: the pieces that its pairs are cut into
_HEAP = 1 << 24  # bytes, a fifth at most, that the C library keeps of small arrays that were freed on a CPU
_LOSS = 6  # numbers for each pair of a chunk whose loss is computed on a CPU
_ENTITY = 136  # bytes of an entity while the preconditioner is made
_SAMPLE = 1 << 12  # rows, at most, that its factors are estimated from
_SMALL = 1 << 16  # bytes of whatever does not grow
_IN_FLIGHT = 2  # blocks of pairs on the device at a time, one of them on the way


@dataclass(frozen=True)
class Orders:
    """What the orders of visits take on a GPU, besides the pairs' own numbers."""

    pieces: int = 0  # of rows and columns, in all
    lines: int = 0  # of a partial result, at most at a time


@dataclass(frozen=True, kw_only=True)
class Footprint(Sizes):
    """Sizes that the memory of an evaluation follows from: those of the towers, and of the problem."""

    parameters: int  # numbers in θ
    rows: tuple[int, int]  # entities held here on each side
    pairs: int  # |O|
    most_pairs: Callable[[int], int]  # the most pairs in a block of so many left rows
    per_pair: int  # numbers kept for each pair besides its place, such as weights
    item: int  # bytes of a number
    on_cpu: bool = False  # whether pairs are sorted, and losses computed, in plain passes
    sorting: int = 20  # bytes of a pair while pairs are sorted by columns in such passes, besides the result
    all_right: int = 0  # right entities of all processes; 0 for those held here
    graph_numbers: int = 0  # numbers that a CUDA graph would hold; 0 where there is nothing to gain from one
    weighted: bool = False  # whether entities have weights
    centred: bool = False  # whether the mean of the right embeddings is subtracted from them
    bfloat16: bool = False  # whether embeddings are gathered in bfloat16
    orders: Orders = Orders()  # of all pairs
    # of blocks of so many left rows: pieces of all of them, lines of one
    block_orders: Callable[[int], Orders] = lambda rows: Orders()
    can_pin: bool = True  # whether pairs can come from pinned host memory

    @property
    def theta(self) -> int:
        """Bytes of θ."""
        return self.item * self.parameters

    @property
    def right(self) -> int:
        """The right side's outputs, direction and results."""
        rows = self.all_right or self.rows[1]
        matrices = 2 if self.viewed[1] and not self.all_right else 5
        matrices += 2 * self.centred  # Q and H less their means
        gathered = 4 * rows * self.columns if self.bfloat16 else 0
        return self.item * matrices * rows * self.columns + gathered

    @property
    def outputs(self) -> int:
        """P and Q."""
        computed = (0 if viewed else rows for viewed, rows in zip(self.viewed, self.rows, strict=True))
        return self.item * self.columns * sum(computed)

    @property
    def vectors(self) -> int:
        """Vectors of θ's size, and the right side's matrices."""
        return _VECTORS * self.theta + self.right

    @property
    def stored_pairs(self) -> int:
        """The pairs, their orders and their weights."""
        place = 4 if self.pairs >= 2**31 else 0  # more of it
        return self.pairs * (_ORDERS + place + self.item * self.per_pair)

    @property
    def entities(self) -> int:
        """Weights and penalties of both sides' entities, a preconditioner's diagonal, and matrices of k × k."""
        return 3 * self.item * sum(self.rows) + _SMALL + 16 * 8 * self.columns**2

    def matrices(self, rows: int) -> int:
        """P, W and U of so many left rows."""
        each = self.item * (0 if self.viewed[0] else 3) + (2 if self.bfloat16 else 0)
        return each * rows * self.columns

    def lines(self, lines: int) -> int:
        """Lines of a partial result."""
        return self.item * self.columns * lines

    def gramian(self, rows: int) -> int:
        """Buffers of a Gramian of so many rows on a GPU (formulas.gram)."""
        k, most = self.columns, 1 << 24
        weighted = min(rows * k, 4 * most) if self.weighted else 0
        return 0 if self.on_cpu else self.item * (min(rows * k * k // 2048, most) + weighted)

    def factors(self, rows: int) -> int:
        """What the preconditioner is made of, with weighted Gramians of so many rows at a time."""
        sample = min(_SAMPLE, max(self.rows)) * max(self.row_bytes)
        return _ENTITY * sum(self.rows) + sample + self.item * min(rows * self.columns, 1 << 26)

    def kept(self, rows: tuple[int, int]) -> int:
        """What a point keeps of the activations of so many rows of each side."""
        each = self.row_bytes if self.kept_bytes is None else self.kept_bytes
        return sum(count * size for count, size in zip(rows, each, strict=True))

    @property
    def resident(self) -> int:
        """All but activations, with everything resident."""
        return max(self.moments(0).values())

    def moments(self, kept: int) -> dict[str, int]:
        """The moments that may take most, with everything resident and so much kept of activations."""
        if not self.on_cpu:
            return self._gpu_moments(kept)
        return {name: size + min(_HEAP, size // 5) for name, size in self._cpu_moments(kept).items()}

    def secant_moments(self, kept: int) -> dict[str, int]:
        """The same of secant steps, without their pairs."""
        m = self.moments(kept)
        return {
            "line search": m["line search"] + _SECANT * self.theta,
            "gradient": m["solving"] - (_VECTORS - 2) * self.theta - self.item * self.pairs,
            "factors": m["factors"],
        }

    def _cpu_moments(self, kept: int) -> dict[str, int]:
        theta, number = self.theta, self.item * self.pairs
        base = self.stored_pairs - _COLUMN * self.pairs + self.entities + self.extra + _SEGMENTS * sum(self.rows)
        base += _LOSS * self.item * min(self.pairs, LOSS_CHUNK)
        point = number + self.outputs + kept  # scores, embeddings, activations
        working = self.right + self.matrices(self.rows[0]) - self.outputs  # W, U, H, V
        return {
            "solving": base + point + working + _VECTORS * theta + 2 * number,
            "line search": base + 2 * point + _SEARCH * theta,
            "factors": base + point + 2 * theta + number + self.factors(max(self.rows)),
            "sorting": base + point + working + 2 * theta + number + self.sorting * self.pairs,
        }

    def _gpu_moments(self, kept: int) -> dict[str, int]:
        theta, number = self.theta, self.item * self.pairs
        base = self.stored_pairs + layout.PIECE_BYTES * self.orders.pieces + 8 * self.rows[0]
        base += self.entities + self.extra + self.features(GPU_BLOCK)
        point = 2 * number + self.outputs + kept  # slopes, curvatures, embeddings, activations
        working = self.right + self.matrices(self.rows[0]) - self.outputs  # W, U, H, V
        gramian, lines = self.gramian(max(self.rows)), self.lines(self.orders.lines)
        sort = layout.SORT_BYTES * min(self.pairs, layout.SORTED) + layout.CUT_BYTES * self.orders.pieces
        return {
            "solving": base + point + working + _VECTORS * theta + number + max(lines, gramian),
            "line search": base + 2 * point + _SEARCH * theta + gramian,
            "factors": base + point + 2 * theta + self.factors(max(self.rows)),
            "sorting": base + point + working + 2 * theta + sort,
        }

    @property
    def least(self) -> int:
        """The smallest budget that is kept: activations recomputed, in the smallest blocks; on a GPU streamed."""
        if self.on_cpu or self.all_right:
            return self.resident + 3 * max(
                min(_FEWEST, n) * size for n, size in zip(self.rows, self.row_bytes, strict=True)
            )
        rows = max(SMALLEST, self.least_block[0])
        ways = [self.streamed(rows, pinned) for pinned in ((False, True) if self.can_pin else (False,))]
        return min(self.resident + self.recomputed, *ways)

    @property
    def recomputed(self) -> int:
        """Activations of blocks of rows that are large enough to be worth recomputing."""
        return 3 * min(16 * SMALLEST, max(self.rows)) * max(self.row_bytes)

    def block(self, rows: int, pinned: bool) -> int:
        """A block of left rows: activations and buffers for their changes, P, W, U, and its pairs' values."""
        orders = _ORDERS - (4 if self.rows[1] <= LARGEST else 2)  # rows, and few columns, in 16 bits
        pair = 3 * self.item + (_IN_FLIGHT * (orders + self.item * self.per_pair) if pinned else 0)
        lines = self.lines(self.block_orders(rows).lines)
        activations = rows * max(self.row_bytes) + self.matrices(rows)
        return int(activations + pair * self.most_pairs(rows) + max(lines, self.gramian(rows)))

    def streamed(self, rows: int, pinned: bool) -> int:
        """What training takes with left rows in blocks of so many."""
        stored = 0 if pinned else self.stored_pairs
        base = stored + layout.PIECE_BYTES * self.block_orders(rows).pieces + 8 * self.rows[0] + self.entities
        base += self.extra + self.features(rows) + self.right + self.block(rows, pinned)
        sort = layout.SORT_BYTES * min(self.most_pairs(rows), layout.SORTED)
        return base + max(_VECTORS * self.theta, 2 * self.theta + max(self.factors(rows), sort))

"""The problem (eq:prob): which pairs were observed, what is known of the entities, and what is minimised.

    L(θ) = Σ_O w_ij ℓ(R_ij, ŷ_ij) + ½ω Σ_∉O a_i b_j (ỹ_ij − ŷ_ij)² + λΨ(θ)
           + ½μ Σ_i c_i ‖p_i‖² + ½μ Σ_j c_j ‖q_j‖²,        c_i = (|O_i| + ω Σ_j b_j)^ν,  c_j = (|O_j| + ω Σ_i a_i)^ν

The last line, a penalty on embeddings that grows with how often an entity is seen, goes beyond the paper; it is
off (μ = 0) by default. Ψ is ½‖θ‖² unless another is given (regularizers.py). All arguments are checked here,
before any work.

A :class:`Point` is the problem at parameters θ: value and gradient (value_and_gradient.py), Gauss-Newton products
(gauss_newton.py), a preconditioner (kronecker.py), and the problem along a line.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.host import default_budget, free_memory, readable
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import SparseMatrix, extremes
from gramtower.data.pairs import MatrixLike, as_features, from_sparse, sorting_bytes
from gramtower.distributed.shards import Shards, unsharded
from gramtower.engine.kernels import BACKENDS, layout, select
from gramtower.engine.kernels.elementwise import Loss, LossTerms, as_loss
from gramtower.engine.objective.blocks import PairBlocks
from gramtower.engine.objective.constants import (
    Constants,
    ImputedLike,
    Numbers,
    PairConstants,
    WeightsLike,
    as_imputed,
    check_labels,
    embedding_penalties,
    entity_weights,
    weights_of_pairs,
)
from gramtower.engine.objective.cuda_graphs import GraphExecutor, GraphPool
from gramtower.engine.objective.formulas import Side
from gramtower.engine.objective.gauss_newton import GaussNewton
from gramtower.engine.objective.kronecker import SIDES, Kronecker, kronecker
from gramtower.engine.objective.planning import Footprint, Orders, Plan, Streamed, make_plan
from gramtower.engine.objective.regularizers import Regularizer, as_regularizer
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Parameters, as_parameters
from gramtower.engine.towers.steps import Scratch
from gramtower.engine.towers.towers import Towers


@dataclass(frozen=True)
class Terms:
    """The value, term by term."""

    observed: float  # Σ_O ℓ⁺
    all_pairs: float  # ω L⁻
    l2: float  # λΨ(θ)
    embedding_l2: float

    @property
    def total(self) -> float:
        """L(θ)."""
        return self.observed + self.all_pairs + self.l2 + self.embedding_l2

    def non_finite(self) -> list[str]:
        """Names of the terms that are NaN or infinite."""
        return [name for name, value in vars(self).items() if not math.isfinite(value)]


class Point:
    """The objective at given weights: ask it for value, gradient and curvature.

    Made by :meth:`gramtower.Problem.at`.

    Its tensors are valid as long as it is: on a GPU their memory may be used again afterwards. Over several processes P
    and Q are the rows held here; values and dot products are those of all.

    Args:
        evaluation: the objective at θ.
        parameters: θ, a private copy.
        at: the problem at other parameters.
        executor: replays gradients and products from CUDA graphs; None runs them kernel by kernel.
        spare_bytes: of the memory budget, for the pairs of vectors that secant steps remember.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        parameters: Parameters,
        at: Callable[[Parameters], Point],
        executor: GraphExecutor | None = None,
        spare_bytes: int = 0,
    ) -> None:
        self.evaluation, self.parameters, self._at, self.executor = evaluation, parameters, at, executor
        self.spare_bytes = spare_bytes

    @property
    def P(self) -> Tensor:
        """The left embeddings, m × k; a forward each time they are asked for where left rows are streamed."""
        return self.evaluation.P

    @property
    def Q(self) -> Tensor:
        """The right embeddings, n × k."""
        return self.evaluation.right.outputs

    @property
    def right_rows(self) -> Tensor:
        """The right embeddings of all processes."""
        return self.evaluation.right_outputs

    @property
    def bilinear(self) -> bool:
        """Whether scores are linear in each side's parameters while the other's are fixed, and both are trained."""
        at, towers = self.evaluation, self.evaluation.towers
        both = all(towers.local_names(side) for side in ("left", "right"))
        return both and not towers.share_parameters and at.left.linear and at.right.linear

    @property
    def work(self) -> Work:
        """What has been done so far, for this and all other points of the problem."""
        return self.evaluation.work

    @property
    def value(self) -> float:
        """L(θ), accumulated in float64."""
        return self.terms.total

    @cached_property
    def terms(self) -> Terms:
        """The value, term by term."""
        c = self.evaluation.constants
        observed, cross, gramian, penalty, square = self._sums
        self.work.data_passes += self.evaluation.share[1]
        all_pairs = c.omega * (0.5 * c.imputed_square - cross + 0.5 * gramian)
        return Terms(observed, all_pairs, 0.5 * c.l2 * square, penalty)

    @property
    def value_noise(self) -> float:
        """Rounding level of the value: the last place of the sums it is made of."""
        c = self.evaluation.constants
        sums = 0.5 * c.omega * (c.imputed_square + abs(self._sums[2]))
        sums += sum(abs(term) for term in vars(self.terms).values())
        return float(torch.finfo(self.parameters.vector.dtype).eps * sums)

    @cached_property
    def _sums(self) -> list[float]:
        return [float(x) for x in self.evaluation.sums.tolist()]

    @torch.no_grad()
    def gradient(self) -> Parameters:
        """∇L(θ) by eq:final_grad: one vjp of each tower, two passes over O."""
        return self.evaluation.gradient() if self.executor is None else self.executor.gradient()

    def gauss_newton(self, damping: float = 0.0) -> GaussNewton:
        """G of eq:general_G as a linear operator; ``G @ d`` by eq:final_Gd. ``damping`` is added to λ only in G."""
        return GaussNewton(self.evaluation, check.number("damping", damping, minimum=0.0), self.executor)

    def preconditioner(self, kind: str = "kronecker", damping: float = 0.0, side: str | None = None) -> Kronecker:
        """M with M @ r ≈ (G + damping·I)⁻¹ r, made of Kronecker factors of the all-pairs curvature.

        With ``side``, "left" or "right", that of this side's parameters while the other's do not move: M is zero there.
        """
        check.choice("kind", kind, ("kronecker",))
        if side is not None:
            check.choice("side", side, SIDES)
            if self.evaluation.towers.share_parameters:
                check.fail("side", repr(side), "None, as the towers share parameters")
        damping = check.number("damping", damping, minimum=0.0)
        return kronecker(self.evaluation, damping, side, None if self.executor is None else self.executor.apply)

    def at(self, parameters: Parameters) -> Point:
        """The problem at other parameters."""
        return self._at(parameters)

    def along(self, direction: Parameters) -> Callable[[float], Point]:
        """The problem along a line: ``point.along(d)(δ)`` is the point at θ + δ d."""
        direction = as_parameters("direction", direction, self.parameters)
        return lambda step: self._at(self.parameters.clone().axpy_(step, direction))


class Problem:
    """What is minimised: the loss of observed pairs, and that of all others as well.

    The formula is in the first lines of this module.

    Args:
        pairs: scipy.sparse m × n. Stored entries are the observed pairs O, their values the labels R_ij. Or
            :class:`~gramtower.Interactions`, whose weights are then the default of ``pair_weights``.
        left: features of the left entities: None for one-hot ids, scipy.sparse, numpy or torch 2-D.
        right: features of the right entities, likewise.
        loss: "logistic" (labels ±1), "squared", "squared_hinge" (labels ±1) or a custom :class:`Loss`.
        omega: ω ≥ 0, the weight of unobserved pairs.
        l2: λ ≥ 0, the weight of Ψ(θ), which is ½‖θ‖².
        imputed: ỹ of unobserved pairs: one number, or (P̃, Q̃) of shapes (m, r) and (n, r). With ``"fitted"`` each
            left entity has the label that fits its scores best, their mean over the right entities weighted by b; all
            losses then see the margin of a score above it.
        left_weights: a ≥ 0, one for each left entity; "degree^0.5" and the like for a power of how often it is
            observed, of mean 1; None for ones.
        right_weights: b ≥ 0, likewise for the right entities.
        embedding_l2: μ ≥ 0.
        frequency_power: ν.
        pair_weights: weights ≥ 0 of the observed pairs' losses, one for each stored entry in row order (that of a
            sorted CSR matrix); "degree^-0.5" and the like for a power of how often the left entity is observed, of mean
            1 over the pairs; None for ones.
        regularizer: another Ψ: a :class:`BlockRidge` or its weights, or a :class:`Regularizer` of your own.
        memory_budget: bytes that training by newton-kron may take beyond the data and the towers, such as "512MB"; None
            for half of what is free, on a GPU more if that is too little. To stay below it, towers run in row blocks
            and recompute. A budget that cannot be kept is refused, with the smallest that can. On a GPU θ counts as
            well; left entities go block by block through the whole evaluation, and pairs are sent from host memory, as
            far as it takes. ``lbfgs`` keeps two vectors of θ's size for each step it remembers, beyond the budget.
        kernels: "auto", or a pair-kernel backend by name ("numba", "triton", "reference").
        precision: of matrix products on a GPU: "float32", or "tf32", which is faster and rounds their inputs to ten
            bits.
        pair_precision: of the embeddings that Gauss-Newton products gather for each pair on a GPU: "float32", or
            "bfloat16", which halves the bytes. Value and gradient gather float32 in any case.
        shards: which process holds which entities, when there are several. Everything above is then local:
            the pairs of local left entities with all right ones, and the rows of local entities.

    Example:
        >>> problem = gt.Problem(sp.eye(4, 3, format="csr"), omega=0.1, l2=0.01)
        >>> point = problem.at(gt.mlp_towers(problem, hidden=(8,), dim=2))
        >>> bool(point.gauss_newton().shape[0] == point.gradient().vector.numel())
        True
    """

    def __init__(
        self,
        pairs: Interactions | SparseMatrix,
        left: MatrixLike | None = None,
        right: MatrixLike | None = None,
        loss: str | Loss = "logistic",
        omega: float = 2.0**-8,
        l2: float = 1.0,
        imputed: ImputedLike = -1.0,
        left_weights: WeightsLike = None,
        right_weights: WeightsLike = None,
        embedding_l2: float = 0.0,
        frequency_power: float = 1.0,
        *,
        pair_weights: WeightsLike = None,
        regularizer: Regularizer | Mapping[str, float] | None = None,
        memory_budget: int | str | None = None,
        kernels: str = "auto",
        precision: str = "float32",
        pair_precision: str = "float32",
        shards: Shards | None = None,
    ) -> None:
        if isinstance(pairs, Interactions):
            pair_weights = pairs.weights if pair_weights is None else pair_weights
            pairs = pairs.matrix
        self.labels: Numbers  # R_ij of the observed pairs, in row order
        self.pairs, self.labels = from_sparse("pairs", pairs, least_rows=int(shards is None))
        self.shards = unsharded(self.pairs.shape) if shards is None else shards
        m, n = self.shards.left.count, self.shards.right.count
        if self.pairs.shape != (m, self.shards.right.total):
            check.fail("pairs", f"shape {self.pairs.shape}", f"shape {(m, self.shards.right.total)}, as shards says")
        self.loss = as_loss(loss)
        self.label_range: tuple[Any, Any] = extremes(self.labels) if len(self.labels) else (0.0, 0.0)
        check_labels(self.loss, self.labels, self.label_range, self.pairs)
        self.left, self.right = as_features("left", left, m), as_features("right", right, n)
        self.omega = check.number("omega", omega, minimum=0.0)
        self.l2 = check.number("l2", l2, minimum=0.0)
        self.imputed = as_imputed(imputed, (m, n))
        self.observed, self.first_entry, self._column_counts = self._place_rows()
        group = self.shards.group
        self.weight_arrays = (  # a and b, None for ones
            entity_weights("left_weights", left_weights, self.pairs.row_counts.numpy(), group),
            entity_weights("right_weights", right_weights, self.column_counts.numpy(), group),
        )
        self.pair_weights = weights_of_pairs(pair_weights, self.pairs.row_counts.numpy(), group)
        self.regularizer = as_regularizer(regularizer)
        self.embedding_l2 = check.number("embedding_l2", embedding_l2, minimum=0.0)
        self.frequency_power = check.number("frequency_power", frequency_power)
        self.penalty_arrays = self._penalties()
        self.memory_budget = None if memory_budget is None else check.memory_size("memory_budget", memory_budget)
        self.planned_budgets: dict[torch.device, int] = {}  # by device, what evaluations there were planned with
        self.kernels = check.choice("kernels", kernels, BACKENDS)
        self.precision = check.choice("precision", precision, host.PRECISIONS)
        self.pair_precision = check.choice("pair_precision", pair_precision, host.PAIR_PRECISIONS)
        self.work = Work()
        self.graphs = self.regularizer is None  # small problems on a GPU run from CUDA graphs; a user's code does not
        self._graph_pool: tuple[tuple[Any, ...], GraphPool] | None = None
        self.streamed: Streamed | None = None  # asks for left rows block by block; otherwise the budget decides
        self.activations: int | None = None  # bytes for activations; otherwise what the budget leaves
        self._plans: WeakKeyDictionary[Towers, tuple[tuple[Any, ...], Plan]] = WeakKeyDictionary()
        self._constants: dict[tuple[torch.dtype, torch.device], Constants] = {}
        self._pair_blocks: dict[tuple[torch.dtype, torch.device, Streamed | None], PairBlocks] = {}
        self._shared: Problem | None = None  # with_penalties

    def with_penalties(self, l2: float, embedding_l2: float) -> Problem:
        """Give the same problem with another λ and μ; everything else is shared with this one, not copied."""
        found = copy.copy(self)
        found.l2 = check.number("l2", l2, minimum=0.0)
        found.embedding_l2 = check.number("embedding_l2", embedding_l2, minimum=0.0)
        found.penalty_arrays = found._penalties()
        found.planned_budgets, found.work = dict(self.planned_budgets), Work()
        found._plans, found._constants, found._graph_pool = WeakKeyDictionary(), {}, None
        found._shared = self if self._shared is None else self._shared  # the blocks of pairs refer to it
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n), over all processes."""
        return self.shards.left.total, self.shards.right.total

    def __repr__(self) -> str:
        m, n = self.shape
        terms = f"{self.loss.name}, omega={self.omega:g}, l2={self.l2:g}"
        return f"Problem({m:,} × {n:,}, {self.observed:,} observed, {terms})"

    def at(self, towers: Towers, parameters: Parameters | None = None) -> Point:
        """The problem evaluated at the towers' present parameters, or at those given.

        The result keeps a copy of the parameters: later changes of the modules do not reach it.
        """
        self._join(towers)
        present = towers.parameters()
        if parameters is not None:
            present.vector.copy_(as_parameters("parameters", parameters, present).vector)
        with host.explained(self.memory_budget):
            return self._evaluate(towers, present)

    def plan(self, towers: Towers) -> Plan:
        """How evaluations with these towers stay within the memory budget.

        Raises:
            ValueError: if a budget cannot be kept, or if the memory cannot hold what training takes.
        """
        self._join(towers)
        return self._planned(towers)

    def _join(self, towers: Towers) -> None:
        if not isinstance(towers, Towers):
            check.fail("towers", type(towers).__name__, "a gramtower.Towers")
        towers.join(self.shards, self.left, self.right)

    def _evaluate(self, towers: Towers, theta: Parameters) -> Point:
        """The point at ``theta``, which it keeps without a copy."""
        plan = self._planned(towers)
        if self.memory_budget is not None and towers.device.type == "cpu":
            host.return_memory()  # the C library keeps what was freed in arrays of up to 32 MB, beyond the budget
        graphs = self._graphs(towers).acquire(theta) if plan.graphs else None
        at = partial(self._evaluate, towers)
        if graphs is None:
            return Point(self._evaluation(towers, theta, plan), theta, at, spare_bytes=plan.spare_bytes)
        return Point(graphs.evaluation, theta, at, graphs, plan.spare_bytes)

    def _evaluation(
        self, towers: Towers, theta: Parameters, plan: Plan, scratch: dict[str, Scratch] | None = None
    ) -> Evaluation:
        """The objective at parameters, over resident or streamed left rows."""
        kernels, constants = select(towers.device, self.kernels), self.constants(towers)
        blocks = plan.left, plan.right
        with host.products_in(self.precision):
            left, right = towers.linearize(theta, self.left, self.right, kernels, blocks, self.work, scratch)
        pairs = self._blocks_of_pairs(towers, plan.streamed)
        return Evaluation(constants, towers, theta, pairs, left, right, kernels, self.work)

    def constants(self, towers: Towers) -> Constants:
        """The constants of the objective in the towers' dtype on their device; made once."""
        key = (towers.dtype, towers.device)
        if key not in self._constants:
            self._constants[key] = _made_constants(self, *key)
        return self._constants[key]

    def resident_pairs(self, towers: Towers) -> PairConstants:
        """All observed pairs on the towers' device."""
        ((_, _, pairs),) = self._blocks_of_pairs(towers, None).visit()
        return pairs

    def _blocks_of_pairs(self, towers: Towers, streamed: Streamed | None) -> PairBlocks:
        key = (towers.dtype, towers.device, streamed)
        if key not in self._pair_blocks:
            here = weakref.proxy(self if self._shared is None else self._shared)  # no reference cycle
            constants = self.constants(towers)
            height, pinned = (None, False) if streamed is None else (streamed.rows, streamed.pinned)
            self._pair_blocks[key] = PairBlocks(
                lambda rows: _pair_constants(here, constants, rows),
                self.shards.left.count, height, pinned, select(towers.device, self.kernels),
            )  # fmt: skip
        return self._pair_blocks[key]

    def _planned(self, towers: Towers) -> Plan:
        """The plan, made once for towers and a budget."""
        key = self._budget(towers), self.streamed, self.graphs, self.activations, towers.signature()
        known = self._plans.get(towers)
        if known is None or known[0] != key:
            if self.streamed is not None and not self.shards.single:
                check.fail("streamed", self.streamed, "None with several processes: each holds a part of the rows")
            if self.streamed is not None and self.streamed.pinned and towers.device.type != "cuda":
                check.fail("streamed", self.streamed, "pinned=False without a GPU to copy pairs to")
            if self.regularizer is not None:
                self.regularizer.check_names(list(towers.parameters()))
            needs = self._footprint(towers)
            self._check_memory(towers, needs)
            key = self._raised_budget(towers, needs), *key[1:]
            self._plans[towers] = known = key, make_plan(key[0], needs, *key[1:4])
        return known[1]

    def least_budget(self, towers: Towers) -> int:
        """The smallest memory budget that training these towers in one process can keep to, in bytes."""
        self._join(towers)
        return self._footprint(towers).least

    def _footprint(self, towers: Towers) -> Footprint:
        """What there is to plan."""
        sizes = towers.sizes(self.left, self.right, select(towers.device, self.kernels))
        if self.regularizer is not None:  # its result, and λ times that
            sizes = replace(sizes, extra=sizes.extra + 2 * towers.dtype.itemsize * towers.size)
        low, high = self.label_range
        weighted = any(weight is not None for weight in self.weight_arrays)
        stored = weighted, self.pair_weights is not None, self.imputed.factors is not None, bool(low != high)
        offsets = self.pairs.offsets.cpu().numpy()

        def most_pairs(rows: int) -> int:
            return int(np.diff(np.append(offsets[:-1:rows], offsets[-1])).max(initial=0))

        shards, on_cpu = self.shards, towers.device.type != "cuda" and self.kernels != "triton"
        rows = shards.left.count, shards.right.count
        widths = towers.layer_widths() if shards.single and self.left.kind == self.right.kind == "ids" else None
        graphed = 0
        if widths is not None and towers.device.type == "cuda":
            layers = sum(count * sum(width) for count, width in zip(rows, widths, strict=True))
            graphed = 4 * towers.size + 5 * len(self.pairs) + layers
        orders, block_orders = self._orders(most_pairs, on_cpu)
        return Footprint(
            **vars(sizes), parameters=towers.size, rows=rows, pairs=len(self.pairs), most_pairs=most_pairs,
            per_pair=sum(stored),  # equal labels are stored once
            item=towers.dtype.itemsize, on_cpu=on_cpu, weighted=weighted, centred=self.imputed.fitted,
            sorting=sorting_bytes(len(self.pairs)), all_right=0 if shards.single else shards.right.total,
            graph_numbers=graphed, bfloat16=self.pair_precision == "bfloat16" and not on_cpu, orders=orders,
            block_orders=block_orders, can_pin=towers.device.type == "cuda",
        )  # fmt: skip

    @cached_property
    def _order_sizes(self) -> tuple[layout.OrderSizes, layout.OrderSizes]:
        """The sizes that depend only on the pairs, the same for all towers."""
        pairs = self.pairs
        return layout.row_order(pairs.row_counts), layout.column_order(pairs.column_counts, pairs.shape[0])

    def _orders(self, most_pairs: Callable[[int], int], on_cpu: bool) -> tuple[Orders, Callable[[int], Orders]]:
        """What the orders of visits take on a GPU: of all pairs, and of blocks of so many left rows."""
        if on_cpu:
            return Orders(), lambda rows: Orders()
        pairs, (left, right) = self.pairs, self._order_sizes

        def of_blocks(
            rows: int,
        ) -> Orders:  # depends only on the pairs: the plan keeps it without a cycle
            return Orders(*layout.block_order(pairs.column_counts, pairs.shape[0], rows, most_pairs(rows)))

        return Orders(left.pieces + right.pieces, max(left.lines, right.lines)), of_blocks

    def _check_memory(self, towers: Towers, needs: Footprint) -> None:
        """Refuse a budget that cannot be kept in one process, or towers that the memory cannot hold."""
        if not self.shards.single or self.streamed is not None:
            return
        least, smaller = readable(needs.least), "a smaller dim or smaller hidden layers take less"
        if self.memory_budget is not None:
            if self.memory_budget < needs.least:
                given = f"{self.memory_budget:,} bytes"
                check.fail("memory_budget", given, f"at least {least!r} to train {towers.size:,} parameters; {smaller}")
        elif needs.least > (free := free_memory(towers.device)):
            given = f"{towers.size:,} parameters, which take {least} to train"
            check.fail("towers", given, f"at most what is free, {readable(free)}; {smaller}")

    def _graphs(self, towers: Towers) -> GraphPool:
        """The CUDA graphs of this problem with these towers."""
        signature = (id(towers), *towers.signature())
        if self._graph_pool is None or self._graph_pool[0] != signature:
            here = weakref.proxy(self)  # no reference cycle
            pool = GraphPool(lambda p: here._evaluation(towers, p, here._planned(towers), {}))
            self._graph_pool = signature, pool
        return self._graph_pool[1]

    @property
    def imputed_arrays(self) -> tuple[Tensor | Numbers, ...]:
        """The imputed labels as arrays: the constant, infinity for fitted ones, or P̃ and Q̃."""
        return self.imputed.factors or (np.array(np.inf if self.imputed.fitted else self.imputed.constant),)

    @property
    def column_counts(self) -> Tensor:
        """``|O_:,j|`` for each right entity held here, over the pairs of all processes."""
        return self.pairs.column_counts if self._column_counts is None else self._column_counts

    def _place_rows(self) -> tuple[int, int, Tensor | None]:
        """Pairs of all processes, those of the processes before this one, and the right entities' numbers of pairs."""
        group, rows = self.shards.group, (self.shards.left, self.shards.right)
        if self.shards.single:
            return len(self.pairs), 0, None
        before = [int(count) for count in group.gather_json(len(self.pairs))]
        squares = group.totals(self.left.square_sum, self.right.square_sum)
        for features, side, square in zip((self.left, self.right), rows, squares, strict=True):
            features.place(side.first, side.total, square)
        counts = group.reduce_scatter_rows(self.pairs.column_counts, self.shards.right.counts).wait()
        return sum(before), sum(before[: group.rank]), counts

    def _penalties(self) -> tuple[Numbers | None, Numbers | None]:
        """μ c of both sides' entities, None without a penalty."""
        if self.embedding_l2 == 0.0:
            return None, None
        sides = zip((self.left, self.right), self.weight_arrays, strict=True)
        local = (float(side.rows if w is None else w.sum()) for side, w in sides)
        sums = self.shards.group.totals(*local)
        counts = (self.pairs.row_counts.numpy(), self.column_counts.numpy())
        return embedding_penalties(self.embedding_l2, self.frequency_power, self.omega, counts, sums)

    def _budget(self, towers: Towers) -> int:
        """The budget given, or a share of what is free, looked up once: all evaluations run in the same blocks."""
        if self.memory_budget is not None:
            self.planned_budgets[towers.device] = self.memory_budget
        elif towers.device not in self.planned_budgets:
            sharing = self.shards.group.local_size if towers.device.type == "cpu" else 1
            self.planned_budgets[towers.device] = default_budget(towers.device) // sharing
        return self.planned_budgets[towers.device]

    def _raised_budget(self, towers: Towers, needs: Footprint) -> int:
        """The budget; half of what is free on a GPU becomes up to nine tenths if no plan could keep to it."""
        budget = self.planned_budgets[towers.device]
        if self.memory_budget is None and self.shards.single and not needs.on_cpu and budget < needs.least:
            budget = max(budget, min(needs.resident + needs.recomputed, free_memory(towers.device) * 9 // 10))
            self.planned_budgets[towers.device] = budget
        return budget


def _made_constants(problem: Problem, dtype: torch.dtype, device: torch.device) -> Constants:
    """The entities' part of a problem; refuses constants that the dtype cannot hold."""
    _check_range(problem, dtype)
    weights, penalties = problem.weight_arrays, problem.penalty_arrays
    factors = problem.imputed.factors
    imputed: tuple[Tensor | float, ...] = (
        (problem.imputed.constant, 1.0) if factors is None else tuple(f.to(device, dtype) for f in factors)
    )
    left, right = (
        Side(_tensor(weights[side], dtype, device), _tensor(penalties[side], dtype, device), imputed[side])
        for side in (0, 1)
    )
    shards = problem.shards
    local = left.imputed_gramian(shards.left.count), right.imputed_gramian(shards.right.count)
    square = (local[0] * local[1]).sum() if shards.single else torch.mul(*shards.group.sum_all(*local)).sum()
    scalars = torch.tensor([problem.omega, problem.imputed.constant], dtype=dtype, device=device)
    total = None
    if problem.imputed.fitted:
        local_sum = None if right.weight is None else float(right.weight.sum(dtype=torch.float64))
        total = float(shards.right.total if local_sum is None else shards.group.totals(local_sum)[0])
    return Constants(
        left, right, problem.omega, problem.l2, float(square), scalars, problem.precision, problem.pair_precision,
        shards, problem.regularizer, total,
    )  # fmt: skip


def _pair_constants(problem: Problem, constants: Constants, rows: tuple[int, int] | None = None) -> PairConstants:
    """The pairs of a range of left rows held here, None for all of them."""
    dtype, device = constants.scalars.dtype, constants.scalars.device
    pairs, where, left = problem.pairs, slice(None), constants.left
    if rows is not None:
        (pairs, where), left = problem.pairs.row_range(*rows), left.rows(*rows)
    pairs = pairs.to(device)
    right = constants.right
    weight = None
    if left.weight is not None or right.weight is not None:
        weight = torch.ones(len(pairs), dtype=dtype, device=device)
        if left.weight is not None:
            weight *= left.weight[pairs.rows]
        if right.weight is not None:
            weight *= constants.shards.gather(right.weight).wait()[pairs.columns]
    imputed: Tensor | float = problem.imputed.constant
    if isinstance(left.imputed, Tensor) and isinstance(right.imputed, Tensor):
        gathered = constants.shards.gather(right.imputed).wait()
        imputed = select(device, problem.kernels).dots(pairs, left.imputed, gathered)
    loss_weight = None if problem.pair_weights is None else problem.pair_weights[where]
    labels = _labels(problem.labels[where], problem.label_range, dtype, device)
    weights = weight, _tensor(loss_weight, dtype, device)
    return PairConstants(pairs, LossTerms(problem.loss, labels, problem.omega, imputed, *weights, constants.scalars))


def _check_range(problem: Problem, dtype: torch.dtype) -> None:
    """Refuse constants that the towers' dtype cannot hold, by name."""
    (a, b), (left, right) = problem.weight_arrays, problem.penalty_arrays
    for name, value in (
        ("omega", problem.omega), ("l2", problem.l2), ("embedding_l2", problem.embedding_l2),
        ("imputed", problem.imputed.constant), ("imputed", problem.imputed.factors), ("pairs", problem.labels),
        ("left_weights", a), ("right_weights", b), ("pair_weights", problem.pair_weights),
        ("embedding_l2 and frequency_power", left), ("embedding_l2 and frequency_power", right),
    ):  # fmt: skip
        for part in value if isinstance(value, tuple) else (value,):
            most = math.inf  # of an array, found by all threads
            if isinstance(part, np.ndarray) and part.ndim == 1 and len(part):
                most = max(abs(float(extreme)) for extreme in extremes(part))
            if part is not None and not most <= torch.finfo(dtype).max:
                check.fits(name, part, dtype)


def _tensor(array: Numbers | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return None if array is None else torch.tensor(array, dtype=dtype, device=device)


def _labels(array: Numbers, bounds: tuple[float, float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """R on O; one number expanded to all where they are equal, as for plain implicit feedback."""
    if len(array) and bounds[0] == bounds[1]:
        return torch.tensor([array[0]], dtype=dtype, device=device).expand(len(array))
    return torch.from_numpy(array).to(device, dtype)  # neither is written to

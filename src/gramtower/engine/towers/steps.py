"""What a step of a tower is: its value and derivatives, its part of the preconditioner, and what it costs.

    forward   x ↦ y                       keeps what the derivatives need
    jvp       (dx, dθ) ↦ dy               eq:Jvp, forward mode
    vjp       g ↦ gᵀ∂y/∂x, gᵀ∂y/∂θ       the tensor-matrix product of eq:ten-mat, reverse mode

:class:`Op` is the interface, and everything that asks something of a step asks it there. A new step needs ``forward``,
``jvp`` and ``vjp``; all else has a default that works. layers.py has the steps whose
derivatives are written out, branches.py those that branch, opaque.py wraps any other module by autodiff; stack.py and
trace.py recognise modules.

Steps hand two things to each other besides plain tensors, each to save a pass over a rows × width matrix:

    Shifted   a tensor plus a bias              the next step adds it while it reads the tensor
    Summed    a tensor with partial column sums   for the bias of the layer below

Agreement of all steps with autodiff is tests/test_towers.py; with the dense twin, tests/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.features import Block, Features
from gramtower.distributed.group import Group
from gramtower.engine.kernels import Kernels
from gramtower.engine.towers.layer_factors import Factors, Noise, root

Named = dict[str, Tensor]
Moment = Tensor | list[Any] | None  # of a step, or of the steps that it is made of
Scratch = dict[tuple[int, int], Tensor]  # two buffers for each number of columns
_BLOCKS, _LINES = 64, 1 << 13  # blocks and rows of partial sums that are kept before they are added up: a few megabytes


@dataclass(frozen=True)
class Shifted:
    """A tensor that must not be overwritten, plus a bias not yet added."""

    tensor: Tensor
    bias: Tensor | None

    def materialise(self, out: Tensor | None = None) -> Tensor:
        """The sum, in new memory or in ``out``."""
        if self.bias is None:
            return self.tensor.clone() if out is None else out.copy_(self.tensor)
        return torch.add(self.tensor, self.bias, out=out)


@dataclass(frozen=True)
class Summed:
    """A vjp's result with partial column sums: ``lines.sum(0)`` is the bias gradient of the layer below."""

    tensor: Tensor
    lines: Tensor


def materialise(x: Tensor | Shifted) -> Tensor:
    """What forward and jvp hand on, as a plain tensor."""
    return x.materialise() if isinstance(x, Shifted) else x


def plain(g: Tensor | Summed) -> Tensor:
    """What vjp hands on, as a plain tensor."""
    return g.tensor if isinstance(g, Summed) else g


@dataclass(frozen=True)
class Values:
    """The tensors of one tower at θ (trainable and frozen, by local name), its kernels, its buffers."""

    tensors: Named
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    transposed: Named = field(default_factory=dict)
    scratch: Scratch = field(default_factory=dict)
    pending_bias_rows: dict[str, list[Tensor]] = field(default_factory=dict)  # whose sums belong to a bias

    def transpose(self, name: str) -> Tensor:
        """A matrix transposed, made once."""
        if name not in self.transposed:
            self.transposed[name] = self.tensors[name].t().contiguous()
        return self.transposed[name]

    def workspace(self, source: Tensor, columns: int, rows: int | None = None) -> Tensor:
        """A rows × columns buffer for a step's result, in other memory than ``source``, whose rows it has if not told.

        The same buffer serves all blocks and products: a step's result is read by the next step only, so two buffers
        per width are enough.
        """
        rows = source.shape[0] if rows is None else rows
        buffer = self._buffer(0, source, rows, columns)
        if buffer.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
            buffer = self._buffer(1, source, rows, columns)
        return buffer

    def _buffer(self, index: int, source: Tensor, rows: int, columns: int) -> Tensor:
        key = (index, columns)
        if key not in self.scratch or self.scratch[key].shape[0] < rows:
            self.scratch[key] = source.new_empty(rows, columns)
        return self.scratch[key][:rows]

    def defer_bias_sum(self, bias: str | None, g: Tensor | Summed, out: Named) -> None:
        """Keep rows with the column sums of g for a bias in ``out``, until ``flush_bias_sums``."""
        if bias is not None and bias in out:
            self.defer_bias_lines(bias, g.lines if isinstance(g, Summed) else self.kernels.column_lines(g))

    def defer_bias_lines(self, bias: str, lines: Tensor) -> None:
        """The same for rows that have the column sums already."""
        pending = self.pending_bias_rows.setdefault(bias, [])
        pending.append(lines)
        if len(pending) > _BLOCKS or sum(map(len, pending)) > _LINES:
            pending[:] = [self.kernels.column_sums(torch.cat(pending))[None]]

    def flush_bias_sums(self, out: Named) -> None:
        """Add deferred sums to ``out``: once for all blocks, as a launch costs a GPU as much as a block's rows."""
        for bias, rows in self.pending_bias_rows.items():
            out[bias] += self.kernels.column_sums(rows[0] if len(rows) == 1 else torch.cat(rows))
        self.pending_bias_rows.clear()


@dataclass(frozen=True)
class Sample:
    """Rows run forward for the preconditioner, about two thousand of all processes, independent of blocks.

    Attributes:
        weight: r_i of each row, times the number of rows that it stands for.
        numbers: of the entities, counted over all processes.
        saved: what a step kept of them.
    """

    weight: Tensor
    numbers: Tensor
    saved: Any


@dataclass(frozen=True)
class CurvatureContext:
    """What a step may use when it adds its factors to the preconditioner.

    Attributes:
        values: the tower's tensors.
        factors: to add to.
        weight: r_i of the entities held here.
        total_weight: Σ r_i over all processes.
        rows: entities of all processes.
        group: the processes whose entities count together.
        owned: local names of tables that hold this process's rows alone.
        noise: vectors to draw.
        sample: some rows with what this step kept of them; the first to ask has them run forward.
        is_first: whether nothing is below this step.
    """

    values: Values
    factors: Factors
    weight: Tensor
    total_weight: Tensor
    rows: int
    group: Group
    owned: Collection[str]
    noise: Noise
    sample: Callable[[], Sample]
    is_first: bool


class Op:
    """One step of a tower; ``saved`` is whatever its ``forward`` keeps of a block of rows.

    Rows are mapped one by one: no row's result depends on another row. ``jvp`` and ``vjp`` do not run ``forward``
    again; they may overwrite the tensor that they are handed (dx, g), and what they return may be overwritten.

    Attributes:
        analytic: whether derivatives need no autodiff. Such steps are recorded in CUDA graphs, and the independence of
            their rows is not tested.
        overwrites_cotangent: whether ``vjp`` overwrites g; if not, a copy is saved where g is the caller's.
        overwrites_tangent: the same for ``jvp`` and dx.
        kept_copies: how many times over a block's results are kept in the end.
        linear: whether y is linear in x and in the step's parameters, each with the other fixed.
    """

    analytic: bool = True
    overwrites_cotangent: bool = True
    overwrites_tangent: bool = True
    kept_copies: int = 1
    linear: bool = False

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Tensor | Shifted, Any]:
        """y and what to keep; ``out`` is an optional buffer for y."""
        raise NotImplementedError

    def jvp(
        self, saved: Any, dx: Tensor | Shifted | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor | Shifted:
        """dy along (dx, tangent); ``out`` is a place for it. Frozen tensors have no tangent, features no dx."""
        raise NotImplementedError

    def vjp(
        self, saved: Any, g: Tensor | Summed, values: Values, out: Named, need_input: bool
    ) -> Tensor | Summed | None:
        """Add gᵀ∂y/∂θ to ``out``, at once or by ``Values.defer_bias_sum``; return gᵀ∂y/∂x if asked."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """For messages."""
        return type(self).__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names, within the tower, of the tensors it uses."""
        return ()

    def precompute(self, saved: Any) -> None:
        """Compute now what a first jvp, vjp or moment would: a CUDA graph may replay them in any order."""

    # The gradient of a table, fused with what it is added to.

    def fusable_table(self, features: Features) -> str | None:
        """As a first step: its table, if ``table_rows`` of all blocks are all rows of it, each once and in order."""
        return None

    def viewed_table(self, features: Features) -> str | None:
        """As the only step: its table, if the table's rows are the outputs, each once and in order."""
        return None

    def table_rows(self, saved: Any, tensors: Named) -> Tensor:
        """The rows of ``fusable_table`` that a block looks up."""
        raise NotImplementedError

    def vjp_bias(self, lines: Tensor, values: Values, out: Named) -> None:
        """What is left of the vjp of a first step whose table is written: ``lines.sum(0)`` are the sums of g."""
        raise NotImplementedError

    def fuses_initial(self, values: Values) -> bool:
        """As a second step: whether it has ``vjp_fused``."""
        return False

    def vjp_fused(
        self, saved: Any, g: Tensor | Summed, values: Values, rows: Tensor, initial: Tensor, scale: float
    ) -> Tensor:
        """gᵀ∂y/∂x + scale·initial, written to ``rows``; returns rows with the column sums of the first term."""
        raise NotImplementedError

    # The preconditioner, see factors.py.

    def moment(self, saved: Any, r: Tensor, some: slice, stride: int) -> Moment:
        """A block's part of what ``pull_curvature`` needs summed over rows, in float64; None if nothing.

        Matrices are estimated from ``some`` rows of the block, one in ``stride``; diagonals come from all rows.
        """
        return None

    def moment_with_mean(self, saved: Any, r: Tensor, some: slice, stride: int) -> Moment:
        """The same for a step beside branches (branches.py): also what ``pull_mean`` needs, where that is more."""
        return self.moment(saved, r, some, stride)

    def input_moment(self, block: Block, r: Tensor) -> Moment:
        """As a first step: the parts of ``moment`` that need all rows of ids and sparse features, from these alone."""
        return None

    def reduce_moment(self, moment: Moment, group: Group, owned: Collection[str]) -> None:
        """Add up ``moment`` over processes, in place; that of a table of own rows stays as it is."""
        if isinstance(moment, Tensor) and not any(name in owned for name in self.parameters):
            group.sum_(moment)

    def pull_curvature(self, S: Tensor, moment: Any, context: CurvatureContext) -> Tensor:
        """Add this step's factors; return the curvature at its input, given S at its output.

        For steps without a formula of their own: mean(g gᵀ), g the vjp of vectors v_i drawn with covariance r_i S for a
        sample of rows, and for the parameters (Σ_i J_iᵀ v_i)², whose mean is the diagonal Σ_i r_i J_iᵀ S J_i.
        Independent of blocks and processes.
        """
        values, noise, group, R = context.values, context.noise, context.group, root(S).to(context.values.dtype)
        sample = context.sample()
        names = [name for name in self.parameters if name in context.factors.trainable]
        sums = [{name: torch.zeros_like(values.tensors[name]) for name in names} for _ in range(noise.draws)]
        below: Tensor | None = None
        values.pending_bias_rows.clear()
        for draw, out in enumerate(sums):
            v = noise.rows(draw, sample.numbers, sample.weight, R)
            g = self.vjp(sample.saved, v, values, out, not context.is_first)
            values.flush_bias_sums(out)
            if g is not None:
                part = (plain(g).t() @ plain(g)).double() / (noise.draws * context.rows)
                below = part if below is None else below + part
        for name in names:
            totals = torch.stack([out[name].double() for out in sums])
            totals = totals if name in context.owned else group.sum_(totals)
            context.factors.add_diagonal(name, totals.square_().mean(0))
        return S if below is None else group.sum_(below)

    def pull_mean(self, M: Tensor, moment: Any, context: CurvatureContext) -> Tensor | None:
        """mean(J)ᵀ M, for what a step shares with branches beside it (branches.py); None leaves that out.

        Scaled as ``pull_curvature`` is: with weights whose mean is c, Σ_i r_i J_iᵀ M / (rows √c).
        """
        return None

    # Planning and several processes.

    @property
    def parts(self) -> tuple[Op, ...]:
        """The steps that a step is made of; itself, if it is one."""
        return (self,)

    @property
    def inner_columns(self) -> int:
        """Columns of results inside the step, besides the one that it hands on."""
        return 0

    @property
    def live_columns(self) -> int:
        """Columns whose curvature is held at once inside the step, besides that of its layers."""
        return 0

    @property
    def workspace_factor(self) -> float:
        """Peak bytes of a row, relative to the results of all steps, while a block is processed."""
        return 1.0

    def layer_width(self, tensors: Named) -> int:
        """Columns of a layer's result; 0 for a step that is no layer."""
        return 0

    def least_block(self, features: Features) -> int:
        """As a first step: rows below which a block costs more than its rows, as sparse columns are walked in each."""
        if features.kind == "sparse":
            return int(features.rows * min(1.0, features.width / (4.0 * max(1, features.entries))))
        return 1

    def check_features(self, side: str, features: Features) -> None:
        """As a first step: refuse features that do not fit."""

    def id_tables(self, side: str, features: Features) -> list[str]:
        """As a first step over ids: its trainable tables with one row for each entity, sharded over processes."""
        self.refuse_table(side, f"{self.label} without a table over the ids", features)

    def refuse_table(self, side: str, given: str, features: Features) -> NoReturn:
        """Refuse what cannot be spread over processes."""
        expected = f"one row for each of this process's {features.rows} entities (problem.{side}.rows)"
        check.fail(f"{side} tower", given, expected)

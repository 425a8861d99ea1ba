"""The interface of a step of a tower: its value, derivatives, part of the preconditioner, and cost.

    forward   x ↦ y                       keeps values for the derivatives
    jvp       (dx, dθ) ↦ dy               eq:Jvp, forward mode
    vjp       g ↦ gᵀ∂y/∂x, gᵀ∂y/∂θ       the tensor-matrix product of eq:ten-mat, reverse mode

A new step is a subclass of :class:`Op` with ``forward``, ``jvp`` and ``vjp``; everything else has a default. layers.py
has the steps with closed-form derivatives, branches.py those with several inputs, and opaque.py differentiates any
other module by autodiff; stack.py and trace.py recognise modules. ``Shifted`` and ``Summed`` each save a pass over a
rows × width matrix.

The preconditioner has Kronecker factors A ⊗ S of each layer: A = Σ_i r_i x_i x_iᵀ are the moments of its inputs (the
bias is an input of 1), S is the curvature at its outputs (kronecker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower.data.pairs import Block, Features, SparseBlock
from gramtower.distributed.group import Group
from gramtower.engine.kernels import Kernels
from gramtower.engine.kernels.reference import Scaled

Named = dict[str, Tensor]
Names = Mapping[int, str]  # id of a parameter → its name within the tower
Moment = Tensor | list[Any] | None  # of one step, or a list for the steps inside a graph
Blocks = dict[tuple[int, int], Tensor]  # mean(J_aᵀ S J_b) by the positions a, b of inputs
Scratch = dict[tuple[int, int], Tensor]  # two buffers for each number of columns
_BLOCKS, _LINES = 64, 1 << 13  # most blocks and rows of partial sums held before they are added up: a few megabytes


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


Change = Tensor | Shifted  # the result of ``forward`` or ``jvp``
Cotangent = Tensor | Summed  # the result of ``vjp``


def materialise(x: Change) -> Tensor:
    """The result of ``forward`` or ``jvp`` as a plain tensor."""
    return x.materialise() if isinstance(x, Shifted) else x


def plain(g: Cotangent) -> Tensor:
    """The result of ``vjp`` as a plain tensor."""
    return g.tensor if isinstance(g, Summed) else g


@dataclass(frozen=True)
class Values:
    """The tensors of one tower at θ (trainable and frozen, by local name), with its kernels and buffers."""

    tensors: Named
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    transposed: Named = field(default_factory=dict)
    scratch: Scratch = field(default_factory=dict)
    pending_bias_rows: dict[str, list[Tensor]] = field(default_factory=dict)  # rows whose sum belongs to a bias

    def transpose(self, name: str) -> Tensor:
        """The transpose of a matrix, computed once."""
        if name not in self.transposed:
            self.transposed[name] = self.tensors[name].t().contiguous()
        return self.transposed[name]

    def workspace(self, source: Tensor, columns: int, rows: int | None = None) -> Tensor:
        """A rows × columns buffer for a step's result, not in the memory of ``source``, with its rows by default.

        All blocks and products share it: only the next step reads a step's result, so two buffers per width suffice.
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

    def start_bias_sums(self) -> None:
        """Discard the sums that an interrupted vjp deferred."""
        self.pending_bias_rows.clear()

    def defer_bias_sum(self, bias: str | None, g: Cotangent, out: Named) -> None:
        """Keep partial column sums of g for a bias in ``out`` until ``flush_bias_sums``."""
        if bias is not None and bias in out:
            self.defer_bias_lines(bias, g.lines if isinstance(g, Summed) else self.kernels.column_lines(g))

    def defer_bias_lines(self, bias: str, lines: Tensor) -> None:
        """Keep given partial column sums for a bias."""
        pending = self.pending_bias_rows.setdefault(bias, [])
        pending.append(lines)
        if len(pending) > _BLOCKS or sum(map(len, pending)) > _LINES:
            pending[:] = [self.kernels.column_sums(torch.cat(pending))[None]]

    def flush_bias_sums(self, out: Named) -> None:
        """Add deferred sums to ``out``, once for all blocks: a GPU launch costs as much as the rows of a block."""
        for bias, rows in self.pending_bias_rows.items():
            out[bias] += self.kernels.column_sums(rows[0] if len(rows) == 1 else torch.cat(rows))
        self.pending_bias_rows.clear()


@dataclass(frozen=True)
class Sample:
    """A sample of rows for the preconditioner: about two thousand over all processes, independent of blocks."""

    weight: Tensor  # r_i of each row, times the number of rows that it represents
    numbers: Tensor  # numbers of the entities, counted over all processes
    saved: Any  # values that the step's ``forward`` kept


@dataclass(frozen=True)
class CurvatureContext:
    """Inputs of ``Op.pull_curvature``."""

    values: Values  # the tower's tensors
    factors: Factors  # the result, to which a step adds its factors
    total_weight: Tensor  # Σ r_i over all processes
    rows: int  # number of entities of all processes
    group: Group  # the processes
    owned: Collection[str]  # local names of tables that hold only this process's rows
    noise: Noise  # random vectors
    sample: Callable[[], Sample]  # some rows with the values that this step kept; computed at the first call
    is_first: bool  # whether no step is below this one


class Op:
    """One step of a tower; ``saved`` are the values that its ``forward`` keeps of a block of rows.

    Each row is mapped independently of the others. ``jvp`` and ``vjp`` do not run ``forward`` again; they may overwrite
    the tensor that they are given (dx, g), and the caller may overwrite the tensor that they return.
    """

    analytic: bool = True  # no autodiff: the step is recorded in CUDA graphs, and independence of rows is not tested
    overwrites_cotangent: bool = True  # whether ``vjp`` overwrites g; if not, no copy of the caller's g is needed
    overwrites_tangent: bool = True  # whether ``jvp`` overwrites dx
    kept_copies: int = 1  # how many copies of a block's results are kept in memory
    linear: bool = False  # whether y is linear in x and in the step's parameters, each with the other fixed
    modules: ClassVar[tuple[type[nn.Module], ...]] = ()  # by exact type, those that ``of_module`` makes a step of

    @classmethod
    def of_module(cls, module: Any, names: Names) -> Op | None:
        """The step of a module, with the names of its parameters; None if autodiff must differentiate the module."""
        raise NotImplementedError

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Change, Any]:
        """Return y and the values to keep; ``out`` is an optional buffer for y."""
        raise NotImplementedError

    def jvp(self, saved: Any, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None) -> Change:
        """Return dy along (dx, tangent), in ``out`` if possible. Frozen tensors have no tangent, features no dx."""
        raise NotImplementedError

    def vjp(self, saved: Any, g: Cotangent, values: Values, out: Named, need_input: bool) -> Cotangent | None:
        """Add gᵀ∂y/∂θ to ``out``, now or by ``Values.defer_bias_sum``; return gᵀ∂y/∂x if ``need_input``."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Name for messages."""
        return type(self).__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names, within the tower, of its tensors."""
        return ()

    def precompute(self, saved: Any) -> None:
        """Compute values that the first jvp, vjp or moment would cache: a CUDA graph may replay them in any order."""

    # The gradient of a table, fused with the addition of another tensor.

    def fusable_table(self, features: Features) -> str | None:
        """For a first step: its table, if ``table_rows`` of all blocks are the table's rows, each once and in order."""
        return None

    def table_rows(self, saved: Any, tensors: Named) -> Tensor:
        """The rows of ``fusable_table`` that a block looks up."""
        raise NotImplementedError

    def vjp_bias(self, lines: Tensor, values: Values, out: Named) -> None:
        """The remaining vjp of a first step whose table is written already; ``lines.sum(0)`` are the sums of g."""
        raise NotImplementedError

    def fuses_initial(self, values: Values) -> bool:
        """For a second step: whether it has ``vjp_fused``."""
        return False

    def vjp_fused(self, saved: Any, g: Cotangent, values: Values, rows: Tensor, initial: Scaled) -> Tensor:
        """Write gᵀ∂y/∂x + ``initial`` to ``rows``; return partial column sums of the first term."""
        raise NotImplementedError

    # The preconditioner, see kronecker.py.

    def moment(self, saved: Any, r: Tensor, some: slice, stride: int) -> Moment:
        """A block's part of the sums over rows that ``pull_curvature`` needs, in float64; None if it needs none.

        Matrices are estimated from ``some`` rows of the block, one in ``stride``; diagonals use all rows.
        """
        return None

    def moment_with_mean(self, saved: Any, r: Tensor, some: slice, stride: int) -> Moment:
        """``moment`` for a step in a graph (branches.py), including the sums that ``pull_mean`` needs."""
        return self.moment(saved, r, some, stride)

    def input_moment(self, block: Block, r: Tensor) -> Moment:
        """For a first step: the parts of ``moment`` that need all rows of ids or sparse features, without ``saved``."""
        return None

    def reduce_moment(self, moment: Moment, group: Group, owned: Collection[str]) -> None:
        """Sum ``moment`` over processes, in place; that of a table of this process's rows is not summed."""
        if isinstance(moment, Tensor) and not any(name in owned for name in self.parameters):
            group.sum_(moment)

    def pull_curvature(self, S: Tensor, moment: Any, context: CurvatureContext) -> Tensor:
        """Add this step's factors; return the curvature at its input, given S at its output.

        The default, for steps without a formula, is mean(g gᵀ), where g is the vjp of random vectors v_i with
        covariance r_i S for a sample of rows; and for the parameters (Σ_i J_iᵀ v_i)², whose mean is the diagonal
        Σ_i r_i J_iᵀ S J_i. The result does not depend on blocks and processes.
        """
        values, noise, group, R = context.values, context.noise, context.group, root(S).to(context.values.dtype)
        sample = context.sample()
        names = [name for name in self.parameters if name in context.factors.trainable]
        sums = [{name: torch.zeros_like(values.tensors[name]) for name in names} for _ in range(noise.draws)]
        below: Tensor | None = None
        values.start_bias_sums()
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
        """mean(J)ᵀ M, for the curvature that a step shares with other branches (branches.py); None leaves it out.

        It is scaled as in ``pull_curvature``: with weights whose mean is c, Σ_i r_i J_iᵀ M / (rows √c).
        """
        return None

    def pull_blocks(self, S: Tensor, moment: Any, context: CurvatureContext) -> Blocks:
        """``pull_curvature`` for a step in a graph: mean(J_aᵀ S J_b) for all inputs a and b."""
        return {(0, 0): self.pull_curvature(S, moment, context)}

    def pull_means(self, M: Tensor, moment: Any, context: CurvatureContext) -> list[Tensor]:
        """``pull_mean`` for a step in a graph: mean(J_a)ᵀ M for all inputs a; nothing leaves it out."""
        mean = self.pull_mean(M, moment, context)
        return [] if mean is None else [mean]

    # Planning and several processes.

    @property
    def parts(self) -> tuple[Op, ...]:
        """The steps inside a graph; otherwise the step itself."""
        return (self,)

    @property
    def inner_columns(self) -> int:
        """Columns of the results inside the step, without its own result."""
        return 0

    @property
    def live_columns(self) -> int:
        """Columns whose curvature is held at the same time inside the step, besides that of its layers."""
        return 0

    @property
    def workspace_factor(self) -> float:
        """Peak bytes of a row while a block is processed, relative to the results of all steps."""
        return 1.0

    def layer_width(self, tensors: Named) -> int:
        """Columns of a layer's result; 0 for a step that is not a layer."""
        return 0

    def least_block(self, features: Features) -> int:
        """For a first step: the smallest sensible number of rows, as each block walks all sparse columns."""
        if features.kind == "sparse":
            return int(features.rows * min(1.0, features.width / (4.0 * max(1, features.entries))))
        return 1

    def check_features(self, side: str, features: Features) -> None:
        """For a first step: refuse features that do not fit."""

    def id_tables(self, side: str, features: Features) -> list[str]:
        """For a first step over ids: its trainable tables with one row per entity, which processes divide."""
        self.refuse_table(side, f"{self.label} without a table over the ids", features)

    def refuse_table(self, side: str, given: str, features: Features) -> NoReturn:
        """Refuse a table that cannot be divided between processes."""
        expected = f"one row for each of this process's {features.rows} entities (problem.{side}.rows)"
        check.fail(f"{side} tower", given, expected)


@dataclass
class Factor:
    """A ⊗ S of a weight, with its bias as one more input if A is a full matrix."""

    weight: str  # local name of the weight
    bias: str | None  # local name of the bias that A covers, or None
    inputs_first: bool  # whether the weight is stored inputs × outputs
    A: Tensor  # inputs × inputs, or its diagonal
    S: Tensor  # outputs × outputs
    mean: Tensor | None = None  # mean of A's diagonal over the rows of all processes, if A covers only local rows


@dataclass
class Factors:
    """The factors of a tower's parameters, in float64."""

    trainable: Collection[str]  # local names of the parameters to precondition
    layers: list[Factor] = field(default_factory=list)  # factors of weights
    # vectors with a full matrix: local name → (c, S), for the curvature c S. These are biases that are not part of
    # their weight's A, with c = Σ r_i, and scales of columns.
    biases: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    diagonals: dict[str, Tensor] = field(default_factory=dict)  # diagonals of all other parameters, by local name

    def add(self, weight: str, bias: str | None, inputs_first: bool, A: Tensor, S: Tensor, total: Tensor) -> None:
        """Add A ⊗ S of a layer with Σ r_i = ``total``; a diagonal A covers only the weight."""
        with_bias = bias is not None and bias in self.trainable
        if A.dim() == 1:
            if weight in self.trainable:
                self.layers.append(Factor(weight, None, inputs_first, A, S))
            if bias is not None and with_bias:
                self.add_matrix(bias, S, total)
        elif weight in self.trainable:
            inputs = len(A) if bias is None or with_bias else len(A) - 1
            self.layers.append(Factor(weight, bias if with_bias else None, inputs_first, A[:inputs, :inputs], S))
        elif bias is not None and with_bias:
            self.add_matrix(bias, S, A[-1, -1])

    def add_matrix(self, name: str, S: Tensor, count: Tensor | float = 1.0) -> None:
        """Add the curvature count·S of a vector; a vector that is used twice gets the sum."""
        if name in self.biases:
            before, other = self.biases[name]
            S, count = before * other + count * S, 1.0
        self.biases[name] = (torch.as_tensor(count, dtype=S.dtype, device=S.device), S)

    def add_diagonal(self, name: str, square: Tensor) -> None:
        """Add the diagonal of any other parameter's curvature."""
        self.diagonals[name] = self.diagonals[name] + square if name in self.diagonals else square


def outer(x: Tensor, r: Tensor, bias: bool) -> Tensor:
    """Σ r (x, 1)(x, 1)ᵀ, or without the 1, in float64."""
    weighted = x * r[:, None]
    A = (weighted.t() @ x).double()
    if not bias:
        return A
    full = torch.empty(len(A) + 1, len(A) + 1, dtype=torch.float64, device=x.device)
    full[:-1, :-1] = A
    full[-1, :-1] = full[:-1, -1] = weighted.sum(0, dtype=torch.float64)
    full[-1, -1] = r.sum(dtype=torch.float64)
    return full


def mean_column(moment: Tensor, rows: int) -> Tensor:
    """mean(x)/√c as a column, from Σ r (x, 1)(x, 1)ᵀ over ``rows`` rows, where c is the mean of the weights r."""
    return torch.as_tensor(moment[:-1, -1:] / (rows * moment[-1, -1]).clamp_min(1e-300).sqrt())


def column_squares(block: SparseBlock, r: Tensor) -> Tensor:
    """Σ_i r_i x_ij² for each feature j, in float64."""
    total = torch.zeros(block.shape[1], dtype=torch.float64, device=r.device)
    values = (block.values.square() * r[block.pattern.rows]).double()
    return total.index_add_(0, block.pattern.columns.long(), values)


@dataclass(frozen=True)
class Noise:
    """Random signs that depend only on an entity's number, not on blocks, processes or devices."""

    seed: int  # seed of the random numbers
    step: int  # number of the step that uses them
    draws: int  # number of vectors for each entity

    def rows(self, draw: int, numbers: Tensor, weight: Tensor, root: Tensor) -> Tensor:
        """Vectors with covariance w_i R Rᵀ for the entities with these numbers, in the dtype of R."""
        key = np.random.SeedSequence((self.seed, self.step, draw)).generate_state(1, np.uint64)
        columns = torch.arange(root.shape[1], device=root.device)
        bits = _mixed(_mixed(numbers.to(root.device) + (int(key[0]) >> 2))[:, None] + columns)
        signs = 1 - 2 * (bits & 1).to(root.dtype)
        return (signs @ root.t()) * weight.to(root.dtype).clamp_min(0).sqrt()[:, None]


def _mixed(x: Tensor) -> Tensor:
    """A hash of integers: two rounds of multiplications and shifts modulo 2⁶⁴."""
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def root(S: Tensor) -> Tensor:
    """R with R Rᵀ = S for a positive semidefinite S, to about ten digits, by Cholesky or eigenvalues."""
    slack = 1e-11 * S.diagonal().abs().mean() * torch.eye(len(S), dtype=S.dtype, device=S.device)
    lower, failed = torch.linalg.cholesky_ex(S + slack)
    if int(failed) == 0 and bool(lower.isfinite().all()):
        return torch.as_tensor(lower)
    values, vectors = clamped_spectrum(S)
    return torch.as_tensor(vectors * values.sqrt())


def clamped_spectrum(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix, clamped at 0, and its eigenvectors.

    If the matrix is not finite, or the eigenvalues are not found, only the diagonal is used, with 0 for entries that
    are not finite, so that there is always a preconditioner.
    """
    scale = S.abs().max()
    if bool(scale.isfinite()):
        try:
            values, vectors = torch.linalg.eigh(S / scale.clamp_min(torch.finfo(S.dtype).tiny))
            return values.clamp_min(0) * scale, vectors
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            pass
    diagonal = S.diagonal().nan_to_num(0.0, 0.0, 0.0).clamp_min(0)
    return diagonal, torch.eye(len(S), dtype=S.dtype, device=S.device)

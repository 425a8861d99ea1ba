"""Kronecker factors of one tower's layers: A (moments of a layer's inputs) and S (curvature at its outputs).

Given H, the k × k curvature at the tower's output averaged over entities, and a weight r_i for each entity, a layer
with inputs x_i has the Gauss-Newton block A ⊗ S with A = Σ_i r_i x_i x_iᵀ (the bias is an input of 1). S is H at the
last layer and moves down as

    S ← WᵀSW              through a linear layer
    S ← S ∘ mean(φ′φ′ᵀ)   through an elementwise activation
    S ← mean(g gᵀ)        through any other module or step, g the back-propagation of vectors drawn with covariance S

For ids and sparse features A is kept to its diagonal, so that tables are preconditioned row by row. Parameters of other
modules and steps that belong to no Linear or Embedding get the diagonal Σ_i (J_iᵀ S J_i), from the same drawn vectors.

Cost: about one matrix product of rows × width² for each layer, over some two thousand rows; a forward and ``draws``
backward passes for modules without a written-out form. Checked by tests/test_kronecker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gramtower.data.features import IdBlock, SparseBlock
from gramtower.distributed.group import SINGLE, Group
from gramtower.model.deferred import pulled
from gramtower.model.layers import InputLinear
from gramtower.model.linearization import Linearization
from gramtower.model.opaque import Opaque
from gramtower.model.ops import Affine, Elementwise, InputAffine, Named, Op
from gramtower.model.sparse import SparseRows

_CHUNK = 512  # rows of drawn vectors that share a seed
_ROWS = 2048  # enough rows to know the moments of a layer's inputs and slopes
_LAYERS = (nn.Linear, nn.Embedding, nn.EmbeddingBag, InputLinear)


@dataclass
class Factor:
    """A ⊗ S for a weight, with its bias as one more input when A is a full matrix.

    Attributes:
        weight: own name of the weight.
        bias: own name of the bias that A covers, or None.
        inputs_first: whether the weight is stored inputs × outputs.
        A: inputs × inputs, or its diagonal.
        S: outputs × outputs.
        mean: mean of A's diagonal over the rows of all processes, where A is that of own rows.
    """

    weight: str
    bias: str | None
    inputs_first: bool
    A: Tensor
    S: Tensor
    mean: Tensor | None = None


@dataclass
class Factors:
    """What a tower's parameters are preconditioned with, in float64."""

    layers: list[Factor] = field(default_factory=list)
    biases: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # own name → (Σ r_i, S)
    diagonals: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def tower_factors(
    tower: Linearization,
    H: Tensor,
    weight: Tensor,
    trainable: set[str],
    draws: int,
    seed: int,
    group: Group = SINGLE,
    owned: Collection[str] = (),
) -> Factors:
    """The factors of one tower from its output curvature H and entity weights (mean 1).

    Args:
        tower: the tower at θ.
        H: k × k, positive semidefinite, float64.
        weight: r, one for each entity.
        trainable: own names of the parameters to precondition.
        draws: vectors drawn for each entity where no written-out form exists.
        seed: for the draws.
        group: the processes whose entities count together.
        owned: own names of tables that hold this process's rows alone.
    """
    steps = tower.steps
    moments: list[Any] = [None] * len(steps)
    stride = max(1, tower.features.total // _ROWS)
    opaque = [i for i, step in enumerate(steps) if isinstance(step, Opaque)]
    for where, saved, some in _seen(tower, stride, bool(opaque)):
        for index, (step, kept) in enumerate(zip(steps, saved, strict=True)):
            moment = None if kept is None else _moment(step, kept, weight[where], some, stride)
            if moment is not None:
                moments[index] = moment if moments[index] is None else moments[index] + moment
    for index, step in enumerate(steps):
        if moments[index] is not None and getattr(step, "weight", None) not in owned:
            group.sum_(moments[index])
    total_weight = group.sum_(weight.sum(dtype=torch.float64))
    factors, S, rows = Factors(), H, tower.features.total
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if isinstance(step, Affine):
            _add_full(factors, step.weight, step.bias, False, moments[index], S, trainable)
            W = tower.values.tensors[step.weight].double()
            S = W.t() @ S @ W
        elif isinstance(step, Elementwise):
            S = S * (moments[index] / rows)
        elif isinstance(step, InputAffine):
            if moments[index].dim() == 1:
                _add_diagonal(factors, step, moments[index], S, total_weight, trainable)
            else:
                _add_full(factors, step.weight, step.bias, step.inputs_first, moments[index], S, trainable)
        else:
            noise = _Noise(seed, index, draws, tower.features.first)
            if isinstance(step, Opaque):
                S = _opaque(tower, index, step, S, weight, trainable, noise, group, owned, factors)
            else:
                S = _by_vjp(tower, index, S, trainable, noise, group, factors)
    if opaque:
        tower.work.add(tower.side, "forwards", len(opaque))
    for factor in factors.layers:
        if factor.weight in owned:
            factor.mean = group.sum_(factor.A.sum()) / rows
    return factors


def _seen(tower: Linearization, stride: int, opaque: bool) -> Iterator[tuple[slice, list[Any], slice]]:
    """Ranges of rows, what each step kept of them, and which of them matrices are estimated from.

    Those are every ``stride``-th of all processes' rows, however they are cut and spread. Where nothing is kept, the
    steps run again over them alone, if they are written out; all rows' inputs come first, for the diagonals, with None
    for what later steps would have kept.
    """
    features = tower.features
    skipped = -features.first % stride
    if tower.plan.keep or opaque or skipped >= features.rows:
        for start, stop, saved in tower.saved_blocks():
            yield slice(start, stop), saved, slice(-(features.first + start) % stride, None, stride)
        return
    by_diagonal = features.kind != "dense"
    if by_diagonal:
        later = [None] * (len(tower.steps) - 1)
        for start, stop in tower.blocks():
            yield slice(start, stop), [tower.inputs(start, stop), *later], slice(0)
    step = stride * tower.plan.rows
    for start in range(skipped, features.rows, step):
        some = slice(start, start + step, stride)
        saved = tower.run_some(some)
        yield some, [None if by_diagonal else saved[0], *saved[1:]], slice(None)


def _moment(step: Op, kept: Any, r: Tensor, some: slice, stride: int) -> Tensor | None:
    """A block's part of Σ r x xᵀ (linear steps, bias included) or of Σ r φ′φ′ᵀ (activations), in float64.

    Matrices are estimated from ``some`` rows of it, one in ``stride``; diagonals come from all rows.
    """
    if isinstance(step, Elementwise):
        slope: Tensor = kept.slopes(some)
        return ((slope * (stride * r[some, None])).t() @ slope).double()
    if isinstance(step, Affine):
        return _outer(kept[some], stride * r[some], step.bias is not None)
    if isinstance(step, InputAffine):
        if isinstance(kept, IdBlock):
            counts = torch.zeros(step.width, dtype=torch.float64, device=r.device)
            return counts.index_add_(0, kept.tensor(r.device), r.double())
        if isinstance(kept, SparseBlock):
            return _column_squares(kept, r)
        return _outer(kept[some], stride * r[some], step.bias is not None)
    return None


def _outer(x: Tensor, r: Tensor, bias: bool) -> Tensor:
    """Σ r (x, 1)(x, 1)ᵀ, or without the 1."""
    weighted = x * r[:, None]
    A = (weighted.t() @ x).double()
    if not bias:
        return A
    full = torch.empty(len(A) + 1, len(A) + 1, dtype=torch.float64, device=x.device)
    full[:-1, :-1] = A
    full[-1, :-1] = full[:-1, -1] = weighted.sum(0, dtype=torch.float64)
    full[-1, -1] = r.sum(dtype=torch.float64)
    return full


def _column_squares(block: SparseBlock, r: Tensor) -> Tensor:
    """Σ_i r_i x_ij² for each feature j."""
    total = torch.zeros(block.shape[1], dtype=torch.float64, device=r.device)
    values = (block.values.square() * r[block.pattern.rows]).double()
    return total.index_add_(0, block.pattern.columns.long(), values)


def _add_full(
    factors: Factors, weight: str, bias: str | None, inputs_first: bool, A: Tensor, S: Tensor, trainable: set[str]
) -> None:
    with_bias = bias is not None and bias in trainable
    if weight in trainable:
        inputs = len(A) if bias is None or with_bias else len(A) - 1
        factors.layers.append(Factor(weight, bias if with_bias else None, inputs_first, A[:inputs, :inputs], S))
    elif with_bias and bias is not None:
        factors.biases[bias] = (A[-1, -1], S)


def _add_diagonal(
    factors: Factors, step: InputAffine, A: Tensor, S: Tensor, total: Tensor, trainable: set[str]
) -> None:
    if step.weight in trainable:
        factors.layers.append(Factor(step.weight, None, step.inputs_first, A, S))
    if step.bias is not None and step.bias in trainable:
        factors.biases[step.bias] = (total, S)


def _opaque(
    tower: Linearization,
    index: int,
    step: Opaque,
    S: Tensor,
    weight: Tensor,
    trainable: set[str],
    noise: _Noise,
    group: Group,
    owned: Collection[str],
    factors: Factors,
) -> Tensor:
    """Factors of the layers inside a module, diagonals of its other parameters, and S at its input."""
    layers = {name: part for name, part in step.module.named_modules() if type(part) in _LAYERS}
    known = {id(p): name for name, p in step.module.named_parameters()}
    found: dict[str, _Moments] = {name: _Moments() for name in layers}
    inside = {known.get(id(p)) for part in layers.values() for p in (part.weight, getattr(part, "bias", None))}
    others = {local: name for local, name in step.names.items() if local not in inside and name in trainable}
    squares: dict[str, Tensor] = {}
    root, draws = _root(S), noise.draws
    below: Tensor | None = None
    for start, stop, saved in tower.saved_blocks():
        leaves = {local: tower.values.tensors[name].detach().requires_grad_() for local, name in step.names.items()}
        calls: list[tuple[str, Any, Tensor]] = []
        hooks = [part.register_forward_hook(_recorder(name, calls)) for name, part in layers.items()]
        x = saved[index].x
        inputs = [x] if isinstance(x, Tensor) and x.is_floating_point() else []
        try:
            with torch.enable_grad():
                y = torch.func.functional_call(step.module, leaves, (x,))
        finally:
            for hook in hooks:
                hook.remove()
        r = weight[start:stop]
        for name, x_in, _ in calls:
            found[name].add_inputs(layers[name], x_in, r, stop - start)
        targets = [out for _, _, out in calls] + inputs + [leaves[local] for local in others]
        if not y.requires_grad:
            continue
        for draw in range(draws):
            v = noise.rows(draw, start, stop, y.shape[1]).to(y.device) @ root.t()
            grads = torch.autograd.grad(y, targets, v.to(y.dtype), retain_graph=True, allow_unused=True)
            for (name, _, _), g in zip(calls, grads, strict=False):
                if g is not None:
                    found[name].add_outputs(g)
            if inputs and index > 0 and (g := grads[len(calls)]) is not None:
                part = (g.t() @ g).double() / (draws * tower.features.total)
                below = part if below is None else below + part
            for local, g in zip(others, grads[len(calls) + len(inputs) :], strict=True):
                if g is not None:
                    part = g.double().square() / draws
                    squares[local] = squares[local] + part if local in squares else part
    for name, part in layers.items():
        table = step.names.get(known.get(id(part.weight), "")) in owned
        found[name].add_up(group, table)
        found[name].into(factors, part, {k: step.names.get(v) for k, v in known.items()}, trainable)
    for local, square in squares.items():
        factors.diagonals[others[local]] = group.sum_(square)
    if below is not None:
        group.sum_(below)
    return torch.zeros(1, 1, dtype=torch.float64) if below is None else below


def _by_vjp(
    tower: Linearization,
    index: int,
    S: Tensor,
    trainable: set[str],
    noise: _Noise,
    group: Group,
    factors: Factors,
) -> Tensor:
    """Diagonals of a step's own parameters and S at its input, from its vjp alone: for steps with no formula here."""
    step, values, root = tower.steps[index], tower.values, _root(S)
    others = {name for s in tower.steps if s is not step for name in _names(s)}
    squares: Named = {}
    below = torch.zeros(1, 1, dtype=torch.float64)
    for start, stop, saved in tower.saved_blocks():
        for draw in range(noise.draws):
            v = noise.rows(draw, start, stop, len(S)).to(root.device) @ root.t()
            out = {name: torch.zeros_like(values.tensors[name]) for name in sorted(trainable - others)}
            g = pulled(step.vjp(saved[index], v.to(values.dtype), values, out, index > 0))
            values.settle(out)
            if g is not None:
                part = (g.t() @ g).double() / (noise.draws * tower.features.total)
                below = part if len(below) != len(part) else below + part
            for name, total in out.items():
                part = total.double().square() / noise.draws
                squares[name] = squares[name] + part if name in squares else part
    for name, square in squares.items():
        if bool(group.sum_(square).any()):  # others are no part of this step
            factors.diagonals[name] = square + factors.diagonals.get(name, 0)
    return group.sum_(below)


def _names(step: Op) -> list[str]:
    """Own names of the tensors that a step with a formula here holds."""
    if isinstance(step, Opaque):
        return list(step.names.values())
    return [name for name in (getattr(step, "weight", None), getattr(step, "bias", None)) if name is not None]


class _Moments:
    """A and S of one layer inside a module, gathered block by block."""

    def __init__(self) -> None:
        self.A: Tensor | None = None
        self.S: Tensor | None = None
        self.total, self.count = torch.zeros(()), 0.0

    def add_inputs(self, layer: nn.Module, x: Any, r: Tensor, rows: int) -> None:
        if isinstance(x, SparseRows):
            part = _column_squares(x.block, r)
        elif not x.is_floating_point():
            assert isinstance(layer.weight, Tensor)
            part = torch.zeros(len(layer.weight), dtype=torch.float64, device=r.device)
            spread = r.double()[:, None].expand(rows, x.numel() // max(1, rows)).reshape(-1)
            part.index_add_(0, x.reshape(-1), spread)
        else:
            flat = x.detach().reshape(-1, x.shape[-1])
            spread = r[:, None].expand(rows, len(flat) // max(1, rows)).reshape(-1)
            part = _outer(flat, spread, getattr(layer, "bias", None) is not None)
        self.A = part if self.A is None else self.A + part
        self.total = self.total.to(r.device) + r.sum(dtype=torch.float64)

    def add_outputs(self, g: Tensor) -> None:
        flat = g.reshape(-1, g.shape[-1])
        part = (flat.t() @ flat).double()
        self.S = part if self.S is None else self.S + part
        self.count += len(flat)

    def add_up(self, group: Group, table: bool) -> None:
        """The sums over all processes; A of a table of own rows stays that of own rows."""
        if self.A is not None and not table:
            group.sum_(self.A)
        if self.S is not None:
            group.sum_(self.S)
        if group.size > 1:
            total, self.count = group.totals(float(self.total), self.count)
            self.total = torch.full_like(self.total, total)

    def into(self, factors: Factors, layer: nn.Module, names: dict[int, str | None], trainable: set[str]) -> None:
        if self.A is None or self.S is None:
            return
        weight, bias = names.get(id(layer.weight)) or "", names.get(id(getattr(layer, "bias", None)))
        S = self.S / self.count  # the mean over rows and draws
        if self.A.dim() == 1:
            step = InputAffine(weight, bias, type(layer) is not nn.Linear, len(self.A))
            _add_diagonal(factors, step, self.A, S, self.total, trainable)
        else:
            _add_full(factors, weight, bias, type(layer) is not nn.Linear, self.A, S, trainable)


def _recorder(name: str, calls: list[tuple[str, Any, Tensor]]) -> Callable[[nn.Module, Any, Tensor], None]:
    def record(_: nn.Module, inputs: Any, output: Tensor) -> None:
        calls.append((name, inputs[0], output))

    return record


@dataclass(frozen=True)
class _Noise:
    """Standard normal rows that depend on an entity's number alone, not on blocks or processes."""

    seed: int
    step: int
    draws: int
    first: int  # number of the first entity held here

    def rows(self, draw: int, start: int, stop: int, width: int) -> Tensor:
        """Rows ``start:stop`` of this process's entities, from chunks that are drawn each from a seed of its own."""
        first, last = self.first + start, self.first + stop
        chunks = range(first // _CHUNK, -(-last // _CHUNK))
        parts = [torch.empty(0, width, dtype=torch.float64)]
        for chunk in chunks:
            key = np.random.SeedSequence((self.seed, self.step, draw, chunk)).generate_state(1, np.uint64)
            generator = torch.Generator().manual_seed(int(key[0]) >> 1)
            parts.append(torch.randn(_CHUNK, width, generator=generator, dtype=torch.float64))
        offset = first - first // _CHUNK * _CHUNK
        return torch.cat(parts)[offset : offset + stop - start]


def _root(S: Tensor) -> Tensor:
    """R with R Rᵀ = S for a positive semidefinite S."""
    values, vectors = clamped_spectrum(S)
    return torch.as_tensor(vectors * values.sqrt())


def clamped_spectrum(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix, clamped at 0, and its eigenvectors.

    Of a matrix that is not finite, or whose eigenvalues are not found, those of its diagonal, in which what is not
    finite counts as 0: whatever the scale of the numbers, there is a preconditioner.
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

"""The closed-form Kronecker preconditioner of the Gauss-Newton matrix over all pairs.

Averaged over the left entities, the curvature of L at the left tower's output is

    H = ω ā Q_c + (1/m) Qᵀ diag(c) Q + mean(μ c_i) I,     c_j = Σ_i:(i,j)∈O ∂²ℓ⁺_ij/∂ŷ²      (eigenvalues clamped at 0)

and likewise on the right; its all-pairs part is exact. With a weight r_i for each entity, a layer with inputs x_i has
the Gauss-Newton block A ⊗ S with A = Σ_i r_i x_i x_iᵀ (the bias is an input of 1). S, the curvature at the layer's
outputs, is H at the last layer and is propagated down as

    S ← WᵀSW              through a linear layer
    S ← S ∘ mean(φ′φ′ᵀ)   through an elementwise activation
    S ← mean(g gᵀ)        through any other step, where g are random vectors with covariance S, back-propagated

all means weighted by r_i. Each step computes its own part (``moment`` and ``pull_curvature`` in steps.py). For ids and
sparse features A is reduced to its diagonal, so that tables are preconditioned row by row. Parameters of steps without
a formula get the diagonal Σ_i r_i J_iᵀ S J_i, from the same random vectors. Moments use about two thousand rows.

Damping is shared between the factors (Martens and Grosse, 2015, Section 6.3): with λ′ = λ + damping and π² = mean diag
A / mean diag S, the inverse applied is (A + π√λ′ I)⁻¹ ⊗ (S + √λ′/π I)⁻¹. With a regulariser Ψ other than ½‖θ‖², λ is
multiplied for each weight by the mean diagonal of ∇²Ψ over it.

A matrix that Cholesky cannot factorise is inverted by its clamped eigenvalues, or by its diagonal if these are not
found (steps.clamped_spectrum); a layer whose factors are not finite gets 1/λ′. The preconditioner of one side is zero
on the other side's parameters.

Cost of building: O((m+n) width²) and a few factorisations of layer width; of applying: one product of each parameter
matrix with factors of its width. Not in the paper.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor

from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.shards import Sharded
from gramtower.engine.objective.regularizers import mean_curvatures
from gramtower.engine.objective.value_and_gradient import Evaluation, Moments
from gramtower.engine.towers.linearization import Linearization
from gramtower.engine.towers.parameters import LinearOperator, Parameters
from gramtower.engine.towers.steps import CurvatureContext, Factor, Factors, Moment, Noise, Sample, clamped_spectrum

SIDES = ("left", "right")

_DRAWS = 4
_TINY = 1e-12


class Kronecker(LinearOperator):
    """M ≈ (G + damping·I)⁻¹: symmetric, positive definite, applied block by block. Made by Point.preconditioner.

    Args:
        like: parameters of the layout.
        blocks: of weights and biases.
        diagonal: of all other parameters, by name.
        still: parameters that M is zero on.
        tables: weights with a row for each entity of a side.
        replay: multiplies it with a vector and writes the result over another one, instead of ``compute``.
    """

    def __init__(
        self,
        like: Parameters,
        blocks: list[_Block],
        diagonal: dict[str, Tensor],
        still: Collection[str] = (),
        tables: Mapping[str, str] = MappingProxyType({}),
        replay: Replay | None = None,
    ) -> None:
        super().__init__(like.blank())  # it may outlive the point by many iterations
        self._blocks, self._diagonal, self._still, self._tables, self.replay = blocks, diagonal, still, tables, replay

    @torch.no_grad()
    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        out = d.empty() if out is None else out
        return self.compute(d, out) if self.replay is None else self.replay(self, d, out)

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """M d, kernel by kernel."""
        for block in self._blocks:
            block.apply(d, out)
        for name, inverse in self._diagonal.items():
            torch.mul(d[name], inverse, out=out[name])
        for name in self._still:
            out[name].zero_()
        return out

    def tensors(self) -> list[Tensor]:
        """What it is made of, always in the same order."""
        return [t for block in self._blocks for t in (block.A, block.S)] + list(self._diagonal.values())

    def state(self) -> dict[str, Sharded | Tensor]:
        """What it is made of; the number in a name is that of the parameter."""
        number = {name: i for i, name in enumerate(self.like)}
        found = {f"diagonal{number[name]}": self._stored(name, tensor) for name, tensor in self._diagonal.items()}
        for block in self._blocks:
            A = self._stored(block.weight, block.A) if block.A.dim() == 1 else block.A
            found |= {f"A{number[block.weight]}": A, f"S{number[block.weight]}": block.S}
        return found

    def _stored(self, name: str, tensor: Tensor) -> Sharded | Tensor:
        return Sharded(tensor, self._tables[name]) if name in self._tables else tensor

    def load(self, state: Mapping[str, Sharded | Tensor]) -> bool:
        """Take over the ``state`` of another of the same towers, unless other blocks of that were finite."""
        own = {name: _plain(one) for name, one in self.state().items()}
        stored = {name: _plain(one) for name, one in state.items()}
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in stored.items()}:
            return False
        for name, tensor in own.items():
            tensor.copy_(stored[name])
        return True

    def copy(self) -> Kronecker:
        """A copy with memory of its own, which is applied kernel by kernel."""
        blocks = [copy.copy(block) for block in self._blocks]
        for block in blocks:
            block.A, block.S = block.A.clone(), block.S.clone()
        diagonal = {name: t.clone() for name, t in self._diagonal.items()}
        return Kronecker(self.like, blocks, diagonal, self._still, self._tables)


Replay = Callable[[Kronecker, Parameters, Parameters], Parameters]


class _Block:
    """The inverse of one damped A ⊗ S, for a weight and the bias that A covers."""

    def __init__(self, weight: str, bias: str | None, inputs_first: bool, A: Tensor, S: Tensor) -> None:
        self.weight, self.bias, self.inputs_first, self.A, self.S = weight, bias, inputs_first, A, S

    def apply(self, r: Parameters, out: Parameters) -> None:
        R, result = r[self.weight], out[self.weight]
        if self.A.dim() == 1:  # a table: rows scaled by the inverse of A's diagonal
            if self.inputs_first:
                torch.mm(R, self.S, out=result).mul_(self.A[:, None])
            else:
                torch.mm(self.S, R, out=result).mul_(self.A)
            return
        R = R.t() if self.inputs_first else R  # outputs × inputs
        if self.bias is not None:
            R = torch.cat([R, r[self.bias][:, None]], 1)
        product = self.S @ R @ self.A
        if self.bias is not None:
            out[self.bias].copy_(product[:, -1])
            product = product[:, :-1]
        result.copy_(product.t() if self.inputs_first else product)


@torch.no_grad()
def kronecker(at: Evaluation, damping: float, side: str | None, replay: Replay | None = None) -> Kronecker:
    """Build the preconditioner at a point; with ``side``, only for the parameters of that side."""
    c, towers = at.constants, at.towers
    numbers = [number for number, name in enumerate(SIDES) if side in (None, name) and towers.local_names(name)]
    moments = at.curvature_moments(numbers)
    shift = {
        name: max(c.l2 * curvature + damping, _TINY)
        for name, curvature in mean_curvatures(c.regularizer, at.parameters).items()
    }
    merged: dict[str, list[Factor]] = {}
    squares: dict[str, Tensor] = {}
    extra: dict[str, list[tuple[Tensor, Tensor]]] = {}  # Σ_i r_i and S of biases kept apart from their tables
    tables: dict[str, str] = {}  # weights with one row for each entity of a side
    sides = [(number, (at.left, at.right)[number]) for number in numbers]
    curvatures, weights = zip(*(_output_curvature(at, number, moments) for number in numbers), strict=True)
    if any(len(tower.steps) > 1 for _, tower in sides):  # the inverse of a table's S is found if it is not definite
        curvatures = tuple(_semidefinite(curvatures))
    for (number, tower), H, weight in zip(sides, curvatures, weights, strict=True):
        names = towers.local_names(SIDES[number])
        owned = {own for own, name in names.items() if name in at.parameters.layout.owned}
        factors = tower_factors(tower, H, weight, set(names), _DRAWS, number, c.shards.group, owned)
        for factor in factors.layers:
            bias = None if factor.bias is None else names[factor.bias]
            renamed = replace(factor, weight=names[factor.weight], bias=bias)
            merged.setdefault(renamed.weight, []).append(renamed)
            if tower.features.kind == "ids" and len(factor.A) == tower.rows:
                tables[renamed.weight] = SIDES[number]
        for name, curvature in factors.biases.items():
            extra.setdefault(names[name], []).append(curvature)
        for name, square in factors.diagonals.items():
            squares[names[name]] = squares[names[name]] + square if names[name] in squares else square
    dtype = at.Q.dtype
    inverses = Inverses()
    pending = [_invert(_merge(parts), shift[name], inverses) for name, parts in merged.items()]
    biases = {name: inverses.ask(_bias_curvature(parts), shift[name]) for name, parts in extra.items()}
    inverses.solve(dtype)
    blocks = [block for make in pending if (block := make()) is not None]
    blocks += [_BiasBlock(name, S) for name, number in biases.items() if (S := inverses[number]) is not None]
    covered = {name for block in blocks for name in (block.weight, block.bias)}
    moved = {name for number in numbers for name in towers.local_names(SIDES[number]).values()}
    diagonal = {
        name: (1 / (shift[name] + squares.get(name, torch.zeros_like(at.parameters[name])))).to(dtype)
        for name in at.parameters
        if name in moved and name not in covered
    }
    still = [name for name in at.parameters if name not in moved]
    return Kronecker(at.parameters, blocks, diagonal, still, tables, replay)


def _plain(one: Sharded | Tensor) -> Tensor:
    return one.tensor if isinstance(one, Sharded) else one


def _output_curvature(at: Evaluation, side: int, moments: Moments) -> tuple[Tensor, Tensor]:
    """H of one side, and each entity's share of it: r_i = tr H_i / mean tr H."""
    c = at.constants
    group, rows, k = c.shards.group, (c.shards.left, c.shards.right)[side].total, at.Q.shape[1]
    own, gramian, square = (c.left, c.right)[side], at.gramians[0][1 - side], moments.squares[1 - side]
    assert square is not None
    trace = moments.sums[side][:, 1].double()  # Σ_j ∂²ℓ⁺_ij ‖q_j‖²
    if own.weight is None:
        H = torch.add(square / rows, gramian, alpha=c.omega)
        trace += c.omega * gramian.trace()
    else:
        H = torch.addcmul(square / rows, gramian, group.sum_(own.weight.sum(dtype=torch.float64)), value=c.omega / rows)
        trace.addcmul_(own.weight.double(), gramian.trace(), value=c.omega)
    if own.penalty is not None:
        H.diagonal().add_(group.sum_(own.penalty.sum(dtype=torch.float64)) / rows)
        trace.add_(own.penalty, alpha=k)
    mean = group.sum_(trace.clamp_min_(0).sum()) / rows
    share = torch.where(mean > 0, trace / mean, 1.0)
    return H, share.to(at.Q.dtype)


def _semidefinite(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Matrices of one size, eigenvalues clamped at 0; most often none is negative, as Cholesky finds out soon."""
    batch = torch.stack(list(matrices))
    diagonal = batch.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(1e-10 * diagonal.abs().mean(-1, keepdim=True))
    found = list(matrices)
    for i, failed in enumerate(torch.linalg.cholesky_ex(batch).info.tolist()):
        if failed:
            values, vectors = clamped_spectrum(found[i])
            found[i] = (vectors * values) @ vectors.t()
    return found


def _merge(parts: list[Factor]) -> Factor:
    """One A ⊗ S for a weight that several layers use: A adds up, S is the mean by A's size."""
    if len(parts) == 1:
        return parts[0]
    sizes = [_diagonal(p.A).sum() for p in parts]
    total = torch.stack(sizes).sum().clamp_min(_TINY)
    S = sum((p.S * (size / total) for p, size in zip(parts, sizes, strict=True)), torch.zeros_like(parts[0].S))
    A = sum((p.A for p in parts[1:]), parts[0].A)
    first = parts[0]
    return Factor(first.weight, first.bias, first.inputs_first, A, S)


def _diagonal(A: Tensor) -> Tensor:
    return A if A.dim() == 1 else A.diagonal()


def _invert(f: Factor, shift: float, inverses: Inverses) -> Callable[[], _Block | None]:
    """Ask for the damped inverse of A ⊗ S; the block once the inverses are there, None if A or S is not finite."""
    mean = _diagonal(f.A).mean() if f.mean is None else f.mean
    pi = (mean.clamp_min(_TINY) / f.S.diagonal().mean().clamp_min(_TINY)).sqrt()
    root = math.sqrt(shift)
    S = inverses.ask(f.S, root / pi, f.A)
    A = 1 / (f.A + pi * root) if f.A.dim() == 1 else inverses.ask(f.A, pi * root, f.S)

    def block() -> _Block | None:
        left, right = A if isinstance(A, Tensor) else inverses[A], inverses[S]
        if left is None or right is None:
            return None
        return _Block(f.weight, f.bias, f.inputs_first, left.to(right.dtype), right)

    return block


def _bias_curvature(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ_i r_i S of a bias kept apart from its table."""
    return sum((count * S for count, S in parts), torch.zeros_like(parts[0][1]))


class _BiasBlock(_Block):
    """A bias by itself."""

    def __init__(self, name: str, inverse: Tensor) -> None:
        super().__init__(name, None, True, inverse.new_ones(1), inverse)

    def apply(self, r: Parameters, out: Parameters) -> None:
        torch.mv(self.S, r[self.weight], out=out[self.weight])


_BATCHED = 128  # rows and columns up to which a GPU does a batch in the time of one
_LEAST, _TINY = 1e-15, 1e-12  # of the largest eigenvalue, or of this: what the others are clamped at


class Inverses:
    """Ask for all inverses, solve, and look each up."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []
        self._sums: list[Tensor] = []  # of all numbers that must be finite
        self._found: list[Tensor | None] = []

    def ask(self, matrix: Tensor, shift: Tensor | float, *others: Tensor) -> int:
        """Ask for (matrix + shift·I)⁻¹, of use where ``others`` are finite too; the number that it is found under."""
        damped = matrix.clone()
        damped.diagonal().add_(shift)
        self._asked.append(damped)
        self._sums.append(sum((other.sum() for other in others), matrix.sum()))
        return len(self._asked) - 1

    def __getitem__(self, number: int) -> Tensor | None:
        """The inverse; None if something was not finite."""
        return self._found[number]

    def solve(self, dtype: torch.dtype) -> None:
        """Find what was asked for, in the given dtype."""
        self._found = [None] * len(self._asked)
        batches = self._batches()
        if not batches:
            return
        matrices = [torch.stack([self._asked[i] for i in numbers]) for numbers in batches]
        tried = [torch.linalg.cholesky_ex(batch) for batch in matrices]
        sums = torch.stack([self._sums[i] for numbers in batches for i in numbers])
        flags = torch.stack([torch.cat([info for _, info in tried]) == 0, sums.isfinite()], 1).tolist()
        for numbers, batch, (factors, _) in zip(batches, matrices, tried, strict=True):
            own, flags = flags[: len(numbers)], flags[len(numbers) :]
            for i, (definite, _) in enumerate(own):
                if not definite:
                    factors[i] = torch.eye(len(factors[i]), dtype=factors.dtype, device=factors.device)
            inverses = _inverse_products(factors)
            for i, (definite, finite) in enumerate(own):
                if finite and not definite:
                    values, vectors = clamped_spectrum(batch[i])
                    inverses[i] = (vectors / values.clamp_min(max(float(values.max()), _TINY) * _LEAST)) @ vectors.mT
                self._found[numbers[i]] = inverses[i].to(dtype) if finite else None

    def _batches(self) -> list[list[int]]:
        """The numbers of matrices that are factorised together."""
        by_size: dict[int, list[int]] = {}
        for i, matrix in enumerate(self._asked):
            by_size.setdefault(len(matrix), []).append(i)
        batches: list[list[int]] = []
        for size, numbers in by_size.items():
            one_by_one = size > _BATCHED and self._asked[numbers[0]].is_cuda
            batches += [[i] for i in numbers] if one_by_one else [numbers]
        return batches


def _inverse_products(factors: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ of lower triangular L: on a GPU two kernels, where LAPACK's way is a chain of small ones."""
    if not factors.is_cuda:
        return torch.cholesky_inverse(factors)
    eye = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    inverse: Tensor = torch.linalg.solve_triangular(factors, eye.expand_as(factors), upper=False)
    return inverse.mT @ inverse


_ROWS = 2048  # rows for estimating the moments of a layer's inputs and slopes


@torch.no_grad()
def tower_factors(
    tower: Linearization,
    H: Tensor,
    weight: Tensor,
    trainable: Collection[str],
    draws: int,
    seed: int,
    group: Group = SINGLE,
    owned: Collection[str] = (),
) -> Factors:
    """The factors of one tower from its output curvature H and entity weights (mean 1).

    Args:
        tower: the tower at θ.
        H: k × k, positive semidefinite, float64.
        weight: r, one number for each entity.
        trainable: local names of the parameters to precondition.
        draws: random vectors for each entity, for steps without a formula.
        seed: seed of the random vectors.
        group: the processes that divide the entities.
        owned: local names of tables that hold only this process's rows.
    """
    steps, features = tower.steps, tower.features
    stride = max(1, features.total // _ROWS)
    moments = _moments(tower, weight, stride)
    held = set(owned)
    if features.kind == "ids" and group.size > 1:
        held.update(steps[0].id_tables(tower.side, features))  # also those that are not trained
    for step, moment in zip(steps, moments, strict=True):
        step.reduce_moment(moment, group, held)
    total_weight = group.sum_(weight.sum(dtype=torch.float64))
    factors, S = Factors(trainable), H
    sample = _Sampled(tower, weight, stride)
    for index in range(len(steps) - 1, -1, -1):
        context = CurvatureContext(
            values=tower.values,
            factors=factors,
            total_weight=total_weight,
            rows=features.total,
            group=group,
            owned=owned,
            noise=Noise(seed, index, draws),
            sample=partial(sample.of, index),
            is_first=index == 0,
        )
        S = steps[index].pull_curvature(S, moments[index], context)
    for factor in factors.layers:
        if factor.weight in owned:
            factor.mean = group.sum_(factor.A.sum()) / features.total
    return factors


class _Sampled:
    """Every ``stride``-th row of all processes, run forward when a step first needs them."""

    def __init__(self, tower: Linearization, weight: Tensor, stride: int) -> None:
        self._tower, self._weight, self._stride = tower, weight, stride

    def of(self, index: int) -> Sample:
        """The rows, with the values that a step kept of them."""
        weight, numbers, saved = self._run
        return Sample(weight, numbers, saved[index])

    @cached_property
    def _run(self) -> tuple[Tensor, Tensor, list[object]]:
        tower, features = self._tower, self._tower.features
        rows = slice(-features.first % self._stride, None, self._stride)
        numbers = features.first + torch.arange(features.rows, device=self._weight.device)[rows]
        saved = tower.forward_some(rows) if len(numbers) else tower.forward_block(0, 0)[1]
        return self._stride * self._weight[rows], numbers, saved


def _moments(tower: Linearization, weight: Tensor, stride: int) -> list[Moment]:
    """The moments of all steps over this process's rows.

    Matrices are estimated from every ``stride``-th row of all processes, independent of blocks and processes. If
    activations were not kept, only those rows are recomputed, and diagonals are computed from the features of all rows.
    A first step differentiated by autodiff may have tables anywhere, so all its rows are recomputed.
    """
    features, steps = tower.features, tower.steps
    skipped = -features.first % stride
    moments: list[Moment] = [None] * len(steps)

    def add(rows: slice, saved: list[object], some: slice) -> None:
        for index, (step, kept) in enumerate(zip(steps, saved, strict=True)):
            moments[index] = _sum(moments[index], step.moment(kept, weight[rows], some, stride))

    by_autodiff = features.kind != "dense" and not steps[0].analytic
    if tower.plan.keep or by_autodiff or skipped >= features.rows:
        for start, stop, saved in tower.saved_blocks():
            add(slice(start, stop), saved, slice(-(features.first + start) % stride, None, stride))
        return moments
    step = stride * tower.plan.rows
    for start in range(skipped, features.rows, step):
        some = slice(start, start + step, stride)
        add(some, tower.forward_some(some), slice(None))
    if features.kind != "dense":
        full: Moment = None
        for start, stop in tower.blocks():
            full = _sum(full, steps[0].input_moment(tower.inputs(start, stop), weight[start:stop]))
        moments[0] = _preferred(full, moments[0])
    return moments


def _sum(a: Moment, b: Moment) -> Moment:
    """The sum of moments, part by part; None counts as zero."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, list) or isinstance(b, list):
        return [_sum(x, y) for x, y in zip(a, b, strict=True)]
    return a + b


def _preferred(a: Moment, b: Moment) -> Moment:
    """The parts of ``a``, or those of ``b`` where ``a`` has None."""
    if isinstance(a, list) and isinstance(b, list):
        return [_preferred(x, y) for x, y in zip(a, b, strict=True)]
    return b if a is None else a

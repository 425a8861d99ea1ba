"""The closed-form Kronecker preconditioner of the Gauss-Newton matrix over all pairs.

Averaged over the left entities, the curvature of L at the left tower's output is

    H = ω ā Q_c + (1/m) Qᵀ diag(c) Q + mean(μ c_i) I,     c_j = Σ_i:(i,j)∈O ∂²ℓ⁺_ij/∂ŷ²      (eigenvalues clamped at 0)

and likewise on the right; its all-pairs part is exact. engine/towers/factors.py turns it into A ⊗ S for each layer.
Damping is shared between the factors (Martens and Grosse, 2015, Section 6.3): with λ′ = λ + damping and π² = mean diag
A / mean diag S, the inverse applied is (A + π√λ′ I)⁻¹ ⊗ (S + √λ′/π I)⁻¹.

Whatever the scale of the data there is a preconditioner: a matrix that Cholesky cannot factorise is inverted by its
clamped eigenvalues, or by its diagonal if these are not found (factors.clamped_spectrum); a layer whose factors are not
finite gets 1/λ′.

Cost of building: O((m+n) width²) and a few factorisations of layer width; of applying: one product of each parameter
matrix with factors of its width. Not in the paper. Checked by tests/test_kronecker.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gramtower.engine.objective.evaluation import Evaluation, Moments
from gramtower.engine.objective.executor import EAGER, Executor
from gramtower.engine.objective.operators import LinearOperator
from gramtower.engine.towers.factors import tower_factors
from gramtower.engine.towers.layer_factors import Factor, Factors, clamped_spectrum
from gramtower.engine.towers.parameters import Parameters

_DRAWS = 4
_TINY = 1e-12


class Kronecker(LinearOperator):
    """M ≈ (G + damping·I)⁻¹: symmetric, positive definite, applied block by block. Made by Point.preconditioner."""

    def __init__(
        self, like: Parameters, blocks: list[_Block], diagonal: dict[str, Tensor], executor: Executor = EAGER
    ) -> None:
        super().__init__(like.blank())  # it may outlive the point by many iterations
        self._blocks, self._diagonal, self.executor = blocks, diagonal, executor

    @torch.no_grad()
    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """M d, written over ``out`` if given."""
        return self.executor.apply(self, d, d.empty() if out is None else out)

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """M d written over ``out``, kernel by kernel."""
        for block in self._blocks:
            block.apply(d, out)
        for name, inverse in self._diagonal.items():
            torch.mul(d[name], inverse, out=out[name])
        return out

    def tensors(self) -> list[Tensor]:
        """What it is made of, always in the same order."""
        return [t for block in self._blocks for t in (block.A, block.S)] + list(self._diagonal.values())

    def state(self) -> dict[str, Tensor]:
        """What it is made of, by name; names that end in ``rows_left`` or ``rows_right`` have one entry an entity."""
        found = {f"diagonal{i}": tensor for i, tensor in enumerate(self._diagonal.values())}
        for i, block in enumerate(self._blocks):
            found |= {f"A{i}" + ("" if block.side is None else f"_rows_{block.side}"): block.A, f"S{i}": block.S}
        return found

    def load(self, state: dict[str, Tensor]) -> Kronecker:
        """Take over the ``state`` of another that was made of the same towers."""
        for name, own in self.state().items():
            own.copy_(state[name])
        return self

    def copy(self) -> Kronecker:
        """The same in memory of its own."""
        blocks = [copy.copy(block) for block in self._blocks]
        for block in blocks:
            block.A, block.S = block.A.clone(), block.S.clone()
        return Kronecker(self.like, blocks, {name: t.clone() for name, t in self._diagonal.items()})


class _Block:
    """The inverse of one damped A ⊗ S, for a weight and the bias that A covers.

    Attributes:
        side: whose entities the numbers of A belong to, if they do.
    """

    def __init__(self, weight: str, bias: str | None, inputs_first: bool, A: Tensor, S: Tensor) -> None:
        self.weight, self.bias, self.inputs_first, self.A, self.S = weight, bias, inputs_first, A, S
        self.side: str | None = None

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
def kronecker(at: Evaluation, damping: float, executor: Executor = EAGER, seed: int = 0) -> Kronecker:
    """Build the preconditioner at a point."""
    c, towers = at.constants, at.towers
    moments = at.curvature_moments()
    shift = max(c.l2 + damping, _TINY)
    merged: dict[str, list[Factor]] = {}
    squares: dict[str, Tensor] = {}
    extra: dict[str, list[tuple[Tensor, Tensor]]] = {}
    tables: dict[str, str] = {}  # weights with one row for each entity of a side
    curvatures, weights = zip(*(_output_curvature(at, index, moments) for index in (0, 1)), strict=True)
    definite = _semidefinite(curvatures)
    for index, (side, tower) in enumerate((("left", at.left.tower), ("right", at.right))):
        H, weight = definite[index], weights[index]
        names = towers.local_names(side)
        owned = {own for own, name in names.items() if name in at.parameters.layout.owned}
        factors = tower_factors(tower, H, weight, set(names), _DRAWS, seed + index, c.shards.group, owned)
        for factor in factors.layers:
            renamed = Factor(
                names[factor.weight],
                None if factor.bias is None else names[factor.bias],
                factor.inputs_first,
                factor.A,
                factor.S,
                factor.mean,
            )
            merged.setdefault(renamed.weight, []).append(renamed)
            if tower.features.kind == "ids" and len(factor.A) == tower.rows:
                tables[renamed.weight] = side
        _collect(factors, names, extra)
        for name, square in factors.diagonals.items():
            squares[names[name]] = squares[names[name]] + square if names[name] in squares else square
    dtype = at.Q.dtype
    inverses = _Inverses()
    pending = [_invert(factor, shift, inverses) for factor in _usable([_merge(parts) for parts in merged.values()])]
    biases = {name: inverses.ask(_bias_curvature(parts), shift) for name, parts in extra.items()}
    inverses.solve(dtype)
    blocks = [block() for block in pending]
    blocks += [_BiasBlock(name, inverses[number]) for name, number in biases.items()]
    covered = {name for block in blocks for name in (block.weight, block.bias)}
    diagonal = {
        name: (1 / (shift + squares.get(name, torch.zeros_like(tensor)))).to(dtype)
        for name, tensor in at.parameters.items()
        if name not in covered
    }
    for block in blocks:
        block.side = tables.get(block.weight) if block.A.dim() == 1 else None
    return Kronecker(at.parameters, blocks, diagonal, executor)


def _collect(factors: Factors, names: dict[str, str], extra: dict[str, list[tuple[Tensor, Tensor]]]) -> None:
    for name, pair in factors.biases.items():
        extra.setdefault(names[name], []).append(pair)


def _output_curvature(at: Evaluation, side: int, moments: Moments) -> tuple[Tensor, Tensor]:
    """H of one side, and each entity's share of it: r_i = tr H_i / mean tr H."""
    c = at.constants
    group, rows, k = c.shards.group, (c.shards.left, c.shards.right)[side].total, at.Q.shape[1]
    own_trace = moments.sums[side][:, 1]  # Σ_j ∂²ℓ⁺_ij ‖q_j‖²
    own, gramian = (c.left, c.right)[side], c.omega * at.gramians[0][1 - side]
    weight, penalty = own.weight, own.penalty
    mean_weight = 1.0 if weight is None else group.sum_(weight.sum(dtype=torch.float64)) / rows
    H = mean_weight * gramian + moments.squares[1 - side] / rows
    trace = own_trace.double() + gramian.trace() * (1.0 if weight is None else weight.double())
    if penalty is not None:
        mean_penalty = group.sum_(penalty.sum(dtype=torch.float64)) / rows
        H.diagonal().add_(mean_penalty)
        trace = trace + k * penalty.double()
    trace = trace.clamp_min(0)
    mean = group.sum_(trace.sum()) / rows
    share = torch.where(mean > 0, trace / mean, torch.ones_like(trace))
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


def _usable(factors: list[Factor]) -> list[Factor]:
    """Factors without those that are not finite: numbers whose squares are beyond the dtype."""
    finite = [torch.isfinite(f.A).all() & torch.isfinite(f.S).all() for f in factors]
    return [f for f, ok in zip(factors, torch.stack(finite).tolist(), strict=True) if ok] if factors else []


def _diagonal(A: Tensor) -> Tensor:
    return A if A.dim() == 1 else A.diagonal()


class _Inverses:
    """Inverses of many small symmetric matrices, made size by size: a GPU does a batch in the time of one."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []
        self._found: list[Tensor] = []

    def ask(self, matrix: Tensor, shift: Tensor | float) -> int:
        """Ask for (matrix + shift·I)⁻¹; the number under which it will be found."""
        damped = matrix.clone()
        damped.diagonal().add_(shift)
        self._asked.append(damped)
        return len(self._asked) - 1

    def __getitem__(self, number: int) -> Tensor:
        return self._found[number]

    def solve(self, dtype: torch.dtype) -> None:
        """All of them by Cholesky in float64."""
        found: dict[int, Tensor] = {}
        for size in {len(matrix) for matrix in self._asked}:
            numbers = [i for i, matrix in enumerate(self._asked) if len(matrix) == size]
            batch = torch.stack([self._asked[i] for i in numbers])
            factors, info = torch.linalg.cholesky_ex(batch)
            failed = info.nonzero()[:, 0].tolist()  # rounding made a semidefinite matrix indefinite
            for i in failed:
                factors[i] = torch.eye(size, dtype=batch.dtype, device=batch.device)
            inverses = torch.cholesky_inverse(factors)
            for i in failed:
                values, vectors = clamped_spectrum(batch[i])
                inverses[i] = (vectors / values.clamp_min(float(values.max().clamp_min(_TINY)) * 1e-15)) @ vectors.mT
            found.update(zip(numbers, inverses.to(dtype), strict=True))
        self._found = [found[i] for i in range(len(self._asked))]


def _invert(f: Factor, shift: float, inverses: _Inverses) -> Callable[[], _Block]:
    """Ask for the damped inverse of A ⊗ S; the block, once the inverses are there."""
    mean = _diagonal(f.A).mean() if f.mean is None else f.mean
    pi = (mean.clamp_min(_TINY) / f.S.diagonal().mean().clamp_min(_TINY)).sqrt()
    root = math.sqrt(shift)
    S = inverses.ask(f.S, root / pi)
    if f.A.dim() == 1:
        diagonal = 1 / (f.A + pi * root)
        return lambda: _Block(f.weight, f.bias, f.inputs_first, diagonal.to(inverses[S].dtype), inverses[S])
    A = inverses.ask(f.A, pi * root)
    return lambda: _Block(f.weight, f.bias, f.inputs_first, inverses[A], inverses[S])


def _bias_curvature(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ_i r_i S of a bias kept apart from its table."""
    return sum((count * S for count, S in parts), torch.zeros_like(parts[0][1]))


class _BiasBlock(_Block):
    """A bias by itself."""

    def __init__(self, name: str, inverse: Tensor) -> None:
        super().__init__(name, None, True, inverse.new_ones(1), inverse)

    def apply(self, r: Parameters, out: Parameters) -> None:
        torch.mv(self.S, r[self.weight], out=out[self.weight])

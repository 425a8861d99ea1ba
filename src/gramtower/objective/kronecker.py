"""The closed-form Kronecker preconditioner of the Gauss-Newton matrix over all pairs.

Averaged over the left entities, the curvature of L at the left tower's output is

    H = ω ā Q_c + (1/m) Qᵀ diag(c) Q + mean(μ c_i) I,     c_j = Σ_i:(i,j)∈O ∂²ℓ⁺_ij/∂ŷ²      (eigenvalues clamped at 0)

and likewise on the right; its all-pairs part is exact. model/factors.py turns it into A ⊗ S for each layer. Damping is
shared between the factors (Martens and Grosse, 2015, Section 6.3): with λ′ = λ + damping and π² = mean diag A / mean
diag S, the inverse applied is (A + π√λ′ I)⁻¹ ⊗ (S + √λ′/π I)⁻¹.

Cost of building: O((m+n) width²) and a few factorisations of layer width; of applying: one product of each parameter
matrix with factors of its width. Not in the paper. Checked by tests/test_kronecker.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramtower.model.factors import Factor, Factors, tower_factors
from gramtower.model.parameters import Parameters, as_parameters
from gramtower.objective.evaluation import Point
from gramtower.objective.gramians import gram, square_norms

_DRAWS = 4
_TINY = 1e-12


class Kronecker:
    """M ≈ (G + damping·I)⁻¹: symmetric, positive definite, applied block by block. Made by Point.preconditioner."""

    def __init__(self, like: Parameters, blocks: list[_Block], diagonal: dict[str, Tensor]) -> None:
        self._like, self._blocks, self._diagonal = like, blocks, diagonal

    @property
    def shape(self) -> tuple[int, int]:
        """(D, D)."""
        return len(self._like), len(self._like)

    def __matmul__(self, r: Any) -> Any:
        """M r for Parameters, or for a flat torch or numpy vector; the result is of the same kind."""
        product = self.product(as_parameters("r", r, self._like))
        if isinstance(r, Parameters):
            return product
        return product.vector.cpu().numpy() if isinstance(r, np.ndarray) else product.vector

    @torch.no_grad()
    def product(self, r: Parameters, out: Parameters | None = None) -> Parameters:
        """M r, written over ``out`` if given."""
        out = r.empty() if out is None else out
        for block in self._blocks:
            block.apply(r, out)
        for name, inverse in self._diagonal.items():
            torch.mul(r[name], inverse, out=out[name])
        return out


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
def kronecker(point: Point, damping: float, seed: int = 0) -> Kronecker:
    """Build the preconditioner at a point."""
    s, towers = point.setting, point.towers
    sums = _pair_sums(point)
    shift = max(s.l2 + damping, _TINY)
    merged: dict[str, list[Factor]] = {}
    squares: dict[str, Tensor] = {}
    extra: dict[str, list[tuple[float, Tensor]]] = {}
    for index, (side, tower) in enumerate((("left", point.left), ("right", point.right))):
        H, weight = _output_curvature(point, index, sums)
        names = towers.own_names(side)
        owned = {own for own, name in names.items() if name in point.parameters.layout.owned}
        factors = tower_factors(tower, H, weight, set(names), _DRAWS, seed + index, s.shards.group, owned)
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
        _collect(factors, names, extra)
        for name, square in factors.diagonals.items():
            squares[names[name]] = squares[names[name]] + square if names[name] in squares else square
    dtype = point.P.dtype
    blocks = [_invert(_merge(parts), shift, dtype) for parts in merged.values()]
    for name, parts in extra.items():
        blocks.append(_bias_block(name, parts, shift, dtype))
    covered = {name for block in blocks for name in (block.weight, block.bias)}
    diagonal = {
        name: (1 / (shift + squares.get(name, torch.zeros_like(tensor)))).to(dtype)
        for name, tensor in point.parameters.items()
        if name not in covered
    }
    return Kronecker(point.parameters, blocks, diagonal)


def _collect(factors: Factors, names: dict[str, str], extra: dict[str, list[tuple[float, Tensor]]]) -> None:
    for name, pair in factors.biases.items():
        extra.setdefault(names[name], []).append(pair)


def _pair_sums(point: Point) -> tuple[Tensor, Tensor]:
    """For each left entity Σ_j ∂²ℓ⁺_ij (1, ‖q_j‖²), and likewise for each right one."""
    pairs, c = point.setting.pairs, point.curvatures()
    norms = square_norms(point.P), square_norms(point.right_rows)
    left, right = (torch.stack([torch.ones_like(n), n], 1) for n in norms)
    sums = torch.zeros_like(left), point.Q.new_zeros(len(point.Q), 2)
    point.kernels.left_sum(pairs, c, right, sums[0])
    point.setting.shards.add_right_sum(sums[1], lambda out: point.kernels.right_sum(pairs, c, left, out)).wait()
    point.work.pair_passes += 4 / point.P.shape[1]
    return sums


def _output_curvature(point: Point, side: int, sums: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """H of one side, and each entity's share of it: r_i = tr H_i / mean tr H."""
    s = point.setting
    group, rows, k = s.shards.group, (s.shards.left, s.shards.right)[side].total, point.P.shape[1]
    other = (point.Q, point.P)[side]
    column_sum, own_trace = sums[1 - side][:, 0], sums[side][:, 1]  # c_j = Σ_i ∂²ℓ⁺_ij and Σ_j ∂²ℓ⁺_ij ‖q_j‖²
    weight, penalty, gramian = s.weights[side], s.penalties[side], s.omega * point.gramians[1 - side]
    mean_weight = 1.0 if weight is None else group.totals(float(weight.double().sum()))[0] / rows
    H = mean_weight * gramian + group.sum_(gram(other, other, column_sum)) / rows
    trace = own_trace.double() + float(gramian.trace()) * (1.0 if weight is None else weight.double())
    if penalty is not None:
        mean_penalty = group.totals(float(penalty.double().sum()))[0] / rows
        H = H + mean_penalty * torch.eye(k, dtype=torch.float64, device=H.device)
        trace = trace + k * penalty.double()
    values, vectors = torch.linalg.eigh(H)
    H = (vectors * values.clamp_min(0)) @ vectors.t()
    trace = trace.clamp_min(0)
    mean = group.totals(float(trace.sum()))[0] / rows
    share = trace / mean if mean > 0 else torch.ones_like(trace)
    return H, share.to(other.dtype)


def _merge(parts: list[Factor]) -> Factor:
    """One A ⊗ S for a weight that several layers use: A adds up, S is the mean by A's size."""
    if len(parts) == 1:
        return parts[0]
    sizes = [float(_diagonal(p.A).sum()) for p in parts]
    total = max(sum(sizes), _TINY)
    S = sum((p.S * (size / total) for p, size in zip(parts, sizes, strict=True)), torch.zeros_like(parts[0].S))
    A = sum((p.A for p in parts[1:]), parts[0].A)
    first = parts[0]
    return Factor(first.weight, first.bias, first.inputs_first, A, S)


def _diagonal(A: Tensor) -> Tensor:
    return A if A.dim() == 1 else A.diagonal()


def _invert(f: Factor, shift: float, dtype: torch.dtype) -> _Block:
    """The damped inverse of A ⊗ S, both factors inverted by Cholesky in float64."""
    mean = float(_diagonal(f.A).mean()) if f.mean is None else f.mean
    pi = math.sqrt(max(mean, _TINY) / max(float(f.S.diagonal().mean()), _TINY))
    root = math.sqrt(shift)
    A = 1 / (f.A + pi * root) if f.A.dim() == 1 else _inverse(f.A, pi * root)
    return _Block(f.weight, f.bias, f.inputs_first, A.to(dtype), _inverse(f.S, root / pi).to(dtype))


def _inverse(matrix: Tensor, shift: float) -> Tensor:
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix + shift * eye)
    if int(failed):  # rounding made a semidefinite matrix indefinite: clamp its eigenvalues
        values, vectors = torch.linalg.eigh(matrix)
        return torch.as_tensor((vectors / (values.clamp_min(0) + shift)) @ vectors.t())
    return torch.cholesky_inverse(factor)


def _bias_block(name: str, parts: list[tuple[float, Tensor]], shift: float, dtype: torch.dtype) -> _Block:
    """A bias kept apart from its table: Σ_i r_i S, damped exactly."""
    S = sum((count * S for count, S in parts), torch.zeros_like(parts[0][1]))
    return _BiasBlock(name, _inverse(S, shift).to(dtype))


class _BiasBlock(_Block):
    """A bias by itself."""

    def __init__(self, name: str, inverse: Tensor) -> None:
        super().__init__(name, None, True, inverse.new_ones(1), inverse)

    def apply(self, r: Parameters, out: Parameters) -> None:
        torch.mv(self.S, r[self.weight], out=out[self.weight])

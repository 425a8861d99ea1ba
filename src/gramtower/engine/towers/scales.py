"""Learned scales of columns, LayerNorm and RMSNorm.

    Scale      y = p ∘ x                                one p for each column, or one for all
    Normalise  y = γ ∘ (x − mean x)/√(var x + ε) + β    nn.LayerNorm over the columns
               y = γ ∘ x/√(mean x² + ε)                 nn.RMSNorm: rows of one length, whatever their direction

Both are closed forms, also for the preconditioner: the block of a scale is S ∘ Σ r x xᵀ. Checked by
tests/test_networks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gramtower.engine.towers.layer_factors import outer
from gramtower.engine.towers.steps import (
    CurvatureContext,
    Moment,
    Named,
    Op,
    Shifted,
    Summed,
    Values,
    materialise,
    plain,
)


@dataclass
class Scale(Op):
    """p ∘ x with a learned p: one number for each column, or one for all."""

    scale: str

    overwrites_tangent = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """See Op."""
        return (self.scale,)

    def forward(self, x: Tensor | Shifted, values: Values, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Op."""
        x = materialise(x)
        return x * values.tensors[self.scale], x

    def jvp(
        self, saved: Tensor, dx: Tensor | Shifted | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """p ∘ dx + dp ∘ x."""
        dy = None if dx is None else materialise(dx) * values.tensors[self.scale]
        if self.scale not in tangent:
            return torch.zeros_like(saved) if dy is None else dy
        return saved * tangent[self.scale] if dy is None else dy.addcmul_(saved, tangent[self.scale])

    def vjp(self, saved: Tensor, g: Tensor | Summed, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """The sums of g ∘ x, and p ∘ g."""
        g = plain(g)
        if self.scale in out:
            out[self.scale] += (g * saved).sum_to_size(out[self.scale].shape)
        return g.mul_(values.tensors[self.scale]) if need_input else None

    def moment(self, saved: Tensor, r: Tensor, some: slice, stride: int) -> Tensor:
        """Σ r x xᵀ."""
        return outer(saved[some], stride * r[some], False)

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """S ∘ Σ r x xᵀ is the block of p, its sum that of one p for all; and p pᵀ ∘ S."""
        assert isinstance(moment, Tensor)
        p = context.values.tensors[self.scale].double()
        _add_scale(self.scale, p, S * moment, context)
        p = p.reshape(-1).expand(len(S))
        return S * p * p[:, None]

    def pull_mean(self, M: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """p ∘ M."""
        return M * context.values.tensors[self.scale].double().reshape(-1, 1)


def _add_scale(name: str, p: Tensor, curvature: Tensor, context: CurvatureContext) -> None:
    if name not in context.factors.trainable:
        return
    if p.dim() == 1 and p.numel() == len(curvature):
        context.factors.add_matrix(name, curvature)
    else:
        context.factors.add_diagonal(name, curvature.sum().reshape(p.shape))


@dataclass
class Normalise(Op):
    """nn.LayerNorm over the columns: γ ∘ x̂ + β, x̂ = (x − mean x)/σ; nn.RMSNorm if not ``centred``: x̂ = x/σ."""

    weight: str | None
    bias: str | None
    eps: float
    centred: bool = True

    overwrites_tangent = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """See Op."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def forward(
        self, x: Tensor | Shifted, values: Values, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """See Op; keeps x̂ and 1/σ."""
        x = materialise(x)
        x = self._centre(x)
        inverse = x.square().mean(1, keepdim=True).add_(self.eps).rsqrt_()
        unit = x.mul_(inverse) if self.centred else x * inverse  # centred rows are a copy
        y = unit if self.weight is None else unit * values.tensors[self.weight]
        return y if self.bias is None else y + values.tensors[self.bias], (unit, inverse)

    def _centre(self, rows: Tensor) -> Tensor:
        """Each row C, where C = I − 11ᵀ/n takes out the mean, or C = I."""
        return rows - rows.mean(1, keepdim=True) if self.centred else rows

    def jvp(
        self,
        saved: tuple[Tensor, Tensor],
        dx: Tensor | Shifted | None,
        values: Values,
        tangent: Named,
        out: Tensor | None = None,
    ) -> Tensor:
        """γ ∘ (C dx − x̂ mean(x̂ ∘ dx))/σ + dγ ∘ x̂ + dβ."""
        unit, inverse = saved
        dy = torch.zeros_like(unit)
        if dx is not None:
            dy = self._project(materialise(dx), unit, inverse)
            dy = dy if self.weight is None else dy.mul_(values.tensors[self.weight])
        if self.weight is not None and self.weight in tangent:
            dy.addcmul_(unit, tangent[self.weight])
        return dy.add_(tangent[self.bias]) if self.bias is not None and self.bias in tangent else dy

    def vjp(
        self, saved: tuple[Tensor, Tensor], g: Tensor | Summed, values: Values, out: Named, need_input: bool
    ) -> Tensor | None:
        """Column sums of g ∘ x̂ and g; and the projection of γ ∘ g."""
        values.defer_bias_sum(self.bias, g, out)
        g = plain(g)
        if self.weight is not None and self.weight in out:
            out[self.weight] += (g * saved[0]).sum(0)
        if not need_input:
            return None
        return self._project(g if self.weight is None else g.mul_(values.tensors[self.weight]), *saved)

    def _project(self, d: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
        """∂x̂/∂x d = (C d − x̂ mean(x̂ ∘ d))/σ, a symmetric matrix for each row."""
        along = (unit * d).mean(1, keepdim=True)
        return torch.addcmul(self._centre(d), unit, along, value=-1).mul_(inverse)

    def moment(self, saved: tuple[Tensor, Tensor], r: Tensor, some: slice, stride: int) -> Tensor | None:
        """Σ r x̂x̂ᵀ, for the curvature of γ."""
        return None if self.weight is None else outer(saved[0][some], stride * r[some], False)

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """mean((C − x̂x̂ᵀ/n) T (C − x̂x̂ᵀ/n)/σ²) with T = γγᵀ ∘ S, over a sample of rows."""
        if self.weight is not None:
            assert isinstance(moment, Tensor)
            _add_scale(self.weight, context.values.tensors[self.weight], S * moment, context)
            gamma = context.values.tensors[self.weight].double()
            S_bias, S = S, S * gamma * gamma[:, None]
        else:
            S_bias = S
        if self.bias is not None and self.bias in context.factors.trainable:
            context.factors.add_matrix(self.bias, S_bias, context.total_weight)
        if context.is_first:
            return S
        n, group, sample = len(S), context.group, context.sample()
        X, inverse = sample.saved
        w = sample.weight[:, None] * inverse.square() / context.rows
        square = ((X @ S.to(X.dtype)) * X).sum(1, keepdim=True)
        mean = group.sum_(w.sum(dtype=torch.float64))
        B = group.sum_(((X * w).t() @ X).double())
        last = group.sum_(((X * (w * square)).t() @ X).double())
        mixed = B @ self._centre(S)  # C x̂ = x̂
        return mean * self._centre(self._centre(S).t()) - (mixed + mixed.t()) / n + last / n**2

    def pull_mean(self, M: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """mean((C − x̂x̂ᵀ/n)/σ) γ ∘ M."""
        if self.weight is not None:
            M = M * context.values.tensors[self.weight].double()[:, None]
        group, sample = context.group, context.sample()
        X, inverse = sample.saved
        w = sample.weight[:, None] * inverse
        scale = (group.sum_(sample.weight.sum(dtype=torch.float64)) * context.rows).clamp_min(1e-300).sqrt()
        mean = group.sum_(w.sum(dtype=torch.float64))
        B = group.sum_(((X * w).t() @ X).double())
        return torch.as_tensor((mean * self._centre(M.t()).t() - B @ M / len(M)) / scale)

    @property
    def workspace_factor(self) -> float:
        """See Op: x̂ is kept beside the result."""
        return 1.75

"""Layers with closed-form derivatives, and the steps (steps.py) that compute them.

The preconditioner has closed forms too: the block of a scale is S ∘ Σ r x xᵀ. Each class lists in ``modules`` the torch
modules that it replaces, and makes the step of a module in ``of_module``; stack.py collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower.data.pairs import Block, Features, IdBlock, SparseBlock
from gramtower.engine.kernels.elementwise import TABLE, Activation, activation_of
from gramtower.engine.kernels.reference import Scaled
from gramtower.engine.towers.steps import (
    Change,
    Cotangent,
    CurvatureContext,
    Named,
    Names,
    Op,
    Shifted,
    Summed,
    Values,
    column_squares,
    materialise,
    mean_column,
    outer,
    plain,
)


class InputLinear(nn.Module):
    """A first layer for custom towers, which accepts ids, sparse rows and dense rows.

    An affine map of an entity's features. Unlike ``nn.Linear`` it stores one contiguous row of weights for each
    feature, and unlike ``nn.Embedding`` it has a bias.

    Args:
        in_features: number of features, or of entities when they come as ids.
        out_features: number of columns of the output.
        bias: whether to add a learned row to every output.
        draw: whether to initialise the weights with normal numbers from torch's generator; otherwise they are
            uninitialised memory.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, draw: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        if draw:
            nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of the table for ids (LongTensor, one dimension); x W otherwise."""
        y = self.weight[x] if x.dtype == torch.int64 and x.dim() == 1 else x @ self.weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Sizes, as nn.Linear prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def split_first(module: nn.Module) -> tuple[InputLinear | nn.Linear | None, nn.Module]:
    """A module as its linear first layer and the rest; None and the module if it does not begin with one."""
    layers = list(module) if isinstance(module, nn.Sequential) else []
    if layers and isinstance(layers[0], (InputLinear, nn.Linear)):
        return layers[0], nn.Sequential(*layers[1:])
    return None, module


@dataclass
class _Linear(Op):
    """A step with a weight W and an optional bias b."""

    weight: str  # name of W
    bias: str | None  # name of b, or None
    # whether W is stored inputs × outputs (Embedding, EmbeddingBag, InputLinear) or outputs × inputs (Linear)
    inputs_first: bool

    overwrites_cotangent = False
    overwrites_tangent = False
    linear = True

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def _matrix(self, tensors: Named) -> Tensor:
        """The weight as inputs × outputs."""
        return tensors[self.weight] if self.inputs_first else tensors[self.weight].t()

    def _add_gradient(self, x: Tensor, g: Tensor, total: Tensor) -> None:
        """Add the gradient of the weight, XᵀG or its transpose, for dense inputs."""
        if self.inputs_first:
            total.addmm_(x.t(), g)
        else:
            total.addmm_(g.t(), x)

    def layer_width(self, tensors: Named) -> int:
        return int(self._matrix(tensors).shape[1])


@dataclass
class InputAffine(_Linear):
    """The first step, x ↦ xᵀW + b on ids, sparse rows or dense rows."""

    width: int  # number of features; for ids, the largest number of entities

    modules = (InputLinear, nn.Linear, nn.Embedding, nn.EmbeddingBag)

    @classmethod
    def of_input(cls, module: nn.Module, kind: str, names: Names) -> InputAffine | None:
        """The step of a module that reads features of a kind; None if it has no closed form for them."""
        if type(module) is InputLinear or (type(module) is nn.Linear and kind != "ids"):
            weight, bias = names[id(module.weight)], names.get(id(module.bias))
            return cls(weight, bias, type(module) is InputLinear, module.in_features)
        if type(module) is nn.Embedding and kind == "ids":
            return cls(names[id(module.weight)], None, True, module.num_embeddings)
        if type(module) is nn.EmbeddingBag and kind == "sparse" and module.mode == "sum":
            return cls(names[id(module.weight)], None, True, module.num_embeddings)
        return None

    def forward(self, x: Block, values: Values, out: Tensor | None = None) -> tuple[Change, Block]:
        """XW + b; for ids without a bias, a view of W."""
        weight, bias = values.tensors[self.weight], None if self.bias is None else values.tensors[self.bias]
        if isinstance(x, SparseBlock):
            matrix = weight if self.inputs_first else values.transpose(self.weight)
            return self._sparse(x, matrix, bias, values, weight.new_empty(x.shape[0], matrix.shape[1])), x
        if isinstance(x, Tensor):
            x = x.to(weight.dtype)
        y = self._product(x, weight)
        return (y if bias is None else Shifted(y, bias)), x

    def jvp(self, saved: Block, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None) -> Change:
        """X dW + db."""
        bias = None if self.bias is None else tangent.get(self.bias)
        if self.weight not in tangent:
            rows = len(saved) if isinstance(saved, IdBlock) else saved.shape[0]
            return Shifted(values.tensors[self.weight].new_zeros(rows, self.layer_width(values.tensors)), bias)
        matrix = tangent[self.weight]
        if isinstance(saved, SparseBlock):
            matrix = matrix if self.inputs_first else matrix.t().contiguous()
            place = values.workspace(matrix, matrix.shape[1], saved.shape[0]) if out is None else out
            return self._sparse(saved, matrix, bias, values, place)
        return Shifted(self._product(saved, matrix), bias)

    def vjp(self, saved: Block, g: Cotangent, values: Values, out: Named, need_input: bool) -> None:
        """XᵀG and the column sums of G."""
        values.defer_bias_sum(self.bias, g, out)
        g = plain(g)
        if self.weight not in out:
            return
        total = out[self.weight]
        if isinstance(saved, IdBlock):
            if saved.rows is None:
                total[saved.start : saved.stop] += g
            else:
                total.index_add_(0, saved.rows, g)
        elif isinstance(saved, Tensor):
            self._add_gradient(saved, g, total)
        else:
            target = total if self.inputs_first else g.new_zeros(self.width, g.shape[1])
            values.kernels.right_sum(saved.pattern, saved.values, g.contiguous(), target)
            if not self.inputs_first:
                total += target.t()

    def _product(self, x: Tensor | IdBlock, matrix: Tensor) -> Tensor:
        if isinstance(x, IdBlock):
            return matrix[x.start : x.stop] if x.rows is None else matrix[x.rows]
        return x @ (matrix if self.inputs_first else matrix.t())

    @staticmethod
    def _sparse(x: SparseBlock, matrix: Tensor, bias: Tensor | None, values: Values, out: Tensor) -> Tensor:
        """X times a matrix of inputs × outputs, added to the bias in ``out``, which saves a separate pass."""
        out = out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        values.kernels.left_sum(x.pattern, x.values, matrix, out)
        return out

    def fusable_table(self, features: Features) -> str | None:
        """Return the table of ids that are in order, with one row each."""
        in_order = features.kind == "ids" and features.parent is None and self.width == features.rows
        return self.weight if in_order and self.inputs_first else None

    def table_rows(self, saved: IdBlock, tensors: Named) -> Tensor:
        return tensors[self.weight][saved.start : saved.stop]

    def vjp_bias(self, lines: Tensor, values: Values, out: Named) -> None:
        if self.bias is not None and self.bias in out:
            values.defer_bias_lines(self.bias, lines)

    def moment(self, saved: Block, r: Tensor, some: slice, stride: int) -> Tensor:
        """Σ r x xᵀ, with the bias as an input of 1; only its diagonal for ids and sparse rows, as for tables."""
        if isinstance(saved, IdBlock):
            counts = torch.zeros(self.width, dtype=torch.float64, device=r.device)
            return counts.index_add_(0, saved.tensor(r.device), r.double())
        if isinstance(saved, SparseBlock):
            return column_squares(saved, r)
        return outer(saved[some], stride * r[some], self.bias is not None)

    def input_moment(self, block: Block, r: Tensor) -> Tensor | None:
        return None if isinstance(block, Tensor) else self.moment(block, r, slice(0), 1)

    def pull_curvature(self, S: Tensor, moment: Tensor, context: CurvatureContext) -> Tensor:
        """A ⊗ S."""
        context.factors.add(self.weight, self.bias, self.inputs_first, moment, S, context.total_weight)
        return S

    def check_features(self, side: str, features: Features) -> None:
        fits = self.width >= features.rows if features.kind == "ids" else self.width == features.width
        if not fits:
            need = f"{features.rows} ids" if features.kind == "ids" else f"{features.width} features"
            check.fail(f"{side} tower", f"a first layer for {self.width} inputs", f"one for {need}")

    def id_tables(self, side: str, features: Features) -> list[str]:
        if self.width != features.rows:
            self.refuse_table(side, f"a table of {self.width} rows", features)
        return [self.weight]


@dataclass
class Affine(_Linear):
    """nn.Linear after the first step: x ↦ xWᵀ + b; with ``inputs_first`` x ↦ xW + b."""

    modules = (nn.Linear,)

    @classmethod
    def of_module(cls, module: nn.Linear, names: Names) -> Affine:
        return cls(names[id(module.weight)], names.get(id(module.bias)), False)

    def forward(self, x: Change, values: Values, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """XWᵀ + b, in ``out`` if given."""
        rows, matrix = materialise(x), self._matrix(values.tensors)
        if self.bias is None:
            return torch.mm(rows, matrix, out=out), rows
        return torch.addmm(values.tensors[self.bias], rows, matrix, out=out), rows

    def jvp(
        self, saved: Tensor, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """dX Wᵀ + X dWᵀ + db."""
        matrix = self._matrix(values.tensors)
        dx = None if dx is None else materialise(dx)
        out = values.workspace(saved if dx is None else dx, matrix.shape[1]) if out is None else out
        bias = None if self.bias is None else tangent.get(self.bias)
        if dx is None:  # the input depends only on the features
            dy = out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        else:
            dy = torch.mm(dx, matrix, out=out) if bias is None else torch.addmm(bias, dx, matrix, out=out)
        return dy.addmm_(saved, self._matrix(tangent)) if self.weight in tangent else dy

    def vjp(self, saved: Tensor, g: Cotangent, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """GᵀX, column sums of G, and G W."""
        values.defer_bias_sum(self.bias, g, out)
        g = plain(g)
        if self.weight in out:
            self._add_gradient(saved, g, out[self.weight])
        if not need_input:
            return None
        matrix = self._matrix(values.tensors)
        return torch.mm(g, matrix.t(), out=values.workspace(g, matrix.shape[0]))

    def moment(self, saved: Tensor, r: Tensor, some: slice, stride: int) -> Tensor:
        """Σ r x xᵀ, with the bias as an input of 1."""
        return outer(saved[some], stride * r[some], self.bias is not None)

    def pull_curvature(self, S: Tensor, moment: Tensor, context: CurvatureContext) -> Tensor:
        """A ⊗ S, and WᵀSW."""
        context.factors.add(self.weight, self.bias, self.inputs_first, moment, S, context.total_weight)
        if context.is_first:
            return S
        matrix = self._matrix(context.values.tensors).double()
        return matrix @ S @ matrix.t()

    def pull_mean(self, M: Tensor, moment: Tensor | None, context: CurvatureContext) -> Tensor:
        """WᵀM."""
        return self._matrix(context.values.tensors).double() @ M


class _Slopes:
    """The slopes φ′ of an activation: stored once they are first needed, or computed from the output y each time."""

    def __init__(self, activation: Activation, make: Callable[[], Tensor] | None, y: Tensor | None) -> None:
        self.activation, self.y, self._make = activation, y, make
        self._slope: Tensor | None = None

    def of(self, rows: slice) -> Tensor:
        """φ′ of some rows."""
        return self.stored[rows] if self.y is None else self.activation.slope(self.y[rows])

    @property
    def stored(self) -> Tensor:
        """φ′ of all rows."""
        if self._slope is None:
            assert self._make is not None
            self._slope, self._make = self._make(), None
        return self._slope


@dataclass
class Elementwise(Op):
    """An activation φ applied to every number separately."""

    activation: Activation

    modules = tuple(kind.module for kind in TABLE)

    @classmethod
    def of_module(cls, module: nn.Module, names: Names) -> Elementwise:
        return cls(activation_of(module))

    def forward(self, x: Change, values: Values, out: Tensor | None = None) -> tuple[Tensor, _Slopes]:
        """φ(x)."""
        if not self._keeps_output(values):
            z = materialise(x)
            y = self.activation.function(z)
            from_output = self.activation.slope_from_output  # without autodiff, and without keeping z
            make = partial(self.activation.slope, y) if from_output else partial(self.activation.slope_at, z)
            return y, _Slopes(self.activation, make, None)
        if isinstance(x, Shifted) and x.bias is not None:
            y = values.kernels.activate(x.tensor, x.bias, self.activation)
        else:
            y = self.activation.function(materialise(x))
        return y, _Slopes(self.activation, None, y)

    def _keeps_output(self, values: Values) -> bool:
        return values.kernels.SLOPES_FROM_OUTPUTS and self.activation.slope_from_output

    def jvp(
        self, saved: _Slopes, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """φ′ ∘ dx."""
        assert dx is not None
        shifted = dx if isinstance(dx, Shifted) else Shifted(dx, None)
        dy = values.workspace(shifted.tensor, shifted.tensor.shape[1]) if shifted is dx else shifted.tensor
        if saved.y is not None:
            values.kernels.slope_product(shifted.tensor, shifted.bias, saved.y, self.activation, dy)
            return dy
        return (shifted.materialise(dy) if shifted is dx else dy).mul_(saved.stored)

    def vjp(self, saved: _Slopes, g: Cotangent, values: Values, out: Named, need_input: bool) -> Cotangent:
        """φ′ ∘ g."""
        g = plain(g)
        if saved.y is None:
            return g.mul_(saved.stored)
        lines = values.kernels.slope_product(g, None, saved.y, self.activation, g, sums=True)
        assert lines is not None
        return Summed(g, lines)

    def precompute(self, saved: _Slopes) -> None:
        if saved.y is None:
            _ = saved.stored

    def fuses_initial(self, values: Values) -> bool:
        return self._keeps_output(values) and values.dtype == torch.float32  # the dtype of GPU programs' arguments

    def vjp_fused(self, saved: _Slopes, g: Cotangent, values: Values, rows: Tensor, initial: Scaled) -> Tensor:
        assert saved.y is not None
        lines = values.kernels.slope_product(plain(g), None, saved.y, self.activation, rows, initial, sums=True)
        assert lines is not None
        return lines

    def moment(self, saved: _Slopes, r: Tensor, some: slice, stride: int) -> Tensor:
        """Σ r φ′φ′ᵀ."""
        return outer(saved.of(some), stride * r[some], False)

    def moment_with_mean(self, saved: _Slopes, r: Tensor, some: slice, stride: int) -> Tensor:
        """``moment`` with one more column for Σ r φ′, which ``pull_mean`` needs."""
        return outer(saved.of(some), stride * r[some], True)

    def pull_curvature(self, S: Tensor, moment: Tensor, context: CurvatureContext) -> Tensor:
        """S ∘ mean(φ′φ′ᵀ)."""
        return S * (moment[: len(S), : len(S)] / context.rows)

    def pull_mean(self, M: Tensor, moment: Tensor, context: CurvatureContext) -> Tensor:
        """mean(φ′) ∘ M."""
        return M * mean_column(moment, context.rows)

    @property
    def workspace_factor(self) -> float:
        return 1.0 if self.activation.slope_from_output else 1.75  # computing and storing φ′ takes memory


@dataclass
class Scale(Op):
    """p ∘ x with a learned p: one number for each column, or one for all columns."""

    scale: str

    overwrites_tangent = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.scale,)

    def forward(self, x: Change, values: Values, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = materialise(x)
        return x * values.tensors[self.scale], x

    def jvp(
        self, saved: Tensor, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """p ∘ dx + dp ∘ x."""
        dy = None if dx is None else materialise(dx) * values.tensors[self.scale]
        if self.scale not in tangent:
            return torch.zeros_like(saved) if dy is None else dy
        return saved * tangent[self.scale] if dy is None else dy.addcmul_(saved, tangent[self.scale])

    def vjp(self, saved: Tensor, g: Cotangent, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """The sums of g ∘ x, and p ∘ g."""
        g = plain(g)
        if self.scale in out:
            out[self.scale] += (g * saved).sum_to_size(out[self.scale].shape)
        return g.mul_(values.tensors[self.scale]) if need_input else None

    def moment(self, saved: Tensor, r: Tensor, some: slice, stride: int) -> Tensor:
        """Σ r x xᵀ."""
        return outer(saved[some], stride * r[some], False)

    def pull_curvature(self, S: Tensor, moment: Tensor, context: CurvatureContext) -> Tensor:
        """The block of p is S ∘ Σ r x xᵀ, or the sum of its entries for a single p; the curvature at x is p pᵀ ∘ S."""
        p = context.values.tensors[self.scale].double()
        _add_scale(self.scale, p, S * moment, context)
        p = p.reshape(-1).expand(len(S))
        return S * p * p[:, None]

    def pull_mean(self, M: Tensor, moment: Tensor, context: CurvatureContext) -> Tensor:
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
    modules = (nn.LayerNorm, nn.RMSNorm)

    @classmethod
    def of_module(cls, module: nn.LayerNorm | nn.RMSNorm, names: Names) -> Normalise | None:
        if len(module.normalized_shape) > 1 or module.eps is None:  # eps=None depends on the dtype
            return None
        centred = isinstance(module, nn.LayerNorm)
        return cls(names.get(id(module.weight)), names.get(id(getattr(module, "bias", None))), module.eps, centred)

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def forward(self, x: Change, values: Values, out: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """γ ∘ x̂ + β; keeps x̂ and 1/σ."""
        x = self._centre(materialise(x))
        inverse = x.square().mean(1, keepdim=True).add_(self.eps).rsqrt_()
        unit = x.mul_(inverse) if self.centred else x * inverse  # centred rows are a copy
        y = unit if self.weight is None else unit * values.tensors[self.weight]
        return y if self.bias is None else y + values.tensors[self.bias], (unit, inverse)

    def _centre(self, rows: Tensor) -> Tensor:
        """Each row times C, where C = I − 11ᵀ/n subtracts the mean, or C = I."""
        return rows - rows.mean(1, keepdim=True) if self.centred else rows

    def jvp(
        self, saved: tuple[Tensor, Tensor], dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None
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
        self, saved: tuple[Tensor, Tensor], g: Cotangent, values: Values, out: Named, need_input: bool
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

    def pull_curvature(self, S: Tensor, moment: Any, context: CurvatureContext) -> Tensor:
        """mean((C − x̂x̂ᵀ/n) T (C − x̂x̂ᵀ/n)/σ²) with T = γγᵀ ∘ S, over a sample of rows."""
        if self.weight is not None:
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

    def pull_mean(self, M: Tensor, moment: Any, context: CurvatureContext) -> Tensor:
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
        return 1.75  # x̂ is kept in addition to the result

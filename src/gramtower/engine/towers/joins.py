"""What a tower does with its columns besides layers and activations: sums, products, concatenation, columns.

    Sum        y = Σ_k c_k x_k + d      residual branches, differences, multiples
    Product    y = a ∘ b                gates
    Concat     y = (x_1, x_2, …)        several tables or fields side by side
    Columns    y = x[:, start:stop]     one field of many, halves of a gate

Those with several inputs are :class:`Join`, the nodes of graph.py. All of them are closed forms, also for the
preconditioner: mean(JᵀSJ) from the moments of their inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramtower.data.features import SparseBlock
from gramtower.engine.towers.layer_factors import mean_column, outer
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

Blocks = dict[tuple[int, int], Tensor]  # mean(J_aᵀ S J_b) by the positions a, b of inputs


class Join(Op):
    """A step with any number of inputs: the node of a graph that is given a list. With one input it is a step as well.

    ``push`` and ``pull`` overwrite nothing; what ``pull`` returns may be g itself, which the caller then copies.
    """

    overwrites_cotangent = False
    overwrites_tangent = False

    def join(self, x: list[Any], values: Values, out: Tensor | None) -> tuple[Tensor, Any]:
        """y and what to keep, as ``Op.forward``."""
        raise NotImplementedError

    def push(self, saved: Any, dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        """dy along (dx, tangent), in memory of its own; an input that no parameter reaches has None."""
        raise NotImplementedError

    def pull(self, saved: Any, g: Tensor, values: Values, out: Named, needed: list[bool]) -> list[Tensor | None]:
        """gᵀ∂y/∂x of the inputs that are needed; gᵀ∂y/∂θ is added to ``out``."""
        raise NotImplementedError

    def pull_blocks(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Blocks:
        """mean(J_aᵀ S J_b) for all inputs a and b; adds factors."""
        raise NotImplementedError

    def pull_means(self, M: Tensor, moment: Moment, context: CurvatureContext) -> list[Tensor] | None:
        """mean(J_a)ᵀ M for all inputs a, scaled as in ``Op.pull_mean``; None leaves it out."""
        return None

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Tensor, Any]:
        """See Op."""
        return self.join(x if isinstance(x, list) else [materialise(x)], values, out)

    def jvp(
        self, saved: Any, dx: Tensor | Shifted | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """See Op."""
        return self.push(saved, [None if dx is None else materialise(dx)], values, tangent)

    def vjp(self, saved: Any, g: Tensor | Summed, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """See Op."""
        g = plain(g)
        (below,) = self.pull(saved, g, values, out, [need_input])
        return g.clone() if below is g else below

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """See Op."""
        return self.pull_blocks(S, moment, context).get((0, 0), S)


@dataclass
class Sum(Join):
    """Σ_k c_k x_k + d."""

    coefficients: tuple[float, ...]
    constant: float = 0.0

    def join(self, x: list[Tensor], values: Values, out: Tensor | None) -> tuple[Tensor, None]:
        """See Join."""
        y = _combined(self.coefficients, x)
        return y.add_(self.constant) if self.constant else y, None

    def push(self, saved: None, dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        """Σ_k c_k dx_k."""
        there = [(c, t) for c, t in zip(self.coefficients, dx, strict=True) if t is not None]
        return _combined(tuple(c for c, _ in there), [t for _, t in there])

    def pull(self, saved: None, g: Tensor, values: Values, out: Named, needed: list[bool]) -> list[Tensor | None]:
        """c_k g."""
        return [None if not need else g if c == 1 else g * c for c, need in zip(self.coefficients, needed, strict=True)]

    def pull_blocks(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Blocks:
        """c_a c_b S."""
        c = self.coefficients
        return {(a, b): S * (c[a] * c[b]) for a in range(len(c)) for b in range(len(c))}

    def pull_means(self, M: Tensor, moment: Moment, context: CurvatureContext) -> list[Tensor]:
        """c_a M."""
        return [M * c for c in self.coefficients]


def _combined(coefficients: tuple[float, ...], x: list[Tensor]) -> Tensor:
    """Σ c_k x_k in memory of its own."""
    if len(x) == 1:
        return x[0].clone() if coefficients[0] == 1 else x[0] * coefficients[0]
    first = x[0] if coefficients[0] == 1 else x[0] * coefficients[0]
    y = torch.add(first, x[1], alpha=coefficients[1])
    for c, t in zip(coefficients[2:], x[2:], strict=True):
        y.add_(t, alpha=c)
    return y


@dataclass
class Product(Join):
    """a ∘ b of two inputs of the same shape."""

    def join(self, x: list[Tensor], values: Values, out: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """See Join."""
        return x[0] * x[1], x

    def push(self, saved: list[Tensor], dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        """da ∘ b + a ∘ db."""
        (a, b), (da, db) = saved, dx
        if da is None or db is None:
            return da * b if da is not None else db * a  # type: ignore[operator]
        return (da * b).addcmul_(a, db)

    def pull(
        self, saved: list[Tensor], g: Tensor, values: Values, out: Named, needed: list[bool]
    ) -> list[Tensor | None]:
        """g ∘ b and g ∘ a."""
        return [g * saved[1] if needed[0] else None, g * saved[0] if needed[1] else None]

    def moment(self, saved: list[Tensor], r: Tensor, some: slice, stride: int) -> Tensor:
        """Σ r (b, a, 1)(b, a, 1)ᵀ."""
        return outer(torch.cat([saved[1][some], saved[0][some]], 1), stride * r[some], True)

    def pull_blocks(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Blocks:
        """S ∘ mean(b bᵀ), S ∘ mean(b aᵀ), S ∘ mean(a aᵀ)."""
        assert isinstance(moment, Tensor)
        mean, parts = moment / context.rows, (slice(0, len(S)), slice(len(S), 2 * len(S)))
        return {(a, b): S * mean[parts[a], parts[b]] for a in (0, 1) for b in (0, 1)}

    def pull_means(self, M: Tensor, moment: Moment, context: CurvatureContext) -> list[Tensor]:
        """mean(b) ∘ M and mean(a) ∘ M."""
        assert isinstance(moment, Tensor)
        mean = mean_column(moment, context.rows)
        return [M * mean[: len(M)], M * mean[len(M) :]]


@dataclass
class Concat(Join):
    """Inputs of these widths side by side."""

    widths: tuple[int, ...]

    def join(self, x: list[Tensor], values: Values, out: Tensor | None) -> tuple[Tensor, None]:
        """See Join."""
        return torch.cat(x, 1, out=out), None

    def push(self, saved: None, dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        """The changes side by side."""
        like = next(t for t in dx if t is not None)
        zeros = (like.new_zeros(()).expand(len(like), width) for width in self.widths)
        return torch.cat([zero if t is None else t for t, zero in zip(dx, zeros, strict=True)], 1)

    def pull(self, saved: None, g: Tensor, values: Values, out: Named, needed: list[bool]) -> list[Tensor | None]:
        """The columns of g that belong to each."""
        parts = torch.split(g, list(self.widths), 1)
        return [part.contiguous() if need else None for part, need in zip(parts, needed, strict=True)]

    def pull_blocks(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Blocks:
        """Blocks of S."""
        rows = torch.split(S, list(self.widths), 0)
        blocks = [torch.split(row, list(self.widths), 1) for row in rows]
        return {(a, b): block for a, row in enumerate(blocks) for b, block in enumerate(row)}

    def pull_means(self, M: Tensor, moment: Moment, context: CurvatureContext) -> list[Tensor]:
        """Rows of M."""
        return list(torch.split(M, list(self.widths), 0))


@dataclass
class Columns(Op):
    """Columns start:stop of ``width``."""

    start: int
    stop: int
    width: int

    overwrites_cotangent = False
    overwrites_tangent = False

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Any, None]:
        """See Op; of sparse features, a block of those columns."""
        if isinstance(x, SparseBlock):
            return x.columns(self.start, self.stop), None
        return materialise(x)[:, self.start : self.stop].contiguous(), None

    def jvp(
        self, saved: None, dx: Tensor | Shifted | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Tensor:
        """The same columns of dx."""
        assert dx is not None
        return materialise(dx)[:, self.start : self.stop].clone(memory_format=torch.contiguous_format)

    def vjp(self, saved: None, g: Tensor | Summed, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """g among zeros."""
        if not need_input:
            return None
        g = plain(g)
        whole = g.new_zeros(len(g), self.width)
        whole[:, self.start : self.stop] = g
        return whole

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """S among zeros."""
        whole = S.new_zeros(self.width, self.width)
        whole[self.start : self.stop, self.start : self.stop] = S
        return whole

    def pull_mean(self, M: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """M among zeros."""
        whole = M.new_zeros(self.width, M.shape[1])
        whole[self.start : self.stop] = M
        return whole

"""Steps with several inputs, and graphs of steps: residual branches, gates, several tables.

All steps have closed forms, including mean(JᵀSJ) for the preconditioner, from the moments of their inputs. In a
:class:`Graph`, values and derivatives pass through the nodes in order; a result that several nodes read has memory of
its own, and their cotangents are added.

For the preconditioner, the curvature of all live results, which are those still to be pulled through a node, is one
matrix in blocks S_ij: with branches x + f(x), the curvature at x includes the curvature that they share. A node j with
inputs a, b, … updates it by

    S_ab ← S_ab + mean(J_a)ᵀ S_jb + S_aj mean(J_b) + mean(J_aᵀ S_jj J_b),     S_ak ← S_ak + mean(J_a)ᵀ S_jk

which is mean(JᵀSJ) of all live results, so that it stays positive semidefinite; for a chain it is the formula of
kronecker.py. The terms S_jk of a node without ``pull_mean`` are left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gramtower.data.pairs import Block, Features, SparseBlock
from gramtower.distributed.group import Group
from gramtower.engine.towers.steps import (
    Blocks,
    Change,
    Cotangent,
    CurvatureContext,
    Moment,
    Named,
    Op,
    Sample,
    Shifted,
    Values,
    materialise,
    mean_column,
    outer,
    plain,
)


class Join(Op):
    """A step with any number of inputs, which a graph calls with lists; with one input it is also a plain step.

    ``push`` and ``pull`` do not overwrite their arguments; ``pull`` may return g itself, which the caller then copies.
    """

    overwrites_cotangent = False
    overwrites_tangent = False

    def join(self, x: list[Any], values: Values, out: Tensor | None) -> tuple[Tensor, Any]:
        """Return y and the values to keep, as ``Op.forward``."""
        raise NotImplementedError

    def push(self, saved: Any, dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        """Return dy along (dx, tangent), in new memory; dx is None for an input that depends on no parameter."""
        raise NotImplementedError

    def pull(self, saved: Any, g: Tensor, values: Values, out: Named, needed: list[bool]) -> list[Tensor | None]:
        """Return gᵀ∂y/∂x of the inputs that are ``needed``; add gᵀ∂y/∂θ to ``out``."""
        raise NotImplementedError

    def pull_blocks(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Blocks:
        raise NotImplementedError

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.join(x if isinstance(x, list) else [materialise(x)], values, out)

    def jvp(self, saved: Any, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None) -> Tensor:
        return self.push(saved, [None if dx is None else materialise(dx)], values, tangent)

    def vjp(self, saved: Any, g: Cotangent, values: Values, out: Named, need_input: bool) -> Tensor | None:
        g = plain(g)
        (below,) = self.pull(saved, g, values, out, [need_input])
        return g.clone() if below is g else below

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        return self.pull_blocks(S, moment, context).get((0, 0), S)


@dataclass
class Sum(Join):
    """Σ_k c_k x_k + d."""

    coefficients: tuple[float, ...]
    constant: float = 0.0

    def join(self, x: list[Tensor], values: Values, out: Tensor | None) -> tuple[Tensor, None]:
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
    """Σ c_k x_k in new memory."""
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
    """Concatenation of inputs with these widths."""

    widths: tuple[int, ...]

    def join(self, x: list[Tensor], values: Values, out: Tensor | None) -> tuple[Tensor, None]:
        return torch.cat(x, 1, out=out), None

    def push(self, saved: None, dx: list[Tensor | None], values: Values, tangent: Named) -> Tensor:
        like = next(t for t in dx if t is not None)
        zeros = (like.new_zeros(()).expand(len(like), width) for width in self.widths)
        return torch.cat([zero if t is None else t for t, zero in zip(dx, zeros, strict=True)], 1)

    def pull(self, saved: None, g: Tensor, values: Values, out: Named, needed: list[bool]) -> list[Tensor | None]:
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
        if isinstance(x, SparseBlock):
            return x.columns(self.start, self.stop), None
        return materialise(x)[:, self.start : self.stop].contiguous(), None

    def jvp(self, saved: None, dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None) -> Tensor:
        """The same columns of dx."""
        assert dx is not None
        return materialise(dx)[:, self.start : self.stop].clone(memory_format=torch.contiguous_format)

    def vjp(self, saved: None, g: Cotangent, values: Values, out: Named, need_input: bool) -> Tensor | None:
        """g, padded with zeros."""
        if not need_input:
            return None
        return F.pad(plain(g), (self.start, self.width - self.stop))

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """S, padded with zeros."""
        return F.pad(S, 2 * (self.start, self.width - self.stop))

    def pull_mean(self, M: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        """M, padded with zeros."""
        return F.pad(M, (0, 0, self.start, self.width - self.stop))


@dataclass(frozen=True)
class Node:
    """A step of a graph."""

    op: Op  # the step
    inputs: tuple[int, ...]  # numbers of the nodes whose results it reads; 0 is the input of the graph
    width: int  # number of columns of its result


@dataclass
class Graph(Op):
    """Nodes in topological order; the last one is the result."""

    nodes: list[Node]  # node i is ``nodes[i - 1]``
    first: bool  # whether the input are feature rows, which have no derivative
    _active: list[bool] = field(init=False)  # whether a result depends on parameters
    _uses: list[int] = field(init=False)  # how often active nodes read it
    _reads: list[int] = field(init=False)  # how often any node reads it

    overwrites_cotangent = True

    def __post_init__(self) -> None:
        self._active = [not self.first]
        for node in self.nodes:
            self._active.append(bool(node.op.parameters) or any(self._active[i] for i in node.inputs))
        self._uses, self._reads = [0] * len(self._active), [0] * len(self._active)
        for number, node in enumerate(self.nodes, 1):
            for i in node.inputs:
                self._reads[i] += 1
                self._uses[i] += self._active[number]

    @property
    def analytic(self) -> bool:  # type: ignore[override]
        return all(node.op.analytic for node in self.nodes)

    @property
    def kept_copies(self) -> int:  # type: ignore[override]
        return max(node.op.kept_copies for node in self.nodes)

    @property
    def label(self) -> str:
        return " and ".join(dict.fromkeys(node.op.label for node in self.nodes))

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for node in self.nodes for name in node.op.parameters))

    @property
    def parts(self) -> tuple[Op, ...]:
        return tuple(part for node in self.nodes for part in node.op.parts)

    def forward(self, x: Any, values: Values, out: Tensor | None = None) -> tuple[Change, list[object]]:
        results: dict[int, Any] = {0: x}
        left, kept = list(self._reads), []
        for number, node in enumerate(self.nodes, 1):
            given = []
            for i in node.inputs:
                if self._reads[i] > 1 or isinstance(node.op, Join):
                    results[i] = materialise(results[i])
                given.append(results[i])
                left[i] -= 1
            place = out if number == len(self.nodes) else None
            results[number], saved = node.op.forward(given if isinstance(node.op, Join) else given[0], values, place)
            kept.append(saved)
            for i in node.inputs:
                if not left[i]:
                    results.pop(i, None)
        return results[len(self.nodes)], kept

    def jvp(
        self, saved: list[object], dx: Change | None, values: Values, tangent: Named, out: Tensor | None = None
    ) -> Change:
        last = len(self.nodes)
        changes: dict[int, Change | None] = {0: dx}
        if dx is not None and not self._handed_on(0):
            changes[0] = _own(materialise(dx), values)
        left = list(self._uses)
        for number, (node, kept) in enumerate(zip(self.nodes, saved, strict=True), 1):
            if not self._active[number]:
                changes[number] = None
                continue
            given: list[Change | None] = []
            for i in node.inputs:
                left[i] -= 1
                change = changes[i] if left[i] else changes.pop(i)
                if left[i] and node.op.overwrites_tangent and change is not None:
                    change = materialise(change).clone()
                given.append(change)
            if isinstance(node.op, Join):
                dy: Change = node.op.push(kept, [None if c is None else materialise(c) for c in given], values, tangent)
            else:
                dy = node.op.jvp(kept, given[0], values, tangent, self._place(number, out, given[0]))
            if number < last and not self._handed_on(number):
                dy = _own(materialise(dy), values)
            changes[number] = dy
        result = changes[last]
        assert result is not None
        return result

    def _place(self, number: int, out: Tensor | None, like: Change | None) -> Tensor | None:
        """A buffer for a node's change: ``out`` for the last node, or new memory if several nodes read it."""
        if number == len(self.nodes):
            return out
        if self._handed_on(number) or like is None:
            return None
        tensor = like.tensor if isinstance(like, Shifted) else like
        return tensor.new_empty(len(tensor), self.nodes[number - 1].width)

    def vjp(self, saved: list[object], g: Cotangent, values: Values, out: Named, need_input: bool) -> Cotangent | None:
        pulled: dict[int, Cotangent] = {len(self.nodes): g}
        for number in range(len(self.nodes), 0, -1):
            node = self.nodes[number - 1]
            if not self._active[number]:
                continue
            above = pulled.pop(number)
            needed = [self._active[i] and (i > 0 or need_input) for i in node.inputs]
            if not isinstance(node.op, Join):
                below = node.op.vjp(saved[number - 1], above, values, out, needed[0])
                if needed[0]:
                    assert below is not None
                    self._add(pulled, number, node.inputs[0], below, values)
                continue
            above = plain(above)
            parts = node.op.pull(saved[number - 1], above, values, out, needed)
            again = sum(part is above for part in parts)
            for i, part in zip(node.inputs, parts, strict=True):
                if part is None:
                    continue
                if part is above:
                    again -= 1
                    part = above.clone() if again and i not in pulled else above
                self._add(pulled, number, i, part, values)
        return pulled.get(0)

    def _add(self, pulled: dict[int, Cotangent], number: int, i: int, part: Cotangent, values: Values) -> None:
        """Add the cotangent that a node returns to that of its input."""
        if i in pulled:
            pulled[i] = plain(pulled[i]).add_(plain(part))
        else:
            pulled[i] = part if i == number - 1 and self._uses[i] == 1 else _own(plain(part), values)

    def _handed_on(self, i: int) -> bool:
        """Whether only the next node reads a result, which may then be in a shared buffer."""
        return self._uses[i] == 1 and i in self.nodes[i].inputs

    def precompute(self, saved: list[object]) -> None:
        for node, kept in zip(self.nodes, saved, strict=True):
            node.op.precompute(kept)

    # The preconditioner.

    def moment(self, saved: list[object], r: Tensor, some: slice, stride: int) -> Moment:
        return [node.op.moment_with_mean(kept, r, some, stride) for node, kept in zip(self.nodes, saved, strict=True)]

    def input_moment(self, block: Block, r: Tensor) -> Moment:
        """Moments of the nodes that read the features or columns of them."""
        blocks, moments = {0: block}, []
        for number, node in enumerate(self.nodes, 1):
            given = blocks.get(node.inputs[0]) if len(node.inputs) == 1 else None
            if isinstance(given, SparseBlock) and isinstance(node.op, Columns):
                blocks[number] = given.columns(node.op.start, node.op.stop)
            moments.append(None if given is None else node.op.input_moment(given, r))
        return moments

    def reduce_moment(self, moment: Moment, group: Group, owned: Collection[str]) -> None:
        for node, part in zip(self.nodes, moment if isinstance(moment, list) else (), strict=True):
            node.op.reduce_moment(part, group, owned)

    def pull_curvature(self, S: Tensor, moment: Moment, context: CurvatureContext) -> Tensor:
        assert isinstance(moment, list)
        live = _Live(len(self.nodes), S)
        for number in range(len(self.nodes), 0, -1):
            node, part = self.nodes[number - 1], moment[number - 1]
            if not self._active[number]:
                continue
            S, shared = live.take(number)
            inner = self._inner(context, number)
            blocks = node.op.pull_blocks(S, part, inner)
            for (a, b), block in blocks.items():
                i, k = node.inputs[a], node.inputs[b]
                if self._active[i] and self._active[k] and i <= k:  # the other half is its transpose
                    live.add(i, k, block)
            for k, M in shared.items():
                for i, mean in zip(node.inputs, node.op.pull_means(M, part, inner), strict=False):
                    if self._active[i]:
                        live.add(i, k, mean + mean.t() if i == k else mean)
        return S if self.first else live.take(0)[0]

    def _inner(self, context: CurvatureContext, number: int) -> CurvatureContext:
        """The context for one node."""

        def sample() -> Sample:
            whole = context.sample()
            return replace(whole, saved=whole.saved[number - 1])

        noise = replace(context.noise, step=1000 * (context.noise.step + 1) + number)
        is_first = not any(self._active[i] for i in self.nodes[number - 1].inputs)
        return replace(context, sample=sample, noise=noise, is_first=is_first)

    # Planning and several processes.

    @property
    def inner_columns(self) -> int:
        return sum(node.width for node in self.nodes[:-1])

    @property
    def live_columns(self) -> int:
        return sum(sorted(node.width for node in self.nodes)[-2:])  # about two branches

    @property
    def workspace_factor(self) -> float:
        return 0.5 + max(node.op.workspace_factor for node in self.nodes)  # branches are held at the same time

    def layer_width(self, tensors: Named) -> int:
        return sum(node.width for node in self.nodes)

    def _inputs(self) -> list[Op]:
        return [node.op for node in self.nodes if 0 in node.inputs]

    def least_block(self, features: Features) -> int:
        return max(op.least_block(features) for op in self._inputs())

    def check_features(self, side: str, features: Features) -> None:
        for op in self._inputs():
            op.check_features(side, features)

    def id_tables(self, side: str, features: Features) -> list[str]:
        return list(dict.fromkeys(name for op in self._inputs() for name in op.id_tables(side, features)))


class _Live:
    """The curvature of the live results: blocks S_ij, i ≤ j."""

    def __init__(self, number: int, S: Tensor) -> None:
        self._blocks = {(number, number): S}

    def take(self, number: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Remove a result j: return S_jj, and S_jk for all others k."""
        own = self._blocks.pop((number, number))
        shared = {}
        for i, k in [pair for pair in self._blocks if number in pair]:
            block = self._blocks.pop((i, k))
            shared[k if i == number else i] = block if i == number else block.t()
        return own, shared

    def add(self, i: int, k: int, block: Tensor) -> None:
        """Add to S_ik."""
        if i > k:
            i, k, block = k, i, block.t()
        self._blocks[i, k] = self._blocks[i, k] + block if (i, k) in self._blocks else block


def _own(t: Tensor, values: Values) -> Tensor:
    """The tensor, copied if it is in a buffer that steps share."""
    storage = t.untyped_storage().data_ptr()
    shared = any(storage == buffer.untyped_storage().data_ptr() for buffer in values.scratch.values())
    return t.clone() if shared else t

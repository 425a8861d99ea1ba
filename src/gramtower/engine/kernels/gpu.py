"""The pair operations on a GPU, in Triton: fused, without atomics, the same bits in every run.

Programs are in programs.py, the order they work in is layout.py. A gathered matrix may be bfloat16 while the others
are float32: sums stay in float32. The fused passes take rows of up to 2048 numbers; longer ones use plain passes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs
from gramtower.engine.kernels import programs as p
from gramtower.engine.kernels.elementwise import ELU, Activation, Fused, LossTerms, Observed, Scored
from gramtower.engine.kernels.layout import Order, Pieces, left_order, remember, right_order
from gramtower.engine.kernels.reference import Kernels, Scaled, Tangents

# Numbers gathered by a program at a time, as measured on an H200 with rows of 128.
_TILE, _DOT_TILE, _TWO_TILES, _TWO_BFLOAT16_TILES = 2048, 1024, 512, 1024
LONGEST = 2048  # the longest row that a program holds in full
_COLUMNS = 128  # columns of a sum made by one program
_RUN = 1 << 14  # elements of a dot product added up by one program


def _terms(terms: LossTerms, absent: Tensor) -> tuple[tuple[Tensor | int, ...], dict[str, int | None]]:
    """A loss as arguments of a program: its tensors, ``absent`` for those it lacks, and its compile-time flags."""
    tensors = (
        terms.labels, terms.labels.stride(0), terms.constants,
        terms.imputed if isinstance(terms.imputed, Tensor) else absent,
        absent if terms.pair_weight is None else terms.pair_weight,
        absent if terms.loss_weight is None else terms.loss_weight,
    )  # fmt: skip
    return tensors, {
        "LOSS": terms.loss.program, "IMPUTED": isinstance(terms.imputed, Tensor),
        "PAIR_WEIGHT": terms.pair_weight is not None, "LOSS_WEIGHT": terms.loss_weight is not None,
    }  # fmt: skip


def _column_lines(x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    x, (rows, columns) = x.contiguous(), x.shape
    width, step = _columns(columns, 256), max(1, 2048 // _columns(columns, 256))
    height = step * _repeats(rows, step)
    if step * 8 < rows <= 1024:  # one narrow program for all rows instead of a second launch
        width, step = _columns(columns, 32), 64
        height = _power(rows)
    lines = torch.empty(_ceil(rows, height), columns, dtype=dtype, device=x.device)
    if rows:
        p.column_sums_program[(lines.shape[0], _ceil(columns, width))](
            x, x if weight is None else weight, lines, rows, columns,
            WEIGHT=weight is not None, HEIGHT=height, ROWS=step, COLUMNS=width, num_warps=4,
        )  # fmt: skip
    return lines


def _repeats(rows: int, step: int, most: int = 8) -> int:
    """How many steps of ``step`` rows a program makes, so that several hundred programs share the rows."""
    return int(min(most, max(1, 1 << (rows // (512 * step)).bit_length() >> 1))) if rows > 64 * step else 8


def _sum_into(order: Pieces, x: Tensor, B: Tensor, out: Tensor) -> None:
    """out_target += Σ x_e b_gathered over the pieces."""
    if not len(order):
        return
    k, B = B.shape[1], _rows(B)
    width = _columns(k, _COLUMNS)
    partial = out.new_empty(order.partial_lines, k)
    entries = order.gathered if order.entries is None else order.entries
    for first, last in pairwise(order.launches):
        p.sum_program[(last - first, _ceil(k, width))](
            order.targets, order.starts, order.lines, order.gathered, entries, x, B, out, partial, first, k,
            B.stride(0), out.stride(0),
            PAIRS=_pairs(width), K=width, PERMUTED=order.entries is not None, num_warps=_warps(width),
        )  # fmt: skip
    _gather_lines(order, partial, out)


def _gather_lines(order: Pieces, partial: Tensor, out: Tensor) -> None:
    if len(order.several):
        k = partial.shape[1]
        width = _columns(k, _COLUMNS)
        p.gather_lines_program[(len(order.several), _ceil(k, width))](
            order.several, order.bounds, partial, out, k, out.stride(0), LINES=16, K=width, num_warps=2
        )


def _ceil(a: int, b: int) -> int:
    """⌈a / b⌉; Triton's own takes several microseconds."""
    return -(-a // b)


def _power(k: int) -> int:
    """The least power of two that is not below k; 1 for 0."""
    return 1 << max(0, k - 1).bit_length()


def _rows(matrix: Tensor) -> Tensor:
    """A matrix whose rows are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _columns(k: int, most: int) -> int:
    """Columns a program works on at a time: a power of two that covers k, or ``most``."""
    return min(_power(k), most)


def _pairs(width: int, tile: int = _TILE) -> int:
    """Pairs whose rows are gathered at a time."""
    return int(min(64, max(1, tile // width)))


def _warps(width: int) -> int:
    return min(8, max(1, width // 128))


class TritonKernels(Kernels):
    """The operations for NVIDIA GPUs. A gradient of all rows takes no longer than a step of their systems."""

    SLOPES_FROM_OUTPUTS = True  # φ′ costs nothing in a pass that reads the output anyway
    GATHERS_BFLOAT16 = True

    def dots(self, pairs: Pairs, A: Tensor, B: Tensor) -> Tensor:
        x = torch.empty(len(pairs), dtype=A.dtype, device=A.device)
        order, k = left_order(pairs), A.shape[1]
        if len(order):
            A, B = _rows(A), _rows(B)
            tile = _columns(k, 1024)
            p.dots_program[(len(order),)](
                order.targets, order.starts, order.gathered, A, B, x, k, A.stride(0), B.stride(0),
                PAIRS=_pairs(tile, _DOT_TILE), K=tile, num_warps=_warps(tile),
            )  # fmt: skip
        return x

    def left_sum(self, pairs: Pairs, x: Tensor, B: Tensor, out: Tensor) -> None:
        _sum_into(left_order(pairs), x, B, out)

    def right_sum(self, pairs: Pairs, x: Tensor, A: Tensor, out: Tensor) -> None:
        _sum_into(right_order(pairs), x, A, out)

    def curvature_left(
        self, pairs: Pairs, c: Tensor, P: Tensor, W: Tensor, Q: Tensor, H: Tensor, out: Tensor
    ) -> Tensor:
        """Fused, in one pass."""
        k, order = P.shape[1], left_order(pairs)
        if k > LONGEST:
            return super().curvature_left(pairs, c, P, W, Q, H, out)
        z = torch.empty_like(c)
        if len(order):
            partial = out.new_empty(order.partial_lines, k)
            Q, H = _rows(Q), _rows(H)
            width = _power(k)
            tile = _TWO_BFLOAT16_TILES if Q.dtype == torch.bfloat16 else _TWO_TILES
            p.curvature_program[(len(order),)](
                order.targets, order.starts, order.lines, order.gathered, c, P.contiguous(), W.contiguous(), Q, H,
                z, out, partial, k, Q.stride(0), H.stride(0),
                PAIRS=_pairs(width, tile), K=width, num_warps=_warps(width), maxnreg=64 if width <= 128 else None,
            )  # fmt: skip
            _gather_lines(order, partial, out)
        return z

    def losses(self, pairs: Pairs, P: Tensor, Q: Tensor, terms: LossTerms) -> Observed:
        """Value and derivatives in one program where it knows the loss."""
        scores = self.dots(pairs, P, Q)
        if terms.loss.program is None:
            return Scored(terms, scores)
        first, second = scores, torch.empty_like(scores)  # a program reads its scores before it writes over them
        programs = _ceil(len(pairs), 1024)
        values = torch.empty(programs, dtype=torch.float64, device=P.device)
        if programs:
            tensors, kinds = _terms(terms, scores)
            p.loss_program[(programs,)](
                scores, *tensors, first, second, values, len(pairs), **kinds, BLOCK=1024, num_warps=4
            )
        return Fused(values.sum(), first, second)

    def loss_left(
        self, pairs: Pairs, P: Tensor, Q: Tensor, terms: LossTerms, out: Tensor, tangents: Tangents | None = None
    ) -> Tensor | None:
        """None if no program knows the loss, or rows are too long."""
        k, order = P.shape[1], left_order(pairs)
        if terms.loss.program is None or k > LONGEST:
            return None
        x = torch.empty(len(pairs), dtype=P.dtype, device=P.device)
        if len(order):
            partial = out.new_empty(order.partial_lines, k)
            P, Q = P.contiguous(), _rows(Q)
            W, H = (P, Q) if tangents is None else (tangents[0].contiguous(), _rows(tangents[1]))
            width = _power(k)
            tensors, kinds = _terms(terms, x)
            p.loss_left_program[(len(order),)](
                order.targets, order.starts, order.lines, order.gathered, *tensors, P, W, Q, H, x, out, partial, k,
                Q.stride(0), H.stride(0), **kinds, CURVED=tangents is not None,
                PAIRS=_pairs(width, _TWO_TILES), K=width, num_warps=_warps(width),
            )  # fmt: skip
            _gather_lines(order, partial, out)
        return x

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        programs = max(1, _ceil(a.numel(), _RUN))
        sums = torch.empty(programs, dtype=torch.float64, device=a.device)
        p.dot_program[(programs,)](a, b, sums, a.numel(), RUN=_RUN, BLOCK=2048, num_warps=8)
        return sums.sum()

    def slope_product(
        self, g: Tensor, bias: Tensor | None, y: Tensor, activation: Activation, out: Tensor,
        initial: Scaled | None = None, sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """A scale other than 1 is for float32."""
        if activation.program is None:
            return super().slope_product(g, bias, y, activation, out, initial, sums)
        (rows, columns), (added, scale) = y.shape, initial or (out, 1.0)
        width = _columns(columns, 512)
        step = max(1, (1024 if sums else 2048) // width)
        height = step * (_repeats(rows, step, 32) if sums else 1)
        grid = _ceil(rows, height), _ceil(columns, width)
        lines = out.new_empty(grid[0] if sums else 1, columns)
        p.slope_program[grid](
            g.contiguous(), g if bias is None else bias, y, added, out, lines, rows, columns, float(scale),
            ALPHA=activation.alpha, ACTIVATION=activation.program, BIAS=bias is not None, INITIAL=initial is not None,
            SUMS=sums, HEIGHT=height, ROWS=step, COLUMNS=width, num_warps=2 if sums else 8,
        )  # fmt: skip
        return lines if sums else None

    def column_sums(self, x: Tensor, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """All rows in ``dtype``."""
        dtype = dtype or x.dtype
        while x.shape[0] > 1:
            x, weight = _column_lines(x, weight, dtype), None
        if x.shape[0] == 1 and weight is None:
            return x[0].to(dtype)
        return x.sum(0, dtype=dtype) if weight is None else weight.to(dtype) @ x.to(dtype)

    def column_lines(self, x: Tensor) -> Tensor:
        """The sums of a run of rows each, in one launch."""
        return _column_lines(x, None, x.dtype)

    def activate(self, x: Tensor, bias: Tensor, activation: Activation) -> Tensor:
        """In one pass for elu of float32."""
        if activation.program != ELU or x.dtype != torch.float32:
            return super().activate(x, bias, activation)
        rows, columns = x.shape
        out = torch.empty_like(x)
        width = _columns(columns, 512)
        step = max(1, 4096 // width)
        p.shifted_elu_program[(_ceil(rows, step), _ceil(columns, width))](
            x.contiguous(), bias, out, rows, columns, ALPHA=activation.alpha, ROWS=step, COLUMNS=width, num_warps=4
        )
        return out

    def export_order(self, pairs: Pairs) -> tuple[Order | None, dict[str, Tensor]]:
        """The short index tensors, and by name the O(|O|) tensors of the order by columns."""
        left, right, none = left_order(pairs), right_order(pairs), pairs.columns[:0].clone()
        assert right.entries is not None
        short = replace(left, gathered=none), replace(right, entries=none, gathered=none)
        return short, {"entries": right.entries, "rows": right.gathered}

    def import_order(self, pairs: Pairs, order: Order | None, by_columns: dict[str, Tensor] | None) -> None:
        """Without the tensors by columns, pairs can only be summed over rows."""
        if order is not None:
            left, right = order
            if by_columns is not None:
                right = replace(right, entries=by_columns["entries"], gathered=by_columns["rows"])
            remember(pairs, replace(left, gathered=pairs.columns), None if by_columns is None else right)


KERNELS = TritonKernels()

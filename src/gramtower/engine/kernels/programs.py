"""The GPU programs of the pair operations, in Triton; gpu.py launches them.

One program works on one piece of a row (layout.py). Row numbers become 64-bit before they are multiplied by a row's
length. Sums are made in the dtype of the result; the value of the objective in float64.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _sigmoids(x):
    """σ(−x) and σ(x) σ(−x)."""
    e = tl.exp(-tl.abs(x))
    large = 1.0 / (1.0 + e)
    return tl.where(x >= 0, e, 1.0) * large, e * large * large


@triton.jit
def dots_program(targets, starts, gathered, A, B, x, k, stride_a, stride_b,
                 PAIRS: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """x_e = a_i · b_j for the entries of a piece."""
    piece = tl.program_id(0)
    row = tl.load(targets + piece).to(tl.int64)
    first, last = tl.load(starts + piece), tl.load(starts + piece + 1)
    for e0 in range(first, last, PAIRS):
        e = e0 + tl.arange(0, PAIRS)
        inside = e < last
        j = tl.load(gathered + e, mask=inside, other=0).to(tl.int64)
        s = tl.zeros((PAIRS,), dtype=x.dtype.element_ty)
        for k0 in range(0, k, K):
            f = k0 + tl.arange(0, K)
            a = tl.load(A + row * stride_a + f, mask=f < k, other=0.0).to(x.dtype.element_ty)
            b = tl.load(B + j[:, None] * stride_b + f[None, :], mask=inside[:, None] & (f < k)[None, :], other=0.0)
            s += tl.sum(a[None, :] * b.to(x.dtype.element_ty), 1)
        tl.store(x + e, s, mask=inside)


@triton.jit
def _piece(targets, starts, lines, before):
    """The row of this program's piece, its line of the partial result, and the range of its entries."""
    piece = before + tl.program_id(0)
    row, line = tl.load(targets + piece).to(tl.int64), tl.load(lines + piece).to(tl.int64)
    return row, line, tl.load(starts + piece), tl.load(starts + piece + 1)


@triton.jit
def _add(total, out, partial, row, line, f, k, stride_out):
    """out_row += total; into a line of the partial result if other pieces share the row."""
    if line < 0:
        place = out + row * stride_out + f
        tl.store(place, tl.load(place, mask=f < k, other=0.0) + total, mask=f < k)
    else:
        tl.store(partial + line * k + f, total, mask=f < k)


@triton.jit(do_not_specialize=["before"])
def sum_program(targets, starts, lines, gathered, entries, x, B, out, partial, before, k, stride_b, stride_out,
                PAIRS: tl.constexpr, K: tl.constexpr, PERMUTED: tl.constexpr):  # fmt: skip
    """out_row += Σ_e x_e b_j over a piece, for K columns; into a line of the partial result if others share the row.

    Pieces are numbered from ``before``, those of earlier launches.
    """
    f = tl.program_id(1) * K + tl.arange(0, K)
    row, line, first, last = _piece(targets, starts, lines, before)
    total = tl.zeros((K,), dtype=out.dtype.element_ty)
    for e0 in range(first, last, PAIRS):
        e = e0 + tl.arange(0, PAIRS)
        inside = e < last
        j = tl.load(gathered + e, mask=inside, other=0).to(tl.int64)
        at = e
        if PERMUTED:
            at = tl.load(entries + e, mask=inside, other=0).to(tl.int64)
        weight = tl.load(x + at, mask=inside, other=0.0)
        b = tl.load(B + j[:, None] * stride_b + f[None, :], mask=inside[:, None] & (f < k)[None, :], other=0.0)
        total += tl.sum(weight[:, None] * b.to(out.dtype.element_ty), 0)
    _add(total, out, partial, row, line, f, k, stride_out)


@triton.jit
def curvature_program(targets, starts, lines, gathered, c, P, W, Q, H, z, out, partial, k, stride_q, stride_h,
                      PAIRS: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """z_e = c_e (w_i·q_j + p_i·h_j), and out_i += Σ z_e q_j, over a piece; K covers a whole row."""
    f = tl.arange(0, K)
    row, line, first, last = _piece(targets, starts, lines, 0)
    p = tl.load(P + row * k + f, mask=f < k, other=0.0)
    w = tl.load(W + row * k + f, mask=f < k, other=0.0)
    total = tl.zeros((K,), dtype=out.dtype.element_ty)
    for e0 in range(first, last, PAIRS):
        e = e0 + tl.arange(0, PAIRS)
        inside = e < last
        j = tl.load(gathered + e, mask=inside, other=0).to(tl.int64)
        here = inside[:, None] & (f < k)[None, :]
        q = tl.load(Q + j[:, None] * stride_q + f[None, :], mask=here, other=0.0).to(out.dtype.element_ty)
        h = tl.load(H + j[:, None] * stride_h + f[None, :], mask=here, other=0.0).to(out.dtype.element_ty)
        change = tl.sum(w[None, :] * q + p[None, :] * h, 1)
        weight = change * tl.load(c + e, mask=inside, other=0.0)
        tl.store(z + e, weight, mask=inside)
        total += tl.sum(weight[:, None] * q, 0)
    _add(total, out, partial, row, line, f, k, k)


@triton.jit
def gather_lines_program(several, bounds, partial, out, k, stride_out, LINES: tl.constexpr, K: tl.constexpr):
    """out_row += the lines of the partial result that belong to it, in order."""
    t = tl.program_id(0)
    f = tl.program_id(1) * K + tl.arange(0, K)
    row = tl.load(several + t).to(tl.int64)
    first, last = tl.load(bounds + t), tl.load(bounds + t + 1)
    total = tl.zeros((K,), dtype=out.dtype.element_ty)
    for l0 in range(first, last, LINES):
        lines = (l0 + tl.arange(0, LINES)).to(tl.int64)
        here = (lines < last)[:, None] & (f < k)[None, :]
        total += tl.sum(tl.load(partial + lines[:, None] * k + f[None, :], mask=here, other=0.0), 0)
    place = out + row * stride_out + f
    tl.store(place, tl.load(place, mask=f < k, other=0.0) + total, mask=f < k)


@triton.jit
def _terms(s, e, inside, labels, stride_label, constants, imputed_at, pair_weight, loss_weight,
           LOSS: tl.constexpr, IMPUTED: tl.constexpr, PAIR_WEIGHT: tl.constexpr,
           LOSS_WEIGHT: tl.constexpr):  # fmt: skip
    """ℓ⁺ in float64, ∂ℓ⁺/∂ŷ and ∂²ℓ⁺/∂ŷ² at the scores s of the pairs e."""
    omega, imputed = tl.load(constants), tl.load(constants + 1)  # an argument would arrive in float32
    y = tl.load(labels + e * stride_label, mask=inside, other=1.0)
    one = tl.full(s.shape, 1.0, dtype=s.dtype)
    if LOSS == 0:
        value = _softplus(-y * s)
        wrong, curve = _sigmoids(y * s)  # labels are ±1, and the curvature is even
        slope = -y * wrong
    elif LOSS == 1:
        value = 0.5 * (y - s) * (y - s)
        slope = s - y
        curve = one
    else:
        short = tl.maximum(1.0 - y * s, 0.0)
        value = 0.5 * short * short
        slope = -y * short
        curve = tl.where(y * s < 1.0, 1.0, 0.0).to(s.dtype)
    if LOSS_WEIGHT:
        weight = tl.load(loss_weight + e, mask=inside, other=0.0)
        value, slope, curve = value * weight, slope * weight, curve * weight
    if IMPUTED:
        imputed = tl.load(imputed_at + e, mask=inside, other=0.0)
    gap = s - imputed
    pull = gap * omega
    bend = one * omega
    if PAIR_WEIGHT:
        weight = tl.load(pair_weight + e, mask=inside, other=0.0)
        pull, bend = pull * weight, bend * weight
    both = value.to(tl.float64) - 0.5 * pull.to(tl.float64) * gap.to(tl.float64)
    return both, (slope - pull).to(s.dtype), (curve - bend).to(s.dtype)


@triton.jit
def loss_program(scores, labels, stride_label, constants, imputed_at, pair_weight, loss_weight,
                 first_out, second_out, value_out, size,
                 LOSS: tl.constexpr, IMPUTED: tl.constexpr, PAIR_WEIGHT: tl.constexpr, LOSS_WEIGHT: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    """ℓ⁺, ∂ℓ⁺/∂ŷ and ∂²ℓ⁺/∂ŷ² of a run of pairs; the sum of the first in float64. ``first_out`` may be ``scores``."""
    run = tl.program_id(0)
    e = run.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < size
    s = tl.load(scores + e, mask=inside, other=0.0)
    value, first, second = _terms(
        s, e, inside, labels, stride_label, constants, imputed_at, pair_weight, loss_weight,
        LOSS, IMPUTED, PAIR_WEIGHT, LOSS_WEIGHT,
    )  # fmt: skip
    tl.store(value_out + run, tl.sum(tl.where(inside, value, 0.0), 0))
    tl.store(first_out + e, first, mask=inside)
    tl.store(second_out + e, second, mask=inside)


@triton.jit
def loss_left_program(targets, starts, lines, gathered, labels, stride_label, constants, imputed_at, pair_weight,
                      loss_weight, P, W, Q, H, x, out, partial, k, stride_q, stride_h,
                      LOSS: tl.constexpr, IMPUTED: tl.constexpr, PAIR_WEIGHT: tl.constexpr, LOSS_WEIGHT: tl.constexpr,
                      CURVED: tl.constexpr, PAIRS: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """x_e = ∂ℓ⁺/∂ŷ, or ∂²ℓ⁺/∂ŷ² (w_i·q_j + p_i·h_j), from the scores p_i·q_j, and out_i += Σ x_e q_j, over a piece."""
    f = tl.arange(0, K)
    row, line, first, last = _piece(targets, starts, lines, 0)
    p = tl.load(P + row * k + f, mask=f < k, other=0.0)
    if CURVED:
        w = tl.load(W + row * k + f, mask=f < k, other=0.0)
    total = tl.zeros((K,), dtype=out.dtype.element_ty)
    for e0 in range(first, last, PAIRS):
        e = e0 + tl.arange(0, PAIRS)
        inside = e < last
        j = tl.load(gathered + e, mask=inside, other=0).to(tl.int64)
        here = inside[:, None] & (f < k)[None, :]
        q = tl.load(Q + j[:, None] * stride_q + f[None, :], mask=here, other=0.0)
        _, slope, curve = _terms(
            tl.sum(p[None, :] * q, 1), e, inside, labels, stride_label, constants, imputed_at, pair_weight, loss_weight,
            LOSS, IMPUTED, PAIR_WEIGHT, LOSS_WEIGHT,
        )  # fmt: skip
        weight = slope
        if CURVED:
            h = tl.load(H + j[:, None] * stride_h + f[None, :], mask=here, other=0.0)
            weight = curve * tl.sum(w[None, :] * q + p[None, :] * h, 1)
        weight = tl.where(inside, weight, 0.0)
        tl.store(x + e, weight, mask=inside)
        total += tl.sum(weight[:, None] * q, 0)
    _add(total, out, partial, row, line, f, k, k)


@triton.jit
def dot_program(a, b, sums, size, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Σ a_e b_e over a run of elements, products and sum in float64."""
    run = tl.program_id(0)
    first = run.to(tl.int64) * RUN
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, RUN, BLOCK):
        e = first + start + tl.arange(0, BLOCK)
        x = tl.load(a + e, mask=e < size, other=0.0).to(tl.float64)
        total += x * tl.load(b + e, mask=e < size, other=0.0).to(tl.float64)
    tl.store(sums + run, tl.sum(total, 0))


@triton.jit
def _slope(y, ALPHA: tl.constexpr, ACTIVATION: tl.constexpr):
    """φ′(z) from y = φ(z)."""
    if ACTIVATION == 0:  # elu
        return tl.where(y > 0, 1.0, y + ALPHA)
    elif ACTIVATION == 1:  # leaky relu; relu with α = 0
        return tl.where(y > 0, 1.0, ALPHA)
    elif ACTIVATION == 2:  # tanh
        return 1.0 - y * y
    else:  # sigmoid
        return y * (1.0 - y)


@triton.jit
def slope_program(g, bias, y, initial, out, sums, rows, columns, scale, ALPHA: tl.constexpr, ACTIVATION: tl.constexpr,
                  BIAS: tl.constexpr, INITIAL: tl.constexpr, SUMS: tl.constexpr,
                  HEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """out = scale·initial + (g + bias) ∘ φ′, φ′ from the activation's output y; sums of HEIGHT rows of the latter."""
    program = tl.program_id(0)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=out.dtype.element_ty)
    for start in range(0, HEIGHT, ROWS):
        r = program.to(tl.int64) * HEIGHT + start + tl.arange(0, ROWS)
        here = (r < rows)[:, None] & (f < columns)[None, :]
        at = r[:, None] * columns + f[None, :]
        x = tl.load(g + at, mask=here, other=0.0)
        if BIAS:
            x += tl.load(bias + f, mask=f < columns, other=0.0)[None, :]
        x *= _slope(tl.load(y + at, mask=here, other=0.0), ALPHA, ACTIVATION).to(x.dtype)
        if SUMS:
            total += tl.sum(x, 0)
        if INITIAL:
            x += scale * tl.load(initial + at, mask=here, other=0.0)
        tl.store(out + at, x, mask=here)
    if SUMS:
        tl.store(sums + program.to(tl.int64) * columns + f, total, mask=f < columns)


@triton.jit
def column_sums_program(x, weight, sums, rows, columns, WEIGHT: tl.constexpr,
                        HEIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Column sums of HEIGHT rows, weighted or not, into a line of sums, in its dtype."""
    program = tl.program_id(0)
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=sums.dtype.element_ty)
    for start in range(0, HEIGHT, ROWS):
        r = program.to(tl.int64) * HEIGHT + start + tl.arange(0, ROWS)
        here = (r < rows)[:, None] & (f < columns)[None, :]
        part = tl.load(x + r[:, None] * columns + f[None, :], mask=here, other=0.0)
        if WEIGHT:
            part *= tl.load(weight + r, mask=r < rows, other=0.0)[:, None]
        total += tl.sum(part, 0).to(sums.dtype.element_ty)
    tl.store(sums + program.to(tl.int64) * columns + f, total, mask=f < columns)


@triton.jit
def shifted_elu_program(x, bias, out, rows, columns, ALPHA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out = elu(x + bias), float32."""
    f = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (r < rows)[:, None] & (f < columns)[None, :]
    at = r[:, None] * columns + f[None, :]
    z = tl.load(x + at, mask=here, other=0.0) + tl.load(bias + f, mask=f < columns, other=0.0)[None, :]
    # eᶻ − 1 loses digits near 0: there by its series, which is exact to float32 where it is used
    series = 1.0 + z * (1.0 / 4) * (1.0 + z * (1.0 / 5) * (1.0 + z * (1.0 / 6) * (1.0 + z * (1.0 / 7))))
    series = z * (1.0 + z * (1.0 / 2) * (1.0 + z * (1.0 / 3) * series))
    grown = tl.where(z > -0.3, series, tl.exp(tl.minimum(z, 0.0)) - 1.0)
    tl.store(out + at, tl.where(z > 0, z, ALPHA * grown), mask=here)

"""The systems of rows (row_systems.py) for CPUs, compiled by numba: one row after the other, its pairs in the cache.

Rows are independent: the result is the same for any number of threads. O(|O| k steps). Compared with
row_systems.solve_batched in tests/test_row_steps.py; timed by benchmarks/bench_als.py.
"""

from __future__ import annotations

import numpy as np

from gramtower._util.compiled import compiled

SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; NaN and infinity keep their meaning


@compiled(fastmath=SUMS, inline="always")
def _row_product(start, stop, others, position, c, B, p, out):  # type: ignore[no-untyped-def]  # pragma: no cover
    """out += Σ_e c_e b_e b_eᵀ p."""
    zero, k, e = out.dtype.type(0), p.shape[0], start
    while e + 4 <= stop:
        b0, b1, b2, b3 = B[others[e]], B[others[e + 1]], B[others[e + 2]], B[others[e + 3]]
        s0, s1, s2, s3 = zero, zero, zero, zero
        for t in range(k):
            s0 += b0[t] * p[t]
            s1 += b1[t] * p[t]
            s2 += b2[t] * p[t]
            s3 += b3[t] * p[t]
        if position is None:
            s0, s1, s2, s3 = s0 * c[e], s1 * c[e + 1], s2 * c[e + 2], s3 * c[e + 3]
        else:
            s0, s1 = s0 * c[position[e]], s1 * c[position[e + 1]]
            s2, s3 = s2 * c[position[e + 2]], s3 * c[position[e + 3]]
        for t in range(k):
            out[t] += s0 * b0[t] + s1 * b1[t] + s2 * b2[t] + s3 * b3[t]
        e += 4
    while e < stop:
        b, s = B[others[e]], zero
        for t in range(k):
            s += b[t] * p[t]
        s *= c[e] if position is None else c[position[e]]
        for t in range(k):
            out[t] += s * b[t]
        e += 1


@compiled(fastmath=SUMS, inline="always")
def _add_row(start, stop, others, position, x, c, B, total, squares):  # type: ignore[no-untyped-def]  # pragma: no cover
    """total += Σ_e x_e b_e and squares += Σ_e c_e b_e ∘ b_e."""
    k, e = total.shape[0], start
    while e + 4 <= stop:
        b0, b1, b2, b3 = B[others[e]], B[others[e + 1]], B[others[e + 2]], B[others[e + 3]]
        if position is None:
            e0, e1, e2, e3 = e, e + 1, e + 2, e + 3
        else:
            e0, e1, e2, e3 = position[e], position[e + 1], position[e + 2], position[e + 3]
        x0, x1, x2, x3 = x[e0], x[e1], x[e2], x[e3]
        c0, c1, c2, c3 = c[e0], c[e1], c[e2], c[e3]
        for t in range(k):
            total[t] += x0 * b0[t] + x1 * b1[t] + x2 * b2[t] + x3 * b3[t]
            squares[t] += c0 * b0[t] * b0[t] + c1 * b1[t] * b1[t] + c2 * b2[t] * b2[t] + c3 * b3[t] * b3[t]
        e += 4
    while e < stop:
        b, e0 = B[others[e]], e if position is None else position[e]
        for t in range(k):
            total[t] += x[e0] * b[t]
            squares[t] += c[e0] * b[t] * b[t]
        e += 1


@compiled(fastmath=SUMS, nogil=True)
def solve_rows(  # type: ignore[no-untyped-def]  # pragma: no cover
    low, high, starts, others, position, x, c, B, pull, weight, spectrum, shift, steps, least, result, norms
):
    """Solve rows ``low`` to ``high``: steps over ``result``, the squares of their gradients' norms in ``norms``."""
    k, zero, one = B.shape[1], B.dtype.type(0), B.dtype.type(1)
    own = np.empty((6, k), B.dtype)
    base, inverse, r, z, p, Ap = own[0], own[1], own[2], own[3], own[4], own[5]
    for i in range(low, high):
        s, pulled = result[i], pull[i if len(pull) > 1 else 0]
        for t in range(k):
            base[t] = weight[i] * spectrum[t] + shift[i]
            inverse[t], r[t], s[t] = base[t], base[t] * s[t] - weight[i] * pulled[t], zero
        _add_row(starts[i], starts[i + 1], others, position, x, c, B, r, inverse)
        square, rz = 0.0, zero
        for t in range(k):
            square += np.float64(r[t]) * r[t]
            inverse[t] = one / max(inverse[t], shift[i])
            r[t] = -r[t]
            z[t] = inverse[t] * r[t]
            p[t] = z[t]
            rz += r[t] * z[t]
        norms[i], enough = square, least * rz
        for _ in range(steps):
            if not rz > enough:
                break
            for t in range(k):
                Ap[t] = base[t] * p[t]
            _row_product(starts[i], starts[i + 1], others, position, c, B, p, Ap)
            bend = zero
            for t in range(k):
                bend += p[t] * Ap[t]
            if not bend > zero:
                break
            size, after = rz / bend, zero
            for t in range(k):
                s[t] += size * p[t]
                r[t] -= size * Ap[t]
                z[t] = inverse[t] * r[t]
                after += r[t] * z[t]
            turn, rz = after / rz, after
            for t in range(k):
                p[t] = z[t] + turn * p[t]

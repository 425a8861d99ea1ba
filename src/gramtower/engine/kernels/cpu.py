"""The pair operations for CPUs, compiled by numba: parallel, fused, bit-identical for any number of threads.

Rows come cut into pieces of bounded length (data.pairs.Segments), so that several threads share a popular item: the
first piece of a row adds to the result, later ones to a line of ``carry`` that is added afterwards, in order. A task
is a run of pieces. Within a task the columns are visited tile by tile, a tile being as many gathered rows as stay in a
core's second-level cache; pairs are taken four at a time, so that a row's vectors are read once for four products. Each
task reads all gathered rows from memory once, and so has several pairs for each of them where there are enough.

Tasks run on plain threads, as many as ``torch.get_num_threads()``, without the GIL. Numba's thread pools are not used:
their workers keep spinning after a call and would compete with torch's for the same cores.

The systems of rows are solved one row after the other, its pairs in the cache. Rows are independent: the result is the
same for any number of threads. O(|O| k steps); timed by benchmarks/bench_als.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import host
from gramtower._util.compiled import compiled
from gramtower.data.pairs import Pairs, Segments
from gramtower.engine.kernels.reference import Kernels, RowSystems

_SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums may be reordered; NaN and infinity keep their meaning
_TILE_BYTES = 1 << 19  # half of a usual second-level cache
_TASK = 1 << 15  # pairs in a task, or fewer when there would be too few tasks for the threads
_REUSE = 16  # pairs in a task for each row that they may gather, likewise: of 2, half the time is spent reading rows
_SHARE = 1 << 12  # but not fewer than these: waking a thread takes as long
_ROW_COST = 8  # of a row of its own system, in pairs
_RUN = 1 << 20  # elements of a dot product summed in one run


def _solve(
    offsets: Tensor, others: Tensor, position: Tensor | None, x: Tensor, c: Tensor, B: Tensor, rows: RowSystems
) -> Tensor:
    starts, norms = _np(offsets), np.empty(len(rows.y), dtype=np.float64)
    work = starts + _ROW_COST * np.arange(len(starts))
    tasks = max(1, min(len(norms), int(work[-1]) // _SHARE))
    bounds = np.searchsorted(work, np.linspace(0, work[-1], tasks + 1)).tolist()
    bounds[-1] = len(norms)
    arguments = (
        starts, _np(others), None if position is None else _np(position), _np(x), _np(c), _np(B), _np(rows.pull),
        _np(rows.weight), _np(rows.spectrum), _np(rows.shift), rows.steps, rows.tolerance**2, _out(rows.y), norms,
    )  # fmt: skip
    host.parallel_for(lambda first, last: _solve_rows(first, last, *arguments), bounds)
    return torch.tensor(norms.sum())


def _sum_into(s: Segments, others: Tensor, x: Tensor, position: NDArray[Any] | None, B: Tensor, out: Tensor) -> None:
    result = _out(out)
    carry = np.zeros((s.continued, B.shape[1]), dtype=result.dtype)
    _run_tasks(
        _row_sum, s, len(B), _tile(s, B, 1), s.rows, s.starts, s.lines, _np(others), _np(x), position, _np(B),
        result, carry,
    )  # fmt: skip
    _add_carry(s, result, carry)


def _run_tasks(kernel: Callable[..., None], s: Segments, gathered: int, *arguments: object) -> None:
    """Run ``kernel(first piece, last piece, *arguments)`` over all pieces, task by task, on all threads.

    ``gathered`` is how many rows a task may gather from.
    """
    pieces, entries, count = len(s.rows), int(s.starts[-1]), torch.get_num_threads()
    size = max(_TASK, _REUSE * gathered)
    tasks = max(1, min(pieces, max(entries // size, min(4 * count, entries // _SHARE) if count > 1 else 1)))
    if tasks == 1:
        kernel(0, pieces, *arguments)
        return
    bounds = np.searchsorted(s.starts, np.linspace(0, entries, tasks + 1)).tolist()
    bounds[-1] = pieces
    host.parallel_for(lambda first, last: kernel(first, last, *arguments), bounds)


def _tile(s: Segments, gathered: Tensor, matrices: int) -> int:
    """Columns in a tile. Tiles pay only while a piece has several pairs in each of them."""
    columns, row_bytes = gathered.shape[0], matrices * gathered.shape[1] * gathered.element_size()
    tiles = min(columns * row_bytes // _TILE_BYTES, int(s.starts[-1]) // (8 * max(1, len(s.rows))))
    return max(1, -(-columns // max(1, tiles)))  # a process may hold no rows at all


def _add_carry(s: Segments, out: NDArray[Any], carry: NDArray[Any]) -> None:
    if s.continued:
        later = s.lines >= 0
        np.add.at(out, s.rows[later], carry)


def _np(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().numpy()


def _out(tensor: Tensor) -> NDArray[Any]:
    if not tensor.is_contiguous():
        raise ValueError("out must be contiguous: the kernel adds to it in place")
    return tensor.numpy()


@compiled(fastmath=_SUMS, nogil=True)
def _dot(a, b):  # type: ignore[no-untyped-def]  # pragma: no cover
    total = 0.0
    for e in range(a.shape[0]):
        total += np.float64(a[e]) * np.float64(b[e])
    return total


@compiled(fastmath=_SUMS, inline="always")
def _dots_run(e, stop, columns, a, B, x):  # type: ignore[no-untyped-def]  # pragma: no cover
    zero, k = x.dtype.type(0), a.shape[0]
    while e + 4 <= stop:
        b0, b1, b2, b3 = B[columns[e]], B[columns[e + 1]], B[columns[e + 2]], B[columns[e + 3]]
        s0, s1, s2, s3 = zero, zero, zero, zero
        for d in range(k):
            s0 += a[d] * b0[d]
            s1 += a[d] * b1[d]
            s2 += a[d] * b2[d]
            s3 += a[d] * b3[d]
        x[e], x[e + 1], x[e + 2], x[e + 3] = s0, s1, s2, s3
        e += 4
    while e < stop:
        b, s = B[columns[e]], zero
        for d in range(k):
            s += a[d] * b[d]
        x[e] = s
        e += 1


@compiled(fastmath=_SUMS, inline="always")
def _sum_run(e, stop, columns, x, position, B, total):  # type: ignore[no-untyped-def]  # pragma: no cover
    k = total.shape[0]
    while e + 4 <= stop:
        b0, b1, b2, b3 = B[columns[e]], B[columns[e + 1]], B[columns[e + 2]], B[columns[e + 3]]
        if position is None:
            x0, x1, x2, x3 = x[e], x[e + 1], x[e + 2], x[e + 3]
        else:
            x0, x1, x2, x3 = x[position[e]], x[position[e + 1]], x[position[e + 2]], x[position[e + 3]]
        for d in range(k):
            total[d] += x0 * b0[d] + x1 * b1[d] + x2 * b2[d] + x3 * b3[d]
        e += 4
    while e < stop:
        b, x0 = B[columns[e]], x[e] if position is None else x[position[e]]
        for d in range(k):
            total[d] += x0 * b[d]
        e += 1


@compiled(fastmath=_SUMS, inline="always")
def _curvature_run(e, stop, columns, c, p, w, Q, H, z, total):  # type: ignore[no-untyped-def]  # pragma: no cover
    zero, k = z.dtype.type(0), total.shape[0]
    while e + 4 <= stop:
        j0, j1, j2, j3 = columns[e], columns[e + 1], columns[e + 2], columns[e + 3]
        q0, q1, q2, q3 = Q[j0], Q[j1], Q[j2], Q[j3]
        h0, h1, h2, h3 = H[j0], H[j1], H[j2], H[j3]
        s0, s1, s2, s3 = zero, zero, zero, zero
        for d in range(k):
            s0 += w[d] * q0[d] + p[d] * h0[d]
            s1 += w[d] * q1[d] + p[d] * h1[d]
            s2 += w[d] * q2[d] + p[d] * h2[d]
            s3 += w[d] * q3[d] + p[d] * h3[d]
        s0, s1, s2, s3 = s0 * c[e], s1 * c[e + 1], s2 * c[e + 2], s3 * c[e + 3]
        z[e], z[e + 1], z[e + 2], z[e + 3] = s0, s1, s2, s3
        for d in range(k):
            total[d] += s0 * q0[d] + s1 * q1[d] + s2 * q2[d] + s3 * q3[d]
        e += 4
    while e < stop:
        q, h, s = Q[columns[e]], H[columns[e]], zero
        for d in range(k):
            s += w[d] * q[d] + p[d] * h[d]
        s *= c[e]
        z[e] = s
        for d in range(k):
            total[d] += s * q[d]
        e += 1


@compiled(inline="always")
def _run_end(e, last, columns, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The first entry from e on whose column is outside the tile; columns increase within a piece."""
    while e < last and columns[e] < end:
        e += 1
    return e


@compiled(fastmath=_SUMS, nogil=True)
def _dots(low, high, tile, rows, starts, columns, A, B, x):  # type: ignore[no-untyped-def]  # pragma: no cover
    at = starts[low:high].copy()
    for end in range(tile, B.shape[0] + tile, tile):
        for s in range(low, high):
            e = at[s - low]
            stop = _run_end(e, starts[s + 1], columns, end)
            if stop > e:
                _dots_run(e, stop, columns, A[rows[s]], B, x)
                at[s - low] = stop


@compiled(fastmath=_SUMS, nogil=True)
def _row_sum(low, high, tile, rows, starts, lines, columns, x, position, B, out, carry):  # type: ignore[no-untyped-def]  # pragma: no cover
    at = starts[low:high].copy()
    for end in range(tile, B.shape[0] + tile, tile):
        for s in range(low, high):
            e = at[s - low]
            stop = _run_end(e, starts[s + 1], columns, end)
            if stop > e:
                total = out[rows[s]] if lines[s] < 0 else carry[lines[s]]
                _sum_run(e, stop, columns, x, position, B, total)
                at[s - low] = stop


@compiled(fastmath=_SUMS, nogil=True)
def _curvature_left(low, high, tile, rows, starts, lines, columns, c, P, W, Q, H, z, out, carry):  # type: ignore[no-untyped-def]  # pragma: no cover
    at = starts[low:high].copy()
    for end in range(tile, Q.shape[0] + tile, tile):
        for s in range(low, high):
            e = at[s - low]
            stop = _run_end(e, starts[s + 1], columns, end)
            if stop > e:
                i = rows[s]
                total = out[i] if lines[s] < 0 else carry[lines[s]]
                _curvature_run(e, stop, columns, c, P[i], W[i], Q, H, z, total)
                at[s - low] = stop


@compiled(fastmath=_SUMS, inline="always")
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


@compiled(fastmath=_SUMS, inline="always")
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


@compiled(fastmath=_SUMS, nogil=True)
def _solve_rows(  # type: ignore[no-untyped-def]  # pragma: no cover
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


class NumbaKernels(Kernels):
    """The operations for CPUs; torch has nothing faster for those that are not here.

    A stored slope of an activation is one multiplication, cheaper than computing it again.
    """

    SOLVES_ROWS = True  # a row's pairs stay in the cache

    def dots(self, pairs: Pairs, A: Tensor, B: Tensor) -> Tensor:
        x = torch.empty(len(pairs), dtype=A.dtype)
        s = pairs.segments
        tile = _tile(s, B, 1)
        _run_tasks(_dots, s, len(B), tile, s.rows, s.starts, _np(pairs.columns), _np(A), _np(B), x.numpy())
        return x

    def left_sum(self, pairs: Pairs, x: Tensor, B: Tensor, out: Tensor) -> None:
        _sum_into(pairs.segments, pairs.columns, x, None, B, out)

    def right_sum(self, pairs: Pairs, x: Tensor, A: Tensor, out: Tensor) -> None:
        columns = pairs.by_column
        _sum_into(columns.segments, columns.rows, x, _np(columns.position), A, out)

    def curvature_left(
        self, pairs: Pairs, c: Tensor, P: Tensor, W: Tensor, Q: Tensor, H: Tensor, out: Tensor
    ) -> Tensor:
        """Fused, in one pass."""
        z = torch.empty_like(c)
        s, result = pairs.segments, _out(out)
        carry = np.zeros((s.continued, Q.shape[1]), dtype=result.dtype)
        _run_tasks(
            _curvature_left, s, len(Q), _tile(s, Q, 2), s.rows, s.starts, s.lines, _np(pairs.columns), _np(c),
            _np(P), _np(W), _np(Q), _np(H), z.numpy(), result, carry,
        )  # fmt: skip
        _add_carry(s, result, carry)
        return z

    def solve_left(self, pairs: Pairs, x: Tensor, c: Tensor, B: Tensor, rows: RowSystems) -> Tensor:
        """A row's pairs are gathered once and stay in the cache."""
        return _solve(pairs.offsets, pairs.columns, None, x, c, B, rows)

    def solve_right(self, pairs: Pairs, x: Tensor, c: Tensor, A: Tensor, rows: RowSystems) -> Tensor:
        columns = pairs.by_column
        return _solve(columns.offsets, columns.rows, columns.position, x, c, A, rows)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Sums of fixed runs, added in order."""
        runs = -(-len(a) // _RUN)
        x, y = _np(a), _np(b)
        if runs == 1:
            return torch.tensor(_dot(x, y), dtype=torch.float64)
        sums = np.zeros(runs)

        def add(first: int, last: int) -> None:
            for run in range(first, last):
                part = slice(run * _RUN, (run + 1) * _RUN)
                sums[run] = _dot(x[part], y[part])

        host.parallel_for(add, list(range(runs + 1)))
        return torch.tensor(sums.sum())


KERNELS = NumbaKernels()

"""What torch allocates while a block of code runs, and Triton's programs done at once in torch.

Under its interpreter Triton runs program by program, which allows for a few hundred rows; sizes that show the memory of
a GPU need thousands. ``Emulated`` takes the place of the programs of engine/kernels/programs.py: what gpu.py allocates
stays as it is, and what the emulation allocates is not counted.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gramtower.engine.kernels import programs
from gramtower.engine.kernels.elementwise import LOSSES

PROGRAMS = (
    "dots_program", "sum_program", "curvature_program", "gather_lines_program", "loss_program", "loss_left_program",
    "dot_program", "slope_program", "column_sums_program", "shifted_elu_program",
)  # fmt: skip


class Allocations(TorchDispatchMode):
    """Bytes of the tensors made since this was entered that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self._known, self.paused = 0, 0, {}, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not self.paused:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._add(tensor.untyped_storage())
        return result

    def _add(self, storage):
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            self._known[key] = storage.nbytes()
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key):
        self.alive -= self._known.pop(key)

    @contextmanager
    def pause(self):
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class Emulated:
    """A program of ``programs`` by name, launched as Triton launches it."""

    def __init__(self, name, allocations=None):
        self.run, self.allocations = globals()[f"_{name}"], allocations

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            if self.allocations is None:
                self.run(grid, *args, **kwargs)
            else:
                with self.allocations.pause():
                    self.run(grid, *args, **kwargs)

        return launch


def emulate(monkeypatch, allocations=None):
    """Put the emulation in the place of all programs."""
    for name in PROGRAMS:
        monkeypatch.setattr(programs, name, Emulated(name, allocations))


def _entries(targets, starts, first, last):
    """Rows of the entries of some pieces, the pieces counted from 0, and the range of the entries."""
    counts = starts[first : last + 1].diff()
    piece = torch.repeat_interleave(torch.arange(last - first), counts)
    return targets.long()[first:last][piece], piece, slice(int(starts[first]), int(starts[last]))


def _finish(total, out, partial, targets, lines):
    alone = lines < 0
    out.index_add_(0, targets[alone].long(), total[alone])
    partial[lines[~alone].long()] = total[~alone]


def _dots_program(grid, targets, starts, gathered, A, B, x, *_, **__):
    row, _, part = _entries(targets, starts, 0, grid[0])
    x[part] = (A[row].to(x.dtype) * B[gathered[part].long()].to(x.dtype)).sum(1)


def _sum_program(grid, targets, starts, lines, gathered, entries, x, B, out, partial, before, *_, PERMUTED, **__):
    last = before + grid[0]
    _, piece, part = _entries(targets, starts, before, last)
    weight = x[entries[part].long()] if PERMUTED else x[part]
    total = out.new_zeros(grid[0], out.shape[1])
    total.index_add_(0, piece, weight[:, None] * B[gathered[part].long()].to(out.dtype))
    _finish(total, out, partial, targets[before:last], lines[before:last])


def _curvature_program(grid, targets, starts, lines, gathered, c, P, W, Q, H, z, out, partial, *_, **__):
    row, piece, part = _entries(targets, starts, 0, grid[0])
    q, h = (X[gathered[part].long()].to(out.dtype) for X in (Q, H))
    z[part] = c[part] * (W[row] * q + P[row] * h).sum(1)
    total = out.new_zeros(grid[0], out.shape[1]).index_add_(0, piece, z[part, None] * q)
    _finish(total, out, partial, targets, lines)


def _gather_lines_program(grid, several, bounds, partial, out, *_, **__):
    out.index_add_(0, torch.repeat_interleave(several.long(), bounds.diff()), partial)


def _terms(scores, labels, constants, LOSS, IMPUTED, PAIR_WEIGHT, LOSS_WEIGHT):
    assert (LOSS, IMPUTED, PAIR_WEIGHT, LOSS_WEIGHT) == (0, False, False, False)
    loss, (omega, imputed) = LOSSES["logistic"], constants.tolist()
    gap = scores - imputed
    value = loss.value(labels, scores) - 0.5 * omega * gap.square()
    return value, loss.first(labels, scores) - omega * gap, loss.second(labels, scores) - omega


def _loss_program(grid, scores, labels, _, constants, *rest, BLOCK, num_warps, **kinds):
    first, second, values = rest[3:6]
    value, slope, curve = _terms(scores, labels, constants, **kinds)
    first.copy_(slope)
    second.copy_(curve)
    values.zero_()[0] = value.double().sum()


def _loss_left_program(grid, targets, starts, lines, gathered, labels, _, constants, *rest, CURVED, **kinds):
    P, W, Q, H, x, out, partial = rest[3:10]
    row, piece, part = _entries(targets, starts, 0, grid[0])
    kinds = {name: kinds[name] for name in ("LOSS", "IMPUTED", "PAIR_WEIGHT", "LOSS_WEIGHT")}
    q = Q[gathered[part].long()]
    _, slope, curve = _terms((P[row] * q).sum(1), labels, constants, **kinds)
    x[part] = curve * (W[row] * q + P[row] * H[gathered[part].long()]).sum(1) if CURVED else slope
    total = out.new_zeros(grid[0], out.shape[1]).index_add_(0, piece, x[part, None] * q)
    _finish(total, out, partial, targets, lines)


def _dot_program(grid, a, b, sums, *_, **__):
    sums.zero_()[0] = a.reshape(-1).double() @ b.reshape(-1).double()


def _slope_program(grid, g, bias, y, initial, out, sums, *rest, ALPHA, ACTIVATION, BIAS, INITIAL, SUMS, **__):
    assert ACTIVATION == 0
    slopes = torch.where(y > 0, 1.0, y + ALPHA)
    x = (g + bias if BIAS else g) * slopes
    if SUMS:
        sums.zero_()[0] = x.sum(0)
    out.copy_(x + rest[2] * initial if INITIAL else x)


def _column_sums_program(grid, x, weight, sums, *_, WEIGHT, **__):
    x = x.to(sums.dtype)
    sums.zero_()[0] = (x * weight[:, None] if WEIGHT else x).sum(0)


def _shifted_elu_program(grid, x, bias, out, *_, **__):
    out.copy_(torch.nn.functional.elu(x + bias))

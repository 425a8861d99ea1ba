"""Evaluations of small problems on a GPU as CUDA graphs: one launch in the place of a hundred.

A slot is one evaluation over fixed memory: θ is copied in, and the value, the gradient and Gauss-Newton products are
replayed, the right side's kernels beside the left side's (kernels/lanes.py); so is the preconditioner, whose factors
are copied in. The work is the same as without graphs, kernel by kernel. A slot belongs to the point that was made from
it until that point is gone; a line search needs two. Where there is nothing to gain (large problems), or where the
steps are not the written-out ones over ids, problems are evaluated kernel by kernel.

Checked on a GPU by tests/test_captured.py; timed by benchmarks/bench_gpu.py.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from gramtower.kernels.lanes import Lane
from gramtower.model.linearization import Work
from gramtower.model.parameters import Parameters
from gramtower.objective.curvature import GaussNewton
from gramtower.objective.evaluation import Point
from gramtower.objective.kronecker import Kronecker

LARGEST = 1 << 30  # bytes of parameters, activations and pairs above which launches no longer matter
_SLOTS = 3

Evaluate = Callable[[Parameters], Point]


class Slots:
    """The slots of one problem with one pair of towers.

    Args:
        evaluate: the problem at parameters, kernel by kernel.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self._free: list[_Slot] = []
        self._made = 0
        self._applied = _Applied()

    def point(self, parameters: Parameters) -> Point:
        """The problem at ``parameters``, which nobody else will change."""
        if self._free:
            slot = self._free.pop()
        elif self._made < _SLOTS:
            self._made += 1
            slot = _Slot(self.evaluate, parameters, self._applied)
        else:  # somebody keeps points: these are not bound to a slot
            return self.evaluate(parameters)
        point = slot.at(parameters)
        weakref.finalize(point, self._free.append, slot)
        return point


class _Recording:
    """Some work captured once and replayed, counted each time."""

    def __init__(self, work: Work, pool: Any, action: Callable[[], object]) -> None:
        before = work.copy()
        self.graph = torch.cuda.CUDAGraph()
        stream = _beside()
        collecting = gc.isenabled()
        gc.disable()  # a graph that dies while another is recorded would spoil the recording
        try:
            with torch.cuda.stream(stream):
                self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    action()
                except BaseException:
                    with suppress(RuntimeError):  # what went wrong first is what matters
                        self.graph.capture_end()
                    raise
                self.graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        self.work, self.share = work, asdict(work.since(before))
        for name in self.share:
            setattr(work, name, getattr(before, name))

    def __call__(self) -> None:
        self.graph.replay()
        for name, amount in self.share.items():
            if amount:
                setattr(self.work, name, getattr(self.work, name) + amount)


def _beside() -> torch.cuda.Stream:
    """Another stream, which has waited for the present one."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


class _Applied:
    """M r over fixed memory, into which the preconditioner that is applied is copied first."""

    def __init__(self) -> None:
        self._held: Kronecker | None = None
        self._holds: weakref.ref[Kronecker] | None = None

    def apply_now(self, M: Kronecker, r: Parameters, out: Parameters) -> Parameters:
        """M r, written to ``out``."""
        if self._held is None:
            self._record(M, r)
        assert self._held is not None
        if self._holds is None or self._holds() is not M:
            torch._foreach_copy_(self._held.tensors(), M.tensors())
            self._holds = weakref.ref(M)
        self._r.vector.copy_(r.vector)
        self._replay()
        out.vector.copy_(self._out.vector)
        return out

    def _record(self, M: Kronecker, r: Parameters) -> None:
        held, own, room = M.copy(), r.clone(), r.empty()
        stream = _beside()
        with torch.cuda.stream(stream):
            held.apply(own, room)
        torch.cuda.current_stream().wait_stream(stream)
        self._replay = _Recording(Work(), torch.cuda.graph_pool_handle(), lambda: held.apply(own, room))
        self._held, self._r, self._out = held, own, room


class _Slot:
    """One evaluation over fixed memory."""

    def __init__(self, evaluate: Evaluate, parameters: Parameters, applied: _Applied) -> None:
        self.applied, self.lane = applied, Lane(torch.cuda.Stream(parameters.vector.device))  # type: ignore[no-untyped-call]
        self.theta, self.direction = parameters.clone(), parameters.clone()
        self.gradient, self.product = parameters.empty(), parameters.empty()
        work = self._try_out(evaluate)
        pool = torch.cuda.graph_pool_handle()
        self.value = _Recording(work, pool, lambda: self._evaluate(evaluate))
        self.slope = _Recording(work, pool, self._slope)
        self.curvature = _Recording(work, pool, self._curvature)

    def at(self, parameters: Parameters) -> Point:
        """The point at ``parameters`` in this slot's memory."""
        self.theta.vector.copy_(parameters.vector)
        self.value()
        point = copy.copy(self.template)
        point.parameters, point.slot = parameters, self
        return point

    def gradient_now(self) -> Parameters:
        """∇L at this slot's θ."""
        self.slope()
        return self.gradient.clone()

    def product_now(self, d: Parameters, damping: float, out: Parameters) -> Parameters:
        """(G + damping·I) d at this slot's θ, written to ``out``."""
        self.direction.vector.copy_(d.vector)
        self.curvature()
        torch.add(self.product.vector, self.direction.vector, alpha=damping, out=out.vector)
        return out

    def attach(self, M: Kronecker) -> Kronecker:
        """The same, applied from a graph."""
        M.replay = self.applied
        return M

    def _try_out(self, evaluate: Evaluate) -> Work:
        """Compile kernels and make what is made once, outside of the recording; not counted."""
        stream = _beside()
        with torch.cuda.stream(stream):
            point = evaluate(self.theta)
            point.lane = self.lane
            work = point.work
            before = work.copy()
            _ = point.sums
            point.pull_gradient(self.gradient)
            GaussNewton(point, 0.0).product(self.direction, self.product)
        torch.cuda.current_stream().wait_stream(stream)
        for name, amount in asdict(before).items():
            setattr(work, name, amount)
        work.left_forwards -= 1
        work.right_forwards -= 1
        return work

    def _evaluate(self, evaluate: Evaluate) -> None:
        self.template = evaluate(self.theta)
        self.template.lane = self.lane
        _ = self.template.sums
        for tower in (self.template.left, self.template.right):
            tower.precompute()  # here, as a product or a preconditioner may come before a gradient

    def _slope(self) -> None:
        self.template.pull_gradient(self.gradient)

    def _curvature(self) -> None:
        GaussNewton(self.template, 0.0).product(self.direction, self.product)

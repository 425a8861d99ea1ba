"""CUDA graphs for small problems on a GPU: one launch instead of a hundred.

A slot is one evaluation over fixed memory: θ is copied in and the value is replayed; gradients, Gauss-Newton products
and the preconditioner, whose factors are copied in, are replayed when they are needed, with the right side's kernels on
a side stream. A slot belongs to a point until nothing refers to that point or its G; a line search needs two. Large
problems, and towers that are not analytic steps over ids, gain nothing and are evaluated kernel by kernel.

torch keeps the memory of the graphs of past problems apart from all other memory, and cannot free it for an allocation
while another graph is recorded, so that one fit after the other would take more. :func:`return_memory` returns it to
the GPU at the end of a fit and before another problem records its first graph.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from gramtower._util.host import SideStream
from gramtower.engine.objective.gauss_newton import GaussNewton
from gramtower.engine.objective.kronecker import Kronecker
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.parameters import Parameters

_SLOTS = 3
_FEW = 4  # tensors of a preconditioner, as two tables have, that are applied as soon as a graph of them is launched

Evaluate = Callable[[Parameters], Evaluation]

_recording = threading.Lock()  # no memory is returned while some thread records
_dead: list[None] = []  # not empty if graphs have died since memory was last returned; finalizers need no lock for it


class _Streams(threading.local):
    """The streams of a thread, by use and device: torch keeps memory for each one that multiplies matrices."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.device], torch.cuda.Stream] = {}

    def get(self, use: str, device: torch.device) -> torch.cuda.Stream:
        """A stream, always the same."""
        if (use, device) not in self._known:
            self._known[use, device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._known[use, device]


_streams = _Streams()


def return_memory() -> None:
    """Give the memory of graphs that died, and all other memory that torch keeps unused, back to the GPU."""
    if _dead:
        _dead.clear()
        with _recording:
            torch.cuda.empty_cache()


class GraphPool:
    """The slots of one problem with one pair of towers; ``evaluate`` computes the problem kernel by kernel."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._free: list[_Slot] = []
        self.made = 0
        self._work: Work | None = None
        self._apply = _GraphedApply()
        weakref.finalize(self, _dead.append, None)

    def acquire(self, parameters: Parameters) -> GraphExecutor | None:
        """A slot evaluated at ``parameters``, free again when no reference to it is left; None if all are in use."""
        if self._free:
            slot = self._free.pop()
        elif self.made < _SLOTS:
            return_memory()
            self.made += 1
            slot = _Slot(self._evaluate, parameters, self._work)
            self._work = slot.work
        else:
            return None
        slot.load(parameters)
        executor = GraphExecutor(slot, self._apply)
        weakref.finalize(executor, self._free.append, slot)
        return executor


class _Recording:
    """Some work captured once and replayed, counted each time."""

    def __init__(self, work: Work, pool: Any, action: Callable[[], object]) -> None:
        before = work.copy()
        self.graph = torch.cuda.CUDAGraph()
        stream = _waiting_stream()
        collecting = gc.isenabled()
        gc.disable()  # a graph that dies while another is recorded would invalidate the capture
        try:
            with _recording, torch.cuda.stream(stream):
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
        self.work, self.share = work, work.since(before)
        work.reset(before)

    def __call__(self) -> None:
        self.graph.replay()
        self.work.reset(self.work.plus(self.share))


def _waiting_stream() -> torch.cuda.Stream:
    """Another stream, which has waited for the present one."""
    stream = _streams.get("recording", torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    return stream


class _GraphedApply:
    """M r over fixed memory, into which the preconditioner that is applied is copied first."""

    def __init__(self) -> None:
        self._held: Kronecker | None = None
        self._holds: weakref.ref[Kronecker] | None = None

    def __call__(self, M: Kronecker, r: Parameters, out: Parameters) -> Parameters:
        """M r, written over ``out``."""
        if len(M.tensors()) <= _FEW:
            return M.compute(r, out)
        if self._held is None or self._holds is None or self._holds() is not M:
            given = M.tensors()
            if self._held is None or _shapes(self._held.tensors()) != _shapes(given):  # factors not finite are left out
                self._held = self._record(M, r)
            torch._foreach_copy_(self._held.tensors(), given)
            self._holds = weakref.ref(M)
        self._r.vector.copy_(r.vector)
        self._replay()
        out.vector.copy_(self._out.vector)
        return out

    def _record(self, M: Kronecker, r: Parameters) -> Kronecker:
        held, self._r, self._out = M.copy(), r.clone(), r.empty()
        stream = _waiting_stream()
        with torch.cuda.stream(stream):
            held.compute(self._r, self._out)
        torch.cuda.current_stream().wait_stream(stream)
        pool = torch.cuda.graph_pool_handle()
        self._replay = _Recording(Work(), pool, lambda: held.compute(self._r, self._out))
        return held


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


class _Slot:
    """One evaluation over fixed memory, at the θ that was loaded last.

    The first slot, without the ``work`` that another one counts, compiles the kernels that all of them use.
    """

    def __init__(self, evaluate: Evaluate, parameters: Parameters, work: Work | None) -> None:
        self._stream = SideStream(_streams.get("side", parameters.vector.device))
        self._theta, self._direction = parameters.clone(), parameters.clone()
        self._gradient, self._product = parameters.empty(), parameters.empty()
        self._make = evaluate
        self.work = self._try_out(lambda at: at.gradient(out=self._gradient)) if work is None else work
        self._pool = torch.cuda.graph_pool_handle()
        self._replay_value = _Recording(self.work, self._pool, self._evaluate)
        self._replay_gradient = _Recording(self.work, self._pool, lambda: self.evaluation.gradient(out=self._gradient))
        self._replay_product: _Recording | None = None  # not every method asks for one

    def load(self, parameters: Parameters) -> None:
        """Evaluate at other parameters."""
        self._theta.vector.copy_(parameters.vector)
        self._replay_value()

    def gradient(self) -> Parameters:
        """∇L at the θ that was loaded."""
        self._replay_gradient()
        return self._gradient.clone()

    def product(self, d: Parameters, damping: float, out: Parameters) -> Parameters:
        """(G + damping·I) d at the θ that was loaded, written over ``out``."""
        self._direction.vector.copy_(d.vector)
        if self._replay_product is None:
            work = self._try_out(self._multiply)
            self._replay_product = _Recording(work, self._pool, lambda: self._multiply(self.evaluation))
        self._replay_product()
        torch.add(self._product.vector, self._direction.vector, alpha=damping, out=out.vector)
        return out

    def _fresh(self) -> Evaluation:
        evaluation = self._make(self._theta)
        evaluation.stream = self._stream
        return evaluation

    def _try_out(self, action: Callable[[Evaluation], object]) -> Work:
        """Compile kernels and make what is made once, outside of the recording and of its memory; not counted."""
        stream = _waiting_stream()
        with torch.cuda.stream(stream):
            evaluation = self._fresh()
            work = evaluation.work
            before = work.copy()
            before.left_forwards -= 1
            before.right_forwards -= 1
            _ = evaluation.sums
            action(evaluation)
        torch.cuda.current_stream().wait_stream(stream)
        work.reset(before)
        return work

    def _evaluate(self) -> None:
        self.evaluation = self._fresh()
        _ = self.evaluation.sums
        for tower in (self.evaluation.left, self.evaluation.right):
            tower.precompute()  # here, as a product or a preconditioner may come before a gradient

    def _multiply(self, evaluation: Evaluation) -> None:
        GaussNewton(evaluation, 0.0).compute(self._direction, self._product)


class GraphExecutor:
    """Replays the graphs of a slot, which is this object's as long as a point or an operator holds it."""

    def __init__(self, slot: _Slot, apply: _GraphedApply) -> None:
        self.evaluation, self.gradient, self.product = slot.evaluation, slot.gradient, slot.product
        self.apply = apply  # applies preconditioners, from a graph that all slots share

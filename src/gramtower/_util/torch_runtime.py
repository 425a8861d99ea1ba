"""Process-wide state of torch: one thread pool, the precision of matrix products, and a side stream of a GPU.

Threads. :func:`parallel_for` runs compiled code and products that release the GIL on ``torch.get_num_threads()``
threads. Idle threads sleep: pools that spin between calls, such as numba's, would compete with torch's workers. A
forked process has none of its parent's threads, so the pool is recreated there; torch's OpenMP threads are gone too and
torch would wait for them, so a forked process uses one torch thread. To use several, start processes by "spawn".

Precision. Matrix products on a GPU are "float32" (IEEE) or "tf32" (inputs rounded to 10 bits of mantissa, sums in
float32; several times faster on tensor cores). torch has one setting per process; :func:`products_in` sets it during a
computation and restores it. Threads that need the other precision wait.

Streams. :class:`SideStream` runs the kernels of the right side next to those of the left side, because kernels
over few right rows leave most of a GPU idle. Memory is safe because the side stream starts after all work before
``fork`` and ``join`` waits for it, and no tensor that one stream reads is freed by the other in between.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import torch

from gramtower._util import host


def parallel_for(work: Callable[[int, int], None], bounds: list[int]) -> None:
    """Call ``work(bounds[t], bounds[t + 1])`` for each t, on the next free thread; work releases the GIL."""
    tasks, threads = len(bounds) - 1, torch.get_num_threads()
    if min(tasks, threads) <= 1:  # too little work for several threads
        for t in range(tasks):
            work(bounds[t], bounds[t + 1])
        return
    numbers = itertools.count()

    def run() -> None:
        while (t := next(numbers)) < tasks:
            work(bounds[t], bounds[t + 1])

    helpers: list[Future[None]] = []
    try:
        helpers += (pool(threads).submit(run) for _ in range(min(threads, tasks) - 1))
        run()
    finally:  # also after Ctrl-C: no thread may still write after this returns
        numbers = itertools.count(tasks)
        wait(helpers)
    for helper in helpers:
        helper.result()


@contextmanager
def threads_of_fit(tiny: bool) -> Iterator[None]:
    """Use a suitable number of torch threads: one if operations are so short that threads would only wait.

    Otherwise as many as torch was given, but no more than the CPUs that this process may use (its affinity mask and the
    quota of its container).
    """
    before = torch.get_num_threads()
    wanted = 1 if tiny else min(before, max(1, host.cpu_count() - _busy_cpus()))
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _busy_cpus() -> int:
    """CPUs that other processes use, if torch's threads wait in long loops (gramtower/__init__.py); otherwise 0."""
    if not sys.modules["gramtower"]._long_waits:
        return 0
    found = []
    for _ in range(3):
        time.sleep(0.005)  # until threads of this process that wait in such a loop sleep
        found.append(host.running_tasks())
    return max(0, min(found) - 1)


@lru_cache(maxsize=1)
def pool(threads: int) -> ThreadPoolExecutor:
    """A pool of threads with one torch thread each. Tasks must not wait for other tasks of the pool."""
    made = ThreadPoolExecutor(threads, "gramtower", _begin_thread)
    started = threading.Barrier(threads)
    for future in [made.submit(started.wait) for _ in range(threads)]:
        future.result()
    torch.set_num_threads(threads)  # for threads made later: the number set last in any thread is what they begin with
    return made


def _begin_thread() -> None:
    torch.get_num_threads()  # a thread's first question sets its number to that of all, and would undo the next line
    torch.set_num_threads(1)


def _begin_child() -> None:
    pool.cache_clear()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


PRECISIONS = ("float32", "tf32")
PAIR_PRECISIONS = ("float32", "bfloat16")


class _Inside(threading.local):
    depth = 0


_inside = _Inside()
_turn = threading.Condition()
_stack = ExitStack()  # restores the setting
_users: dict[int, str] = {}  # threads inside blocks, and the precision that they use


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Use this precision for matrix products inside the block; blocks can be nested."""
    if _inside.depth:
        with _set_to(precision):
            yield
        return
    try:  # before anything is changed: Ctrl-C may come between any two lines
        _inside.depth = 1
        _enter(precision)
        yield
    finally:
        _inside.depth = 0
        _leave()


def _enter(precision: str) -> None:
    """Wait until no other thread uses the other precision, and set this one."""
    with _turn:
        _users.pop(threading.get_ident(), None)  # is there if the thread was interrupted while it left
        while not set(_live_users().values()) <= {precision}:
            _turn.wait(1.0)  # a thread that dies in its block does not notify
        if not _users:
            _stack.close()
            _stack.enter_context(_set_to(precision))
        _users[threading.get_ident()] = precision


def _leave() -> None:
    """Restore the setting if no other thread needs it."""
    with _turn:
        _users.pop(threading.get_ident(), None)
        if not _live_users():
            _stack.close()
            _turn.notify_all()


def _live_users() -> dict[int, str]:
    """Forget threads that ended without leaving their block, and return the others."""
    for ended in _users.keys() - sys._current_frames().keys():
        del _users[ended]
    return _users


@contextmanager
def _set_to(precision: str) -> Iterator[None]:
    matmul, wanted = torch.backends.cuda.matmul, precision == "tf32"
    named = getattr(matmul, "fp32_precision", None)  # since torch 2.9: "tf32", "ieee", or "none", which is "ieee"
    try:
        allowed = matmul.allow_tf32
    except RuntimeError:  # the caller has set fp32_precision; torch refuses to mix the two
        allowed = None
    if wanted == (named == "tf32" if allowed is None else allowed):
        yield
        return
    if allowed is None:
        matmul.fp32_precision = "tf32" if wanted else "ieee"
    else:
        matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        if allowed is not None:
            matmul.allow_tf32 = allowed
        if named is not None:  # setting allow_tf32 makes "none" into "ieee"
            matmul.fp32_precision = named


class SideStream:
    """A CUDA stream next to the current one; with None, the current one itself."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream

    def fork(self) -> None:
        """Make the side stream wait for all work submitted to the current stream so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def within(self) -> Iterator[None]:
        """Submit the work of this block to the side stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self.stream is not None and self.stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(self.stream)

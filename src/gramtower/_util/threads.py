"""The one pool of plain threads, for compiled code and products that release the GIL; ``torch.get_num_threads()`` many.

Idle threads sleep. Thread pools that spin between calls, numba's own among them, would compete with torch's workers for
the same cores.

A forked process has none of its parent's threads: the pool is recreated there. Torch's own OpenMP threads are gone too,
and torch would wait for them for ever, so that a forked process works with one torch thread; to use several, start
processes by "spawn".
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache

import torch

from gramtower._util import host


def parallel_for(work: Callable[[int, int], None], bounds: list[int]) -> None:
    """Call ``work(bounds[t], bounds[t + 1])`` for each t, on the next free thread; work releases the GIL."""
    tasks, threads = len(bounds) - 1, torch.get_num_threads()
    if min(tasks, threads) <= 1:  # small work is not worth what handing it out costs
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
    """Work with as many torch threads as suit the machine: one for operations so short that threads would only wait.

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
    """CPUs that others use now, where torch's threads would wait in long loops (gramtower/__init__.py); 0 elsewhere."""
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

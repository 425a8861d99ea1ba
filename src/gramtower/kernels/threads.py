"""Plain threads for compiled code that releases the GIL, as many as ``torch.get_num_threads()``.

Idle threads sleep. Thread pools that spin between calls, numba's own among them, would compete with torch's workers for
the same cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache

import torch


def share_out(work: Callable[[int, int], None], bounds: list[int]) -> None:
    """Call ``work(bounds[t], bounds[t + 1])`` for each t, each by whichever thread is free; work releases the GIL."""
    tasks, numbers, threads = len(bounds) - 1, itertools.count(), torch.get_num_threads()

    def run() -> None:
        while (t := next(numbers)) < tasks:
            work(bounds[t], bounds[t + 1])

    helpers: list[Future[None]] = []
    try:
        helpers += (_pool(threads).submit(run) for _ in range(min(threads, tasks) - 1))
        run()
    finally:  # also after Ctrl-C: nobody may still write where the caller goes on
        numbers = itertools.count(tasks)
        wait(helpers)
    for helper in helpers:
        helper.result()


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="gramtower")

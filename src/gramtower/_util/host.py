"""The machine and the process: memory and CPUs that it may use, threads, precision of products and GPU streams.

Memory. Limits are those of the machine, the container or the batch job. Freed memory is given back to the system.

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

import ctypes
import gc
import importlib.util
import itertools
import math
import mmap
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

_SMALL = 1 << 18  # bytes; the system keeps count of mappings, and allows some ten thousand
_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of cgroups, version 2 and 1
_USED = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_UNKNOWN = 4 << 30  # memory of a machine that does not tell
_CPU_V1 = Path("/sys/fs/cgroup/cpu")
_OWN_GROUPS = "/proc/self/cgroup"  # lines of number:controllers:group; version 2 has no controllers there


def memory_size() -> int:
    """Total memory of the host in bytes, or the limit of a container or batch job."""
    limits = [_installed_memory()]
    for path in _limit_files():
        with suppress(OSError, ValueError):  # no such control, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _installed_memory() -> int:
    """Memory of the machine; Windows has a function of its own for it."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its own size, then the total in bytes
    windows = getattr(ctypes, "windll", None)
    return int(status[1]) if windows is not None and windows.kernel32.GlobalMemoryStatusEx(status) else _UNKNOWN


def memory_left() -> int | None:
    """Bytes that a container or batch job may still allocate; None without a limit.

    Cached files that were not used recently count as free, because the system drops them first.
    """
    left = []
    for path in _limit_files():
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            used = _number(path.with_name(_USED.get(path.name, path.name + "-used")))
            left.append(max(0, min(limit, limit - used + _inactive_files(path.with_name("memory.stat")))))
    return min(left, default=None)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _inactive_files(path: Path) -> int:
    """Bytes of inactive cached files in a memory.stat; version 1 counts inner groups separately."""
    with suppress(OSError, ValueError):
        found = dict(line.split() for line in path.read_text().splitlines())
        return int(found.get("total_inactive_file", found.get("inactive_file", 0)))
    return 0


def _limit_files() -> list[Path]:
    """Files with limits of this process: of the outermost control group, its own, and those in between."""
    files = [Path(path) for path in _CONTAINER]
    with suppress(OSError):  # a system without control groups
        for line in Path(_OWN_GROUPS).read_text().splitlines():
            controllers, group = line.split(":", 2)[1:]
            if not controllers or "memory" in controllers.split(","):
                root = Path(_CONTAINER[1 if controllers else 0])
                inner = Path(group.lstrip("/"))
                files += [root.parent / folder / root.name for folder in (inner, *inner.parents)]
    return files


def cpu_count() -> int:
    """CPUs that this process may use: those of its affinity mask, and at most the quota of its container."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # no such mask on this system
        count = os.cpu_count() or 1
    quotas = [count]
    for folder in {path.parent for path in _limit_files()}:
        with suppress(OSError, ValueError, IndexError):
            quota, period = (folder / "cpu.max").read_text().split()[:2]
            quotas.append(math.ceil(int(quota) / int(period)))
    with suppress(OSError, ValueError):  # version 1
        most, of = (int((_CPU_V1 / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if most > 0:
            quotas.append(math.ceil(most / of))
    return max(1, min(quotas))


def running_tasks() -> int:
    """Number of runnable threads of all processes, including this one; 1 if it is unknown."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1


def own_pages(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialised array in small pages of its own, unless it is small.

    Only written pages take memory, and the system gets them back as soon as the array is freed. Arrays on the heap of
    the C library leave holes, which count as used memory until something fits into them.
    """
    kind = np.dtype(dtype)
    if size * kind.itemsize < _SMALL:
        return np.empty(size, kind)
    pages = mmap.mmap(-1, size * kind.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # huge ones are taken whole as soon as one byte is written
        with suppress(OSError):  # the system knows of none
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, kind)


def return_memory() -> None:
    """Return freed memory to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


@cache
def has_numba() -> bool:
    """Whether numba is installed; without it everything runs in numpy, scipy and torch."""
    return importlib.util.find_spec("numba") is not None


@dataclass(frozen=True)
class BlockPlan:
    """Rows per block, whether activations are kept between forward, jvp and vjp, and whether outputs are."""

    rows: int
    keep: bool
    outputs: bool = True


def default_budget(device: torch.device) -> int:
    """Half of the free memory of a device."""
    return free_memory(device) // 2


def free_memory(device: torch.device) -> int:
    """Free memory of a device in bytes; for a CPU at most the rest of a container's limit.

    Memory of a GPU that torch's allocator has reserved but does not use counts as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept)
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return total_memory(device) // 2
    left = memory_left()
    return free if left is None else min(free, left)


def readable(size: int) -> str:
    """A size as text for the argument memory_budget, rounded up."""
    unit, name = (10**9, "GB") if size >= 10**11 else (10**6, "MB")
    return f"{-(-size // unit)}{name}"


def total_memory(device: torch.device) -> int:
    """Total memory of a device in bytes; for a CPU at most the limit of a container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_size()


@contextmanager
def explained(budget: int | None) -> Iterator[None]:
    """Turn the out-of-memory error of a GPU into one that suggests a memory budget."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        now = "half of what was free" if budget is None else f"{budget / 1e9:.1f} GB"
        smaller = "4GB" if budget is None else f"{max(0.1, budget / 2e9):.1f}GB"
        raise MemoryError(
            f"the GPU ran out of memory: memory_budget is {now}; give a smaller one, such as memory_budget={smaller!r}"
            ", so that towers run in row blocks and recompute, or a smaller dim"
        ) from error


_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ResidentPeak:
    """The peak of this process's resident memory since the construction of this object.

    Linux records the peak (VmHWM) and resets it on request. Elsewhere the answer is None.

    Attributes:
        start: resident bytes at the start, after unused memory was returned; None if unknown.
    """

    def __init__(self) -> None:
        gc.collect()
        return_memory()
        self.start: int | None = None
        with suppress(OSError):
            _RESET.write_text("5")  # the largest size becomes the present one
            self.start = _bytes("VmRSS")

    def bytes(self) -> int | None:
        """The peak so far; None if unknown."""
        return None if self.start is None else _bytes("VmHWM")


def _bytes(name: str) -> int | None:
    found = re.search(rf"{name}:\s+([0-9]+) kB", _STATUS.read_text())
    return None if found is None else 1024 * int(found[1])


_DONT_NEED = 4  # MADV_DONTNEED
_FIELDS = 5  # of a line of /proc/self/smaps before the path


def release(path: Path, tensor: Tensor) -> int:
    """Drop a tensor's pages of a mapped file from memory; returns the number of bytes.

    They stay in the system's cache and come back when they are read. Only unwritten pages of that very file are
    dropped, and only on Linux.
    """
    start = tensor.data_ptr()
    span = _mapping(path, start, start + tensor.numel() * tensor.element_size())
    if span is None or not tensor.is_contiguous():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    first, size = span
    return size if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _DONT_NEED) == 0 else 0


def _mapping(path: Path, start: int, stop: int) -> tuple[int, int] | None:
    """Start and size of the whole pages between two addresses, if they are an unwritten mapping of the file."""
    if sys.platform != "linux":
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-start // page) * page, stop // page * page
    try:
        inode, lines = path.stat().st_ino, Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    inside = False
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):  # the head of a mapping: addresses, rights, offset, device, inode, path
            low, _, high = words[0].partition("-")
            inside = int(low, 16) <= first and last <= int(high, 16) and words[_FIELDS - 1] == str(inode)
        elif inside and words[0] in ("Private_Dirty:", "Anonymous:") and words[1] != "0":
            return None  # something was written into it, which only this process has
        elif inside and words[0] == "VmFlags:":
            return (first, last - first) if last > first else None
    return None


_LARGE = 1 << 22  # bytes: two huge pages
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def empty_like(vector: Tensor) -> Tensor:
    """An uninitialised vector of the same length, type and device.

    On a CPU large vectors are allocated by numpy, which asks for huge pages where torch does not: a copy of 36 MB took
    16 ms, and 5 to 8 ms in huge pages.
    """
    if vector.device.type != "cpu" or vector.nbytes < _LARGE or vector.dtype not in _NUMPY:
        return torch.empty_like(vector)
    return torch.from_numpy(np.empty(len(vector), _NUMPY[vector.dtype]))


class Vectors:
    """Uninitialised vectors on a CPU whose memory is reused once neither they nor views of them are alive.

    Solvers allocate several vectors of the size of θ in each iteration; reuse avoids fresh pages. All memory is freed
    with this object.
    """

    def __init__(self) -> None:
        self._idle: list[NDArray[np.floating]] = []

    def empty_like(self, vector: Tensor) -> Tensor:
        """A vector of the same length and type."""
        dtype = _NUMPY[vector.dtype]
        fitting = (i for i, array in enumerate(self._idle) if array.dtype == dtype and len(array) == len(vector))
        place = next(fitting, None)
        array = np.empty(len(vector), dtype) if place is None else self._idle.pop(place)
        lent = array.view()  # torch refers to this object as long as any tensor over its memory lives
        weakref.finalize(lent, self._idle.append, array).atexit = False
        return torch.from_numpy(lent)


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
    wanted = 1 if tiny else min(before, max(1, cpu_count() - _busy_cpus()))
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
        found.append(running_tasks())
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
_users: dict[threading.Thread, str] = {}  # threads inside blocks, and the precision that they use


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
        _users.pop(threading.current_thread(), None)  # is there if the thread was interrupted while it left
        while not set(_live_users().values()) <= {precision}:
            _turn.wait(1.0)  # a thread that dies in its block does not notify
        if not _users:
            _stack.close()
            _stack.enter_context(_set_to(precision))
        _users[threading.current_thread()] = precision


def _leave() -> None:
    """Restore the setting if no other thread needs it."""
    with _turn:
        _users.pop(threading.current_thread(), None)
        if not _live_users():
            _stack.close()
            _turn.notify_all()


def _live_users() -> dict[threading.Thread, str]:
    """Forget threads that ended without leaving their block, and return the others."""
    for ended in [thread for thread in _users if not thread.is_alive()]:
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

    def within(self) -> AbstractContextManager[object]:
        """Submit the work of a block to the side stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self.stream is not None and self.stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(self.stream)

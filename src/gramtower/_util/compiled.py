"""``compiled``: ``numba.njit`` with a cache of machine code on disk, which several processes can use at the same time.

numba numbers the files of a function's cache in an index. Two processes that add to one index can give one number to
two signatures, and the next process would run code for integers on floats. Each process therefore holds the lock of a
folder of its own, 0, 1, …, as long as it runs, into which it first copies functions that only other folders have. numba
notices a change of a function's own file, but not of another file with functions that it calls; so the cache of a
function is below a digest of all these files. Below a digest, entries are only added, so that copies are consistent.

The files are unpickled, so only trusted users may write to the folder. If no folder can be written, functions are
compiled in each process, with one warning. GRAMTOWER_CACHE=0 turns the cache off.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import config, njit
from numba.extending import is_jitted

from gramtower._util.files import take_lock

CACHE = "GRAMTOWER_CACHE"  # "0" in the environment turns the cache off
_ROOM = 1 << 26  # bytes that must be free on the disk
_locks: list[int | None] = []  # held until the process ends


def compiled(**options: Any) -> Callable[[Callable[..., object]], Any]:
    """Decorate a function with ``njit`` and a cache on disk (none for functions that are always inlined)."""

    def decorate(function: Callable[..., object]) -> Any:
        chosen: str = config.CACHE_DIR  # type: ignore[attr-defined]
        uncached = "inline" in options or config.DISABLE_JIT or os.environ.get(CACHE) == "0"  # type: ignore[attr-defined]
        folder = None if uncached else _own_folder(chosen)
        if folder is None:
            return njit(**options)(function)
        config.CACHE_DIR = str(folder / _digest(function))  # type: ignore[attr-defined]
        try:
            return njit(cache=True, **options)(function)
        finally:
            config.CACHE_DIR = chosen  # type: ignore[attr-defined]

    return decorate


@cache
def _own_folder(chosen: str) -> Path | None:
    """Take a folder that no other running process uses: in the chosen one, next to this file, or in the user's cache.

    The result is None, with a warning, if none of them can be written.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for root in (*([Path(chosen)] if chosen else []), Path(__file__).parent / "__pycache__", user):
        with suppress(OSError):
            return _take_folder(root / "gramtower-compiled")
    warnings.warn(
        "no folder for compiled code can be written: every process has to compile, which takes seconds; set "
        "NUMBA_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own_folder.cache_clear)


def _take_folder(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(root).free < _ROOM:
        raise OSError(f"{root}: the disk is full")
    for number in itertools.count():
        with suppress(BlockingIOError):
            _locks.append(take_lock(root / f"{number}.lock"))
            break
    folder = root / str(number)
    for file in folder.rglob("*.nb?"):
        if not file.stat().st_size:  # numba does not wait for the disk: the power may have failed
            file.unlink()
    for index in root.rglob("*.nbi"):
        place = folder.joinpath(*index.relative_to(root).parts[1:-1])
        if not (place / index.name).exists():
            place.mkdir(parents=True, exist_ok=True)
            for file in (*index.parent.glob(f"{index.stem}.*.nbc"), index):  # a killed process leaves no index
                shutil.copy(file, place)
    return folder


def _digest(function: Callable[..., object]) -> str:
    """A digest of numba's version and the source files of a function and of the compiled functions it may call."""
    found, waiting = {function}, [function]
    while waiting:
        names: dict[str, Any] = getattr(waiting.pop(), "__globals__", {})
        new = {value.py_func for value in names.values() if is_jitted(value)} - found
        found |= new
        waiting += new
    contents = [_content(path) for path in sorted({one.__code__.co_filename for one in found})]
    return hashlib.sha256("".join([numba.__version__, *contents]).encode()).hexdigest()[:16]


@cache
def _content(source: str) -> str:
    """A digest of a file's content, and its time, by which numba 0.60 tells whether an index is outdated."""
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() + str(os.stat(source).st_mtime_ns)

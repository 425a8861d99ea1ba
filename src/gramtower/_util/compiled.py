"""``compiled``: compiles a function with numba and keeps the machine code on disk for the next process.

Code is kept where numba would keep it, but in files of our own: numba numbers its files in an index, and two processes
that compile at the same time may give one number to two signatures. Here each file holds one function for one signature
and processor; its name is a digest of these, of the sources of the function and all that it calls, and of the versions.
Files are replaced atomically and begin with a digest of their content; damaged ones are rewritten. They are unpickled,
so the folder must be writable only by its user. If no file can be written, functions are compiled in each process, with
one warning. GRAMTOWER_CACHE=0 turns the cache off.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba import config, njit
from numba.core.serialize import dumps

from gramtower._util.files import replacing

CACHE = "GRAMTOWER_CACHE"  # "0" in the environment turns the cache off
_UNUSABLE = (  # of a cache: unwritable, or its files not what this numba wrote
    OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ImportError, RuntimeError,
    pickle.PickleError,
)  # fmt: skip
_THEN = "every process has to compile, which takes seconds; set NUMBA_CACHE_DIR to a writable folder"
_THEN_NOT = "every process has to compile, which takes seconds; use a version that gramtower was tested with"
_warned = False


def compiled(**options: Any) -> Callable[[Callable[..., object]], Any]:
    """Decorate a function with ``njit`` and a cache on disk (none for functions that are always inlined)."""

    def decorate(function: Callable[..., object]) -> Any:
        made = njit(**options)(function)
        if "inline" in options or config.DISABLE_JIT or os.environ.get(CACHE) == "0":  # type: ignore[attr-defined]
            return made
        try:
            _keep(made)
        except (RuntimeError, OSError):  # no place that can be written
            _warn_once("no folder for compiled code can be written")
        except (AttributeError, TypeError):  # the cache is not part of numba's public interface
            _warn_once("this version of numba keeps compiled code in another way", _THEN_NOT)
            return njit(**options)(function)
        return made

    return decorate


def _keep(made: Any) -> None:
    """Replace the cache of a compiled function by CodeFiles, in the folder that numba chooses."""
    made.enable_caching()
    cache = made._cache
    files = CodeFiles(cache.cache_path, cache._impl.filename_base, made.py_func)
    steps = {name: _tolerant(getattr(cache, name), cache.cache_path) for name in ("load_overload", "save_overload")}
    if not hasattr(cache, "_cache_file"):
        raise AttributeError("_cache_file")
    cache._cache_file = files
    for name, step in steps.items():
        setattr(cache, name, step)


def _tolerant(step: Callable[..., object], folder: str) -> Callable[..., object]:
    """Wrap a step of the cache: it does nothing if its files cannot be used."""

    def guarded(*arguments: object) -> object:
        try:
            return step(*arguments)
        except Damaged as error:
            _warn_once(f"of the compiled code in {folder}, {error} is not used", "it is compiled and written again")
        except _UNUSABLE as error:
            why = getattr(error, "strerror", None) or "a damaged file"
            _warn_once(f"compiled code cannot be kept in {folder} ({why})")
        return None

    return guarded


def _warn_once(reason: str, then: str = _THEN) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"{reason}: {then}", RuntimeWarning, stacklevel=2)


ENDING = ".gtc"
_DIGEST = 32  # bytes of SHA-256


class Damaged(ValueError):
    """A file differs from what was written."""


class CodeFiles:
    """The files of one function, which replace numba's index and numbered files."""

    def __init__(self, folder: str, base: str, function: Callable[..., object]) -> None:
        self.folder, self.base, self.function = Path(folder), base, function

    def path(self, key: object) -> Path:
        """The file for a signature and processor."""
        contents = [_content(source) for source in sources(self.function)]
        of = repr((key, contents, numba.__version__, platform.python_version()))
        return self.folder / f"{self.base}.{hashlib.sha256(of.encode()).hexdigest()[:32]}{ENDING}"

    def load(self, key: object) -> object:
        """Load the code for a key; None if there is none."""
        try:
            stored = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(stored[_DIGEST:]).digest() != stored[:_DIGEST]:
            raise Damaged("a damaged file")
        known, data = pickle.loads(stored[_DIGEST:])
        if known != key:
            raise Damaged("a file of another function")
        return data

    def save(self, key: object, data: object) -> None:
        content: bytes = dumps((key, data))  # type: ignore[no-untyped-call]
        with replacing(self.path(key)) as partial:
            partial.write_bytes(hashlib.sha256(content).digest() + content)

    def flush(self) -> None:
        """Do nothing: names depend on the content, so no file is outdated."""


def sources(function: Callable[..., object]) -> list[str]:
    """The source files of a function and of the compiled functions that it calls, directly or indirectly."""
    found, waiting = {function}, [function]
    while waiting:
        one: Any = waiting.pop()
        called = (getattr(one.__globals__.get(name), "py_func", None) for name in one.__code__.co_names)
        new = {other for other in called if other is not None} - found
        found |= new
        waiting += new
    return sorted({one.__code__.co_filename for one in found})


@lru_cache
def _content(source: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()

"""``compiled``: the one way this library compiles a function with numba, kept on disk for the next process if possible.

Machine code is kept where numba would keep it (beside the source file, or in the user's cache folder, or in
NUMBA_CACHE_DIR), in files of code_files.py. Where none of the folders can be written, or a file cannot be used (a full
disk, damage), functions are compiled in this process anew, and a warning says so once. GRAMTOWER_CACHE=0 keeps and
reads nothing. The code, and so every result, is the same either way.

Files of compiled code that another process may write, cut short or damage at any moment.

One file holds one function compiled for one signature and one processor. Its name is a digest of what it is of: the
signature, the processor, the content of the source files of the function and of all that it calls, which are compiled
into it, the versions of numba and Python. No index says which file is which, so that processes that compile at the same
time cannot mix them up: numba's own files are numbered, two processes may give one number to two signatures, and a
third then calls the wrong code. Files are written beside and renamed, and begin with a digest of their content; one
that was cut or changed is not used, and is written anew.

What is read is unpickled by numba's own rules: the folder must be one that only its user can write. Checked by
tests/test_compiled.py.
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
_THEN = "every process compiles anew, which takes seconds; set NUMBA_CACHE_DIR to a writable folder"
_THEN_NOT = "every process compiles anew, which takes seconds; use a version that gramtower was tested with"
_warned = False


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: ``njit`` with these options, and a cache on disk unless the function is only ever inlined."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = njit(**options)(function)
        if "inline" in options or config.DISABLE_JIT or os.environ.get(CACHE) == "0":  # type: ignore[attr-defined]
            return made
        try:
            _keep(made)
        except (RuntimeError, OSError):  # no place that can be written
            _warn_once("no folder for compiled code can be written")
        except (AttributeError, TypeError):  # what is replaced is not part of numba's public interface
            _warn_once("this version of numba keeps compiled code in another way", _THEN_NOT)
            return njit(**options)(function)
        return made

    return decorate


def _keep(made: Any) -> None:
    """Let a compiled function keep its code in files of code_files.py, in the folder that numba chooses."""
    made.enable_caching()
    cache = made._cache
    files = CodeFiles(cache.cache_path, cache._impl.filename_base, made.py_func)
    steps = {name: _tolerant(getattr(cache, name), cache.cache_path) for name in ("load_overload", "save_overload")}
    if not hasattr(cache, "_cache_file"):
        raise AttributeError("_cache_file")
    cache._cache_file = files
    for name, step in steps.items():
        setattr(cache, name, step)


def _tolerant(step: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """A step of the cache that does nothing where its files cannot be used."""

    def guarded(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except Damaged as error:
            _warn_once(f"of the compiled code in {folder}, {error} is not used", "it is compiled and written anew")
        except _UNUSABLE as error:
            why = getattr(error, "strerror", None) or "a damaged file"
            _warn_once(f"compiled code cannot be kept in {folder} ({why})")
        return None

    return guarded


def _warn_once(reason: str, then: str = _THEN) -> None:
    """Warn, once in a process."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"{reason}: {then}", RuntimeWarning, stacklevel=2)


ENDING = ".gtc"
_DIGEST = 32  # bytes of SHA-256


class Damaged(ValueError):
    """A file does not hold what was written."""


class CodeFiles:
    """The files of one function, in the place of numba's index and numbered files.

    Args:
        folder: where they are.
        base: how their names begin.
        function: the plain function that is compiled.
    """

    def __init__(self, folder: str, base: str, function: Callable[..., Any]) -> None:
        self.folder, self.base, self.function = Path(folder), base, function

    def path(self, key: Any) -> Path:
        """The file for a signature and processor."""
        contents = [_content(source) for source in sources(self.function)]
        of = repr((key, contents, numba.__version__, platform.python_version()))
        return self.folder / f"{self.base}.{hashlib.sha256(of.encode()).hexdigest()[:32]}{ENDING}"

    def load(self, key: Any) -> Any:
        """What was saved under a key, None if nothing was.

        Raises:
            Damaged: if the file is not as it was written.
        """
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

    def save(self, key: Any, data: Any) -> None:
        """Keep compiled code under a key."""
        content: bytes = dumps((key, data))  # type: ignore[no-untyped-call]
        with replacing(self.path(key)) as partial:
            partial.write_bytes(hashlib.sha256(content).digest() + content)

    def flush(self) -> None:
        """Nothing: names depend on content, so that nothing goes stale."""


def sources(function: Callable[..., Any]) -> list[str]:
    """The files of a function and of the compiled functions that it calls by a global name, and so on."""
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

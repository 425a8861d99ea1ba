"""``compiled``: the one way this library compiles a function with numba, kept on disk for the next process if possible.

Machine code is kept where numba would keep it (beside the source file, or in the user's cache folder, or in
NUMBA_CACHE_DIR), in files of code_files.py. Where none of the folders can be written, or a file cannot be used (a full
disk, damage), functions are compiled in this process anew, and a warning says so once. GRAMTOWER_CACHE=0 keeps and
reads nothing. The code, and so every result, is the same either way.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

from numba import config, njit

from gramtower._util.code_files import CodeFiles, Damaged

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

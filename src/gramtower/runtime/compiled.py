"""``compiled``: the one way this library compiles a function with numba, kept on disk for the next process if possible.

Numba keeps machine code beside the source file, or in the user's cache folder, or in NUMBA_CACHE_DIR. Where none of
them can be written, or writing fails later (a full disk), functions are compiled in every process anew, and a warning
says so once. Checked by tests/test_compiled.py.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

from numba import config, njit

_UNUSABLE = (OSError, EOFError, ValueError, pickle.UnpicklingError)  # of a cache: unwritable, or its files damaged
_warned = False


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: ``njit`` with these options, and a cache on disk unless the function is only ever inlined."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = njit(**options)(function)
        return made if "inline" in options else _with_cache(made)

    return decorate


def _with_cache(made: Any) -> Any:
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return made
    try:
        made.enable_caching()
    except (RuntimeError, OSError):  # no place that can be written
        _warn_once("no folder for compiled code can be written")
        return made
    cache = made._cache
    for name in ("load_overload", "save_overload"):
        setattr(cache, name, _tolerant(getattr(cache, name), cache.cache_path))
    return made


def _tolerant(step: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """A step of the cache that does nothing where its files cannot be used."""

    def guarded(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except _UNUSABLE as error:
            reason = getattr(error, "strerror", None) or "a damaged file"
            _warn_once(f"compiled code cannot be kept in {folder} ({reason})")
            return None

    return guarded


def _warn_once(reason: str) -> None:
    """Warn, once per process."""
    global _warned
    if not _warned:
        _warned = True
        text = f"{reason}: every process compiles anew, which takes seconds; set NUMBA_CACHE_DIR to a writable folder"
        warnings.warn(text, RuntimeWarning, stacklevel=2)

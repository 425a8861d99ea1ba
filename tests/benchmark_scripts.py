"""Scripts of benchmarks/ as modules, for their tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@contextmanager
def benchmark(name: str, folder: str = ".") -> Iterator[ModuleType]:
    """The script as a module; it and what it imports there are taken out of the way again afterwards."""
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER / folder))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = before
        for added in set(sys.modules) - known:
            if str(getattr(sys.modules[added], "__file__", "")).startswith(str(FOLDER)):
                del sys.modules[added]

"""Packages that only some uses need: imported where they are used, named with how to get them where they are absent.

Every message ends in the line to type, ``pip install "gramtower[EXTRA]"``.
"""

from __future__ import annotations

import importlib
from typing import Any

#: Package, by the name it is imported under → the extra of ours that brings it.
EXTRAS = {
    "polars": "io",
    "pyarrow": "io",
    "backports.zstd": "io",
    "cyclopts": "cli",
    "rich": "cli",
    "matplotlib": "plots",
    "triton": "gpu",
    "optuna": "tune",
    "fastapi": "serve",
    "pydantic": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "faiss": "ann",
    "hnswlib": "hnsw",
    "implicit": "benchmark",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
}


def install_line(package: str) -> str:
    """What to type to get a package; by its own name where no extra of ours brings it."""
    return f'pip install "gramtower[{EXTRAS[package]}]"' if package in EXTRAS else f"pip install {package}"


def missing(what: str, package: str, error: ImportError | None = None) -> ImportError:
    """The error for a use whose package could not be imported.

    Args:
        what: the use, the beginning of a sentence such as "tuning".
        package: what it needs, by the name it is imported under.
        error: how the import failed; names another package of the same extra if that is the one missing.
    """
    absent = error is None or isinstance(error, ModuleNotFoundError)
    root = "" if error is None else (error.name or "").split(".")[0]
    if absent and EXTRAS.get(root, "") == EXTRAS.get(package):
        package = root
    why = "is not installed" if absent else f"cannot be imported ({error})"
    return ImportError(f"{what} needs {package}, which {why}: {install_line(package)}", name=package)


def need(module: str, what: str, package: str | None = None) -> Any:
    """A module of an optional package.

    Args:
        module: its name.
        what: the use, for the error.
        package: what to install, where that is not the beginning of the module's name.

    Raises:
        ImportError: with the line to type, if it is not there.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(what, package or module.split(".")[0], error) from error

"""Optional packages: imported where they are used; a missing one is an error with the command that installs it."""

from __future__ import annotations

import importlib
from types import ModuleType

#: Import name of a package → the extra that installs it.
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
    """The command that installs a package, by extra if there is one."""
    return f'pip install "gramtower[{EXTRAS[package]}]"' if package in EXTRAS else f"pip install {package}"


def missing(what: str, package: str, error: ImportError | None = None) -> ImportError:
    """Make the error for a package that could not be imported."""
    absent = error is None or isinstance(error, ModuleNotFoundError)
    root = "" if error is None else (error.name or "").split(".")[0]
    if absent and EXTRAS.get(root, "") == EXTRAS.get(package):
        package = root
    why = "is not installed" if absent else f"cannot be imported ({error})"
    return ImportError(f"{what} needs {package}, which {why}: {install_line(package)}", name=package)


def need(module: str, what: str, package: str | None = None) -> ModuleType:
    """Import a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(what, package or module.split(".")[0], error) from error

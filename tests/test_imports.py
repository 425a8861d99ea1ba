"""Packages import only from packages above them, and ``import gramtower`` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gramtower

ROOT = Path(gramtower.__file__).parent
ORDER = (
    "distributed",
    "data",
    "kernels",
    "model",
    "objective",
    "optim",
    "training",
    "report",
)  # each may import from those before it
LAST = (
    "retrieval",
    "metrics",
    "estimator",
    "tuning",
    "compat",
    "cli",
    "demo",
    "__main__",
)  # and these from all of them, and each other
HEAVY = ("numba", "triton", "polars", "matplotlib", "rich", "cyclopts", "safetensors", "pandas", "optuna")
SHARED = ("_checks", "_files", "_schema", "_tensors")  # imported by all, and import nothing else of the library


def allowed(package):
    if package in LAST:
        return {*ORDER, *LAST}
    return set(ORDER[: ORDER.index(package) + 1])


def imported_packages(source):
    """First components below gramtower of everything imported anywhere in the source; "" for gramtower itself."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            root = node.module == "gramtower"
            names = [f"gramtower.{alias.name}" for alias in node.names] if root else [node.module]
        for name in names:
            if name.split(".")[0] == "gramtower":
                yield node.lineno, [*name.split("."), ""][1]


FILES = sorted(path for path in ROOT.rglob("*.py") if path.stem not in SHARED and path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_imports_only_from_above(path):
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert package in (*ORDER, *LAST), f"{package} has no place yet: put it into ORDER or LAST, and into the docs"
    wrong = [
        f"line {line}: gramtower.{found}"
        for line, found in imported_packages(path.read_text())
        if found not in SHARED and found not in allowed(package)
    ]
    assert not wrong


def test_the_rule_catches_what_it_should():
    lazy = "def f():\n    from gramtower.objective.problem import Problem\n"
    assert [found for _, found in imported_packages(lazy)] == ["objective"]
    assert "objective" not in allowed("model")
    assert list(imported_packages("import gramtower")) == [(1, "")]
    assert "" not in allowed("cli")
    assert list(imported_packages("from gramtower import _checks as check")) == [(1, "_checks")]


@pytest.mark.parametrize("name", SHARED)
def test_what_all_import_imports_nothing_else_of_the_library(name):
    assert {found for _, found in imported_packages((ROOT / f"{name}.py").read_text())} <= set(SHARED)


def test_importing_the_library_loads_nothing_that_only_some_uses_need():
    script = f"import sys, gramtower; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

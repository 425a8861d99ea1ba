"""Packages import only from packages above them, modules never in circles, and ``import gramtower`` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gramtower

ROOT = Path(gramtower.__file__).parent
ORDER = (
    "runtime",
    "distributed",
    "data",
    "engine.kernels",
    "engine.towers",
    "engine.objective",
    "optim",
    "training",
    "retrieval",
    "metrics",
    "pages",
    "estimator",
    "tuning",
    "two_tower",
    "evaluation",
    "compare",
    "benchmarking",
    "reports",
    "compat",
    "serving",
    "demo",
    "cli",
    "__main__",
)  # each may import from those before it, nothing from those after it
HEAVY = ("numba", "triton", "polars", "matplotlib", "rich", "cyclopts", "safetensors", "pandas", "optuna")
HEAVY += ("implicit", "threadpoolctl", "fastapi", "uvicorn", "pydantic", "faiss", "hnswlib")
SHARED = ("_checks", "_files", "_schema", "_tensors", "_toml", "_widths")  # imported by all, import nothing else


def package_of(module):
    """The place of a module in ORDER: its package, that of the engine with the second name."""
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "engine" else 1])


def imported_modules(source):
    """Modules below gramtower that are imported anywhere in the source, in functions too; "" for gramtower itself."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "gramtower":
                yield node.lineno, known(name.partition(".")[2])


def known(name):
    """The longest beginning of a dotted name that is a module."""
    parts = name.split(".")
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
PLACED = sorted(set(MODULES) - {*SHARED, "__init__", "engine"})


@pytest.mark.parametrize("module", PLACED)
def test_a_module_imports_only_from_above(module):
    package = package_of(module)
    assert package in ORDER, f"{package} has no place yet: put it into ORDER, and into the docs"
    allowed = {*SHARED, *ORDER[: ORDER.index(package) + 1]}
    found = imported_modules(MODULES[module].read_text())
    assert not [f"line {line}: gramtower.{name}" for line, name in found if package_of(name) not in allowed]


def test_no_module_imports_itself_through_others():
    graph = {name: {x for _, x in imported_modules(path.read_text())} - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_the_rule_catches_what_it_should():
    lazy = "def f():\n    from gramtower.engine.objective.problem import Problem\n"
    assert list(imported_modules(lazy)) == [(2, "engine.objective.problem")]
    assert package_of("engine.objective.problem") == "engine.objective"
    assert list(imported_modules("import gramtower")) == [(1, "")]
    assert list(imported_modules("from gramtower import _checks as check")) == [(1, "_checks")]
    assert list(imported_modules("from gramtower.engine import kernels")) == [(1, "engine.kernels")]


@pytest.mark.parametrize("name", SHARED)
def test_what_all_import_imports_nothing_else_of_the_library(name):
    assert {found for _, found in imported_modules(MODULES[name].read_text())} <= set(SHARED)


def test_importing_the_library_loads_nothing_that_only_some_uses_need():
    script = f"import sys, gramtower; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

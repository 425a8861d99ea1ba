"""The scripts of benchmarks/: what they import exists, and the solvers' table is computed from the runs as it says."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def solvers():
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("bench_solvers")
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def test_what_the_scripts_import_from_the_library_exists():
    found = 0
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("gramtower"):
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")
                    found += 1
    assert found > 50


def test_ratios_are_default_over_the_best_of_the_others(solvers):
    def made(*curve):
        return {"curve": [(*point, 10 * point[0]) for point in curve], "seconds": curve[-1][0]}

    runs = {
        "reference": made((0.0, 300.0), (90.0, 100.0)),
        "newton-kron": made((0.0, 300.0), (1.0, 109.0), (2.0, 100.9), (3.0, 100.05)),
        "lbfgs": made((0.0, 300.0), (0.5, 200.0), (4.0, 100.5)),
        "gd": made((0.0, 300.0), (2.0, 110.0)),
    }
    found = solvers.summary(runs)
    assert found["best"] == 100.0
    assert found["seconds_to"]["gd"] == {"0.1": 2.0, "0.01": None, "0.001": None}
    assert found["passes_to"]["lbfgs"] == {"0.1": 40.0, "0.01": 40.0, "0.001": None}
    assert found["ratio"]["0.1"] == {"ratio": 0.5, "rival": "gd"}
    assert found["ratio"]["0.01"] == {"ratio": 0.5, "rival": "lbfgs"}
    assert found["ratio"]["0.001"] == {"ratio": 0.75, "rival": None}  # at most: no other method got there in 4 s
    assert found["falling"] == 2.0  # the reference had 300 until the last quarter of its run, in which it found 100
    kept = solvers.without_curves({"runs": runs, "dim": 2})
    assert kept == {
        "dim": 2,
        "runs": {k: {"seconds": r["seconds"], "lowest": r["curve"][-1][1]} for k, r in runs.items()},
    }

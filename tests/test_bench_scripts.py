"""The scripts of benchmarks/: what they import exists, and the solvers' table is computed from the runs as it says."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

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


def test_generated_pairs_are_as_many_as_asked_for_and_different_for_any_number_of_threads(solvers):
    grouped_pairs = importlib.import_module("common").grouped_pairs
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(grouped_pairs(70_000, 900, 500_000, groups=8))
    finally:
        torch.set_num_threads(before)
    one, two = found
    assert (one != two).nnz == 0
    assert (one.shape, one.nnz) == ((70_000, 900), 500_000)
    for row in (0, 65_535, 65_536, 69_999):
        columns = one[row].indices
        assert (np.diff(columns) > 0).all()
        assert 1 <= len(columns) <= 225
    assert one.indices.min() >= 0
    popular = np.sort(one.getnnz(0))[::-1]
    assert popular[0] > 5 * popular[450] > 0  # skewed
    shared = (one[:4000] @ one[:4000].T).toarray()  # rows of a group share more columns than others
    same = np.equal.outer(np.arange(4000) % 8, np.arange(4000) % 8) & ~np.eye(4000, dtype=bool)
    assert shared[same].mean() > 1.5 * shared[~same & ~np.eye(4000, dtype=bool)].mean()

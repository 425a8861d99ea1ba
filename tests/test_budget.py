"""Budgets of the source tree: its size, unique file names, ``Any``, and the files that one row of data passes through.

A bound may only be lowered. Raise one only together with the feature that needs it, and say so in the commit.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "gramtower"
MODULES = sorted(SOURCE.rglob("*.py"))

FILES = 168
LINES = 45_653
ANY = 199
SHARED_NAMES = 0  # file names, except __init__.py and __main__.py, that several packages have
BENCHMARK_FILES, BENCHMARK_BYTES = 50, 1_000_000
ENTERED_BY_THE_COMMAND = 57  # one or two more on a busy machine, where a fit takes fewer threads
ENTERED_BY_THE_ESTIMATOR = 47

TRACE = """
import sys, threading

seen, found = set(), []


def inside_an_import(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def profile(frame, event, argument):
    code = frame.f_code
    if event != "call" or found or "/src/gramtower/" not in code.co_filename:
        return
    if code.co_name == "compute" and code.co_filename.endswith("objective/gauss_newton.py"):
        found.append(len(seen) + 1)
    if code.co_filename not in seen and code.co_flags & 1 and not inside_an_import(frame):
        seen.add(code.co_filename)


def traced(function):
    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    print("\\n".join(sorted(name.split("/src/gramtower/")[1] for name in seen)), file=sys.stderr)
    print("files", *found)
"""
COMMAND = """
from gramtower.__main__ import main

def fit():
    sys.argv = ["gramtower", "fit", "ratings.csv", "--left", "user", "--right", "item", "--hidden", "16",
                "--max-iterations", "1", "--out", "run"]
    try:
        main()
    except SystemExit:
        pass

traced(fit)
"""
ESTIMATOR = """
import polars as pl
import gramtower as gt

data = pl.read_csv("ratings.csv")
traced(lambda: gt.TwoTower(hidden=(16,), max_iterations=1).fit(data, left="user", right="item"))
"""


def test_the_source_is_small():
    lines = sum(len(path.read_text().splitlines()) for path in MODULES)
    assert len(MODULES) <= FILES
    assert lines <= LINES


def test_file_names_are_unique():
    own = (path for path in MODULES if "compat" not in path.parts)  # other libraries prescribe the names in there
    names = Counter(path.name for path in own if not path.name.startswith("__"))
    shared = sorted(name for name, count in names.items() if count > 1)
    assert len(shared) <= SHARED_NAMES, shared


def any_of_signature(node):
    """How many times the annotations of a function say Any."""
    if not isinstance(node, ast.FunctionDef):
        return 0
    taken = [x.annotation for x in ast.walk(node.args) if isinstance(x, ast.arg)]
    parts = [part for annotation in (*taken, node.returns) if annotation is not None for part in ast.walk(annotation)]
    return sum(isinstance(part, ast.Name) and part.id == "Any" for part in parts)


def test_few_signatures_say_any():
    found = {
        str(path.relative_to(SOURCE)): sum(map(any_of_signature, ast.walk(ast.parse(path.read_text()))))
        for path in MODULES
    }
    assert sum(found.values()) <= ANY, sorted(found.items(), key=lambda item: -item[1])[:10]


def test_benchmarks_are_few_and_small():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    if not files:
        pytest.skip("needs the repository: a copy does not say which files belong to it")
    assert len(files) <= BENCHMARK_FILES
    assert sum(path.stat().st_size for path in files) <= BENCHMARK_BYTES


@pytest.mark.parametrize(
    ("script", "bound"),
    [(COMMAND, ENTERED_BY_THE_COMMAND), (ESTIMATOR, ENTERED_BY_THE_ESTIMATOR)],
    ids=["gramtower fit ratings.csv", "TwoTower().fit(data)"],
)
def test_a_row_passes_few_files_before_the_first_gauss_newton_product(script, bound, tmp_path):
    pytest.importorskip("polars", reason="tables are read by polars")
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    rows = [f"{user},{(7 * user + step * step) % 90}" for user in range(200) for step in range(9)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", TRACE + script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert re.search(r"files \d+$", done.stdout), done.stderr
    assert int(done.stdout.split()[-1]) <= bound, done.stderr

"""Packages that only some uses need: each absence is told with the one line that mends it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import wheel

import gramtower
from gramtower._util.checks import EXTRAS, install_line, missing, need

SOURCE = Path(gramtower.__file__).parent
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
NAMES = {
    "faiss-cpu": "faiss",
    "prometheus-client": "prometheus_client",
}  # import names
UNUSED = {"playwright"}  # by the library: tests of pages need it
GUARDED = {
    "cli": {"cyclopts", "rich"},  # by cli.main
    "serving": {"prometheus_client", "pydantic", "starlette", "uvicorn"},  # by cli.serve
    "experiments/tuning/study.py": {"optuna"},  # by open_study, which makes what the rest works on
    "engine/kernels/programs.py": {"triton"},  # by select, which warns
    "demo.py": {"matplotlib"},  # says how to get the picture
}
#: package → (what is run without it, the beginning of what is said)
USES = {
    "polars": ("gt.Interactions.from_frame({'u': [1], 'i': [2]}, 'u', 'i')", "reading tables needs polars"),
    "pyarrow": ("gt.Interactions.from_parquet(sys.executable, 'u', 'i')", "reading Parquet files needs pyarrow"),
    "optuna": ("gt.TwoTower().tune(pairs)", "tuning needs optuna"),
    "rich": ("gt.TwoTower(max_iterations=1).fit(pairs, callbacks=[bar()])", "this callback needs rich"),
    "matplotlib": ("draw_comparison(Comparison)", "drawing needs matplotlib"),
    "faiss": ("index._faiss()", "an index needs faiss"),
    "hnswlib": ("index._hnswlib()", "an index of kind hnsw needs hnswlib"),
    "obstore": ("gt.load('gs://lake/model')", "reading and writing URLs needs obstore"),
    "boto3": ("need('boto3')", "reading and writing URLs needs boto3"),
}
SCRIPT = """
import json, sys
uses, said = json.loads(sys.argv[1]), {}
sys.modules |= dict.fromkeys(uses)
import numpy as np, gramtower as gt
from gramtower._util.remote import _need as need
from gramtower.training.callbacks import ProgressBar as bar
from gramtower.serving import ann_index as index
from gramtower.experiments.comparison_page import draw_comparison
from gramtower.experiments.comparison import Comparison
pairs = gt.Interactions.from_arrays(np.arange(40) % 8, np.arange(40) % 7)
for package, use in uses.items():
    try:
        exec(use)
    except ImportError as error:
        said[package] = str(error)
print(json.dumps(said))
"""


def extras():
    content = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for extra, needs in content.items():
        if extra in ("dev", "docs", "release"):
            continue
        for text in needs:
            name = re.match(r"[A-Za-z0-9_.-]+", text)[0]
            if name != "gramtower":
                yield NAMES.get(name, name), extra


def test_the_extras_named_are_those_of_the_project():
    assert dict(item for item in extras() if item[0] not in UNUSED) == EXTRAS


def test_without_a_package_the_line_that_installs_it_is_told():
    uses = json.dumps({package: use for package, (use, _) in USES.items()})
    done = subprocess.run([sys.executable, "-c", SCRIPT, uses], capture_output=True, text=True, check=True)
    expected = {
        package: f"{begin}, which is not installed: {install_line(package)}" for package, (_, begin) in USES.items()
    }
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize(
    ("package", "command", "begin"),
    [
        ("cyclopts", ["info"], "the command line needs cyclopts"),
        ("rich", ["info"], "the command line needs rich"),
        ("uvicorn", ["serve", "{run}"], "serve needs uvicorn"),
    ],
)
def test_a_command_without_its_package_fails_with_one_line(package, command, begin, tmp_path):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pairs = gramtower.Interactions.from_arrays([0, 1, 2, 3] * 3, [0, 1, 2] * 4)
    gramtower.TwoTower(dim=2, max_iterations=1, device="cpu").fit(pairs).save(tmp_path / "model.gramtower")
    given = [part.format(run=tmp_path / "model.gramtower") for part in command]
    script = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = {given!r}; from gramtower.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    line = f"error: {begin}, which is not installed: {install_line(package)}"
    assert (done.returncode, done.stderr.strip()) == (1, line)


def test_a_package_that_is_there_but_broken_says_why(tmp_path, monkeypatch):
    (tmp_path / "hnswlib.py").write_text("raise ImportError('wrong ABI')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hnswlib", raising=False)
    expected = 'an index needs hnswlib, which cannot be imported (wrong ABI): pip install "gramtower[hnsw]"'
    with pytest.raises(ImportError, match=rf"^{re.escape(expected)}$"):
        need("hnswlib", "an index")


def test_the_package_that_is_missing_is_named_and_others_by_their_own_names():
    absent = ModuleNotFoundError("No module named 'pydantic'", name="pydantic.v1")
    assert "needs pydantic, which is not installed" in str(missing("serve", "starlette", absent))
    other = ModuleNotFoundError("No module named 'anyio'", name="anyio")
    assert str(missing("serve", "starlette", other)).endswith('pip install "gramtower[serve]"')
    assert install_line("mlflow") == "pip install mlflow"


def runtime_imports(tree):
    """Top packages imported when the code runs, not those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        yield from runtime_imports(node)


def test_no_module_imports_an_optional_package_past_the_helper():
    known = {*EXTRAS, "mlflow", "tensorboard", "wandb", "pandas", "sklearn", "IPython", "implicit"}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        allowed = GUARDED.get(name, set()) | GUARDED.get(name.split("/")[0], set())
        assert set(runtime_imports(ast.parse(path.read_text()))) & known <= allowed, name


@pytest.mark.parametrize("extra", ["plots", "ann"])
def test_the_program_that_tries_an_extra_of_the_wheel_runs_where_it_is_installed(extra):
    exec(wheel.EXTRAS[extra][0], {})

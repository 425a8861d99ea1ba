"""Packages import only from packages above them, modules never in circles, and ``import gramtower`` stays light."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gramtower
from gramtower import _deprecated

ROOT = Path(gramtower.__file__).parent
ORDER = (
    ("_util", "_deprecated"),
    ("distributed", "data"),
    ("engine.kernels",),
    ("engine.towers",),
    ("engine.objective",),
    ("optim",),
    ("training",),
    ("retrieval", "metrics"),
    ("model",),
    ("experiments", "compat", "serving", "launch"),
    ("_public", "demo"),
    ("cli", "__main__"),
)  # each package may import from its own line and from those above it
LAZY = {  # imports inside of functions, for methods of the estimator that start a tool
    "model.two_tower": {"experiments"},
}
HEAVY = ("numba", "triton", "polars", "matplotlib", "rich", "cyclopts", "safetensors", "pandas", "optuna")
HEAVY += ("implicit", "threadpoolctl", "starlette", "uvicorn", "pydantic", "faiss", "hnswlib", "onnx", "onnxscript")
HEAVY += ("prometheus_client", "obstore", "boto3", "botocore", "pyspark", "ray", "pyarrow")
HEAVY += ("model2vec", "tokenizers", "sentence_transformers", "transformers", "huggingface_hub")


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
LEVELS = {package: level for level, packages in enumerate(ORDER) for package in packages}


def test_a_module_imports_only_from_above():
    wrong = []
    for module, path in MODULES.items():
        if module in ("__init__", "engine"):
            continue
        package = package_of(module)
        assert package in LEVELS, f"{package} has no place in ORDER"
        for line, name in imported_modules(path.read_text()):
            found = package_of(name)
            if name and LEVELS[found] > LEVELS[package] and found not in LAZY.get(module, ()):
                wrong.append(f"{path}:{line} imports gramtower.{name}")
    assert not wrong


def test_no_module_imports_itself_through_others():
    graph = {name: {x for _, x in imported_modules(path.read_text())} - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_the_rule_catches_what_it_should():
    lazy = "def f():\n    from gramtower.engine.objective.problem import Problem\n"
    assert list(imported_modules(lazy)) == [(2, "engine.objective.problem")]
    assert package_of("engine.objective.problem") == "engine.objective"
    assert list(imported_modules("import gramtower")) == [(1, "")]
    assert list(imported_modules("from gramtower._util import checks as check")) == [(1, "_util.checks")]
    assert list(imported_modules("from gramtower.engine import kernels")) == [(1, "engine.kernels")]


def test_importing_the_library_loads_nothing_that_only_some_uses_need():
    script = f"import sys, gramtower; gramtower.TwoTower; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["--help", "--version", "", "nonsense", "--no-such-flag"])
def test_the_list_of_commands_and_errors_of_usage_do_without_torch(command):
    pytest.importorskip("cyclopts")
    script = "import sys; from gramtower.cli.program import run; code = run(sys.argv[1:])"
    script += "; print('loaded:', [name for name in ('torch', 'scipy', 'numba', 'polars') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script, *command.split()], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["loaded: []"], done.stdout + done.stderr


def test_the_program_itself_does_without_torch():
    pytest.importorskip("cyclopts")
    command = [sys.executable, "-X", "importtime", "-m", "gramtower", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "gramtower.cli.program" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in ("torch", "scipy")]


def test_every_command_is_listed_by_the_first_line_of_its_help():
    pytest.importorskip("cyclopts")
    from gramtower.cli.program import COMMANDS

    for name, (module, line) in COMMANDS.items():
        function = getattr(importlib.import_module(f"gramtower.cli.{module}"), name.replace("-", "_"))
        assert function.__doc__.splitlines()[0] == line


def test_every_public_name_is_listed_and_imported_from_its_module():
    places = {(node.module, node.names[0].name) for node in ast.parse((ROOT / "_public.py").read_text()).body
              if isinstance(node, ast.ImportFrom)}  # fmt: skip
    names = {name for _, name in places}
    assert set(gramtower.__all__) == names <= set(dir(gramtower))
    for module, name in places:
        assert getattr(gramtower, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", _deprecated.NAMES)
def test_old_spellings_still_work_with_a_warning(name):
    new = importlib.import_module(f"gramtower.{_deprecated.NAMES[name]}")
    with pytest.warns(DeprecationWarning, match=f"{new.__name__}.{name}"):
        assert getattr(gramtower, name) is getattr(new, name)


def test_packages_are_attributes_without_an_import_of_their_own():
    script = "import gramtower as gt; print(gt.data.splits.__name__, gt.retrieval.topk.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gramtower.data.splits", "gramtower.retrieval.topk"]


def test_old_module_names_still_work_with_a_warning():
    script = (
        "import importlib, sys; [print(importlib.import_module(f'gramtower.{old}').__name__) for old in sys.argv[1:]]"
    )
    names = gramtower._deprecated.MODULES
    command = [sys.executable, "-W", "always", "-c", script, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"gramtower.{new}" for new in names.values()]
    assert [old for old in names if f"DeprecationWarning: gramtower.{old} has moved" not in done.stderr] == []


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'gramtower'.*'TwoTowers'"):
        _ = gramtower.TwoTowers

"""The documentation tells the truth: its Python runs, its files exist, and it leaves out no name, option or dependency.

Cells of the tutorials are executed by `make docs`; here they are only compiled.
"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import engines
import pytest
import scipy.sparse
import torch

import gramtower
from gramtower.metrics import KNOWN

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
TUTORIALS = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.name != "index.md")
PUBLIC = [name for name in gramtower.__all__ if name not in ("splits", "text")]  # modules
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"^```\{code-cell\} python\n(?::[^\n]*\n)*(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!-- no-run: .+ -->\n\Z")
NEEDS = re.compile(r"<!-- needs: (.+) -->\n```python\n")


def without_missing(text):
    """The text without the blocks marked <!-- needs: package --> just above, where that is not installed; and these."""
    absent = {name for name in NEEDS.findall(text) if not installed(name)}
    for name in absent:
        text = text.replace(f"<!-- needs: {name} -->\n", f"<!-- no-run: needs {name} -->\n")
    return text, absent


def installed(name):
    """Whether a package, or all of a module such as ray.train, can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def python_blocks(text):
    """Line number and source of each ```python block, without those marked <!-- no-run: reason --> just above."""
    return [
        (text.count("\n", 0, found.start(1)), found[1])
        for found in BLOCK.finditer(text)
        if not SKIP.search(text[: found.start()])
    ]


def page_with_marks(page):
    """A page as a parameter, with the warnings that the engines on it give left out."""
    quiet = engines.QUIET if NEEDS.search(page.read_text()) else []
    marks = [pytest.mark.filterwarnings(line) for line in quiet]
    return pytest.param(page, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", [page_with_marks(page) for page in PAGES])
def test_python_runs(page, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    if page.name == "object-storage.md":
        request.getfixturevalue("s3")
    names = {"__name__": "__main__"}
    text, absent = without_missing(page.read_text())
    with engines.environment() if NEEDS.search(text) else nullcontext():
        for line, source in python_blocks(text):
            exec(compile("\n" * line + source, str(page), "exec"), names)  # so that errors show the page's own line
    if absent:
        pytest.skip(f"blocks that need {', '.join(sorted(absent))} were left out, as it is not installed")
    shown = re.search(r"^<!-- output -->\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown is None or shown[1] == capsys.readouterr().out


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_cells_of_tutorials_compile_and_the_page_is_listed(page):
    text = page.read_text()
    cells = [found[1] for found in CELL.finditer(text)]
    for source in cells:
        compile(source, str(page), "exec")
    assert text.count("```{code-cell}") == len(cells) > 3
    assert f"\n{page.stem}\n" in (DOCS / "tutorials/index.md").read_text()


def test_every_page_has_one_title_of_its_own():
    """A second title in a page makes two entries of it in the navigation; two pages of one title look like one."""
    titles = {}
    for page in PAGES[1:]:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found = re.findall(r"^# (.+)$", prose, re.MULTILINE)
        assert len(found) == (0 if "{include}" in page.read_text() else 1), page.name
        titles |= {title: [*titles.get(title, []), page.name] for title in found}
    assert [names for names in titles.values() if len(names) > 1] == []


def test_no_page_of_the_site_scrolls_sideways(too_wide):
    site = DOCS / "_build/check"
    pages = [site / f"{name}.html" for name in ("index", "benchmark", "evidence/results", "reference/command-line")]
    if not all(page.exists() for page in pages):
        pytest.skip("needs the site: make docs-check")
    assert too_wide(*pages) == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/get-started.md"])
def test_installation_starts_from_a_clone(page):
    """No index has the package: the first line to type must not ask one for it."""
    lines = re.findall(r"pip install (.+)", (ROOT / page).read_text())
    assert lines[0].startswith('-c constraints.txt ".[')


def test_every_public_name_is_in_the_reference_and_opens_with_a_sentence():
    text = (DOCS / "reference/python.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function):: gramtower\.([\w.]+)$", text, re.MULTILINE)
    optim = [f"optim.{name}" for name, value in vars(gramtower.optim).items() if inspect.isclass(value)]
    assert sorted(listed) == sorted([*PUBLIC, *optim])
    members = [
        (f"{name}.{part}", value.fget if isinstance(value, property) else getattr(value, "__func__", value))
        for name in PUBLIC
        if inspect.isclass(getattr(gramtower, name))
        for part, value in vars(getattr(gramtower, name)).items()
        if part[0] != "_" and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]
    for name, value in [*((name, getattr(gramtower, name)) for name in PUBLIC), *members]:
        first = (inspect.getdoc(value) or "").split("\n\n")[0]
        assert re.search(r"\w.*[.:…]$", first, re.DOTALL), name


def test_examples_of_docstrings_give_what_they_say():
    given = {"gt": gramtower, "sp": scipy.sparse, "torch": torch}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for name in sorted(PUBLIC):
        for example in finder.find(getattr(gramtower, name), name, globs=dict(given)):
            runner.run(example)
    assert runner.failures == 0
    assert runner.tries > 15


def test_modules_of_the_reference_hold_the_names_that_it_lists():
    module, text = "", (DOCS / "reference/modules.md").read_text()
    for kind, name in re.findall(r"^\.\. (currentmodule|autoclass|autofunction):: ([\w.]+)$", text, re.MULTILINE):
        if kind == "currentmodule":
            module = name
            continue
        place, _, last = (name if name.startswith("gramtower.") else f"{module}.{name}").rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(place), last)), name


def test_the_page_of_the_command_line_has_every_option():
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli import program as cli

    app = cli.make_app(*cli.COMMANDS)
    found = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    conf = importlib.util.module_from_spec(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        patch.setenv("PYTHONPATH", "")
        found.loader.exec_module(conf)
    page = [""]
    conf._commands(None, "reference/command-line", page)
    for command in app.resolved_commands():
        if command.startswith("-"):
            continue
        start = page[0].index(f"## gramtower {command}\n")
        section = page[0][start : page[0].find("\n## ", start + 1)]
        for argument in app[command].assemble_argument_collection():
            if argument.show:
                assert argument.names[0] in section, (command, argument.names)


def test_every_metric_has_its_formula():
    text = (DOCS / "metrics.md").read_text()
    assert [name for name in KNOWN if f"`{name}" not in text] == []


def test_blocks_are_found_and_skipped_only_when_marked():
    marked = "<!-- no-run: needs a GPU -->\n```python\ny = 2\n```\n"
    text = f"a\n```python\nx = 1\n```\n{marked}```\nz\n```\n```python\nw = 3\n```\n"
    assert python_blocks(text) == [(2, "x = 1\n"), (12, "w = 3\n")]


def test_links_between_pages_lead_somewhere():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_every_dependency_has_its_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["build-system"]["requires"], project["project"]["dependencies"]]
    groups += project["project"]["optional-dependencies"].values()
    wanted = {re.match(r"[\w.-]+", need)[0] for group in groups for need in group} - {"gramtower"}
    rows = re.findall(r"^\|(.+)\|$", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
    listed = {cell.strip() for row in rows for cell in row.split("|")[:2]}
    assert wanted <= listed


def test_the_oldest_versions_that_are_run_are_the_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [
        *project["dependencies"],
        *(need for name in ("io", "cli", "plots", "tune", "serve", "ann", "cloud", "dev") for need in extras[name]),
    ]
    bounds = {m[1]: m[2] for need in needs if (m := re.match(r"([\w-]+)>=([\d.]+)", need))}
    run = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    for name in bounds.keys() - {"ruff", "mypy"}:  # which test-oldest does not run
        assert f"{run[name]}.0".startswith(f"{bounds[name]}."), name

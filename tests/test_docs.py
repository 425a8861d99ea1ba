"""The documentation tells the truth: its Python runs, its files exist, its list of dependencies is complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!-- no-run: .+ -->\n\Z")


def python_blocks(text):
    """Line number and source of each ```python block, without those marked <!-- no-run: reason --> just above."""
    return [
        (text.count("\n", 0, found.start(1)), found[1])
        for found in BLOCK.finditer(text)
        if not SKIP.search(text[: found.start()])
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for line, source in python_blocks(page.read_text()):
        exec(compile("\n" * line + source, str(page), "exec"), names)  # so that errors show the page's own line


def test_blocks_are_found_and_skipped_only_when_marked():
    marked = "<!-- no-run: needs a GPU -->\n```python\ny = 2\n```\n"
    text = f"a\n```python\nx = 1\n```\n{marked}```\nz\n```\n```python\nw = 3\n```\n"
    assert python_blocks(text) == [(2, "x = 1\n"), (12, "w = 3\n")]


def test_links_between_pages_lead_somewhere():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_files_named_in_the_architecture_exist():
    tree = re.search(r"```\n(src/gramtower/\n.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)[1]
    folders, missing, named = [], [], 0
    for line in tree.splitlines():
        name = line.split()[0]
        folders = folders[: (len(line) - len(line.lstrip())) // 2]
        path = ROOT.joinpath(*folders, name)
        missing += [] if path.exists() else [str(path)]
        folders += [name] if name.endswith("/") else []
        named += 1
    assert missing == []
    assert named > 20


def test_every_dependency_has_its_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["build-system"]["requires"], project["project"]["dependencies"]]
    groups += project["project"]["optional-dependencies"].values()
    wanted = {re.match(r"[\w-]+", need)[0] for group in groups for need in group} - {"gramtower"}
    rows = re.findall(r"^\|(.+)\|$", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
    listed = {cell.strip() for row in rows for cell in row.split("|")[:2]}
    assert wanted <= listed


def test_the_oldest_versions_that_are_run_are_the_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [
        *project["dependencies"],
        *(need for name in ("io", "cli", "plots", "tune", "serve", "ann", "dev") for need in extras[name]),
    ]
    bounds = {m[1]: m[2] for need in needs if (m := re.match(r"([\w-]+)>=([\d.]+)", need))}
    run = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    for name in bounds.keys() - {"ruff", "mypy"}:  # which test-oldest does not run
        assert f"{run[name]}.0".startswith(f"{bounds[name]}."), name

"""What a release promises: one version, a dated changelog, types in the package, formats as documented."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pytest

import gramtower as gt
from gramtower.data import tables
from gramtower.model import model_file
from gramtower.serving import ann_index as index
from gramtower.training import checkpoint

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = Path(__file__).parent / "files"


def test_the_version_is_written_once():
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+?)"', source, re.MULTILINE) == [gt.__version__]


def test_the_changelog_has_a_dated_section_for_this_version_and_each_kind_of_change_once():
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    heads = [section.splitlines()[0] for section in sections]
    assert heads[0] == "[Unreleased]"
    dates = [date.fromisoformat(re.fullmatch(r"\[\d+\.\d+\.\d+\] - (.+)", head)[1]) for head in heads[1:]]
    assert heads[1].startswith(f"[{gt.__version__}]")
    assert dates == sorted(dates, reverse=True)
    for section in sections:
        kinds = re.findall(r"^### (.+)", section, re.MULTILINE)
        assert len(kinds) == len(set(kinds))


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "src/gramtower/py.typed").read_bytes() == b""
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_every_python_that_is_promised_is_tested_where_it_is_installed():
    listed = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    tried = re.search(r"^PYTHONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert tried == listed
    assert PROJECT["project"]["requires-python"] == f">={listed[0]}"


def test_hooks_run_what_make_runs():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    made = re.findall(
        r"^\t\$\(BIN\)/((?:ruff|mypy).*?)(?: --check)?(?: \.)?$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert made == ["ruff check", "ruff format", "mypy"]
    assert [entry.removesuffix(" --force-exclude") for entry in re.findall(r"entry: \.venv/bin/(.+)", text)] == made


def test_the_page_of_formats_has_the_versions_of_the_code():
    rows = re.findall(
        r"^\|.+?\|.+?\| (`gramtower.+?`) \| (\d+) \|$", (ROOT / "docs/formats.md").read_text(), re.MULTILINE
    )
    told = {name: int(version) for names, version in rows for name in re.findall(r"`(.+?)`", names)}
    kinds = [model_file.KIND, checkpoint._KIND, index._FORMAT, (tables._FORMAT, tables._VERSION)]
    assert told == dict(kinds)


@pytest.mark.parametrize("path", sorted(FILES.glob("model-*.gramtower")), ids=lambda path: path.name)
def test_models_of_every_version_that_is_promised_are_read(path):
    model = gt.load(path)
    ids, scores = model.recommend(["ann"], k=2)
    assert ids.tolist() == [["cheese", "apples"]]
    assert scores[0, 0] == pytest.approx(float(model.embed(["ann"])[0] @ model.embed(["cheese"], side="right")[0]))
    assert model.embed(side="left").shape == (4, 2)
    assert [record.iteration for record in model.history_] == list(range(len(model.history_)))


def test_a_model_of_the_present_format_is_among_the_files():
    assert (FILES / f"model-{model_file.KIND[1]}.gramtower").is_file(), "python tests/test_release.py writes it"


def write_model():
    """The model of the files, for a new format; those of released formats stay as they are."""
    bought = {"ann": ["bread", "milk"], "bob": ["bread", "milk", "cheese"], "cy": ["milk", "cheese"], "di": ["apples"]}
    left = [who for who, items in bought.items() for _ in items]
    pairs = gt.Interactions.from_arrays(left, [item for items in bought.values() for item in items])
    model = gt.TwoTower(dim=2, hidden=(), omega=0.2, max_iterations=8, device="cpu").fit(pairs)
    model.save(FILES / f"model-{model_file.KIND[1]}.gramtower")
    print(model.recommend(["ann"], k=2), np.shape(model.embed()))


if __name__ == "__main__":
    write_model()

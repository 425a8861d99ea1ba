"""The demo: bundled pairs, what is held out, the lists for tools, the comparison, the command."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="tools become features with polars")

from gramtower import demo
from gramtower.cli.program import run
from gramtower.data.datasets import packages, thesaurus
from gramtower.data.interactions import Interactions
from gramtower.data.splits import held_out
from gramtower.model.two_tower import load

KINDS, STYLES = ("grunt", "react", "karma", "mongo"), ("lint", "test")


def small():
    """Each package has a tool for its kind and one for its style, and needs what goes with the two together."""
    pairs = [
        (f"{kind}-{style}-{place}", dependency)
        for kind in KINDS
        for style in STYLES
        for place in range(15)
        for dependency in (kind, style, f"{kind}-{style}", f"{kind}-core")[: 4 - place % 2]
    ]
    return Interactions.from_arrays(*zip(*pairs, strict=True))


def tiny(patch):
    patch.setattr(demo, "packages", small)
    patch.setattr(demo, "TOOLS", len(KINDS) + len(STYLES))
    patch.setattr(demo, "SHOWN", 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        tiny(patch)
        return demo.run(out=tmp_path_factory.mktemp("demo"), verbose=False, uses=[["karma", "lint"], ["test", "mongo"]])


def test_what_comes_with_the_library():
    npm, words = packages(), thesaurus()
    assert (npm.shape, len(npm)) == ((15_722, 661), 139_933)
    assert (words.shape, len(words)) == ((8_655, 8_655), 674_945)
    assert np.diff(npm.matrix.indptr).min() >= 3
    assert np.bincount(npm.matrix.indices).min() >= 30
    notice = files("gramtower.data").joinpath("bundled", "npm-core.LICENSE.txt").read_text(encoding="utf-8")
    assert "The MIT License" in notice
    assert "Copyright (c)" in notice


def test_the_tools_describe_and_the_rest_is_to_be_found(monkeypatch):
    tiny(monkeypatch)
    pairs, tools = demo.described(small())
    assert set(pairs.right_ids) == {f"{kind}-{other}" for kind in KINDS for other in (*STYLES, "core")}
    assert {name: set(its) for name, its in tools.items()} == {
        name: set(name.split("-")[:2]) for name in pairs.left_ids
    }
    assert len(pairs) == len(small()) - 2 * len(pairs.left_ids)
    monkeypatch.setattr(demo, "LEAST", 3)
    assert demo.described(small())[1] == {}  # nobody uses three of them


def test_new_combinations_get_what_goes_with_both(found):
    for one, kind, style in zip(found["uses"], ("karma", "mongo"), ("lint", "test"), strict=True):
        assert {d["dependency"] for d in one["two towers"]} == {f"{kind}-{style}", f"{kind}-core"}
        assert not any(d["held_out"] for d in one["two towers"])  # asked about, not held out


def test_held_out_packages_are_new_and_their_links_are_marked(found, monkeypatch):
    tiny(monkeypatch)
    pairs, tools = demo.described(small())
    split = held_out(pairs, side="left", share=0.2, seed=0)
    assert not set(load(found["model"]).left_.ids) & set(split.test.left_ids)
    assert (found["left"], found["new"]) == (split.train.shape[0], split.test.shape[0]) == (96, 24)
    rows, columns = split.test.matrix.nonzero()
    truth = set(zip(split.test.left_ids[rows], split.test.right_ids[columns], strict=True))
    assert len(found["new_packages"]) == demo.NEW
    for one in found["new_packages"]:
        assert one["uses"] == tools[one["package"]]
        for method in ("linear towers", "two towers"):
            marks = [(one["package"], d["dependency"]) in truth for d in one[method]]
            assert [d["held_out"] for d in one[method]] == marks
        assert any(d["held_out"] for d in one["two towers"])


def test_popularity_is_the_plain_count_of_hits():
    used = [(f"u{u}", f"i{j:02d}") for j in range(40) for u in range(50 - j)]
    train = Interactions.from_arrays(*zip(*used, strict=True))
    chosen = np.random.default_rng(0).integers(40, size=(30, 3))
    new = [(f"v{u}", f"i{j:02d}") for u in range(30) for j in set(chosen[u].tolist())]
    test = Interactions.from_arrays(*zip(*new, strict=True))
    recalls = [np.mean([j < 20 for j in set(own)]) for own in chosen.tolist()]  # i00 to i19 are used most
    assert demo._popularity(train, test)["recall@20"] == pytest.approx(np.mean(recalls))
    assert 0 < np.mean(recalls) < 1


def test_the_command_prints_json_alone_and_takes_tools(tmp_path, capsys, monkeypatch):
    tiny(monkeypatch)
    tokens = ["demo", "--seconds", "0.01", "--out", str(tmp_path), "--quiet", "--uses", "karma, lint", "--uses", "test"]
    assert run([*tokens, "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert printed.err == ""
    assert [one["uses"] for one in answer["uses"]] == [["karma", "lint"], ["test"]]
    assert list(answer["methods"]) == ["used most", "linear towers", "two towers"]
    assert load(answer["model"]).dim_ > 0
    demo.show(answer)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("two towers", "linear towers", "  karma + lint", "MAP@5"))
    assert run(["demo", "--out", str(tmp_path), "--uses", "karma, cobol"]) == 2
    assert "uses: got 'cobol', expected tools out of grunt, karma" in capsys.readouterr().err
    assert run(["demo", "--out", str(tmp_path), "--uses", ", "]) == 2

"""The server, the shell and the page explain scores as the model does."""

from __future__ import annotations

import json

import pytest
from serving_cases import client, folder, model, source

from gramtower.cli.program import run


@pytest.fixture(scope="module")
def api():
    with client(source(), *(source(name, table=False) for name in ("table", "matrix", "plain"))) as made:
        yield made


def post(api, status=200, **body):
    answer = api.post("/explain", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_explanations_are_those_of_the_model_and_add_up(api):
    for name in ("history", "plain"):
        answer = post(api, model=name, left="a/b", right="i7", most=3)
        wanted = model(name).explain("a/b", "i7").to_plain(3)
        assert answer["score"] == wanted["score"]
        assert [(one["kind"], one["name"]) for one in answer["contributions"]] == [
            (one["kind"], one["name"]) for one in wanted["contributions"]
        ]
        shown = sum(one["value"] for one in answer["contributions"])
        parts = shown + answer["others"]["value"] + answer["base"] + answer["remainder"]
        assert parts == pytest.approx(answer["score"], abs=1e-9)
        assert answer["others"]["count"] > 0


def test_history_has_titles_and_new_entities_are_explained(api):
    answer = post(api, right="i7", histories=[["i1", "i5", "i1"]])
    titles = {one["name"]: one["title"] for one in answer["contributions"]}
    assert titles == {"i1": "Thing 1, naïve", "i5": None}
    assert answer["left"] is None
    rows = post(api, model="matrix", left=2, right=3, left_features=[[0.5, 1, -1]])
    assert {one["name"] for one in rows["contributions"]} == {0, 1, 2}


def test_what_cannot_be_explained_is_refused(api):
    assert "near" in post(api, 404, left="a/b", right="i77")
    assert "near" in post(api, 404, left="a/bb", right="i7")
    assert "left_features" in post(api, 422, model="table", left="a/b", right="i7")["error"]
    assert "left" in post(api, 422, right="i7")["error"]
    assert "one, of the entity" in post(api, 422, right="i7", histories=[["i1"], ["i2"]])["error"]
    assert "most" in post(api, 422, left="a/b", right="i7", most=0)["error"]


def test_the_shell_explains_a_pair(capsys):
    path = str(folder() / "history.gramtower")
    assert run(["explain", path, "a/b", "i7", "-k", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "left": "a/b", "right": "i7", **model().explain("a/b", "i7").to_plain(3),
    }  # fmt: skip
    assert run(["explain", path, "a/b", "i7"]) == 0
    assert "history" in capsys.readouterr().out
    assert run(["explain", path, "(new)", "i7", "--history", "i1", "--history", "i2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["contributions"]) == 2
    assert run(["explain", path, "a/b", "i77"]) == 2
    assert "nearest" in capsys.readouterr().err

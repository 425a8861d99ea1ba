"""The server answers what the model answers, and says clearly what it does not."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from serving_cases import ITEMS, ODD, client, folder, genres, model, source

from gramtower.serving.messages import Limits


@pytest.fixture(scope="module")
def api():
    plain = [source(name, table=False) for name in ("table", "matrix", "plain", "kinds")]
    with client(source(), *plain) as made:
        yield made


def post(api, path, status=200, **body):
    answer = api.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def lists(answer):
    return [[place["id"] for place in one["results"]] for one in answer["answers"]]


def expected(name="history", *arguments, **options):
    ids, scores = model(name).recommend(*arguments, **options)
    return [
        [key for key, score in zip(*row, strict=True) if np.isfinite(score)] for row in zip(ids, scores, strict=True)
    ]


def test_lists_are_those_of_the_model_for_ids_of_any_unicode(api):
    answer = post(api, "/recommend", left=[*ODD, "user 3"], k=5)
    assert [one["left"] for one in answer["answers"]] == [*ODD, "user 3"]
    ids, scores = model().recommend([*ODD, "user 3"], k=5)
    assert lists(answer) == ids.tolist()
    found = [[place["score"] for place in one["results"]] for one in answer["answers"]]
    np.testing.assert_allclose(found, scores, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        dict(exclude_seen=False),
        dict(allow=["i1", "i2", "i3", "i1"]),
        dict(deny=["i1", "i2", "i30"]),
        dict(allow=["i1", "i2", "i3"], deny=["i2"]),
        dict(allow=[]),
    ],
)
def test_options_mean_what_they_mean_in_python(api, options):
    assert lists(post(api, "/recommend", left=["user 1", "a/b"], k=30, **options)) == expected(
        "history", ["user 1", "a/b"], k=30, **options
    )


def test_unknown_ids_of_allow_and_deny_are_ignored_and_counted(api):
    asked = dict(left=["user 1", "a/b"], k=5)
    answer = post(api, "/recommend", **asked, allow=["i1", "no", "i3", "nor"], deny=["none"])
    assert (answer["unknown_allowed"], answer["unknown_denied"]) == (2, 1)
    assert lists(answer) == expected("history", asked["left"], k=5, allow=["i1", "i3"])
    assert "unknown_allowed" not in post(api, "/recommend", **asked, allow=["i1"])
    empty = post(api, "/recommend", **asked, allow=["no"])
    assert (lists(empty), empty["unknown_allowed"]) == ([[], []], 1)
    lines = api.post("/recommend", json={**asked, "allow": ["i1", "no"], "stream": True}).text.splitlines()
    assert [json.loads(line)["unknown_allowed"] for line in lines] == [1, 1]


def test_k_beyond_all_entities_gives_all_that_are_not_seen(api):
    seen = model().seen_[model().left_.rows(["user 0"])[0]].nnz
    assert len(lists(post(api, "/recommend", left=["user 0"], k=1000))[0]) == ITEMS - seen


@pytest.mark.parametrize("wanted", ["Comedy", ["Comedy", "War"]])
def test_a_filter_by_a_column_gives_what_matches_in_the_order_of_the_scores(api, wanted):
    values = [wanted] if isinstance(wanted, str) else wanted
    right = [key for key, found in genres().items() if set(found) & set(values)]
    answer = post(api, "/recommend", left=["user 2"], k=50, filter={"genre": wanted})
    assert lists(answer) == expected("history", ["user 2"], k=50, allow=right)


def test_ranges_and_several_columns_are_all_of_them(api):
    answer = post(
        api, "/recommend", left=["user 2"], k=50, exclude_seen=False, columns=["year", "genre"],
        filter={"genre": "Comedy", "year": {"min": 1985, "max": 2000}},
    )  # fmt: skip
    cells = [place["columns"] for place in answer["answers"][0]["results"]]
    assert cells
    assert all(1985 <= float(one["year"]) <= 2000 and "Comedy" in one["genre"] for one in cells)
    with_title = post(api, "/recommend", left=["user 2"], k=1, columns=True)["answers"][0]["results"][0]
    assert with_title["columns"]["title"].startswith("Thing")
    assert post(api, "/recommend", left=["user 2"], filter={"genre": "Opera"})["answers"][0]["results"] == []


RULES = {
    "where": dict(where="genre == 'Comedy' and 1985 <= year < 2010"),
    "boost": dict(boost={"year": 0.003}),
    "popularity": dict(popularity=-0.2),
    "diversity": dict(diversity=0.6),
    "at_most": dict(at_most={"genre": 1}),
    "min_score": dict(min_score=0.0),
    "all": dict(
        where={"year": {"min": 1982}}, boost={"year": 0.01}, popularity=0.1, diversity=0.2, at_most={"genre": 2}
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_give_the_lists_of_the_model(api, name):
    left = ["user 2", "a/b", "user 5"]
    table = {"table": folder() / "items.csv"} if {"where", "boost", "at_most"} & set(RULES[name]) else {}
    for k in (3, 40):
        wanted = expected("history", left, k=k, **table, **RULES[name])
        assert lists(post(api, "/recommend", left=left, k=k, **RULES[name])) == wanted
        lines = api.post("/recommend", json={"left": left, "k": k, "stream": True, **RULES[name]}).text.splitlines()
        assert [[one["id"] for one in json.loads(line)["results"]] for line in lines] == wanted
    assert wanted != expected("history", left, k=40)


def test_an_empty_filter_needs_no_table(api):
    plain = post(api, "/recommend", model="plain", left=["user 2"])
    assert post(api, "/recommend", model="plain", left=["user 2"], filter={}, at_most={}) == plain


def test_each_entity_may_have_its_own_allow_list(api):
    left, allow = ["user 2", "a/b", "user 5"], [["i1", "i2", "no"], [], ["i7", "i9", "i1", "i12"]]
    answer = post(api, "/recommend", left=left, k=3, exclude_seen=False, allow=allow, boost={"year": 0.1})
    assert answer["unknown_allowed"] == 1
    options = dict(k=3, exclude_seen=False, boost={"year": 0.1}, table=folder() / "items.csv")
    wanted = [expected("history", [key], allow=[one for one in own if one != "no"], **options)[0]
              for key, own in zip(left, allow, strict=True)]  # fmt: skip
    assert lists(answer) == wanted
    new = post(api, "/recommend", histories=[["i1"], ["i2"]], k=3, allow=[["i3"], ["i1", "i4"]])
    assert [set(one) for one in lists(new)] == [{"i3"}, {"i1", "i4"}]


def test_each_entity_may_have_its_own_pairs_to_exclude(api):
    left, seen = ["user 2", "a/b", "user 5"], [["i1", "i2", "no"], [], ["i30", "i1"]]
    answer = post(api, "/recommend", left=left, k=30, exclude=seen, deny=["i9"])
    assert answer["unknown_excluded"] == 1
    wanted = [expected("history", [key], k=30, deny=["i9", *(one for one in own if one != "no")])[0]
              for key, own in zip(left, seen, strict=True)]  # fmt: skip
    assert lists(answer) == wanted
    streamed = api.post("/recommend", json={"left": left, "k": 30, "exclude": seen, "deny": ["i9"], "stream": True})
    found = [json.loads(line) for line in streamed.text.splitlines()]
    assert [[one["id"] for one in line["results"]] for line in found] == wanted
    new = post(api, "/recommend", histories=[["i1"], ["i2"]], k=30, exclude=[["i3"], []])
    assert [{"i1", "i3"} & set(lists(new)[0]), {"i2", "i3"} & set(lists(new)[1])] == [set(), {"i3"}]


def test_new_entities_by_history_by_features_and_by_both(api):
    histories = [["i1", "i2", "i1"], []]
    assert lists(post(api, "/recommend", histories=histories, k=6)) == expected(histories=histories, k=6)
    rows = [{"age": 31, "city": "Oslo"}, {"age": 40.5}]
    columns = {"age": [31.0, 40.5], "city": ["Oslo", None]}
    for given in (rows, columns):
        answer = post(api, "/recommend", model="table", left_features=given, histories=histories, k=4)
        assert lists(answer) == expected("table", left_features=columns, histories=histories, k=4)
    answer = post(api, "/recommend", model="matrix", left_features=[[0.1, -2, 3e-3]], k=4)
    assert lists(answer) == expected("matrix", left_features=np.array([[0.1, -2, 3e-3]]), k=4)


ONE = dict(age=30, zip=1, vip=True, tags=["a"], about="red wine", vec=[0.1, 1, -2])


@pytest.mark.parametrize(
    "given", [{}, dict(vec=[1, 2, 3]), dict(vec=None), dict(age="30"), dict(zip="1"), dict(zip=1.0), dict(vip="true")]
)
def test_features_of_every_kind_are_taken_as_json_has_them(api, given):
    row = {**ONE, **given}
    columns = {name: [cell] for name, cell in {**row, "zip": 1, "vip": True, "age": 30.0}.items()}
    columns["vec"] = [None if row["vec"] is None else [float(one) for one in row["vec"]]]
    wanted = lists_and_scores("kinds", left_features=columns, k=3)
    for features in ([row], {name: [cell] for name, cell in row.items()}):
        answer = post(api, "/recommend", model="kinds", left_features=features, k=3)
        assert [(place["id"], pytest.approx(place["score"])) for place in answer["answers"][0]["results"]] == wanted


def lists_and_scores(name, **options):
    ids, scores = model(name).recommend(**options)
    return list(zip(ids[0].tolist(), map(float, scores[0]), strict=True))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (dict(vec=[1, 2]), "vec"),
        (dict(vec=[1, "x", 2]), "vec"),
        (dict(vec=[[1, 2, 3]]), "vec"),
        (dict(vec=3.0), "vec"),
        (dict(age="x"), "age"),
        (dict(age={"a": 1}), "age"),
        (dict(about=["a"]), "about"),
    ],
)
def test_features_that_do_not_fit_are_refused_by_field_and_column(api, given, name):
    error = post(api, "/recommend", 422, model="kinds", left_features=[{**ONE, **given}])["error"]
    assert error.startswith("left_features")
    assert name in error
    assert "union" not in error
    assert "str]" not in error
    assert "dict[" not in error


def test_row_numbers_are_the_ids_of_a_model_of_a_matrix(api):
    assert lists(post(api, "/recommend", model="matrix", left=[0, 11], k=3)) == expected("matrix", [0, 11], k=3)
    assert "from 0 to 11" in post(api, "/recommend", 404, model="matrix", left=[12])["error"]
    assert post(api, "/recommend", 404, model="matrix", left=["0"])["near"] == {"0": []}


@pytest.mark.parametrize("side", ["left", "right"])
def test_neighbours_are_those_of_the_model(api, side):
    asked = ["i4", "i7"] if side == "right" else ["007", "user 1"]
    ids, scores = model().similar(asked, side, k=7)
    answer = post(api, "/similar", ids=asked, side=side, k=7)
    assert lists(answer) == ids.tolist()
    assert [one["id"] for one in answer["answers"]] == asked
    np.testing.assert_allclose([p["score"] for p in answer["answers"][0]["results"]], scores[0], rtol=1e-5)


def test_neighbours_of_several_together_are_of_their_mean_direction(api):
    answer = post(api, "/similar", ids=["i4", "i7"], k=5, together=True)
    Q = model().embed(side="right")
    unit = Q / np.linalg.norm(Q, axis=1, keepdims=True)
    rows = model().right_.rows(["i4", "i7"])
    scores = unit @ unit[rows].mean(0)
    scores[rows] = -np.inf
    assert lists(answer)[0] == model().right_.ids[np.argsort(-scores)[:5]].tolist()


def test_scores_and_embeddings_are_those_of_the_model(api):
    left, right = ["user 1", "a/b"], ["i3", "i9"]
    np.testing.assert_allclose(
        post(api, "/score", left=left, right=right)["scores"], model().predict(left, right), 1e-5
    )
    np.testing.assert_allclose(post(api, "/embed", ids=left)["embeddings"], model().embed(left), rtol=1e-6)
    np.testing.assert_allclose(
        post(api, "/embed", ids=right, side="right")["embeddings"], model().embed(right, "right"), rtol=1e-6
    )
    np.testing.assert_allclose(
        post(api, "/embed", histories=[["i3"]])["embeddings"], model().embed(histories=[["i3"]]), rtol=1e-6
    )


@pytest.mark.parametrize("count", [1, 64, 200])
def test_many_ids_stream_as_lines_in_order(api, count):
    asked = [["a/b", "007", "user 5"][i % 3] for i in range(count)]
    answer = api.post("/recommend", json={"left": asked, "k": 3, "stream": True})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["left"] for line in lines] == asked
    assert [[p["id"] for p in line["results"]] for line in lines] == expected("history", asked, k=3)
    assert api.post("/recommend", json={"left": ["nobody"], "stream": True}).status_code == 404


def test_a_stream_is_refused_like_any_other_answer(api):
    rows, lists = [{"age": 30, "city": "Oslo"}] * 2, [["i1"], ["i2"], ["i3"]]
    for body in ({"left_features": rows, "histories": lists}, {"left_features": []}, {"left_features": {"age": []}}):
        plain, streamed = (api.post("/recommend", json={"model": "table", **body, "stream": s}) for s in (False, True))
        assert (plain.status_code, streamed.status_code) == (422, 422)
        assert plain.json() == streamed.json()
    for body in ({"left": []}, {"histories": []}):
        plain, streamed = (api.post("/recommend", json={"model": "table", **body, "stream": s}) for s in (False, True))
        assert (plain.json()["answers"], streamed.content) == ([], b"")


def test_unknown_ids_are_404_and_name_near_ones(api):
    found = post(api, "/recommend", 404, left=["a/b", "user 1!", "usr 2"])
    assert found["unknown"] == ["user 1!", "usr 2"]
    assert "user 1" in found["near"]["user 1!"]
    assert "user 2" in found["near"]["usr 2"]
    assert "user 2" in found["error"]
    assert post(api, "/recommend", 404, left=[7])["near"] == {"7": []}
    assert post(api, "/similar", 404, ids=["i 4"])["near"]["i 4"][0] == "i4"
    assert post(api, "/recommend", 404, left=["a/b"], model="histry")["near"] == ["history"]


BAD = {
    "no k": dict(left=["a/b"], k=0),
    "a k of text": dict(left=["a/b"], k="5"),
    "a true k": dict(left=["a/b"], k=True),
    "a large k": dict(left=["a/b"], k=1_000_000),
    "a field that is none": dict(left=["a/b"], kk=3),
    "an id that is none": dict(left=[1.5]),
    "nobody": dict(k=5),
    "two kinds": dict(left=["a/b"], histories=[["i1"]]),
    "features of another model": dict(left_features=[{"age": 3}]),
    "a column that is none": dict(left=["a/b"], filter={"gnre": "War"}),
    "a range of words": dict(left=["a/b"], filter={"genre": {"min": 3}}),
    "another bound": dict(left=["a/b"], filter={"year": {"least": 3}}),
    "columns that are none": dict(left=["a/b"], columns=["titel"]),
    "too many ids": dict(left=["a/b"] * 1001),
    "a long history": dict(histories=[["i1"] * 10_001]),
    "a wrong column": dict(model="table", left_features=[{"agee": 3}]),
    "columns of two lengths": dict(model="table", left_features={"age": [1.0], "city": ["Oslo", "Lima"]}),
    "a filter without a table": dict(model="table", left=["a/b"], filter={"genre": "War"}),
    "a boost without a table": dict(model="table", left=["a/b"], boost={"year": 1}),
    "an expression that is none": dict(left=["a/b"], where="year ="),
    "code": dict(left=["a/b"], where="__import__('os')"),
    "nested": dict(left=["a/b"], where="(" * 900),
    "no expression": dict(left=["a/b"], where=""),
    "a filter twice": dict(left=["a/b"], where="year", filter={"year": 3}),
    "a boost of words": dict(left=["a/b"], boost={"genre": 1}),
    "a boost that is text": dict(left=["a/b"], boost={"year": "1"}),
    "an infinite boost": dict(left=["a/b"], boost={"year": 1e300}),
    "much diversity": dict(left=["a/b"], diversity=1.1),
    "a quota of none": dict(left=["a/b"], at_most={"genre": 0}),
    "a quota of another column": dict(left=["a/b"], at_most={"gnre": 1}),
    "too few allow lists": dict(left=["a/b", "007"], allow=[["i1"]]),
    "an allow list that is too long": dict(left=["a/b"], allow=[["i1"] * 10_001]),
    "lists among ids": dict(left=["a/b"], allow=["i1", ["i2"]]),
    "too few lists to exclude": dict(left=["a/b", "007"], exclude=[["i1"]]),
    "a list to exclude that is too long": dict(left=["a/b"], exclude=[["i1"] * 10_001]),
    "ids to exclude without lists": dict(left=["a/b"], exclude=["i1"]),
    "rows of two widths": dict(model="matrix", left_features=[[1.0, 2.0, 3.0], [1.0]]),
    "another width": dict(model="matrix", left_features=[[1.0, 2.0]]),
    "no rows": dict(model="table", left_features=[]),
    "histories of a model without": dict(model="plain", histories=[["i1"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_422_with_one_line(api, name):
    error = post(api, "/recommend", 422, **BAD[name])["error"]
    assert re.match(r"[\w×, .|\[\]{}=]+: ", error), error
    assert len(error) < 700
    assert "\n" not in error


def test_the_message_names_the_bound(api):
    assert post(api, "/recommend", 422, left=["a/b"], k=5000)["error"] == (
        "k: got 5000, expected an integer from 1 to 1000"
    )
    assert "genre" in post(api, "/recommend", 422, left=["a/b"], filter={"gnre": "War"})["error"]
    assert "expected one of the fields model, left, k" in post(api, "/recommend", 422, user=["a/b"])["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"nul", b"\xff\xfe", b'{"left": ["\\ud800"]}', b"[" * 5000])
def test_what_is_no_json_is_422(api, body):
    answer = api.post("/recommend", content=body)
    assert answer.status_code == 422
    assert answer.json()["error"]


def test_pairs_of_other_lengths_and_several_ways_to_embed_are_refused(api):
    assert "2 and 1" in post(api, "/score", 422, left=["a/b", "007"], right=["i1"])["error"]
    post(api, "/embed", 422)
    post(api, "/embed", 422, ids=["a/b"], histories=[["i1"]])
    post(api, "/similar", 422, ids=[], together=True)


def test_long_bodies_are_413_also_without_a_length():
    with client(limits=Limits(body=1000)) as small:
        assert small.post("/score", json={"left": ["x" * 2000], "right": []}).status_code == 413
        assert small.post("/score", content=iter([b"x" * 600, b"x" * 600])).status_code == 413
        assert small.post("/score", json={"left": [], "right": []}).json()["scores"] == []


def test_paths_that_are_none_and_methods_are_json_too(api):
    assert api.get("/nothing").status_code == 404
    assert api.get("/../../etc/passwd").status_code == 404
    assert api.get("/recommend").status_code == 405
    assert api.get("/recommend").json()["error"] == "Method Not Allowed"


def test_health_readiness_and_the_models(api):
    assert api.get("/health").json() == {"status": "ok"}
    assert api.get("/ready").json()["status"] == "ready"
    found = {one["name"]: one for one in api.get("/models").json()["models"]}
    assert list(found) == ["history", "table", "matrix", "plain", "kinds"]
    assert [found[name]["histories"] for name in found] == [True, True, False, False, False]
    assert found["history"]["right"] == ITEMS


def test_the_interface_describes_itself(api):
    described = api.get("/openapi.json").json()
    assert set(described["paths"]) >= {"/recommend", "/similar", "/score", "/embed", "/health", "/ready", "/metrics"}
    body = described["paths"]["/recommend"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"left", "k", "where", "histories"} <= set(body["properties"])
    text = api.get("/docs").text
    assert "POST /recommend" in text
    assert "<script" not in text
    assert not re.search(r"https?://|src=|<link", text)

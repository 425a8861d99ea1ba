"""Context: combinations of a user and context columns as left entities, in Python, the command line and the server."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

pytest.importorskip("polars", reason="tables are read by polars")

import gramtower as gt

DEVICES = ("phone", "tv", "web")
USERS, ITEMS = 60, 40


def log(seed=0, without=()):
    """Rows of users who choose by their taste and by the device, and a mask of those to test on."""
    rng = np.random.default_rng(seed)
    taste, popular = rng.normal(size=(USERS, 4)) @ rng.normal(size=(4, ITEMS)), 2.0 * rng.normal(size=(3, ITEMS))
    rows = [
        (f"u{user}", DEVICES[device], f"i{item}")
        for user in range(USERS)
        for device in range(3)
        for item in np.argsort(-(0.4 * taste[user] + popular[device] + rng.gumbel(size=ITEMS)))[:6]
        if (user, device) not in without
    ]
    held = rng.random(len(rows)) < 0.25
    columns = ("user", "device", "item")
    return [
        dict(
            zip(columns, zip(*(r for r, out in zip(rows, held, strict=True) if out == part), strict=True), strict=True)
        )
        for part in (False, True)
    ]


def small(**settings):
    settings = {"dim": 16, "hidden": (), "max_iterations": 8, "select": False, "l2": 2.0} | settings
    return gt.TwoTower(**settings, device="cpu")


def read(rows, **options):
    return gt.Interactions.from_frame(rows, "user", "item", context=["device"], **options)


@pytest.fixture(scope="module")
def fitted():
    train, test = log()
    return small().fit(train, left="user", right="item", context=["device"]), train, test


def test_left_ids_are_combinations_that_can_be_read():
    frame = {
        "user": [7, 8, None, 7],
        "item": [*"abca"],
        "device": ["tv", 'say "é"\n', "tv", None],
        "hour": [1.0, 2, 3, 4],
    }
    with pytest.warns(UserWarning, match=r"1 .*id"):
        pairs = gt.Interactions.from_frame(frame, "user", "item", context=["device", "hour"])
    wanted = [{"user": 7, "device": "tv", "hour": "1"}, {"user": 8, "device": 'say "é"\n', "hour": "2"}]
    assert [json.loads(key) for key in pairs.left_ids] == [*wanted, {"user": 7, "device": None, "hour": "4"}]
    assert pairs.context == ("device", "hour")
    assert pairs.subset([0]).without_empty().context == ("device", "hour")


def test_contexts_of_one_user_have_different_lists_and_rank_better_than_no_context(fitted):
    model, train, test = fitted
    lists = {device: model.recommend(["u1"], 5, context={"device": device})[0][0].tolist() for device in DEVICES}
    assert len({tuple(found) for found in lists.values()}) == 3
    free = small(l2="auto", select=True).fit(train, left="user", right="item")
    for device in DEVICES:
        some = {
            name: [x for x, d in zip(cells, test["device"], strict=True) if d == device] for name, cells in test.items()
        }
        with_context = model.evaluate(read(some))
        without = free.evaluate(gt.Interactions.from_frame(some, "user", "item"))
        assert with_context.left_out["seen"] == without.left_out["seen"]
        assert with_context["ndcg@20"] > 1.1 * without["ndcg@20"]


def test_an_embedding_is_that_of_the_shared_user_and_of_the_context(fitted):
    model = fitted[0]

    def embed(user, device):
        return model.embed(left_features={"user": [user], "device": [device]})[0]

    known = json.dumps({"user": "u3", "device": "tv"}, separators=(",", ":"))
    assert np.allclose(model.embed([known])[0], embed("u3", "tv"), atol=1e-6)
    scores = model.predict(["u3", "u4"], ["i1", "i2"], context={"device": ["tv", "web"]})
    by_hand = [
        embed("u3", "tv") @ model.embed(["i1"], "right")[0],
        embed("u4", "web") @ model.embed(["i2"], "right")[0],
    ]
    assert np.allclose(scores, by_hand, atol=1e-5)
    ids, found = model.recommend(["u3"], ITEMS, context={"device": "tv"}, exclude_seen=False)
    assert np.allclose(found[0], model.embed(ids[0], "right") @ embed("u3", "tv"), atol=1e-5)


def test_what_a_user_has_seen_in_any_context_is_left_out(fitted):
    model, train, _ = fitted
    rows = list(zip(*train.values(), strict=True))
    for user in ("u0", "u9"):
        seen = {item for one, _, item in rows if one == user}
        for context in (None, {"device": "tv"}, {"device": "fridge"}):
            ids, scores = model.recommend([user], ITEMS, context=context)
            assert set(ids[0][np.isfinite(scores[0])]) == set(model.right_.ids) - seen
        known = json.dumps({"user": user, "device": "web"}, separators=(",", ":"))
        ids, scores = model.recommend([known], ITEMS)
        assert set(ids[0][np.isfinite(scores[0])]) == set(model.right_.ids) - seen
    denied = {"user": ["u0"], "item": [model.recommend(["u0"], 1, context={"device": "tv"})[0][0][0]]}
    more = model.recommend(["u0"], 3, context={"device": "tv"}, exclude=denied)[0]
    assert denied["item"][0] not in more[0]


def test_pairs_of_users_hold_in_all_contexts(fitted, tmp_path):
    import polars as pl

    model, _, test = fitted
    rows = {"user": ["u0", "u0", "u9"], "item": ["i1", "i2", "i3"], "device": ["tv", "web", "fridge"]}
    combined = json.dumps({"user": "u0", "device": "phone"}, separators=(",", ":"))
    by_user = {name: rows[name] for name in ("user", "item")}
    for pairs in (by_user, read(rows), {"left": [combined] * 2, "item": ["i1", "i2"]}):
        for asked in ({"left": ["u0"], "context": {"device": "tv"}}, {"left": [combined]}):
            ids, scores = model.recommend(k=ITEMS, allow=pairs, exclude_seen=False, **asked)
            assert set(ids[0][np.isfinite(scores[0])]) == {"i1", "i2"}
            ids, scores = model.recommend(k=ITEMS, exclude=pairs, exclude_seen=False, **asked)
            assert set(ids[0][np.isfinite(scores[0])]) == set(model.right_.ids) - {"i1", "i2"}
    model.recommend_all(tmp_path / "lists.csv", ITEMS, allow=by_user, exclude_seen=False)
    lists = pl.read_csv(tmp_path / "lists.csv").rows()
    found = {device: {row[2] for row in lists if row[0] == combined.replace("phone", device)} for device in DEVICES}
    assert found == {device: {"i1", "i2"} for device in DEVICES}
    own = read({name: [cell for cell, user in zip(cells, test["user"], strict=True) if user == "u0"]
                for name, cells in test.items()})  # fmt: skip
    everything = {"user": ["u0"] * ITEMS, "item": [f"i{j}" for j in range(ITEMS)]}
    with pytest.raises(ValueError, match="test"):  # nothing is left to rank
        model.evaluate(own, exclude=everything)


def test_unseen_combinations_are_ranked_and_unseen_values_count_as_missing():
    train, _ = log(without={(5, 1)})
    model = small().fit(read(train))
    combined = json.dumps({"user": "u5", "device": "tv"}, separators=(",", ":"))
    assert combined not in set(model.left_.ids)
    unseen, missing = ([*model.recommend(["u5"], 5, context=c)] for c in ({"device": "tv"}, {"device": "fridge"}))
    assert not np.allclose(unseen[1], missing[1])
    assert np.array_equal(missing[1], model.recommend(["u5"], 5)[1])
    assert np.array_equal(missing[1], model.recommend(["u5"], 5, context={"device": None})[1])
    test = read({"user": ["u5", "new"], "device": ["tv", "tv"], "item": [unseen[0][0][0], "i1"]})
    with pytest.warns(UserWarning, match="1 of 2"):
        scores = model.evaluate(test)
    assert scores["map@5"] == 1.0
    assert scores.left_out == {"unknown_left": 1, "unknown_right": 0, "seen": 0}


def test_the_id_of_a_combination_is_explained_by_its_user_and_its_context(fitted):
    model = fitted[0]
    found = model.explain(json.dumps({"user": "u1", "device": "tv"}, separators=(",", ":")), "i3")
    assert found == model.explain(right="i3", left_features={"user": ["u1"], "device": ["tv"]})
    assert {part.name for part in found.contributions} == {"user=u1", "device=tv"}


def test_models_with_context_are_saved_and_updated(fitted, tmp_path):
    model = fitted[0]
    model.save(tmp_path / "model")
    loaded = gt.load(tmp_path / "model")
    context = {"device": "tv"}
    assert np.array_equal(
        loaded.recommend(["u1"], 5, context=context)[1], model.recommend(["u1"], 5, context=context)[1]
    )
    pairs = loaded.trained_.nnz
    loaded.update(read({"user": ["u1", "new"], "device": ["fridge", "tv"], "item": ["i1", "i2"]}))
    assert loaded.trained_.nnz == pairs + 2  # pairs in other contexts are not learned from
    assert "i2" not in loaded.recommend(["new"], 5, context={"device": "fridge"})[0]
    loaded.update({"user": ["newer"], "device": ["tv"], "item": ["i2"]}, left="user", right="item")
    assert "i2" not in loaded.recommend(["newer"], 5)[0]
    with pytest.raises(ValueError, match=r"^more_pairs: .*context"):
        loaded.update(gt.Interactions.from_arrays(["u1"], ["i1"]))


def test_tables_of_held_out_pairs_are_read_with_their_context(fitted):
    model, _, test = fitted
    assert model.evaluate(test, left="user", right="item") == model.evaluate(read(test))
    rows = {name: test[name] for name in ("user", "item", "device")}
    by_table, by_pairs = (model.fitted_.calibrated(one, "platt") for one in (rows, read(test)))
    assert by_table.calibration == by_pairs.calibration
    with pytest.raises(ValueError, match="context: got 'device'"):
        model.evaluate({name: test[name] for name in ("user", "item")})


def test_events_and_tables_of_numbers_have_context_too():
    events = {"u": [1, 1, 2], "i": [5, 5, 6], "kind": ["a", "b", "a"], "hour": [20, 20, 8], "new": [True, True, False]}
    pairs = gt.Interactions.from_events(
        events, "u", "i", event="kind", weights={"a": 1, "b": 2}, context=["hour", "new"]
    )
    assert pairs.weights.tolist() == [3, 1]
    model = small(dim=1, max_iterations=1).fit(pairs)
    found = model.recommend([1], 1, context={"hour": 20, "new": True}, exclude_seen=False)[1]
    as_float = {"hour": np.float64(20), "new": np.bool_(True)}
    assert np.array_equal(found, model.recommend([1], 1, context=as_float, exclude_seen=False)[1])
    assert not np.array_equal(found, model.recommend([1], 1, context={"hour": 8}, exclude_seen=False)[1])


def test_bad_contexts_are_refused_by_argument(fitted):
    model, train, test = fitted
    for wrong in ({"dev": "tv"}, "tv", {"device": ["tv", "tv"]}, ["tv"]):
        with pytest.raises(ValueError, match="context"):
            model.recommend(["u1"], 3, context=wrong)
    with pytest.raises(ValueError, match=r"^user ids: .*'u'"):
        model.recommend(["u"], 3, context={"device": "tv"})
    with pytest.raises(ValueError, match="context"):
        model.recommend(left_features={"user": ["u1"], "device": ["tv"]}, context={"device": "tv"})
    with pytest.raises(ValueError, match="test"):
        model.evaluate(gt.Interactions.from_frame(test, "user", "item"))
    for wrong in (["nothing"], ["user"], ["device", "device"], "device"):
        with pytest.raises(ValueError, match="context"):
            gt.Interactions.from_frame(train, "user", "item", context=wrong)
    with pytest.raises(ValueError, match="left_features"):
        small().fit(read(train), left_features="history")
    for key in ("ann", "[1]", '{"device": "tv"}', '{"left": [1]}', "[" * 10_000):
        with pytest.raises(ValueError, match="left ids"):
            small().fit(gt.Interactions(sp.csr_matrix(np.eye(1)), [key], ["x"], context=("device",)))
    plain = small(max_iterations=1).fit(train, left="user", right="item")
    with pytest.raises(ValueError, match="context"):
        plain.recommend(["u1"], 3, context={"device": "tv"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import run

    folder = tmp_path_factory.mktemp("context")
    for name, rows in zip(("train", "test"), log(), strict=True):
        lines = [",".join(row) for row in zip(*rows.values(), strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["user,device,item", *lines]) + "\n")
    small = ["--dim", "8", "--hidden", "none", "--max-iterations", "4", "--select", "off", "--l2", "2", "--quiet"]
    command = ["fit", str(folder / "train.csv"), "--left", "user", "--right", "item", "--context", "device"]
    assert run([*command, *small, "--out", str(folder / "run")]) == 0
    return folder


def test_the_command_line_asks_in_a_context(run, capsys):
    from gramtower.cli.program import run as gramtower

    def answer(*tokens, code=0):
        capsys.readouterr()
        assert gramtower([*map(str, tokens), "--quiet", "--json"]) == code
        printed = capsys.readouterr()
        return json.loads(printed.out) if code == 0 else printed.err

    asked = ["recommend", run / "run", "--left", "u1", "-k", "3"]
    model = gt.load(run / "run" / "model.gramtower")
    for device in DEVICES:
        found = answer(*asked, "--context", f"device={device}")["answers"][0]
        assert found["left"] == "u1"
        wanted = model.recommend(["u1"], 3, context={"device": device})[0][0].tolist()
        assert [one["id"] for one in found["results"]] == wanted
    (run / "own.csv").write_text("user,item\nu1,i1\nu1,i2\n")
    found = answer(*asked, "--context", "device=tv", "--allow-pairs", run / "own.csv", "--include-seen")
    assert {one["id"] for one in found["answers"][0]["results"]} == {"i1", "i2"}
    assert answer(*asked, "--exclude", run / "own.csv", "--allow", "i1", "i2")["answers"][0]["results"] == []
    scores = answer("evaluate", run / "run", "--test", run / "test.csv")
    assert scores["left_out"]["unknown_left"] == 0
    (run / "more.csv").write_text("user,device,item\nu1,fridge,i3\n")
    assert answer("update", run / "run", run / "more.csv", "--out", run / "updated")["new_left"] == 1
    columns = ["--left", "user", "--right", "item", "--context", "device"]
    answer("split", run / "train.csv", *columns, "--by", "random", "--out", run / "parts")
    assert (run / "parts" / "train.csv").read_text().startswith("user,device,item\nu0,phone,")
    assert "context" in answer(*asked, "--context", "place=here", code=2)
    assert "COLUMN=VALUE" in answer(*asked, "--context", "tv", code=2)
    assert "RUN: got a model with context" in answer("off-policy", run / "run", run / "test.csv", code=2)
    fit = ["fit", run / "train.csv", *columns, "--out", run / "x"]
    assert "--context" in answer(*fit, "--history", code=2)


def test_the_server_asks_in_a_context(run):
    cases = pytest.importorskip("serving_cases", reason="the server needs starlette")
    path = run / "run" / "model.gramtower"
    model = gt.load(path)
    with cases.client(cases.source("context", table=False, path=path)) as client:

        def ask(**body):
            return client.post("/recommend", json={"k": 3} | body)

        for context in ({"device": "tv"}, {"device": ["tv", "web"]}, {"device": None}, None):
            found = ask(left=["u1", "u2"], context=context).json()["answers"]
            ids = model.recommend(["u1", "u2"], 3, context=context)[0].tolist()
            assert [[one["id"] for one in each["results"]] for each in found] == ids
        lines = ask(left=["u1", "u2"], context={"device": ["tv", "web"]}, stream=True).text.splitlines()
        wanted = model.recommend(["u1", "u2"], 3, context={"device": ["tv", "web"]})[0].tolist()
        assert [[one["id"] for one in json.loads(line)["results"]] for line in lines] == wanted
        assert ask(left=["nobody knows"], context={"device": "tv"}).status_code == 404
        assert ask(left=["u1"], context={"place": "here"}).status_code == 422
        assert ask(left=["u1"], context={"device": ["tv", "web"]}).status_code == 422
        assert ask(left=[str(model.left_.ids[0])]).status_code == 200
        pairs = {"left": ["u1", "u2"], "right": ["i1", "i2"]}
        for context in ({"device": "tv"}, {"device": ["tv", "fridge"]}, None):
            found = client.post("/score", json={**pairs, "context": context}).json()["scores"]
            assert found == pytest.approx(model.predict(*pairs.values(), context=context).tolist())
        assert client.post("/score", json={**pairs, "context": {"place": 1}}).status_code == 422
        body = {"left": str(model.left_.ids[0]), "right": "i1"}
        assert client.post("/explain", json=body).json()["score"] == pytest.approx(model.predict(*body.values())[0])

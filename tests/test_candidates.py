"""Entities that stand in a feature table without pairs: kept and ranked when asked, and never learned from."""

from __future__ import annotations

import json

import numpy as np
import pytest
from test_new_entities import ITEMS, NEW, USERS, item_table, items, pairs, small, user_table, users

import gramtower as gt
from gramtower._util.checks import LeftOutWarning

WHOLE = [*range(ITEMS), *NEW]


@pytest.fixture(scope="module")
def both():
    features = user_table(range(USERS + 2)), ["id", item_table(WHOLE)]
    return small().fit(pairs(), *features), small().fit(pairs(), *features, candidates="all")


def test_entities_without_pairs_are_kept_when_asked_and_nothing_is_learned_from_them(both, tmp_path):
    trained, every = both
    assert len(trained.right_) == ITEMS
    assert every.right_.ids.tolist() == [*trained.right_.ids, *(f"i{j}" for j in NEW)]
    assert every.left_.ids.tolist() == [*trained.left_.ids, f"u{USERS}", f"u{USERS + 1}"]
    assert [record.value for record in every.history_] == [record.value for record in trained.history_]
    assert np.array_equal(every.embed(side="right")[:ITEMS], trained.embed(side="right"))
    expected = trained.embed(right_features=items(NEW))
    assert np.allclose(every.embed(side="right")[ITEMS:], expected, atol=1e-6)
    every.save(tmp_path / "m.gramtower")
    loaded = gt.load(tmp_path / "m.gramtower")
    assert (loaded.right_.added, loaded.left_.added) == (len(NEW), 2)
    lists = loaded.recommend(["u1", f"u{USERS}"], k=30)[0]
    assert set(lists.ravel()) & {f"i{j}" for j in NEW}
    known = loaded.recommend(["u1"], k=30, candidates="trained")[0]
    assert not set(known.ravel()) & {f"i{j}" for j in NEW}


def test_evaluate_ranks_all_or_trained_candidates(both):
    trained, every = both
    test = pairs(keep=lambda i, j: (i + j) % 4 == 0)
    assert every.evaluate(test, candidates="trained") == trained.evaluate(test)
    assert every.evaluate(test) == trained.evaluate(test, right_features=items(NEW))
    assert every.evaluate(test) != trained.evaluate(test)
    mixed = pairs(right=WHOLE, keep=lambda i, j: (i + j) % 4 == 0)
    unknown = sum(1 for name in mixed.right_ids[mixed.matrix.indices] if int(name[1:]) >= ITEMS)
    assert every.evaluate(mixed).left_out["unknown_right"] == 0
    with pytest.warns(LeftOutWarning):
        assert every.evaluate(mixed, candidates="trained").left_out["unknown_right"] == unknown > 0
    with pytest.raises(ValueError, match=r"candidates.*'some'"):
        every.evaluate(test, candidates="some")


@pytest.mark.parametrize("described", [False, True])
def test_evaluate_ranks_the_allowed_ids_only(both, described):
    every = both[1]
    test = pairs(right=WHOLE, keep=lambda i, j: (i + j) % 4 == 0)
    allowed = [f"i{j}" for j in (1, 5, 9, *NEW)]
    options = {"left_features": user_table(range(USERS))} if described else {}
    found = every.evaluate(test, ("recall@3", "map@3"), allow=allowed, **options)
    hits, recall = 0, []
    lists, _ = every.recommend(test.left_ids, 3, allow=allowed)
    for row, names in enumerate(lists):
        if described:
            names = every.recommend(left_features=users([int(test.left_ids[row][1:])]), k=3, allow=allowed)[0][0]
        relevant = set(test.right_ids[test.matrix[row].indices]) & set(allowed)
        hits += len(relevant)
        recall += [len(relevant & set(names)) / len(relevant)] if relevant else []
    assert found["recall@3"] == pytest.approx(np.mean(recall))
    assert found.left_out == {"not_allowed": len(test) - hits, "unknown_left": 0, "unknown_right": 0, "seen": 0}
    with pytest.warns(LeftOutWarning, match=r"allow.*1.*10"):
        assert every.evaluate(test, ("recall@3", "map@3"), allow=[*allowed, "none"], **options) == found
    with pytest.raises(ValueError, match=r"^allow.*0"), pytest.warns(LeftOutWarning):
        every.evaluate(test, allow=["none"], **options)


def test_an_update_learns_nothing_from_them_either_and_keeps_them():
    model = small().fit(pairs(), user_table(range(USERS)), ["id", item_table(WHOLE)], candidates="all")
    more = gt.Interactions.from_arrays(["u1", "u2"], [f"i{NEW[0]}"] * 2)
    model.update(more, user_table(range(USERS)), ["id", item_table(WHOLE)])
    assert (model.right_.trained, model.right_.added) == (ITEMS + 1, len(NEW) - 1)
    assert model.right_.ids[ITEMS] == f"i{NEW[0]}"
    assert set(model.right_.ids) == {f"i{j}" for j in WHOLE}


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (None, r"candidates.*'all'.*right_features.*right_features"),
        (np.eye(ITEMS), r"candidates.*'all'.*right_features"),
    ],
)
def test_candidates_without_a_table_are_refused_before_training(right, message):
    with pytest.raises(ValueError, match=message):
        small().fit(pairs(), None, right, candidates="all")
    with pytest.raises(ValueError, match=r"candidates.*'every'"):
        small().fit(pairs(), candidates="every")


def test_candidates_in_the_shell(tmp_path, capsys):
    pytest.importorskip("cyclopts")
    from gramtower.cli.program import run

    coo = pairs().matrix.tocoo()
    rows = [f"{pairs().left_ids[i]},{pairs().right_ids[j]}" for i, j in zip(coo.row, coo.col, strict=True)]
    (tmp_path / "p.csv").write_text("user,item\n" + "\n".join(rows) + "\n")
    (tmp_path / "test.csv").write_text(f"user,item\nu0,i{NEW[0]}\nu0,i0\n")
    table = items(WHOLE)
    lines = (",".join(map(str, line)) for line in zip(*table.values(), strict=True))
    (tmp_path / "items.csv").write_text("\n".join([",".join(table), *lines]) + "\n")
    base = [tmp_path / "p.csv", "--left", "user", "--right", "item", "--right-features", tmp_path / "items.csv"]
    base += ["--dim", "3", "--hidden", "none", "--device", "cpu", "--quiet", "--max-iterations", "2"]

    def call(*tokens):
        code = run([str(token) for token in tokens])
        return code, capsys.readouterr()

    assert call("fit", *base, "--candidates", "all", "--out", tmp_path / "run")[0] == 0
    assert gt.load(tmp_path / "run/model.gramtower").right_.added == len(NEW)
    assert 'candidates = "all"' in (tmp_path / "run/config.toml").read_text()
    for chosen, left_out in (("all", 0), ("trained", 1)):
        tokens = ["--test", tmp_path / "test.csv", "--no-exclude-seen", "--candidates", chosen, "--json", "--quiet"]
        code, said = call("evaluate", tmp_path / "run", *tokens)
        assert (code, json.loads(said.out)["left_out"]["unknown_right"]) == (0, left_out)
    tokens = ["--test", tmp_path / "test.csv", "--no-exclude-seen", "--allow", "i0", "--allow", "none", "--json"]
    code, said = call("evaluate", tmp_path / "run", *tokens)
    assert (code, json.loads(said.out)["left_out"]["not_allowed"]) == (0, 1)
    assert "allow: 1 of 2 ids are unknown" in said.err
    code, said = call("recommend", tmp_path / "run", "--left", "u0", "--allow", "i1", "--allow", "none", "--deny", "x")
    assert (code, "i1" in said.out) == (0, True)
    assert ("allow: 1 of 2" in said.err, "deny: 1 of 1" in said.err) == (True, True)
    code, said = call("cross-validate", *base, "--folds", "2", "--candidates", "all")
    assert (code, "--candidates" in said.err) == (2, True)

"""Feature tables on the command line: fit, evaluate, recommend for new entities, similar, info, and bad input."""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

import gramtower as gt
from gramtower.cli.program import run
from gramtower.cli.query import listed
from gramtower.data.frames import read_frame
from gramtower.data.tables import FeatureTable
from gramtower.model.two_tower import load

SMALL = ["--dim", "4", "--hidden", "8", "--device", "cpu"]
COLUMNS = ["--left", "user", "--right", "item"]


def answer(capsys, *tokens, code=0):
    capsys.readouterr()
    assert run([*map(str, tokens), "--json", "--quiet"]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *tokens):
    capsys.readouterr()
    assert run([*map(str, tokens), "--quiet"]) == 2
    return capsys.readouterr().err


def test_low_rank_labels_come_from_files_and_are_read_again_by_update(files, tmp_path, capsys):
    rng, ids = np.random.default_rng(0), {"left_ids": [f"{u:02d}" for u in range(45)]}
    ids |= {"right_ids": [f"item {i}" for i in range(30)]}
    left, right = rng.normal(size=(45, 2)), rng.normal(size=(30, 2))
    np.savez(tmp_path / "labels.npz", left=left, right=right, **ids)
    fit = ["fit", files / "train.csv", *COLUMNS, *SMALL, "--max-iterations", "2"]
    answer(capsys, *fit, "--imputed", tmp_path / "labels.npz", "--out", tmp_path / "run")
    model = load(tmp_path / "run" / "model.gramtower")
    rows = [[*ids["left_ids"]].index(key) for key in model.left_.ids]
    assert np.array_equal(model.imputed[0], left[rows])
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]["imputed"].endswith("labels.npz")
    for side, factor in zip(("left", "right"), model.imputed, strict=True):
        np.save(tmp_path / f"{side}.npy", factor)
    plain = f"{tmp_path / 'left.npy'},{tmp_path / 'right.npy'}"
    answer(capsys, *fit, "--imputed", plain, "--out", tmp_path / "plain")
    again = load(tmp_path / "plain" / "model.gramtower")
    assert [record.value for record in again.history_] == [record.value for record in model.history_]
    (tmp_path / "more.csv").write_text("user,item\n42,item 1\n")
    answer(capsys, "update", tmp_path / "run", tmp_path / "more.csv")
    assert len(load(tmp_path / "run" / "model.gramtower").imputed[0]) == len(model.left_) + 1
    assert "imputed[0]" in refusal(capsys, "update", tmp_path / "plain", tmp_path / "more.csv")
    compare = ["compare", files / "train.csv", *COLUMNS, *SMALL, "--optimizers", "gd", "--max-iterations", "1"]
    found = answer(capsys, *compare, "--imputed", tmp_path / "labels.npz", "--out", tmp_path / "compare")
    assert found["settings"]["problem"]["imputed"].endswith("labels.npz")


def test_bad_files_of_low_rank_labels_are_refused_by_what_is_wrong(files, tmp_path, capsys):
    arrays = {"left": np.ones((40, 2)), "right": np.ones((30, 2))}
    fit = ["fit", files / "train.csv", *COLUMNS, *SMALL, "--out", tmp_path / "run", "--imputed"]
    for change, what in (
        ({"left": np.ones((39, 2))}, r"imputed\[0\].*39"), ({"right": np.ones((30, 1))}, "widths 2 and 1"),
        ({"other": np.ones(3)}, "left, right, other"), ({"left": np.array([{}], dtype=object)}, "cannot be read"),
        ({"left_ids": 100 + np.arange(40)}, "without 40 of 40 left entities, such as '00'"),
        ({"left_ids": np.arange(3)}, "3 ids"), ({"right_ids": np.zeros(30)}, "right_ids"),
        ({"left": np.full((40, 2), np.nan)}, "nan"),
    ):  # fmt: skip
        np.savez(tmp_path / "bad.npz", **arrays | change)
        assert re.search(what, refusal(capsys, *fit, tmp_path / "bad.npz"))
    (tmp_path / "text.npz").write_text("left")
    assert "cannot be read" in refusal(capsys, *fit, tmp_path / "text.npz")
    assert "no such file" in refusal(capsys, *fit, tmp_path / "none.npz")
    assert "LEFT.npy,RIGHT.npy" in refusal(capsys, *fit, tmp_path / "left.npy")
    assert not (tmp_path / "run" / "model.gramtower").exists()


def even(name):
    return int(name.split()[-1]) % 2 == 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Users like items of their parity. Their tables tell it; user 00 and item 0 lack a row, and strangers have one."""
    folder = tmp_path_factory.mktemp("features")
    liked = [(u, i) for u in range(40) for i in range(30) if u % 2 == i % 2]
    for name, kept in (("train.csv", lambda u, i: (u + i) % 5), ("test.csv", lambda u, i: not (u + i) % 5)):
        lines = [f"{u:02d},item {i}" for u, i in liked if kept(u, i)]
        (folder / name).write_text("user,item\n" + "\n".join(lines) + "\n")

    def users(numbers):
        rows = [f"{u:02d},{'odd' if u % 2 else 'even'},{u % 7},{'x|y' if u % 2 else 'y|z'},2020-01-0{1 + u % 9}"
                for u in numbers]  # fmt: skip
        return "user,parity,code,tags,since\n" + "\n".join(rows) + "\n"

    (folder / "users.csv").write_text(users(range(1, 42)))
    (folder / "new.csv").write_text(users([90, 91, 3]))
    items = [f"item {i}\tThe {'odd' if i % 2 else 'even'} film {i}" for i in range(1, 33)]
    (folder / "items.tsv").write_text("id\ttitle\n" + "\n".join(items) + "\n")
    (folder / "foreign.csv").write_text("user,parity\nx,odd\ny,even\n")
    return folder


def fit(files, out, *flags, left="users.csv", iterations=12):
    tables = ["--left-features", files / left, "--right-features", files / "items.tsv", "--hash-bits", 6]
    limits = [*SMALL, "--max-iterations", iterations]
    return ["fit", files / "train.csv", *COLUMNS, *tables, *limits, "--out", out, *flags]


@pytest.fixture(scope="module")
def fitted(files):
    out = files / "run"
    kinds = ["--left-column", "code=categorical", "--left-column", "since=skip", "--left-identity", "--right-identity"]
    assert run([*map(str, fit(files, out, *kinds)), "--quiet"]) == 0
    return out


def test_a_fit_states_the_join_and_the_kinds(files, fitted, capsys):
    left, right = (json.loads((fitted / "summary.json").read_text())["features"][side] for side in ("left", "right"))
    assert left["columns"] == {"parity": "categorical", "code": "categorical", "tags": "list"}
    assert (left["ids_without_features"], left["features_without_ids"], left["skipped"]) == (1, 2, ["since"])
    assert right["columns"] == {"title": "text"}
    assert (right["ids_without_features"], right["features_without_ids"]) == (1, 3)
    assert run([*map(str, fit(files, files / "noted", iterations=1))]) == 0
    said = capsys.readouterr().err
    assert "1 of 40 user entities have no features; 2 rows of features have no pairs" in said
    assert "code (numeric)" in said


def test_features_are_seen_beside_ids_and_info_says_so(fitted, capsys):
    found = answer(capsys, "info", fitted)
    assert (found["left_kind"], found["right_kind"]) == ("id + table", "id + table")
    assert load(fitted / "model.gramtower").right_.inputs.width == 30 + 64


def test_features_mean_what_they_mean_in_python(files, tmp_path, capsys):
    found = answer(capsys, *fit(files, tmp_path / "run", iterations=3))
    assert answer(capsys, "info", tmp_path / "run")["left_kind"] == "table"
    pairs = gt.Interactions.from_csv(files / "train.csv", "user", "item")
    tables = {
        "left_features": FeatureTable.inferred(read_frame("users", files / "users.csv"), "user"),
        "right_features": FeatureTable.inferred(read_frame("items", files / "items.tsv"), "id", hash_bits=6),
    }
    model = gt.TwoTower(dim=4, hidden=(8,), device="cpu", max_iterations=3).fit(pairs, **tables)
    assert [side.inputs.kind for side in (model.left_, model.right_)] == ["table", "table"]
    assert model.history_[-1].value == found["objective"]


def test_a_fit_says_what_each_tower_sees_and_that_the_old_flag_is_not_needed(files, tmp_path, capsys):
    def said(*flags):
        assert run([*map(str, fit(files, tmp_path / "run", *flags, "--fresh", iterations=1))]) == 0
        return capsys.readouterr().err

    text = said("--right-identity")
    line = next(line for line in text.splitlines() if "tower sees" in line)
    assert re.search("user tower sees features without ids; .*item tower sees ids and features", line)
    assert "ids only" in line
    assert "deprecated" not in text
    text = said("--no-right-identity")
    assert "--no-right-identity is deprecated" in text
    assert load(tmp_path / "run/model.gramtower").right_.inputs.kind == "table"
    config = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert "right-identity" not in config["features"]
    assert run(["fit", str(files / "train.csv"), *COLUMNS, *SMALL, "--max-iterations", "1", "--out",
                str(tmp_path / "plain")]) == 0  # fmt: skip
    text = capsys.readouterr().err
    assert "user tower sees ids" in text
    assert "ids only" not in text


def test_an_update_keeps_ids_of_a_run_whose_config_does_not_name_them(files, fitted, tmp_path, capsys):
    shutil.copytree(fitted, tmp_path / "run")
    path = tmp_path / "run/config.toml"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "identity" not in line))
    answer(capsys, "update", tmp_path / "run", files / "test.csv", "--iterations", "1")
    assert answer(capsys, "info", tmp_path / "run")["right_kind"] == "id + table"


def test_identities_beside_features_may_be_a_smaller_correction(files, tmp_path, capsys):
    answer(capsys, *fit(files, tmp_path, "--identity-scale", "0.1", iterations=1))
    model = load(tmp_path / "model.gramtower")
    assert [side.inputs.parts[0].name for side in (model.left_, model.right_)] == ["id*0.1", "id*0.1"]
    assert "identity_scale = 0.1" in (tmp_path / "config.toml").read_text().replace("-", "_")
    assert run([*map(str, fit(files, tmp_path / "none", "--identity-scale", "0"))]) == 2
    assert "--identity-scale: got 0" in capsys.readouterr().err


def test_evaluate_and_similar_work_as_without_features(files, fitted, capsys):
    found = answer(capsys, "evaluate", fitted, "--test", files / "test.csv", "--metrics", "recall@20")
    assert found["metrics"]["recall@20"] > 0.95
    alike = answer(capsys, "similar", fitted, "--left", "07", "-k", "3")["answers"][0]["results"]
    assert not any(even(hit["id"]) for hit in alike)


def test_new_entities_are_recommended_for_by_their_features(files, fitted, capsys):
    found = answer(capsys, "recommend", fitted, "--left-features", files / "new.csv", "-k", 5)["answers"]
    assert [entry["left"] for entry in found] == ["90", "91", "03"]
    for entry in found:
        first = entry["results"][: 3 if entry["left"] == "03" else 5]  # which has seen all others that it likes
        assert all(even(hit["id"]) == even(entry["left"]) for hit in first)
    assert {hit["id"] for hit in first} == {"item 7", "item 17", "item 27"}
    one = answer(capsys, "recommend", fitted, "--left-features", files / "new.csv", "--left", "91", "-k", 5)["answers"]
    assert [hit["id"] for hit in one[0]["results"]] == [hit["id"] for hit in found[1]["results"]]
    assert run(["recommend", str(fitted), "--left-features", str(files / "new.csv")]) == 0
    assert "1 of 3 ids were in the training data" in capsys.readouterr().err


def test_history_and_features_together_serve_a_new_user(files, tmp_path, capsys):
    answer(capsys, *fit(files, tmp_path, "--history"))
    assert answer(capsys, "info", tmp_path)["left_kind"] == "history + table"
    history = [token for i in (1, 3, 5, 7, 9, 11) for token in ("--history", f"item {i}")]
    tokens = ["recommend", tmp_path, *history, "-k", 3]
    alone = answer(capsys, *tokens)["answers"][0]["results"]
    assert not any(even(hit["id"]) for hit in alone)
    both = answer(capsys, *tokens, "--left-features", files / "new.csv", "--left", "91")["answers"][0]
    assert both["left"] == "91"
    assert not any(even(hit["id"]) or hit["id"] in ("item 1", "item 3") for hit in both["results"])
    answer(capsys, *fit(files, tmp_path / "all", "--history", "--left-identity", iterations=1))
    assert answer(capsys, "info", tmp_path / "all")["left_kind"] == "id + history + table"
    answer(capsys, *fit(files, tmp_path / "table", iterations=1))
    assert answer(capsys, "info", tmp_path / "table")["left_kind"] == "table"


def test_new_entities_are_evaluated_by_features_and_histories(files, tmp_path, capsys):
    answer(capsys, *fit(files, tmp_path / "run", "--history"))
    lines = [f"{u},item {i}" for u in (90, 91, 97) for i in range(30) if u % 2 == i % 2]
    (tmp_path / "test.csv").write_text("user,item\n" + "\n".join([*lines[1::2], "90,item 99"]) + "\n")
    (tmp_path / "seen.csv").write_text("user,item\n" + "\n".join(lines[::2]) + "\n")
    tokens = ["evaluate", tmp_path / "run", "--test", tmp_path / "test.csv", "--metrics", "recall@20"]
    features, histories = ["--left-features", files / "new.csv"], ["--histories", tmp_path / "seen.csv"]
    assert "none of them" in refusal(capsys, *tokens)  # known ids alone
    found = answer(capsys, *tokens, *features, *histories)
    assert found["pairs_left_out"] == 1
    assert found["metrics"]["recall@20"] > 0.9
    for given in (features, histories):
        assert answer(capsys, *tokens, *given)["metrics"]["recall@20"] > 0.5
    assert run([*map(str, tokens), *map(str, features)]) == 0
    assert "1 of 3 user entities have no features" in capsys.readouterr().err


def test_new_items_are_ranked_compared_and_measured_by_their_table(files, fitted, tmp_path, capsys):
    items = [f"item {i}\tThe {'odd' if i % 2 else 'even'} film {i}" for i in range(20, 44)]
    table = tmp_path / "catalogue.tsv"
    table.write_text("id\ttitle\n" + "\n".join(items) + "\n\tNameless\n")
    tokens = ["recommend", fitted, "--left", "07", "-k", 40, "--include-seen", "--right-features", table]
    found = [hit["id"] for hit in answer(capsys, *tokens)["answers"][0]["results"]]
    assert len(found) == 40
    assert sum(not even(name) for name in found[:15]) > 12  # words of a title share few features here
    assert len({f"item {i}" for i in range(31, 44, 2)} & set(found[:22])) > 4
    trained = answer(capsys, *tokens, "--candidates", "trained")["answers"][0]["results"]
    assert {hit["id"] for hit in trained} <= {f"item {i}" for i in range(30)}
    assert run([*map(str, tokens)]) == 0
    assert "14 of 24 item entities of catalogue.tsv are new" in capsys.readouterr().err
    alike = answer(capsys, "similar", fitted, "--right", "item 41", "--right-features", table, "-k", 5)["answers"]
    assert not any(even(hit["id"]) for hit in alike[0]["results"])
    rows = answer(capsys, "similar", fitted, "--right-features", table, "-k", 5)["answers"]
    assert [entry["right"] for entry in rows] == [f"item {i}" for i in range(20, 44)]
    assert [hit["id"] for hit in rows[21]["results"]] == [hit["id"] for hit in alike[0]["results"]]
    lines = [f"{u:02d},item {i}" for u in range(40) for i in range(30, 44) if u % 2 == i % 2]
    (tmp_path / "test.csv").write_text("user,item\n" + "\n".join([*lines, "07,item 99"]) + "\n")
    tokens = ["evaluate", fitted, "--test", tmp_path / "test.csv", "--metrics", "recall@20"]
    assert "none of them" in refusal(capsys, *tokens)
    measured = answer(capsys, *tokens, "--right-features", table)
    assert measured["metrics"]["recall@20"] > 0.8
    assert measured["left_out"] == {"unknown_left": 0, "unknown_right": 1, "seen": 0}
    assert "got both" in refusal(capsys, "similar", fitted, "--left", "07", "--right-features", table)


def test_given_pairs_and_those_of_validation_are_not_shown(files, tmp_path, capsys):
    limits = [*COLUMNS, *SMALL, "--max-iterations", 5]
    validation = ["--validation", files / "test.csv", "--metric", "recall@5"]
    answer(capsys, "fit", files / "train.csv", *limits, *validation, "--out", tmp_path / "run")
    ask = ["recommend", tmp_path / "run", "--left", "07", "-k", 30]
    shown = [hit["id"] for hit in answer(capsys, *ask)["answers"][0]["results"]]
    assert sorted(shown) == sorted(f"item {i}" for i in range(0, 30, 2))  # 07 has all odd ones, in either file
    (tmp_path / "more.csv").write_text("user,item\n07,item 4\n07,item 6\n08,item 2\nnobody,item 8\n")
    fewer = answer(capsys, *ask, "--exclude", tmp_path / "more.csv")["answers"][0]["results"]
    assert set(shown) - {hit["id"] for hit in fewer} == {"item 4", "item 6"}
    (tmp_path / "new.csv").write_text("user,item\n07,item 4\n07,item 8\n")
    tokens = ["evaluate", tmp_path / "run", "--test", tmp_path / "new.csv", "--metrics", "recall@15"]
    assert answer(capsys, *tokens)["metrics"]["recall@15"] == 1
    left = answer(capsys, *tokens, "--exclude", tmp_path / "more.csv")
    assert (left["left_out"]["seen"], left["pairs_left_out"]) == (1, 1)
    test = answer(capsys, "evaluate", tmp_path / "run", "--test", files / "test.csv", "--metrics", "recall@5")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert test["metrics"]["recall@5"] == pytest.approx(summary["metric_value"])


def test_the_config_of_a_run_repeats_it(fitted, tmp_path, capsys):
    config = tomllib.loads((fitted / "config.toml").read_text())
    assert config["features"]["left-column"] == {"code": "categorical", "since": "skip"}
    again = answer(capsys, "fit", "--config", fitted / "config.toml", "--out", tmp_path)
    first = json.loads((fitted / "summary.json").read_text())
    assert again["objective"] == pytest.approx(first["objective"], rel=1e-5)
    assert again["features"] == first["features"]


def test_other_features_are_another_run(files, tmp_path, capsys):
    answer(capsys, *fit(files, tmp_path, iterations=1))
    (tmp_path / "other.csv").write_text((files / "users.csv").read_text().replace("05,odd", "05,even"))
    assert "differs in features" in refusal(capsys, *fit(files, tmp_path, left=tmp_path / "other.csv", iterations=1))


def test_movielens_tables_are_read_as_they_come(tmp_path, capsys):
    ratings = [f"{u}::{i}::5::1" for u in range(6) for i in range(6) if u % 2 == i % 2]
    (tmp_path / "ratings.dat").write_text("\n".join(ratings) + "\n")
    (tmp_path / "users.dat").write_text("".join(f"{u}::{'FM'[u % 2]}::25::{u}::0213{u}\n" for u in range(6)))
    movies = "".join(f"{i}::Film {i} (19{i}0)::{'War|Drama' if i % 2 else 'War'}\n" for i in range(6))
    (tmp_path / "movies.dat").write_text(movies, encoding="latin-1")
    tables = ["--left-features", tmp_path / "users.dat", "--right-features", tmp_path / "movies.dat"]
    found = answer(
        capsys, "fit", tmp_path, *tables, *SMALL, "--max-iterations", 1, "--hash-bits", 5, "--out", tmp_path / "run"
    )
    assert found["features"]["left"]["columns"]["zip"] == "categorical"
    assert found["features"]["right"]["columns"] == {"title": "text", "genres": "list"}


def test_bad_features_are_one_line(files, fitted, tmp_path, capsys):
    out = tmp_path / "out"
    assert "none of them with the id" in refusal(capsys, *fit(files, out, left="foreign.csv"))
    assert "nofile" in refusal(capsys, *fit(files, out, left="nofile.csv"))
    assert "--left-id" in refusal(capsys, *fit(files, out, "--left-id", "uid", left="items.tsv"))
    assert "'parity'" in refusal(capsys, *fit(files, out, "--left-column", "party=text"))
    assert "'number'" in refusal(capsys, *fit(files, out, "--left-column", "code=number"))
    assert "--right-features" in refusal(
        capsys, "fit", files / "train.csv", *COLUMNS, "--no-right-identity", "--out", out
    )
    for flag, value in (("--right-id", "item"), ("--right-column", "a=text"), ("--right-encoder", "a=b")):
        tokens = ("fit", files / "train.csv", *COLUMNS, flag, value, "--out", out)
        assert f"{flag}: got" in refusal(capsys, *tokens)
    (tmp_path / "few.csv").write_text("user,parity\n95,odd\n")
    assert "got a table of user, parity, expected the column 'code'" in refusal(
        capsys, "recommend", fitted, "--left-features", tmp_path / "few.csv"
    )
    assert "97" in refusal(capsys, "recommend", fitted, "--left-features", files / "new.csv", "--left", "97")
    assert not out.exists()


@pytest.fixture(scope="module")
def shelf(files):
    """A model without features, and a table of its right entities."""
    rows = [f"item {i},Film {i},{1990 + i}.0,{'War|Drama' if i % 3 else 'Comedy'}" for i in range(29)]
    (files / "shelf.csv").write_text("item,title,year,genre\n" + "\n".join(rows) + "\n")
    out = files / "plain"
    tokens = ["fit", files / "train.csv", *COLUMNS, *SMALL, "--max-iterations", 6, "--out", out, "--quiet"]
    assert run([*map(str, tokens)]) == 0
    return out, files / "shelf.csv"


def test_lists_show_titles_of_a_table(files, fitted, shelf, tmp_path, capsys):
    plain, table = shelf
    tokens = ["recommend", plain, "--left", "07", "-k", 30, "--include-seen"]
    assert "title" not in answer(capsys, *tokens)["answers"][0]["results"][0]
    found = answer(capsys, *tokens, "--right-table", table)["answers"][0]["results"]
    assert {hit["id"]: hit["title"] for hit in found} == {
        f"item {i}": f"Film {i}" if i < 29 else None for i in range(30)
    }
    found = answer(capsys, *tokens, "--right-table", table, "--right-title", "genre")["answers"][0]["results"]
    assert {hit["title"] for hit in found} == {"War|Drama", "Comedy", None}
    assert run([*map(str, tokens), "--right-table", str(table)]) == 0
    assert "Film 7" in capsys.readouterr().out
    found = answer(capsys, "recommend", fitted, "--left", "07")["answers"][0]["results"]  # the run's own table
    assert all(hit["title"].endswith(f" film {hit['id'].split()[1]}") for hit in found if hit["id"] != "item 0")
    new = tmp_path / "new.tsv"
    new.write_text("id\ttitle\n" + "".join(f"item {i}\tThe odd film {i}\n" for i in (1, 3, 51, 53)))
    tokens = ["recommend", fitted, "--left", "07", "-k", 40, "--include-seen", "--right-features", new]
    titles = {hit["id"]: hit["title"] for hit in answer(capsys, *tokens)["answers"][0]["results"]}
    assert titles["item 51"] == "The odd film 51"
    found = answer(capsys, *tokens, "--where", "title == 'The odd film 51'")["answers"][0]["results"]
    assert [hit["id"] for hit in found] == ["item 51"]
    tokens = ["similar", plain, "--right", "item 4", "-k", 29]
    assert "title" not in answer(capsys, *tokens)["answers"][0]["results"][0]
    found = answer(capsys, *tokens, "--right-table", table)["answers"][0]["results"]
    assert {hit["id"]: hit["title"] for hit in found} == {
        f"item {i}": f"Film {i}" if i < 29 else None for i in range(30) if i != 4
    }
    found = answer(capsys, "similar", fitted, "--right-features", new, "-k", 5)["answers"][-1]["results"]
    assert all("title" in hit for hit in found)  # of the run's own table


def test_a_model_file_says_how_columns_of_ids_are_called(files, shelf, tmp_path, capsys):
    plain, table = shelf
    model = tmp_path / "alone.gramtower"
    load(plain / "model.gramtower").save(model)
    tokens = ["recommend", model, "--left", "07", "--right-table", table]
    assert answer(capsys, *tokens)["answers"][0]["results"][0]["title"].startswith("Film")
    (tmp_path / "own.csv").write_text("user,item\n07,item 3\n")
    found = answer(capsys, *tokens, "--allow-pairs", tmp_path / "own.csv", "--include-seen")["answers"][0]["results"]
    assert [hit["id"] for hit in found] == ["item 3"]
    (tmp_path / "edges.csv").write_text("07,item 3\n07,item 4\n")
    edges = ["--test", tmp_path / "edges.csv", "--format", "edges", "--no-exclude-seen"]
    assert answer(capsys, "evaluate", model, *edges)["pairs"] == 2
    (tmp_path / "test.csv").write_text("item,user\nitem 3,07\nitem 4,07\n")
    assert answer(capsys, "evaluate", model, "--test", tmp_path / "test.csv", "--no-exclude-seen")["pairs"] == 2


def test_lists_are_filtered_by_columns(shelf, tmp_path, capsys):
    plain, table = shelf
    tokens = ["recommend", plain, "--left", "07", "-k", 30, "--include-seen", "--right-table", table]

    def numbers(*flags):
        found = answer(capsys, *tokens, *flags)["answers"][0]["results"]
        return sorted(int(hit["id"].split()[1]) for hit in found)

    assert numbers("--where", "genre == 'Comedy'") == list(range(0, 29, 3))
    assert numbers("--where", "genre == 'Drama' and 2000 <= year <= 2004") == [10, 11, 13, 14]
    assert numbers("--where", "year in [1991, 1992]") == [1, 2]
    assert numbers("--where", "genre == 'Comedy'", "--allow", "item 0", "item 1", "item 3") == [0, 3]
    assert numbers("--where", "genre == 'Opera'") == []
    assert len(numbers("--at-most", "genre=2")) == 5  # two of Comedy, two of War|Drama, and one without a row
    (tmp_path / "own.csv").write_text("user,item\n07,item 3\n07,item 4\n08,item 5\n")
    assert numbers("--allow-pairs", tmp_path / "own.csv") == [3, 4]
    out = tmp_path / "all.csv"
    everything = ["recommend", plain, "--all", "--out", out, "--right-table", table, "--where", "year<=1991"]
    answer(capsys, *everything)
    assert {line.split(",")[2] for line in out.read_text().splitlines()[1:]} <= {"item 0", "item 1"}
    for flag in ("year =", "genre >= 3", "year >= 'x'", "yeer == 1990"):
        assert "where: " in refusal(capsys, *tokens, "--where", flag)
    assert "--right-table" in refusal(capsys, "recommend", plain, "--left", "07", "--where", "year == 1990")


def test_scores_are_boosted_and_cut_in_the_shell(shelf, capsys):
    plain, table = shelf
    tokens = ["recommend", plain, "--left", "07", "-k", 30, "--include-seen", "--right-table", table]

    def scores(*flags):
        return {hit["id"]: hit["score"] for hit in answer(capsys, *tokens, *flags)["answers"][0]["results"]}

    before, fitted = scores(), load(plain / "model.gramtower").fitted_
    pairs = dict(zip(fitted.right.ids, fitted.popularity.tolist(), strict=True))
    years = {f"item {i}": 1990 + i if i < 29 else 0 for i in range(30)}
    expected = {key: s + 0.01 * years[key] - 0.5 * math.log(1 + pairs[key]) for key, s in before.items()}
    least = sorted(expected.values())[20] - 1e-3
    after = scores("--boost", "year=0.01", "--popularity", "-0.5", "--min-score", least)
    assert after == pytest.approx({key: s for key, s in expected.items() if s >= least}, abs=1e-4)
    assert list(scores("--diversity", 0.9)) != list(before)
    for flags in (["--boost", "year=inf"], ["--boost", "yeer=1"], ["--at-most", "genre=x"], ["--diversity", 2]):
        assert f"{flags[0][2:].replace('-', '_')}" in refusal(capsys, *tokens, *flags)


def test_ids_to_allow_or_deny_come_several_at_once_or_from_a_file(shelf, tmp_path, capsys):
    plain, _ = shelf
    tokens = ["recommend", plain, "--left", "07", "-k", 30, "--include-seen"]

    def ids(*flags):
        return {hit["id"] for hit in answer(capsys, *tokens, *flags)["answers"][0]["results"]}

    assert ids("--allow", "item 1", "item 2", "--allow", "item 3") == {"item 1", "item 2", "item 3"}
    (tmp_path / "stock.txt").write_bytes("\ufeffitem 4\r\n\nitem 5\n".encode())
    assert ids("--allow", f"@{tmp_path / 'stock.txt'}", "item 1") == {"item 1", "item 4", "item 5"}
    assert ids("--deny", f"@{tmp_path / 'stock.txt'}", "item 1") == {
        f"item {i}" for i in range(30) if i not in (1, 4, 5)
    }
    assert "no such file" in refusal(capsys, *tokens, "--allow", f"@{tmp_path / 'none'}")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "--deny: " in refusal(capsys, *tokens, "--deny", f"@{tmp_path / 'bytes'}")
    assert listed("--allow", ["@@x", "@@@y", "z"]) == ["@x", "@@y", "z"]
    (tmp_path / "test.csv").write_text("user,item\n07,item 1\n07,item 4\n07,item 9\n")
    tested = ["evaluate", plain, "--test", tmp_path / "test.csv", "--no-exclude-seen", "--metrics", "recall@1"]
    allowed = ["--allow", f"@{tmp_path / 'stock.txt'}", "item 1"]
    assert answer(capsys, *tested, *allowed)["left_out"]["not_allowed"] == 1

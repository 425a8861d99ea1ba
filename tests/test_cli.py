"""The command line, run in-process: what it prints, what it leaves on disk and how it ends."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import inspect
import json
import os
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import torch

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

import gramtower.training.callbacks
from gramtower._util.files import toml
from gramtower.cli.options import TABLES
from gramtower.cli.program import run
from gramtower.model.two_tower import TwoTower, load
from gramtower.training.checkpoint import locked

SMALL = ["--dim", "4", "--hidden", "8", "--device", "cpu", "--quiet"]
COLUMNS = ["--left", "user", "--right", "item"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two groups that like the even and the odd items; each user lacks some of its own, which are the test pairs."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("pairs")
    rows = [(f"{u:03d}", f"film {i} [x]", 5 if u % 2 == i % 2 else 1) for u in range(40) for i in range(30)]
    test = rng.random(len(rows)) < 0.25
    for name, chosen in (("train.csv", ~test), ("test.csv", test)):
        lines = [f"{u},{i},{r}" for (u, i, r), keep in zip(rows, chosen, strict=True) if keep]
        (folder / name).write_text("\n".join(["user,item,rating", *lines]) + "\n")
    return folder


@pytest.fixture(scope="module")
def fitted(pairs):
    rated = [*COLUMNS, "--value", "rating", "--threshold", "4"]
    out = pairs / "run"
    assert run(["fit", str(pairs / "train.csv"), *rated, *SMALL, "--max-iterations", "8", "--out", str(out)]) == 0
    return out


def answer(capsys, *tokens, code=0):
    """The JSON that a command prints on standard output."""
    capsys.readouterr()
    assert run([*map(str, tokens), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *tokens, code=2):
    """The one line of an error."""
    capsys.readouterr()
    assert run([*map(str, tokens)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_run_folder_holds_everything_that_was_used(fitted, pairs):
    assert sorted(p.name for p in fitted.iterdir()) == [
        "checkpoint.safetensors", "checkpoint.safetensors.history", "config.toml", "history.jsonl", "model.gramtower",
        "summary.json",
    ]  # fmt: skip
    config = tomllib.loads((fitted / "config.toml").read_text())
    assert config["data"]["threshold"] == 4
    assert config["model"]["hidden"] == [8]
    assert config["train"]["patience"] == TwoTower().patience
    summary = json.loads((fitted / "summary.json").read_text())
    assert summary["iterations"] == 8
    assert summary["environment"]["threads"] >= 1
    assert len((fitted / "history.jsonl").read_text().splitlines()) == 9


def test_people_read_the_names_of_the_data_and_programs_left_and_right(fitted, pairs, capsys):
    assert run(["info", str(fitted)]) == 0
    shown = capsys.readouterr().out
    assert "user entities" in shown
    assert "item id" in shown
    assert "left_id" not in shown
    assert answer(capsys, "info", fitted)["names"] == {"left": "user", "right": "item"}
    assert run(["info", str(pairs / "train.csv"), *COLUMNS, "--time", "rating"]) == 0
    assert "1970-01-01T00:00:" in capsys.readouterr().out
    assert "error: user ids: got unknown ids 'nobody'" in refusal(capsys, "recommend", fitted, "--left", "nobody")
    assert "error: item ids: got unknown ids 'none'" in refusal(capsys, "similar", fitted, "--right", "none")


def test_evaluation_finds_the_planted_groups(fitted, pairs, capsys):
    test = ("--test", pairs / "test.csv")  # columns and threshold come from the run
    found = answer(capsys, "evaluate", fitted, *test, "--metrics", "recall@20, ndcg@5")
    assert set(found["metrics"]) == {"recall@20", "ndcg@5"}
    assert found["metrics"]["recall@20"] > 0.95
    assert found["pairs_left_out"] == 0
    seen = answer(capsys, "evaluate", fitted, *test, "--metrics", "ndcg@5", "--no-exclude-seen")
    assert seen["metrics"]["ndcg@5"] < found["metrics"]["ndcg@5"]
    parts = answer(capsys, "evaluate", fitted, *test, "--by", "popularity")
    assert any("popularity" in name for name in parts["metrics"])


def test_evaluation_has_metrics_of_lists_and_of_rare_items(fitted, pairs, capsys):
    names = "psp@5,hr@5,hit_rate@5,mrr,coverage@5,gini@5,novelty@5,diversity@5,precision@5"
    found = answer(capsys, "evaluate", fitted, "--test", pairs / "test.csv", "--metrics", names)["metrics"]
    assert list(found) == names.split(",")
    assert found["hr@5"] == found["hit_rate@5"] >= found["mrr"] > 0.5
    assert 0 < found["psp@5"] <= 1
    assert min(found["novelty@5"], found["diversity@5"], found["gini@5"]) > 0
    assert "novelty@5 activity=low" in answer(
        capsys, "evaluate", fitted, "--test", pairs / "test.csv", "--metrics", "novelty@5", "--by", "activity"
    )["metrics"]  # fmt: skip


def test_unknown_test_ids_are_left_out_and_counted(fitted, tmp_path, capsys):
    (tmp_path / "t.csv").write_text("user,item,rating\n000,film 0 [x],5\nnobody,film 2 [x],5\n000,film 28 [x],5\n")
    tokens = ("evaluate", fitted, "--test", tmp_path / "t.csv", "--no-exclude-seen")
    assert answer(capsys, *tokens)["pairs_left_out"] == 1
    (tmp_path / "t.csv").write_text("user,item,rating\nnobody,film 2 [x],5\n")
    assert "none of them" in refusal(capsys, *tokens)


def test_what_is_left_out_of_a_fit_is_said_and_counted(tmp_path, capsys):
    rows = [f"{u},{i}" for u in range(8) for i in range(5) if (u + i) % 2]
    (tmp_path / "p.csv").write_text("\n".join(["user,item", *rows, *["9,"] * 60]) + "\n")
    (tmp_path / "v.csv").write_text("user,item\n0,2\n70,2\n0,71\n")
    tokens = ["fit", str(tmp_path / "p.csv"), *COLUMNS, *SMALL, "--max-iterations", "1", "--out", str(tmp_path / "run")]
    assert run([*tokens, "--validation", str(tmp_path / "v.csv"), "--json"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert (facts["rows_left_out"], facts["validation_pairs"], facts["validation_pairs_left_out"]) == (60, 1, 2)
    assert facts["pairs"] == len(rows)
    assert "warning: more than half: 60 of 80 rows are left out (60 without an id)\n" in printed.err
    assert "warning: more than half: 2 of 3 pairs of validation are left out" in printed.err


def test_the_shell_asks_in_the_type_of_the_models_ids(tmp_path, capsys):
    import polars as pl

    rows = [(u, i) for u in range(8) for i in range(5) if (u + i) % 2]
    frame = pl.DataFrame(rows, schema=["user", "item"], orient="row")
    frame.write_parquet(tmp_path / "p.parquet")
    frame.head(3).write_csv(tmp_path / "t.csv")
    fit = [
        "fit",
        str(tmp_path / "p.parquet"),
        *COLUMNS,
        *SMALL,
        "--max-iterations",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run(fit) == 0
    found = answer(capsys, "recommend", tmp_path / "run", "--left", "7", "--deny", "1", "-k", "5")["answers"][0]
    assert found["left"] == 7
    assert {hit["id"] for hit in found["results"]} == {3}
    assert answer(capsys, "similar", tmp_path / "run", "--right", "2", "-k", "1")["answers"][0]["right"] == 2
    assert "ids are whole numbers here" in refusal(capsys, "recommend", tmp_path / "run", "--left", "007")
    evaluated = answer(capsys, "evaluate", tmp_path / "run", "--test", tmp_path / "t.csv", "--no-exclude-seen")
    assert (evaluated["pairs"], evaluated["pairs_left_out"]) == (3, 0)


def test_recommendations_are_new_items_of_the_users_group(fitted, capsys):
    found = answer(capsys, "recommend", fitted, "--left", "007", "--left", "010", "-k", "2")["answers"]
    assert [entry["left"] for entry in found] == ["007", "010"]
    assert all(int(hit["id"].split()[1]) % 2 == 1 for hit in found[0]["results"])
    assert run(["recommend", str(fitted), "--left", "007", "-k", "1", "--quiet"]) == 0
    assert capsys.readouterr().out.split()[:4] == ["user", "rank", "item", "score"]
    assert run(["recommend", str(fitted), "--left", "007", "--min-score", "1e9", "--quiet"]) == 0
    assert capsys.readouterr().out.split()[-4:] == ["007", "-", "-", "-"]  # an empty list is an answer
    asked = ["recommend", fitted, "--left", "007"]
    assert "--boost: got 'year', expected COLUMN=NUMBER" in refusal(capsys, *asked, "--boost", "year")
    assert "--at-most: got 'year'" in refusal(capsys, *asked, "--at-most", "year")
    model = load(fitted / "model.gramtower")
    ids, scores = model.recommend(["007"], 2)
    assert [hit["id"] for hit in found[0]["results"]] == ids[0].tolist()
    assert [hit["score"] for hit in found[0]["results"]] == pytest.approx(scores[0].tolist())
    best = found[0]["results"][0]["id"]
    denied = answer(capsys, "recommend", fitted, "--left", "007", "--deny", best)["answers"][0]["results"]
    assert best not in [hit["id"] for hit in denied]
    everything = answer(capsys, "recommend", fitted, "--left", "007", "-k", "99", "--include-seen")["answers"][0]
    assert len(everything["results"]) == len(model.right_) > len(denied)


def test_similar_entities_are_of_the_same_group(fitted, capsys):
    found = answer(capsys, "similar", fitted, "--left", "007", "-k", "5")["answers"][0]
    assert all(int(hit["id"]) % 2 == 1 and hit["id"] != "007" for hit in found["results"])
    capsys.readouterr()
    assert run(["similar", str(fitted), "--right", "film 4 [x]", "-k", "3"]) == 0
    assert "[x]" in capsys.readouterr().out  # brackets are text, not markup


def test_info_counts_a_model_and_a_file(fitted, pairs, capsys):
    model = answer(capsys, "info", fitted)
    assert (model["kind"], model["left_id"], model["settings"]["dim"]) == ("model", "000", 4)
    data = answer(capsys, "info", pairs / "train.csv", *COLUMNS, "--value", "rating", "--threshold", "4")
    assert (data["kind"], data["left"], data["pairs"]) == ("pairs", model["left"], model["pairs"])
    assert run(["info", str(fitted)]) == 0
    assert "pairs per entity" in capsys.readouterr().out


def test_folders_of_public_sets_are_told_by_their_files_or_flag(tmp_path, capsys):
    sets = {
        "citeulike": {"users.dat": "2 0 2\n1 1\n", "words.dat": "1 0:4\n0\n1 1:2\n", "vocabulary.dat": "a\nb\n"},
        "musae": {"x_edges.csv": "a,b\n0,7\n", "x_features.json": '{"7": [0]}', "x_pages.csv": "id,name\n0,A\n7,B\n"},
        "wikispeedia": {"links.tsv": "A\tB\nB\tC\n", "categories.tsv": "A\tsubject.X\n"},
    }
    for name, files in sets.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
        expected = {"citeulike": (2, 3, 3), "musae": (2, 2, 2), "wikispeedia": (3, 3, 2)}[name]
        for flags in ([], ["--format", name]):
            found = answer(capsys, "info", tmp_path / name, *flags)
            assert (found["left"], found["right"], found["pairs"]) == expected
        assert "has its own columns" in refusal(capsys, "info", tmp_path / name, "--left", "user")
    assert "expected a folder with links.tsv" in refusal(capsys, "info", tmp_path / "musae", "--format", "wikispeedia")


def test_formats_are_told_by_name_or_flag(tmp_path, capsys):
    with gzip.open(tmp_path / "a.tsv.gz", "wt") as file:
        file.write("u\ti\n01\tx\n01\ty\n2\tx\n")
    (tmp_path / "lists.txt").write_text("01 x y\n2 x\n")
    (tmp_path / "edges.txt").write_text("01 x 5\n01 y 4\n2 x 4\n2 y 1\n")
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml/ratings.dat").write_text("01::x::5::9\n01::y::4::9\n2::x::4::9\n2::y::3::9\n")
    (tmp_path / "nf").mkdir()
    (tmp_path / "nf/combined_data_1.txt").write_text(
        "7:\n1,5,2001-01-01\n2,4,2001-01-01\n8:\n1,4,2001-01-01\n2,1,2001-01-01\n"
    )
    netflix = answer(capsys, "info", tmp_path / "nf")
    assert (netflix["left"], netflix["right"], netflix["pairs"], netflix["right_id"]) == (2, 2, 3, "7")
    ways = [
        ("a.tsv.gz", "--left", "u", "--right", "i"),
        ("lists.txt", "--format", "lists"),
        ("edges.txt", "--format", "edges", "--value", "2", "--threshold", "4"),
        ("ml",),
        ("commas.txt", "--format", "lists", "--separator", ","),
        ("links.tsv", "--format", "edges"),
        ("semi.csv", "--left", "u", "--right", "i", "--separator", ";"),
        ("tabs.txt", "--format", "edges", "--separator", "tab"),
    ]
    (tmp_path / "commas.txt").write_text("01,x 1,y\n2,x 1\n")
    (tmp_path / "links.tsv").write_text("01\tx\n01\ty z\n2\tx\n")
    (tmp_path / "tabs.txt").write_text("01\tx\n01\ty z\n2\tx\n")
    (tmp_path / "semi.csv").write_text("u;i\n01;x\n01;y\n2;x\n")
    for name, *flags in ways:
        found = answer(capsys, "info", tmp_path / name, *flags)
        assert (found["left"], found["right"], found["pairs"], found["left_id"]) == (2, 2, 3, "01"), name
    assert "--format" in refusal(capsys, "info", tmp_path / "lists.txt")
    assert "own columns" in refusal(capsys, "info", tmp_path / "ml", "--left", "user")
    assert "--separator" in refusal(capsys, "info", tmp_path / "ml", "--separator", ";")


def test_flags_win_over_the_config_and_a_runs_own_config_repeats_it(fitted, tmp_path, capsys):
    config = ["--config", fitted / "config.toml", "--quiet"]
    again = answer(capsys, "fit", *config, "--out", tmp_path / "again")
    summary = json.loads((fitted / "summary.json").read_text())
    assert again["objective"] == pytest.approx(summary["objective"], rel=1e-5)
    short = answer(capsys, "fit", *config, "--max-iterations", "1", "--out", tmp_path / "short")
    assert short["iterations"] == 1
    assert load(tmp_path / "short/model.gramtower").dim == 4


def test_an_interrupted_fit_goes_on_by_the_same_command(pairs, tmp_path, capsys, monkeypatch):
    tokens = ["fit", pairs / "train.csv", *COLUMNS, *SMALL[:-1], "--max-iterations", "6", "--validation", "0.2"]
    whole = answer(capsys, *tokens, "--patience", "99", "--out", tmp_path / "whole")
    show = gramtower.training.callbacks.Log.__call__

    def interrupt(log, record):
        show(log, record)
        if record.iteration == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(gramtower.training.callbacks.Log, "__call__", interrupt)
    cut = answer(capsys, *tokens, "--patience", "99", "--out", tmp_path / "cut", code=130)
    assert cut["iterations"] == 3
    monkeypatch.undo()
    rest = answer(capsys, *tokens, "--patience", "99", "--out", tmp_path / "cut")
    assert rest["resumed"]
    assert not whole["resumed"]
    assert rest["iterations"] == 6
    assert (rest["objective"], rest["metric_value"]) == (whole["objective"], whole["metric_value"])


def test_a_run_in_a_folder_that_another_one_writes_is_refused_and_changes_nothing(pairs, tmp_path, capsys):
    tokens = [*map(str, ["fit", pairs / "train.csv", *COLUMNS, *SMALL, "--out", tmp_path / "run"])]
    assert run([*tokens, "--max-iterations", "2"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for lock, said in ((tmp_path / "run", "out: "), (tmp_path / "run/checkpoint.safetensors", "checkpoint: ")):
        with locked(lock):
            assert run([*tokens, "--fresh"]) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"error: {said}")
            assert "is being written by another run" in error
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    with locked(tmp_path / "run"):
        assert run(["tune", *tokens[1:]]) == 2


def test_a_report_on_a_fit_says_its_end_and_leaves_its_summary(pairs, tmp_path, capsys):
    tokens = ["fit", pairs / "train.csv", *COLUMNS, *SMALL, "--out", tmp_path / "run", "--max-iterations", "2"]
    answer(capsys, *tokens)
    before = (tmp_path / "run/summary.json").read_bytes()
    found = answer(capsys, "report", tmp_path / "run")
    assert (found["status"], found["iterations"]) == ("finished", 2)
    assert "iterations (2)" in found["message"]
    assert (tmp_path / "run/summary.json").read_bytes() == before
    last = (tmp_path / "run/history.jsonl").read_text().splitlines()[-1]
    with (tmp_path / "run/history.jsonl").open("a") as file:  # a run that goes on, and was killed
        file.write(last.replace('"iteration": 2', '"iteration": 3') + "\n")
    found = answer(capsys, "report", tmp_path / "run")
    assert (found["status"], found["message"]) == ("unfinished", "no end was recorded")
    assert "which holds a fit" in refusal(capsys, "compare", *tokens[1:])


@pytest.mark.parametrize(
    "command",
    ["fit", "tune", "compare", "benchmark", "cross-validate", "convert", "partition", "split", "demo"],
)
def test_every_command_ends_with_130_after_ctrl_c(command, pairs, tmp_path, capsys, monkeypatch):
    from gramtower.engine.objective.problem import Problem

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    tokens = [pairs / "train.csv", *COLUMNS] if command != "demo" else []
    tokens += SMALL if command in ("fit", "tune", "compare") else []
    tokens += ["--by", "random"] if command == "split" else []
    if command in ("convert", "partition", "split"):
        reader = "read_batches" if command == "partition" else "read_pairs"
        monkeypatch.setattr(f"gramtower.cli.data_commands.{reader}", interrupt)
    monkeypatch.setattr(Problem, "at", interrupt)
    out = tmp_path / ("out.csv" if command == "convert" else "out")
    assert run([*map(str, [command, *tokens, "--out", out])]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: interrupted; ")


def test_a_command_that_is_refused_leaves_no_folder(fitted, pairs, tmp_path, capsys):
    train, out = [pairs / "train.csv", *COLUMNS, *SMALL], ["--out", tmp_path / "new" / "out"]
    assert "did you mean damping" in refusal(capsys, "fit", *train, *out, "--option", "dampin=1")
    assert "did you mean damping" in refusal(capsys, "tune", *train, *out, "--option", "dampin=1")
    assert "MORE: no such file" in refusal(capsys, "update", fitted, tmp_path / "none.csv", *out)
    assert not list(tmp_path.iterdir())
    (tmp_path / "new").mkdir()
    refusal(capsys, "update", fitted, tmp_path / "none.csv", *out)
    assert not list((tmp_path / "new").iterdir())  # one that was there stays


@pytest.mark.parametrize("command", ["fit", "tune", "compare", "benchmark", "cross-validate"])
def test_ratings_without_a_threshold_are_refused_by_the_flag_that_is_missing(command, pairs, tmp_path, capsys):
    said = refusal(capsys, command, pairs / "train.csv", *COLUMNS, "--value", "rating", "--out", tmp_path / "out")
    assert said.startswith("error: --value: ")
    assert "--threshold" in said
    assert "--loss squared" in said
    assert "matrix" not in said


@pytest.mark.parametrize(
    ("name", "separator", "flag"),
    [("a.csv", ";", "--separator ';'"), ("a.csv", "\t", "--separator tab"), ("a.tsv", ";", "--separator ';'")],
)
def test_another_separator_is_named(name, separator, flag, tmp_path, capsys):
    (tmp_path / name).write_text(f"u{separator}i\n1{separator}x\n2{separator}y\n")
    assert flag in refusal(capsys, "info", tmp_path / name, "--left", "u", "--right", "i")
    given = "tab" if separator == "\t" else separator
    assert answer(capsys, "info", tmp_path / name, "--left", "u", "--right", "i", "--separator", given)["pairs"] == 2
    (tmp_path / name).write_text("u,i;j\n1,x\n" if name == "a.csv" else "u\ti;j\n1\tx\n")
    assert "--separator" not in refusal(capsys, "info", tmp_path / name, "--left", "no", "--right", "i;j")


def test_pair_weights_reach_the_objective(pairs, tmp_path, capsys):
    tokens = ["fit", pairs / "train.csv", *COLUMNS, *SMALL, "--max-iterations", "0", "--embedding-l2", "0"]
    plain = answer(capsys, *tokens, "--out", tmp_path / "a")
    weighted = answer(capsys, *tokens, "--weight", "rating", "--out", tmp_path / "b")
    assert weighted["objective"] > plain["objective"]  # weights are 1 and 5


def test_a_raised_limit_goes_on_and_other_settings_need_fresh(pairs, tmp_path, capsys):
    tokens = ["fit", pairs / "train.csv", *COLUMNS, *SMALL, "--out", tmp_path]
    answer(capsys, *tokens, "--max-iterations", "1")
    assert answer(capsys, *tokens, "--max-iterations", "2")["resumed"]
    assert "objective" in refusal(capsys, *tokens, "--l2", "3")
    assert not answer(capsys, *tokens, "--l2", "3", "--max-iterations", "1", "--fresh")["resumed"]


def test_bad_input_is_one_line_and_exit_code_2(fitted, pairs, tmp_path, capsys):
    train, out = pairs / "train.csv", ["--out", tmp_path / "out"]
    columns = refusal(capsys, "fit", train, "--left", "usr", "--right", "item", *out)
    assert "user, item, rating" in columns
    assert not (tmp_path / "out").exists()
    assert "--right" in refusal(capsys, "fit", train, "--left", "user", *out)
    assert "nofile.csv" in refusal(capsys, "fit", tmp_path / "nofile.csv", *COLUMNS, *out)
    assert "--value" in refusal(capsys, "fit", train, *COLUMNS, "--threshold", "4", *out)
    assert "hidden" in refusal(capsys, "fit", train, *COLUMNS, "--hidden", "8;8", *out)
    assert "dim" in refusal(capsys, "compare", train, *COLUMNS, "--dim", "0", "--quiet", *out)
    assert "validation" in refusal(capsys, "fit", train, *COLUMNS, "--validation", "1.5", *out)
    assert "--embedding-l2" in refusal(capsys, "fit", train, "--embeding-l2", "3", *out)
    assert "'007'" in refusal(capsys, "recommend", fitted, "--left", "0077")
    assert "film 4 [x]" in refusal(capsys, "similar", fitted, "--right", "film 4 x")
    assert "neither" in refusal(capsys, "similar", fitted)
    assert "recall" in refusal(capsys, "evaluate", fitted, "--test", train, "--metrics", "recal@20")
    assert "recommend" in refusal(capsys, "recomend", fitted)


def test_a_foreign_model_and_an_empty_folder_are_refused(tmp_path, capsys):
    (tmp_path / "model.gramtower").write_bytes(b"something else")
    assert "not a gramtower model" in refusal(capsys, "recommend", tmp_path, "--left", "1")
    (tmp_path / "empty").mkdir()
    assert "model.gramtower" in refusal(capsys, "evaluate", tmp_path / "empty", "--test", "x.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\ndims = 3", "'dim'"),
        ("[modell]\ndim = 3", "[model]"),
        ("dim = 3", "[model]"),
        ("[data]\nmax-iterations = 3", "[train]"),
        ("[model]\ndim = 'x'", "a whole number"),
        ("[model\n", "not a TOML file"),
    ],
)
def test_a_wrong_config_names_what_was_meant(text, message, pairs, tmp_path, capsys):
    (tmp_path / "c.toml").write_text(text)
    tokens = ("fit", pairs / "train.csv", *COLUMNS, "--config", tmp_path / "c.toml", "--out", tmp_path / "out")
    assert message in refusal(capsys, *tokens)


def test_a_failure_is_exit_code_1_and_debug_shows_where(fitted, capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(TwoTower, "recommend", broken)
    said = refusal(capsys, "recommend", fitted, "--left", "007", code=1)
    assert "internal error in gramtower (cli/query.py, line" in said
    assert "--debug" in said
    assert "Error" not in said
    assert run(["recommend", str(fitted), "--left", "007", "--debug"]) == 1
    assert "in broken" in capsys.readouterr().err
    monkeypatch.setenv("GRAMTOWER_DEBUG", "1")
    assert run(["recommend", str(fitted), "--left", "007"]) == 1
    assert "in broken" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 1, "not enough memory; try a smaller --dim"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] can't allocate memory: 9 bytes"), 1, "not enough memory; try"),
        (RecursionError("maximum recursion depth exceeded"), 2, "nested too deeply"),
        (OSError(errno.ENOSPC, "No space left on device", "run"), 1, "run: no space left on the disk"),
        (OSError(errno.EROFS, "Read-only file system", "run"), 2, "run: the file system is read-only"),
        (KeyError("x"), 1, "internal error in gramtower"),
    ],
)
def test_every_error_is_said_in_words_of_this_library(fitted, capsys, monkeypatch, error, code, words):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(TwoTower, "recommend", broken)
    said = refusal(capsys, "recommend", fitted, "--left", "007", code=code)
    assert words in said
    assert "Errno" not in said
    assert "alloc_cpu" not in said


def test_paths_that_cannot_be_used_are_named(fitted, pairs, tmp_path, capsys):
    fit = ("fit", pairs / "train.csv", *COLUMNS, *SMALL, "--out")
    os.mkfifo(tmp_path / "pipe")
    assert "pipe, expected a folder" in refusal(capsys, *fit, tmp_path / "pipe")
    long = refusal(capsys, *fit, "x" * 5000)
    assert "the name is too long" in long
    assert len(long) < 1100
    for command in ("fit", "tune", "compare", "benchmark", "partition"):  # before DATA, which takes long to read
        said = refusal(capsys, command, tmp_path / "none.csv", *COLUMNS, "--out", pairs / "train.csv" / "x")
        assert "train.csv is a file, expected a folder" in said
    for flags in (("--test", "none.csv"), ("--test", pairs / "test.csv", "--exclude", "none.csv")):
        assert f"{flags[-2]}: no such file or folder: none.csv" in refusal(capsys, "evaluate", fitted, *flags)
    said = refusal(capsys, "fit", pairs / "train.csv", *COLUMNS, "--validation", "none.csv", "--out", tmp_path / "out")
    assert "--validation: no such file or folder: none.csv" in said
    assert "is a folder, expected a file" in refusal(capsys, *fit, tmp_path, "--config", tmp_path)
    convert = ("convert", pairs / "train.csv", *COLUMNS, "--out")
    (tmp_path / "there.csv").mkdir()
    assert "which is no ordinary file" in refusal(capsys, *convert, tmp_path / "there.csv")
    for token in ("a\0b", "\udcff", "\ud800"):
        assert "expected text in UTF-8" in refusal(capsys, "info", token)


def test_numbers_beyond_all_reason_are_refused(fitted, pairs, tmp_path, capsys):
    fit = ("fit", pairs / "train.csv", *COLUMNS, *SMALL, "--out", tmp_path / "out")
    assert "seed: got" in refusal(capsys, *fit, "--seed", 2**70)
    assert "threads: got" in refusal(capsys, *fit, "--threads", 10**12)
    cut = ("partition", pairs / "train.csv", *COLUMNS, "--out", tmp_path / "parts", "--parts", 10**8)
    assert "parts: got" in refusal(capsys, *cut)
    assert not (tmp_path / "parts").exists()


def test_progress_is_on_standard_error_and_quiet_is_quiet(pairs, tmp_path, capsys):
    tokens = ["fit", str(pairs / "train.csv"), *COLUMNS, *SMALL[:-1], "--max-iterations", "1"]
    assert run([*tokens, "--out", str(tmp_path / "a")]) == 0
    printed = capsys.readouterr()
    assert "iter   seconds" in printed.err
    assert "model.gramtower" in printed.out
    assert run([*tokens, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_threads_are_set_before_the_command_runs(fitted, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    answer(capsys, "info", fitted, "--threads", "3")
    assert asked == [3]
    assert "threads" in refusal(capsys, "info", fitted, "--threads", "0")


def test_every_argument_of_the_estimator_is_a_flag():
    arguments = set(inspect.signature(TwoTower.__init__).parameters) - {"self", "towers", "verbose"}
    flags = {f.name for name in ("model", "train") for f in dataclasses.fields(TABLES[name])}
    assert arguments - flags == {"optimizer_options"}  # --option NAME=VALUE
    assert flags - arguments == {"option", "history", "history_last", "history_decay", "refit", "validation_side"}


def test_written_values_are_toml():
    values = {"a": 'q"\\\n\x7f\u00e9\U0001f600', "b": [1, 2.5, 1e-20], "c": True, "d": {"damping": 0.5}}
    text = "\n".join(f"{key} = {toml(value)}" for key, value in values.items())
    assert tomllib.loads(text) == values


def test_help_states_rules_and_units():
    done = subprocess.run([sys.executable, "-m", "gramtower", "--help"], capture_output=True, text=True, check=True)
    assert "recommend" in done.stdout
    assert "Exit codes" in done.stdout


def test_the_help_of_every_option_is_whole(capsys):
    assert run(["fit", "--help"]) == 0
    assert "edges (user item, without a header); without it, by the name or content of DATA." in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(["fit", "pairs.csv"], "--out"), (["recommend"], "RUN"), (["fit", "pairs.csv", "--out"], "--out")],
)
def test_a_missing_argument_is_named(tokens, name, capsys):
    assert run(tokens) == 2
    command = tokens[0]
    expected = f"error: {name}: missing value; see gramtower {command} --help"
    assert capsys.readouterr().err.strip() == expected


def test_a_csv_file_without_a_header_is_read_by_positions(tmp_path, capsys):
    path = tmp_path / "pairs.csv"
    path.write_text("ann,tea\nbob,tea\nann,milk\n")
    assert run(["info", str(path)]) == 2
    said = capsys.readouterr().err
    assert "the first line is 'ann,tea'" in said  # of a file with a header, the names to choose from
    assert "--format edges takes positions" in said
    assert run(["info", str(path), "--format", "edges", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 3


def test_the_summary_is_of_the_first_of_equally_good_points(tmp_path):
    path, out = tmp_path / "pairs.csv", tmp_path / "run"
    path.write_text("user,item\n" + "".join(f"u{i % 7},i{i % 5}\n" for i in range(35)))
    flags = ["--validation", "0.4", "--metric", "recall@20", "--patience", "3", "--quiet"]  # all five are listed
    assert run(["fit", str(path), "--left", "user", "--right", "item", "--out", str(out), *flags]) == 0
    found = json.loads((out / "summary.json").read_text())
    records = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [record["metric"] for record in records] == [1.0] * 4
    assert (found["iteration"], found["objective"]) == (0, records[0]["value"])


def test_fit_help_states_the_stopping_rules(capsys):
    assert run(["fit", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "seconds of training" in text
    assert "1e-6" in text
    assert "--memory-budget" in text


def test_a_file_of_another_kind_leaves_the_format_of_the_run_for_the_next(tmp_path):
    from gramtower.cli.formats import DataOptions
    from gramtower.cli.options import Settings
    from gramtower.cli.reading import read_like

    (tmp_path / "seen.data").write_text("left,right\nu1,a\nu1,b\n")
    (tmp_path / "test.tsv").write_text("left\tright\nu1\ta\n")
    settings = Settings(data=DataOptions(path=tmp_path / "pairs.data", format="csv", left="left", right="right"))
    assert len(read_like(settings, tmp_path / "test.tsv", "--test")) == 1
    assert len(read_like(settings, tmp_path / "seen.data", "--exclude")) == 2

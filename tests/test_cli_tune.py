"""``gramtower tune`` run in-process: what it leaves on disk, and that ``fit`` takes it."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")
pytest.importorskip("optuna", reason="tuning needs optuna")

from gramtower.cli.program import run
from gramtower.model.two_tower import load

COLUMNS = ["--left", "user", "--right", "item"]
SPACE = '[space]\nomega = [0.001, 1.0]\nleft-power = true\ndim = [2, 4]\nhidden = ["none", "4"]\n'


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Users of two groups with most of their group's items."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("pairs")
    rows = [f"{u:03d},{i}" for u in range(40) for i in range(30) if u % 2 == i % 2 and rng.random() < 0.7]
    (folder / "pairs.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    (folder / "space.toml").write_text(SPACE)
    return folder


def command(pairs, out, *more):
    base = ["tune", pairs / "pairs.csv", *COLUMNS, "--space", pairs / "space.toml", "--out", out]
    small = ["--max-iterations", "5", "--device", "cpu", "--quiet"]
    return [str(token) for token in (*base, *small, *more)]


def test_each_trial_is_told_once(pairs, tmp_path, capsys):
    tokens = [token for token in command(pairs, tmp_path / "tuned", "--trials", "2") if token != "--quiet"]
    assert run(tokens) == 0
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("trial ")]
    assert lines == ["0", "1"]


def test_a_tuned_config_goes_into_fit(pairs, tmp_path, capsys):
    out = tmp_path / "tuned"
    assert run(command(pairs, out, "--trials", "6", "--metric", "recall@10", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == 6
    assert found["metric"] == "recall@10"
    assert found["value"] >= found["at the defaults"]
    assert found["metrics"].keys() == {"own settings", "found"}
    for measured in found["metrics"].values():
        assert measured.keys() == {"recall@10", "map@5", "recall@20", "ndcg@20"}
    assert {"config.toml", "report.md", "report.json", "search"} <= {path.name for path in out.iterdir()}
    config = tomllib.loads((out / "config.toml").read_text())
    assert config["model"]["dim"] == found["arguments"]["dim"]
    assert config["model"].get("omega") == found["arguments"].get("omega")
    assert "the defaults" in found["verdict"]
    assert found["verdict"] == json.loads((out / "report.json").read_text())["verdict"]
    assert found["verdict"] in (out / "config.toml").read_text()
    assert "validation" not in config["data"]
    fitted = tmp_path / "run"
    assert run(["fit", "--config", str(out / "config.toml"), "--out", str(fitted), "--quiet"]) == 0
    used = tomllib.loads((fitted / "config.toml").read_text())
    for name in config["model"].keys() - {"history"}:  # what is not there is left to the rules of the defaults
        assert used["model"][name] == config["model"][name]
    assert used["train"]["max-iterations"] == config["train"]["max-iterations"]


def test_the_same_command_goes_on(pairs, tmp_path, capsys):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert run(command(pairs, whole, "--trials", "5")) == 0
    assert run(command(pairs, parted, "--trials", "2")) == 0
    assert run(command(pairs, parted, "--trials", "5")) == 0
    reports = [json.loads((folder / "report.json").read_text()) for folder in (whole, parted)]
    assert [t["value"] for t in reports[0]["trials"]] == [t["value"] for t in reports[1]["trials"]]


def test_flags_take_names_out_of_the_search(pairs, tmp_path):
    out = tmp_path / "out"
    base = ["tune", str(pairs / "pairs.csv"), *COLUMNS, "--out", str(out), "--trials", "1", "--quiet"]
    assert run([*base, "--dim", "3", "--omega", "0.5", "--max-iterations", "2", "--device", "cpu"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert not {"dim", "omega"} & set(report["space"])
    assert tomllib.loads((out / "config.toml").read_text())["model"]["dim"] == 3


def test_feature_tables_are_searched_and_written_down(pairs, tmp_path, capsys):
    (tmp_path / "items.csv").write_text("item,parity\n" + "".join(f"{i},{i % 2}\n" for i in range(30)))
    (tmp_path / "space.toml").write_text('[space]\nfeatures = "given"\ndim = [2, 4]\n')
    out, fitted = tmp_path / "tuned", tmp_path / "run"
    more = ["--right-features", tmp_path / "items.csv", "--right-column", "parity=categorical", "--trials", "2"]
    tokens = ["tune", pairs / "pairs.csv", *COLUMNS, "--space", tmp_path / "space.toml", "--out", out, *more]
    assert run([*map(str, tokens), "--max-iterations", "3", "--device", "cpu", "--quiet"]) == 0
    config = tomllib.loads((out / "config.toml").read_text())
    assert config["features"]["right-features"].endswith("items.csv")
    assert run(["fit", "--config", str(out / "config.toml"), "--out", str(fitted), "--quiet"]) == 0
    assert load(fitted / "model.gramtower").right_.inputs.kind == "table"


def test_settings_are_chosen_by_entities_that_were_never_seen(pairs, tmp_path, capsys):
    (tmp_path / "users.csv").write_text("user,parity\n" + "".join(f"{u:03d},{u % 2}\n" for u in range(40)))
    (tmp_path / "space.toml").write_text("[space]\nl2 = true\ndim = [2, 4]\n")
    out, fitted = tmp_path / "tuned", tmp_path / "run"
    base = [pairs / "pairs.csv", *COLUMNS, "--left-features", tmp_path / "users.csv", "--left-column",
            "parity=categorical", "--validation", "0.2", "--validation-side", "left", "--max-iterations", "8",
            "--device", "cpu", "--quiet", "--json"]  # fmt: skip
    options = ["--space", tmp_path / "space.toml", "--out", out, "--trials", "2", "--metric", "precision@5"]
    assert run(["tune", *map(str, (*base, *options))]) == 0
    assert json.loads(capsys.readouterr().out)["value"] > 0.5
    assert json.loads((out / "report.json").read_text())["data"]["held_out_left"] == 8
    assert "8 user entities were held out" in (out / "report.md").read_text()
    assert "validation-side" not in (out / "config.toml").read_text()
    assert run(["fit", *map(str, (*base, "--out", fitted, "--refit", "--metric", "precision@5"))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left"] == 40
    assert found["validation_pairs"] > 0
    assert found["metric_value"] > 0.5
    assert tomllib.loads((fitted / "config.toml").read_text())["train"]["validation-side"] == "left"
    assert len(load(fitted / "model.gramtower").left_) == 40


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--validation-side", "left"], "validation_side: got 'left' with left_features of id"),
        (["--metric", "recal@20"], "metric: got 'recal@20'"),
        (["--validation", "0"], "--validation: got 0, expected a share"),
        (["--validation", "1.0"], "--validation: got 1.0"),
        (["--trials", "0"], "trials: got 0"),
        (["--space", "missing.toml"], "missing.toml"),
        (["--left-features", "missing.csv"], "missing.csv"),
        (["--option", "dampin=1"], "did you mean damping"),  # of the first trial
    ],
)
def test_bad_input_is_one_line(pairs, tmp_path, more, message, capsys):
    base = ["tune", str(pairs / "pairs.csv"), *COLUMNS, "--out", str(tmp_path / "out"), "--quiet", "--device", "cpu"]
    assert run([*base, *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())  # neither a folder nor a log


def test_an_empty_space_is_refused(pairs, tmp_path, capsys):
    (tmp_path / "space.toml").write_text("[space]\n")
    base = ["tune", str(pairs / "pairs.csv"), *COLUMNS, "--out", str(tmp_path / "out"), "--quiet", "--device", "cpu"]
    assert run([*base, "--space", str(tmp_path / "space.toml")]) == 2
    assert "an empty space" in capsys.readouterr().err


def test_help_states_one_default_of_the_metric(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["tune", "--help"]) == 0
    sentences = " ".join(capsys.readouterr().out.split()).split("--")
    assert [part.count("[default:") for part in sentences if part.startswith("metric")] == [0, 1]

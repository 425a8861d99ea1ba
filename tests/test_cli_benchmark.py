"""``gramtower benchmark`` and ``report`` of its folder: table, sentence, JSON, and exit codes that mean something."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

from gramtower.cli.program import run
from gramtower.experiments import benchmark_runner as runner

COLUMNS = ["--left", "user", "--right", "item"]
CONFIG = '[data]\nvalidation = "0.2"\n[model]\ndim = 4\nhidden = "none"\n[train]\nmax-iterations = 2\nrefit = true\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Users of four groups with items of their own group; a table of users, and a config."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, 60, 900)
    items = (rng.integers(0, 10, 900) * 4 + users % 4) % 40
    path = tmp_path_factory.mktemp("benchmark")
    rows = [f"u{u},{i}\n" for u, i in zip(users, items, strict=True)]
    (path / "pairs.csv").write_text("user,item\n" + "".join(rows))
    (path / "test.csv").write_text("user,item\n" + "".join(f"u{u},{(u % 4 + 4 * (u % 7)) % 40}\n" for u in range(60)))
    (path / "users.csv").write_text("user,group\n" + "".join(f"u{u},g{u % 4}\n" for u in range(60)))
    (path / "mine.toml").write_text(CONFIG)
    return path


def command(folder, out, *more):
    return run(["benchmark", str(folder / "pairs.csv"), *COLUMNS, "--out", str(out), "--quiet", *map(str, more)])


def test_a_table_and_who_won_are_printed_and_report_makes_the_page_anew(folder, tmp_path, capsys):
    out = tmp_path / "out"
    models = ("--models", "popularity,ease", "--config", folder / "mine.toml", "--seeds", 2, "--metrics", "recall@5")
    assert command(folder, out, *models) == 0
    printed = capsys.readouterr().out
    assert "difference from" in printed
    assert "has the best recall@5, " in printed
    assert "excludes zero" in printed or "includes zero" in printed
    for name in ("popularity", "ease", "mine"):
        assert name in printed
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdict"] in printed
    assert summary["models"]["mine"]["settings"]["fit"] == {"validation": 0.2, "refit": True}
    assert summary["commands"][0].startswith("gramtower benchmark ")
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    (out / "summary.json").unlink()
    assert run(["report", str(out)]) == 0
    assert summary["verdict"] in capsys.readouterr().out
    assert (out / "report.html").read_text() == page
    assert run(["report", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary


def test_the_same_command_goes_on_after_an_interrupt(folder, tmp_path, capsys, monkeypatch):
    measure, seen = runner.measure, []

    def interrupted(entry, seed, *rest):
        seen.append((entry.name, seed))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measure(entry, seed, *rest)

    monkeypatch.setattr(runner, "measure", interrupted)
    models = ("--models", "popularity,ease", "--seeds", 1, "--json")
    assert command(folder, tmp_path, *models) == 130
    assert "the same command" in capsys.readouterr().err
    assert command(folder, tmp_path, *models) == 0
    assert seen == [("popularity", 0), ("ease", 0), ("ease", 0)]
    assert json.loads(capsys.readouterr().out)["best"] == "ease"


def test_features_a_test_file_and_a_reference(folder, tmp_path, capsys):
    more = ("--left-features", folder / "users.csv", "--test", folder / "test.csv", "--reference", "popularity")
    names = ("--models", "popularity,gramtower-linear-features", "--metrics", "ndcg@5", "--seeds", 1, "--json")
    assert command(folder, tmp_path, *more, *names) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"]["test"] == "a given test"
    assert found["reference"] == "popularity"
    assert found["models"]["gramtower-linear-features"]["metrics"]["ndcg@5"]["difference"]["mean"] != 0
    assert found["models"]["gramtower-linear-features"]["settings"]["fit"]["left_features"][0]["table"] == {
        "group": "categorical"
    }


def test_a_model_that_fails_is_exit_code_1_and_one_left_out_is_not(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "needs_implicit", lambda model: "not here" if type(model).__name__ == "ALS" else None)
    assert command(folder, tmp_path / "a", "--models", "popularity,als", "--seeds", 1) == 0
    assert "als left out: not here" in capsys.readouterr().out

    def failing(self, pairs, seed):
        raise MemoryError("too much")

    monkeypatch.setattr(runner.Popularity, "fit", failing)
    assert command(folder, tmp_path / "b", "--models", "popularity", "--seeds", 1) == 1
    printed = capsys.readouterr().out
    assert "popularity failed: seed 0: MemoryError: too much" in printed
    assert "none won" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--models", "pop"], "models: got 'pop', expected names of popularity, item-knn"),
        (["--test", "2"], "test: got 2, expected a share between 0 and 1"),
        (["--test", "no.csv"], "no such file or folder: no.csv"),
        (["--validation", "0.1"], "--validation"),
        (["--metrics", "auc"], "metrics: got 'auc', expected metrics of lists"),
        (["--seeds", "0"], "seeds: got 0"),
        (["--models", "none"], "models: got none, expected at least one model"),
        (
            ["--models", "gramtower-hidden-features"],
            "baselines: got 'gramtower-hidden-features', expected left_features or right_features",
        ),
        (["--config", "no.toml"], "no.toml"),
        (["--config", "ease={mine}"], "a name other than 'ease', which is taken"),
        (["--config", "{mine}", "--config", "{mine}"], "a name other than 'mine', which is taken"),
        (["--config", "{mine}", "--config", "b={other}"], "left = 'person' in [data] of b"),
    ],
)
def test_bad_input_is_exit_code_2_and_leaves_nothing(folder, tmp_path, capsys, more, message):
    (folder / "other.toml").write_text('[data]\nleft = "person"\nright = "item"\n')
    places = {"mine": folder / "mine.toml", "other": folder / "other.toml"}
    flags = [] if "b={other}" in more else COLUMNS
    tokens = [str(folder / "pairs.csv"), *flags, "--out", str(tmp_path / "out"), *(x.format(**places) for x in more)]
    assert run(["benchmark", *tokens]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(folder, tmp_path, capsys):
    (tmp_path / "history.jsonl").write_text("")
    assert command(folder, tmp_path, "--models", "popularity") == 2
    assert "which holds a fit, expected a folder of its own for a benchmark" in capsys.readouterr().err

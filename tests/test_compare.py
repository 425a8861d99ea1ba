"""``gramtower compare`` and ``report``: the same start, honest ends, and a kill that changes nothing."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from itertools import count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

import gramtower as gt
from gramtower.cli.program import run
from gramtower.data.datasets import planted_pairs
from gramtower.experiments import comparison as contest
from gramtower.experiments import comparison_page as building
from gramtower.experiments.comparison import measured_at
from gramtower.optim.solvers import SOLVERS
from gramtower.optim.stochastic import Sampled
from gramtower.training import loop
from gramtower.training.checkpoint import locked
from gramtower.training.result import read_history

SMALL = ["--left", "user", "--right", "item", "--dim", "4", "--hidden", "8", "--device", "cpu", "--quiet"]
SMALL += ["--omega", "1.4", "--right-weights", "degree^0", "--imputed", "-1", "--embedding-l2", "0.004"]
SAMPLED = ["--option", "sogram.ratio=0.1", "--option", "sampling-diag.ratio=0.1"]
SAMPLED += ["--option", "sogram.step_size=1e-7", "--option", "sampling.step_size=1e-7"]  # short enough not to diverge


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Users of two groups with the items of their own group, and a few of the other."""
    rng = np.random.default_rng(0)
    likely = np.equal.outer(np.arange(40) % 2, np.arange(30) % 2)
    users, items = np.nonzero(rng.random((40, 30)) < np.where(likely, 0.6, 0.05))
    path = tmp_path_factory.mktemp("pairs") / "toy pairs.csv"
    path.write_text("user,item\n" + "".join(f"{u},{i}\n" for u, i in zip(users, items, strict=True)))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """No figures, where they are not what is looked at: drawing takes longer than all the rest."""
    monkeypatch.setattr(building, "draw_comparison", lambda comparison: None)


def command(pairs, out, *more):
    return [str(token) for token in ("compare", pairs, *SMALL, *more, "--out", out)]


def answer(capsys, tokens, code=0):
    capsys.readouterr()
    assert run([*map(str, tokens), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def refusal(capsys, tokens):
    capsys.readouterr()
    assert run([*map(str, tokens)]) == 2
    return capsys.readouterr().err


def curves(folder, name):
    """Everything of a history but the time."""
    return [(r.iteration, r.value, r.data_passes, r.metric, r.step) for r in read_history(folder / f"{name}.jsonl")]


def test_all_methods_start_alike_and_everything_is_written(pairs, tmp_path, capsys):
    tokens = command(pairs, tmp_path, "--optimizers", ",".join(SOLVERS), "--max-iterations", "2", *SAMPLED)
    found = answer(capsys, tokens)
    starts = {name: read_history(tmp_path / f"{name}.jsonl")[0] for name in SOLVERS}
    assert len({(r.value, r.metric, r.data_passes) for r in starts.values()}) == 1
    assert next(iter(starts.values())).metric is not None
    made = {"report.html", "summary.json", "comparison.json", "time.png", "time.svg", "passes.png", "passes.svg"}
    assert {p.name for p in tmp_path.iterdir()} == made | {"runs"} | {f"{name}.jsonl" for name in SOLVERS}
    assert json.loads((tmp_path / "summary.json").read_text()) == found
    assert found["commands"][0].startswith(f"gramtower compare '{pairs}' --left user")
    assert found["data"]["pairs"] + found["data"]["validation_pairs"] == len(pairs.read_text().splitlines()) - 1
    assert found["settings"]["towers"]["hidden"] == [8]
    assert found["settings"]["problem"]["precision"] == "float32"
    assert found["environment"]["threads"] >= 1
    assert found["title"] == "toy pairs"
    best = found["methods"]["newton-kron"]
    assert 0 < best["seconds_to"]["1"] <= best["seconds"]
    assert run(tokens) == 0
    assert "report.html" in capsys.readouterr().out


def test_no_method_diverges_as_it_comes_and_one_sentence_says_who_won(tmp_path, capsys):
    matrix = planted_pairs(400, 200, 3400).tocoo()
    rows = "\n".join(f"u{i},i{j}" for i, j in zip(matrix.row, matrix.col, strict=True))
    (tmp_path / "pairs.csv").write_text("user,item\n" + rows)
    tokens = [
        "compare",
        str(tmp_path / "pairs.csv"),
        "--left",
        "user",
        "--right",
        "item",
        "--out",
        str(tmp_path / "out"),
    ]
    tokens += ["--dim", "8", "--hidden", "none", "--device", "cpu", "--quiet", "--max-iterations", "3"]
    assert run([*tokens, "--optimizers", ",".join(SOLVERS)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out/summary.json").read_text())
    assert {method["status"] for method in found["methods"].values()} == {"finished"}
    for name, method in found["methods"].items():
        assert method["iterations"] == 3
        first, *_, last = read_history(tmp_path / f"out/{name}.jsonl")
        assert last.value < first.value
    assert re.match(
        r"For this data [a-z-]+ won: within 1% of the lowest objective of all after .* s, ", found["verdict"]
    )
    assert found["verdict"] in printed
    assert found["verdict"] in html.unescape((tmp_path / "out/report.html").read_text())


def test_a_comparison_in_which_every_method_diverges_still_has_its_report(pairs, tmp_path, capsys):
    steps = ["--option", "sogram.step_size=1e9", "--option", "sampling.step_size=1e9"]
    more = ["--optimizers", "sogram,sampling", "--max-iterations", "3", *steps]
    found = answer(capsys, command(pairs, tmp_path, *more))  # they ran
    assert {method["status"] for method in found["methods"].values()} == {"diverged"}
    assert (tmp_path / "time.svg").stat().st_size > 1000
    assert (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_only_the_methods_that_have_not_ended_run(pairs, tmp_path, capsys, monkeypatch):
    started = []
    minimize = contest.minimize
    monkeypatch.setattr(contest, "minimize", lambda *a, **k: started.append(a[2]) or minimize(*a, **k))
    limit = ["--max-iterations", "2"]
    answer(capsys, command(pairs, tmp_path, "--optimizers", "gd,newton", *limit))
    before = (tmp_path / "gd.jsonl").read_bytes()
    found = answer(capsys, command(pairs, tmp_path, "--optimizers", "newton,lbfgs", *limit))
    assert started == ["gd", "newton", "lbfgs"]
    assert list(found["methods"]) == ["gd", "newton", "lbfgs"]
    assert len(found["commands"]) == 2
    assert (tmp_path / "gd.jsonl").read_bytes() == before
    request = json.loads((tmp_path / "comparison.json").read_text())  # version 0.2 kept the ends in it
    del request["kind"], request["version"]
    request["methods"] = {name: {"status": "finished", "message": "old"} for name in ("gd", "newton", "lbfgs")}
    (tmp_path / "comparison.json").write_text(json.dumps(request))
    shutil.rmtree(tmp_path / "runs")
    found = answer(capsys, command(pairs, tmp_path, "--optimizers", "gd,gd-diag", *limit))
    assert started[3:] == ["gd-diag"]
    assert [method["message"] for method in found["methods"].values()][:3] == ["old"] * 3
    answer(capsys, command(pairs, tmp_path, "--optimizers", "gd", *limit, "--fresh"))
    assert started[4:] == ["gd"]
    assert not (tmp_path / "newton.jsonl").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_folder_of_another_comparison_is_refused_by_what_differs(pairs, tmp_path, capsys):
    run(command(pairs, tmp_path, "--optimizers", "gd,sogram", "--max-iterations", "1", *SAMPLED))
    assert "settings" in refusal(capsys, command(pairs, tmp_path, "--optimizers", "gd", "--max-iterations", "2"))
    other = command(pairs, tmp_path, "--optimizers", "gd", "--max-iterations", "1", "--precision", "tf32")
    assert "settings" in refusal(capsys, other)
    other = command(pairs, tmp_path, "--optimizers", "gd", "--max-iterations", "1", "--validation", "0.2")
    assert "data" in refusal(capsys, other)
    other = command(pairs, tmp_path, "--optimizers", "sogram", "--max-iterations", "1", "--option", "sogram.ratio=0.2")
    assert "sogram" in refusal(capsys, other)


SCRIPT = """
    import sys
    from gramtower.experiments import comparison as contest
    from gramtower.cli.program import run
    contest._CHECKPOINT_SECONDS = 0.0  # so short a run would have none otherwise
    sys.exit(run(sys.argv[1:]))
"""


def test_a_killed_comparison_goes_on_and_ends_with_the_same_figure(pairs, tmp_path, capsys):
    names = ["gd", "sogram", "newton-kron"]
    more = ["--optimizers", ",".join(names), "--max-iterations", "25", *SAMPLED]
    answer(capsys, command(pairs, tmp_path / "whole", *more))
    tokens = [token for token in command(pairs, tmp_path / "cut", *more) if token != "--quiet"]
    program = [sys.executable, "-c", textwrap.dedent(SCRIPT), *tokens]
    with subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        for line in process.stderr:
            if line.startswith("-- sogram"):
                break
        for _ in range(9):  # a header, the start, a few iterations
            process.stderr.readline()
        os.kill(process.pid, signal.SIGKILL)
    assert json.loads((tmp_path / "cut/comparison.json").read_text())["methods"] == names
    assert [path.stem for path in (tmp_path / "cut/runs").glob("*.json")] == ["gd"]
    assert (tmp_path / "cut/sogram.safetensors").exists()
    assert 1 < len(read_history(tmp_path / "cut/sogram.jsonl")) < 26
    assert run(["report", str(tmp_path / "cut"), "--quiet"]) == 0  # what there is can be looked at
    found = answer(capsys, tokens)
    after = [json.loads((tmp_path / f"cut/runs/{name}.json").read_text()) for name in names]
    assert [end["resumed"] for end in after] == [False, True, False]
    assert all(found["methods"][name]["status"] == "finished" for name in names)
    for name in names:
        assert curves(tmp_path / "cut", name) == curves(tmp_path / "whole", name)
    assert (tmp_path / "cut/passes.svg").read_bytes() == (tmp_path / "whole/passes.svg").read_bytes()
    assert not (tmp_path / "cut/sogram.safetensors").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_goes_wrong_is_reported_and_the_rest_runs(pairs, tmp_path, capsys, monkeypatch):
    def broken(self, seed):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(gt.optim.Newton, "method", broken)
    tokens = command(
        pairs, tmp_path, "--optimizers", "newton,sampling,newtn,gd-diag,newton-kron", "--max-iterations", "3",
        "--option", "sampling.step_size=1e9", "--option", "gd-diag.mo=1",
    )  # fmt: skip
    found = answer(capsys, tokens, code=1)
    told = {name: (m["status"], m["message"]) for name, m in found["methods"].items()}
    assert told["newton"] == ("failed", "RuntimeError: out of luck")
    assert told["sampling"][0] == "diverged"
    assert told["newtn"][0] == "unknown"
    assert "'newton'" in told["newtn"][1]
    assert told["gd-diag"][0] == "failed"
    assert "expected one of" in told["gd-diag"][1]
    assert told["newton-kron"][0] == "finished"
    assert run(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "newton failed: RuntimeError: out of luck" in printed
    assert "newtn unknown" in printed


@pytest.mark.usefixtures("undrawn")
def test_an_iteration_longer_than_the_limit_is_said(pairs, tmp_path, capsys, monkeypatch):
    iterate, looks, slow = Sampled.iterate, count(), []
    clock = SimpleNamespace(perf_counter=lambda: 0.01 * next(looks) + 0.6 * len(slow))
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(Sampled, "iterate", lambda *a: slow.append(a) or iterate(*a))
    tokens = command(pairs, tmp_path, "--optimizers", "sogram,gd", "--time-limit", "0.5", *SAMPLED)
    found = answer(capsys, tokens)["methods"]
    assert found["sogram"]["status"] == "too slow"
    assert "longer than the time limit of 0.5 s" in found["sogram"]["message"]
    assert found["sogram"]["iterations"] == 1
    assert found["gd"]["status"] == "finished"
    assert "longer than the time limit of 0.5 s" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_checkpoints_of_methods_that_ended_go_even_after_a_kill(pairs, tmp_path, capsys):
    tokens = command(pairs, tmp_path / "run", "--optimizers", "gd", "--max-iterations", 2)
    answer(capsys, tokens)
    left = [tmp_path / "run" / f"gd.safetensors{ending}" for ending in ("", ".history")]
    for path in left:
        path.write_bytes(b"of a run that was killed")
    answer(capsys, tokens)
    assert not [path for path in left if path.exists()]


def test_an_interrupted_comparison_says_so_and_goes_on(pairs, tmp_path, capsys, monkeypatch):
    method = contest.minimize

    def interrupted(*arguments, **more):
        def stop(record, _):
            if record.iteration == 3:
                raise KeyboardInterrupt

        return method(*arguments, **more, callbacks=[stop])

    tokens = command(pairs, tmp_path, "--optimizers", "newton,gd", "--max-iterations", "5")
    monkeypatch.setattr(contest, "minimize", interrupted)
    cut = answer(capsys, tokens, code=130)["methods"]
    assert (cut["newton"]["status"], cut["newton"]["iterations"]) == ("unfinished", 3)
    assert cut["gd"] == {"status": "unfinished", "message": "not started yet"}
    monkeypatch.undo()
    found = answer(capsys, tokens)["methods"]
    assert (found["newton"]["status"], found["newton"]["iterations"]) == ("finished", 5)
    assert found["gd"]["iterations"] == 5


@pytest.mark.usefixtures("undrawn")
def test_two_comparisons_do_not_write_one_folder(pairs, tmp_path, capsys):
    tokens = command(pairs, tmp_path, "--optimizers", "gd", "--max-iterations", "1")
    answer(capsys, tokens)
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with locked(tmp_path):
        assert "is being written by another run" in refusal(capsys, [*tokens, "--fresh"])
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "which holds a comparison" in refusal(capsys, ["fit", tokens[1], *SMALL, "--out", tmp_path])


EXPERIMENT = """
[data]
left = "user"
right = "item"
validation = 0.2
shape = [60, 40, 500]
[problem]
omega = 0.125
embedding-l2 = 0.0
[towers]
hidden = [8]
dim = 4
[run]
max-iterations = 2
seed = 3
[optimizers.sampling]
ratio = 0.2
step-size = 1e-6
[optimizers.newton-kron]
"""


@pytest.mark.usefixtures("undrawn")
def test_an_experiment_says_what_runs_and_flags_win(pairs, tmp_path, capsys):
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    tokens = ["compare", pairs, "--config", tmp_path / "small.toml", "--quiet", "--out", tmp_path / "out"]
    found = answer(capsys, [*tokens, "--l2", "3", "--option", "sampling.ratio=0.5"])
    assert list(found["methods"]) == ["sampling", "newton-kron"]
    assert (found["title"], found["synthetic"]) == ("small", None)
    assert (found["settings"]["problem"]["omega"], found["settings"]["problem"]["l2"]) == (0.125, 3.0)
    end = json.loads((tmp_path / "out/runs/sampling.json").read_text())
    assert end["options"] == {"ratio": 0.5, "step_size": 1e-6}
    first, last = (read_history(tmp_path / "out/sampling.jsonl")[i] for i in (0, -1))
    assert last.data_passes - first.data_passes == pytest.approx(2 * 2 * 0.5**2, rel=0.1)  # two steps an iteration
    assert "--synthetic" in refusal(capsys, [tokens[0], *tokens[2:]])  # no data, but a shape


def test_generated_pairs_are_marked_wherever_they_appear(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    tokens = ["compare", "--config", tmp_path / "small.toml", "--synthetic", "--quiet", "--out", tmp_path / "out"]
    found = answer(capsys, tokens)
    assert (found["data"]["left"], found["data"]["right"], found["data"]["pairs"]) == (60, 40, 500)
    assert "not the data itself" in found["synthetic"]
    assert run([*map(str, tokens)]) == 0
    assert "SYNTHETIC DATA" in capsys.readouterr().out
    assert "not the data itself" in (tmp_path / "out/report.html").read_text()
    assert "SYNTHETIC DATA" in (tmp_path / "out/time.svg").read_text()
    assert "no DATA" in refusal(capsys, [*tokens[:1], tmp_path / "x.csv", *tokens[1:]])
    assert "experiment" in refusal(capsys, ["compare", "--synthetic", "--out", tmp_path / "out"])


@pytest.mark.usefixtures("undrawn")
def test_feature_tables_reach_the_towers(pairs, tmp_path, capsys):
    lines = [f"{i},{'even' if i % 2 == 0 else 'odd'}" for i in range(30)]
    (tmp_path / "items.csv").write_text("item,kind\n" + "\n".join(lines) + "\n")
    more = ["--optimizers", "gd", "--max-iterations", "1", "--right-features", tmp_path / "items.csv"]
    found = answer(capsys, command(pairs, tmp_path / "out", *more))
    assert found["settings"]["towers"]["features"] == {"left": "id", "right": "table"}


def test_bad_input_is_refused_before_anything_is_written(pairs, tmp_path, capsys):
    out = tmp_path / "out"
    assert "'newton-kron'" in refusal(capsys, command(pairs, out, "--optimizers", "newton_kron"))
    assert "nofile.csv" in refusal(capsys, command(tmp_path / "nofile.csv", out))
    assert "dim" in refusal(capsys, command(pairs, out, "--dim", "0"))
    assert "time_limit" in refusal(capsys, command(pairs, out, "--time-limit", "0"))
    assert "METHOD.NAME" in refusal(capsys, command(pairs, out, "--option", "ratio=0.1"))
    assert "folder" in refusal(capsys, ["report", tmp_path / "none"])
    assert not out.exists()


def test_metrics_thin_out_by_a_rule_of_the_iteration_alone():
    chosen = [i for i in range(10_001) if measured_at(i)]
    assert chosen[:22] == [*range(21), chosen[21]]
    assert all(b <= 1.1 * a + 1 for a, b in pairwise(chosen[21:]))
    assert len(chosen) < 200


def test_a_comparison_without_checkpoints_ends_the_same_and_needs_no_safetensors(tmp_path, monkeypatch):
    problem = gt.Problem(planted_pairs(30, 20, 100), omega=0.1)
    ends = []
    for name, keeps in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        if not keeps:
            monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        runner = contest.Runner(
            problem, lambda: gt.mlp_towers(problem, (8,), 4), None, 60.0, 3, 0, tmp_path / name, checkpoints=keeps
        )
        assert runner.run("gd").status == "finished"
        ends.append(read_history(contest.history_path(tmp_path / name, "gd"))[-1].value)
        assert contest.checkpoint_path(tmp_path / name, "gd").exists() == keeps
    assert ends[0] == ends[1]

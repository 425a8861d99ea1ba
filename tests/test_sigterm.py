"""SIGTERM, as Kubernetes, Slurm and spot machines send it, ends commands as Ctrl-C does.

Most commands run in this process and send the signal to themselves at a chosen call; real processes are signalled from
outside.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

from gramtower.cli import program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")

COLUMNS = ["--left", "user", "--right", "item"]
SMALL = ["--dim", "4", "--device", "cpu"]
SLOW = ["--optimizer", "gd", "--embedding-l2", "0.001"]  # does not converge before a signal arrives
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]),
}
AT = "gramtower.training.loop:_Run._iterate:"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("sigterm") / "pairs.csv"
    pairs = {(int(u), int(i)) for u, i in zip(rng.integers(0, 60, 900), rng.integers(0, 40, 900), strict=True)}
    path.write_text("\n".join(["user,item", *(f"u{u},i{i}" for u, i in sorted(pairs))]) + "\n")
    return path


def gramtower(*tokens, kill=None):
    """Run a command in this process; ``kill`` names a function and the call of it before which SIGTERM is sent."""
    out, errors = io.StringIO(), io.StringIO()
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(program, "_received", [])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        program.interrupt_on_sigterm()
        torch.set_num_threads(1)
        if kill is not None:
            place, name, count = kill.split(":")
            patch.setattr(f"{place}.{name}", killing(attrgetter(name)(import_module(place)), int(count)))
        try:
            code = program.run([*map(str, tokens)])
        finally:
            signal.signal(signal.SIGTERM, before)
            torch.set_num_threads(threads)
    return subprocess.CompletedProcess(tokens, code, out.getvalue(), errors.getvalue())


def killing(function, count):
    """The function, with SIGTERM to this process before its ``count``-th call."""
    calls = itertools.count(1)

    def called(*given, **named):
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*given, **named)

    return called


@pytest.fixture(scope="module")
def fitted(data):
    out = data.parent / "run"
    assert gramtower("fit", data, *COLUMNS, *SMALL, "--max-iterations", "2", "--out", out).returncode == 0
    return out


def locks(folder):
    return [path.name for path in folder.rglob("*") if path.name.endswith((".lock", ".partial"))]


def assert_terminated(done, *folders):
    assert done.returncode == 143, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "SIGTERM" in last
    assert "Traceback" not in done.stderr
    assert not [name for folder in folders for name in locks(folder)]


def test_a_fit_that_was_terminated_goes_on_from_its_last_iteration(data, tmp_path):
    tokens = ["fit", data, *COLUMNS, *SMALL, "--optimizer", "gd", "--max-iterations", "40", "--select", "off", "--json"]
    whole = gramtower(*tokens, "--out", tmp_path / "whole")
    cut = gramtower(*tokens, "--out", tmp_path / "run", kill=AT + "24")
    assert_terminated(cut, tmp_path)
    kept = json.loads(cut.stdout)["iterations"]
    assert kept > 0
    rest = gramtower(*tokens, "--out", tmp_path / "run")
    assert f"{kept:5d} " in rest.stderr.split("iter ")[1]  # nothing between the last checkpoint and the signal is lost
    found, expected = (json.loads(done.stdout) for done in (rest, whole))
    assert (found["resumed"], found["iterations"]) == (True, 40)
    assert found["objective"] == expected["objective"]
    assert not locks(tmp_path)


def test_a_fit_that_was_terminated_while_it_chose_a_penalty_chooses_the_same_one(data, tmp_path):
    tokens = ["fit", data, *COLUMNS, *SMALL, "--json"]
    whole = gramtower(*tokens, "--out", tmp_path / "whole")
    assert whole.stderr.count("select: ") >= 3
    cut = gramtower(*tokens, "--out", tmp_path / "run", kill=AT + "6")
    assert_terminated(cut, tmp_path)
    assert "iter " not in cut.stderr  # no iteration of the fit itself
    found, expected = (json.loads(done.stdout) for done in (gramtower(*tokens, "--out", tmp_path / "run"), whole))
    assert (found["resumed"], found["objective"]) == (False, expected["objective"])


def test_a_signal_from_outside_ends_a_fit_in_time(data, tmp_path):
    tokens = ["fit", data, *COLUMNS, *SMALL, *SLOW, "--max-iterations", "1000000", "--out"]
    command = [sys.executable, "-m", "gramtower", *map(str, [*tokens, tmp_path / "run"])]
    history = tmp_path / "run" / "history.jsonl"
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as one:
        try:
            while one.poll() is None and (not history.exists() or history.read_text().count("\n") < 7):
                time.sleep(0.01)
            one.send_signal(signal.SIGTERM)
            out, errors = one.communicate(timeout=60)
        finally:
            one.kill()
    assert_terminated(subprocess.CompletedProcess(command, one.returncode, out, errors), tmp_path)
    assert (tmp_path / "run" / "model.gramtower").exists()


def test_a_search_that_was_terminated_goes_on_after_its_trials(data, tmp_path):
    (tmp_path / "space.toml").write_text("[space]\nomega = [0.01, 1.0]\n")
    tokens = ["tune", data, *COLUMNS, *SMALL, "--max-iterations", "3", "--trials", "3"]
    tokens += ["--space", tmp_path / "space.toml", "--json"]
    whole = gramtower(*tokens, "--out", tmp_path / "whole")
    cut = gramtower(*tokens, "--out", tmp_path / "run", kill="gramtower.experiments.tuning.search:run_trial:3")
    assert_terminated(cut, tmp_path)
    rest = gramtower(*tokens, "--out", tmp_path / "run")
    found, expected = (json.loads(done.stdout) for done in (rest, whole))
    assert {key: found[key] for key in ("trials", "value", "arguments")} == {
        key: expected[key] for key in ("trials", "value", "arguments")
    }


def test_a_benchmark_that_was_terminated_goes_on_after_its_runs(data, tmp_path):
    tokens = ["benchmark", data, *COLUMNS, "--models", "popularity,item-knn", "--seeds", "1", "--out", tmp_path / "run"]
    cut = gramtower(*tokens, kill="gramtower.experiments.benchmark_runner:measure:2")
    assert_terminated(cut, tmp_path)
    rest = gramtower(*tokens)
    assert rest.returncode == 0
    assert "1 of 2 runs are there already" in rest.stderr


def test_several_processes_stop_after_the_same_iteration_and_keep_it(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    tokens = ["gramtower", "fit", data, *COLUMNS, *SMALL, *SLOW, "--out", tmp_path / "run"]
    command, history = [*torchrun, *map(str, tokens)], tmp_path / "run" / "history.jsonl"
    command += ["--max-iterations", "1000000"]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as several:
        try:
            while several.poll() is None and (not history.exists() or history.read_text().count("\n") < 9):
                time.sleep(0.01)
            several.send_signal(signal.SIGTERM)  # torchrun hands it on
            errors = several.communicate(timeout=100)[1]
        finally:
            several.kill()
    assert errors.count("error: stopped by SIGTERM") == 2, errors
    assert "continue from it" in errors
    assert not locks(tmp_path)
    records = history.read_text().splitlines()
    rest = gramtower(*tokens[1:], "--max-iterations", len(records) + 4)  # one process goes on from those of two
    assert rest.returncode == 0, rest.stderr
    assert "continuing from" in rest.stderr
    assert history.read_text().splitlines()[: len(records)] == records  # the checkpoint had all of them


@pytest.mark.parametrize(
    ("command", "kill"),
    [
        ("compare", AT + "4"),
        ("cross-validate", AT + "4"),
        ("update", AT + "1"),
        ("partition", "gramtower.cli.data_commands:write_batches:1"),
        ("recommend", "gramtower.cli.query:TwoTower.recommend_all:1"),
    ],
)
def test_every_long_command_ends_with_143(command, kill, data, fitted, tmp_path):
    small, out = [*COLUMNS, *SMALL], ["--out", tmp_path / "out"]
    tokens = {
        "compare": [data, *small, *out, "--optimizers", "gd", "--max-iterations", "5"],
        "cross-validate": [data, *small, "--out", tmp_path / "out.json"],
        "update": [fitted, data, *out],
        "partition": [data, *COLUMNS, *out],
        "recommend": [fitted, "--all", "--out", tmp_path / "out.csv"],
    }[command]
    assert_terminated(gramtower(command, *tokens, kill=kill), tmp_path)


def test_a_second_signal_does_not_disturb_the_end_and_an_ignored_one_stays_ignored(data, tmp_path):
    code = """
import os, signal, sys
from gramtower.cli import program
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
program.interrupt_on_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
print(*program.interruption())
"""
    for given, expected in (("twice", "stopped by SIGTERM 143"), ("ignored", "interrupted 130")):
        done = subprocess.run([sys.executable, "-c", code, given], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr

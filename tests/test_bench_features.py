"""benchmarks/features/tuning.py: what it prints and saves, step by step, on a small set."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import scipy.sparse as sp
from benchmark_scripts import benchmark

from gramtower.data.datasets import planted_pairs

pytest.importorskip("optuna", reason="tuning needs optuna")


@pytest.fixture(scope="module")
def tuning():
    with benchmark("tuning", "features") as script:
        yield script


@pytest.fixture
def run(tuning, monkeypatch, tmp_path, capsys):
    """The script on planted pairs, as from the command line: what it printed, and the file it left."""
    pairs = sp.csr_matrix(planted_pairs(90, 50, observed=1200))
    words = sp.random(90, 12, 0.3, "csr", random_state=0, dtype=np.float32)
    new = np.arange(90) % 5 == 0
    one = tuning.FeatureSet(pairs[~new], words[~new], None, "left", words[new], pairs[new])

    def loaded(name, split, data):
        assert (name, split) == ("delicious", 3)
        return one

    monkeypatch.setattr(tuning, "load", loaded)

    def run(*options):
        command = ["tuning.py", "delicious", "--device", "cpu", "--out", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", command)
        try:
            tuning.main()
        finally:
            run.printed = capsys.readouterr().out
            run.saved = json.loads((tmp_path / "features_tuning_delicious.json").read_text())
        return run.saved

    return run


def test_the_last_line_has_both_scores(run):
    saved = run("--minutes", "1", "--trials", "3")
    last = json.loads(run.printed.splitlines()[-1])
    assert {"p@1", "p@5", "recall@20"} <= set(last["defaults"])
    assert set(last["tuned"]) == set(last["defaults"])
    assert (last["trials"], last["split"], last["metric"]) == (3, 3, "ndcg@5")
    assert 0 < last["search_seconds"] <= last["total_seconds"]
    assert {key: saved[key] for key in last} == last
    assert len(saved["log"]) == 3
    assert saved["verdict"] in run.printed


def test_where_the_defaults_stay_the_tuned_model_is_theirs(run):
    saved = run("--minutes", "1", "--trials", "1")
    assert saved["state"] == "defaults stay"
    assert saved["arguments"] == {}
    assert saved["tuned"] == saved["defaults"]


def test_what_is_done_is_printed_and_saved_before_the_next_step(run, tuning, monkeypatch):
    real = tuning.Progress.trial

    def killed(self, search):
        real(self, search)
        if len(search.trials) == 2:
            raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(tuning.Progress, "trial", killed)
        with pytest.raises(SystemExit):
            run("--minutes", "1", "--trials", "5")
    assert run.saved["state"] == "defaults fitted"
    assert run.saved["trials"] == 2
    assert "tuned" not in run.saved
    assert run.saved["defaults"]["p@1"] > 0
    assert "trial 1: ndcg@5" in run.printed
    before = run.saved
    finished = run("--finish")  # and can be finished
    assert set(finished["tuned"]) == set(before["defaults"])
    assert {key: finished[key] for key in ("defaults", "trials", "arguments", "log")} == {
        key: before[key] for key in ("defaults", "trials", "arguments", "log")
    }


def test_everything_fits_into_the_minutes_it_is_given(run):
    saved = run("--minutes", "5", "--within", "0.0001")
    assert saved["trials"] >= 1  # the defaults are trained whatever the limit
    assert saved["search_seconds"] < 60

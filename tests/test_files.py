"""Writing in one step: whatever goes wrong, the old file stays whole and nothing is left beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower._util import files as _files
from gramtower._util.files import replacing, write_text


@contextmanager
def full_beyond(size):
    """What a write beyond so many bytes of a file gets is what a full disk gives it."""
    resource = pytest.importorskip("resource", reason="limits on file sizes are set with the resource module")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def eye(size=900):
    return sp.eye(size, format="csr", dtype="float32")


def save_model(folder):
    model = gt.TwoTower(dim=4, hidden=(), max_iterations=0, device="cpu").fit(eye())
    return lambda: model.save(folder / "model")


def save_checkpoint(folder, **options):
    problem = gt.Problem(eye())
    towers = gt.mlp_towers(problem, hidden=(), dim=4)
    limits = iter(range(1, 9))
    return lambda: gt.minimize(problem, towers, "gd", next(limits), checkpoint=folder / "run", **options)


def save_table(folder):
    pytest.importorskip("polars", reason="tables are written with polars")
    from gramtower.cli.data_commands import write_pairs

    pairs = gt.Interactions.from_arrays(np.arange(5000).astype(str), np.arange(5000).astype(str))
    return lambda: [write_pairs(pairs, folder / f"table.{kind}") for kind in ("csv", "csv.gz", "parquet")]


def save_search(folder):
    from gramtower.experiments.tuning.report import Search
    from gramtower.experiments.tuning.trial import Tried

    trials = [Tried(n, {"omega": 0.1}, 0.5, 1, [0.5] * 20, 0.1, False, "TOLERANCE") for n in range(99)]
    search = Search("map@5", trials, 0, {}, {"omega": 0.1}, "ids", {}, {"ranked_users": 1, "left": 1, "right": 1}, 1.0)
    return lambda: search.write(folder)


def save_figures(folder):
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    from gramtower.experiments.comparison_page import build

    gt.minimize((problem := gt.Problem(eye(9))), gt.mlp_towers(problem, (), 2), "gd", 9, history=folder / "gd.jsonl")
    return lambda: build(folder)


WRITERS = {
    "model": save_model,
    "checkpoint": save_checkpoint,
    "table": save_table,
    "search": save_search,
    "figures": save_figures,
    "text": lambda folder: lambda: write_text(folder / "text", "x" * 20_000),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_disk_that_is_full_leaves_the_old_files_whole(kind, tmp_path):
    save = WRITERS[kind](tmp_path)
    save()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_beyond(1000), pytest.raises(OSError, match="File too large"):
        save()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[name].startswith(content) for name, content in before.items())  # records are appended to
    save()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_folder_that_cannot_be_written_leaves_the_old_files_whole(kind, tmp_path, monkeypatch):
    save = WRITERS[kind](tmp_path)
    save()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def read_only(*_):
        raise OSError(30, "Read-only file system", "a name of ours")

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    with pytest.raises(OSError, match=rf"Read-only file system.*'{tmp_path}/[\w.]+'"):
        save()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert all(after[name].startswith(content) for name, content in before.items())


def test_a_history_on_a_full_disk_keeps_its_records(tmp_path):
    problem, path = gt.Problem(eye(9)), tmp_path / "history.jsonl"

    def run():
        return gt.minimize(problem, gt.mlp_towers(problem, (), 2), "gd", 4, history=path)

    values = [record.value for record in run().history]
    with full_beyond(path.stat().st_size - 50), pytest.raises(OSError, match="File too large"):
        run()
    assert [record.value for record in gt.read_history(path)] == values[:4]


def test_a_search_whose_log_met_a_full_disk_goes_on_as_if_it_had_not(tmp_path):
    pytest.importorskip("optuna", reason="searches are proposed by optuna")
    model = gt.TwoTower(dim=2, hidden=(), max_iterations=2, device="cpu")
    options = dict(space={"omega": [0.01, 1.0]}, refit=False)
    pairs = sp.random(30, 20, 0.3, "csr", np.float32, random_state=0)
    pairs.data[:] = 1
    whole = model.tune(pairs, trials=3, storage=tmp_path / "whole", **options)
    model.tune(pairs, trials=1, storage=tmp_path / "log", **options)
    most = (tmp_path / "whole/runs/trial-1.json").stat().st_size - 40
    with full_beyond(most), pytest.raises(OSError, match="File too large"):
        model.tune(pairs, trials=3, storage=tmp_path / "log", **options)
    resumed = model.tune(pairs, trials=3, storage=tmp_path / "log", **options)
    assert [(t.settings, t.curve) for t in resumed.trials] == [(t.settings, t.curve) for t in whole.trials]


def test_what_was_written_takes_the_place_of_the_old_file(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    write_text(path, "one")
    write_text(path, "zwei é")
    assert path.read_text(encoding="utf-8") == "zwei é"
    assert os.listdir(path.parent) == ["a.txt"]


def test_until_the_end_the_old_file_is_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_fails_at_the_last_moment_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


KILLED = """
import os, runpy, sys
from pathlib import Path
replacing = runpy.run_path(sys.argv[2])["replacing"]
with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    path = tmp_path / "a"
    command = [sys.executable, "-c", KILLED, str(path), _files.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        write_text(path, "one")
        assert len(os.listdir(tmp_path)) == 2  # the other process is still at work
        process.communicate("die\n")
    assert len(os.listdir(tmp_path)) == 2
    write_text(tmp_path / "b", "two")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_saved_model_can_be_read_by_whoever_can_read_other_files(tmp_path):
    model = gt.TwoTower(dim=2, hidden=(), max_iterations=0, device="cpu").fit(sp.eye(3, format="csr", dtype="float32"))
    model.save(tmp_path / "model")
    (tmp_path / "other").touch()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_or_device_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="ordinary file"):
        write_text(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]

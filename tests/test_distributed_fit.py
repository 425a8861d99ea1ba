"""Estimator, checkpoints, evaluation, models and partitions over several processes, against one process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import shared_fits
import torch
from processes import HERE, run_group

import gramtower as gt
from gramtower.data.splits import random_pairs
from gramtower.distributed import shard_files as shards_file
from gramtower.distributed.partition import read_part, write_partition


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    whole = shared_fits.half(None, 6, tmp_path / "uninterrupted")
    run_group("shared_fits:half", 3, tmp_path / "three", 3, tmp_path / "by-three", "uneven")
    for copy in ("by-three-then-one", "incomplete"):
        shutil.copytree(tmp_path / "by-three", tmp_path / copy)
    shared_fits.half(None, 3, tmp_path / "by-one")
    going_on = [6, tmp_path / "by-three", "even", tmp_path / "by-one", "uneven"]
    three_two, one_two = run_group("shared_fits:halves", 2, tmp_path / "two", *going_on)[0]
    three_one = shared_fits.half(None, 6, tmp_path / "by-three-then-one")
    for change, values in {"3 then 1": three_one, "3 then 2": three_two, "1 then 2": one_two}.items():
        for name in whole:
            assert values[name] == pytest.approx(whole[name], rel=1e-9), (change, name)
    names = [path.name for path in (tmp_path / "by-three").iterdir()]
    assert len(names) == 3 * len(whole)  # main file, records and one shard each; those of three processes are gone
    assert len(list((tmp_path / "by-three-then-one").iterdir())) == 2 * len(whole)
    others = list(shards_file.others(tmp_path / "incomplete" / "gd-diag.safetensors"))
    assert len(others) == 2
    others[0].unlink()
    with pytest.raises(ValueError, match=r"damaged.*checkpoint"):
        shared_fits.half(None, 4, tmp_path / "incomplete")


def test_default_settings_lead_one_and_several_processes_to_the_same_parameters(tmp_path):
    alone = shared_fits.default_tables(None)
    for size in (2, 3):
        for found in run_group("shared_fits:default_tables", size, tmp_path / str(size)):
            assert found["iterations"] == alone["iterations"] == 12  # sweeps, in all of them
            for table, expected in zip(found["tables"], alone["tables"], strict=True):
                np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)


def test_the_estimator_learns_evaluates_and_saves_the_same_model(tmp_path):
    split = random_pairs(shared_fits.interactions(str), 0.2, seed=0)  # whose text joins the numbers of the whole data
    write_partition(split.train, tmp_path / "parts", 5)
    (tmp_path / "alone").mkdir()
    alone = shared_fits.estimator_fit(tmp_path / "alone", tmp_path / "parts")
    many = run_group("shared_fits:estimator_fit", 3, tmp_path / "many", tmp_path / "parts")
    assert all(one == many[0] for one in many)
    for kind, expected in alone.items():
        found = many[0][kind]
        assert found["values"] == pytest.approx(expected["values"], rel=1e-4)
        assert found["scores"] == pytest.approx(expected["scores"], abs=1e-9)
        assert found["best"] == pytest.approx(expected["best"])
        assert (found["users"], found["pairs"]) == (expected["users"], expected["pairs"])
        assert found["groups"] == expected["groups"]
        one, saved = (gt.load(tmp_path / where / f"{kind}.gramtower") for where in ("alone", "many"))
        ids = sorted(one.left_.ids.tolist())
        assert saved.left_.ids.dtype == one.left_.ids.dtype == (object if kind == "parts" else np.int64)
        assert saved.refine_ == one.refine_ == (kind == "refined")
        for side, names in (("left", ids), ("right", one.right_.ids.tolist())):
            np.testing.assert_allclose(saved.embed(names, side), one.embed(names, side), rtol=0, atol=2e-3)
        assert saved.recommend(ids[:5], k=3)[0].tolist() == one.recommend(ids[:5], k=3)[0].tolist()
        assert (saved.seen_ != one.seen_).nnz == 0
    histories = [["i3", "i6"], ["i1"]]  # new entities go through the towers that were put together
    kind = "history.gramtower"
    expected, found = (gt.load(tmp_path / w / kind).recommend(histories=histories, k=2)[1] for w in ("alone", "many"))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    new = np.eye(5)[:3]  # ids of new entities are expected from the features of all processes
    one, saved = (gt.load(tmp_path / w / "beside.gramtower").embed(right_features=new) for w in ("alone", "many"))
    np.testing.assert_allclose(saved, one, atol=2e-3)


COLUMNS = ["--left", "left", "--right", "right", "--weight", "weight"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_torchrun_fits_a_partition_and_restarts_from_the_checkpoint_when_a_process_is_killed(tmp_path):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    write_partition(shared_fits.interactions(), tmp_path / "parts", 4)
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    program = tmp_path / "program.py"  # an end of the interpreter that aborts, as gloo's threads make it now and then
    program.write_text("import atexit, os\natexit.register(os.abort)\nfrom gramtower.cli import main\nmain()\n")
    fit = [str(program), "fit", str(tmp_path / "parts"), *COLUMNS, "--dim", "3", "--hidden", "4", "--device", "cpu"]
    run = [*fit, "--optimizer", "gd", "--max-iterations", "120", "--out", str(tmp_path / "run")]
    history = tmp_path / "run" / "history.jsonl"
    with subprocess.Popen(
        [*TORCHRUN, "--max-restarts", "1", *run],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        while process.poll() is None and (not history.exists() or history.read_text().count("\n") < 12):
            time.sleep(0.02)
        os.kill(_worker(process.pid, rank=1), signal.SIGKILL)
        try:
            errors = process.communicate(timeout=400)[1]
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
    assert process.returncode == 0, errors  # an end that aborts is no failure of a run
    assert gt.load(tmp_path / "run" / "model.gramtower").history_[-1].iteration == 120
    assert "continuing from" in errors
    assert "2 processes; each sent and received about" in errors
    records = gt.read_history(history)
    assert [record.iteration for record in records] == list(range(121))
    alone = gt.TwoTower(dim=3, hidden=(4,), device="cpu", optimizer="gd", max_iterations=120)
    alone.fit(read_part(tmp_path / "parts", weight="weight"))
    values, expected = ([record.value for record in h] for h in (records, alone.history_))
    assert values[:41] == pytest.approx(expected[:41], rel=1e-5)
    # later a line search may halve a step once more: float32 is rounded otherwise in two processes
    assert values[-1] == pytest.approx(expected[-1], rel=1e-2)


def _worker(launcher, rank):
    """The process of a rank that torchrun started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == launcher and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("no such process")


def test_torch_is_not_asked_for_a_group_when_there_is_none():
    assert not torch.distributed.is_initialized()
    problem = shared_fits.problem_of(shared_fits.group())
    assert problem.shards.single
    point = problem.at(shared_fits.towers_of(problem, "ids", torch.float64))
    assert point.right_rows is point.Q

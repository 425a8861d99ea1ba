"""Fits on a real Spark session and a real Ray cluster: a killed process changes nothing, and errors are readable."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import threading
import time
from unittest.mock import Mock

import engines
import numpy as np
import pytest
import shared_fits
from processes import run_group

import gramtower as gt
from gramtower._util.checks import install_line
from gramtower._util.files import as_path, write_text
from gramtower._util.remote import RemotePath
from gramtower.distributed.group import SINGLE, PeerError
from gramtower.distributed.partition import read_part, write_partition
from gramtower.launch import ray as on_ray
from gramtower.launch import spark as on_spark
from gramtower.launch.job import make_job

pl = pytest.importorskip("polars", reason="feature tables are frames of polars")

pytestmark = [pytest.mark.filterwarnings(line) for line in engines.QUIET]
SETTINGS = gt.TwoTower(dim=3, hidden=(4,), device="cpu", optimizer="gd", max_iterations=300, select=False)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "parts"
    write_partition(shared_fits.interactions(), folder, 4)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    """The model of two processes that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_group("shared_fits:part_fit", 2, folder, parts, SETTINGS.max_iterations)
    return gt.load(folder / "model.gramtower")


def job_of(parts, out, settings=SETTINGS, features=None):
    made = make_job(parts, None, settings, out, None, features)
    made.begin()
    return pickle.loads(pickle.dumps(made))  # as an engine sends it


def test_a_job_fits_what_the_estimator_fits(parts, tmp_path):
    kinds = pl.DataFrame({"id": [f"i{j}" for j in range(30)], "kind": ["abc"[j % 3] for j in range(30)]})
    table = gt.FeatureTable(kinds, "id", categorical=["kind"])
    settings = gt.TwoTower(dim=3, hidden=(4,), device="cpu", max_iterations=3, select=False)
    job = job_of(parts, tmp_path / "run", settings, table)
    job.work(SINGLE)
    launched = job.launched()
    expected = gt.TwoTower(**settings.get_params()).fit(read_part(parts), None, table)
    assert [record.value for record in launched.history] == [record.value for record in expected.history_]
    np.testing.assert_array_equal(gt.load(launched.model).right_.embeddings, expected.right_.embeddings)


def test_a_process_ends_normally_after_bad_settings_and_no_attempt_repeats_them(parts, tmp_path):
    job = job_of(parts, tmp_path / "run", gt.TwoTower(dim=0, device="cpu", select=False))
    job.work(SINGLE)
    assert job.refused
    with pytest.raises(ValueError, match=r"^dim: got 0"):
        job.launched()
    with pytest.raises(ValueError, match=r"^dim: got 0"):
        raise job.failed("Spark", RuntimeError("a long trace"))
    job.begin()  # the next call
    assert not job.refused


def test_other_errors_are_raised_for_the_engine_and_the_first_cause_is_kept(parts, tmp_path, monkeypatch):
    job = job_of(parts, tmp_path / "run")
    assert "no slots" in str(job.failed("Spark", RuntimeError("no slots")))
    for error in (MemoryError("the node is full"), PeerError("process 0 of 2 is gone")):
        monkeypatch.setattr(gt.TwoTower, "fit", Mock(side_effect=error))
        with pytest.raises(type(error)):
            job.work(SINGLE)
    assert not job.refused
    assert "process 0 of 1: MemoryError: the node is full" in str(job.failed("Spark", RuntimeError("a long trace")))


@pytest.fixture
def remote_parts(s3, parts):
    write_partition(shared_fits.interactions(), "s3://lake/parts", 4)
    return "s3://lake/parts"


def test_the_folder_of_a_run_may_be_a_url(remote_parts, parts, tmp_path):
    short = gt.TwoTower(**SETTINGS.get_params() | {"max_iterations": 6})
    for iterations in (3, 6):  # the second call continues
        settings = gt.TwoTower(**short.get_params() | {"max_iterations": iterations})
        job = job_of(remote_parts, "s3://lake/runs/one", settings)
        job.work(SINGLE)
        launched = job.launched()
    assert str(launched.model) == "s3://lake/runs/one/model.gramtower"
    local = job_of(parts, tmp_path / "run", short)
    local.work(SINGLE)
    expected = local.launched()
    assert [record.value for record in launched.history] == [record.value for record in expected.history]
    found, wanted = gt.load(launched.model), gt.load(expected.model)
    np.testing.assert_array_equal(found.left_.embeddings, wanted.left_.embeddings)
    names = {str(path)[len("s3://lake/runs/") :] for path in as_path("s3://lake/runs").below()}
    assert names == {
        "one/model.gramtower",
        "one/history.jsonl",
        "one/checkpoint/fit.safetensors",
        "one/checkpoint/fit.safetensors.history",
    }


def test_errors_of_a_run_with_a_url_are_those_of_a_folder(remote_parts):
    job = job_of(remote_parts, "s3://lake/run", gt.TwoTower(dim=0, device="cpu", select=False))
    job.work(SINGLE)
    with pytest.raises(ValueError, match=r"^dim: got 0"):
        job.launched()
    for out in ("https://lake.example/run", "s3://lake"):
        with pytest.raises(ValueError, match=r"^out: "):
            job_of(remote_parts, out)


def test_a_process_whose_run_was_taken_over_refuses_nothing_to_its_successor(remote_parts):
    """It still ends when the next attempt works already, and must not leave an error that ends all attempts."""
    job = job_of(remote_parts, "s3://lake/run", gt.TwoTower(**SETTINGS.get_params() | {"max_iterations": 20}))

    def taken(record, point):
        if record.iteration == 2:
            write_text(as_path("s3://lake/run.lock"), "0: process 1 on another machine")

    with pytest.raises(OSError, match="process 1 on another machine"):
        job.work(SINGLE, [taken])
    assert not job.refused
    job.work(SINGLE)
    assert len(job.launched().history) == 21


def test_ray_refuses_a_store_that_it_cannot_write_to(parts, monkeypatch):
    pytest.importorskip("ray.train.torch", reason="needs ray, which is not installed")
    pytest.importorskip("obstore", reason="object storage needs obstore")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lake")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setattr(RemotePath, "exists", lambda self: False)  # there is no such store here
    with pytest.raises(ValueError, match=r"^out: got az://lake/run"):
        on_ray.fit(parts, SETTINGS, out="az://lake/run")


def fit(engine, parts, out, settings=SETTINGS):
    if engine is on_spark:
        return on_spark.fit(parts, settings, out=out, num_processes=2)
    from ray.train import ScalingConfig

    return on_ray.fit(parts, settings, out=out, scaling_config=ScalingConfig(num_workers=2), max_failures=1)


def kill_the_first_process(out, killed):
    """Kill the process that writes the checkpoint, after its second one."""
    history, lock = out / "history.jsonl", out / ".gramtower.lock"
    while not history.exists() or history.read_text().count("\n") < 12:
        time.sleep(0.01)
    killed.append(int(lock.read_text().split()[0]))
    os.kill(killed[0], signal.SIGKILL)


def check_a_killed_fit(engine, parts, out, uninterrupted):
    killed = []
    killer = threading.Thread(target=kill_the_first_process, args=(out, killed), daemon=True)
    killer.start()
    launched = fit(engine, parts, out)
    assert killed
    assert killed[0] != os.getpid()
    model = gt.load(launched.model)
    expected = uninterrupted.history_
    assert [record.iteration for record in launched.history] == list(range(SETTINGS.max_iterations + 1))
    assert {record.processes for record in launched.history} == {2}
    assert [record.value for record in launched.history] == pytest.approx([r.value for r in expected], rel=1e-6)
    for side in ("left", "right"):
        ids = getattr(model, f"{side}_").ids.tolist()
        np.testing.assert_allclose(model.embed(ids, side), uninterrupted.embed(ids, side), rtol=0, atol=1e-5)
    assert not (out / "error.json").exists()


def test_spark_goes_on_from_the_checkpoint_when_a_process_is_killed(session, parts, tmp_path, uninterrupted):
    check_a_killed_fit(on_spark, parts, tmp_path / "run", uninterrupted)


def test_ray_goes_on_from_the_checkpoint_when_a_worker_is_killed(cluster, parts, tmp_path, uninterrupted):
    check_a_killed_fit(on_ray, parts, tmp_path / "run", uninterrupted)
    reported = json.loads((tmp_path / "run" / "checkpoint_manager_snapshot.json").read_text())
    assert str(SETTINGS.max_iterations) in re.findall(
        r'"iteration": (\d+)', json.dumps(reported)
    )  # with the last numbers


def test_ray_gets_each_checkpoint_once_and_the_end(parts, tmp_path, monkeypatch):
    train, sent = pytest.importorskip("ray.train", reason="needs ray, which is not installed"), []
    monkeypatch.setattr(on_ray, "_PAUSE", 0.0)
    monkeypatch.setattr(
        train, "report", lambda metrics, **given: sent.append((metrics["iteration"], given["checkpoint"]))
    )
    job = job_of(parts, tmp_path / "run", gt.TwoTower(**SETTINGS.get_params() | {"max_iterations": 12}))
    job.work(SINGLE, [on_ray._Report(job)])
    assert [iteration for iteration, _ in sent] == [6, 11, 12]  # written after iterations 5 and 10
    assert {given.path for _, given in sent} == {str(tmp_path / "run" / "checkpoint")}


def refused(engine, parts, out):
    negative = gt.TwoTower(dim=3, device="cpu", max_iterations=2, select=False, l2=-1.0)  # which the processes find
    with pytest.raises(ValueError, match=r"^l2: got -1\.0"):
        fit(engine, parts, out, negative)


def test_spark_refuses_what_a_session_cannot_run(session, parts, tmp_path):
    with pytest.raises(ValueError, match="num_processes: got 3"):
        on_spark.fit(parts, SETTINGS, out=tmp_path / "run", num_processes=3)
    with pytest.raises(ValueError, match="use_gpu"):
        on_spark.fit(parts, gt.TwoTower(device="cuda"), out=tmp_path / "run", num_processes=2)
    assert not (tmp_path / "run").exists()


def test_spark_raises_the_error_of_a_process(session, parts, tmp_path):
    refused(on_spark, parts, tmp_path / "run")


def test_ray_raises_the_error_of_a_worker(cluster, parts, tmp_path):
    refused(on_ray, parts, tmp_path / "run")


ENGINES = [pytest.param(on_spark, id="spark"), pytest.param(on_ray, id="ray")]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("path", {"path": "nowhere"}),
        ("settings", {"settings": {"dim": 3}}),
        ("optimizer", {"settings": gt.TwoTower(optimizer="fastest")}),
        ("out", {"out": "file"}),
        ("count", {}),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(engine, name, change, parts, tmp_path, monkeypatch):
    pytest.importorskip("pyspark" if engine is on_spark else "ray.train.torch", reason="the engine is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    count = {"num_processes": 0} if engine is on_spark else {"max_failures": -1}
    given = {"path": parts, "settings": SETTINGS, "out": "run"} | (change or count)
    with pytest.raises(ValueError, match=next(iter(count)) if name == "count" else name):
        engine.fit(given.pop("path"), given.pop("settings"), **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_without_the_package_the_line_that_installs_it_is_told(engine, parts, tmp_path, monkeypatch):
    package = "pyspark" if engine is on_spark else "ray"
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=package) as raised:
        engine.fit(parts, SETTINGS, out=tmp_path / "run")
    assert str(raised.value).endswith(install_line(package))

"""Other systems: the library without what only Linux or Unix has, and the workflow that runs the tests there."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from gramtower._util import host

ROOT = Path(__file__).resolve().parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
#: What Windows lacks of the standard library, and macOS in part; without names that the library's own code needs here.
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "crypt", "syslog")
NAMES = {
    "os": """sched_getaffinity sched_setaffinity sysconf uname fork forkpty register_at_fork memfd_create mkfifo mknod
        getuid geteuid getgid getloadavg posix_fadvise killpg setsid nice O_CLOEXEC""",
    "signal": "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE SIGQUIT alarm pthread_sigmask set_wakeup_fd",
    "mmap": "MADV_NOHUGEPAGE MADV_HUGEPAGE MADV_DONTNEED MADV_WILLNEED",
    "socket": "AF_UNIX SO_REUSEPORT",
    "time": "clock_gettime tzset",
    "select": "poll epoll",
}
SCRIPT = """
import importlib, json, os, pkgutil, sys, warnings
import numba, numpy, safetensors.numpy, safetensors.torch, scipy.sparse.csgraph, scipy.linalg, torch
for name in ("polars", "rich.progress", "cyclopts", "optuna", "matplotlib.pyplot", "uvicorn", "starlette",
             "prometheus_client", "faiss", "triton", "httptools", "pydantic"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
import fcntl, pathlib

modules, names = json.loads(sys.argv[1])
flags, stat, fsync = fcntl.fcntl, os.stat, os.fsync
for name in modules:
    sys.modules[name] = None
for module, hidden in names.items():
    for name in hidden.split():
        vars(importlib.import_module(module)).pop(name, None)


def refuse(event, given):
    if event == "open" and isinstance(given[0], str) and given[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "no such file", given[0])


def stat_of(path, *rest, **named):
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "no such file", os.fspath(path))
    return stat(path, *rest, **named)


def sync(file):  # as Windows does
    if flags(file, fcntl.F_GETFL) & 3 == os.O_RDONLY:
        raise OSError(9, "read-only")
    fsync(file)


sys.addaudithook(refuse)
os.stat, os.fsync = stat_of, sync
os.O_BINARY = 0
warnings.simplefilter("error", ResourceWarning)
import gramtower as gt

missing = []
for module in pkgutil.walk_packages(gt.__path__, "gramtower."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if (error.name or "").split(".")[0] in ("gramtower", *modules):
                raise
            missing.append(module.name)
rng = numpy.random.default_rng(0)
pairs = gt.Interactions.from_arrays(rng.integers(40, size=400), rng.integers(30, size=400))
model = gt.TwoTower(dim=4, hidden=(8,), max_iterations=2).fit(pairs, checkpoint="run.check", history="run.jsonl")
model.save("model.gramtower")
ids, scores = gt.load("model.gramtower").recommend([0, 1], k=3)
gt.load("model.gramtower").update(pairs, iterations=1)
from gramtower._util import host
from gramtower.experiments.run_store import OthersBusy, environment
from gramtower.serving.snapshot import _private
from gramtower.training.result import read_history

_private(pathlib.Path("model.gramtower"))
environment()
host.return_memory()
print(json.dumps({
    "ids": ids.tolist(), "again": model.recommend([0, 1], k=3)[0].tolist(), "records": len(read_history("run.jsonl")),
    "memory": host.memory_size(), "free": host.free_memory(torch.device("cpu")), "cpus": host.cpu_count(),
    "busy": OthersBusy().cores(), "peak": host.ResidentPeak().bytes(), "tasks": host.running_tasks(),
    "left": sorted(p.name for p in pathlib.Path().iterdir()), "missing": missing,
}))
"""


@pytest.mark.skipif(os.name != "posix", reason="hides what is missing here")
def test_every_module_is_imported_and_a_model_is_fitted_without_what_only_unix_has(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([MODULES, NAMES])],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ids"] == found["again"]
    assert found["records"] == 3
    assert found["memory"] == host._UNKNOWN
    assert found["free"] == host._UNKNOWN // 2
    assert found["cpus"] >= 1
    assert (found["busy"], found["peak"], found["tasks"]) == (None, None, 1)
    assert not [name for name in found["left"] if "partial" in name or name.endswith(".lock")]


def test_windows_tells_its_memory(monkeypatch):
    def fill(status):
        assert ctypes.sizeof(status) == status[0] == 64
        status[1] = 3 << 30
        return 1

    monkeypatch.delattr(os, "sysconf", raising=False)
    windows = SimpleNamespace(kernel32=SimpleNamespace(GlobalMemoryStatusEx=fill))
    monkeypatch.setattr(ctypes, "windll", windows, raising=False)
    assert host._installed_memory() == 3 << 30


def test_several_workers_need_the_signal_that_leads_them(monkeypatch):
    server = pytest.importorskip("gramtower.serving.server")
    monkeypatch.delattr(signal, "SIGHUP", raising=False)
    with pytest.raises(ValueError, match="workers"):
        server.serve([], server.Options(port=0, workers=2), print)


@pytest.fixture(scope="module")
def workflow():
    return pytest.importorskip("yaml").safe_load(WORKFLOW.read_text())


def test_the_workflow_runs_every_python_that_is_promised_and_all_systems(workflow):
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = set(re.findall(r"Python :: (3\.\d+)", " ".join(classifiers)))
    matrices = [job["strategy"]["matrix"] for job in workflow["jobs"].values() if "strategy" in job]
    assert promised <= {version for matrix in matrices for version in matrix["python"]}
    assert {"ubuntu", "macos", "windows"} <= {name.split("-")[0] for matrix in matrices for name in matrix["system"]}


def test_the_workflow_is_complete_and_runs_what_exists(workflow):
    assert set(workflow[True]) >= {"push", "pull_request"}  # YAML reads "on" as true
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, job in workflow["jobs"].items():
        assert {"runs-on", "steps", "timeout-minutes"} <= job.keys(), name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/checkout@v5"))
            assert set(re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))) <= targets
            for path in re.findall(r"tests/\w+\.py", step.get("run", "")):
                assert (ROOT / path).exists(), path

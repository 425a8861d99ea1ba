"""A fit whose number of hosts changes from two to one and back: torchrun starts it again, and nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest
import shared_fits
from processes import HERE

import gramtower as gt
from gramtower.distributed.partition import read_part, write_partition

ITERATIONS = 24
#: One process of the fit. It waits at iterations that the test chooses, so that nothing depends on time.
WORKER = f"""
import os, sys, time
from pathlib import Path
import gramtower as gt
from gramtower.distributed.partition import read_part
from gramtower.distributed.rendezvous import joined

folder = Path(sys.argv[1])
(folder / f"process-of-{{os.getppid()}}").write_text(str(os.getpid()))

def reached(name):
    return (folder / name).exists()

with joined(False) as group:
    def wait(record, point):
        if group.size == 1:  # until torchrun ends this process because another host joins
            while not reached("lost") or (record.iteration >= 14 and not reached("back")):
                (folder / f"one-{{record.iteration}}").touch()
                time.sleep(0.02)
            while reached("back"):
                time.sleep(0.02)
        while group.size == 2 and record.iteration >= 8 and not reached("lost"):
            (folder / "two").touch()
            time.sleep(0.02)

    model = gt.TwoTower(dim=3, hidden=(4,), device="cpu", optimizer="gd", max_iterations={ITERATIONS}, select=False)
    part = read_part(folder / "parts", group=group)
    model.fit(part, checkpoint=folder / "checkpoint", history=folder / "history.jsonl", callbacks=[wait])
    model.save(folder / "model.gramtower")
os._exit(0)  # gloo's threads now and then abort an ordinary end of the interpreter
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def agent(stack, folder, port):
    """Start torchrun as on one of two hosts; it ends with the test."""
    path = os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "5", "--monitor-interval", "0.1", "--rdzv-id", "elastic", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"]
    more = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # see how-to/engines.md
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, str(folder / "worker.py"), str(folder)], env=os.environ | more, stdout=log, stderr=log
        )
    stack.callback(kill, folder, process)
    return process


def kill(folder, process):
    """Kill an agent with its process, as the loss of a host does."""
    process.kill()
    process.wait()
    worker = folder / f"process-of-{process.pid}"
    if worker.exists():
        with suppress(ProcessLookupError):
            os.kill(int(worker.read_text()), signal.SIGKILL)


def wait_for(path, *agents):
    end = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < end, f"{path.name}: {(path.parent / 'log').read_text()[-3000:]}"
        assert all(one.poll() is None for one in agents), (path.parent / "log").read_text()[-3000:]
        time.sleep(0.05)


def test_a_fit_goes_on_while_hosts_leave_and_join(tmp_path):
    write_partition(shared_fits.interactions(), tmp_path / "parts", 4)
    (tmp_path / "worker.py").write_text(WORKER)
    with ExitStack() as stack:
        port = free_port()
        first = agent(stack, tmp_path, port)
        wait_for(tmp_path / f"process-of-{first.pid}", first)  # it has the endpoint
        second = agent(stack, tmp_path, port)
        wait_for(tmp_path / "two", first, second)
        kill(tmp_path, second)
        (tmp_path / "lost").touch()
        wait_for(tmp_path / "one-14", first)
        again = agent(stack, tmp_path, port)
        (tmp_path / "back").touch()
        assert [one.wait(timeout=240) for one in (first, again)] == [0, 0], (tmp_path / "log").read_text()[-3000:]
    history = gt.read_history(tmp_path / "history.jsonl")
    sizes = [record.processes for record in history]
    assert [record.iteration for record in history] == list(range(ITERATIONS + 1))
    assert [size for place, size in enumerate(sizes) if place == 0 or size != sizes[place - 1]] == [2, 1, 2]
    alone = gt.TwoTower(dim=3, hidden=(4,), device="cpu", optimizer="gd", max_iterations=ITERATIONS, select=False)
    alone.fit(read_part(tmp_path / "parts"))
    assert [r.value for r in history] == pytest.approx([r.value for r in alone.history_], rel=1e-5)
    saved = gt.load(tmp_path / "model.gramtower")
    ids = alone.left_.ids.tolist()
    assert saved.embed(ids, "left") == pytest.approx(alone.embed(ids, "left"), abs=2e-3)

"""Run a function in several processes of a gloo group and collect what each returns: :func:`run_group`.

Processes are forked from a server that has imported torch and the library, so that a group starts in a fraction of a
second.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "gramtower.model.two_tower", "scipy.sparse", "numba"])


def run_group(target, size, folder, *arguments, timeout=500, env=None):
    """``target`` is "module:function" in this folder, called with the folder and the arguments; JSON comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    started = start_group(target, size, folder, *arguments, env=env)
    outcomes = [process.communicate(timeout=timeout)[1] for process in started]
    for rank, (process, errors) in enumerate(zip(started, outcomes, strict=True)):
        assert process.returncode == 0, f"process {rank} of {size} ended with {process.returncode}:\n{errors[-3000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def start_group(target, size, folder, *arguments, env=None):
    for old in folder.glob("*.json"):
        old.unlink()
    (folder / "store").unlink(missing_ok=True)
    return [Member(rank, size, folder, target, *arguments, env=env) for rank in range(size)]


class Member:
    """One process of a group, with the interface of ``subprocess.Popen``; what it prints goes to a file."""

    def __init__(self, rank, size, folder, target, *arguments, env=None):
        self.log = folder / f"{rank}.log"
        given = (rank, size, str(folder), target, *map(str, arguments))
        self.process = CONTEXT.Process(target=_run, args=(self.log, env or {}, given), daemon=True)
        self.process.start()

    @property
    def pid(self):
        return self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def communicate(self, timeout=None):
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise subprocess.TimeoutExpired("a process of a group", timeout)
        return "", self.log.read_text() if self.log.exists() else ""

    def kill(self):
        self.process.kill()


def _run(log, env, arguments):
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        main(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(rank, size, folder, target, *arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    store.set(f"started/{rank}", "")  # all have to start first, which may take long on a busy machine
    store.wait([f"started/{other}" for other in range(size)], timedelta(seconds=300))
    timeout = timedelta(seconds=float(os.environ.get("TEST_TIMEOUT", "300")))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    module, name = target.split(":")
    result = getattr(importlib.import_module(module), name)(Path(folder), *arguments)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # all is written: gloo's threads now and then abort an ordinary end of the interpreter

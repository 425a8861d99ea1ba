"""Run a function in several processes of a gloo group and collect what each returns.

``python tests/processes.py RANK SIZE FOLDER MODULE:FUNCTION`` is one process; :func:`run_group` starts them all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent


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
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, str(HERE / "processes.py")]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), target, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]


def main(rank, size, folder, target, *arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", int(size))
    store.set(f"started/{rank}", "")  # all have to start first, which may take long on a busy machine
    store.wait([f"started/{other}" for other in range(int(size))], timedelta(seconds=300))
    timeout = timedelta(seconds=float(os.environ.get("TEST_TIMEOUT", "300")))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size), timeout=timeout)
    module, name = target.split(":")
    result = getattr(importlib.import_module(module), name)(Path(folder), *arguments)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # all is written: gloo's threads now and then abort an ordinary end of the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])

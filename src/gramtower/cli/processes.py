"""Several processes, started by torchrun: one process group for a command, and output from the first process alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch

from gramtower import _checks as check
from gramtower.distributed.group import Group, current_group
from gramtower.estimator.defaults import pick_device

TIMEOUT = "GRAMTOWER_TIMEOUT"  # seconds after which a process that does not answer ends the run


@contextmanager
def joined(device: str | None) -> Iterator[Group]:
    """The process group that torchrun's environment describes; without torchrun this process alone.

    NCCL when the model is on GPUs, one for each process of a machine, and gloo otherwise.
    """
    if not _started_among_several():
        yield current_group()
        return
    import torch.distributed as dist

    seconds = os.environ.get(TIMEOUT, "600")
    if not seconds.replace(".", "", 1).isdigit() or float(seconds) <= 0:
        check.fail(TIMEOUT, repr(seconds), "a number of seconds above 0")
    cuda = pick_device(device or "auto").type == "cuda"
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            check.fail(
                "device", f"{torch.cuda.device_count()} GPUs for process {local} of this machine", "one for each"
            )
        torch.cuda.set_device(local)
    timeout = timedelta(seconds=float(seconds))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timeout, store=_store(rank, timeout), rank=rank, world_size=size
    )
    yield current_group()
    dist.destroy_process_group()  # not after an error: the others may wait elsewhere


def leave(code: int) -> NoReturn:
    """End the program.

    One of several processes skips the interpreter's shutdown: gloo's threads, still freeing tensors, sometimes abort it
    (pytorch issue 190489), and torchrun would count a run as failed whose model is written.
    """
    if _started_among_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _started_among_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def _store(rank: int, timeout: timedelta) -> Any:
    """The rendezvous store: torchrun's, with a prefix for each restart.

    Torch does not separate attempts: after a restart gloo would find the addresses of processes that are gone.
    """
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(host, port, None, ours, timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"gramtower/{attempt}", store)  # type: ignore[attr-defined]

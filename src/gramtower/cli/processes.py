"""Several processes, started by torchrun: one process group for a command, and output from the first process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from gramtower._util import checks as check
from gramtower.cli.leaving import started_among_several
from gramtower.cli.rendezvous import agreed_name
from gramtower.distributed.group import Group, current_group
from gramtower.model.defaults import pick_device

TIMEOUT = "GRAMTOWER_TIMEOUT"  # seconds after which a process that does not answer ends the run


@contextmanager
def joined(device: str | None) -> Iterator[Group]:
    """The process group that torchrun's environment describes; without torchrun this process alone.

    NCCL when the model is on GPUs, one for each process of a machine, and gloo otherwise.
    """
    if not started_among_several():
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
        "nccl" if cuda else "gloo", timeout=timeout, store=_store(rank, size, timeout), rank=rank, world_size=size
    )
    yield current_group()
    dist.destroy_process_group()  # not after an error: the others may wait elsewhere


def _store(rank: int, size: int, timeout: timedelta) -> Any:
    """The rendezvous store: torchrun's, with a prefix for each attempt.

    Torch does not separate the attempts of several hosts: after a restart gloo would find the addresses of processes
    that are gone.
    """
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, None, ours, timeout)  # type: ignore[attr-defined]
    name = agreed_name(store, rank, size, timeout)
    return dist.PrefixStore(f"gramtower/{name}", store)  # type: ignore[attr-defined]

"""The rendezvous of processes that torchrun started: one process group for all of them.

They agree over torchrun's store on a name that all processes of one attempt share and no other attempt has. The store
outlives the processes: after a restart it holds the addresses of those that are gone, and what connects them needs
names of its own. Torchrun's count of restarts is not such a name over several hosts: each agent counts the failures of
its own host, so that after a loss the counts differ. Nothing read from the store is believed until it answers something
written in this attempt.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from gramtower._util import checks as check

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from gramtower.distributed.group import Group

TIMEOUT = "GRAMTOWER_TIMEOUT"  # seconds after which a process that does not answer ends the run
_PAUSE = 0.02  # seconds between looks at the store


def started_among_several() -> bool:
    """Whether torchrun started this process as one of several; loads nothing of torch."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def joined(cuda: bool) -> Iterator[Group]:
    """Join the process group of torchrun (NCCL with ``cuda``, else gloo); without it, the group of this process."""
    from gramtower.distributed.group import current_group

    if not started_among_several():
        yield current_group()
        return
    import torch
    import torch.distributed as dist

    seconds = os.environ.get(TIMEOUT, "600")
    if not seconds.replace(".", "", 1).isdigit() or float(seconds) <= 0:
        check.fail(TIMEOUT, repr(seconds), "a number of seconds above 0")
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= (gpus := torch.cuda.device_count()):
            check.fail("device", f"{gpus} GPUs for process {local} of this machine", "one for each")
        torch.cuda.set_device(local)
    timeout = timedelta(seconds=float(seconds))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, backend = _store(rank, size, timeout), "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    yield current_group()
    dist.destroy_process_group()  # not after an error: the others may wait elsewhere


def _store(rank: int, size: int, timeout: timedelta) -> Store:
    """The rendezvous store: torchrun's, with a prefix for each attempt."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, None, ours, timeout)  # type: ignore[attr-defined]
    name = agreed_name(store, rank, size, timeout)
    return dist.PrefixStore(f"gramtower/{name}", store)  # type: ignore[attr-defined]


def agreed_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """The name of this attempt, made by the first process.

    A process writes a number of its own, and waits for the first to answer with that number and the name; the first
    answers every number that it sees until all have said, under the name, that they know it.
    """
    own, end = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"gramtower/asked/{rank}", own)
        while True:
            number, _, name = _read(store, f"gramtower/answered/{rank}").partition(" ")
            if number == own:
                store.set(f"gramtower/known/{name}/{rank}", "")
                return name
            _wait(end, "the first process")
    answered: dict[int, str] = {}
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            number = _read(store, f"gramtower/asked/{other}")
            if number and answered.get(other) != number:
                store.set(f"gramtower/answered/{other}", f"{number} {own}")
                answered[other] = number
            if store.check([f"gramtower/known/{own}/{other}"]):
                waiting.discard(other)
        if waiting:
            _wait(end, f"process {min(waiting)} of {size}")
    return own


def _read(store: Store, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _wait(end: float, what: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(f"{what} did not come to the rendezvous in time")
    time.sleep(_PAUSE)

"""A name that all processes of one attempt share and no other attempt has, agreed on over torchrun's store.

The store outlives the processes: after a restart it holds the addresses of those that are gone, and what connects them
needs names of its own. Torchrun's count of restarts is not such a name over several hosts: each agent counts the
failures of its own host, so that after a loss the counts differ. Nothing read from the store is believed until it
answers something written in this attempt.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import Any

_PAUSE = 0.02  # seconds between looks


def agreed_name(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """The name of this attempt, made by the first process.

    A process writes a number of its own, and waits for the first to answer with that number and the name; the first
    answers every number that it sees until all have said, under the name, that they know it.

    Raises:
        TimeoutError: if the others do not come in time.
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


def _read(store: Any, key: str) -> str:
    """What is under a key, or nothing."""
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _wait(end: float, what: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(f"{what} did not come to the rendezvous in time")
    time.sleep(_PAUSE)

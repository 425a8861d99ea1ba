"""The name of an attempt: the same for all of its processes, and never that of an earlier one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from gramtower.distributed.rendezvous import agreed_name

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
SOON = timedelta(seconds=20)


def attempt(store, delays):
    """The names that processes find, each of which comes after its delay."""
    found = {}

    def come(rank, delay):
        time.sleep(delay)
        found[rank] = agreed_name(store, rank, len(delays), SOON)

    threads = [threading.Thread(target=come, args=one) for one in enumerate(delays)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(delays))]


def test_attempts_on_one_store_have_names_of_their_own_whoever_comes_first():
    store, names = dist.HashStore(), set()
    for delays in ([0, 0, 0], [0.1, 0, 0], [0, 0.1, 0.05], [0.05, 0.1, 0]):
        found = attempt(store, delays)
        assert len(set(found)) == 1
        names.add(found[0])
    assert len(names) == 4


def test_what_an_attempt_left_that_was_cut_short_misleads_nobody():
    store = dist.HashStore()
    store.set("gramtower/asked/1", "one that was killed")
    store.set("gramtower/answered/1", "another that was killed old-name")
    store.set("gramtower/known/old-name/1", "")
    found = attempt(store, [0.05, 0.1])
    assert found[0] == found[1] != "old-name"


def test_one_that_nobody_joins_says_who_is_missing():
    for rank, who in ((0, "process 1 of 2"), (1, "the first process")):
        with pytest.raises(TimeoutError, match=rf"{who}"):
            agreed_name(dist.HashStore(), rank, 2, timedelta(seconds=0.05))

"""One worker answers all: in batches, each task by itself, whatever the others do."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("starlette", reason="the server needs starlette")

from gramtower.serving.batching import Batcher
from gramtower.serving.messages import Refused


class Number:
    def __init__(self, value, size=1):
        self.value, self.size = value, size


class Work:
    """Doubles numbers; waits at the gate, and remembers its batches."""

    def __init__(self):
        self.gate, self.batches, self.begun = threading.Event(), [], threading.Event()

    def __call__(self, tasks):
        self.batches.append([task.value for task in tasks])
        self.begun.set()
        assert self.gate.wait(10)
        return [Refused(422, "seven") if task.value == -7 else 2 * task.value for task in tasks]


async def gathered(batcher, work, values, **options):
    """Answers to a first task, which holds the worker, and to others that come meanwhile."""
    first = asyncio.create_task(batcher.submit(Number(0)))
    await asyncio.to_thread(work.begun.wait, 10)
    others = [asyncio.create_task(batcher.submit(Number(value, **options))) for value in values]
    await asyncio.sleep(0.01)
    assert batcher.waiting == len(others)
    work.gate.set()
    return await asyncio.gather(first, *others, return_exceptions=True)


def test_what_comes_while_the_worker_is_busy_is_one_batch():
    work, sizes = Work(), []
    batcher = Batcher(work, observe=sizes.append)
    assert asyncio.run(gathered(batcher, work, range(1, 30))) == [2 * i for i in range(30)]
    batcher.close()
    assert work.batches == [[0], list(range(1, 30))]
    assert sizes == [1, 29]
    assert not batcher.alive


def test_a_task_that_is_refused_is_refused_alone():
    work = Work()
    answers = asyncio.run(gathered(Batcher(work), work, [6, -7, 8]))
    assert answers[1::2] == [12, 16]
    assert isinstance(answers[2], Refused)


def test_batches_are_bounded_by_rows_and_large_tasks_are_their_own():
    work = Work()
    asyncio.run(gathered(Batcher(work, size=10), work, [1, 2, 3, 4, 5], size=4))
    assert work.batches == [[0], [1, 2], [3, 4], [5]]


def test_a_fault_fails_its_batch_and_the_worker_goes_on():
    def work(tasks):
        if tasks[0].value == 1:
            raise ZeroDivisionError("a fault")
        return [task.value for task in tasks]

    async def ask(batcher):
        with pytest.raises(ZeroDivisionError):
            await batcher.submit(Number(1))
        return await batcher.submit(Number(2))

    batcher = Batcher(work)
    assert asyncio.run(ask(batcher)) == 2
    assert batcher.alive


def test_too_many_waiting_are_503():
    async def ask(batcher, work):
        first = asyncio.create_task(batcher.submit(Number(0)))
        await asyncio.to_thread(work.begun.wait, 10)
        others = [asyncio.create_task(batcher.submit(Number(value))) for value in range(1, 5)]
        await asyncio.sleep(0.01)
        work.gate.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    work = Work()
    answers = asyncio.run(ask(Batcher(work, most=2), work))
    assert answers[:3] == [0, 2, 4]
    assert [answer.status for answer in answers[3:]] == [503, 503]


def test_clients_that_have_gone_cost_no_work():
    async def ask(batcher, work):
        first = asyncio.create_task(batcher.submit(Number(0)))
        await asyncio.to_thread(work.begun.wait, 10)
        gone = asyncio.create_task(batcher.submit(Number(1)))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        work.gate.set()
        return await first, await batcher.submit(Number(2))

    work = Work()
    assert asyncio.run(ask(Batcher(work), work)) == (0, 4)
    assert work.batches == [[0], [2]]


def test_closing_answers_what_waits():
    work = Work()

    async def ask(batcher):
        first = asyncio.create_task(batcher.submit(Number(3)))
        await asyncio.to_thread(work.begun.wait, 10)
        second = asyncio.create_task(batcher.submit(Number(4)))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await asyncio.sleep(0.01)
        work.gate.set()
        await closing
        with pytest.raises(Refused, match="going down"):
            await batcher.submit(Number(5))
        return await first, await second

    assert asyncio.run(ask(Batcher(work))) == (6, 8)

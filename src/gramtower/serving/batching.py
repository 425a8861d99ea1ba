"""One worker thread answers what many clients ask, several requests at a time.

While the worker is busy, requests gather; what has gathered is its next batch. When it is idle it waits for company
only if there was any the last time: until as many requests are there as in the last batch, and never longer than
``wait`` seconds. So a lone client is answered at once, and many share each product with all embeddings. The event
loop never computes anything.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gramtower.serving.errors import Refused


class Task(Protocol):
    """Something for the worker to do."""

    @property
    def size(self) -> int:
        """How much it is: rows that lists or embeddings are wanted for."""
        ...


@dataclass
class _Waiting:
    task: Task
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any] = field(repr=False)


class Batcher:
    """A queue and its worker.

    Args:
        work: answers tasks: one answer or exception for each.
        wait: most seconds to wait for company.
        size: rows of a batch; a larger task is a batch of its own.
        most: tasks that may wait; more are refused with 503.
        observe: told the number of tasks of each batch.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Any]], Sequence[Any]],
        wait: float = 0.002,
        size: int = 1024,
        most: int = 1024,
        observe: Callable[[int], None] = lambda tasks: None,
    ) -> None:
        self._work, self._wait, self._size, self._most, self._observe = work, wait, size, most, observe
        self._waiting: deque[_Waiting] = deque()
        self._condition = threading.Condition()
        self._closed, self._last = False, 1
        self._thread = threading.Thread(target=self._run, name="gramtower-serving", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker is there."""
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        """Tasks that nobody has begun."""
        return len(self._waiting)

    async def submit(self, task: Task) -> Any:
        """The answer to a task.

        Raises:
            Refused: what the task itself is refused with; 503 if too many wait.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._condition:
            if self._closed or len(self._waiting) >= self._most:
                raise Refused(503, "server: too many requests are waiting, or it is going down; try again later")
            self._waiting.append(_Waiting(task, loop, future))
            self._condition.notify()
        return await future

    def close(self) -> None:
        """Answer what waits, then end the worker."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            there = [item for item in batch if not item.future.cancelled()]  # the clients of the others have gone
            if there:
                self._answer(there)
            del batch, there  # nothing may keep a model alive while the worker waits

    def _next(self) -> list[_Waiting] | None:
        with self._condition:
            while not self._waiting and not self._closed:
                self._condition.wait()
            end = time.monotonic() + self._wait
            while len(self._waiting) < self._last and not self._closed:
                if (left := end - time.monotonic()) <= 0:
                    break
                self._condition.wait(left)
            if not self._waiting:
                return None
            batch, rows = [self._waiting.popleft()], 0
            rows = batch[0].task.size
            while self._waiting and rows + self._waiting[0].task.size <= self._size:
                rows += self._waiting[0].task.size
                batch.append(self._waiting.popleft())
            self._last = len(batch)
            return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        try:
            answers = list(self._work([item.task for item in batch]))
        except Exception as error:  # a fault of the library: these requests fail, the worker goes on
            answers = [error] * len(batch)
        self._observe(len(batch))
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        for item, answer in zip(batch, answers, strict=True):
            by_loop.setdefault(item.loop, []).append((item.future, answer))
        for loop, finished in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, finished)


def _deliver(finished: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, answer in finished:
        if future.cancelled():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

"""One thread computes the answers to all clients, several requests at a time.

While the thread is busy, requests gather, and become its next batch. When it is idle it waits for more requests only if
the last batch had several: until as many have arrived, and at most ``wait`` seconds. So a single client is answered at
once, and many clients share each product with all embeddings. Tasks of one kind on one model are computed together; a
task that fails does not affect the others. Answers are encoded here, not in the event loop, which never computes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower.data.ids import Key
from gramtower.serving.ann_index import Found, Query
from gramtower.serving.messages import Refused, encode
from gramtower.serving.served_entities import Entities
from gramtower.serving.snapshot import Snapshot


class Batcher:
    """A queue of at most ``most`` tasks, and the thread that computes them in batches of up to ``size`` rows.

    All tasks are submitted from one event loop.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Any]], Sequence[object]],
        wait: float = 0.002,
        size: int = 1024,
        most: int = 1024,
        observe: Callable[[int], None] = lambda tasks: None,
    ) -> None:
        self._work, self._wait, self._size, self._most, self._observe = work, wait, size, most, observe
        self._waiting: deque[Waiting] = deque()
        self._condition = threading.Condition()
        self._closed, self._last = False, 1
        self._thread = threading.Thread(target=self._run, name="gramtower-serving", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, task: ListTask | CallTask) -> Any:
        """Compute a task."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._condition:
            if self._closed or len(self._waiting) >= self._most:
                raise Refused(503, "server: too many requests are waiting, or it is going down; try again later")
            self._waiting.append((task, future))
            self._condition.notify()
        return await future

    def close(self) -> None:
        """Compute the waiting tasks, then end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            there = [item for item in batch if not item[1].cancelled()]  # other clients have disconnected
            if there:
                self._answer(there)
            del batch, there  # so that no reference keeps a replaced model in memory

    def _next(self) -> list[Waiting] | None:
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
            batch = [self._waiting.popleft()]
            rows = batch[0][0].size
            while self._waiting and (rows := rows + self._waiting[0][0].size) <= self._size:
                batch.append(self._waiting.popleft())
            self._last = len(batch)
            return batch

    def _answer(self, batch: list[Waiting]) -> None:
        tasks, futures = zip(*batch, strict=True)
        try:
            answers = self._work(tasks)
        except Exception as error:  # these requests fail, the thread continues
            answers = [error] * len(batch)
        self._observe(len(batch))
        loop = futures[0].get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_deliver, futures, answers)


def _deliver(futures: Sequence[asyncio.Future[object]], answers: Sequence[object]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if future.cancelled():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


@dataclass
class ListTask:
    """Recommendations, or neighbours in one side."""

    snapshot: Snapshot  # model
    kind: str  # "recommend", or the side of the neighbours
    prepare: Callable[[], Query]  # builds the query; may raise Refused
    asked: Sequence[Key] | None  # entity of each list; None for new entities
    field: str  # name of that entity in the answer
    size: int  # number of lists
    columns: list[str] | None = None  # columns of the table to return; None for none, empty for all
    lines: bool = False  # whether to return one line for each list instead of one JSON object

    def answer(self, found: Found, notes: dict[str, int]) -> bytes:
        """The JSON of the lists, with the notes of their query, which each line repeats."""
        this = self.snapshot.side("right" if self.kind == "recommend" else self.kind)
        answers: list[dict[str, object]] = []
        for place, (rows, scores) in enumerate(zip(*found, strict=True)):
            there = np.isfinite(scores)
            answers.append({} if self.asked is None else {self.field: self.asked[place]})
            answers[-1]["results"] = places(this, rows[there], scores[there].tolist(), self.columns)
        if self.lines:
            return b"".join(encode(answer | notes) + b"\n" for answer in answers)
        return encode({"model": self.snapshot.name, "answers": answers, **notes})


@dataclass
class CallTask:
    """Any other request: a function to call."""

    call: Callable[[], Any]
    size: int = 1


Waiting = tuple[ListTask | CallTask, "asyncio.Future[Any]"]


def places(
    this: Entities, rows: NDArray[np.int64], scores: Sequence[float] | None = None, columns: list[str] | None = None
) -> list[dict[str, object]]:
    """Entities with their ids, scores and columns of the table."""
    found: list[dict[str, object]] = [{"id": name} for name in this.names(rows)]
    if scores is not None:
        for one, score in zip(found, scores, strict=True):
            one["score"] = score
    if columns is not None:
        if this.table is None:
            raise Refused(422, f"columns: the server has no table; start it with gramtower serve --{this.side}-table")
        for one, cells in zip(found, this.table.cells(rows, columns or None), strict=True):
            one["columns"] = cells
    return found


def work(tasks: Sequence[ListTask | CallTask]) -> list[object]:
    """Compute one answer or exception for each task."""
    answers: list[object] = [None] * len(tasks)
    groups: dict[Hashable, list[tuple[int, ListTask, Query]]] = {}
    for place, task in enumerate(tasks):
        try:
            if isinstance(task, CallTask):
                answers[place] = task.call()
            else:
                query = task.prepare()
                groups.setdefault((id(task.snapshot), task.kind), []).append((place, task, query))
        except Exception as error:
            answers[place] = error
    for members in groups.values():
        snapshot, kind, queries = members[0][1].snapshot, members[0][1].kind, [query for _, _, query in members]
        try:
            lists = snapshot.recommend(queries) if kind == "recommend" else snapshot.similar(kind, queries)
        except Exception as error:
            for place, _, _ in members:
                answers[place] = error
            continue
        for (place, task, query), found in zip(members, lists, strict=True):
            try:
                answers[place] = task.answer(found, query.notes)
            except Exception as error:
                answers[place] = error
    return answers

"""What the worker does: requests as tasks, answered in batches, and their JSON.

Tasks over one model and of one kind are answered together; a task that fails is refused alone. Answers are made as
bytes here, off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gramtower.serving.entities import Entities, Key
from gramtower.serving.errors import Refused
from gramtower.serving.lists import Found, Query
from gramtower.serving.snapshot import Snapshot


@dataclass
class ListTask:
    """Lists for some rows: recommendations, or neighbours of one side.

    Attributes:
        snapshot: of the model.
        kind: "recommend", or the side of neighbours.
        prepare: makes the query; may refuse.
        asked: what each list is of, as the answer names it; None for new entities, which are numbered.
        field: the name of that.
        size: how many lists.
        columns: of the table to show with each place; None for none, empty for all.
        lines: whether the answer is a list of lines, one for each list, instead of one JSON object.
    """

    snapshot: Snapshot
    kind: str
    prepare: Callable[[], Query]
    asked: Sequence[Key] | None
    field: str
    size: int
    columns: list[str] | None = None
    lines: bool = False

    def answer(self, found: Found, notes: dict[str, int]) -> bytes:
        """The JSON of the lists, with the notes of their query; each line has them."""
        this = self.snapshot.side("right" if self.kind == "recommend" else self.kind)
        answers = []
        for place, (rows, scores) in enumerate(zip(*found, strict=True)):
            there = np.isfinite(scores)
            head = {} if self.asked is None else {self.field: self.asked[place]}
            answers.append(head | {"results": places(this, rows[there], scores[there].tolist(), self.columns)})
        if self.lines:
            return b"".join(encode(answer | dict(notes)) + b"\n" for answer in answers)
        return encode({"model": self.snapshot.name, "answers": answers, **notes})


@dataclass
class CallTask:
    """Anything else: one function."""

    call: Callable[[], Any]
    size: int = 1


def places(
    this: Entities, rows: Any, scores: Sequence[float] | None = None, columns: list[str] | None = None
) -> list[dict[str, Any]]:
    """Entities as the API shows them: id, score, and columns of the table."""
    shown: list[dict[str, Any]] = [{"id": name} for name in this.names(rows)]
    if scores is not None:
        for one, score in zip(shown, scores, strict=True):
            one["score"] = score
    if columns is not None:
        if this.table is None:
            raise Refused(
                422, f"columns: got some, expected a server with a table: gramtower serve --{this.side}-table"
            )
        for one, cells in zip(shown, this.table.cells(rows, columns or None), strict=True):
            one["columns"] = cells
    return shown


def encode(content: Any) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def work(tasks: Sequence[ListTask | CallTask]) -> list[Any]:
    """One answer or exception for each task."""
    answers: list[Any] = [None] * len(tasks)
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
        first = members[0][1]
        queries = [query for _, _, query in members]
        try:
            if first.kind == "recommend":
                lists = first.snapshot.recommend(queries)
            else:
                lists = first.snapshot.similar(first.kind, queries)
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

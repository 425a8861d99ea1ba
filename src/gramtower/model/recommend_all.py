"""The lists of all left entities, streamed to a file: what `TwoTower.recommend_all` does.

The lists are those of `recommend`. Scores are made and ranked some rows at a time (retrieval/topk.py), a thread
writes the last part (data/list_files.py) while the next is ranked. Cost: the score products and one pass over them, and
O(answers) for the file. Memory: a part of about a million answers, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gramtower._util.host import explained
from gramtower.data.list_files import ListFile
from gramtower.model.feature_spec import Ids
from gramtower.retrieval.topk import Lists, Ranking
from gramtower.training.checkpoint import locked


def write_lists(
    ids: Ids,
    shape: tuple[int, int],
    ranking: Ranking,
    path: Path,
    k: int,
    device: torch.device,
    fresh: bool,
    progress: Callable[[int, int], object] | None,
) -> int:
    """Write the lists of all left entities to a table, from where an earlier run of the same was killed.

    Args:
        ids: of the left and right entities; None for row numbers.
        shape: numbers of left and right entities.
        ranking: their embeddings, and what is left out.
        path: the table: .parquet, .csv or .tsv.
        k: longest list.
        device: where scores are made.
        fresh: begin again if parts of an earlier run are there.
        progress: called with the lists that are written and the number of all, after each part.

    Returns:
        The number of answers that this call wrote.
    """
    file = ListFile(path, ids, shape, k, _marks(ids, ranking))
    with locked(path, name="path"):
        done, answers = file.begin(fresh), 0
        total, pending = file.lists, None
        if progress is not None and done:
            progress(min(done * file.rows, total), total)
        with ThreadPoolExecutor(1, "gramtower-lists") as writer, explained(None):
            for part, columns, values in _parts(_streamed(ranking, k, done, file.rows, device), file, done, k):
                if pending is not None:
                    answers += _written(pending, file, progress)
                pending = part, writer.submit(file.write, part, columns, values)
            if pending is not None:
                answers += _written(pending, file, progress)
        file.finish()
    return answers


def _written(pending: tuple[int, Future[int]], file: ListFile, progress: Callable[[int, int], object] | None) -> int:
    part, future = pending
    answers = future.result()
    if progress is not None:
        progress(min((part + 1) * file.rows, file.lists), file.lists)
    return answers


def _streamed(ranking: Ranking, k: int, done: int, rows: int, device: torch.device) -> Iterator[Lists]:
    """Lists of all rows but those of the first parts, in order.

    Each part has its own products: how scores are rounded depends on the number of rows, and a run that goes on after a
    kill has to end in the same file as one that was not killed.
    """
    total, across = len(ranking.P), ranking.Q.to(device)
    for start in range(done * rows, total, max(1, rows)):
        stop = min(start + rows, total)
        some = ranking if (start, stop) == (0, total) else ranking.rows(start, stop)
        moved = some._replace(P=some.P.to(device), Q=across)
        for begin, end, columns, values in moved.lists(k):
            yield start + begin, start + end, columns, values


def _parts(
    lists: Iterator[Lists], file: ListFile, done: int, k: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Lists as they come, by parts of the file; entities without a list have an empty one."""
    part = done
    columns, values = _empty(file, part, k)
    for start, stop, found, scores in lists:
        taken = 0
        while taken < stop - start:
            first = start + taken - part * file.rows
            count = min(stop - start - taken, len(columns) - first)
            columns[first : first + count, : found.shape[1]] = found[taken : taken + count]
            values[first : first + count, : found.shape[1]] = scores[taken : taken + count]
            taken += count
            if first + count == len(columns):
                yield part, columns, values
                part += 1
                columns, values = _empty(file, part, k)
    while part < file.parts:  # there was nothing to choose from
        yield part, columns, values
        part += 1
        columns, values = _empty(file, part, k)


def _empty(file: ListFile, part: int, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    rows = max(0, min(file.rows, file.lists - part * file.rows))
    return np.full((rows, k), -1, np.int64), np.full((rows, k), -np.inf, np.float32)


def _marks(ids: Ids, ranking: Ranking) -> dict[str, Any]:
    """What the lists are of, by digests of all that they depend on."""
    left, right = ids
    out = ranking.exclude
    return {
        "left ids": _digest(left),
        "right ids": _digest(right),
        "left embeddings": _digest(ranking.P.numpy()),
        "right embeddings": _digest(ranking.Q.numpy()),
        "pairs left out": None if out is None else _digest(out.indptr, out.indices),
        "right entities allowed": _digest(ranking.chosen),
        "right entities denied": _digest(ranking.deny),
    }


def _digest(*arrays: NDArray[Any] | None) -> str | None:
    """A digest of arrays; None of nothing."""
    made = blake2b(digest_size=8)
    for array in arrays:
        if array is None:
            return None
        if array.dtype == object:
            for key in array.tolist():
                made.update(repr(key).encode() + b"\n")
        else:
            made.update(f"{array.dtype.str}{array.shape}".encode())
            made.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return made.hexdigest()

"""Columns of Parquet parts, decoded by worker processes and handed on piece by piece.

Each worker (data/part_worker.py) decodes one part at a time with one thread; a thread of this process waits for its
pieces and handles them. Pieces of different parts come in any order. No part is decoded twice, and none in this
process, which a damaged file could end. A worker that goes away is an error that names its part; after any error, and
after Ctrl-C, all workers are ended before the call returns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower.data.parts import Part

STEP = 1 << 19  # rows of a piece
_MOST = 16  # workers: each holds an interpreter, polars and a piece, about 200 MB
_OVERHEAD = 1 << 33  # bytes of address space for the interpreter and its threads
_PROGRAM = Path(__file__).with_name("part_worker.py")


@dataclass(frozen=True)
class Described:
    """What a part says of itself: its columns as (name, type, kind), and how many rows it has."""

    columns: list[tuple[str, str, str]]
    rows: int


@dataclass(frozen=True)
class Cells:
    """A column of a piece: numbers, texts, or codes of distinct texts.

    Attributes:
        missing: how many cells are empty.
        values: numbers, NaN where missing; of distinct texts the code of each row; of plain text empty.
        text: UTF-8 of the texts, row by row or the distinct ones in order of appearance; None for numbers.
        lengths: of these in bytes.
    """

    missing: int
    values: NDArray[Any]
    text: NDArray[np.uint8] | None = None
    lengths: NDArray[np.uint32] | None = None

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.values) if self.lengths is None or len(self.values) else len(self.lengths)


class _Worker:
    """One process, which answers requests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(host.memory_size() + _OVERHEAD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "POLARS_MAX_THREADS": "1",
                "MALLOC_ARENA_MAX": "2",
            },
        )

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either, which says it
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, path: Path) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """The next frame.

        Raises:
            ValueError: naming the part, if it cannot be read.
        """
        try:
            head: dict[str, Any] = json.loads(self._take(int.from_bytes(self._take(8), "little")))
            arrays = [np.frombuffer(self._take(np.dtype(kind).itemsize * n), kind) for kind, n in head["arrays"]]
        except EOFError:
            head, arrays = {"reason": "it ends the process that reads it"}, []
        if "reason" in head:
            check.fail("path", f"{path}, which cannot be read ({head['reason']})", "a Parquet file")
        return head, arrays

    def _take(self, size: int) -> bytearray:
        assert self._process.stdout is not None
        buffer = bytearray(size)
        view, at = memoryview(buffer), 0
        while at < size:
            got = self._process.stdout.readinto(view[at:])  # type: ignore[attr-defined]
            if not got:
                raise EOFError
            at += got
        return buffer

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()

    def close(self) -> None:
        """End the process and let go of its pipes."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


class Workers:
    """Worker processes, one for each core as far as there are parts and memory for them; ended by ``with``.

    Args:
        parts: in order.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        count = min(torch.get_num_threads(), len(parts), _MOST, host.memory_size() // 10**9)
        self._workers = [_Worker() for _ in range(max(1, count))]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def describe(self) -> list[Described]:
        """Columns and rows of every part, from their footers."""
        found: dict[int, Described] = {}

        def work(worker: _Worker, number: int) -> None:
            path = self.parts[number].path
            worker.ask({"describe": str(path.absolute())})
            head, _ = worker.answer(path)
            columns = [(str(name), str(dtype), str(kind)) for name, dtype, kind in head["columns"]]
            found[number] = Described(columns, int(head["rows"]))

        self._run(work)
        return [found[number] for number in range(len(self.parts))]

    def read(
        self,
        described: Sequence[Described],
        columns: Sequence[str],
        plain: Sequence[str],
        handle: Callable[[int, int, int, dict[str, Cells]], None],
    ) -> None:
        """Read some columns of all parts.

        Args:
            described: the parts.
            columns: names of the columns.
            plain: those of which text is wanted as it is, without codes, where it is all there and not long.
            handle: called in any of several threads with the number of a part, a row of it, how many rows follow, and
                their columns.
        """
        names, step = list(dict.fromkeys(columns)), STEP

        def work(worker: _Worker, number: int) -> None:
            path, rows = self.parts[number].path, described[number].rows
            kinds = {name: kind for name, _, kind in described[number].columns}
            worker.ask(
                {"read": str(path.absolute()), "columns": names, "plain": list(plain), "rows": rows, "step": step}
            )
            for _ in range(0, rows, step):
                head, arrays = worker.answer(path)
                cells = dict(_cells(names, kinds, head["missing"], arrays))
                if any(cell.rows != head["rows"] for cell in cells.values()):
                    check.fail("path", f"{path}, whose columns differ in length", "a Parquet file")
                handle(number, head["start"], head["rows"], cells)
                del arrays, cells  # before the next piece comes

        self._run(work)

    def _run(self, work: Callable[[_Worker, int], None]) -> None:
        """Call ``work`` for each part's number, each with the next free worker; the error of the first part wins."""
        numbers, lock = iter(range(len(self.parts))), threading.Lock()
        errors: dict[int, BaseException] = {}
        done = threading.Event()

        def run(worker: _Worker) -> None:
            while not errors and not done.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    work(worker, number)
                except BaseException as error:
                    errors[number] = error

        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in self._workers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: no thread may go on after this returns
            done.set()
            for worker in self._workers:
                worker.end()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if errors:
            raise errors[min(errors)]


def _cells(
    names: Sequence[str], kinds: dict[str, str], missing: dict[str, int], arrays: list[NDArray[Any]]
) -> Iterator[tuple[str, Cells]]:
    """The arrays of a frame by column."""
    rest = iter(arrays)
    for name in names:
        taken = list(itertools.islice(rest, 3 if kinds[name] == "text" else 1))
        yield name, Cells(missing[name], *taken)

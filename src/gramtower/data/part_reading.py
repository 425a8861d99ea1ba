"""A folder of Parquet parts as pairs, in a stream: pieces of rows become numbers as they come.

Held at once: 8 bytes for each row kept (its two ids as numbers; 4 more for each value or weight, 8 for a time), the
table of distinct ids (data/interning.py), and a piece for each worker. The result takes as much or more, and is made of
these nearly in place (data/grouping.py). Ids are numbered in order of first appearance, parts in order of their
names, so that the result is that of the same rows in one file, whatever the number of workers.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower.data import frames, part_stream
from gramtower.data.frames import Choice
from gramtower.data.grouping import Piece, group
from gramtower.data.ids import integers
from gramtower.data.interning import Table, first_rows
from gramtower.data.merge import Fields, Rule, check_rows
from gramtower.data.part_stream import Cells, Described, Workers
from gramtower.data.parts import Part, check_unchanged, key_values, list_parts
from gramtower.data.sources import reading

_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_WITHIN = 40  # bits of a place that say which row of a part


@dataclass(frozen=True)
class ReadingProgress:
    """How far the reading of a folder is.

    Attributes:
        parts: read so far.
        all_parts: of the folder.
        rows: read so far.
        all_rows: of all parts.
        seconds: since it began.
    """

    parts: int
    all_parts: int
    rows: int
    all_rows: int
    seconds: float

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        rows = f"{self.rows:,} of {self.all_rows:,} rows"
        return f"{rows}, {self.parts:,} of {self.all_parts:,} parts, {self.rate / 1e6:.2f} M rows/s"


def read_folder(
    folder: Path,
    choices: Sequence[Choice],
    rule: Rule,
    progress: Callable[[ReadingProgress], None] | None = None,
) -> tuple[Fields, str, str]:
    """The fields of Interactions, and the names of the left and right column.

    Args:
        folder: of Parquet files; data/parts.py says which.
        choices: (argument, column) of "left", "right", and of "value", "weight" and "time" where they are read.
        rule: which rows make a pair.
        progress: called from time to time, in any thread.

    Raises:
        ValueError: naming the part that cannot be read, that has other columns or types than the first one, in which an
            id is missing, or that changed meanwhile.
    """
    frames.polars()
    with reading(folder):
        parts = list_parts(folder)
        with Workers(parts) as workers:
            described = workers.describe()
            names = _same_columns(parts, described, choices)
            total = sum(one.rows for one in described)
            if 8 * total > host.memory_size():
                check.fail("path", f"{folder} with {total:,} rows", "rows that fit in memory, 8 bytes each at least")
            read = {argument: name for (argument, _), name in zip(choices, names, strict=True)}
            if not rule.reads_value:
                read.pop("value", None)
            collected = _Collected(parts, described, read, rule, progress)
            present = [name for name, _, _ in described[0].columns]
            others = {name for argument, name in read.items() if argument in _OTHERS}
            plain = [name for name in (read["left"], read["right"]) if name not in others]
            wanted = [name for name in read.values() if name in present] or present[:1]
            workers.read(described, wanted, plain, collected.take)
        check_unchanged(folder, parts)
        return collected.fields(), names[0], names[1]


class _Collected:
    """What has been read so far; pieces come in any order and from several threads."""

    def __init__(
        self,
        parts: Sequence[Part],
        described: Sequence[Described],
        columns: dict[str, str],
        rule: Rule,
        progress: Callable[[ReadingProgress], None] | None,
    ) -> None:
        self._parts, self._columns, self._rule = parts, columns, rule
        self._left = {
            number: -(-one.rows // part_stream.STEP) for number, one in enumerate(described)
        }  # pieces to come
        self._done, self._rows, self._all = sum(not n for n in self._left.values()), 0, sum(d.rows for d in described)
        self._progress, self._began = progress, time.perf_counter()
        self._lock, self._pieces = threading.Lock(), dict[tuple[int, int], Piece]()
        self._report = {"rows": 0, "rows_without_id": 0, "rows_without_number": 0, "rows_below_threshold": 0}
        kinds = {name: kind for name, _, kind in described[0].columns}
        self._tables = {side: Table(self._is_text(columns[side], kinds)) for side in ("left", "right")}

    def _is_text(self, column: str, kinds: dict[str, str]) -> bool:
        """Whether ids are text; of a key, unless every folder's value is a whole number."""
        if column in kinds:
            return kinds[column] == "text"
        return not all(_NUMBER.fullmatch(part.keys[column]) for part in self._parts)

    def take(self, number: int, start: int, rows: int, cells: dict[str, Cells]) -> None:
        """So many rows of part ``number`` from ``start`` on."""
        part = self._parts[number]
        with reading(part.path):
            cells |= {name: _key_cells(part, name, rows) for name in self._columns.values() if name not in cells}
            piece = self._piece(part, (number << _WITHIN) + start, cells, rows)
        with self._lock:
            if len(piece.left):
                self._pieces[number, start] = piece
            self._left[number] -= 1
            self._done += not self._left[number]
            self._rows += rows
            state = ReadingProgress(
                self._done, len(self._parts), self._rows, self._all, time.perf_counter() - self._began
            )
        if self._progress is not None:
            self._progress(state)

    def _piece(self, part: Part, place: int, cells: dict[str, Cells], rows: int) -> Piece:
        numbers = {
            name: _numbers(name, column, cells[column]) for name, column in self._columns.items() if name in _OTHERS
        }
        kept = np.ones(rows, bool)
        for array in numbers.values():
            kept &= ~np.isnan(array)
        counts = {"rows": rows, "rows_without_number": rows - int(np.count_nonzero(kept))}
        if self._rule.threshold is not None:
            kept &= numbers["value"] >= self._rule.threshold
            counts["rows_below_threshold"] = rows - counts["rows_without_number"] - int(np.count_nonzero(kept))
        left, right = (
            _marks(self._tables[side], side, part, column, cells[column], kept, place)
            for side, column in (("left", self._columns["left"]), ("right", self._columns["right"]))
        )
        chosen = slice(None) if kept.all() else kept
        names = [name for name in numbers if name != "value" or self._rule.labels]
        dtype = np.float64 if self._rule.duplicates == "sum" else np.float32
        with self._lock:
            for name, count in counts.items():
                self._report[name] += count
        return Piece(
            _own(left[chosen]),
            _own(right[chosen]),
            {name: _own(numbers[name][chosen].astype(np.float64 if name == "time" else dtype)) for name in names},
        )

    def fields(self) -> Fields:
        """Everything put together."""
        report = self._report
        check_rows(report)
        pieces = [self._pieces.pop(key) for key in sorted(self._pieces)]
        (left, right), shape = self._tables.values(), tuple(map(len, self._tables.values()))
        host.return_memory()
        renumber = left.finish(), right.finish()
        host.return_memory()
        matrix, weights, times, merged = group(pieces, (shape[0], shape[1]), self._rule.duplicates, renumber)
        host.return_memory()
        report |= {"rows_merged": merged, "pairs": matrix.nnz, "left": shape[0], "right": shape[1]}
        return Fields(matrix, left.names(renumber[0]), right.names(renumber[1]), times, weights, report)


_OTHERS = ("value", "weight", "time")


def _same_columns(parts: Sequence[Part], described: Sequence[Described], choices: Sequence[Choice]) -> list[str]:
    """The names of the chosen columns, which every part must have with the same type; keys of folders come last."""
    first = described[0]
    present = [name for name, _, _ in first.columns]
    names = frames.pick_all(choices, [*present, *(key for key in parts[0].keys if key not in present)])
    types = {name: dtype for name, dtype, _ in first.columns if name in names}
    for part, one in zip(parts, described, strict=True):
        others = {name for name, _, _ in one.columns}
        if others != set(present):
            odd = sorted(others ^ set(present))[0]
            given = f"{part.path}, which has {'the' if odd in others else 'no'} column {odd!r}"
            check.fail("path", given, f"the columns of {parts[0].name}, the first part: {', '.join(present)}")
        for name, dtype, _ in one.columns:
            if name in types and dtype != types[name]:
                given = f"{part.path}, whose column {name!r} is of {dtype}"
                check.fail("path", given, f"{types[name]} as in {parts[0].name}, the first part")
    kinds = {name: (dtype, kind) for name, dtype, kind in first.columns}
    for (argument, _), name in zip(choices, names, strict=True):
        dtype, kind = kinds.get(name, ("String", "text"))
        of_ids = argument in ("left", "right")
        allowed = {"text", "integer", "number"} | ({"time"} if argument == "time" else set())
        if kind not in allowed or (of_ids and dtype == "Boolean"):
            expected = "ids that are text or whole numbers" if of_ids else "numbers"
            check.fail(argument, f"column {name!r} of {dtype} in {parts[0].path}", expected)
    return names


def _key_cells(part: Part, key: str, rows: int) -> Cells:
    """A column with one text in every row."""
    value = key_values(part, key)
    text = np.frombuffer((value or "").encode(), np.uint8)
    codes: NDArray[np.uint32] = np.full(rows, 2**32 - 1 if value is None else 0, np.uint32)
    return Cells(rows if value is None else 0, codes, text, np.array([len(text)], np.uint32))


def _marks(
    table: Table, side: str, part: Part, column: str, cells: Cells, kept: NDArray[np.bool_], place: int
) -> NDArray[np.int32]:
    """The mark of each row's id; -1 where the row is not kept."""
    if cells.missing:
        given = (
            f"{part.path}, in which {cells.missing:,} rows from {place & ((1 << _WITHIN) - 1)} on have no {column!r}"
        )
        check.fail(side, given, "an id in every row of a folder of parts; leave such rows out when they are written")
    turn = place >> _WITHIN
    if cells.text is not None and cells.lengths is not None:
        if table.text and not len(cells.values):
            return table.add_texts(cells.text, cells.lengths, _places(kept, place), turn)
        if table.text:
            found = first_rows(cells.values, kept, len(cells.lengths), place)
            marks: NDArray[np.int32] = table.add_texts(cells.text, cells.lengths, found, turn)[cells.values]
            return marks
        whole = np.full(len(kept), int(bytes(cells.text)), np.int64)  # the key of a folder, which is a whole number
    else:
        whole, _ = integers(side, cells.values)
    return table.add_numbers(whole, _places(kept, place), turn)


def _places(kept: NDArray[np.bool_], place: int) -> NDArray[np.int64]:
    """Of rows from ``place`` on; -1 for those that are not kept."""
    return np.where(kept, np.arange(place, place + len(kept)), -1)


def _numbers(name: str, column: str, cells: Cells) -> NDArray[np.float64]:
    """Values, weights or times of a piece; NaN where they are missing."""
    pl = frames.polars()
    if cells.text is None or cells.lengths is None:
        found: NDArray[np.float64] = frames.numbers(name, pl.Series(column, cells.values)).to_numpy()
        return found
    ends = np.cumsum(cells.lengths, dtype=np.int64).tolist()
    data = cells.text.tobytes()
    texts = [data[a:b].decode() for a, b in zip([0, *ends], ends, strict=False)]
    read = frames.seconds if name == "time" else frames.numbers
    known = np.append(read(name, pl.Series(column, texts, dtype=pl.String)).to_numpy(), np.nan)
    result: NDArray[np.float64] = known[np.minimum(cells.values, len(texts))]  # a missing cell has the largest code
    return result


def _own(array: NDArray[Any]) -> NDArray[Any]:
    """A copy whose memory can be given back as soon as it is freed."""
    own = host.own_pages(len(array), array.dtype)
    own[:] = array
    return own

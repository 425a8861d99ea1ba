"""Pairs from a folder of Parquet parts, as Spark, DuckDB or polars write it, read in a stream.

Parts are the files ending in .parquet or .pq at any depth, in sorted order of their paths below the folder. Names that
begin with ``_`` or ``.`` and those ending in .crc are what writers leave next to them (``_SUCCESS``, ``_metadata``,
``_temporary``) and are skipped. Any other file is refused, and so is a Delta table, whose log says which parts still
count. A folder called ``key=value`` gives every row below it a column ``key``, as Hive does.

:class:`Folder` reads all files or some of them. For a fit by several processes (distributed/partition.py) files belong
to *groups*: all files below one folder ``key=value``, or one file without such a folder.

Threads read one part each, batch by batch, and turn its ids into numbers as they come. Memory: 8 bytes for each row
that is kept (its two ids as numbers; 4 more for each value or weight, 8 for a time), the table of distinct ids
(data/interning.py), and one batch per thread. The matrix takes as much or more and is built from these arrays nearly
in place (data/grouping.py). Ids are numbered in order of first appearance, and parts are ordered by name, so the
result equals that of the same rows in one file, for any number of threads.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.files import WRITING, files_below
from gramtower._util.host import parallel_for
from gramtower.data import frames
from gramtower.data.frames import Choice
from gramtower.data.ids import Ids, Key, integers
from gramtower.data.matrices import Fields, Rule
from gramtower.data.sources import reading

if TYPE_CHECKING:  # compiled by numba
    import pyarrow as pa

    from gramtower.data.grouping import Piece

Kind = TypeVar("Kind", bound=np.generic)
_THREADS = 8
STEP = 1 << 19  # rows of a batch
_ENDINGS = (".parquet", ".pq")
_TABLES = (".csv", ".tsv", ".dat", ".data", ".txt")  # of the folders that public data sets come in
_NULL = "__HIVE_DEFAULT_PARTITION__"
_EXPECTED = "a folder of Parquet parts"
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_WITHIN = 40  # bits of a place that hold the row within its part
_OTHERS = ("value", "weight", "time")


@dataclass(frozen=True)
class Part:
    """One file."""

    path: Path  # where it is
    name: str  # its path below the folder, with slashes
    keys: dict[str, str]  # the columns given by its folders, key=value
    size: int  # in bytes
    modified: int  # in nanoseconds since 1970

    @property
    def group(self) -> str:
        """The files that belong together: the folder ``key=value`` that the file is below, or the file itself."""
        levels = self.name.split("/")
        return "/".join(levels[: max((n for n, level in enumerate(levels[:-1], 1) if "=" in level), default=None)])


@dataclass(frozen=True)
class ReadingProgress:
    """Progress of reading a folder."""

    parts: int  # parts read so far
    all_parts: int  # parts of the folder
    rows: int  # rows read so far
    all_rows: int  # rows of all parts
    seconds: float  # time since the start

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        rows = f"{self.rows:,} of {self.all_rows:,} rows"
        return f"{rows}, {self.parts:,} of {self.all_parts:,} parts, {self.rate / 1e6:.2f} M rows/s"


@dataclass(frozen=True)
class _Described:
    """The columns of a part, the polars types of the chosen ones, and the number of its rows."""

    columns: list[str]
    types: dict[str, Any]
    rows: int


def is_parts(path: Path) -> bool:
    """Whether a path is a folder with Parquet files and without the tables of another layout."""
    if not path.is_dir() or any(file.suffix.lower() in _TABLES for file in path.iterdir()):
        return False
    return any(file.name.lower().endswith(_ENDINGS) for file in _visible(path))


def list_parts(folder: Path) -> list[Part]:
    """List the parts of a folder, in order; a file is its own part."""
    if not folder.is_dir():
        return [_part(folder, folder.parent)]
    if (folder / "_delta_log").exists():
        expected = f"{_EXPECTED}; export the current rows of the table to a folder of their own"
        check.fail("path", f"{folder}, a Delta table, of whose files not all may count", expected)
    if (folder / WRITING).exists():
        given = f"{folder}, which a process is writing, or was when it ended"
        check.fail("path", given, "a complete folder: wait, or write it again")
    found = []
    for path in _visible(folder):
        if not path.name.lower().endswith(_ENDINGS):
            expected = f"{_EXPECTED} (.parquet, .pq) and no other files, unless their names begin with _ or ."
            check.fail("path", f"{path} among the parts", expected)
        if not path.is_file():
            check.fail("path", f"{path}, which is a device, a pipe or a broken link", "plain files")
        found.append(_part(path, folder))
    if not found:
        check.fail("path", f"{folder}, a folder without .parquet or .pq files", _EXPECTED)
    found.sort(key=lambda part: part.name.split("/"))
    for part in found:
        if list(part.keys) != list(found[0].keys):
            given = f"{part.path} below {', '.join(part.keys) or 'no key'}"
            expected = f"folders key=value of {', '.join(found[0].keys) or 'no key'}, as of the first part"
            check.fail("path", given, expected)
    return found


def _part(path: Path, folder: Path) -> Part:
    below, state = path.relative_to(folder), path.stat()
    if state.st_size == 0:
        check.fail("path", f"{path}, which is empty", "a Parquet file")
    levels = (level.partition("=") for level in below.parts[:-1] if "=" in level)
    keys = {unquote(key): unquote(value) for key, _, value in levels}
    return Part(path, below.as_posix(), keys, state.st_size, state.st_mtime_ns)


def check_unchanged(folder: Path, parts: list[Part]) -> None:
    """Refuse a folder whose files are no longer those that were listed."""
    before = {part.name: (part.size, part.modified) for part in parts}
    now = {part.name: (part.size, part.modified) for part in list_parts(folder)}
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            how = "added" if name not in before else "removed" if name not in now else "written to"
            given = f"{folder / name}, which was {how} while the folder was read"
            check.fail("path", given, "a folder that does not change while it is read")


def _visible(folder: Path) -> Iterator[Path]:
    """Yield the files that count."""
    return (path for path in files_below(folder) if not path.name.endswith(".crc"))


class Folder:
    """A folder of parts whose columns were checked.

    Attributes:
        parts: the files, in order.
        rows: number of rows of each file.
        names: names of the chosen columns.
        rule: the rule for rows.
        columns: argument → name of its column; without values that the rule does not read.
        stored: names of the columns that files have; the others are keys of folders.
        texts: those that are text.
    """

    def __init__(self, path: Path, choices: Sequence[Choice], rule: Rule) -> None:
        with reading(path):
            self.path, self.parts = path, list_parts(path)
            with ThreadPoolExecutor(_THREADS) as pool:  # of objects, the requests take most of the time
                described = list(pool.map(lambda part: _describe(part, choices), self.parts))
            self.names = _same_columns(self.parts, described, choices)
        self.rows, self.rule = [one.rows for one in described], rule
        self.columns = {argument: name for (argument, _), name in zip(choices, self.names, strict=True)}
        if not rule.reads_value:
            self.columns.pop("value", None)
        self.stored = [name for name in dict.fromkeys(self.columns.values()) if name in described[0].columns]
        self.texts = [name for name in self.stored if frames.is_text(described[0].types[name])]
        self._first = described[0].columns[0]  # counts rows if all chosen columns are keys

    def is_text(self, column: str) -> bool:
        """Whether ids are text; those of a key are, unless the value of every folder is a whole number."""
        if column in self.stored:
            return column in self.texts
        return not all(_NUMBER.fullmatch(part.keys[column]) for part in self.parts)

    def read(
        self, files: range, progress: Callable[[ReadingProgress], None] | None = None, seed: int | None = None
    ) -> Collected:
        """Read consecutive files; ``seed`` is that of the hashes of left ids."""
        total = sum(self.rows[number] for number in files)
        if 8 * total > host.memory_size():
            check.fail("path", f"{self.path} with {total:,} rows", "rows that fit in memory, 8 bytes each at least")
        collected = Collected(self, files, progress, seed)
        errors: dict[int, BaseException] = {}

        def work(number: int, _: int) -> None:
            try:
                collected.read(number, errors)
            except BaseException as error:  # also Ctrl-C: the other threads stop after their batch
                errors[number] = error

        with reading(self.path):
            parallel_for(work, list(range(files.start, files.stop + 1)))
            if errors:
                raise errors[min(errors)]
            check_unchanged(self.path, self.parts)
        return collected

    def batches(self, number: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the batches of a file, each with its first row; the chosen columns include those of keys."""
        part, rows, start = self.parts[number], self.rows[number], 0
        keys = [name for name in dict.fromkeys(self.columns.values()) if name not in self.stored]
        with reading(part.path), frames.parquet_file("path", part.path, self.texts) as file:
            for batch in frames.parquet_batches(file, self.stored or [self._first], STEP):
                if start + len(batch) > rows:
                    break
                for key in keys:
                    batch = batch.append_column(key, _key_cells(part, key, len(batch)))
                yield start, batch
                start += len(batch)
            if start != rows:
                given = f"{part.path}, which cannot be read (it does not have as many rows as it declares, {rows:,})"
                check.fail("path", given, "a Parquet file")

    def refuse_missing(self, number: int, start: int, argument: str, missing: int) -> None:
        """Refuse rows without an id."""
        given = f"{self.parts[number].path}, in which {missing:,} rows from {start} on have no"
        expected = "an id in every row of a folder of parts; filter such rows out when writing it"
        check.fail(argument, f"{given} {self.columns[argument]!r}", expected)


def _describe(part: Part, choices: Sequence[Choice]) -> _Described:
    with reading(part.path), frames.parquet_file("path", part.path, footer=True) as file:
        schema, wanted = file.schema_arrow, {column for _, column in choices}
        chosen = [name for place, name in enumerate(schema.names) if name in wanted or place in wanted]
        types = {name: frames.polars_type(schema.field(name).type) for name in chosen}
        return _Described(list(schema.names), types, file.metadata.num_rows)


def _same_columns(parts: Sequence[Part], described: Sequence[_Described], choices: Sequence[Choice]) -> list[str]:
    """The names of the chosen columns, which every part must have with the same type; keys of folders come last."""
    pl, present, types = frames.polars(), described[0].columns, described[0].types
    names = frames.pick_all(choices, [*present, *(key for key in parts[0].keys if key not in present)])
    for part, one in zip(parts, described, strict=True):
        if set(one.columns) != set(present):
            odd = sorted(set(one.columns) ^ set(present))[0]
            given = f"{part.path}, which has {'the' if odd in one.columns else 'no'} column {odd!r}"
            check.fail("path", given, f"the columns of {parts[0].name}, the first part: {', '.join(present)}")
        for name in types:
            if one.types.get(name) != types[name]:
                given = f"{part.path}, whose column {name!r} is of {one.types.get(name)}"
                check.fail("path", given, f"{types[name]} as in {parts[0].name}, the first part")
    for (argument, _), name in zip(choices, names, strict=True):
        kind = types.get(name, pl.String())
        of_ids = argument in ("left", "right")
        allowed = kind.is_numeric() or frames.is_text(kind) or (kind == pl.Boolean and not of_ids)
        if not allowed and not (argument == "time" and kind in (pl.Date, pl.Datetime)):
            expected = "ids that are text or whole numbers" if of_ids else "numbers"
            check.fail(argument, f"column {name!r} of {kind} in {parts[0].path}", expected)
    return names


class Collected:
    """The rows read so far; batches come in any order and from several threads.

    ``left`` and ``right`` are the tables of ids, ``report`` counts rows.
    """

    def __init__(
        self,
        folder: Folder,
        files: range,
        progress: Callable[[ReadingProgress], None] | None,
        seed: int | None,
    ) -> None:
        from gramtower.data.interning import Table

        self._folder, self._rule, self._progress, self._began = folder, folder.rule, progress, time.perf_counter()
        rows = [folder.rows[number] for number in files]
        self._done, self._all, self._total = rows.count(0), len(files), sum(rows)
        self._lock, self._pieces = threading.Lock(), dict[tuple[int, int], "Piece"]()
        self._columns_of: NDArray[np.int32] = np.empty(0, np.int32)  # of marks, after right_ids()
        self.report = {"rows": 0, "rows_without_id": 0, "rows_without_number": 0, "rows_below_threshold": 0}
        self.left = Table(folder.is_text(folder.columns["left"]), seed)
        self.right = Table(folder.is_text(folder.columns["right"]))

    def read(self, number: int, errors: dict[int, BaseException]) -> None:
        """Read a part; returns early if another part had an error."""
        with reading(self._folder.parts[number].path):
            for start, batch in self._folder.batches(number):
                if errors:
                    return
                self._take(number, start, batch)

    def _take(self, number: int, start: int, batch: pa.RecordBatch) -> None:
        """Keep a batch: rows of part ``number`` from ``start`` on."""
        from gramtower.data.grouping import Piece

        rows, columns = len(batch), self._folder.columns
        numbers = {
            name: _numbers(name, columns[name], batch.column(columns[name])) for name in columns if name in _OTHERS
        }
        kept = np.ones(rows, bool)
        for array in numbers.values():
            kept &= ~np.isnan(array)
        counts = {"rows": rows, "rows_without_number": rows - int(np.count_nonzero(kept))}
        if self._rule.threshold is not None:
            kept &= numbers["value"] >= self._rule.threshold
            counts["rows_below_threshold"] = rows - counts["rows_without_number"] - int(np.count_nonzero(kept))
        left, right = (self._marks(side, number, start, batch, kept) for side in ("left", "right"))
        chosen = slice(None) if kept.all() else kept
        exact = np.float64 if self._rule.duplicates == "sum" else np.float32
        kinds = {name: np.float64 if name == "time" else exact for name in numbers}
        if not self._rule.labels:
            kinds.pop("value", None)
        own = {name: _own(numbers[name][chosen].astype(kind)) for name, kind in kinds.items()}
        piece = Piece(_own(left[chosen]), _own(right[chosen]), own)
        with self._lock:
            for name, count in counts.items():
                self.report[name] += count
            if len(piece.left):
                self._pieces[number, start] = piece
            self._done += start + rows == self._folder.rows[number]
            reached = self._done, self._all, self.report["rows"], self._total
        if self._progress is not None:
            self._progress(ReadingProgress(*reached, time.perf_counter() - self._began))

    def _marks(
        self, side: str, number: int, start: int, batch: pa.RecordBatch, kept: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """The mark of each row's id; -1 where the row is not kept."""
        from gramtower.data.interning import first_rows

        table, column = self.left if side == "left" else self.right, self._folder.columns[side]
        array, place = batch.column(column), (number << _WITHIN) + start
        missing, coded = array.null_count, hasattr(array, "dictionary")
        whole: NDArray[np.int64] = np.empty(0, np.int64)
        if not missing and not coded and not table.text:
            whole, gone = integers(side, frames.as_series(column, array).to_numpy())
            missing = 0 if gone is None else int(gone.sum())
        if missing:
            self._folder.refuse_missing(number, start, side, missing)
        if coded and table.text:
            codes = array.indices.to_numpy()
            first = first_rows(codes.astype(np.uint32, copy=False), kept, len(array.dictionary), place)
            return np.asarray(table.add_texts(*_texts(array.dictionary), first, number)[codes])
        places = np.where(kept, np.arange(place, place + len(kept)), -1)
        if table.text:
            return table.add_texts(*_texts(array), places, number)
        if coded:  # the key of a folder, which is a whole number
            whole = np.full(len(kept), int(array.dictionary[0].as_py()), np.int64)
        return table.add_numbers(whole, places, number)

    def split_left_id(self) -> tuple[Key, str, str] | None:
        """Return a left id with rows in two groups of files, and a file of each; None if there is no such id."""
        parts = self._folder.parts
        groups = np.unique([part.group for part in parts], return_inverse=True)[1]
        files = self.left.places() >> _WITHIN  # of each mark, the first file
        for (number, _), piece in sorted(self._pieces.items()):
            wrong = groups[files[piece.left]] != groups[number]
            if wrong.any():
                mark = int(piece.left[np.argmax(wrong)])
                return self.left.key(mark), parts[files[mark]].name, parts[number].name
        return None

    def left_hashes(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
        """Yield some of the left ids at a time: their hashes, and the number of the file that has each."""
        files = self.left.places() >> _WITHIN
        yield from ((hashes, files[marks]) for hashes, marks in self.left.hashes())

    def right_ids(self) -> Ids:
        """Return the right ids of these rows in order of first appearance, and empty their table."""
        self._columns_of = self.right.finish()
        return self.right.names(self._columns_of)

    def fields(self, right: tuple[NDArray[np.int32], Ids] | None = None) -> Fields:
        """Build the matrix and the ids; ``right`` numbers the result of :meth:`right_ids` among all right ids."""
        from gramtower.data.grouping import group

        pieces = [self._pieces.pop(key) for key in sorted(self._pieces)]
        host.return_memory()
        rows, columns = self.left.finish(), self.right.finish() if right is None else self._columns_of
        shape = len(self.left), len(self.right) if right is None else len(right[1])
        columns = columns if right is None else right[0][columns]
        host.return_memory()
        matrix, weights, times, merged = group(pieces, shape, self._rule.duplicates, (rows, columns))
        host.return_memory()
        report = self.report | {"rows_merged": merged, "pairs": matrix.nnz, "left": shape[0], "right": shape[1]}
        right_ids = self.right.names(columns) if right is None else right[1]
        return Fields(matrix, self.left.names(rows), right_ids, times, weights, report)


def _key_cells(part: Part, key: str, rows: int) -> pa.DictionaryArray:
    """An Arrow array with the value of a folder's key in every row; Hive has a name for missing values."""
    pa = frames.arrow()
    indices = pa.array(np.zeros(rows, np.int32), mask=np.full(rows, part.keys[key] == _NULL))
    return pa.DictionaryArray.from_arrays(indices, pa.array([part.keys[key]]))


def _texts(array: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """UTF-8 and lengths of an Arrow array of text without missing cells."""
    pa = frames.arrow()
    array = array.cast(pa.large_string())
    if not len(array):
        return np.empty(0, np.uint8), np.empty(0, np.int64)
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data, np.diff(offsets)


def _numbers(name: str, column: str, array: pa.Array) -> NDArray[np.float64]:
    """Values, weights or times of a batch; NaN where they are missing."""
    read = frames.seconds if name == "time" else frames.numbers
    if not hasattr(array, "dictionary"):
        return read(name, frames.as_series(column, array)).to_numpy()
    known: NDArray[np.float64] = np.full(len(array.dictionary) + 1, np.nan)  # the last one for missing cells
    codes = array.indices.fill_null(len(array.dictionary)).to_numpy()
    used = np.unique(codes)
    used = used[used < len(array.dictionary)]
    known[used] = read(name, frames.as_series(column, array.dictionary.take(used))).to_numpy()
    return np.asarray(known[codes])


def _own(array: NDArray[Kind]) -> NDArray[Kind]:
    """A copy whose memory can be given back as soon as it is freed."""
    own = host.own_pages(len(array), array.dtype)
    own[:] = array
    return own

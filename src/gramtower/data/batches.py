"""Rows of pairs from CSV and Parquet files, a batch at a time, for files that are larger than the memory.

Rows are those that :class:`~gramtower.data.interactions.Interactions` would keep: ids are text or whole numbers, and
rows with a missing cell or a value below the threshold are dropped and counted. Rows of the same pair are not merged.
Cost: O(rows) time; memory for one batch, some 8 MB of text or half a million rows of a Parquet file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gramtower.data import frames, sources
from gramtower.data.frames import Choice, Column
from gramtower.data.ids import id_series
from gramtower.data.interactions import column_choices, table_names
from gramtower.data.matrices import Rule, check_rows
from gramtower.data.parquet import Folder, ReadingProgress, check_unchanged
from gramtower.data.sources import existing, reading

if TYPE_CHECKING:
    from polars import DataFrame, Series

_QUOTE = b'"'


def pair_batches(
    path: Path,
    left: Column,
    right: Column,
    *,
    value: Column | None = None,
    weight: Column | None = None,
    time: Column | None = None,
    threshold: float | None = None,
    labels: bool = False,
    separator: str | None = None,
    progress: Callable[[ReadingProgress], None] | None = None,
) -> Iterator[DataFrame]:
    """Yield tables of ids, named as in the file, and of ``value``, ``weight`` and ``time`` if there are any.

    The arguments are those of :meth:`Interactions.from_csv`. Without a separator, ``path`` is a Parquet file or a
    folder of them, and the arguments are those of :meth:`Interactions.from_parquet`.
    """
    rule = Rule(threshold, labels, "max", value)
    ids, others = column_choices(left, right, value=value if rule.reads_value else None, weight=weight, time=time)
    if separator is None:
        source = _parquet_columns(Folder(existing("path", path, folder=True), ids + others, rule), progress)
    else:
        source = _csv_columns(existing("path", path), ids, others, separator)
    report = dict.fromkeys(("rows", "rows_without_id", "rows_without_number", "rows_below_threshold"), 0)
    for columns in source:
        yield _kept(columns, [name for name, _ in others], rule, report)
    check_rows(report)


def _kept(columns: list[Series], others: Sequence[str], rule: Rule, report: dict[str, int]) -> DataFrame:
    """The rows of a batch that make a pair; the others are counted."""
    pl = frames.polars()
    names = table_names([column.name for column in columns[:2]], others)
    cells = [id_series(side, column) for side, column in zip(("left", "right"), columns, strict=False)]
    for argument, column in zip(others, columns[2:], strict=True):
        read, kind = (frames.seconds, pl.Float64) if argument == "time" else (frames.numbers, pl.Float32)
        cells.append(read(argument, column).fill_nan(None).cast(kind))
    table: DataFrame = pl.DataFrame([cell.alias(name) for cell, name in zip(cells, names, strict=True)])
    report["rows"] += len(table)
    for reason, of in (("rows_without_id", names[:2]), ("rows_without_number", names[2:])):
        before, table = len(table), table.drop_nulls(of) if of else table
        report[reason] += before - len(table)
    if rule.threshold is not None:
        value = names[2 + others.index("value")]
        before, table = len(table), table.filter(pl.col(value) >= rule.threshold).drop(value)
        report["rows_below_threshold"] += before - len(table)
    return table


def _parquet_columns(folder: Folder, progress: Callable[[ReadingProgress], None] | None) -> Iterator[list[Series]]:
    pl, began, done = frames.polars(), time.perf_counter(), 0
    for number, part in enumerate(folder.parts):
        with reading(part.path):
            for start, batch in folder.batches(number):
                columns = [frames.decoded(name, batch.column(name)) for name in folder.names]
                for place, argument in enumerate(("left", "right")):
                    if not folder.is_text(name := folder.names[place]) and name not in folder.stored:
                        columns[place] = columns[place].cast(pl.Int64)  # the key of a folder
                    columns[place] = id_series(argument, columns[place])
                    if folder.path.is_dir() and (missing := columns[place].null_count()):
                        folder.refuse_missing(number, start, argument, missing)
                yield columns
                done += len(batch)
                if progress is not None:
                    read = number + (start + len(batch) == folder.rows[number]), len(folder.parts)
                    progress(ReadingProgress(*read, done, sum(folder.rows), time.perf_counter() - began))
    if folder.path.is_dir():
        check_unchanged(folder.path, folder.parts)


def _csv_columns(
    path: Path, texts: Sequence[Choice], others: Sequence[Choice], separator: str
) -> Iterator[list[Series]]:
    """Yield the columns that :func:`frames.read_csv` reads, a few rows at a time; the first line names them."""
    with reading(path):
        header, lines = b"", 0
        for block in sources.whole_lines(sources.read_pieces(path), _QUOTE):
            if not header:
                header, block = _first_line(block)
            if block.strip():
                try:
                    columns = frames.read_csv(header + block, texts, others, separator=separator)
                except ValueError as error:
                    where = f" (its line 2 is line {lines + 2:,} of the file)" if lines else ""
                    raise ValueError(f"{error}{where}") from error
                yield columns
            lines += block.count(b"\n")


def _first_line(block: bytes) -> tuple[bytes, bytes]:
    """Cut a block after its first line that is not blank."""
    end = block.find(b"\n", len(block) - len(block.lstrip(b"\r\n")))
    while end >= 0 and block.count(_QUOTE, 0, end) % 2:
        end = block.find(b"\n", end + 1)
    return (block + b"\n", b"") if end < 0 else (block[: end + 1], block[end + 1 :])

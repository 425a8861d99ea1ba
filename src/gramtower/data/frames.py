"""Tables from CSV and Parquet files and from the frames of other libraries, and conversion of their columns.

polars reads CSV, pyarrow reads Parquet; both are imported when they are first needed.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Union, cast

import numpy as np

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.checks import need
from gramtower._util.files import fetched
from gramtower.data import sources
from gramtower.data.sources import BOM, PACKED, PathLike, existing, reading

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    from polars import DataFrame, DataType, LazyFrame, Series


Column = str | int  # by name, or by position from 0


class ArrowTable(Protocol):
    """A table of polars, pandas or pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


TableLike = Union[ArrowTable, Mapping[str, Any], "LazyFrame"]  # a table, or a mapping of column names to values
_BATCH = 1 << 19  # rows of a Parquet file that are read at a time
_EXPLAINED = 1 << 26  # bytes of a file that is searched for its first fault
Choice = tuple[str, Column]  # an argument, for errors, and the column it chose


def polars() -> ModuleType:
    """The polars module, or an error that says how to get it."""
    return need("polars", "reading tables")


def arrow() -> ModuleType:
    """The pyarrow module with its Parquet reader, or an error that says how to get it."""
    need("pyarrow.parquet", "reading Parquet files")
    return need("pyarrow", "reading Parquet files")


def suffix_of(path: Path) -> str:
    """The ending of a file's name in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_parquet(path: Path) -> bool:
    """Whether a file has the name of a Parquet file."""
    return suffix_of(path) in (".parquet", ".pq")


def separator_of(path: Path) -> str:
    """The separator of fields, by the ending of the name: a tab for .tsv, otherwise a comma."""
    return "\t" if suffix_of(path) == ".tsv" else ","


def text_bytes(path: Path, encoding: str) -> bytes:
    """Read the text of a file as UTF-8 without a byte order mark, decompressed."""
    return _as_utf8(path, sources.content(path), encoding)


def _as_utf8(where: Path | str, data: bytes, encoding: str) -> bytes:
    if not sources.is_utf8(encoding):
        return sources.decoded(where, data, encoding).encode()
    sources.refuse_utf16(where, data)
    if sources.compression(data):
        check.fail("path", f"{where}, which is compressed twice", "text")
    return data.removeprefix(BOM)


def _source(path: Path, encoding: str) -> Path | bytes:
    """The source for polars: the file itself if it is plain UTF-8, otherwise its text."""
    if sources.packing(path) or not sources.is_utf8(encoding):
        return text_bytes(path, encoding)
    with path.open("rb") as stream:
        sources.refuse_utf16(path, stream.read(2))
    return Path(os.fspath(path)).absolute()  # polars would take a ~ at the beginning for the home folder


class Needed(str):
    """The name of a column that the user did not choose: an existing encoding needs it."""

    __slots__ = ()


def pick(name: str, column: Column, present: Sequence[str]) -> str:
    """The name of a column chosen by name or by position; the error lists the columns."""
    if isinstance(column, Needed) and column not in present:
        check.fail(name, f"a table of {', '.join(present)}", f"the column {str(column)!r} as well, as in training")
    if isinstance(column, int) and not isinstance(column, bool):
        if not 0 <= column < len(present):
            check.fail(name, column, f"a position below {len(present)}; columns present: {', '.join(present)}")
        return present[column]
    if not isinstance(column, str) or column not in present:
        check.fail(name, repr(column), f"one of the columns present: {', '.join(present)}")
    return column


def pick_all(choices: Sequence[Choice], present: Sequence[str]) -> list[str]:
    """:func:`pick` for many columns, in O(columns)."""
    known = set(present)
    return [
        column if isinstance(column, str) and column in known else pick(name, column, present)
        for name, column in choices
    ]


def read_csv(
    source: Path | bytes,
    texts: Sequence[Choice] | None,
    others: Sequence[Choice] = (),
    *,
    separator: str = ",",
    header: bool = True,
    quote: str | None = '"',
    comment: str | None = None,
    encoding: str = "utf8",
    label: str = "path",
) -> list[Series]:
    """Read some columns of a delimited text file or its bytes: ``texts`` as text (None: all), others as inferred."""
    pl = polars()
    where = source if isinstance(source, Path) else "text"
    with reading(where, label):
        options = _options(separator, header, quote, comment)
        given = _source(source, encoding) if isinstance(source, Path) else _as_utf8(where, source, encoding)
        try:
            present = pl.read_csv(given, n_rows=0 if header else 1, infer_schema=False, **options).columns
            texts = [(label, name) for name in present] if texts is None else texts
            names = pick_all((*texts, *others), present)
            end = "_duplicated_0"  # what polars adds to the second of two
            twice = {name.removesuffix(end) for name in present if header and name.endswith(end)}
            for _, column in (*texts, *others):
                if column in twice:
                    expected = "column names that differ, or a position"
                    check.fail(label, f"{where}, whose header has {column!r} twice", expected)
            chosen, overrides = set(names), dict.fromkeys(names[: len(texts)], pl.String)
            form: dict[str, Any] = {"columns": [name for name in present if name in chosen], **options}
            try:
                table = pl.read_csv(given, schema_overrides=overrides, try_parse_dates=True, **form)
            except pl.exceptions.ComputeError:  # a column that turned out not to be what its first rows look like
                table = pl.read_csv(given, infer_schema=False, **form)
        except pl.exceptions.NoDataError:
            check.fail(label, f"{where}, which has no rows", "a file with rows")
        except pl.exceptions.ComputeError as error:
            fault = _fault(given, separator, quote, comment) or str(error).split("\n\n")[0][:200]
            expected = f"UTF-8 (or encoding=) lines of fields separated by {separator!r}"
            check.fail(label, f"{where}, which cannot be read ({fault})", expected)
        if not len(table):
            check.fail(label, f"{where}, which has no rows", "a file with rows, ended by \\n")
        return [table[name] for name in names]


def _options(separator: str, header: bool, quote: str | None, comment: str | None) -> dict[str, Any]:
    if not isinstance(separator, str) or len(separator.encode(errors="replace")) != 1 or separator in "\r\n":
        check.fail("separator", repr(separator), "one ASCII character")
    if quote is not None and (
        not isinstance(quote, str) or len(quote.encode(errors="replace")) != 1 or quote in f"{separator}\r\n"
    ):
        check.fail("quote", repr(quote), "one ASCII character other than the separator, or None")
    if comment is not None and not (isinstance(comment, str) and comment):
        check.fail("comment", repr(comment), "the beginning of lines to skip, or None")
    form = {"separator": separator, "has_header": header, "quote_char": quote, "comment_prefix": comment}
    return form | {"encoding": "utf8", "glob": False}


def _fault(given: Path | bytes, separator: str, quote: str | None, comment: str | None) -> str:
    """The first fault of a text that polars refused, with its line; "" if it is not found."""
    if isinstance(given, Path) and (given.stat().st_size > _EXPLAINED or sources.packing(given)):
        return ""
    data = given if isinstance(given, bytes) else given.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return f"not utf8 text at byte {error.start}, in line {data[: error.start].count(10) + 1}"
    form: dict[str, Any] = {"quoting": csv.QUOTE_NONE} if quote is None else {"quotechar": quote}
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True, **form)
    width, begin = None, 1
    try:
        for row in rows:
            if row and not (comment is not None and row[0].startswith(comment)):
                width = len(row) if width is None else width
                if len(row) > width:
                    return f"line {begin} has {len(row)} fields, the first line {width}"
            begin = rows.line_num + 1
    except csv.Error as error:
        closed = "unexpected end" not in str(error)
        return f"in line {begin} {'there is text after a closing quote' if closed else 'a quote is never closed'}"
    return ""


@contextmanager
def parquet_file(label: str, path: Path, texts: Sequence[str] = (), footer: bool = False) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file with pyarrow; errors of the file name it. With ``footer`` no rows will be read.

    pyarrow raises where polars, on some damaged files, ends the process ("memory allocation of … bytes failed"). Do not
    ask it for the metadata of single columns, ``metadata.row_group(0).column(0)``: that ends the process, too.
    """
    pa = arrow()
    try:
        with (
            fetched(path, footer) as source,
            pa.parquet.ParquetFile(source, read_dictionary=list(texts), buffer_size=1 << 20) as file,
        ):
            if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
                check.fail(label, f"{path}, which has two columns of one name", "column names that differ")
            yield file
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        if isinstance(error, OSError) and (error.errno is not None or str(path) in str(error)):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        check.fail(label, f"{path}, which cannot be read ({reason})", "a Parquet file")


def parquet_batches(
    file: pq.ParquetFile, names: Sequence[str], rows: int, threads: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of some columns of an open Parquet file, checked so that their buffers can be trusted."""
    for batch in file.iter_batches(rows, columns=list(dict.fromkeys(names)), use_threads=threads):
        batch.validate(full=True)
        yield batch


def as_series(name: str, array: pa.Array) -> Series:
    """An Arrow array as a polars column."""
    return cast("Series", polars().from_arrow(array)).alias(name)


def polars_type(kind: pa.DataType) -> DataType:
    """The polars type of an Arrow type; Unknown if there is none."""
    pl, pa = polars(), arrow()
    try:
        return as_series("", pa.array([], kind)).dtype
    except (TypeError, ValueError, NotImplementedError, pl.exceptions.PolarsError, pa.ArrowException):
        return cast("DataType", pl.Unknown())


def is_text(kind: DataType) -> bool:
    """Whether a polars type is text."""
    pl = polars()
    return kind.base_type() in (pl.String, pl.Categorical, pl.Enum)  # a categorical type of a file is not equal to all


def read_parquet(path: Path, choices: Sequence[Choice] | None, label: str = "path") -> list[Series]:
    """Read some columns of a Parquet file; None for all."""
    with reading(path, label):
        with parquet_file(label, path, footer=True) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
        names = list(schema.names) if choices is None else pick_all(choices, schema.names)
        if 8 * rows * len(names) > host.memory_size():
            check.fail(label, f"{path} with {rows:,} rows", "a table that fits in memory")
        pl = polars()
        types = {name: polars_type(schema.field(name).type) for name in names}
        pieces: dict[str, list[Series]] = {name: [] for name in names}
        with parquet_file(label, path, [name for name, kind in types.items() if kind == pl.String]) as file:
            for batch in parquet_batches(file, names, _BATCH, threads=True):
                for name, found in pieces.items():
                    found.append(decoded(name, batch.column(name)))
        if names and sum(map(len, pieces[names[0]])) != rows:
            check.fail(label, f"{path}, which cannot be read (it does not have {rows:,} rows)", "a Parquet file")
        made = {name: pl.concat(found) if found else pl.Series(name, [], types[name]) for name, found in pieces.items()}
        for name, kind in types.items():
            if kind.base_type() in (pl.Categorical, pl.Enum):
                made[name] = made[name].cast(pl.Categorical)
        return [made[name] for name in names]


def decoded(name: str, array: pa.Array) -> Series:
    """A column of a batch; text stored as codes shares the memory of its distinct texts."""
    if not hasattr(array, "dictionary"):
        return as_series(name, array)
    codes = as_series(name, array.indices).cast(polars().UInt32)
    return as_series(name, array.dictionary).gather(codes)


def read_columns(
    name: str, source: TableLike | PathLike, texts: Sequence[Choice] | None, others: Sequence[Choice] = ()
) -> list[Series]:
    """Read columns of a table, or of a Parquet or delimited file: ``texts`` (None: all of a file), then ``others``."""
    choices = None if texts is None else [*texts, *others]
    if not isinstance(source, (str, os.PathLike)):
        return take(name, source, choices or [])
    path = existing(name, source)
    if is_parquet(path):
        return read_parquet(path, choices, name)
    return read_csv(path, texts, others, separator=separator_of(path), label=name)


def read_frame(name: str, source: TableLike | PathLike) -> DataFrame:
    """Convert a table, or read a whole Parquet or delimited file; all columns of a text file are text."""
    if not isinstance(source, (str, os.PathLike)):
        return as_frame(name, source)
    return cast("DataFrame", polars().DataFrame(read_columns(name, check.path(name, source), None)))


def take(name: str, frame: TableLike, choices: Sequence[Choice]) -> list[Series]:
    """Select some columns of a table."""
    names = pick_all(choices, column_names(name, frame))
    table = as_frame(name, frame, set(names))
    return [table[column] for column in names]


def as_frame(name: str, value: TableLike, columns: Set[str] | None = None) -> DataFrame:
    """Convert a table, or those of ``columns`` that it has, to a polars DataFrame."""
    pl = polars()
    if isinstance(value, pl.LazyFrame):
        names = value.collect_schema().names()
        value = value.select([c for c in names if columns is None or c in columns]).collect()
    if isinstance(value, pl.DataFrame):
        return cast("DataFrame", value.select([c for c in value.columns if columns is None or c in columns]))
    if type(value).__module__.split(".")[0] == "pandas":
        return _from_pandas(value, columns)
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if columns is None or str(k) in columns}
        cells = {k: _from_cells(k, v) if isinstance(v, list) else v for k, v in kept.items()}
        return cast("DataFrame", pl.DataFrame(cells, strict=False))
    if hasattr(value, "__arrow_c_stream__"):
        return as_frame(name, pl.DataFrame(value), columns)
    check.fail(name, type(value).__name__, "a polars, pandas or pyarrow table, or a mapping of columns")


def _from_pandas(value: pd.DataFrame, columns: Set[str] | None) -> DataFrame:
    """Convert column by column, because polars needs pyarrow for text in pandas and that may be absent."""
    pl = polars()
    made = []
    for column in value.columns:
        if columns is not None and str(column) not in columns:
            continue
        cells = value[column]
        try:
            if cells.dtype == object:  # pyarrow would take some for others, such as UUIDs for bytes
                raise TypeError
            made.append(pl.from_pandas(cells).alias(str(column)))
        except (ImportError, TypeError, ValueError):
            pairs = zip(cells.tolist(), cells.isna().tolist(), strict=True)
            made.append(_from_cells(str(column), [None if missing else cell for cell, missing in pairs]))
    return cast("DataFrame", pl.DataFrame(made))


def _from_cells(name: str, cells: list[object]) -> Series:
    """A column of Python values; of dtype Object if polars has no type for them."""
    pl = polars()
    if len({type(cell) for cell in cells if cell is not None}) <= 1:
        with suppress(TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
            return cast("Series", pl.Series(name, cells, strict=False))
    return cast("Series", pl.Series(name, cells, dtype=pl.Object))


def column_names(name: str, value: TableLike) -> list[str]:
    """The column names of a table."""
    pl = polars()
    if isinstance(value, pl.LazyFrame):
        return list(value.collect_schema().names())
    if isinstance(value, Mapping):
        return [str(column) for column in value]
    for attribute in ("column_names", "columns"):  # pyarrow; polars and pandas
        names = getattr(value, attribute, None)
        if names is not None:
            return [str(column) for column in names]
    return list(as_frame(name, value).columns)


_LARGEST = float(np.finfo(np.float32).max)  # of a number


def texts(column: Series) -> Series:
    """Convert cells to text; floats that are all whole numbers are written as whole numbers."""
    pl = polars()
    column = _plain(column)
    if column.dtype == pl.String:
        return column
    if column.dtype.is_float():
        column = column.fill_nan(None)
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == column.null_count() and (whole.cast(column.dtype) == column).all():
            column = whole
    try:
        return column.cast(pl.String)
    except pl.exceptions.PolarsError:
        check.fail(f"column {column.name!r}", f"{column.dtype}", "text or whole numbers")


def numbers(name: str, column: Series) -> Series:
    """Convert cells to float64; other text, and numbers beyond float32, are errors. Null and NaN are missing."""
    pl = polars()
    column = _plain(column)
    if not (column.dtype.is_numeric() or column.dtype in (pl.Boolean, pl.String, pl.Null)):
        check.fail(name, f"column {column.name!r} of {column.dtype}", "numbers")
    result = column.cast(pl.Float64, strict=False)
    if result.null_count() > column.null_count() and column.dtype == pl.String:
        result = column.str.strip_chars().cast(pl.Float64, strict=False)
    if result.null_count() > column.null_count():
        shown = column.filter(result.is_null() & column.is_not_null())
        check.fail(name, f"{shown[0]!r} in column {column.name!r} ({len(shown)} such rows)", "numbers")
    large = np.abs(result.to_numpy()) > _LARGEST
    if large.any():
        shown = column[int(np.argmax(large))]
        check.fail(name, f"{shown} in column {column.name!r}", f"finite numbers, up to {_LARGEST:.2g}")
    return result


def seconds(name: str, column: Series) -> Series:
    """Convert times to float64: dates and datetimes become seconds since 1970 (UTC unless they have a zone)."""
    pl = polars()
    column = _plain(column)
    if column.dtype == pl.String:
        sample = column.drop_nulls()
        if len(sample) and sample.head(1).cast(pl.Float64, strict=False).null_count():
            try:
                column = column.str.to_datetime()
            except pl.exceptions.PolarsError:
                wrong = sample.clear()
                with suppress(pl.exceptions.PolarsError):
                    wrong = sample.filter(sample.str.to_datetime(strict=False).is_null())
                given = f"{str((wrong if len(wrong) else sample)[0])!r} in column {column.name!r}"
                check.fail(name, given, "numbers, or dates such as 2020-01-31, in one format")
    if column.dtype == pl.Date:
        return column.cast(pl.Int32).cast(pl.Float64) * 86400
    if column.dtype == pl.Datetime:
        return column.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64) / 1e6
    return numbers(name, column)


def _plain(column: Series) -> Series:
    """Convert a column of dtype Object to the common type of its cells, such as floats for integers and floats."""
    pl = polars()
    if column.dtype != pl.Object:
        return column
    try:
        return cast("Series", pl.Series(column.name, column.to_list(), strict=False))
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        check.fail("frame", f"column {column.name!r} of several types", "cells of one type")

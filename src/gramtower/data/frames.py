"""Tables from files and from other libraries' frames, with errors that say what is wrong with the file.

polars does the work; it is imported here, when a table is asked for, and by nothing else in the library at import
time. Checked by tests/test_interactions.py and tests/test_tables.py.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gramtower import _checks as check

if TYPE_CHECKING:
    from polars import DataFrame, Series

Column = str | int  # by name, or by position from 0
_PACKED = (".gz", ".xz", ".zst", ".bz2")
PathLike = str | os.PathLike[str]
Choice = tuple[str, Column]  # an argument, for errors, and the column it chose


def polars() -> Any:
    """The polars module, or an error that says how to get it."""
    try:
        import polars
    except ImportError as error:
        raise ImportError('tables are read with polars: pip install "gramtower[io]"') from error
    return polars


def existing(name: str, path: PathLike) -> Path:
    """A path that exists and is not an empty file."""
    found = Path(path)
    if not found.exists():
        raise FileNotFoundError(f"{name}: no such file: {found}")
    if found.is_file() and found.stat().st_size == 0:
        check.fail(name, f"{found}, which is empty", "a file with rows")
    return found


def suffix_of(path: Path) -> str:
    """The ending of a file's name in small letters, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in _PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def separator_of(path: Path) -> str:
    """What stands between fields, by the ending: tabs in .tsv, otherwise commas."""
    return "\t" if suffix_of(path) == ".tsv" else ","


def content(path: Path) -> bytes:
    """The bytes of a file, decompressed by its ending: .xz, .gz, .bz2 and, where Python or polars can, .zst."""
    suffix = path.suffix.lower()
    if suffix == ".xz":
        with lzma.open(path) as stream:
            return stream.read()
    if suffix == ".gz":
        import gzip

        with gzip.open(path) as stream:
            return bytes(stream.read())
    if suffix == ".bz2":
        import bz2

        with bz2.open(path) as stream:
            return stream.read()
    if suffix == ".zst":
        return _unzstd(path)
    return path.read_bytes()


def _unzstd(path: Path) -> bytes:
    """Decompressed by polars: the file as a table of one column without separator, then lines again."""
    form = {"has_header": False, "separator": "\x01", "quote_char": None, "infer_schema": False}
    column = polars().read_csv(path, **form).to_series(0).fill_null("")
    return ("\n".join(column.to_list()) + "\n").encode()


def pick(name: str, column: Column, present: Sequence[str]) -> str:
    """The name of a column chosen by name or by position; the error lists the columns there are."""
    if isinstance(column, int) and not isinstance(column, bool):
        if not 0 <= column < len(present):
            check.fail(name, column, f"a position below {len(present)}; columns present: {', '.join(present)}")
        return present[column]
    if not isinstance(column, str) or column not in present:
        check.fail(name, repr(column), f"one of the columns present: {', '.join(present)}")
    return column


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
    """Some columns of a delimited text file.

    Args:
        source: the file (.gz, .zst, .xz and .bz2 are decompressed) or its bytes.
        texts: (argument name, column) of columns that are read as text, whatever they look like; None for all.
        others: the same for columns read as numbers or dates where they look like that, otherwise as text.
        separator: one character between fields.
        header: whether the first line names the columns.
        quote: quoting character, None for none.
        comment: lines that start with this are left out.
        encoding: of the text; any name Python knows.
        label: name of the argument that holds the path, for errors.

    Returns:
        The columns of ``texts``, then those of ``others``, under the file's own names.
    """
    pl = polars()
    if not isinstance(separator, str) or len(separator.encode()) != 1:
        check.fail("separator", repr(separator), "one ASCII character")
    where = source if isinstance(source, Path) else "text"
    if isinstance(source, Path) and source.suffix.lower() in (".xz", ".bz2"):
        source = content(source)
    options: dict[str, Any] = {
        "separator": separator,
        "has_header": header,
        "quote_char": quote,
        "comment_prefix": comment,
        "encoding": encoding,
    }
    try:
        present = pl.read_csv(source, n_rows=0 if header else 1, infer_schema=False, **options).columns
        texts = [(label, name) for name in present] if texts is None else texts
        names = [pick(name, column, present) for name, column in (*texts, *others)]
        wanted = sorted(set(names), key=present.index)
        overrides = dict.fromkeys(names[: len(texts)], pl.String)
        try:
            table = pl.read_csv(source, columns=wanted, schema_overrides=overrides, try_parse_dates=True, **options)
        except pl.exceptions.ComputeError:  # a column that turned out not to be what its first rows look like
            table = pl.read_csv(source, columns=wanted, infer_schema=False, **options)
    except pl.exceptions.NoDataError:
        check.fail(label, f"{where}, which has no rows", "a file with rows")
    except (pl.exceptions.ComputeError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        if "utf-8" in reason.lower() or isinstance(error, UnicodeDecodeError):
            check.fail(label, f"{where}, which is not {encoding} text ({reason})", "UTF-8, or the encoding= it has")
        check.fail(label, f"{where}, which cannot be read ({reason})", f"lines of fields separated by {separator!r}")
    if not len(table):
        check.fail(label, f"{where}, which has no rows", "a file with rows")
    return [table[name] for name in names]


def read_parquet(path: Path, choices: Sequence[Choice] | None) -> list[Series]:
    """Some columns of a Parquet file; None for all."""
    pl = polars()
    try:
        present = list(pl.read_parquet_schema(path))
        names = present if choices is None else [pick(name, column, present) for name, column in choices]
        table = pl.read_parquet(path, columns=sorted(set(names), key=present.index))
    except pl.exceptions.PolarsError as error:
        check.fail("path", f"{path}, which cannot be read ({str(error).splitlines()[0]})", "a Parquet file")
    return [table[name] for name in names]


def read_frame(name: str, path: Path) -> DataFrame:
    """A whole Parquet or delimited file; the columns of a text file as text."""
    found = existing(name, path)
    parquet = suffix_of(found) in (".parquet", ".pq")
    columns = read_parquet(found, None) if parquet else read_csv(found, None, separator=separator_of(found), label=name)
    made: DataFrame = polars().DataFrame(columns)
    return made


def take(name: str, frame: Any, choices: Sequence[Choice]) -> list[Series]:
    """Some columns of a frame of any of the libraries ``as_frame`` takes."""
    present = column_names(name, frame)
    names = [pick(argument, column, present) for argument, column in choices]
    table = as_frame(name, frame, names)
    return [table[column] for column in names]


def as_frame(name: str, value: Any, columns: Sequence[str] | None = None) -> DataFrame:
    """A polars DataFrame from polars, pandas or pyarrow, or a mapping of columns; only the given columns if any.

    Columns that are not there are left to the caller to miss.
    """
    pl = polars()
    if isinstance(value, pl.LazyFrame):
        names = value.collect_schema().names()
        value = value.select([c for c in names if columns is None or c in columns]).collect()
    if isinstance(value, pl.DataFrame):
        chosen: DataFrame = value.select([c for c in value.columns if columns is None or c in columns])
        return chosen
    if type(value).__module__.split(".")[0] == "pandas":
        return _from_pandas(value, columns)
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if columns is None or str(k) in columns}
        made: DataFrame = pl.DataFrame(
            {k: _from_cells(k, v) if isinstance(v, list) else v for k, v in kept.items()}, strict=False
        )
        return made
    if hasattr(value, "__arrow_c_stream__"):
        return as_frame(name, pl.DataFrame(value), columns)
    check.fail(name, type(value).__name__, "a polars, pandas or pyarrow table, or a mapping of columns")


def _from_pandas(value: Any, columns: Sequence[str] | None) -> DataFrame:
    """Column by column, because polars needs pyarrow for text in pandas and that may be absent."""
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
    table: DataFrame = pl.DataFrame(made)
    return table


def _from_cells(name: str, cells: list[Any]) -> Series:
    """A column from Python's values; of Objects where these are of several types, or of one that polars has not."""
    pl = polars()
    if len({type(cell) for cell in cells if cell is not None}) > 1:
        return cast("Series", pl.Series(name, cells, dtype=pl.Object))
    try:
        return cast("Series", pl.Series(name, cells, strict=False))
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        return cast("Series", pl.Series(name, cells, dtype=pl.Object))


def _plain(column: Series) -> Series:
    """A column of Objects as what polars makes of them together, such as numbers of integers and floats."""
    pl = polars()
    if column.dtype != pl.Object:
        return column
    try:
        return cast("Series", pl.Series(column.name, column.to_list(), strict=False))
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        check.fail("frame", f"column {column.name!r} of several types", "cells of one type")


def column_names(name: str, value: Any) -> list[str]:
    """The column names of a frame of any of the libraries ``as_frame`` takes."""
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


def texts(column: Series) -> Series:
    """Cells as text; whole numbers that a missing value turned into floats are written as whole numbers."""
    pl = polars()
    column = _plain(column)
    if column.dtype == pl.String:
        return column
    if column.dtype.is_float():
        column = column.fill_nan(None)
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == column.null_count() and (whole.cast(column.dtype) == column).all():
            column = whole
    return column.cast(pl.String)


def numbers(name: str, column: Series) -> Series:
    """Float64 values; text that is not a number is an error that shows it, NaN is a missing value."""
    pl = polars()
    column = _plain(column)
    if not (column.dtype.is_numeric() or column.dtype in (pl.Boolean, pl.String, pl.Null)):
        check.fail(name, f"column {column.name!r} of {column.dtype}", "numbers")
    stripped = column.str.strip_chars() if column.dtype == pl.String else column
    result = stripped.cast(pl.Float64, strict=False)
    if result.null_count() > column.null_count():
        shown = column.filter(result.is_null() & column.is_not_null())
        check.fail(name, f"{shown[0]!r} in column {column.name!r} ({len(shown)} such rows)", "numbers")
    result = result.fill_nan(None)
    if result.is_infinite().any():
        check.fail(name, f"an infinite number in column {column.name!r}", "finite numbers")
    return result


def seconds(name: str, column: Series) -> Series:
    """Float64 times: numbers as they are, dates and times as seconds since 1970 (UTC unless they have a zone)."""
    pl = polars()
    column = _plain(column)
    if column.dtype == pl.String:
        sample = column.drop_nulls()
        if len(sample) and sample.head(1).cast(pl.Float64, strict=False).null_count():
            try:
                column = column.str.to_datetime()
            except pl.exceptions.PolarsError:
                check.fail(name, f"{sample[0]!r} … in column {column.name!r}", "numbers, or dates such as 2020-01-31")
    if column.dtype in (pl.Date, pl.Datetime):
        return column.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64) / 1e6
    return numbers(name, column)

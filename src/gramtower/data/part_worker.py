"""The program of a worker process: decodes Parquet parts with polars and sends their columns on as plain arrays.

It runs apart because polars ends the whole process ("memory allocation of … bytes failed") on some damaged files: the
reader loses a worker then, and names the part. Nothing of the library is imported here, so that a worker starts in a
tenth of a second and holds little memory. Requests are lines of JSON on standard input:

    {"describe": PATH}                                                 → one frame: columns with types, number of rows
    {"read": PATH, "columns": […], "plain": […], "rows": n, "step": s} → a frame for each s rows

A frame is the length of a JSON object, the object, and the bytes of the arrays it lists. Text of the columns that are
asked for plain comes as it is, row after row: one block of UTF-8, and lengths. Other text, and plain text that is long
or missing in some rows, comes as the distinct texts of the piece in order of appearance and a code for each row, which
takes several times the time and memory. Run by data/part_stream.py; checked by tests/test_parts.py.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_LONG = 1 << 25  # bytes of a piece's plain text


def main() -> None:
    """Answer requests until standard input ends."""
    limit, channel = int(sys.argv[1]), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed must not get among the frames
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, ValueError, OSError):  # not on this system, or less than that already
        pass
    for line in sys.stdin:
        request = json.loads(line)
        try:
            frames = [_describe(request["describe"])] if "describe" in request else _pieces(request)
            for answer, arrays in frames:
                _send(channel, answer, arrays)
                del arrays  # before the next piece is decoded
        except BaseException as error:  # a panic of polars is no Exception
            _send(channel, {"reason": " ".join(str(error).split())[:200] or type(error).__name__}, [])


def _send(channel: Any, answer: dict[str, Any], arrays: list[Any]) -> None:
    listed = [[array.dtype.str, len(array)] for array in arrays]
    head = json.dumps({**answer, "arrays": listed}).encode()
    channel.write(len(head).to_bytes(8, "little") + head)
    for array in arrays:
        channel.write(memoryview(array).cast("B") if len(array) else b"")
    channel.flush()


def _scan(path: str) -> Any:
    import polars as pl

    return pl.scan_parquet(path, glob=False, hive_partitioning=False)


def _describe(path: str) -> tuple[dict[str, Any], list[Any]]:
    import polars as pl

    with open(path, "rb") as file:
        schema = pl.read_parquet_schema(file)
    rows = _scan(path).select(pl.len()).collect().item()
    return {"columns": [[name, str(kind), _kind(kind)] for name, kind in schema.items()], "rows": rows}, []


def _kind(dtype: Any) -> str:
    import polars as pl

    if dtype.base_type() in (pl.String, pl.Categorical, pl.Enum):  # a categorical type of a file is not equal to all
        return "text"
    if dtype in (pl.Date, pl.Datetime):
        return "time"
    if dtype.is_integer():
        return "integer"
    return "number" if dtype.is_numeric() or dtype == pl.Boolean else "other"


def _pieces(request: dict[str, Any]) -> Any:
    """Frames of a part; each column is its number of missing cells and its arrays."""
    names = list(dict.fromkeys(request["columns"]))
    for start in range(0, request["rows"], request["step"]):
        table = _scan(request["read"]).select(names).slice(start, request["step"]).collect()
        if len(table) != min(request["step"], request["rows"] - start):
            raise ValueError(f"{len(table)} rows at row {start}, fewer than it says it has")
        missing, arrays = {}, []
        for name in names:
            column = table.drop_in_place(name)
            missing[name] = column.null_count()
            arrays += _arrays(column, name in request["plain"])
            del column
        yield {"start": start, "rows": min(request["step"], request["rows"] - start), "missing": missing}, arrays
        arrays.clear()


def _arrays(column: Any, plain: bool) -> list[Any]:
    """Text: codes, if any, bytes and lengths. Others: numbers; a missing one is NaN, or the type float64."""
    import numpy as np
    import polars as pl

    kind = _kind(column.dtype)
    if kind == "text":
        text, codes = column.cast(pl.String), np.empty(0, np.uint32)
        if not plain or text.null_count() or text.str.len_bytes().cast(pl.Int64).sum() > _LONG:
            distinct = text.unique(maintain_order=True).drop_nulls()
            found = text.cast(pl.Enum(distinct)).to_physical().cast(pl.UInt32)
            codes = (found.fill_null(2**32 - 1) if found.null_count() else found).to_numpy()
            text = distinct
        joined = np.frombuffer((text.str.join("").item() or "").encode(), np.uint8)
        return [codes, joined, text.str.len_bytes().cast(pl.UInt32).to_numpy()]
    if kind == "time":  # as data/frames.py: seconds
        column = column.cast(pl.Datetime("us")).cast(pl.Int64).cast(pl.Float64) / 1e6
    if kind == "integer" and not column.null_count():
        return [np.ascontiguousarray(column.to_numpy())]
    return [np.ascontiguousarray(column.cast(pl.Float64).to_numpy())]


if __name__ == "__main__":
    main()

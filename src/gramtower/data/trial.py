"""Parquet files read on trial, in a separate process, before they are read here.

polars ends the whole process ("memory allocation of 2305843009213693944 bytes failed") or panics on some damaged files,
and nothing in that process can prevent it. The trial takes as long as reading does, and the start of an interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util import host

_OVERHEAD = 1 << 33  # bytes of address space for the interpreter and its threads
_PROGRAM = """
import json, sys
path, chosen, memory, overhead = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (memory + overhead, resource.getrlimit(resource.RLIMIT_AS)[1]))
except (ImportError, ValueError, OSError):
    pass
import polars as pl
form = {"glob": False, "hive_partitioning": False}
try:
    with open(path, "rb") as file:
        present = list(pl.read_parquet_schema(file))
    rows = pl.scan_parquet(path, **form).select(pl.len()).collect().item()
    known = set(present)
    places = [x for x in chosen or [] if isinstance(x, int) and 0 <= x < len(present)]
    names = present if chosen is None else [x for x in chosen if x in known] + [present[x] for x in places]
    if 8 * rows * len(names) <= memory:
        pl.read_parquet(path, columns=list(dict.fromkeys(names)), **form)
    print(json.dumps({"present": present, "rows": rows}))
except BaseException as error:
    print(json.dumps({"reason": " ".join(str(error).split())[:200]}))
"""


def columns_and_rows(label: str, path: Path, chosen: list[str | int] | None) -> tuple[list[str], int]:
    """The names of a Parquet file's columns and the number of its rows.

    Args:
        label: the argument that holds the path.
        path: the file.
        chosen: columns that will be read, by name or position; None for all.

    Raises:
        ValueError: if polars cannot read those columns.
    """
    given = json.dumps([str(path.absolute()), chosen, host.memory_size(), _OVERHEAD])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=given,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {"reason": "it ends the process that reads it"}
    if "reason" in answer:
        check.fail(label, f"{path}, which cannot be read ({answer['reason']})", "a Parquet file")
    return answer["present"], answer["rows"]

"""A folder of Parquet parts, as Spark, DuckDB or polars write it: which files are its parts, and whether they stay.

Parts are the files ending in .parquet or .pq at any depth, in sorted order of their paths below the folder. Names that
begin with ``_`` or ``.`` and those ending in .crc are what writers leave beside them (``_SUCCESS``, ``_metadata``,
``_temporary``), and are passed over. Any other file is refused, and so is a Delta table, whose log says which parts
still count. A folder called ``key=value`` gives every row below it a column ``key``, as Hive does.

Cost: one stat for each file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from gramtower._util import checks as check

_ENDINGS = (".parquet", ".pq")
_TABLES = (".csv", ".tsv", ".dat", ".data", ".txt")  # of the folders that public sets come in
_NULL = "__HIVE_DEFAULT_PARTITION__"
_EXPECTED = "a folder of Parquet parts"


@dataclass(frozen=True)
class Part:
    """One file.

    Attributes:
        path: where it is.
        name: its path below the folder, with slashes.
        keys: columns that its folders are called by, key=value.
        size: in bytes.
        modified: in nanoseconds since 1970.
    """

    path: Path
    name: str
    keys: dict[str, str]
    size: int
    modified: int


def is_parts(path: Path) -> bool:
    """Whether a path is a folder with Parquet files in it, and without the tables of another layout."""
    if not path.is_dir() or any(file.suffix.lower() in _TABLES for file in path.iterdir()):
        return False
    return any(name.lower().endswith(_ENDINGS) for _, name in _visible(path))


def list_parts(folder: Path) -> list[Part]:
    """The parts of a folder, in order.

    Raises:
        ValueError: if there are none, if another file is among them, or if folders disagree in their keys.
    """
    if (folder / "_delta_log").exists():
        expected = f"{_EXPECTED}; let what knows the table write its rows as parts of their own"
        check.fail("path", f"{folder}, a Delta table, of whose files not all may count", expected)
    found = []
    for place, name in _visible(folder):
        path = place / name
        if not name.lower().endswith(_ENDINGS):
            expected = f"{_EXPECTED} (.parquet, .pq) and no other files, unless their names begin with _ or ."
            check.fail("path", f"{path} among the parts", expected)
        if not path.is_file():
            check.fail("path", f"{path}, which is a device, a pipe or a broken link", "plain files")
        below, state = path.relative_to(folder), path.stat()
        if state.st_size == 0:
            check.fail("path", f"{path}, which is empty", "a Parquet file")
        found.append(Part(path, below.as_posix(), _keys(below), state.st_size, state.st_mtime_ns))
    if not found:
        check.fail("path", f"{folder}, a folder without .parquet or .pq files", _EXPECTED)
    found.sort(key=lambda part: part.name.split("/"))
    for part in found:
        if list(part.keys) != list(found[0].keys):
            given = f"{part.path} below {', '.join(part.keys) or 'no key'}"
            check.fail(
                "path", given, f"folders key=value of {', '.join(found[0].keys) or 'no key'}, as of the first part"
            )
    return found


def check_unchanged(folder: Path, parts: list[Part]) -> None:
    """Refuse a folder whose files are no longer the ones that were listed.

    Raises:
        ValueError: naming the first file that came, went or was written to.
    """
    before = {part.name: (part.size, part.modified) for part in parts}
    now = {part.name: (part.size, part.modified) for part in list_parts(folder)}
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            how = "came" if name not in before else "went" if name not in now else "was written to"
            check.fail("path", f"{folder / name}, which {how} while it was read", "a folder that stays as it is")


def key_values(part: Part, key: str) -> str | None:
    """What the folders of a part say of a key; None for Hive's name of a missing value."""
    return None if part.keys[key] == _NULL else part.keys[key]


def _visible(folder: Path) -> Iterator[tuple[Path, str]]:
    """Folders and names of the files that count."""
    for place, below, names in os.walk(folder, onerror=_raise):
        below[:] = sorted(name for name in below if not name.startswith(("_", ".")))
        yield from ((Path(place), name) for name in names if not (name.startswith(("_", ".")) or name.endswith(".crc")))


def _raise(error: OSError) -> None:
    raise error


def _keys(below: Path) -> dict[str, str]:
    pairs = (name.partition("=") for name in below.parts[:-1] if "=" in name)
    return {unquote(key): unquote(value) for key, _, value in pairs}

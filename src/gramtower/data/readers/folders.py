"""Data sets that are a folder of several files: which file is which."""

from __future__ import annotations

import re
from pathlib import Path

from gramtower._util import checks as check
from gramtower.data.sources import PACKED, PathLike, existing
from gramtower.data.streams import members

_PACKED = "(" + "|".join(re.escape(ending) for ending in PACKED) + ")?"


def file_in(path: PathLike, pattern: str, expected: str) -> Path:
    """The file of a folder, or of a folder in it, whose name matches a pattern, compressed or not.

    Args:
        path: the folder.
        pattern: a regular expression of the whole name, without the ending of a compression.
        expected: the name to ask for when it is not there.
    """
    folder = existing("path", path, folder=True)
    if not folder.is_dir():
        check.fail("path", f"{folder}, which is a file", f"a folder with {expected}")
    found = members(folder, re.compile(pattern + _PACKED, re.IGNORECASE))
    if not found:
        there = ", ".join(members(folder, re.compile(".*"))[:20]) or "nothing"
        check.fail("path", f"{folder}, which holds {there}", f"a folder with {expected}, plain or compressed")
    return folder / found[0]


def holds(path: Path, *patterns: str) -> bool:
    """Whether a path is a folder with a file, compressed or not, for each of some patterns of names."""
    return path.is_dir() and all(members(path, re.compile(one + _PACKED, re.IGNORECASE)) for one in patterns)

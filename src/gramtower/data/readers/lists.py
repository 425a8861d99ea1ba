"""Lines of ids: ``user item item …`` lists, thesaurus lines, edge lists. O(size)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.frames import Column
from gramtower.data.interactions import Interactions
from gramtower.data.sources import PathLike, decoded, existing, reading


def item_lists(path: PathLike, *, separator: str | None = None, encoding: str = "utf8") -> Interactions:
    """Lines ``user item item …``: one left entity and its right entities.

    Args:
        path: the file, which may be compressed.
        separator: between ids; None for any run of spaces and tabs.
        encoding: of the text.

    Returns:
        Interactions of ``"user"`` and ``"item"``. A line without items makes no pair and is counted in the report as
        ``lines_without_pairs``.
    """
    with reading(path):
        return _lists(path, separator, encoding, "user", "item")


def thesaurus(path: PathLike, *, separator: str = ",", encoding: str = "utf8") -> Interactions:
    """Lines ``head,word,word,…``: Interactions of ``"head"`` and ``"word"``; words may contain spaces."""
    with reading(path):
        return _lists(path, separator, encoding, "head", "word")


def _lists(path: PathLike, separator: str | None, encoding: str, left_name: str, right_name: str) -> Interactions:
    if separator is not None and not (isinstance(separator, str) and separator):
        check.fail("separator", repr(separator), "what stands between ids, or None")
    heads: list[str] = []
    lengths: list[int] = []
    members: list[str] = []
    alone = 0
    for _, line in lines(path, encoding):
        if separator is None:
            fields = [field for field in line.replace("\t", " ").split(" ") if field]
        else:
            fields = [field for part in line.split(separator) if (field := part.strip())]
        if len(fields) < 2:
            alone += len(fields)
            continue
        heads.append(fields[0])
        lengths.append(len(fields) - 1)
        members += fields[1:]
    if not members:
        check.fail(
            "path", f"{path}, which has no line with two ids", f"lines '{left_name} {right_name} {right_name} …'"
        )
    left = np.repeat(np.asarray(heads, dtype=object), lengths)
    found = Interactions.from_arrays(left, members, left_name=left_name, right_name=right_name)
    return found.renamed(left_name, right_name, lines_without_pairs=alone)


def edge_list(
    path: PathLike,
    *,
    separator: str | None = None,
    left: Column = 0,
    right: Column = 1,
    header: bool = False,
    comment: str | None = "#",
    encoding: str = "utf8",
    **options: Any,
) -> Interactions:
    """Lines of two ids, perhaps with more columns.

    Args:
        path: the file, which may be compressed.
        separator: between columns; None for any run of spaces and tabs.
        left: column of left ids, by position from 0, or by name where there is a header.
        right: column of right ids.
        header: whether the first line names the columns.
        comment: lines that begin with this are left out.
        encoding: of the text.
        options: ``value``, ``weight``, ``time``, ``threshold``, ``labels``, ``duplicates`` as in
            :meth:`Interactions.from_csv`.
    """
    if separator is not None and not (isinstance(separator, str) and separator):
        check.fail("separator", repr(separator), "what stands between columns, or None")
    source: PathLike | bytes = path
    with reading(path):
        if separator is None or len(separator) > 1:
            data = frames.text_bytes(existing("path", path), encoding)
            if separator is None:
                source = re.sub(rb"\t?\r?\n\t?", b"\n", re.sub(rb"[ \t]+", b"\t", data.strip(b" \t")))
                separator = "\t"
            else:
                source, separator = one_byte(data, separator.encode())
            encoding = "utf8"
        found = Interactions.from_csv(
            source,
            left,
            right,
            separator=separator,
            header=header,
            quote=None,
            comment=comment,
            encoding=encoding,
            **options,
        )
    return found if header else found.renamed("left", "right")


def lines(path: PathLike, encoding: str, keep_blank: bool = False) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file without their ends; blank ones left out unless asked for."""
    text = frames.text_bytes(existing("path", path), encoding)
    for number, line in enumerate(decoded(path, text, "utf8").rstrip("\n").split("\n"), start=1):
        line = line.rstrip("\r")
        if keep_blank or line.strip():
            yield number, line


def one_byte(data: bytes, separator: bytes) -> tuple[bytes, str]:
    """The text with a separator of one byte, which does not occur in it, for one of several."""
    free = next((byte for byte in b"\t\x1f\x1e\x1d\x1c\x02\x03\x04" if byte not in data), None)
    if free is None:
        check.fail("path", "text with every control character", f"text with {separator!r} between fields")
    return data.replace(separator, bytes([free])), chr(free)

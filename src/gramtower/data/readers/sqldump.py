"""Rows of MySQL dumps, piece by piece: the columns asked for, by the names that CREATE TABLE gives them.

A dump is statements; rows stand in ``INSERT INTO `t` VALUES (…),(…);``. Rows are matched one after the other without a
gap, so that quotes and brackets inside text cannot be taken for the end of a row, and a row that a buffer cuts waits
for the rest of it. What is held is one piece of the file and one row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gramtower._util import checks as check
from gramtower.data import streams

Row = tuple[bytes, ...]
_END = ord(";")
_LONGEST = 1 << 20  # bytes of a row; more without an end are not a row
_LARGEST = 10**18
_WIDEST = 100  # columns of a table
_KEYWORD = len(b"CREATE TABLE ")
_TEXT = rb"'[^'\\]*+(?:(?:\\.|'')[^'\\]*+)*+'"
_VALUE = rb"(?:NULL|-?[0-9][-+0-9.eE]*+|(?:_binary )?" + _TEXT + rb"|0x[0-9A-Fa-f]*+)"
_STATEMENT = re.compile(rb"^(CREATE TABLE|INSERT INTO)\b", re.MULTILINE)
_CREATE = re.compile(rb"CREATE TABLE [^(]*\((.*?)\n\)[^\n]*;", re.DOTALL)
_COLUMN = re.compile(rb"^[ \t]*+`(\w+)`", re.MULTILINE)
_INSERT = re.compile(rb"INSERT INTO `?\w+`?(?: \(([^)]*)\))? VALUES\s*+")
_ESCAPE = re.compile(rb"\\(.)|''", re.DOTALL)
_ESCAPED = {b"0": b"\0", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"Z": b"\x1a"}


def number_of(value: bytes) -> int:
    """A whole number of at most 18 digits."""
    try:
        found = int(value)
        if -_LARGEST < found < _LARGEST:
            return found
    except ValueError:
        pass
    check.fail("path", f"{value[:60].decode(errors='replace')!r} in a column of ids", "whole numbers")


def text_of(value: bytes) -> bytes:
    """The bytes of a quoted value; NULL is empty."""
    if value == b"NULL":
        return b""
    if not value.endswith(b"'"):
        check.fail("path", f"{value[:60].decode(errors='replace')!r} in a column of text", "quoted text or NULL")
    inner = value[1:-1] if value[:1] == b"'" else value[value.index(b"'") + 1 : -1]
    if b"\\" not in inner and b"'" not in inner:
        return inner
    return _ESCAPE.sub(lambda found: b"'" if found[1] is None else _ESCAPED.get(found[1], found[1]), inner)


def columns_of(path: Path) -> list[str]:
    """The columns of the table of a dump, from its CREATE TABLE."""
    return _Reader(path).columns()


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[list[Row]]:
    """Some columns of all rows, many rows at a time, as they are written: ``b"12"``, ``b"'Title'"``, ``b"NULL"``.

    Raises:
        ValueError: if a column does not exist, a row is not one, or the file ends inside a statement.
    """
    return _Reader(path).rows(columns)


class _Reader:
    """A dump: bytes read and not needed yet, where in them the next ones stand, and how many came before them."""

    def __init__(self, path: Path) -> None:
        self.path, self.data, self.at, self.before = path, b"", 0, 0
        self.pieces = streams.read_pieces(path)

    def columns(self) -> list[str]:
        """Goes on to the CREATE TABLE and reads it."""
        if self._next_statement() != b"CREATE TABLE":
            check.fail("path", f"{self.path} without CREATE TABLE before its rows", "a MySQL dump of one table")
        while (found := _CREATE.match(self.data, self.at)) is None:
            self._more("CREATE TABLE")
        self.at = found.end()
        names = [name.decode() for name in _COLUMN.findall(found[1])]
        if len(names) > _WIDEST or len(set(names)) < len(names):
            check.fail("path", f"{self.path} with {len(names)} columns", f"at most {_WIDEST}, each once")
        return names

    def rows(self, wanted: Sequence[str]) -> Iterator[list[Row]]:
        """See read_rows."""
        present = self.columns()
        for name in wanted:
            if name not in present:
                check.fail("path", f"{self.path} with columns {', '.join(present)}", f"a column {name}")
        values = [b"(" + _VALUE + b")" if name in wanted else _VALUE for name in present]
        row = re.compile(rb"\s*+\(" + b",".join(values) + rb"\)\s*+[,;]", re.DOTALL)
        captured = [name for name in present if name in wanted]
        order = [captured.index(name) for name in wanted]
        as_written = order == sorted(order)
        while (word := self._next_statement()) is not None:
            if word != b"INSERT INTO":
                check.fail("path", f"{self.path} with two tables", "a MySQL dump of one table")
            while (head := _INSERT.match(self.data, self.at)) is None or head.end() == len(self.data):
                self._more("INSERT INTO")
            named = None if head[1] is None else [x.strip(" `") for x in head[1].decode(errors="replace").split(",")]
            if named is not None and named != present:
                given = f"{self.path}, whose rows have columns {', '.join(named)}"
                check.fail("path", given, f"those of its CREATE TABLE, {', '.join(present)}")
            self.at = head.end()
            for batch in self._statement(row):
                yield batch if as_written else [tuple(groups[place] for place in order) for groups in batch]

    def _statement(self, row: re.Pattern[bytes]) -> Iterator[list[Row]]:
        """The rows of one INSERT, up to its semicolon, as many at a time as were read."""
        while True:
            batch: list[Row] = []
            data, at, ended = self.data, self.at, False
            while found := row.match(data, at):  # none where a row is cut, or is none
                at = found.end()
                batch.append(found.groups())
                if data[at - 1] == _END:
                    ended = True
                    break
            self.at = at
            yield batch
            if ended:
                return
            self._more("a row")

    def _next_statement(self) -> bytes | None:
        """Goes to the next CREATE TABLE or INSERT INTO at the beginning of a line; None at the end of the file."""
        while (found := _STATEMENT.search(self.data, self.at)) is None:
            line = max(self.at, self.data.rfind(b"\n") + 1)  # a cut line stays
            inside = len(self.data) - line > _KEYWORD  # of a line that is no statement: its last byte is enough
            self.at = len(self.data) - 1 if inside else line
            if not self._grow():
                return None
            self.at = int(inside)
        self.at = found.start()
        return found[1]

    def _more(self, what: str) -> None:
        """Reads another piece because what stands here is not whole; refuses what will not become so."""
        place = f"{what} at byte {self.before + self.at}"
        if len(self.data) - self.at > _LONGEST:
            shown = self.data[self.at : self.at + 60].decode(errors="replace")
            check.fail("path", f"{self.path}, where {place} begins {shown!r}", "rows that fit its CREATE TABLE")
        if not self._grow():
            check.fail("path", f"{self.path}, which ends inside {place}", "a whole file")

    def _grow(self) -> bool:
        """Forgets what was used and reads another piece; False at the end of the file."""
        piece = next(self.pieces, b"")
        self.before += self.at
        self.data, self.at = self.data[self.at :] + piece, 0
        return bool(piece)

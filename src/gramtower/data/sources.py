"""Files given by the user: decompression, decoding, archives, and errors that name the file.

A problem with a file always raises ``ValueError`` or ``OSError`` with its name: readers work inside :func:`reading`,
which translates the errors of lower layers. Decompression is bounded, so that a small file cannot fill the memory: a
file that is read whole may take a quarter of the machine's memory, and one that is read in pieces 1 GiB plus 200 times
the file's size. Pieces come from files, folders, zips and tars, and hold at most one chunk and one line.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import re
import struct
import sys
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from gramtower._util import checks as check
from gramtower._util import host
from gramtower._util.checks import need
from gramtower._util.files import as_path, is_remote

PathLike = str | os.PathLike[str]


def _open_zst(file: PathLike | IO[bytes], mode: str = "rb") -> IO[bytes]:
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    opened: IO[bytes] = need(module, "reading .zst files", module).open(file, mode)
    return opened


OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zst}
PACKED = tuple(OPENERS)  # endings of compressed files
CHUNK = 1 << 23
BOM = b"\xef\xbb\xbf"
_BEGINNINGS = {  # of compressed files, whatever they are called
    ".gz": re.compile(rb"\x1f\x8b"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    ".zst": re.compile(rb"[\x28\x50-\x5f][\xb5\x2a][\x2f\x4d][\xfd\x18]"),  # a frame, or one to be skipped
    "zlib": re.compile(rb"x[\x01\x9c\xda]"),
}
_BELOW = (  # what the layers below raise for damaged files
    EOFError,
    OverflowError,
    RuntimeError,  # zip: encrypted, or by an unknown method; recursion
    MemoryError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
_TOML_BYTES, _TOML_LINE = 1 << 16, 2000  # tomllib takes quadratic time for keys of many parts


@contextmanager
def reading(path: PathLike, name: str = "path") -> Iterator[None]:
    """Turn errors raised inside into ``ValueError`` or ``OSError`` that name the file."""
    try:
        yield
    except UnicodeError as error:
        check.fail(name, f"{path}, which is not the text it should be ({error})", "UTF-8, or the encoding= it has")
    except (ValueError, OSError) as error:
        if str(path) in str(error):
            raise
        if isinstance(error, ValueError):
            raise ValueError(f"{error} (reading {path})") from error
        if error.errno not in (None, errno.EINVAL):  # of which the latter is a place before the file's beginning
            raise OSError(error.errno, error.strerror, str(path)) from error
        if type(error) in (OSError, gzip.BadGzipFile):  # what zip, gzip, bz2 and polars say of damage
            _refuse(name, path, error, "is damaged or cut short")
        raise type(error)(f"{name}: {path}: {_reason(error)}") from error
    except _BELOW as error:
        _refuse(name, path, error, "is damaged or cut short")
    except BaseException as error:  # a panic of polars is no Exception
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if not kinds & {"PolarsError", "PanicException", "ZstdError"}:
            raise
        _refuse(name, path, error, "is damaged or cut short" if "ZstdError" in kinds else "cannot be read")


def _refuse(name: str, path: PathLike, error: BaseException, how: str) -> NoReturn:
    check.fail(name, f"{path}, which {how} ({_reason(error)})", "a whole file")


def _reason(error: BaseException) -> str:
    """The first paragraph of an error in one line, of bounded length."""
    text = " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + " …"


def existing(name: str, path: PathLike, *, folder: bool = False) -> Path:
    """Check that a path is a plain non-empty file or, with ``folder``, a folder."""
    try:
        found = as_path(path)
        found = found.pinned() if is_remote(found) else found
    except TypeError:
        check.fail(name, repr(path), "a path")
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: no such object: {path}") from None
    if not found.exists():
        raise FileNotFoundError(f"{name}: no such file: {found}")
    if found.is_dir():
        if not folder:
            check.fail(name, f"{found}, which is a folder", "a file")
        return found
    if not found.is_file():
        check.fail(name, f"{found}, which is a device or a pipe", "a plain file")
    if found.stat().st_size == 0:
        check.fail(name, f"{found}, which is empty", "a file with rows")
    return found


def compression(head: bytes) -> str:
    """The compression of some bytes, by the first of them: one of PACKED, "zlib", or "" for none."""
    return next((kind for kind, beginning in _BEGINNINGS.items() if beginning.match(head)), "")


def packing(path: Path) -> str:
    """The compression of a file, by its first bytes: one of PACKED, or "" for none."""
    with path.open("rb") as stream:
        found = compression(stream.read(16))
    suffix = path.suffix.lower()
    if (suffix in PACKED and found != suffix) or found == "zlib":
        shown = f"{found} data" if found else "not compressed"
        check.fail("path", f"{path}, which is {shown}", f"{suffix} data" if suffix in PACKED else "text, plain or .gz")
    return found


class Budget:
    """A limit on the bytes of a compressed file's content: ``most``, or 1 GiB plus 200 times the file's size."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self.most = path, (1 << 30) + 200 * path.stat().st_size if most is None else most
        self.left = self.most

    def take(self, size: int) -> None:
        """Count bytes that came out, and refuse more than the limit."""
        self.left -= size
        if self.left < 0:
            given = f"{self.path}, which decompresses to more than {self.most / 1e9:.3g} GB"
            check.fail("path", given, "a file of that size at most; decompress a larger one first")


class Metered:
    """A file object whose bytes are counted against a budget."""

    def __init__(self, stream: IO[bytes], budget: Budget) -> None:
        self._stream, self._budget = stream, budget

    def read(self, size: int | None = None) -> bytes:
        """Read at most ``size`` or CHUNK bytes; empty at the end."""
        piece = self._stream.read(CHUNK if size is None else size)
        self._budget.take(len(piece))
        return piece

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in pieces, without a byte order mark of UTF-8."""
        first = self.read(max(CHUNK, len(BOM)))
        refuse_utf16(self._budget.path, first)
        yield first.removeprefix(BOM)
        while piece := self.read():
            yield piece


@contextmanager
def opened(path: Path, most: int | None = None) -> Iterator[Metered]:
    """Open a file, decompressed by its first bytes: .gz, .xz, .bz2, .zst."""
    with reading(path), OPENERS.get(packing(path), open)(path, "rb") as stream:
        yield Metered(stream, Budget(path, most))


def content(path: Path) -> bytes:
    """Read a file whole, decompressed; at most a quarter of the machine's memory."""
    buffer = io.BytesIO()
    with opened(path, host.memory_size() // 4) as stream:
        while piece := stream.read():
            buffer.write(piece)
    return buffer.getvalue()


def is_utf8(encoding: str) -> bool:
    """Whether an encoding is UTF-8; an unknown encoding is refused."""
    if not isinstance(encoding, str):
        check.fail("encoding", repr(encoding), "the name of an encoding")
    try:
        b" ".decode(encoding)
    except (LookupError, ValueError) as error:
        if not isinstance(error, UnicodeError):
            check.fail("encoding", repr(encoding), "a text encoding that Python knows, such as utf8 or latin-1")
    return encoding.lower().replace("_", "-") in ("utf8", "utf-8", "utf-8-sig")


def decoded(path: PathLike, data: bytes, encoding: str) -> str:
    """Decode bytes, without a byte order mark; the error names the file and the position."""
    if is_utf8(encoding):
        refuse_utf16(path, data)
        data = data.removeprefix(BOM)
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        place = f" at byte {error.start}, line {data[: error.start].count(10) + 1}" if hasattr(error, "start") else ""
        reason = getattr(error, "reason", "undecodable")
        check.fail("path", f"{path}, which is not {encoding} text ({reason}{place})", "UTF-8, or the encoding= it has")


def refuse_utf16(path: PathLike, head: bytes) -> None:
    """Refuse text that begins with the byte order mark of UTF-16."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        expected = "UTF-8, or encoding='utf-16' where an encoding can be given"
        check.fail("path", f"{path}, which begins like UTF-16 text", expected)


def read_toml(name: str, path: PathLike) -> dict[str, Any]:
    """Read a TOML file of at most 64 KiB and lines of at most 2,000 characters."""
    with reading(path, name):
        found = existing(name, path)
        with found.open("rb") as stream:
            data = stream.read(_TOML_BYTES + 1)
        text = decoded(found, data, "utf8")
        longest = max(map(len, text.split("\n")))
        if len(data) > _TOML_BYTES or longest > _TOML_LINE:
            given = f"{found} of {found.stat().st_size:,} bytes and lines up to {longest:,} characters"
            check.fail(name, given, f"at most {_TOML_BYTES:,} bytes and lines of {_TOML_LINE:,}")
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: {found} is not a TOML file: {_reason(error)}") from error


_LONGEST = 1 << 26  # bytes of a line
_DEPTH = 2  # tars in tars
_TAR = re.compile(r".*\.(tar|tgz|tar\.\w+)", re.IGNORECASE)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others decompress a whole block at once, of any size


def read_pieces(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed: .gz, .xz, .bz2, .zst."""
    with opened(path) as stream:
        yield from stream.pieces()


def members(path: Path, wanted: re.Pattern[str]) -> list[str]:
    """Sorted names of the files of a folder (and two levels below it) or zip that match a pattern."""
    with reading(path):
        if path.is_dir():
            files = (file for level in ("*", "*/*", "*/*/*") for file in path.glob(level))
            return sorted(file.relative_to(path).as_posix() for file in files if wanted.fullmatch(file.name))
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return sorted(name for name in archive.namelist() if wanted.fullmatch(Path(name).name))
        return []


def read_members(path: Path, names: Iterable[str], end: bytes = b"\n", most: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of some files of a folder or zip, one file after the other."""
    if path.is_dir():
        for name in names:
            yield from read_pieces(path / name)
            yield end
        return
    with reading(path), zipfile.ZipFile(path) as archive:
        budget = Budget(path, most)
        for name in names:
            if (method := archive.getinfo(name).compress_type) not in _METHODS:
                check.fail("path", f"{path}, where {name} is packed by method {method}", "a zip by deflate")
            with archive.open(name) as stream:
                yield from Metered(stream, budget).pieces()
            yield end


def is_tar(path: Path) -> bool:
    """Whether a file has the name of a tar, compressed or not."""
    return bool(_TAR.fullmatch(path.name))


def read_tar(path: Path, wanted: re.Pattern[str], end: bytes = b"\n") -> Iterator[bytes]:
    """Yield the bytes of matching files of a tar, and of tars inside it, in their order."""
    with opened(path) as stream:
        yield from _tar_pieces(stream, Budget(path), wanted, end, _DEPTH)


def _tar_pieces(stream: Metered, budget: Budget, wanted: re.Pattern[str], end: bytes, depth: int) -> Iterator[bytes]:
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as archive:
        for member in archive:
            name = Path(member.name)
            inner = archive.extractfile(member) if wanted.fullmatch(name.name) or is_tar(name) else None
            if inner is None:
                continue
            if not is_tar(name):
                yield from Metered(inner, budget).pieces()
                yield end
            elif depth:
                opener = OPENERS.get(".gz" if name.suffix.lower() == ".tgz" else name.suffix.lower())
                unpacked = inner if opener is None else opener(inner)
                yield from _tar_pieces(Metered(unpacked, budget), budget, wanted, end, depth - 1)
            else:
                check.fail("path", f"{budget.path} with tars in tars in tars", "files at most two tars deep")


def whole_lines(pieces: Iterable[bytes], quote: bytes = b"") -> Iterator[bytes]:
    """Regroup bytes into chunks that end at the end of a line, of about CHUNK bytes or one line.

    With ``quote``, a line break between quotes does not end a line.
    """
    kept: list[bytes] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length < CHUNK:
            continue
        data = b"".join(kept)
        cut = data.rfind(b"\n") + 1
        odd = bool(quote) and data.count(quote, 0, cut) % 2 == 1
        while odd and cut:
            before = data.rfind(b"\n", 0, cut - 1) + 1
            odd ^= data.count(quote, before, cut) % 2 == 1
            cut = before
        if cut:
            yield data[:cut]
        kept, length = [data[cut:]], len(data) - cut
        if length > _LONGEST:
            check.fail("path", f"a line of more than {_LONGEST:,} bytes that begins {kept[0][:40]!r}", "shorter lines")
    if rest := b"".join(kept):
        yield rest


_PACKED = "(" + "|".join(re.escape(ending) for ending in PACKED) + ")?"


def file_in(path: PathLike, pattern: str, expected: str) -> Path:
    """Find the file of a folder, or of a folder in it, whose name matches a pattern, compressed or not."""
    folder = existing("path", path, folder=True)
    if not folder.is_dir():
        check.fail("path", f"{folder}, which is a file", f"a folder with {expected}")
    found = members(folder, re.compile(pattern + _PACKED, re.IGNORECASE))
    if not found:
        there = ", ".join(members(folder, re.compile(".*"))[:20]) or "nothing"
        check.fail("path", f"{folder}, which holds {there}", f"a folder with {expected}, plain or compressed")
    return folder / found[0]


def holds(path: Path, *patterns: str) -> bool:
    """Whether a path is a folder with a file, compressed or not, for each pattern."""
    return path.is_dir() and all(members(path, re.compile(one + _PACKED, re.IGNORECASE)) for one in patterns)

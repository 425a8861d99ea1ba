"""Large files piece by piece: decompressed as they are read, from folders, zips and tars, cut where lines end.

Nothing here holds more than one chunk and one line, and no more comes out of a file than sources.Budget allows. Checked
by tests/test_netflix.py, tests/test_mediawiki.py and tests/test_sources.py.
"""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower.data import sources
from gramtower.data.sources import OPENERS, Budget, Metered, opened, reading

_LONGEST = 1 << 26  # bytes of a line
_DEPTH = 2  # tars in tars
_TAR = re.compile(r".*\.(tar|tgz|tar\.\w+)", re.IGNORECASE)
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others decompress a whole block at once, of any size


def read_pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed: .gz, .xz, .bz2.

    Raises:
        ValueError: if the file ends too early, is not what its ending says, or explodes.
    """
    with opened(path) as stream:
        yield from stream.pieces()


def members(path: Path, wanted: re.Pattern[str]) -> list[str]:
    """Names of the files of a folder (and two levels below it) or zip whose last part matches; sorted."""
    with reading(path):
        if path.is_dir():
            files = (file for level in ("*", "*/*", "*/*/*") for file in path.glob(level))
            return sorted(file.relative_to(path).as_posix() for file in files if wanted.fullmatch(file.name))
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return sorted(name for name in archive.namelist() if wanted.fullmatch(Path(name).name))
        return []


def read_members(path: Path, names: Iterable[str], end: bytes = b"\n", most: int | None = None) -> Iterator[bytes]:
    """The bytes of some files of a folder or zip, one file after the other, each ended by a line's end.

    Args:
        path: the folder or zip.
        names: of the files.
        end: what stands between files.
        most: how many bytes there may be in all; see sources.Budget.
    """
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
    """Whether a file is called a tar, compressed or not."""
    return bool(_TAR.fullmatch(path.name))


def read_tar(path: Path, wanted: re.Pattern[str], end: bytes = b"\n") -> Iterator[bytes]:
    """The bytes of matching files of a tar, in its order, also of tars inside it; read once from front to end."""
    with opened(path) as stream:
        yield from _tar_pieces(stream, Budget(path), wanted, end, _DEPTH)


def _tar_pieces(stream: Any, budget: Budget, wanted: re.Pattern[str], end: bytes, depth: int) -> Iterator[bytes]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
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


def whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks that end where a line ends, of about CHUNK bytes or one line, whichever is more."""
    kept: list[bytes] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length < sources.CHUNK:
            continue
        data = b"".join(kept)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut]
        kept, length = [data[cut:]], len(data) - cut
        if length > _LONGEST:
            check.fail("path", f"a line of more than {_LONGEST:,} bytes that begins {kept[0][:40]!r}", "shorter lines")
    if rest := b"".join(kept):
        yield rest

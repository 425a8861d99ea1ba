"""Large files piece by piece: decompressed as they are read, from folders, zips and tars, cut where lines end.

Nothing here holds more than one chunk and one line. Checked by tests/test_netflix.py and tests/test_mediawiki.py.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from gramtower import _checks as check

CHUNK = 1 << 23
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_DAMAGED = (EOFError, OSError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile)
_TAR = re.compile(r".*\.(tar|tgz|tar\.\w+)", re.IGNORECASE)


def read_pieces(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed by its ending: .gz, .xz, .bz2.

    Raises:
        ValueError: if the file ends too early or is not what its ending says.
    """
    opener = _OPENERS.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as stream:
            yield from _pieces(stream)
    except _DAMAGED as error:
        check.fail("path", f"{path}, which is damaged or cut short ({error})", "a whole file")


def members(path: Path, wanted: re.Pattern[str]) -> list[str]:
    """Names of the files of a folder (and two levels below it) or zip whose last part matches; sorted."""
    if path.is_dir():
        files = (file for level in ("*", "*/*", "*/*/*") for file in path.glob(level))
        return sorted(file.relative_to(path).as_posix() for file in files if wanted.fullmatch(file.name))
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return sorted(name for name in archive.namelist() if wanted.fullmatch(Path(name).name))
    return []


def read_members(path: Path, names: Iterable[str]) -> Iterator[bytes]:
    """The bytes of some files of a folder or zip, one file after the other, each ended by a line's end."""
    if path.is_dir():
        for name in names:
            yield from read_pieces(path / name)
            yield b"\n"
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for name in names:
                with archive.open(name) as stream:
                    yield from _pieces(stream)
                yield b"\n"
    except _DAMAGED as error:
        check.fail("path", f"{path}, which is damaged or cut short ({error})", "a whole zip")


def is_tar(path: Path) -> bool:
    """Whether a file is called a tar, compressed or not."""
    return bool(_TAR.fullmatch(path.name))


def read_tar(path: Path, wanted: re.Pattern[str]) -> Iterator[bytes]:
    """The bytes of matching files of a tar, in its order, also of tars inside it; read once from front to end."""
    try:
        with tarfile.open(path, "r|*") as archive:
            yield from _tar_pieces(archive, wanted)
    except _DAMAGED as error:
        check.fail("path", f"{path}, which is damaged or cut short ({error})", "a whole tar")


def _tar_pieces(archive: tarfile.TarFile, wanted: re.Pattern[str]) -> Iterator[bytes]:
    for member in archive:
        name = Path(member.name)
        stream = archive.extractfile(member) if wanted.fullmatch(name.name) or is_tar(name) else None
        if stream is None:
            continue
        if is_tar(name):
            with tarfile.open(fileobj=stream, mode="r|*") as inner:
                yield from _tar_pieces(inner, wanted)
        else:
            yield from _pieces(stream)
            yield b"\n"


def whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks that end where a line ends, of about CHUNK bytes or one line, whichever is more."""
    kept: list[bytes] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length < CHUNK:
            continue
        data = b"".join(kept)
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut]
        kept, length = [data[cut:]], len(data) - cut
    if rest := b"".join(kept):
        yield rest


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(CHUNK):
        yield piece

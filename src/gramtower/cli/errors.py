"""From an exception to one line and an exit status, in this library's words.

0: fine. 1: the run failed. 2: bad input, which are ``ValueError`` and files that are not there or not usable. Anything
else is a fault of the library: the line says where it is and what to report.
"""

from __future__ import annotations

import errno
import re
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EPIPE}
_WORDS = {
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "exists already, and is not a folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "is a folder, expected a file",
    errno.EACCES: "no permission to read or write it",
    errno.EPERM: "no permission to read or write it",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
}
_MEMORY = re.compile(r"out of memory|can.t allocate memory|not enough memory|unable to allocate", re.IGNORECASE)


def explain(error: BaseException) -> tuple[str, int]:
    """The line and the exit status for an exception."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        detail = f": {error}" if str(error) and _ours(error) else "; try a smaller --dim, --hidden or --memory-budget"
        return f"not enough memory{detail}", 1
    if isinstance(error, RecursionError):
        return "input that is nested too deeply", 2
    if isinstance(error, UnicodeEncodeError):
        return f"got {error.object!r}, expected text that UTF-8 can hold", 2
    if isinstance(error, OSError):
        return _about_file(error)
    if isinstance(error, ImportError):
        return str(error), 1
    if isinstance(error, ValueError) and _ours(error):
        return str(error), 2
    return f"a fault of gramtower{_place(error)}: please report it, with the command and what --debug shows", 1


def _about_file(error: OSError) -> tuple[str, int]:
    if error.errno is None:  # raised with its own message
        return str(error), 2
    words = _WORDS.get(error.errno) or (error.strerror or "cannot be read or written").lower()
    name = error.filename2 if error.filename2 is not None else error.filename
    if isinstance(name, bytes):
        name = name.decode(errors="backslashreplace")
    return words if name is None else f"{name}: {words}", 1 if error.errno in _FAILURES else 2


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _ours(error: BaseException) -> bool:
    """Whether an exception was raised by this library rather than by one that it calls."""
    frames = _frames(error)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_ROOT)


def _place(error: BaseException) -> str:
    """The last place of the library that an exception came through."""
    frames = [f for f in _frames(error) if Path(f.filename).is_relative_to(_ROOT)]
    return f" ({Path(frames[-1].filename).relative_to(_ROOT).as_posix()}, line {frames[-1].lineno})" if frames else ""

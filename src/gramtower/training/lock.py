"""Locks on what runs write, so that no two of them write the same.

The operating system gives a lock back when its process ends, however it ends. Where there are no POSIX locks there is
none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gramtower._util.files import take_lock
from gramtower.distributed.group import SINGLE, Group


@contextmanager
def locked(path: Path | None, group: Group = SINGLE, name: str = "checkpoint") -> Iterator[None]:
    """Hold the lock of what is at ``path`` in the first process; None locks nothing.

    The lock of a folder is a file in it, that of a file stands beside it.

    Args:
        path: what is written.
        group: the processes of the run.
        name: the argument that said so, for the error.

    Raises:
        ValueError: in every process, if another run holds it.
    """
    file: int | None = None
    lock = None
    if path is not None:
        lock = path / ".gramtower.lock" if path.is_dir() else path.with_name(path.name + ".lock")
        with group.together():
            if group.rank == 0:
                file = _take(lock, path, name)
    try:
        yield
    finally:
        if file is not None and lock is not None:
            lock.unlink(missing_ok=True)
            os.close(file)


def _take(lock: Path, path: Path, name: str) -> int | None:
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = take_lock(lock)
    except BlockingIOError:
        holder = lock.read_text(errors="replace").strip() or "unknown"
        raise ValueError(
            f"{name}: {path} is being written by another run (process {holder}); wait for it to end, or give this run "
            "another path"
        ) from None
    if file is not None:
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()} on {os.uname().nodename}".encode())
    return file

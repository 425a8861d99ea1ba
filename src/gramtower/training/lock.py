"""A lock on a checkpoint, so that two runs never write the same one.

The operating system gives the lock back when its process ends, however it ends. On systems without POSIX locks there
is none. Checked by tests/test_failures.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gramtower.distributed.group import Group


@contextmanager
def locked(path: Path | None, group: Group) -> Iterator[None]:
    """Hold the lock of the checkpoint at ``path`` in the first process; None locks nothing.

    Raises:
        ValueError: in every process, if another run holds it.
    """
    lock, file = None if path is None else path.with_name(path.name + ".lock"), -1
    if lock is not None:
        with group.together():
            if group.rank == 0 and os.name == "posix":
                file = _take(lock)
    try:
        yield
    finally:
        if file >= 0 and lock is not None:
            lock.unlink(missing_ok=True)
            os.close(file)


def _take(lock: Path) -> int:
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(file, 100).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise ValueError(
                f"checkpoint: {lock.parent} is being written by another run (process {holder}); wait for it to end, "
                "or give this run another folder"
            ) from None
        if lock.exists() and os.path.samestat(os.fstat(file), lock.stat()):
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()} on {os.uname().nodename}".encode())
            return file
        os.close(file)  # its holder has just removed it: take the new one

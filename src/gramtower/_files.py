"""Files that are never half written: another name first, then onto the disk, then renamed.

Used by everything that writes a file that something else may read. Checked by tests/test_files.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write under; what is there when the block ends well takes the place of ``path`` in one step.

    If the block or the disk fails, the file at ``path`` stays as it was and nothing is left beside it. Folders above
    it are made. The new file has the permissions that an ordinary new file gets.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # some writers make theirs private
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Save UTF-8 text in one step."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")

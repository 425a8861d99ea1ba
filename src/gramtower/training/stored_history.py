"""The records of a checkpoint: lines of JSON in a file beside it that is appended to and never rewritten.

A checkpoint therefore costs as much late in a run as early, and no history is too long for it. The checkpoint says how
many bytes of the file are its own, and their checksum: what a kill left behind them is ignored, and overwritten by the
next checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from gramtower._util.schema import build
from gramtower.training.result import Record


class StoredHistory:
    """The file beside one checkpoint, as far as the last checkpoint knows it."""

    def __init__(self, checkpoint: Path, count: int = 0, size: int = 0, checksum: int = 0) -> None:
        self.path = history_path(checkpoint)
        self.count, self.size, self.checksum = count, size, checksum

    @property
    def mark(self) -> dict[str, int]:
        """What the checkpoint says of the file."""
        return {"records": self.count, "bytes": self.size, "checksum": self.checksum}

    def append(self, records: Sequence[Record]) -> None:
        """Write what is new of a run's records onto the disk."""
        text = "".join(record.to_json() + "\n" for record in records[self.count :]).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.seek(self.size)
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self.checksum = zlib.crc32(text, self.checksum)
        self.count, self.size = len(records), self.size + len(text)


def read_stored(checkpoint: Path, mark: Mapping[str, int]) -> tuple[StoredHistory, list[Record]]:
    """The records that a checkpoint speaks of.

    Raises:
        ValueError, OSError: if the file is missing or damaged.
    """
    path = history_path(checkpoint)
    try:
        known = StoredHistory(checkpoint, mark["records"], mark["bytes"], mark["checksum"])
        with path.open("rb") as file:
            content = file.read(known.size)
        if len(content) != known.size or zlib.crc32(content) != known.checksum:
            raise ValueError("another checksum")
        records = [build("history", Record, json.loads(line)) for line in content.splitlines()]
        if len(records) != known.count or not records:
            raise ValueError("another number of records")
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} beside it is damaged: {error}") from error
    return known, records


def history_path(checkpoint: Path) -> Path:
    """Where the records of a checkpoint are."""
    return checkpoint.with_name(checkpoint.name + ".history")

"""The folder of a comparison, a benchmark or a search: a manifest, and one JSON file for each run that ended.

    KIND.json        the request
    runs/NAME.json   a run that ended

Each file is written in one step when its content is known. A command that was killed is therefore continued by the same
command, which skips the runs that have a file; a checksum guards each of them. A manifest says which data and settings
it belongs to, and a folder of others is refused.

Runs also say how they were timed: versions, machine, and the load by other processes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from gramtower import __version__
from gramtower._util import checks as check
from gramtower._util.files import build, plain, remove_left_overs, write_json
from gramtower._util.tensors import digest_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = 2
_PACKAGE = Path(__file__).resolve().parent.parent
_STAT = Path("/proc/stat")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")

T = TypeVar("T")


@dataclass(frozen=True)
class RunStore:
    """The files of one experiment."""

    folder: Path  # where they are
    kind: str  # "comparison", "benchmark" or "search"
    argument: str = "folder"  # name of the folder in error messages

    @property
    def manifest(self) -> Path:
        """The file with the request."""
        return self.folder / f"{self.kind}.json"

    def read_manifest(self, cls: type[T]) -> T | None:
        """Return the manifest as a dataclass, None if there is none."""
        return self._read(self.manifest, cls)

    def write_manifest(self, content: DataclassInstance) -> None:
        """Save a dataclass as the manifest."""
        write_json(self.manifest, self._headed(content))

    def read_run(self, name: str, cls: type[T]) -> T | None:
        """Return a run as a dataclass, None if it has not ended."""
        return self._read(self.run_path(name), cls)

    def write_run(self, name: str, content: DataclassInstance) -> None:
        """Save a dataclass as a run that ended."""
        body = plain(self._headed(content))
        write_json(self.run_path(name), body | {"checksum": _checksum(body)})

    def run_path(self, name: str) -> Path:
        """Return the file of a run. Different names have different files, whatever characters they contain."""
        if not _PLAIN_NAME.fullmatch(name):
            letters = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "run"
            name = f"{letters}-{zlib.crc32(name.encode()):08x}"
        return self.folder / "runs" / f"{name}.json"

    def continued(self, now: T, fresh: bool, same: Iterable[str]) -> T | None:
        """Return the manifest that the folder already holds, None if the experiment starts here."""
        before = None if fresh else self.read_manifest(type(now))
        remove_left_overs(self.folder / "runs")
        if before is None:
            for path in (self.manifest, *self.folder.glob("runs/*.json")):
                path.unlink(missing_ok=True)
        else:
            self.refuse(name for name in same if getattr(before, name) != plain(getattr(now, name)))
        return before

    def refuse(self, differing: Iterable[str]) -> None:
        """Raise a ValueError that lists the differences from the manifest; nothing happens for an empty list."""
        if names := ", ".join(differing):
            expected = f"a new folder for another {self.kind}" + (", or fresh to replace it" * (self.kind != "search"))
            check.fail(self.argument, f"{self.folder}, whose {self.manifest.name} has another {names}", expected)

    def _headed(self, content: DataclassInstance) -> dict[str, object]:
        return {"kind": f"gramtower {self.kind}", "version": VERSION, **asdict(content)}

    def _read(self, path: Path, cls: type[T]) -> T | None:
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
            if "checksum" in content and content.pop("checksum") != _checksum(content):
                raise ValueError("its content does not match its checksum")
            kind, version = content.pop("kind", f"gramtower {self.kind}"), content.pop("version", VERSION)
            if kind != f"gramtower {self.kind}":
                raise ValueError(f"its kind is {kind!r}")
            if version == VERSION:
                return build(path.name, cls, content)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.argument}: {path} is damaged or not of a {self.kind} ({error})") from error
        raise ValueError(
            f"{self.argument}: {path} has format {version!r}, but this version of gramtower reads format {VERSION}; "
            "use a new folder"
        )


def _checksum(content: dict[str, object]) -> str:
    return digest_of(json.dumps(content, sort_keys=True))


def environment() -> dict[str, object]:
    """Return the machine and the versions that a run runs with."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        processor = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), processor)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gramtower": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "system": platform.system(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str | None:
    """Return the commit of this code, with a + if files were changed since; None outside its repository."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # not a repository, or another project's that this package is only installed in
    head = _git("rev-parse", "--short=12", "HEAD")
    return head if head is None or not _git("status", "--porcelain", "--", ".") else head + "+"


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class OthersBusy:
    """Measures how many cores other processes keep busy, starting from its construction."""

    def __init__(self) -> None:
        self.start = _reading()

    def cores(self) -> float | None:
        """Return the average number of cores that others kept busy so far; None on systems other than Linux."""
        now = _reading()
        if self.start is None or now is None:
            return None
        wall, total, process = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, total - process) / max(wall, 1e-9)


def _reading() -> tuple[float, float, float] | None:
    """Return wall time, CPU seconds of all processes, and CPU seconds of this process."""
    try:
        fields = [int(x) for x in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    idle = fields[3] + fields[4]  # also waiting for disks
    process = os.times()
    return time.monotonic(), (sum(fields) - idle) / ticks, process.user + process.system

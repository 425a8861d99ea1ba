"""The folder of a comparison, a benchmark or a search: a manifest, and one JSON file for each run that ended.

    KIND.json        the request
    runs/NAME.json   a run that ended

Each file is written in one step when its content is known. A command that was killed is therefore continued by the same
command, which skips the runs that have a file; a checksum guards each of them. A manifest says which data and settings
it belongs to, and a folder of others is refused.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gramtower._util import checks as check
from gramtower._util.files import build, plain, remove_left_overs, write_json
from gramtower._util.tensors import digest_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = 2
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

"""Settings and factors as the .npz file that implicit writes and reads; nothing is pickled or unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np

from gramtower._util import checks as check
from gramtower._util.files import replacing


def write_npz(file: str | Path | IO[bytes], values: dict[str, Any]) -> None:
    """Write named numbers, text and arrays to a path, which gets .npz at its end if it has not, or to an open file."""
    if hasattr(file, "write"):
        np.savez(file, **values)
        return
    with replacing(_with_suffix(file)) as partial, partial.open("wb") as opened:
        np.savez(opened, **values)


def read_npz(file: str | Path | IO[bytes], names: Collection[str]) -> dict[str, Any]:
    """What :func:`write_npz` wrote under some of these names; numbers and text come back as Python's."""
    source = file if hasattr(file, "read") else _with_suffix(file)
    try:
        content = np.load(source, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            check.fail("file", "an .npy array", "an .npz file of a model")
        with content:
            arrays = {name: content[name] for name in content.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        check.fail("file", str(error) or "an empty file", "an .npz file of a model")
    if unknown := sorted(arrays.keys() - set(names)):
        check.fail("file", "settings such as " + ", ".join(unknown[:3]), "those of this model: " + ", ".join(names))
    return {name: value.item() if value.shape == () else value for name, value in arrays.items()}


def _with_suffix(file: object) -> Path:
    path = check.path("file", file)
    return path if path.name.endswith(".npz") else path.with_name(path.name + ".npz")

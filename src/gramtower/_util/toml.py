"""Settings as a TOML file with tables of names and values, which ``gramtower fit --config`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gramtower._util.files import write_text


def write_config(path: Path, tables: Mapping[str, Mapping[str, object]], comment: str) -> None:
    """Write settings as a TOML file with the names of the flags; None is left out."""
    write_text(path, config_text(tables, comment))


def config_text(tables: Mapping[str, Mapping[str, object]], comment: str) -> str:
    """Return the text of such a file."""
    lines = [f"# {comment}"]
    for name, table in tables.items():
        given = {key.replace("_", "-"): value for key, value in table.items() if value is not None}
        lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in given.items())]
    return "\n".join(lines) + "\n"


def toml(value: object) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        given = {key: item for key, item in value.items() if item is not None}  # which TOML has no word for
        return "{ " + ", ".join(f"{toml(str(key))} = {toml(item)}" for key, item in given.items()) + " }"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

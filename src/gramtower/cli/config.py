"""The config file: TOML tables ``[data]``, ``[features]``, ``[model]``, ``[train]``; keys are the names of flags.

A flag wins over the file. A key nobody knows is an error that names the nearest one.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from gramtower._util import checks as check
from gramtower._util.toml import toml
from gramtower._util.widths import parse_hidden
from gramtower.cli.options import DataOptions, FeatureOptions, ModelOptions, TrainOptions
from gramtower.data.sources import read_toml, reading

TABLES: dict[str, type] = {
    "data": DataOptions,
    "features": FeatureOptions,
    "model": ModelOptions,
    "train": TrainOptions,
}
_NOT_THE_MODEL = ("history", "refit", "validation_side")  # of [model] and [train], for the estimator's fit
_Table = TypeVar("_Table", DataOptions, FeatureOptions, ModelOptions, TrainOptions)


@dataclass
class Settings:
    """The options that are in force."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    features: FeatureOptions = field(default_factory=FeatureOptions)

    def estimator_arguments(self) -> dict[str, Any]:
        """What was given of the constructor arguments of ``gramtower.TwoTower``."""
        both = {f.name: getattr(part, f.name) for part in (self.model, self.train) for f in fields(part)}
        given = {name: value for name, value in both.items() if value is not None and name not in _NOT_THE_MODEL}
        if "hidden" in given:
            given["hidden"] = parse_hidden(given["hidden"])
        if "select" in given:
            given["select"] = {"auto": True, "off": False}.get(given["select"], given["select"])
        if "option" in given:
            given["optimizer_options"] = dict(parse_option(text) for text in given.pop("option"))
        return given


def merge_flags(
    config: Path | None,
    data: DataOptions | None = None,
    model: ModelOptions | None = None,
    train: TrainOptions | None = None,
    features: FeatureOptions | None = None,
) -> Settings:
    """The file's settings, overridden by flags."""
    file = Settings() if config is None else read_config(config)
    return Settings(
        merged(file.data, data), merged(file.model, model), merged(file.train, train), merged(file.features, features)
    )


def read_config(path: Path) -> Settings:
    """Settings from a TOML file.

    Raises:
        ValueError: if it is not TOML, or holds an unknown table or key, or a value of the wrong type.
    """
    known = {name: get_type_hints(table) for name, table in TABLES.items()}
    found = read_tables(path, read_toml("config", path), known)
    return Settings(**{name: TABLES[name](**values) for name, values in found.items()})


def read_tables(path: Path, content: dict[str, Any], known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file as the flags would have given their values.

    Args:
        path: the file, for errors.
        content: its tables.
        known: the type of each key that a table may have, by table.
    """
    tables: dict[str, dict[str, Any]] = {}
    with reading(path, "config"):
        for name, table in content.items():
            if name not in known:
                home = _home(name.replace("-", "_"), known)
                hint = f"[{nearest(name, known)}]" if home is None else f"the key below [{home}]"
                named = ", ".join(f"[{one}]" for one in known)
                check.fail("config", f"{name!r} at the top of {path}", f"{hint}; tables are {named}")
            if not isinstance(table, dict):
                check.fail("config", f"{name} = {table!r}", f"a table [{name}]")
            tables[name] = _read_table(path, name, table, known)
        return tables


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like a wrong one."""
    return check.near(name, list(known), 1, 0.0)[0]


def parse_option(text: str) -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``; the value as TOML where it is that, otherwise as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        check.fail("option", repr(text), "NAME=VALUE")
    try:
        return name.strip(), tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return name.strip(), value


def merged(defaults: _Table, flags: _Table | None) -> _Table:
    """``defaults`` overridden by the ``flags`` that were given."""
    if flags is None:
        return defaults
    return replace(defaults, **{f.name: v for f in fields(flags) if (v := getattr(flags, f.name)) is not None})


def _read_table(path: Path, name: str, table: dict[str, Any], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        plain = key.replace("-", "_")
        if plain not in known[name]:
            home = _home(plain, known)
            near = nearest(plain, known[name]).replace("_", "-")
            expected = repr(near) if home is None else f"{key!r} below [{home}]"
            check.fail("config", f"unknown key {key!r} in [{name}] of {path}", expected)
        values[plain] = _as_flag(f"[{name}] {key}", value, known[name][plain])
    return values


def _home(key: str, known: dict[str, dict[str, Any]]) -> str | None:
    """The table that has a key."""
    return next((name for name, keys in known.items() if key in keys), None)


def _as_flag(name: str, value: Any, hint: Any) -> Any:
    """A value of the file as the flag would have given it."""
    kind = next(k for k in get_args(hint) if k is not types.NoneType)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is str and (number or isinstance(value, list)):
        return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    if kind is float and number:
        return check.number(f"config: {name}", value) if isinstance(value, int) else value
    if get_args(kind) == (int,):
        if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return value
        expected = "a list of whole numbers"
    elif get_args(kind):  # a list of NAME=VALUE, here a table
        if isinstance(value, dict):
            return [f"{key}={toml(item)}" for key, item in value.items()]
        expected = "a table of names and values"
    elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    else:
        expected = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[kind]
    check.fail(f"config: {name}", repr(value), expected)

"""JSON from a file as a dataclass: all fields are required, no others are allowed, and types are checked."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, Union

T = TypeVar("T")
_LARGEST = 1 << 63  # of integers: what a tensor and a file can count


def build(where: str, cls: type[T], plain: object) -> T:
    """Make an instance of a dataclass from a JSON object."""
    if type(plain) is not dict:
        raise ValueError(f"{where}: got {_shown(plain)}, expected an object")
    kind: Any = cls
    tests, needed = _fields(kind)
    for name, value in plain.items():
        if name not in tests:
            raise ValueError(f"{where}: got a field {name!r}, expected {', '.join(tests)}")
        fits, expected = tests[name]
        if not fits(value):
            raise ValueError(f"{where}: got {name} {_shown(value)}, expected {expected}")
    for name in needed:
        if name not in plain:
            raise ValueError(f"{where}: got no {name}, expected {tests[name][1]}")
    return cls(**plain)


def fits(hint: object, value: object) -> bool:
    """Whether a JSON value has an annotated type."""
    return _test(hint)(value)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "…"


@lru_cache(maxsize=64)
def _fields(cls: type) -> tuple[dict[str, tuple[Callable[[object], bool], str]], list[str]]:
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    missing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    return {f.name: (_test(hints[f.name]), str(f.type)) for f in fields}, needed


@lru_cache(maxsize=256)
def _test(hint: object) -> Callable[[object], bool]:
    """The test for an annotation; types that JSON does not have never match."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is float:
        return lambda value: type(value) is float or (type(value) is int and -_LARGEST <= value < _LARGEST)
    if hint is int:
        return lambda value: type(value) is int and -_LARGEST <= value < _LARGEST
    if hint in (str, bool, type(None)):
        return lambda value: type(value) is hint
    if origin in (Union, types.UnionType):
        tests = [_test(one) for one in inner]
        return lambda value: any(test(value) for test in tests)
    if origin in (list, tuple, Sequence):
        each = _test(inner[0])
        return lambda value: type(value) is list and all(map(each, value))
    if origin is dict:
        each = _test(inner[1])
        return lambda value: type(value) is dict and all(map(each, value.values()))
    return lambda value: False

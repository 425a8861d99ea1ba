"""Checks of arguments and of optional packages.

A bad argument raises ``ValueError`` with the argument, the given value and the expected one. Optional packages are
imported where they are used; a missing one raises ``ImportError`` with the command that installs it.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
import string
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gramtower._util.files import as_path, is_remote

if TYPE_CHECKING:
    import torch


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_COMPARED = 500  # names that a wrong one is compared with letter by letter; among more, only those one edit away
_LONGEST = 32  # letters of a name whose edits are tried


class LeftOutWarning(UserWarning):
    """Some of the data was left out."""


def fail(name: str, given: object, expected: str) -> NoReturn:
    """Raise ``ValueError`` in the form that this library uses for bad arguments."""
    raise ValueError(f"{name}: got {given}, expected {expected}")


def shown(value: object, most: int = 60) -> str:
    """A value as text for a message, cut if it is long."""
    text = repr(value[: most + 1]) if isinstance(value, str) else repr(value)[: most + 1]
    return text if len(text) <= most else text[:most] + "…"


def number(name: str, value: object, *, minimum: float = -math.inf, above: float | None = None) -> float:
    """Check for a finite real number, at least ``minimum`` (or strictly above ``above``)."""
    bound = f" above {above:g}" if above is not None else f" >= {minimum:g}" if minimum > -math.inf else ""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        fail(name, repr(value), f"a finite number{bound}")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result) or result < minimum or (above is not None and result <= above):
        fail(name, repr(value), f"a finite number{bound}")
    return result


def count(name: str, value: object, *, minimum: int = 1, most: int | None = None) -> int:
    """Check for an integer, at least ``minimum`` and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or int(value) < minimum:
        fail(name, repr(value), f"an integer >= {minimum}")
    if most is not None and int(value) > most:
        fail(name, repr(value), f"an integer from {minimum} to {most}")
    return int(value)


def seed(value: object) -> int:
    """Check for a seed that every random generator accepts."""
    return count("seed", value, minimum=0, most=2**63 - 1)


def choice(name: str, value: object, options: tuple[str, ...]) -> str:
    """Check for one of a few names; the error lists them."""
    if not isinstance(value, str) or value not in options:
        fail(name, repr(value), "one of " + ", ".join(repr(o) for o in options))
    return value


def near(name: str, known: Collection[str], count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Known names similar to an unknown one, the most similar first.

    A few names are all compared. Among many, only names that are one edit away are looked up, which takes milliseconds
    if ``known`` is a set or a mapping.
    """
    if len(known) <= _COMPARED:
        return difflib.get_close_matches(name, list(known), count, cutoff)
    known = known if isinstance(known, (Set, Mapping)) else set(known)
    found = dict.fromkeys(edit for edit in _edits(name) if edit in known and edit != name)
    return difflib.get_close_matches(name, list(found), count, 0.0)


def _edits(name: str) -> Iterator[str]:
    """Variants of a name: other case, no blanks around it and, for short names, one letter changed."""
    yield from (name.strip(), name.lower(), name.upper(), name.title())
    if len(name) > _LONGEST:
        return
    letters = {*string.ascii_letters, *string.digits, *" -_.:/", *name}
    for place in range(len(name) + 1):
        before, after = name[:place], name[place:]
        yield before + after[1:]
        yield before + after[1:2] + after[:1] + after[2:]
        for letter in letters:
            yield before + letter + after
            yield before + letter + after[1:]


def flag(name: str, value: object) -> bool:
    """Check for True or False (or 1 or 0)."""
    if not isinstance(value, (bool, int, np.bool_, np.integer)) or value not in (0, 1):
        fail(name, repr(value), "True or False")
    return bool(value)


def path(name: str, value: object) -> Path:
    """Check for a path."""
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        fail(name, repr(value), "a path or URL: text or pathlib.Path")
    return as_path(value)


def local_path(name: str, value: object) -> Path:
    """Check for a path that is no URL."""
    found = path(name, value)
    if is_remote(found):
        fail(name, found, "a local path; pairs, tables, models and lists can have URLs")
    return found


def listed(name: str, value: object, what: str = "values") -> list[Any]:
    """The elements of a one-dimensional sequence; strings and 2-D arrays are refused."""
    import torch  # here, so that the help of the command line does without it

    flat = not isinstance(value, torch.Tensor) or (value.layout == torch.strided and value.dim() == 1)
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable) or not flat or hasattr(value, "tocsr"):
        fail(name, type(value).__name__, f"a list of {what}")
    if isinstance(value, np.ndarray) and value.ndim != 1:
        fail(name, f"an array of shape {value.shape}", f"a list of {what}")
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else list(value)


def ids(name: str, value: object) -> list[Any]:
    """A list of ids, from one id or a sequence."""
    found = [value] if isinstance(value, (str, int, np.integer)) else listed(name, value, "ids")
    for one in found:
        if not isinstance(one, Hashable):
            fail(name, type(one).__name__, "ids: text or whole numbers")
    return found


def functions(name: str, value: object) -> list[Any]:
    """Check for a sequence of functions."""
    listed = list(value) if isinstance(value, Iterable) else [value]
    if not isinstance(value, Iterable) or not all(map(callable, listed)):
        fail(name, repr(value), "a sequence of functions")
    return listed


def as_array(name: str, value: object, expected: str) -> NDArray[Any]:
    """Convert a dense tensor or a sequence to a numpy array."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            fail(name, f"a tensor of layout {value.layout}", f"{expected} (a dense tensor, or scipy.sparse)")
        value = value.detach().cpu()
        value = (value.double() if value.dtype in (torch.float16, torch.bfloat16) else value).numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        fail(name, type(value).__name__, expected)


def as_float_array(name: str, value: object) -> NDArray[np.floating]:
    """Convert to a float array; float32 and float64 are kept, other real numbers become float64."""
    expected = "an array of real numbers"
    array = as_array(name, value, expected)
    if array.dtype.kind not in "biuf":
        fail(name, f"dtype {array.dtype}", expected)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def finite(name: str, array: NDArray[np.number]) -> None:
    """Refuse NaN and infinity; the error names the first position."""
    if array.size and np.isfinite(array.min()) and np.isfinite(array.max()):  # a NaN is both; without a new array
        return
    bad = ~np.isfinite(array)
    if bad.any():
        place = tuple(int(x) for x in np.argwhere(bad)[0])
        at = place[0] if len(place) == 1 else place
        fail(name, f"{array[place]} at {at} ({int(bad.sum())} non-finite in all)", "finite numbers")


def fits(name: str, value: ArrayLike, dtype: torch.dtype) -> None:
    """Refuse finite numbers that are too large for a dtype; the error names the first."""
    import torch

    array, most = np.asarray(value), torch.finfo(dtype).max
    if array.size and max(abs(float(array.min())), abs(float(array.max()))) > most:
        place = tuple(int(x) for x in np.argwhere(np.abs(array) > most)[0])
        at = f" at {place[0] if len(place) == 1 else place}" if place else ""
        kind = str(dtype).removeprefix("torch.")
        fail(name, f"{array[place]:g}{at}", f"numbers of at most {most:.2g} with towers in {kind}")


def weights(name: str, value: object, length: int) -> NDArray[np.floating] | None:
    """Entity weights: None for all ones, or finite non-negative numbers, one for each entity."""
    if value is None:
        return None
    array = as_float_array(name, value)
    if array.shape != (length,):
        fail(name, f"shape {array.shape}", f"shape ({length},), one weight for each entity of that side")
    finite(name, array)
    if (array < 0).any():
        place = int(np.argmax(array < 0))
        fail(name, f"{array[place]} at {place}", "weights >= 0")
    return array


def memory_size(name: str, value: object) -> int:
    """Bytes from an integer or from text such as ``"512MB"`` (10⁶) or ``"2GiB"`` (2³⁰)."""
    expected = 'a positive number of bytes or text such as "512MB", "1.5GB" or "2GiB"'
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            fail(name, repr(value), expected)
        size = float(match[1]) * _UNITS[match[2].upper()]
    elif isinstance(value, (int, float, np.integer)) and not isinstance(value, bool):
        size = float(value)
    else:
        fail(name, repr(value), expected)
    if not 1 <= size < math.inf:
        fail(name, repr(value), expected)
    return int(size)


Hidden = Sequence[int] | tuple[Sequence[int], Sequence[int]]  # of both towers, or of the left and the right one


def check_hidden(hidden: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check the widths of hidden layers: one sequence for both towers, or a pair of sequences."""
    if not isinstance(hidden, Iterable) or isinstance(hidden, str) or getattr(hidden, "ndim", 1) != 1:
        fail("hidden", repr(hidden), "a sequence of layer widths, such as (256, 256) or (), or a pair of them")
    given = tuple(hidden)
    sides = given if len(given) == 2 and all(isinstance(one, (list, tuple)) for one in given) else (given, given)
    left, right = (tuple(count("hidden", width) for width in side) for side in sides)
    return left, right


def hidden_text(hidden: Hidden) -> str:
    """Write widths as text: ``"256,256"``, ``"none"``, or ``"1024/none"`` if the two towers differ."""
    left, right = (",".join(map(str, widths)) or "none" for widths in check_hidden(hidden))
    return left if left == right else f"{left}/{right}"


def config_hidden(hidden: Hidden) -> list[int] | str:
    """Widths for a config file: a list, or text if the towers differ."""
    left, right = check_hidden(hidden)
    return list(left) if left == right else hidden_text(hidden)


def parse_hidden(text: str, name: str = "hidden") -> Hidden:
    """Read widths from the text of :func:`hidden_text`."""
    sides = []
    for side in text.split("/"):
        words = [] if side.strip() == "none" else [word.strip() for word in side.split(",") if word.strip()]
        if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
            fail(name, repr(text), "widths such as 256,256, or none, or those of the left/right tower")
        sides.append(tuple(count(name, int(word)) for word in words))
    if len(sides) > 2:
        fail(name, repr(text), "widths of one or two towers")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


#: Import name of a package → the extra that installs it.
EXTRAS = {
    "polars": "io",
    "pyarrow": "io",
    "backports.zstd": "io",
    "cyclopts": "cli",
    "rich": "cli",
    "matplotlib": "plots",
    "triton": "gpu",
    "optuna": "tune",
    "starlette": "serve",
    "pydantic": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "faiss": "ann",
    "hnswlib": "hnsw",
    "implicit": "benchmark",
    "model2vec": "text",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "obstore": "cloud",
    "boto3": "cloud",
    "pyspark": "spark",
    "ray": "ray",
}


def install_line(package: str) -> str:
    """The command that installs a package, by extra if there is one."""
    return f'pip install "gramtower[{EXTRAS[package]}]"' if package in EXTRAS else f"pip install {package}"


def missing(what: str, package: str, error: ImportError | None = None) -> ImportError:
    """Make the error for a package that could not be imported."""
    absent = error is None or isinstance(error, ModuleNotFoundError)
    root = "" if error is None else (error.name or "").split(".")[0]
    if absent and EXTRAS.get(root, "") == EXTRAS.get(package):
        package = root
    why = "is not installed" if absent else f"cannot be imported ({error})"
    return ImportError(f"{what} needs {package}, which {why}: {install_line(package)}", name=package)


def need(module: str, what: str, package: str | None = None) -> ModuleType:
    """Import a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(what, package or module.split(".")[0], error) from error

"""Files: paths and URLs, atomic writes, JSON, TOML, and JSON as dataclasses.

A file is written in a temporary folder, synced to disk, and renamed. A killed process leaves such a folder,
``.gramtower-….partial``; the next write next to it removes it. A lock distinguishes it from the folder of a process
that is still writing.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
import os
import re
import shutil
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, Union

if TYPE_CHECKING:
    from gramtower._util.remote import RemotePath

SCHEMES = ("s3", "gs", "az", "hf", "http", "https")  # of URLs; the last three can only be read
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
WRITING = "_writing"  # marks a folder of objects that is not complete
_PREFIX, _SUFFIX, _LOCK = ".gramtower-", ".partial", "lock"


def as_path(value: str | os.PathLike[str]) -> Path:
    """Return a path, or a path of remote.py for a URL; one of another scheme is refused.

    The result for a URL is a new object, which reads the present version. ``Path`` drops a slash of "s3://bucket",
    which is accepted here.
    """
    text = str(value) if isinstance(value, (str, PurePath)) else os.fspath(value)
    if (found := _URL.match(text)) is None:
        return Path(text)
    if found[1].lower() not in SCHEMES:
        expected = f"a local path, or a URL of {', '.join(SCHEMES)} (a local folder of this name: ./{found[1]}:)"
        raise ValueError(f"path: got {text}, expected {expected}")
    from gramtower._util.remote import RemotePath

    return RemotePath(found[1].lower() + text[found.end(1) :])


def is_remote(path: Path) -> TypeGuard[RemotePath]:
    """Whether a path is a URL."""
    return _URL.match(str(path)) is not None


@contextmanager
def fetched(path: Path, footer: bool = False) -> Iterator[Path | io.RawIOBase]:
    """Yield a file to open: the path, or of a URL a copy for as long as the block runs.

    With ``footer`` only a few bytes of a large object will be read, and only these are fetched.
    """
    if is_remote(path):
        with path.fetched(footer) as file:
            yield file
    else:
        yield path.absolute()


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, at any depth, without those whose path has a part that begins with _ or a dot."""
    if is_remote(folder):
        start = len(folder.parts)
        yield from (path for path in folder.below() if not any(part[0] in "_." for part in path.parts[start:]))
        return

    def fail(error: OSError) -> None:
        raise error

    for place, below, names in os.walk(folder, onerror=fail):
        below[:] = sorted(name for name in below if name[0] not in "_.")
        yield from (Path(place) / name for name in names if name[0] not in "_.")


def remove_folder(folder: Path) -> None:
    """Remove a folder and what is in it."""
    if is_remote(folder):
        for path in folder.below():
            path.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; it atomically replaces ``path`` when the block succeeds.

    If the block or the disk fails, the file at ``path`` is unchanged and nothing else is left. Parent folders are
    created. The new file has the permissions that an ordinary new file gets. A device, a pipe or a folder is never
    replaced. The object of a URL is replaced by one upload (remote.py).
    """
    if is_remote(path):
        from gramtower._util.remote import uploading

        with uploading(path) as partial, _full_disk(path):
            yield partial
        return
    if path.exists() and not path.is_file():
        raise ValueError(f"path: got {path}, which is no ordinary file, expected one, or a new name")
    with _next_to(path) as folder:
        partial = folder / "content"
        partial.touch()
        mode = partial.stat().st_mode
        with _full_disk(path):
            yield partial
        partial.chmod(mode)  # some writers make theirs private
        _to_disk(partial, os.O_RDWR)  # Windows syncs only what may be written
        partial.replace(path)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder; it replaces ``path``, a folder or nothing, when the block succeeds.

    If the block fails, the folder at ``path`` is unchanged. A process that is killed between two renames at the end
    leaves no folder there. A folder of objects cannot be renamed: it has an object ``_writing`` while it is replaced,
    and readers refuse it then.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix=_PREFIX) as local:
            yield Path(local)
            write_text(path / WRITING, "")
            for old in path.below():
                if old.name != WRITING:
                    old.unlink(missing_ok=True)
            for file in sorted(Path(local).iterdir()):
                with replacing(path / file.name) as partial:
                    file.replace(partial)
            (path / WRITING).unlink()
        return
    with _next_to(path) as folder:
        partial = folder / "content"
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            _to_disk(file, os.O_RDWR)
        if path.exists():
            path.rename(folder / "old")
        partial.rename(path)


@contextmanager
def _next_to(path: Path) -> Iterator[Path]:
    """Yield a locked temporary folder next to a path, and sync the names of the parent folder if the block succeeds."""
    folder, lock = _writing_folder(path)
    try:
        yield folder
        with suppress(OSError):  # systems differ in what they can do for folders
            _to_disk(path.parent, os.O_RDONLY)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def _full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "SafetensorError":  # a full disk, in the words of another package
            raise OSError(f"{path} cannot be written: {error}") from error
        raise


def is_left_over(name: str) -> bool:
    """Whether a name is that of a temporary folder, which the next write next to it removes."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def remove_left_overs(folder: Path) -> None:
    """Remove the temporary folders of killed processes from a folder."""
    for left in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        _remove_if_left(left)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically; file names that are not valid UTF-8 keep their bytes."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode("utf-8", "surrogateescape"))  # the same line ends on all systems


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object atomically; :func:`plain` converts other values."""
    write_text(path, json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: object) -> Any:
    """Convert values for JSON: non-finite numbers become None, arrays lists, and other objects text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def tuples(value: object) -> object:
    """Turn lists of JSON, such as the widths of hidden layers, back into tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def take_lock(path: Path) -> int | None:
    """Open (or create) a file with an exclusive lock (``BlockingIOError`` if it is held); None without locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise
        except OSError:
            os.close(file)
            return None
        try:
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass
        os.close(file)  # its holder has just removed it: take the new one


def _writing_folder(path: Path) -> tuple[Path, int | None]:
    """Create a temporary folder next to ``path`` with its lock, and remove those of killed processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_overs(path.parent)
        while True:
            folder = Path(tempfile.mkdtemp(_SUFFIX, _PREFIX, path.parent))
            try:
                return folder, take_lock(folder / _LOCK)
            except (FileNotFoundError, BlockingIOError):
                continue  # another process took it for one that was left
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _remove_if_left(folder: Path) -> None:
    try:
        lock = take_lock(folder / _LOCK)
    except OSError:  # it is being written in, or has just gone
        return
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _to_disk(path: Path, flags: int) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def config_text(tables: Mapping[str, Mapping[str, object]], comment: str) -> str:
    """Return settings as the text of a TOML file with the names of the flags; None is left out."""
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


T = TypeVar("T")
_PLAIN = {str, int, float, bool, Any, Ellipsis}  # annotations of values that stay as JSON has them
_LARGEST = 1 << 63  # of integers: what a tensor and a file can count


def build(where: str, cls: type[T], content: object) -> T:
    """Make an instance of a dataclass from a JSON object; types are checked, and only fields with a default may miss.

    Objects become dataclasses and lists become tuples for fields that are annotated as these.
    """
    if type(content) is not dict:
        raise ValueError(f"{where}: got {_shown(content)}, expected an object")
    kind: Any = cls
    tests, needed = _fields(kind)
    for name, value in content.items():
        if name not in tests:
            raise ValueError(f"{where}: got a field {name!r}, expected {', '.join(tests)}")
        hint, expected = tests[name]
        if not fits(hint, value):
            raise ValueError(f"{where}: got {name} {_shown(value)}, expected {expected}")
    for name in needed:
        if name not in content:
            raise ValueError(f"{where}: got no {name}, expected {tests[name][1]}")
    made: dict[str, Any] = {name: _made(f"{where}.{name}", tests[name][0], one) for name, one in content.items()}
    return cls(**made)


def _made(where: str, hint: object, content: object) -> object:
    """A JSON value that has an annotated type, as this type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    kind, value = typing.cast(type, hint), typing.cast(Any, content)
    if origin in (Union, types.UnionType):
        return _made(where, next(one for one in inner if fits(one, value)), value)
    if origin in (list, tuple) and {*inner} <= _PLAIN:
        return origin(value)
    if origin in (list, tuple):
        hints = itertools.repeat(inner[0]) if origin is list or Ellipsis in inner else inner
        return origin(_made(where, each, one) for each, one in zip(hints, value, strict=False))
    return build(where, kind, value) if dataclasses.is_dataclass(hint) else value


def fits(hint: object, value: object) -> bool:
    """Whether a JSON value has an annotated type."""
    return _test(hint)(value)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:60] + "…"


@lru_cache(maxsize=64)
def _fields(cls: type) -> tuple[dict[str, tuple[object, str]], list[str]]:
    """The annotation of each field and its text, and the fields without a default."""
    hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    missing = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    return {f.name: (hints[f.name], str(f.type)) for f in fields}, needed


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
    if dataclasses.is_dataclass(hint):
        return lambda value: type(value) is dict
    if origin is tuple and Ellipsis not in inner:
        return lambda value: type(value) is list and len(value) == len(inner) and all(map(fits, inner, value))
    if origin in (list, tuple, Sequence):
        each = _test(inner[0])
        return lambda value: type(value) is list and all(map(each, value))
    if origin is dict:
        each = _test(inner[1])
        return lambda value: type(value) is dict and all(map(each, value.values()))
    return lambda value: False

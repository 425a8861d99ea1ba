"""The formats that pairs are read from: each entry of :data:`FORMATS` has the reader of a format and its detection.

To add a reader, add an entry; the choices of ``--format``, its help, the detection by path and the checks of flags
derive from it. :class:`DataOptions` has the flags themselves.
"""

from __future__ import annotations

import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from gramtower._util import checks as check
from gramtower.cli.output import note
from gramtower.data import readers
from gramtower.data.batches import pair_batches
from gramtower.data.frames import TableLike, polars, read_csv, separator_of, suffix_of
from gramtower.data.interactions import Interactions
from gramtower.data.parquet import is_parts
from gramtower.data.readers.mediawiki import is_mediawiki, mediawiki_links
from gramtower.data.readers.ratings import is_netflix, netflix
from gramtower.data.sources import holds, opened

if TYPE_CHECKING:
    from polars import DataFrame

    from gramtower.data.parquet import ReadingProgress

_DATA = Parameter(name="*", group=Group("Data", sort_key=1))
_ROLES = ("left", "right", "value", "weight", "time")
_NO_HEADER = "for a file without a header, --format edges takes positions"
_FLAGS = {  # flags that only some formats take, and why others do not
    "columns": ((*_ROLES, "context"), "has its own columns"),
    "threshold": (("threshold",), "has no values"),
    "event": (("event",), "has no types of events"),
    "separator": (("separator",), "has no separator to choose"),
}
_EVERY = 5.0  # seconds between lines about progress
_HEAD = 1 << 16  # bytes of a file in which its first line is looked for


@dataclass(frozen=True)
class Format:
    """A format of files or folders of pairs."""

    read: Callable[[Path, DataOptions, bool], Interactions]  # takes the options, and whether to report progress
    endings: tuple[str, ...] = ()  # endings of file names that have this format
    sniff: Callable[[Path], bool] | None = None  # tells whether a folder or archive has this format
    flags: tuple[str, ...] = ()  # the keys of _FLAGS that apply to it
    about: str = ""  # remark for the help of ``--format``
    stream: Callable[[Path, DataOptions, bool], Iterator[DataFrame]] | None = None  # yields tables, as pair_batches


def find_format(path: Path, options: ReadOptions, name: str = "DATA") -> str:
    """The name of the format of a path, given by ``--format`` or detected."""
    kind = guess_format(path, name) if options.format is None else check.choice("format", options.format, (*FORMATS,))
    for flag, (names, why) in _FLAGS.items():
        for role in names if flag not in FORMATS[kind].flags else ():
            if (given := getattr(options, role)) is not None:
                check.fail(f"--{role}", repr(given), f"nothing: the format {kind} {why}")
    if options.threshold is not None and options.value is None and "columns" in FORMATS[kind].flags:
        check.fail("--threshold", options.threshold, "--value as well: the column that it applies to")
    if (options.event is None) != (options.event_weights is None):
        check.fail("--event, --event-weights", "one of them", "both: the column of types, and their weights")
    for role in ("value", "weight", "threshold") if options.event is not None else ():
        if (given := getattr(options, role)) is not None:
            check.fail(f"--{role}", repr(given), "nothing with --event, which says what pairs weigh")
    return kind


def guess_format(path: Path, name: str = "DATA") -> str:
    """Detect the format: of a file by the ending of its name, of a folder or archive by the files in it."""
    if not path.is_dir():
        suffix = suffix_of(path)
        for kind, one in FORMATS.items():
            if suffix in one.endings:
                return kind
    for kind, one in FORMATS.items():
        if one.sniff is not None and one.sniff(path):
            return kind
    expected = ".csv, .tsv, .parquet (also .gz, .xz, .zst), a folder of .parquet, MovieLens or Netflix, or --format"
    check.fail(name, path, f"{expected} with one of {', '.join(FORMATS)}")


def _read_csv(path: Path, options: DataOptions, loud: bool) -> Interactions:
    left, right = _id_columns(options, path)
    separator = _separator(options) or separator_of(path)
    with _separator_hint(path, separator):
        if options.event is not None:
            return _read_events(polars().DataFrame(read_csv(path, None, separator=separator)), options)
        return Interactions.from_csv(path, left, right, separator=separator, **_arguments(options))


def _stream_csv(path: Path, options: DataOptions, loud: bool) -> Iterator[DataFrame]:
    left, right = _id_columns(options, path)
    separator = _separator(options) or separator_of(path)
    with _separator_hint(path, separator):
        yield from pair_batches(path, left, right, separator=separator, **_arguments(options))


@contextmanager
def _separator_hint(path: Path, separator: str) -> Iterator[None]:
    """Add to an error that the first line has another separator, if it has."""
    try:
        yield
    except ValueError as error:
        other = _other_separator(path, separator)
        if other is None:
            raise
        shown = {"\t": "tab", ",": "','"}.get(other, f"'{other}'")
        hint = f"its first line has {shown} and no {separator!r}: give --separator {shown}"
        raise ValueError(f"{error}; {hint}") from error


def _read_parquet(path: Path, options: DataOptions, loud: bool) -> Interactions:
    if options.event is not None:
        return _read_events(path, options)
    return Interactions.from_parquet(path, **parquet_arguments(path, options, loud))


def _stream_parquet(path: Path, options: DataOptions, loud: bool) -> Iterator[DataFrame]:
    return pair_batches(path, **parquet_arguments(path, options, loud))


def parquet_arguments(path: Path, options: ReadOptions, loud: bool) -> dict[str, Any]:
    """How a Parquet file or folder is read: arguments of ``Interactions.from_parquet`` and ``read_part``."""
    left, right = _id_columns(options)
    return {"left": left, "right": right, "progress": _Notes() if loud else None, **_arguments(options)}


def _read_events(source: TableLike | Path, options: DataOptions) -> Interactions:
    """Read a log of events; only those to learn from have a half-life here (see :func:`reading.read_pairs`)."""
    left, right = _id_columns(options)
    named = [text.partition("=") for text in (options.event_weights or "").split(",")]
    try:
        weights = {kind.strip(): float(weight) for kind, _, weight in named}
    except ValueError:
        check.fail("--event-weights", repr(options.event_weights), "TYPE=WEIGHT,TYPE=WEIGHT, such as view=1,buy=10")
    aged: dict[str, Any] = {} if options.half_life is None else {"half_life": options.half_life, "now": options.now}
    return Interactions.from_events(
        source, left, right, event=options.event or "", weights=weights, time=options.time, **aged, **_context(options)
    )


def _read_edges(path: Path, options: ReadOptions, loud: bool) -> Interactions:
    """Read lines of fields between spaces or tabs, in a .csv file between commas; columns are positions from 0."""
    given = {name: getattr(options, name) for name in _ROLES}
    if options.context is not None:
        check.fail("--context", repr(options.context), "nothing: edges have no column names")
    for name, column in given.items():
        if column is not None and not column.isdecimal():
            check.fail(f"--{name}", repr(column), "a position from 0: edges have no column names")
    places = {name: int(column) for name, column in given.items() if column is not None}
    separator = _separator(options) or {".tsv": "\t", ".csv": ","}.get(suffix_of(path))
    return readers.edge_list(path, separator=separator, **(_arguments(options) | places))


def _read_lists(path: Path, options: ReadOptions, loud: bool) -> Interactions:
    return readers.item_lists(path, separator=_separator(options))


def _read_set(reader: Callable[..., Any], path: Path, options: ReadOptions, loud: bool) -> Interactions:
    """Read a public data set, whose columns are known."""
    found = reader(path) if options.threshold is None else reader(path, threshold=options.threshold)
    return found if isinstance(found, Interactions) else found.pairs


def _is_movielens(path: Path) -> bool:
    """Whether a path may be MovieLens: any folder or zip that no other reader knows, or a .dat file."""
    suffix = suffix_of(path)
    return path.is_dir() or (suffix == ".zip" and zipfile.is_zipfile(path)) or suffix == ".dat"


def _id_columns(options: ReadOptions, csv: Path | None = None) -> tuple[str, str]:
    for name in ("left", "right"):
        if getattr(options, name) is None:
            hint = "" if csv is None else f"; the first line is {_first_line(csv)[:200]!r}, {_NO_HEADER}"
            check.fail(f"--{name}", "nothing", f"the name of the column with {name} ids{hint}")
    return options.left or "", options.right or ""


def _separator(options: ReadOptions) -> str | None:
    """The separator that was given, with "tab" for the character that is hard to type in a shell."""
    return "\t" if options.separator == "tab" else options.separator


def _arguments(options: ReadOptions) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("value", "weight", "time", "threshold")}
    return given | {"labels": options.value is not None and options.threshold is None} | _context(options)


def _context(options: ReadOptions) -> dict[str, Any]:
    return {} if options.context is None else {"context": names_in(options.context)}


def names_in(text: str) -> list[str]:
    """The names of a flag that takes several, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _first_line(path: Path) -> str:
    """The first line of a file, empty if it cannot be read."""
    try:
        with opened(path) as file:
            return str(file.read(_HEAD).partition(b"\n")[0].decode("utf-8", "replace").rstrip("\r"))
    except (OSError, ValueError):
        return ""


def _other_separator(path: Path, separator: str) -> str | None:
    """Return a usual separator that the first line of a file has, if it lacks the one that was used; otherwise None."""
    head = _first_line(path)
    found = [one for one in (";", "\t", "|", ",") if one in head]
    return found[0] if found and separator not in head else None


class _Notes:
    """Prints a line about the reading of a folder every few seconds, and one at its end if there was any before."""

    def __init__(self) -> None:
        self._next, self._lock = time.monotonic() + _EVERY, threading.Lock()
        self._said = False

    def __call__(self, state: ReadingProgress) -> None:
        with self._lock:
            due = time.monotonic() >= self._next
            if due or (self._said and state.rows == state.all_rows):
                self._next, self._said = time.monotonic() + _EVERY, True
                note(f"reading: {state}")


#: All formats by name. Of several that a folder may have, the first one whose ``sniff`` agrees is used.
FORMATS = {
    "csv": Format(
        _read_csv, (".csv", ".tsv"), flags=("columns", "threshold", "separator", "event"), stream=_stream_csv
    ),
    "parquet": Format(
        _read_parquet, (".parquet", ".pq"), is_parts, ("columns", "threshold", "event"), stream=_stream_parquet
    ),
    "netflix": Format(partial(_read_set, netflix), sniff=is_netflix, flags=("threshold",)),
    "mediawiki": Format(partial(_read_set, mediawiki_links), sniff=is_mediawiki),
    "citeulike": Format(
        partial(_read_set, readers.citeulike), sniff=lambda path: holds(path, r"users\.dat", r"vocabulary\.dat")
    ),
    "musae": Format(
        partial(_read_set, readers.musae), sniff=lambda path: holds(path, r".*edges\.csv", r".*features\.json")
    ),
    "wikispeedia": Format(
        partial(_read_set, readers.wikispeedia), sniff=lambda path: holds(path, r"links\.tsv", r"categories\.tsv")
    ),
    "movielens": Format(partial(_read_set, readers.movielens), sniff=_is_movielens, flags=("threshold",)),
    "lists": Format(_read_lists, flags=("separator",), about="user item ..."),
    "edges": Format(_read_edges, flags=("columns", "threshold", "separator"), about="user item, without a header"),
}


@_DATA
@dataclass
class ReadOptions:
    """How pairs are read: the table ``[data]`` without ``validation``."""

    path: Annotated[str | None, Parameter(show=False)] = None
    "The file or folder of pairs; the same as DATA."
    left: str | None = None
    "Column of left ids, such as the user (edges: a position from 0)."
    right: str | None = None
    "Column of right ids, such as the item."
    value: str | None = None
    "Column of values, such as a rating; without --threshold they are the labels."
    threshold: float | None = None
    "Keep pairs whose value is at least this, labelled 1 (MovieLens and Netflix: 4 unless given)."
    weight: str | None = None
    "Column of weights of the pairs' losses."
    time: str | None = None
    "Column of times, used by --half-life, split and info."
    event: str | None = None
    "Of a log of events (csv, parquet), the column with their types; pairs are weighed by --event-weights."
    event_weights: str | None = None
    "Weights of types, such as view=1,cart=3,buy=10; those of a pair's events are added, 0 leaves events out."
    context: str | None = None
    "Context columns (csv, parquet), such as device,hour: left entities are combinations of --left and their values."
    format: Annotated[
        str | None,
        Parameter(
            help=", ".join(f"{name} ({one.about})" if one.about else name for name, one in FORMATS.items())
            + "; without it, by the name or content of DATA."
        ),
    ] = None
    separator: str | None = None
    "Separator of csv, edges and lists, such as ; or tab; without it a comma (.csv), a tab (.tsv), or any spaces."
    same_entities: bool | None = None
    "Both sides are one set of entities, and none is recommended to itself [default: by ids and pairs]."


@_DATA
@dataclass
class DataOptions(ReadOptions):
    """How pairs are read, and which are held out. The table ``[data]``."""

    half_life: str | None = None
    "Weigh pairs or events by age, such as 90d: halve the weight for every such time (units: s, min, h, d, w)."
    now: str | None = None
    "With --half-life, the time from which ages count, such as 2024-01-31 [default: the newest]."
    validation: str | None = None
    "Pairs to stop early on: a share of each left entity's, such as 0.1, drawn with --seed, or a file like DATA."

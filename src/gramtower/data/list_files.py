"""Ranked lists as a frame, or as one Parquet, CSV or TSV file that is written part by part: one row for each answer.

Parts are files in a folder next to the table, ``NAME.parts``, with a manifest; each is written completely or not at
all. The last step joins them into the table and removes the folder. An interrupted run continues after its last part if
the manifest matches its arguments; otherwise the error names the difference. Memory: one part, and a few row groups
while the parts are joined.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.checks import missing
from gramtower._util.files import is_left_over, is_remote, remove_folder, replacing, write_json
from gramtower.data import frames
from gramtower.data.entity_table import frame_and_id
from gramtower.data.frames import TableLike
from gramtower.data.ids import Ids, IdsLike, id_series, join
from gramtower.data.sources import PathLike
from gramtower.data.tables import FeatureTable

if TYPE_CHECKING:
    from polars import DataFrame, Series

ENDINGS = (".parquet", ".csv", ".tsv")
_ANSWERS = 1 << 20  # of a part
_SCORE, _PLACE = 12, 3  # bytes: most characters of a score, and of a dictionary's place in Parquet
_PART = re.compile(r"part-[0-9]{6}\.(parquet|csv|tsv)")
_MANIFEST, _KIND, _VERSION = "manifest.json", "gramtower lists", 1


class ListFile:
    """A writer for a table of lists of length k; the ending of ``path`` decides the format.

    ``ids`` and ``sizes`` are of the left and the right entities; None for row numbers. ``marks`` are facts about the
    lists, as JSON values by name; a run continues only if they are equal. ``names`` are those of the columns of ids.
    """

    def __init__(
        self,
        path: Path,
        ids: tuple[Ids | None, Ids | None],
        sizes: tuple[int, int],
        k: int,
        marks: Mapping[str, object],
        names: tuple[str, str] = ("left", "right"),
    ) -> None:
        self._ending = path.suffix.lower()
        if self._ending not in ENDINGS:
            check.fail("path", path, ".parquet, .csv or .tsv")
        if path.is_dir():
            check.fail("path", f"{path}, a folder", "a file, or a new name")
        self.path, self.folder, self.lists = path, path.with_name(path.name + ".parts"), sizes[0]
        self.rows = min(sizes[0], max(1, _ANSWERS // k // 1024 * 1024 or _ANSWERS // k))
        self.parts = -(-self.lists // self.rows)
        self._k, self._left, self._right = k, _column(ids[0], sizes[0]), _column(ids[1], sizes[1])
        self._columns = [names[0], "rank", names[1], "score"]
        self._marks = {
            "k": k, "left entities": sizes[0], "rows of a part": self.rows, "columns": self._columns, **marks,
        }  # fmt: skip

    def begin(self, fresh: bool = False) -> int:
        """Create or find the folder (``fresh``: without the parts of an earlier run); returns how many parts it has.

        Parts of other lists and a disk that is too small are refused.
        """
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else [_MANIFEST]
        only_parts = all(is_left_over(name) or _PART.fullmatch(name) for name in names)  # an interrupted start or end
        if only_parts or (fresh and (self.folder / _MANIFEST).exists()):
            remove_folder(self.folder)
        done, there = self._parts_there() if self.folder.exists() else (0, 0)
        self._check_room(there)
        if not self.folder.exists() or not done:
            write_json(self.folder / _MANIFEST, {"kind": _KIND, "version": _VERSION, "of": self._marks})
        return done

    def write(self, part: int, columns: NDArray[np.int64], values: NDArray[np.float32]) -> int:
        """Write the lists of a part, as top_k returns them; returns the number of answers."""
        table = self._table(part * self.rows, columns, values)
        with replacing(self._name(part)) as partial:
            if self._ending == ".parquet":
                table.write_parquet(partial, compression="lz4", statistics=False)  # the join takes its time
            else:
                table.write_csv(partial, separator=frames.separator_of(self.path), include_header=part == 0)
        return len(table)

    def finish(self) -> None:
        """Join the parts into the table, which replaces an older one, and remove them."""
        names = [self._name(part) for part in range(self.parts)]
        with replacing(self.path) as partial:
            if self._ending == ".parquet":
                sources = [Path(os.fspath(name)).absolute() for name in names]
                frames.polars().scan_parquet(sources, glob=False).sink_parquet(partial)
            else:
                with partial.open("wb") as whole:
                    for name in names:
                        with name.open("rb") as one:
                            shutil.copyfileobj(one, whole, 1 << 20)
        remove_folder(self.folder)

    def room(self) -> int:
        """Estimate the bytes of parts and table."""
        answers, left, right = self.lists * self._k, _length(self._left), _length(self._right)
        if self._ending != ".parquet":
            return round(2 * answers * (left + right + len(str(self._k)) + _SCORE + len(self._columns)))
        known = min(len(self._right), self.rows * self._k)  # each part has a dictionary of its ids
        return round(2 * (answers * (4 + 1 + _PLACE) + self.lists * left + self.parts * known * right))

    def _table(self, first: int, columns: NDArray[np.int64], values: NDArray[np.float32]) -> DataFrame:
        pl, kept = frames.polars(), np.isfinite(values)
        rows, places = np.nonzero(kept)
        left = self._left.slice(first, len(columns)).gather(pl.Series(rows, dtype=pl.UInt32))
        right = self._right.gather(pl.Series(columns[kept], dtype=pl.UInt32))
        rank = pl.Series((places + 1).astype(np.int32))
        made = left, rank, right, pl.Series(values[kept])
        return cast("DataFrame", pl.DataFrame(dict(zip(self._columns, made, strict=True))))

    def _name(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}{self._ending}"

    def _parts_there(self) -> tuple[int, int]:
        """Number and bytes of the parts of an earlier run; parts of other lists are refused."""
        try:
            found = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            of = found["of"] if (found["kind"], found["version"]) == (_KIND, _VERSION) else None
        except ConnectionError:  # which says nothing about the file
            raise
        except (OSError, ValueError, KeyError, TypeError):
            of = None
        if not isinstance(of, dict):
            self._refuse("which is not a folder of lists that this version started")
        for name in self._marks | of:
            if of.get(name) != self._marks.get(name):
                self._refuse(f"started with other {name} ({of.get(name)}, now {self._marks.get(name)})")
        sizes: list[int] = []
        while len(sizes) < self.parts and self._name(len(sizes)).is_file():
            sizes.append(self._name(len(sizes)).stat().st_size)
        return len(sizes), sum(sizes)

    def _refuse(self, why: str) -> NoReturn:
        expected = "the same arguments as before, another name, or fresh=True (--fresh) to start again"
        check.fail("path", f"{self.folder}, {why}", expected)

    def _check_room(self, there: int) -> None:
        place = Path(tempfile.gettempdir()) if is_remote(self.path) else self.folder  # copies of the parts are joined
        parent = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        needed, free = self.room() - there, shutil.disk_usage(parent).free
        if needed > free:
            given = f"{self.path} on a disk with {free / 1e6:,.0f} MB free"
            check.fail("path", given, f"room for about {needed / 1e6:,.0f} MB: the parts, and the file that joins them")


def _column(ids: Ids | None, size: int) -> Series:
    pl = frames.polars()
    if ids is None or ids.dtype != object:
        return cast("Series", pl.Series(np.arange(size, dtype=np.int64) if ids is None else ids))
    for key in ids.tolist():
        if not isinstance(key, str):
            given = f"an entity called {key!r}"
            check.fail("right_features", given, "a table with a column of ids, as files need them")
    return cast("Series", pl.Series(ids.tolist(), dtype=pl.String))


def _length(column: Series) -> float:
    """Mean length of an id in bytes."""
    return float(cast("float", column.cast(frames.polars().String).str.len_bytes().mean() or 0.0))


def lists_frame(
    asked: IdsLike,
    ids: Ids,
    scores: NDArray[np.floating],
    names: tuple[str, str] = ("left", "right"),
    packages: Sequence[str] = ("polars", "pandas"),
    more: Mapping[str, Sequence[object]] | None = None,
) -> Any:
    """A table of lists, with columns for the query id, the rank from 1, the answer and its score.

    ``ids`` and ``scores`` have one row for each id of ``asked``; scores of −inf are dropped. The first of ``packages``
    that is installed makes the frame. ``more`` are further columns, as :func:`extra_columns` returns them.
    """
    wanted, found, given = check.ids("asked", asked), np.asarray(ids), np.asarray(scores)
    if found.ndim != 2 or found.shape != given.shape or len(wanted) != len(found):
        shown = f"{len(wanted)} ids asked for, answers of shape {found.shape} and scores of shape {given.shape}"
        check.fail("asked, ids, scores", shown, "one row of as many answers as scores for each id")
    kept = ~np.isneginf(given)
    rows, places = np.nonzero(kept)
    columns: dict[str, Any] = {
        names[0]: [wanted[row] for row in rows.tolist()],
        "rank": places + 1,
        names[1]: found[kept].tolist(),
        "score": given[kept],
    }
    for name, values in (more or {}).items():
        if name in columns:
            check.fail("table", f"a column {name!r}", f"names other than {', '.join(map(repr, columns))}")
        columns[name] = values
    for package in packages:
        try:
            return importlib.import_module(package).DataFrame(columns)
        except ImportError:
            continue
    raise missing("a table of lists", "polars")


def extra_columns(
    table: TableLike | PathLike | FeatureTable, name: str, ids: Ids, scores: NDArray[np.floating]
) -> dict[str, list[object]]:
    """Look up the columns of a table for each answer of some lists; null if it has no row for an answer."""
    frame, named = frame_and_id(table, name, typed=True)
    keys = id_series("table", frame[named])
    present = np.flatnonzero(keys.is_not_null().to_numpy())
    index = dict(zip(keys.drop_nulls().to_list(), present.tolist(), strict=True))
    if len(index) < len(present):
        check.fail("table", f"an id in several rows of column {named!r}", "each id in one row")
    answers = np.asarray(ids)[~np.isneginf(np.asarray(scores))]
    rows = join(answers, index)
    if len(answers) and not (rows >= 0).any():
        shown = f"{len(frame):,} rows, none of which has the id of an answer in column {named!r}"
        check.fail("table", shown, f"ids such as {answers.tolist()[0]!r}, in a column 'id' or {name!r} or in the first")
    pl = frames.polars()
    places = pl.Series(rows, dtype=pl.Int64).replace(-1, None)
    return {name: frame[name].gather(places).to_list() for name in frame.columns if name != named}

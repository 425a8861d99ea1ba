"""Partitions: folders of Parquet files, each left id in one part, of which each process of a fit reads its share.

Any engine writes them, with ids as they are. A *part* is a file, or all files below a folder ``key=value``; its rows
may be in any order. Which files count, and how their columns are read, is described in data/parquet.py. Process r of N
reads consecutive whole parts, so that rows are even, and there must be at least N parts.

Ids are numbered in order of first appearance, as :meth:`Interactions.from_parquet` numbers those of the same folder, so
a fit is the same for any N. Left ids need no agreement: those of process r follow those of process r − 1. Right ids are
sent from each process in turn, without those that others sent before. No process holds the pairs of others, and all
hold the right ids.

A left id in two parts is an error. In one process the numbers of left ids show it; between processes, process h mod N
compares all hashes h of left ids, a sixteenth of them at a time, and the ids themselves where hashes are equal.
Memory: that of the process's own pairs (data/parquet.py), and the right ids twice.
"""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.files import WRITING, as_path, replacing_folder
from gramtower.data import frames
from gramtower.data.frames import Column
from gramtower.data.ids import Ids, Key, entity_names, pack_ids
from gramtower.data.interactions import Interactions, column_choices, has_values, pair_table
from gramtower.data.matrices import Rule, are_one_set, check_rows, selected
from gramtower.data.parquet import Collected, Folder, ReadingProgress
from gramtower.data.sources import PathLike, existing
from gramtower.distributed.group import Group, agree, current_group
from gramtower.distributed.shards import Rows, Shards, balanced

if TYPE_CHECKING:
    from polars import DataFrame

    from gramtower.data.interning import Table  # compiled by numba

_NAME = re.compile(r"part-\d{5}\.parquet")
_NEXT = 1 << 40  # places of right ids that each process may use
_HELD = 1 << 22  # rows that are written at a time
_GROUP = 1 << 16  # rows of a group of a run, of which those with the wanted parts are read
_PART = "part of gramtower"  # a column of runs
_NAMED = 8  # pairs of equal hashes that are looked at: two ids with one hash are rare


@dataclass(frozen=True)
class Shard:
    """The rows of a partition that one process reads."""

    matrix: sp.csr_matrix  # local left rows × all right columns
    weights: NDArray[np.float32] | None  # weights of the pairs, or None
    left_ids: NDArray[Any]  # ids of the local left rows
    right_ids: NDArray[Any]  # ids of all right entities
    shards: Shards  # the row ranges of all processes
    pairs: int  # number of pairs of all processes
    left_name: str = "left"  # name of the left column
    right_name: str = "right"  # name of the right column
    report: Mapping[str, int] = field(default_factory=dict)  # counts of rows read, dropped and merged by all processes
    one_set: bool = False  # whether both sides are one set of entities
    held_out: sp.csr_matrix | None = None  # validation pairs in the form of the matrix, or None
    held_out_pairs: int | None = None  # number of held-out pairs of all processes, or None

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of all processes."""
        return self.shards.left.total, self.shards.right.total

    @property
    def entity_names(self) -> tuple[str, str]:
        """Names of the left and the right entities for messages."""
        return entity_names(self.left_name, self.right_name)

    def __len__(self) -> int:
        return self.pairs

    def holding_out(self, held: NDArray[np.bool_]) -> Shard:
        """Hold out some of the local pairs, for validation; every process does so with its own."""
        count = int(self.shards.group.totals(float(held.sum()))[0])
        return replace(
            self, matrix=selected(self.matrix, ~held), weights=None if self.weights is None else self.weights[~held],
            held_out=selected(self.matrix, held), pairs=self.pairs - count, held_out_pairs=count,
        )  # fmt: skip


def write_partition(pairs: Interactions, folder: str | Path, parts: int) -> list[int]:
    """Write pairs as a folder of Parquet parts with about equally many pairs; returns these numbers.

    The columns are the ids, named as in the pairs, and ``value``, ``weight`` and ``time`` if there are any.

    Args:
        pairs: the pairs.
        folder: a new or empty folder, or one with an earlier partition, which is replaced.
        parts: number of parts; at least the largest number of processes that will read them.
    """
    folder, offsets = _writable(folder), pairs.matrix.indptr
    check.count("parts", parts)
    bounds, values = [int(offsets[row]) for row in balanced(np.diff(offsets), parts)], has_values(pairs)
    with replacing_folder(folder) as partial:
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            pair_table(pairs, start, stop, values).write_parquet(partial / f"part-{number:05d}.parquet")
    return np.diff(bounds).tolist()


def write_batches(batches: Iterable[DataFrame], folder: str | Path, parts: int) -> dict[str, Any]:
    """Write tables of pairs, which come one after the other, as a folder of Parquet parts; returns facts about it.

    A hash of its left id says which part a row belongs to. Rows are first written as sorted runs, from which one part
    after the other is read; rows of the same pair are merged to the largest number of each column. At a time there are
    about four million rows in memory, or one batch or part if that is larger, and the right ids.

    Args:
        batches: tables with left ids in the first column, right ids in the second, and numbers.
        folder: as for :func:`write_partition`.
        parts: number of parts.
    """
    pl, folder, counts = frames.polars(), _writable(folder), np.zeros(check.count("parts", parts), np.int64)
    left, pairs = 0, list[int]()
    with replacing_folder(folder) as partial:
        (runs := partial / "runs").mkdir()
        files: list[Path] = []
        for rows in _gathered(batches):
            names, keys = rows.columns, rows.to_series(0).hash(0) % parts
            files.append(runs / f"{len(files)}.parquet")
            sorted_rows = rows.with_columns(keys.cast(pl.Int64).alias(_PART)).sort(_PART, maintain_order=True)
            sorted_rows.write_parquet(files[-1], row_group_size=_GROUP)
            counts += np.bincount(sorted_rows[_PART].to_numpy(), minlength=parts)
        if not files:
            check.fail("batches", "no rows", "at least one pair")
        for first, stop in _groups_of_parts(counts):
            of_group = pl.scan_parquet(files, glob=False).filter(pl.col(_PART).is_between(first, stop - 1)).collect()
            keyed = of_group.sort(_PART, maintain_order=True).group_by(_PART, *names[:2], maintain_order=True)
            merged = keyed.agg(pl.exclude(_PART, *names[:2]).max())
            ends = np.searchsorted(merged[_PART].to_numpy(), np.arange(first, stop + 1)).tolist()
            for number, (a, b) in enumerate(itertools.pairwise(ends), first):
                merged[a:b].select(names).write_parquet(partial / f"part-{number:05d}.parquet")
                pairs.append(b - a)
            left += merged[names[0]].n_unique()
        right = pl.scan_parquet(files, glob=False).select(names[1]).unique().select(pl.len())
        facts = {"columns": names, "left": left, "right": right.collect(engine="streaming").item()}
        shutil.rmtree(runs)
    return facts | {"pairs": sum(pairs), "parts": parts, "fewest_pairs": min(pairs), "most_pairs": max(pairs)}


def _gathered(batches: Iterable[DataFrame]) -> Iterator[DataFrame]:
    """Yield batches together until there are _HELD rows."""
    held: list[DataFrame] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= _HELD:
            yield frames.polars().concat(held)
            held.clear()
    if sum(map(len, held)):
        yield frames.polars().concat(held)


def _groups_of_parts(counts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of parts with at most _HELD rows together, or of one part."""
    ends, first = np.cumsum(counts), 0
    while first < len(counts):
        before = ends[first] - counts[first]
        stop = max(first + 1, int(np.searchsorted(ends, before + _HELD, "right")))
        yield first, stop
        first = stop


def _writable(folder: str | Path) -> Path:
    """The path of a folder to write a partition to; one with other files is refused."""
    folder = as_path(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    others = sorted(name for name in names if not _NAME.fullmatch(name) and name != WRITING)
    if others or (folder.exists() and not folder.is_dir()):
        given = f"{folder}, which {f'holds other files such as {others[0]}' if others else 'is a file'}"
        check.fail("folder", given, "a new or empty folder, or an earlier partition")
    return folder


def refuse_old(name: str, folder: Path) -> None:
    """Refuse a partition in the format that was written before partitions were Parquet files."""
    if (folder / "manifest.json").is_file() and any(folder.glob("part-*.safetensors")):
        given = f"{folder}, a partition in a format that is no longer read"
        check.fail(name, given, "a folder of Parquet files: run gramtower partition again on the pairs")


def read_part(
    folder: PathLike,
    left: Column = 0,
    right: Column = 1,
    *,
    value: Column | None = None,
    weight: Column | None = None,
    time: Column | None = None,
    threshold: float | None = None,
    labels: bool = False,
    duplicates: str = "max",
    same_entities: bool | None = None,
    group: Group | None = None,
    progress: Callable[[ReadingProgress], None] | None = None,
) -> Shard:
    """Read this process's share of a partition; a single process reads all of it.

    Args:
        folder: a folder of Parquet files in which no left id is in two parts (a file, or a folder ``key=value``).
        left: column of left ids, by name or by position from 0.
        right: column of right ids.
        value: column of values; :class:`gramtower.Interactions` describes this and the next arguments.
        weight: column of weights.
        time: column of times; rows without one are dropped, and times are not kept.
        threshold: smallest value that makes a pair.
        labels: whether values are the labels.
        duplicates: how rows of the same pair are merged.
        same_entities: whether both sides are one set of entities; None decides from the data.
        group: the processes; otherwise those of the default group of torch.distributed.
        progress: is called after each batch of rows of this process.
    """
    group = current_group() if group is None else group
    with group.together():
        rule = Rule(threshold, labels, duplicates, value)
        ids, others = column_choices(left, right, value=value, weight=weight, time=time)
        path = existing("folder", folder, folder=True)
        if not path.is_dir():
            check.fail("folder", f"{path}, which is a file", "a folder of Parquet files")
        refuse_old("folder", path)
        source = Folder(path, ids + others, rule)
        files = range(len(source.parts))
        parts = [list(numbers) for _, numbers in itertools.groupby(files, lambda file: source.parts[file].group)]
        if len(parts) < group.size:
            expected = f"at least {group.size}, one for each process; write more files, or start fewer processes"
            check.fail("folder", f"{len(parts)} parts in {source.path}", expected)
        cuts = balanced([sum(source.rows[file] for file in part) for part in parts], group.size)
        first, stop = ([*parts, [len(files)]][cuts[rank]][0] for rank in (group.rank, group.rank + 1))
    agree(group, {"folder": f"{len(source.parts):,} files with {sum(source.rows):,} rows"})
    seed = group.from_first(secrets.randbits(63))
    with group.together():
        rows = source.read(range(first, stop), progress, seed)
        if (found := rows.split_left_id()) is not None:
            _refuse_split(*found)
    _check_apart(rows, source, group)
    report = _added(group, rows.report)
    with group.together():
        if group.rank == 0:
            check_rows(report)
        names = rows.right_ids()
    columns, right_ids = _agree_on_ids(names, group)
    del names
    with group.together():
        fields = rows.fields((columns, right_ids))
    report = _added(group, fields.report)
    counts = group.gather_json(len(fields.left_ids))
    bounds = (0, *itertools.accumulate(counts)), balanced(np.ones(len(right_ids)), group.size)
    shards = Shards(group, Rows(bounds[0], group.rank), Rows(bounds[1], group.rank))

    def total(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        return group.sum_(torch.from_numpy(numbers)).numpy()

    given = None if same_entities is None else check.flag("same_entities", same_entities)
    one_set = are_one_set(fields.matrix, fields.left_ids, right_ids, total) if given is None else given
    return Shard(
        fields.matrix, fields.weights, fields.left_ids, right_ids, shards, report["pairs"], source.names[0],
        source.names[1], report | {"left": shards.left.total, "right": len(right_ids)}, one_set,
    )  # fmt: skip


def _added(group: Group, report: dict[str, int]) -> dict[str, int]:
    """The counts of all processes."""
    found = group.gather_json(report)
    return {name: sum(one[name] for one in found) for name in report}


def _refuse_split(key: Key, one: str, two: str) -> None:
    expected = "every left id in one part (a file, or a folder key=value): partition by left id, such as"
    expected += " df.repartition(64, 'user').write.parquet(…) in Spark, or run gramtower partition"
    check.fail("folder", f"rows of left id {key!r} in {one} and in {two}", expected)


def _check_apart(rows: Collected, source: Folder, group: Group) -> None:
    """Refuse a left id that rows of several processes have."""
    if group.size == 1:
        return
    equal: list[list[int]] = []  # a hash, and the files of two ids that have it
    for hashes, files in rows.left_hashes():
        target = (hashes >> np.uint64(32)) % np.uint64(group.size)
        order = np.argsort(target, kind="stable")
        entries = torch.from_numpy(np.stack([hashes.view(np.int64), files], axis=1)[order])
        counts = np.bincount(target.astype(np.int64), minlength=group.size).tolist()
        found = group.exchange_rows(entries, counts).numpy()
        found = found[np.argsort(found[:, 0], kind="stable")]
        twice = np.flatnonzero(found[1:, 0] == found[:-1, 0])[:_NAMED]
        equal += [[*found[at].tolist(), int(found[at + 1, 1])] for at in twice]
    suspects = [one for part in group.gather_json(equal[:_NAMED]) for one in part]
    asked = np.array([one[0] for one in suspects], np.int64).view(np.uint64)
    own: list[list[object]] = []
    for hashes, marks in rows.left.hashes() if suspects else ():
        for at in np.flatnonzero(np.isin(hashes, asked)):
            own.append([int(hashes[at].view(np.int64)), rows.left.key(int(marks[at]))])
    known = [tuple(one) for part in group.gather_json(own) for one in part]
    for number, one, two in suspects:
        same = [key for other, key in known if other == number]
        if len(set(same)) < len(same):
            key = next(key for key in same if same.count(key) > 1)
            _refuse_split(key, source.parts[one].name, source.parts[two].name)


def _agree_on_ids(names: Ids, group: Group) -> tuple[NDArray[np.int32], Ids]:
    """The number of each local id among the ids of all processes in order of first appearance, and all ids."""
    if group.size == 1:
        return np.arange(len(names), dtype=np.int32), names
    from gramtower.data.interning import SHARDS, Table

    table, marks = Table(names.dtype == object), np.empty(0, np.int32)
    for rank in range(group.size):
        new = names[:0]
        if rank == group.rank:
            known = table.counts()
            marks = _enter(table, pack_ids(names), rank)
            new = names[marks // SHARDS >= known[marks % SHARDS]]
        packed = pack_ids(new)
        sizes = group.gather_json([len(tensor) for tensor in packed.values()])[rank]
        for (name, tensor), size in zip(packed.items(), sizes, strict=True):
            packed[name] = group.broadcast_(tensor if rank == group.rank else tensor.new_empty(size), rank)
        if rank != group.rank:
            _enter(table, packed, rank)
    numbers = table.finish()
    return numbers[marks], table.names(numbers)


def _enter(table: Table, ids: dict[str, Tensor], rank: int) -> NDArray[np.int32]:
    """Enter ids of a process into a table; returns their marks."""
    if "numbers" in ids:
        return table.add_numbers(ids["numbers"].numpy(), rank * _NEXT + np.arange(len(ids["numbers"])))
    lengths = np.diff(ids["offsets"].numpy())
    return table.add_texts(ids["text"].numpy(), lengths, rank * _NEXT + np.arange(len(lengths)))

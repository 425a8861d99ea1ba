"""``gramtower split``, ``convert`` and ``partition``: pairs written as files to test on, to read faster, or to share.

The folder of a split holds ``train`` and ``test`` (``train-1`` … with --by folds, ``history`` with --history) and
``split.json``, which says how they were made; it is written first, so that an unfinished folder is recognised. A
partition is a folder of Parquet parts, of which each process of a fit reads its share (distributed/partition.py).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.files import is_left_over, replacing, write_json
from gramtower.cli.formats import ReadOptions
from gramtower.cli.options import Common, number_or_text, read_config
from gramtower.cli.output import Table
from gramtower.cli.reading import for_writing, read_batches, read_pairs
from gramtower.data import frames, splits
from gramtower.data.frames import is_parquet
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions, column_names, has_values, pair_table
from gramtower.data.splits import Split
from gramtower.distributed.partition import write_batches

MANIFEST = "split.json"
KIND = "gramtower split"
MOST_FOLDS = 10_000  # each is two files
_OWN = re.compile(r"(train|test|history)(-[0-9]+)?\.(csv|tsv|parquet)(\.gz)?")
_FORMATS = ("csv", "tsv", "csv.gz", "tsv.gz", "parquet")
_FLAGS = {  # which flags go with which way
    "random": ("share",),
    "per-user": ("share", "minimum"),
    "last": ("count", "minimum"),
    "time": ("share", "cut"),
    "cold-left": ("share", "history"),
    "cold-right": ("share",),
    "folds": ("count", "folds_of"),
}
_SHARE, _FOLDS = 0.2, 5


def split(
    path: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    by: str,
    out: Path,
    share: float | None = None,
    count: int | None = None,
    minimum: int | None = None,
    cut: str | None = None,
    history: float | None = None,
    folds_of: str | None = None,
    file_format: str | None = None,
    seed: int = 0,
    config: Path | None = None,
    data: ReadOptions | None = None,
    common: Common = Common(),
) -> int:
    """Split pairs into training and test files.

    random: pairs drawn from all. per-user: the same share of each left entity's pairs. last: the latest pairs of each
    left entity. time: all pairs from a given time on. cold-left, cold-right: left or right entities with all their
    pairs, to test on unseen entities. folds: a training and a test file for each fold; every pair is tested once.

    Args:
        path: Pairs, as for fit.
        by: random, per-user, last, time, cold-left, cold-right or folds.
        out: Folder for the files: new, empty, or that of an earlier split, which is replaced.
        share: Of the pairs or entities to hold out, above 0 and below 1 [default: 0.2].
        count: Pairs of each left entity (last) [default: 1], or folds [default: 5].
        minimum: Pairs that each left entity keeps to train on (per-user, last) [default: 1].
        cut: Moment of the first pair to test (time), such as 2020-01-31, instead of --share.
        history: Share of a held-out left entity's pairs (cold-left) that go into a file of their own, to describe it.
        folds_of: What is divided into folds: pairs, left or right entities [default: pairs].
        file_format: csv, tsv, csv.gz, tsv.gz or parquet [default: parquet if DATA is, otherwise csv].
        seed: Seed of the random draws.
        config: TOML file whose table [data] says how DATA is read.
    """
    every = {"share": share, "count": count, "minimum": minimum, "cut": cut, "history": history, "folds_of": folds_of}
    flags = {name: value for name, value in every.items() if value is not None}
    _check_flags(check.choice("by", by, tuple(_FLAGS)), flags)
    ending = "parquet" if is_parquet(path) else "csv"
    ending = ending if file_format is None else check.choice("file-format", file_format, _FORMATS)
    _check_folder(out)
    pairs = read_pairs(path, read_config(config).with_flags(data).data)
    if by in ("time", "last") and pairs.times is None:
        check.fail("--by", f"{by} with pairs that have no times", "--time, the column of times, or another way")
    made = _splits(pairs, by, flags, check.seed(seed))
    how = {"kind": KIND, "by": by, "seed": seed, **flags}
    written = _write(made, pairs, out, ending, how)
    facts = {**how, "columns": column_names(pairs), "pairs": len(pairs), "splits": written, "finished": True}
    write_json(out / MANIFEST, facts)
    _remove_old(out, written)
    parts = [part for one in written for part in one.values() if isinstance(part, dict)]
    rows = [(str(out / part["file"]), part["pairs"], part["left"], part["right"]) for part in parts]
    unknown = sum(one["test_pairs_of_new_entities"] for one in written)
    lost = [f"{unknown:,} test pairs have an entity that is not in the training part"] if unknown else []
    return common.answer({**facts, "out": str(out)}, Table(("file", "pairs", "left", "right"), rows), *lost)


def _check_flags(by: str, flags: Mapping[str, Any]) -> None:
    """Refuse flags that mean nothing for this way of splitting, and values that no split can have."""
    for name, given in flags.items():
        if name not in _FLAGS[by]:
            ways = " or ".join(way for way, known in _FLAGS.items() if name in known)
            check.fail(f"--{name.replace('_', '-')}", repr(given), f"nothing with --by {by}: it goes with --by {ways}")
    if "cut" in flags and "share" in flags:
        check.fail("--cut", f"{flags['cut']} and --share {flags['share']}", "one of them")
    for name in ("share", "history"):
        if name in flags and not 0 < flags[name] < 1:
            check.fail(f"--{name}", flags[name], "a share above 0 and below 1")
    if "folds_of" in flags:
        check.choice("--folds-of", flags["folds_of"], ("pairs", "left", "right"))
    if "count" in flags:
        check.count("--count", flags["count"], minimum=2 if by == "folds" else 1, most=MOST_FOLDS)


def _splits(pairs: Interactions, by: str, flags: Mapping[str, Any], seed: int) -> Iterator[Split]:
    share, minimum = flags.get("share", _SHARE), flags.get("minimum", 1)
    if by == "folds":
        return splits.folds(pairs, flags.get("count", _FOLDS), by=flags.get("folds_of", "pairs"), seed=seed)
    if by == "random":
        made = splits.random_pairs(pairs, share, seed=seed)
    elif by == "per-user":
        made = splits.per_user(pairs, share, minimum=minimum, seed=seed)
    elif by == "last":
        made = splits.leave_last(pairs, flags.get("count", 1), minimum=minimum, seed=seed)
    elif by == "time":
        cut = number_or_text(flags["cut"]) if "cut" in flags else None
        made = splits.by_time(pairs, None if cut is not None else share, cut=cut, seed=seed)
    elif "history" in flags:
        made = splits.held_out_users(pairs, share, history=flags["history"], seed=seed)
    else:
        made = splits.held_out(pairs, by.removeprefix("cold-"), share, seed=seed)
    return iter([made])


def _write(
    made: Iterator[Split], pairs: Interactions, out: Path, ending: str, how: Mapping[str, object]
) -> list[dict[str, Any]]:
    """Write the parts of each split; returns their files and counts."""
    found = []
    first = next(made)  # what cannot be split is refused before anything is written
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / MANIFEST, {**how, "finished": False})
    for number, one in enumerate(chain([first], made), start=1):
        place = f"-{number}" if how["by"] == "folds" else ""
        facts: dict[str, Any] = {}
        for name, part in (("train", one.train), ("test", one.test), ("history", one.history)):
            if part is not None and len(part):
                file = f"{name}{place}.{ending}"
                write_pairs(part, out / file, values=has_values(pairs))
                left, right = part.without_empty().shape
                facts[name] = {"file": file, "pairs": len(part), "left": left, "right": right}
        found.append(facts | {"test_pairs_of_new_entities": _of_new_entities(one)})
    return found


def _of_new_entities(one: Split) -> int:
    """Test pairs with an entity that no training pair has."""
    train, test = one.train.without_empty(), one.test
    left = join(test.left_ids, index_of(train.left_ids)) < 0
    right = join(test.right_ids, index_of(train.right_ids)) < 0
    entries = test.matrix.tocoo()
    return int((left[entries.row] | right[entries.col]).sum())


def _check_folder(out: Path) -> None:
    """Refuse a folder with files of others; those of an earlier split are known by its split.json."""
    expected = "a new or empty folder, or that of an earlier split"
    if out.exists() and not out.is_dir():
        check.fail("--out", f"{out}, which is a file", expected)
    there = sorted(path.name for path in out.iterdir() if not is_left_over(path.name)) if out.exists() else []
    if MANIFEST in there:
        try:
            known = json.loads((out / MANIFEST).read_text(encoding="utf-8")).get("kind") == KIND
        except (OSError, ValueError, AttributeError, RecursionError):
            known = False
        others = [name for name in there if name != MANIFEST and not _OWN.fullmatch(name)] if known else [MANIFEST]
    else:
        others = there
    if others:
        check.fail("--out", f"{out}, which holds other files such as {others[0]}", expected)


def _remove_old(out: Path, made: list[dict[str, Any]]) -> None:
    """Remove the files of an earlier split that this one has not replaced."""
    files = {part["file"] for one in made for part in one.values() if isinstance(part, dict)}
    for old in out.iterdir():
        if _OWN.fullmatch(old.name) and old.name not in files:
            old.unlink(missing_ok=True)


_ENDINGS = (".csv", ".tsv", ".parquet")
_ROWS = 1 << 19


def convert(
    path: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    out: Path,
    config: Path | None = None,
    data: ReadOptions | None = None,
    common: Common = Common(),
) -> int:
    """Convert pairs of any format to a CSV or Parquet table, which is read faster.

    A folder with the dumps page, pagelinks, redirect and (since 2023) linktarget (.sql.gz) of a MediaWiki becomes the
    links between its articles, with redirects followed; columns are from and to.

    Args:
        path: Pairs, as for fit.
        out: The table: .csv, .tsv (both also .gz) or .parquet.
        config: TOML file whose table [data] says how DATA is read.
    """
    if frames.suffix_of(out) not in _ENDINGS or out.suffix.lower() not in (*_ENDINGS, ".gz"):
        check.fail("out", out, ".csv, .tsv (both also .gz) or .parquet")
    pairs = read_pairs(path, read_config(config).with_flags(data).data)
    write_pairs(pairs, out)
    return common.answer({**pairs.report, "columns": column_names(pairs), "out": str(out)})


def write_pairs(pairs: Interactions, out: Path, values: bool | None = None) -> None:
    """Save pairs as a table, in one step; text files a block of rows at a time."""
    values = has_values(pairs) if values is None else values
    with replacing(out) as partial:
        if frames.suffix_of(out) == ".parquet":
            pair_table(pairs, 0, len(pairs), values).write_parquet(partial)
            return
        with gzip.open(partial, "wb") if out.suffix.lower() == ".gz" else partial.open("wb") as file:
            for start in range(0, max(1, len(pairs)), _ROWS):
                table = pair_table(pairs, start, min(start + _ROWS, len(pairs)), values)
                text = table.write_csv(separator=frames.separator_of(out), include_header=start == 0)
                file.write(text.encode())


MOST_PARTS = 65_536  # each is a file


def partition(
    path: Path,
    /,
    *,
    out: Path,
    parts: int = 64,
    config: Path | None = None,
    data: ReadOptions | None = None,
    common: Common = Common(),
) -> int:
    """Write pairs as Parquet parts, each left entity in one part, for a fit by several processes.

    ``torchrun --nproc-per-node 4 -m gramtower fit FOLDER --left user --right item --out RUN`` then reads each part in
    only one process. CSV and Parquet files are read in a stream and may be larger than the memory; pairs of other
    formats are read whole. Spark, DuckDB and polars can write such folders, too.

    Args:
        path: Pairs, as for fit.
        out: Folder for the parts: new, empty, or that of an earlier partition, which is replaced.
        parts: Number of parts; at least the largest number of processes that will read them.
        config: TOML file whose table [data] says how the pairs are read.
    """
    for_writing(out)
    check.count("parts", parts, most=MOST_PARTS)
    options = read_config(config).with_flags(data).data
    if options.context is not None:
        check.fail("--context", repr(options.context), "nothing: models with context are fitted in one process")
    facts = write_batches(read_batches(path, options, not common.quiet), out, parts)
    return common.answer({"folder": str(out), **facts})

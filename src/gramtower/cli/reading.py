"""From paths and options to pairs, feature tables and models; and the folder of a run.

The folder has model.gramtower, config.toml, history.jsonl, summary.json and, while it runs, a checkpoint.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import as_path, is_remote
from gramtower.cli.formats import FORMATS, DataOptions, ReadOptions, find_format, guess_format, parquet_arguments
from gramtower.cli.options import Settings, parse_option, read_config
from gramtower.data import frames, readers, splits
from gramtower.data.ids import Ids, as_ids, as_objects, id_series, index_of, join
from gramtower.data.interactions import Interactions, has_values, pair_table
from gramtower.data.sources import existing
from gramtower.data.tables import FeatureTable
from gramtower.distributed.group import SINGLE, Group
from gramtower.distributed.partition import Shard, read_part, refuse_old
from gramtower.engine.kernels.elementwise import LOSSES, Loss
from gramtower.engine.objective.constants import as_imputed
from gramtower.model.context import with_context
from gramtower.model.feature_spec import ORDERED
from gramtower.model.fit_data import hold_out
from gramtower.model.two_tower import TwoTower, load
from gramtower.training.checkpoint import locked

if TYPE_CHECKING:
    from polars import DataFrame

MODEL, CONFIG, HISTORY, SUMMARY = "model.gramtower", "config.toml", "history.jsonl", "summary.json"
CHECKPOINT, COMPARISON = "checkpoint.safetensors", "comparison.json"
NO_ID = "(no id)"
_ROWS = 1 << 19  # of a table
_MOVIELENS = {"left": ("user",), "right": ("movie",)}
Say = Callable[[str], None]  # prints a line about progress, or does nothing


def read_pairs(
    path: Path, options: DataOptions, loud: bool = False, name: str = "DATA", loss: str | Loss | None = None
) -> Interactions:
    """The pairs of a file or folder; those to learn from, ``DATA``, are weighed by age if there is a half-life."""
    if name != "DATA":
        options = replace(options, half_life=None, now=None)
    elif options.now is not None and options.half_life is None:
        check.fail("--now", repr(options.now), "--half-life as well")
    if not path.exists():
        raise FileNotFoundError(f"{name}: no such file or folder: {path}")
    refuse_old(name, path)
    pairs = FORMATS[find_format(path, options, name)].read(path, options, loud)
    if options.half_life is not None and options.event is None:  # of events each one was
        pairs = pairs.decayed(options.half_life, options.now)
    _check_labels(pairs.matrix.data, options, loss)
    return pairs if options.same_entities is None else replace(pairs, same_entities=options.same_entities)


def read_batches(path: Path, options: DataOptions, loud: bool) -> Iterator[DataFrame]:
    """Tables of the rows of pairs; other formats than CSV and Parquet, and weights by event or age, are read whole."""
    if path.exists() and options.event is options.half_life is options.now is None:
        refuse_old("DATA", path)
        if (stream := FORMATS[find_format(path, options)].stream) is not None:
            return stream(path, options, loud)
    pairs = read_pairs(path, options, loud)
    starts, values = range(0, len(pairs), _ROWS), has_values(pairs)
    return (pair_table(pairs, start, min(start + _ROWS, len(pairs)), values) for start in starts)


def read_share(path: Path, options: DataOptions, loud: bool, loss: str | Loss, group: Group) -> Shard | None:
    """This process's share of a folder of Parquet parts; None for one process, and for other files and folders."""
    with group.together():
        if group.size == 1 or not path.is_dir() or find_format(path, options) != "parquet":
            return None
        for name in ("context", "event", "half_life"):
            if getattr(options, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                check.fail(flag, repr(getattr(options, name)), "nothing with several processes, which share a folder")
        columns = parquet_arguments(path, options, loud)
    shard = read_part(path, **columns, same_entities=options.same_entities, group=group)
    with group.together():
        _check_labels(shard.matrix.data, options, loss)
    return shard


def _check_labels(labels: NDArray[np.float32], options: DataOptions, loss: str | Loss | None) -> None:
    known = LOSSES.get(loss) if isinstance(loss, str) else loss
    allowed = None if known is None else known.labels
    if options.value is not None and options.threshold is None and allowed is not None:
        wrong = labels[~np.isin(labels, allowed)]
        if len(wrong):
            expected = "--threshold, such as 4, to keep values of at least that; or --loss squared for any values"
            check.fail("--value", f"{wrong[0]:g} in column {options.value!r}", expected)


def read_like(
    settings: Settings, path: Path, name: str, flags: ReadOptions | None = None, without: Sequence[str] = ()
) -> Interactions:
    """The pairs of a file like that of a run: with its columns, and its format if both are of a kind; flags win.

    Options named in ``without`` are those of the run that the file need not have.
    """
    given = settings.data.path
    kind = None if flags is None else flags.format
    if given is None and path.exists() and (kind or guess_format(path, name)) not in ("csv", "parquet"):
        without = [*without, "left", "right", "context"]  # names of columns, which this file does not have
    settings = replace(settings, data=replace(settings.data, **dict.fromkeys(without)))
    if given is not None and Path(given).suffixes != path.suffixes:
        settings = replace(settings, data=replace(settings.data, format=None))
    return read_pairs(path, settings.with_flags(flags).data, name=name)


def held_out_of(
    pairs: Interactions, options: DataOptions, seed: int, of_all: bool = False
) -> tuple[Interactions, Interactions | None]:
    """Training and validation pairs: a share of each left entity's pairs (or of all), a file of its own, or none."""
    share = validation_of(options)
    if not isinstance(share, float):
        return pairs, share
    if not of_all:
        return hold_out(pairs, share, check.seed(seed))
    split = splits.random_pairs(pairs, share, seed=seed)
    return split.train, split.test


def validation_of(options: DataOptions) -> float | Interactions | None:
    """What ``--validation`` says: a share, the pairs of a file, or nothing."""
    return None if options.validation is None else share_or_pairs("--validation", options.validation, options)


def share_or_pairs(name: str, text: str, options: DataOptions) -> float | Interactions:
    """What a flag says that takes a share of the pairs, or a file of others."""
    try:
        share = float(text)
    except ValueError:
        return read_pairs(as_path(text), options, name=name)
    if not 0 < share < 1:
        check.fail(name, text, "a share between 0 and 1 (both excluded), or a file")
    return share


def tower_features(
    settings: Settings, pairs: Interactions | Shard, say: Say, group: Group = SINGLE
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``left_features`` and ``right_features`` for :meth:`TwoTower.fit`, and what the join by id found, by side."""
    spread = group if isinstance(pairs, Shard) else SINGLE  # the processes that the left ids are spread over
    arguments: dict[str, Any] = {}
    report: dict[str, Any] = {}
    sides = (("left", pairs.left_ids, spread), ("right", pairs.right_ids, SINGLE))
    for (side, ids, processes), called in zip(sides, pairs.entity_names, strict=True):
        parts: list[Any] = _history(settings) if side == "left" else []
        path = getattr(settings.features, f"{side}_features")
        if path is not None:
            with group.together():
                table = read_table(side, as_path(path), settings)
            report[side] = _report_join(side, called, table, ids, say, processes)
            parts.append(table)
        for flag in () if path is not None else ("id", "column", "encoder"):
            if (value := getattr(settings.features, f"{side}_{flag}")) is not None:
                check.fail(f"--{side}-{flag}", repr(value), f"--{side}-features as well: the table that it is about")
        identity, scale = getattr(settings.features, f"{side}_identity"), settings.features.identity_scale
        if side == "left" and isinstance(pairs, Interactions) and pairs.context:
            if parts or identity:
                check.fail("--context", ", ".join(pairs.context), "it without --history, --left-features and -identity")
            arguments["left_features"] = with_context(pairs, None)
            continue
        if identity is False and not parts:
            check.fail(f"--no-{side}-identity", "no other features", f"--{side}-features to see instead")
        if identity is False:
            say(f"--no-{side}-identity is deprecated: a tower with features sees ids only with --{side}-identity")
        if identity is None:
            identity = not parts or (scale is not None and not isinstance(parts[0], str))
        scale = scale if parts else None
        own = "id" if scale is None else f"id*{check.number('--identity-scale', scale, above=0.0)!r}"
        arguments[f"{side}_features"] = [own, *parts] if identity else parts
    return arguments, report


def _history(settings: Settings) -> list[str]:
    """The history that the left tower sees, in a list; an empty one if it sees none."""
    options = settings.model
    rules = [(name, n) for name in ORDERED if (n := getattr(options, f"history_{name}")) is not None]
    if len(rules) > 1 or (rules and not options.history):
        check.fail(f"--history-{rules[0][0]}", rules[0][1], "--history as well, and one of --history-last and -decay")
    return [":".join(["history", *(f"{name}={count}" for name, count in rules)])] if options.history else []


def read_imputed(given: Any, pairs: Interactions | Shard) -> Any:
    """The imputed labels of a model: as given, or two arrays from files, in the order of the pairs' entities."""
    paths = [as_path(part) for part in given.split(",")] if isinstance(given, str) else []
    if not paths or any(path.suffix not in (".npz", ".npy") for path in paths):
        return given
    if [path.suffix for path in paths] not in ([".npz"], [".npy", ".npy"]):
        check.fail("imputed", given, "FILE.npz, or two files LEFT.npy,RIGHT.npy")
    if not isinstance(pairs, Interactions):
        check.fail("imputed", given, "a number or fitted where several processes share a folder of parts")
    arrays: dict[str, Any] = {}
    for side, path in zip(("left", "right"), paths, strict=False):
        try:
            with existing("imputed", path).open("rb") as file:  # without pickle: no code runs
                found = np.load(file, allow_pickle=False)
                arrays |= {key: found[key] for key in found} if path.suffix == ".npz" else {side: found}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"imputed: {path} cannot be read as arrays of numbers ({error})") from error
    if not {"left", "right"} <= set(arrays) <= {"left", "right", "left_ids", "right_ids"}:
        check.fail("imputed", f"{given} with {', '.join(arrays)}", "left and right, and left_ids and right_ids if any")
    factors = []
    for side, ids in (("left", pairs.left_ids), ("right", pairs.right_ids)):
        factor = check.as_float_array(f"imputed: {side} of {given}", arrays[side])
        if (known := arrays.get(f"{side}_ids")) is not None:
            named = as_ids(f"imputed: {side}_ids of {given}", known.tolist())
            if len(named) != len(factor):
                check.fail(f"imputed: {side}_ids of {given}", f"{len(named):,} ids", f"{len(factor):,}, one a row")
            rows = join(ids, index_of(named))
            if (rows < 0).any():
                some = f"{int((rows < 0).sum()):,} of {len(ids):,} {side} entities, such as {ids[np.argmin(rows)]!r}"
                check.fail("imputed", f"{given} without {some}", "a row for each entity of the pairs")
            factor = factor[rows]
        factors.append(factor)
    as_imputed((factors[0], factors[1]), pairs.shape)
    return tuple(factors)


def sizes_line(pairs: Interactions | Shard) -> str:
    """The numbers of pairs and of entities, which are called as in the data."""
    (m, n), (left, right) = pairs.shape, pairs.entity_names
    return f"{len(pairs):,} pairs of {m:,} {left} and {n:,} {right} entities"


def seen_line(features: Mapping[str, list[str | FeatureTable]], names: tuple[str, str]) -> str:
    """One line about what each tower sees, and what to compare it with where there are features."""
    sides, described = [], False
    for side, name in zip(("left", "right"), names, strict=True):
        parts = features[f"{side}_features"]
        tables = [part for part in parts if not isinstance(part, str)]
        named = [{"id": "ids"}.get(part.partition("*")[0], part) for part in parts if isinstance(part, str)]
        seen = " and ".join([*named, *(["features"] if tables else [])])
        sides.append(f"the {name} tower sees {seen}{' without ids' if tables and 'ids' not in named else ''}")
        described |= bool(tables)
    advice = "; lists of known entities may be better with ids only, new entities need features" if described else ""
    return "; ".join(sides) + advice


def read_table(side: str, path: Path, settings: Settings) -> FeatureTable:
    """A file of features: the kinds of its columns as the options say, the others told from their content."""
    options = settings.features
    frame = read_frame(f"{side}_features", path)
    column = id_column(side, frame, getattr(options, f"{side}_id"), getattr(settings.data, side))
    kinds, encoders = (
        {
            name: str(value)
            for text in getattr(options, f"{side}_{flag}") or []
            for name, value in [parse_option(text, f"--{side}-{flag}", f"COLUMN={expected}")]
        }
        for flag, expected in (("column", "KIND"), ("encoder", "MODEL"))
    )
    further: dict[str, Any] = {
        "separator": options.list_separator,
        "hash_bits": options.hash_bits,
        "ngrams": options.ngrams,
        "encoders": encoders or None,
    }
    return FeatureTable.inferred(frame, column, kinds, **{k: v for k, v in further.items() if v is not None})


def read_frame(name: str, path: Path) -> DataFrame:
    """A table with all columns: CSV as text, Parquet, or ``users.dat`` and ``movies.dat`` of MovieLens."""
    found = existing(name, path)
    if frames.suffix_of(found) == ".dat":
        return readers.movielens_table(found, found.name.split(".")[0])
    return frames.read_frame(name, found)


def id_column(side: str, frame: DataFrame, given: str | None, pairs_column: str | None) -> str:
    """The column of ids: the one given, else one called like that of the pairs, else ``id``."""
    present = frame.columns
    if given is not None:
        return frames.pick(f"--{side}-id", given, present)
    named = [name for name in (pairs_column, "id", *_MOVIELENS[side]) if name in present]
    if not named:
        check.fail(f"--{side}-id", "nothing", f"the column of ids of the {side} table: one of {', '.join(present)}")
    return str(named[0])


def new_rows(
    model: TwoTower, path: Path, chosen: list[str] | None, say: Say, side: str = "left"
) -> tuple[DataFrame, list[str]]:
    """The rows of a table of new entities, all or those of some ids, and their ids (or numbers, without ids)."""
    table, frame = _table_of(model, path, side), read_frame(f"{side}_features", path)
    if table.id not in frame.columns:
        if chosen is not None:
            check.fail(f"--{side}", ", ".join(chosen), f"a column {table.id!r} in {path} to find them by")
        return frame, [f"row {number + 1}" for number in range(len(frame))]
    found = id_series("id", frame[table.id])
    ids = found.cast(frames.polars().String).fill_null(NO_ID).to_list()
    if chosen is not None:
        places = {name: row for row, name in reversed(list(enumerate(ids)))}  # of an id in several rows the first
        unknown = [name for name in chosen if name not in places]
        if unknown:
            check.fail(f"--{side}", unknown[0], f"ids of column {table.id!r} of {path}")
        frame = frame[[places[name] for name in chosen]]
        ids = chosen
    this = model.left_ if side == "left" else model.right_
    known = 0 if this.ids is None else int((join(as_objects(ids), index_of(this.ids)) >= 0).sum())
    if known:
        say(f"{known:,} of {len(ids):,} ids were in the training data; here they are described only by their features")
    return frame, ids


def rows_to_add(model: TwoTower, path: str, settings: Settings, side: str) -> DataFrame:
    """A table of new and changed entities of a model that stores the others, with the model's column of ids."""
    frame = read_frame(f"{side}_features", as_path(path))
    column = id_column(side, frame, getattr(settings.features, f"{side}_id"), getattr(settings.data, side))
    return frame.rename({column: _table_of(model, as_path(path), side).id})


def rows_with_ids(model: TwoTower, path: Path, side: str, say: Say, ids: Ids | None = None) -> DataFrame:
    """A table of entities with a column of ids; says how many of ``ids`` it lacks, or how many are new to the model."""
    table, frame = _table_of(model, path, side), read_frame(f"{side}_features", path)
    keys = id_series("id", frame[frames.pick(f"id column of {path}", table.id, frame.columns)]).drop_nulls()
    this = model.fitted_.side(side)
    if ids is not None:
        without = int((join(ids, {key: row for row, key in enumerate(keys.to_list())}) < 0).sum())
        if without:
            say(f"{without:,} of {len(ids):,} {this.called} entities have no features")
    else:
        known = np.arange(len(this)) if this.ids is None else this.ids
        new = int((join(keys.to_numpy(), index_of(known)) < 0).sum()) if len(keys) else 0
        say(f"{new:,} of {len(keys):,} {this.called} entities of {path.name} are new")
    return frame


def _table_of(model: TwoTower, path: Path, side: str) -> FeatureTable:
    inputs = (model.left_ if side == "left" else model.right_).inputs
    table = next((part.table for part in inputs.parts if part.table is not None), None)
    if table is None:
        seen = "history: use --history" if inputs.has_history else inputs.kind
        check.fail(f"--{side}-features", path, f"a model fitted with --{side}-features; this one sees {seen}")
    return table


def _report_join(
    side: str, called: str, table: FeatureTable, ids: Ids, say: Say, group: Group
) -> dict[str, Any]:  # fmt: skip
    table.match(ids)
    found = dict(table.report) | {"columns": table.kinds, "features": len(table.feature_names)}
    local, unused = found["ids_without_features"], found["features_without_ids"]
    without, count = (int(total) for total in group.totals(local, len(ids)))
    unused += (len(ids) - local) - (count - without)  # what other processes' ids use
    found |= {"ids_without_features": without, "features_without_ids": unused}
    if without == count:
        given = f"{found['rows']:,} rows, none of them with the id of a {called} entity"
        example = str(ids[0]) if len(ids) else ""
        check.fail(f"{side}_features", given, f"ids such as {example!r} in column {table.id!r}")
    kinds = ", ".join(f"{name} ({kind})" for name, kind in found["columns"].items())
    skipped = f"; left out: {', '.join(found['skipped'])}" if found["skipped"] else ""
    say(f"{called} features: {kinds}{skipped}")
    say(f"{without:,} of {count:,} {called} entities have no features; {unused:,} rows of features have no pairs")
    return found


def for_writing(out: Path, kind: str | None = None) -> Path:
    """The folder that a command is to write, there or not; one that cannot be is refused before anything is read.

    A folder that holds a run of another ``kind`` is refused, too.
    """
    if is_remote(out):
        from gramtower._util.remote import check_writable

        check_writable(out)
    else:
        there = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
        if not there.is_dir():
            check.fail("out", out if there == out.absolute() else f"{out}, where {there} is a file", "a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            check.fail("out", f"{out}, with no permission to write in {there}", "a folder that can be written")
    for other, file in {"fit": HISTORY, "comparison": COMPARISON}.items():
        if kind not in (None, other) and (out / file).exists():
            check.fail("out", f"{out}, which holds a {other}", f"a folder of its own for a {kind}")
    return out


@contextmanager
def held(out: Path, group: Group = SINGLE) -> Iterator[None]:
    """The folder that a command writes, made if need be and locked.

    If the command fails before it wrote anything, folders that were made for it go again.
    """
    new = [] if is_remote(out) else [one for one in (out, *out.parents) if not one.exists()]
    with group.together():
        out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out, group, "out"):
            yield
    except BaseException:
        with suppress(OSError):  # something is in it
            for one in new:
                one.rmdir()
        raise


def is_model(path: Path) -> bool:
    """Whether a path is a run's folder or a model file."""
    return (path / MODEL).exists() or (path / CONFIG).exists() or path.suffix == ".gramtower"


def model_file(run: Path) -> Path:
    """The model file of a run (a folder, or the file itself)."""
    path = run / MODEL if run.is_dir() else run
    if not path.exists():
        hint = "; its fit has not finished: run the same fit command to continue" if (run / CHECKPOINT).exists() else ""
        raise ValueError(f"run: got {run}, expected a folder that holds {MODEL}, or a model file{hint}")
    return path


def settings_of(run: Path) -> Settings:
    """The settings that the model of a run was made with, as far as its folder says."""
    config = (run if run.is_dir() else run.parent) / CONFIG
    return read_config(config if config.exists() else None)


def open_model(run: Path) -> tuple[TwoTower, Settings]:
    """Load the model of a run (a folder or a model file) and the settings it was made with.

    A model file without the folder of a run says by its names how the columns of ids are called.
    """
    model, settings = load(model_file(run)), settings_of(run)
    if settings.data.path is None:
        left, right = model.fitted_.list_columns
        known = model.fitted_.combinations
        context = None if known is None else ",".join(known.columns[1:])
        settings = replace(settings, data=replace(settings.data, left=left, right=right, context=context))
    return model, settings

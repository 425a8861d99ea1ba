"""The options of the commands: each class is a table of the config file, each field a flag and a key of it.

None means "not given", so that a flag can win over the file and the file over the library's default. The flags of
``[model]`` and ``[train]`` are the arguments of :class:`gramtower.TwoTower`, whose defaults the help shows.

The config file has the TOML tables ``[data]``, ``[features]``, ``[model]`` and ``[train]``. A flag overrides the file.
An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from cyclopts import Group, Parameter

from gramtower._util import checks as check
from gramtower._util.checks import parse_hidden
from gramtower._util.toml import toml
from gramtower.data.sources import read_toml, reading
from gramtower.model.settings import ModelSettings

FORMATS = ("csv", "parquet", "movielens", "netflix", "mediawiki", "citeulike", "musae", "wikispeedia", "lists", "edges")
_DEFAULTS = ModelSettings().get_params()


def _flag(name: str, text: str, default: str | None = None) -> Parameter:
    """A flag for an argument of the estimator, with its default in the help."""
    value: Any = _DEFAULTS[name]
    if value is None and default is None:
        default = "none" if name == "time_limit" else "by the data"
    elif default is None:
        default = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return Parameter(help=f"{text} [default: {default}]")


@Parameter(name="*", group=Group("Data", sort_key=1))
@dataclass
class DataOptions:
    """What is read, and how. The table ``[data]``."""

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
    "Column of times, used by split and info."
    format: Annotated[
        str | None,
        Parameter(
            help="csv, parquet, movielens, netflix, mediawiki, citeulike, musae, wikispeedia, lists (user item ...), "
            "edges (user item, without a header); without it, told from DATA."
        ),
    ] = None
    separator: str | None = None
    "Between fields of csv, edges and lists, such as ; or tab; without it a comma (.csv), a tab (.tsv), or any spaces."
    same_entities: bool | None = None
    "Both sides are one set, so that none is recommended to itself [default: told from ids and pairs]."
    validation: str | None = None
    "Pairs to stop early on: a share of each left entity's, such as 0.1, drawn with --seed, or a file like DATA."


@Parameter(name="*", group=Group("Features", sort_key=2))
@dataclass
class FeatureOptions:
    """What the towers see instead of ids, or next to them. The table ``[features]``."""

    left_features: str | None = None
    "Table of features of left entities, joined by id: .csv, .tsv, .parquet."
    right_features: str | None = None
    "The same for right entities."
    left_id: str | None = None
    "Its column of ids [default: called as --left, or id]."
    right_id: str | None = None
    "The same for --right-features."
    left_column: Annotated[
        list[str] | None,
        Parameter(
            help="Kind of a column of --left-features, NAME=KIND: numeric, categorical, list, text, vector or skip; "
            "may be repeated. Kinds of other columns are told from their content.",
            negative=(),
        ),
    ] = None
    right_column: Annotated[
        list[str] | None, Parameter(help="The same for --right-features; may be repeated.", negative=())
    ] = None
    list_separator: str | None = None
    "Between the elements of list columns [default: |]."
    hash_bits: int | None = None
    "Text columns become 2^bits features each [default: 15]."
    ngrams: str | None = None
    "Of text columns: word, or char [default: word]."
    left_identity: bool | None = None
    "With --left-features or --history: also a vector of its own for each left entity [default: no]."
    right_identity: bool | None = None
    "With --right-features: also a vector of its own for each right entity [default: no]."
    identity_scale: float | None = None
    "Add such vectors to features with this scale; below 1, such as 0.1, new entities rank higher among known ones."
    candidates: str | None = None
    "all: a fit also keeps entities of its tables that have no pairs, and recommends them [default: trained]."


@Parameter(name="*", group=Group("Model", sort_key=3))
@dataclass
class ModelOptions:
    """What is minimised, over which towers. The table ``[model]``."""

    dim: Annotated[int | None, _flag("dim", "Size of the embeddings.")] = None
    hidden: Annotated[
        str | None,
        _flag("hidden", "Widths of hidden layers, as in 256,256, or of left/right; none for linear factors."),
    ] = None
    activation: Annotated[
        str | None, _flag("activation", "Of the hidden layers, such as relu, gelu or leaky_relu(0.25).")
    ] = None
    normalize: Annotated[bool | None, _flag("normalize", "Bring embeddings of a side to one length.")] = None
    refine: Annotated[bool | None, _flag("refine", "Let known entities' own pairs move what features say.")] = None
    loss: Annotated[str | None, _flag("loss", "On observed pairs: logistic, squared or squared_hinge.")] = None
    omega: Annotated[float | None, _flag("omega", "Weight of each unobserved pair.")] = None
    l2: Annotated[float | None, _flag("l2", "Penalty on all parameters.")] = None
    embedding_l2: Annotated[float | None, _flag("embedding_l2", "Penalty on embeddings, by frequency.")] = None
    frequency_power: Annotated[float | None, _flag("frequency_power", "How it grows with frequency.")] = None
    imputed: Annotated[float | None, _flag("imputed", "Label of unobserved pairs.")] = None
    left_weights: Annotated[
        str | None, _flag("left_weights", "Weights of unobserved pairs by left entity, such as degree^0.5.", "degree^0")
    ] = None
    right_weights: Annotated[str | None, _flag("right_weights", "The same by right entity; degree^0 for none.")] = None
    scale_features: Annotated[bool | None, _flag("scale_features", "Bring features to a common scale.", "yes")] = None
    history: Annotated[
        bool | None,
        Parameter(help="Describe each left entity by its right ones, so that new ones can be embedded.", negative=()),
    ] = None


@Parameter(name="*", group=Group("Training", sort_key=4))
@dataclass
class TrainOptions:
    """How it is minimised. The table ``[train]``."""

    optimizer: Annotated[
        str | None,
        _flag("optimizer", "newton-kron, newton, gd, gd-diag, lbfgs, sogram(-diag), sampling(-diag)."),
    ] = None
    option: Annotated[
        list[str] | None,
        Parameter(help="A constant of the method, NAME=VALUE; may be repeated.", negative=()),
    ] = None
    max_iterations: Annotated[int | None, _flag("max_iterations", "Stop after so many iterations.")] = None
    time_limit: Annotated[float | None, _flag("time_limit", "Stop after so many seconds of training.")] = None
    patience: Annotated[
        int | None, _flag("patience", "With --validation: stop after so many iterations without a better metric.")
    ] = None
    refit: Annotated[
        bool | None,
        Parameter(help="With --validation: then fit all pairs for as many iterations as were best.", negative=()),
    ] = None
    validation_side: Annotated[
        str | None,
        Parameter(
            help="left or right: --validation, a share, is of that side's entities, held out with all their pairs, to "
            "go by entities that were never seen. The side needs a table of features."
        ),
    ] = None
    metric: Annotated[
        str | None,
        _flag("metric", "Metric of held-out data, such as recall@20."),
    ] = None
    select: Annotated[
        str | None,
        Parameter(
            help="Choose penalties on held-out data first: auto, off, or the part to hold out: pairs, left or right "
            "entities [default: auto]."
        ),
    ] = None
    device: Annotated[str | None, _flag("device", "auto, cpu or cuda.")] = None
    precision: Annotated[str | None, _flag("precision", "Of matrix products on a GPU: tf32 or float32.")] = None
    pair_precision: Annotated[
        str | None, _flag("pair_precision", "Of what is gathered for each pair on a GPU: float32 or bfloat16.")
    ] = None
    seed: Annotated[int | None, _flag("seed", "For initial weights, splits and methods that draw.")] = None
    memory_budget: Annotated[
        str | None, _flag("memory_budget", "Memory of an evaluation, such as 500MB or 2GiB.", "by the machine")
    ] = None


@Parameter(name="*", group=Group("Output and machine", sort_key=5))
@dataclass
class Common:
    """What every command understands."""

    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    "Print one JSON object on standard output, and nothing else there."
    quiet: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    "No progress on standard error."
    threads: int | None = None
    "Threads to use; set it when several runs share the cores."
    debug: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    "Show where an error came from."


def refuse_refit(train: TrainOptions | None) -> None:
    """Refuse ``--refit`` in commands other than fit."""
    if train is not None and train.refit:
        check.fail("--refit", True, "nothing: only fit takes it")


def refuse_validation_side(train: TrainOptions | None) -> None:
    """Refuse ``--validation-side`` in commands other than fit and tune."""
    if train is not None and train.validation_side is not None:
        check.fail("--validation-side", train.validation_side, "nothing: only fit and tune take it")


def refuse_candidates(features: FeatureOptions | None) -> None:
    """Refuse ``--candidates`` in commands that make no model with lists of its own."""
    if features is not None and features.candidates is not None:
        check.fail("--candidates", features.candidates, "nothing: fit and tune take it")


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

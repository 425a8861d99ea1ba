"""The options of the commands: each class is a table of the config file, each field a flag and a key of it.

None means "not given", so that a flag can win over the file and the file over the library's default. The flags of
``[model]`` and ``[train]`` derive from the arguments of :class:`gramtower.TwoTower` (model/settings.py). A command
takes the class that has its flags and no others.

The config file has the TOML tables ``[data]``, ``[features]``, ``[model]`` and ``[train]``. A flag overrides the file.
An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import inspect
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from gramtower._util import checks as check
from gramtower._util.checks import parse_hidden
from gramtower._util.files import as_path, toml
from gramtower.cli.formats import DataOptions, ReadOptions
from gramtower.cli.output import Table, note, print_facts, print_json, print_table, silent
from gramtower.data.sources import read_toml, reading
from gramtower.model.settings import SETTINGS, ModelSettings

_FEATURES, _MODEL, _TRAINING, _OUTPUT = (
    Parameter(name="*", group=Group(name, sort_key=place))
    for place, name in enumerate(("Features", "Model", "Training", "Output and machine"), start=2)
)
Texts = Annotated[list[str] | None, Parameter(negative=())]  # a flag that may be repeated
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
Known = Mapping[str, Mapping[str, object]]  # the type of each key that a table may have, by table
_Kind = TypeVar("_Kind", bound=type)


def _from_settings(table: str) -> Callable[[_Kind], _Kind]:
    """Give a class of options a field for every setting of a model that belongs to one table of the config file."""
    hints = get_type_hints(ModelSettings)

    def extend(kind: _Kind) -> _Kind:
        own = inspect.get_annotations(kind)
        derived = {}
        for name, setting in SETTINGS.items():
            if setting.table == table:
                derived[setting.flag or name] = Annotated[_flag_type(hints[name]) | None, _flag(name)]
                setattr(kind, setting.flag or name, None)
        kind.__annotations__ = derived | own
        return kind

    return extend


def _flag_type(hint: object) -> Any:
    """The type of the flag for a setting: text where the setting takes it, names and values for a mapping."""
    kinds = {get_origin(kind) or kind for kind in (get_args(hint) or (hint,))}
    if dict in kinds:
        return list[str]
    return next((kind for kind in (str, bool, int, float) if kind in kinds), str)


def _flag(name: str) -> Parameter:
    """The flag for a setting, with its default in the help."""
    setting = SETTINGS[name]
    if setting.flag is not None:  # may be repeated, and has no default
        return Parameter(help=setting.flag_help, negative=())
    return Parameter(help=f"{setting.flag_help} [default: {setting.shown or getattr(ModelSettings, name)}]")


class _Options:
    """Options by name; those that are derived from settings are unknown to type checkers."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


@_FEATURES
@dataclass
class FeatureOptions:
    """What the towers see instead of ids, or next to them: the table ``[features]`` without ``candidates``."""

    left_features: str | None = None
    "Table of features of left entities, joined by id: .csv, .tsv, .parquet."
    right_features: str | None = None
    "Table of features of right entities."
    left_id: str | None = None
    "Id column of --left-features [default: the name given to --left, else id]."
    right_id: str | None = None
    "Id column of --right-features [default: the name given to --right, else id]."
    left_column: Texts = None
    """Kind of a column of --left-features, NAME=KIND: numeric, categorical, list, text, vector or skip; may be
    repeated. The kinds of other columns are inferred from their content."""
    right_column: Texts = None
    "Kind of a column of --right-features, NAME=KIND; may be repeated."
    left_encoder: Texts = None
    """Encoder of a column of text of --left-features, NAME=MODEL: the folder of a model2vec or sentence-transformers
    model, or its name on the Hugging Face Hub; may be repeated. Vectors are kept in ~/.cache/gramtower."""
    right_encoder: Texts = None
    "Encoder of a column of text of --right-features, NAME=MODEL; may be repeated."
    list_separator: str | None = None
    "Separator of the elements of list columns [default: |]."
    hash_bits: int | None = None
    "Text columns become 2^bits features each [default: 15]."
    ngrams: str | None = None
    "How text columns are cut: word or char [default: word]."
    left_identity: bool | None = None
    "With --left-features or --history: also learn a vector for each left entity [default: no]."
    right_identity: bool | None = None
    "With --right-features: also learn a vector for each right entity [default: no]."
    identity_scale: float | None = None
    "Scale of these vectors next to features; below 1, such as 0.1, new entities rank higher among known ones."


@_FEATURES
@dataclass
class FitFeatures(FeatureOptions):
    """What the towers see, and which entities a model keeps. The table ``[features]``."""

    candidates: str | None = None
    "all: also keep and recommend entities of the tables that have no pairs [default: trained]."


@_MODEL
@dataclass
@_from_settings("model")
class ModelOptions(_Options):
    """What is minimised, over which towers. The table ``[model]``."""

    history: Annotated[bool | None, Parameter(negative=())] = None
    "Describe each left entity by its right entities, so that new left entities can be embedded."
    history_last: int | None = None
    "With --history and --time: only by the last N right entities."
    history_decay: int | None = None
    "With --history and --time: by values that halve with every N newer right entities."


@_TRAINING
@dataclass
@_from_settings("train")
class TrainOptions(_Options):
    """How it is minimised: the table ``[train]`` without ``validation_side`` and ``refit``."""


@_TRAINING
@dataclass
class TuneTraining(TrainOptions):
    """How trials are trained: the table ``[train]`` without ``refit``."""

    validation_side: str | None = None
    """left or right: hold out the share --validation of that side's entities with all their pairs, to validate on
    unseen entities. The side needs a table of features."""


@_TRAINING
@dataclass
class FitTraining(TuneTraining):
    """How a model is fitted. The table ``[train]``."""

    refit: Annotated[bool | None, Parameter(negative=())] = None
    "With --validation: then fit all pairs for the number of iterations that was best."


@_OUTPUT
@dataclass
class Common:
    """Options of every command."""

    json: Switch = False
    "Print only one JSON object on standard output."
    quiet: Switch = False
    "Do not report progress on standard error."
    threads: int | None = None
    "Number of threads; set it when several runs share the cores."
    debug: Switch = False
    "Show the traceback of an error."

    @property
    def note(self) -> Callable[[str], None]:
        """Prints a line about progress, unless --quiet was given."""
        return silent if self.quiet else note

    def answer(self, content: Mapping[str, object], *shown: Mapping[str, object] | Table | str) -> int:
        """Print JSON for programs; for people facts (by default the same), tables and lines. Return the exit code 0."""
        if self.json:
            print_json(content)
            return 0
        for part in shown or (content,):
            if isinstance(part, str):
                print(part)
            elif isinstance(part, Table):
                print_table(*part)
            else:
                print_facts(part)
        return 0


TABLES: dict[str, type] = {"data": DataOptions, "features": FitFeatures, "model": ModelOptions, "train": FitTraining}


@dataclass
class Settings:
    """The options that are in force."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: FitTraining = field(default_factory=FitTraining)
    features: FitFeatures = field(default_factory=FitFeatures)

    def source(self, path: Path | None, or_else: str = "") -> Path:
        """The file or folder of pairs: an argument, which is kept, or that of the config file."""
        if path is not None:
            self.data.path = str(path)
        if self.data.path is None:
            expected = f"a file of pairs, as an argument or as path below [data] of the config{or_else}"
            check.fail("DATA", "nothing", expected)
        return as_path(self.data.path)

    def estimator_arguments(self) -> dict[str, Any]:
        """The constructor arguments of ``gramtower.TwoTower`` that were given."""
        given = {}
        for name, setting in SETTINGS.items():
            value = None if setting.table is None else getattr(getattr(self, setting.table), setting.flag or name)
            if value is not None:
                given[name] = _FROM_TEXT[name](value) if name in _FROM_TEXT else value
        return given

    def with_flags(self, *tables: ReadOptions | FeatureOptions | ModelOptions | TrainOptions | None) -> Settings:
        """Override these settings by the flags that were given, in tables of any order."""
        found = {}
        for flags in tables:
            if flags is not None:
                name = next(name for name, kind in TABLES.items() if issubclass(kind, type(flags)))
                given = {one.name: getattr(flags, one.name) for one in fields(flags)}
                found[name] = replace(getattr(self, name), **{k: v for k, v in given.items() if v is not None})
        return replace(self, **found)


def read_config(path: Path | None) -> Settings:
    """Settings from a TOML file, if there is one."""
    if path is None:
        return Settings()
    known = {name: get_type_hints(table) for name, table in TABLES.items()}
    found = read_tables(path, read_toml("config", path), known)
    return Settings(**{name: TABLES[name](**values) for name, values in found.items()})


def read_tables(path: Path, content: dict[str, object], known: Known) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file as the flags would have given their values."""
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
            tables[name] = {}
            for key, value in table.items():
                plain = key.replace("-", "_")
                if plain not in known[name]:
                    home, near = _home(plain, known), nearest(plain, known[name]).replace("_", "-")
                    expected = repr(near) if home is None else f"{key!r} below [{home}]"
                    check.fail("config", f"unknown key {key!r} in [{name}] of {path}", expected)
                tables[name][plain] = _as_flag(f"[{name}] {key}", value, known[name][plain])
        return tables


def _home(key: str, known: Known) -> str | None:
    """The table that has a key."""
    return next((name for name, keys in known.items() if key in keys), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like a wrong one."""
    return check.near(name, list(known), 1, 0.0)[0]


def parse_option(text: str, flag: str = "option", expected: str = "NAME=VALUE") -> tuple[str, Any]:
    """Name and value of ``NAME=VALUE``; the value as TOML where it is that, otherwise as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        check.fail(flag, repr(text), expected)
    try:
        return name.strip(), tomllib.loads(f"x = {value}")["x"]
    except (ValueError, RecursionError):
        return name.strip(), value


def _as_flag(name: str, value: object, hint: object) -> object:
    """A value of the file as the flag would have given it."""
    kind = next(k for k in get_args(hint) if k is not types.NoneType)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value == "auto" and kind in (int, float, bool):
        return None
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


def number_or_text(value: str) -> float | str:
    """A number as such, everything else as text."""
    try:
        return float(value)
    except ValueError:
        return value


#: From the text of a flag to the value of the setting, where that is not the value itself.
_FROM_TEXT: dict[str, Callable[[Any], Any]] = {
    "imputed": number_or_text,
    "hidden": lambda text: text if text == "auto" else parse_hidden(text),
    "optimizer_options": lambda texts: dict(map(parse_option, texts)),
    "regularizer": lambda texts: dict(map(parse_option, texts)),
    "select": lambda text: {"auto": True, "off": False}.get(text, text),
}

"""Feature tables: the columns of entities, joined by id and encoded as one sparse matrix.

The encoding is kept, so that rows of new entities are encoded in the same way, and can be saved as JSON.
data/encoders.py describes the encoding of each kind of column. If kinds are not given, they are inferred:

    list         lists, or text with the separator in at least a tenth of the cells and recurring elements
    numeric      numbers, or text that is a number in every cell; numbers with leading zeros, such as "02139", are codes
    categorical  truth values; text whose values recur (at most half as many values as cells) or are single words
    text         other text
    vector       lists of floating-point numbers, all of one length of at least two
    skip         dates, columns without a value, and anything else

Cost: O(cells).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import build
from gramtower.data import frames
from gramtower.data.encoders import (
    MOST_BITS,
    Categorical,
    Elements,
    Encoded,
    Encoder,
    Numeric,
    Text,
    Vector,
    from_plain,
    to_plain,
)
from gramtower.data.frames import Choice, TableLike
from gramtower.data.ids import Ids, IdsLike, Key, id_array, id_series, index_of, join
from gramtower.data.interactions import Interactions, union
from gramtower.data.pairs import MatrixLike
from gramtower.data.sources import PathLike, reading
from gramtower.data.text import Encoder as TextEncoder
from gramtower.data.text import Function

if TYPE_CHECKING:
    from polars import DataFrame, Series


_FORMAT, _VERSION = "gramtower.features", 1
#: Kind of a column → argument of FeatureTable that chooses such columns.
_ARGUMENTS = {"numeric": "numeric", "categorical": "categorical", "list": "lists", "text": "text", "vector": "vectors"}
_DENSE = 100  # numeric columns side by side


@dataclass
class _Form:
    format: str
    version: int
    id: str
    columns: list[dict[str, Any]]


class FeatureTable:
    """The features of the entities of one side.

    Args:
        frame: a polars, pandas or pyarrow table, a mapping of columns, or the path of a CSV or Parquet file.
        id: column of ids: whole numbers, or text (always for a CSV file). Rows without an id are dropped and counted;
            repeated ids are an error. A whole number and its decimal text are the same id.
        numeric: columns of numbers.
        categorical: columns with one value of a set.
        lists: columns of lists, or of text with ``separator`` between elements.
        text: columns of free text.
        vectors: columns of lists of numbers of one length, such as pretrained embeddings.
        separator: text between the elements of list columns.
        hash_bits: each text column becomes 2^hash_bits columns.
        ngrams: ``"word"`` (words and pairs of words) or ``"char"`` (3 to 5 characters of each word).
        strict: whether :meth:`encode` refuses ids without features and features without ids.
        encoders: columns of text that go through an encoder each, by name: a :class:`~gramtower.data.text.Encoder`, or
            its first argument. Vectors are treated like those of ``vectors``. An empty text is a missing vector.

    Attributes:
        report: counts of the table (``rows``, ``rows_without_id``, ``missing`` by column) and of the last
            :meth:`encode` (``ids_without_features``, ``features_without_ids``) or :meth:`encode_frame`
            (``unseen_values``).
    """

    def __init__(
        self,
        frame: TableLike | PathLike,
        id: str = "user",
        numeric: Sequence[str] = (),
        categorical: Sequence[str] = (),
        lists: Sequence[str] = (),
        text: Sequence[str] = (),
        separator: str = "|",
        hash_bits: int = 15,
        ngrams: str = "word",
        strict: bool = False,
        vectors: Sequence[str] = (),
        encoders: Mapping[str, TextEncoder | PathLike | Function] | None = None,
    ) -> None:
        if encoders is not None and not isinstance(encoders, Mapping):
            check.fail("encoders", type(encoders).__name__, "a mapping of columns to encoders")
        given = dict(encoders or {})
        through = {name: one if isinstance(one, TextEncoder) else TextEncoder(one) for name, one in given.items()}
        kinds = {"numeric": numeric, "categorical": categorical, "lists": lists, "text": text, "vectors": vectors}
        kinds |= {"encoders": list(through)}
        for name, chosen in kinds.items():
            if isinstance(chosen, str):
                check.fail(name, repr(chosen), f"a sequence of column names, such as ({chosen!r},)")
        if not any(kinds.values()):
            names = ", ".join(f"{name}=" for name in kinds)
            expected = f"at least one of {names}, or FeatureTable.inferred(...)"
            check.fail("columns", "none", expected)
        if not isinstance(separator, str) or not separator:
            check.fail("separator", repr(separator), "text between the elements of a list")
        if check.count("hash_bits", hash_bits) > MOST_BITS:
            check.fail("hash_bits", hash_bits, f"at most {MOST_BITS}")
        check.choice("ngrams", ngrams, ("word", "char"))
        self.id, self.strict = id, strict
        self._source: TableLike | PathLike | None = frame
        choices = [(name, column) for name, chosen in kinds.items() for column in chosen]
        fits: dict[str, Callable[[Series], Encoder]] = {
            "numeric": Numeric.fit,
            "categorical": Categorical.fit,
            "lists": lambda column: Elements.fit(column, separator),
            "text": lambda column: Text(column.name, hash_bits, ngrams),
            "vectors": Vector.fit,
            "encoders": lambda column: Encoded.fit_to(column, through[column.name]),
        }
        with _named(frame):
            texts = [("id", id), *choices[len(numeric) :]]
            found = frames.read_columns("frame", frame, texts, choices[: len(numeric)])
            ids, columns = id_series("id", found[0]), found[len(texts) :] + found[1 : len(texts)]
            self.report: dict[str, Any] = {"rows": len(ids), "rows_without_id": int(ids.null_count())}
            present = ids.is_not_null()
            named = ids.filter(present)
            if named.n_unique() < len(named):
                twice = named.filter(named.is_duplicated())
                check.fail("id", f"{twice[0]!r} in {int((named == twice[0]).sum())} rows", "each id in one row")
            kept = [column.filter(present) for column in columns]
            for place, (kind, column) in enumerate(choices):
                kept[place] = through[column].vectors(kept[place]) if kind == "encoders" else kept[place]
            self.encoders = [fits[kind](column) for (kind, _), column in zip(choices, kept, strict=True)]
            self.report["missing"] = {column.name: int(column.null_count()) for column in kept if column.null_count()}
            self._row: dict[Key, int] | None = index_of(np.array(named.to_list(), dtype=object))
            self._matrix = self._encoded(kept)[0]

    @classmethod
    def inferred(
        cls,
        frame: TableLike | PathLike,
        id: str = "user",
        kinds: Mapping[str, str] | None = None,
        separator: str = "|",
        encoders: Mapping[str, TextEncoder | PathLike | Function] | None = None,
        **options: Any,
    ) -> FeatureTable:
        """Make a table and infer the kinds of its columns from their content.

        Args:
            frame: see the class.
            id: column of ids.
            kinds: kinds of some columns ("numeric", "categorical", "list", "text", "vector" or "skip"), which are not
                inferred.
            separator: text between the elements of list columns.
            encoders: columns that go through an encoder, see the class; they are not inferred.
            options: ``hash_bits``, ``ngrams``, ``strict``.
        """
        with _named(frame):
            source = frames.read_frame("frame", frame)
            frames.pick("id", id, source.columns)
            for name in encoders or {}:
                frames.pick("encoders", name, source.columns)
            found = infer_kinds(source, id, {**dict.fromkeys(encoders or {}, "skip"), **(kinds or {})}, separator)
            found = {name: kind for name, kind in found.items() if kind != "skip" or name not in (encoders or {})}
            chosen: dict[str, Any] = {
                argument: [name for name, one in found.items() if one == kind] for kind, argument in _ARGUMENTS.items()
            }
            if not encoders and not set(found.values()) - {"skip"}:
                check.fail("columns", ", ".join(found) or "none", "at least one that can be encoded; name it in kinds")
            table = cls(source, id, separator=separator, encoders=encoders, **chosen, **options)
            table._source = frame
            table.report["skipped"] = [name for name, kind in found.items() if kind == "skip"]
            return table

    def read_alike(self, frame: TableLike | PathLike, id: str | None = None) -> FeatureTable:
        """Make a table of other rows with the columns, kinds and options of this one; values are found again."""
        chosen: dict[str, Any] = {}
        for encoder in self.encoders:
            column = frames.Needed(encoder.column)
            if isinstance(encoder, Encoded):
                chosen.setdefault("encoders", {})[column] = encoder.compared()
                continue
            chosen.setdefault(_ARGUMENTS[encoder.kind], []).append(column)
            if isinstance(encoder, Elements):
                chosen["separator"] = encoder.separator
            if isinstance(encoder, Text):
                chosen |= {"hash_bits": encoder.bits, "ngrams": encoder.ngrams}
        return FeatureTable(frame, self.id if id is None else id, strict=self.strict, **chosen)

    def __len__(self) -> int:
        return 0 if self._row is None else len(self._row)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{column} {kind}" for column, kind in self.kinds.items())
        return f"FeatureTable({len(self):,} rows by {self.id!r}, {self.width:,} features: {kinds})"

    @property
    def source(self) -> TableLike | PathLike:
        """The frame or path that the table was read from."""
        if self._source is None:
            check.fail("features", "an encoder read from JSON, which has no rows", "a table with rows, or a frame")
        return self._source

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each encoded column."""
        return {encoder.column: encoder.kind for encoder in self.encoders}

    @property
    def feature_names(self) -> list[str]:
        """One name for each column of the encoded matrix."""
        return [name for encoder in self.encoders for name in encoder.names]

    def names_in(self, frame: DataFrame | None) -> list[str]:
        """The names of features, with the words of the first row of a frame for columns of hashed text."""
        return [
            name
            for one in self.encoders
            for name in (one.names_in(frame[one.column]) if isinstance(one, Text) and frame is not None else one.names)
        ]

    @property
    def width(self) -> int:
        """Number of columns of the encoded matrix."""
        return sum(encoder.width for encoder in self.encoders)

    @property
    def columns_apart(self) -> list[int]:
        """Columns of the encoded matrix with numbers or with indicators of missing values."""
        found: list[int] = []
        start = 0
        for encoder in self.encoders:
            end = start + encoder.width
            if isinstance(encoder, (Numeric, Vector)):
                found += range(start, end)
            elif isinstance(encoder, Categorical) and encoder.indicator:
                found.append(end - 1)
            start = end
        return found

    @property
    def columns(self) -> list[str]:
        """Encoded columns of the table."""
        return [encoder.column for encoder in self.encoders]

    def encode(self, ids: IdsLike) -> sp.csr_matrix:
        """Encode the features of some entities; an id that is not in the table has only missing values."""
        rows = self.match(ids)
        if rows.max(initial=-1) < self._matrix.shape[0]:
            return sp.csr_matrix(self._matrix[rows])
        return sp.csr_matrix(sp.vstack([self._matrix, self.missing_row()], format="csr")[rows])

    def match(self, ids: IdsLike) -> NDArray[np.int64]:
        """The table's row of each id (the number of rows if it has none); also counts unmatched ids and rows."""
        if self._row is None:
            check.fail("ids", "a call on an encoder read from JSON, which has no rows", "encode_frame(frame)")
        asked, missing = id_array("ids", ids)
        if missing is not None:
            check.fail("ids", f"no id at place {int(np.argmax(missing))}", "an id at every place")
        last = len(self._row)
        rows = join(asked, self._row)
        rows[rows < 0] = last
        without = asked[rows == last].tolist()
        unused = last - len(set(rows.tolist()) - {last})
        self.report |= {"ids_without_features": len(without), "features_without_ids": unused}
        if self.strict and without:
            shown = ", ".join(repr(name) for name in without[:3])
            check.fail("ids", f"{len(without)} without features, first {shown}", "features for every id (strict=True)")
        if self.strict and unused:
            check.fail("ids", f"{unused} rows of features without an id", "an id for every row (strict=True)")
        return rows

    def encode_frame(self, frame: TableLike | PathLike, name: str = "frame") -> sp.csr_matrix:
        """Encode new entities: each row of a table with the same columns (ids are not needed).

        Unseen categories count as missing and unseen list elements are dropped; ``report["unseen_values"]`` counts both
        by column. ``name`` is the name of the table in errors.
        """
        with _named(frame):
            matrix, self.report["unseen_values"] = self._encoded(self._read(frame, name))
        return matrix

    def with_rows(
        self, ids: Ids, rows: sp.csr_matrix, frame: DataFrame | None = None, frame_ids: Ids | None = None
    ) -> FeatureTable:
        """Make a table of encoded rows and of those of a frame, which replace rows with the same ids.

        The encoding gets columns for values that only the frame has; means and deviations stay.
        """
        made = self.without_rows()
        if frame is None or frame_ids is None:
            made._row, made._matrix = index_of(ids), rows
            return made
        columns = self._read(frame, "frame")
        made.encoders = [encoder.extended(column) for encoder, column in zip(self.encoders, columns, strict=True)]
        places, start = [np.empty(0, np.int64)], 0
        for old, new in zip(self.encoders, made.encoders, strict=True):
            same = old.width == new.width
            index = {} if same else {name: place for place, name in enumerate(new.names)}
            places.append(start + (np.arange(old.width) if same else np.array([index[name] for name in old.names])))
            start += new.width
        kept = np.flatnonzero(join(ids, index_of(frame_ids)) < 0)
        old_rows = sp.csr_matrix(rows[kept])
        moved = (old_rows.data, np.concatenate(places)[old_rows.indices], old_rows.indptr)
        wide = sp.csr_matrix(moved, shape=(len(kept), made.width))
        wide.sort_indices()
        made._matrix = sp.csr_matrix(sp.vstack([wide, made._encoded(columns)[0]], format="csr"))
        made._row = {key: row for row, key in enumerate([*ids[kept].tolist(), *frame_ids.tolist()])}
        return made

    def _read(self, frame: TableLike | PathLike, name: str) -> list[Series]:
        """The columns of a table that are encoded, in the order of the encoders."""
        choices: list[Choice] = [(name, frames.Needed(column)) for column in self.columns]
        numeric = sum(isinstance(encoder, Numeric) for encoder in self.encoders)
        others = len(choices) - numeric
        columns = frames.read_columns("frame", frame, choices[numeric:], choices[:numeric])
        return columns[others:] + columns[:others]

    def with_labels(
        self, pairs: Interactions, right: FeatureTable, columns: Mapping[str, str]
    ) -> tuple[Interactions, FeatureTable]:
        """Add a row for each right entity with the entity's own text, and the pair of that row with the entity.

        A model that is fitted to both results also learns from the texts of the right entities, such as documents as
        queries for themselves. This helps in search. It does harm where the text of an entity does not ask for that
        entity, such as articles that link to others (docs/evidence/defaults.md). The rows stay in the model as left
        entities: ``"label: ID"`` or, for numbers, numbers after the largest one. ``update`` needs the same table.

        Args:
            pairs: pairs whose left entities this table describes.
            right: a table of the right entities.
            columns: for a column of this table the column of ``right`` with text of the same kind, such as
                ``{"query": "title"}``. Other columns of the new rows are missing.
        """
        if pairs.one_set:
            check.fail("pairs", "pairs of one set of entities", "two sets: no entity is paired with itself")
        if not isinstance(columns, Mapping) or not columns:
            check.fail("columns", repr(columns), 'a mapping such as {"query": "title"}')
        for name in columns:
            frames.pick("columns", name, self.columns)
        pl, frame = frames.polars(), frames.read_frame("right", right.source)
        texts = {name: frames.texts(frame[frames.pick("columns", of, frame.columns)]) for name, of in columns.items()}
        keys, absent = id_array("id", frame[right.id])
        known = join(keys, index_of(pairs.right_ids)) >= 0
        known &= ~np.all([column.is_null().to_numpy() for column in texts.values()], axis=0)
        known &= True if absent is None else ~absent
        rows = pl.Series(np.flatnonzero(known))
        own = self._row or {}
        largest = max((key for key in (*own, *pairs.left_ids.tolist()) if isinstance(key, int)), default=-1)
        text_ids = pairs.left_ids.dtype == object
        ids = [f"label: {key}" if text_ids else largest + 1 + at for at, key in enumerate(keys[known].tolist())]
        cells = {name: texts[name].gather(rows) if name in texts else [None] * len(rows) for name in self.columns}
        made = copy.copy(self)
        made.report = dict(self.report)
        made._matrix = sp.csr_matrix(sp.vstack([self._matrix, made.encode_frame(pl.DataFrame(cells))], format="csr"))
        made._row = own | {key: self._matrix.shape[0] + at for at, key in enumerate(ids)}
        return union(pairs, Interactions.from_arrays(ids, keys[known])), made

    def to_json(self) -> str:
        """The encoding (not the rows) as JSON."""
        plain = {"format": _FORMAT, "version": _VERSION, "id": self.id, "columns": [to_plain(e) for e in self.encoders]}
        return json.dumps(plain, ensure_ascii=False)

    @classmethod
    def encoder_from_json(cls, text: str) -> FeatureTable:
        """Rebuild the encoding of a table from JSON, without its rows."""
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError) as error:
            check.fail("text", f"no JSON ({error})", "what to_json() returned")
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
            check.fail("text", f"JSON that begins {text[:40]!r}", f"a {_FORMAT} object")
        if plain.get("version") != _VERSION:
            check.fail("text", f"version {plain.get('version')!r}", f"version {_VERSION}")
        form = build("text", _Form, plain)
        return cls._without_rows(form.id, [from_plain(column) for column in form.columns])

    @classmethod
    def _without_rows(cls, id: str, encoders: list[Encoder]) -> FeatureTable:
        table = cls.__new__(cls)
        table.id, table.strict, table.report, table._row, table._source = id, False, {}, None, None
        table.encoders = encoders
        table._matrix = sp.csr_matrix((0, table.width), dtype=np.float32)
        return table

    def without_rows(self) -> FeatureTable:
        """The encoding of the table without its rows."""
        return self._without_rows(self.id, list(self.encoders))

    def _encoded(self, columns: list[Series]) -> tuple[sp.csr_matrix, dict[str, int]]:
        parts = [encoder.transform(column) for encoder, column in zip(self.encoders, columns, strict=True)]
        unseen = {e.column: count for e, (_, count) in zip(self.encoders, parts, strict=True) if count}
        matrix = sp.csr_matrix(sp.hstack(_sparse([part for part, _ in parts]), format="csr"), dtype=np.float32)
        matrix.eliminate_zeros()
        return matrix, unseen

    def missing_row(self) -> sp.csr_matrix:
        """The encoded row of an entity with only missing values."""
        pl = frames.polars()
        return self._encoded([pl.Series(column, [None], dtype=pl.String) for column in self.columns])[0]


def _sparse(parts: list[NDArray[np.float32] | sp.csr_matrix]) -> list[sp.csr_matrix]:
    """Combine dense columns into few sparse matrices, because creating a matrix takes longer than filling it."""
    blocks: list[sp.csr_matrix] = []
    for dense, group in groupby(parts, lambda part: isinstance(part, np.ndarray)):
        run = list(group)
        steps = range(0, len(run), _DENSE)
        blocks += [sp.csr_matrix(np.hstack(run[at : at + _DENSE])) for at in steps] if dense else run
    return blocks


def _named(frame: object) -> AbstractContextManager[None]:
    return reading(frame, "frame") if isinstance(frame, (str, os.PathLike)) else nullcontext()


_SEPARATED, _RECURRING, _WORDS = 0.1, 0.5, 1.5


def infer_kinds(table: DataFrame, id: str, given: Mapping[str, str], separator: str) -> dict[str, str]:
    """Infer the kind of every column except ``id``; kinds in ``given`` are kept."""
    present = [name for name in table.columns if name != id]
    for name, kind in given.items():
        if name not in present:
            close = check.near(name, present, 1) or present
            check.fail("kinds", repr(name), f"a column besides the id, such as {', '.join(map(repr, close)) or 'none'}")
        check.choice(f"kinds[{name!r}]", kind, (*_ARGUMENTS, "skip"))
    kinds = {name: given.get(name) or _by_type(table[name]) for name in present}
    found = iter(_of_text([table[name] for name, kind in kinds.items() if not kind], separator))
    return {name: kind or next(found) for name, kind in kinds.items()}


def _by_type(column: Series) -> str:
    """The kind of a column by its type; "" for text."""
    pl = frames.polars()
    if isinstance(column.dtype, pl.List) and column.dtype.inner == pl.String:
        return "list"
    if column.null_count() == len(column):
        return "skip"
    if isinstance(column.dtype, (pl.List, pl.Array)):
        lists: Any = column.arr.to_list() if isinstance(column.dtype, pl.Array) else column
        lengths = lists.drop_nulls().list.len().unique().to_list()
        return "vector" if lists.dtype.inner.is_float() and len(lengths) == 1 and lengths[0] > 1 else "skip"
    if column.dtype == pl.Boolean:
        return "categorical"
    if column.dtype.is_numeric():
        return "numeric"
    return "" if column.dtype in (pl.String, pl.Categorical, pl.Enum) else "skip"


def _of_text(columns: Sequence[Series], separator: str) -> list[str]:
    pl = frames.polars()
    named = [column.alias(str(place)) for place, column in enumerate(columns)]
    table = pl.DataFrame(named).select(pl.all().cast(pl.String).str.strip_chars().replace("", None))
    cells = pl.all().drop_nulls()
    figures = {
        "cells": cells.len(),
        "numbers": cells.cast(pl.Float64, strict=False).is_not_null().sum(),
        "codes": cells.str.contains(r"^[+-]?0\d").sum(),
        "separated": cells.str.contains(separator, literal=True).sum(),
        "values": cells.n_unique(),
        "words": cells.str.count_matches(r"\w+").sum(),
    }
    counted = {name: table.select(figure).row(0) if columns else () for name, figure in figures.items()}
    rows = zip(*counted.values(), strict=True)
    return [_decide(table[str(place)], separator, *row) for place, row in enumerate(rows)]


def _decide(
    column: Series, separator: str, cells: int, numbers: int, codes: int, separated: int, values: int, words: int
) -> str:
    if not cells:
        return "skip"
    if numbers == cells and not codes:
        return "numeric"
    if separated >= _SEPARATED * cells:
        elements = column.drop_nulls().str.split(separator).explode()
        if elements.n_unique() <= _RECURRING * len(elements):
            return "list"
    if values <= _RECURRING * cells:
        return "categorical"
    return "text" if words >= _WORDS * cells else "categorical"


FeaturesLike: TypeAlias = FeatureTable | MatrixLike | TableLike | str | Sequence[Any] | None  # accepted by estimators

"""Encoders: each turns one column of a feature table into columns of numbers, and later rows into the same columns.

    numeric      (x − mean) / deviation, 0 where missing; an indicator column if the table has missing values
    categorical  one column for each value; one for missing values if the table has some
    list         one column for each element, 1 where the list contains it
    text         2^bits columns of hashed n-grams; each row has length 1
    vector       each number like a numeric column; an indicator column if the table has missing vectors
    encoded      text through an encoder (data/text.py), whose vectors are treated like a vector column

A category that was not in the table counts as missing and a list element that was not in it is dropped; both are
counted. Each ``transform`` costs O(entries).
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import build
from gramtower.data import frames
from gramtower.data.matrices import ones_at
from gramtower.data.text import Encoder as TextEncoder
from gramtower.data.text import Function, alike

if TYPE_CHECKING:
    from polars import Series

MISSING = " (missing)"
MOST_BITS = 24  # of a text column: 2^24 columns
_WORD_LENGTHS, _CHARACTER_LENGTHS = (1, 2), (3, 4, 5)


@dataclass(frozen=True)
class Encoder:
    """Base class: the encoding of one column."""

    kind: ClassVar[str]
    column: str

    @property
    def names(self) -> list[str]:
        """Names of the encoded columns."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Number of encoded columns."""
        return len(self.names)

    def transform(self, column: Series) -> tuple[NDArray[np.float32] | sp.csr_matrix, int]:
        """Encode a column, dense or sparse; also returns how many of its entries were not in the table."""
        raise NotImplementedError

    def extended(self, column: Series) -> Encoder:
        """The same encoding with columns for values, or for missing ones, that only a further column of cells has."""
        return self

    def check(self) -> None:
        """Refuse fields that ``fit`` cannot give."""


@dataclass(frozen=True)
class Numeric(Encoder):
    """A column of numbers, standardised."""

    kind = "numeric"
    mean: float
    deviation: float
    indicator: bool

    @classmethod
    def fit(cls, column: Series) -> Numeric:
        """Compute mean and standard deviation of the present values; a constant column has deviation 1."""
        values = frames.numbers("numeric", column).to_numpy()
        present = values[~np.isnan(values)]
        mean = float(present.mean()) if len(present) else 0.0
        deviation = float(present.std()) if len(present) else 0.0
        return cls(column.name, mean, deviation if deviation > 1e-12 * abs(mean) else 1.0, len(present) < len(values))

    @property
    def names(self) -> list[str]:
        return [self.column, self.column + MISSING] if self.indicator else [self.column]

    def transform(self, column: Series) -> tuple[NDArray[np.float32], int]:
        values = frames.numbers("numeric", column).to_numpy()
        missing = np.isnan(values)
        made = np.where(missing, 0.0, (values - self.mean) / self.deviation)
        parts = [made, missing] if self.indicator else [made]
        return np.column_stack(parts).astype(np.float32), 0

    def extended(self, column: Series) -> Numeric:
        missing = np.isnan(frames.numbers("numeric", column).to_numpy()).any()
        return replace(self, indicator=self.indicator or bool(missing))

    def check(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.deviation < math.inf):
            check.fail("mean, deviation", f"{self.mean}, {self.deviation}", "finite numbers and a positive deviation")


@dataclass(frozen=True)
class _Listed(Encoder):
    values: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [f"{self.column}={value}" for value in self.values]

    @property
    def width(self) -> int:
        return len(self.values)

    def check(self) -> None:
        if len(set(self.values)) < len(self.values):
            check.fail("values", "a repeated value", "distinct values")


@dataclass(frozen=True)
class Categorical(_Listed):
    """A column with one value of a set."""

    kind = "categorical"
    indicator: bool

    @classmethod
    def fit(cls, column: Series) -> Categorical:
        """Find the values; they are kept in sorted order."""
        texts = frames.texts(column)
        values = sorted(value for value in texts.unique().to_list() if value is not None)
        return cls(column.name, tuple(values), texts.null_count() > 0)

    @property
    def names(self) -> list[str]:
        return super().names + [self.column + MISSING] * self.indicator

    @property
    def width(self) -> int:
        return len(self.values) + self.indicator

    def transform(self, column: Series) -> tuple[sp.csr_matrix, int]:
        texts = frames.texts(column)
        places = _places(texts, self.values)
        unseen = int((places < 0).sum()) - texts.null_count()
        if self.indicator:
            places = np.where(places < 0, len(self.values), places)
        return _ones(np.arange(len(places)), places, len(places), self.width), unseen

    def extended(self, column: Series) -> Categorical:
        more = Categorical.fit(column)
        values = tuple(sorted({*self.values, *more.values}))
        return replace(self, values=values, indicator=self.indicator or more.indicator)


@dataclass(frozen=True)
class Elements(_Listed):
    """A column of lists: polars lists, or text with a separator. A missing list is an empty one."""

    kind = "list"
    separator: str

    @classmethod
    def fit(cls, column: Series, separator: str) -> Elements:
        """Find the elements; they are kept in sorted order."""
        return cls(column.name, tuple(_exploded(column, separator)[1].unique().sort().to_list()), separator)

    def transform(self, column: Series) -> tuple[sp.csr_matrix, int]:
        rows, elements = _exploded(column, self.separator)
        places = _places(elements, self.values)
        return _ones(rows, places, len(column), len(self.values)), int((places < 0).sum())

    def extended(self, column: Series) -> Elements:
        more = Elements.fit(column, self.separator)
        return replace(self, values=tuple(sorted({*self.values, *more.values})))

    def check(self) -> None:
        super().check()
        if not self.separator:
            check.fail("separator", "''", "text between the elements of a list")


@dataclass(frozen=True)
class Text(Encoder):
    """A column of text as hashed n-grams: words and pairs of words, or 3 to 5 characters of each word.

    The hash is CRC-32 of the n-gram in UTF-8, the same in every process. Case, accents and width are folded.
    """

    kind = "text"
    bits: int
    ngrams: str

    @property
    def names(self) -> list[str]:
        return [f"{self.column}#{place}" for place in range(1 << self.bits)]

    @property
    def width(self) -> int:
        return 1 << self.bits

    def names_in(self, column: Series) -> list[str]:
        """The names, of which those that the first cell of a column has are by its n-grams."""
        names, known = self.names, dict[int, str]()
        for gram in dict.fromkeys(grams(frames.texts(column[:1])[0] or "", self.ngrams)):
            place = self._place(gram)
            known[place] = f"{known[place]}|{gram}" if place in known else f"{self.column}={gram}"
        for place, name in known.items():
            names[place] = name
        return names

    def _place(self, gram: str) -> int:
        return zlib.crc32(gram.encode()) & ((1 << self.bits) - 1)

    def transform(self, column: Series) -> tuple[sp.csr_matrix, int]:
        places, counts = list[int](), list[int]()
        for cell in frames.texts(column).to_list():
            found = [self._place(gram) for gram in grams(cell or "", self.ngrams)]
            places += found
            counts.append(len(found))
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        matrix = sp.csr_matrix((np.ones(len(places), np.float32), places, offsets), (len(counts), 1 << self.bits))
        matrix.sum_duplicates()
        lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
        matrix.data /= np.repeat(lengths, np.diff(matrix.indptr)).astype(np.float32)
        return matrix, 0

    def check(self) -> None:
        if not 1 <= self.bits <= MOST_BITS or self.ngrams not in ("word", "char"):
            check.fail("bits, ngrams", f"{self.bits}, {self.ngrams[:20]!r}", f"1 to {MOST_BITS}, word or char")


@dataclass(frozen=True)
class Vector(Encoder):
    """A column of lists of numbers of one length, such as pretrained embeddings; each place is standardised."""

    kind = "vector"
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    indicator: bool

    @classmethod
    def fit(cls, column: Series) -> Vector:
        """Compute means and standard deviations of the present vectors; a constant place has deviation 1."""
        values, missing = _vectors(column, None)
        mean, deviation = values.mean(0), values.std(0)
        deviation = np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)
        return cls(column.name, tuple(mean.tolist()), tuple(deviation.tolist()), bool(missing.any()))

    @property
    def names(self) -> list[str]:
        return [f"{self.column}[{place}]" for place in range(len(self.mean))] + [self.column + MISSING] * self.indicator

    def transform(self, column: Series) -> tuple[NDArray[np.float32], int]:
        values, missing = _vectors(column, len(self.mean))
        made = np.zeros((len(missing), self.width), dtype=np.float32)
        made[~missing, : len(self.mean)] = (values - np.array(self.mean)) / np.array(self.deviation)
        if self.indicator:
            made[missing, -1] = 1
        return made, 0

    def extended(self, column: Series) -> Vector:
        missing = _vectors(column, len(self.mean))[1].any()
        return replace(self, indicator=self.indicator or bool(missing))

    def check(self) -> None:
        finite = all(math.isfinite(x) and 0 < y < math.inf for x, y in zip(self.mean, self.deviation, strict=False))
        if not finite or not len(self.mean) == len(self.deviation) > 0:
            given = f"{len(self.mean)} and {len(self.deviation)} numbers"
            check.fail("mean, deviation", given, "equally many finite numbers and positive deviations")


@dataclass(frozen=True)
class Encoded(Vector):
    """A column of text through an encoder, which is loaded when there is a text to encode."""

    kind = "encoded"
    encoder: str  # its name
    digest: str  # of its weights; "" for a function
    probe: tuple[float, ...]  # its vector of one fixed sentence
    used: TextEncoder | None = field(init=False, default=None, compare=False, repr=False)
    known: bool = field(init=False, default=False, compare=False, repr=False)  # whether ``used`` was compared

    @classmethod
    def fit_to(cls, vectors: Series, encoder: TextEncoder) -> Encoded:
        """Compute means and deviations of the vectors that an encoder gave."""
        if vectors.null_count() == len(vectors):
            check.fail("encoders", f"column {vectors.name!r} without text", "at least one text")
        of, probe = Vector.fit(vectors), tuple(encoder.probe.tolist())
        made = cls(of.column, of.mean, of.deviation, of.indicator, encoder.name, encoder.digest, probe)
        return made._with(encoder, True)

    def attach(self, given: TextEncoder | str | os.PathLike[str] | Function) -> None:
        """Use an encoder instead of the one that is known by name; a function is compared with it at once."""
        name = self.encoder if callable(given) else None
        encoder = given if isinstance(given, TextEncoder) else TextEncoder(given, name=name)
        self._with(encoder, False)
        if encoder.is_function:
            self.compared()
        else:
            object.__setattr__(self, "encoder", encoder.name)

    def has_encoder_of(self, other: Encoded) -> bool:
        """Whether two columns go through the same encoder."""
        return self.digest == other.digest and alike(self.probe, other.probe)

    def transform(self, column: Series) -> tuple[NDArray[np.float32], int]:
        return super().transform(self._vectors(column))

    def extended(self, column: Series) -> Encoded:
        made = super().extended(self._vectors(column))
        assert isinstance(made, Encoded)
        return made if self.used is None else made._with(self.used, self.known)

    def _vectors(self, column: Series) -> Series:
        pl = frames.polars()
        if isinstance(column.dtype, pl.Array):  # the table that is being made has the vectors already
            return column
        return column.cast(pl.String) if column.null_count() == len(column) else self.compared().vectors(column)

    def check(self) -> None:
        super().check()
        if len(self.probe) != len(self.mean) or not all(map(math.isfinite, self.probe)):
            check.fail("probe", f"{len(self.probe)} numbers", f"{len(self.mean)} finite numbers")

    def _with(self, encoder: TextEncoder, known: bool) -> Encoded:
        object.__setattr__(self, "used", encoder)
        object.__setattr__(self, "known", known)
        return self

    def compared(self) -> TextEncoder:
        """The encoder, after a comparison with that of the training."""
        name = f"column {self.column!r}: encoder {self.encoder!r}"
        if self.used is None and not self.digest:
            check.fail(name, "no function", f"gt.load(path, encoders={{{self.encoder!r}: function}})")
        if self.used is None and os.path.isabs(self.encoder) and not os.path.isdir(self.encoder):
            check.fail(name, "no such folder", f"its new place: gt.load(path, encoders={{{self.encoder!r}: FOLDER}})")
        encoder = self.used or TextEncoder(self.encoder)
        if not self.known and (found := encoder.difference(self.digest, self.probe)) is not None:
            check.fail(name, found, f"the encoder of the training, with vectors of length {len(self.mean)}")
        self._with(encoder, True)
        return encoder


_KINDS = {one.kind: one for one in (Numeric, Categorical, Elements, Text, Vector, Encoded)}


def grams(text: str, kind: str) -> list[str]:
    """The n-grams of a text: words and pairs of neighbours, or runs of 3 to 5 characters of ``<word>``."""
    folded = unicodedata.normalize("NFKD", text).casefold()
    words = re.findall(r"\w+", "".join(c for c in folded if not unicodedata.combining(c)))
    if kind == "word":
        return [" ".join(words[i : i + n]) for n in _WORD_LENGTHS for i in range(len(words) - n + 1)]
    marked = [f"<{word}>" for word in words]
    return [word[i : i + n] for word in marked for n in _CHARACTER_LENGTHS for i in range(len(word) - n + 1)]


def to_plain(encoder: Encoder) -> dict[str, Any]:
    """An encoder as JSON values."""
    return {"kind": encoder.kind, **{one.name: getattr(encoder, one.name) for one in fields(encoder) if one.init}}


def from_plain(plain: dict[str, object]) -> Encoder:
    """Rebuild the encoder that :func:`to_plain` wrote."""
    fields = dict(plain)
    kind = check.choice("kind", fields.pop("kind", None), tuple(_KINDS))
    made: Encoder = build(f"a {kind} column", _KINDS[kind], fields)
    made.check()
    return made


def _vectors(column: Series, width: int | None) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The vectors that are there, one a row, and where there is none."""
    pl = frames.polars()
    if column.dtype == pl.String:  # numbers between commas or blanks, with or without brackets
        bare = column.str.strip_chars("[]() \t").replace("", None)
        column = bare.str.replace_all(r"[,;\s]+", " ").str.split(" ")
    elif isinstance(column.dtype, pl.Array):
        column = column.arr.to_list()
    missing = column.is_null().to_numpy()
    if missing.all():
        if width is None:
            check.fail("vectors", f"column {column.name!r} without a vector", "lists of numbers of one length")
        return np.empty((0, width)), missing
    inner = column.dtype.inner if isinstance(column.dtype, pl.List) else None
    if inner is None or not (inner.is_numeric() or inner == pl.String):
        check.fail("vectors", f"column {column.name!r} of {column.dtype}", "lists of numbers of one length")
    present = column.filter(~missing)
    lengths = present.list.len().to_numpy()
    wanted = int(lengths.max()) if width is None else width
    if wanted == 0 or (lengths != wanted).any():
        given = f"column {column.name!r} with lists of {lengths.min()} to {lengths.max()} numbers"
        check.fail("vectors", given, f"lists of {wanted or 'some'} numbers each")
    values = frames.numbers("vectors", present.explode()).to_numpy().reshape(-1, wanted)
    if np.isnan(values).any():
        place = int(np.flatnonzero(~missing)[np.isnan(values).any(1)][0])
        check.fail("vectors", f"a missing number in row {place} of column {column.name!r}", "vectors without gaps")
    return values, missing


def _places(texts: Series, values: Sequence[str]) -> NDArray[np.int64]:
    """Place of each text among the values; -1 where missing or not among them."""
    pl = frames.polars()
    if not values or texts.null_count() == len(texts):
        return np.full(len(texts), -1, dtype=np.int64)
    found = texts.replace_strict(list(values), range(len(values)), default=-1, return_dtype=pl.Int64)
    return np.asarray(found.to_numpy())


def _ones(rows: NDArray[np.int64], places: NDArray[np.int64], height: int, width: int) -> sp.csr_matrix:
    """1 at (row, place) for every place that is not -1; an element named twice counts once."""
    present = places >= 0
    return ones_at(rows[present], places[present], (height, width))


def _exploded(column: Series, separator: str) -> tuple[NDArray[np.int64], Series]:
    """Row and text of every element; blanks around elements and empty elements are left out."""
    pl = frames.polars()
    if column.dtype == pl.List:
        table = pl.DataFrame({"row": np.arange(len(column)), "element": column}).explode("element")
        table = table.with_columns(frames.texts(table["element"]).alias("element")).lazy()
    else:
        table = pl.DataFrame({"row": np.arange(len(column)), "element": frames.texts(column)}).lazy()
        table = table.with_columns(pl.col("element").str.split(separator)).explode("element")
    element = pl.col("element")
    table = table.with_columns(element.str.strip_chars()).filter(element.is_not_null() & (element != "")).collect()
    return table["row"].to_numpy(), table["element"]

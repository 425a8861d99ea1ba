"""How one column of a feature table becomes columns of numbers, remembered so that later rows get the same ones.

    numeric      (x − mean) / deviation, 0 where missing; an indicator column when the table has missing values
    categorical  one column for each value; one for missing values when the table has some
    list         one column for each element, 1 where the list holds it
    text         2^bits columns of hashed n-grams, each row of length 1
    vector       each of its numbers like a numeric column; an indicator column when the table has missing vectors

A category that the table did not have counts as missing; a list element that it did not have is left out; both are
counted. Each ``transform`` costs O(entries).
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.schema import build
from gramtower.data import frames

if TYPE_CHECKING:
    from polars import Series

MISSING = " (missing)"
MOST_BITS = 24  # of a text column: 2^24 columns
_WORD_LENGTHS, _CHARACTER_LENGTHS = (1, 2), (3, 4, 5)


@dataclass(frozen=True)
class Numeric:
    """A column of numbers, standardised."""

    column: str
    mean: float
    deviation: float
    indicator: bool

    @classmethod
    def fit(cls, column: Series) -> Numeric:
        """Mean and standard deviation of the values that are there; a constant column has deviation 1."""
        values = frames.numbers("numeric", column).to_numpy()
        present = values[~np.isnan(values)]
        mean = float(present.mean()) if len(present) else 0.0
        deviation = float(present.std()) if len(present) else 0.0
        return cls(column.name, mean, deviation if deviation > 1e-12 * abs(mean) else 1.0, len(present) < len(values))

    @property
    def names(self) -> list[str]:
        """Names of the columns made."""
        return [self.column, self.column + MISSING] if self.indicator else [self.column]

    @property
    def width(self) -> int:
        """Number of columns made."""
        return 1 + self.indicator

    def transform(self, column: Series) -> tuple[NDArray[np.float32], int]:
        """The columns made, dense, and how many entries were unseen."""
        values = frames.numbers("numeric", column).to_numpy()
        missing = np.isnan(values)
        made = np.where(missing, 0.0, (values - self.mean) / self.deviation)
        parts = [made, missing] if self.indicator else [made]
        return np.column_stack(parts).astype(np.float32), 0


@dataclass(frozen=True)
class Categorical:
    """A column with one value of a set."""

    column: str
    values: tuple[str, ...]
    indicator: bool

    @classmethod
    def fit(cls, column: Series) -> Categorical:
        """The values in sorted order."""
        texts = frames.texts(column)
        values = sorted(value for value in texts.unique().to_list() if value is not None)
        return cls(column.name, tuple(values), texts.null_count() > 0)

    @property
    def names(self) -> list[str]:
        """Names of the columns made."""
        return [f"{self.column}={value}" for value in self.values] + [self.column + MISSING] * self.indicator

    @property
    def width(self) -> int:
        """Number of columns made."""
        return len(self.values) + self.indicator

    def transform(self, column: Series) -> tuple[sp.csr_matrix, int]:
        """The columns made, and how many entries were unseen."""
        texts = frames.texts(column)
        places = _places(texts, self.values)
        unseen = int((places < 0).sum()) - texts.null_count()
        if self.indicator:
            places = np.where(places < 0, len(self.values), places)
        return _ones(np.arange(len(places)), places, len(places), len(self.names)), unseen


@dataclass(frozen=True)
class Elements:
    """A column of lists: polars lists, or text with a separator. A missing list is an empty one."""

    column: str
    values: tuple[str, ...]
    separator: str

    @classmethod
    def fit(cls, column: Series, separator: str) -> Elements:
        """The elements in sorted order."""
        return cls(column.name, tuple(_exploded(column, separator)[1].unique().sort().to_list()), separator)

    @property
    def names(self) -> list[str]:
        """Names of the columns made."""
        return [f"{self.column}={value}" for value in self.values]

    @property
    def width(self) -> int:
        """Number of columns made."""
        return len(self.values)

    def transform(self, column: Series) -> tuple[sp.csr_matrix, int]:
        """The columns made, and how many entries were unseen."""
        rows, elements = _exploded(column, self.separator)
        places = _places(elements, self.values)
        matrix = _ones(rows, places, len(column), len(self.values))
        return matrix, int((places < 0).sum())


@dataclass(frozen=True)
class Text:
    """A column of text as hashed n-grams: words and pairs of words, or 3 to 5 characters of each word.

    The hash is CRC-32 of the n-gram in UTF-8, the same in every process. Case, accents and width are folded.
    """

    column: str
    bits: int
    ngrams: str

    @property
    def names(self) -> list[str]:
        """Names of the columns made."""
        return [f"{self.column}#{place}" for place in range(1 << self.bits)]

    @property
    def width(self) -> int:
        """Number of columns made."""
        return 1 << self.bits

    def transform(self, column: Series) -> tuple[sp.csr_matrix, int]:
        """The columns made, and how many entries were unseen."""
        places: list[int] = []
        counts = []
        for cell in frames.texts(column).to_list():
            found = [zlib.crc32(gram.encode()) & ((1 << self.bits) - 1) for gram in grams(cell or "", self.ngrams)]
            places += found
            counts.append(len(found))
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        matrix = sp.csr_matrix((np.ones(len(places), np.float32), places, offsets), (len(counts), 1 << self.bits))
        matrix.sum_duplicates()
        lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
        matrix.data /= np.repeat(lengths, np.diff(matrix.indptr)).astype(np.float32)
        return matrix, 0


@dataclass(frozen=True)
class Vector:
    """A column of lists of numbers of one length, such as pretrained embeddings, each place standardised."""

    column: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    indicator: bool

    @classmethod
    def fit(cls, column: Series) -> Vector:
        """Means and standard deviations of the vectors that are there; a constant place has deviation 1."""
        values, missing = _vectors(column, None)
        mean, deviation = values.mean(0), values.std(0)
        deviation = np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)
        return cls(column.name, tuple(mean.tolist()), tuple(deviation.tolist()), bool(missing.any()))

    @property
    def names(self) -> list[str]:
        """Names of the columns made."""
        return [f"{self.column}[{place}]" for place in range(len(self.mean))] + [self.column + MISSING] * self.indicator

    @property
    def width(self) -> int:
        """Number of columns made."""
        return len(self.mean) + self.indicator

    def transform(self, column: Series) -> tuple[NDArray[np.float32], int]:
        """The columns made, dense, and how many entries were unseen."""
        values, missing = _vectors(column, len(self.mean))
        made = np.zeros((len(missing), self.width), dtype=np.float32)
        made[~missing, : len(self.mean)] = (values - np.array(self.mean)) / np.array(self.deviation)
        if self.indicator:
            made[missing, -1] = 1
        return made, 0


Encoder = Numeric | Categorical | Elements | Text | Vector
_KINDS: dict[str, Any] = {
    "numeric": Numeric, "categorical": Categorical, "list": Elements, "text": Text, "vector": Vector,
}  # fmt: skip


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
    kind = next(name for name, made in _KINDS.items() if isinstance(encoder, made))
    return {"kind": kind, **asdict(encoder)}


def from_plain(plain: dict[str, Any]) -> Encoder:
    """The encoder that :func:`to_plain` wrote.

    Raises:
        ValueError: if it is anything else.
    """
    fields = dict(plain)
    kind = check.choice("kind", fields.pop("kind", None), tuple(_KINDS))
    made: Encoder = build(f"a {kind} column", _KINDS[kind], fields)
    if isinstance(made, Numeric) and not (math.isfinite(made.mean) and 0 < made.deviation < math.inf):
        check.fail("mean, deviation", f"{made.mean}, {made.deviation}", "finite numbers, the deviation positive")
    if isinstance(made, Vector):
        made = replace(made, mean=tuple(made.mean), deviation=tuple(made.deviation))
        finite = all(math.isfinite(x) and 0 < y < math.inf for x, y in zip(made.mean, made.deviation, strict=False))
        if not finite or not len(made.mean) == len(made.deviation) > 0:
            given = f"{len(made.mean)} and {len(made.deviation)} numbers"
            check.fail("mean, deviation", given, "as many finite numbers in both, deviations positive")
    if isinstance(made, Text) and (not 1 <= made.bits <= MOST_BITS or made.ngrams not in ("word", "char")):
        check.fail("bits, ngrams", f"{made.bits}, {made.ngrams[:20]!r}", f"1 to {MOST_BITS}, word or char")
    if isinstance(made, (Categorical, Elements)):
        made = replace(made, values=tuple(made.values))
        if len(set(made.values)) < len(made.values):
            check.fail("values", "one of them twice", "each value once")
    if isinstance(made, Elements) and not made.separator:
        check.fail("separator", "''", "text between the elements of a list")
    return made


def _vectors(column: Series, width: int | None) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The vectors that are there, one a row, and where there is none.

    Text is taken as numbers between commas or blanks, with or without brackets.
    """
    pl = frames.polars()
    if column.dtype == pl.String:
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


def _ones(rows: NDArray[Any], places: NDArray[Any], height: int, width: int) -> sp.csr_matrix:
    """1 at (row, place) for every place that is not -1."""
    present = places >= 0
    entries = (np.ones(int(present.sum()), np.float32), (rows[present], places[present]))
    matrix = sp.csr_matrix(entries, shape=(height, width))
    matrix.sum_duplicates()  # which scipy 1.13.0 leaves
    matrix.data[:] = 1  # an element named twice counts once
    return matrix


def _exploded(column: Series, separator: str) -> tuple[NDArray[Any], Series]:
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

"""Observed pairs with the ids, weights and times they came with: from files, frames or arrays to one CSR matrix.

Ids are whole numbers or text, as the source has them (data/ids.py says when); rows are numbered in order of first
appearance among the rows kept.
Cost: O(rows) time and memory beyond reading the file; see data/merge.py for the order of entries.

Pairs as scikit-learn takes its data: a sequence of samples, one for each pair, that is cut by positions.

Interactions have the shape of their matrix, whose rows are entities; scikit-learn's searches count and cut what they
are given by its first axis. Cost: that of ``Interactions.subset``.

Two sets of observed pairs as one: the entities of the first, then those that only the second has.

A pair that both have is taken from the second, with its label, weight and time. Ids are joined as in data/ids.py and
keep the type of the first. Cost: O(pairs log pairs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower.data import frames
from gramtower.data.frames import Choice, Column, TableLike
from gramtower.data.ids import (
    IdsLike,
    Key,
    as_ids,
    as_known,
    code_series,
    code_values,
    id_series,
    index_of,
    join,
    moments,
    rows_of,
)
from gramtower.data.matrices import SparseMatrix, are_one_set, canonical, checked, entry_mask
from gramtower.data.merge import Rule, assemble, given_ids, warn_of_header
from gramtower.data.sources import PathLike, existing, reading

if TYPE_CHECKING:
    import polars as pl

    from gramtower.data.parquet import ReadingProgress


_SHOWN = 5  # pairs in a notebook


@dataclass(frozen=True, eq=False)
class Interactions:
    """Observed pairs, such as which user bought which item: what a model learns from.

    Make one with ``from_csv``, ``from_frame``, ``from_arrays`` ….

    What the constructors share. ``threshold=4`` keeps rows whose value is at least 4 and labels them 1; without a
    threshold the value is the label when ``labels=True``, otherwise every row is a pair labelled 1. Rows without an id,
    or without a value, weight or time that was asked for, are left out and counted, and more than one in a hundred of
    them are a warning. Then rows of the same pair are merged by ``duplicates``:

    - ``"max"`` (default, whatever the order of rows): largest label, largest weight, latest time
    - ``"sum"``: labels and weights added, latest time
    - ``"last"``, ``"first"``: label, weight and time of one row, by time where there are times, otherwise by place
    - ``"error"``: repeated pairs are an error

    Attributes:
        matrix: scipy.sparse CSR, m × n, float32. Stored entries are the observed pairs, values the labels; the columns
            of a row increase and none occurs twice.
        left_ids: m distinct ids, an int64 array or an object array of str; row i of the matrix belongs to
            ``left_ids[i]``. Text files give text ("007" stays "007"), integers stay integers; see data/ids.py.
        right_ids: n distinct ids.
        times: float64, aligned with ``matrix.data``, or None. Seconds since 1970 where the source had dates.
        weights: float32, aligned with ``matrix.data``, or None.
        left_name: name of the left column.
        right_name: name of the right column.
        report: counts of what was read, left out and merged.
        numbered: where ids are but the row or column numbers of a matrix that came without ids, how many it had, for
            each side; otherwise None. Numbers of another matrix are other entities, and are not joined with them.
        same_entities: whether both sides are one set, such as packages that depend on packages: then no entity is
            recommended to itself. None lets :attr:`one_set` tell from the data.

    Example:
        >>> pairs = gt.Interactions.from_arrays(["ann", "ann", "bob"], ["tea", "milk", "tea"])
        >>> pairs
        Interactions(3 pairs of 2 'left' and 2 'right')
        >>> pairs.matrix.toarray().tolist(), list(pairs.right_ids)
        ([[1.0, 1.0], [1.0, 0.0]], ['tea', 'milk'])
    """

    matrix: sp.csr_matrix
    left_ids: NDArray[Any]
    right_ids: NDArray[Any]
    times: NDArray[np.float64] | None = None
    weights: NDArray[np.float32] | None = None
    left_name: str = "left"
    right_name: str = "right"
    report: Mapping[str, int] = field(default_factory=dict)
    numbered: tuple[int | None, int | None] = (None, None)
    same_entities: bool | None = None

    def __post_init__(self) -> None:
        if checked("matrix", self.matrix).shape != (len(self.left_ids), len(self.right_ids)):
            given = f"shape {self.matrix.shape} with {len(self.left_ids)} and {len(self.right_ids)} ids"
            check.fail("matrix", given, "one row for each left id and one column for each right id")
        for name in ("left_ids", "right_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, np.ndarray) or ids.dtype not in (np.int64, object):
                object.__setattr__(self, name, as_ids(name, ids))
        for name, values in (("times", self.times), ("weights", self.weights)):
            if values is not None and len(values) != self.matrix.nnz:
                check.fail(name, f"{len(values)} values", f"{self.matrix.nnz}, one for each pair")
        if self.same_entities is not None:
            check.flag("same_entities", self.same_entities)

    @classmethod
    def from_csv(
        cls,
        path: PathLike | bytes,
        left: Column,
        right: Column,
        *,
        value: Column | None = None,
        weight: Column | None = None,
        time: Column | None = None,
        threshold: float | None = None,
        labels: bool = False,
        duplicates: str = "max",
        separator: str = ",",
        header: bool = True,
        quote: str | None = '"',
        comment: str | None = None,
        encoding: str = "utf8",
        same_entities: bool | None = None,
    ) -> Interactions:
        """Pairs from a delimited text file; .gz, .zst, .xz and .bz2 are decompressed.

        Args:
            path: the file, or its content as bytes.
            left: column of left ids, by name or by position from 0.
            right: column of right ids.
            value: column of ratings, counts or labels.
            weight: column of pair weights.
            time: column of times: numbers, or dates and datetimes, which become seconds since 1970 (those without a
                zone are taken as UTC).
            threshold: smallest value that makes a pair; see the class.
            labels: whether values are the labels; see the class.
            duplicates: how rows of the same pair are merged; see the class.
            separator: one character between fields.
            header: whether the first line names the columns. There is a warning where columns are chosen by position
                and the names are ids of other lines too.
            quote: quoting character, None for none.
            comment: lines that start with this are left out.
            encoding: of the text; any name Python knows.
            same_entities: whether both sides are one set of entities; see the class.
        """
        rule = Rule.of(threshold, labels, duplicates, value)
        texts, others = _choices(left, right, value, weight, time)
        source = path if isinstance(path, bytes) else existing("path", path)
        form: dict[str, Any] = {"separator": separator, "header": header, "quote": quote, "comment": comment}
        with reading("text" if isinstance(source, bytes) else source):
            columns = frames.read_csv(source, texts, others, encoding=encoding, **form)
            found = cls._from_columns(columns, others, rule, same_entities)
        if header and not isinstance(left, str) and not isinstance(right, str):
            warn_of_header((found.left_name, found.right_name), (found.left_ids, found.right_ids))
        return found

    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        left: Column,
        right: Column,
        *,
        value: Column | None = None,
        weight: Column | None = None,
        time: Column | None = None,
        threshold: float | None = None,
        labels: bool = False,
        duplicates: str = "max",
        same_entities: bool | None = None,
        progress: Callable[[ReadingProgress], None] | None = None,
    ) -> Interactions:
        """Read pairs from a Parquet file, or in a stream from a folder of Parquet parts.

        The arguments are those of :meth:`from_csv`. The parts of a folder (data/parquet.py says which files these are)
        are ordered by name and read batch by batch, in little more memory than the result takes. Folders called
        key=value give a column ``key``; a row without an id is an error. ``progress`` is called after each batch of a
        folder, in any thread, with a :class:`gramtower.data.parquet.ReadingProgress`.
        """
        rule = Rule.of(threshold, labels, duplicates, value)
        texts, others = _choices(left, right, value, weight, time)
        source = existing("path", path, folder=True)
        if source.is_dir():
            from gramtower.data.parquet import read_folder

            fields, *names = read_folder(source, texts + others, rule, progress)
            return cls(**vars(fields), left_name=names[0], right_name=names[1], same_entities=same_entities)
        with reading(source):
            return cls._from_columns(frames.read_parquet(source, texts + others), others, rule, same_entities)

    @classmethod
    def from_frame(
        cls,
        frame: TableLike,
        left: Column,
        right: Column,
        *,
        value: Column | None = None,
        weight: Column | None = None,
        time: Column | None = None,
        threshold: float | None = None,
        labels: bool = False,
        duplicates: str = "max",
        same_entities: bool | None = None,
    ) -> Interactions:
        """Pairs from a polars, pandas or pyarrow table or a mapping of columns; arguments as in :meth:`from_csv`."""
        rule = Rule.of(threshold, labels, duplicates, value)
        texts, others = _choices(left, right, value, weight, time)
        return cls._from_columns(frames.take("frame", frame, texts + others), others, rule, same_entities)

    @classmethod
    def from_arrays(
        cls,
        left: Iterable[Any],
        right: Iterable[Any],
        *,
        value: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        time: Iterable[Any] | None = None,
        threshold: float | None = None,
        labels: bool = False,
        duplicates: str = "max",
        left_name: str = "left",
        right_name: str = "right",
        same_entities: bool | None = None,
    ) -> Interactions:
        """Pairs from sequences of equal length: ids (text or whole numbers; None is missing) and numbers.

        Times are numbers, or dates, datetimes, datetime64 or ISO 8601 text, UTC unless they have a zone. Needs no
        polars. The other arguments are those of :meth:`from_csv`.
        """
        rule = Rule.of(threshold, labels, duplicates, value)
        left, right = given_ids("left", left), given_ids("right", right)
        given = {"value": value if rule.reads_value else None, "weight": weight}
        numbers = {name: check.as_float_array(name, x) for name, x in given.items() if x is not None}
        if time is not None:
            numbers["time"] = moments("time", time)
        fields = assemble(code_values("left", left), code_values("right", right), numbers, rule)
        return cls(**vars(fields), left_name=left_name, right_name=right_name, same_entities=same_entities)

    @classmethod
    def from_matrix(
        cls,
        matrix: SparseMatrix,
        left_ids: Iterable[Key] | None = None,
        right_ids: Iterable[Key] | None = None,
        *,
        left_name: str = "left",
        right_name: str = "right",
        same_entities: bool | None = None,
    ) -> Interactions:
        """Pairs from any scipy.sparse matrix; ids default to row and column numbers. Duplicates are added."""
        csr = _canonical(matrix)
        rows = as_ids("left_ids", range(csr.shape[0]) if left_ids is None else check.listed("left_ids", left_ids))
        columns = as_ids(
            "right_ids", range(csr.shape[1]) if right_ids is None else check.listed("right_ids", right_ids)
        )
        numbered = csr.shape[0] if left_ids is None else None, csr.shape[1] if right_ids is None else None
        return cls(
            csr, rows, columns, left_name=left_name, right_name=right_name, report=_counts(csr), numbered=numbered,
            same_entities=same_entities,
        )  # fmt: skip

    @classmethod
    def _from_columns(
        cls, columns: list[pl.Series], others: list[Choice], rule: Rule, same_entities: bool | None
    ) -> Interactions:
        """``columns``: left, right, then those of ``others``. Emptied, so that the text can be freed on the way."""
        numbers = {}
        for name, _ in reversed(others):
            column = columns.pop()
            if name != "value" or rule.reads_value:
                read = frames.seconds if name == "time" else frames.numbers
                numbers[name] = read(name, column).to_numpy()  # a missing number is NaN from here on
        left_name, right_name = columns[0].name, columns[1].name
        left, right = code_series(id_series("left", columns.pop(0)), id_series("right", columns.pop(0)))
        fields = assemble(left, right, numbers, rule)
        return cls(**vars(fields), left_name=left_name, right_name=right_name, same_entities=same_entities)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n): left and right entities."""
        return (len(self.left_ids), len(self.right_ids))

    def __len__(self) -> int:
        return int(self.matrix.nnz)

    def __repr__(self) -> str:
        m, n = self.shape
        sets = ", one set of entities" if self.one_set else ""
        return f"Interactions({len(self):,} pairs of {m:,} {self.left_name!r} and {n:,} {self.right_name!r}{sets})"

    def _repr_html_(self) -> str:
        """A card for notebooks: sizes, what the pairs have besides, and the first of them."""
        (m, n), matrix = self.shape, self.matrix
        sizes: dict[str, object] = {"pairs": len(self), self.left_name: m, self.right_name: n}
        sizes["share of all pairs"] = len(self) / max(1, m * n)
        extra = {"labels": bool(len(self)) and not bool((matrix.data == 1).all()), "weights": self.weights is not None}
        extra |= {"times": self.times is not None, "one set of entities": self.one_set}
        sizes["with"] = (
            ", ".join(name for name, there in extra.items() if there) or "all labels 1, no weights, no times"
        )
        rows = np.searchsorted(matrix.indptr, np.arange(min(_SHOWN, len(self))), side="right") - 1
        first = [
            (self.left_ids[row], self.right_ids[matrix.indices[place]], f"{matrix.data[place]:g}")
            for place, row in enumerate(rows.tolist())
        ]
        more = f"… and {len(self) - len(first):,} more" if len(self) > len(first) else ""
        listed = html.table((self.left_name, self.right_name, "label"), first)
        return html.card("Interactions", html.facts(sizes), listed, html.note(more))

    @cached_property
    def one_set(self) -> bool:
        """Whether both sides are one set of entities: as given, or by ids and pairs (data/matrices.py)."""
        if self.same_entities is not None:
            return bool(self.same_entities)
        return are_one_set(self.matrix, self.left_ids, self.right_ids)

    @cached_property
    def _left_index(self) -> dict[Key, int]:
        return index_of(self.left_ids)

    @cached_property
    def _right_index(self) -> dict[Key, int]:
        return index_of(self.right_ids)

    def left_rows(self, ids: IdsLike) -> NDArray[np.int64]:
        """Rows of left ids; unknown ids are an error that names the first ones and the nearest known."""
        return rows_of(self.left_name, ids, self._left_index)

    def right_rows(self, ids: IdsLike) -> NDArray[np.int64]:
        """Columns of right ids; unknown ids are an error that names the first ones and the nearest known."""
        return rows_of(self.right_name, ids, self._right_index)

    def subset(self, entries: ArrayLike) -> Interactions:
        """Some of the pairs, with the same ids; one set of entities if these are.

        Args:
            entries: a mask over the stored entries (``matrix.data``), or their places without repetition.
        """
        chosen = entry_mask("entries", entries, len(self))
        old = self.matrix
        before = np.concatenate([[0], np.cumsum(chosen)])
        offsets = before[old.indptr].astype(old.indptr.dtype)
        matrix = sp.csr_matrix((old.data[chosen], old.indices[chosen], offsets), shape=old.shape)
        times = None if self.times is None else self.times[chosen]
        weights = None if self.weights is None else self.weights[chosen]
        return replace(
            self, matrix=matrix, times=times, weights=weights, report=_counts(matrix), same_entities=self.one_set
        )

    def without_empty(self) -> Interactions:
        """The same pairs without the entities that have none: no row and no column of the matrix is empty."""
        old = self.matrix
        rows = np.flatnonzero(np.diff(old.indptr))
        kept = np.bincount(old.indices, minlength=old.shape[1]) > 0
        if len(rows) == old.shape[0] and kept.all():
            return self
        columns = (np.cumsum(kept) - 1)[old.indices].astype(old.indices.dtype)  # in the same order as before
        offsets = np.append(old.indptr[rows], old.indptr[-1])  # rows between two that are kept are empty
        shape = (len(rows), int(kept.sum()))
        matrix = sp.csr_matrix((old.data, columns, offsets), shape=shape)
        left, right = self.left_ids[rows], self.right_ids[kept]
        return replace(
            self, matrix=matrix, left_ids=left, right_ids=right, report=_counts(matrix), same_entities=self.one_set
        )

    def with_matrix(self, matrix: SparseMatrix) -> Interactions:
        """Other pairs of the same entities. Times and weights are those of the old pairs and are not kept."""
        csr = _canonical(matrix, self.shape)
        return replace(self, matrix=csr, times=None, weights=None, report=_counts(csr))

    def renamed(self, left_name: str, right_name: str, **counts: int) -> Interactions:
        """The same pairs under other column names, with more counts in the report."""
        return replace(self, left_name=left_name, right_name=right_name, report={**self.report, **counts})


def _canonical(matrix: SparseMatrix, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    csr = sp.csr_matrix(canonical("matrix", matrix, shape), dtype=np.float32, copy=True)
    check.finite("matrix", csr.data)  # float64 may be too large for float32, and added duplicates too
    return csr


def _counts(matrix: sp.csr_matrix) -> dict[str, int]:
    return {"pairs": int(matrix.nnz), "left": matrix.shape[0], "right": matrix.shape[1]}


def _choices(
    left: Column, right: Column, value: Column | None, weight: Column | None, time: Column | None
) -> tuple[list[Choice], list[Choice]]:
    others = [("value", value), ("weight", weight), ("time", time)]
    return [("left", left), ("right", right)], [(name, column) for name, column in others if column is not None]


class PairSamples:
    """Observed pairs as ``X`` of scikit-learn's searches: ``GridSearchCV(...).fit(gt.PairSamples(pairs))``.

    Every pair is a sample. Parts keep the ids of both sides, so that models of different parts know the same entities.

    Args:
        pairs: the pairs, or a scipy.sparse matrix of them.
    """

    def __init__(self, pairs: Interactions | SparseMatrix) -> None:
        if not isinstance(pairs, Interactions) and not sp.issparse(pairs):
            check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")
        self.pairs = pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(pairs)

    @property
    def shape(self) -> tuple[int]:
        """How many pairs there are."""
        return (len(self.pairs),)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, places: Any) -> PairSamples:
        """Some of the pairs, by a mask, by places or by a slice; scikit-learn adds an ellipsis for further axes."""
        if isinstance(places, tuple) and len(places) == 2 and places[1] is Ellipsis:
            places = places[0]
        if isinstance(places, slice):
            places = np.arange(len(self))[places]
        if isinstance(places, (int, np.integer)):
            check.fail("places", places, "several: a mask, an array of places or a slice")
        return PairSamples(self.pairs.subset(places))

    __iter__ = None  # pairs are taken in parts, not one by one

    def __repr__(self) -> str:
        return f"PairSamples({self.pairs!r})"


PairsLike: TypeAlias = Interactions | PairSamples | SparseMatrix | TableLike  # what estimators accept as observed pairs


def pairs_of(given: PairsLike) -> Any:
    """The pairs of samples; anything else as it is."""
    return given.pairs if isinstance(given, PairSamples) else given


def union(known: Interactions, more: Interactions, name: str = "more", strangers: bool = True) -> Interactions:
    """The pairs of both.

    Args:
        known: the first ones; their rows and columns keep their places.
        more: the second ones; weights that one of the two has not are ones, times are kept if both have them.
        name: of the argument that gave the second ones, for errors.
        strangers: whether entities that are new in ``more`` are added; their pairs are left out otherwise.
    """
    rows, left_ids = _places(f"{name}: left ids", known.left_ids, more.left_ids, strangers)
    columns, right_ids = _places(f"{name}: right ids", known.right_ids, more.right_ids, strangers)
    shape = (len(left_ids), len(right_ids))
    first, second = known.matrix.tocoo(), more.matrix.tocoo()
    i, j = rows[second.row], columns[second.col]
    kept = (i >= 0) & (j >= 0)
    keys = np.concatenate([_keys(first.row, first.col, shape), _keys(i[kept], j[kept], shape)])
    order = np.argsort(keys, kind="stable")
    last = np.append(np.diff(keys[order]) > 0, True)[: len(order)]  # of the entries of one pair, the second's
    chosen = order[last]
    offsets = np.searchsorted(keys[chosen], np.arange(shape[0] + 1, dtype=np.int64) * shape[1])
    data = np.concatenate([first.data, second.data[kept]])[chosen]
    matrix = sp.csr_matrix((data, keys[chosen] % max(shape[1], 1), offsets), shape=shape)
    weights = times = None
    if known.weights is not None or more.weights is not None:
        parts = [np.ones(len(p), np.float32) if p.weights is None else p.weights for p in (known, more)]
        weights = np.concatenate([parts[0], parts[1][kept]])[chosen]
    if known.times is not None and more.times is not None:
        times = np.concatenate([known.times, more.times[kept]])[chosen]
    report = {"pairs": int(matrix.nnz), "left": shape[0], "right": shape[1]}
    left, right = (
        size if count == len(ids) else None
        for size, count, ids in zip(known.numbered, shape, (known.left_ids, known.right_ids), strict=True)
    )
    return replace(
        known, matrix=matrix, left_ids=left_ids, right_ids=right_ids, weights=weights, times=times, report=report,
        numbered=(left, right),
    )  # fmt: skip


def _keys(rows: NDArray[Any], columns: NDArray[Any], shape: tuple[int, int]) -> NDArray[np.int64]:
    return np.asarray(rows.astype(np.int64) * shape[1] + columns)


def _places(
    name: str, known: NDArray[Any], given: NDArray[Any], strangers: bool
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The row of each given id among those known and, after them, the new ones; and all of these ids."""
    places = join(given, index_of(known)) if len(known) else np.full(len(given), -1, dtype=np.int64)
    new = places < 0
    if not strangers or not new.any():
        return places, known
    places[new] = len(known) + np.arange(int(new.sum()))
    added = given[new].tolist()
    if len(known) and known.dtype.kind != given.dtype.kind:  # numbers and text
        added = list(map(str, added)) if known.dtype == object else as_known(added, known)
        if known.dtype != object and any(isinstance(one, str) for one in added):
            example = next(one for one in added if isinstance(one, str))
            check.fail(name, repr(example), "whole numbers, as those that are known")
    ids = np.empty(len(known) + len(added), dtype=known.dtype if len(known) else given.dtype)
    ids[: len(known)], ids[len(known) :] = known, added
    return places, ids

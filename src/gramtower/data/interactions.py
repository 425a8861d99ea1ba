"""Interactions: observed pairs with ids, weights and times, read from files, frames or arrays into one CSR matrix.

Ids are whole numbers or text (data/ids.py has the rules); rows are numbered in order of first appearance among the rows
kept. Cost: O(rows) time and memory in addition to reading the file; data/matrices.py describes the order of entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cached_property
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower.data import frames
from gramtower.data.frames import Choice, Column, TableLike
from gramtower.data.ids import (
    Ids,
    IdsLike,
    Key,
    as_ids,
    as_known,
    as_objects,
    code_series,
    code_values,
    decays,
    entity_names,
    id_series,
    index_of,
    join,
    moments,
    rows_of,
)
from gramtower.data.matrices import (
    Rule,
    SparseMatrix,
    are_one_set,
    assemble,
    canonical,
    check_rows,
    checked,
    entry_mask,
    selected,
    warn_of_header,
)
from gramtower.data.sources import PathLike, existing, reading

if TYPE_CHECKING:
    import polars as pl

    from gramtower.data.parquet import ReadingProgress


Moment: TypeAlias = float | str | date | np.datetime64  # datetimes are dates
_SHOWN = 5  # pairs in a notebook


@dataclass(frozen=True, eq=False)
class Interactions:
    """Observed pairs, such as which user bought which item: the training data of a model.

    Create one with ``from_csv``, ``from_parquet``, ``from_frame``, ``from_arrays``, ``from_matrix`` or, from a log of
    events, ``from_events``.

    ``threshold=4`` keeps rows whose value is at least 4 and labels them 1. Without a threshold the value is the label
    if ``labels=True``; otherwise every row is a pair labelled 1. Rows with a missing id, or a missing value, weight or
    time in a chosen column, are dropped and counted; more than 1% of them give a warning. Then rows of the same pair
    are merged by ``duplicates``:

    - ``"max"`` (default; does not depend on the order of rows): largest label, largest weight, latest time
    - ``"sum"``: labels and weights added, latest time
    - ``"last"``, ``"first"``: label, weight and time of one row, by time if there are times, otherwise by position
    - ``"error"``: repeated pairs raise an error

    Attributes:
        matrix: scipy.sparse CSR, m × n, float32. Stored entries are the observed pairs and values the labels; the
            columns of a row increase and are distinct.
        left_ids: m distinct ids, an int64 array or an object array of str; row i of the matrix belongs to
            ``left_ids[i]``. Text files give text ("007" stays "007"), integers stay integers; see data/ids.py.
        right_ids: n distinct ids.
        times: float64, aligned with ``matrix.data``, or None. Seconds since 1970 if the source had dates.
        weights: float32, aligned with ``matrix.data``, or None.
        left_name: name of the left column.
        right_name: name of the right column.
        report: counts of rows read, dropped and merged.
        numbered: for each side, the number of entities if the ids are only row or column numbers of a matrix without
            ids; otherwise None. Such numbers are not joined with those of another matrix.
        same_entities: whether both sides are one set, such as packages that depend on packages: then no entity is
            recommended to itself. With None, :attr:`one_set` decides from the data.
        context: names of context columns; left entities are then combinations of an id and their values, and left ids
            are JSON objects such as ``{"user":"ann","device":"tv"}``.

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
    context: tuple[str, ...] = ()

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
        context: Sequence[str] = (),
    ) -> Interactions:
        """Read pairs from a delimited text file; .gz, .zst, .xz and .bz2 are decompressed.

        Args:
            path: the file, its URL such as s3://bucket/pairs.csv, or its content as bytes.
            left: column of left ids, by name or by position from 0.
            right: column of right ids.
            value: column of ratings, counts or labels.
            weight: column of pair weights.
            time: column of times: numbers, or dates and datetimes, which become seconds since 1970 (UTC if they have no
                zone).
            threshold: smallest value that makes a pair; see the class.
            labels: whether values are the labels; see the class.
            duplicates: how rows of the same pair are merged; see the class.
            separator: one character between fields.
            header: whether the first line names the columns. There is a warning if columns are chosen by position and
                the names also occur as ids.
            quote: quoting character, or None.
            comment: lines that start with this text are skipped.
            encoding: text encoding; any name that Python knows.
            same_entities: whether both sides are one set of entities; see the class.
            context: columns that make left entities together with the left id, such as ``["device", "hour"]``. Their
                values are categories; docs/how-to/context.md describes such models.
        """
        rule = Rule(threshold, labels, duplicates, value)
        texts, others = column_choices(left, right, context, value=value, weight=weight, time=time)
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
        context: Sequence[str] = (),
        progress: Callable[[ReadingProgress], None] | None = None,
    ) -> Interactions:
        """Read pairs from a Parquet file, or in a stream from a folder of Parquet parts.

        The arguments are those of :meth:`from_csv`. The parts of a folder (data/parquet.py says which files these are)
        are ordered by name and read batch by batch, in little more memory than the result takes. Folders called
        key=value give a column ``key``; a row without an id is an error. ``progress`` is called after each batch of a
        folder, in any thread, with a :class:`gramtower.data.parquet.ReadingProgress`.
        """
        rule = Rule(threshold, labels, duplicates, value)
        texts, others = column_choices(left, right, context, value=value, weight=weight, time=time)
        source = existing("path", path, folder=True)
        if source.is_dir():
            if context:
                check.fail("context", f"{', '.join(context)} with a folder", "a file, or polars.scan_parquet(folder)")
            from gramtower.data.parquet import Folder

            folder = Folder(source, texts + others, rule)
            rows = folder.read(range(len(folder.parts)), progress)
            check_rows(rows.report)
            left_name, right_name = folder.names[:2]
            return cls(**vars(rows.fields()), left_name=left_name, right_name=right_name, same_entities=same_entities)
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
        context: Sequence[str] = (),
    ) -> Interactions:
        """Read pairs from a polars, pandas or pyarrow table or a mapping of columns; see :meth:`from_csv`."""
        rule = Rule(threshold, labels, duplicates, value)
        texts, others = column_choices(left, right, context, value=value, weight=weight, time=time)
        return cls._from_columns(frames.take("frame", frame, texts + others), others, rule, same_entities)

    @classmethod
    def from_arrays(
        cls,
        left: Iterable[object],
        right: Iterable[object],
        *,
        value: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        time: Iterable[object] | None = None,
        threshold: float | None = None,
        labels: bool = False,
        duplicates: str = "max",
        left_name: str = "left",
        right_name: str = "right",
        same_entities: bool | None = None,
    ) -> Interactions:
        """Make pairs from sequences of equal length: ids (text or whole numbers; None is missing) and numbers.

        Times are numbers, or dates, datetimes, datetime64 or ISO 8601 text, UTC unless they have a zone. The other
        arguments are those of :meth:`from_csv`. Does not need polars.
        """
        rule = Rule(threshold, labels, duplicates, value)
        for name, ids in (("left", left), ("right", right)):
            if sp.issparse(ids):
                check.fail(name, "a sparse matrix", "a sequence of ids; from_matrix takes a matrix")
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
        """Make pairs from a scipy.sparse matrix; ids default to row and column numbers. Duplicates are added."""
        csr = _canonical(matrix)
        given = zip(("left_ids", "right_ids"), (left_ids, right_ids), csr.shape, strict=True)
        rows, columns = (as_ids(name, range(n) if ids is None else check.listed(name, ids)) for name, ids, n in given)
        numbered = csr.shape[0] if left_ids is None else None, csr.shape[1] if right_ids is None else None
        return cls(
            csr, rows, columns, left_name=left_name, right_name=right_name, report=_counts(csr), numbered=numbered,
            same_entities=same_entities,
        )  # fmt: skip

    @classmethod
    def from_events(
        cls,
        events: TableLike | PathLike,
        left: Column,
        right: Column,
        *,
        event: Column,
        weights: Mapping[str, float],
        time: Column | None = None,
        half_life: str | timedelta | None = None,
        now: Moment | None = None,
        duplicates: str = "sum",
        same_entities: bool | None = None,
        context: Sequence[str] = (),
    ) -> Interactions:
        """Turn a log of events, such as views and purchases, into weighted pairs labelled 1.

        The weight of a pair is the sum of the weights of its events, each of them halved for every ``half_life`` of its
        age; its time is that of the latest event. In training it multiplies the pair's loss, so that a pair with
        weight 10 counts like ten pairs with weight 1.

        Args:
            events: a polars, pandas or pyarrow table, a mapping of columns, or the path of a CSV or Parquet file. Of a
                folder of Parquet files, give ``polars.scan_parquet(folder)``.
            left: column of left ids, by name or by position from 0.
            right: column of right ids.
            event: column with the type of each event.
            weights: a number >= 0 for each type, such as ``{"view": 1, "cart": 3, "buy": 10}``. Events with weight 0
                are left out; a type without a weight is an error.
            time: column of times, as for :meth:`from_csv`.
            half_life: a duration as for :meth:`decayed`; None for weights that do not depend on time.
            now: the time from which ages count; None for the newest event.
            duplicates: how events of one pair are merged: "sum", "max" for the largest weight, or another rule of the
                class.
            same_entities: whether both sides are one set of entities; see the class.
            context: context columns, as for :meth:`from_csv`.
        """
        rule, known = Rule(None, False, duplicates), event_weights(weights)
        if half_life is not None and time is None:
            check.fail("half_life", repr(half_life), "time= as well: the column of times")
        if now is not None and half_life is None:
            check.fail("now", repr(now), "half_life= as well")
        if not any(known.values()):
            check.fail("weights", "only zeros", "a number above 0 for some type of event")
        texts, others = column_choices(left, right, context, time=time)
        texts.append(("event", event))
        columns = frames.read_columns("events", events, texts, others)
        types = frames.texts(columns.pop(len(texts) - 1))
        for kind, count in types.drop_nulls().value_counts(sort=True).rows():
            if kind not in known:
                given = f"no weight for the type {kind!r} of {count:,} events"
                check.fail("weights", given, "a number for each type of event; 0 leaves its events out")
        values = types.replace_strict(known, default=None, return_dtype=frames.polars().Float64)
        kept = values.is_null() | (values > 0)  # a missing type is counted as a missing number
        columns, values = [column.filter(kept) for column in columns], values.filter(kept)
        if half_life is not None:
            columns[-1] = frames.seconds("time", columns[-1])
            values = values * decays(columns[-1].to_numpy(), half_life, now)
        return cls._from_columns([*columns, values], [*others, ("weight", event)], rule, same_entities)

    @classmethod
    def _from_columns(
        cls, columns: list[pl.Series], others: list[Choice], rule: Rule, same_entities: bool | None
    ) -> Interactions:
        """Assemble the columns left, right, context and ``others``; the list is emptied to free text early."""
        numbers = {}
        for name, _ in reversed(others):
            column = columns.pop()
            if name != "value" or rule.reads_value:
                read = frames.seconds if name == "time" else frames.numbers
                numbers[name] = read(name, column).to_numpy()  # a missing number is NaN from here on
        left_name, right_name, *context = (column.name for column in columns)
        if context:
            columns = [_combined([columns[0], *columns[2:]]), columns[1]]
        left, right = code_series(left=columns.pop(0), right=columns.pop(0))
        fields = assemble(left, right, numbers, rule)
        names: dict[str, Any] = {"left_name": left_name, "right_name": right_name, "context": tuple(context)}
        return cls(**vars(fields), **names, same_entities=same_entities)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of left and right entities, (m, n)."""
        return (len(self.left_ids), len(self.right_ids))

    @property
    def entity_names(self) -> tuple[str, str]:
        """Names of the left and the right entities for messages, such as ("user", "item")."""
        return entity_names(" × ".join((self.left_name, *self.context)), self.right_name)

    def __len__(self) -> int:
        return int(self.matrix.nnz)

    def __repr__(self) -> str:
        m, n = self.shape
        sets, left = ", one set of entities" if self.one_set else "", " × ".join((self.left_name, *self.context))
        return f"Interactions({len(self):,} pairs of {m:,} {left!r} and {n:,} {self.right_name!r}{sets})"

    def _repr_html_(self) -> str:
        (m, n), matrix = self.shape, self.matrix
        sizes: dict[str, object] = {"pairs": len(self), self.left_name: m, self.right_name: n}
        sizes["share of all pairs"] = len(self) / max(1, m * n)
        extra = {"labels": bool(len(self)) and not bool((matrix.data == 1).all()), "weights": self.weights is not None}
        extra |= {"times": self.times is not None, "one set of entities": self.one_set}
        there = ", ".join(name for name, found in extra.items() if found)
        sizes["with"] = there or "all labels 1, no weights, no times"
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
        """Whether both sides are one set of entities: as given, or decided from the data."""
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
        """Look up the rows of left ids; an unknown id is an error that suggests similar ones."""
        return rows_of(self.left_name, ids, self._left_index)

    def right_rows(self, ids: IdsLike) -> NDArray[np.int64]:
        """Look up the columns of right ids; an unknown id is an error that suggests similar ones."""
        return rows_of(self.right_name, ids, self._right_index)

    def subset(self, entries: ArrayLike) -> Interactions:
        """Select some of the pairs; the ids of both sides are kept.

        Args:
            entries: a mask over the stored entries (``matrix.data``), or their distinct positions.
        """
        chosen = entry_mask("entries", entries, len(self))
        times, weights = (None if array is None else array[chosen] for array in (self.times, self.weights))
        return self._with(selected(self.matrix, chosen), times=times, weights=weights)

    def without_empty(self) -> Interactions:
        """Remove the entities without pairs: no row and no column of the matrix is empty."""
        old = self.matrix
        rows = np.flatnonzero(np.diff(old.indptr))
        kept = np.bincount(old.indices, minlength=old.shape[1]) > 0
        if len(rows) == old.shape[0] and kept.all():
            return self
        columns = (np.cumsum(kept) - 1)[old.indices].astype(old.indices.dtype)  # in the same order as before
        offsets = np.append(old.indptr[rows], old.indptr[-1])  # rows between two that are kept are empty
        shape = (len(rows), int(kept.sum()))
        matrix = sp.csr_matrix((old.data, columns, offsets), shape=shape)
        return self._with(matrix, left_ids=self.left_ids[rows], right_ids=self.right_ids[kept])

    def _with(self, matrix: sp.csr_matrix, **fields: NDArray[Any] | None) -> Interactions:
        return replace(self, matrix=matrix, report=_counts(matrix), same_entities=self.one_set, **fields)  # type: ignore[arg-type]

    def with_matrix(self, matrix: SparseMatrix) -> Interactions:
        """Make other pairs of the same entities; times and weights are dropped."""
        csr = _canonical(matrix, self.shape)
        return replace(self, matrix=csr, times=None, weights=None, report=_counts(csr))

    def decayed(self, half_life: str | timedelta, now: Moment | None = None) -> Interactions:
        """Multiply the weights of the pairs by 2^(−age / half_life), so that older pairs count less.

        Args:
            half_life: the age at which a pair counts half: text such as "90d", with one of the units s, min, h, d and
                w, or a timedelta of datetime, pandas or numpy.
            now: the time from which ages count: a number, a date, a datetime or ISO 8601 text like the times of pairs;
                None for the newest time. Pairs after it are an error.
        """
        if self.times is None:
            check.fail("half_life", repr(half_life), "pairs with times: name their column of times")
        found = decays(self.times, half_life, now)
        return replace(self, weights=(found if self.weights is None else found * self.weights).astype(np.float32))

    def renamed(self, left_name: str, right_name: str, **counts: int) -> Interactions:
        """Change the column names, and add counts to the report."""
        return replace(self, left_name=left_name, right_name=right_name, report={**self.report, **counts})


def _canonical(matrix: SparseMatrix, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    csr = sp.csr_matrix(canonical("matrix", matrix, shape), dtype=np.float32, copy=True)
    check.finite("matrix", csr.data)  # float64 may be too large for float32, and added duplicates too
    return csr


def _counts(matrix: sp.csr_matrix) -> dict[str, int]:
    return {"pairs": int(matrix.nnz), "left": matrix.shape[0], "right": matrix.shape[1]}


def event_weights(given: object) -> dict[str, float]:
    """Check the weights of types of events."""
    if not isinstance(given, Mapping) or not given:
        check.fail("weights", repr(given), 'numbers by type of event, such as {"view": 1, "buy": 10}')
    return {str(kind): check.number(f"weights[{kind!r}]", value, minimum=0.0) for kind, value in given.items()}


def column_choices(
    left: Column, right: Column, context: Sequence[str] = (), **others: Column | None
) -> tuple[list[Choice], list[Choice]]:
    """The columns of ids and of their context, and those of the other arguments that are not None."""
    chosen = [(name, column) for name, column in others.items() if column is not None]
    named = check.listed("context", context, "names of columns")
    if len({*named, left}) <= len(named):
        check.fail("context", ", ".join(map(repr, named)), "columns that differ from each other and from left")
    return [("left", left), ("right", right), *(("context", column) for column in named)], chosen


def _combined(columns: list[pl.Series]) -> pl.Series:
    """Ids of combinations of a left id and the values of context columns as JSON; missing where the left id is."""
    polars, own = frames.polars(), id_series("left", columns[0])
    table = polars.DataFrame([own, *(frames.texts(column) for column in columns[1:])])
    written = polars.struct(polars.all()).struct.json_encode()
    return cast("pl.Series", table.select(polars.when(own.is_not_null()).then(written)).to_series())


def column_names(pairs: Interactions) -> list[str]:
    """The names of the columns of :func:`pair_table`."""
    return list(_pair_columns(pairs, has_values(pairs)))


def _pair_columns(pairs: Interactions, values: bool) -> dict[str, NDArray[np.generic] | None]:
    """The columns of the table: ids (None here), values if asked for, and weights and times where there are any.

    Where ids have such a name, that column is called pair_value, pair_weight or pair_time.
    """
    numbers = {"value": pairs.matrix.data if values else None, "weight": pairs.weights, "time": pairs.times}
    there = {name: column for name, column in numbers.items() if column is not None}
    ids = pairs.left_name, *pairs.context, pairs.right_name
    return dict(zip(table_names(ids, there), [*[None] * len(ids), *there.values()], strict=True))


def table_names(ids: Sequence[str], numbers: Iterable[str]) -> list[str]:
    """Names of the columns of a table of pairs, which differ: those of ids, then value, weight and time."""
    found = list(ids) if ids[0] != ids[-1] else ["left", *ids[1:-1], "right"]
    for name in numbers:
        while name in found:
            name = f"pair_{name}"
        found.append(name)
    return found


def has_values(pairs: Interactions) -> bool:
    """Whether the values say anything: some are not 1."""
    return bool((pairs.matrix.data != 1).any())


def pair_table(pairs: Interactions, start: int, stop: int, values: bool) -> pl.DataFrame:
    """Pairs ``start`` to ``stop`` as a table, with their values if asked for."""
    polars = frames.polars()
    rows = np.searchsorted(pairs.matrix.indptr, np.arange(start, stop), side="right") - 1
    left = [pairs.left_ids[rows]]
    if pairs.context:
        read = [json.loads(key) for key in left[0].tolist()]
        left = [as_objects([one[name] for one in read]) for name in (pairs.left_name, *pairs.context)]
    ids = iter([*left, pairs.right_ids[pairs.matrix.indices[start:stop]]])
    kind, cells = None if pairs.context else polars.String, {}  # ids in a context may be numbers
    for name, numbers in _pair_columns(pairs, values).items():
        part = next(ids) if numbers is None else numbers[start:stop]
        text = part.dtype == object
        cells[name] = polars.Series(part.tolist(), dtype=kind) if text else polars.Series(part)
    found: pl.DataFrame = polars.DataFrame(cells)
    return found


class PairSamples:
    """Observed pairs as ``X`` of scikit-learn's searches: ``GridSearchCV(...).fit(gt.PairSamples(pairs))``.

    Every pair is a sample, so that scikit-learn can select pairs by position. Parts keep the ids of both sides.

    Args:
        pairs: the pairs, or a scipy.sparse matrix of them.
    """

    def __init__(self, pairs: Interactions | SparseMatrix) -> None:
        if not isinstance(pairs, Interactions) and not sp.issparse(pairs):
            check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")
        self.pairs = pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(pairs)

    @property
    def shape(self) -> tuple[int]:
        """A tuple with the number of pairs."""
        return (len(self.pairs),)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, places: ArrayLike | slice | tuple[ArrayLike | slice, EllipsisType]) -> PairSamples:
        """Select pairs by a mask, positions or a slice; scikit-learn adds an ellipsis for further axes."""
        if isinstance(places, tuple) and len(places) == 2 and places[1] is Ellipsis:
            places = places[0]
        if isinstance(places, slice):
            places = np.arange(len(self))[places]
        if isinstance(places, (int, np.integer)):
            check.fail("places", places, "several pairs: a mask, an array of positions or a slice")
        return PairSamples(self.pairs.subset(places))

    __iter__ = None  # pairs are selected in parts, not one by one

    def __repr__(self) -> str:
        return f"PairSamples({self.pairs!r})"


PairsLike: TypeAlias = Interactions | PairSamples | SparseMatrix | TableLike  # what estimators accept as observed pairs


def pairs_of(given: PairsLike) -> Interactions | SparseMatrix | TableLike:
    """Unwrap PairSamples; anything else is returned unchanged."""
    return given.pairs if isinstance(given, PairSamples) else given


def union(known: Interactions, more: Interactions, name: str = "more", add_new: bool = True) -> Interactions:
    """Combine two sets of pairs: the entities of the first, which keep their places, then the new ones of the second.

    If both have a pair, the label, weight and time of the second are kept. Missing weights are 1, and times are kept if
    both sets have them. Without ``add_new`` the pairs of new entities are dropped. Cost: O(pairs log pairs).
    """
    rows, left_ids = _places(f"{name}: left ids", known.left_ids, more.left_ids, add_new)
    columns, right_ids = _places(f"{name}: right ids", known.right_ids, more.right_ids, add_new)
    shape = (len(left_ids), len(right_ids))
    first, second = known.matrix.tocoo(), more.matrix.tocoo()
    i, j = rows[second.row], columns[second.col]
    kept = (i >= 0) & (j >= 0)
    ends = ((first.row, first.col), (i[kept], j[kept]))
    keys = np.concatenate([row.astype(np.int64) * shape[1] + column for row, column in ends])
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
    sizes = zip(known.numbered, shape, known.shape, strict=True)
    left, right = (size if after == before else None for size, after, before in sizes)
    return replace(
        known, matrix=matrix, left_ids=left_ids, right_ids=right_ids, weights=weights, times=times,
        report=_counts(matrix), numbered=(left, right),
    )  # fmt: skip


def _places(name: str, known: Ids, given: Ids, add_new: bool) -> tuple[NDArray[np.int64], Ids]:
    """The row of each given id, with new ids after the known ones, and all ids."""
    places = join(given, index_of(known)) if len(known) else np.full(len(given), -1, dtype=np.int64)
    new = places < 0
    if not add_new or not new.any():
        return places, known
    places[new] = len(known) + np.arange(int(new.sum()))
    added = given[new].tolist()
    if len(known) and known.dtype.kind != given.dtype.kind:  # numbers and text
        added = list(map(str, added)) if known.dtype == object else as_known(added, known)
        if known.dtype != object and (texts := [one for one in added if isinstance(one, str)]):
            check.fail(name, repr(texts[0]), "whole numbers, like the known ids")
    ids = np.empty(len(known) + len(added), dtype=known.dtype if len(known) else given.dtype)
    ids[: len(known)], ids[len(known) :] = known, added
    return places, ids

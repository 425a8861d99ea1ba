"""Lists as Arrow batches: the same lists for Spark, for Ray and for everything that reads and writes Arrow streams.

A :class:`Lists` has the embeddings, the pairs to leave out and the rules of a ranking, prepared once. It can be sent to
other processes, and turns batches of left ids into batches of answers with the columns of the file of recommend_all.
Cost: that of ``recommend`` for the rows of a batch. Memory: the model, and the answers of one batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

import numpy as np

from gramtower._util import checks as check
from gramtower._util.checks import need
from gramtower.data.tables import FeaturesLike
from gramtower.model.fitted import FittedModel, ListRules
from gramtower.model.side import Side
from gramtower.model.two_tower import TwoTower, load
from gramtower.retrieval.topk import Ranking

if TYPE_CHECKING:
    from pyarrow import Array, DataType, RecordBatch, RecordBatchReader, Schema, Table

Model = TwoTower | FittedModel | str | Path
_ANSWERS = 1 << 20  # of a batch
_USE = "lists as Arrow batches"


class ListOptions(ListRules, total=False):
    """The filters, exclusions and rules of lists; :meth:`FittedModel.recommend` describes each."""

    right_features: FeaturesLike


class Stream(Protocol):
    """A table or stream that other packages can read through Arrow's C interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the stream in a capsule."""


@dataclass(frozen=True)
class Lists:
    """A ranking of the right entities of a model for any of its left entities."""

    left: Side  # the left entities
    ranking: Ranking  # a row for each of them
    right_ids: Array  # ids of the right entities
    k: int  # length of the lists
    schema: Schema  # of the answers

    def batches(self, batches: Iterable[RecordBatch], column: str | None = None) -> Iterator[RecordBatch]:
        """Make the answers for batches of left ids, which are in a column, by default the first one."""
        rows = max(1, _ANSWERS // self.k)
        for batch in batches:
            for start in range(0, batch.num_rows, rows):
                yield self._answers(batch.slice(start, rows).column(0 if column is None else column))

    def table(self, table: Table, column: str | None = None) -> Table:
        """Make the answers for a table of left ids."""
        pyarrow = need("pyarrow", _USE)
        return pyarrow.Table.from_batches(self.batches(table.to_batches(), column), self.schema)

    def _answers(self, ids: Array) -> RecordBatch:
        pa = need("pyarrow", _USE)
        columns, values = self.ranking.rows(self.left.rows(ids.to_pylist())).top(self.k)
        kept = np.isfinite(values)
        rows, places = np.nonzero(kept)
        left = ids.cast(self.schema.field(0).type).take(pa.array(rows))
        rank, right = pa.array(places + 1, pa.int32()), self.right_ids.take(pa.array(columns[kept]))
        return pa.RecordBatch.from_arrays([left, rank, right, pa.array(values[kept], pa.float32())], schema=self.schema)


def lists_of(model: Model, k: int = 10, **options: Unpack[ListOptions]) -> Lists:
    """Prepare the lists of a model; the arguments are those of ``recommend_all``."""
    pa = need("pyarrow", _USE)
    k = check.count("k", k)
    for name in options:
        check.choice("options", name, tuple(ListOptions.__annotations__))
    if isinstance(model, (str, Path)):
        model = load(model)
    if not isinstance(model, (TwoTower, FittedModel)):
        check.fail("model", type(model).__name__, "a fitted model, or the path of a saved one")
    fitted = model if isinstance(model, FittedModel) else model.fitted_
    here, ranking = fitted.ranked(**options)
    right_ids = pa.array(np.arange(len(here.right)) if here.right.ids is None else here.right.ids)
    types = [_type(here.left), pa.int32(), _type(here.right), pa.float32()]
    left, right = here.list_columns
    schema = pa.schema([pa.field(*pair) for pair in zip((left, "rank", right, "score"), types, strict=True)])
    return Lists(here.left, ranking, right_ids, min(k, len(here.right)), schema)


def _type(side: Side) -> DataType:
    pa = need("pyarrow", _USE)
    if side.ids is not None and side.ids.dtype == object:
        for key in side.ids:
            if not isinstance(key, str):
                check.fail("right_features", f"an entity called {key!r}", "a table with a column of ids")
        return pa.string()
    return pa.int64()


def recommend(
    model: Model, source: Stream, k: int = 10, *, column: str | None = None, **options: Unpack[ListOptions]
) -> RecordBatchReader:
    """Make the lists of ``recommend_all`` for the left entities of an Arrow stream, while it is read.

    Args:
        model: a model, or the path of a saved one.
        source: a stream with ids of left entities: a DuckDB relation, a pyarrow reader or table, a polars frame.
        k: length of the lists.
        column: the column of ids; the first one by default.
        options: filters, exclusions and other rules, as for ``recommend_all``.

    Returns:
        A ``pyarrow.RecordBatchReader`` with a row for each answer: left id, rank from 1, right id and score. DuckDB and
        polars read it like a table.
    """
    pa = need("pyarrow", _USE)
    if not hasattr(source, "__arrow_c_stream__"):
        check.fail("source", type(source).__name__, "an Arrow stream, such as a DuckDB relation or a pyarrow reader")
    lists = lists_of(model, k, **options)
    reader = pa.RecordBatchReader.from_stream(source)
    if column is not None and column not in reader.schema.names:
        check.fail("column", repr(column), f"one of {', '.join(reader.schema.names)}")
    return pa.RecordBatchReader.from_batches(lists.schema, lists.batches(reader, column))

"""One side of a fitted model: ids, features and embeddings of its entities, and entities that training did not have.

A FeatureTable, frame or file with the column of ids that the model was fitted with (a FeatureTable: its own) gives
ids; rows without one are left out of joins, and an id twice is an error. A matrix has no ids: its entities are known by
place. In a model whose rows are numbers they get the next numbers, otherwise the names ("new", 0), ("new", 1), ….
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.frames import TableLike
from gramtower.data.ids import (
    IdsLike,
    Key,
    as_ids,
    as_known,
    as_objects,
    id_array,
    index_of,
    is_of_other_type,
    join,
    key_of,
    rows_of,
)
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import SparseMatrix, canonical, resized, warn_of_ids
from gramtower.data.pairs import MatrixLike, as_features
from gramtower.data.tables import FeaturesLike, FeatureTable
from gramtower.engine.towers.towers import Towers
from gramtower.model.feature_spec import FeatureSpec, IdArray, Matrix, is_sparse, new_matrix, read_table

Name: TypeAlias = Key | tuple[str, int]  # an id, or ("new", 0), ("new", 1), … of entities that have none
HistoriesLike: TypeAlias = (
    Interactions | SparseMatrix | TableLike | str | Path | Iterable[Iterable[Key]]
)  # right ids of left entities


@dataclass
class Side:
    """Entities of one side."""

    name: str  # "left" or "right"
    ids: IdArray | None  # one id for each row, int64 or text (objects); None when rows are known by number
    embeddings: Tensor  # rows × k
    inputs: FeatureSpec  # what its tower sees of them
    # where ids are row numbers of a matrix without ids, how many rows it had; see Interactions
    numbered: int | None = None
    added: int = 0  # how many entities, the last ones, were not there in training
    called: str = "entity"  # name of its entities in messages, such as "user"; a model sets it from its names

    @property
    def trained(self) -> int:
        return len(self) - self.added

    @cached_property
    def index(self) -> dict[Any, int]:
        """The row of each id, or of each row number where there are no ids."""
        return index_of(np.arange(len(self)) if self.ids is None else self.ids)

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, ids: Name | Iterable[Name]) -> NDArray[np.int64]:
        """Row numbers of ids; unknown ones are named with the nearest known."""
        wanted = check.ids(f"{self.called} ids", ids)
        if self.ids is None:
            return self._numbers(wanted)
        ways = self.inputs.ways(self.name)
        expected = "ids seen in training" + (f", or {' or '.join(ways)} for new entities" if ways else "")
        return rows_of(f"{self.called} ids", wanted, self.index, expected)

    def row(self, key: Name | None) -> int:
        is_name = isinstance(key, tuple) and len(key) == 2
        if key is None or (isinstance(key, (list, tuple, np.ndarray)) and not is_name):
            check.fail(self.name, "None" if key is None else type(key).__name__, "one id")
        return int(self.rows([key])[0])

    def known_rows(self, name: str, ids: Name | Iterable[Name]) -> NDArray[np.int64]:
        """Row numbers of those ids that are known; a warning counts the others.

        Ids of the other type, such as the text "7" for the number 7, are refused as in :meth:`rows`.
        """
        wanted = check.ids(name, ids)
        if self.ids is None:
            self._numbers([key for key in wanted if not _is_number(key)][:1])
            index: Any = {int(key): int(key) for key in wanted if _is_number(key) and 0 <= key < len(self)}
        else:
            wanted, index = [key if isinstance(key, tuple) else key_of(name, key) for key in wanted], self.index
        unknown = [key for key in wanted if key not in index]
        self.rows([key for key in unknown if self.ids is not None and is_of_other_type(key, index)][:1])
        warn_of_ids(name, unknown, len(wanted))
        return np.array([index[key] for key in wanted if key in index], dtype=np.int64)

    def _numbers(self, wanted: list[Key]) -> NDArray[np.int64]:
        for key in wanted:
            if not _is_number(key) or not 0 <= key < len(self):
                check.fail(f"{self.called} ids", repr(key), f"row numbers from 0 to {len(self) - 1}")
        return np.array(wanted, dtype=np.int64)

    def names(self, rows: NDArray[np.int64]) -> IdArray:
        """Ids of row numbers; −1, for no answer, becomes None (text) or −1 (numbers)."""
        if self.ids is None:
            return rows
        padded: NDArray[Any] = np.empty(len(self.ids) + 1, dtype=self.ids.dtype)  # the last place is reached by −1
        padded[:-1], padded[-1] = self.ids, -1 if self.ids.dtype.kind == "i" else None
        return np.asarray(padded[rows])


def _is_number(key: object) -> TypeGuard[int]:
    return isinstance(key, (int, np.integer)) and not isinstance(key, bool)


def normalised(embeddings: Tensor) -> Tensor:
    """Rows scaled to length one; zero rows stay zero."""
    return torch.nn.functional.normalize(embeddings, dim=1)


def history_matrix(right: Side, histories: HistoriesLike) -> sp.csr_matrix:
    """What new left entities have seen: from lists of right ids, or from a sparse matrix. Larger values are newer."""
    if is_sparse(histories):
        if histories.ndim != 2 or histories.shape[1] not in (len(right), right.trained):
            check.fail("histories", f"shape {histories.shape}", f"{len(right)} columns, one for each {right.called}")
        found = sp.csr_matrix(canonical("histories", histories), dtype=np.float64)  # float32 would merge times
        return resized(found, (found.shape[0], len(right)))
    lists = check.listed("histories", histories, "lists of right ids")
    return listed_histories(
        [right.rows(check.listed("histories", history, "right ids")) for history in lists], len(right)
    )


def listed_histories(columns: list[NDArray[np.int64]], width: int) -> sp.csr_matrix:
    """Lists of columns, the oldest first, as rows of a matrix; values are places from 1, of several the last."""
    latest = [np.unique(one[::-1], return_index=True) for one in columns]  # places from the end
    offsets = np.cumsum([0, *(len(found) for found, _ in latest)])
    indices = np.concatenate([np.empty(0, np.int64), *(found for found, _ in latest)])
    places = [len(one) - back for one, (_, back) in zip(columns, latest, strict=True)]
    values = np.concatenate([np.empty(0, np.int64), *places]).astype(np.float32)
    return sp.csr_matrix((values, indices, offsets), (len(columns), width))


@dataclass(frozen=True, eq=False)
class Described:
    """Rows that describe entities of a side."""

    side: Side
    # for each part of the side's inputs that the caller gives, a polars frame, a matrix or None, row by row alike
    parts: list[Any]
    ids: IdArray | None  # of the rows, or None if nothing has any
    missing: NDArray[np.bool_] | None  # rows without an id; None if there are none
    count: int  # how many rows

    def names(self) -> list[Any]:
        """The ids of the rows, None where there is none; their numbers where nothing has ids."""
        if self.ids is None:
            return list(range(self.count))
        missing = np.zeros(self.count, dtype=bool) if self.missing is None else self.missing
        return [None if absent else key for absent, key in zip(missing, self.ids.tolist(), strict=True)]

    def places(self) -> dict[Key, int]:
        """The row of each id; an id in two rows is refused."""
        assert self.ids is not None
        rows = np.arange(self.count) if self.missing is None else np.flatnonzero(~self.missing)
        keys = self.ids[rows].tolist()
        found = dict(zip(keys, rows.tolist(), strict=True))
        if len(found) < len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            check.fail(f"{self.side.name}_features", f"id {twice!r} in several rows", "each id in one row")
        return found

    def rows_in(self, index: Mapping[Key, int]) -> NDArray[np.int64]:
        """The row of each id in an index, −1 where it has none; all −1 without ids."""
        if self.ids is None:
            return np.full(self.count, -1, dtype=np.int64)
        found = join(self.ids, index)
        return found if self.missing is None else np.where(self.missing, -1, found)

    def encoded(self, rows: NDArray[np.int64]) -> list[Matrix | None]:
        """Some rows in each part, not scaled; every column of a table is missing in a row of −1."""
        name, found = f"{self.side.name}_features", list[Matrix | None]()
        for part, given in zip(self.side.inputs.given, self.parts, strict=True):
            if given is None:
                found.append(None)
            elif part.table is not None:
                found.append(part.table.encode_frame(_gathered(given, rows), name))
            elif (rows < 0).any():
                check.fail(name, "no row for some entity", "a row of the matrix for each one")
            else:
                found.append(sp.csr_matrix(given)[rows] if sp.issparse(given) else given[rows])
        return found


def _gathered(frame: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of a polars frame; a row of −1 is one of missing values."""
    pl = frames.polars()
    return frame.select(pl.all().gather(pl.Series(rows, dtype=pl.Int64).replace(-1, None)))


def described(side: Side, features: FeaturesLike) -> Described:
    """What was given for entities of a side; tables among several parts are joined by id, matrices by place."""
    name = f"{side.name}_features"
    parts: list[Any] = []
    found: list[tuple[IdArray, NDArray[np.bool_] | None] | None] = []
    for part, rows in zip(side.inputs.given, side.inputs.listed(side.name, features), strict=True):
        if rows is None or part.table is None:
            parts.append(None if rows is None else new_matrix(name, part, rows))
            found.append(None)
        else:
            column = rows.id if isinstance(rows, FeatureTable) else part.table.id
            source: Any = rows.source if isinstance(rows, FeatureTable) else rows
            frame = read_table(name, source)
            parts.append(frame)
            found.append(id_array(name, frame[column]) if column in frame.columns else None)
    if all(part is None for part in parts):
        check.fail(name, "None", "rows of a table or of a matrix")
    first = next((place for place, ids in enumerate(found) if ids is not None), None)
    ids, missing = (None, None) if first is None else found[first] or (None, None)
    for place, other in enumerate(found):
        if other is not None and place != first and ids is not None:
            there = Described(side, [], *other, len(parts[place])).places()
            parts[place] = _gathered(parts[place], Described(side, [], ids, missing, len(ids)).rows_in(there))
    counts = sorted({int(part.shape[0]) for part in parts if part is not None})
    if len(counts) > 1:
        check.fail(name, f"{' and '.join(map(str, counts))} rows", "as many rows in each")
    return Described(side, parts, ids, missing, counts[0])


def new_rows(
    side: Side, what: Described | None, history: sp.csr_matrix | None, rows: NDArray[np.int64] | None = None
) -> tuple[list[Matrix | None], int]:
    """The rows of new entities in each given part, not scaled, and how many there are; ``rows`` are some of them."""
    if history is not None and not side.inputs.has_history:
        check.fail("histories", "lists of ids", 'a model fitted with left_features="history"')
    if what is None:
        assert history is not None
        return [None] * len(side.inputs.given), history.shape[0]
    rows = np.arange(what.count) if rows is None else rows
    if history is not None and history.shape[0] != len(rows):
        check.fail(f"{side.name}_features, histories", f"{len(rows)} and {history.shape[0]} rows", "as many in each")
    return what.encoded(rows), len(rows)


def new_features(
    side: Side, what: Described | None, history: sp.csr_matrix | None, rows: NDArray[np.int64] | None = None
) -> Matrix:
    """What the tower sees of new entities: of all that are described, or of some rows of them."""
    return side.inputs.encoded(side.name, *new_rows(side, what, history, rows), history)


def embedded(
    side: Side, towers: Towers, what: Described | None, history: sp.csr_matrix | None,
    rows: NDArray[np.int64] | None = None,
) -> Tensor:  # fmt: skip
    """New entities through their tower."""
    features = new_features(side, what, history, rows)
    return towers.embed(side.name, as_features(side.name, features, features.shape[0])).cpu()


def extended(
    side: Side, towers: Towers, features: FeaturesLike, history: sp.csr_matrix | None = None,
    ids: IdsLike | None = None, kept: bool = False,
) -> tuple[Side, NDArray[np.int64]]:  # fmt: skip
    """A side with entities that it does not know yet, and the row there of each row that was given."""
    name = f"{side.name}_features"
    what = None if features is None else described(side, features)
    count = what.count if what is not None else 0 if history is None else history.shape[0]
    if ids is not None:
        if what is not None and what.ids is not None:
            check.fail(f"{side.name}_ids", "ids", f"none: {name} has a column of ids")
        names = as_ids(f"{side.name}_ids", check.listed(f"{side.name}_ids", ids))
        if len(names) != count:
            check.fail(f"{side.name}_ids", f"{len(names)} ids", f"{count}, one for each row")
        index = {key: row for row, key in enumerate(names.tolist())}
    elif what is not None and what.ids is not None:
        names, index = what.ids, what.places()
    elif kept and side.ids is not None:
        check.fail(name, "rows without ids", f"a table with a column of ids, or {side.name}_ids")
    else:
        names, index = None, {}
    if names is None:
        rows = np.arange(count)
        places = len(side) + rows
        all_ids: IdArray | None = None
        if side.ids is not None:
            all_ids = as_objects([*side.ids.tolist(), *(("new", i) for i in range(count))])
    else:
        rows, places, all_ids = _joined(side, name, names, index)
    shown = None if history is None else sp.csr_matrix(history[rows])
    given, count = new_rows(side, what, shown, rows)
    return appended(side, towers, all_ids, given, count, shown), places


def appended(
    side: Side, towers: Towers, ids: IdArray | None, given: Sequence[MatrixLike | None], count: int,
    history: sp.csr_matrix | None = None,
) -> Side:  # fmt: skip
    """A side with ``count`` more entities, by their rows in each given part, not scaled; ``ids`` are those of all."""
    rows = side.inputs.encoded(side.name, given, count, history)
    new = towers.embed(side.name, as_features(side.name, rows, count)).cpu().to(side.embeddings.dtype)
    return replace(
        side, ids=ids, embeddings=torch.cat([side.embeddings, new]), added=side.added + count,
        inputs=side.inputs.with_more_rows(len(side), given),
    )  # fmt: skip


def _joined(
    side: Side, name: str, names: IdArray, index: Mapping[Key, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], IdArray]:
    """The rows of unknown ids, the place of every row in the grown side (−1 without an id), and all its ids."""
    known = np.arange(len(side)) if side.ids is None else side.ids
    keys = np.array(list(index), dtype=names.dtype) if names.dtype != object else as_objects(list(index))
    rows = np.fromiter(index.values(), dtype=np.int64, count=len(index))
    found = join(keys, index_of(known))
    fresh = found < 0
    places = np.full(len(names), -1, dtype=np.int64)
    places[rows] = np.where(fresh, len(side) + np.cumsum(fresh) - 1, found)
    return rows[fresh], places, np.concatenate([known, _alike(name, keys[fresh], known)])


def _alike(name: str, new: IdArray, known: IdArray) -> IdArray:
    """New ids of the type of those known: text, or whole numbers."""
    if known.dtype == object:
        return as_objects([str(key) for key in new.tolist()])
    keys = new.tolist() if new.dtype != object else as_known(new.tolist(), known)
    strange = next((key for key in keys if isinstance(key, str)), None)
    if strange is not None:
        check.fail(name, f"the id {strange!r}", "whole numbers, as the model's ids are")
    return np.array(keys, dtype=np.int64)

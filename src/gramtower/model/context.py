"""Context: left entities that are combinations of an id and context columns, such as a user on a device at an hour.

``Interactions.from_frame(…, context=["device"])`` makes one left entity of each combination. Its id is a JSON object,

    {"user":"ann","device":"tv"}

and its features are one-hot: a column for the user, which all combinations of the user share, and one for each value of
the context. So a combination that was never seen is embedded by its user and its values; a value that was never seen,
or is not given, counts as missing. What a user has seen in one context is seen in all of them. Cost: O(ids), and the
pairs of a user once for each of its combinations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.ids import IdsLike, Key, as_ids, rows_of
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import ones_at, union
from gramtower.data.tables import FeaturesLike, FeatureTable
from gramtower.distributed.group import current_group
from gramtower.model.feature_spec import COMBINATION, FeatureSpec, GivenFeatures, IdArray, is_combination

Value = str | int | float | bool | None
Context = Mapping[str, Value | Sequence[Value]]  # values of context columns, for all entities or one for each


def with_context(pairs: Interactions, left_features: FeaturesLike) -> FeaturesLike:
    """The left features of a fit on pairs with context: the table of their combinations."""
    if (processes := current_group().size) > 1:
        check.fail("context", f"columns in {processes} processes", "a fit in one process")
    if any(map(is_combination, GivenFeatures("left", left_features).parts)):
        return left_features  # made here before
    if left_features is not None:
        expected = "None: with context columns the left tower sees the id and the context"
        check.fail("left_features", type(left_features).__name__, expected)
    return [combinations_table(pairs.left_ids, [pairs.left_name, *pairs.context])]


def combinations_table(ids: IdArray, columns: Sequence[str]) -> FeatureTable:
    """The features of combinations, by their ids."""
    cells = _cells(ids, columns)
    frame = {COMBINATION: ids.tolist()} | {name: [_text(cell) for cell in cells[name]] for name in columns}
    return FeatureTable(frame, COMBINATION, categorical=list(columns))


def _cells(ids: IdArray, columns: Sequence[str]) -> dict[str, list[Key]]:
    """What the ids of combinations say, by column."""
    found: dict[str, list[Key]] = {name: [] for name in columns}
    for key in ids.tolist():
        try:
            one = json.loads(key)
            for name in columns:
                found[name].append(one[name])
                hash(one[name])
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            check.fail("left ids", repr(key)[:60], f"JSON objects with values of {', '.join(columns)}")
    return found


def _text(value: object) -> str | None:
    """A value as tables write it: whole numbers without a point, and true or false in lower case."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool):
        return str(value).lower()
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return value if value is None or isinstance(value, str) else str(value)


@dataclass(frozen=True, eq=False)
class Combinations:
    """The combinations that a model knows: rows of its left side."""

    columns: list[str]  # of the left id, and of the context
    ids: IdArray  # of all combinations

    @classmethod
    def of(cls, inputs: FeatureSpec, ids: IdArray | None) -> Combinations | None:
        """Those of a model, from what its left tower sees; None for a model without context."""
        table = inputs.parts[0].table if len(inputs.parts) == 1 else None
        return cls(table.columns, ids) if table is not None and is_combination(table) and ids is not None else None

    @cached_property
    def _users(self) -> tuple[IdArray, dict[Key, int], NDArray[np.int64]]:
        """Distinct left ids without context, the place of each, and that of each combination."""
        index: dict[Key, int] = {}
        first = self.columns[0]
        own = [index.setdefault(key, len(index)) for key in _cells(self.ids, [first])[first]]
        return as_ids(first, list(index)), index, np.array(own, dtype=np.int64)

    @property
    def users(self) -> IdArray:
        """Distinct left ids without context."""
        return self._users[0]

    def rows(self, ids: IdsLike) -> NDArray[np.int64]:
        """Places of ids in :attr:`users`."""
        return rows_of(f"{self.columns[0]} ids", ids, self._users[1], "ids seen in training")

    def of_users(self, ids: IdArray) -> IdArray:
        """Those of some combinations whose users are known."""
        first = self.columns[0]
        known = [key in self._users[1] for key in _cells(ids, [first])[first]]
        found: IdArray = ids[np.array(known, dtype=bool)]
        return found

    def seen(self, pairs: sp.csr_matrix) -> sp.csr_matrix:
        """What each of :attr:`users` has seen in any context, as ones, from the pairs of combinations."""
        own = self._users[2]
        by_user = ones_at(own, np.arange(len(own)), (len(self.users), len(own)))
        return union(sp.csr_matrix(by_user @ pairs))

    def spread(self, pairs: sp.csr_matrix) -> sp.csr_matrix:
        """The pairs of combinations with those of the same user in other contexts, as ones."""
        return self.of_combinations(self.seen(pairs))

    def of_combinations(self, pairs: sp.csr_matrix) -> sp.csr_matrix:
        """Pairs of :attr:`users` as those of each of their combinations."""
        return sp.csr_matrix(pairs[self._users[2]])

    def row(self, place: int) -> dict[str, list[str | None]]:
        """A table of the combination in one place of :attr:`ids`, for the left tower."""
        cells = _cells(self.ids[[place]], self.columns)
        return {name: [_text(cell) for cell in column] for name, column in cells.items()}

    def features(self, places: NDArray[np.int64], context: Context | None) -> dict[str, list[str | None]]:
        """A table of users in a context, for the left tower."""
        if context is not None and not isinstance(context, Mapping):
            check.fail("context", type(context).__name__, f"values by column, of {', '.join(self.columns[1:])}")
        given, (name, *others) = context or {}, self.columns
        for column in given:
            if column not in others:
                check.fail("context", repr(column), f"values by column, of {', '.join(others)}")
        frame = {name: [_text(key) for key in self.users[places].tolist()]}
        for column in others:
            value = given.get(column)
            single = value is None or isinstance(value, (str, int, float, np.generic))
            cells = [value] * len(places) if single else check.listed("context", value)
            if len(cells) != len(places):
                check.fail("context", f"{len(cells)} values of {column!r}", f"one, or {len(places)}, one for each id")
            frame[column] = [_text(cell) for cell in cells]
        return frame

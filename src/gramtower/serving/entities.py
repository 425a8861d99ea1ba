"""The entities of one side of a served model: ids ↔ rows, near ids of a wrong one, search as one types.

Ids are looked up by their hashes. A search goes through one text of all ids and titles in lower
case, joined by line ends: matches at the beginning of an id or title first, then anywhere; O(characters), without a
Python loop over entities.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.ids import as_known, is_of_other_type
from gramtower.serving.errors import Refused, shown
from gramtower.serving.rowindex import RowIndex
from gramtower.serving.table import EntityTable

Key = str | int
_NAMED = 3  # unknown ids that an answer names


class Entities:
    """One side.

    Args:
        side: "left" or "right".
        ids: one id for each row, whole numbers or text; None where rows are known by number.
        embeddings: rows × dim.
        degrees: observed pairs of each.
        table: columns to show and to filter by.

    Attributes:
        index: the row of each id; None where rows are known by number.
    """

    def __init__(
        self,
        side: str,
        ids: NDArray[Any] | None,
        embeddings: Tensor,
        degrees: NDArray[np.int64],
        table: EntityTable | None = None,
    ) -> None:
        self.side, self.ids, self.embeddings, self.degrees, self.table = side, ids, embeddings, degrees, table
        self.index = None if ids is None else RowIndex(ids)
        self.text = ids is not None and ids.dtype.kind != "i"

    def __len__(self) -> int:
        return len(self.embeddings)

    def row(self, key: Key) -> int:
        """The row of an id, −1 if it is unknown."""
        if self.index is not None:
            return self.index.row(key)
        return key if isinstance(key, int) and 0 <= key < len(self) else -1

    def rows(self, keys: Sequence[Key]) -> NDArray[np.int64]:
        """The rows of ids.

        Raises:
            Refused: 404, naming unknown ids and near ones.
        """
        found = np.fromiter((self.row(key) for key in keys), np.int64, len(keys))
        if len(found) and found.min() < 0:
            unknown = list(dict.fromkeys(key for key, row in zip(keys, found, strict=True) if row < 0))
            raise self._unknown(unknown)
        return found

    def known_rows(self, keys: Sequence[Key]) -> tuple[NDArray[np.int64], int]:
        """The rows of known ids, increasing and once each, and the number of unknown ids.

        Raises:
            Refused: 404 for ids that are known in the other type, as text or as a number.
        """
        found = np.fromiter((self.row(key) for key in keys), np.int64, len(keys))
        unknown = [key for key, row in zip(keys, found, strict=True) if row < 0]
        if self.index is not None and any(is_of_other_type(key, self.index) for key in unknown):
            self.rows(keys)
        return np.unique(found[found >= 0]), len(unknown)

    def names(self, rows: NDArray[np.int64]) -> list[Key]:
        """The ids of rows."""
        named: list[Key] = (rows if self.ids is None else self.ids[rows]).tolist()
        return named

    def near(self, key: Key) -> list[Key]:
        """Known ids like an unknown one: the same in the other type, or a few edits away."""
        if self.ids is None or self.index is None:
            return []
        other: Key = str(key) if isinstance(key, int) else as_known([key], self.ids)[0]
        if other in self.index:
            return [other]
        return list(check.near(key, self.index)) if self.text and isinstance(key, str) else []  # type: ignore[arg-type]

    def _unknown(self, unknown: Sequence[Key]) -> Refused:
        near = {str(key)[:200]: self.near(key) for key in unknown[:_NAMED]}
        named = ", ".join(shown(key) for key in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        close = [name for names in near.values() for name in names]
        hint = f" (nearest: {', '.join(shown(name) for name in close[:_NAMED])})" if close else ""
        kind = "text" if self.text else "whole numbers"
        rows = f" from 0 to {len(self) - 1}" if self.ids is None else ""
        message = f"{self.side} ids: got unknown {named}{more}{hint}, expected ids of the model, which are {kind}{rows}"
        return Refused(404, message, unknown=[str(key)[:200] for key in unknown[:_NAMED]], near=near)

    @cached_property
    def _texts(self) -> tuple[str, list[int]]:
        """Ids and titles, a line each, in lower case; and where each entity begins."""
        ids = range(len(self)) if self.ids is None else self.ids.tolist()
        titles = None if self.table is None else self.table.titles()
        parts, starts, at = [], [], 0
        for row, key in enumerate(ids):
            title = None if titles is None else titles[row]
            names = (key,) if title is None or title == key else (key, title)
            line = "".join("\n" + str(name).replace("\n", " ").casefold() for name in names)
            parts.append(line)
            starts.append(at)
            at += len(line)
        return "".join(parts), starts

    def search(self, text: str, most: int) -> list[int]:
        """Rows whose id or title holds a text, those that begin with it first, then the order of the model."""
        wanted = text.replace("\n", " ").casefold()
        everything, starts = self._texts
        found: dict[int, None] = {}
        if not wanted:
            return [int(row) for row in np.argsort(-self.degrees, kind="stable")[:most]]
        for pattern in ("\n" + wanted, wanted):
            at = everything.find(pattern)
            while at >= 0 and len(found) < most:
                row = bisect_right(starts, at) - 1
                found[row] = None
                at = everything.find(pattern, starts[row + 1] if row + 1 < len(starts) else len(everything))
        return list(found)

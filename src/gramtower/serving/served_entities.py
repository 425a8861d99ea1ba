"""The entities of one side of a served model: ids and rows, search, and a map.

Ids are looked up by hash. A search scans one text of all ids and titles in lower case, joined by line ends: O(number of
characters), without a Python loop over entities. The map is the projection on the first two principal components of the
embeddings, O(entities · dim² + dim³).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.entity_table import EntityTable
from gramtower.data.ids import Ids, Key, as_known, is_of_other_type
from gramtower.serving.messages import Refused

Rows = NDArray[np.int64]
_NAMED = 3  # unknown ids that an answer names
_BLOCK = 1 << 16


class RowIndex(Mapping[Key, int]):
    """The row of each id in 12 bytes per id: sorted hashes and their rows; a dict takes 60 to 100 bytes."""

    def __init__(self, ids: Ids) -> None:
        self._ids, self._text = ids, ids.dtype.kind != "i"
        hashes = np.fromiter(map(hash, ids), np.int64, len(ids))  # valid in this process only
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._rows = hashes[order], order.astype(np.int32 if len(ids) < 2**31 else np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Key]:
        for start in range(0, len(self._ids), 4096):
            yield from self._ids[start : start + 4096].tolist()

    def __getitem__(self, key: Key) -> int:
        if (row := self.row(key)) < 0:
            raise KeyError(key)
        return row

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, int)) and self.row(key) >= 0

    def row(self, key: Key) -> int:
        """The row of an id, −1 if it is unknown."""
        if isinstance(key, str) != self._text:
            return -1
        wanted = hash(key)
        place = int(self._hashes.searchsorted(wanted))
        while place < len(self._hashes) and self._hashes[place] == wanted:
            row = int(self._rows[place])
            if self._ids[row] == key:
                return row
            place += 1
        return -1


class Entities:
    """The entities of one side.

    Attributes:
        index: the row of each id; None for row numbers.
    """

    def __init__(
        self, side: str, ids: Ids | None, embeddings: Tensor, degrees: Rows, table: EntityTable | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        self.side, self.ids, self.embeddings, self.degrees, self.table = side, ids, embeddings, degrees, table
        self.index = None if ids is None else RowIndex(ids)
        self.text = ids is not None and ids.dtype.kind != "i"
        self.name = name or side

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def titles(self) -> list[str | None] | None:
        """The title of each entity, None for entities without one; None if there is no column of titles."""
        return None if self.table is None else self.table.titles

    @cached_property
    def unit(self) -> Tensor:
        """The embeddings, normalised to length 1."""
        return torch.nn.functional.normalize(self.embeddings, dim=1)

    @cached_property
    def map(self) -> Map:
        """The map of the entities with the most pairs."""
        return project(self)

    def row(self, key: Key) -> int:
        """The row of an id, −1 if it is unknown."""
        if self.index is not None:
            return self.index.row(key)
        return key if isinstance(key, int) and 0 <= key < len(self) else -1

    def rows(self, keys: Sequence[Key]) -> Rows:
        """The rows of ids."""
        found = np.fromiter((self.row(key) for key in keys), np.int64, len(keys))
        if len(found) and found.min() < 0:
            raise self._unknown(list(dict.fromkeys(k for k, row in zip(keys, found, strict=True) if row < 0)))
        return found

    def known_rows(self, keys: Sequence[Key]) -> tuple[Rows, int]:
        """The rows of known ids, increasing and without duplicates, and the number of unknown ids."""
        found = np.fromiter((self.row(key) for key in keys), np.int64, len(keys))
        unknown = [key for key, row in zip(keys, found, strict=True) if row < 0]
        if self.index is not None and any(is_of_other_type(key, self.index) for key in unknown):
            self.rows(keys)
        return np.unique(found[found >= 0]), len(unknown)

    def names(self, rows: Rows) -> list[Key]:
        """The ids of rows."""
        named: list[Key] = (rows if self.ids is None else self.ids[rows]).tolist()
        return named

    def near(self, key: Key) -> list[Key]:
        """Known ids similar to an unknown one: the same in the other type, or a few edits away."""
        if self.ids is None or self.index is None:
            return []
        other: Key = str(key) if isinstance(key, int) else as_known([key], self.ids)[0]
        if other in self.index:
            return [other]
        return list(check.near(key, self.index)) if self.text and isinstance(key, str) else []  # type: ignore[arg-type]

    def _unknown(self, unknown: Sequence[Key]) -> Refused:
        near = {str(key)[:200]: self.near(key) for key in unknown[:_NAMED]}
        named = ", ".join(check.shown(key) for key in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        close = [name for names in near.values() for name in names]
        hint = f" (nearest: {', '.join(check.shown(name) for name in close[:_NAMED])})" if close else ""
        kind = "text" if self.text else "whole numbers"
        rows = f" from 0 to {len(self) - 1}" if self.ids is None else ""
        message = f"{self.name} ids: got unknown {named}{more}{hint}, expected ids of the model, which are {kind}{rows}"
        return Refused(404, message, unknown=[str(key)[:200] for key in unknown[:_NAMED]], near=near)

    @cached_property
    def _texts(self) -> tuple[str, list[int]]:
        """Ids and titles, one per line, in lower case; and the position of each entity."""
        ids = range(len(self)) if self.ids is None else self.ids.tolist()
        parts, starts, at = [], [], 0
        for row, key in enumerate(ids):
            title = None if self.titles is None else self.titles[row]
            names = (key,) if title is None or title == key else (key, title)
            line = "".join("\n" + str(name).replace("\n", " ").casefold() for name in names)
            parts.append(line)
            starts.append(at)
            at += len(line)
        return "".join(parts), starts

    def search(self, text: str, most: int) -> list[int]:
        """Rows whose id or title contains a text, those that start with it first; the most frequent for no text."""
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


@dataclass(frozen=True)
class Map:
    """Entities in two dimensions."""

    rows: Rows  # the entities, those with the most pairs first
    places: NDArray[np.float32]  # two coordinates for each
    shares: tuple[float, float]  # share of the variance of each dimension


def project(this: Entities, most: int = 5000) -> Map:
    """The map of the entities with the most pairs."""
    axes, mean, shares = _axes(this.embeddings)
    rows = np.argsort(-this.degrees, kind="stable")[:most].astype(np.int64)
    chosen = this.embeddings[torch.from_numpy(rows)].double()
    return Map(rows, ((chosen - mean) @ axes).float().numpy(), shares)


def _axes(X: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """The first two principal axes (dim × 2), each with a positive largest part, the mean, and the variance shares."""
    n, dim = X.shape
    mean = sum((X[a : a + _BLOCK].double().sum(0) for a in range(0, n, _BLOCK)), torch.zeros(dim).double()) / max(1, n)
    covariance = torch.zeros(dim, dim, dtype=torch.float64)
    for start in range(0, n, _BLOCK):
        centred = X[start : start + _BLOCK].double() - mean
        covariance += centred.t() @ centred
    values, vectors = torch.linalg.eigh(covariance)
    axes = vectors[:, [-1, -2]] if dim > 1 else torch.cat([vectors, torch.zeros(1, 1).double()], 1)
    signs = torch.sign(axes.gather(0, axes.abs().argmax(0, keepdim=True)))
    total = max(float(values.clamp(min=0).sum()), 1e-300)
    second = float(values[-2]) if dim > 1 else 0.0
    return axes * torch.where(signs == 0, 1.0, signs), mean, (float(values[-1]) / total, max(0.0, second) / total)

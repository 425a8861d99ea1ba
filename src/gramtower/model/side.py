"""One side of a fitted model: ids, features and embeddings of its entities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.ids import key_of
from gramtower.data.left_out import warn_of_ids
from gramtower.data.lookup import index_of, is_of_other_type, rows_of
from gramtower.data.matrices import canonical, resized
from gramtower.model.inputs import Inputs


@dataclass
class Side:
    """Entities of one side.

    Attributes:
        name: "left" or "right".
        ids: one id for each row, int64 or text (objects); None when rows are known by number.
        embeddings: rows × k.
        inputs: what its tower sees of them.
        numbered: where ids are row numbers of a matrix without ids, how many rows it had; see Interactions.
        added: how many entities, the last ones, were not there in training.
    """

    name: str
    ids: NDArray[Any] | None
    embeddings: Tensor
    inputs: Inputs
    numbered: int | None = None
    added: int = 0

    @property
    def trained(self) -> int:
        """How many entities, the first ones, were there in training."""
        return len(self) - self.added

    @cached_property
    def _index(self) -> dict[Any, int]:
        return {} if self.ids is None else index_of(self.ids)

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, ids: Any) -> NDArray[np.int64]:
        """Row numbers of ids; unknown ones are named with the nearest known."""
        wanted = check.ids(f"{self.name} ids", ids)
        if self.ids is None:
            return self._numbers(wanted)
        expected = f"ids seen in training, or {self.name}_features for new entities"
        if not any(isinstance(key, tuple) and key in self._index for key in wanted):
            return rows_of(f"{self.name} ids", wanted, self._index, expected)
        single = (self._index[key] if isinstance(key, tuple) and key in self._index
                  else rows_of(f"{self.name} ids", [key], self._index, expected)[0] for key in wanted)  # fmt: skip
        return np.fromiter(single, dtype=np.int64, count=len(wanted))

    def known_rows(self, name: str, ids: Any) -> NDArray[np.int64]:
        """Row numbers of those ids that are known; a warning counts the others.

        Ids of the other type, such as the text "7" for the number 7, are refused as in :meth:`rows`.
        """
        wanted = check.ids(name, ids)
        if self.ids is None:
            numbers = (key for key in wanted if isinstance(key, (int, np.integer)) and not isinstance(key, bool))
            index: Any = {int(key): int(key) for key in numbers if 0 <= key < len(self)}
            strange = [key for key in wanted if isinstance(key, bool) or not isinstance(key, (int, np.integer))]
            self._numbers(strange[:1])
        else:
            wanted, index = [key if isinstance(key, tuple) else key_of(name, key) for key in wanted], self._index
        unknown = [key for key in wanted if key not in index]
        twins = [key for key in unknown if self.ids is not None and is_of_other_type(key, index)]
        self.rows(twins[:1])
        warn_of_ids(name, unknown, len(wanted))
        return np.array([index[key] for key in wanted if key in index], dtype=np.int64)

    def _numbers(self, wanted: list[Any]) -> NDArray[np.int64]:
        for key in wanted:
            if isinstance(key, bool) or not isinstance(key, (int, np.integer)) or not 0 <= key < len(self):
                check.fail(f"{self.name} ids", repr(key), f"row numbers from 0 to {len(self) - 1}")
        return np.array(wanted, dtype=np.int64)

    def names(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Ids of row numbers; −1, for no answer, becomes None (text) or −1 (numbers)."""
        if self.ids is None:
            return rows
        padded = np.empty(len(self.ids) + 1, dtype=self.ids.dtype)  # the last place is reached by −1
        padded[:-1], padded[-1] = self.ids, -1 if self.ids.dtype.kind == "i" else None
        named: NDArray[Any] = padded[rows]
        return named


def normalised(embeddings: Tensor) -> Tensor:
    """Rows scaled to length one; zero rows stay zero."""
    return torch.nn.functional.normalize(embeddings, dim=1)


def history_matrix(right: Side, histories: Any) -> sp.csr_matrix:
    """What new left entities have seen, as a matrix of ones: from lists of right ids, or from a sparse matrix."""
    if sp.issparse(histories):
        if histories.ndim != 2 or histories.shape[1] not in (len(right), right.trained):
            check.fail("histories", f"shape {histories.shape}", f"{len(right)} columns, one for each right entity")
        found = sp.csr_matrix(canonical("histories", histories), dtype=np.float32)
        return resized(found, (found.shape[0], len(right)))
    lists = check.listed("histories", histories, "lists of right ids")
    columns = [right.rows(check.listed("histories", history, "right ids")) for history in lists]
    offsets = np.cumsum([0, *map(len, columns)])
    indices = np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)
    matrix = sp.csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(columns), len(right)))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix

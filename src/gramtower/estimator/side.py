"""One side of a fitted model: ids, features and embeddings of its entities."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.estimator.inputs import Inputs


@dataclass
class Side:
    """Entities of one side.

    Attributes:
        name: "left" or "right".
        ids: one id for each row: text, or None when rows are known by number.
        embeddings: rows × k.
        inputs: what its tower sees of them.
    """

    name: str
    ids: NDArray[Any] | None
    embeddings: Tensor
    inputs: Inputs

    def __post_init__(self) -> None:
        self._rows = None if self.ids is None else {key: row for row, key in enumerate(self.ids.tolist())}

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, ids: Any) -> NDArray[np.int64]:
        """Row numbers of ids; unknown ones are named with the nearest known."""
        wanted = [ids] if isinstance(ids, (str, int, np.integer)) else list(ids)
        if self._rows is None:
            return self._numbers(wanted)
        unknown = [key for key in wanted if key not in self._rows]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), list(self._rows)[:200_000], 1, 0.0)
            hint = f"; nearest known: {near[0]!r}" if near else ""
            check.fail(
                f"{self.name} ids",
                f"{len(unknown)} unknown, such as {unknown[0]!r}{hint}",
                f"ids seen in training, or {self.name}_features for new entities",
            )
        return np.array([self._rows[key] for key in wanted], dtype=np.int64)

    def _numbers(self, wanted: Sequence[Any]) -> NDArray[np.int64]:
        if not all(isinstance(key, (int, np.integer)) and 0 <= key < len(self) for key in wanted):
            bad = next(k for k in wanted if not (isinstance(k, (int, np.integer)) and 0 <= k < len(self)))
            check.fail(f"{self.name} ids", repr(bad), f"row numbers from 0 to {len(self) - 1}")
        return np.array(wanted, dtype=np.int64)

    def names(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Ids of row numbers; −1 becomes None (text ids) or −1 (row numbers)."""
        if self.ids is None:
            return rows
        padded = np.empty(len(self.ids) + 1, dtype=object)  # the last place, reached by −1, stays None
        padded[:-1] = self.ids
        named: NDArray[Any] = padded[rows]
        return named


def normalised(embeddings: Tensor) -> Tensor:
    """Rows scaled to length one; zero rows stay zero."""
    return torch.nn.functional.normalize(embeddings, dim=1)


def history_matrix(right: Side, histories: Any) -> sp.csr_matrix:
    """What new left entities have seen, as a matrix of ones: from lists of right ids, or from a sparse matrix."""
    if sp.issparse(histories):
        if histories.shape[1] != len(right):
            check.fail("histories", f"shape {histories.shape}", f"{len(right)} columns, one for each right entity")
        return sp.csr_matrix(histories, dtype=np.float32)
    columns = [right.rows(list(history)) for history in histories]
    offsets = np.cumsum([0, *map(len, columns)])
    indices = np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)
    matrix = sp.csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(columns), len(right)))
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix

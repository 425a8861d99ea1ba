"""Features of one side as a caller passes them to a fit: identified, checked, and cut to some of the entities."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.matrices import checked
from gramtower.data.tables import FeatureTable
from gramtower.distributed.group import current_group
from gramtower.distributed.shards import Rows


@dataclass(frozen=True, eq=False)
class GivenFeatures:
    """Features of one side: None or "id" for ids, "history", a table, a matrix, or a list of these.

    Attributes:
        side: "left" or "right".
        given: the argument of the caller.
    """

    side: str
    given: Any

    @property
    def parts(self) -> list[Any]:
        """The parts, one if the argument is no list."""
        return list(self.given) if isinstance(self.given, (list, tuple)) else [self.given]

    @property
    def described(self) -> list[Any]:
        """The parts that are tables or matrices, not names."""
        return [part for part in self.parts if part is not None and not isinstance(part, str)]

    @property
    def only_tables(self) -> bool:
        """Whether tables describe the entities, next to ids and histories at most: then features are joined by id."""
        return bool(self.described) and all(isinstance(part, FeatureTable) for part in self.described)

    def width(self, right: int) -> int:
        """Return the number of features that a hidden layer would see; 0 where the side has ids.

        Invalid values count as no features here; the fit refuses them later.
        """
        total = 0
        for part in self.parts:
            if part is None or (isinstance(part, str) and part != "history"):
                return 0
            if isinstance(part, str):
                total += right
            else:
                shape: Any = getattr(part, "shape", ())
                total += part.width if isinstance(part, FeatureTable) else int(shape[1]) if len(shape) == 2 else 1
        return total

    def refuse_frames(self) -> None:
        """Refuse frames: numpy would take their rows for those of the entities, whatever their order."""
        for part in self.parts:
            if is_frame(part):
                expected = 'a FeatureTable, which is joined by id: FeatureTable.inferred(frame, id="…")'
                check.fail(f"{self.side}_features", f"a {type(part).__name__}", expected)

    def tables(self) -> Any:
        """Return the tables, which describe entities without pairs too; None for a left side that has none.

        Raises:
            ValueError: if there is no table, or a matrix next to it.
        """
        if (processes := current_group().size) > 1:
            check.fail("candidates", f"'all' in {processes} processes", "'trained', and model.add after loading")
        if self.side == "left" and not self.described:
            return None
        if not self.only_tables:
            kinds = ", ".join(type(part).__name__ for part in self.described) or "only ids"
            expected = f"{self.side}_features with a FeatureTable, whose rows without pairs are kept"
            check.fail("candidates", f"'all' with {self.side}_features of {kinds}", expected)
        return self.described if len(self.described) > 1 else self.described[0]

    def take(self, ids: NDArray[Any], rows: NDArray[np.int64]) -> Any:
        """Return the features of some of the entities as a fit takes them: rows of matrices; tables and names as is."""
        taken = [
            _lenient(part, ids) if isinstance(part, FeatureTable)
            else self._matrix_rows(part, len(ids), rows) if is_matrix(part) else part
            for part in self.parts
        ]  # fmt: skip
        return taken if isinstance(self.given, (list, tuple)) else taken[0]

    def encode(self, ids: NDArray[Any], rows: NDArray[np.int64]) -> list[Any]:
        """Return rows of each table, encoded, and of each matrix."""
        return [
            _lenient(part, ids).encode(ids[rows])
            if isinstance(part, FeatureTable)
            else self._matrix_rows(part, len(ids), rows)
            for part in self.described
        ]

    def local(self, rows: Rows, is_local: bool) -> Any:
        """Return the features with matrices cut to the rows of this process, unless they were given so."""
        taken = [self._local_part(part, rows, is_local) for part in self.parts]
        return taken if isinstance(self.given, (list, tuple)) else taken[0]

    def _local_part(self, part: Any, rows: Rows, is_local: bool) -> Any:
        name = f"{self.side}_features"
        if isinstance(part, FeatureTable) or not hasattr(part, "shape") or rows.count == rows.total:
            return part
        if not is_local:
            return rows.local_rows(name, checked(name, part).tocsr() if sp.issparse(part) else part)
        if part.shape[0] != rows.count:
            expected = f"{rows.count}, one for each of this process's own entities of that side"
            check.fail(name, f"{part.shape[0]} rows", expected)
        return part

    def _matrix_rows(self, part: Any, count: int, rows: NDArray[np.int64]) -> Any:
        name = f"{self.side}_features"
        if not is_matrix(part) or len(part.shape) != 2 or part.shape[0] != count:
            shape = f" of shape {tuple(part.shape)}" if hasattr(part, "shape") else ""
            check.fail(name, type(part).__name__ + shape, f"{count} rows, one for each {self.side} entity")
        if sp.issparse(part):
            return sp.csr_matrix(checked(name, part))[rows]
        return (
            part[torch.from_numpy(rows)] if isinstance(part, torch.Tensor) else check.as_float_array(name, part)[rows]
        )


def _lenient(table: FeatureTable, ids: NDArray[Any]) -> FeatureTable:
    """Return a table that takes only some of the ids; a strict one must have all of them."""
    found = copy.copy(table)
    found.report = dict(table.report)
    if table.strict:
        found.match(ids)
    found.strict = False
    return found


def is_matrix(value: Any) -> bool:
    """Whether a value has rows of numbers: scipy.sparse, torch, numpy or anything that numpy makes an array of."""
    return hasattr(value, "shape") and (sp.issparse(value) or hasattr(value, "__array__"))


def is_path(given: Any) -> bool:
    """Whether something is the path of a file."""
    return isinstance(given, (str, os.PathLike))


def is_frame(given: Any) -> bool:
    """Whether something is a table with named columns: of polars, pandas or pyarrow, or a mapping of columns."""
    return isinstance(given, Mapping) or any(
        hasattr(given, name) for name in ("collect_schema", "column_names", "__arrow_c_stream__", "__dataframe__")
    )

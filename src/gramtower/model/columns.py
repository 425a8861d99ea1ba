"""Frames as pairs: which columns of a polars, pandas or pyarrow table hold what, wherever pairs are taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gramtower._util import checks as check
from gramtower.data import frames
from gramtower.data.frames import Column
from gramtower.data.interactions import Interactions
from gramtower.data.samples import pairs_of


@dataclass(frozen=True)
class Columns:
    """The columns of a frame of pairs, by name or by position; see :meth:`gramtower.Interactions.from_frame`."""

    left: Column | None = None
    right: Column | None = None
    value: Column | None = None
    weight: Column | None = None
    time: Column | None = None
    threshold: float | None = None

    def read(self, name: str, given: Any) -> Any:
        """A frame as Interactions; anything else as it is, for which no columns may be given.

        As in the shell, rows whose value is at least the threshold are pairs labelled 1; without a threshold the values
        are the labels; without a value every row is a pair labelled 1.

        Raises:
            ValueError: if columns are given without a frame, or a frame without the columns of its ids.
        """
        given = pairs_of(given)
        chosen = {column: value for column, value in vars(self).items() if value is not None}
        if not is_frame(given):
            if chosen:
                shown = ", ".join(f"{column}={value!r}" for column, value in chosen.items())
                check.fail(name, f"{type(given).__name__} with {shown}", "a polars, pandas or pyarrow table with them")
            return given
        if self.left is None or self.right is None:
            expected = 'left= and right= as well: its columns of ids, as in fit(frame, left="user", right="item")'
            check.fail(name, f"a {type(given).__name__}", expected)
        return Interactions.from_frame(
            given, self.left, self.right, value=self.value, weight=self.weight, time=self.time,
            threshold=self.threshold, labels=self.value is not None and self.threshold is None,
        )  # fmt: skip

    def read_pairs(self, name: str, given: Any) -> Any:
        """The same, where of a frame or file without named columns the first two hold left and right ids."""
        if not is_frame(given) and not is_path(given):
            return self.read(name, given)
        frame = frames.read_frame(name, check.path(name, given)) if is_path(given) else frames.as_frame(name, given)
        if self.left is None and self.right is None and len(frame.columns) < 2:
            check.fail(name, f"a table of {len(frame.columns)} columns", "left and right ids in two of them")
        chosen = self if self.left is not None or self.right is not None else replace(self, left=0, right=1)
        return chosen.read(name, frame)

    def read_also(self, name: str, given: Any) -> Any:
        """A second frame with the same columns as Interactions; anything else as it is."""
        return self.read(name, given) if is_frame(given) else pairs_of(given)


def is_path(given: Any) -> bool:
    """Whether something is the path of a file."""
    return isinstance(given, (str, os.PathLike))


def is_frame(given: Any) -> bool:
    """Whether something is a table with named columns: of polars, pandas or pyarrow, or a mapping of columns."""
    return isinstance(given, Mapping) or any(
        hasattr(given, name) for name in ("collect_schema", "column_names", "__arrow_c_stream__", "__dataframe__")
    )

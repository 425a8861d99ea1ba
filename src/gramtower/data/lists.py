"""Ranked lists as a table: one row for each answer, in polars if it is installed, otherwise in pandas.

Columns of a second table, such as titles, are put beside the answers by id; reading that one takes polars.

Cost: O(answers).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.optional import missing
from gramtower.data import frames
from gramtower.data.ids import id_series
from gramtower.data.lookup import join
from gramtower.data.tables import FeatureTable


def lists_frame(
    asked: Any,
    ids: NDArray[Any],
    scores: NDArray[Any],
    names: tuple[str, str] = ("left", "right"),
    packages: Sequence[str] = ("polars", "pandas"),
    beside: Mapping[str, Sequence[Any]] | None = None,
) -> Any:
    """Lists, as ``recommend`` gives them, as a table with columns for the id asked for, rank from 1, answer and score.

    Args:
        asked: the ids asked for, one for each list.
        ids: the answers, a row for each list; their type stays.
        scores: of the answers; places without an answer (−inf) are left out.
        names: of the columns of the ids asked for and of the answers.
        packages: whose frames to make, the first that is installed.
        beside: further columns, a value for each answer in the order of the rows; see :func:`columns_beside`.
    """
    wanted, found, given = check.ids("asked", asked), np.asarray(ids), np.asarray(scores)
    if found.ndim != 2 or found.shape != given.shape or len(wanted) != len(found):
        shown = f"{len(wanted)} ids asked for, answers of shape {found.shape} and scores of shape {given.shape}"
        check.fail("asked, ids, scores", shown, "one row of as many answers as scores for each id")
    kept = ~np.isneginf(given)
    rows, places = np.nonzero(kept)
    columns: dict[str, Any] = {
        names[0]: [wanted[row] for row in rows.tolist()],
        "rank": places + 1,
        names[1]: found[kept].tolist(),
        "score": given[kept],
    }
    for name, values in (beside or {}).items():
        if name in columns:
            check.fail("table", f"a column {name!r}", f"names other than {', '.join(map(repr, columns))}")
        columns[name] = values
    for package in packages:
        try:
            return importlib.import_module(package).DataFrame(columns)
        except ImportError:
            continue
    raise missing("a table of lists", "polars")


def columns_beside(table: Any, ids: NDArray[Any], scores: NDArray[Any]) -> dict[str, Any]:
    """The columns of a table for each answer of some lists, null where it has no row for one.

    Args:
        table: a polars, pandas or pyarrow table, a mapping of columns or the path of a CSV or Parquet file, whose ids
            are in the column "id" or else in the first; or a :class:`~gramtower.data.tables.FeatureTable`.
        ids: the answers, a row for each list.
        scores: of the answers.

    Raises:
        ValueError: if an id is in several rows, or no id of the table is one of the answers.
    """
    source = table.source if isinstance(table, FeatureTable) else table
    given = isinstance(source, (str, os.PathLike))
    frame = frames.read_frame("table", check.path("table", source)) if given else frames.as_frame("table", source)
    if not frame.columns:
        check.fail("table", "no columns", "a column of ids, and others to show")
    named = table.id if isinstance(table, FeatureTable) else "id" if "id" in frame.columns else frame.columns[0]
    keys = id_series("table", frame[named])
    present = np.flatnonzero(keys.is_not_null().to_numpy())
    index = dict(zip(keys.drop_nulls().to_list(), present.tolist(), strict=True))
    if len(index) < len(present):
        check.fail("table", f"an id in several rows of column {named!r}", "each id in one row")
    answers = np.asarray(ids)[~np.isneginf(np.asarray(scores))]
    rows = join(answers, index)
    if len(answers) and not (rows >= 0).any():
        shown = f"{len(frame):,} rows, none of which has the id of an answer in column {named!r}"
        check.fail("table", shown, f"ids such as {answers.tolist()[0]!r}, in a column 'id' or in the first")
    pl = frames.polars()
    places = pl.Series(rows, dtype=pl.Int64).replace(-1, None)
    return {name: frame[name].gather(places).to_list() for name in frame.columns if name != named}

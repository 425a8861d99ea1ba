"""Ranked lists as a table: one row for each answer, in polars if it is installed, otherwise in pandas.

Cost: O(answers). Checked by tests/test_fit_frames.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower._optional import missing


def lists_frame(
    asked: Any,
    ids: NDArray[Any],
    scores: NDArray[Any],
    names: tuple[str, str] = ("left", "right"),
    packages: Sequence[str] = ("polars", "pandas"),
) -> Any:
    """Lists, as ``recommend`` gives them, as a table with columns for the id asked for, rank from 1, answer and score.

    Args:
        asked: the ids asked for, one for each list.
        ids: the answers, a row for each list; their type stays.
        scores: of the answers; places without an answer (−inf) are left out.
        names: of the columns of the ids asked for and of the answers.
        packages: whose frames to make, the first that is installed.
    """
    wanted, found, given = check.ids("asked", asked), np.asarray(ids), np.asarray(scores)
    if found.ndim != 2 or found.shape != given.shape or len(wanted) != len(found):
        shown = f"{len(wanted)} ids asked for, answers of shape {found.shape} and scores of shape {given.shape}"
        check.fail("asked, ids, scores", shown, "one row of as many answers as scores for each id")
    kept = ~np.isneginf(given)
    rows, places = np.nonzero(kept)
    columns = {
        names[0]: [wanted[row] for row in rows.tolist()],
        "rank": places + 1,
        names[1]: found[kept].tolist(),
        "score": given[kept],
    }
    for package in packages:
        try:
            return importlib.import_module(package).DataFrame(columns)
        except ImportError:
            continue
    raise missing("a table of lists", "polars")

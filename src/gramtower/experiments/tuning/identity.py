"""What a stored search is of: data, space, metric, seed and model, by checksums where they are large.

A log of anything else is refused (study.py). Cost: one pass over pairs, labels, weights and features. Checked by
tests/test_tuning.py.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.engine.kernels.losses import Loss
from gramtower.experiments.tuning.space import Space, describe
from gramtower.experiments.tuning.trial import Parts
from gramtower.model.fit_data import FitData
from gramtower.model.settings import ModelSettings


def identity(parts: Parts, space: Space, metric: str, seed: int, model: ModelSettings) -> dict[str, Any]:
    """What must be the same for a stored search to be continued, beside what :func:`learned_from` says."""
    marks = _marks(parts.matrix.indptr, parts.matrix.indices)
    held = _marks(parts.held_out.indptr, parts.held_out.indices)
    unseen = parts.unseen
    entities = "" if unseen is None else f"{unseen.count} {unseen.side} entities, "
    fixed = {k: v for k, v in model.get_params().items() if k not in ("device", "verbose", "memory_budget", "metric")}
    return {
        "pairs": f"{parts.matrix.shape[0]} × {parts.matrix.shape[1]}, {parts.matrix.nnz} pairs, {marks}",
        "validation": f"{entities}{parts.held_out.nnz} pairs, {held}",
        "space": describe(space),
        "metric": metric,
        "seed": seed,
        "model": {name: _text(name, value) for name, value in fixed.items()},
    }


def _text(name: str, value: Any) -> str:
    """A setting in one form in every process: weights by all their numbers, a loss of one's own by its name."""
    if isinstance(value, Loss):
        return value.name
    if name in ("left_weights", "right_weights") and not isinstance(value, (str, type(None))):
        return str(_marks(check.as_float_array(name, value).astype(np.float64)))
    return str(value)


def learned_from(data: FitData) -> dict[str, Any]:
    """Labels, weights and features of a fit, by checksums."""
    weights = "none" if data.weights is None else str(_marks(data.weights))
    return {
        "labels": str(_marks(data.matrix.data)),
        "weights": weights,
        "left features": _features_mark(data.features[0]),
        "right features": _features_mark(data.features[1]),
    }


def _features_mark(rows: Any) -> str:
    if rows is None:
        return "ids"
    arrays = (rows.indptr, rows.indices, rows.data) if sp.issparse(rows) else (np.asarray(rows),)
    return f"{rows.shape[0]} × {rows.shape[1]}, {_marks(*arrays)}"


def _marks(*arrays: NDArray[Any]) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(array).tobytes()) for array in arrays]

"""`gramtower.load`: a saved model back to life, its towers rebuilt from the stored architecture. Never unpickles.

Checked by tests/test_estimator.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.packing import unpack_ids
from gramtower.distributed.shards import whole
from gramtower.estimator import model_file
from gramtower.estimator.inputs import Inputs, Part
from gramtower.estimator.side import Side
from gramtower.estimator.two_tower import TwoTower
from gramtower.model.mlp import undrawn_towers
from gramtower.model.towers import Towers
from gramtower.objective.problem import Problem
from gramtower.training.result import Reason, Record


def load(path: str | Path, towers: Callable[[Problem], Towers] | None = None) -> TwoTower:
    """A model that :meth:`TwoTower.save` wrote.

    Args:
        path: the file.
        towers: for a model with towers of your own, the function it was made with; without it the model recommends but
            cannot embed new entities.
    """
    header, tensors = model_file.read_model(Path(path))
    params: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in header["params"].items()}
    arrays: dict[str, Any] = {
        name: tensors[name].numpy() for name in ("left_weights", "right_weights") if name in tensors
    }
    model = TwoTower(**{"right_weights": None, **params, **arrays}, towers=towers)  # version 1 knew of no weights
    before = header["params"]  # version 1 had no sizes that depend on the data
    model.dim_, model.hidden_ = header.get("dim", before["dim"]), tuple(header.get("hidden", before["hidden"]))
    inputs = {name: _inputs(name, header, tensors) for name in ("left", "right")}
    shape = (_rows("left", inputs, tensors), _rows("right", inputs, tensors))
    model.towers_ = _rebuild(model, header, tensors["parameters"], inputs, shape)
    model.left_, model.right_ = (
        Side(
            name,
            unpack_ids(tensors, f"{name}_"),
            tensors[name] if name in tensors else getattr(model.towers_, name)[0].weight.detach(),
            inputs[name],
        )
        for name in ("left", "right")
    )
    model.shards_ = whole(shape)
    columns = tensors["seen_columns"].numpy()
    ones = np.ones(len(columns), dtype=np.float32)
    model.seen_ = sp.csr_matrix((ones, columns, tensors["seen_offsets"].numpy()), shape=shape)
    model.history_ = [Record(**record) for record in header["history"]]
    model.best_metric_, model.omega_ = header["best_metric"], header["omega"]
    model.message_ = header.get("message", header["reason"])  # version 1 had the message alone
    model.reason_ = Reason[header["reason"]] if "message" in header else Reason.of_message(model.message_)
    return model


def _rows(name: str, inputs: dict[str, Inputs], tensors: dict[str, Tensor]) -> int:
    """Entities of a side: of its embeddings, or of the table that they are, with a row for each id."""
    return len(tensors[name]) if name in tensors else inputs[name].width


def _rebuild(
    model: TwoTower, header: dict[str, Any], vector: Tensor, inputs: dict[str, Inputs], shape: tuple[int, int]
) -> Any:
    """The towers from the stored architecture and parameters, or None if they are the caller's and were not given."""
    if header["own_towers"] and model.towers is None:
        return None
    problem = Problem(
        sp.csr_matrix(shape, dtype=np.float32),
        left=inputs["left"].placeholder(shape[0]),
        right=inputs["right"].placeholder(shape[1]),
    )
    if model.towers is None:
        towers = undrawn_towers(problem, model.hidden_, model.dim_, model.activation)
    else:
        towers = model.towers(problem)
    if towers.size != len(vector):
        check.fail("towers", f"{towers.size} parameters", f"the {len(vector)} that the model was saved with")
    towers.load(vector)
    return towers


def _inputs(name: str, header: dict[str, Any], tensors: dict[str, Tensor]) -> Inputs:
    """What the tower of a side sees; version 1 has one part without a table, and calls "id" "ids"."""
    if header["version"] > 1:
        return Inputs.from_json(model_file.unpack_text(tensors[f"{name}_inputs"]))
    side = header["sides"][name]
    return Inputs((Part("id" if side["kind"] == "ids" else side["kind"], side["width"]),))

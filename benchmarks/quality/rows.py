"""The rows of a quality table: how each is trained from its stored settings, and where those are.

ours         configs/NAME.toml, a config file of `gramtower fit`; on all four sets these are linear towers
hidden       the same objective with hidden layers, [NAME.hidden] of configs/peers.toml
softmax      [NAME.softmax]: towers trained by in-batch softmax
als          [NAME.als]: implicit, where it is installed
popularity   nothing to set
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import baselines
import scipy.sparse as sp
from torch import Tensor

import gramtower as gt
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import iterations, make_problem, make_towers
from gramtower.model.settings import ModelSettings

HERE = Path(__file__).resolve().parent
ROWS = ("popularity", "als", "softmax", "hidden", "ours")
METRICS = ("recall@20", "ndcg@20", "paper_map@5")
Look = Callable[[int, float, Tensor, Tensor], None]


def stored(name: str, row: str) -> dict[str, Any]:
    """The stored settings of a row for a set."""
    if row == "popularity":
        return {}
    if row == "ours":
        tables = tomllib.loads((HERE / "configs" / f"{name}.toml").read_text())
        found = tables["model"] | tables.get("train", {})
    else:
        found = tomllib.loads((HERE / "configs" / "peers.toml").read_text())[name][row]
    return {key.replace("-", "_"): value for key, value in found.items()}


def train(
    row: str, pairs: sp.csr_matrix, settings: dict[str, Any], device: str = "auto", look: Look | None = None
) -> tuple[Tensor, Tensor, float]:
    """Embeddings of a row trained by settings, and the seconds it took; ImportError where a package is missing."""
    start = time.perf_counter()
    if row == "popularity":
        found = baselines.popularity(pairs)
    elif row == "als":
        found = baselines.als(pairs, **settings)
    elif row == "softmax":
        found = baselines.softmax(pairs, **settings, device=device, look=look)
    else:
        found = ours(pairs, settings, device, look)
    return *found, time.perf_counter() - start


def ours(pairs: sp.csr_matrix, settings: dict[str, Any], device: str, look: Look | None) -> tuple[Tensor, Tensor]:
    """Two towers learned from all pairs, embeddings left where they were computed."""
    known = {k: v for k, v in settings.items() if k not in ("history", "option")}
    model = ModelSettings(**{**known, "device": device}, optimizer_options=settings.get("option"))
    data = prepare_data(model, pairs, "history" if settings.get("history") else None)
    problem = make_problem(model, data)
    towers = make_towers(model, data, problem)
    callbacks = [] if look is None else [lambda record, point: look(record.iteration, record.seconds, point.P, point.Q)]
    gt.minimize(
        problem, towers, model.optimizer, iterations(model, data, problem, towers), model.time_limit, model.seed,
        callbacks, **model.solver_options(),
    )  # fmt: skip
    point = problem.at(towers)
    return point.P, point.Q

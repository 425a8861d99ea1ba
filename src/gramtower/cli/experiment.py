"""Experiments: a TOML file with everything that decides a comparison of methods, frozen so that others can rerun it.

    [data]       how pairs are read: format, threshold, left, right, ..., validation; and shape = [m, n, pairs]
    [problem]    loss, omega, l2, imputed, embedding-l2, ...
    [towers]     hidden, dim, activation
    [optimizers.NAME]   the constants of one method; a table for each method to run, in this order
    [run]        time-limit, max-iterations, seed, metric, ...

Keys are the names of the flags of ``gramtower fit`` and of the options of :func:`gramtower.minimize`; one that nobody
knows is an error that names the nearest. Without the data, pairs of the same shape are generated. The files of the
paper's four data sets are in ``experiments/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from gramtower._util import checks as check
from gramtower.cli.options import DataOptions, ModelOptions, Settings, TrainOptions, nearest, read_tables
from gramtower.data.interactions import Interactions
from gramtower.data.sources import read_toml, reading
from gramtower.data.synthetic import planted_pairs
from gramtower.optim.solvers import SOLVERS, as_solver

_TABLES = ("problem", "towers", "optimizers", "run")  # tables that a config of fit does not have
_TOWERS = ("hidden", "dim", "activation")
_BY_METHOD = ("optimizer", "option", "patience")  # of fit, where one method runs


@dataclass(frozen=True)
class Experiment:
    """A comparison as a file says.

    Attributes:
        path: the file.
        settings: data, model and training as the flags of ``fit`` would have set them.
        optimizers: constants of each method to run, by name, in order.
        shape: (m, n, training pairs) of the data it is about, or None.
    """

    path: Path
    settings: Settings
    optimizers: dict[str, dict[str, Any]]
    shape: tuple[int, int, int] | None

    @property
    def name(self) -> str:
        """The name of the file without its ending."""
        return self.path.stem

    @property
    def synthetic_note(self) -> str:
        """What must be said of every result on generated pairs."""
        m, n, observed = self._shape()
        return f"generated pairs of the shape of {self.name} ({m:,} x {n:,}, {observed:,} pairs), not the data itself"

    def synthetic_pairs(self) -> Interactions:
        """Generated pairs with planted groups; holding out the share ``validation`` leaves as many as ``shape`` says.

        The same for the same seed of ``[run]``.
        """
        m, n, observed = self._shape()
        try:
            share = float(self.settings.data.validation or 0.0)
        except ValueError:
            share = 0.0  # a file of its own
        total = round(observed / (1 - share)) if 0 < share < 1 else observed
        seed = self.settings.train.seed or 0
        made = planted_pairs(m, n, total, groups=max(1, min(64, m // 8, n // 8)), seed=seed)
        return Interactions.from_matrix(made)

    def _shape(self) -> tuple[int, int, int]:
        if self.shape is None:
            check.fail("synthetic", f"{self.path} without a shape", "shape = [m, n, pairs] below [data]")
        return self.shape


def is_experiment(path: Path) -> bool:
    """Whether a TOML file has a table that only experiments have; otherwise it is a config as for fit."""
    return any(name in _TABLES for name in read_toml("config", path))


def load_experiment(path: Path) -> Experiment:
    """An experiment from its file.

    Raises:
        ValueError: if it is not TOML, or holds an unknown table, method, key or constant, or a wrong value.
    """
    model, train = get_type_hints(ModelOptions), get_type_hints(TrainOptions)
    known = {
        "data": get_type_hints(DataOptions) | {"shape": list[int] | None},
        "problem": {key: kind for key, kind in model.items() if key not in _TOWERS},
        "towers": {key: model[key] for key in _TOWERS},
        "optimizers": dict.fromkeys(SOLVERS),
        "run": {key: kind for key, kind in train.items() if key not in _BY_METHOD},
    }
    with reading(path, "config"):
        content = read_toml("config", path)
        methods = content.pop("optimizers", {})
        tables = read_tables(path, content, known)
        data = tables.get("data", {})
        shape = data.pop("shape", None)
        if shape is not None and (len(shape) != 3 or not 0 < shape[2] <= 0.8 * shape[0] * shape[1]):
            check.fail("config: [data] shape", shape, "[m, n, pairs], with at most 80% of the m·n pairs")
        settings = Settings(
            DataOptions(**data),
            ModelOptions(**tables.get("problem", {}), **tables.get("towers", {})),
            TrainOptions(**tables.get("run", {})),
        )
        return Experiment(path, settings, _methods(path, methods), None if shape is None else tuple(shape))


def _methods(path: Path, given: Any) -> dict[str, dict[str, Any]]:
    """Constants by method, each checked as the method will check it."""
    if not isinstance(given, dict) or not given:
        check.fail("config", f"{path} with optimizers = {given!r}", "a table [optimizers.NAME] for each method to run")
    found: dict[str, dict[str, Any]] = {}
    for name, constants in given.items():
        if name not in SOLVERS:
            expected = f"[optimizers.{nearest(name, SOLVERS)}]"
            check.fail("config", f"unknown method [optimizers.{name}] in {path}", expected)
        if not isinstance(constants, dict):
            check.fail("config", f"optimizers.{name} = {constants!r}", f"a table [optimizers.{name}]")
        found[name] = {key.replace("-", "_"): value for key, value in constants.items()}
        try:
            as_solver(name, found[name])
        except ValueError as error:
            raise ValueError(f"config: [optimizers.{name}] of {path}: {error}") from error
    return found

"""Recommendations and links learned from all pairs: two networks, exact over observed and unobserved pairs alike.

    pairs = gramtower.Interactions.from_csv("ratings.csv", "user", "item")
    model = gramtower.TwoTower().fit(pairs)
    ids, scores = model.recommend(["ann"], k=10)

The engine below it is public too: ``Problem`` is what is minimised, ``mlp_towers`` makes two networks, and
``problem.at(towers)`` has value, gradient() and gauss_newton() @ d, at the cost of m + n instead of m·n.

Names are imported when they are first asked for, and torch with them, because `gramtower --help` needs none. Type
checkers and editors read the imports below; tests/test_imports.py holds that _PLACES says the same.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gramtower import _deprecated as _deprecated

# Threads of torch wait for each other in loops of about a millisecond (GNU OpenMP's default), so that two processes on
# the same CPUs hold each other up. OpenMP reads this variable when torch is imported; values of the user's own stay.
_own_wait = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
_long_waits = "torch" in sys.modules and not _own_wait  # torch is here already, and did not read it
if not _own_wait:
    os.environ["GOMP_SPINCOUNT"] = "1000"

if TYPE_CHECKING:
    from gramtower.data.interactions import Interactions as Interactions
    from gramtower.data.interactions import PairSamples as PairSamples
    from gramtower.engine.kernels.losses import Loss as Loss
    from gramtower.engine.objective.point import Point as Point
    from gramtower.engine.objective.problem import Problem as Problem
    from gramtower.engine.towers.layers import InputLinear as InputLinear
    from gramtower.engine.towers.mlp import mlp_towers as mlp_towers
    from gramtower.engine.towers.parameters import Parameters as Parameters
    from gramtower.engine.towers.towers import Towers as Towers
    from gramtower.experiments.benchmark_report import Benchmark as Benchmark
    from gramtower.experiments.benchmark_runner import benchmark as benchmark
    from gramtower.experiments.cross_validation import CrossValidation as CrossValidation
    from gramtower.experiments.cross_validation import PairSplit as PairSplit
    from gramtower.experiments.cross_validation import cross_validate as cross_validate
    from gramtower.experiments.cross_validation import ranking_scorer as ranking_scorer
    from gramtower.model.two_tower import TwoTower as TwoTower
    from gramtower.model.two_tower import load as load
    from gramtower.optim.descent import Backtracking as Backtracking
    from gramtower.optim.descent import Descent as Descent
    from gramtower.optim.descent import Direction as Direction
    from gramtower.optim.descent import DirectionResult as DirectionResult
    from gramtower.optim.descent import Method as Method
    from gramtower.optim.descent import StepResult as StepResult
    from gramtower.optim.descent import StepRule as StepRule
    from gramtower.optim.solvers import LBFGS as LBFGS
    from gramtower.optim.solvers import DiagonalDescent as DiagonalDescent
    from gramtower.optim.solvers import DiagonalSampling as DiagonalSampling
    from gramtower.optim.solvers import DiagonalSogram as DiagonalSogram
    from gramtower.optim.solvers import GradientDescent as GradientDescent
    from gramtower.optim.solvers import Newton as Newton
    from gramtower.optim.solvers import NewtonKron as NewtonKron
    from gramtower.optim.solvers import Sampling as Sampling
    from gramtower.optim.solvers import Sogram as Sogram
    from gramtower.optim.solvers import Solver as Solver
    from gramtower.training.callbacks import ProgressBar as ProgressBar
    from gramtower.training.loop import minimize as minimize
    from gramtower.training.result import Reason as Reason
    from gramtower.training.result import Record as Record
    from gramtower.training.result import Result as Result
    from gramtower.training.result import read_history as read_history

__version__ = "0.2.0"  # the one place of the version; pyproject.toml reads it

_PLACES = {
    "experiments.benchmark_report": "Benchmark",
    "experiments.benchmark_runner": "benchmark",
    "data.interactions": "Interactions PairSamples",
    "engine.kernels.losses": "Loss",
    "engine.objective.point": "Point",
    "engine.objective.problem": "Problem",
    "engine.towers.layers": "InputLinear",
    "engine.towers.mlp": "mlp_towers",
    "engine.towers.parameters": "Parameters",
    "engine.towers.towers": "Towers",
    "experiments.cross_validation": "CrossValidation PairSplit cross_validate ranking_scorer",
    "optim.descent": "Backtracking Descent Direction DirectionResult Method StepResult StepRule",
    "optim.solvers": "LBFGS DiagonalDescent DiagonalSampling DiagonalSogram GradientDescent Newton NewtonKron "
    "Sampling Sogram Solver",
    "training.callbacks": "ProgressBar",
    "training.loop": "minimize",
    "training.result": "Reason Record Result read_history",
    "model.two_tower": "TwoTower load",
}

if not TYPE_CHECKING:  # a type checker knows the names, and would take any other for one of these
    _MODULES = {name: f"gramtower.{module}" for module, names in _PLACES.items() for name in names.split()}
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        """A public name from the module that defines it, kept, or a package such as ``data`` with what is in it."""
        if name in _MODULES:
            found = globals()[name] = getattr(import_module(_MODULES[name]), name)
            return found
        if not name.startswith("_"):
            for module in _PLACES:
                import_module(f"gramtower.{module}")
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'gramtower' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})

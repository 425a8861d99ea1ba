"""Old places of public names and modules, which work for one more version, with a ``DeprecationWarning``."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = {  # old name -> new name, both below gramtower
    "benchmarking": "experiments",
    "benchmarking.baselines": "experiments.baselines",
    "compat.implicit.utils": "compat.implicit.base",
    "data.bundle": "data.datasets",
    "data.partition": "distributed.partition",
    "data.readers.netflix": "data.readers.ratings",
    "data.synthetic": "data.datasets",
    "estimator": "model",
    "estimator.fitted": "model.fitted",
    "export": "model",
    "export.networks": "model.exporting",
    "tuning": "experiments.tuning",
    "tuning.report": "experiments.tuning.report",
}

_OPTIM = "Backtracking Descent DiagonalDescent DiagonalSampling DiagonalSogram Direction DirectionResult "
_OPTIM += "GradientDescent LBFGS Method Newton NewtonKron Sampling Sogram Solver StepResult StepRule"
NAMES = dict.fromkeys(_OPTIM.split(), "optim")  # name that was in gramtower -> module below gramtower that has it


class _MovedModules:
    """A finder and loader that answers the import of an old module name with the new module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        moved = name.startswith("gramtower.") and name.removeprefix("gramtower.") in MODULES
        return ModuleSpec(name, self) if moved else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create a module, which ``exec_module`` then replaces."""

    def exec_module(self, module: ModuleType) -> None:
        new = f"gramtower.{MODULES[module.__name__.removeprefix('gramtower.')]}"
        warnings.warn(f"{module.__name__} has moved; import {new} instead", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


sys.meta_path.insert(0, _MovedModules())  # before the finder that would look for old names in new folders

"""Recommendations and links from two networks, trained exactly on all pairs, observed and unobserved.

    pairs = gramtower.Interactions.from_csv("ratings.csv", "user", "item")
    model = gramtower.TwoTower().fit(pairs)
    ids, scores = model.recommend(["ann"], k=10)

The engine is public too: ``Problem`` is the objective, ``mlp_towers`` makes two networks, and ``problem.at(towers)``
has the value, gradient() and gauss_newton() @ d, at the cost of m + n instead of m·n.

The public names are listed in ``_public.py``. They are imported when one of them is first used, and torch with them,
because `gramtower --help` needs none of them.
"""

import os
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramtower import _deprecated as _deprecated

# Threads of torch wait for each other in loops of about a millisecond (GNU OpenMP's default), so that two processes on
# the same CPUs slow each other down. OpenMP reads this variable when torch is imported; a user's own values are kept.
_own_wait = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
_long_waits = "torch" in sys.modules and not _own_wait  # torch is imported already and did not read it
if not _own_wait:
    os.environ["GOMP_SPINCOUNT"] = "1000"

__version__ = "0.2.0"  # the one place of the version; pyproject.toml reads it

if TYPE_CHECKING:
    from gramtower import optim as optim
    from gramtower._public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, or a package such as ``data`` with its modules."""
        if name in _deprecated.NAMES:
            new = f"gramtower.{_deprecated.NAMES[name]}"
            warnings.warn(f"gramtower.{name} has moved; use {new}.{name} instead", DeprecationWarning, stacklevel=2)
            return getattr(import_module(new), name)
        if name == "__all__":
            return sorted(_places())
        if not name.startswith("_"):
            if name in _places():
                module = _places()[name]
                globals()[name] = getattr(import_module(module), name, None) or import_module(f"{module}.{name}")
            else:
                import_module("gramtower._public")  # imports all packages, which are attributes then
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'gramtower' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_places()})

    @cache
    def _places() -> dict[str, str]:
        """The module of each public name, read from _public.py without importing what it imports."""
        lines = (Path(__file__).parent / "_public.py").read_text(encoding="utf-8").splitlines()
        words = [line.split() for line in lines if line.startswith("from ")]
        return {name: module for _, module, _, name, *_ in words}

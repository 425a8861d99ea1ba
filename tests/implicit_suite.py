"""`make implicit-tests CHECKOUT=path`: implicit's own test files, unchanged, with our modules in the place of its own.

    python tests/implicit_suite.py CHECKOUT              # as a script that changes one import: implicit.als is ours
    python tests/implicit_suite.py CHECKOUT --all        # implicit.evaluation, implicit.utils and its loss are ours too

CHECKOUT is a clone of github.com/benfred/implicit, outside this project: none of it is copied here. The rest of
implicit is the installed package. docs/implicit.md has the outcome.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

ONE = {"implicit.als": "als"}
ALL = ONE | {"implicit.cpu.als": "als", "implicit.evaluation": "evaluation", "implicit.utils": "base"}
KEPT = ("implicit.gpu", "implicit.nearest_neighbours")  # what their test files import besides


def substitute(names: dict[str, str]) -> None:
    """Let implicit's modules be ours, for every import from now on."""
    for name in (*ALL, *KEPT):
        importlib.import_module(name)
    for name, own in names.items():
        module = importlib.import_module(f"gramtower.compat.implicit.{own}")
        package, _, last = name.rpartition(".")
        sys.modules[name] = module
        setattr(sys.modules[package], last, module)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--all", action="store_true", help="every module that we have, not implicit.als alone")
    given, options = parser.parse_known_args()
    tests = given.checkout.resolve() / "tests"
    if not (tests / "als_test.py").is_file():
        parser.error(f"{tests} has no als_test.py: give the folder of a clone of implicit")
    sys.path.insert(0, str(tests))
    substitute(ALL if given.all else ONE)
    files = [tests / "als_test.py", *([tests / "evaluation_test.py"] if given.all else [])]
    plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir", str(tests)]
    return int(pytest.main([*plain, "-q", "-rA", "--show-capture=no", "-W", "ignore", *map(str, files), *options]))


if __name__ == "__main__":
    sys.exit(main())

"""`make lightfm-tests CHECKOUT=path`: LightFM's own test files, unchanged, with our modules in the place of its own.

    python tests/lightfm_suite.py CHECKOUT               # on generated ratings in the format of MovieLens 100k
    python tests/lightfm_suite.py CHECKOUT --data FOLDER  # on movielens100k/movielens.zip there, as LightFM keeps it
    python tests/lightfm_suite.py CHECKOUT --theirs      # LightFM itself, installed or built in CHECKOUT

CHECKOUT is a clone of github.com/lyst/lightfm, outside this project: none of it is copied here, and it need not be
built. lightfm.datasets is read from there, and everything else is ours. docs/lightfm.md has the outcome.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

OURS = ("lightfm", "data", "evaluation", "cross_validation")
FILES = ("test_api", "test_movielens", "test_evaluation", "test_data", "test_cross_validation")
USERS, ITEMS, RATINGS, TASTES, GENRES = 943, 1682, 100_000, 6, 19


def substitute(package: Path) -> None:
    """Let LightFM's modules be ours for every import from now on; its datasets are those of the checkout."""
    theirs = types.ModuleType("lightfm")
    theirs.__path__ = [str(package)]
    sys.modules["lightfm"] = theirs
    for name in OURS:
        module = importlib.import_module(f"gramtower.compat.lightfm.{name}")
        sys.modules[f"lightfm.{name}"] = module
        setattr(theirs, name, module)
    theirs.LightFM = theirs.lightfm.LightFM


def write_ratings(path: Path, seed: int = 0) -> None:
    """Generate users, films, genres and ratings with the sizes of MovieLens 100k, ten ratings of each user for testing.

    Users choose films by popularity and by a taste of six dimensions, and rate by taste, quality and mood. The numbers
    are such that LightFM 1.17 itself reaches the bounds of its tests.
    """
    rng = np.random.default_rng(seed)
    people, films = rng.normal(size=(USERS, TASTES)), rng.normal(size=(ITEMS, TASTES)) / np.sqrt(TASTES)
    taste, place = people @ films.T, np.arange(1, ITEMS + 1)
    sizes = np.minimum(np.sort(20 + np.round(rng.lognormal(3.9, 1.0, USERS)).astype(int)), 740)
    sizes = np.maximum(20, np.round(sizes * RATINGS / sizes.sum()).astype(int))
    sizes[-1] += RATINGS - sizes.sum()
    order = np.argsort(1.6 * np.log(place + 10) - 1.5 * taste - rng.gumbel(size=taste.shape), axis=1)
    quality = 0.5 * rng.normal(size=ITEMS) - 0.25 * np.log(place / 100)
    like = 0.35 + quality + 0.5 * rng.normal(size=(USERS, 1)) + 0.9 * taste + 0.9 * rng.normal(size=taste.shape)
    stars = np.clip(np.round(3.4 + 0.8 * like), 1, 5).astype(int)
    parts: dict[str, list[str]] = {"ua.base": [], "ua.test": []}
    for user in range(USERS):
        for number, item in enumerate(rng.permutation(order[user, : sizes[user]])):
            parts["ua.test" if number < 10 else "ua.base"].append(f"{user + 1}\t{item + 1}\t{stars[user, item]}\t0")
    shown = (films @ rng.normal(size=(TASTES, GENRES - 1)) > 1.2).astype(int)
    parts["u.item"] = ["|".join([f"{i + 1}", f"Film {i + 1}", *"   0", *map(str, shown[i])]) for i in range(ITEMS)]
    parts["u.genre"] = [f"genre {number}|{number}" for number in range(GENRES)]
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, lines in parts.items():
            archive.writestr(f"ml-100k/{name}", "\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--data", type=Path, help="LightFM's folder of datasets, usually ~/lightfm_data")
    parser.add_argument("--theirs", action="store_true", help="run LightFM itself")
    given, options = parser.parse_known_args()
    root = given.checkout.resolve()
    if not (root / "tests" / "test_movielens.py").is_file():
        parser.error(f"{root} has no tests/test_movielens.py: give the folder of a clone of LightFM")
    sys.path.insert(0, str(root))
    if not given.theirs:
        substitute(root / "lightfm")
    with tempfile.TemporaryDirectory() as home:
        data = Path(home, "lightfm_data")
        if given.data is None:
            write_ratings(data / "movielens100k" / "movielens.zip")
        else:
            data.symlink_to(given.data.resolve())
        os.environ["HOME"] = home  # where LightFM looks for datasets
        plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--rootdir", str(root)]
        files = [str(root / "tests" / f"{name}.py") for name in FILES]
        return int(pytest.main([*plain, "-q", "-rA", "--show-capture=no", "-W", "ignore", *files, *options]))


if __name__ == "__main__":
    sys.exit(main())

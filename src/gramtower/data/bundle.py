"""The pairs that come with the library: npm packages with their dependencies, and words with their synonyms.

    packages()    15,722 packages × 661 dependencies, 139,933 pairs: bundled/npm-core.txt.xz; MIT, see its LICENSE.txt
    thesaurus()   8,655 heads × 8,655 words, 674,945 pairs: bundled/moby-core.txt.xz; public domain

O(pairs).
"""

from __future__ import annotations

import lzma
from importlib.resources import files

import numpy as np

from gramtower.data.interactions import Interactions


def packages() -> Interactions:
    """Packages of npm in 2016 and what they depend on, to run or to develop: pairs (package, dependency)."""
    return _lines("npm-core.txt.xz", " ")


def thesaurus() -> Interactions:
    """A core of the Moby thesaurus: pairs (head, word)."""
    return _lines("moby-core.txt.xz", ",")


def _lines(name: str, separator: str) -> Interactions:
    """Lines of a left entity and its right ones."""
    packed = files("gramtower.data").joinpath("bundled", name).read_bytes()
    left: list[str] = []
    right: list[str] = []
    for line in lzma.decompress(packed).decode().splitlines():
        first, *others = line.split(separator)
        left += [first] * len(others)
        right += others
    return Interactions.from_arrays(np.array(left, dtype=object), np.array(right, dtype=object))

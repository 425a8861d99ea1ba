"""Example data: pairs that come with the library, and synthetic pairs of any size.

    packages()       15,722 packages × 661 dependencies, 139,933 pairs: bundled/npm-core.txt.xz; MIT, see LICENSE.txt
    thesaurus()      8,655 heads × 8,655 words, 674,945 pairs: bundled/moby-core.txt.xz; public domain
    planted_pairs()  entities in groups; pairs are more frequent within a group, activity and popularity are skewed
    paper_shape()    the same with the shapes of the paper's Table "Data statistics"

Cost: O(|O| log |O|) time.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.readers.item_lists import item_lists

#: (m, n, |O|) of the paper's four data sets.
PAPER_SHAPES = {
    "ml1m": (6_037, 3_513, 517_770),
    "ml10m": (69_786, 10_210, 4_505_820),
    "netflix": (478_251, 17_768, 51_228_351),
    "wiki-simple": (85_270, 55_695, 5_478_549),
}


def planted_pairs(
    m: int, n: int, observed: int, groups: int = 16, affinity: float = 0.8, skew: float = 1.0, seed: int = 0
) -> sp.csr_matrix:
    """Draw an m × n matrix of ``observed`` pairs, all labelled 1.

    Args:
        m: number of left entities.
        n: number of right entities.
        observed: number of pairs, at most 80% of m·n, so that drawing without repetition ends.
        groups: number of groups on each side.
        affinity: share of pairs drawn within the left entity's group.
        skew: standard deviation of the logarithm of activity and popularity.
        seed: random seed.
    """
    check.count("m", m)
    check.count("n", n)
    if check.count("observed", observed, minimum=0) > 0.8 * m * n:
        check.fail("observed", observed, f"at most 80% of all pairs, {int(0.8 * m * n)}")
    check.count("groups", groups)
    rng = np.random.default_rng(seed)
    activity = np.exp(rng.normal(scale=skew, size=m))
    popularity = np.exp(rng.normal(scale=skew, size=n))
    left_group = rng.integers(groups, size=m)
    right_group = rng.integers(groups, size=n)
    order = np.argsort(right_group, kind="stable")  # right entities, group by group
    edges = np.searchsorted(right_group[order], np.arange(groups + 1))
    totals = np.concatenate([[0.0], np.cumsum(popularity[order])])
    heavy = np.cumsum(activity)
    keys = np.empty(0, dtype=np.int64)
    accepted = 0.9  # share of drawn pairs that were new in the last round
    while len(keys) < observed:
        batch = int(1.1 * (observed - len(keys)) / max(accepted, 0.02)) + 64
        rows = np.searchsorted(heavy, rng.random(batch) * heavy[-1], side="right").clip(max=m - 1)
        own = rng.random(batch) < affinity
        low = np.where(own, totals[edges[left_group[rows]]], 0.0)
        high = np.where(own, totals[edges[left_group[rows] + 1]], totals[-1])
        low, high = np.where(high > low, low, 0.0), np.where(high > low, high, totals[-1])  # an empty group
        place = np.searchsorted(totals, low + rng.random(batch) * (high - low), side="right") - 1
        columns = order[place.clip(0, n - 1)]
        found = np.unique(np.concatenate([keys, rows * np.int64(n) + columns]))
        accepted = (len(found) - len(keys)) / batch
        if accepted < 0.3:  # the likely pairs are used up: draw more evenly
            affinity *= 0.5
            heavy, totals = (np.cumsum(np.diff(x, prepend=0.0) ** 0.5) for x in (heavy, totals))
        keys = found
    keys = np.sort(rng.permutation(keys)[:observed])
    offsets = np.searchsorted(keys, np.arange(m + 1, dtype=np.int64) * n)
    return sp.csr_matrix((np.ones(observed, dtype=np.float32), (keys % n).astype(np.int32), offsets), shape=(m, n))


def paper_shape(name: str, seed: int = 0) -> sp.csr_matrix:
    """Draw synthetic pairs with the shape of one of the paper's data sets (not the data themselves)."""
    m, n, observed = PAPER_SHAPES[check.choice("name", name, tuple(PAPER_SHAPES))]
    return planted_pairs(m, n, observed, groups=64, seed=seed)


def packages() -> Interactions:
    """npm packages of 2016 and their dependencies: pairs (package, dependency)."""
    return _bundled("npm-core.txt.xz", " ").renamed("package", "dependency")


def thesaurus() -> Interactions:
    """A core of the Moby thesaurus: pairs (head, word)."""
    return _bundled("moby-core.txt.xz", ",").renamed("head", "word")


def _bundled(name: str, separator: str) -> Interactions:
    with as_file(files("gramtower.data").joinpath("bundled", name)) as path:
        return item_lists(path, separator=separator)

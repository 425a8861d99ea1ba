"""The function of `lightfm.cross_validation`: a random split of interactions."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower.data.matrices import SparseMatrix, checked


def random_train_test_split(
    interactions: SparseMatrix, test_percentage: float = 0.2, random_state: int | np.random.RandomState | None = None
) -> tuple[sp.coo_matrix, sp.coo_matrix]:
    """Split entries at random into a training and a test matrix.

    The same seed gives the same split as LightFM's function, and the same for a matrix of sample weights whose entries
    are in the same order.

    Args:
        interactions: sparse users × items.
        test_percentage: share of the entries in the test matrix, from 0 to 1.
        random_state: seed or RandomState; None for a random one.
    """
    share = check.number("test_percentage", test_percentage, minimum=0.0)
    if share > 1.0:
        check.fail("test_percentage", test_percentage, "a share from 0 to 1")
    entries = checked("interactions", interactions).tocoo()
    order = as_random_state(random_state).permutation(len(entries.data))
    cut = int((1.0 - share) * len(order))
    train, test = (
        sp.coo_matrix((entries.data[part], (entries.row[part], entries.col[part])), entries.shape, entries.dtype)
        for part in (order[:cut], order[cut:])
    )
    return train, test


def as_random_state(given: int | np.random.RandomState | None) -> np.random.RandomState:
    """A generator of LightFM's kind from a seed, or the given one; None for a random seed."""
    if isinstance(given, np.random.RandomState):
        return given
    seed = None if given is None else check.count("random_state", given, minimum=0, most=2**32 - 1)
    return np.random.RandomState(seed)

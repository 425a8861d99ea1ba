"""Pairs as scikit-learn takes its data: a sequence of samples, one for each pair, that is cut by positions.

Interactions have the shape of their matrix, whose rows are entities; scikit-learn's searches count and cut what they
are given by its first axis. Cost: that of ``Interactions.subset``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions


class PairSamples:
    """Observed pairs as ``X`` of scikit-learn's searches: ``GridSearchCV(...).fit(gt.PairSamples(pairs))``.

    Every pair is a sample. Parts keep the ids of both sides, so that models of different parts know the same entities.

    Args:
        pairs: the pairs, or a scipy.sparse matrix of them.
    """

    def __init__(self, pairs: Any) -> None:
        if not isinstance(pairs, Interactions) and not sp.issparse(pairs):
            check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")
        self.pairs = pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(pairs)

    @property
    def shape(self) -> tuple[int]:
        """How many pairs there are."""
        return (len(self.pairs),)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, places: Any) -> PairSamples:
        """Some of the pairs, by a mask, by places or by a slice; scikit-learn adds an ellipsis for further axes."""
        if isinstance(places, tuple) and len(places) == 2 and places[1] is Ellipsis:
            places = places[0]
        if isinstance(places, slice):
            places = np.arange(len(self))[places]
        if isinstance(places, (int, np.integer)):
            check.fail("places", places, "several: a mask, an array of places or a slice")
        return PairSamples(self.pairs.subset(places))

    __iter__ = None  # pairs are taken in parts, not one by one

    def __repr__(self) -> str:
        return f"PairSamples({self.pairs!r})"


def pairs_of(given: Any) -> Any:
    """The pairs of samples; anything else as it is."""
    return given.pairs if isinstance(given, PairSamples) else given

"""Model selection with scikit-learn: the splits of this library as positions of pairs, and its metrics as scorers.

    search = GridSearchCV(gt.TwoTower(), {"dim": [32, 64]}, scoring=gt.ranking_scorer("ndcg@20"), cv=gt.PairSplit(3))
    search.fit(gt.PairSamples(pairs))

Neither imports scikit-learn. Splits of whole entities have no positions: :func:`gramtower.cross_validate` takes them.
Cost of a split: that of data/splits.py, and O(pairs log pairs) to find positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data import splits
from gramtower.data.interactions import Interactions
from gramtower.data.samples import PairSamples, pairs_of
from gramtower.metrics.definitions import LOWER_IS_BETTER, parse

Positions = NDArray[np.int64]
_DRAWN: dict[str, Callable[..., splits.Split]] = {
    "random_pairs": splits.random_pairs,
    "per_user": splits.per_user,
    "leave_one_out": splits.leave_one_out,
    "leave_last": splits.leave_last,
    "by_time": splits.by_time,
}


class PairSplit:
    """Which pairs to learn from and which to rank, for ``cv=`` of scikit-learn's searches.

    Args:
        count: how many splits: folds, or draws with the seeds ``seed``, ``seed + 1``, ….
        method: "folds", of which each pair is tested in one; or a function of :mod:`gramtower.data.splits`:
            "random_pairs", "per_user", "leave_one_out", "leave_last" or "by_time".
        seed: of the draws.
        options: of that function, such as ``test=0.2``.
    """

    def __init__(self, count: int = 5, method: str = "folds", *, seed: int = 0, **options: Any) -> None:
        self.method = check.choice("method", method, ("folds", *_DRAWN))
        self.count = check.count("count", count, minimum=2 if method == "folds" else 1)
        self.seed, self.options = check.seed(seed), options
        if method == "folds" and options:
            check.fail("options", ", ".join(options), "none: folds of pairs have none")

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """How many splits there are."""
        return self.count

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[Positions, Positions]]:
        """Positions of training and test pairs, split by split.

        Args:
            X: :class:`gramtower.PairSamples`.
            y: not used; scikit-learn hands it on.
            groups: likewise.
        """
        if not isinstance(X, PairSamples):
            check.fail("X", type(X).__name__, "gramtower.PairSamples(pairs): one sample for each pair")
        pairs, everything = X.pairs, np.arange(len(X))
        for part in self._parts(pairs):
            held = np.isin(_keys(pairs), _keys(part.test), assume_unique=True)
            yield everything[~held], everything[held]

    def _parts(self, pairs: Interactions) -> Iterator[splits.Split]:
        if self.method == "folds":
            yield from splits.folds(pairs, self.count, seed=self.seed)
            return
        for turn in range(self.count):
            yield _DRAWN[self.method](pairs, seed=self.seed + turn, **self.options)

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"PairSplit({self.count}, {self.method!r}, seed={self.seed}{options})"


@dataclass(frozen=True)
class RankingScorer:
    """A ranking metric of held-out pairs, as ``scoring=`` of scikit-learn's searches; see :func:`ranking_scorer`.

    Attributes:
        metric: its name.
        sign: −1 for a metric of which less is better, as scikit-learn maximises.
    """

    metric: str
    sign: float = 1.0

    def __call__(self, model: Any, X: Any, y: Any = None) -> float:
        """The metric of a fitted model."""
        return self.sign * float(model.evaluate(pairs_of(X), (self.metric,))[self.metric])


def ranking_scorer(metric: str = "ndcg@20") -> RankingScorer:
    """A metric of how well held-out pairs are ranked, for ``scoring=`` of scikit-learn's searches.

    Training pairs are left out of the rankings, as in ``TwoTower.evaluate``. A dictionary of several scorers works as
    it does for scikit-learn's own.

    Args:
        metric: its name, see docs/metrics.md. One of which less is better is negated.
    """
    if not isinstance(metric, str):
        check.fail("metric", repr(metric), "the name of one metric")
    (found,) = parse((metric,))
    return RankingScorer(found.name, -1.0 if found.kind in LOWER_IS_BETTER else 1.0)


def _keys(pairs: Interactions) -> Positions:
    """A number for each pair, increasing; parts of the same pairs have the same numbers."""
    matrix = pairs.matrix
    rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))
    return np.asarray(rows * matrix.shape[1] + matrix.indices)

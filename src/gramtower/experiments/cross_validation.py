"""Cross-validation, intervals around metrics, and adapters for scikit-learn's model selection.

``cross_validate`` fits a copy of a model on all folds but one and measures it on that one, for each fold in turn. It
works with every model that has ``get_params``, ``fit`` and ``evaluate`` like :class:`gramtower.TwoTower`. Cost: as many
fits and evaluations as folds.

Intervals. Student's t over folds: mean ± t_{n−1}(0.975) s/√n. Folds share training pairs, so their values are not
independent and the interval is a guide rather than a promise. Bootstrap over users (percentiles): users are drawn with
replacement, each with all its values in all folds, so that a user who is in every fold does not count as several. Cost
of the bootstrap: O(replicates · users · folds · metrics) as matrix products, in blocks.

``PairSplit`` and ``ranking_scorer`` give scikit-learn the splits of this library as positions of pairs, and its metrics
as scorers, without importing scikit-learn:

    search = GridSearchCV(gt.TwoTower(), {"dim": [32, 64]}, scoring=gt.ranking_scorer("ndcg@20"), cv=gt.PairSplit(3))
    search.fit(gt.PairSamples(pairs))

Splits of whole entities have no positions; :func:`gramtower.cross_validate` takes them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, TypeVar, Unpack

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import html
from gramtower.data import splits
from gramtower.data.ids import Ids, index_of, join
from gramtower.data.interactions import Interactions, PairSamples, PairsLike, pairs_of
from gramtower.data.splits import Split
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import current_group
from gramtower.metrics.definitions import DEFAULT, LOWER_IS_BETTER, parse
from gramtower.model.feature_spec import GivenFeatures, is_matrix
from gramtower.model.fit_data import PairColumns, read_frame
from gramtower.model.fitting import joined_features
from gramtower.training.result import Reason

Interval = tuple[float, float]
Positions = NDArray[np.int64]
Fold = tuple[Positions, NDArray[np.floating[Any]]]  # users, as numbers that are the same in all folds, and their values
LEVEL = 0.95  # of intervals
_ELEMENTS = 1 << 22  # of a block of drawn users


class Estimator(Protocol):
    """A model that can be fitted again: its parameters and ``fit``."""

    def get_params(self) -> Mapping[str, object]: ...
    @property
    def fit(self) -> Callable[..., object]: ...


class Evaluated(Estimator, Protocol):
    """A model that can be cross-validated."""

    @property
    def evaluate(self) -> Callable[..., object]: ...


_Model = TypeVar("_Model", bound=Estimator)


def t_interval(values: Sequence[float]) -> Interval:
    """Return the 95% t interval of the mean of a few values, NaN for fewer than two."""
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    if n < 2:
        return (math.nan, math.nan)
    from scipy.special import stdtrit  # which `import gramtower` has no other use for

    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * float(array.std(ddof=1)) / math.sqrt(n)
    return (float(array.mean()) - half, float(array.mean()) + half)


def bootstrap_intervals(folds: Sequence[Fold], *, replicates: int = 1000, seed: int = 0) -> list[Interval]:
    """Return 95% intervals of several means over folds of means over users, with the same draws of users.

    The values of a fold are users × means; NaN stands for no value.
    """
    users, width = 1 + max(int(keys.max(initial=-1)) for keys, _ in folds), folds[0][1].shape[1]
    sums, counts = np.zeros((users, width, len(folds))), np.zeros((users, width, len(folds)))
    for fold, (keys, values) in enumerate(folds):
        there = np.isfinite(values)
        sums[keys, :, fold] = np.where(there, values, 0.0)
        counts[keys, :, fold] = there
    known = counts.any((1, 2))
    users = int(known.sum())
    if not users:
        return [(math.nan, math.nan)] * width
    flat_sums, flat_counts = sums[known].reshape(users, -1), counts[known].reshape(users, -1)
    generator = np.random.default_rng(seed)
    size, found = max(1, _ELEMENTS // users), []
    for start in range(0, replicates, size):
        rows = min(size, replicates - start)
        chosen = generator.integers(users, size=(rows, users)) + users * np.arange(rows)[:, None]
        drawn = np.bincount(chosen.ravel(), minlength=rows * users).reshape(rows, users).astype(np.float64)
        weight = drawn @ flat_counts
        means = np.divide(drawn @ flat_sums, weight, out=np.full(weight.shape, np.nan), where=weight > 0)
        by_fold = means.reshape(rows, width, len(folds))
        there = np.isfinite(by_fold)
        total, count = np.where(there, by_fold, 0.0).sum(-1), there.sum(-1)
        found.append(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))
    finite = [values[np.isfinite(values)] for values in np.concatenate(found).T]
    ends = [0.5 - LEVEL / 2, 0.5 + LEVEL / 2]
    spans = [np.quantile(values, ends).tolist() if len(values) else [math.nan, math.nan] for values in finite]
    return [(low, high) for low, high in spans]


_SHOWN = 10  # folds whose values a table lists


@dataclass(frozen=True, repr=False)
class CrossValidation:
    """The result of cross-validation.

    Attributes:
        folds: the result of ``evaluate`` for each fold.
        mean: mean of each metric over the folds.
        interval: 95% interval of each mean by Student's t over the folds; NaN for a single fold.
        user_interval: 95% interval by a bootstrap over users, for metrics that are means over users.
    """

    folds: Sequence[Mapping[str, float]]
    mean: Mapping[str, float]
    interval: Mapping[str, Interval]
    user_interval: Mapping[str, Interval] = field(default_factory=dict)

    def values(self, metric: str) -> NDArray[np.float64]:
        """Return the values of a metric, one for each fold."""
        check.choice("metric", metric, tuple(self.mean))
        return np.asarray([fold[metric] for fold in self.folds], dtype=np.float64)

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Return all numbers, for JSON."""
        return {
            metric: {
                "mean": mean,
                "interval": list(self.interval[metric]),
                "user_interval": list(self.user_interval[metric]) if metric in self.user_interval else None,
                "folds": self.values(metric).tolist(),
            }
            for metric, mean in self.mean.items()
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows of a table, with the values of the first folds."""
        rows = []
        for metric, mean in self.mean.items():
            values = " ".join(f"{value:.4f}" for value in self.values(metric)[:_SHOWN])
            more = " …" if len(self.folds) > _SHOWN else ""
            spans = [span(self.interval[metric]), span(self.user_interval.get(metric))]
            rows.append([metric, f"{mean:.4f}", *spans, values + more])
        return ["", "mean", "95% over folds", "95% over users", "folds"], rows

    def __repr__(self) -> str:
        return "\n".join([f"CrossValidation of {len(self.folds)} folds", *text_table(*self.table())])

    def _repr_html_(self) -> str:
        heads, rows = self.table()
        return html.card(f"CrossValidation of {len(self.folds)} folds", html.table(heads, rows, longest=None))


def text_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a plain table."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def cross_validate(
    model: Evaluated,
    pairs: PairsLike,
    folds: int | Iterable[Split] = 5,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    left_features: FeaturesLike = None,
    right_features: FeaturesLike = None,
    seed: int = 0,
    **columns: Unpack[PairColumns],
) -> CrossValidation:
    """Fit and measure a model once for each fold, each time on other pairs.

    Args:
        model: the model, such as a :class:`gramtower.TwoTower`. It is not changed: each fold fits a new one with the
            same parameters (``get_params``).
        pairs: :class:`~gramtower.Interactions`; a polars, pandas or pyarrow table whose columns ``left``, ``right`` …
            name; or a scipy.sparse matrix.
        folds: the number of folds, drawn by :func:`gramtower.data.splits.folds`; or splits of these pairs. Splits with
            a ``history`` are evaluated with it (``evaluate(..., histories=...)``).
        metrics: names, see docs/metrics.md.
        left_features: input of the left tower, as for ``fit``. Rows of a matrix are in the order of ``pairs``.
        right_features: the same for the right tower.
        seed: seed of the folds and of the bootstrap; the model has its own.
        columns: ``left``, ``right``, ``value`` … of a table of pairs, as for ``fit``.

    Returns:
        Values of each fold, means and intervals.
    """
    missing = [name for name in ("get_params", "fit", "evaluate") if not callable(getattr(model, name, None))]
    if missing or isinstance(model, type):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        check.fail("model", given, "a model with get_params, fit and evaluate, such as gramtower.TwoTower()")
    names = tuple(metric.name for metric in parse(metrics))
    if (processes := current_group().size) > 1:
        check.fail("cross_validate", f"{processes} processes", "one: folds do not run over several")
    known = known_pairs(read_frame("pairs", pairs, **columns))
    sides = dict(zip(("left", "right"), joined_features((left_features, right_features), known), strict=True))
    found, users = [], []
    for split in _splits(known, folds, check.seed(seed)):
        features = {
            f"{side}_features": _taken(side, one, getattr(known, f"{side}_ids"), getattr(split.train, f"{side}_ids"))
            for side, one in sides.items()
            if one is not None
        }
        fitted = fit_copy(model, split.train, features)
        shown = {} if split.history is None else {"histories": split.history}
        scores: Any = fitted.evaluate(split.test, names, **shown)
        found.append(scores)
        if hasattr(scores, "per_user"):
            measured = split.test if shown else split.train  # whose rows evaluate takes users for
            users.append((measured.left_ids[scores.rows], scores.per_user))
    values = {name: [float(scores[name]) for scores in found] for name in names}
    return CrossValidation(
        found,
        {name: float(np.mean(each)) for name, each in values.items()},
        {name: t_interval(each) for name, each in values.items()},
        _user_intervals(names, users, seed) if len(users) == len(found) else {},
    )


def known_pairs(pairs: object) -> Interactions:
    """Return Interactions, or a sparse matrix as such."""
    known = Interactions.from_matrix(pairs) if sp.issparse(pairs) else pairs
    if not isinstance(known, Interactions):
        check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")
    return known


def fit_copy(model: _Model, pairs: PairsLike, arguments: Mapping[str, object], **changes: object) -> _Model:
    """Return a fitted copy of a model with some parameters changed."""
    params = {name: copy.deepcopy(value) for name, value in model.get_params().items()}
    made = type(model)(**params | changes)
    made.fit(pairs, **arguments)
    if getattr(made, "reason_", None) is Reason.INTERRUPTED:
        raise KeyboardInterrupt
    return made


def _splits(pairs: Interactions, folds: object, seed: int) -> Iterator[Split]:
    """Return the splits, the first of them checked before anything is fitted."""
    if isinstance(folds, (int, np.integer)) and not isinstance(folds, bool):
        if not 2 <= folds <= len(pairs):
            check.fail("folds", folds, f"an integer from 2 to {len(pairs)}, the number of pairs")
        return splits.folds(pairs, int(folds), seed=seed)
    expected = "a number of folds, or splits such as those of gramtower.data.splits"
    matrix = sp.issparse(folds) or isinstance(folds, (np.ndarray, torch.Tensor))
    if matrix or not isinstance(folds, Iterable) or isinstance(folds, (str, bytes)):
        check.fail("folds", type(folds).__name__ if matrix else repr(folds), expected)
    given = iter(folds)
    first = next(given, None)
    if not isinstance(first, Split):
        check.fail("folds", "no splits" if first is None else f"a sequence of {type(first).__name__}", expected)
    return chain([first], given)


def _taken(side: str, features: FeaturesLike, known: Ids, asked: Ids) -> FeaturesLike:
    """Return features of the entities of a split: rows of matrices by id; tables are joined by id in the fit."""
    given = GivenFeatures(side, features)
    if asked is known or not any(map(is_matrix, given.parts)):
        return features
    rows = join(asked, index_of(known))
    if (rows < 0).any():
        check.fail("folds", f"a split with {asked[rows < 0].tolist()[0]!r}, which is not in pairs", "splits of pairs")
    return given.take(known, rows)


def _user_intervals(
    names: Sequence[str], users: Sequence[tuple[Ids, Mapping[str, NDArray[np.float64]]]], seed: int
) -> dict[str, Interval]:
    """Return bootstrap intervals of the metrics that every fold has for each user."""
    index: dict[object, int] = {}
    keys = [np.asarray([index.setdefault(key, len(index)) for key in ids.tolist()], dtype=np.int64) for ids, _ in users]
    of_users = [name for name in names if all(name in values for _, values in users)]
    folds = {name: [(own, one[name][:, None]) for own, (_, one) in zip(keys, users, strict=True)] for name in of_users}
    return {name: bootstrap_intervals(parts, seed=seed)[0] for name, parts in folds.items()}


def span(interval: Interval | None) -> str:
    """Format an interval."""
    return "-" if interval is None or not np.isfinite(interval[0]) else f"{interval[0]:.4f} to {interval[1]:.4f}"


_DRAWN = ("random_pairs", "per_user", "leave_one_out", "leave_last", "by_time")


class PairSplit:
    """Splits pairs into those to learn from and those to rank, for ``cv=`` of scikit-learn's searches.

    Args:
        count: the number of splits: folds, or draws with the seeds ``seed``, ``seed + 1``, ….
        method: "folds", each pair being tested in one fold; or a function of :mod:`gramtower.data.splits`:
            "random_pairs", "per_user", "leave_one_out", "leave_last" or "by_time".
        seed: seed of the draws.
        options: arguments of that function, such as ``test=0.2``.
    """

    def __init__(self, count: int = 5, method: str = "folds", *, seed: int = 0, **options: object) -> None:
        self.method = check.choice("method", method, ("folds", *_DRAWN))
        self.count = check.count("count", count, minimum=2 if method == "folds" else 1)
        self.seed, self.options = check.seed(seed), options
        if method == "folds" and options:
            check.fail("options", ", ".join(options), "none: folds of pairs have none")

    def get_n_splits(self, X: object = None, y: object = None, groups: object = None) -> int:
        """Return the number of splits."""
        return self.count

    def split(self, X: object, y: object = None, groups: object = None) -> Iterator[tuple[Positions, Positions]]:
        """Yield the positions of training and test pairs of each split.

        Args:
            X: :class:`gramtower.PairSamples`.
            y: not used.
            groups: not used.
        """
        if not isinstance(X, PairSamples):
            check.fail("X", type(X).__name__, "gramtower.PairSamples(pairs): one sample for each pair")
        pairs, everything = X.pairs, np.arange(len(X))
        if self.method == "folds":
            parts = splits.folds(pairs, self.count, seed=self.seed)
        else:
            draw = getattr(splits, self.method)
            parts = (draw(pairs, seed=self.seed + turn, **self.options) for turn in range(self.count))
        for part in parts:
            held = np.isin(_keys(pairs), _keys(part.test), assume_unique=True)
            yield everything[~held], everything[held]

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"PairSplit({self.count}, {self.method!r}, seed={self.seed}{options})"


@dataclass(frozen=True)
class RankingScorer:
    """A ranking metric of held-out pairs for ``scoring=`` of scikit-learn's searches; see :func:`ranking_scorer`.

    Attributes:
        metric: name of the metric.
        sign: −1 for a metric of which less is better, because scikit-learn maximises.
    """

    metric: str
    sign: float = 1.0

    def __call__(self, model: Evaluated, X: PairsLike, y: object = None) -> float:
        """Return the metric of a fitted model."""
        found: Any = model.evaluate(pairs_of(X), (self.metric,))
        return self.sign * float(found[self.metric])


def ranking_scorer(metric: str = "ndcg@20") -> RankingScorer:
    """Return a scorer of how well held-out pairs are ranked, for ``scoring=`` of scikit-learn's searches.

    Training pairs are left out of the rankings, as in ``TwoTower.evaluate``. A dictionary of several scorers works like
    one of scikit-learn's own.

    Args:
        metric: its name, see docs/metrics.md. A metric of which less is better is negated.
    """
    if not isinstance(metric, str):
        check.fail("metric", repr(metric), "the name of one metric")
    (found,) = parse((metric,))
    return RankingScorer(found.name, -1.0 if found.kind in LOWER_IS_BETTER else 1.0)


def _keys(pairs: Interactions) -> Positions:
    """Return an increasing number for each pair; parts of the same pairs have the same numbers."""
    matrix = pairs.matrix
    rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))
    return np.asarray(rows * matrix.shape[1] + matrix.indices)

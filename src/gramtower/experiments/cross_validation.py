"""Cross-validation: a fresh copy of a model fitted on all folds but one and measured on that one, for each in turn.

Works with whatever has ``get_params``, ``fit`` and ``evaluate`` as :class:`gramtower.TwoTower` has them. Cost: as many
fits and evaluations as folds, one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower.data.frames import Column
from gramtower.data.interactions import Interactions
from gramtower.data.lookup import index_of, join
from gramtower.data.splits import Split
from gramtower.data.splits import folds as cut
from gramtower.distributed.group import current_group
from gramtower.experiments.intervals import Interval, bootstrap_interval, t_interval
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.model.fit_data import Columns
from gramtower.training.result import Reason

_SHOWN = 10  # folds whose values a repr lists


@dataclass(frozen=True, repr=False)
class CrossValidation:
    """What cross-validation found: metrics of each fold, their means, and how sure these are.

    Attributes:
        folds: the result of ``evaluate`` for each fold.
        mean: of each metric over the folds.
        interval: 95% interval of each mean by Student's t over the folds; NaN for a single one.
        user_interval: 95% interval by a bootstrap over users, for metrics that are means over users.
    """

    folds: Sequence[Mapping[str, float]]
    mean: Mapping[str, float]
    interval: Mapping[str, Interval]
    user_interval: Mapping[str, Interval] = field(default_factory=dict)

    def values(self, metric: str) -> NDArray[np.float64]:
        """The values of a metric, one for each fold."""
        check.choice("metric", metric, tuple(self.mean))
        return np.asarray([fold[metric] for fold in self.folds], dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {
            metric: {
                "mean": mean,
                "interval": list(self.interval[metric]),
                "user_interval": list(self.user_interval[metric]) if metric in self.user_interval else None,
                "folds": self.values(metric).tolist(),
            }
            for metric, mean in self.mean.items()
        }

    def __repr__(self) -> str:
        heads = ["", "mean", "95% over folds", "95% over users", "folds"]
        lines = [heads]
        for metric, mean in self.mean.items():
            values = " ".join(f"{value:.4f}" for value in self.values(metric)[:_SHOWN])
            more = " …" if len(self.folds) > _SHOWN else ""
            spans = [_span(self.interval[metric]), _span(self.user_interval.get(metric))]
            lines.append([metric, f"{mean:.4f}", *spans, values + more])
        widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([f"CrossValidation of {len(self.folds)} folds", *(line.rstrip() for line in table)])

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        heads = ["metric", "mean", "95% over folds", "95% over users", *(f"fold {i + 1}" for i in range(self._shown))]
        rows = [
            (metric, mean, _span(self.interval[metric]), _span(self.user_interval.get(metric)),
             *self.values(metric)[: self._shown].tolist())
            for metric, mean in self.mean.items()
        ]  # fmt: skip
        return html.card(f"CrossValidation of {len(self.folds)} folds", html.table(heads, rows))

    @property
    def _shown(self) -> int:
        return min(_SHOWN, len(self.folds))


def cross_validate(
    model: Any,
    pairs: Any,
    folds: int | Iterable[Split] = 5,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    left_features: Any = None,
    right_features: Any = None,
    seed: int = 0,
    left: Column | None = None,
    right: Column | None = None,
    value: Column | None = None,
    weight: Column | None = None,
    time: Column | None = None,
    threshold: float | None = None,
) -> CrossValidation:
    """Fit and measure a model as often as there are folds, each time on other pairs.

    Args:
        model: what to fit, such as a :class:`gramtower.TwoTower`. It stays as it is: each fold fits a new one with the
            same parameters (``get_params``).
        pairs: :class:`~gramtower.Interactions`; a polars, pandas or pyarrow table, ``left``, ``right`` … being its
            columns; or a scipy.sparse matrix.
        folds: how many, drawn by :func:`gramtower.data.splits.folds`; or splits of your own, of these pairs. Those with
            a ``history`` are evaluated by it (``evaluate(..., histories=...)``).
        metrics: names, see docs/metrics.md.
        left_features: what the left tower sees, as for ``fit``. Rows of a matrix are in the order of ``pairs``.
        right_features: the same for the right tower.
        seed: of the folds and of the bootstrap; the model has its own.
        left: of a table, the column of left ids, as for ``fit``.
        right: the column of right ids.
        value: the column of values.
        weight: the column of pair weights.
        time: the column of times.
        threshold: smallest value that makes a pair, labelled 1.

    Returns:
        Values of each fold, means and intervals.
    """
    _check_model(model)
    names = tuple(metric.name for metric in parse(metrics))
    if (processes := current_group().size) > 1:
        check.fail("cross_validate", f"{processes} processes", "one: folds do not run over several")
    pairs = Columns(left, right, value, weight, time, threshold).read("pairs", pairs)
    known = Interactions.from_matrix(pairs) if sp.issparse(pairs) else pairs
    if not isinstance(known, Interactions):
        check.fail("pairs", type(pairs).__name__, "gramtower.Interactions or a scipy.sparse matrix")
    found, users = [], []
    for split in _splits(known, folds, check.seed(seed)):
        features = {}
        for side, given in (("left", left_features), ("right", right_features)):
            if given is not None:
                ids = getattr(known, f"{side}_ids"), getattr(split.train, f"{side}_ids")
                features[f"{side}_features"] = _of_rows(f"{side}_features", given, *ids)
        fitted = fit_copy(model, split.train, features)
        shown = {} if split.history is None else {"histories": split.history}
        scores = fitted.evaluate(split.test, names, **shown)
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


def fit_copy(model: Any, pairs: Any, arguments: Mapping[str, Any], **changes: Any) -> Any:
    """A new model with the parameters of another one, some of them changed, fitted.

    Raises:
        KeyboardInterrupt: after Ctrl-C, which a fit takes for its end, and which is to end everything around it.
    """
    params = {name: copy.deepcopy(value) for name, value in model.get_params().items()}
    made = type(model)(**params | changes)
    made.fit(pairs, **arguments)
    if getattr(made, "reason_", None) is Reason.INTERRUPTED:
        raise KeyboardInterrupt
    return made


def _check_model(model: Any) -> None:
    missing = [name for name in ("get_params", "fit", "evaluate") if not callable(getattr(model, name, None))]
    if missing or isinstance(model, type):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__}"
        check.fail("model", given, "a model with get_params, fit and evaluate, such as gramtower.TwoTower()")


def _splits(pairs: Interactions, folds: Any, seed: int) -> Iterator[Split]:
    """The splits to go through, the first of them checked before anything is fitted."""
    if isinstance(folds, (int, np.integer)) and not isinstance(folds, bool):
        if not 2 <= folds <= len(pairs):
            check.fail("folds", folds, f"an integer from 2 to {len(pairs)}, the number of pairs")
        return cut(pairs, int(folds), seed=seed)
    expected = "a number of folds, or splits such as those of gramtower.data.splits"
    matrix = sp.issparse(folds) or isinstance(folds, (np.ndarray, torch.Tensor))
    if matrix or not isinstance(folds, Iterable) or isinstance(folds, (str, bytes)):
        check.fail("folds", type(folds).__name__ if matrix else repr(folds), expected)
    given = iter(folds)
    first = next(given, None)
    if not isinstance(first, Split):
        check.fail("folds", "no splits" if first is None else f"a sequence of {type(first).__name__}", expected)
    return chain([first], given)


def _of_rows(name: str, features: Any, known: NDArray[Any], asked: NDArray[Any]) -> Any:
    """Features for other entities: rows of matrices are found by id, everything else knows ids itself."""
    if isinstance(features, (list, tuple)):
        return [_of_rows(name, one, known, asked) for one in features]
    if not (sp.issparse(features) or isinstance(features, (np.ndarray, torch.Tensor))) or asked is known:
        return features
    if features.shape[0] != len(known):
        check.fail(name, f"{features.shape[0]} rows", f"{len(known)}, one for each entity of pairs")
    rows = join(asked, index_of(known))
    if (rows < 0).any():
        check.fail("folds", f"a split with {asked[rows < 0].tolist()[0]!r}, which is not in pairs", "splits of pairs")
    matrix = features.tocsr() if sp.issparse(features) else features
    return matrix[torch.from_numpy(rows)] if isinstance(matrix, torch.Tensor) else matrix[rows]


def _user_intervals(
    names: Sequence[str], users: Sequence[tuple[NDArray[Any], Mapping[str, NDArray[Any]]]], seed: int
) -> dict[str, Interval]:
    """Bootstrap intervals of the metrics that every fold has for each user."""
    index: dict[Any, int] = {}
    keys = [np.asarray([index.setdefault(key, len(index)) for key in ids.tolist()], dtype=np.int64) for ids, _ in users]
    return {
        name: bootstrap_interval([(own, values[name]) for own, (_, values) in zip(keys, users, strict=True)], seed=seed)
        for name in names
        if all(name in values for _, values in users)
    }


def _span(interval: Interval | None) -> str:
    return "-" if interval is None or not np.isfinite(interval[0]) else f"{interval[0]:.4f} to {interval[1]:.4f}"

"""The split and the models of a benchmark.

All models share one split for each seed. The pairs that are learned from count as seen, and so does every entity with
itself where both sides are one set; all right entities are candidates. A model of the caller is a baseline of this
package; an estimator with ``get_params``, ``fit(pairs, …)`` and ``recommend(ids, k)``, such as
:class:`gramtower.TwoTower`; or a model of ``implicit``, whose factors or similarities are ranked. Each run fits a copy,
with the seed of the run if the model takes one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.tensors import digest_of
from gramtower.data.ids import Ids, index_of, join
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import SparseMatrix, union, without
from gramtower.data.splits import random_pairs
from gramtower.data.tables import FeatureTable
from gramtower.experiments.baselines import (
    ALS,
    EASE,
    BuiltIn,
    ItemKNN,
    Lists,
    OfImplicit,
    Popularity,
    needs_implicit,
    settings_of,
)
from gramtower.experiments.benchmark_report import ModelFacts
from gramtower.experiments.cross_validation import Estimator, fit_copy
from gramtower.metrics.definitions import parse
from gramtower.metrics.embedding_metrics import ranking_metrics
from gramtower.metrics.tally import Scores
from gramtower.model.fit_data import aligned, own_pairs, prepare_data
from gramtower.model.fit_parts import make_problem
from gramtower.model.settings import ModelSettings
from gramtower.model.two_tower import TwoTower
from gramtower.optim.solvers import as_solver

Test = float | Interactions | SparseMatrix  # a share of the pairs, or held-out pairs
_REFUSED = {
    "auc": "it needs scores of all items, and a model here gives lists",
    "mrr": "mrr@K: a model here gives lists",
    "diversity": "it is measured in a model's own embeddings, which differ from model to model",
}


@dataclass(frozen=True, eq=False)
class Cut:
    """The split of one seed."""

    train: Interactions  # pairs to learn from
    seen: sp.csr_matrix  # pairs that are left out of lists, users × items
    users: NDArray[np.int64]  # rows of the users with relevant items
    relevant: sp.csr_matrix  # their relevant items, one row for each user

    def measure(self, lists: NDArray[np.int64], metrics: list[str]) -> Scores:
        """Return the metrics of lists, one list for each of ``users``."""
        if lists.shape[0] != len(self.users):
            check.fail("lists", f"{lists.shape[0]} lists", f"{len(self.users)}, one for each user")
        taken = seen_places(lists, sp.csr_matrix(self.seen[self.users]))
        if taken:
            expected = "none: those that a user has in the training pairs are left out for every model"
            check.fail("lists", f"{taken:,} items that are seen", expected)
        return ranking_metrics(lists, self.relevant, metrics, popularity=self.train.matrix)


def checked_metrics(metrics: str | Sequence[str]) -> list[str]:
    """Return the names of metrics, all of which can be computed from lists."""
    for metric in (found := parse(metrics)):
        if metric.kind in _REFUSED and (metric.kind == "diversity" or not metric.k):
            check.fail("metrics", repr(metric.name), f"metrics of lists: {_REFUSED[metric.kind]}")
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        check.fail("metrics", ", ".join(names), "each metric once")
    return names


def make_cut(pairs: Interactions, test: Test, seed: int) -> Cut:
    """Return the split of a seed: a share of the pairs drawn at random, or test pairs, the same for every seed."""
    if isinstance(test, (Interactions, sp.spmatrix, sp.sparray)):
        train, held_out = pairs, test
    else:
        split = random_pairs(pairs, test, seed=seed)
        train, held_out = split.train, split.test
    ids = train.left_ids, train.right_ids
    found = aligned("test", held_out, ids, train.shape, train.numbered)
    seen = union(train.matrix, own_pairs(ids, train.shape)) if train.one_set else union(train.matrix)
    relevant = without(sp.csr_matrix((found > 0).astype(np.float32)), seen)
    users = np.flatnonzero(np.diff(relevant.indptr)).astype(np.int64)
    if not len(users):
        check.fail("test", f"{found.nnz:,} pairs, none of them both positive and new", "at least one that is")
    return Cut(train, seen, users, sp.csr_matrix(relevant[users]))


def seen_places(lists: NDArray[np.int64], seen: sp.csr_matrix) -> int:
    """Count the places of lists that hold an item of the same row of ``seen``."""
    rows, places = np.nonzero(lists >= 0)
    shown = sp.csr_matrix((np.ones(len(rows), dtype=np.float32), (rows, lists[rows, places])), shape=seen.shape)
    return int(shown.multiply(seen).nnz)


def describe(value: object, ids: Ids | None = None) -> object:
    """Describe settings and features in JSON; equal ones have equal descriptions. Arrays and tables become digests.

    Of a table only the rows of ``ids`` count.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): describe(part, ids) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(part, ids) for part in value]
    if isinstance(value, FeatureTable):
        rows = [] if ids is None else [value.encode(ids)]
        return {"table": value.kinds, "fingerprint": digest_of(value.to_json(), *rows)}
    if isinstance(value, (np.ndarray, torch.Tensor, sp.spmatrix, sp.sparray)):
        return {"shape": list(value.shape), "fingerprint": digest_of(value)}
    if isinstance(value, Interactions):
        return {"pairs": len(value), "fingerprint": digest_of(value.matrix, value.left_ids, value.right_ids)}
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is not None:
        return f"{value.__module__}.{name}"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


BASELINES: dict[str, Callable[[], BuiltIn]] = {"popularity": Popularity, "item-knn": ItemKNN, "ease": EASE, "als": ALS}
TOWERS: dict[str, Callable[[], TwoTower]] = {
    "gramtower-linear": lambda: TwoTower(hidden=()),
    "gramtower-linear-features": lambda: TwoTower(hidden=()),
    "gramtower-hidden-features": TwoTower,
}
BUILT_IN = (*BASELINES, *TOWERS)
_SEEDS = ("seed", "random_state")
_LONGEST = 60  # letters of a name
_BLOCK = 8192  # users that an estimator is asked about at once


class Recommender(Estimator, Protocol):
    """An estimator that makes lists."""

    @property
    def recommend(self) -> Callable[..., tuple[object, object]]: ...


class Candidate(Protocol):
    """A model in one run, with the interface of a baseline."""

    def fit(self, pairs: Interactions, seed: int = 0) -> object: ...
    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists: ...


@dataclass(frozen=True)
class Entry:
    """A model of a benchmark."""

    name: str  # name of the model
    make: Callable[[], Candidate]  # returns an unfitted copy of it
    facts: ModelFacts  # its description, to recognise its runs


class OfEstimator:
    """Gives an estimator the interface of a baseline."""

    def __init__(self, model: Recommender, arguments: Mapping[str, object]) -> None:
        self.model, self.arguments = model, dict(arguments)

    def check(self, pairs: Interactions) -> None:
        """Refuse settings and features of towers that do not fit the data; other estimators check when they fit."""
        if isinstance(self.model, ModelSettings):
            known = {name: one for name, one in self.arguments.items() if name in ("left_features", "right_features")}
            as_solver(self.model.optimizer, dict(self.model.solver_options()))
            data = prepare_data(self.model, pairs, **known)
            make_problem(self.model, data)
            if (asked := self.model.with_changes().max_iterations) is not None:
                check.count("max_iterations", asked, minimum=0)

    def fit(self, pairs: Interactions, seed: int = 0) -> None:
        seeds = {name: seed for name in _SEEDS if name in self.model.get_params()}
        self.model, self.pairs = fit_copy(self.model, pairs, self.arguments, **seeds), pairs

    def lists(self, rows: NDArray[np.int64], k: int, seen: sp.csr_matrix) -> Lists:
        index, found = index_of(self.pairs.right_ids), np.full((len(rows), k), -1, dtype=np.int64)
        for start in range(0, len(rows), _BLOCK):
            users = self.pairs.left_ids[rows[start : start + _BLOCK]]
            ids, scores = self.model.recommend(users.tolist(), k)
            names, filled = np.asarray(ids), np.asarray(scores) > -np.inf
            if names.ndim != 2 or names.shape != filled.shape or len(names) != len(users):
                expected = f"ids and scores of shape ({len(users)}, {k} or fewer)"
                check.fail("recommend", f"ids of shape {names.shape} and scores of shape {filled.shape}", expected)
            columns = join(names[filled], index)
            if (columns < 0).any():
                check.fail("recommend", f"{names[filled][columns < 0].tolist()[0]!r}", "ids of the training pairs")
            width = min(k, names.shape[1])
            block = np.full(names.shape, -1, dtype=np.int64)
            block[filled] = columns
            found[start : start + len(users), :width] = block[:, :width]
        return found


def make_entries(
    pairs: Interactions,
    baselines: Sequence[str] | None,
    models: Mapping[str, object] | None,
    features: Mapping[str, object],
) -> list[Entry]:
    """Return the models of a benchmark after checking them."""
    entries = [
        _baseline(name, BASELINES[name](), pairs)
        if name in BASELINES
        else _estimator(name, TOWERS[name](), features if name.endswith("-features") else {}, pairs, "towers")
        for name in _chosen(baselines, bool(features))
    ]
    if models is not None and not isinstance(models, Mapping):
        check.fail("models", type(models).__name__, "names and models, such as {'mine': gramtower.TwoTower(dim=32)}")
    for name, given in (models or {}).items():
        if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST or not name.isprintable():
            check.fail("models", f"the name {name!r}", f"text of 1 to {_LONGEST} letters")
        if name in BUILT_IN:
            check.fail("models", f"the name {name!r}", "a name other than " + ", ".join(BUILT_IN))
        entries.append(_own(name, given, pairs, features))
    if not any(entry.facts.left_out is None for entry in entries):
        reasons = "; ".join(f"{entry.name}: {entry.facts.left_out}" for entry in entries)
        check.fail("models", f"none that can run ({reasons})" if entries else "none", "at least one model")
    return entries


def _chosen(names: Sequence[str] | None, with_features: bool) -> list[str]:
    fitting = [name for name in BUILT_IN if with_features or not name.endswith("-features")]
    if names is None:
        return fitting
    chosen = [names] if isinstance(names, str) else check.listed("baselines", names, "names")
    for name in chosen:
        if name not in BUILT_IN:
            near = check.near(name, BUILT_IN, 1) if isinstance(name, str) else []
            hint = f"{near[0]!r}, or another of " if near else ""
            check.fail("baselines", repr(name), hint + ", ".join(BUILT_IN))
        if name not in fitting:
            check.fail("baselines", repr(name), "left_features or right_features for it to see")
    if len(set(chosen)) < len(chosen):
        check.fail("baselines", ", ".join(chosen), "each name once")
    return chosen


def _baseline(name: str, model: BuiltIn, pairs: Interactions) -> Entry:
    reason = needs_implicit(model)
    if reason is None and isinstance(model, EASE):
        reason = model.too_large(pairs.shape[1])
    shown = {"model": type(model).__name__} | {name: describe(value) for name, value in settings_of(model).items()}
    facts = ModelFacts("baseline", shown, isinstance(model, ALS), reason)
    return Entry(name, lambda: copy.deepcopy(replace(model)), facts)


def _own(name: str, given: object, pairs: Interactions, features: Mapping[str, object]) -> Entry:
    paired = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    model: Any = given  # of any of the kinds below
    arguments: Mapping[str, object] = features
    if paired:
        model, arguments = model
    if isinstance(model, (Popularity, ItemKNN, EASE, ALS)) and not paired:
        return _baseline(name, model, pairs)
    if not isinstance(model, type) and all(
        callable(getattr(model, n, None)) for n in ("get_params", "fit", "recommend")
    ):
        return _estimator(name, model, arguments, pairs, "own")
    of_implicit = hasattr(model, "user_factors") or hasattr(model, "similarity")
    if of_implicit and not isinstance(model, type) and callable(getattr(model, "fit", None)) and not paired:
        plain = {n: v for n, v in vars(model).items() if isinstance(v, (bool, int, float, str)) and n not in _SEEDS}
        facts = ModelFacts("own", {"model": type(model).__name__, **plain}, True)
        return Entry(name, lambda: OfImplicit(copy.deepcopy(model)), facts)
    shown = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    expected = (
        "a model with get_params, fit and recommend such as gramtower.TwoTower(), a pair of it and the arguments of "
        "its fit, one of gramtower.experiments.baselines, or one of implicit"
    )
    check.fail(f"models[{name!r}]", shown, expected)


def _estimator(name: str, model: Recommender, arguments: Mapping[str, object], pairs: Interactions, kind: str) -> Entry:
    """Return a model that is an estimator; matrices of features must have a row for each entity."""
    given = {}
    for part, value in arguments.items():
        ids = {"left_features": pairs.left_ids, "right_features": pairs.right_ids}.get(part)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if ids is not None and hasattr(one, "shape") and one.shape[0] != len(ids):
                check.fail(part, f"{one.shape[0]} rows", f"{len(ids)}, one for each entity of pairs")
        given[part] = describe(value, ids)
    settings = {n: describe(v) for n, v in model.get_params().items() if n not in ("verbose", *_SEEDS)}
    shown = {"model": type(model).__name__, **settings, **({"fit": given} if given else {})}
    return Entry(name, lambda: OfEstimator(model, arguments), ModelFacts(kind, shown, True))

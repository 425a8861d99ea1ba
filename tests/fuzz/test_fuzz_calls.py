"""Hostile arguments to the public functions: each call answers, or refuses with ``ValueError`` or ``OSError``."""

from __future__ import annotations

import contextlib
import copy
import datetime
import warnings
from pathlib import Path

import numpy as np
import scipy.sparse as sp
import torch
from harness import ACCEPTED, Fuzz

import gramtower as gt
from gramtower.compat.implicit import TwoTower as Implicit
from gramtower.compat.implicit import evaluation
from gramtower.compat.implicit.als import AlternatingLeastSquares, calculate_loss
from gramtower.data import splits
from gramtower.metrics import evaluate_embeddings, ranking_metrics
from gramtower.retrieval.topk import top_k

M, N = 8, 6
MANY = 2**70
THEIRS = ("implicit", "als")  # calls that raise as implicit's do
SIZED = (
    "dim",
    "hidden",
    "factors",
    "max_iterations",
    "iterations",
    "k",
    "N",
    "K",
    "userids",
)  # a large number there is a large task


def pattern():
    return sp.csr_matrix((np.add.outer(np.arange(M), 2 * np.arange(N)) % 3 < 2).astype(np.float32))


def values():
    """Things that an argument may be given instead of what it should."""
    x = pattern()
    broken = x.copy()
    broken.data[3] = np.nan
    return [
        None, True, False, 0, 1, -1, 3, 1.5, -0.0, float("nan"), float("inf"), -float("inf"), 1e300, 1e-300, 2j, "",
        "x", "id", "history", "left", "auto", "map@5", "recall@3", "map@0", "degree^2", "degree^nan", "1MB", "\0",
        "é\ud800", b"x", b"\xff", [], [1], [1, 2, 3], ["a", None], [[1, 2], [3]], [[]], (), (0,), (2, 2), {},
        {"a": 1}, {"user": [1]}, {1}, range(3), iter([1, 2]), object(), len, type, lambda *_: None, Ellipsis, np.nan,
        np.int8(3), np.float16(2), np.array(3), np.array([]), np.zeros((0, 3)), np.zeros((M, 0)), np.zeros((M, 2)),
        np.ones(M), np.ones(N), -np.ones(M), np.full((M, 3), np.nan), np.array(["a", "b"]),
        np.array([1, "b", None], dtype=object), np.zeros((2, 2, 2)), np.zeros((M, 2), complex),
        np.array([2**63], dtype=np.uint64), np.array(["2020-01-01"], dtype="M8[D]"),
        np.ma.masked_array([1.0, 2.0], [True, False]), np.arange(M), np.arange(M, dtype=np.int8),
        np.eye(M, dtype=bool), x, broken, x.tocoo(), x.tocsc(), x.T, x[:3], x[:, :0], x[:0], x * -1, x * 1e30,
        x.astype(bool), x.astype(complex), sp.csr_matrix((0, 0)), sp.csr_array(x), sp.lil_matrix(x),
        sp.csr_matrix((10**4, 2)), torch.zeros(M, 2), torch.zeros(0), torch.zeros(M, 2).half(),
        torch.full((M, 2), float("inf")), torch.eye(M).to_sparse(), torch.zeros(M, 2, dtype=torch.cfloat),
        torch.zeros(M, 2, requires_grad=True), torch.tensor(3), torch.float16, gt.Interactions.from_matrix(x),
        gt.Interactions.from_matrix(x[:3]), gt.Problem(x), datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1),
        Path("nowhere"), Path("."), Path("x" * 300),
    ]  # fmt: skip


def hostile(name, argument):
    """Values to try; where a large number is a large task none is given, and no function where ours would be called."""
    found = values() + ([] if argument in SIZED else [MANY, -MANY, 10**12])
    if argument in ("towers", "validation", "callbacks"):
        found = [value for value in found if not callable(value)]
    return [v for v in found if isinstance(v, (str, Path))] if (name, argument) == ("load", "path") else found


class Surface:
    """The functions, each with arguments that it accepts."""

    def __init__(self, folder):
        x = pattern()
        self.pairs = gt.Interactions.from_arrays(
            [f"u{i}" for i in x.nonzero()[0]], [f"i{j}" for j in x.nonzero()[1]], time=np.arange(x.nnz)
        )
        self.settings = dict(dim=2, hidden=(2,), max_iterations=1, device="cpu")
        self.model = gt.TwoTower(**self.settings).fit(self.pairs)
        features = np.ones((M, 3), np.float32)
        self.described = gt.TwoTower(**self.settings).fit(x, left_features=["history", features])
        self.catalogued = gt.TwoTower(**self.settings).fit(x, right_features=np.ones((N, 3), np.float32))
        self.implicit = Implicit(2, iterations=1, use_gpu=False, history=True)
        self.implicit.fit(x, show_progress=False)
        self.problem = gt.Problem(x)
        self.towers = gt.mlp_towers(self.problem, (2,), 2)
        self.file = folder / "model"
        self.model.save(self.file)
        self.folder = folder
        P, Q = np.ones((M, 2), np.float32), np.ones((N, 2), np.float32)
        lists = np.tile(np.arange(3), (M, 1))
        left, right = ["u0", "u1"], ["i0", "i1"]
        problem = dict(left=None, right=None, loss="logistic", omega=0.1, l2=1.0, imputed=-1.0, left_weights=None)
        problem |= dict(right_weights=None, embedding_l2=0.0, frequency_power=1.0, pair_weights=None)
        problem |= dict(memory_budget=None, kernels="auto", precision="float32", pair_precision="float32")
        params = {k: v for k, v in gt.TwoTower(**self.settings).get_params().items() if k != "towers"}
        run = dict(optimizer="gd", max_iterations=1, time_limit=1.0, seed=0, callbacks=(), tolerance=1e-6)
        self.calls = {
            "Problem": (gt.Problem, dict(pairs=x) | problem),
            "evaluated problem": (self.evaluated, dict(pairs=x) | problem),
            "at": (self.problem.at, dict(towers=self.towers, parameters=None)),
            "mlp_towers": (gt.mlp_towers, dict(problem=self.problem, hidden=(2,), dim=2, activation="elu", seed=0)),
            "minimize": (self.minimized, run | dict(patience=None, validation=None, history=None, checkpoint=None)),
            "load": (gt.load, dict(path=self.file)),
            "read_history": (gt.read_history, dict(path=self.file)),
            "fit": (self.fitted, dict(pairs=x, left_features=None, right_features=None, validation=None)),
            "fit of settings": (self.fitted, dict(pairs=x) | params),
            "recommend": (
                self.model.recommend,
                dict(left=left, k=3, exclude_seen=True, allow=None, deny=None, left_features=None, histories=None)
                | dict(exclude=self.pairs, candidates="all"),
            ),
            "recommend to new": (self.described.recommend, dict(left=None, k=3, left_features=features, histories=x)),
            "new right": (self.catalogued.recommend, dict(left=[1], k=3, exclude=x, right_features=features)),
            "similar to new": (self.catalogued.similar, dict(ids=None, side="right", k=3, right_features=features)),
            "predict new": (self.catalogued.predict, dict(left=[1], right=[N], right_features=features)),
            "add": (self.added, dict(right_features=features, right_ids=None, left_features=None, histories=None)),
            "evaluate with new": (
                self.catalogued.evaluate,
                dict(test=x, right_features=features, exclude=None, exclude_seen=False),
            ),
            "similar": (self.model.similar, dict(ids=right, side="right", k=3)),
            "predict": (self.model.predict, dict(left=left, right=right)),
            "embed": (self.described.embed, dict(ids=None, side="left", left_features=features, histories=x)),
            "embed known": (self.model.embed, dict(ids=left, side="left")),
            "evaluate": (self.model.evaluate, dict(test=self.pairs, metrics=("map@5",), exclude_seen=False, by=None)),
            "evaluate new": (self.described.evaluate, dict(test=x, left_features=features, histories=x)),
            "save": (self.saved, dict(path=folder / "other")),
            "set_params": (lambda **given: repr(gt.TwoTower().set_params(**given)), params),
            "from_arrays": (
                gt.Interactions.from_arrays,
                dict(left=left, right=right, value=[1.0, 2.0], weight=[1.0, 2.0], time=[1.0, 2.0], threshold=1.0)
                | dict(labels=False, duplicates="max"),
            ),
            "from_matrix": (gt.Interactions.from_matrix, dict(matrix=x, left_ids=list("abcdefgh"), right_ids=None)),
            "subset": (self.pairs.subset, dict(entries=np.arange(3))),
            "with_matrix": (self.pairs.with_matrix, dict(matrix=x)),
            "left_rows": (self.pairs.left_rows, dict(ids=left)),
            "random_pairs": (splits.random_pairs, dict(pairs=self.pairs, test=0.2, seed=0)),
            "per_user": (splits.per_user, dict(pairs=self.pairs, test=0.2, minimum=1, seed=0)),
            "leave_one_out": (splits.leave_one_out, dict(pairs=self.pairs, minimum=1, seed=0)),
            "by_time": (splits.by_time, dict(pairs=self.pairs, test=0.2, cut=None, seed=0)),
            "leave_last": (splits.leave_last, dict(pairs=self.pairs, count=1, minimum=1, seed=0)),
            "held_out": (splits.held_out, dict(pairs=self.pairs, side="right", share=0.3, seed=0)),
            "folds": (lambda **given: list(splits.folds(**given)), dict(pairs=self.pairs, count=3, by="left", seed=0)),
            "held_out_users": (splits.held_out_users, dict(pairs=self.pairs, users=0.3, history=0.5, seed=0)),
            "top_k": (top_k, dict(P=P, Q=Q, k=3, exclude=x, allow=None, deny=None, block_bytes=None)),
            "ranking_metrics": (ranking_metrics, dict(recommended=lists, relevant=x, metrics=("map@3",))),
            "metrics of lists": (
                ranking_metrics,
                dict(recommended=lists, relevant=x, popularity=x, propensity=(0.55, 1.5), embeddings=Q)
                | dict(metrics=("psp@3", "novelty@3", "diversity@3", "gini@3")),
            ),
            "cross_validate": (
                gt.cross_validate,
                dict(model=gt.TwoTower(dim=2, hidden=(), max_iterations=1), pairs=self.pairs, folds=2, seed=0)
                | dict(metrics=("map@3",), left_features=None, right_features=None),
            ),
            "metrics of rare items": (
                evaluate_embeddings,
                dict(P=P, Q=Q, test=x, popularity=x, propensity=(0.55, 1.5), metrics=("psp@3", "novelty@3", "mrr")),
            ),
            "evaluate_embeddings": (
                evaluate_embeddings,
                dict(
                    P=P,
                    Q=Q,
                    test=x,
                    train=None,
                    metrics=("map@3", "auc"),
                    exclude_train=False,
                    by=None,
                    block_bytes=None,
                ),
            ),
            "implicit": (
                self.like_implicit,
                dict(
                    user_items=x, factors=2, regularization=0.1, alpha=1.0, random_state=0, use_gpu=False, iterations=1
                ),
            ),
            "implicit recommend": (
                self.implicit.recommend,
                dict(userid=[1], user_items=x[:1], N=2, filter_items=None, recalculate_user=False, items=None),
            ),
            "implicit similar": (self.implicit.similar_items, dict(itemid=1, N=2, filter_items=None, items=None)),
        } | self.als_calls(x)

    def als_calls(self, x):
        als = AlternatingLeastSquares(2, iterations=1, use_gpu=False)
        als.fit(x, show_progress=False)
        als.save(self.folder / "als.npz")
        shared = dict(train_user_items=x, test_user_items=x, K=2)
        fit = dict(user_items=x, factors=2, regularization=0.1, alpha=1.0, dtype="float32", random_state=0)
        similar = dict(itemid=[1], N=2, recalculate_item=True, item_users=x.T.tocsr()[1:2], items=None)
        return {
            "als": (self.like_als, fit | dict(use_gpu=False, iterations=1, calculate_training_loss=True)),
            "als recommend": (als.recommend, dict(userid=[1], user_items=x[:1], N=2, recalculate_user=True)),
            "als similar": (als.similar_items, similar),
            "als partial fit": (copy.deepcopy(als).partial_fit_users, dict(userids=[1], user_items=x[:1])),
            "als explain": (als.explain, dict(userid=1, user_items=x, itemid=2, user_weights=None, N=2)),
            "als load": (AlternatingLeastSquares.load, dict(fileobj_or_path=self.folder / "als.npz")),
            "als loss": (calculate_loss, dict(Cui=x, X=als.user_factors, Y=als.item_factors, regularization=0.1)),
            "als metrics": (lambda **given: evaluation.ranking_metrics_at_k(als, **given), shared),
            "split": (evaluation.train_test_split, dict(ratings=x, train_percentage=0.5, random_state=0)),
            "leave out": (evaluation.leave_k_out_split, dict(ratings=x, K=1, train_only_size=0.1, random_state=0)),
        }

    def evaluated(self, **given):
        problem = gt.Problem(**given)
        return problem.at(gt.mlp_towers(problem, (2,), 2)).value

    def minimized(self, **given):
        return gt.minimize(self.problem, gt.mlp_towers(self.problem, (2,), 2), **given)

    def fitted(self, pairs, left_features=None, right_features=None, validation=None, **params):
        model = gt.TwoTower(**(self.settings | params))
        repr(model)
        return model.fit(pairs, left_features, right_features, validation).recommend([0], 2)

    def added(self, **given):
        return copy.copy(self.catalogued).add(**given).recommend([0], 2)

    def saved(self, path):
        self.model.save(self.folder / path if isinstance(path, (str, Path)) else path)

    def like_als(self, user_items, **params):
        AlternatingLeastSquares(**params).fit(user_items, show_progress=False)

    def like_implicit(self, user_items, **params):
        Implicit(**params, hidden=()).fit(user_items, show_progress=False)


def call_in(folder, function, given):
    with contextlib.chdir(folder):
        return function(**given)


def test_calls(tmp_path):
    fuzz = Fuzz("calls", small=150)
    surface = Surface(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rng in fuzz:
            name = rng.choice(list(surface.calls))
            function, good = surface.calls[name]
            given = dict(good)
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                argument = rng.choice(list(good))
                given[argument] = rng.choice(hostile(name, argument))
            accepted = (*ACCEPTED, IndexError, NotImplementedError) if name.startswith(THEIRS) else ACCEPTED
            fuzz.attempt((name, given), lambda f=function, given=given: call_in(tmp_path, f, given), accepted)

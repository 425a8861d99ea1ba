"""Ranking metrics against plain loops written from the definitions, and against ir_measures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from gramtower.metrics import Scores, definitions, evaluate_embeddings, ranking_metrics
from gramtower.retrieval import scan

AT_K = ("paper_map", "precision", "recall", "ndcg", "map", "hit", "mrr")


def slow_metric(kind, ranked, relevant, k):
    """One user: a list of items, best first, and the set of relevant ones."""
    hit = [item in relevant for item in ranked[:k]] + [False] * (k - len(ranked[:k]))
    precision = [sum(hit[:c]) / c for c in range(1, k + 1)]
    return {
        "paper_map": sum(precision) / k,
        "precision": precision[-1],
        "recall": sum(hit) / len(relevant),
        "ndcg": sum(h / math.log2(c + 2) for c, h in enumerate(hit))
        / sum(1 / math.log2(c + 2) for c in range(min(k, len(relevant)))),
        "map": sum(p for p, h in zip(precision, hit, strict=True) if h) / min(k, len(relevant)),
        "hit": float(any(hit)),
        "mrr": max((1 / (c + 1) for c, h in enumerate(hit) if h), default=0.0),
    }[kind]


def slow_auc(scores, relevant, others):
    wins = [(scores[r] > scores[o]) + 0.5 * (scores[r] == scores[o]) for r in relevant for o in others]
    return sum(wins) / len(wins) if wins else math.nan


def ranking(scores, left_out):
    return sorted((j for j in range(len(scores)) if j not in left_out), key=lambda j: (-scores[j], j))


def example(m=40, n=33, seed=0):
    """Embeddings with equal scores, training and test pairs that overlap, users without test pairs."""
    rng = np.random.default_rng(seed)
    P, Q = (torch.from_numpy(rng.integers(-2, 3, (size, 4))).float() for size in (m, n))
    train = sp.random(m, n, 0.15, "csr", random_state=seed)
    test = sp.random(m, n, 0.08, "csr", random_state=seed + 1)
    test.data[::9] = -1.0  # observed, and not relevant
    test.data[test.indptr[5] : test.indptr[7]] = -1.0
    return P, Q, train, test


def rows(matrix, positive=False):
    csr = matrix.tocsr()
    return [
        {
            int(j)
            for j, x in zip(csr[i].indices, csr[i].data, strict=True)
            if x > 0 or not positive
        }
        for i in range(csr.shape[0])
    ]  # fmt: skip


def slow_evaluation(P, Q, test, train, exclude, user_filter=None, item_filter=None):
    """All metrics by the definitions, as {name: mean}, over users of the filter, relevant items of the filter."""
    dense, seen = (P @ Q.T).tolist(), rows(train)
    found = {}
    for i, relevant in enumerate(rows(test, positive=True)):
        left_out = seen[i] if exclude else set()
        relevant = relevant - left_out
        counted = {j for j in relevant if item_filter is None or item_filter[j]}
        if not counted or (user_filter is not None and not user_filter[i]):
            continue
        ranked = ranking(dense[i], left_out)
        for k in (1, 5, 50):
            for kind in AT_K:
                found.setdefault(f"{kind}@{k}", []).append(slow_metric(kind, ranked, counted, k))
        auc = slow_auc(dense[i], counted, [j for j in ranked if j not in relevant])
        if not math.isnan(auc):
            found.setdefault("auc", []).append(auc)
    return {name: sum(values) / len(values) for name, values in found.items()}


NAMES = [*(f"{kind}@{k}" for kind in AT_K for k in (1, 5, 50)), "auc"]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("block_bytes", [None, 1000])
def test_embeddings_are_measured_as_by_plain_loops(exclude, block_bytes):
    P, Q, train, test = example()
    found = evaluate_embeddings(P, Q, test, train=train, metrics=NAMES, exclude_train=exclude, block_bytes=block_bytes)
    assert found == pytest.approx(slow_evaluation(P, Q, test, train, exclude), rel=1e-12)
    relevant = [r - s if exclude else r for r, s in zip(rows(test, positive=True), rows(train), strict=True)]
    assert (found.users, found.users_left_out) == (sum(map(bool, relevant)), sum(not r for r in relevant))
    assert found.pairs == sum(map(len, relevant))
    assert found.pairs + found.pairs_left_out == (test.data > 0).sum()
    assert (found.pairs_left_out > 0) == exclude


@pytest.mark.parametrize("by", ["popularity", "activity"])
def test_a_break_down_is_the_metric_of_the_users_or_items_of_each_tercile(by):
    P, Q, train, test = example(seed=3)
    found = evaluate_embeddings(P, Q, test, train=train, metrics=NAMES, by=by)
    seen, relevant = rows(train), rows(test, positive=True)
    users = [i for i in range(40) if relevant[i] - seen[i]]
    counts = [sum(j in s for s in seen) for j in range(33)] if by == "popularity" else [len(s) for s in seen]
    low, high = np.quantile(counts if by == "popularity" else [counts[i] for i in users], [1 / 3, 2 / 3])
    parts = {"low": lambda c: c <= low, "mid": lambda c: low < c <= high, "high": lambda c: c > high}
    expected = slow_evaluation(P, Q, test, train, True)
    for name, inside in parts.items():
        chosen = [inside(c) for c in counts]
        only = dict(item_filter=chosen) if by == "popularity" else dict(user_filter=chosen)
        part = slow_evaluation(P, Q, test, train, True, **only)
        expected |= {f"{metric} {by}={name}": value for metric, value in part.items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert set(found.groups) == {f"{by}=low", f"{by}=mid", f"{by}=high"}
    assert (sum(found.groups.values()) == found.users) == (by == "activity")


def test_lists_are_measured_as_by_plain_loops():
    rng = np.random.default_rng(0)
    lists = np.array([rng.permutation(30)[:12] for _ in range(20)])
    lists[3, 4:], lists[7] = -1, -1
    truth = sp.random(20, 30, 0.1, "csr", random_state=4)
    names = [f"{kind}@{k}" for kind in AT_K for k in (1, 3, 12)]
    found = ranking_metrics(lists, truth, names)
    users = [(lists[i][lists[i] >= 0].tolist(), items) for i, items in enumerate(rows(truth)) if items]
    for name in names:
        kind, k = name.split("@")
        expected = sum(slow_metric(kind, *user, int(k)) for user in users) / len(users)
        assert found[name] == pytest.approx(expected, rel=1e-12), name
    assert found.users == len(users)


def test_the_papers_map_by_hand():
    """eq:map, K = 5, hits at places 1 and 3 of one user and none of the other: (1 + 1/2 + 2/3 + 2/4 + 2/5) / 5 / 2."""
    relevant = sp.csr_matrix(np.array([[1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6]))
    lists = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    found = ranking_metrics(lists, relevant, ("paper_map@5", "map@5", "coverage@5"))
    by_hand = (1 + 1 / 2 + 2 / 3 + 2 / 4 + 2 / 5) / 5 / 2
    assert found["paper_map@5"] == pytest.approx(by_hand)
    assert found["map@5"] == pytest.approx((1 + 2 / 3) / 2 / 2)
    assert found["coverage@5"] == pytest.approx(5 / 6)
    assert isinstance(found, Scores)
    assert (found.users, found.users_left_out) == (2, 1)


def test_lists_are_measured_as_by_ir_measures():
    ir = pytest.importorskip("ir_measures", reason="ir_measures is not installed")
    P, Q, train, test = example(m=60, n=50, seed=6)
    P, Q = P + 0.1 * torch.randn(P.shape), Q + 0.1 * torch.randn(Q.shape)  # no ties: libraries break them differently
    dense, seen = (P @ Q.T).tolist(), rows(train)
    relevant = [r - s for r, s in zip(rows(test, positive=True), seen, strict=True)]
    qrels = [ir.Qrel(f"{i}", f"{j}", 1) for i, items in enumerate(relevant) for j in items]
    run = [
        ir.ScoredDoc(f"{i}", f"{j}", dense[i][j]) for i in range(60) if relevant[i] for j in ranking(dense[i], seen[i])
    ]
    theirs = {
        "precision@5": ir.P @ 5, "recall@20": ir.R @ 20, "ndcg@20": ir.nDCG @ 20, "ndcg@3": ir.nDCG @ 3,
        "hit@5": ir.Success @ 5, "mrr@20": ir.RR @ 20, "map@50": ir.AP @ 50,
    }  # fmt: skip
    expected = ir.calc_aggregate(list(theirs.values()), qrels, run)
    found = evaluate_embeddings(P, Q, test, train=train, metrics=tuple(theirs))
    assert found == pytest.approx({name: expected[measure] for name, measure in theirs.items()}, rel=1e-6)


def test_counts_of_items_above_agree():
    rng = np.random.default_rng(2)
    relevant = sp.random(9, 5000, 0.01, "csr", random_state=0)
    block = torch.from_numpy(rng.integers(0, 50, (9, 5000)).astype(np.float32))
    block[torch.from_numpy((rng.random((9, 5000)) < 0.1) & (relevant.toarray() == 0))] = -torch.inf
    for start, stop in ((0, 9), (2, 7)):
        part = slice(relevant.indptr[start], relevant.indptr[stop])
        offsets = relevant.indptr[start : stop + 1].astype(np.int64) - relevant.indptr[start]
        compiled = scan.above(block[start:stop], offsets, relevant.indices[part].astype(np.int64))
        np.testing.assert_array_equal(compiled, definitions.above_torch(block[start:stop], relevant, start, stop))
        np.testing.assert_array_equal(compiled, definitions.above(block[start:stop], relevant, start, stop))


def test_large_blocks_give_the_metrics_of_small_ones():
    P, Q = torch.randn(300, 6), torch.randn(4000, 6)
    P, Q = (8 * P).round() / 8, (8 * Q).round() / 8  # products are exact, so blocks cannot change a tie
    train, test = (sp.random(300, 4000, 0.01, "csr", random_state=s) for s in (0, 1))
    names = ("map@5", "recall@20", "ndcg@20", "coverage@20", "auc")
    found = [
        evaluate_embeddings(P, Q, test, train=train, metrics=names, block_bytes=size) for size in ("64MB", "100KB")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    for size in (None, "100KB"):  # without the AUC scores are made in tiles, not in whole rows
        tiled = evaluate_embeddings(P, Q, test, train=train, metrics=names[:-1], block_bytes=size)
        assert tiled == pytest.approx({name: found[0][name] for name in names[:-1]}, rel=1e-12)


def test_coverage_counts_items_shown_to_anyone():
    P, Q = torch.tensor([[1.0], [-1.0]]), torch.tensor([[3.0], [2.0], [1.0], [0.0]])
    everyone = sp.csr_matrix(np.ones((2, 4)))
    assert evaluate_embeddings(P, Q, everyone, metrics="coverage@1") == {"coverage@1": 0.5}
    assert evaluate_embeddings(P, Q, everyone, metrics="coverage@9") == {"coverage@9": 1.0}


def test_pairs_in_any_order_and_twice_count_once():
    P, Q, train, test = example()
    coo = train.tocoo()
    order = np.random.default_rng(0).permutation(np.tile(np.arange(coo.nnz), 2))
    twice = sp.coo_array((coo.data[order], (coo.row[order], coo.col[order])), shape=coo.shape)
    found = evaluate_embeddings(P, Q, sp.csc_matrix(test), train=twice, metrics=NAMES)
    assert found == evaluate_embeddings(P, Q, test, train=train, metrics=NAMES)
    assert len(twice.data) == 2 * train.nnz


def test_a_user_who_has_seen_or_likes_everything_has_no_auc():
    P, Q = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [3.0]])
    test = sp.csr_matrix(np.array([[0, 1, 1], [0, 1, 0]]))
    train = sp.csr_matrix(np.array([[1, 0, 0], [0, 0, 0]]))
    assert evaluate_embeddings(P, Q, test, train=train, metrics="auc") == {"auc": 0.5}
    assert math.isnan(evaluate_embeddings(P[:1], Q, test[:1], train=train[:1], metrics="auc")["auc"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(metrics=("recall",)), r"metrics.*'recall'.*'recall@20'"),
        (dict(metrics=("recal@5",)), r"metrics.*'recal@5'"),
        (dict(metrics=("recall@0",)), r"metrics.*'recall@0'"),
        (dict(metrics=()), r"metrics.*none"),
        (dict(test=sp.csr_matrix((3, 4))), r"test.*0"),
        (dict(train=sp.csr_matrix(np.eye(3, 4))), "3 pairs, 3 of them in train"),
        (dict(test=np.eye(3, 4)), r"test.*ndarray"),
        (dict(test=sp.eye(4, 3)), r"test.*\(4, 3\)"),
        (dict(by="popularity"), r"train.*None"),
        (dict(by="age", train=sp.csr_matrix((3, 4))), r"by:.*'age'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, text):
    good = dict(P=torch.ones(3, 2), Q=torch.ones(4, 2), test=sp.csr_matrix(np.eye(3, 4)))
    with pytest.raises(ValueError, match=text):
        evaluate_embeddings(**{**good, **arguments})


@pytest.mark.parametrize(
    ("recommended", "metrics", "text"),
    [
        ([[0, 1], [2, 3]], "recall@3", r"recommended.*2"),
        ([[0, 1], [1, 1]], "recall@2", "an item twice in row 1"),
        ([[0, 1], [1, 4]], "recall@2", "columns from 0 to 4"),
        ([[0, 1]], "recall@2", r"relevant.*shape"),
        ([[0.5, 1.0], [1.0, 2.0]], "recall@2", r"recommended.*shape"),
        ([[0, 1], [2, 3]], "auc", "evaluate_embeddings computes the AUC"),
    ],
)
def test_bad_lists_are_refused(recommended, metrics, text):
    with pytest.raises(ValueError, match=text):
        ranking_metrics(recommended, sp.csr_matrix(np.eye(2, 4)), metrics)
    with pytest.raises(ValueError, match="above 0"):
        ranking_metrics([[0, 1], [2, 3]], sp.csr_matrix((2, 4)), "recall@2")

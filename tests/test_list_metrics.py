"""Propensity-scored precision, novelty, diversity, Gini, MRR of whole rankings: against plain loops and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from processes import run_group
from test_metrics import example, ranking, rows

from gramtower.distributed.group import current_group
from gramtower.metrics import evaluate_embeddings, ranking_metrics
from gramtower.metrics.definitions import diversity, gini, inverse_propensities, self_information

NAMES = ("psp@1", "psp@5", "psp@50", "novelty@3", "novelty@50", "diversity@2", "diversity@7", "diversity@50", "mrr")


def inverse_propensity(count, users, a=0.55, b=1.5):
    """Jain et al. (2016), equation 2, as written there."""
    c = (math.log(users) - 1) * (b + 1) ** a
    return 1 + c * math.exp(-a * math.log(count + b))


def slow_lists(P, Q, test, train, *, exclude=True, users=None, items=None, ab=(0.55, 1.5)):
    """The metrics by their definitions, as {name: value}, and the items of each user's list by place."""
    dense, seen, n = (P @ Q.T).tolist(), rows(train), Q.shape[0]
    degree = [sum(j in s for s in seen) for j in range(n)]
    unit = Q.double().numpy()
    lengths = np.linalg.norm(unit, axis=1, keepdims=True)
    unit = np.divide(unit, lengths, out=np.zeros_like(unit), where=lengths > 0)
    sums, lists = {}, []
    for i, relevant in enumerate(rows(test, positive=True)):
        relevant = relevant - (seen[i] if exclude else set())
        counted = {j for j in relevant if items is None or items[j]}
        if not counted or (users is not None and not users[i]):
            continue
        ranked = ranking(dense[i], seen[i] if exclude else set())
        lists.append(ranked)
        for k in (1, 5, 50):
            worth = {j: inverse_propensity(degree[j], len(seen), *ab) for j in counted}
            gained = sum(worth[j] for j in ranked[:k] if j in counted)
            sums.setdefault(f"psp@{k}", []).append((gained, sum(sorted(worth.values(), reverse=True)[:k])))
        for k in (3, 50):
            told = [math.log2(len(seen) / max(1, degree[j])) for j in ranked[:k]]
            sums.setdefault(f"novelty@{k}", []).append((sum(told) / len(told), 1))
        for k in (2, 7, 50):
            top = ranked[:k]
            apart = [1 - unit[a] @ unit[b] for a in top for b in top if a != b]
            sums.setdefault(f"diversity@{k}", []).append((sum(apart) / len(apart), 1))
        sums.setdefault("mrr", []).append((1 / (1 + min(ranked.index(j) for j in counted)), 1))
    found = {name: sum(x for x, _ in pairs) / sum(y for _, y in pairs) for name, pairs in sums.items()}
    return found, lists


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("block_bytes", [None, 1000])
def test_lists_are_measured_as_by_plain_loops(exclude, block_bytes):
    P, Q, train, test = example()
    Q[3] = 0.0  # an embedding without a direction
    train = sp.csr_matrix(train.multiply(np.arange(33) != 4))  # an item without a training pair
    options = dict(train=train, exclude_train=exclude, block_bytes=block_bytes)
    found = evaluate_embeddings(P, Q, test, metrics=NAMES, **options)
    expected, _ = slow_lists(P, Q, test, train, exclude=exclude)
    assert found == pytest.approx(expected, rel=1e-6)  # directions are float32
    tiled = evaluate_embeddings(P, Q, test, metrics=NAMES[:-1], **options)
    assert tiled == pytest.approx({name: expected[name] for name in NAMES[:-1]}, rel=1e-6)


@pytest.mark.parametrize("by", ["popularity", "activity"])
def test_a_break_down_counts_the_users_or_items_of_each_tercile(by):
    P, Q, train, test = example(seed=3)
    found = evaluate_embeddings(P, Q, test, train=train, metrics=(*NAMES, "gini@5"), by=by)
    seen, relevant = rows(train), rows(test, positive=True)
    users = [i for i in range(40) if relevant[i] - seen[i]]
    counts = [sum(j in s for s in seen) for j in range(33)] if by == "popularity" else [len(s) for s in seen]
    low, _ = np.quantile(counts if by == "popularity" else [counts[i] for i in users], [1 / 3, 2 / 3])
    chosen = [count <= low for count in counts]
    only = dict(items=chosen) if by == "popularity" else dict(users=chosen)
    expected, _ = slow_lists(P, Q, test, train, **only)
    for name in NAMES:
        of_lists = name.startswith(("novelty", "diversity"))
        if by == "popularity" and of_lists:  # the lists are the same, whatever items count
            assert f"{name} popularity=low" not in found
        else:
            assert found[f"{name} {by}=low"] == pytest.approx(expected[name], rel=1e-6), name
    assert [name for name in found if name.startswith("gini")] == ["gini@5"]


def test_coverage_and_gini_are_of_all_lists_together():
    P, Q, train, test = example(seed=5)
    found = evaluate_embeddings(P, Q, test, train=train, metrics=("coverage@3", "gini@3", "gini@1"))
    _, lists = slow_lists(P, Q, test, train)
    for k in (1, 3):
        counts = np.zeros(33)
        for ranked in lists:
            counts[ranked[:k]] += 1
        apart = np.abs(counts[:, None] - counts[None, :]).sum() / (2 * 33**2 * counts.mean())
        assert found[f"gini@{k}"] == pytest.approx(apart, rel=1e-12)
    assert found["coverage@3"] == (counts > 0).mean()


def test_gini_at_its_ends():
    assert gini(np.array([4, 4, 4])) == 0
    assert gini(np.array([0, 0, 0, 12])) == pytest.approx(3 / 4)
    assert math.isnan(gini(np.array([0, 0])))


def test_propensity_scored_precision_by_hand():
    """100 users; labels with 0 and 98 pairs. C = (ln 100 − 1) 2.5^0.55, 1/p = 1 + C (N_l + 1.5)^−0.55."""
    train = sp.csr_matrix(np.repeat([[1, 0, 0]], 98, axis=0))
    train.resize(100, 3)
    c = (math.log(100) - 1) * 2.5**0.55
    never, often = 1 + c * 1.5**-0.55, 1 + c * 99.5**-0.55
    relevant = sp.csr_matrix([[1, 1, 0], [1, 0, 0]])
    lists = [[0, 2, 1], [2, 0, 1]]
    found = ranking_metrics(lists, relevant, ("psp@1", "psp@2"), popularity=train)
    assert found["psp@1"] == pytest.approx(often / (never + often))
    assert found["psp@2"] == pytest.approx(2 * often / (never + 2 * often))
    other = ranking_metrics(lists, relevant, "psp@2", popularity=train, propensity=(0.0, 1.0))
    assert other["psp@2"] == pytest.approx(2 / 3)  # A = 0: all labels alike, the best lists gain 2 and 1
    assert found.per_user["psp@2"].mean() == pytest.approx(found["psp@2"])


def test_an_item_without_pairs_has_the_smallest_propensity_and_a_small_set_none_below_one():
    worth = inverse_propensities(np.arange(50), 1000, 0.55, 1.5)
    assert worth[0] == worth.max() == pytest.approx(1 + (math.log(1000) - 1) * (2.5 / 1.5) ** 0.55)
    assert (np.diff(worth) < 0).all()
    assert (inverse_propensities(np.arange(3), 2, 0.55, 1.5) == 1).all()  # log 2 < 1: C would be negative
    assert self_information(np.array([0, 1, 2, 8]), 8).tolist() == [3, 3, 2, 0]


def test_novelty_and_diversity_by_hand():
    relevant, train = (
        sp.csr_matrix([[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]),
        sp.csr_matrix([[1, 1, 0, 0], [1, 0, 0, 0]]),
    )
    lists = [[0, 1, 2], [2, -1, -1], [-1, -1, -1]]
    found = ranking_metrics(
        lists, relevant, ("novelty@3", "diversity@3", "diversity@2"), popularity=train,
        embeddings=np.array([[1.0, 0], [0, 2], [-3, 0], [5, 5]]),
    )  # fmt: skip
    assert found["novelty@3"] == pytest.approx(((0 + 1 + 1) / 3 + 1) / 2)  # the last list is empty
    assert found["diversity@3"] == pytest.approx((1 + 2 + 1) / 3)  # cosines 0, −1, 0; lists of one item have none
    assert found["diversity@2"] == pytest.approx(1.0)
    np.testing.assert_allclose(found.per_user["novelty@3"], [2 / 3, 1, np.nan])


def test_diversity_does_not_depend_on_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    Q = rng.normal(size=(50, 6)).astype(np.float32)
    Q /= np.linalg.norm(Q, axis=1, keepdims=True)
    lists = np.array([rng.permutation(50)[:9] for _ in range(40)])
    whole = diversity(lists, Q, [3, 9])
    monkeypatch.setattr("gramtower.metrics.definitions._ELEMENTS", 20)
    for k, values in diversity(lists, Q, [3, 9]).items():
        np.testing.assert_allclose(values, whole[k], rtol=1e-12)


def test_hit_rate_has_three_names_and_mrr_takes_whole_lists():
    relevant = sp.csr_matrix(np.array([[1, 0, 1, 0], [0, 0, 0, 1]]))
    lists = [[1, 0, 2], [0, 1, 2]]
    found = ranking_metrics(lists, relevant, ("hit@2", "hr@2", "hit_rate@2", "mrr", "mrr@1"))
    assert found == {"hit@2": 0.5, "hr@2": 0.5, "hit_rate@2": 0.5, "mrr": 0.25, "mrr@1": 0.0}


def test_values_of_users_have_the_metrics_as_means():
    P, Q, train, test = example(seed=2)
    names = ("recall@5", "psp@5", "novelty@5", "auc", "mrr", "coverage@5")
    found = evaluate_embeddings(P, Q, test, train=train, metrics=names)
    assert set(found.per_user) == set(names) - {"coverage@5"}
    assert {name: np.nanmean(values) for name, values in found.per_user.items()} == pytest.approx(
        {name: found[name] for name in found.per_user}
    )
    for row, recall in zip(found.rows, found.per_user["recall@5"], strict=True):
        alone = evaluate_embeddings(P[row : row + 1], Q, test[row], train=train[row], metrics="recall@5")
        assert alone["recall@5"] == pytest.approx(recall)


def test_users_who_were_not_in_training_are_measured_with_the_popularity_of_training():
    P, Q, train, test = example(seed=4)
    new = slice(0, 10)
    found = evaluate_embeddings(
        P[new], Q, test[new], popularity=train, metrics=("psp@20", "novelty@5", "recall@5"), by="popularity"
    )
    everyone = evaluate_embeddings(P, Q, test, train=train, exclude_train=False, metrics=("psp@20", "novelty@5"))
    np.testing.assert_allclose(
        found.per_user["novelty@5"], everyone.per_user["novelty@5"][: len(found.rows)], rtol=1e-12
    )
    few, of_all = found.per_user["psp@20"], everyone.per_user["psp@20"][: len(found.rows)]
    assert few.sum() > 0
    np.testing.assert_allclose(few * of_all.sum(), of_all * few.sum())  # the best lists of others differ, as a factor
    assert "recall@5 popularity=low" in found


def test_whole_rankings_are_measured_as_by_ir_measures_and_sklearn():
    ir = pytest.importorskip("ir_measures", reason="ir_measures is not installed")
    similarity = pytest.importorskip("sklearn.metrics.pairwise", reason="scikit-learn is not installed")
    P, Q, train, test = example(m=60, n=50, seed=6)
    P, Q = P + 0.1 * torch.randn(P.shape), Q + 0.1 * torch.randn(Q.shape)  # no ties: libraries break them differently
    dense, seen = (P @ Q.T).tolist(), rows(train)
    relevant = [r - s for r, s in zip(rows(test, positive=True), seen, strict=True)]
    users = [i for i in range(60) if relevant[i]]
    qrels = [ir.Qrel(f"{i}", f"{j}", 1) for i in users for j in relevant[i]]
    run = [ir.ScoredDoc(f"{i}", f"{j}", dense[i][j]) for i in users for j in ranking(dense[i], seen[i])]
    expected = ir.calc_aggregate([ir.RR, ir.Success @ 5, ir.P @ 3], qrels, run)
    found = evaluate_embeddings(P, Q, test, train=train, metrics=("mrr", "hr@5", "precision@3", "diversity@4"))
    assert found["mrr"] == pytest.approx(expected[ir.RR], rel=1e-6)
    assert found["hr@5"] == pytest.approx(expected[ir.Success @ 5], rel=1e-6)
    assert found["precision@3"] == pytest.approx(expected[ir.P @ 3], rel=1e-6)
    distances = similarity.cosine_distances(Q.double().numpy())
    tops = [ranking(dense[i], seen[i])[:4] for i in users]
    apart = [distances[np.ix_(top, top)].sum() / 12 for top in tops]
    assert found["diversity@4"] == pytest.approx(np.mean(apart), rel=1e-6)


def spread_evaluation(folder):
    """One of several processes, which holds every second user."""
    group = current_group()
    P, Q, train, test = example(seed=7)
    own = np.arange(group.rank, 40, group.size)
    names = (*NAMES, "coverage@5", "gini@5", "hr@5")
    found = [
        evaluate_embeddings(P[own], Q, test[own], train=train[own], metrics=names, by=by, processes=group)
        for by in ("popularity", "activity")
    ]
    return [dict(one) for one in found]


def test_several_processes_measure_what_one_does(tmp_path):
    P, Q, train, test = example(seed=7)
    names = (*NAMES, "coverage@5", "gini@5", "hr@5")
    expected = [evaluate_embeddings(P, Q, test, train=train, metrics=names, by=by) for by in ("popularity", "activity")]
    for process in run_group("test_list_metrics:spread_evaluation", 2, tmp_path):
        for found, whole in zip(process, expected, strict=True):
            assert found == pytest.approx(dict(whole), rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(metrics="psp@5"), r"train.*None.*'psp@5'"),
        (dict(metrics="novelty@5"), r"train.*None.*'novelty@5'"),
        (dict(metrics="diversity@1"), r"metrics.*'diversity@1'"),
        (dict(metrics="psp"), r"metrics.*'psp'"),
        (dict(metrics="psp@1", popularity=sp.eye(4, 3)), r"popularity.*\(4, 3\)"),
        (dict(metrics="psp@1", popularity=sp.eye(4), propensity=(1, 0)), r"propensity.*B.*0"),
        (dict(metrics="psp@1", popularity=sp.eye(4), propensity=0.5), r"propensity.*0.5"),
        (dict(by="activity", popularity=sp.eye(4)), r"train.*None.*'activity'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, text):
    good = dict(P=torch.ones(3, 2), Q=torch.ones(4, 2), test=sp.csr_matrix(np.eye(3, 4)))
    with pytest.raises(ValueError, match=text):
        evaluate_embeddings(**{**good, **arguments})


def test_lists_alone_need_what_embeddings_bring():
    lists, relevant = [[0, 1], [2, 3]], sp.csr_matrix(np.eye(2, 4))
    with pytest.raises(ValueError, match=r"popularity.*'psp@2'"):
        ranking_metrics(lists, relevant, "psp@2")
    with pytest.raises(ValueError, match=r"embeddings.*'diversity@2'"):
        ranking_metrics(lists, relevant, "diversity@2")
    with pytest.raises(ValueError, match=r"embeddings.*3"):
        ranking_metrics(lists, relevant, "diversity@2", embeddings=np.ones((3, 2)))

"""LightFM's interface: its model and objective against plain sums over all pairs, ranks and metrics by brute force."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from gramtower.compat.lightfm import Dataset, LightFM, evaluation
from gramtower.compat.lightfm.cross_validation import random_train_test_split

M, N = 30, 20


@pytest.fixture(scope="module")
def taste():
    """Users like items of their own half; 1 is a like, −1 a dislike, and half of the pairs have no entry."""
    rng = np.random.default_rng(0)
    liked = np.equal.outer(np.arange(M) % 2, np.arange(N) % 2)
    return sp.coo_matrix(np.where(rng.random((M, N)) < 0.5, np.where(liked, 1, -1), 0))


@pytest.fixture(scope="module")
def features():
    rng = np.random.default_rng(1)
    sides = ((M, rng.random((M, 4)) < 0.5), (N, rng.random((N, 3)) < 0.5))
    return [sp.hstack([sp.identity(rows), own.astype(float)]).tocsr() for rows, own in sides]


@pytest.fixture(scope="module")
def fitted(taste, features):
    return LightFM(3, random_state=1).fit(taste, *features, epochs=3)


def scores(model, user_features=None, item_features=None):
    (b_u, E_u), (b_v, E_v) = (
        model.get_user_representations(user_features),
        model.get_item_representations(item_features),
    )
    return E_u @ E_v.T + b_u[:, None] + b_v


def gradient_norms(model, features, objective):
    """Norm of the gradient of an objective of the four tables at those of the model, and at half of them."""
    dense = [torch.tensor(one.toarray(), dtype=torch.float64) for one in features]
    names = ("user_embeddings", "user_biases", "item_embeddings", "item_biases")
    norms = []
    for factor in (1.0, 0.5):
        tables = [
            torch.tensor(factor * getattr(model, name), dtype=torch.float64, requires_grad=True) for name in names
        ]
        X, b_u, Y, b_v = dense[0] @ tables[0], dense[0] @ tables[1], dense[1] @ tables[2], dense[1] @ tables[3]
        rows = torch.cat([X, b_u[:, None]], 1), torch.cat([Y, b_v[:, None]], 1)
        objective(X @ Y.t() + b_u[:, None] + b_v, rows, tables).backward()
        norms.append(sum(float(t.grad.square().sum()) for t in tables) ** 0.5)
    return norms


def test_logistic_with_dislikes_is_minimised_over_observed_pairs_only(taste, features):
    model = LightFM(3, user_alpha=0.002, item_alpha=0.02, random_state=2).fit(taste, *features, epochs=80)
    R = torch.tensor(taste.toarray(), dtype=torch.float64)
    count, pairs = (R != 0).double(), taste.nnz
    usual = 1.0 - 0.5 * (0.002 + 0.02) * pairs / (3.0 + 0.02 * pairs / np.sqrt(M * N))  # share of the usual penalties
    weights = [3.0 * usual + 0.002 * pairs] * 2 + [3.0 * usual + 0.02 * pairs] * 2

    def objective(y, rows, tables):
        loss = (torch.nn.functional.softplus(-R * y) * count).sum()
        loss = loss + 0.5 * sum(weight * t.square().sum() for weight, t in zip(weights, tables, strict=True))
        return loss + 0.01 * usual * sum(
            (count.sum(1 - side) * row.square().sum(1)).sum() for side, row in enumerate(rows)
        )

    at, half = gradient_norms(model, features, objective)
    assert at < 2e-3 * half


@pytest.mark.parametrize("loss", ["bpr", "warp", "warp-kos"])
def test_other_losses_are_minimised_over_all_pairs(taste, features, loss):
    model = LightFM(2, loss=loss, random_state=2).fit(taste, *features, epochs=80)
    R = torch.tensor(taste.toarray(), dtype=torch.float64)
    liked, observed = (R > 0).double(), (R != 0).double()
    pairs = float(liked.sum())
    omega = 2 * pairs / (M * N - pairs)
    b = observed.sum(0) ** 0.1
    b = b / b.mean()
    c = observed.sum(1) + omega * b.sum(), observed.sum(0) + omega * M

    def objective(y, rows, tables):
        loss = (torch.nn.functional.softplus(-y) * liked).sum()
        loss = loss + 0.5 * omega * ((1 - observed) * b * (y + 0.5).square()).sum()
        penalty = sum((one * row.square().sum(1)).sum() for one, row in zip(c, rows, strict=True))
        return loss + 0.01 * penalty + 2.0**-6 * sum(t.square().sum() for t in tables)

    at, half = gradient_norms(model, features, objective)
    assert at < 2e-3 * half


def test_likes_alone_are_learned_from_all_pairs_with_every_loss(taste):
    likes = taste.multiply(taste > 0).tocsr()
    plain, ranked = (LightFM(4, loss=loss, random_state=3).fit(likes, epochs=9) for loss in ("logistic", "warp"))
    assert np.array_equal(scores(plain), scores(ranked))
    assert evaluation.auc_score(plain, likes).mean() > 0.9


def test_entries_without_weight_and_dislikes_take_no_part_in_a_ranking_loss(taste):
    settings = {"loss": "warp", "random_state": 3}
    zeros = taste.copy()
    zeros.data = np.where(zeros.data > 0, 7, 0)
    weight = taste.astype(float)
    weight.data = np.where(taste.data > 0, 0.5, 0.0)
    first = scores(LightFM(**settings).fit(taste, epochs=5))
    assert np.array_equal(first, scores(LightFM(**settings).fit(zeros, epochs=5)))
    assert np.array_equal(first, scores(LightFM(**settings).fit(taste, sample_weight=weight, epochs=5)))


def test_representations_give_the_scores_of_predict(fitted, features):
    users, items = np.divmod(np.arange(M * N), N)
    found = fitted.predict(users, items, item_features=features[1], user_features=features[0])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, scores(fitted, *features)[users, items], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(fitted.predict(4, np.arange(N), features[1], features[0]), found[4 * N : 5 * N])
    bias = fitted.item_biases.copy()
    assert np.abs(bias).max() > 0.01
    fitted = copy.deepcopy(fitted)
    fitted.item_biases = bias + 1
    moved = fitted.predict(users, items, features[1], features[0])
    np.testing.assert_allclose(moved - found, np.asarray(features[1].sum(1)).ravel()[items], rtol=1e-4)


def test_ranks_are_those_of_a_count_over_all_items(fitted, features, taste):
    model = copy.deepcopy(fitted)
    model.item_embeddings[3], model.item_biases[3] = model.item_embeddings[4], model.item_biases[4]
    twins = features[1].tolil()
    twins[3, 20:] = twins[4, 20:]
    twins = twins.tocsr()
    train, test = (taste.multiply(taste == sign).tocsr() for sign in (-1, 1))
    ranks = model.predict_rank(test, train, twins, features[0])
    y = model.predict(*np.divmod(np.arange(M * N), N), twins, features[0]).reshape(M, N)
    out = train.toarray() != 0
    for user, item in zip(*test.nonzero(), strict=True):
        others = [j for j in range(N) if not out[user, j] and j != item and y[user, j] >= y[user, item]]
        assert ranks[user, item] == len(others)
    assert len(ranks.data) == test.nnz
    with pytest.raises(ValueError, match="test_interactions"):
        model.predict_rank(test, test, twins, features[0])


def test_metrics_follow_from_the_ranked_lists(fitted, features, taste):
    train, test = (taste.multiply(taste == sign).tocsr() for sign in (-1, 1))
    test = sp.csr_matrix(np.where(np.arange(M)[:, None] == 5, 0, test.toarray()))
    given = {"user_features": features[0], "item_features": features[1], "train_interactions": train}
    names = ("precision_at_k", "recall_at_k", "auc_score", "reciprocal_rank")
    found = {name: getattr(evaluation, name)(fitted, test, **given) for name in names}
    y, expected = scores(fitted, *features), {name: [] for name in names}
    for user in range(M):
        wanted = test[user].indices
        if not len(wanted):
            continue
        there = np.setdiff1d(np.arange(N), train[user].indices)
        order = there[np.argsort(-y[user, there])]
        hits = np.isin(order, wanted)
        expected["precision_at_k"].append(hits[:10].sum() / 10)
        expected["recall_at_k"].append(hits[:10].sum() / len(wanted))
        expected["reciprocal_rank"].append(1 / (1 + np.argmax(hits)))
        pairs = [(a, b) for a in np.flatnonzero(hits) for b in np.flatnonzero(~hits)]
        expected["auc_score"].append(np.mean([a < b for a, b in pairs]) if pairs else 0.5)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)
        assert len(getattr(evaluation, name)(fitted, test, **given, preserve_rows=True)) == M


def test_fit_partial_goes_on_and_fit_starts_anew(taste):
    model = LightFM(4, random_state=5).fit(taste, epochs=2)
    before = scores(model)
    assert np.array_equal(scores(LightFM(4, random_state=5).fit(taste, epochs=2)), before)
    assert np.array_equal(scores(model.fit_partial(taste, epochs=0)), before)
    further = model.fit_partial(taste, epochs=20)
    assert further is model
    assert np.abs(scores(model) - before).max() > 0.01
    with pytest.raises(ValueError, match="user_features"):
        model.fit_partial(taste, user_features=sp.identity(M + 1, format="csr"))
    fresh = LightFM(4, random_state=np.random.RandomState(5))
    assert np.array_equal(fresh.fit(taste, epochs=0).user_biases, np.zeros(M))


def test_nothing_to_learn_from_leaves_the_initial_embeddings(taste):
    weight = taste.astype(np.float32)
    weight.data[:] = 0
    start = scores(LightFM(random_state=0).fit(taste, epochs=0))
    assert np.array_equal(start, scores(LightFM(random_state=0).fit(taste, sample_weight=weight, epochs=4)))
    assert np.array_equal(start, scores(LightFM(random_state=0).fit(sp.coo_matrix((M, N)), epochs=4)))


def test_features_rank_new_items(taste):
    group = sp.csr_matrix(np.eye(2)[np.arange(N) % 2])
    known = taste.multiply(taste > 0).tocsr()
    model = LightFM(4, loss="warp", random_state=0).fit(known[:, : N - 4], item_features=group, epochs=8)
    found = model.predict(np.arange(M).repeat(4), np.tile(np.arange(N - 4, N), M), item_features=group).reshape(M, 4)
    own = np.equal.outer(np.arange(M) % 2, np.arange(N - 4, N) % 2)
    assert found[own].min() > found[~own].max()


def test_settings_without_effect_warn_and_bad_ones_are_refused(taste, recwarn):
    with pytest.warns(UserWarning, match=r"learning_rate=0.1.*max_sampled=30"):
        LightFM(learning_rate=0.1, max_sampled=30)
    with pytest.warns(UserWarning, match="num_threads=4"):
        LightFM().fit(taste, num_threads=4)
    recwarn.clear()
    LightFM(8, loss="warp", item_alpha=1e-5).fit(taste)
    assert not recwarn
    for name, value in dict(no_components=0, loss="hinge", item_alpha=-1.0, rho=1.0, random_state="a").items():
        with pytest.raises(ValueError, match=name):
            LightFM(**{name: value})
    model = LightFM()
    with pytest.raises(ValueError, match="alpha"):
        model.set_params(item_alpha=float("nan"))
    assert model.item_alpha == 0.0
    with pytest.raises(ValueError, match="components"):
        model.set_params(components=4)


def test_bad_data_is_refused(taste, fitted):
    weight = taste.astype(float)
    for name, given in {
        "sample_weight": dict(sample_weight=weight.tocsr()),
        "item_features": dict(item_features=sp.identity(N - 1, format="csr")),
        "epochs": dict(epochs=-1),
        "user_features": dict(user_features=sp.identity(M, format="csr") * np.nan),
    }.items():
        with pytest.raises(ValueError, match=name):
            LightFM().fit(taste, **given)
    weight.data[0] = -1
    with pytest.raises(ValueError, match="sample_weight"):
        LightFM().fit(taste, sample_weight=weight)
    with pytest.raises(NotImplementedError, match="warp-kos"):
        LightFM(loss="warp-kos").fit(taste, sample_weight=weight)
    with pytest.raises(ValueError, match="not fitted"):
        LightFM().predict(0, [1])
    for users, items in (([0, 1], [0]), (-1, [0]), (2**40, [0]), ("ann", [0]), (0, [0.5]), (0, [N + 3])):
        with pytest.raises(ValueError, match=r"user_ids|item_ids|item_features"):
            fitted.predict(users, items)


def test_a_pickled_copy_gives_the_same_scores(fitted):
    assert np.array_equal(scores(pickle.loads(pickle.dumps(fitted))), scores(fitted))


def test_scikit_learn_clones_and_searches(taste):
    base = pytest.importorskip("sklearn.base")
    search = pytest.importorskip("sklearn.model_selection")
    assert base.clone(LightFM(3, random_state=1)).no_components == 3

    def scorer(model, x, y=None):
        return model.no_components

    class Same(search.KFold):
        def split(self, X, y=None, groups=None):
            yield from [(np.arange(M), np.arange(M))] * self.n_splits

    grid = search.GridSearchCV(LightFM(random_state=1), {"no_components": [2, 3]}, scoring=scorer, cv=Same(2))
    assert grid.fit(taste.tocsr()).best_params_ == {"no_components": 3}


def test_dataset_numbers_ids_and_features_as_they_appear():
    data = Dataset(item_identity_features=False)
    data.fit(["ann", "bob"], ["x", "y"], user_features=["old"], item_features=["red", "big"])
    data.fit_partial(users=["eve", "ann"])
    assert data.interactions_shape() == (3, 2)
    assert data.mapping()[1] == {"ann": 0, "bob": 1, "old": 2, "eve": 3}
    assert data.model_dimensions() == (4, 2)
    ones, weights = data.build_interactions([("eve", "x"), ("ann", "y", 3)])
    assert ones.toarray().tolist() == [[0, 1], [0, 0], [1, 0]]
    assert weights.toarray().tolist() == [[0, 3], [0, 0], [1, 0]]
    user = data.build_user_features([("eve", {"old": 3.0})])
    np.testing.assert_allclose(user.toarray(), [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0.75, 0.25]])
    assert data.build_item_features([("x", ["red", "big"])], normalize=False).toarray().tolist() == [[1, 1], [0, 0]]


def test_dataset_refuses_what_it_does_not_know():
    data = Dataset()
    data.fit([1, 2], ["x"], item_features=["red"])
    for wrong in ((3, "x"), (1, "z"), (1,), (1, "x", "many")):
        with pytest.raises(ValueError, match="data"):
            data.build_interactions([wrong])
    for wrong in (("x", ["blue"]), ("z", ["red"]), ("x",)):
        with pytest.raises(ValueError, match="data"):
            data.build_item_features([wrong])
    bare = Dataset(user_identity_features=False)
    bare.fit([1, 2], ["x"], user_features=["old"])
    with pytest.raises(ValueError, match="normalize=False"):
        bare.build_user_features([(1, ["old"])])


def test_a_seed_gives_the_same_split_as_lightfm(taste):
    train, test = random_train_test_split(taste, 0.3, random_state=7)
    order = np.arange(taste.nnz)
    np.random.RandomState(7).shuffle(order)
    assert np.array_equal(train.row, taste.row[order[: int(0.7 * taste.nnz)]])
    assert (train + test != taste).nnz == 0
    assert train.multiply(test).nnz == 0
    with pytest.raises(ValueError, match="test_percentage"):
        random_train_test_split(taste, 1.5)


def test_arguments_have_the_order_of_lightfm():
    first = "no_components, k, n, learning_schedule, loss, learning_rate, rho, epsilon, item_alpha, user_alpha"
    assert ", ".join(inspect.signature(LightFM).parameters) == first + ", max_sampled, random_state"
    fit = "self, interactions, user_features, item_features, sample_weight, epochs, num_threads, verbose"
    for method in (LightFM.fit, LightFM.fit_partial):
        assert ", ".join(inspect.signature(method).parameters) == fit
    whole = "model, test_interactions, train_interactions, user_features, item_features, preserve_rows, num_threads"
    assert ", ".join(inspect.signature(evaluation.auc_score).parameters) == whole + ", check_intersections"

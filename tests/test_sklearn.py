"""scikit-learn's tools on this library's estimator: its searches, clones, copies, reprs and estimator checks."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.interactions import pairs_of
from gramtower.data.splits import by_time, folds, leave_one_out, per_user
from gramtower.data.tables import FeatureTable

pytest.importorskip("sklearn", reason="scikit-learn is not installed")
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.utils import estimator_checks
from sklearn.utils.validation import check_is_fitted

#: Checks of scikit-learn that say something about an estimator of pairs.
RUN = {
    "check_estimator_cloneable", "check_estimator_tags_renamed", "check_valid_tag_types", "check_estimator_repr",
    "check_no_attributes_set_in_init", "check_estimators_overwrite_params", "check_dont_overwrite_parameters",
    "check_estimators_fit_returns_self", "check_estimators_unfitted", "check_mixin_order", "check_estimators_pickle",
    "check_do_not_raise_errors_in_init_or_set_params", "check_parameters_default_constructible",
    "check_get_params_invariance", "check_set_params", "check_dict_unchanged", "check_fit_idempotent",
    "check_fit_check_is_fitted",
}  # fmt: skip
_X = "X is a table of numbers there; pairs are not one, and OnPairs would be tested in the place of the estimator"
_PREDICT = "predict takes left and right ids, and there is no transform"
#: And the others, with the reason why they are left out.
LEFT_OUT = {
    "check_fit_score_takes_y": "score takes pairs; there is no y",
    "check_pipeline_consistency": "likewise",
    "check_n_features_in": "pairs have no features; those of entities are arguments of fit, on each side",
    "check_n_features_in_after_fitting": "likewise",
    "check_methods_sample_order_invariance": _PREDICT,
    "check_methods_subset_invariance": _PREDICT,
    "check_fit2d_predict1d": _PREDICT,
    "check_array_api_input": _PREDICT,
    "check_readonly_memmap_input": _X,
    "check_positive_only_tag_during_fit": _X,
    "check_estimators_dtypes": _X,
    "check_complex_data": _X,
    "check_dtype_object": _X,
    "check_estimators_empty_data_messages": _X,
    "check_estimators_nan_inf": _X,
    "check_estimator_sparse_tag": _X,
    "check_estimator_sparse_array": _X,
    "check_estimator_sparse_matrix": _X,
    "check_f_contiguous_array_estimator": _X,
    "check_fit2d_1sample": _X,
    "check_fit2d_1feature": _X,
    "check_fit1d": _X,
}


class OnPairs(gt.TwoTower):
    """The estimator for scikit-learn's checks, which fit tables of numbers: those above the mean are the pairs."""

    def fit(self, X, y=None):
        return super().fit(sp.csr_matrix(np.where(X.mean() < X, 1.0, 0.0)))

    def predict(self, X):
        return super().predict(range(len(X)), [0] * len(X))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True  # else all checks are skipped
        return tags


def checks():
    if not hasattr(estimator_checks, "estimator_checks_generator"):  # before scikit-learn 1.6: those that it has
        known = [getattr(estimator_checks, name, None) for name in sorted(RUN)]
        return [partial(check, "OnPairs") for check in known if check is not None]
    estimator = OnPairs(dim=2, max_iterations=1, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library does without BaseEstimator, as scikit-learn is not needed for it
        return [check for _, check in estimator_checks.estimator_checks_generator(estimator)]


def named(check):
    return check.func.__name__ + "".join(f" {key}={value}" for key, value in check.keywords.items())


def small(**changes):
    return gt.TwoTower(**{"dim": 4, "hidden": (), "max_iterations": 3, "device": "cpu", "select": False} | changes)


def grouped(times=False):
    """Users of three groups, each with items of its own."""
    rng = np.random.default_rng(0)
    left, right = rng.integers(30, size=500), rng.integers(24, size=500)
    kept = left % 3 == right % 3
    when = np.arange(kept.sum(), dtype=float) if times else None
    return gt.Interactions.from_arrays([f"u{i}" for i in left[kept]], [f"i{j}" for j in right[kept]], time=when)


@pytest.mark.parametrize("check", [check for check in checks() if check.func.__name__ in RUN], ids=named)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_pass(check):
    check(OnPairs(dim=2, max_iterations=1, device="cpu"))


def test_every_check_of_scikit_learn_is_run_or_left_out_for_a_reason():
    assert not RUN & set(LEFT_OUT)
    assert {check.func.__name__ for check in checks()} <= RUN | set(LEFT_OUT)


def test_a_grid_search_finds_what_cross_validation_measures():
    pairs = grouped()
    scoring = {name: gt.ranking_scorer(name) for name in ("ndcg@5", "recall@5")}
    grid = {"dim": [1, 4], "omega": [0.05]}
    search = GridSearchCV(small(), grid, scoring=scoring, cv=gt.PairSplit(3, seed=2), refit="ndcg@5")
    search.fit(gt.PairSamples(pairs))
    for place, dim in enumerate((1, 4)):
        expected = gt.cross_validate(small(dim=dim, omega=0.05), pairs, 3, ("ndcg@5", "recall@5"), seed=2)
        for name in scoring:
            found = [search.cv_results_[f"split{fold}_test_{name}"][place] for fold in range(3)]
            assert found == expected.values(name).tolist()
    assert search.best_params_ == {"dim": 4, "omega": 0.05}
    assert search.best_estimator_.dim_ == 4
    assert len(search.best_estimator_.trained_.data) == len(pairs)
    assert search.best_estimator_.recommend(["u3"], k=2)[0].shape == (1, 2)


def test_a_search_without_scoring_chooses_by_the_metric_of_the_model():
    pairs = grouped()
    search = GridSearchCV(small(omega=0.05, metric="ndcg@5"), {"dim": [1, 4]}, cv=gt.PairSplit(3, seed=2))
    search.fit(gt.PairSamples(pairs))
    given = GridSearchCV(
        small(omega=0.05), {"dim": [1, 4]}, cv=gt.PairSplit(3, seed=2), scoring=gt.ranking_scorer("ndcg@5")
    ).fit(gt.PairSamples(pairs))
    scores = search.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all()
    assert scores.tolist() == given.cv_results_["mean_test_score"].tolist()
    assert scores[1] > scores[0]
    assert search.best_params_ == {"dim": 4}
    held = per_user(pairs, 0.3, seed=1)
    search.fit(gt.PairSamples(held.train))
    assert search.score(gt.PairSamples(held.test)) == search.best_estimator_.score(held.test) > 0


def test_score_is_the_metric_of_the_model_on_pairs_and_predict_scores_pairs():
    split = per_user(grouped(), 0.3, seed=1)
    model = small(metric="recall@5").fit(split.train)
    assert model.score(split.test) == model.evaluate(split.test, ("recall@5",))["recall@5"]
    assert model.score(gt.PairSamples(split.test)) == model.score(split.test)
    assert model.set_params(metric="gini@5").score(split.test) < 0  # less is better
    left, right = ["u3", "u4"], ["i3", "i5"]
    expected = (model.embed(left) * model.embed(right, side="right")).sum(1)
    assert np.allclose(model.predict(left, right), expected, rtol=1e-5)
    with pytest.warns(DeprecationWarning, match="predict"):
        assert np.array_equal(model.score(left, right), model.predict(left, right))


def test_features_of_entities_are_handed_on_whole():
    pairs = grouped()
    items = FeatureTable({"item": list(pairs.right_ids), "group": [int(i[1:]) % 3 for i in pairs.right_ids]},
                         id="item", categorical=["group"])  # fmt: skip
    dense = np.eye(3)[[int(i[1:]) % 3 for i in pairs.left_ids]]
    found = cross_validate(
        small(), gt.PairSamples(pairs), scoring=gt.ranking_scorer("recall@5"), cv=gt.PairSplit(2),
        params={"right_features": ["id", items], "left_features": dense}, error_score="raise",
    )  # fmt: skip
    expected = gt.cross_validate(
        small(), pairs, 2, ("recall@5",), left_features=dense, right_features=["id", items]
    ).values("recall@5")
    assert found["test_score"].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("method", "options", "function"),
    [
        ("per_user", {"test": 0.3, "minimum": 2}, per_user),
        ("leave_one_out", {}, leave_one_out),
        ("by_time", {"test": 0.2}, by_time),
    ],
)
def test_positions_are_those_of_the_library_s_own_splits(method, options, function):
    pairs = grouped(times=True)
    X = gt.PairSamples(pairs)
    cuts = list(gt.PairSplit(2, method, seed=5, **options).split(X))
    assert len(cuts) == gt.PairSplit(2, method, seed=5, **options).get_n_splits() == 2
    for turn, (train, test) in enumerate(cuts):
        expected = function(pairs, seed=5 + turn, **options)
        assert (X[test].pairs.matrix != expected.test.matrix).nnz == 0
        assert (X[train].pairs.matrix != expected.train.matrix).nnz == 0
        assert np.array_equal(X[test].pairs.times, expected.test.times)


def test_folds_test_every_pair_once():
    pairs = grouped()
    X = gt.PairSamples(pairs)
    tested = [test for _, test in gt.PairSplit(4).split(X)]
    assert np.array_equal(np.sort(np.concatenate(tested)), np.arange(len(pairs)))
    assert [len(test) for test in tested] == [len(fold.test) for fold in folds(pairs, 4)]


def test_samples_are_cut_by_places_masks_and_slices():
    pairs = grouped()
    X = gt.PairSamples(pairs)
    assert (len(X), X.shape) == (len(pairs), (len(pairs),))
    mask = np.arange(len(X)) < 5
    for key in (np.arange(5), mask, slice(5), (np.arange(5), ...)):
        part = X[key].pairs
        assert len(part) == 5
        assert part.left_ids is pairs.left_ids
    assert len(gt.PairSamples(pairs.matrix)) == len(pairs)
    assert pairs_of(pairs) is pairs
    with pytest.raises(ValueError, match=r"places.*3"):
        X[3]
    with pytest.raises(TypeError, match="not iterable"):
        iter(X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gt.PairSplit(1), "count: got 1, expected an integer >= 2"),
        (lambda: gt.PairSplit(2, "held_out"), "method: got 'held_out', expected one of 'folds'"),
        (lambda: gt.PairSplit(2, test=0.1), "options: got test, expected none"),
        (lambda: list(gt.PairSplit(2).split(grouped())), "X: got Interactions, expected gramtower.PairSamples"),
        (lambda: gt.PairSamples([[1, 2]]), "pairs: got list, expected gramtower.Interactions"),
        (lambda: gt.ranking_scorer("precision"), "precision"),
        (lambda: gt.ranking_scorer(["recall@5"]), "metric: got ['recall@5'], expected the name of one metric"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_less_is_better_is_negated():
    X = gt.PairSamples(grouped())
    ((train, test),) = gt.PairSplit(1, "random_pairs").split(X)
    model = small().fit(X[train])
    assert gt.ranking_scorer("gini@5")(model, X[test]) < 0 < gt.ranking_scorer("recall@5")(model, X[test])


def test_splitters_and_scorers_travel_to_other_processes():
    for one in (gt.PairSplit(3, "per_user", test=0.1), gt.ranking_scorer("map@5"), gt.PairSamples(grouped())):
        assert repr(pickle.loads(pickle.dumps(one))) == repr(one)


def test_copies_of_estimators_and_of_fitted_models_answer_alike():
    fresh = small(omega=0.2, left_weights=np.ones(30))
    for again in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh)), clone(fresh)):
        assert again.omega == 0.2
        assert np.array_equal(again.left_weights, fresh.left_weights)
        with pytest.raises(NotFittedError):
            check_is_fitted(again)
    fitted = small().fit(grouped(), left_features="history", validation=0.1)
    check_is_fitted(fitted)
    before = fitted.recommend(["u4"], k=4)
    for again in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert again.recommend(["u4"], k=4)[0].tolist() == before[0].tolist()
        assert again.history_ == fitted.history_
        assert again.recommend(histories=[["i1", "i4"]], k=3)[0].shape == (1, 3)
        again.fit(grouped(), left_features="history", warm_start=True)  # what is done to a copy
    assert np.array_equal(fitted.recommend(["u4"], k=4)[1], before[1])  # is not done to it
    with pytest.raises(NotFittedError):
        check_is_fitted(clone(fitted))


class TwoTower(BaseEstimator):
    """As scikit-learn prints it."""

    __init__, __post_init__ = gt.TwoTower.__init__, gt.TwoTower.__post_init__


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dim": 4},
        {"dim": 4, "hidden": (16,), "omega": 0.1, "max_iterations": 25, "device": "cpu"},
        {"dim": 4, "hidden": (16,), "omega": 0.1, "max_iterations": 25, "device": "cpu", "seed": 31, "verbose": True},
        {"dim": 128, "hidden": ((1024, 512), ()), "activation": "tanh", "loss": "squared", "embedding_l2": 0.0078125,
         "left_weights": "degree^0.5", "optimizer": "lbfgs", "optimizer_options": {"memory": 30}, "metric": "ndcg@20",
         "memory_budget": "2GB", "precision": "float32"},
        {"l2": None, "omega": float("inf")},
    ],
    ids=len,
)  # fmt: skip
def test_the_repr_is_scikit_learns(changed):
    assert repr(gt.TwoTower(**changed)) == repr(TwoTower(**changed))


def test_the_repr_of_a_fitted_model_is_its_settings_and_what_it_knows():
    fitted = small().fit(grouped())
    assert repr(fitted).startswith(repr(small()) + ": 30 left entities by id")
    assert str(fitted) == repr(fitted)

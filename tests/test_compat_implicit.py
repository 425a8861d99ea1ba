"""implicit's interface: argument names, shapes and exceptions, on a pattern whose answers are known."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from test_estimator import checkerboard

from gramtower.compat.implicit import TwoTower
from gramtower.model.two_tower import TwoTower as Estimator


@pytest.fixture(scope="module")
def fitted():
    model = TwoTower(factors=8, iterations=25, random_state=1, hidden=(16,), device="cpu")
    model.fit(checkerboard(), show_progress=False)
    return model


def test_one_user_gives_one_dimension_and_several_two(fitted):
    user_items = checkerboard()
    ids, scores = fitted.recommend(3, user_items[3], N=4)
    assert ids.shape == scores.shape == (4,)
    assert ids[0] == 3
    ids, scores = fitted.recommend([3, 4, 5], user_items[[3, 4, 5]], N=4)
    assert ids.shape == scores.shape == (3, 4)
    assert ids[:, 0].tolist() == [3, 4, 5]


def test_filters_and_choices(fitted):
    user_items = checkerboard()
    assert 3 not in fitted.recommend(3, user_items[3], N=5, filter_items=[3])[0]
    assert set(fitted.recommend(3, user_items[3], N=5, items=[1, 3, 4], filter_already_liked_items=False)[0]) == {
        1,
        3,
        4,
    }
    liked, _ = fitted.recommend(3, user_items[3], N=5, filter_already_liked_items=False)
    assert all(item % 2 == 1 for item in liked)


def test_similar_begins_with_the_entity_itself(fitted):
    ids, scores = fitted.similar_items(4, N=5)
    assert ids[0] == 4
    assert scores[0] == pytest.approx(1.0, abs=1e-5)
    assert all(item % 2 == 0 for item in ids)
    many, _ = fitted.similar_users([1, 2], N=3)
    assert many[:, 0].tolist() == [1, 2]


def test_filtered_items_come_last_with_the_lowest_score(fitted):
    user_items = checkerboard()
    ids, scores = fitted.recommend(4, user_items[4], N=6, items=[0, 1, 2, 3, 4, 5])
    assert ids.dtype == np.int32
    assert ids[0] == 4
    assert set(ids[:4]) == {1, 3, 4, 5}
    assert ids[4:].tolist() == [0, 2]  # liked
    assert set(scores[4:]) == {-np.finfo(np.float32).max}
    everything, _ = fitted.recommend([4, 5], user_items[[4, 5]], N=1000, filter_items=[7])
    assert np.array_equal(np.sort(everything), [np.arange(20)] * 2)
    assert 7 in everything[0, -10:]
    assert fitted.recommend(4, user_items[4], items=[])[0].shape == (0,)


def test_rank_items_and_recommend_all_are_deprecated_ways_to_recommend(fitted):
    user_items = checkerboard()
    with pytest.warns(DeprecationWarning, match="rank_items"):
        ranked = fitted.rank_items(3, user_items[3], [1, 4, 6])
    assert np.array_equal(ranked[0], fitted.recommend(3, user_items[3], 10, False, items=[1, 4, 6])[0])
    with pytest.warns(DeprecationWarning, match="recommend_all"):
        lists = fitted.recommend_all(user_items[5:], N=3, users_items_offset=5)
    assert np.array_equal(lists, fitted.recommend(np.arange(5, 20), user_items[5:], N=3)[0])


def test_entities_that_are_alike_to_the_last_bit_open_their_own_lists():
    twins = sp.csr_matrix(np.kron([[1, 0], [0, 1]], np.ones((6, 6), np.float32)))
    model = fit(twins, 2)
    for ids, scores in (model.similar_users(np.arange(12), N=3), model.similar_items(np.arange(12), N=3)):
        assert ids[:, 0].tolist() == list(range(12))
        assert np.allclose(scores[:, 0], 1.0, atol=1e-5)
        assert all(len(set(row)) == 3 for row in ids.tolist())
    ids, _ = model.similar_items(5, N=3, filter_items=[5])
    assert 5 not in ids
    assert set(model.similar_items(5, N=9, items=[1, 2])[0]) == {1, 2}


def test_copies_pickles_and_open_files_answer_alike(fitted):
    buffer = io.BytesIO()
    fitted.save(buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted)), fitted.to_cpu(), TwoTower.load(buffer)):
        assert other is not fitted
        for a, b in zip(fitted.similar_items([3, 4]), other.similar_items([3, 4]), strict=True):
            assert np.array_equal(a, b)


def test_callbacks_are_given_three_arguments():
    seen = []
    model = TwoTower(4, iterations=3, use_gpu=False, calculate_training_loss=True)
    model.fit(checkerboard(), show_progress=False, callback=lambda *given: seen.append(given))
    assert [number for number, _, _ in seen] == [0, 1, 2]
    values = [value for _, _, value in seen]
    assert values == sorted(values, reverse=True)


def test_exceptions_are_those_of_implicit(fitted):
    user_items = checkerboard()
    with pytest.raises(ValueError, match="CSR"):
        fitted.recommend(0, user_items[0].tocoo())
    with pytest.raises(ValueError, match="1 row"):
        fitted.recommend([0, 1], user_items[0])
    with pytest.raises(ValueError, match=r"items.*filter_items"):
        fitted.recommend(0, user_items[0], items=[1], filter_items=[2])
    with pytest.raises(IndexError):
        fitted.recommend(99, user_items[0])
    with pytest.raises(IndexError):
        fitted.recommend(0, user_items[0], items=[99])
    with pytest.raises(NotImplementedError):
        fitted.recommend(0, user_items[0], recalculate_user=True)


def test_users_are_recalculated_from_their_items():
    model = TwoTower(factors=8, iterations=25, hidden=(16,), device="cpu", history=True)
    model.fit(checkerboard(), show_progress=False)
    row = sp.csr_matrix((np.ones(7, np.float32), ([0] * 7, range(1, 15, 2))), shape=(1, 20))
    ids, _ = model.recommend(0, row, N=3, recalculate_user=True)
    assert set(ids) == {15, 17, 19}


def fit(matrix, *arguments, **options):
    model = TwoTower(*arguments, **{"iterations": 5, "hidden": (), "use_gpu": False} | options)
    model.fit(matrix, show_progress=False)
    return model


def test_arguments_come_in_the_order_of_implicit():
    names = (
        "factors regularization alpha dtype use_native use_cg use_gpu iterations calculate_training_loss num_threads"
    )
    assert list(inspect.signature(TwoTower).parameters)[:11] == [*names.split(), "random_state"]
    model = TwoTower(8, 0.05, 2.0)  # in implicit the third one is alpha
    assert (model.factors, model.model.l2, model.alpha, model.iterations) == (8, 0.05, 2.0, 15)


def test_a_dislike_is_not_a_like():
    disliked = checkerboard()
    disliked[3, 5] = -1.0
    liked = abs(disliked)
    bad, good = (fit(matrix, 8).user_factors[3] @ fit(matrix, 8).item_factors[5] for matrix in (disliked, liked))
    assert bad < 0 < good
    with pytest.raises(ValueError, match="1 negative"):
        TwoTower(8, history=True).fit(disliked, show_progress=False)


def test_entries_are_confidences_and_alpha_multiplies_them():
    matrix = checkerboard().astype(np.float32)
    sure = matrix.copy()
    sure[3, 5] = 50.0
    scores = [fit(m, 8).user_factors[3] @ fit(m, 8).item_factors[5] for m in (matrix, sure)]
    assert scores[1] > scores[0] + 0.5
    once, twice = fit(sure * 2, 8), fit(sure, 8, alpha=2.0)
    assert np.array_equal(once.user_factors, twice.user_factors)
    assert not np.array_equal(once.user_factors, fit(sure, 8).user_factors)


def test_ones_are_what_the_estimator_learns_without_weights():
    ours = fit(checkerboard(), 8)
    plain = Estimator(dim=8, hidden=(), max_iterations=5, device="cpu").fit(
        sp.csr_matrix(checkerboard(), dtype=np.float32)
    )
    assert np.array_equal(ours.user_factors, plain.embed(side="left"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(bad):
    matrix = checkerboard().astype(np.float32)
    matrix.data[7] = bad
    with pytest.raises(ValueError, match="finite"):
        fit(matrix, 8)
    with pytest.raises(ValueError, match=r"scipy\.sparse"):
        fit(np.eye(4), 8)
    with pytest.raises(ValueError, match="alpha"):
        TwoTower(alpha=bad)


def test_arguments_without_a_meaning_here_warn():
    with pytest.warns(UserWarning, match=r"no effect.*dtype=.*float64.*use_cg=False.*num_threads=4"):
        TwoTower(dtype=np.float64, use_cg=False, num_threads=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TwoTower(dtype=np.float32, use_native=True, use_cg=True, calculate_training_loss=True, num_threads=0)


def test_generators_give_seeds():
    seeds = [TwoTower(random_state=kind(3)).model.seed for kind in (np.random.default_rng, np.random.RandomState)]
    again = [TwoTower(random_state=kind(3)).model.seed for kind in (np.random.default_rng, np.random.RandomState)]
    assert seeds == again
    assert TwoTower(random_state=11).model.seed == 11


def test_an_item_without_any_pair_is_like_no_other():
    matrix = sp.hstack([checkerboard(), sp.csr_matrix((20, 2))], format="csr")
    model = fit(matrix, 8)
    assert not model.similar_items(21, N=5)[1].any()
    ids, scores = model.similar_items(3, N=22)
    assert set(scores[ids >= 20]) == {0.0}


def test_saved_models_answer_alike(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    loaded = TwoTower.load(tmp_path / "model")
    for before, after in zip(fitted.similar_items(3), loaded.similar_items(3), strict=True):
        assert np.array_equal(before, after)
    assert loaded.user_factors.shape == (20, 8)


def test_signatures_match_implicit():
    base = pytest.importorskip("implicit.recommender_base", reason="implicit is not installed").RecommenderBase
    for name in ("fit", "recommend", "similar_items", "similar_users"):
        theirs = inspect.signature(getattr(base, name)).parameters
        ours = inspect.signature(getattr(TwoTower, name)).parameters
        assert list(ours)[: len(theirs)] == list(theirs), name
        for parameter in theirs.values():
            assert ours[parameter.name].default == parameter.default, (name, parameter.name)
    theirs = inspect.signature(pytest.importorskip("implicit.als").AlternatingLeastSquares).parameters
    ours = inspect.signature(TwoTower).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in theirs.keys() - {"regularization", "use_gpu"}:  # by the data, and by the machine, here
        assert ours[name].default == theirs[name].default, name


def test_lists_of_two_towers_copy_no_factors():
    model = TwoTower(factors=4, iterations=1)
    with pytest.raises(ValueError, match=r"model.*fit first|not fitted"):
        model.recommend(0, None, filter_already_liked_items=False)
    model.fit(checkerboard(), show_progress=False)
    for side in ("left", "right"):
        assert np.shares_memory(model._factors(side), model.model.fitted_.side(side).embeddings.numpy())
    model.user_factors[:] = 0  # what a caller gets is a copy
    assert model.user_factors.any()

"""implicit's interface: argument names, shapes and exceptions, on a pattern whose answers are known."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import scipy.sparse as sp
from test_estimator import checkerboard

from gramtower.compat.implicit import TwoTower


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


def test_exceptions_are_those_of_implicit(fitted):
    user_items = checkerboard()
    with pytest.raises(ValueError, match="CSR"):
        fitted.recommend(0, user_items[0].tocoo())
    with pytest.raises(ValueError, match="1 row for every user"):
        fitted.recommend([0, 1], user_items[0])
    with pytest.raises(ValueError, match="both items and filter_items"):
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

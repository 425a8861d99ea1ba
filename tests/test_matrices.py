"""Sparse matrices that do not hold together are refused wherever one can be given, before compiled code sees them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import gramtower as gt
from gramtower.compat.implicit import AlternatingLeastSquares
from gramtower.compat.implicit import TwoTower as Implicit
from gramtower.data import matrices
from gramtower.data.matrices import canonical, checked, extremes, pattern
from gramtower.metrics import evaluate_embeddings, ranking_metrics
from gramtower.retrieval.topk import top_k

DENSE = np.array([[1.0, 0, 2, 0], [0, 3, 0, 0], [0, 0, 0, 4], [5, 0, 0, 0]])


def broken(form="csr", **parts):
    """A 4 × 4 matrix of the given format, some of its arrays replaced after scipy has checked them."""
    matrix = sp.csr_matrix(DENSE).asformat(form)
    for name, value in parts.items():
        setattr(matrix, name, np.array(value) if isinstance(value, list) else value)
    return matrix


BROKEN = {
    "offsets that fall": broken(indptr=[0, 5, 2, 3, 4]),
    "offsets that begin late": broken(indptr=[1, 2, 3, 4, 5]),
    "offsets beyond the end": broken(indptr=[0, 2, 3, 4, 10**9]),
    "too few offsets": broken(indptr=[0, 2, 5]),
    "no offsets": broken(indptr=np.empty(0, np.int32)),
    "negative columns": broken(indices=[0, 2, -1, 3, 0]),
    "columns out of range": broken(indices=[0, 2, 1, 10**6, 0]),
    "columns of int64 out of range": broken(indices=np.array([0, 2, 1, 2**40, 0])),
    "fewer values than columns": broken(data=[1.0, 2, 3]),
    "columns as numbers with fractions": broken(indices=[0.0, 2, 1, 3, 0]),
    "values in two dimensions": broken(data=np.ones((5, 1))),
    "NaN": broken(data=[1, 2, np.nan, 4, 5]),
    "complex numbers": broken(data=np.ones(5, complex)),
    "rows out of range in csc": broken("csc", indices=[0, 9, 1, 0, 2]),
    "blocks out of range": broken("bsr", indices=[0, 1, 7, 0, 1]),
    "coordinates out of range": broken("coo", coords=(np.array([0, 0, 1, 2, 9]), np.array([0, 2, 1, 3, 0]))),
    "fewer coordinates than values": broken("coo", coords=(np.array([0, 0]), np.array([0, 2]))),
    "lists of other lengths": broken("lil", data=np.array([[1.0] * 99, [3.0], [4.0], [5.0]], dtype=object)),
    "lists with columns out of range": broken("lil", rows=np.array([[0, 99], [1], [3], [0]], dtype=object)),
    "diagonals without values": broken("dia", data=np.ones((1, 4))),
}
GOOD = sp.csr_matrix(DENSE > 0, dtype=float)
MODEL = gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu").fit(GOOD)
ONES = np.ones((4, 2), np.float32)


@pytest.mark.parametrize("what", BROKEN)
def test_a_matrix_that_does_not_hold_together_is_refused(what):
    with pytest.raises(ValueError, match=r"^R:"):
        checked("R", BROKEN[what])


@pytest.mark.parametrize("what", ["offsets that fall", "columns out of range", "rows out of range in csc"])
@pytest.mark.parametrize(
    "give",
    [
        lambda bad: gt.TwoTower(dim=2, device="cpu").fit(bad),
        lambda bad: gt.TwoTower(dim=2, device="cpu").fit(GOOD, validation=bad),
        lambda bad: gt.TwoTower(dim=2, device="cpu").fit(GOOD, left_features=bad),
        lambda bad: gt.TwoTower(dim=2, device="cpu").fit(GOOD, right_features=["id", bad]),
        lambda bad: gt.Problem(bad),
        lambda bad: gt.Problem(GOOD, left=bad),
        lambda bad: gt.Interactions(bad, np.arange(4), np.arange(4)),
        lambda bad: gt.Interactions.from_matrix(bad),
        lambda bad: gt.Interactions.from_matrix(GOOD).with_matrix(bad),
        lambda bad: top_k(ONES, ONES, 2, exclude=bad),
        lambda bad: evaluate_embeddings(ONES, ONES, bad, metrics="recall@2"),
        lambda bad: evaluate_embeddings(ONES, ONES, GOOD, train=bad, metrics="recall@2"),
        lambda bad: ranking_metrics(np.zeros((4, 1), int), bad, "recall@1"),
        lambda bad: MODEL.evaluate(bad, ["recall@2"]),
        lambda bad: MODEL.recommend(histories=bad),
        lambda bad: Implicit(2).fit(bad, show_progress=False),
        lambda bad: AlternatingLeastSquares(2).fit(bad, show_progress=False),
    ],
)
def test_everything_that_takes_a_matrix_checks_it(give, what):
    with pytest.raises(ValueError, match=r"(offsets|columns|rows)"):
        give(BROKEN[what])


def test_implicits_way_to_leave_out_items_checks_too():
    recommender = Implicit(2)
    recommender.model = MODEL
    with pytest.raises(ValueError, match="offsets"):
        recommender.recommend(np.arange(4), BROKEN["offsets that fall"])


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "dia", "bsr"])
@pytest.mark.parametrize("kind", ["matrix", "array"])
def test_every_format_is_taken(form, kind):
    given = getattr(sp, f"{form}_{kind}")(DENSE)
    assert np.array_equal(canonical("R", given).toarray(), DENSE)


def test_entries_beyond_the_last_offset_do_not_count():
    longer = broken(indices=[0, 2, 1, 3, 0, 77], data=[1.0, 2, 3, 4, 5, 99])
    assert np.array_equal(canonical("R", longer).toarray(), DENSE)
    assert gt.Problem(longer, loss="squared").pairs.columns.tolist() == [0, 2, 1, 3, 0]


def test_what_a_matrix_says_of_its_own_order_is_not_believed():
    matrix = sp.csr_matrix((np.ones(3), [2, 0, 0], [0, 3]), shape=(1, 4))
    matrix.has_sorted_indices = matrix.has_canonical_format = True
    assert canonical("R", matrix).indices.tolist() == [0, 2]


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
def test_extremes_are_those_of_the_whole(chunk, monkeypatch):
    monkeypatch.setattr(matrices, "_CHUNK", chunk)
    array = np.random.default_rng(3).normal(size=101).astype(np.float32)
    assert extremes(array) == (array.min(), array.max())
    array[57] = np.nan
    assert np.isnan(extremes(array)).all()


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
def test_checks_in_chunks_see_what_checks_of_the_whole_see(chunk, monkeypatch):
    monkeypatch.setattr(matrices, "_CHUNK", chunk)
    offsets, columns = np.array([0, 0, 3, 3, 5, 7, 7]), np.array([1, 4, 6, 0, 8, 2, 9])
    assert matrices.rows_increase(offsets, columns)
    for place in range(1, 7):
        changed = columns.copy()
        changed[place] = changed[place - 1]
        assert matrices.rows_increase(offsets, changed) == (place in (3, 5))
    matrix = sp.csr_matrix((np.ones(7), columns, offsets), shape=(6, 10))
    assert checked("R", matrix) is matrix
    for place in range(7):
        wrong = matrix.copy()
        wrong.data[place] = np.nan
        with pytest.raises(ValueError, match=rf"R.*nan.*{place}.*1 non-finite"):
            checked("R", wrong)
        wrong = matrix.copy()
        wrong.indices[place] = 10
        with pytest.raises(ValueError, match=rf"columns.*10.*{place}"):
            checked("R", wrong)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(-2, 7), min_size=0, max_size=7),
    st.lists(st.integers(-2, 6), min_size=0, max_size=7),
    st.sampled_from([np.int8, np.int32, np.int64]),
)
def test_a_pattern_is_refused_or_can_be_followed(offsets, columns, kind):
    offsets, columns = np.array(offsets, dtype=kind), np.array(columns, dtype=kind)
    try:
        pattern("seen", columns, offsets, (4, 5))
    except ValueError:
        return
    rows = [columns[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert len(rows) == 4
    assert list(itertools.chain(*rows)) == columns.tolist()
    assert all(row == sorted(set(row)) and set(row) <= set(range(5)) for row in rows)

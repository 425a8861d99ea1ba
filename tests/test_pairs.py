"""A sparse matrix as rows and columns of pairs."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramtower._util import host
from gramtower.data import pairs as module
from gramtower.data.pairs import cut_rows, from_sparse

DENSE = np.array([[0, 2.0, 0, 3], [0, 0, 0, 0], [5, 0, 0, 7], [0, 1, 0, 0]])  # row 1 and column 2 are empty


def to_dense(pairs, values):
    dense = np.zeros(pairs.shape)
    dense[pairs.rows.long(), pairs.columns.long()] = values
    return dense


@pytest.mark.parametrize(
    "make", [sp.csr_matrix, sp.csc_matrix, sp.coo_matrix, sp.lil_matrix, sp.csr_array, sp.coo_array]
)
def test_every_format_gives_the_same_pairs_in_row_order(make):
    pairs, values = from_sparse("pairs", make(DENSE))
    assert len(pairs) == 5
    assert pairs.offsets.tolist() == [0, 2, 2, 4, 5]
    assert pairs.columns.tolist() == [1, 3, 0, 3, 1]
    assert np.array_equal(to_dense(pairs, values), DENSE)


def test_unsorted_rows_are_sorted_with_their_values():
    matrix = sp.csr_matrix(([3.0, 2, 7, 5, 1], [3, 1, 3, 0, 1], [0, 2, 2, 4, 5]), shape=(4, 4))
    pairs, values = from_sparse("pairs", matrix)
    assert pairs.columns.tolist() == [1, 3, 0, 3, 1]
    assert values.tolist() == [2, 3, 5, 7, 1]
    assert matrix.indices.tolist() == [3, 1, 3, 0, 1]  # the caller's matrix is left alone


@pytest.mark.parametrize("format", ["csr", "csc", "coo"])
def test_explicit_zeros_are_pairs(format):
    matrix = sp.coo_matrix(([0.0, 4], ([0, 1], [1, 0])), shape=(2, 2)).asformat(format)
    pairs, values = from_sparse("pairs", matrix)
    assert values.tolist() == [0, 4]
    assert pairs.columns.tolist() == [1, 0]


@pytest.mark.parametrize(
    "matrix",
    [
        sp.coo_matrix(([1.0, 1, 1, 1], ([3, 1, 0, 1], [0, 2, 0, 2])), shape=(4, 3)),
        sp.csr_matrix(([1.0, 1, 1, 1], [0, 2, 2, 0], [0, 1, 3, 3, 4]), shape=(4, 3)),
    ],
    ids=["coo", "csr"],
)
def test_duplicates_are_refused_by_place(matrix):
    with pytest.raises(ValueError, match=r"R:.*1.*1.*2"):
        from_sparse("R", matrix)


def test_later_changes_of_the_matrix_do_not_reach_the_pairs():
    matrix = sp.csr_matrix(DENSE)
    pairs, values = from_sparse("pairs", matrix)
    matrix.data[:], matrix.indices[:] = 9, 0
    assert np.array_equal(to_dense(pairs, values), DENSE)


def test_float32_stays_and_other_numbers_become_float64():
    kinds = {t: from_sparse("pairs", sp.csr_matrix(DENSE).astype(t))[1].dtype for t in (np.float32, np.int8, bool)}
    assert kinds == {np.float32: np.float32, np.int8: np.float64, bool: np.float64}


@given(m=st.integers(1, 9), n=st.integers(1, 9), density=st.sampled_from([0.0, 0.2, 1.0]), seed=st.integers(0, 9))
def test_columns_hold_the_same_entries(m, n, density, seed):
    dense = np.random.default_rng(seed).random((m, n)) * (np.random.default_rng(seed + 1).random((m, n)) < density)
    pairs, values = from_sparse("pairs", sp.csr_matrix(dense))
    columns = pairs.by_column
    expected = sp.csc_matrix(dense)
    assert columns.offsets.tolist() == expected.indptr.tolist()
    assert columns.rows.tolist() == expected.indices.tolist()
    assert values[columns.position.numpy()].tolist() == expected.data.tolist()
    assert pairs.row_counts.tolist() == (dense != 0).sum(1).tolist()
    assert pairs.column_counts.tolist() == (dense != 0).sum(0).tolist()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(700, 2000), (3, 5), (2000, 1), (40, 257)])
def test_many_pairs_are_put_in_column_order_by_all_threads_alike(shape, threads, monkeypatch):
    rng, before = np.random.default_rng(3), torch.get_num_threads()
    places = np.unique((shape[0] * shape[1] * rng.random(9000) ** 2).astype(np.int64))
    matrix = sp.csr_matrix((np.ones(len(places)), np.divmod(places, shape[1])), shape=shape)
    expected, _ = from_sparse("pairs", matrix)
    counts = np.bincount(places % shape[1], minlength=shape[1])
    assert isinstance(expected.by_column.rows, torch.Tensor)  # by scipy, before the limit is lowered
    monkeypatch.setattr(module, "_MANY", 1)
    torch.set_num_threads(threads)
    try:
        for first in ("by_column", "column_counts"):
            pairs, _ = from_sparse("pairs", matrix)
            getattr(pairs, first)
            assert pairs.column_counts.tolist() == counts.tolist()
            for name in ("offsets", "rows", "position"):
                found, wanted = getattr(pairs.by_column, name), getattr(expected.by_column, name)
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted), name
    finally:
        torch.set_num_threads(before)


def test_without_numba_scipy_makes_the_column_order(monkeypatch):
    monkeypatch.setattr(module, "_MANY", 1)
    expected = from_sparse("pairs", sp.csr_matrix(DENSE))[0].by_column
    monkeypatch.setattr(host, "has_numba", lambda: False)
    monkeypatch.setitem(sys.modules, "gramtower.data.grouping", None)  # importing it fails
    found = from_sparse("pairs", sp.csr_matrix(DENSE))[0].by_column
    assert found.rows.tolist() == expected.rows.tolist() == [2, 0, 3, 0, 2]
    assert found.position.tolist() == expected.position.tolist()


def test_index_arrays_of_any_kind_are_copied():
    for kind in (np.int16, np.uint32, np.int64, ">i4"):
        matrix = sp.csr_matrix(DENSE)
        matrix.indices, matrix.indptr = matrix.indices.astype(kind), matrix.indptr.astype(kind)
        matrix.indices.flags.writeable = False
        pairs, values = from_sparse("pairs", matrix)
        assert pairs.columns.dtype == torch.int32
        assert np.array_equal(to_dense(pairs, values), DENSE)


def test_a_range_of_rows_is_a_view():
    pairs, values = from_sparse("pairs", sp.csr_matrix(DENSE))
    part, where = pairs.row_range(1, 4)
    assert np.array_equal(to_dense(part, values[where]), DENSE[1:4])
    assert part.columns.data_ptr() == pairs.columns[2:].data_ptr()
    assert len(pairs.row_range(1, 2)[0]) == 0


@given(counts=st.lists(st.integers(0, 13), min_size=1, max_size=8))
def test_segments_cover_every_entry_once_in_order(counts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEGMENT", 4)
        pieces = cut_rows(torch.tensor([0, *np.cumsum(counts)]))
    lengths = np.diff(pieces.starts)
    assert pieces.starts[-1] == sum(counts)
    assert ((lengths > 0) & (lengths <= 4)).all()
    assert np.repeat(pieces.rows, lengths).tolist() == np.repeat(np.arange(len(counts)), counts).tolist()
    first = np.diff(pieces.rows, prepend=-1) > 0
    assert (pieces.lines[first] == -1).all()
    assert pieces.lines[~first].tolist() == list(range(pieces.continued))

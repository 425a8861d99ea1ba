"""Top K against sorted dense scores, for every implementation, with ties, exclusions and lists."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from gramtower.retrieval import scan, topk
from gramtower.retrieval.topk import top_k

SELECTORS = {"torch": topk.best_torch, "numba": scan.best, "chosen": topk.best}


def sorted_rows(dense, k):
    """Best first, equal scores by column, −1 and −inf where nothing is left: one Python sort a row."""
    found, values = np.full((len(dense), k), -1), np.full((len(dense), k), -np.inf, dtype=np.float32)
    for i, row in enumerate(dense.tolist()):
        ranked = sorted((-s, j) for j, s in enumerate(row) if s > -np.inf)[:k]
        for place, (s, j) in enumerate(ranked):
            found[i, place], values[i, place] = j, -s
    return found, values


def whole_numbers(rows, n, dim=5, seed=0):
    """Embeddings whose scores are exact in float32 and often equal."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(-2, 3, (size, dim), generator=g).float() for size in (rows, n))


@pytest.mark.parametrize("selector", SELECTORS)
@given(
    rows=st.integers(1, 5), n=st.integers(1, 9000), k=st.integers(1, 40), kinds=st.integers(1, 400), seed=st.integers(0)
)
def test_the_best_of_a_block_with_ties_and_gaps(selector, rows, n, k, kinds, seed):
    rng = np.random.default_rng(seed)
    block = rng.integers(0, kinds, (rows, n)).astype(np.float32)
    block[rng.random((rows, n)) < rng.choice([0, 0.3, 0.999])] = -np.inf
    k = min(k, n)
    columns, values = SELECTORS[selector](torch.from_numpy(block.copy()), k)
    expected = sorted_rows(block, k)
    np.testing.assert_array_equal(columns.numpy(), expected[0])
    np.testing.assert_array_equal(values.numpy(), expected[1])


@given(
    rows=st.integers(1, 5),
    n=st.integers(1, 9000),
    k=st.integers(65, 300),
    kinds=st.integers(1, 3000),
    seed=st.integers(0),
)
def test_long_lists_with_ties_and_gaps(rows, n, k, kinds, seed):
    rng = np.random.default_rng(seed)
    block = rng.integers(0, kinds, (rows, n)).astype(np.float32)
    block[rng.random((rows, n)) < rng.choice([0, 0.3, 0.999])] = -np.inf
    if rng.random() < 0.3:
        block.sort(axis=1)  # every score is a candidate
    k = min(k, n)
    columns, values = scan.best(torch.from_numpy(block.copy()), k)
    expected = sorted_rows(block, k)
    np.testing.assert_array_equal(columns.numpy(), expected[0])
    np.testing.assert_array_equal(values.numpy(), expected[1])


@pytest.mark.parametrize("k", [1, 7, 64, 65, 200, 700])
def test_the_implementations_agree_on_large_blocks(k):
    block = torch.randn(64, 20_011)
    assert block.numel() > topk._WORTH_LOADING
    expected = block.sort(1, descending=True)
    for best in SELECTORS.values():
        columns, values = best(block.clone(), k)
        assert torch.equal(columns, expected.indices[:, :k])
        assert torch.equal(values, expected.values[:, :k])


@pytest.fixture(params=["whole rows", "tiles"])
def way(request, monkeypatch):
    """Both ways to lists: tiles are for much work, so here little is called much."""
    monkeypatch.setattr(topk, "_WORTH_LOADING", 1 if request.param == "tiles" else 1 << 60)
    return request.param


@pytest.mark.parametrize("block_bytes", [1, 4 * 31 * 4, 4 * 200 * 3, "64MB"])
@pytest.mark.parametrize("lists", ["none", "allow", "deny", "both"])
def test_exclusions_and_lists_in_blocks_of_any_size(lists, block_bytes, way):
    P, Q = whole_numbers(23, 231)
    exclude = sp.random(23, 231, 0.3, "csr", random_state=1)
    allow = np.array([30, 2, 7, 7, 11, 19, 3, *range(60, 200)]) if lists in ("allow", "both") else None
    deny = [2, 64, 19, 28, 127, 128, 230] if lists in ("deny", "both") else None
    dense = (P @ Q.T).numpy()
    dense[exclude.toarray() != 0] = -np.inf
    if allow is not None:
        dense[:, np.setdiff1d(np.arange(231), allow)] = -np.inf
    if deny is not None:
        dense[:, deny] = -np.inf
    found = top_k(P, Q, 6, exclude=exclude, allow=allow, deny=deny, block_bytes=block_bytes)
    for ours, theirs in zip(found, sorted_rows(dense, 6), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found[0].dtype == np.int64
    assert found[1].dtype == np.float32


@given(
    rows=st.integers(1, 9),
    n=st.integers(1, 300),
    k=st.sampled_from([1, 2, 5, 8, 64, 65, 90]),
    seed=st.integers(0, 2**31),
    height=st.integers(1, 4),
)
def test_tiles_of_any_shape_give_the_lists_of_whole_rows(rows, n, k, seed, height):
    P, Q = whole_numbers(rows, n, seed=seed)
    exclude = sp.random(rows, n, 0.2, "csr", random_state=seed)
    chosen = np.random.default_rng(seed).permutation(rows)[: max(1, rows - 2)]
    dense = (P @ Q.T).numpy()
    dense[exclude.toarray() != 0] = -np.inf
    expected = sorted_rows(dense[chosen], min(k, n))
    threads = torch.get_num_threads()
    lists = topk.Ranking(P, Q, exclude[chosen], ranked=chosen)._tiled(min(k, n), 4 * 64 * height * threads)
    place = 0
    for start, stop, columns, values in lists:
        assert start == place
        np.testing.assert_array_equal(columns, expected[0][start:stop])
        np.testing.assert_array_equal(values, expected[1][start:stop])
        place = stop
    assert place == len(chosen)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 500, 7), (9, 700, 20), (40, 1000, 128), (5, 257, 3)])
def test_threads_that_share_the_columns_of_few_rows_give_the_same_lists(threads, rows, n, k, monkeypatch):
    P, Q = whole_numbers(rows, n, seed=rows)  # whole numbers: many equal scores
    exclude, deny = sp.random(rows, n, 0.4, "csr", random_state=0), np.arange(0, n, 17)
    dense = (P @ Q.T).numpy()
    dense[exclude.toarray() != 0] = -np.inf
    dense[:, deny] = -np.inf
    taken = []
    shared = topk._shared
    monkeypatch.setattr(topk, "_shared", lambda *given: taken.append(given) or shared(*given))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ((start, stop, columns, values),) = topk.Ranking(P, Q, exclude, deny)._tiled(k, None)
    finally:
        torch.set_num_threads(before)
    assert len(taken) == 1
    assert (start, stop) == (0, rows)
    expected = sorted_rows(dense, k)
    np.testing.assert_array_equal(columns, expected[0])
    np.testing.assert_array_equal(values, expected[1])


@given(
    rows=st.integers(1, 10**6), n=st.integers(1, 10**6), threads=st.integers(1, 64), size=st.integers(1 << 14, 1 << 30)
)
def test_the_tiles_of_all_threads_are_within_the_bytes_given(rows, n, threads, size):
    height, width = topk.tile_shape(rows, n, threads, size)
    assert 1 <= height <= rows
    assert 1 <= width <= n
    assert 4 * height * width * threads <= size


def test_threads_keep_their_numbers_and_the_pool_is_used_again(way):
    P, Q = whole_numbers(40, 90)
    before = torch.get_num_threads()
    for _ in range(2):
        top_k(P, Q, 3)
        assert torch.get_num_threads() == before
    seen = []
    thread = threading.Thread(target=lambda: seen.append((torch.ones(4) @ torch.ones(4), torch.get_num_threads())))
    thread.start()
    thread.join()
    assert seen[0][1] == before


def test_lists_can_be_left_off_before_the_end():
    P, Q = whole_numbers(300, 90)
    lists = topk.Ranking(P, Q)._tiled(3, 1)
    next(lists)
    lists.close()
    assert top_k(P, Q, 3)[0].shape == (300, 3)


def test_places_that_nothing_can_fill_are_empty(way):
    P, Q = whole_numbers(3, 4)
    found, values = top_k(P, Q, 6)
    assert (np.sort(found[:, :4], axis=1) == np.arange(4)).all()
    assert (found[:, 4:] == -1).all()
    assert (values[:, 4:] == -np.inf).all()
    for nothing in (dict(exclude=sp.csr_matrix(np.ones((3, 4)))), dict(allow=[]), dict(allow=[1], deny=[1])):
        found, values = top_k(P, Q, 2, **nothing)
        assert (found == -1).all()
        assert (values == -np.inf).all()
    assert top_k(P[:0], Q, 2)[0].shape == (0, 2)
    assert topk.best_torch(torch.empty(0, 9), 2)[0].shape == (0, 2)


def test_every_stored_pair_is_excluded_whatever_its_value_and_order(way):
    P, Q = torch.ones(2, 1), torch.ones(4, 1)
    exclude = sp.csr_matrix((np.array([0.0, -1.0, 1.0]), np.array([2, 0, 1]), np.array([0, 2, 3])), shape=(2, 4))
    assert top_k(P, Q, 4, exclude=exclude)[0].tolist() == [[1, 3, -1, -1], [0, 2, 3, -1]]


def test_the_inputs_stay_as_they_were_and_other_types_are_taken():
    P, Q = (x.double().requires_grad_() for x in whole_numbers(5, 9))
    before = P.detach().clone(), Q.detach().clone()
    found = top_k(P, Q, 3, deny=np.array([1]), allow=torch.arange(5))
    assert torch.equal(P, before[0])
    assert torch.equal(Q, before[1])
    again = top_k(P.detach().numpy(), Q.detach().bfloat16(), 3, deny=[1], allow=range(5))
    np.testing.assert_array_equal(found[0], again[0])


def test_one_block_of_scores_is_all_that_is_held():
    P, Q = whole_numbers(50, 40)
    blocks = [(start, stop, block.data_ptr()) for start, stop, block in topk.Ranking(P, Q).scores(1600)]
    assert [stop - start for start, stop, _ in blocks] == [10] * 5
    assert len({place for _, _, place in blocks}) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(k=0), r"k:.*0"),
        (dict(P=torch.ones(3)), r"P.*shape"),
        (dict(P=torch.ones(3, 2)), "the same number of columns"),
        (dict(Q=torch.ones(4, 5, dtype=torch.int64)), r"Q.*dtype"),
        (dict(Q=torch.full((4, 5), torch.nan)), r"Q.*4 rows.*NaN"),
        (dict(exclude=sp.csr_matrix((4, 4))), r"exclude.*shape"),
        (dict(exclude=np.zeros((3, 4))), r"exclude.*ndarray"),
        (dict(allow=[4]), r"allow.*4"),
        (dict(deny=[0, -1]), r"deny.*-1"),
        (dict(deny=[0.5]), r"deny.*shape"),
        (dict(block_bytes="much"), r"block_bytes.*'much'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, text):
    good = dict(P=torch.ones(3, 5), Q=torch.ones(4, 5), k=2)
    with pytest.raises(ValueError, match=text):
        top_k(**{**good, **arguments})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="lists of a GPU need one")
@pytest.mark.parametrize(("n", "k"), [(40, 7), (40, 40), (3000, 5)])
def test_lists_of_a_gpu_are_those_of_a_cpu_through_ties_exclusions_and_blocks(n, k):
    P, Q = whole_numbers(50, n)
    exclude = sp.random(50, n, 0.2, format="csr", random_state=0)
    expected = top_k(P, Q, k, exclude=exclude, deny=[3, 5])
    for rows in (2, 20, 100):  # two blocks at a time
        found = top_k(P.cuda(), Q.cuda(), k, exclude=exclude, deny=[3, 5], block_bytes=rows * 4 * n)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])

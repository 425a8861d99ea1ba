"""implicit's ALS behind its own interface: the objective, its minimum, and everything that follows from factors."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from test_estimator import checkerboard

from gramtower.compat.implicit import ParameterWarning, als
from gramtower.compat.implicit.als import (
    AlternatingLeastSquares,
    calculate_loss,
    confidences,
    factor_towers,
    make_problem,
    minimize_factors,
)


def ratings(users=25, items=18, seed=0):
    """Confidences with dislikes, and a stored entry of 0."""
    matrix = sp.random(users, items, 0.3, format="csr", random_state=seed, dtype=np.float64)
    matrix.data = np.round(matrix.data * 6 - 1.2, 1)
    matrix.data[5] = 0.0
    return matrix


def grouped(users=150, items=100, groups=10, seed=0):
    """Users like most items of their group and few others."""
    rng = np.random.default_rng(seed)
    own = np.equal.outer(rng.integers(groups, size=users), rng.integers(groups, size=items))
    return sp.csr_matrix((rng.random(own.shape) < np.where(own, 0.6, 0.05)).astype(np.float32))


def double_sum(R, X, Y, regularization, alpha=1.0):
    """Σ over all pairs of c (t − x·y)² + λ(‖X‖² + ‖Y‖²), pair by pair; also the sum of all c."""
    stored = {(i, j): alpha * r for i, j, r in zip(*R.tocoo().coords, R.tocoo().data, strict=True)}
    loss, weights = regularization * ((X**2).sum() + (Y**2).sum()), 0.0
    for i in range(R.shape[0]):
        for j in range(R.shape[1]):
            r = stored.get((i, j))
            c, t = (1.0, 0.0) if r is None else (abs(r), float(r > 0))
            loss = loss + c * (t - (X[i] * Y[j]).sum()) ** 2
            weights += c
    return loss, weights


def fitted(matrix, factors=4, **options):
    model = AlternatingLeastSquares(factors, **{"use_gpu": False, "random_state": 1, "regularization": 0.1} | options)
    model.fit(matrix, show_progress=False)
    return model


@pytest.fixture(scope="module")
def model():
    return fitted(ratings(), alpha=3.0, iterations=200, dtype=np.float64)


def factors_for(matrix, k=3, seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(matrix.shape[0], k)), rng.normal(size=(matrix.shape[1], k))


@pytest.mark.parametrize("regularization", [0.0, 0.7])
@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_the_problem_is_half_of_the_double_sum_and_so_is_its_gradient(regularization, alpha):
    R = ratings()
    X, Y = (torch.from_numpy(table).requires_grad_() for table in factors_for(R))
    dense, _ = double_sum(R, X, Y, regularization, alpha)
    dense.backward()
    problem = make_problem(confidences("R", R, alpha), regularization)
    towers = factor_towers(problem, X.detach().numpy(), Y.detach().numpy(), 3, 0, torch.float64)
    point = problem.at(towers)
    assert 2 * point.value == pytest.approx(dense.item(), rel=1e-12)
    expected = torch.cat([X.grad.reshape(-1), Y.grad.reshape(-1)])
    assert torch.allclose(2 * point.gradient().to_vector(), expected, rtol=1e-10, atol=1e-10)


def test_the_loss_is_the_mean_over_all_weights_and_that_of_implicit():
    R = ratings()
    X, Y = factors_for(R)
    total, weights = double_sum(R, X, Y, 0.3)
    assert calculate_loss(R, X, Y, 0.3) == pytest.approx(total / weights, rel=1e-12)
    theirs = pytest.importorskip("implicit.cpu.als").calculate_loss(R.astype(np.float32), X, Y, 0.3)
    constant = -R.data[R.data < 0].sum()  # implicit adds it for dislikes, whatever the factors
    assert calculate_loss(R, X, Y, 0.3) + constant / weights == pytest.approx(theirs, rel=1e-5)
    liked = abs(R)
    theirs = pytest.importorskip("implicit.cpu.als").calculate_loss(liked.astype(np.float32), X, Y, 0.3)
    assert calculate_loss(liked, X, Y, 0.3) == pytest.approx(theirs, rel=1e-5)


def test_fit_ends_where_the_double_sum_has_no_slope(model):
    X, Y = (torch.from_numpy(table).requires_grad_() for table in (model.user_factors, model.item_factors))
    value, _ = double_sum(ratings(), X, Y, 0.1, 3.0)
    value.backward()
    start, _ = double_sum(ratings(), 0 * X, 0 * Y, 0.1, 3.0)
    assert value < 0.5 * start
    assert X.grad.norm() < 1e-6 * start
    assert Y.grad.norm() < 1e-6 * start


def test_as_many_iterations_lead_about_as_low_as_implicits_and_lower_on_average():
    als, ratios = pytest.importorskip("implicit.cpu.als"), []
    for seed, (k, alpha, regularization) in enumerate([(8, 1.0, 0.01), (8, 20.0, 1.0), (16, 5.0, 0.1)] * 2):
        R = grouped(seed=seed)
        theirs = als.AlternatingLeastSquares(k, regularization, alpha, random_state=1)
        theirs.fit(R, show_progress=False)
        ours = fitted(R, k, alpha=alpha, regularization=regularization)
        losses = [calculate_loss(R * alpha, m.user_factors, m.item_factors, regularization) for m in (ours, theirs)]
        ratios.append(losses[0] / losses[1])
    assert max(ratios) < 1.05
    assert np.mean(ratios) < 1.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_with_as_many_factors_as_columns_and_no_penalty_the_matrix_is_reproduced(dtype):
    R = (grouped(9, 6, 3) > 0).astype(np.float64)
    model = fitted(R, 6, alpha=2.0, regularization=0.0, dtype=dtype)
    assert model.user_factors.dtype == model.item_factors.dtype == dtype
    assert np.abs(model.user_factors @ model.item_factors.T - R.toarray()).max() < 1e-3


@pytest.mark.parametrize("regularization", [0.0, 0.5])
def test_recalculated_factors_solve_a_dense_weighted_least_squares_problem(regularization):
    R, model = ratings(), fitted(ratings(), alpha=2.0, regularization=regularization, dtype=np.float64)
    found = model.recalculate_user(np.arange(5), R[:5])
    Y = model.item_factors
    for i in range(5):
        c, t = np.ones(len(Y)), np.zeros(len(Y))
        c[R[i].indices], t[R[i].indices] = np.abs(2.0 * R[i].data), R[i].data > 0
        rows = np.vstack([np.sqrt(c)[:, None] * Y, np.sqrt(regularization) * np.eye(4)])
        best = np.linalg.lstsq(rows, np.append(np.sqrt(c) * t, np.zeros(4)), rcond=None)[0]
        assert np.allclose(found[i], best, atol=1e-8)
    assert np.array_equal(model.recalculate_user(3, R[3]), found[3])


def test_without_a_penalty_the_shortest_of_many_solutions_is_taken():
    model = fitted(ratings(), 3, regularization=0.0, dtype=np.float64)
    model.item_factors[:, 2] = model.item_factors[:, 1]  # two directions are one
    (found,) = model.recalculate_user([0], ratings()[:1])
    assert found[2] == pytest.approx(found[1], rel=1e-6)
    assert np.abs(found).max() < 10


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stored_users_are_those_that_recalculation_gives(dtype):
    R = grouped()
    model = fitted(R, 8, alpha=4.0, iterations=5, dtype=dtype)
    again = model.recalculate_user(np.arange(150), R)
    assert np.abs((model.user_factors - again) @ model.item_factors.T).max() < 1e-4
    users = np.arange(40)
    stored, recalculated = (model.recommend(users, R[users], N=3, recalculate_user=new) for new in (False, True))
    assert np.allclose(stored[1], recalculated[1], atol=1e-4)


def test_new_users_and_items_take_part_at_once():
    board = checkerboard()
    model = fitted(board, 2, regularization=0.0)
    assert model.recommend(0, board[0])[0][0] == 0
    model.partial_fit_users([0, 30], board[[1, 1]])
    assert model.user_factors.shape == (31, 2)
    assert not model.user_factors[20:30].any()
    for user in (0, 30):
        assert model.recommend(user, board[1])[0][0] == 1
    model.partial_fit_items([25], board[1])  # liked by whom item 1 is liked
    assert set(model.recommend(1, board[1], N=2)[0]) == {1, 25}
    model.partial_fit_items([1], sp.csr_matrix((1, 31)))  # liked by nobody now
    assert not model.item_factors[1].any()
    with pytest.raises(ValueError, match="1 row"):
        model.partial_fit_users([0, 1], board[0])
    with pytest.raises(IndexError, match="got -1"):
        model.partial_fit_items([-1], board[1])
    with pytest.raises(ValueError, match="factors"):
        model.partial_fit_users([2**50], board[1])


def test_a_score_is_explained_by_the_liked_items(model):
    R = ratings()
    score, added, weights = model.explain(2, R, 7)
    assert score == pytest.approx(model.recalculate_user(2, R[2]) @ model.item_factors[7], rel=1e-9)
    assert score == pytest.approx(sum(part for _, part in added), rel=1e-9)
    assert {item for item, _ in added} == set(R[2].indices[R[2].data > 0])
    assert [part for _, part in added] == sorted((part for _, part in added), reverse=True)
    again, few, _ = model.explain(2, R, 7, user_weights=weights, N=2)
    assert (again, few) == (score, added[:2])
    with pytest.raises(ValueError, match="user_weights"):
        model.explain(2, R, 7, user_weights=np.eye(3))
    with pytest.raises(IndexError):
        model.explain(2, R, 18)


def test_dislikes_pull_to_zero_and_a_stored_zero_counts_for_nothing():
    R = checkerboard(12).astype(np.float64)
    disliked, unknown = R.tolil(), R.tolil()
    disliked[3, 5] = -50.0
    scores = []
    for matrix in (R, disliked.tocsr()):
        found = fitted(matrix, 2)
        scores.append(found.user_factors[3] @ found.item_factors[5])
    assert scores[0] > 0.7
    assert abs(scores[1]) < 0.5 * scores[0]
    unknown[3, 3] = 7.0
    unknown = unknown.tocsr()
    unknown.data[unknown.data == 7.0] = 0.0
    ignored, counted = (
        model.user_factors[3] @ model.item_factors[3] for model in (fitted(unknown, 2), fitted(R, 2))
    )  # fmt: skip
    assert ignored > 0.88 > counted


def test_who_likes_nothing_has_no_factors():
    R = sp.vstack([ratings(), sp.csr_matrix((1, 18)), -abs(ratings()[:1])], format="csr")
    model = fitted(R)
    assert not model.user_factors[25:].any()
    assert model.user_factors[:25].any(axis=1).sum() >= 24
    assert not fitted(sp.csr_matrix((3, 4))).item_factors.any()


def test_callbacks_follow_the_iterations():
    R, seen = grouped(), []
    model = AlternatingLeastSquares(4, iterations=6, calculate_training_loss=True, use_gpu=False)
    model.fit(R, show_progress=False, callback=lambda *given: seen.append(given))
    assert [number for number, _, _ in seen] == list(range(6))
    assert all(seconds > 0 for _, seconds, _ in seen)
    losses = [loss for _, _, loss in seen]
    assert losses == sorted(losses, reverse=True)
    end = calculate_loss(R, model.user_factors, model.item_factors, model.regularization)
    assert end <= losses[-1] * (1 + 1e-6)  # the users' last step comes after the iterations
    fitted(R, iterations=1).fit(R, show_progress=False, callback=lambda *given: seen.append(given))
    assert seen[-1][2] is None


def test_no_iterations_leave_what_was_drawn_and_a_second_fit_goes_on():
    R = grouped()
    model = fitted(R, iterations=0, calculate_training_loss=True)
    drawn = model.user_factors.copy()
    assert 0.05 < drawn.std() < 0.2
    model.iterations, first = 2, calculate_loss(R, drawn, model.item_factors, 0.1)
    losses = [first]
    for _ in range(3):
        model.fit(R, show_progress=False)
        losses.append(calculate_loss(R, model.user_factors, model.item_factors, 0.1))
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.98 * losses[1] < 0.8 * losses[0]
    with pytest.raises(ValueError, match="new model"):
        model.fit(R[:9], show_progress=False)


def test_the_same_seed_gives_the_same_factors_and_another_one_others():
    first, again, other = (fitted(grouped(), iterations=2, random_state=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.user_factors, again.user_factors)
    assert not np.array_equal(first.user_factors, other.user_factors)


def test_float64_factors_give_float64_scores(model):
    R = ratings()
    ids, scores = model.recommend(np.arange(25), R, N=18)
    assert scores.dtype == np.float64
    exact = np.take_along_axis(model.user_factors @ model.item_factors.T, ids.astype(int), 1)
    liked = scores == -np.finfo(np.float32).max
    assert np.allclose(scores[~liked], exact[~liked], rtol=1e-12, atol=1e-12)
    assert liked.sum() == R.nnz
    assert (np.diff(scores) <= 0).all()


def same_answers(one, other):
    R = ratings()
    for name, given in (("recommend", (3, R[3])), ("similar_items", (2,)), ("similar_users", ([1, 4],))):
        for a, b in zip(getattr(one, name)(*given), getattr(other, name)(*given), strict=True):
            assert np.array_equal(a, b)


def test_copies_pickles_and_files_answer_alike(model, tmp_path):
    same_answers(model, copy.deepcopy(model))
    same_answers(model, model.to_cpu())
    same_answers(model, pickle.loads(pickle.dumps(model)))
    model.save(tmp_path / "model")
    assert (tmp_path / "model.npz").exists()
    loaded = AlternatingLeastSquares.load(str(tmp_path / "model"))
    same_answers(model, loaded)
    assert (loaded.alpha, loaded.dtype, loaded.iterations) == (3.0, np.float64, 200)
    buffer = io.BytesIO()
    model.save(buffer)
    buffer.seek(0)
    same_answers(model, model.load(buffer))


def test_models_that_were_not_fitted_are_saved_too(tmp_path):
    empty = AlternatingLeastSquares(7, 0.5, use_gpu=False, random_state=4)
    empty.save(tmp_path / "model.npz")
    assert vars(AlternatingLeastSquares.load(tmp_path / "model.npz")) == vars(empty)
    with pytest.raises(ValueError, match="not fitted"):
        empty.recommend(0, ratings()[0])


def test_files_go_to_implicit_and_come_from_it(tmp_path):
    als = pytest.importorskip("implicit.cpu.als")
    R = grouped()
    ours = fitted(R, 8)
    ours.save(tmp_path / "ours.npz")
    theirs = als.AlternatingLeastSquares.load(str(tmp_path / "ours.npz"))
    there = theirs.recommend(np.arange(20), R[:20], N=5)
    here = ours.recommend(np.arange(20), R[:20], N=5)
    assert np.array_equal(there[0], here[0])
    assert np.allclose(there[1], here[1], atol=1e-6)
    assert np.allclose(theirs.recalculate_user(3, R[3]), ours.recalculate_user(3, R[3]), atol=1e-3)
    theirs = als.AlternatingLeastSquares(8, regularization=0.2, alpha=2.0, random_state=1)
    theirs.fit(R, show_progress=False)
    theirs.save(str(tmp_path / "theirs.npz"))
    loaded = AlternatingLeastSquares.load(tmp_path / "theirs.npz")
    assert (loaded.regularization, loaded.alpha) == (0.2, 2.0)
    assert np.array_equal(loaded.recommend(3, R[3])[0], theirs.recommend(3, R[3])[0])
    for mine, other in zip(loaded.explain(3, R, 5)[:2], theirs.explain(3, R, 5)[:2], strict=True):
        assert np.allclose(mine, other, atol=1e-4)


def test_files_of_something_else_are_refused(tmp_path):
    path = tmp_path / "model.npz"
    rows = np.ones((3, 2), np.float32)
    for content, what in (
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"factors": 5, "user_factors": rows}, "rows of 5 factors"),
        ({"factors": 2, "user_factors": rows * np.nan}, "finite"),
        ({"factors": -1}, "factors"),
        ({"user_factors": np.array([{}], dtype=object)}, "pickle"),
    ):
        np.savez(path, **content)
        with pytest.raises(ValueError, match=what):
            AlternatingLeastSquares.load(path)
    np.save(tmp_path / "array.npy", rows)
    (tmp_path / "array.npy").rename(path)
    with pytest.raises(ValueError, match=r"\.npz"):
        AlternatingLeastSquares.load(path)
    for nothing in (3, None, b"x"):
        with pytest.raises(ValueError, match=r"^file"):
            AlternatingLeastSquares.load(nothing)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"\.npz"):
        AlternatingLeastSquares.load(path)


def test_other_formats_and_options_without_meaning_warn():
    R = grouped()
    with pytest.warns(Warning, match=r"user_items.*coo_matrix.*CSR") as caught:
        fitted(R.tocoo(), iterations=1)
    assert any(w.category.__name__ == ParameterWarning.__name__ for w in caught)
    with pytest.warns(UserWarning, match=r"no effect.*use_native=False.*use_cg=False.*num_threads=4"):
        AlternatingLeastSquares(use_native=False, use_cg=False, num_threads=4)
    with pytest.warns(Warning, match="float32 here"):
        assert AlternatingLeastSquares(dtype=np.float16).dtype == np.float32


@pytest.mark.parametrize(
    ("name", "bad"),
    [("factors", 0), ("regularization", -1.0), ("alpha", 0.0), ("dtype", "int32"), ("dtype", "real"),
     ("iterations", -1), ("use_gpu", "yes"), ("calculate_training_loss", 2)],
)  # fmt: skip
def test_arguments_are_checked(name, bad):
    with pytest.raises(ValueError, match=name):
        AlternatingLeastSquares(**{name: bad})


def test_matrices_are_checked():
    for bad in (np.eye(3), sp.csr_matrix((0, 3)), ratings() * np.nan):
        with pytest.raises(ValueError, match="user_items"):
            fitted(bad)
    with pytest.raises(ValueError, match="finite"):
        fitted(ratings() * 1e300, dtype=np.float64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(model):
    with pytest.raises(ValueError, match=r"use_gpu.*True"):
        model.to_gpu()
    with pytest.raises(ValueError, match=r"use_gpu.*True"):
        fitted(ratings(), use_gpu=True)


def test_all_methods_of_implicit_are_there_with_its_arguments():
    theirs = pytest.importorskip("implicit.cpu.als").AlternatingLeastSquares
    cached = {"solver", "YtY", "XtX", "user_norms", "item_norms"}  # inner parts of the method
    names = {name for name in dir(theirs) if not name.startswith("_")} - cached
    assert {"explain", "partial_fit_users", "rank_items", "recommend_all", "to_gpu"} <= names
    for name in names:
        expected = inspect.signature(getattr(theirs, name)).parameters
        given = inspect.signature(getattr(AlternatingLeastSquares, name)).parameters
        assert list(given) == list(expected), name
        assert {n: p.default for n, p in given.items()} == {n: p.default for n, p in expected.items()}, name
    expected = inspect.signature(pytest.importorskip("implicit.als").AlternatingLeastSquares).parameters
    given = inspect.signature(AlternatingLeastSquares).parameters
    assert list(given) == list(expected)
    assert all(given[name].default == expected[name].default for name in given.keys() - {"use_gpu"})


def test_an_interrupt_leaves_both_sides_trainable(monkeypatch):
    problem = make_problem(confidences("R", ratings(), 1.0), 0.1)
    towers = factor_towers(problem, None, None, 4, 0, torch.float64)
    minimize, calls = als.minimize, []

    def interrupted(*arguments, **options):
        calls.append(options)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return minimize(*arguments, **options)

    monkeypatch.setattr(als, "minimize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        minimize_factors(problem, towers, 2, lambda record, point: None, False)
    assert all(p.requires_grad for tower in (towers.left, towers.right) for p in tower.parameters())

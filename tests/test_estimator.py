"""TwoTower on data whose answers are known by construction."""

from __future__ import annotations

import copy
import math
import os
import pickle
import re
from dataclasses import FrozenInstanceError
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn

import gramtower as gt
from gramtower._util import host
from gramtower._util.checks import LeftOutWarning
from gramtower.data.datasets import planted_pairs
from gramtower.data.splits import random_pairs
from gramtower.distributed.group import SINGLE
from gramtower.model import defaults, fit_data
from gramtower.model.feature_spec import history_features
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem

CPU = torch.device("cpu")


def checkerboard(size=20):
    """Even users like even items and odd ones odd items, each except its own number."""
    rows, columns = np.nonzero((np.add.outer(np.arange(size), np.arange(size)) % 2 == 0) & ~np.eye(size, dtype=bool))
    return sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(size, size))


def named(size=20):
    matrix = checkerboard(size).tocoo()
    return gt.Interactions.from_arrays(
        np.array([f"user {i:03d}" for i in matrix.row], dtype=object),
        np.array([f"{j:03d}" for j in matrix.col], dtype=object),
    )


def small(**options):
    given = {"dim": 8, "hidden": (16,), "max_iterations": 25, "device": "cpu", "select": False}
    return gt.TwoTower(**given | options)


@pytest.fixture(scope="module")
def model():
    return small().fit(named())


def test_the_missing_item_of_the_pattern_is_recommended_first(model):
    ids, scores = model.recommend([f"user {i:03d}" for i in range(20)], k=3)
    assert ids[:, 0].tolist() == [f"{i:03d}" for i in range(20)]
    assert scores.shape == (20, 3)
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize(
    "options", [dict(hidden=()), dict(loss="squared", imputed=0.0), dict(optimizer="lbfgs", max_iterations=100)]
)
def test_other_models_find_it_too(options):
    ids, _ = small(**options).fit(checkerboard()).recommend(range(20), k=1)
    assert ids[:, 0].tolist() == list(range(20))


def test_seen_items_come_back_when_asked_for(model):
    seen = set(named().right_ids[named().matrix[0].indices])
    kept, _ = model.recommend("user 000", k=9, exclude_seen=False)
    left_out, _ = model.recommend("user 000", k=9)
    assert len(seen & set(kept[0])) >= 8
    assert not seen & set(left_out[0])


def test_allow_and_deny_lists(model):
    allowed, _ = model.recommend("user 000", k=5, allow=["000", "001", "003"])
    assert set(allowed[0]) == {"000", "001", "003", None}
    denied, _ = model.recommend("user 000", k=5, deny=["000"])
    assert "000" not in denied[0]


@pytest.mark.parametrize("kind", ["text", "numbers", "rows"])
def test_unknown_ids_of_allow_and_deny_are_ignored_and_counted(kind):
    pairs, users, items, strange = checkerboard(), range(20), range(20), [50, 60, 70]
    if kind != "rows":
        pairs = gt.Interactions.from_matrix(pairs, *((named().left_ids, named().right_ids) if kind == "text" else ()))
    if kind == "text":
        users, items, strange = named().left_ids, named().right_ids, ["no", "nor", "none"]
    model = small(max_iterations=2).fit(pairs)
    some = [items[1], items[3], items[1]]
    for name in ("allow", "deny"):
        expected = model.recommend(users, k=5, **{name: some})
        with pytest.warns(LeftOutWarning, match=rf"^{name}.*3.*6") as warned:
            found = model.recommend(users, k=5, **{name: [*some, *strange]})
        assert len(warned) == 1
        assert all(map(np.array_equal, found, expected))
    with pytest.warns(UserWarning, match=r"allow.*3.*3"):
        ids, scores = model.recommend(users, k=5, allow=strange)
    assert np.isneginf(scores).all()
    assert set(ids.ravel().tolist()) == {None if kind == "text" else -1}


def test_an_allowed_id_of_the_other_type_is_an_error():
    model = small(max_iterations=1).fit(gt.Interactions.from_matrix(checkerboard()))
    with pytest.raises(ValueError, match=r"whole numbers.*3"):
        model.recommend([1], allow=[1, "3", 99])


def test_places_without_an_answer_are_empty(model):
    ids, scores = model.recommend("user 000", k=20)
    assert (ids[0][11:] == None).all()  # noqa: E711
    assert np.isneginf(scores[0][11:]).all()


def test_similar_entities_share_their_parity(model):
    ids, _ = model.similar("004", side="right", k=5)
    assert all(int(item) % 2 == 0 for item in ids[0])
    assert "004" not in ids[0]
    users, _ = model.similar(["user 001"], side="left", k=5)
    assert all(int(user[-3:]) % 2 == 1 for user in users[0])


def test_score_embed_and_recommend_agree(model):
    ids, scores = model.recommend("user 005", k=2)
    assert model.predict(["user 005"] * 2, ids[0]) == pytest.approx(scores[0], rel=1e-5)
    product = model.embed(["user 005"]) @ model.embed(ids[0], side="right").T
    assert product[0] == pytest.approx(scores[0], rel=1e-5)


@pytest.mark.parametrize("hidden", [(), (4,)])
def test_changing_an_answer_changes_nothing_in_the_model(hidden):
    pairs = checkerboard()
    fitted = small(hidden=hidden, max_iterations=2).fit(pairs)

    def answers():
        lists = (*fitted.recommend([0, 1], k=3), *fitted.similar([0, 1], k=3), fitted.predict([0, 1], [1, 0]))
        return (*lists, *(fitted.embed(ids, side=side) for ids in (None, [0, 1]) for side in ("left", "right")))

    before = answers()
    for answer in answers():
        answer[:] = 0
    pairs.indices[:] = 0  # what it was fitted on is the caller's
    assert all(np.array_equal(a, b) for a, b in zip(before, answers(), strict=True))


def test_an_answer_outlives_the_models_way_to_another_process():
    fitted = small(max_iterations=2).fit(checkerboard())
    taken = fitted.embed(side="right")
    ForkingPickler.dumps(fitted)  # what multiprocessing.Pool.map does with it; torch moves tensors to shared memory
    assert not np.shares_memory(taken, fitted.right_.embeddings.numpy())
    assert np.array_equal(taken, fitted.embed(side="right"))


def test_evaluate_on_held_out_pairs(model):
    held = gt.Interactions.from_arrays(
        np.array([f"user {i:03d}" for i in range(20)], dtype=object),
        np.array([f"{i:03d}" for i in range(20)], dtype=object),
    )
    found = model.evaluate(held, metrics=("recall@1", "ndcg@5", "map@5"))
    assert found["recall@1"] == 1.0
    assert found["ndcg@5"] == 1.0
    assert found["map@5"] == 1.0


def test_validation_stops_early_and_keeps_the_best():
    held = sp.identity(20, format="csr", dtype=np.float32)
    fitted = small(patience=2, metric="recall@1", max_iterations=60).fit(checkerboard(), validation=held)
    assert fitted.best_metric_ == max(record.metric for record in fitted.history_)
    assert fitted.evaluate(held, metrics=("recall@1",))["recall@1"] == fitted.best_metric_
    assert len(fitted.history_) < 61


@pytest.mark.parametrize("kind", ["ids", "dense", "sparse", "history"])
def test_saved_and_loaded_models_answer_alike(kind, tmp_path):
    matrix = checkerboard()
    features = {"ids": None, "dense": np.eye(20), "sparse": sp.identity(20, format="csr"), "history": "history"}[kind]
    fitted = small().fit(matrix, left_features=features)
    path = tmp_path / "model.gramtower"
    fitted.save(path)
    loaded = gt.load(path)
    for before, after in zip(fitted.recommend(range(20), k=5), loaded.recommend(range(20), k=5), strict=True):
        assert np.array_equal(before, after)
    assert loaded.get_params() == fitted.get_params()
    assert loaded.history_ == fitted.history_
    assert loaded.reason_ is fitted.reason_ is gt.Reason.MAX_ITERATIONS
    assert loaded.message_ == fitted.message_
    if kind == "dense":
        assert np.array_equal(fitted.embed(left_features=np.eye(20)[:3]), loaded.embed(left_features=np.eye(20)[:3]))
    if kind == "history":
        assert np.array_equal(
            fitted.recommend(histories=[[2, 4]], k=3)[0], loaded.recommend(histories=[[2, 4]], k=3)[0]
        )


def test_text_ids_survive_saving(model, tmp_path):
    model.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert loaded.left_.ids.tolist() == model.left_.ids.tolist()
    assert loaded.recommend("user 007", k=1)[0][0, 0] == "007"


def test_new_users_through_their_features_and_histories():
    parity = np.stack([np.arange(20) % 2, 1 - np.arange(20) % 2], 1).astype(np.float32)
    by_features = small().fit(checkerboard(), left_features=parity)
    assert by_features.recommend(left_features=np.array([[1.0, 0.0]]), k=10)[0][0].tolist().count(0) == 0
    by_history = small().fit(checkerboard(), left_features="history")
    ids, _ = by_history.recommend(histories=[range(1, 15, 2), range(0, 14, 2)], k=3)
    assert set(ids[0]) == {15, 17, 19}
    assert set(ids[1]) == {14, 16, 18}


def test_warm_start_keeps_known_entities_and_adds_new_ones():
    first = small(max_iterations=15).fit(named(16))
    ended = first.history_[-1].value
    assert small(max_iterations=15).fit(named(16)).fit(named(16), warm_start=True).history_[0].value == ended
    options = {"max_iterations": 15, "omega": 0.1}
    grown = small(**options).fit(named(16)).fit(named(20), warm_start=True)
    assert grown.history_[0].value < 0.9 * small(**{**options, "max_iterations": 0}).fit(named(20)).history_[0].value
    assert grown.recommend("user 019", k=1)[0][0, 0] == "019"
    assert len(first.left_) == 16


def test_size_and_layers_follow_the_data_unless_given(tmp_path):
    ids = gt.TwoTower(max_iterations=2, device="cpu").fit(named(16))
    assert ids.hidden_ == ((), ())
    assert ids.dim_ == ids.embed().shape[1] == 16
    features = gt.TwoTower(max_iterations=1, device="cpu").fit(named(16), right_features=np.eye(16))
    assert features.hidden_ == ((), (64,))
    given = gt.TwoTower(dim=3, hidden=(5,), max_iterations=1, device="cpu").fit(named(16))
    assert (given.dim_, given.hidden_) == (3, ((5,), (5,)))
    sides = gt.TwoTower(dim=3, hidden=((5, 4), ()), max_iterations=1, device="cpu").fit(named(16))
    assert sides.hidden_ == ((5, 4), ())
    for model in (ids, sides, features):
        model.save(tmp_path / "m")
        loaded = gt.load(tmp_path / "m")
        assert loaded.get_params() == model.get_params()
        assert (loaded.dim_, loaded.hidden_) == (model.dim_, model.hidden_)
    assert np.array_equal(loaded.embed(right_features=np.eye(16)), features.embed(side="right"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 12),
        ({"optimizer": gt.optim.NewtonKron()}, 12),
        ({"memory_budget": "2GB"}, 12),
        ({"towers": lambda problem: gt.mlp_towers(problem, hidden=(), dim=4)}, 12),
        ({"optimizer": gt.optim.NewtonKron(sweeps=0)}, 20),
        ({"optimizer_options": {"sweeps": 0}}, 20),
        ({"optimizer": "lbfgs"}, 20),
    ],
)
def test_the_default_number_of_iterations_follows_from_whether_sweeps_are_made(options, expected):
    model = gt.TwoTower(dim=4, device="cpu", **options).fit(planted_pairs(60, 40, 400, seed=0))
    assert model.history_[-1].iteration == expected
    if options.get("optimizer") != "lbfgs":  # which never damps
        assert all((record.damping is None) == (expected == 12) for record in model.history_[1:])


def test_a_warm_start_keeps_the_size_that_more_data_would_change():
    model = gt.TwoTower(max_iterations=4, device="cpu").fit(named(16))
    before = model.dim_
    assert gt.TwoTower(max_iterations=1, device="cpu").fit(named(20)).dim_ == 20 != before
    assert model.fit(named(20), warm_start=True).dim_ == before
    assert model.dim == "auto"


def test_scikit_learn_conventions():
    estimator = small(omega=0.1)
    params = estimator.get_params()
    assert params["omega"] == 0.1
    assert gt.TwoTower(**params).get_params() == params
    assert estimator.set_params(dim=4).dim == 4
    estimator.set_params(select=True)
    assert repr(estimator) == "TwoTower(device='cpu', dim=4, hidden=(16,), max_iterations=25, omega=0.1)"
    with pytest.raises(ValueError, match=r"parameter.*'size'"):
        estimator.set_params(size=3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("factors", "did you mean 'dim'?"),  # what implicit calls it
        ("no_components", "did you mean 'dim'?"),  # and LightFM
        ("random_state", "did you mean 'seed'?"),
        ("max_iteration", "did you mean 'max_iterations'?"),
        ("omgea", "did you mean 'omega'?"),
        ("zzz", "known are dim, hidden, activation"),
    ],
)
def test_an_unknown_argument_is_refused_with_what_was_meant(name, hint):
    with pytest.raises(TypeError, match=rf"'{name}'.*{re.escape(hint)}"):
        gt.TwoTower(**{name: 3})
    if "did" in hint:
        with pytest.raises(ValueError, match=re.escape(f"parameter: got '{name}' ({hint})")):
            gt.TwoTower().set_params(**{name: 3})


def test_what_was_learned_is_one_object_that_copies_share_and_nobody_changes(model):
    assert model.left_ is model.fitted_.left
    assert model.recommend(["user 003"], k=3)[0].tolist() == model.fitted_.recommend(["user 003"], k=3)[0].tolist()
    for name in ("left_", "dim_", "history_"):
        with pytest.raises(AttributeError, match="read-only"):
            setattr(model, name, None)
    with pytest.raises(FrozenInstanceError):
        model.fitted_.dim = 3
    assert copy.copy(model).fitted_ is model.fitted_
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.embed(), model.embed())
    assert again.left_.ids.tolist() == model.left_.ids.tolist()
    fresh = gt.TwoTower(**model.get_params())
    assert not hasattr(fresh, "fitted_")
    with pytest.raises(ValueError, match="fit"):
        fresh.recommend(["user 003"])


def test_a_failed_fit_leaves_the_model_as_it_was():
    fitted = small(max_iterations=2).fit(named())
    before = fitted.fitted_
    with pytest.raises(ValueError, match="infinite"):
        fitted.set_params(imputed=1e30).fit(named())
    assert fitted.fitted_ is before


def test_a_subclass_may_have_a_constructor_of_its_own(tmp_path):
    class Two(gt.TwoTower):
        def __init__(self, note="", dim=2):
            super().__init__(dim=dim, hidden=(), max_iterations=2, device="cpu")
            self.note = note

    fitted = Two("mine").fit(checkerboard())
    assert str(fitted).startswith("Two(note='mine'): 20 left entities by id")
    assert fitted.get_params() == {"note": "mine", "dim": 2}
    fitted.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert (loaded.dim, loaded.max_iterations) == (2, 2)
    assert np.array_equal(loaded.embed(), fitted.embed())


def test_a_fit_reads_its_pairs_once_into_data_that_stay_as_they_are(monkeypatch):
    real, read = fit_data.matrix_and_ids, []
    monkeypatch.setattr(fit_data, "matrix_and_ids", lambda pairs, name="pairs": read.append(name) or real(pairs, name))
    data = prepare_data(small(), named(), "history", validation=named())
    assert read == ["pairs", "validation"]
    with pytest.raises(FrozenInstanceError):
        data.dim = 3


def test_no_new_entities_have_no_answers():
    fitted = small(max_iterations=1).fit(named(), np.eye(20, 3))
    assert fitted.embed(left_features=np.empty((0, 3))).shape == (0, 8)
    ids, scores = fitted.recommend(left_features=np.empty((0, 3)), k=2)
    assert ids.shape == scores.shape == (0, 2)


def test_sklearn_clone_works():
    base = pytest.importorskip("sklearn.base", reason="scikit-learn is not installed")
    estimator = small(omega=0.1)
    assert base.clone(estimator).get_params() == estimator.get_params()


def test_towers_of_ones_own_and_what_a_file_cannot_hold(tmp_path):
    def make(problem):
        torch.manual_seed(0)
        tower = lambda rows: nn.Sequential(nn.Embedding(rows, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))  # noqa: E731
        return gt.Towers(tower(problem.shape[0]), tower(problem.shape[1]))

    fitted = small(towers=make).fit(checkerboard())
    fitted.save(tmp_path / "m")
    for loaded in (gt.load(tmp_path / "m"), gt.load(tmp_path / "m", towers=make)):
        assert np.array_equal(loaded.recommend([3], k=2)[0], fitted.recommend([3], k=2)[0])


def test_defaults_scale_with_the_data():
    size = (1000, 1000)
    assert defaults.default_omega(size, 10_000) == pytest.approx(2 * 10_000 / 990_000)
    few, many = (defaults.default_l2((1000, n), 10_000, "features") for n in (200, 400))
    assert few == 2 * many == pytest.approx(1.5)
    neither = False, False
    assert defaults.default_l2(size, 10, "ids") == defaults.default_l2(size, 10_000, "ids")
    assert defaults.default_l2(size, 10, "ids", 5.0) > defaults.default_l2(size, 10, "ids")  # ids next to features
    short, long, longest = (defaults.default_l2(size, 10_000, "features", entries) for entries in (64, 256, 1e6))
    assert short == 2 * long == pytest.approx(3 * longest) == defaults.default_l2(size, 10_000, "features")
    few, left, right = (1000, 12_000, 20_000, 30_000, 900_000), (True, False), (False, True)
    powers = [defaults.default_right_weights(size, n, "features", left) for n in few]
    assert powers == ["degree^0.4", "degree^0.4", "degree^0.3", "degree^0.2", "degree^0.2"]
    assert defaults.default_right_weights(size, 900_000, "features", right) == "degree^0.4"
    assert defaults.default_right_weights(size, 900_000, "ids", neither) == "degree^0.1"
    sparse, dense = (defaults.default_embedding_l2(size, n, "ids", 1.0) for n in (1000, 100_000))
    few, some, many = (defaults.default_embedding_l2(size, n, "features", 1.0) for n in (1000, 50_000, 900_000))
    assert few < some < many == sparse == dense  # the more pairs an entity has, the more can be learned by heart
    assert defaults.default_embedding_l2((100, 10_000), 50_000, "features", 1.0) == some
    for seen in ("ids", "features"):  # the same penalty for an entity with 50 pairs, whatever the power
        one, other = (defaults.default_embedding_l2(size, 50_000, seen, nu) * 150.0**nu for nu in (1.0, 0.6))
        assert one == pytest.approx(other)
    assert defaults.default_embedding_l2(size, 100_000, "histories", 1.0) == dense
    sizes = [defaults.default_dim((n, 10 * n), ((), ()), CPU, 10**11) for n in (10, 500, 1000, 3000, 100_000)]
    assert sizes == [10, 128, 256, 256, 256]
    assert defaults.default_dim((100_000, 50_000), ((), ()), torch.device("cuda"), 10**11) == 2048
    assert defaults.default_dim((100_000, 50_000), ((512, 256), ()), torch.device("cuda"), 10**11) == 128
    widths = [defaults.default_hidden((n, 50), (300, 0), CPU) for n in (10, 1000, 100_000)]
    assert widths == [((64,), ()), ((256,), ()), ((1024,), ())]
    assert defaults.default_hidden((10**6, 10**6), (9, 9), torch.device("cuda")) == ((2048,), (2048,))
    assert defaults.default_hidden((10**6, 10**6), (2**15, 2**24), CPU) == ((512,), (64,))
    fitted = small(max_iterations=1).fit(checkerboard())
    assert fitted.omega_ == pytest.approx(2 * 180 / 220)


@pytest.mark.parametrize("missing", [0, 1])
def test_where_all_or_nearly_all_pairs_are_observed_the_model_does_not_collapse(missing):
    labels = np.where(np.add.outer(np.arange(30), np.arange(20)) % 2 == 0, 1.0, -1.0)
    for matrix in (np.ones((30, 20)), labels):
        pairs = sp.csr_matrix(matrix)
        pairs = sp.csr_matrix((pairs.data[missing:], (pairs.nonzero()[0][missing:], pairs.nonzero()[1][missing:])))
        fitted = gt.TwoTower(dim=4, device="cpu").fit(pairs)
        assert fitted.omega_ <= 4
        rows, columns = pairs.nonzero()
        assert (fitted.predict(rows, columns) * pairs.data > 1).all()


def test_an_entity_without_pairs_has_no_neighbours_and_is_none():
    pairs = sp.csr_matrix(sp.block_diag([checkerboard(), sp.csr_matrix((2, 2))]), dtype=np.float32)
    fitted = small(max_iterations=5).fit(pairs)
    for side in ("left", "right"):
        with pytest.raises(ValueError, match=rf"{side} ids.*20"):
            fitted.similar([3, 20], side)
        ids, scores = fitted.similar([3], side, k=30)
        assert not np.isin(ids[np.isfinite(scores)], [20, 21]).any()
        assert np.isfinite(scores).sum() == 19
    described = small(max_iterations=2).fit(pairs, right_features=np.eye(22, 5, dtype=np.float32))
    assert np.isfinite(described.similar([20], "right", k=3)[1]).all()


def test_embeddings_are_smaller_where_training_would_not_fit_the_memory(monkeypatch):
    many = (3_000_000, 1_000_000)
    assert defaults.default_dim(many, (), CPU, 40 * 4_000_000 * 256) == 256
    assert defaults.default_dim(many, (), CPU, 40 * 4_000_000 * 256 - 1) == 128
    assert defaults.default_dim(many, (), CPU, 1) == 1
    # four processes hold a quarter of the entities each, and five vectors of all right ones
    assert defaults.default_dim(many, (), CPU, (40 + 20) * 1_000_000 * 256, processes=4) == 256
    assert defaults.default_dim(many, (), CPU, (40 + 20) * 1_000_000 * 256 - 1, processes=4) == 128
    monkeypatch.setattr(defaults, "total_memory", lambda device: 2 * 40 * (20 + 20) * 7)
    fitted = gt.TwoTower(max_iterations=1, device="cpu").fit(checkerboard())
    assert fitted.dim_ == 4  # 64, halved until 7 would do
    room = [defaults.room_for_training(torch.device("cuda"), SINGLE, budget) for budget in (None, "1kB", "1GB")]
    assert room == [40 * 40 * 7, 1000, 40 * 40 * 7]


def test_what_a_container_may_have_counts(monkeypatch, tmp_path):
    assert host.total_memory(CPU) > 10**8
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "limit").write_text("123456\n")
    monkeypatch.setattr(host, "_CONTAINER", (str(tmp_path / "memory.max"), str(tmp_path / "none")))
    whole = host.total_memory(CPU)
    monkeypatch.setattr(host, "_CONTAINER", (str(tmp_path / "limit"), str(tmp_path / "memory.max")))
    assert host.total_memory(CPU) == 123456 < whole


def test_a_default_fit_has_the_penalty_of_its_frequencies_and_weights_of_right_entities():
    counts = np.array([1, 2, 4, 8, 16])
    pairs = sp.csr_matrix((np.arange(40)[:, None] < counts).astype(np.float32))

    def made(**options):
        model = gt.TwoTower(device="cpu", **options)
        return make_problem(model, prepare_data(model, pairs))

    frequency = 3 * 31 / math.sqrt(200)
    assert made().embedding_l2 == pytest.approx(0.01 * frequency**0.2)
    assert made(frequency_power=1.0).embedding_l2 == 0.01
    assert made(embedding_l2=0.1).embedding_l2 == 0.1
    left, right = made().weight_arrays
    assert left is None
    assert right == pytest.approx(counts**0.1 / (counts**0.1).mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": -5}, "dim: got -5, expected an integer >= 1"),
        ({"dim": "64"}, "dim: got '64', expected an integer >= 1"),
        ({"hidden": 256}, "hidden: got 256, expected a sequence"),
        ({"hidden": "256"}, "hidden: got '256', expected a sequence"),
        ({"hidden": ("a",)}, "hidden: got 'a', expected an integer >= 1"),
    ],
)
def test_sizes_that_cannot_be_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        gt.TwoTower(device="cpu", **options).fit(checkerboard())


def test_no_entities_is_an_error_with_a_name():
    with pytest.raises(ValueError, match=r"pairs.*\(0, 5\)"):
        gt.TwoTower(device="cpu").fit(sp.csr_matrix((0, 5)))


def test_an_interrupted_fit_goes_on_from_its_checkpoint(tmp_path):
    whole = small(max_iterations=8).fit(checkerboard())
    path = tmp_path / "c.safetensors"
    small(max_iterations=5).fit(checkerboard(), checkpoint=path)
    resumed = small(max_iterations=8).fit(checkerboard(), checkpoint=path)
    assert [r.value for r in resumed.history_] == [r.value for r in whole.history_]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.recommend("user 0O5"), r"unknown ids 'user 0O5' \(nearest: 'user"),
        (lambda m: m.recommend(), r"left.*None"),
        (lambda m: m.recommend("user 001", k=0), r"k:.*0"),
        (lambda m: m.recommend("user 001", deny=[1.5]), r"deny.*1.5"),
        (lambda m: small().fit(checkerboard()).recommend([1], allow=["x"]), r"right ids.*'x'"),
        (lambda m: m.recommend(left_features=np.ones((1, 3))), "knows left ids only"),
        (lambda m: m.recommend(histories=[["001"]]), 'fitted with left_features="history"'),
        (lambda m: m.similar("001", side="top"), r"side.*'top'"),
        (lambda m: m.predict(["user 001"], ["001", "002"]), "1 and 2 ids"),
        (lambda m: m.evaluate(checkerboard()), "a matrix without ids"),
        (lambda m: small().recommend([1]), "fit"),
        (lambda m: small().fit([[1, 0]]), r"pairs.*list"),
        (lambda m: small().fit("pairs.csv"), r"pairs.*str.*from_csv"),
        (lambda m: small().tune(checkerboard(), refit="no"), r"refit.*'no'"),
        (lambda m: small(device="tpu").fit(checkerboard()), r"device.*'tpu'"),
        (lambda m: small().fit(checkerboard(), left_features="past"), r"left_features.*'past'"),
    ],
)
def test_bad_input_is_refused(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_cuda_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="none"):
        small(device="cuda").fit(checkerboard())


def test_a_full_disk_leaves_the_old_file_whole(model, tmp_path, monkeypatch):
    path = tmp_path / "m"
    model.save(path)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        small(max_iterations=1).fit(checkerboard()).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m"]


def test_tables_that_are_the_embeddings_are_stored_once(tmp_path):
    pairs = sp.random(400, 300, density=0.05, format="csr", random_state=0, data_rvs=np.ones)
    model = gt.TwoTower(dim=64, hidden=(), max_iterations=2, device="cpu").fit(pairs)
    model.save(tmp_path / "m")
    table = 4 * 64 * (400 + 300)
    assert table < (tmp_path / "m").stat().st_size < 1.4 * table
    loaded = gt.load(tmp_path / "m")
    for side in ("left", "right"):
        assert np.array_equal(loaded.embed(side=side), model.embed(side=side))
    again = loaded.fit(pairs, warm_start=True)
    assert again.history_[0].value == pytest.approx(model.history_[-1].value, rel=1e-6)
    half = gt.TwoTower(dim=64, hidden=(), max_iterations=2, device="cpu").fit(pairs, right_features=np.eye(300, 4))
    half.save(tmp_path / "m")  # a table on one side, features on the other
    loaded = gt.load(tmp_path / "m")
    for side in ("left", "right"):
        assert np.array_equal(loaded.embed(side=side), half.embed(side=side))


def test_history_features_have_length_one():
    features = history_features(checkerboard())
    assert np.allclose(features.multiply(features).sum(1), 1)


def test_arguments_of_a_wrong_kind_are_refused_by_name(tmp_path):
    pairs = gt.Interactions.from_matrix(checkerboard())
    fitted = small(max_iterations=1).fit(checkerboard())
    for name, call in (
        ("left", lambda: fitted.recommend(Ellipsis)),
        ("deny", lambda: fitted.recommend([1], deny=checkerboard())),
        ("exclude_seen", lambda: fitted.recommend([1], exclude_seen=torch.zeros(0))),
        ("ids", lambda: fitted.similar([[1, 2]])),
        ("metrics", lambda: fitted.evaluate(checkerboard(), metrics=True)),
        ("path", lambda: fitted.save(3)),
        ("optimizer_options", lambda: small(optimizer_options=torch.zeros(2)).fit(checkerboard())),
        ("hidden", lambda: small(hidden=torch.tensor(3)).fit(checkerboard())),
        ("seed", lambda: small(seed=2**70).fit(checkerboard())),
        ("left_ids", lambda: gt.Interactions.from_matrix(checkerboard(), left_ids=True)),
        ("left", lambda: gt.Interactions.from_arrays(checkerboard(), [1])),
        ("entries", lambda: pairs.subset(torch.eye(3).to_sparse())),
        ("pairs", lambda: random_pairs([[1, 2]])),
        ("problem", lambda: gt.mlp_towers(np.eye(3))),
        ("path", lambda: gt.read_history(None)),
    ):
        with pytest.raises(ValueError, match=rf"^{name}"):
            call()
    assert repr(gt.TwoTower(left_weights=sp.eye(2), right_weights=np.ones(2))).startswith("TwoTower(left_weights=")


EXTREMES = {
    "omega of 1e39": ({}, dict(omega=1e39), r"^omega: got 1e\+39, expected numbers of at most 3.4e\+38 with towers in"),
    "omega of 1e38": (
        {},
        dict(omega=1e38, hidden=(4,)),
        r"^fit: got NaN or infinite numbers: the gradient, expected an objective that",
    ),
    "l2 of 1e300": ({}, dict(l2=1e300), r"^l2: got 1e\+300"),
    "imputed of 1e20": ({}, dict(imputed=1e20), r"^fit: got NaN or infinite numbers: at the start, the term observed"),
    "weights of 1e300": ({}, dict(left_weights=np.full(20, 1e300)), r"^left_weights: got 1e\+300 at 0"),
    "penalty of 1e300": ({}, dict(embedding_l2=1e300), r"^embedding_l2: got 1e\+300"),
    "a huge step": (
        {},
        dict(optimizer="sampling", optimizer_options=dict(step_size=1e30, steps=3)),
        "smaller step_size",
    ),
    "dim of 1e9": (
        {},
        dict(dim=10**9),
        r"^dim: got 1000000000, expected towers .*free memory, \d+[MG]B; with 40 ",
    ),
    "hidden of 1e12": ({}, dict(hidden=(10**12,), dim=2), r"^hidden: got \(10{12},\), expected towers"),
}


@pytest.mark.parametrize("size", [1e30, 1e300])
@pytest.mark.parametrize("sparse", [False, True])
def test_columns_of_any_size_train_alike_and_so_do_new_entities(size, sparse, tmp_path):
    plain = np.random.default_rng(0).random((20, 3)) + 0.5
    large = plain * [1.0, 2.0 ** np.frexp(size)[1], 1.0]
    answers = []
    for features in (plain, large):
        given = sp.csr_matrix(features) if sparse else features
        model = small(hidden=(4,), max_iterations=2).fit(checkerboard(), left_features=given)
        assert np.isfinite(model.embed(side="left")).all()
        model.save(tmp_path / "model")
        answers.append(gt.load(tmp_path / "model").embed(left_features=given[:5]))
        np.testing.assert_allclose(answers[-1], model.embed(side="left")[:5], rtol=1e-5, atol=1e-6)
    if not sparse:  # columns are standardised; entries of a sparse matrix are compared with those of all columns
        np.testing.assert_allclose(answers[1], answers[0], rtol=1e-4, atol=1e-5)


def test_one_huge_row_leaves_the_others_their_features():
    features = sp.csr_matrix(np.diag([1.0] * 19 + [1e20]))
    model = small(hidden=(4,), max_iterations=5).fit(checkerboard(), left_features=features)
    assert np.isfinite(model.embed(side="left")).all()
    assert np.ptp(model.embed(side="left")[:19], axis=0).max() > 1e-3


@pytest.mark.parametrize("case", EXTREMES)
def test_extreme_numbers_are_refused_by_name(case):
    features, settings, message = EXTREMES[case]
    model = gt.TwoTower(**{"dim": 3, "max_iterations": 2, "device": "cpu", **settings})
    with pytest.raises(ValueError, match=message):
        model.fit(checkerboard(), **features)
    assert not hasattr(model, "towers_")


@pytest.mark.parametrize("optimizer", ["newton-kron", "newton", "lbfgs", "gd"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(omega=1e30),
        dict(omega=1e-38),
        dict(l2=1e30),
        dict(l2=0.0),
        dict(embedding_l2=1e30),
        dict(dim=50),
        "1e12",
        "0",
    ],
    ids=str,
)
def test_what_is_extreme_but_can_be_worked_with_gives_a_finite_model(settings, optimizer):
    features = None
    if isinstance(settings, str):
        features, settings = np.random.default_rng(0).normal(size=(20, 3)) * float(settings), {}
    settings = {"dim": 3, "max_iterations": 3, "hidden": (4,), "device": "cpu", **settings}
    model = gt.TwoTower(**settings, optimizer=optimizer).fit(checkerboard(), left_features=features)
    assert all(np.isfinite(model.embed(side=side)).all() for side in ("left", "right"))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)])
def test_a_single_entity_on_a_side_is_enough(shape):
    model = gt.TwoTower(max_iterations=3, device="cpu").fit(sp.csr_matrix(np.ones(shape)))
    assert np.isfinite(model.embed(side="left") @ model.embed(side="right").T).all()


class Threads:
    """Keeps the number of torch threads at each iteration."""

    def __init__(self):
        self.seen = []

    def __call__(self, record, point):
        self.seen.append(torch.get_num_threads())
        if len(self.seen) == 2:
            raise RuntimeError("enough")


@pytest.mark.parametrize(("size", "hidden", "threads"), [(40, (), 1), (40, (8,), 2), (4000, (), 2)])
def test_tiny_fits_take_one_thread_and_give_the_others_back(size, hidden, threads, monkeypatch):
    monkeypatch.setattr(host, "cpu_count", lambda: 2)
    monkeypatch.setattr(gt, "_long_waits", False)
    before = torch.get_num_threads()
    watcher = Threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="enough"):
            gt.TwoTower(dim=100, hidden=hidden, loss="squared", device="cpu", max_iterations=3).fit(
                sp.random(size, size, 0.05 * 40 / size, "csr", random_state=0), callbacks=[watcher]
            )
        assert set(watcher.seen) == {threads}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_default_penalty_is_by_the_entries_of_sparse_features(tmp_path):
    pairs = checkerboard()
    rng = np.random.default_rng(0)
    short, long = (sp.csr_matrix(rng.random((pairs.shape[0], width)) + 0.1) for width in (64, 256))
    found = [small(max_iterations=1).fit(pairs, features) for features in (short, long, long.toarray())]
    assert found[0].l2_ == 2 * found[1].l2_ == found[2].l2_  # of dense ones the width says nothing
    found[1].save(tmp_path / "m")
    assert gt.load(tmp_path / "m").l2_ == found[1].l2_


def test_the_default_activation_follows_the_data_and_stays_with_the_model(tmp_path):
    pairs, features = named(), sp.random(20, 9, density=0.5, random_state=0, format="csr")
    options = dict(hidden=(8,), max_iterations=2)
    beside_ids = small(**options).fit(pairs, features)
    both = small(**options, normalize=True).fit(pairs, features, sp.csr_matrix(np.eye(pairs.shape[1], 4) + 0.5))
    assert (beside_ids.activation_, both.activation_) == ("relu", "gelu")
    both.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert loaded.activation_ == "gelu"
    assert np.array_equal(loaded.embed(left_features=features), both.embed(left_features=features))


@pytest.mark.parametrize("name", ["leaky_relu(2)", "leaky_relu(0.0)", "leaky_relu(-0.1)", "softmax", 3])
def test_unknown_activations_are_refused_by_name(name):
    with pytest.raises(ValueError, match=r"activation.*'elu'.*'relu'.*'leaky_relu\(0.25\)'"):
        small(activation=name, hidden=(4,)).fit(named(), left_features="history")

"""Validation on entities that training has not seen, against plain recomputations: splits, a fit, embed, metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.splits import held_out
from gramtower.experiments.tuning.study import Gain, gain, pick
from gramtower.metrics import evaluate_embeddings
from gramtower.metrics.embedding_metrics import deal
from gramtower.model.fit_data import prepare_data
from gramtower.model.settings import ModelSettings
from gramtower.model.unseen import hold_out_entities

SHAPE = (80, 50)


def data():
    return sp.csr_matrix(planted_pairs(*SHAPE, observed=900))


def words(rows, seed=0):
    """Sparse features whose first columns are the planted groups, more or less."""
    rng = np.random.default_rng(seed)
    found = sp.random(rows, 12, 0.3, "csr", random_state=seed) * 3
    groups = sp.csr_matrix((rng.random(rows) + 1, (np.arange(rows), np.arange(rows) % 5)), shape=(rows, 12))
    return sp.csr_matrix(found + groups)


def small(**options):
    base = {"dim": 4, "hidden": (8,), "max_iterations": 4, "device": "cpu", "metric": "ndcg@5", "refine": False}
    return gt.TwoTower(**base | {"select": False} | options)


def recomputed(pairs, features, side, metric, **options):
    """The metric of a model fitted on the other entities, every step by public functions and plain loops."""
    P, Q, truth = unseen_rows(pairs, features, side, **options)
    return evaluate_embeddings(P, Q, sp.csr_matrix(truth), metrics=(metric,))[metric]


def recomputed_without(pairs, features, side, metric):
    """The same without each part of the held-out entities."""
    P, Q, truth = unseen_rows(pairs, features, side)
    if side == "left":
        P, truth = P[truth.any(1)], truth[truth.any(1)]
    of, found = deal(len(P) if side == "left" else len(Q), 0), []
    for part in range(of.max() + 1):
        kept = of != part
        p, q, t = (P[kept], Q, truth[kept]) if side == "left" else (P, Q[kept], truth[:, kept])
        found.append(evaluate_embeddings(p, q, sp.csr_matrix(t), metrics=(metric,))[metric])
    return found


def unseen_rows(pairs, features, side, draw=0, **options):
    """Embeddings of both sides, one of them of entities that the model has not seen, and the pairs between them."""
    split = held_out(gt.Interactions.from_matrix(pairs, same_entities=False), side, 0.25, seed=draw)
    kept = {"left": split.train.left_ids, "right": split.train.right_ids}
    inner = {f"{name}_features": rows[kept[name]] for name, rows in features.items()}
    model = small(**options).fit(split.train.matrix, **inner)
    new = split.held_out_users if side == "left" else split.held_out_items
    embedded = model.embed(**{f"{side}_features": features[side][new]})
    rows, columns = (new, kept["right"]) if side == "left" else (kept["left"], new)
    truth = np.array([[pairs[i, j] for j in columns] for i in rows])
    P, Q = (embedded, model.embed(side="right")) if side == "left" else (model.embed(side="left"), embedded)
    return P, Q, truth


SIDES = {
    "left": {"left": words(SHAPE[0])},
    "right": {"left": words(SHAPE[0]), "right": np.asarray(words(SHAPE[1], 1).toarray())},
}


@pytest.mark.filterwarnings("ignore:no iteration ranks the validation part better")
@pytest.mark.parametrize("side", SIDES)
def test_a_fit_stops_by_what_it_does_for_entities_it_has_not_seen(side):
    features = {f"{name}_features": rows for name, rows in SIDES[side].items()}
    model = small().fit(data(), **features, validation=0.25, validation_side=side)
    metrics = [record.metric for record in model.history_]
    assert len(set(metrics)) > 2
    for count in (1, len(metrics) - 1):
        plain = recomputed(data(), SIDES[side], side, "ndcg@5", max_iterations=count)
        assert metrics[count] == pytest.approx(plain, abs=1e-5)
    assert model.best_metric_ == max(metrics)
    whole = small().fit(data(), **features, validation=0.25, validation_side=side, refit=True)
    assert whole.best_metric_ == model.best_metric_
    assert (len(whole.left_), len(whole.right_)) == SHAPE
    again = small(max_iterations=max(1, int(np.argmax(metrics)))).fit(data(), **features)
    assert np.array_equal(whole.embed(side="left"), again.embed(side="left"))


@pytest.mark.parametrize("side", SIDES)
def test_trials_are_ranked_on_entities_they_have_not_seen(side):
    pytest.importorskip("optuna", reason="tuning needs optuna")
    features = {f"{name}_features": rows for name, rows in SIDES[side].items()}
    options = dict(trials=6, metric="ndcg@5", validation=0.25, validation_side=side, space={"l2": True, "dim": [4, 6]})
    model = small(metric="recall@20")
    found = model.tune(data(), **options, **features)
    first = found.trials[0]
    assert first.settings["dim"] == 4
    last = [recomputed(data(), SIDES[side], side, "ndcg@5", max_iterations=count) for count in (2, 3, 4)]
    assert first.value == pytest.approx(np.mean(last), abs=1e-5)
    assert first.iteration == 4  # an early point that is best by chance does not count
    for number in range(1, 4):  # l2 twice as large and half of it, another dim: each a change of the best so far
        before, now = pick(found.trials[:number]).settings, found.trials[number].settings
        assert now["l2"] != before["l2"] if number < 3 else now == {**before, "dim": 6}
    assert found.best.value >= first.value
    plain = recomputed(data(), SIDES[side], side, "ndcg@5", **found.arguments)
    assert found.best.curve[-1] == pytest.approx(plain, abs=1e-5)
    assert (len(model.left_), len(model.right_)) == SHAPE
    assert found.best.iteration == model.history_[-1].iteration
    assert "max_iterations" not in found.arguments  # those of the model
    again = small(metric="recall@20").tune(data(), **options, **features, refit=False)
    assert [(t.settings, t.curve) for t in again.trials] == [(t.settings, t.curve) for t in found.trials]
    other = small().tune(data(), **options | {"trials": 1}, **features, refit=False, seed=1)
    assert other.trials[0].curve != first.curve
    assert first.without == pytest.approx(recomputed_without(data(), SIDES[side], side, "ndcg@5"), abs=1e-5)
    count = found.data[f"held_out_{side}"]
    assert count == round(0.25 * SHAPE[("left", "right").index(side)])
    assert f"{count} {side} entities were held out with all their pairs" in found.markdown()


def from_a_bad_start(**more):
    """A search whose first trial learns next to nothing, so that others are better whoever is held out."""
    model = small(l2=500.0)
    options = dict(trials=6, metric="ndcg@5", validation=0.25, validation_side="left", left_features=words(80))
    return model, model.tune(data(), **options, space={"l2": [0.05, 500.0], "right_power": True}, **more)


def test_what_wins_is_confirmed_on_other_entities_from_another_start(tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="tuning needs optuna")
    model, found = from_a_bad_start(storage=tmp_path / "log")
    assert found.winner != 0
    again = found.confirmations
    assert [trial.number for trial in again] == [0, found.winner]
    for trial in again:
        options = dict(l2=trial.settings["l2"], right_weights=f"degree^{trial.settings['right_power']}", seed=1)
        P, Q, truth = unseen_rows(data(), SIDES["left"], "left", draw=1, **options)
        plain = evaluate_embeddings(P, Q, sp.csr_matrix(truth), metrics=("ndcg@5",))["ndcg@5"]
        assert trial.curve[-1] == pytest.approx(plain, abs=1e-5)
    assert found.verdict.endswith(f", and {gain(again[1], again[0])} on other held-out data")
    assert model.l2 == found.best.settings["l2"] < 500
    for trial in again:
        assert f"| {trial.number} | {trial.value:.4f} | on other held-out data | 4 |" in found.markdown()
    monkeypatch.setattr("gramtower.experiments.tuning.search.run_trial", None)  # all of it is in the log
    _, resumed = from_a_bad_start(storage=tmp_path / "log")
    assert resumed.confirmations == again
    assert resumed.verdict == found.verdict


@pytest.mark.parametrize(
    ("other", "but"),
    [(Gain(-0.01, 0.005, 0.5), "-2.0 % ± 1.0 % on other held-out data"), (None, "it could not be confirmed")],
)
def test_what_is_not_confirmed_does_not_replace_the_defaults(other, but, monkeypatch):
    pytest.importorskip("optuna", reason="tuning needs optuna")
    from gramtower.experiments.tuning import search as searching

    asked = []
    monkeypatch.setattr(searching._Run, "_gain_on_others", lambda run, tried: asked.append(tried.number) or other)
    model, found = from_a_bad_start()
    best = pick(found.trials)
    assert 1 <= len(set(asked)) == len(asked) <= 3
    assert asked[0] == best.number != 0 == found.winner
    assert found.arguments == {}
    assert model.l2 == 500
    assert found.verdict.startswith(f"the defaults stay: trial {best.number} gains ")
    assert found.verdict.endswith(f", but {but}")


def test_features_are_what_unseen_entities_are_known_by(tmp_path):
    pytest.importorskip("optuna", reason="tuning needs optuna")
    options = dict(trials=1, validation_side="left", left_features=words(80), refit=False)
    with pytest.raises(ValueError, match=r"space.*features.*'ids'.*'given'"):
        small().tune(data(), space={"features": "ids", "l2": True}, **options)
    found = gt.TwoTower(max_iterations=2, device="cpu").tune(data(), **options, storage=tmp_path / "log")
    names = {"omega", "l2", "penalty", "frequency_power", "left_power", "right_power", "dim", "hidden", "activation"}
    assert names | {"normalize"} <= set(found.space)
    assert found.features == found.space["features"] == "given"
    with pytest.raises(ValueError, match="other"):
        gt.TwoTower(max_iterations=2, device="cpu").tune(
            data(), trials=1, left_features=words(80), refit=False, storage=tmp_path / "log"
        )


def test_held_out_entities_are_no_rows_and_the_scaling_does_not_know_them():
    pairs, features = data(), words(80)
    pairs = sp.csr_matrix(sp.vstack([pairs, sp.csr_matrix((1, 50))]))  # one without pairs, which is never drawn
    features = sp.csr_matrix(sp.vstack([features, words(1)]))
    settings = ModelSettings(device="cpu")
    unseen = hold_out_entities(settings, pairs, (["id", features], None), 0.25, "left", 3)
    assert unseen.count == 20
    assert unseen.train.shape[0] == 60
    matrix = unseen.train.matrix
    assert np.diff(matrix.indptr).min() > 0
    assert np.bincount(matrix.indices, minlength=matrix.shape[1]).min() > 0
    inner = prepare_data(settings, unseen.train, *unseen.features)
    plain = prepare_data(settings, pairs[unseen.train.left_ids][:, unseen.train.right_ids],
                         ["id", features[unseen.train.left_ids]])  # fmt: skip
    assert np.array_equal(inner.inputs[0].parts[1].scaling.factor, plain.inputs[0].parts[1].scaling.factor)
    held = np.setdiff1d(np.arange(80), unseen.train.left_ids)
    assert (unseen.described[0] != features[held]).nnz == 0
    rows = unseen.validator("map@5", inner).rows
    assert (rows.rows, rows.width) == (20, 60 + 12)  # no id, and features
    assert rows.arrays[1].min() >= 60


def test_tables_are_joined_by_id():
    pytest.importorskip("polars", reason="tables need polars")
    from gramtower.data.tables import FeatureTable

    pairs = gt.Interactions.from_matrix(data(), [f"u{i}" for i in range(80)], [f"i{j}" for j in range(50)])
    order = np.random.default_rng(0).permutation(80)
    columns = {"user": [f"u{i}" for i in order], "group": [str(i % 5) for i in order], "age": [float(i) for i in order]}
    table = FeatureTable(columns, id="user", categorical=["group"], numeric=["age"], strict=True)
    model = small().fit(pairs, left_features=["id", table], validation=0.25, validation_side="left")
    split = held_out(pairs, "left", 0.25, seed=0)
    plain = small(max_iterations=1).fit(split.train, left_features=["id", FeatureTable(
        columns, id="user", categorical=["group"], numeric=["age"])])  # fmt: skip
    found = plain.evaluate(split.test, metrics=("ndcg@5",), left_features=columns)["ndcg@5"]
    assert model.history_[1].metric == pytest.approx(found, abs=1e-5)
    assert not set(model.left_.ids) & set(split.test.left_ids)
    short = FeatureTable({"user": ["u1"], "age": [1.0]}, id="user", numeric=["age"], strict=True)
    with pytest.raises(ValueError, match="79 without features"):
        small().fit(pairs, left_features=short, validation=0.25, validation_side="left")


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_one_set_the_held_out_entities_are_on_no_side(side):
    rng = np.random.default_rng(0)
    links = sp.csr_matrix(np.triu(rng.random((40, 40)) < 0.2, 1))
    pairs = gt.Interactions.from_matrix((links + links.T).astype(np.float32), same_entities=True)
    unseen = hold_out_entities(ModelSettings(), pairs, (words(40), words(40)), 0.25, side, 0)
    split = held_out(pairs, side, 0.25, seed=0)
    gone = split.held_out_users if side == "left" else split.held_out_items
    assert unseen.count == len(gone) == 10
    assert not set(gone) & {*unseen.train.left_ids, *unseen.train.right_ids}
    other = unseen.train.right_ids if side == "left" else unseen.train.left_ids
    dense = pairs.matrix.toarray()
    expected = dense[np.ix_(gone, other)] if side == "left" else dense[np.ix_(other, gone)]
    assert np.array_equal(unseen.truth.toarray(), expected)


def test_a_checkpoint_of_another_validation_is_refused(tmp_path):
    path = tmp_path / "fit.checkpoint"
    options = dict(left_features=words(80), validation_side="left", checkpoint=path)
    small(max_iterations=1).fit(data(), validation=0.25, **options)
    longer = small().fit(data(), validation=0.25, **options)
    assert longer.history_[-1].iteration == 4
    split = held_out(gt.Interactions.from_matrix(data(), same_entities=False), "left", 0.25, seed=0)
    changed = words(80).tolil()
    changed[split.held_out_users[0]] = 1.0  # nothing that is learned from
    with pytest.raises(ValueError, match="validation"):
        small().fit(data(), validation=0.25, **options | {"left_features": sp.csr_matrix(changed)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(validation_side="up"), r"validation_side.*'up'"),
        (dict(validation_side="left"), r"validation_side.*'left'.*left_features.*left_features"),
        (dict(validation_side="left", left_features="history"), "got 'left' with left_features of history"),
        (dict(validation_side="right", left_features=words(80)), "got 'right' with right_features of id"),
        (dict(validation_side="left", left_features=words(79)), r"left_features.*csr_matrix.*\(79, 12\)"),
        (dict(validation_side="left", left_features=words(80), validation=1.0), r"validation.*1.0"),
        (dict(validation_side="left", left_features=words(80), validation=data()), r"validation.*csr_matrix"),
        (dict(validation_side="left", left_features=words(80), validation=None), r"validation.*None"),
    ],
)
def test_bad_input_is_refused(options, message):
    for method in ("fit", "tune"):
        given = {"validation": 0.25, **options}
        with pytest.raises(ValueError, match=message):
            getattr(small(), method)(data(), **given)


def test_weights_of_single_entities_do_not_go_with_it():
    with pytest.raises(ValueError, match=r"validation_side.*'left'.*right_weights"):
        small(right_weights=np.ones(50)).fit(data(), words(80), validation=0.25, validation_side="left")


def test_metrics_of_popularity_count_the_training_pairs():
    model = small(metric="psp@5").fit(data(), words(80), validation=0.25, validation_side="left")
    split = held_out(gt.Interactions.from_matrix(data(), same_entities=False), "left", 0.25, seed=0)
    plain = small(max_iterations=2).fit(split.train.matrix, words(80)[split.train.left_ids])
    truth = data()[split.held_out_users][:, split.train.right_ids]
    new = plain.embed(left_features=words(80)[split.held_out_users])
    found = evaluate_embeddings(
        new, plain.embed(side="right"), truth, metrics=("psp@5",), popularity=split.train.matrix
    )["psp@5"]
    assert model.history_[2].metric == pytest.approx(found, abs=1e-5)
    right = small(metric="psp@5", max_iterations=1).fit(
        data(), right_features=words(50), validation=0.25, validation_side="right"
    )
    assert json.dumps(right.best_metric_)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_frame_without_ids_is_refused_rather_than_taken_for_rows_in_the_order_of_entities(side):
    pd = pytest.importorskip("pandas")
    features = {"left_features": words(SHAPE[0]), "right_features": words(SHAPE[1], 1)}
    name = f"{side}_features"
    features[name] = pd.DataFrame(features[name].toarray())
    message = rf"{name}: got a DataFrame of 0, 1, 2.*column of ids.*FeatureTable"
    with pytest.raises(ValueError, match=message):
        small().fit(data(), **features, validation=0.25, validation_side="left")

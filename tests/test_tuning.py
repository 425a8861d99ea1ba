"""Tuning on small data with planted groups: what it finds, how it stops, goes on and reports."""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower._util.checks import parse_hidden
from gramtower.data.datasets import planted_pairs
from gramtower.experiments.tuning import trial as curves
from gramtower.experiments.tuning.report import read_search
from gramtower.experiments.tuning.study import gain, judge, pick
from gramtower.experiments.tuning.trial import changed_arguments, make_parts, start_values
from gramtower.metrics.embedding_metrics import deal
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem
from gramtower.training.checkpoint import locked

pytest.importorskip("optuna", reason="tuning needs optuna")

SPACE = {"omega": [1e-4, 4.0], "penalty": [1e-4, 1.0], "dim": [2, 6]}


def data():
    return planted_pairs(m=60, n=40, observed=700)


def small(**options):
    return gt.TwoTower(**{"hidden": (), "max_iterations": 6, "device": "cpu", "select": False, **options})


def settings_and_values(search):
    return [(t.settings, t.value, t.curve) for t in search.trials]


@pytest.fixture(scope="module")
def search():
    return small().tune(data(), trials=12, metric="ndcg@10", space=SPACE, refit=False)


def test_the_first_trial_is_at_the_defaults(search):
    parts = make_parts(data(), 0.1, (None, None), 0, "cpu")
    model = small(metric="ndcg@10", patience=5, dim=2).fit(parts.train, validation=parts.held_out)
    assert search.trials[0].value == pytest.approx(model.best_metric_, abs=1e-6)
    assert search.trials[0].settings["omega"] == pytest.approx(model.omega_)


def test_the_best_is_at_least_the_default_and_is_what_the_arguments_say(search):
    assert search.best.value >= search.trials[0].value
    assert len(search.trials) == 12
    start = search.trials[0].settings
    changed = {name for name, value in search.best.settings.items() if value != start[name] or name == "dim"}
    assert changed - {"penalty"} == set(search.arguments) - {"max_iterations", "embedding_l2"}
    assert all(search.arguments[name] == search.best.settings[name] for name in changed - {"penalty"})
    assert "penalty" not in changed or "embedding_l2" in search.arguments  # also if the path chose it
    assert search.arguments["max_iterations"] == max(1, search.best.iteration)
    parts = make_parts(data(), 0.1, (None, None), 0, "cpu")
    again = small(**search.arguments).fit(parts.train)
    found = again.evaluate(parts.held_out, metrics=("ndcg@10",))["ndcg@10"]
    assert found == pytest.approx(search.best.value, abs=1e-5)


def test_the_same_seed_gives_the_same_search(search):
    again = small().tune(data(), trials=12, metric="ndcg@10", space=SPACE, refit=False)
    assert settings_and_values(again) == settings_and_values(search)
    other = small().tune(data(), trials=12, metric="ndcg@10", space=SPACE, refit=False, seed=1)
    assert other.trials[-1].settings != search.trials[-1].settings


def test_a_stopped_search_goes_on_as_if_it_had_not_stopped(search, tmp_path):
    options = dict(metric="ndcg@10", space=SPACE, refit=False, storage=tmp_path / "log")
    small().tune(data(), trials=5, **options)
    resumed = small().tune(data(), trials=12, **options)
    assert settings_and_values(resumed) == settings_and_values(search)


@pytest.mark.parametrize("moment", [19, 20, 21, 22, 23])
def test_an_interrupted_trial_is_tried_again(moment, search, tmp_path, monkeypatch):
    from gramtower.experiments.tuning import trial

    options = dict(metric="ndcg@10", space=SPACE, storage=tmp_path / "log")
    real, looks = trial.RankingValidator, []

    class Impatient(real):
        def __call__(self, point):
            looks.append(point)
            if len(looks) == moment:
                raise KeyboardInterrupt
            return super().__call__(point)

    monkeypatch.setattr(trial, "RankingValidator", Impatient)
    model = small()
    stopped = model.tune(data(), trials=12, **options)
    assert 0 < len(stopped.trials) < 12
    assert not hasattr(model, "left_")  # who stops a search does not want to wait for a fit
    resumed = small().tune(data(), trials=12, **options)
    assert settings_and_values(resumed) == settings_and_values(search)


def test_what_a_kill_left_does_not_stop_a_search_and_another_run_does(search, tmp_path):
    path = tmp_path / "log"
    options = dict(metric="ndcg@10", space=SPACE, refit=False, storage=path)
    small().tune(data(), trials=11, **options)
    (path / "runs/.gramtower-abc.partial").mkdir()
    (path / ".gramtower.lock").write_text("of a process that was killed")
    assert settings_and_values(small().tune(data(), trials=12, **options)) == settings_and_values(search)
    assert not list((path / "runs").glob(".gramtower*"))
    with locked(path), pytest.raises(ValueError, match=r"^storage: .* another run"):
        small().tune(data(), trials=13, **options)


def test_a_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "log.journal"  # of version 0.2
    path.write_text('{"op_code":')
    with pytest.raises(ValueError, match=r"^storage: .*log\.journal.*earlier versions"):
        small().tune(data(), trials=1, space=SPACE, storage=path)
    assert path.read_text() == '{"op_code":'


@pytest.mark.parametrize(
    ("name", "part"),
    [("search", '"metric"'), ("runs/trial-0", '"curve"'), ("runs/trial-0", "}"), ("runs/trial-0", "1")],
)
def test_a_damaged_log_is_refused_by_name(name, part, tmp_path):
    options = dict(trials=1, space=SPACE, refit=False, storage=tmp_path / "log")
    small().tune(data(), **options)
    path = tmp_path / f"log/{name}.json"
    text = path.read_text()
    assert part in text
    path.write_text(text.replace(part, "", 1))
    with pytest.raises(ValueError, match=rf"^storage: .*{name}\.json is damaged"):
        small().tune(data(), **options)


def test_a_log_of_another_search_is_refused(tmp_path):
    options = dict(trials=1, space=SPACE, refit=False, storage=tmp_path / "log")
    small().tune(data(), **options)
    with pytest.raises(ValueError, match=r"other.* metric"):
        small().tune(data(), **options, metric="map@5")
    with pytest.raises(ValueError, match=r"other.* pairs"):
        small().tune(planted_pairs(m=61, n=40, observed=700), **options)
    rows = np.random.default_rng(0).normal(size=(data().shape[1], 3))
    with pytest.raises(ValueError, match=r"another right_features"):
        small().tune(data(), **options, right_features=rows)


def test_a_log_of_other_labels_or_rows_of_features_is_refused(tmp_path):
    options = dict(trials=1, space={"omega": True}, refit=False, storage=tmp_path / "log")
    rows, pairs = np.random.default_rng(0).normal(size=(data().shape[1], 3)), data()
    model = small(loss="squared")
    model.tune(pairs, **options, right_features=rows)
    model.tune(pairs, **options, right_features=rows)  # goes on
    with pytest.raises(ValueError, match=r"another right_features"):
        model.tune(pairs, **options, right_features=rows[::-1].copy())
    with pytest.raises(ValueError, match=r"other.* labels"):
        model.tune(2 * pairs, **options, right_features=rows)


def test_a_log_is_of_all_weights_and_of_a_loss_by_its_name(tmp_path):
    """Text of long arrays leaves out their middle, that of functions says where they are in memory."""
    pairs, options = planted_pairs(m=1200, n=40, observed=6000), dict(trials=1, space={"omega": True}, refit=False)
    weights = np.ones(1200)
    small(left_weights=weights).tune(pairs, **options, storage=tmp_path / "weights")
    small(left_weights=list(weights)).tune(pairs, **options, storage=tmp_path / "weights")  # goes on
    weights[600] = 2.0
    with pytest.raises(ValueError, match=r"other.* model"):
        small(left_weights=weights).tune(pairs, **options, storage=tmp_path / "weights")

    def own(name):
        difference = lambda y, s: s - y  # noqa: E731
        return gt.Loss(lambda y, s: (s - y) ** 2 / 2, difference, lambda y, s: torch.ones_like(s), name=name)

    small(loss=own("mine")).tune(data(), **options, storage=tmp_path / "loss")
    small(loss=own("mine")).tune(data(), **options, storage=tmp_path / "loss")
    with pytest.raises(ValueError, match=r"other.* model"):
        small(loss=own("other")).tune(data(), **options, storage=tmp_path / "loss")


def test_refitting_leaves_a_model_of_all_pairs_with_the_settings():
    pairs = data()
    model = small()
    found = model.tune(pairs, trials=3, space=SPACE)
    assert {"dim", "max_iterations"} <= set(found.arguments)
    assert model.get_params() == small(**found.arguments).get_params()
    assert model.seen_.nnz == pairs.nnz
    assert model.recommend([0], k=3)[0].shape == (1, 3)


def test_defaults_that_stay_are_left_to_their_rules():
    """They go by the size of the data, and all pairs are more than the part that trials learn from."""
    model = small(frequency_power=0.5)
    found = model.tune(data(), trials=1, space={"omega": True, "penalty": True, "right_power": True, "loss": True})
    assert set(found.arguments) == {"max_iterations"}
    assert found.verdict == "the defaults stay: no trial was better"
    plain = small(frequency_power=0.5, max_iterations=found.best.iteration).fit(data())
    assert model.omega_ == plain.omega_
    assert np.array_equal(model.embed(side="left"), plain.embed(side="left"))


@pytest.mark.parametrize("metric", ["ndcg@10", "coverage@5"])
def test_only_what_is_better_beyond_noise_replaces_the_defaults(metric, search):
    if metric != search.metric:
        search = small().tune(data(), trials=4, metric=metric, space=SPACE, refit=False)
    first, best = search.trials[0], pick(search.trials)
    assert bool(first.without) == (metric == "ndcg@10")  # coverage is of no single user
    judged = judge(search.trials)
    if first.without and judged.winner is not first:  # the gain on one draw of held-out pairs may be chance
        again = {t.number: t for t in search.confirmations}
        assert {0, judged.winner.number} <= set(again)
        likely = gain(again[judged.winner.number], again[0]).likely
        assert (search.winner == judged.winner.number) == likely
        assert search.verdict.endswith(f"{gain(again[judged.winner.number], again[0])} on other held-out data")
    else:
        assert (search.winner, search.verdict) == (judged.winner.number, judged.text)
    assert search.verdict[0].upper() + search.verdict[1:] + "." in search.markdown()
    assert f"| {best.number} | {best.value:.4f} |" in search.markdown()  # whoever wants it finds it
    for t in search.trials:
        assert t.pruned or bool(t.without) == (bool(first.without) and (t is first or t.value > first.value))


def test_the_metric_without_each_part_of_the_users_is_that_of_the_others(search):
    parts = make_parts(data(), 0.1, (None, None), 0, "cpu")
    first = search.trials[0]
    model = small(dim=2, max_iterations=first.iteration).fit(parts.train)
    users = np.flatnonzero(np.diff(parts.held_out.indptr))
    of = deal(len(users), 0)
    for part, without in enumerate(first.without):
        kept = sp.diags(np.isin(np.arange(60), users[of != part]).astype(np.float32)) @ parts.held_out
        kept.eliminate_zeros()
        assert model.evaluate(kept, metrics=("ndcg@10",))["ndcg@10"] == pytest.approx(without, abs=1e-5)
    assert len(first.without) == 20


def test_a_report_has_several_metrics_of_the_winner_and_of_the_models_own_settings(search, tmp_path):
    """A gain by the metric that is maximised can be a loss by another."""
    parts = make_parts(data(), 0.1, (None, None), 0, "cpu")
    first, best = search.trials[0], pick(search.trials)
    assert best is not first
    search = replace(search, winner=best.number)
    for trial in (first, best):
        assert set(trial.metrics) == {"ndcg@10", "map@5", "recall@20", "ndcg@20"}
        assert trial.metrics["ndcg@10"] == pytest.approx(trial.value, abs=1e-6)
    model = small(dim=2, max_iterations=first.iteration).fit(parts.train)
    expected = model.evaluate(parts.held_out, metrics=tuple(first.metrics))
    assert first.metrics == pytest.approx(dict(expected), abs=1e-5)
    heads, rows = search.metrics_table()
    assert heads[1:] == list(best.metrics)
    assert [len(row) for row in rows] == [5, 5, 5]
    assert float(rows[1][2]) == pytest.approx(best.metrics["map@5"], abs=1e-4)
    change = best.metrics["map@5"] / first.metrics["map@5"] - 1
    assert float(rows[2][2].removesuffix(" %")) == pytest.approx(100 * change, abs=0.06)
    search.write(tmp_path)
    read = read_search(tmp_path)
    assert read.metrics_table() == (heads, rows)
    assert search.caution in read.markdown()
    assert search.caution in search._repr_html_()
    for trial in read.trials:
        trial.metrics.clear()  # as in a report of an earlier version
    assert read.metrics_table() == ([], [])
    assert read.caution in read.markdown()


def test_what_the_model_was_given_is_not_searched():
    found = small(omega=0.1, left_weights="degree^0.5").tune(data(), trials=1, refit=False)
    assert not {"omega", "left_power", "hidden"} & set(found.space)
    assert {"penalty", "right_power", "dim", "l2", "loss"} <= set(found.space)
    named = small(omega=0.1).tune(data(), trials=1, space={"omega": [0.05, 0.2]}, refit=False)
    assert named.trials[0].settings == {"omega": pytest.approx(0.1)}


def test_powers_of_weights_start_at_the_models_own_and_zero_is_kept_apart_from_the_default():
    space = {"left_power": True, "right_power": True}
    found = small(left_weights="degree^0.3").tune(data(), trials=1, space=space, refit=False)
    assert found.trials[0].settings == {"left_power": 0.3, "right_power": 0.1}
    none = small().tune(data(), trials=1, space={"right_power": 0.0, "omega": True}, refit=False)
    given = small(right_weights=None).tune(data(), trials=1, space={"omega": True}, refit=False)
    assert none.best.value == given.best.value
    for search in (none, given):  # a config file without the key would mean the default
        text = tomllib.loads(search.config())["model"]["right-weights"]
        assert gt.Problem(data(), right_weights=text).weight_arrays[1] is None


def test_weights_that_are_arrays_are_not_in_the_config_which_says_so():
    search = small(right_weights=list(np.ones(40))).tune(data(), trials=1, space={"omega": True}, refit=False)
    assert "right_weights were arrays" in search.config().splitlines()[0]
    assert tomllib.loads(search.config())["model"]["right-weights"] == "degree^0"


def test_importances_need_no_other_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    found = small().tune(data(), trials=5, metric="ndcg@10", space={"omega": True, "l2": True}, refit=False)
    assert found.importance.keys() == {"omega", "l2"}


def test_a_solver_is_in_the_config_by_name_and_one_of_ones_own_is_said(tmp_path):
    class Own(gt.optim.GradientDescent):
        """A method of the user's own."""

    options = dict(trials=1, space={"omega": True}, refit=False)
    search = small(optimizer=gt.optim.Newton(cg_max_steps=7)).tune(data(), **options)
    search.write(tmp_path)
    for found in (search, read_search(tmp_path)):
        train = tomllib.loads(found.config())["train"]
        assert (train["optimizer"], train["option"]["cg_max_steps"]) == ("newton", 7)
    sampled = tomllib.loads(small(optimizer=gt.optim.Sogram(ratio=0.5)).tune(data(), **options).config())["train"]
    assert sampled["option"]["ratio"] == 0.5
    assert "step_size" not in sampled["option"]  # None, for which TOML has no word
    text = small(optimizer=Own()).tune(data(), **options).config()
    assert "optimizer of your own, which this file cannot hold" in text.splitlines()[0]
    assert "optimizer" not in tomllib.loads(text)["train"]


def test_what_follows_a_setting_that_was_changed_is_not_left_to_the_rules():
    parts, model = make_parts(data(), 0.1, (None, None), 0, "cpu"), small()
    start = start_values(model, parts, prepare_data(model, parts.train, None, None))
    settings = {name: start[name] for name in ("dim", "hidden", "l2")}
    assert changed_arguments(settings, model, parts.matrix, start) == {}
    wider = changed_arguments({**settings, "hidden": "64"}, model, parts.matrix, start)  # dim would be half of it
    assert wider == {"hidden": parse_hidden("64"), "dim": start["dim"]}
    seen = changed_arguments({**settings, "features": "history"}, model, parts.matrix, {**start, "features": "ids"})
    assert seen.keys() >= {"dim", "hidden", "l2"}


def test_a_penalty_that_is_not_searched_keeps_its_total_weight_for_another_power():
    model, parts = small(), make_parts(data(), 0.1, (None, None), 0, "cpu")
    prepared = prepare_data(model, parts.train, None, None)
    start, problem = start_values(model, parts, prepared), make_problem(model, prepared)
    found = changed_arguments({"frequency_power": 0.6}, model, parts.matrix, start)["embedding_l2"]
    (m, n), rows, columns = parts.matrix.shape, *(np.asarray(parts.matrix.sum(axis)).ravel() for axis in (1, 0))
    counts = np.concatenate([rows + problem.omega * n, columns + problem.omega * m])
    power = model.frequency_power
    assert found * (counts**0.6).sum() == pytest.approx(problem.embedding_l2 * (counts**power).sum())


def test_the_time_limit_ends_a_search():
    found = small().tune(data(), trials=10_000, time_limit=0.5, space=SPACE, refit=False)
    assert 1 <= len(found.trials) < 200


def test_a_trial_that_the_time_limit_cuts_is_tried_again(search, tmp_path, monkeypatch):
    from gramtower.experiments.tuning import search as searching
    from gramtower.experiments.tuning import trial

    real, looks = trial.RankingValidator, []

    class Counting(real):
        def __call__(self, point):
            looks.append(point)
            return super().__call__(point)

    clock = SimpleNamespace(perf_counter=lambda: 0.0 if len(looks) < 20 else 100.0)  # time is up at the 20th look
    with monkeypatch.context() as patched:
        patched.setattr(trial, "RankingValidator", Counting)
        patched.setattr(trial, "time", clock)
        patched.setattr(searching, "time", clock)
        options = dict(metric="ndcg@10", space=SPACE, refit=False, storage=tmp_path / "log")
        stopped = small().tune(data(), trials=12, time_limit=50.0, **options)
    assert len(looks) in (20, 21)  # a trial is not left before its first iteration
    assert 0 < len(stopped.trials) < 12
    resumed = small().tune(data(), trials=12, **options)
    assert settings_and_values(resumed) == settings_and_values(search)


class Clock:
    """A clock that moves on by one second with each look at the validation part."""

    def __init__(self, monkeypatch):
        from gramtower.experiments.tuning import search as searching
        from gramtower.experiments.tuning import trial

        clock, real, self.now = self, trial.RankingValidator, 0.0

        class Slow(real):
            def __call__(self, point):
                clock.now += 1.0
                return super().__call__(point)

        monkeypatch.setattr(trial, "RankingValidator", Slow)
        for module in (trial, searching):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_the_defaults_are_trained_in_full_whatever_the_limit(monkeypatch):
    clock = Clock(monkeypatch)
    found = small(patience=None).tune(data(), trials=9, time_limit=3.0, space=SPACE, refit=False)
    assert [len(t.curve) - 1 for t in found.trials] == [6]
    assert clock.now == 7.0


@pytest.mark.parametrize("limit", [45.0, 60.0, 75.0])
def test_a_search_uses_its_time_and_ends_within_the_limit(limit, monkeypatch):
    clock = Clock(monkeypatch)
    found = small(dim=4).tune(data(), trials=99, time_limit=limit, space={"penalty": [0.01, 0.5]}, refit=False)
    assert len(found.trials) > 3
    kept_back = 2 * len(found.trials[0].curve)  # for the winner to be confirmed
    assert limit - kept_back <= clock.now <= limit + 1  # whoever is late is left after the iteration


def test_larger_towers_are_tried_only_while_there_is_time(monkeypatch):
    clock = Clock(monkeypatch)
    options = dict(trials=12, metric="ndcg@10", space={"dim": [2, 4], "l2": True}, refit=False)
    short = small(dim=2).tune(data(), time_limit=7 * 12.5, **options)
    assert {t.settings["dim"] for t in short.trials} == {2}
    assert len(short.trials) > 8
    assert len({t.settings["l2"] for t in short.trials}) > 6  # other choices were made
    clock.now = 0.0
    assert {t.settings["dim"] for t in small(dim=2).tune(data(), **options).trials} == {2, 4}


@pytest.mark.parametrize(("choice", "kind"), [("history", "history"), ("ids+history", "id + history")])
def test_history_features_can_be_found(choice, kind):
    model = small()
    found = model.tune(data(), trials=2, space={"features": choice, "dim": [2, 4]})
    assert found.features == choice
    assert model.left_.inputs.kind == kind
    config = tomllib.loads(found.config())
    assert config["model"]["history"] is True
    assert config["features"]["left-identity"] is ("id" in kind)


def test_given_features_are_used_and_can_be_left_out():
    groups = np.random.default_rng(0).random((40, 5)).astype(np.float32)
    found = small().tune(data(), trials=6, right_features=groups, space={"features": True, "dim": [2, 4]}, refit=False)
    assert found.trials[0].settings["features"] == "given"
    assert {t.settings["features"] for t in found.trials} == {"given", "ids"}


def test_reports_hold_every_trial_and_a_config(search, tmp_path):
    search.write(tmp_path, {"data": {"path": "pairs.csv"}})
    content = json.loads((tmp_path / "report.json").read_text())
    assert [t["value"] for t in content["trials"]] == [t.value for t in search.trials]
    assert content["winner"] == search.best.number
    table = (tmp_path / "report.md").read_text()
    assert all(f"\n| {t.number} | {t.value:.4f} |" in table for t in search.trials)
    assert set(search.importance) == set(SPACE)
    assert sum(search.importance.values()) == pytest.approx(1.0)
    config = tomllib.loads((tmp_path / "config.toml").read_text())
    assert config["data"]["path"] == "pairs.csv"
    assert config["model"]["dim"] == search.arguments["dim"] == search.best.settings["dim"]
    assert config["model"].get("omega") == search.arguments.get("omega")
    assert config["model"]["hidden"] == []
    assert config["train"]["max-iterations"] == search.arguments["max_iterations"]


def test_the_winner_is_what_its_arguments_give_again():
    pairs = planted_pairs(m=300, n=100, observed=5000, groups=8)
    found = small(dim=1).tune(pairs, trials=6, metric="ndcg@10", space={"dim": [1, 8]}, refit=False)
    assert found.winner > 0
    parts = make_parts(pairs, 0.1, (None, None), 0, "cpu")
    again = small(**found.arguments).fit(parts.train)
    assert again.evaluate(parts.held_out, metrics=("ndcg@10",))["ndcg@10"] == pytest.approx(found.best.value, abs=1e-5)


def test_reports_of_searches_with_warm_starts_are_read(search, tmp_path):
    search.write(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    content["trials"][3] |= {"warm_from": 1, "pruned": True}
    content["confirmations"] = [content["trials"][2] | {"warm_from": 0, "confirmed": 0.25}]
    (tmp_path / "report.json").write_text(json.dumps(content))
    found = read_search(tmp_path)
    assert found.trials[3].note == "warm from 1, given up"
    assert "| cold start |" in found.markdown()


def test_settings_that_come_to_the_same_are_trained_once(monkeypatch):
    from gramtower.experiments.tuning import search as searching

    real, trained = searching.run_trial, []

    def counted(estimator, settings, *arguments, **options):
        trained.append((settings["hidden"], settings["activation"]))
        return real(estimator, settings, *arguments, **options)

    monkeypatch.setattr(searching, "run_trial", counted)
    space = {"hidden": ["none", "4"], "activation": ["relu", "tanh"]}
    found = gt.TwoTower(dim=2, max_iterations=2, device="cpu").tune(data(), trials=9, space=space, refit=False)
    assert len(found.trials) == 9
    assert sorted(trained) == [("4", "relu"), ("4", "tanh"), ("none", "relu")]
    for trial in found.trials:
        first = found.trials[trial.number if trial.same_as is None else trial.same_as]
        assert (trial.value, trial.curve, first.same_as) == (first.value, first.curve, None)
        if trial.same_as is not None:
            assert trial.seconds == 0
            assert f"| 0.0 | same as {first.number} |" in found.markdown()
    assert found.best.same_as is None


def test_the_activation_of_towers_without_hidden_layers_is_not_searched():
    features = sp.random(60, 8, density=0.3, format="csr", random_state=0)
    options = dict(trials=1, left_features=features, refit=False)
    assert "activation" not in small().tune(data(), **options).space
    assert "relu | leaky_relu(0.35) | gelu" in small(hidden=(4,)).tune(data(), **options).space["activation"]


def test_a_failing_setting_is_left_out_and_failing_defaults_are_an_error(tmp_path, monkeypatch):
    from gramtower.experiments.tuning import search as searching

    real = searching.run_trial

    def limited(estimator, settings, *arguments, **options):
        if settings["dim"] == 6:
            raise RuntimeError("out of memory")
        return real(estimator, settings, *arguments, **options)

    monkeypatch.setattr(searching, "run_trial", limited)
    found = small().tune(data(), trials=8, space=SPACE, refit=False)
    assert 1 <= len(found.trials) < 8
    assert {t.settings["dim"] for t in found.trials} == {2}
    with pytest.raises(RuntimeError, match="out of memory"):
        small().tune(data(), trials=8, space={"dim": [6, 2]}, refit=False, storage=tmp_path / "log")
    assert not list(tmp_path.iterdir())  # no log of a search without a trial


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(metric="recal@20"), r"metric.*'recal@20'"),
        (dict(metric=("recall@20", "map@5")), "metric"),
        (dict(trials=0), r"trials.*0"),
        (dict(time_limit=0.0), r"time_limit.*0.0"),
        (dict(validation=1.5), r"validation.*1.5"),
        (dict(validation=0.0), r"validation.*0.0"),
        (dict(space={}), "an empty space"),
        (dict(space={"penalty": True}), r"space.*penalty.*0"),
        (dict(seed=-1), r"seed.*-1"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(embedding_l2=0.0).tune(data(), **options)


def test_towers_of_ones_own_have_nothing_to_choose():
    with pytest.raises(ValueError, match=r"towers.*own"):
        small(towers=lambda problem: gt.mlp_towers(problem, (), 2)).tune(data())


def test_splits_that_leave_users_without_items_are_refused():
    lonely = sp.identity(6, format="csr", dtype=np.float32)
    with pytest.raises(ValueError, match="no user"):
        small().tune(lonely)
    held = sp.csr_matrix((np.ones(1, np.float32), ([5], [0])), shape=(6, 6))
    train = lonely.tolil()
    train[5, 5] = 0
    with pytest.raises(ValueError, match=r"1 users.*5"):
        small().tune(train.tocsr(), validation=held)


def test_every_user_keeps_a_pair_and_has_its_share_ranked():
    parts = make_parts(data(), 0.3, (None, None), 0, "cpu")
    before, kept, held = (np.diff(x.indptr) for x in (data(), parts.matrix, parts.held_out))
    assert (kept[before > 0] > 0).all()
    assert np.array_equal(kept + held, before)
    assert np.abs(held - 0.3 * before).max() <= 0.5 + 1e-9


def test_large_validation_parts_are_ranked_for_some_users(monkeypatch):
    from gramtower.experiments.tuning import trial

    monkeypatch.setitem(trial._SCORES, "cpu", 40 * 10)
    parts = make_parts(data(), 0.3, (None, None), 0, "cpu")
    assert parts.shown == 10 == (np.diff(parts.held_out.indptr) > 0).sum()
    assert parts.users > 10


def test_curves_that_cannot_reach_the_best_are_hopeless():
    rising = [0.0, 0.02, 0.04, 0.06, 0.08, 0.10, 0.12, 0.14]
    assert not curves.hopeless(rising, 10, 0.3)  # 0.14 + 10 · 0.02
    assert curves.hopeless(rising, 5, 0.3)
    assert not curves.hopeless(rising[:5], 1, 0.9)  # too early to say
    assert not curves.hopeless(rising, 0, None)
    falling = [0.0, 0.1, 0.31, 0.2, 0.18, 0.17, 0.16, 0.15]
    assert not curves.hopeless(falling, 5, 0.3)  # it has been above the best
    assert curves.hopeless(falling, 5, 0.3, rough=True)  # what counts is its end
    assert not curves.hopeless(falling, 5, 0.165, rough=True)  # the best of its last three


def test_what_counts_is_the_best_of_a_curve_and_the_mean_end_of_a_rough_one():
    assert curves.outcome([0.1, 0.3, 0.2]) == (0.3, 1)
    assert curves.outcome([0.1, 0.9, 0.2, 0.3, 0.4], rough=True) == (pytest.approx(0.3), 4)
    assert curves.outcome([0.1, 0.3], rough=True) == (0.3, 1)


def test_without_optuna_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r'pip install "gramtower\[tune\]"'):
        small().tune(data(), space=SPACE)


def test_lines_about_trials_are_logged_and_shown_in_a_terminal(capsys, caplog, monkeypatch):
    def lines(**options):
        small(dim=2).tune(data(), trials=2, space={"l2": True}, refit=False, **options)
        return capsys.readouterr().err.splitlines()

    assert lines() == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert [line.split()[:2] for line in lines()][:2] == [["trial", "0"], ["trial", "1"]]
    with caplog.at_level(logging.INFO, logger="gramtower.tune"):
        assert lines(verbose=False) == []
    assert len(caplog.records) >= 2

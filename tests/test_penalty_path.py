"""Penalties and shapes of towers that a fit chooses on held-out data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
import shared_fits
import torch
from processes import run_group

import gramtower as gt
from gramtower._util.checks import check_hidden
from gramtower.data.datasets import planted_pairs
from gramtower.data.splits import per_user
from gramtower.distributed.partition import write_partition
from gramtower.experiments import figures
from gramtower.experiments.tuning import search
from gramtower.model import penalty_path
from gramtower.model.fitted import Selection
from gramtower.model.penalty_path import _held_pairs
from gramtower.model.unseen import UnseenValidator
from gramtower.training.loop import minimize


def faint(seed=0):
    """Pairs whose groups say little: a model that follows each of them learns noise."""
    return planted_pairs(300, 120, 2400, groups=3, affinity=0.6, skew=0.3, seed=seed)


def small(**options):
    return gt.TwoTower(**{"dim": 16, "device": "cpu", **options})


def test_a_fit_of_faint_pairs_chooses_a_stronger_penalty_than_the_rule_and_ranks_better():
    split = per_user(gt.Interactions.from_matrix(faint()), 0.2, seed=1)
    rule, chosen = small(select=False).fit(split.train), small().fit(split.train)
    assert rule.path_ is None
    assert chosen.embedding_l2_ == chosen.path_.chosen["embedding_l2"] > 1.5 * rule.embedding_l2_
    assert chosen.evaluate(split.test)["ndcg@20"] > 1.02 * rule.evaluate(split.test)["ndcg@20"]
    assert "chosen from" in repr(chosen)


def test_the_path_starts_at_the_rule_and_keeps_metric_and_standard_error_of_each_point():
    model = small().fit(faint())
    path = model.path_
    assert path.tried[0].settings["embedding_l2"] == pytest.approx(
        small(select=False).fit(faint()).embedding_l2_, rel=0.05
    )
    assert path.metric == model.metric
    assert len(path.tried) >= 4
    assert all(0 < point.metric < 1 and 0 < point.standard_error < 0.1 for point in path.tried)
    best = max(path.tried, key=lambda point: point.metric)
    assert 0.4 < path.chosen["embedding_l2"] / best.settings["embedding_l2"] < 2.1


def test_the_choice_is_the_same_for_the_same_seed():
    assert small(seed=3).fit(faint()).path_ == small(seed=3).fit(faint()).path_


def test_a_penalty_that_is_given_is_never_changed():
    model = small(embedding_l2=0.5).fit(faint())
    assert model.embedding_l2_ == 0.5
    assert not model.path_.tried
    assert "embedding_l2" in model.path_.note


@pytest.mark.parametrize(
    "pairs",
    [
        planted_pairs(20, 15, 100),  # too few entities to rank
        sp.csr_matrix(np.eye(200, 150)[:, :150]),  # one pair each, which stays
        sp.csr_matrix(np.ones((1, 40))),  # one left entity
    ],
)
def test_data_without_enough_to_hold_out_are_fitted_by_the_rule(pairs):
    model, rule = small(max_iterations=2).fit(pairs), small(max_iterations=2, select=False).fit(pairs)
    assert model.embedding_l2_ == rule.embedding_l2_
    assert not model.path_.tried
    assert "too few" in model.path_.note


def test_a_metric_that_stays_the_same_leaves_the_rule():
    pairs = sp.csr_matrix(np.ones((80, 12)))  # all observed: the one that is held out is all there is to rank
    model = small(max_iterations=2, metric="recall@20").fit(pairs)
    assert model.embedding_l2_ == small(max_iterations=2, select=False).fit(pairs).embedding_l2_
    assert "the same for all" in model.path_.note


def test_validation_pairs_of_the_user_take_the_place_of_the_held_out_part():
    split = per_user(gt.Interactions.from_matrix(faint()), 0.2, seed=1)
    model = small().fit(split.train, validation=split.test)
    assert model.path_.held_out == "the validation part"
    assert model.path_.tried
    given = max(model.path_.tried, key=lambda point: point.metric)
    assert model.best_metric_ >= 0.95 * given.metric


@pytest.mark.parametrize("select", ["rows", "both", 1.5, None])
def test_select_takes_a_flag_or_a_part_to_hold_out(select):
    with pytest.raises(ValueError, match="select"):
        small(select=select).fit(faint())


def test_entities_without_features_cannot_be_held_out():
    with pytest.raises(ValueError, match="select"):
        small(select="left").fit(faint())


def words(groups, width, rng):
    """Rows of features: the group of each entity, and noise."""
    noise = sp.random(len(groups), width, 0.1, random_state=rng, format="csr")
    return sp.hstack([sp.csr_matrix(np.eye(groups.max() + 1)[groups]), noise]).tocsr().astype(np.float32)


def described():
    """Pairs of entities on both sides that groups explain, and features that tell them."""
    rng = np.random.default_rng(0)
    left, right = rng.integers(6, size=400), rng.integers(6, size=150)
    pairs = sp.csr_matrix(rng.random((400, 150)) < np.where(left[:, None] == right, 0.2, 0.01)).astype(np.float32)
    return pairs, words(left, 30, rng), words(right, 30, rng)


def test_features_on_both_sides_compare_linear_and_normalised_towers_by_new_entities():
    model = small(hidden=None, dim=8).fit(*described())
    path = model.path_
    shapes = [(point.settings.get("hidden"), point.settings["normalize"]) for point in path.tried]
    assert (None, False) in shapes
    assert ((), False) in shapes
    assert any(normalize for _, normalize in shapes)
    assert "left entities" in path.held_out
    assert model.l2_ == path.chosen["l2"]
    assert model.normalize_ == path.chosen["normalize"]
    if "hidden" in path.chosen:
        assert model.hidden_ == check_hidden(path.chosen["hidden"])
    else:
        assert model.hidden_ == small(hidden=None, dim=8, select=False, max_iterations=1).fit(*described()).hidden_


def misleading():
    """Pairs of few entities by groups, and features that tell nearly every entity from the others as well."""
    rng = np.random.default_rng(1)
    left, right = rng.integers(3, size=500), rng.integers(3, size=120)
    pairs = sp.csr_matrix(rng.random((500, 120)) < np.where(left[:, None] == right, 0.1, 0.05)).astype(np.float32)
    return pairs, words(left, 600, rng), words(right, 200, rng)


def test_networks_that_follow_their_pairs_too_closely_stop_where_new_entities_rank_best(monkeypatch):
    data, error = misleading(), penalty_path._Search.error
    monkeypatch.setattr(penalty_path._Search, "error", lambda search, one, other=None: 0.0)
    model = small(hidden=None, dim=None, l2="auto").fit(*data)
    count, path = model.path_.chosen["max_iterations"], model.path_
    assert count < 12  # the iterations of a fit by rules
    assert model.history_[-1].iteration == count
    assert (model.hidden_, model.dim_) == (check_hidden(path.chosen["hidden"]), path.chosen["dim"])
    assert model.fit(*data, warm_start=True).history_[-1].iteration <= count
    monkeypatch.setattr(penalty_path._Search, "error", lambda *points: 9.0 if len(points) > 2 else error(*points))
    assert "max_iterations" not in small(hidden=None, dim=None, l2="auto").fit(*data).path_.chosen  # within noise


def test_iterations_of_newton_kron_are_not_those_of_another_optimizer():
    model = small(hidden=None, dim=None, optimizer="lbfgs", max_iterations="auto").fit(*misleading())
    assert not {"max_iterations", "hidden", "dim"} & set(model.path_.chosen)


def test_the_plot_joins_points_that_stopped_after_different_iterations():
    tried = [({"l2": 1.0, "max_iterations": 4}, 0.2, 0.01), ({"l2": 4.0}, 0.3, 0.01), ({"l2": 0.25}, 0.1, 0.01)]
    axis = pytest.importorskip("matplotlib.figure").Figure().subplots()
    figures._path(axis, tried, "ndcg@20")
    assert len(axis.containers) == 1


def test_trials_of_a_search_may_have_other_sizes_and_iterations_than_a_chosen_early_stop():
    chosen = {"normalize": True, "l2": 2.0, "hidden": ((64,), (64,)), "dim": 32, "max_iterations": 4}
    assert search._lasting(Selection("ndcg@20", "", chosen=chosen)) == {"normalize": True, "l2": 2.0}
    linear = chosen | {"hidden": ((), ())}
    assert search._lasting(Selection("ndcg@20", "", chosen=linear))["hidden"] == ((), ())


def test_iterations_and_sizes_that_are_given_are_not_chosen():
    model = small(hidden=(8,), dim=4, max_iterations=5).fit(*misleading())
    assert not {"max_iterations", "hidden", "dim"} & set(model.path_.chosen)
    assert model.history_[-1].iteration == 5
    sized = small(hidden=(8,), dim=4).fit(*misleading())
    assert not {"hidden", "dim"} & set(sized.path_.chosen)


def test_the_path_of_ids_and_the_fit_after_it_take_no_more_iterations_than_four_fits(monkeypatch):
    made = []

    def counted(*arguments, **options):
        result = minimize(*arguments, **options)
        made.append(result.history[-1].iteration)
        return result

    monkeypatch.setattr(penalty_path, "minimize", counted)
    last, fit = (small(select=select).fit(faint()).history_[-1].iteration for select in (True, False))
    assert made[0] == fit  # the first point converges, as its neighbours go on from it
    assert set(made[1:-1]) == {fit // 2}  # a quarter would not do: they would still rank as the one before
    assert sum(made) + last <= 4 * fit


def test_a_fit_of_ids_continues_from_the_best_point_with_half_of_the_iterations():
    model, scratch = small().fit(faint()), small(select=False).fit(faint())
    assert model.path_.continued
    assert len(model.history_) - 1 == (len(scratch.history_) - 1) // 2
    chosen = small(select=False, **model.path_.chosen)
    assert model.history_[0].value < chosen.fit(faint()).history_[2].value  # it starts close to the minimum
    assert small(max_iterations=5).fit(faint()).history_[-1].iteration == 5


def test_a_fit_starts_from_scratch_where_the_path_knew_other_data():
    split = per_user(gt.Interactions.from_matrix(faint()), 0.2, seed=1)
    assert not small(max_iterations=2).fit(split.train, validation=split.test).path_.continued
    assert not small(max_iterations=2, optimizer="lbfgs").fit(faint()).path_.continued
    assert not small(max_iterations=2, hidden=(8,)).fit(faint()).path_.continued
    assert not small(max_iterations=2).fit(faint(), *random_features(faint())).path_.continued


def test_a_fit_starts_from_scratch_where_entities_were_held_out_of_the_path():
    pairs = gt.Interactions.from_matrix(faint())
    model = small(select="left", max_iterations=2).fit(pairs, ["id", random_features(faint())[0]])
    assert "left entities" in model.path_.held_out
    assert not model.path_.continued
    assert model.left_.embeddings.shape[0] == len(pairs.left_ids)


def test_the_scale_of_normalised_embeddings_continues_with_their_tables():
    model = small(normalize=True).fit(faint())
    assert model.path_.continued
    assert model.history_[0].value < 1.1 * model.history_[-1].value


def test_the_fit_of_several_processes_continues_where_they_hold_other_rows_than_in_the_path(tmp_path):
    alone = shared_fits.continued(None)
    for found in run_group("shared_fits:continued", 2, tmp_path):
        assert found["ids"] == pytest.approx(alone["ids"], rel=1e-4)
        start, end = found["ids and features"][0], found["ids and features"][-1]
        assert end < start < 1.05 * end  # next to features tables are not cut into rows


def test_the_error_of_held_out_right_entities_is_that_of_drawing_others(monkeypatch):
    # left entities share them: without a half of them the metric is 0.01 higher, without the other as much lower
    monkeypatch.setattr(UnseenValidator, "without", lambda self, point, seed: [self(point) + 0.01, self(point) - 0.01])
    pairs, _, right = described()
    path = small().fit(pairs, right_features=right).path_
    assert "right entities" in path.held_out
    assert [point.standard_error for point in path.tried] == pytest.approx([0.01] * len(path.tried))


def test_shapes_that_are_given_are_not_compared():
    model = small(hidden=(8,), normalize=False).fit(*described())
    first, *_ = others = [set(point.settings) - {"l2", "max_iterations"} for point in model.path_.tried]
    assert first == set()
    assert not any(others[:-1])
    assert others[-1] == {"omega"}


def offset(seed=0):
    """Pairs of users who like all of one kind of items and few of the others, in different numbers."""
    rng = np.random.default_rng(seed)
    left, right = rng.integers(4, size=300), rng.integers(4, size=200)
    rate = rng.choice([0.02, 0.1, 0.4], size=300)
    return sp.csr_matrix(rng.random((300, 200)) < rate[:, None] * np.where(left[:, None] == right, 2.0, 0.4))


def test_half_of_omega_is_tried_last_and_kept_if_it_ranks_better(tmp_path):
    pairs = offset().astype(np.float32)
    path = (model := small().fit(pairs)).path_
    last, others = path.tried[-1], path.tried[:-1]
    rule = small(select=False).fit(pairs).omega_
    assert 0.8 * rule / 2 < last.settings["omega"] < rule / 2  # the part that is learned from has fewer pairs
    assert not any("omega" in point.settings for point in others)
    assert ("omega" in path.chosen) == (last.metric > max(point.metric for point in others))
    given = small(omega=rule).fit(pairs).path_
    assert not any("omega" in point.settings for point in given.tried)
    model.save(tmp_path / "model")
    assert gt.load(tmp_path / "model").path_ == path


def test_a_chosen_omega_is_half_of_the_rule_for_all_pairs_and_stays_in_files_and_updates(tmp_path, monkeypatch):
    point = penalty_path._Search.point

    def better(search, shape, *args):
        found = point(search, shape, *args)
        found.metric += "omega" in shape.changes
        return found

    monkeypatch.setattr(penalty_path._Search, "point", better)
    pairs = offset().astype(np.float32)
    model = small().fit(pairs)
    assert model.omega_ == model.path_.chosen["omega"] == pytest.approx(small(select=False).fit(pairs).omega_ / 2)
    model.save(tmp_path / "model")
    updated = [one.update(pairs) for one in (model, gt.load(tmp_path / "model"))]
    assert all(one.omega_ == model.omega_ for one in updated)
    assert np.array_equal(updated[0].embed(side="right"), updated[1].embed(side="right"))


def test_ids_next_to_features_hold_out_pairs_and_rank_known_entities_as_well_as_ids_do():
    pairs, left, right = described()
    split = per_user(gt.Interactions.from_matrix(pairs), 0.2, seed=0)
    ids = small().fit(split.train)
    both = small().fit(split.train, ["id", left], ["id", right])
    assert "pairs of" in both.path_.held_out
    assert both.hidden_ == ((), ())
    assert not both.path_.ids_only
    assert both.evaluate(split.test)["ndcg@20"] > ids.evaluate(split.test)["ndcg@20"]


def random_features(pairs, width=40):
    """Features that say nothing about the entities of both sides."""
    rng = np.random.default_rng(1)
    return [sp.csr_matrix((rng.random((size, width)) < 0.2).astype(np.float32)) for size in pairs.shape]


def test_ids_next_to_features_that_say_nothing_rank_known_entities_exactly_as_ids_do(tmp_path):
    left, right = random_features(faint())
    split = per_user(gt.Interactions.from_matrix(faint()), 0.2, seed=0)
    ids = small().fit(split.train)
    both = small().fit(split.train, ["id", left], ["id", right])
    assert both.path_.ids_only
    assert "features only for new entities" in repr(both)
    assert both.embedding_l2_ == ids.embedding_l2_
    assert both.evaluate(split.test)["ndcg@20"] == ids.evaluate(split.test)["ndcg@20"]
    both.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert loaded.path_ == both.path_
    new = random_features(faint())[1][:3]
    np.testing.assert_allclose(loaded.embed(right_features=new), both.embed(right_features=new))
    assert np.abs(loaded.embed(right_features=new)).max() > 1e-4  # by a regression of id vectors on features


def test_an_update_of_ids_next_to_features_goes_on_from_known_vectors_and_keeps_the_penalty_twice():
    pairs = gt.Interactions.from_matrix(faint())
    left, right = random_features(faint())
    model = small().fit(pairs, ["id", left], ["id", right])
    assert model.path_.ids_only
    before, penalty = model.embed(side="right"), model.embedding_l2_
    for user in (0, 1):
        model.update(gt.Interactions.from_arrays([user], [5]), ["id", left], ["id", right], iterations=0)
    assert model.path_.ids_only
    assert model.embedding_l2_ == penalty
    np.testing.assert_allclose(model.embed(side="right"), before, atol=1e-4)


def test_a_model_file_keeps_the_path_and_updates_keep_its_penalty(tmp_path):
    pairs = gt.Interactions.from_matrix(faint())
    model = small().fit(pairs)
    model.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert loaded.path_ == model.path_
    assert loaded.get_params() == model.get_params()
    loaded.update(gt.Interactions.from_arrays([0, 1], [5, 7]))
    assert loaded.embedding_l2_ == model.embedding_l2_
    loaded.update(gt.Interactions.from_arrays([0, 1], [8, 9]))
    assert loaded.embedding_l2_ == model.embedding_l2_


def test_a_continued_run_keeps_its_choice_and_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    whole = small(max_iterations=6).fit(faint(), checkpoint=tmp_path / "whole")
    small(max_iterations=6).fit(
        faint(), checkpoint=tmp_path / "half", callbacks=[lambda record, _: record.iteration == 3]
    )
    monkeypatch.setattr(penalty_path, "_Search", None)  # no point may be tried again
    resumed = small(max_iterations=6).fit(faint(), checkpoint=tmp_path / "half")
    assert resumed.path_.chosen == whole.path_.chosen
    assert resumed.history_[-1].value == whole.history_[-1].value
    chosen = tmp_path / "half.selection.json"
    for text in (json.dumps({"chosen": 3}), "{"):
        chosen.write_text(text)
        with pytest.raises(ValueError, match=r"checkpoint.*half\.selection\.json"):
            small(max_iterations=8).fit(faint(), checkpoint=tmp_path / "half")


def test_an_interrupt_on_the_path_ends_the_fit_and_leaves_the_model_as_it_was(monkeypatch):
    model, calls = small().fit(faint()), []
    before, point = model.fitted_, penalty_path._Search.point

    def stop(self, *given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return point(self, *given)

    monkeypatch.setattr(penalty_path._Search, "point", stop)
    with pytest.raises(KeyboardInterrupt):
        model.fit(faint(1))
    assert model.fitted_ is before


def test_verbose_fits_print_a_line_for_each_point(capsys):
    model = small(verbose=True, max_iterations=2).fit(faint())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("select:")]
    assert len(lines) == len(model.path_.tried)
    assert "embedding_l2=" in lines[0]
    assert "±" in lines[0]


def test_the_plot_has_the_path():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert len(small().fit(faint()).plot().axes) == len(small(select=False).fit(faint()).plot().axes) + 1


def test_held_out_pairs_leave_each_entity_one_and_are_the_same_in_any_number_of_parts():
    pairs = planted_pairs(500, 80, 3000, skew=1.5)
    held, rows = _held_pairs(pairs, 7)
    counts = np.diff(pairs.indptr)
    out = np.add.reduceat(np.append(held, False), pairs.indptr[:-1]) * (counts > 0)
    assert rows == (out > 0).sum() >= 50
    assert held.sum() <= 0.12 * pairs.nnz
    assert (out < np.maximum(counts, 1)).all()
    assert not out[counts == 1].any()

    class Together:  # both processes, whose totals are those of all
        def totals(self, *given):
            return next(asked)

    whole = (float((counts > 1).sum()), float(np.clip(np.floor(0.1 * counts + 0.5), 1, None)[counts > 1].sum()))
    for first, stop in ((0, 211), (211, 500)):
        asked = iter([(*whole, float(pairs.nnz)), (0.0,)])
        part, _ = _held_pairs(pairs[first:stop], 7, Together(), first, int(pairs.indptr[first]))
        assert np.array_equal(part, held[pairs.indptr[first] : pairs.indptr[stop]])


def test_a_large_set_is_chosen_for_by_a_sample_of_its_left_entities(monkeypatch):
    monkeypatch.setattr(penalty_path, "_PAIRS", 1500)
    model = small().fit(faint())
    assert model.path_.tried
    assert model.left_.embeddings.shape[0] == 300
    assert not model.path_.continued
    ranked = int(model.path_.held_out.split(" pairs of ")[1].split()[0])
    assert 50 <= ranked < 230  # of 300


def test_several_processes_choose_what_one_does(tmp_path):
    write_partition(gt.Interactions.from_matrix(faint()), tmp_path / "parts", 4)
    alone = shared_fits.selected_fit(tmp_path / "alone", tmp_path / "parts")
    many = run_group("shared_fits:selected_fit", 2, tmp_path / "many", tmp_path / "parts")
    assert many[0] == many[1]
    expected = alone["whole"]
    for found in (alone["parts"], *many[0].values()):
        assert found["embedding_l2"] == pytest.approx(expected["embedding_l2"], rel=1e-6)
        assert found["values"] == pytest.approx(expected["values"], rel=1e-5)
    one, *others = (
        gt.load(tmp_path / where) for where in ("alone/whole.gramtower", "many/whole.gramtower", "many/parts.gramtower")
    )
    for model in others:
        for side, ids in (("left", one.left_.ids), ("right", one.right_.ids)):
            np.testing.assert_allclose(model.embed(ids, side), one.embed(ids, side), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_a_problem_with_other_penalties_is_the_one_made_with_them(dtype):
    pairs = planted_pairs(30, 20, 120)
    base = gt.Problem(pairs, omega=0.1, l2=0.3, embedding_l2=0.2, right_weights="degree^0.5")
    towers = gt.mlp_towers(base, hidden=(6,), dim=4).to(dtype)
    first = base.at(towers)
    found = base.with_penalties(0.7, 0.05).at(towers)
    expected = gt.Problem(pairs, omega=0.1, l2=0.7, embedding_l2=0.05, right_weights="degree^0.5").at(towers)
    assert found.value == pytest.approx(expected.value, rel=1e-13)
    assert found.value != first.value
    assert torch.allclose(found.gradient().vector, expected.gradient().vector, rtol=1e-11, atol=1e-13)
    d = first.gradient()
    assert torch.allclose((found.gauss_newton() @ d).vector, (expected.gauss_newton() @ d).vector, rtol=1e-11)
    assert first.value == base.at(towers).value
    for bad in ({"l2": -1.0, "embedding_l2": 0.0}, {"l2": 0.0, "embedding_l2": float("nan")}):
        with pytest.raises(ValueError, match="l2"):
            base.with_penalties(**bad)

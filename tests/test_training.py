"""The loop: limits, reasons, records, callbacks, early stopping, interruption, non-finite values."""

from __future__ import annotations

import io
import json
import math
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.training import callbacks, loop


def planted(dtype=torch.float64):
    problem = gt.Problem(planted_pairs(40, 30, 250, groups=4, seed=1), omega=2**-3, l2=0.5)
    return problem, gt.mlp_towers(problem, hidden=(6,), dim=4, dtype=dtype)


def convex(dtype=torch.float64):
    """A linear left tower against a fixed right one, which Gauss-Newton solves in a few iterations."""
    problem, _ = planted()
    towers = gt.mlp_towers(problem, hidden=(), dim=4, dtype=dtype)
    towers.right.requires_grad_(False)
    return problem, gt.Towers(towers.left, towers.right)


def test_the_towers_end_at_the_reported_value():
    problem, towers = planted()
    result = gt.minimize(problem, towers, max_iterations=4)
    assert result.reason is gt.Reason.MAX_ITERATIONS
    assert [record.iteration for record in result.history] == [0, 1, 2, 3, 4]
    assert problem.at(towers).value == result.value == result.history[-1].value


def test_there_is_one_copy_of_the_parameters_while_they_are_trained_and_the_towers_have_their_own_afterwards():
    problem, towers = planted()
    seen = []

    def look(_, point):
        theta = point.parameters.vector.untyped_storage().data_ptr()
        seen.append({p.untyped_storage().data_ptr() for p in towers.left.parameters()} == {theta})
        assert problem.at(towers).value == point.value

    result = gt.minimize(problem, towers, max_iterations=3, callbacks=[look])
    assert seen == [True, True, True]
    value = result.value
    with torch.no_grad():
        towers.left[0].weight.zero_()
    assert problem.at(towers, result.parameters).value == value


def test_an_error_on_the_way_leaves_the_towers_at_the_last_point():
    problem, towers = planted()
    values, points = [], []

    def fail(record, point):
        values.append(record.value)
        points.append(point)
        if record.iteration == 2:
            raise RuntimeError("of the callback")

    start = towers.parameters()
    with pytest.raises(RuntimeError, match="of the callback"):
        gt.minimize(problem, towers, max_iterations=5, callbacks=[fail])
    assert problem.at(towers).value == values[-1]
    kept = points[-1].parameters.clone()
    towers.load(start)
    assert torch.equal(points[-1].parameters.vector, kept.vector)  # the towers' tensors are theirs again


def test_other_parameters_may_be_loaded_on_the_way():
    values = []
    for load in (False, True):
        problem, towers = planted()
        start = towers.parameters()

        def look(_, __, load=load, towers=towers, start=start):
            if load:
                towers.load(start)

        result = gt.minimize(problem, towers, max_iterations=4, callbacks=[look])
        values.append([r.value for r in result.history])
        assert problem.at(towers).value == result.value
    assert values[0] == values[1]


def test_time_limit_stops_after_the_iteration_that_passes_it(monkeypatch):
    looks = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 0.01 * next(looks)))
    problem, towers = planted()
    result = gt.minimize(problem, towers, "gd", max_iterations=10**6, time_limit=0.055)
    assert result.reason is gt.Reason.TIME_LIMIT
    assert [round(record.seconds, 9) for record in result.history] == [0.01, 0.02, 0.03, 0.04, 0.05, 0.06]


def test_tolerance_stops_at_a_small_gradient():
    problem, towers = convex()
    result = gt.minimize(problem, towers, max_iterations=500, tolerance=1e-4)
    assert result.reason is gt.Reason.TOLERANCE
    assert result.history[-1].gradient_norm <= 1e-4 * result.history[1].gradient_norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-2), (torch.float64, 1e-5)])
def test_rounding_level_ends_the_run_with_help(dtype, bound):
    problem, towers = convex(dtype)
    result = gt.minimize(problem, towers, max_iterations=500, tolerance=0.0)
    assert result.reason is gt.Reason.NO_DECREASE
    assert f"measurably in {str(dtype).removeprefix('torch.')}" in result.message
    assert ("towers.to(torch.float64) can go further" in result.message) == (dtype == torch.float32)
    assert problem.at(towers).gradient().norm() < bound * result.history[1].gradient_norm


def test_records_hold_what_plots_need(tmp_path):
    problem, towers = planted()
    path = tmp_path / "run" / "history.jsonl"
    result = gt.minimize(problem, towers, "newton", max_iterations=3, history=path)
    assert gt.read_history(path) == result.history
    first, last = result.history[0], result.history[-1]
    assert first.data_passes == 1  # the value at the start
    products = sum(record.cg_steps for record in result.history)
    values = sum(record.trials for record in result.history)
    assert last.data_passes == 1 + 3 + products + values  # gradients, products, line-search values
    assert last.work["left_jvps"] == products
    assert last.work["left_vjps"] == products + 3
    assert math.isclose(sum(last.terms.values()), last.value)
    assert set(json.loads(path.read_text().splitlines()[0])) == set(vars(first))


@pytest.mark.parametrize("name", ["sampling", "sampling-diag", "sogram", "sogram-diag"])
def test_what_only_the_record_of_a_sampled_method_asks_for_is_neither_counted_nor_timed(name, monkeypatch):
    problem, towers = planted()
    at, clock = gt.Problem.at, [0.0]

    def slow(self, *arguments):
        clock[0] += 10
        return at(self, *arguments)

    def validation(point):
        clock[0] += 10
        return point.value

    monkeypatch.setattr(gt.Problem, "at", slow)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    result = gt.minimize(
        problem, towers, name, ratio=0.5, step_size=1e-9, max_iterations=2, validation=validation
    )  # fmt: skip
    start, first, second = result.history
    assert (start.data_passes, first.data_passes, second.data_passes) == (1, 1.5, 2)  # two quarters each
    assert first.work["left_forwards"] - start.work["left_forwards"] <= 2 * (2 if "sogram" in name else 1)
    assert start.seconds == 10  # the value at the start is the run's own
    assert second.seconds == start.seconds  # nothing else moved this clock
    assert clock[0] == 60


def test_validation_may_be_asked_for_at_some_iterations_only():
    problem, towers = planted()
    run = dict(validation=lambda point: -point.value, validate_at=lambda iteration: iteration % 2 == 0, patience=2)
    result = gt.minimize(problem, towers, "gd", max_iterations=4, **run)
    assert [record.metric is None for record in result.history] == [False, True, False, True, False]
    assert result.value == result.history[-1].value


def test_an_unfinished_last_line_of_a_history_is_ignored(tmp_path):
    problem, towers = planted()
    path = tmp_path / "history.jsonl"
    result = gt.minimize(problem, towers, "gd", max_iterations=3, history=path)
    path.write_text(path.read_text()[:-20])
    assert gt.read_history(path) == result.history[:-1]


@pytest.mark.parametrize(("damage", "message"), [
    (lambda line: line[:-20], r"line 2.*object"),
    (lambda line: line.replace('"step"', '"steps"'), r"line 2.*'steps'"),
])  # fmt: skip
def test_a_history_that_is_damaged_before_its_end_is_refused_by_line(damage, message, tmp_path):
    problem, towers = planted()
    path = tmp_path / "history.jsonl"
    gt.minimize(problem, towers, "gd", max_iterations=2, history=path)
    first, second, third = path.read_text().splitlines()
    path.write_text("\n".join([first, damage(second), third]) + "\n")
    with pytest.raises(ValueError, match=message):
        gt.read_history(path)


def test_a_callback_that_returns_true_stops_the_run():
    problem, towers = planted()
    seen = []

    def watch(record, point):
        seen.append((record.iteration, point.value == record.value))
        return record.iteration == 2

    result = gt.minimize(problem, towers, callbacks=[watch])
    assert result.reason is gt.Reason.CALLBACK
    assert seen == [(1, True), (2, True)]


@pytest.mark.parametrize(("answer", "stops"), [(np.bool_(True), True), (np.bool_(False), False), (1, False)])
def test_the_answers_of_callbacks_may_be_of_numpy_and_other_values_do_not_stop(answer, stops):
    problem, towers = planted()
    result = gt.minimize(problem, towers, max_iterations=2, callbacks=[lambda record, point: answer])
    assert (result.reason is gt.Reason.CALLBACK) == stops


def test_early_stopping_restores_the_best_point():
    problem, towers = planted()
    scores = iter([0.1, 0.5, 0.9, 0.4, 0.3, 0.2])
    kept = []

    def metric(point):
        kept.append(point.parameters.to_vector())
        return next(scores)

    result = gt.minimize(problem, towers, max_iterations=50, validation=metric, patience=3)
    assert result.reason is gt.Reason.EARLY_STOP
    assert len(result.history) == 6
    assert result.best_metric == 0.9
    assert torch.equal(towers.parameters().vector, kept[2])
    assert result.value == result.history[2].value == problem.at(towers).value


@pytest.mark.parametrize(("scores", "best", "metric"), [
    ([0.2, 0.5, 0.5, 0.1], 1, 0.5),
    ([math.nan, 0.1, math.nan, 0.3], 3, 0.3),
    ([math.nan] * 4, 3, None),
])  # fmt: skip
def test_of_equal_metrics_the_first_is_kept_with_its_value_and_nan_is_never_the_best(scores, best, metric):
    problem, towers = planted()
    given = iter(scores)
    result = gt.minimize(problem, towers, max_iterations=3, validation=lambda point: next(given))
    assert result.best_metric == metric
    assert result.value == result.history[best].value == problem.at(towers).value


def test_patience_without_validation_is_refused():
    problem, towers = planted()
    with pytest.raises(ValueError, match="patience"):
        gt.minimize(problem, towers, patience=3)


def test_keyboard_interrupt_ends_with_the_last_point():
    problem, towers = planted()

    def interrupt(record, _):
        if record.iteration == 3:
            raise KeyboardInterrupt

    result = gt.minimize(problem, towers, callbacks=[interrupt])
    assert result.reason is gt.Reason.INTERRUPTED
    assert problem.at(towers).value == result.history[3].value


def test_divergence_keeps_the_last_good_point_and_names_the_term():
    problem, towers = planted(torch.float32)
    result = gt.minimize(problem, towers, "sampling", max_iterations=50, ratio=0.5, step_size=10.0, steps=1)
    assert result.reason is gt.Reason.NON_FINITE
    assert math.isfinite(problem.at(towers).value)
    assert set(result.non_finite) <= {"gradient", "observed", "all_pairs", "l2", "embedding_l2"}
    assert all(name in result.message for name in result.non_finite)
    assert result.non_finite


def test_a_start_that_is_not_finite_says_which_term():
    problem, towers = planted(torch.float32)
    bad = gt.Towers(nn.Sequential(nn.Embedding(40, 4), nn.Tanh()), towers.right)
    with torch.no_grad():
        bad.left[0].weight.fill_(torch.inf)
        towers.right[-1].bias.fill_(3e38)
    result = gt.minimize(problem, bad, max_iterations=3)
    assert result.reason is gt.Reason.NON_FINITE
    assert "at the start" in result.message
    assert "l2" in result.non_finite


def test_the_log_has_fixed_columns_and_a_live_line_on_a_terminal():
    problem, towers = planted()
    records = gt.minimize(problem, towers, max_iterations=3).history
    assert {len(callbacks.line(record)) for record in records} == {len(callbacks.HEADER)}

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, live in ((io.StringIO(), False), (Terminal(), True)):
        shown = callbacks.Log((5, 60.0), stream)
        for record in records:
            shown(record)
        shown.end("done")
        text = stream.getvalue()
        assert ("\r" in text) is live
        assert ("s left" in text) is live
        assert text.count("\n") == len(records) + 2


def test_verbose_writes_to_standard_error(capsys):
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, verbose=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 5
    assert "iterations (2)" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_iterations=-1), r"max_iterations.*-1"),
        (dict(time_limit="60s"), r"time_limit.*'60s'"),
        (dict(tolerance=-1.0), r"tolerance.*-1\.0"),
        (dict(seed=-1), r"seed.*-1"),
        (dict(checkpoint_every=0), r"checkpoint_every.*0"),
        (dict(checkpoint_seconds=-1.0), r"checkpoint_seconds.*-1\.0"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    problem, towers = planted()
    with pytest.raises(ValueError, match=message):
        gt.minimize(problem, towers, **options)

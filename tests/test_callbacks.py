"""Callbacks: what they are told and when, and what the recorders write; their packages are stood in for."""

from __future__ import annotations

import io
import re
import sys
import types

import numpy as np
import pytest
from rich.console import Console

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.training.callbacks import MLflow, ProgressBar, Started, TensorBoard, WeightsAndBiases, numbers_of


class Spy:
    """Writes down what it is told."""

    def __init__(self, fails_at=None, end_fails=False):
        self.calls, self.fails_at, self.end_fails = [], fails_at, end_fails

    def begin(self, started):
        self.calls.append(("begin", started.last.iteration, started.max_iterations))
        self.started = started

    def __call__(self, record, point):
        self.calls.append(record.iteration)
        assert point.value == record.value
        if record.iteration == self.fails_at:
            raise RuntimeError("in a callback")

    def end(self, result):
        self.calls.append(("end", None if result is None else result.reason.name))
        if self.end_fails:
            raise OSError("in the end of a callback")


def small(**options):
    return gt.TwoTower(**dict(dim=3, hidden=(), max_iterations=3, device="cpu", select=False, omega=0.1) | options)


def pairs():
    return planted_pairs(40, 30, 300, groups=3, seed=0)


def test_fit_tells_callbacks_of_beginning_iterations_and_end():
    spy = Spy()
    model = small().fit(pairs(), callbacks=[spy, lambda record, point: None])
    assert spy.calls == [("begin", 0, 3), 1, 2, 3, ("end", "MAX_ITERATIONS")]
    told = spy.started.settings
    assert (told["optimizer"], told["omega"], told["left"], told["right"]) == ("newton-kron", 0.1, 40, 30)
    assert spy.started.last == model.history_[0]


def test_a_callback_stops_a_fit():
    model = small().fit(pairs(), callbacks=[lambda record, point: record.iteration == 2])
    assert model.reason_ is gt.Reason.CALLBACK
    assert len(model.history_) == 3


def test_an_error_in_a_callback_reaches_the_caller_and_leaves_the_model(tmp_path):
    model = small().fit(pairs())
    before, fitted = model.embed(), model.fitted_
    first, second = Spy(), Spy(fails_at=2, end_fails=True)
    with pytest.raises(RuntimeError, match=r"^in a callback$"):
        model.fit(pairs(), warm_start=True, callbacks=[first, second])
    assert first.calls[-1] == second.calls[-1] == ("end", None)
    assert model.fitted_ is fitted
    assert np.array_equal(model.embed(), before)
    broken = Spy(end_fails=True)
    with pytest.raises(OSError, match="in the end"):
        model.fit(pairs(), callbacks=[broken, first])
    assert first.calls[-1] == ("end", "MAX_ITERATIONS")
    assert model.fitted_ is fitted


def test_one_that_cannot_begin_ends_those_that_have(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    first, last = Spy(), Spy()
    with pytest.raises(ImportError, match="pip install wandb"):
        small().fit(pairs(), callbacks=[first, WeightsAndBiases(), last])
    assert first.calls == [("begin", 0, 3), ("end", None)]
    assert last.calls == []


def test_a_resumed_run_begins_where_it_goes_on_and_is_the_same(tmp_path):
    whole = small(max_iterations=4).fit(pairs())
    with pytest.raises(RuntimeError):
        small(max_iterations=4).fit(pairs(), checkpoint=tmp_path / "run", callbacks=[Spy(fails_at=1)])
    small(max_iterations=2).fit(pairs(), checkpoint=tmp_path / "run")
    spy = Spy()
    resumed = small(max_iterations=4).fit(pairs(), checkpoint=tmp_path / "run", callbacks=[spy])
    assert spy.calls == [("begin", 2, 4), 3, 4, ("end", "MAX_ITERATIONS")]
    assert np.array_equal(resumed.embed(), whole.embed())


def test_with_refit_both_runs_are_told_of():
    spy = Spy()
    model = small(max_iterations=6, patience=2).fit(pairs(), validation=0.2, refit=True, callbacks=[spy])
    begins = [call for call in spy.calls if isinstance(call, tuple) and call[0] == "begin"]
    assert begins == [("begin", 0, 6), ("begin", 0, model.history_[-1].iteration)]


def test_the_progress_bar_shows_iterations_objective_and_metric():
    page = io.StringIO()
    model = small(patience=9).fit(
        pairs(), validation=0.2, callbacks=[ProgressBar(Console(file=page, force_terminal=True, width=120))]
    )
    shown = page.getvalue()
    assert "3/3" in shown
    assert f"objective {model.history_[-1].value:.6g}, validation {model.history_[-1].metric:.4f}" in shown


class Stand(types.SimpleNamespace):
    """A package that writes down its calls."""

    def __init__(self, *names):
        self.calls = []
        for name in names:
            setattr(self, name, self.noted(name))

    def noted(self, name):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return call

    def named(self, name):
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


def test_mlflow_has_a_run_with_settings_and_numbers(monkeypatch):
    mlflow = Stand("set_experiment", "start_run", "log_params", "log_metrics", "set_tag", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    model = small().fit(pairs(), callbacks=[MLflow("films", "one")])
    assert mlflow.named("set_experiment") == [(("films",), {})]
    assert mlflow.named("start_run") == [((), {"run_name": "one", "nested": True})]
    assert mlflow.named("log_params")[0][0][0]["optimizer"] == "newton-kron"
    expected = [((numbers_of(record),), {"step": record.iteration}) for record in model.history_]
    assert mlflow.named("log_metrics") == expected
    assert mlflow.named("set_tag") == [(("gramtower.reason", "MAX_ITERATIONS"), {})]
    assert mlflow.calls[-1] == ("end_run", ("FINISHED",), {})
    with pytest.raises(RuntimeError):
        small().fit(pairs(), callbacks=[MLflow(), Spy(fails_at=1)])
    assert mlflow.calls[-1] == ("end_run", ("FAILED",), {})


def test_tensorboard_has_a_scalar_for_each_number(monkeypatch, tmp_path):
    board = Stand("SummaryWriter", "add_text", "add_scalar", "close")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    watch = TensorBoard(tmp_path / "log")
    model = small().fit(pairs(), callbacks=[watch])
    values = [a[1:] for a, _ in board.named("add_scalar") if a[0] == "objective"]
    assert values == [(record.value, record.iteration) for record in model.history_]
    assert board.calls[-1][0] == "close"
    small().fit(pairs(), callbacks=[watch])
    opened = [arguments[0] for arguments, _ in board.named("SummaryWriter")]
    assert opened == [str(tmp_path / "log"), str(tmp_path / "log-2")]


def test_weights_and_biases_has_a_run_with_settings_and_numbers(monkeypatch):
    wandb = Stand("init", "log", "finish")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    model = small().fit(pairs(), callbacks=[WeightsAndBiases(project="films", config={"day": 3})])
    ((_, options),) = wandb.named("init")
    assert options["project"] == "films"
    assert (options["config"]["omega"], options["config"]["day"]) == (0.1, 3)
    assert [a[0]["objective"] for a, _ in wandb.named("log")] == [record.value for record in model.history_]
    assert wandb.calls[-1] == ("finish", (), {"exit_code": 0})


@pytest.mark.parametrize(
    ("callback", "module", "package", "line"),
    [
        (ProgressBar(), "rich.progress", "rich", 'pip install "gramtower[cli]"'),
        (MLflow(), "mlflow", "mlflow", "pip install mlflow"),
        (TensorBoard("log"), "torch.utils.tensorboard", "tensorboard", "pip install tensorboard"),
        (WeightsAndBiases(), "wandb", "wandb", "pip install wandb"),
    ],
)
def test_a_missing_package_is_named_with_how_to_get_it(callback, module, package, line, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    message = f"this callback needs {package}, which is not installed: {line}"
    with pytest.raises(ImportError, match=rf"^{re.escape(message)}$"):
        small().fit(pairs(), callbacks=[callback])


def test_other_processes_record_nothing(monkeypatch):
    mlflow = Stand("start_run", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    record = small().fit(pairs()).history_[0]
    for watch in (MLflow(), ProgressBar()):
        watch.begin(Started(record, 3, {}, first=False))
        watch(record, None)
        watch.end(None)
    assert mlflow.calls == []

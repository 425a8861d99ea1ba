"""The precision of matrix products: set for a computation and put back after it, and safe with the optimizer."""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import make_case
from torch.utils._python_dispatch import TorchDispatchMode

import gramtower as gt
from gramtower._util import host
from gramtower._util.host import products_in
from gramtower.data.datasets import planted_pairs
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem
from gramtower.optim.solvers import SOLVERS
from gramtower.training import loop
from gramtower.training.loop import products_used


@pytest.fixture
def matmul():
    setting = torch.backends.cuda.matmul
    before = setting.allow_tf32
    yield setting
    setting.allow_tf32 = before


def fail_in(precision, seen):
    with products_in(precision):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        raise KeyError


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_what_was_set_before_is_put_back_even_after_an_error(before, precision, matmul):
    matmul.allow_tf32, seen = before, []
    with pytest.raises(KeyError):
        fail_in(precision, seen)
    assert seen == [precision == "tf32"]
    assert matmul.allow_tf32 == before


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_the_newer_setting_of_torch_is_followed_and_put_back_as_well(before, precision, matmul):
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch 2.9 and newer have torch.backends.cuda.matmul.fp32_precision")
    case = make_case()
    default = matmul.fp32_precision
    try:
        matmul.fp32_precision = before
        with products_in(precision):
            assert (matmul.fp32_precision == "tf32") == (precision == "tf32")
            assert case.problem.at(case.towers).value > 0
            assert (matmul.fp32_precision == "tf32") == (precision == "tf32")
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = default


@pytest.mark.parametrize("other", ["float32", "tf32"])
def test_threads_have_the_precision_that_they_ask_for(other, matmul):
    matmul.allow_tf32 = False
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with products_in("tf32"):
            inside.set()
            leave.wait(10)
            seen.append(("tf32", matmul.allow_tf32))

    def second():
        inside.wait(10)
        with products_in(other):
            seen.append((other, matmul.allow_tf32))

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    threads[1].join(0.2)  # it waits where it asks for the other precision
    assert threads[1].is_alive() == (other == "float32")
    leave.set()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 2
    assert all(allowed == (precision == "tf32") for precision, allowed in seen)
    assert not matmul.allow_tf32


def test_unknown_precisions_are_refused_with_the_choices():
    pairs = planted_pairs(5, 4, 6)
    with pytest.raises(ValueError, match=r"precision.*'half'.*'float32'.*'tf32'"):
        gt.Problem(pairs, precision="half")
    with pytest.raises(ValueError, match=r"pair_precision.*'tf32'.*'float32'.*'bfloat16'"):
        gt.Problem(pairs, pair_precision="tf32")


def test_choices_for_a_gpu_change_nothing_on_a_cpu():
    results = []
    for options in ({}, {"precision": "tf32", "pair_precision": "bfloat16"}):
        case = make_case(**options)
        point = case.problem.at(case.towers)
        g = point.gradient()
        results.append((torch.tensor(point.value), g.vector, (point.gauss_newton() @ g).vector))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class RoundedProducts(TorchDispatchMode):
    """Rounds the inputs of matrix products to ten bits of mantissa, as a GPU does with tf32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}  # of the two factors
        place = first.get(function.overloadpacket.__name__.rstrip("_"))
        if place is not None and args[place].dtype == torch.float32:
            args = [*args[:place], *map(self.rounded, args[place : place + 2]), *args[place + 2 :]]
        return function(*args, **(kwargs or {}))

    def rounded(self, x):
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("name", SOLVERS)
def test_each_optimizer_gets_as_far_with_tf32_as_it_says(name):
    pairs, sampled = planted_pairs(1000, 800, 10_000, groups=4, seed=1), "s" in name[:1]
    size = {"step_size": 0.01 if "diag" in name else 1e-6, "steps": 50} if sampled else {}  # a search may find another
    problem = gt.Problem(pairs, omega=2**-4, l2=0.01, kernels="reference")
    values = torch.zeros(2, 2)
    for place, mode in enumerate((nullcontext, RoundedProducts)):
        for seed in range(2):
            towers = gt.mlp_towers(problem, (32, 32), 16, seed=seed)
            with mode():
                values[place, seed] = gt.minimize(problem, towers, name, 5 if sampled else 20, **size).value
    assert values.max() < 15_000  # from 32,000
    assert (float((values[1] / values[0] - 1).mean()) < 0.04) == SOLVERS[name].tf32  # newton: 0.11, others at most 0.01


def test_the_table_of_optimizers_has_the_precision_that_each_is_safe_with():
    text = (Path(__file__).parent.parent / "docs" / "choosing.md").read_text()
    for name, solver in SOLVERS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert row.endswith("| tf32 |" if solver.tf32 else "| float32 |")


@pytest.mark.parametrize(("optimizer", "given", "used"), [
    ("newton-kron", {}, "tf32"), ("newton", {}, "float32"), (gt.optim.Newton(cg_max_steps=3), {}, "float32"),
    (gt.optim.Solver(), {}, "float32"), ("newton", {"precision": "tf32"}, "tf32"),
    ("newton-kron", {"precision": "float32"}, "float32"),
])  # fmt: skip
def test_an_estimator_uses_tf32_only_with_optimizers_that_are_safe_with_it(optimizer, given, used):
    settings = gt.TwoTower(optimizer=optimizer, device="cpu", **given).with_changes()
    assert make_problem(settings, prepare_data(settings, planted_pairs(20, 10, 40))).precision == used


def test_products_are_tf32_only_in_float32_on_a_gpu():
    for device, dtype, precision, used in (
        ("cuda", torch.float32, "tf32", "tf32"), ("cuda", torch.float32, "float32", "float32"),
        ("cuda", torch.float64, "tf32", "float64"), ("cpu", torch.float32, "tf32", "float32"),
    ):  # fmt: skip
        towers = SimpleNamespace(device=torch.device(device), dtype=dtype)
        assert products_used(SimpleNamespace(precision=precision), towers) == used


@pytest.mark.parametrize(("name", "warned"), [("newton", True), ("gd", False)])
def test_tf32_is_named_where_a_run_stops_and_warned_of_where_it_is_not_safe(name, warned, monkeypatch):
    monkeypatch.setattr(loop, "products_used", lambda problem, towers: "tf32")  # as on a GPU
    problem = gt.Problem(planted_pairs(30, 20, 100), precision="tf32")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = gt.minimize(problem, gt.mlp_towers(problem, (), 2), name, 10_000, tolerance=0.0)
    assert [warning.filename for warning in seen if "tf32" in str(warning.message)] == [__file__] * warned
    assert result.reason is gt.Reason.NO_DECREASE
    assert "measurably in tf32" in result.message
    assert 'precision="float32" can go further' in result.message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: TF32 and bfloat16 gathers are for GPUs")
@pytest.mark.parametrize(("precision", "pairs", "near"), [
    ("float32", "float32", 2e-4), ("tf32", "float32", 5e-3), ("float32", "bfloat16", 1e-2),
])  # fmt: skip
def test_on_a_gpu_results_are_as_near_to_the_cpu_as_the_choice_allows(precision, pairs, near):
    problem = gt.Problem(planted_pairs(3000, 2000, 60_000), precision=precision, pair_precision=pairs)
    towers = gt.mlp_towers(problem)
    here = problem.at(towers)
    wanted = here.gradient(), here.gauss_newton() @ here.gradient()
    moved = gt.Towers(towers.left.cuda(), towers.right.cuda())
    point = problem.at(moved)
    g = point.gradient()
    Gd = point.gauss_newton() @ g.from_vector(wanted[0].vector)
    assert point.value == pytest.approx(here.value, rel=near)
    for mine, exact in zip((g, Gd), wanted, strict=True):
        assert float((mine.vector.cpu() - exact.vector).norm()) <= near * exact.norm()


def test_after_an_interrupt_anywhere_in_it_a_thread_can_use_the_other_precision(matmul):
    matmul.allow_tf32, lines = False, []

    def interrupt(line):
        """Whether the block has so many lines of code, after an interrupt at that line."""

        def trace(frame, event, argument):
            nonlocal line
            if frame.f_code.co_filename != host.__file__:
                return None
            line -= event == "line"
            if line == 0 and event == "line":
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with products_in("tf32"):
                pass
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def run():
        while interrupt(len(lines) + 1):
            with products_in("float32"):
                assert not matmul.allow_tf32
            lines.append("other precision")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert len(lines) > 10


def test_entering_a_block_does_not_list_the_frames_of_all_threads(monkeypatch):
    """Python 3.11 holds a lock for that list; a garbage collection that needs the same lock waited for it for ever."""

    def refuse():
        raise AssertionError("sys._current_frames was called")

    monkeypatch.setattr(sys, "_current_frames", refuse)
    with products_in("tf32"), products_in("tf32"):
        pass


def test_a_thread_that_ended_inside_keeps_nobody_waiting(matmul):
    held = [products_in("tf32")]
    for target in (held[0].__enter__, lambda: held.append(products_in("float32").__enter__())):
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

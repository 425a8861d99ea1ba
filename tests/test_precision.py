"""The precision of matrix products is set for a computation and put back after it."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from cases import make_case

import gramtower as gt
from gramtower._util import host
from gramtower._util.host import products_in
from gramtower.data.datasets import planted_pairs


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

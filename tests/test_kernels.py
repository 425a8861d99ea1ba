"""The pair kernels: numba against reference against dense matrix products."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from cases import make_case

from gramtower._util import host
from gramtower.data.pairs import SEGMENT, from_sparse
from gramtower.engine import kernels
from gramtower.engine.kernels import cpu, reference
from gramtower.engine.kernels.elementwise import LOSSES, LossTerms, activation_of
from gramtower.engine.objective import problem

BACKENDS = {"numba": cpu.KERNELS, "reference": reference.KERNELS}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-13}  # of the largest number in the result
LONG = 2 * SEGMENT + 77


def make_pairs(name):
    rng = np.random.default_rng(0)
    seen = {
        "holes": lambda: (rng.random((23, 17)) < 0.4) & (np.arange(23) % 5 > 0)[:, None] & (np.arange(17) % 4 > 0),
        "none": lambda: np.zeros((4, 3), bool),
        "all": lambda: np.ones((9, 201), bool),
        "one": lambda: np.ones((1, 1), bool),
        "long row": lambda: np.arange(3)[:, None] + rng.random((3, LONG)) > 0.99,
        "long column": lambda: np.arange(3) + rng.random((LONG, 3)) > 0.99,
    }[name]()
    return from_sparse("pairs", sp.csr_matrix(seen))[0]


PATTERNS = ("holes", "none", "all", "one", "long row", "long column")


def make_operands(pairs, k, dtype):
    """P, W (m × k), Q, H (n × k), a number for each pair, and what the results are added to."""
    m, n = pairs.shape
    left, right = (torch.randn(3, rows, k, dtype=dtype) for rows in (m, n))
    return left[0], left[1], right[0], right[1], torch.randn(len(pairs), dtype=dtype), left[2], right[2]


def run(backend, pairs, operands):
    P, W, Q, H, x, left, right = operands
    results = {"left_sum": left.clone(), "right_sum": right.clone(), "curvature_left": left.clone()}
    backend.left_sum(pairs, x, Q, results["left_sum"])
    backend.right_sum(pairs, x, P, results["right_sum"])
    results["z"] = backend.curvature_left(pairs, x, P, W, Q, H, results["curvature_left"])
    return {"dots": backend.dots(pairs, P, Q), **results}


def run_dense(pairs, operands):
    P, W, Q, H, x, left, right = (t.double() for t in operands)
    i, j = pairs.rows.long(), pairs.columns.long()
    X, Z = torch.zeros(2, *pairs.shape, dtype=torch.float64, device=x.device)
    X[i, j] = x
    Z[i, j] = ((W @ Q.T + P @ H.T) * X)[i, j]
    return {
        "dots": (P @ Q.T)[i, j], "left_sum": left + X @ Q, "right_sum": right + X.T @ P,
        "curvature_left": left + Z @ Q, "z": Z[i, j],
    }  # fmt: skip


def assert_same(results, expected, dtype):
    for name, exact in expected.items():
        assert results[name].dtype == dtype
        limit = TOLERANCE[dtype] * max(1.0, float(exact.abs().max())) if exact.numel() else 0.0
        assert torch.allclose(results[name].double(), exact, rtol=0, atol=limit), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("k", [1, 3, 7, 33, 130])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_dense_products(backend, pattern, k, dtype):
    pairs = make_pairs(pattern)
    operands = make_operands(pairs, k, dtype)
    assert_same(run(BACKENDS[backend], pairs, operands), run_dense(pairs, operands), dtype)


@pytest.mark.parametrize("pattern", ["all", "long row", "long column"])
def test_tiles_do_not_change_results(pattern, monkeypatch):
    pairs = make_pairs(pattern)
    operands = make_operands(pairs, 7, torch.float64)
    monkeypatch.setattr(cpu, "_TILE_BYTES", 256)
    tiled = pairs.segments if pattern != "long column" else pairs.by_column.segments
    gathered = operands[2] if pattern != "long column" else operands[0]
    assert cpu._tile(tiled, gathered, 1) < len(gathered) / 3
    assert_same(run(cpu.KERNELS, pairs, operands), run_dense(pairs, operands), torch.float64)


@pytest.mark.parametrize("pattern", ["all", "long row", "long column"])
def test_tasks_do_not_change_the_bits(pattern, monkeypatch, threads):
    pairs = make_pairs(pattern)
    operands = make_operands(pairs, 7, torch.float32)
    threads(2)
    few = run(cpu.KERNELS, pairs, operands)
    bounds = []
    parallel_for = host.parallel_for
    monkeypatch.setattr(host, "parallel_for", lambda work, cuts: (bounds.append(cuts), parallel_for(work, cuts)))
    monkeypatch.setattr(cpu, "_TASK", 16)
    monkeypatch.setattr(cpu, "_REUSE", 0)
    many = run(cpu.KERNELS, pairs, operands)
    assert max(map(len, bounds)) > 2  # tasks and one
    assert all(torch.equal(few[name], many[name]) for name in many)
    bounds.clear()
    threads(1)
    monkeypatch.setattr(cpu, "_REUSE", len(pairs))  # no second task is worth reading all rows again
    run(cpu.KERNELS, pairs, operands)
    assert not bounds


def test_blocks_of_the_reference_do_not_change_results(monkeypatch):
    pairs = make_pairs("holes")
    operands = make_operands(pairs, 7, torch.float64)
    monkeypatch.setattr(reference, "_BUFFER", 40)
    assert_same(run(reference.KERNELS, pairs, operands), run_dense(pairs, operands), torch.float64)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("pattern", ["all", "long row", "long column"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_number_of_threads_gives_the_same_bits(pattern, dtype, threads):
    pairs = make_pairs(pattern)
    operands = make_operands(pairs, 33, dtype)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(run(cpu.KERNELS, pairs, operands))
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_may_be_strided(backend):
    pairs = make_pairs("holes")
    wide = make_operands(pairs, 14, torch.float64)
    strided = [t[:, ::2] if t.dim() == 2 else t for t in wide]
    P, W, Q, H, x, left, right = strided
    operands = (P, W, Q, H, torch.stack([x, x], 1)[:, 0], left.contiguous(), right.contiguous())
    assert_same(run(BACKENDS[backend], pairs, operands), run_dense(pairs, operands), torch.float64)


def test_strided_results_are_refused():
    pairs = make_pairs("holes")
    P, W, Q, H, x, left, right = make_operands(pairs, 3, torch.float64)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.KERNELS.left_sum(pairs, x, Q, left.t().contiguous().t())
    with pytest.raises(ValueError, match="contiguous"):
        cpu.KERNELS.right_sum(pairs, x, P, right.t().contiguous().t())
    with pytest.raises(ValueError, match="contiguous"):
        cpu.KERNELS.curvature_left(pairs, x, P, W, Q, H, left.t().contiguous().t())


def test_nan_stays_nan():
    pairs = make_pairs("all")
    P, _, Q, _, x, left, _ = make_operands(pairs, 3, torch.float32)
    P[2, 1], x[5] = float("nan"), float("nan")
    assert torch.isnan(cpu.KERNELS.dots(pairs, P, Q)).sum() == pairs.shape[1]
    cpu.KERNELS.left_sum(pairs, x, Q, left)
    assert torch.isnan(left).sum() == 3


def test_a_backend_is_chosen_by_device_and_name():
    assert kernels.select(torch.device("cpu")) is cpu.KERNELS
    assert kernels.select(torch.device("cpu"), "reference") is reference.KERNELS
    assert kernels.select(torch.device("meta")) is reference.KERNELS


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"kernels.*'fast'.*'auto'.*'reference'.*'numba'.*'triton'"):
        kernels.select(torch.device("cpu"), "fast")
    with pytest.raises(ValueError, match=r"'numba'.*meta.*'auto'.*'reference'"):
        kernels.select(torch.device("meta"), "numba")


def test_without_numba_the_reference_runs_with_a_warning(monkeypatch):
    monkeypatch.setattr(kernels, "_installed", lambda package: False)
    with pytest.warns(RuntimeWarning, match="pip install numba"):
        assert kernels.select(torch.device("cpu")) is reference.KERNELS


def loss_terms(loss, pairs, dtype):
    rng = torch.Generator().manual_seed(1)
    labels = torch.where(torch.rand(len(pairs), generator=rng) < 0.5, -1.0, 1.0).to(dtype)
    imputed, a, w = torch.rand(3, len(pairs), dtype=dtype, generator=rng)
    return LossTerms(loss, labels, 0.3, imputed, a, w, torch.tensor([0.3, 0.0], dtype=dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_sums_are_those_of_the_formula(backend, loss):
    pairs, module = make_pairs("holes"), BACKENDS[backend]
    P, W, Q, H, _, out, _ = make_operands(pairs, 5, torch.float64)
    t = loss_terms(LOSSES[loss], pairs, torch.float64)
    scores = reference.KERNELS.dots(pairs, P, Q).requires_grad_()
    each = t.loss_weight * t.loss.value(t.labels, scores) - 0.15 * t.pair_weight * (t.imputed - scores) ** 2
    (slopes,) = torch.autograd.grad(each.sum(), scores, create_graph=True)
    (curvatures,) = torch.autograd.grad(slopes.sum(), scores)
    observed, exact = module.losses(pairs, P, Q, t), dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(observed.value, each.detach().sum(), **exact)
    torch.testing.assert_close(observed.slopes, slopes.detach(), **exact)
    torch.testing.assert_close(observed.curvatures, curvatures, **exact)
    mine, sums = out.clone(), out.clone()
    wanted = curvatures * run_change(pairs, P, W, Q, H)
    reference.KERNELS.left_sum(pairs, wanted, Q, sums)
    z = module.curvature_left(pairs, observed.curvatures, P, W, Q, H, mine)
    torch.testing.assert_close(z, wanted, **exact)
    torch.testing.assert_close(mine, sums, **exact)
    assert module.loss_left(pairs, P, Q, t, mine) is None


def run_change(pairs, P, W, Q, H):
    return reference.KERNELS.dots(pairs, W, Q) + reference.KERNELS.dots(pairs, P, H)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_over_rows(backend):
    module, activation = BACKENDS[backend], activation_of(torch.nn.ELU(0.7))
    x, bias = torch.randn(37, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    assert torch.equal(module.activate(x, bias, activation), torch.nn.functional.elu(x + bias, 0.7))
    torch.testing.assert_close(module.column_lines(x).sum(0), x.sum(0))
    order, tensors = module.export_order(make_pairs("holes"))
    module.import_order(make_pairs("holes"), order, tensors)


def test_a_new_backend_is_a_module_and_its_name(monkeypatch):
    """The recipe "a kernel" of docs/architecture.md."""
    calls = []

    class Own(kernels.Kernels):
        def dots(self, *arguments):
            calls.append("dots")
            return super().dots(*arguments)

    own = types.ModuleType("tests_own_kernels")
    own.KERNELS = Own()
    monkeypatch.setitem(sys.modules, own.__name__, own)
    monkeypatch.setitem(kernels._MODULES, "own", own.__name__)
    monkeypatch.setattr(kernels, "BACKENDS", ("auto", *kernels._MODULES))
    monkeypatch.setattr(problem, "BACKENDS", kernels.BACKENDS)
    results = []
    for backend in ("own", "reference"):
        case = make_case(kernels=backend)
        point = case.problem.at(case.towers)
        g = point.gradient()
        results.append(torch.cat([g.vector, point.gauss_newton() @ g.vector, point.preconditioner() @ g.vector]))
    assert torch.equal(*results)
    assert calls == ["dots"] * 3  # the reference multiplies by G with two


FORKED = """
import os, sys, threading
import numpy as np, scipy.sparse as sp, torch
import gramtower as gt

torch.set_num_threads(2)
pairs = sp.random(1100, 1000, 0.01, random_state=0, format="csr")
pairs.data[:] = 1

def work():
    model = gt.TwoTower(dim=8, max_iterations=1, device="cpu").fit(pairs)
    return model.recommend(np.arange(1100), k=3)

here = work()
(torch.ones(600, 600) @ torch.ones(600, 600)).sum()  # starts torch's own threads
child = os.fork()
if not child:
    there = work()
    close = np.allclose(here[1], there[1], rtol=1e-2)  # scores; products by another number of threads round otherwise
    os._exit(0 if close and torch.get_num_threads() == 1 else 3)
threading.Timer(60, os.kill, (child, 9)).start()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(code != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_fits_and_recommends_with_threads_of_its_own():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_threads_of_the_pool_work_with_one_torch_thread_each_and_leave_the_callers_number_alone():
    before = torch.get_num_threads()
    host.pool.cache_clear()
    assert host.pool(3).submit(torch.get_num_threads).result() == 1
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)
